"""Where the screen's bars stand against noise, and the conserved fraction (recipe section 3)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from spectral_monitor.development.series import Series
from spectral_monitor.development.trajectories import Ranking, classified, rank, top_size

COUNT_BARS = (2.0, 10.0, 30.0, 50.0, 100.0)
T_PRECISION = 50.0


@dataclass(frozen=True)
class Calibration:
    """Bars and counts at one observation, for one capability.

    Attributes:
        null_p99: noise floor of the null selectivity; NaN when none was drawn.
        t_recall: ``max(2, null_p99)``; ``t_precision``: 50.
        above: threshold -> heads at or above it.
        above_null: heads above the noise floor; None without one.
        conserved_by_null: ``above_null / heads``.
        top, classified_in_top: ``round(0.18 * heads)`` best heads by ``top_score``, and those of them with a class.
        conserved_by_pr: ``classified_in_top / heads``.
    """

    step: int
    capability: str
    heads: int
    null_p99: float
    t_recall: float
    t_precision: float
    median: float
    largest: float
    above: dict[str, int]
    above_null: int | None
    conserved_by_null: float
    top: int
    top_score: str
    classified_in_top: int | None
    conserved_by_pr: float


def calibrate(series: Series, ranking: Ranking | None = None) -> Calibration | None:
    """Calibration at the last usable observation; None when the record has no selectivity for the capability."""
    values = series.selectivity.get(series.capability)
    if values is None or not np.isfinite(values[series.last]).any():
        return None
    at = series.last
    known = values[at][np.isfinite(values[at])]
    floor = float(series.null_p99[at])
    heads = len(series.heads)
    above_null = None if math.isnan(floor) else int((known > floor).sum())
    ranking = ranking or rank(series)
    top = top_size(heads)
    in_top = int(classified(series, at)[ranking.order[:top]].sum()) if series.has_classes else None
    if not np.isfinite(ranking.values).any():
        in_top = None
    return Calibration(
        step=int(series.steps[at]),
        capability=series.capability,
        heads=heads,
        null_p99=floor,
        t_recall=math.nan if math.isnan(floor) else max(2.0, floor),
        t_precision=T_PRECISION,
        median=float(np.median(known)),
        largest=float(known.max()),
        above={f"{bar:g}": int((known >= bar).sum()) for bar in COUNT_BARS},
        above_null=above_null,
        conserved_by_null=math.nan if above_null is None else above_null / heads,
        top=top,
        top_score=ranking.score,
        classified_in_top=in_top,
        conserved_by_pr=math.nan if in_top is None else in_top / heads,
    )
