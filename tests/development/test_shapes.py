from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from spectral_monitor.development.shapes import isotonic, shape_of

LOG = np.geomspace(1, 1000, 30)
RISES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "line in log tokens": lambda x: 0.8 * np.log(x) / np.log(1000),
    "line in tokens": lambda x: 0.8 * x / 1000,
    "saturating": lambda x: 0.8 * (1 - np.exp(-x / 200)),
    "square root": lambda x: 0.8 * np.sqrt(x / 1000),
}


@pytest.mark.parametrize("name", RISES)
@pytest.mark.parametrize("noise", [0.0, 0.02, 0.05])
@pytest.mark.parametrize("grid", ["log", "linear"])
def test_gradual_rises_are_ramps(name: str, noise: float, grid: str) -> None:
    x = LOG if grid == "log" else np.linspace(1, 1000, 30)
    kinds = []
    for seed in range(20):
        values = RISES[name](x) + noise * np.random.default_rng(seed).normal(size=len(x))
        kinds.append(shape_of(x, values.clip(0, 1)).kind)
    assert kinds.count("ramp") >= 19


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.05])
@pytest.mark.parametrize("at", [5.0, 60.0, 400.0])
@pytest.mark.parametrize("before", [0.0, 0.3])
def test_a_jump_is_a_transition_and_is_placed(noise: float, at: float, before: float) -> None:
    placed = 0
    for seed in range(20):
        values = np.where(at < LOG, before + 0.6, before) + noise * np.random.default_rng(seed).normal(size=len(LOG))
        shape = shape_of(LOG, values.clip(0, 1))
        assert shape.kind == "transition"
        assert shape.after is not None and shape.by is not None
        placed += shape.after < at <= shape.by
    assert placed >= 18


@pytest.mark.parametrize("level", [0.0, 0.05, 0.4])
@pytest.mark.parametrize("noise", [0.0, 0.02, 0.05])
def test_a_flat_series_has_no_shape(level: float, noise: float) -> None:
    kinds = []
    for seed in range(20):
        values = level + noise * np.random.default_rng(seed).normal(size=len(LOG))
        kinds.append(shape_of(LOG, values.clip(0, 1)).kind)
    assert kinds.count("none") >= 19


def test_two_points_are_too_few() -> None:
    shape = shape_of(np.array([1.0, 10.0]), np.array([0.0, 0.8]))
    assert shape.kind == "undetermined" and "2 observations" in shape.reason and shape.after is None


def test_a_jump_across_a_wide_gap_is_undetermined() -> None:
    shape = shape_of(np.array([1.0, 2.0, 50.0, 100.0]), np.array([0.0, 0.01, 0.7, 0.71]))
    assert shape.kind == "undetermined" and "look more often" in shape.reason
    assert (shape.after, shape.by) == (2.0, 50.0)


def test_a_fall_is_no_rise() -> None:
    assert shape_of(LOG, np.linspace(0.8, 0.1, len(LOG))).kind == "none"


def test_missing_fractions_are_left_out() -> None:
    values = np.where(LOG > 60, 0.7, 0.0)
    values[::7] = np.nan
    assert shape_of(LOG, values).kind == "transition"


def test_step_zero_does_not_break_the_ratio() -> None:
    x = np.concatenate([[0.0], LOG])
    assert shape_of(x, np.concatenate([[0.0], np.where(LOG > 60, 0.7, 0.0)])).kind == "transition"


def test_isotonic_is_the_least_squares_monotone_fit() -> None:
    assert isotonic(np.array([1.0, 3.0, 2.0, 4.0])).tolist() == [1.0, 2.5, 2.5, 4.0]
    assert isotonic(np.array([3.0, 2.0, 1.0])).tolist() == [2.0, 2.0, 2.0]
    optimize = pytest.importorskip("scipy.optimize")
    if hasattr(optimize, "isotonic_regression"):
        values = np.random.default_rng(0).normal(size=200).cumsum()
        np.testing.assert_allclose(isotonic(values), optimize.isotonic_regression(values).x)
