"""The copy process: seeded, inside its vocabulary, and with phrases that really come back."""

from __future__ import annotations

import numpy as np

from train_examples.copy_process import CopyProcess, TokenRows, fixed_lag


def continued(tokens: np.ndarray) -> float:
    """Share of positions whose (previous, current) pair stood earlier in the row."""
    found = [
        any((row[at - 1], row[at]) == (row[back - 1], row[back]) for back in range(1, at))
        for row in tokens
        for at in range(2, len(row))
    ]
    return float(np.mean(found))


def test_the_seed_decides_the_rows() -> None:
    process = CopyProcess(length=32)
    assert (process.sample(5, 1) == process.sample(5, 1)).all()
    assert (process.sample(5, 1) != process.sample(5, 2)).any()


def test_rows_have_the_shape_and_the_vocabulary() -> None:
    tokens = CopyProcess(vocabulary=40, length=24).sample(200, 0)
    assert tokens.shape == (200, 24) and tokens.dtype == np.int64
    assert tokens.min() == 0 and tokens.max() == 39


def test_phrases_come_back_because_of_the_copies() -> None:
    copying = CopyProcess(uniform_rows=1.0).sample(40, 0)
    fresh = CopyProcess(uniform_rows=1.0, copy_start=0.0).sample(40, 0)
    assert continued(copying) > 0.4
    assert continued(fresh) < 0.05


def test_the_markov_language_prefers_its_successors() -> None:
    tokens = CopyProcess(uniform_rows=0.0, copy_start=0.0).sample(400, 3)
    followers = [tokens[:, 1:][tokens[:, :-1] == token] for token in range(64)]
    top8 = [np.sort(np.bincount(each, minlength=64))[-8:].sum() / len(each) for each in followers if len(each) > 100]
    assert np.mean(top8) > 0.7


def test_labels_are_the_inputs() -> None:
    rows = TokenRows(CopyProcess(length=16).sample(3, 0))
    assert len(rows) == 3
    assert (rows[1]["input_ids"] == rows[1]["labels"]).all() and rows[1]["labels"].shape == (16,)


def test_fixed_lag_rows_repeat_at_one_distance() -> None:
    rows = fixed_lag(50, seed=1, vocabulary=30, length=20)
    assert rows.shape == (50, 20) and (rows[:, :10] == rows[:, 10:]).all()
    assert continued(rows[:, :10]) < 0.1
    assert (rows == fixed_lag(50, seed=1, vocabulary=30, length=20)).all()
