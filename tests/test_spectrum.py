"""Effective ranks and the PR integral (recipe section 2; cases, "Participation ratio depends on ...")."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from spectral_monitor.spectrum import effective_rank, effective_rank_of, gram, pr_integral
from tests.architectures.textbook import rank_by_svd


def _normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rows", [3, 16, 200])
def test_gram_route_equals_one_float64_svd_a_head(rows: int) -> None:
    outputs = _normal(rows, 5, 16) * torch.logspace(0, -3, 16)
    slow = [rank_by_svd(outputs[:, head]) for head in range(5)]
    np.testing.assert_allclose(effective_rank_of(outputs), slow, rtol=1e-5)


def test_moment_definition_is_the_classical_participation_ratio() -> None:
    outputs = _normal(50, 2, 8) * torch.linspace(1, 3, 8)
    squares = torch.linalg.svdvals(outputs[:, 1].double()).square()
    expected = float(squares.sum() ** 2 / squares.square().sum())
    assert effective_rank_of(outputs, "moment")[1] == pytest.approx(expected, rel=1e-9)


def test_sums_of_grams_over_micro_batches_give_the_whole() -> None:
    outputs = _normal(64, 3, 16)
    parts = sum(gram(part) for part in outputs.split([1, 20, 43]))
    assert isinstance(parts, torch.Tensor)
    np.testing.assert_allclose(effective_rank(parts), effective_rank_of(outputs), rtol=1e-10)


def test_known_ranks() -> None:
    direction = _normal(1, 1, 8)
    assert effective_rank_of(_normal(40, 1, 1) * direction)[0] == pytest.approx(1, abs=1e-6)
    assert effective_rank_of(torch.ones(40, 1, 8))[0] == pytest.approx(1, abs=1e-6)  # not centred: a mean alone is 1
    assert effective_rank_of(torch.eye(8)[:, None])[0] == pytest.approx(8)


def test_dead_and_non_finite_heads_have_no_rank() -> None:
    outputs = _normal(10, 3, 4)
    outputs[:, 0] = 0
    outputs[0, 1, 0] = torch.nan
    ranks = effective_rank_of(outputs)
    assert np.isnan(ranks[:2]).all()
    assert 1 <= ranks[2] <= 4


def test_isotropic_rows_are_pulled_down_when_they_are_few() -> None:
    """The moment definition gains about 1/N + 1/D in its inverse: 32 rows of 64 dimensions give about 21, 4096 63."""
    few, many = _normal(32, 1, 64), _normal(4096, 1, 64)
    assert effective_rank_of(few, "moment")[0] == pytest.approx(1 / (1 / 32 + 1 / 64), abs=1)
    assert effective_rank_of(many, "moment")[0] == pytest.approx(63, abs=0.5)
    assert effective_rank_of(few)[0] < 32
    assert effective_rank_of(many)[0] > 63


def test_bfloat16_outputs_agree_within_one_percent() -> None:
    outputs = _normal(256, 2, 16)
    np.testing.assert_allclose(effective_rank_of(outputs.bfloat16()), effective_rank_of(outputs), rtol=0.01)


def test_scale_does_not_matter_even_where_squares_underflow_float32() -> None:
    outputs = _normal(64, 2, 8)
    np.testing.assert_allclose(effective_rank_of(outputs * 1e-25), effective_rank_of(outputs), rtol=1e-6)


def test_unknown_definition_is_refused() -> None:
    with pytest.raises(ValueError, match="use 'entropy' or 'moment'"):
        effective_rank(torch.eye(2)[None], "renyi")  # type: ignore[arg-type]


def test_pr_integral_weighs_by_log_tokens_and_leaves_step_zero_out() -> None:
    tokens = np.array([0.0, 10.0, 100.0, 1000.0])
    pr = np.array([[50.0, 2.0], [3.0, 0.5], [4.0, np.nan], [2.0, 3.0]])
    integral = pr_integral(tokens, pr)
    assert integral[0] == pytest.approx((4 - 1) * np.log(10) + (2 - 1) * np.log(10))
    assert integral[1] == pytest.approx((3 - 1) * np.log(10))
    assert pr_integral(np.array([0.0, 5.0]), np.array([2.0, 3.0])) == 0
