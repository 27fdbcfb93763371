"""Stopped anywhere, resumed anywhere: training and record come out as if nothing had happened."""

from __future__ import annotations

import json
import random
import shutil
import signal
import sys
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
    assert not crash.run(out)
    assert_whole(out)
    return out


def check_killed(whole: Path, out: Path, moment: float, how: int, restore: bool = False) -> bool:
    """Kill a run at ``moment`` (a share of its CPU time), resume it, compare; True if the kill came in time."""
    cut = crash.run(out, moment * float((whole / "seconds").read_text()), how, restore)
    assert not cut or not crash.run(out, restore=restore)
    assert tiny.difference(final_weights(whole), final_weights(out)) == []
    first, second = RunRecord.open(whole / "record-0"), assert_whole(out)
    assert numbers(first) == numbers(second)
    assert said(first) == said(second)
    assert [v.effect for v in first.verdicts()] == [v.effect for v in second.verdicts()]
    return cut


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc to kill at a given CPU time")
def test_killed_and_resumed(whole: Path, tmp_path: Path) -> None:
    moments = random.Random(1)
    cuts = [
        check_killed(whole, tmp_path / "kill", moments.uniform(0.3, 0.95), signal.SIGKILL),
        check_killed(whole, tmp_path / "term", moments.uniform(0.3, 0.95), signal.SIGTERM, restore=True),
    ]
    assert any(cuts)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc to kill at a given CPU time")
def test_killed_at_twenty_random_moments_and_resumed(whole: Path, tmp_path: Path) -> None:
    moments = random.Random(0)
    cuts = 0
    for number in range(20):
        out = tmp_path / str(number)
        cuts += check_killed(whole, out, moments.uniform(0.05, 1.0), signal.SIGKILL, restore=number % 2 == 1)
        shutil.rmtree(out)
    assert cuts >= 10


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
