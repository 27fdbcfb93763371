"""Observations made by hand, for tests that need to know the answer."""

from __future__ import annotations

from typing import Any

import numpy as np

from spectral_monitor.observation import CLASSES, HeadTable, Observation, ProbeMetrics
from spectral_monitor.screen import Thresholds, classify


def observation(
    step: int,
    tokens: float | None = None,
    layers: int = 2,
    per_layer: int = 4,
    pr: Any = 2.0,
    selectivity: dict[str, Any] | None = None,
    attention: dict[str, Any] | None = None,
    **fields: Any,
) -> Observation:
    """One observation: arrays of ``layers * per_layer`` values, or one number for all heads; 1x and 0.1 by default."""
    count = layers * per_layer

    def array(value: Any) -> np.ndarray:
        return np.broadcast_to(np.asarray(value, dtype=np.float64), (count,)).copy()

    ratios = {name: array((selectivity or {}).get(name, 1.0)) for name in CLASSES}
    masses = {name: array((attention or {}).get(name, 0.1)) for name in CLASSES}
    heads = HeadTable(
        layer=np.repeat(np.arange(layers), per_layer),
        head=np.tile(np.arange(per_layer), layers),
        pr=array(pr),
        pr_moment=array(pr),
        attention=masses,
        baselines={"others": array(0.01)},
        selectivity=ratios,
        head_class=classify(ratios, Thresholds()),
        status=np.full(count, "ok"),
        sink=np.zeros(count),
    )
    given = {"probe": "induction", "fingerprint": "f" * 64, "baseline": "others", **fields}
    return Observation(
        step=step,
        tokens=float(step) * 100 if tokens is None else tokens,
        heads=heads,
        metrics=given.pop("metrics", ProbeMetrics(0.1, 0.2, 5.0, 1.0, 64)),
        **given,
    )
