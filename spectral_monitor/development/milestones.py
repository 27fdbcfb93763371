"""F3: when something was first seen, always as an interval (recipe section 5).

An onset lies between two observations. It is *at or before* the first observation when it is there already, and *not
seen up to* the last one when it never comes. Observations that are marked or not finite do not count and widen the
interval.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from spectral_monitor.development.series import BoolArray, Series
from spectral_monitor.observation import FloatArray

Status = Literal["between", "at or before", "not seen", "not measured"]

INDUCTION_COUNTS = (3, 5)
FIRST_TOKEN_FRACTIONS = (0.10, 0.30, 0.50, 0.70)
CLASS_COUNT = 30


@dataclass(frozen=True)
class Onset:
    """The interval in which something came to hold.

    ``after_*`` is the last usable observation before it (None when it held at the first one), ``by_*`` the first at
    which it held (None when it never did); ``index`` that observation's number.
    """

    status: Status
    index: int | None = None
    after_step: int | None = None
    by_step: int | None = None
    after_tokens: float | None = None
    by_tokens: float | None = None

    @property
    def seen(self) -> bool:
        """Whether it was seen at all."""
        return self.index is not None


def onset(series: Series, holds: BoolArray) -> Onset:
    """First usable observation at which ``holds`` [O]."""
    usable = np.flatnonzero(series.usable)
    found = usable[holds[usable]]
    if not len(found):
        return Onset("not seen")
    index = int(found[0])
    before = usable[usable < index]
    previous = int(before[-1]) if len(before) else None
    return Onset(
        status="at or before" if previous is None else "between",
        index=index,
        after_step=None if previous is None else int(series.steps[previous]),
        by_step=int(series.steps[index]),
        after_tokens=None if previous is None else _tokens(series, previous),
        by_tokens=_tokens(series, index),
    )


def _tokens(series: Series, index: int) -> float | None:
    value = float(series.tokens[index])
    return None if math.isnan(value) else value


def first_token_fraction(series: Series) -> FloatArray:
    """[O] share of all heads whose class is first token; NaN where no head has a class."""
    known = (series.head_class != "").any(axis=1)
    return np.where(known, (series.head_class == "first_token").mean(axis=1), np.nan)


def class_fractions(series: Series) -> dict[str, FloatArray]:
    """Class -> [O] share of all heads; NaN where no head has a class."""
    known = (series.head_class != "").any(axis=1)
    names = [name for name in np.unique(series.head_class) if name]
    return {str(name): np.where(known, (series.head_class == name).mean(axis=1), np.nan) for name in names}


def first_token_by_layer(series: Series) -> FloatArray:
    """[O, layers] number of first-token heads a layer (F1), layers in the order of ``series.layers``."""
    first = series.head_class == "first_token"
    return np.stack([first[:, series.layer == layer].sum(axis=1) for layer in series.layers], axis=1).astype(float)


def milestones(series: Series) -> dict[str, Onset]:
    """The published milestones, by the names of ``published/milestones.csv``, for the probe's own capability.

    A milestone whose columns the record lacks is ``not measured``.
    """
    result: dict[str, Onset] = {}
    counts = series.members(series.capability).sum(axis=1)
    for number in INDUCTION_COUNTS:
        measured = series.capability in series.selectivity
        result[f"{series.capability}_heads>={number}"] = (
            onset(series, counts >= number) if measured else Onset("not measured")
        )
    classed = series.has_classes
    fraction = np.nan_to_num(first_token_fraction(series), nan=-1.0)
    for bar in FIRST_TOKEN_FRACTIONS:
        reached = fraction >= bar - 1e-9
        result[f"bos_fraction>={bar:.2f}"] = onset(series, reached) if classed else Onset("not measured")
    for name in ("previous_token", "self"):
        many = (series.head_class == name).sum(axis=1) >= CLASS_COUNT
        result[f"{name}_heads>={CLASS_COUNT}"] = onset(series, many) if classed else Onset("not measured")
    return result


@dataclass(frozen=True)
class Gap:
    """``later`` in tokens over ``earlier`` in tokens, with the range that the two intervals allow.

    ``low`` is 0 where nothing bounds it from below, ``high`` infinite where nothing bounds it from above.
    """

    earlier: str
    later: str
    ratio: float
    low: float
    high: float


def ratio_of(earlier: Onset, later: Onset, axis: str = "tokens") -> tuple[float, float, float]:
    """``by_later / by_earlier`` and its range: (ratio, low, high); NaN where either was not seen."""
    if not earlier.seen or not later.seen:
        return math.nan, math.nan, math.nan
    first = _on_axis(earlier, axis)
    second = _on_axis(later, axis)
    return _over(second[1], first[1]), _over(second[0], first[1]), _over(second[1], first[0])


def gaps(series: Series, found: dict[str, Onset]) -> list[Gap]:
    """Gaps between the first circuit milestone and each first-token milestone that was reached."""
    earlier = f"{series.capability}_heads>={INDUCTION_COUNTS[0]}"
    result = []
    for later, at in found.items():
        if later.startswith("bos_fraction") and at.seen and found[earlier].seen:
            result.append(Gap(earlier, later, *ratio_of(found[earlier], at, series.axis)))
    return result


def _on_axis(at: Onset, axis: str) -> tuple[float, float]:
    after, by = (at.after_tokens, at.by_tokens) if axis == "tokens" else (at.after_step, at.by_step)
    return float(after or 0.0), float(by or 0.0)


def _over(above: float, below: float) -> float:
    if below > 0:
        return above / below
    return math.inf if above > 0 else math.nan


def median_of(values: Iterable[float]) -> float:
    """Median of the values that are not NaN; NaN of none."""
    known = [value for value in values if not math.isnan(value)]
    return float(np.median(known)) if known else math.nan
