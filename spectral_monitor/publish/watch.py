"""``spectral-monitor watch``: a run directory in the terminal, while the run goes on. It reads the record only."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from spectral_monitor.errors import RecordError
from spectral_monitor.heads import Head
from spectral_monitor.observation import CLASSES, DEAD, NOT_FINITE, UNCLASSIFIED, Observation
from spectral_monitor.publish.follow import Follower, Snapshot
from spectral_monitor.publish.rows import Bars, target_of
from spectral_monitor.publish.tables import show, tokens_text
from spectral_monitor.publish.terminal import event_line, sparkline, verdict_line

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

#: Seconds without a new look after which the view says that nothing arrives.
QUIET = 600.0


def watch(
    run_dir: str | os.PathLike[str],
    *,
    console: Console | None = None,
    interval: float = 1.0,
    heads: int | None = None,
    once: bool = False,
    wait: bool = False,
    clock: Callable[[], float] = time.time,
) -> None:
    """Show ``run_dir`` until interrupted.

    On a terminal one view is redrawn; elsewhere each look, event and verdict is one plain line.

    Args:
        interval: seconds between two looks at the directory.
        heads: how many heads to list; None: as many as fit.
        once: show the view once and return.
        wait: wait for a run directory that does not exist yet.

    Raises RecordError when there is no run directory (and ``wait`` is not set).
    """
    from rich.console import Console

    console = console or Console()
    follower = Follower(run_dir)
    snapshot = _first(follower, interval, wait and not once, console)
    try:
        if once:
            console.print(view(snapshot, clock(), width=console.width, heads=heads or 12))
        elif console.is_terminal:
            _live(follower, snapshot, console, interval, heads, clock)
        else:
            _lines(follower, snapshot, console, interval)
    except KeyboardInterrupt:
        return


def _first(follower: Follower, interval: float, wait: bool, console: Console) -> Snapshot:
    said = False
    while True:
        try:
            return follower.poll()
        except RecordError:
            if not wait:
                raise
            if not said:
                console.print(f"waiting for a run in {follower.run_dir} (Ctrl-C to stop)", markup=False)
                said = True
            time.sleep(interval)


def _live(
    follower: Follower,
    snapshot: Snapshot,
    console: Console,
    interval: float,
    heads: int | None,
    clock: Callable[[], float],
) -> None:
    from rich.live import Live

    def draw(now: Snapshot) -> RenderableType:
        return view(now, clock(), width=console.width, height=console.height, heads=heads)

    try:
        with Live(draw(snapshot), console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(interval)
                snapshot = follower.poll()
                live.update(draw(snapshot), refresh=True)
    except KeyboardInterrupt:
        console.print(view(snapshot, clock(), width=console.width, heads=heads or 12))  # stays when the screen goes


def _lines(follower: Follower, snapshot: Snapshot, console: Console, interval: float) -> None:
    """New lines only. A look that a resumed run repeats is a new line: it is a new look."""
    told: set[str] = set()
    while True:
        for key, line in _all_lines(snapshot):
            if key not in told:
                told.add(key)
                console.print(line, markup=False, highlight=False, soft_wrap=True)
        time.sleep(interval)
        snapshot = follower.poll()


def _all_lines(snapshot: Snapshot) -> list[tuple[str, str]]:
    found: list[tuple[int, int, str, str]] = []
    for seen in snapshot.observations:
        leading = "  ".join(
            f"{name} {show(attention, '.3f')} ({show(selectivity, '.1f')}x, PR {show(pr, '.1f')})"
            for name, pr, attention, selectivity in _leading(seen, 3, snapshot.run)
        )
        finite = "" if seen.finite else "  NOT FINITE"
        tokens = f"  {tokens_text(seen.tokens):>6} tokens" if seen.tokens is not None else ""
        line = f"step {seen.step:>6}{tokens}  {seen.probe} top-1 {seen.metrics.top1:.1%}{finite}  {leading}"
        found.append((seen.step, 0, f"look {seen.probe} {seen.step} {seen.attempt}", line))
    found += [(event.step, 1, event.key, event_line(event)) for event in snapshot.events]
    found += [
        (
            verdict.step,
            2,
            f"verdict {verdict.probe} {verdict.step} {verdict.capability} {verdict.mode}",
            verdict_line(verdict),
        )
        for verdict in snapshot.verdicts
    ]
    return [(key, line) for _, _, key, line in sorted(found, key=lambda entry: entry[:2])]


# -- the view ---------------------------------------------------------------------------------------------------------


def view(
    snapshot: Snapshot, now: float, *, width: int = 100, height: int | None = None, heads: int | None = None
) -> RenderableType:
    """The run as one rich renderable that fits ``width`` x ``height`` characters.

    ``now``: Unix time, for "last look 3 s ago".
    """
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    parts: list[RenderableType] = [_headline(snapshot, now)] if snapshot.observations else []
    events = [event_line(event) for event in snapshot.events if event.kind != "candidates_changed"][-5:]
    verdicts = [verdict_line(verdict) for verdict in snapshot.verdicts][-2:]
    probes = snapshot.probes
    if height is not None:  # first the older events go, then heads, so that what is new stays in view
        told = sum(math.ceil(len(text) / max(1, width - 4)) for text in verdicts)
        room = height - 4 - told - 9 * max(1, len(probes))
        events = events[-max(1, room - 2) :]
        heads = heads or max(1, (room - len(events)) // max(1, len(probes)))
    for probe in probes:
        parts.append(Text(""))
        parts.extend(_probe(snapshot, probe, width, heads or 8))
    if not probes:
        parts.append(Text("No look yet: the first one comes before the first update."))
    if verdicts or events:
        parts.append(Text(""))
    for text in verdicts:  # wrapped, not cut: the control is at its end
        parts.append(Text(text, style="bold green" if ": CAUSAL" in text else "bold"))
    parts.extend(_line(text, "yellow" if "below" in text or "lost" in text else "") for text in events)
    return Panel(
        Group(*parts),
        title=f"spectral monitor  {snapshot.run_dir}",
        title_align="left",
        subtitle="Ctrl-C to leave" if height is not None else None,
        subtitle_align="right",
        height=height,
    )


def _line(text: str, style: str) -> RenderableType:
    from rich.text import Text

    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def _headline(snapshot: Snapshot, now: float) -> RenderableType:
    from rich.text import Text

    last = max(snapshot.observations, key=lambda seen: (seen.step, seen.time))
    facts = [f"step {last.step:,}"]
    if last.tokens is not None:
        facts.append(f"{'about ' if last.tokens_estimated else ''}{tokens_text(last.tokens)} tokens")
    facts.append(f"{len(snapshot.observations)} looks")
    if math.isfinite(last.share):
        facts.append(f"monitor {last.share:.1%} of the time")
    text = Text("  ".join(facts), no_wrap=True, overflow="ellipsis")
    age = now - last.time
    if math.isfinite(age):
        quiet = age > QUIET
        text.append(f"  last look {_ago(age)} ago", style="yellow" if quiet else "green")
    if not last.finite:
        text.append("  NOT FINITE", style="bold red")
    return text


def _ago(seconds: float) -> str:
    seconds = max(0.0, seconds)
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def _probe(snapshot: Snapshot, probe: str, width: int, heads: int) -> list[RenderableType]:
    from rich.text import Text

    seen = snapshot.of(probe)
    last, table = seen[-1], seen[-1].heads
    room = max(10, min(48, width - 44))
    status = (
        f"{int(np.count_nonzero(table.status == NOT_FINITE))} not finite" if (table.status == NOT_FINITE).any() else ""
    )
    dead = int(np.count_nonzero(table.status == DEAD))
    notes = ", ".join(note for note in (status, f"{dead} dead" if dead else "") if note)
    parts: list[RenderableType] = [
        Text(f"{probe}", style="bold").append(
            f"  {last.metrics.rows} rows{', ' + notes if notes else ''}", style="dim"
        ),
        _series("top-1", [one.metrics.top1 for one in seen], room, f"{last.metrics.top1:.1%}", 0.0, 1.0),
        _series("loss", [one.metrics.loss for one in seen], room, f"{last.metrics.loss:.2f} nats"),
        _classes(last, width),
        _heads(snapshot, seen, heads, width),
        _line("* in a circuit that was checked; bold: over both bars; PR drawn from 1 to the largest listed", "dim"),
    ]
    return parts


def _series(
    label: str, values: Sequence[float], room: int, now: str, low: float | None = None, high: float | None = None
) -> RenderableType:
    from rich.text import Text

    text = Text(f"{label:<7}", no_wrap=True, overflow="ellipsis")
    text.append(sparkline(list(values), low, high, room), style="cyan")
    return text.append(f" {now}")


#: Terminal colours of the classes, near those of the report.
_COLOURS = {
    "induction": "bright_red",
    "duplicate_token": "yellow",
    "previous_token": "green",
    "first_token": "blue",
    "self": "magenta",
    "local": "cyan",
    UNCLASSIFIED: "bright_black",
}


def _classes(last: Observation, width: int) -> RenderableType:
    """All heads by class as one bar, with its numbers."""
    from rich.text import Text

    text = Text(f"{'heads':<7}", no_wrap=True, overflow="ellipsis")
    count = len(last.heads)
    sizes = {name: int(np.count_nonzero(last.heads.head_class == name)) for name in (*CLASSES, UNCLASSIFIED)}
    bar = max(10, min(24, width - 70))
    for name, size in sizes.items():
        text.append("█" * round(bar * size / max(count, 1)), style=_COLOURS[name])
    for name, size in sizes.items():
        if size:
            text.append(
                f" {size} {'unclassified' if name == UNCLASSIFIED else name.replace('_', '-')}", style=_COLOURS[name]
            )
    return text


def _heads(snapshot: Snapshot, seen: Sequence[Observation], count: int, width: int) -> Table:
    """The heads that attend most to the probe's target, with their history where there is room."""
    from rich.table import Table
    from rich.text import Text

    last = seen[-1]
    target = target_of(last, snapshot.run)
    bars = Bars.of(snapshot.run)
    members = {head for verdict in snapshot.verdicts if verdict.probe == last.probe for head in verdict.heads}
    wide = width >= 96
    table = Table(box=None, padding=(0, 1), header_style="dim", pad_edge=False)
    table.add_column("head", no_wrap=True)
    table.add_column("PR", justify="right", no_wrap=True)
    if wide:
        table.add_column("PR so far", no_wrap=True)
    table.add_column(f"attention ({target})", justify="right", no_wrap=True)
    if wide:
        table.add_column("attention so far", no_wrap=True)
    table.add_column("selectivity", justify="right", no_wrap=True)
    table.add_column("class", no_wrap=True)
    leading = _leading(last, count, snapshot.run)
    indices = [last.heads.index(Head.parse(name)) for name, *_ in leading]
    ranks = [_at(one, index, "pr") for one in seen for index in indices]
    top = max((rank for rank in ranks if math.isfinite(rank)), default=1.0)
    for name, pr, attention, selectivity in leading:
        index = last.heads.index(Head.parse(name))
        passed = selectivity >= bars.selectivity and attention >= bars.attention
        style = "bold green" if name in members else "bold" if passed else ""
        kind = str(last.heads.head_class[index])
        cells: list[str | Text] = [name + ("*" if name in members else ""), show(pr, ".2f")]
        if wide:
            cells.append(Text(sparkline([_at(one, index, "pr") for one in seen], 1.0, top, 20), style="cyan"))
        cells.append(show(attention, ".3f"))
        if wide:
            cells.append(Text(sparkline([_at(one, index, target) for one in seen], 0.0, 1.0, 20), style="cyan"))
        cells.append(show(selectivity, ".1f") + "x")
        cells.append(Text("" if kind == UNCLASSIFIED else kind.replace("_", "-"), style=_COLOURS.get(kind, "")))
        table.add_row(*cells, style=style)
    return table


def _leading(observation: Observation, count: int, run: Mapping[str, Any]) -> list[tuple[str, float, float, float]]:
    """Name, PR, attention and selectivity of the ``count`` heads that attend most to the target, most first."""
    heads = observation.heads
    if not heads.attention:
        return []
    target = target_of(observation, run)
    attention, selectivity = heads.attention[target], heads.selectivity[target]
    names = list(heads)
    order = np.argsort(-np.nan_to_num(attention, nan=-1.0), kind="stable")[:count]
    return [(str(names[at]), float(heads.pr[at]), float(attention[at]), float(selectivity[at])) for at in order]


def _at(observation: Observation, index: int, what: str) -> float:
    values = observation.heads.pr if what == "pr" else observation.heads.attention.get(what)
    return math.nan if values is None or index >= len(values) else float(values[index])
