"""The run as it happens, in the terminal: a live view where there is one, plain lines where there is none."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from spectral_monitor.heads import Head
from spectral_monitor.observation import Event, Observation, Verdict
from spectral_monitor.publish.tables import show, tokens_text

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

_BLOCKS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class HeadRow:
    """One line of the view: a head's latest numbers, and its PR against its own lowest so far."""

    head: Head
    pr: float
    rise: float
    attention: float
    selectivity: float
    member: bool


@dataclass
class ProbeView:
    """What the view keeps of one probe: its last observation and the short history that is drawn."""

    capability: str
    last: Observation | None = None
    top1: list[float] = field(default_factory=list)
    lowest_pr: dict[Head, float] = field(default_factory=dict)
    circuit: tuple[str, ...] = ()

    def add(self, observation: Observation) -> None:
        """Take in the next observation; values that are not finite leave the lowest PR as it was."""
        self.last = observation
        self.top1.append(observation.metrics.top1)
        for head, pr in zip(observation.heads, observation.heads.pr, strict=True):
            if math.isfinite(pr):
                self.lowest_pr[head] = min(pr, self.lowest_pr.get(head, math.inf))

    def rows(self, count: int) -> list[HeadRow]:
        """The ``count`` heads that attend most to the probe's target, most first."""
        if self.last is None or self.capability not in self.last.heads.attention:
            return []
        heads = self.last.heads
        attention, selectivity = heads.attention[self.capability], heads.selectivity[self.capability]
        order = np.argsort(-np.nan_to_num(attention, nan=-1.0), kind="stable")[:count]
        names = list(heads)
        return [
            HeadRow(
                names[at],
                float(heads.pr[at]),
                float(heads.pr[at]) / self.lowest_pr.get(names[at], math.nan),
                float(attention[at]),
                float(selectivity[at]),
                str(names[at]) in self.circuit,
            )
            for at in order
        ]


class TerminalPublisher:
    """Publisher that shows the run in the terminal.

    On a terminal it redraws one live view (training loss, probe accuracy, the heads that attend most to the probe's
    target, the latest events). Elsewhere (a file, a pipe, a CI log) it prints one plain line an observation, an event
    and a verdict. Give the Trainer ``disable_tqdm=True`` beside the live view: two that redraw get in each other's way.

    Args:
        console: where to draw; by default standard output.
        live: force the live view on or off; None: on where the console is a terminal.
        heads: how many heads are listed.
        total_steps: the run's length, for the progress figure; None: not shown.
    """

    def __init__(
        self,
        console: Console | None = None,
        *,
        live: bool | None = None,
        heads: int = 8,
        total_steps: int | None = None,
    ) -> None:
        from rich.console import Console

        self.console = console or Console()
        self.live_view = self.console.is_terminal if live is None else live
        self.heads, self.total_steps = heads, total_steps
        self.step: int = 0
        self.tokens: float | None = None
        self.loss: list[float] = []
        self.probes: dict[str, ProbeView] = {}
        self.messages: deque[str] = deque(maxlen=8)
        self._info: Mapping[str, Any] = {}
        self._began = time.monotonic()
        self._live: Live | None = None

    # -- what the training reports ------------------------------------------------------------------------------

    def training(self, step: int, tokens: float | None = None, loss: float | None = None) -> None:
        """Where the training stands (optional: the monitor itself does not know the loss)."""
        self.step, self.tokens = step, tokens if tokens is not None else self.tokens
        if loss is not None and math.isfinite(loss):
            self.loss.append(loss)
        self._refresh()

    # -- what the monitor reports -------------------------------------------------------------------------------

    def start(self, monitor_info: Mapping[str, Any]) -> None:
        """Open the view."""
        self._info = monitor_info
        self._began = time.monotonic()
        if self.live_view and self._live is None:
            from rich.live import Live

            self._live = Live(self.render(), console=self.console, refresh_per_second=4, transient=False)
            self._live.start()

    def observation(self, observation: Observation, previous: Observation | None = None) -> None:
        """Take in one look; without a live view: print its line."""
        view = self._view(observation.probe)
        view.add(observation)
        self.step = max(self.step, observation.step)
        self.tokens = observation.tokens if observation.tokens is not None else self.tokens
        if self._live is None:
            self._line(observation_line(observation, view, self.loss[-1] if self.loss else None))
        self._refresh()

    def event(self, event: Event) -> None:
        """Show what happened; it stays in view until newer events push it out."""
        if event.kind == "candidates_changed" and event.probe:
            self._view(event.probe).circuit = event.heads
        self._message(event_line(event))

    def verdict(self, verdict: Verdict) -> None:
        """Show a causal check's answer with its control."""
        self._message(verdict_line(verdict))

    def close(self, summary: Mapping[str, Any] | None = None) -> None:
        """Leave the last view standing and let go of the terminal."""
        if self._live is not None:
            self._live.update(self.render(), refresh=True)
            self._live.stop()
            self._live = None

    # -- drawing ------------------------------------------------------------------------------------------------

    def render(self) -> RenderableType:
        """The whole view as a rich renderable."""
        from rich.console import Group
        from rich.panel import Panel
        from rich.text import Text

        parts: list[RenderableType] = [Text(self._headline())]
        if self.loss:
            parts.append(Text(f"loss           {sparkline(self.loss)} {self.loss[-1]:.3f}"))
        for name, view in self.probes.items():
            parts.extend(self._probe(name, view))
        if self.messages:
            parts.append(Text("\n".join(self.messages), no_wrap=True, overflow="ellipsis"))
        return Panel(Group(*parts), title="spectral monitor", title_align="left")

    def _probe(self, name: str, view: ProbeView) -> list[RenderableType]:
        from rich.table import Table
        from rich.text import Text

        if view.last is None:
            return []
        accuracy = Text(f"probe top-1    {sparkline(view.top1, 0.0, 1.0)} {view.last.metrics.top1:.1%}  ({name})")
        table = Table(box=None, padding=(0, 1), header_style="bold")
        for heading in ("head", "PR", "x its lowest", f"attention on the {name} target", "selectivity"):
            table.add_column(heading, justify="left" if heading.startswith(("head", "attention")) else "right")
        for row in view.rows(self.heads):
            bar = "█" * round(20 * (row.attention if math.isfinite(row.attention) else 0.0))
            table.add_row(
                str(row.head),
                show(row.pr, ".2f"),
                show(row.rise, ".1f"),
                f"{show(row.attention, '.3f')} {bar}",
                show(row.selectivity, ".1f"),
                style="bold green" if row.member else None,
            )
        return [accuracy, table]

    def _headline(self) -> str:
        of = f" of {self.total_steps}" if self.total_steps else ""
        tokens = f", {tokens_text(self.tokens)} tokens" if self.tokens is not None else ""
        share = next(
            (
                f", monitor {view.last.share:.1%} of the time"
                for view in self.probes.values()
                if view.last is not None and math.isfinite(view.last.share)
            ),
            "",
        )
        return f"step {self.step}{of}{tokens}, {time.monotonic() - self._began:.0f} s{share}"

    # -- inside -------------------------------------------------------------------------------------------------

    def _view(self, probe: str) -> ProbeView:
        if probe not in self.probes:
            known = self._info.get("probes")
            described = known.get(probe, {}) if isinstance(known, Mapping) else {}
            capability = described.get("capability", probe) if isinstance(described, Mapping) else probe
            self.probes[probe] = ProbeView(str(capability))
        return self.probes[probe]

    def _message(self, text: str) -> None:
        self.messages.append(text)
        if self._live is None:
            self._line(text)
        self._refresh()

    def _line(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _refresh(self) -> None:
        if self._live is not None:
            self._live.update(self.render())


# -- lines ------------------------------------------------------------------------------------------------------------


def observation_line(observation: Observation, view: ProbeView, loss: float | None) -> str:
    """One look in one line: where, how well the probe's task is done, which heads lead."""
    trained = f"  loss {loss:.3f}" if loss is not None else ""
    finite = "" if observation.finite else "  NOT FINITE"
    leading = "  ".join(
        f"{row.head} {show(row.attention, '.3f')} ({show(row.selectivity, '.1f')}x, PR {show(row.pr, '.1f')})"
        for row in view.rows(3)
    )
    return (
        f"{_place(observation.step, observation.tokens)}{trained}  {observation.probe} "
        f"top-1 {observation.metrics.top1:.1%}{finite}  {leading}"
    )


def event_line(event: Event) -> str:
    """One event in one line; its own text where it has one."""
    said = event.text or " ".join(
        part for part in (event.kind.replace("_", " "), " ".join(event.heads), event.direction) if part
    )
    return f"{_place(event.step, event.tokens)}  * {said}"


def verdict_line(verdict: Verdict) -> str:
    """One verdict in one line: the heads, the answer, and what matched-random removal did."""
    intact, out = verdict.condition("baseline"), verdict.condition("circuit")
    measured = ""
    if intact is not None and out is not None:
        measured = f" top-1 {intact.top1:.1%}, without them {out.top1:.1%}"
        if verdict.random:
            top1 = [draw.top1 for draw in verdict.random]
            measured += f", {len(top1)} matched random sets out {min(top1):.1%} to {max(top1):.1%}"
            measured += f" (p = {verdict.p_value:.2g})"
        measured += ";"
    return (
        f"{_place(verdict.step, verdict.tokens)}  = {verdict.capability} ({verdict.mode} ablation): "
        f"{verdict.verdict.upper()}:{measured} heads {' '.join(verdict.heads)}"
    )


def sparkline(values: list[float], low: float | None = None, high: float | None = None, width: int = 40) -> str:
    """The series as a row of bars, at most ``width``; the last value is always in it. Not finite: a blank."""
    if not values:
        return ""
    count = min(width, len(values))
    at = np.unique(np.linspace(0, len(values) - 1, count).round().astype(int))
    chosen = np.array(values, dtype=np.float64)[at]
    finite = chosen[np.isfinite(chosen)]
    if not len(finite):
        return " " * len(chosen)
    bottom, top = (finite.min() if low is None else low), (finite.max() if high is None else high)
    scaled = (chosen - bottom) / (top - bottom) if top > bottom else np.full(len(chosen), 0.5)
    levels = [1 + round(7 * min(1.0, max(0.0, value))) if math.isfinite(value) else 0 for value in scaled]
    return "".join(_BLOCKS[level] for level in levels)


def _place(step: int, tokens: float | None) -> str:
    return f"step {step:>6}" + (f"  {tokens_text(tokens):>6} tokens" if tokens is not None else "")
