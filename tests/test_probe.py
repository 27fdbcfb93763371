"""The induction probe batch (recipe section 1)."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from spectral_monitor.errors import ProbeError
from spectral_monitor.probe import MIN_VOCABULARY, ProbeBatch, induction_probe, sampled_positions


def published_rows(n: int, length: int, seed: int, low: int, high: int):
    """The published draws, written out once more from recipe section 1: tokens, A, B, position of A."""
    state = np.random.RandomState(seed)
    for _ in range(n):
        row = list(state.randint(low, high, size=length))
        a, b = state.choice(np.arange(low, high), 2, replace=False)
        ab = state.randint(20, length // 2)
        row[ab] = a
        row[ab + 1] = b
        others = [i for i in range(length) if row[i] == a and i != ab]
        for i in others:
            row[i] = state.randint(low, high)
        others = [i for i in range(length) if row[i] == b and i != ab + 1]
        for i in others:
            row[i] = state.randint(low, high)
        row[-1] = a
        yield row, a, b, ab


@pytest.mark.parametrize(("n", "length", "low", "high"), [(50, 256, 100, 10_000), (200, 64, 3, 40)])
def test_published_protocol_is_token_for_token(n, length, low, high):
    probe = induction_probe(n, length, 42, (low, high), protocol="published")
    for index, (row, _, b, ab) in enumerate(published_rows(n, length, 42, low, high)):
        assert probe.tokens[index].tolist() == [int(token) for token in row]
        assert probe.target[index] == b
        assert probe.targets["duplicate_token"][index, 0] == ab


def test_published_collisions_are_kept_counted_and_left_out():
    probe = induction_probe(400, 64, 42, (3, 24), protocol="published")
    collided = [(np.array(row[:-1]) == b).sum() > 1 for row, _, b, _ in published_rows(400, 64, 42, 3, 24)]
    assert sum(collided) > 0
    assert probe.params["collisions"]["second_token"] == sum(collided)
    for name in ("induction", "duplicate_token"):
        assert (probe.usable[name] == ~np.array(collided)).all()
    assert "first_token" not in probe.usable


@pytest.mark.parametrize(("length", "vocabulary"), [(256, None), (64, 64), (16, 40), (300, 50_304)])
def test_default_rows_have_one_pair_and_no_collision(length, vocabulary):
    probe = induction_probe(300, length, vocabulary=vocabulary)
    index = np.arange(300)
    a, b = probe.tokens[:, -1], probe.target
    ab = probe.targets["duplicate_token"][:, 0]
    assert (a != b).all()
    assert (probe.tokens[index, ab] == a).all() and (probe.tokens[index, ab + 1] == b).all()
    assert ((probe.tokens == a[:, None]).sum(1) == 2).all()
    assert ((probe.tokens == b[:, None]).sum(1) == 1).all()
    assert (probe.targets["induction"][:, 0] == ab + 1).all()
    assert ab.max() < length // 2 and ab.min() >= min(20, length // 4)
    assert not probe.usable


def test_target_positions_of_the_other_classes():
    probe = induction_probe(5, 100)
    assert (probe.query == 99).all()
    assert (probe.targets["previous_token"] == 98).all()
    assert (probe.targets["first_token"] == 0).all()
    assert (probe.targets["self"] == 99).all()
    assert sorted(probe.targets["local"][0]) == [94, 95, 96, 97]


def test_sampled_positions_follow_the_published_draws():
    state, seen = np.random.RandomState(0), []
    while len(seen) < 50:
        position = state.randint(1, 255)
        if position not in (0, 255, 254, 250, 251, 252, 253) and position not in seen:
            seen.append(position)
    assert sampled_positions(256).tolist() == seen


@pytest.mark.parametrize("vocabulary", [50_304, 50_688, 10_000])
def test_models_of_one_suite_see_the_same_ids(vocabulary):
    assert induction_probe(20, vocabulary=vocabulary).fingerprint == induction_probe(20).fingerprint


def test_special_ids_are_left_out():
    special = {*range(10), *range(50_254, 50_277)}
    probe = induction_probe(500, token_range=(0, 50_277), exclude=special, vocabulary=50_304)
    for tokens in (probe.tokens, *probe.companions.values()):
        assert not np.isin(tokens, list(special)).any()
    assert probe.tokens.max() < 50_277


def test_a_small_vocabulary_clamps_the_range_and_says_so():
    probe = induction_probe(50, 64, vocabulary=64)
    assert probe.tokens.max() < 64
    assert "clamped" in probe.params["notes"][0]


def test_too_small_a_vocabulary_names_the_needed_size():
    with pytest.raises(ProbeError, match=f"at least {MIN_VOCABULARY} token ids"):
        induction_probe(10, 64, vocabulary=20)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rows": 0}, "at least one row"),
        ({"length": 8}, "at least 16 tokens"),
        ({"length": 30, "protocol": "published"}, "at least 42 tokens"),
        ({"token_range": (50, 50)}, "empty or negative"),
        ({"token_range": (-5, 50)}, "empty or negative"),
        ({"protocol": "other"}, "unknown probe protocol"),
        ({"protocol": "published", "vocabulary": 5000}, "vocabulary has 5000"),
        ({"protocol": "published", "start_token": 0}, "no start token"),
    ],
)
def test_senseless_numbers_are_refused_in_one_sentence(options, said):
    with pytest.raises(ProbeError, match=said):
        induction_probe(**options)


def test_a_start_token_shifts_every_position_by_one():
    plain, started = induction_probe(30, 63), induction_probe(30, 64, start_token=0)
    assert (started.tokens[:, 0] == 0).all()
    assert (started.tokens[:, 1:] == plain.tokens).all()
    assert (started.targets["induction"] == plain.targets["induction"] + 1).all()
    assert (started.companions["null"][:, 0] == 0).all()
    assert (plain.tokens != 0).all()


def test_building_a_probe_touches_no_global_random_state():
    before = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()  # noqa: NPY002
    induction_probe(10)
    induction_probe(10, protocol="published").null_positions(5)
    assert random.getstate() == before[0]
    assert (np.random.get_state()[1] == before[1]).all()  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), before[2])


def test_companions_null_has_no_repeat_and_content_differs_at_the_target_alone():
    probe = induction_probe(200, 64, vocabulary=64)
    assert max(np.bincount(row).max() for row in probe.companions["null"]) == 1
    changed = probe.companions["content"] != probe.tokens
    assert (changed.sum(1) == 1).all()
    assert (changed.argmax(1) == probe.targets["induction"][:, 0]).all()
    assert (probe.companions["content"][np.arange(200), probe.targets["induction"][:, 0]] != probe.tokens[:, -1]).all()


def test_the_fingerprint_is_of_what_is_shown_and_asked():
    first = induction_probe(20)
    assert first.fingerprint == induction_probe(20).fingerprint
    assert first.fingerprint != induction_probe(20, seed=43).fingerprint
    assert first.fingerprint != first.take(slice(0, 10)).fingerprint


def test_null_positions_are_no_target_and_in_front_of_the_query():
    probe = induction_probe(100, 64)
    positions = probe.null_positions(30)
    for row in range(100):
        special = {int(p) for targets in probe.targets.values() for p in targets[row]}
        assert not special & set(positions[row].tolist())
        assert positions[row].max() < probe.query[row]
    assert len(np.unique(positions)) > 30


def test_a_batch_that_makes_no_sense_is_refused():
    tokens = np.zeros((2, 8), dtype=np.int64)
    targets = {"induction": np.array([[3], [7]])}
    with pytest.raises(ProbeError, match="between 0 and the row's query"):
        ProbeBatch("p", "induction", tokens, np.array([7, 5]), np.array([0, 0]), targets)
    with pytest.raises(ProbeError, match="its capability"):
        ProbeBatch("p", "key", tokens, np.array([7, 7]), np.array([0, 0]), targets)


def test_free_positions_of_some_rows_are_those_of_all() -> None:
    probe = induction_probe(20, 32, vocabulary=100)
    rows = np.array([3, 0, 17])
    assert (probe.free_positions(rows) == probe.free_positions()[rows]).all()
