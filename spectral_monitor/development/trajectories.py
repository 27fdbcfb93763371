"""PR integral, PR spread and what a ranking by them finds (recipe section 2)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from spectral_monitor.development.series import Series
from spectral_monitor.heads import Head
from spectral_monitor.integral import pr_integral
from spectral_monitor.observation import UNCLASSIFIED, FloatArray, IntArray

#: The papers' size of the PR top set: 18% of all heads.
TOP_SHARE = 0.18


def pr_spread(pr: FloatArray) -> FloatArray:
    """``max - min`` over observations of PR [S, K]: [K]; NaN for a head without any PR."""
    known = np.isfinite(pr)
    high = np.where(known, pr, -np.inf).max(axis=0)
    low = np.where(known, pr, np.inf).min(axis=0)
    return np.where(known.any(axis=0), high - low, np.nan)


@dataclass(frozen=True)
class Ranking:
    """Heads in order of one score.

    Attributes:
        score: ``"integral"``, ``"spread"`` or ``"pr"`` (a record of one observation has no integral).
        values: [K] in head order.
        order: [K] columns, best first; a head without a value comes last.
    """

    score: str
    values: FloatArray
    order: IntArray

    def top(self, heads: tuple[Head, ...], k: int) -> list[Head]:
        """The best ``k`` heads."""
        return [heads[column] for column in self.order[:k]]


def rank(series: Series, score: str = "integral") -> Ranking:
    """Heads by PR integral, by spread, or by the PR of the last usable observation."""
    x, pr = series.x[series.usable], series.pr[series.usable]
    if score == "integral" and (x > 0).sum() < 2:
        score = "pr"
    if score == "integral":
        values = pr_integral(x, pr)
    elif score == "spread":
        values = pr_spread(pr)
    else:
        values = pr[-1]
    order = np.argsort(-np.nan_to_num(values, nan=-np.inf), kind="stable")
    return Ranking(score, values, order.astype(np.int64))


@dataclass(frozen=True)
class PrecisionAtK:
    """How many of the best ``k`` heads of a ranking are of the wanted kind, against the share among all heads."""

    score: str
    k: int
    hits: int
    precision: float
    base_rate: float


def precision_at_k(ranking: Ranking, wanted: np.ndarray, ks: tuple[int, ...]) -> list[PrecisionAtK]:
    """Precision of a ranking at each k for a boolean ``wanted`` [K]; k above K is cut to K."""
    total = len(wanted)
    results = []
    for k in dict.fromkeys(min(k, total) for k in ks if k > 0):
        hits = int(wanted[ranking.order[:k]].sum())
        results.append(PrecisionAtK(ranking.score, k, hits, hits / k, float(wanted.mean())))
    return results


def top_size(heads: int) -> int:
    """``K = round(0.18 * L * H)``, at least one."""
    return max(1, round(TOP_SHARE * heads))


def classified(series: Series, index: int) -> np.ndarray:
    """[K] True where the head has a class at that observation."""
    found: np.ndarray = (series.head_class[index] != UNCLASSIFIED) & (series.head_class[index] != "")
    return found
