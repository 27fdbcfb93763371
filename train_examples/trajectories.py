"""Pictures as SVG files that any browser shows: a run's accuracy, attention and PR of every head; runs side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

import numpy as np

from spectral_monitor.development import Series, load_series
from spectral_monitor.heads import Head
from spectral_monitor.observation import Event, FloatArray, Verdict
from spectral_monitor.publish.tables import tokens_text
from spectral_monitor.record import RunRecord

_WIDTH, _PANEL, _LEFT, _RIGHT, _TOP, _GAP = 900, 190, 64, 150, 56, 46
#: Told apart also by colour-blind readers (Okabe and Ito's palette).
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_GREY = "#c4c7cc"


def draw(run_dir: Path, title: str) -> list[Path]:
    """One ``trajectories-PROBE.svg`` in the run directory for each probe of a finished run; the files written."""
    record = RunRecord.open(run_dir)
    events, verdicts, written = record.events(), record.verdicts(), []
    for probe in sorted({observation.probe for observation in record.observations()}):
        series = load_series(record, probe)
        file = run_dir / f"trajectories-{probe}.svg"
        file.write_text(
            trajectories_svg(
                series,
                series.circuit(series.capability, series.last),
                [event for event in events if event.probe == probe],
                [verdict for verdict in verdicts if verdict.probe == probe],
                f"{title}: {probe}",
            )
        )
        written.append(file)
    return written


def trajectories_svg(
    series: Series, circuit: Sequence[Head], events: Sequence[Event], verdicts: Sequence[Verdict], title: str
) -> str:
    """Three panels over developmental time (logarithmic; observations at 0 tokens are left out, they have no place).

    Probe top-1 with the causal verdicts, attention of each head on the probe's target with the crossings, PR of each
    head. Heads of ``circuit`` are coloured and named, all others are grey.
    """
    shown = series.usable & (series.x > 0)
    x = np.log10(series.x[shown])
    if not len(x):
        return _document([_text(_LEFT, 30, f"{title}: no observation after the first training step")], 60)
    low, high = float(x.min()), float(x.max())
    span = (low - 0.05, high + 0.05) if high == low else (low, high)
    attention = series.attention.get(series.capability, np.full(series.pr.shape, np.nan))
    largest = float(np.nanmax(series.pr)) if np.isfinite(series.pr).any() else 1.0
    panels = (
        ("probe top-1", series.top1[shown][:, None], 0.0, 1.0),
        (f"attention on the {series.capability} target", attention[shown], 0.0, 1.0),
        ("PR (effective rank)", series.pr[shown], 0.0, largest * 1.05),
    )
    parts = [_text(_LEFT, 24, title, size=16, weight="bold")]
    for number, (name, values, bottom, top) in enumerate(panels):
        place = _Panel(_TOP + number * (_PANEL + _GAP), span, bottom, top)
        parts += place.frame(name, series.axis)
        if number == 0:
            parts += [place.line(x, values[:, 0], "#222222", 2)]
            parts += [_verdict_mark(place, verdict, series.axis) for verdict in verdicts]
        else:
            parts += _heads(place, x, values, series.heads, circuit)
        if number == 1:
            parts += [_crossing_mark(place, event, series.axis) for event in events]
    return _document([part for part in parts if part], _TOP + len(panels) * (_PANEL + _GAP))


def accuracy_svg(panels: Mapping[str, Mapping[str, Series]], title: str) -> str:
    """One panel a probe with the top-1 of every run over developmental time (logarithmic, without step 0).

    Args:
        panels: probe -> run's name -> its series. A run has the same colour in every panel.
        title: above everything.
    """
    shown = {probe: {name: _after_start(one, one.top1) for name, one in runs.items()} for probe, runs in panels.items()}
    times = [x for runs in shown.values() for x, _ in runs.values() if len(x)]
    if not times:
        return _document([_text(_LEFT, 30, f"{title}: no observation after the first training step")], 60)
    low, high = (float(np.log10(edge(np.concatenate(times)))) for edge in (np.min, np.max))
    span = (low - 0.05, high + 0.05) if high == low else (low, high)
    axis = next(one.axis for runs in panels.values() for one in runs.values())
    parts = [_text(_LEFT, 24, title, size=16, weight="bold")]
    for number, (probe, runs) in enumerate(shown.items()):
        place = _Panel(_TOP + number * (_PANEL + _GAP), span, 0.0, 1.0)
        parts += place.frame(f"{probe}: top-1", axis)
        for index, (name, (x, top1)) in enumerate(runs.items()):
            colour = _COLOURS[index % len(_COLOURS)]
            parts.append(place.line(np.log10(x), top1, colour, 2))
            parts.append(_text(_WIDTH - _RIGHT + 8, place.y + 14 + 16 * index, name, colour=colour))
    return _document(parts, _TOP + len(shown) * (_PANEL + _GAP))


def _after_start(series: Series, values: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Developmental time and values of the usable observations after 0 tokens."""
    keep = series.usable & (series.x > 0)
    return series.x[keep], values[keep]


class _Panel:
    def __init__(self, y: float, span: tuple[float, float], bottom: float, top: float) -> None:
        self.y, self.span, self.bottom, self.top = y, span, bottom, top

    def at_x(self, value: float) -> float:
        share = (value - self.span[0]) / (self.span[1] - self.span[0])
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def at_y(self, value: float) -> float:
        return self.y + _PANEL * (1 - (value - self.bottom) / (self.top - self.bottom))

    def frame(self, name: str, axis: str) -> list[str]:
        right, foot = _WIDTH - _RIGHT, self.y + _PANEL
        parts = [
            f'<rect x="{_LEFT}" y="{self.y}" width="{right - _LEFT}" height="{_PANEL}" fill="none" stroke="#888"/>',
            _text(_LEFT, self.y - 6, name, weight="bold"),
        ]
        for value in np.linspace(self.bottom, self.top, 3):
            parts.append(_text(_LEFT - 6, self.at_y(value) + 4, f"{value:.3g}", anchor="end"))
        for value in np.linspace(*self.span, 6):
            number = 10**value
            label = tokens_text(number) if axis == "tokens" else f"{number:.0f}"
            parts.append(_text(self.at_x(float(value)), foot + 16, label, anchor="middle"))
        parts.append(_text(right + 8, foot - 2, axis))
        return parts

    def line(self, x: FloatArray, values: FloatArray, colour: str, width: float) -> str:
        """A line that is broken where a value is missing."""
        commands, pen = [], "M"
        for at, value in zip(x, values, strict=True):
            if not math.isfinite(value):
                pen = "M"
                continue
            commands.append(f"{pen}{self.at_x(float(at)):.1f} {self.at_y(float(value)):.1f}")
            pen = "L"
        return f'<path d="{" ".join(commands)}" fill="none" stroke="{colour}" stroke-width="{width}"/>'


def _heads(
    place: _Panel, x: FloatArray, values: FloatArray, heads: Sequence[Head], circuit: Sequence[Head]
) -> list[str]:
    parts = [
        place.line(x, values[:, column], _GREY, 1) for column, head in enumerate(heads) if head not in set(circuit)
    ]
    for number, head in enumerate(sorted(circuit)):
        colour = _COLOURS[number % len(_COLOURS)]
        parts.append(place.line(x, values[:, list(heads).index(head)], colour, 2))
        parts.append(_text(_WIDTH - _RIGHT + 8, place.y + 14 + 16 * number, str(head), colour=colour))
    return parts


def _at(place: _Panel, step: int, tokens: float | None, axis: str) -> float | None:
    value = tokens if axis == "tokens" else float(step)
    if value is None or value <= 0 or not place.span[0] - 1e-9 <= math.log10(value) <= place.span[1] + 1e-9:
        return None
    return place.at_x(math.log10(value))


def _verdict_mark(place: _Panel, verdict: Verdict, axis: str) -> str:
    at = _at(place, verdict.step, verdict.tokens, axis)
    if at is None:
        return ""
    filled = "#009E73" if verdict.verdict == "causal" else "#ffffff"
    said = escape(f"step {verdict.step}, {verdict.mode}: {verdict.verdict} ({' '.join(verdict.heads)})")
    y = place.y + 10
    return f'<circle cx="{at:.1f}" cy="{y}" r="5" fill="{filled}" stroke="#222"><title>{said}</title></circle>'


def _crossing_mark(place: _Panel, event: Event, axis: str) -> str:
    if event.kind != "selectivity_crossing":
        return ""
    at = _at(place, event.step, event.tokens, axis)
    if at is None:
        return ""
    said = escape(f"step {event.step}: {' '.join(event.heads)} crossed {event.direction}")
    return (
        f'<path d="M{at:.1f} {place.y} V{place.y + _PANEL}" stroke="#888" stroke-dasharray="3 3">'
        f"<title>{said}</title></path>"
    )


def _text(
    x: float, y: float, text: str, size: int = 12, anchor: str = "start", weight: str = "normal", colour: str = "#222"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" font-weight="{weight}" '
        f'fill="{colour}">{escape(text)}</text>'
    )


def _document(parts: Sequence[str], height: float) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:.0f}" width="{_WIDTH}" '
        f'height="{height:.0f}" font-family="sans-serif"><rect width="100%" height="100%" fill="white"/>'
        + "\n".join(parts)
        + "</svg>\n"
    )
