"""F4: how early the screen knows the final circuit (recipe section 5)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from spectral_monitor.development.milestones import Onset, onset
from spectral_monitor.development.series import Series
from spectral_monitor.heads import Head
from spectral_monitor.observation import FloatArray

#: Shares of the final circuit; "33" is one of three heads, "67" two of three.
LEVELS = {"33": 1 / 3, "67": 2 / 3, "100": 1.0}


@dataclass(frozen=True)
class Reached:
    """When a share of the final circuit was first recovered.

    ``fraction`` is that time over the last observation's time (tokens, or steps); ``holds_from`` the first observation
    from which the share was never lost again.
    """

    onset: Onset
    fraction: float
    holds_from: Onset


@dataclass(frozen=True)
class Recall:
    """Recall and precision of one capability's final circuit at each observation.

    ``recall``, ``precision`` [O]: precision is NaN where the screen finds no head; both are NaN at observations that do
    not count.
    """

    capability: str
    final: tuple[Head, ...]
    recall: FloatArray
    precision: FloatArray
    levels: dict[str, Reached]


def recall_of(series: Series, capability: str) -> Recall | None:
    """Recall of the final circuit by the same screen at each observation; None when the final circuit is empty."""
    members = series.members(capability)
    final = members[series.last]
    if not final.any():
        return None
    shared = (members & final).sum(axis=1)
    found = members.sum(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        recall = np.where(series.usable, shared / final.sum(), np.nan)
        precision = np.where(series.usable & (found > 0), shared / found, np.nan)
    total = float(series.x[series.last])
    levels = {}
    for name, level in LEVELS.items():
        reached = np.nan_to_num(recall, nan=-1.0) >= level - 1e-9
        first = onset(series, reached)
        stays = np.logical_and.accumulate((reached | ~series.usable)[::-1])[::-1]
        fraction = math.nan if first.index is None or total <= 0 else float(series.x[first.index]) / total
        levels[name] = Reached(first, fraction, onset(series, stays))
    final_heads = tuple(head for head, inside in zip(series.heads, final, strict=True) if inside)
    return Recall(capability, final_heads, recall, precision, levels)
