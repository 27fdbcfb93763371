"""Comparison of contents, as pure functions of hashes."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st

from spectral_monitor.replay.integrity import (
    Contents,
    TensorRecord,
    compare,
    compare_tensors,
    file_hashes,
    tensor_hashes,
)

from .models import tiny_model


def one(name: str, step: int | None, *shards: str) -> Contents:
    return Contents(name, step, {f"model-{index}": shard for index, shard in enumerate(shards)})


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_each_distinct_content_is_measured_once(contents: list[int]) -> None:
    items = [one(f"step{index * 10}", index * 10, str(content)) for index, content in enumerate(contents)]
    found = compare(items).findings
    measured = [item for item in items if found[item.name].kind == "fine"]
    assert sorted(item.shards["model-0"] for item in measured) == sorted({str(content) for content in contents})
    for item in items:
        alone = contents.count(int(item.shards["model-0"])) == 1
        assert (found[item.name].mark is None) == alone
        same_as = found[item.name].same_as
        assert same_as is None or found[same_as].kind == "fine"


def test_the_final_model_is_trusted_where_main_agrees() -> None:
    items = [one("step0", 0, "f"), one("step1000", 1000, "a"), one("step2000", 2000, "f"), one("main", None, "f")]
    found = compare(items)
    assert found.findings["step0"].kind == "duplicate"
    assert found.findings["step2000"].mark is None
    assert found.lowest_trusted(items) == 1000


def test_main_equal_to_the_last_step_alone_is_no_finding() -> None:
    found = compare([one("step1", 1, "a"), one("step2", 2, "b"), one("main", None, "b")])
    assert found.groups == ()
    assert all(item.kind == "fine" and item.mark is None for item in found.findings.values())


def test_of_unselected_members_none_is_measured_twice() -> None:
    items = [one("step0", 0, "f"), one("step5", 5, "f"), one("step9", 9, "f"), one("main", None, "f")]
    found = compare(items, frozenset({"step0", "step5"})).findings
    assert (found["step0"].same_as, found["step5"].kind) == ("step5", "fine")
    assert found["step5"].mark is not None


def test_a_shared_shard_makes_a_mixture() -> None:
    items = [
        one("step1", 1, "a", "b"),
        one("step5", 5, "x", "d"),
        one("step9", 9, "x", "f"),
        one("main", None, "x", "f"),
    ]
    found = compare(items).findings
    assert (found["step5"].kind, found["step5"].same_as) == ("mixed", "step9")
    assert found["step9"].kind == "fine"
    assert found["step1"].kind == "fine"
    without_main = compare(items[:3]).findings
    assert {without_main["step5"].kind, without_main["step9"].kind} == {"mixed"}


def test_files_are_told_apart_by_content(tmp_path: Path) -> None:
    big = os.urandom(3_000_000)
    other = bytearray(big)
    other[1_234_567] ^= 1  # between the sampled places: only a whole reading tells
    (tmp_path / "a").write_bytes(big)
    (tmp_path / "b").write_bytes(big)
    (tmp_path / "c").write_bytes(bytes(other))
    (tmp_path / "d").write_bytes(big[:-1])
    os.link(tmp_path / "a", tmp_path / "e")
    hashes = file_hashes([tmp_path / name for name in "abcde"])
    assert hashes[tmp_path / "a"] == hashes[tmp_path / "b"] == hashes[tmp_path / "e"]
    assert len({hashes[tmp_path / name] for name in "acd"}) == 3


def test_tensor_hashes_see_one_bit_and_leave_out_what_says_nothing() -> None:
    model = tiny_model(0)
    before = tensor_hashes(model)
    assert before == tensor_hashes(tiny_model(0))
    assert not any("norm" in name or name.endswith("bias") for name in before)
    name = next(iter(before))
    with torch.no_grad():
        model.get_parameter(name).view(-1)[3] += 1e-6
    after = tensor_hashes(model)
    assert {key for key in before if before[key] != after[key]} == {name}


def test_tensors_of_another_step_and_frozen_ones() -> None:
    records = [TensorRecord("step1", 1, {"e": "0", "w": "1"}), TensorRecord("step2", 2, {"e": "0", "w": "2"})]
    assert compare_tensors("step3", 3, {"e": "0", "w": "3"}, records).kind == "fine", "frozen in all: no evidence"
    mixed = compare_tensors(
        "step3", 3, {"e": "0", "w": "1", "v": "3"}, [*records, TensorRecord("step9", 9, {"e": "5", "w": "9"})]
    )
    assert mixed.kind == "mixed"
    copy = compare_tensors("step3", 3, {"e": "0", "w": "2"}, records)
    assert (copy.kind, copy.same_as) == ("duplicate", "step2")
    assert compare_tensors("step1", 1, {"w": "1"}, [TensorRecord("step0", 0, {"w": "1"})]).mark is None
