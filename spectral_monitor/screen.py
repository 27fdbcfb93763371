"""The pattern screen: attention mass and selectivity by class, circuits, noise floor (recipe section 3)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from spectral_monitor.errors import ThresholdError
from spectral_monitor.heads import Head
from spectral_monitor.observation import BASELINES, UNCLASSIFIED, FloatArray, HeadTable, IntArray
from spectral_monitor.probe import ProbeBatch

#: Baselines are floored here: a head that attends nowhere else must not divide by zero.
FLOOR = 1e-8


@dataclass(frozen=True)
class Thresholds:
    """Bars of the screen; all are ratios of attention to baseline except ``min_attention``.

    Attributes:
        classify: a head gets the class of its largest selectivity from here on.
        member: circuit membership of a capability (all-head, capability-specific screen).
        previous_token: membership of the previous-token circuit, which also asks for the best class.
        min_attention: target attention below which a head is never a circuit member, however large its ratio.
        hysteresis: a member leaves only below ``hysteresis * member``.
    """

    classify: float = 30.0
    member: float = 50.0
    previous_token: float = 100.0
    min_attention: float = 0.02
    hysteresis: float = 0.8

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if not math.isfinite(value) or value < 0:
                raise ThresholdError(f"threshold {item.name} must be a number from 0 up, not {value}")
        if self.min_attention > 1:
            raise ThresholdError(f"min_attention is an attention mass between 0 and 1, not {self.min_attention}")
        if not 0 < self.hysteresis <= 1:
            raise ThresholdError(f"hysteresis is a share of the threshold in (0, 1], not {self.hysteresis}")


def selectivity(attention: FloatArray, baseline: FloatArray) -> FloatArray:
    """Mean attention on the target / baseline, the baseline floored at 1e-8."""
    return attention / np.maximum(baseline, FLOOR)


def uniform_baseline(probe: ProbeBatch, capability: str) -> float:
    """``1 / (T - k)``: T the mean number of positions up to the query, k the class's target positions."""
    return 1.0 / (float(probe.query.mean()) + 1 - probe.targets[capability].shape[1])


def classify(selectivities: Mapping[str, FloatArray], thresholds: Thresholds) -> np.ndarray:
    """[K] class of largest selectivity where that is >= ``thresholds.classify``, else ``"none"``; NaN never wins."""
    names = list(selectivities)
    stacked = np.stack([np.nan_to_num(selectivities[name], nan=-1.0) for name in names])
    best = stacked.argmax(axis=0)
    reached = stacked.max(axis=0) >= thresholds.classify
    result: np.ndarray = np.where(reached, np.array(names, dtype=np.str_)[best], UNCLASSIFIED)
    return result


def circuit(
    heads: HeadTable, capability: str, thresholds: Thresholds, current: Sequence[Head] | frozenset[Head] = ()
) -> list[Head]:
    """Heads of one capability's circuit (recipe section 3).

    All heads with selectivity >= ``member`` whatever their best class; the previous-token circuit asks for
    ``previous_token`` and for the best class. Heads of ``current`` stay until they fall below ``hysteresis`` of it.
    A head with target attention below ``min_attention`` is never a member.
    """
    if capability not in heads.selectivity:
        return []
    bar = thresholds.previous_token if capability == "previous_token" else thresholds.member
    stays = np.array([head in current for head in heads], dtype=bool)
    bars = np.where(stays, bar * thresholds.hysteresis, bar)
    values, mass = heads.selectivity[capability], heads.attention[capability]
    with np.errstate(invalid="ignore"):
        member = (values >= bars) & (mass >= thresholds.min_attention)
    if capability == "previous_token":
        member &= heads.head_class == "previous_token"
    return [head for head, inside in zip(heads, member, strict=True) if inside]


def class_fractions(heads: HeadTable) -> dict[str, float]:
    """Share of all heads in each class, ``"none"`` included."""
    names = [*heads.attention, UNCLASSIFIED]
    return {name: float(np.mean(heads.head_class == name)) for name in names}


def class_counts(heads: HeadTable) -> dict[str, int]:
    """Number of heads in each class, ``"none"`` included."""
    names = [*heads.attention, UNCLASSIFIED]
    return {name: int(np.sum(heads.head_class == name)) for name in names}


# -- reach of a threshold ---------------------------------------------------------------------------------------------


def largest_selectivity(probe: ProbeBatch, capability: str, baseline: str) -> float:
    """Selectivity of a head with all its attention on the target; infinite for the ``others`` baseline.

    With ``sampled`` the target itself is among the sampled positions in a share of the rows, which caps the ratio
    (near 62, 105, 202 at T = 64, 128, 256); ``uniform`` is capped at T - k.
    """
    _check_baseline(baseline)
    if baseline == "others":
        return math.inf
    if baseline == "uniform":
        return 1.0 / uniform_baseline(probe, capability)
    share = _sampled_share(probe, capability)
    return math.inf if share == 0 else 1.0 / share


def mass_at(threshold: float, probe: ProbeBatch, capability: str, baseline: str) -> float:
    """Attention mass at which a head reaches ``threshold``, the rest of its attention spread evenly.

    Above 1 where the threshold cannot be reached.
    """
    _check_baseline(baseline)
    positions = float(probe.query.mean()) + 1
    targets = probe.targets[capability].shape[1]
    rest = 1.0 / max(positions - targets, 1.0)
    if baseline == "uniform":
        return threshold * uniform_baseline(probe, capability)
    share = 0.0 if baseline == "others" else _sampled_share(probe, capability)
    # m / (m * share + (1 - share) * (1 - m) * rest) = threshold, solved for m
    slope = 1 - threshold * share + threshold * (1 - share) * rest
    return math.inf if slope <= 0 else threshold * (1 - share) * rest / slope


def check_reachable(probe: ProbeBatch, thresholds: Thresholds, baseline: str) -> None:
    """ThresholdError where no head could ever reach the membership threshold of the probe's capability."""
    cap = largest_selectivity(probe, probe.capability, baseline)
    if thresholds.member > cap:
        raise ThresholdError(
            f"no head can reach the membership threshold {thresholds.member:g}x on probe {probe.name!r}: with the "
            f"{baseline!r} baseline and rows of {probe.length} tokens all attention on the target gives {cap:.0f}x. "
            "Lower the threshold, lengthen the rows, or use baseline 'others'"
        )


def _sampled_share(probe: ProbeBatch, capability: str) -> float:
    """Share of (row, sampled position) pairs in which the sampled position is the class's target."""
    if not len(probe.sampled):
        return 0.0
    hits = (probe.targets[capability][:, :, None] == probe.sampled[None, None, :]).sum()
    pairs = (probe.sampled[None, :] <= probe.query[:, None]).sum() * probe.targets[capability].shape[1]
    return float(hits / pairs) if pairs else 0.0


def _check_baseline(baseline: str) -> None:
    if baseline not in BASELINES:
        raise ThresholdError(f"unknown baseline {baseline!r}: use one of {', '.join(BASELINES)}")


# -- noise floor ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NullCalibration:
    """Null selectivity: random non-special positions as target (recipe section 3).

    ``p95``/``p99`` pool heads and draws; ``t_recall = max(2, p99)``; ``draws`` a head.
    """

    p95: float
    p99: float
    draws: int

    @property
    def t_recall(self) -> float:
        """The noise floor used as the recall threshold."""
        return max(2.0, self.p99)


def null_calibration(null_attention: FloatArray, baseline: FloatArray) -> NullCalibration:
    """Percentiles of the pooled null ratio.

    Args:
        null_attention: [K, draws] mean attention on each draw's random positions.
        baseline: [K].
    """
    ratios = selectivity(null_attention, baseline[:, None])
    ratios = ratios[np.isfinite(ratios)]
    if not ratios.size:
        return NullCalibration(math.nan, math.nan, null_attention.shape[1])
    p95, p99 = np.percentile(ratios, [95, 99])
    return NullCalibration(float(p95), float(p99), null_attention.shape[1])


# -- sums over rows ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Columns:
    """Which positions of an attention row are averaged: the classes, then ``free`` and ``sampled``.

    ``free`` are the positions that are no class's target (the ``others`` baseline).
    """

    names: tuple[str, ...]

    @classmethod
    def of(cls, probe: ProbeBatch) -> Columns:
        """The columns of a probe batch."""
        return cls((*probe.classes, "free", "sampled"))


def column_indicators(probe: ProbeBatch, rows: IntArray) -> tuple[np.ndarray, np.ndarray]:
    """Which positions belong to which column, and which rows count.

    Returns:
        [B, T, C] 1.0 at the column's positions (float32), and [B, C] 1.0 where the row counts for it (float64).
    """
    columns = Columns.of(probe).names
    indicators = np.zeros((len(rows), probe.length, len(columns)), dtype=np.float32)
    usable = np.ones((len(rows), len(columns)), dtype=np.float64)
    index = np.arange(len(rows))[:, None]
    for number, name in enumerate(probe.classes):
        indicators[index, probe.targets[name][rows], number] = 1.0
        if name in probe.usable:
            usable[:, number] = probe.usable[name][rows]
    indicators[:, :, columns.index("free")] = probe.free_positions(rows)
    if len(probe.sampled):
        inside = probe.sampled[None, :] <= probe.query[rows][:, None]
        indicators[:, probe.sampled, columns.index("sampled")] = inside
    return indicators, usable
