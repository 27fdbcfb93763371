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
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(AXES), figsize=(12, 3.2), sharey=True)
    for panel, axis in zip(panels, AXES, strict=True):
        along = [point for point in points if point.axis == axis]
        size = [point.value for point in along]
        panel.loglog(size, [point.plain_seconds for point in along], "o--", color="#7f8c8d", label="plain forward")
        panel.loglog(size, [point.seconds for point in along], "o-", color="#c0392b", label="observation")
        straight = [along[0].seconds * value / along[0].value for value in size]
        panel.loglog(size, straight, ":", color="black", linewidth=0.8, label="straight line")
        panel.set_xticks(size, [str(value) for value in size])
        panel.minorticks_off()
        panel.set_xlabel(axis)
    panels[0].set_ylabel("seconds")
    panels[0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
    pyplot.close(figure)
