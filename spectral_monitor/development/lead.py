"""F5: does the spectral signal come before the pattern? (recipe section 5)

For each head of the final circuit: the first observation at which its PR is at least ``RISE`` times its own running
minimum, against the first at which its selectivity reaches the circuit's bar. The running minimum looks at earlier
observations only: a lead that needs the future would be no warning. Random initialisation lets PR collapse first, so an
absolute bar would be meaningless, and a rise of 1.5 times fires in almost every head of a small model; 3 times is where
Pythia 1B's published L4H4 rises (2.6 -> 27).

Heads that never join rise too. Their share, and how early they do, is the base rate without which a lead says nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from spectral_monitor.development.milestones import Onset, median_of, onset, ratio_of
from spectral_monitor.development.series import BoolArray, Series
from spectral_monitor.heads import Head
from spectral_monitor.observation import FloatArray

#: PR over its own running minimum that counts as a rise.
RISE = 3.0


@dataclass(frozen=True)
class Lead:
    """One head's PR rise and selectivity crossing.

    Attributes:
        ratio: tokens (or steps) at the crossing / at the rise; above 1, PR came first. NaN where either is missing.
        low, high: the range that the schedule's resolution allows.
        observations: crossing's observation number - rise's; None where either is missing.
        resolved: the range leaves out 1: the order of the two is certain.
    """

    head: Head
    rise: Onset
    crossing: Onset
    ratio: float
    low: float
    high: float
    observations: int | None

    @property
    def resolved(self) -> bool:
        return not math.isnan(self.ratio) and (self.low >= 1 or self.high < 1)


@dataclass(frozen=True)
class BaseRate:
    """The same rise among heads that never joined the circuit at any observation.

    Attributes:
        heads: their number; ``rose``: those whose PR rose at all; ``rose_before``: no later than the median
            crossing of the circuit's heads.
        share_before: ``rose_before / heads``; NaN without such heads or without a crossing.
        circuit_share_before: share of the circuit's heads whose PR rose no later than their own crossing.
        median_ratio: median of (median crossing) / (rise) over the outside heads that rose.
        circuit_median_ratio: median ratio of the circuit's heads.
    """

    heads: int
    rose: int
    rose_before: int
    share_before: float
    circuit_share_before: float
    median_ratio: float
    circuit_median_ratio: float


def rises(series: Series, factor: float = RISE) -> BoolArray:
    """[O, K] True where PR is at least ``factor`` times the running minimum of the head's earlier usable values."""
    result = np.zeros(series.pr.shape, dtype=bool)
    lowest: FloatArray = np.full(series.pr.shape[1], np.inf)
    for index in np.flatnonzero(series.usable):
        pr = series.pr[index]
        with np.errstate(invalid="ignore"):
            result[index] = np.isfinite(lowest) & (pr >= factor * lowest)
            lowest = np.fmin(lowest, pr)
    return result


def leads(series: Series, capability: str, factor: float = RISE) -> list[Lead]:
    """Lead of each head of the final circuit, in order of head."""
    members = series.members(capability)
    rose = rises(series, factor)
    result = []
    for column in np.flatnonzero(members[series.last]):
        rise, crossing = onset(series, rose[:, column]), onset(series, members[:, column])
        ratio, low, high = ratio_of(rise, crossing, series.axis)
        between = None if rise.index is None or crossing.index is None else crossing.index - rise.index
        result.append(Lead(series.heads[int(column)], rise, crossing, ratio, low, high, between))
    return result


def base_rate(series: Series, capability: str, circuit: list[Lead], factor: float = RISE) -> BaseRate:
    """How the heads that never joined behave, by the same rule."""
    members = series.members(capability)
    usable = series.usable
    outside = ~members[usable].any(axis=0)
    rose = rises(series, factor)[:, outside]
    x = series.x
    crossing = median_of(float(x[lead.crossing.index]) for lead in circuit if lead.crossing.index is not None)
    first = np.array([x[np.flatnonzero(column)[0]] if column.any() else math.inf for column in rose.T])
    rose_number = int(np.isfinite(first).sum())
    before = int((first <= crossing).sum()) if not math.isnan(crossing) else 0
    total = int(outside.sum())
    crossed = [lead for lead in circuit if lead.crossing.index is not None]
    in_time = [lead for lead in crossed if lead.observations is not None and lead.observations >= 0]
    return BaseRate(
        heads=total,
        rose=rose_number,
        rose_before=before,
        share_before=before / total if total and not math.isnan(crossing) else math.nan,
        circuit_share_before=len(in_time) / len(crossed) if crossed else math.nan,
        median_ratio=median_of(crossing / value for value in first if np.isfinite(value) and value > 0),
        circuit_median_ratio=median_of(lead.ratio for lead in circuit),
    )
