"""F2: the shape of a fraction's rise over training (recipe section 5).

The rule, in words. The rise is what a monotone curve through the fractions (isotonic regression, which averages noise
away) climbs from the first to the last observation.

* ``undetermined``: fewer than three observations.
* ``none``: the rise is below 0.1, or below four standard deviations of the fractions around that curve.
* ``transition``: two thirds of the rise lie in a stretch between two observations that is at most a factor of 4 long in
  tokens and at most a third of the observed run. (The first condition alone would call a straight line in tokens a
  transition, since its last factor of four holds three quarters of it.)
* ``undetermined``: no such stretch, but 80% of the rise fall between two neighbouring observations: they stand too far
  apart to tell.
* ``ramp``: everything else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from spectral_monitor.observation import FloatArray

Kind = Literal["ramp", "transition", "none", "undetermined"]

MIN_POINTS = 3
MIN_RISE = 0.1
NOISE_SDS = 4.0
SHARE = 2 / 3
MAX_RATIO = 4.0
MAX_SPAN = 1 / 3
GAP_SHARE = 0.8


@dataclass(frozen=True)
class Shape:
    """The shape of a rise and where it lies.

    Attributes:
        kind: see the module.
        reason: one sentence.
        after, by: x (tokens, or steps) between which the rise lies: for a transition the shortest stretch that holds
            two thirds of it, for a ramp the stretch between 10% and 90% of it; None where there is none.
        share: share of the rise between ``after`` and ``by``.
        ratio: ``by / after``: how sharp; infinite from 0, NaN where there is no stretch.
        points: observations used.
        start, end: the monotone curve's ends.
    """

    kind: Kind
    reason: str
    after: float | None
    by: float | None
    share: float
    ratio: float
    points: int
    start: float
    end: float


def shape_of(x: FloatArray, fraction: FloatArray) -> Shape:
    """Shape of ``fraction`` [S] over ``x`` [S] (tokens or steps, in increasing order); NaN fractions are left out."""
    known = np.isfinite(fraction) & np.isfinite(x)
    x, fraction = x[known], fraction[known]
    nan = math.nan
    points = len(x)
    if points < MIN_POINTS:
        reason = f"{points} observation{'' if points == 1 else 's'}: at least {MIN_POINTS} are needed"
        return Shape("undetermined", reason, None, None, nan, nan, points, nan, nan)
    curve = isotonic(fraction)
    start, end = float(curve[0]), float(curve[-1])
    rise = end - start
    noise = float(np.sqrt(np.sum((fraction - curve) ** 2) / max(points - 2, 1)))
    if rise < max(MIN_RISE, NOISE_SDS * noise):
        level = f"the fraction stays between {fraction.min():.3f} and {fraction.max():.3f}"
        return Shape("none", level, None, None, nan, nan, points, start, end)

    sharp = _sharpest(x, curve, rise)
    if sharp is not None:
        first, last = sharp
        share = float(curve[last] - curve[first]) / rise
        ratio = _ratio(x[first], x[last])
        reason = f"{share:.0%} of the rise from {start:.3f} to {end:.3f} lie within a factor of {ratio:.2f}"
        return Shape("transition", reason, float(x[first]), float(x[last]), share, ratio, points, start, end)

    steps = np.diff(curve) / rise
    widest = int(steps.argmax())
    if steps[widest] >= GAP_SHARE:
        after, by = float(x[widest]), float(x[widest + 1])
        reason = (
            f"{steps[widest]:.0%} of the rise fall between two neighbouring observations a factor of "
            f"{_ratio(after, by):.1f} apart: look more often in between"
        )
        return Shape("undetermined", reason, after, by, float(steps[widest]), _ratio(after, by), points, start, end)

    first = int(np.flatnonzero(curve <= start + 0.1 * rise)[-1])
    last = int(np.flatnonzero(curve >= start + 0.9 * rise)[0])
    share = float((curve[last] - curve[first]) / rise)
    ratio = _ratio(x[first], x[last])
    reason = f"the rise from {start:.3f} to {end:.3f} is spread over a factor of {ratio:.1f}"
    return Shape("ramp", reason, float(x[first]), float(x[last]), share, ratio, points, start, end)


def _sharpest(x: FloatArray, curve: FloatArray, rise: float) -> tuple[int, int] | None:
    """The shortest admissible stretch (ends as indices) that holds ``SHARE`` of the rise, or None."""
    best: tuple[float, float, int, int] | None = None
    length = x[-1] - x[0]
    for first in range(len(x) - 1):
        enough = np.flatnonzero(curve - curve[first] >= SHARE * rise - 1e-12)
        if not len(enough):
            break
        last = int(enough[0])
        ratio, span = _ratio(x[first], x[last]), float(x[last] - x[first])
        if ratio <= MAX_RATIO * (1 + 1e-9) and span <= MAX_SPAN * length:
            found = (ratio, span, first, last)
            best = found if best is None else min(best, found)
    return None if best is None else best[2:]


def _ratio(after: float, by: float) -> float:
    return float(by / after) if after > 0 else math.inf


def isotonic(values: FloatArray) -> FloatArray:
    """Least-squares non-decreasing fit (pool adjacent violators)."""
    means: list[float] = []
    sizes: list[int] = []
    for value in values:
        means.append(float(value))
        sizes.append(1)
        while len(means) > 1 and means[-2] >= means[-1]:
            size = sizes[-2] + sizes[-1]
            means[-2] = (means[-2] * sizes[-2] + means[-1] * sizes[-1]) / size
            sizes[-2] = size
            means.pop()
            sizes.pop()
    return np.repeat(means, sizes)
