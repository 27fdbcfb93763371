"""Stopped anywhere, resumed anywhere: training and record come out as if nothing had happened."""

from __future__ import annotations

import itertools
import json
import random
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

from spectral_monitor import LogSchedule, RunRecord, SpectralMonitorCallback
from spectral_monitor.attach.accelerate import watch
from spectral_monitor.errors import RecordError
from tests.attach import crash, tiny

SCHEDULED = crash.SCHEDULE.steps(crash.STEPS)


def final_weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / f"checkpoint-{crash.STEPS}" / "model.safetensors")


def numbers(record: RunRecord) -> list[Any]:
    """What the record says, without times."""
    return [
        (o.step, o.tokens, o.heads.pr.tolist(), o.heads.selectivity["induction"].tolist(), o.metrics.loss)
        for o in record.observations()
    ]


def assert_whole(out: Path, name: str = "record-0") -> RunRecord:
    """Every file of the record can be read, and nothing half-written is left."""
    assert not list((out / name).rglob("*.tmp"))
    for file in (out / name).rglob("*.json"):
        json.loads(file.read_text())
    for line in (out / name / "events.jsonl").read_text().splitlines():
        json.loads(line)
    record = RunRecord.open(out / name)
    assert record.steps() == SCHEDULED
    assert len(record.observations()) == len(SCHEDULED)
    return record


def said(record: RunRecord) -> list[str]:
    """Events as they were announced, without error notes."""
    return [event.key for event in record.events() if event.kind != "error"]


# -- killed -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole")
    crash.run(out)
    assert_whole(out)
    return out


def check_killed(whole: Path, out: Path, end: crash.Death, restore: bool = False) -> None:
    """A run that meets its ``end`` and is resumed comes out as the whole one."""
    assert crash.run(out, end, restore), f"the run came to its end before {end}"
    crash.run(out, restore=restore)
    assert tiny.difference(final_weights(whole), final_weights(out)) == []
    first, second = RunRecord.open(whole / "record-0"), assert_whole(out)
    assert numbers(first) == numbers(second)
    assert said(first) == said(second)
    assert [v.effect for v in first.verdicts()] == [v.effect for v in second.verdicts()]


def deaths(whole: Path, seed: int) -> Iterator[crash.Death]:
    """Moments of the whole run: at a file operation, or up to 20 ms after one."""
    chance = random.Random(seed)
    last = int((whole / "operations").read_text())
    while True:
        yield crash.Death(chance.randint(1, last - 20), chance.choice((0.0, chance.uniform(0.0, 0.02))))


def test_killed_and_resumed(whole: Path, tmp_path: Path) -> None:
    killed, terminated = itertools.islice(deaths(whole, seed=1), 2)
    check_killed(whole, tmp_path / "kill", killed)
    check_killed(whole, tmp_path / "term", replace(terminated, how=signal.SIGTERM), restore=True)


@pytest.mark.slow
def test_killed_at_twenty_random_moments_and_resumed(whole: Path, tmp_path: Path) -> None:
    for number, end in enumerate(itertools.islice(deaths(whole, seed=0), 20)):
        check_killed(whole, tmp_path / str(number), end, restore=number % 2 == 1)
        shutil.rmtree(tmp_path / str(number))


def test_a_checkpoint_whose_trainer_state_was_torn_is_passed_over(whole: Path, tmp_path: Path) -> None:
    crash.train(tmp_path, last=28)
    (tmp_path / "checkpoint-28" / "trainer_state.json").write_text("")
    crash.run(tmp_path)
    assert numbers(assert_whole(tmp_path)) == numbers(RunRecord.open(whole / "record-0"))


def test_killed_between_two_events_of_a_look(whole: Path, tmp_path: Path) -> None:
    """However many of a look's events were written, all are there in the end: also those that the run had announced
    long before its checkpoint, and that are true again."""
    crash.train(tmp_path / "cut", last=23)
    lines = (tmp_path / "cut" / "record-0" / "events.jsonl").read_text().splitlines(keepends=True)
    of_the_look = [line for line in lines if json.loads(line)["step"] == 23]
    assert len(of_the_look) > 1 and lines[-1] == of_the_look[-1]
    for lost in range(1, len(of_the_look) + 1):
        out = tmp_path / str(lost)
        shutil.copytree(tmp_path / "cut", out)
        (out / "record-0" / "events.jsonl").write_text("".join(lines[:-lost]))
        crash.train(out)
        assert said(assert_whole(out)) == said(RunRecord.open(whole / "record-0"))


# -- stopped and resumed within one process ---------------------------------------------------------------------------


@pytest.mark.parametrize("restore", [False, True], ids=["states left", "states restored"])
def test_callback_state_option_on_and_off(restore: bool, whole: Path, tmp_path: Path) -> None:
    crash.train(tmp_path, last=32, restore=restore)
    crash.train(tmp_path, restore=restore)
    assert tiny.difference(final_weights(whole), final_weights(tmp_path)) == []
    record = assert_whole(tmp_path)
    assert numbers(record) == numbers(RunRecord.open(whole / "record-0"))
    assert said(record) == said(RunRecord.open(whole / "record-0"))


def test_steps_that_are_done_again_are_marked(whole: Path, tmp_path: Path) -> None:
    crash.train(tmp_path, last=32)
    for step in (28, 32):
        shutil.rmtree(tmp_path / f"checkpoint-{step}", ignore_errors=True)
    crash.train(tmp_path)
    record = assert_whole(tmp_path)
    attempts = {observation.step: observation.attempt for observation in record.observations()}
    assert attempts[16] == 1 and attempts[23] == 2 and attempts[32] == 2 and attempts[45] == 1
    assert numbers(record) == numbers(RunRecord.open(whole / "record-0"))
    assert said(record) == said(RunRecord.open(whole / "record-0"))


@pytest.mark.parametrize("restore", [False, True], ids=["states left", "states restored"])
def test_monitor_added_and_removed_in_the_middle(restore: bool, whole: Path, tmp_path: Path) -> None:
    crash.train(tmp_path, watched=False, last=15, restore=restore)
    crash.train(tmp_path, last=30, restore=restore)
    crash.train(tmp_path, watched=False, last=42, restore=restore)
    crash.train(tmp_path, restore=restore)
    assert tiny.difference(final_weights(whole), final_weights(tmp_path)) == []
    steps = RunRecord.open(tmp_path / "record-0").steps()
    assert set(steps) >= {16, 23, 45, 60} and min(steps) >= 15
    assert not set(steps) & set(range(31, 42))


def test_two_monitors_with_different_probes_in_one_run(whole: Path, tmp_path: Path) -> None:
    crash.train(tmp_path, monitors=2, last=32)
    crash.train(tmp_path, monitors=2)
    assert tiny.difference(final_weights(whole), final_weights(tmp_path)) == []
    first, second = assert_whole(tmp_path, "record-0"), assert_whole(tmp_path, "record-1")
    assert numbers(first) == numbers(RunRecord.open(whole / "record-0"))
    assert numbers(first) != numbers(second)
    files = {path.name for path in (tmp_path / "checkpoint-28").iterdir()}
    assert {"record-0.json", "record-1.json"} <= files


def test_a_lost_state_in_the_checkpoint_is_replaced_by_the_records_own(whole: Path, tmp_path: Path) -> None:
    crash.train(tmp_path, last=28)
    (tmp_path / "checkpoint-28" / "record-0.json").write_text('{"torn')
    crash.train(tmp_path)
    expected = numbers(RunRecord.open(whole / "record-0"))
    assert [entry for entry in numbers(RunRecord.open(tmp_path / "record-0")) if entry[0] != 28] == expected


def test_the_same_callback_trains_twice(tmp_path: Path) -> None:
    watched = SpectralMonitorCallback(tiny.monitor(tmp_path / "record"), trackers=False)
    for _ in range(2):
        tiny.trainer(tmp_path, callbacks=[watched], max_steps=4).train()
    assert RunRecord.open(tmp_path / "record").steps() == [0, 1, 2, 3, 4]
    assert RunRecord.open(tmp_path / "record-1").steps() == [0, 1, 2, 3, 4]


def test_a_new_run_does_not_set_aside_a_record_that_is_being_written(tmp_path: Path) -> None:
    other = tiny.monitor(tmp_path / "record")
    other.observe(tiny.gpt2(), 0, 0.0)
    watched = SpectralMonitorCallback(tiny.monitor(tmp_path / "record"), trackers=False)
    with pytest.raises(RecordError, match="is being written by another process"):
        tiny.trainer(tmp_path, callbacks=[watched], max_steps=2).train()
    other.observe(tiny.gpt2(), 1, 1.0)
    assert RunRecord.open(tmp_path / "record").steps() == [0, 1]


# -- Accelerate -------------------------------------------------------------------------------------------------------


def accelerate_run(
    out: Path, *, last: int = 20, resume: str | None = None, way: str | None = "watch", accumulation: int = 2
) -> tuple[dict[str, torch.Tensor], Any]:
    """A user's loop: bf16 autocast, gradient accumulation, a checkpoint every five updates."""
    torch.manual_seed(5)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=accumulation)
    model = tiny.gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.stack([row["input_ids"] for row in tiny.rows(256)])
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=False)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    options: dict[str, Any] = {
        "probes": tiny.probe(rows=4),
        "schedule": LogSchedule(last_step=20),
        "thresholds": tiny.EASY,
        "max_overhead": None,
        "on_error": "raise",
    }
    monitor = None
    if way == "watch":
        monitor = watch(accelerator, out / "record", **options)
    elif way == "registered":
        monitor = tiny.SpectralMonitor(out / "record", **options)
        accelerator.register_for_checkpointing(monitor)
    step = 0
    if resume is not None:
        accelerator.load_state(resume)
        step = int(resume.rpartition("-")[2])
    elif monitor is not None:
        monitor.step(model, 0, 0.0)
    start = step * accumulation
    for number, batch in enumerate(loader):
        if number < start:
            continue
        if number == start:  # a new iterator draws from the random stream: dropout begins anew from here
            torch.manual_seed(100 + step)
        with accelerator.accumulate(model), accelerator.autocast():
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:
                step += 1
                if monitor is not None:
                    monitor.step(model, step, float(step * accumulation * 64))
        if accelerator.sync_gradients and step % 5 == 0:
            accelerator.save_state(str(out / f"step-{step}"))
            torch.manual_seed(100 + step)
        if step >= last:
            break
    if monitor is not None:
        monitor.close()
    return tiny.weights(accelerator.unwrap_model(model)), tiny.random_states()


@pytest.fixture
def fresh_accelerate() -> Any:
    """Accelerate keeps one state a process; the Trainers of the other tests made theirs."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.usefixtures("fresh_accelerate")
@pytest.mark.parametrize("way", ["watch", "registered"])
def test_a_bare_accelerate_loop_is_bit_identical_and_resumes(way: str, tmp_path: Path) -> None:
    plain = accelerate_run(tmp_path / "plain", way=None)
    watched = accelerate_run(tmp_path / "whole", way=way)
    assert tiny.difference(plain, watched) == []
    accelerate_run(tmp_path / "run", way=way, last=13)
    resumed = accelerate_run(tmp_path / "run", way=way, resume=str(tmp_path / "run" / "step-10"))
    assert tiny.difference(plain, resumed) == []
    first, second = RunRecord.open(tmp_path / "whole" / "record"), RunRecord.open(tmp_path / "run" / "record")
    assert first.steps() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 13, 16, 19, 20]
    assert numbers(first) == numbers(second)
    assert said(first) == said(second)
    attempts = {observation.step: observation.attempt for observation in second.observations()}
    assert (attempts[10], attempts[11], attempts[13], attempts[16]) == (1, 2, 2, 1)


@pytest.mark.usefixtures("fresh_accelerate")
def test_watch_can_be_added_and_left_out_at_any_accelerate_checkpoint(tmp_path: Path) -> None:
    plain = accelerate_run(tmp_path / "plain", way=None)
    accelerate_run(tmp_path / "run", way=None, last=5)
    accelerate_run(tmp_path / "run", way="watch", last=10, resume=str(tmp_path / "run" / "step-5"))
    accelerate_run(tmp_path / "run", way=None, last=15, resume=str(tmp_path / "run" / "step-10"))
    last = accelerate_run(tmp_path / "run", way="watch", resume=str(tmp_path / "run" / "step-15"))
    assert tiny.difference(plain, last) == []
    assert RunRecord.open(tmp_path / "run" / "record").steps() == [6, 7, 8, 10, 16, 19, 20]
