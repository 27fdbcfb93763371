"""A replay in the terminal: two bars where there is a terminal, one line a revision where there is none."""

from __future__ import annotations

import time
from typing import Any

from spectral_monitor.replay.claims import Row
from spectral_monitor.replay.plan import MEASURED, MIXED, Plan, Planned
from spectral_monitor.replay.runner import Result


class Bars:
    """Download and measuring, each with an estimate of its end; ``with Bars(plan): ...``."""

    def __init__(self, plan: Plan, rank: int = 0) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        self.console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._live = self.console.is_terminal
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[amount]}"))
        self._bars = Progress(
            *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=self.console, transient=True
        )
        self._prefix = f"rank {rank}: " if rank else ""
        wanted = [planned for planned in plan.planned if planned.wanted]
        self._count = len(wanted)
        self._bytes = sum(sum(file.size for file in planned.fetch) for planned in wanted)
        self._came = 0
        self._done = 0
        self._began = time.monotonic()
        self._download = self._bars.add_task("download", total=self._bytes or None, amount="")
        self._measure = self._bars.add_task("measure", total=self._count, amount=f"0/{self._count}")

    def __enter__(self) -> Bars:
        if self._live:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def downloading(self, name: str, size: int) -> None:
        self._bars.update(self._download, description=f"download {name}" if size else f"found {name}")

    def bytes(self, count: int) -> None:
        self._came += count
        amount = f"{size_text(self._came)} of {size_text(self._bytes)}"
        self._bars.update(self._download, completed=self._came, amount=amount)

    def measuring(self, name: str) -> None:
        self._bars.update(self._measure, description=f"measure {name}")

    def done(self, row: Row) -> None:
        if row.status in (MEASURED, MIXED) or row.seconds is not None:
            self._done += 1
            self._bars.update(self._measure, completed=self._done, amount=f"{self._done}/{self._count}")
        seconds = "" if row.seconds is None else f" in {row.seconds:.1f} s"
        reason = f": {row.reason}" if row.reason else ""
        self.console.print(f"{self._prefix}{row.revision}: {row.status}{seconds}{reason}", markup=False)


def print_plan(plan: Plan, costs: str, console: Any = None) -> None:
    """The plan as a table: what is measured, what is not and why, bytes, and what it will cost."""
    from rich.table import Table

    from spectral_monitor.publish.console import wide_when_piped

    console = console or wide_when_piped(highlight=False, soft_wrap=True)
    for series in plan.series:
        title = plan.source.text + (f", {series.name}" if series.name else "")
        table = Table(title=title, title_justify="left")
        for name in ("revision", "step", "tokens", "format", "to load", "plan"):
            table.add_column(name, justify="right" if name in ("step", "tokens", "to load") else "left")
        for planned in series.planned:
            checkpoint = planned.checkpoint
            table.add_row(
                checkpoint.name,
                "" if checkpoint.step < 0 else f"{checkpoint.step:,}",
                "" if checkpoint.tokens is None else _tokens(planned),
                "" if planned.weights is None else planned.weights.format,
                size_text(planned.bytes) if planned.wanted else "",
                f"{planned.status}: {planned.reason}" if planned.reason else "measure",
            )
        console.print(table)
        for sentence in [*series.notes, *([series.compared] if series.compared else [])]:
            console.print(f"note: {sentence}", markup=False)
    if plan.skipped:
        names = ", ".join(f"{item.name} ({item.reason})" for item in plan.skipped[:20])
        more = f" and {len(plan.skipped) - 20} more" if len(plan.skipped) > 20 else ""
        console.print(f"skipped: {names}{more}", markup=False)
    console.print(costs, markup=False)


def print_result(result: Result, plan: Plan, console: Any) -> None:
    """The end of a replay in a few lines."""
    counts: dict[str, int] = {}
    for row in result.rows:
        counts[row.status] = counts.get(row.status, 0) + 1
    said = ", ".join(f"{count} {status}" for status, count in counts.items())
    console.print(f"{plan.source.text}: {said or 'nothing'}", markup=False)
    if result.unrecorded:
        console.print(
            f"measured, and recorded once other shards are done: {', '.join(result.unrecorded)}", markup=False
        )
    if result.unfinished:
        console.print(f"not finished: {', '.join(result.unfinished)}; start the command again to go on", markup=False)
    for series in plan.series:
        for sentence in series.notes:
            console.print(f"note: {sentence}", markup=False)


def size_text(count: float) -> str:
    """``2090000000`` -> ``2.09 GB`` (decimal units, as disks and the Hub count)."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.3g} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1000
    return f"{count:.3g} TB"


def _tokens(planned: Planned) -> str:
    tokens = planned.checkpoint.tokens or 0.0
    for unit, factor in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if tokens >= factor:
            return f"{tokens / factor:.4g}{unit}"
    return f"{tokens:.0f}"
