"""The engine: what it does when things go wrong, and what it says of itself."""

from __future__ import annotations

import json
import logging
import math
import resource
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from spectral_monitor import LogSchedule, RunRecord, SpectralMonitor, WarningParameters, capture
from spectral_monitor.errors import ProbeError, RecordError, SpectralMonitorError
from spectral_monitor.publish.guarded import guarded
from spectral_monitor.warning import Crossing
from tests.attach import tiny


def quiet(run_dir: Path | None, **options: Any) -> Any:
    """A monitor as a training run has it: errors are logged."""
    return tiny.monitor(run_dir, **{"on_error": "log", "check": None, **options})


# -- out of memory ----------------------------------------------------------------------------------------------------


def starve(monkeypatch: pytest.MonkeyPatch, rows: int) -> list[int]:
    """Forward passes of more than ``rows`` rows find no memory; the sizes that were tried."""
    tried: list[int] = []
    original = capture.Subject.logits

    def logits(self: Any, tokens: torch.Tensor, *arguments: Any) -> torch.Tensor:
        tried.append(len(tokens))
        if len(tokens) > rows:
            raise torch.OutOfMemoryError("no memory")
        return original(self, tokens, *arguments)

    monkeypatch.setattr(capture.Subject, "logits", logits)
    return tried


def test_out_of_memory_halves_the_micro_batch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, probe = tiny.gpt2(), tiny.probe(rows=16)
    expected = quiet(None, probes=probe, batch_size=16).observe(model, 0, 0.0).observations[0]
    tried = starve(monkeypatch, 5)
    monitor = quiet(None, probes=probe, batch_size=16)
    seen = monitor.observe(model, 0, 0.0).observations[0]
    assert max(tried) == 16 and monitor.batch_size == 4
    assert seen.heads.pr == pytest.approx(expected.heads.pr, rel=1e-5)
    assert seen.heads.attention["induction"] == pytest.approx(expected.heads.attention["induction"], rel=1e-5)
    assert "out of memory in a probe; going on with 8 rows" in caplog.text
    assert "out of memory in a probe; going on with 4 rows" in caplog.text


def test_out_of_memory_down_to_one_row_skips_the_look_and_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, monitor = tiny.gpt2(), quiet(tmp_path / "run", batch_size=4)
    assert monitor.step(model, 0, 0.0) is not None
    with monkeypatch.context() as patched:
        starve(patched, 0)
        assert monitor.step(model, 1, 1.0) is None
    assert monitor.step(model, 2, 2.0) is not None
    record = RunRecord.open(tmp_path / "run")
    assert record.steps() == [0, 2]
    assert [(event.kind, event.step) for event in record.events() if event.kind == "error"] == [("error", 1)]
    assert monitor.summary()["failures"] == {"observation": 1}


# -- numbers that are none --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_broken_weights_are_marked_and_raise_no_alarm(value: float, tmp_path: Path) -> None:
    model = tiny.gpt2(layers=3)
    monitor = tiny.monitor(tmp_path / "run", check=None, warning=WarningParameters(crossing=Crossing(1.0, 1e-9, 1.0)))
    monitor.observe(model, 0, 0.0)
    before = monitor.summary()["circuits"]
    with torch.no_grad():
        model.transformer.h[1].attn.c_attn.weight[0, 0] = value
    look = monitor.observe(model, 1, 10.0)
    observation = look.observations[0]
    assert not observation.finite
    assert set(observation.heads.status[observation.heads.layer == 0]) == {"ok"}
    assert set(observation.heads.status[observation.heads.layer == 2]) == {"not_finite"}
    assert look.events == () and look.verdicts == ()
    assert monitor.summary()["circuits"] == before
    stored = RunRecord.open(tmp_path / "run").observations()[-1]
    assert not stored.finite
    for file in (tmp_path / "run").rglob("*.json"):
        json.loads(file.read_text(), parse_constant=lambda name: pytest.fail(f"a bare {name} is no JSON"))


# -- disks and publishers ---------------------------------------------------------------------------------------------


def test_a_full_disk_costs_the_record_and_not_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, monitor = tiny.gpt2(), quiet(tmp_path / "run")
    assert monitor.step(model, 0, 0.0) is not None
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))  # a real error of the operating system
    try:
        look = monitor.step(model, 1, 1.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert look is not None and monitor.summary()["failures"].keys() == {"record"}
    assert monitor.step(model, 2, 2.0) is not None
    assert not list((tmp_path / "run").rglob("*.tmp"))
    record = RunRecord.open(tmp_path / "run")
    assert record.steps() == [0, 2] and len(record.observations()) == 2
    assert "record failed" in caplog.text


def test_a_run_directory_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match="cannot be written"):
        tiny.monitor(tmp_path / "file" / "run").prepare(tiny.gpt2())


def test_the_second_process_is_refused(tmp_path: Path) -> None:
    first = tiny.monitor(tmp_path / "run")
    first.observe(tiny.gpt2(), 0, 0.0)
    with pytest.raises(RecordError, match="is being written by another process"):
        tiny.monitor(tmp_path / "run").observe(tiny.gpt2(), 0, 0.0)
    first.close()
    tiny.monitor(tmp_path / "run").observe(tiny.gpt2(), 1, 1.0)


class Trouble:
    """A publisher that raises, or hangs, whatever it is told."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    def __getattr__(self, name: str) -> Any:
        if name not in ("start", "observation", "event", "verdict", "close"):
            raise AttributeError(name)

        def call(*arguments: Any) -> None:
            time.sleep(self.seconds)
            raise BrokenPipeError(f"{name} failed")

        return call


def test_publishers_that_raise_are_counted_and_the_record_is_complete(tmp_path: Path) -> None:
    model, monitor = tiny.gpt2(), quiet(tmp_path / "run", publishers=[Trouble()])
    for step in range(3):
        assert monitor.step(model, step, float(step)) is not None
    summary = monitor.close()
    assert summary["failures"]["Trouble.observation"] == 3
    assert RunRecord.open(tmp_path / "run").steps() == [0, 1, 2]


def test_a_publisher_that_hangs_is_left_alone_after_its_limit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hanging = guarded([Trouble(seconds=0.5)], limit=0.01)
    for each in hanging:
        each.close_limit = 0.01
    model, monitor = tiny.gpt2(), quiet(tmp_path / "run", publishers=hanging)
    for step in range(6):
        monitor.step(model, step, float(step))
    monitor.close()
    assert RunRecord.open(tmp_path / "run").steps() == [0, 1, 2, 3, 4, 5]
    assert "the training goes on" in caplog.text and hanging[0].overruns


def test_a_failed_causal_check_does_not_cost_the_observation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*arguments: Any, **named: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(capture.Subject, "run_conditions", fail)
    monitor = quiet(tmp_path / "run", kind=tiny.Forced, check=tiny.DRAWS)
    assert monitor.step(tiny.gpt2(), 0, 0.0) is not None
    assert monitor.summary()["failures"] == {"causal check": 1}
    assert RunRecord.open(tmp_path / "run").steps() == [0]


# -- mistakes of the user's -------------------------------------------------------------------------------------------


def test_a_probe_that_does_not_fit_says_so_before_the_run(tmp_path: Path) -> None:
    from spectral_monitor import induction_probe

    wide = induction_probe(rows=4, length=tiny.LENGTH, vocabulary=200, token_range=(0, 200))
    long = induction_probe(rows=4, length=2 * tiny.LENGTH, vocabulary=tiny.VOCABULARY, token_range=(0, tiny.VOCABULARY))
    for probe, said in ((wide, "token id"), (long, "takes at most")):
        with pytest.raises(ProbeError, match=said):
            tiny.monitor(tmp_path / "run", probes=probe).prepare(tiny.gpt2())
        assert not (tmp_path / "run").exists()


def test_a_record_of_another_probe_is_refused(tmp_path: Path) -> None:
    first = tiny.monitor(tmp_path / "run")
    first.observe(tiny.gpt2(), 0, 0.0)
    first.close()
    with pytest.raises(RecordError, match="belongs to another probe"):
        tiny.monitor(tmp_path / "run", probes=tiny.probe(seed=1)).prepare(tiny.gpt2())
    assert RunRecord.open(tmp_path / "run").steps() == [0]


def test_what_cannot_be_read_is_said_once_and_the_run_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    monitor = quiet(None)
    for step in range(3):
        assert monitor.step(torch.nn.Linear(4, 4), step, 0.0) is None
    assert monitor.summary()["failures"] == {"observation": 3}
    assert len([r for r in caplog.records if r.levelno == logging.WARNING]) == 1
    with pytest.raises((SpectralMonitorError, TypeError)):
        tiny.monitor(None).step(torch.nn.Linear(4, 4), 0, 0.0)


# -- the budget -------------------------------------------------------------------------------------------------------


def run_on_a_clock(
    monkeypatch: pytest.MonkeyPatch, seconds_a_step: float, seconds_a_look: float, steps: int, **options: Any
) -> SpectralMonitor:
    """A run on a made-up clock: what is dropped must not depend on how fast this machine is."""
    from spectral_monitor import monitor as module

    now = 0.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    model = tiny.gpt2()
    original = SpectralMonitor._look

    def look(self: Any, *arguments: Any) -> Any:
        nonlocal now
        result = original(self, *arguments)
        now += seconds_a_look
        return result

    monkeypatch.setattr(SpectralMonitor, "_look", look)
    watched = quiet(None, schedule=LogSchedule(last_step=steps), null_draws=0, companions=(), **options)
    for step in range(steps + 1):
        watched.step(model, step, float(step))
        now += seconds_a_step
    return watched


def test_optional_looks_are_dropped_to_keep_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monitor = run_on_a_clock(monkeypatch, 1.0, 1.0, 200, max_overhead=0.05)
    every = LogSchedule(last_step=200).steps(200)
    required = [step for step in every if LogSchedule(last_step=200).is_required(step)]
    looked = sorted(set(every) - set(monitor.skipped))
    assert set(required) <= set(looked) and 0 < len(monitor.skipped) < len(every)
    assert monitor.seconds / 201 <= 0.055
    assert monitor.summary()["skipped_steps"] == monitor.skipped


def test_no_look_is_dropped_while_the_budget_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monitor = run_on_a_clock(monkeypatch, 1.0, 0.01, 100, max_overhead=0.01)
    assert monitor.skipped == []


def test_required_looks_stay_however_dear_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monitor = run_on_a_clock(monkeypatch, 1.0, 100.0, 64, max_overhead=0.01)
    assert monitor.summary()["share"] > 0.5
    every = LogSchedule(last_step=64)
    assert not [step for step in monitor.skipped if every.is_required(step)]
    assert monitor.last_step == 64


def test_seconds_and_share_are_in_every_observation(tmp_path: Path) -> None:
    model, monitor = tiny.gpt2(), tiny.monitor(tmp_path / "run")
    for step in range(3):
        monitor.step(model, step, float(step))
    for observation in RunRecord.open(tmp_path / "run").observations():
        assert observation.seconds > 0 and 0 < observation.share <= 1
