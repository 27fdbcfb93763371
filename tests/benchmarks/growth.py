"""How the cost of an observation grows over N, T, L and H: a table and a picture."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from spectral_monitor.capture import Subject
from spectral_monitor.probe import induction_probe
from tests.benchmarks.measuring import plain_forward, random_llama, timed
from tests.benchmarks.memory import peak_mebibytes

#: What is varied, one at a time, around N = 16, T = 256, L = 4, H = 8.
AXES: dict[str, tuple[int, ...]] = {
    "N": (8, 16, 32, 64),
    "T": (128, 256, 512, 1024),
    "L": (2, 4, 8, 16),
    "H": (4, 8, 16, 32),
}
BASE = {"N": 16, "T": 256, "L": 4, "H": 8}


@dataclass(frozen=True)
class Point:
    """Median seconds of an observation and of the plain forward at one size, and the observation's peak memory."""

    axis: str
    value: int
    seconds: float
    plain_seconds: float
    mebibytes: float


def grow(quick: bool) -> list[Point]:
    """Measure along every axis. Heads have size 32 and the model is 32 H wide, so that H grows the model as well."""
    points = []
    for axis, values in AXES.items():
        for value in values[:3] if quick else values:
            size = {**BASE, axis: value}
            model = random_llama(size["L"], size["H"], size["T"])
            probe = induction_probe(size["N"], size["T"], vocabulary=2000)
            subject, plain = Subject(model, probe), plain_forward(model, probe, 8)
            subject.read(probe, 8, null_draws=20)
            plain()
            ours, theirs = [], []
            for _ in range(3):
                theirs.append(timed(plain))
                ours.append(timed(lambda s=subject, p=probe: s.read(p, 8, null_draws=20)))
            peak = peak_mebibytes("observation", size["T"], size["N"], size["L"], size["H"], 32)
            points.append(Point(axis, value, statistics.median(ours), statistics.median(theirs), peak))
    return points


def exponents(points: list[Point]) -> dict[str, tuple[float, float]]:
    """Axis -> slope of log cost over log size, for seconds and memory: 1 is a straight line through the origin."""
    found = {}
    for axis in AXES:
        along = [point for point in points if point.axis == axis]
        size = [math.log(point.value) for point in along]
        seconds = float(np.polyfit(size, [math.log(p.seconds) for p in along], 1)[0])
        memory = float(np.polyfit(size, [math.log(max(p.mebibytes, 1e-3)) for p in along], 1)[0])
        found[axis] = seconds, memory
    return found


def draw(points: list[Point], file: Path) -> None:
    """One panel an axis, seconds over size, observation and plain forward, both axes logarithmic."""
    from plotly.subplots import make_subplots

    figure = make_subplots(rows=1, cols=len(AXES), subplot_titles=[f"{axis}" for axis in AXES], shared_yaxes=True)
    for column, axis in enumerate(AXES, 1):
        along = [point for point in points if point.axis == axis]
        for name, colour in (("observation", "#c0392b"), ("plain forward", "#7f8c8d")):
            seconds = [p.seconds if name == "observation" else p.plain_seconds for p in along]
            figure.add_scatter(
                x=[p.value for p in along],
                y=seconds,
                name=name,
                line={"color": colour},
                row=1,
                col=column,
                showlegend=column == 1,
            )
        figure.update_xaxes(type="log", tickvals=[p.value for p in along], row=1, col=column)
    figure.update_yaxes(type="log")
    figure.update_yaxes(title_text="seconds", row=1, col=1)
    figure.update_layout(width=1100, height=380, template="plotly_white")
    if file.suffix == ".html":
        figure.write_html(file, include_plotlyjs="cdn")
    else:
        figure.write_image(file)
