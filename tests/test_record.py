"""The record on disk: whole after any interruption, one writer, readable by ordinary tools."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from spectral_monitor import Event, Observation, RunRecord
from spectral_monitor.errors import RecordError
from spectral_monitor.record import dumps, set_aside
from tests.attach import tiny

RUN: dict[str, Any] = {"probes": {"induction": {"fingerprint": "abc"}}}


@pytest.fixture(scope="module")
def seen() -> Observation:
    return tiny.monitor(None, check=None).observe(tiny.gpt2(), 3, 30.0).observations[0]


def test_an_observation_comes_back_as_it_was_written(seen: Observation, tmp_path: Path) -> None:
    with RunRecord.create(tmp_path / "run", RUN) as record:
        written = record.append(replace(seen, mark="why", label="step3", tokens_estimated=True))
    read = RunRecord.open(tmp_path / "run").observations()[0]
    for name in ("pr", "pr_moment", "sink", "layer", "head", "head_class", "status"):
        assert np.array_equal(getattr(read.heads, name), getattr(written.heads, name)), name
    for name in ("attention", "baselines", "selectivity", "reach", "extra"):
        ours, theirs = getattr(written.heads, name), getattr(read.heads, name)
        assert ours.keys() == theirs.keys()
        assert all(np.array_equal(ours[key], theirs[key], equal_nan=True) for key in ours), name
    assert replace(read, heads=seen.heads) == replace(written, heads=seen.heads)


def test_parquet_readers_open_it_as_it_is(seen: Observation, tmp_path: Path) -> None:
    with RunRecord.create(tmp_path / "run", RUN) as record:
        record.append(seen)
        record.append(replace(seen, step=4))
    table = pq.read_table(tmp_path / "run" / "observations")
    assert table.num_rows == 16 and {"step", "layer", "head", "pr", "selectivity_induction"} <= set(table.column_names)


def test_a_step_that_is_done_again_replaces_and_is_counted(seen: Observation, tmp_path: Path) -> None:
    with RunRecord.create(tmp_path / "run", RUN) as record:
        for step in (1, 2, 4, 8):
            record.append(replace(seen, step=step))
        assert record.rewind(2) == 2
        assert record.steps() == [1, 2]
        attempts = [record.append(replace(seen, step=step)).attempt for step in (4, 8, 16, 8)]
    assert attempts == [2, 2, 1, 3]
    assert RunRecord.open(tmp_path / "run").steps() == [1, 2, 4, 8, 16]
    assert len(list((tmp_path / "run" / "superseded").iterdir())) == 3


@pytest.mark.parametrize("left", ["temporaries", "lock only", "torn event", "no folders"])
def test_what_a_killed_process_left_is_no_obstacle(left: str, seen: Observation, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with RunRecord.create(run, RUN) as record:
        record.append(seen)
        record.add_event(Event("note", 3, 30.0, text="whole"))
    expected = [3]
    if left == "temporaries":
        (run / ".state.json.1234.tmp").write_text('{"half')
        (run / "observations" / ".step-000000004.induction.parquet.1234.tmp").write_bytes(b"PAR1")
    elif left == "lock only":
        for file in sorted(run.rglob("*"), reverse=True):
            if file.name != ".lock":
                file.rmdir() if file.is_dir() else file.unlink()
        (run / ".run.json.1234.tmp").write_text('{"format": 1')
        expected = []
    elif left == "torn event":
        with open(run / "events.jsonl", "a") as file:
            file.write('{"kind": "note", "st')
    elif left == "no folders":
        (run / "verdicts").rmdir()
    with RunRecord.create(run, RUN) as record:
        assert record.steps() == expected
        record.append(replace(seen, step=5))
        record.add_event(Event("note", 5, 50.0, text="after"))
    assert not list(run.rglob("*.tmp"))
    again = RunRecord.open(run)
    assert again.steps() == [*expected, 5]
    assert [event.text for event in again.events()][-1] == "after"
    assert "half" not in (run / "events.jsonl").read_text()
    for line in (run / "events.jsonl").read_text().splitlines():
        json.loads(line)


def test_a_write_that_fails_leaves_the_old_file(
    seen: Observation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RunRecord.create(tmp_path / "run", RUN) as record:
        record.save_state({"last_step": 1})

        def full(*arguments: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            record.save_state({"last_step": 2})
        with pytest.raises(OSError, match="No space"):
            record.append(seen)
        monkeypatch.undo()
        assert record.load_state() == {"last_step": 1} and record.steps() == []
        assert not list((tmp_path / "run").rglob("*.tmp"))


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    first = RunRecord.create(tmp_path / "run", RUN)
    with pytest.raises(RecordError, match="is being written by another process"):
        RunRecord.create(tmp_path / "run", RUN)
    with pytest.raises(RecordError, match="is being written by another process"):
        set_aside(tmp_path / "run")
    RunRecord.open(tmp_path / "run")
    first.close()
    with pytest.raises(RecordError, match="for reading only"):
        first.update_run({})
    RunRecord.create(tmp_path / "run", RUN).close()


def test_set_aside_keeps_every_earlier_record(tmp_path: Path) -> None:
    assert set_aside(tmp_path / "run") is None
    for number in (1, 2):
        RunRecord.create(tmp_path / "run", RUN).close()
        assert set_aside(tmp_path / "run") == tmp_path / f"run-{number}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run-1", "run-2"]


def test_what_is_no_record_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="no run directory at"):
        RunRecord.open(tmp_path / "none")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(RecordError, match=r"it has no run\.json"):
        RunRecord.open(tmp_path / "mine")
    with pytest.raises(RecordError, match=r"holds other files and no run\.json"):
        RunRecord.create(tmp_path / "mine", RUN)
    assert [path.name for path in (tmp_path / "mine").iterdir() if path.name != ".lock"] == ["thesis.txt"]
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "run.json").write_text('{"format": 99}')
    with pytest.raises(RecordError, match="is a record of format 99"):
        RunRecord.open(tmp_path / "new")
    (tmp_path / "new" / "run.json").write_text("{torn")
    with pytest.raises(RecordError, match="cannot be read as a run record"):
        RunRecord.open(tmp_path / "new")


def test_another_probe_is_refused_and_a_further_one_is_added(tmp_path: Path) -> None:
    RunRecord.create(tmp_path / "run", RUN).close()
    with pytest.raises(RecordError, match="belongs to another probe"):
        RunRecord.create(tmp_path / "run", {"probes": {"induction": {"fingerprint": "xyz"}}})
    RunRecord.create(tmp_path / "run", {"probes": {"keys": {"fingerprint": "k"}}}).close()
    assert set(RunRecord.open(tmp_path / "run").probes) == {"induction", "keys"}


def test_one_event_told_twice_counts_once(tmp_path: Path) -> None:
    with RunRecord.create(tmp_path / "run", RUN) as record:
        for time in (1.0, 2.0):
            record.add_event(Event("pr_rise", 4, 40.0, probe="induction", heads=("L0H1",), time=time))
        assert [event.time for event in record.events()] == [1.0]


def test_two_notes_of_one_step_are_two(tmp_path: Path) -> None:
    record = RunRecord.create(tmp_path / "record", {})
    for text in ("the weights are those of step 4", "bf16", "bf16"):
        record.add_event(Event("note", 8, 512.0, "induction", text=text))
    assert [event.text for event in record.events()] == ["the weights are those of step 4", "bf16"]


def test_json_never_holds_a_bare_nan() -> None:
    text = dumps({"a": float("nan"), "b": [np.float64("inf")], "c": np.array([1.0, np.nan])}, indent=None)
    assert json.loads(text) == {"a": None, "b": [None], "c": [1.0, None]} and "NaN" not in text
