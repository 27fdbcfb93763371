"""The cases of shared/cases.md under "Weights & Biases": a fake with wandb's step rules, and real offline files."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spectral_monitor.publish import names
from spectral_monitor.publish.alerts import AlertBox
from spectral_monitor.publish.wandb import WandbPublisher

from . import factories as make
from .offline import OfflineRun, offline_environment

PROBES = (0, 1, 2, 4, 8, 16)


class RunWithSummary(make.StrictRun):
    """Keeps the summary as wandb does: each row, and each update, covers what was there."""

    def __init__(self) -> None:
        super().__init__()
        self.summary: dict[str, Any] = {}

    def _flush(self) -> None:
        self.summary.update(self._pending)
        super()._flush()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> RunWithSummary:
    run = RunWithSummary()
    for name, module in make.fake_wandb_modules(run).items():
        monkeypatch.setitem(sys.modules, name, module)
    return run


def points(run: make.StrictRun, key: str, axis: str) -> list[tuple[float, float]]:
    return [(row[axis], row[key]) for row in run.rows if key in row]


# -- no point is lost, no axis moves --------------------------------------------------------------------------------


def test_trainer_rows_carry_the_trainers_axis(run: make.StrictRun) -> None:
    """Case 1: the Trainer logs every 5 steps, probes at 1, 2, 4, 8, 16."""
    run.config.update({"report_to": ["wandb"]})
    publisher = WandbPublisher()
    publisher.start({})
    for step in range(21):
        if step in PROBES:
            publisher.observation(make.observation(step))
        if step and step % 5 == 0:
            run.log({"train/loss": 1 / step, "train/global_step": step})
    publisher.close({})
    assert not run.drops
    assert all(call["step"] is None for call in run.calls)
    assert points(run, "train/loss", "train/global_step") == [(s, 1 / s) for s in (5, 10, 15, 20)]
    seen = points(run, names.metric("probe_top1"), "train/global_step")
    assert [step for step, _ in seen] == list(PROBES)
    assert not run.defined, "the Trainer's own glob is the only definition: overlapping ones resolve at random"


@pytest.mark.parametrize("first", ["user", "monitor"])
@pytest.mark.parametrize("every", [1, 2, 5])
def test_a_loop_that_logs_with_a_step(run: make.StrictRun, first: str, every: int) -> None:
    """Case 2: the user passes step= after each update, twice a step at times."""
    publisher = WandbPublisher()
    publisher.start({})
    for step in range(1, 21):
        if first == "monitor" and step in PROBES:
            publisher.observation(make.observation(step))
        if step % every == 0:
            run.log({"loss": 1 / step}, step=step)
        if first == "user" and step in PROBES:
            publisher.observation(make.observation(step))
            publisher.verdict(make.verdict(step))
        if step % every == 0:
            run.log({"accuracy": step}, step=step)
    publisher.close({})
    run.log({"final": 1}, step=20)
    run.finish()
    assert not run.drops
    wanted = [step for step in range(1, 21) if step % every == 0]
    assert points(run, "loss", "_step") == [(step, 1 / step) for step in wanted]
    assert points(run, "accuracy", "_step") == [(step, step) for step in wanted]
    assert points(run, "final", "_step") == [(20, 1)]
    shown = sorted(points(run, names.metric("probe_top1"), names.STEP))
    assert [step for step, _ in shown] == [step for step in PROBES if step]
    assert run.defined[names.metric("probe_top1")] == {"step_metric": names.STEP}


@pytest.mark.parametrize("every", [1, 3, 50])
def test_a_loop_that_logs_without_a_step(run: make.StrictRun, every: int) -> None:
    """Case 3: the user's own counter is the x-axis; it must stay what it is without the monitor."""
    alone = make.StrictRun()
    publisher = WandbPublisher()
    publisher.start({})
    for step in range(1, 21):
        if step % every == 0:
            run.log({"loss": 1 / step})
            alone.log({"loss": 1 / step})
        if step in PROBES:
            publisher.observation(make.observation(step))
    publisher.close({})
    run.finish()
    assert points(run, "loss", "_step") == points(alone, "loss", "_step")
    shown = sorted(points(run, names.metric("probe_top1"), names.STEP))
    expected = {step: make.observation(step).metrics.top1 for step in PROBES if step}
    assert shown == sorted(expected.items())


def test_a_verdict_row_is_never_covered_by_a_later_look(run: make.StrictRun) -> None:
    publisher = WandbPublisher()
    publisher.start({})
    run.log({"loss": 1}, step=0)
    publisher.observation(make.observation(1))
    publisher.verdict(make.verdict(1))
    publisher.observation(make.observation(2))
    run.finish()
    effect = points(run, names.verdict_metric("induction", "effect", "zero"), names.STEP)
    assert effect == [(1.0, 3.1)]
    assert sorted(step for step, _ in points(run, names.metric("seconds"), names.STEP)) == [1.0, 2.0]


@pytest.mark.parametrize("probes", [("induction",), ("induction", "copies", "induction_long")])
@pytest.mark.parametrize("every", [1, 3, 5, 50])
@pytest.mark.parametrize("ends", range(16, 21))
def test_the_summary_has_the_last_look(run: RunWithSummary, probes: tuple[str, ...], every: int, ends: int) -> None:
    """Fault: looks that waited for the end of the run put their old values into its summary."""
    publisher = WandbPublisher()
    publisher.start({})
    last: dict[str, float] = {}
    for step in range(ends + 1):
        for number, probe in enumerate(probes if step in (*PROBES, ends) else ()):
            publisher.observation(make.observation(step, probe=probe, seed=number, formed=make.formed_at(step, 8)))
            publisher.event(make.event(step=step, probe=probe))
            seen = make.observation(step, probe=probe, seed=number, formed=make.formed_at(step, 8))
            last[names.metric("probe_loss", probe)] = seen.metrics.loss
            last[names.metric("pr_mean", probe)] = pytest.approx(seen.heads.pr.mean())
            last[names.metric("alarms/all", probe)] = len({*PROBES, ends})
        if step % every == 0:
            run.log({"loss": 1 / (1 + step)}, step=step)
    publisher.close({})
    run.finish()
    last[names.STEP] = ends
    assert {key: run.summary.get(key) for key in last} == last
    for probe in probes:
        shown = sorted(x for x, _ in points(run, names.metric("probe_loss", probe), names.STEP))
        assert shown == sorted({*PROBES, ends}), "each look once"


def test_own_rows_commits_at_once(run: make.StrictRun) -> None:
    publisher = WandbPublisher(own_rows=True)
    publisher.start({})
    for step in PROBES:
        publisher.observation(make.observation(step))
    assert [step for step, _ in points(run, names.metric("probe_top1"), names.STEP)] == list(PROBES)
    assert len(run.calls) == len(PROBES)


def test_one_log_call_a_probe_and_few_files(run: make.StrictRun) -> None:
    """Case: per-head keys flood the workspace (80 layers of 64 heads)."""
    run.config.update({"report_to": "wandb"})
    publisher = WandbPublisher()
    publisher.start({})
    circuit = tuple((layer, head) for layer in range(40, 44) for head in range(64))
    seen = [make.observation(step, layers=80, heads=64, circuit=circuit, formed=1.0) for step in range(3)]
    for step in range(60):
        publisher.observation(seen[step % 3])
    assert len(run.calls) == 60
    scalars = {key for call in run.calls for key, value in call["data"].items() if isinstance(value, float)}
    media = [value for call in run.calls for value in call["data"].values() if not isinstance(value, float)]
    assert len(scalars) <= 60
    assert len(media) <= 3 * 60
    tables = [call["data"][names.metric(names.TABLE)] for call in run.calls]
    assert len(tables[0].options["data"]) == 80 * 64
    assert len(json.dumps(tables[0].options["data"])) < 5e6


def test_files_stay_under_the_limit_in_a_long_run(run: make.StrictRun) -> None:
    run.config.update({"report_to": "wandb"})
    publisher = WandbPublisher(max_files=40)
    publisher.start({})
    for step in range(500):
        publisher.observation(make.observation(step))
    files = [key for call in run.calls for key in call["data"] if key.endswith((names.TABLE, names.PICTURE))]
    assert 30 < len(files) <= 40
    later = [row[names.STEP] for row in run.rows if names.metric(names.TABLE) in row]
    assert max(later) > 100, "thinned out, not cut off"


# -- runs: the one that is there, or none ---------------------------------------------------------------------------


@pytest.mark.parametrize("there", ["nothing", "not installed", "disabled"])
def test_without_a_run_nothing_is_sent_and_none_is_opened(monkeypatch: pytest.MonkeyPatch, there: str) -> None:
    module = make.fake_wandb()
    if there == "disabled":
        module.run = make.StrictRun()  # type: ignore[attr-defined]
        module.run.disabled = True  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", None if there == "not installed" else module)
    publisher = WandbPublisher()
    publisher.start({})
    publisher.observation(make.observation(1))
    publisher.event(make.event())
    publisher.verdict(make.verdict())
    publisher.close({})
    assert module.inits == []  # type: ignore[attr-defined]
    if there == "disabled":
        assert module.run.calls == [] == module.run.alerts  # type: ignore[attr-defined]


def test_joins_the_run_that_comes_later_and_finishes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    module = make.fake_wandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    publisher = WandbPublisher()
    publisher.start({})
    publisher.observation(make.observation(0))
    run = module.init()
    run.config.update({"report_to": ["wandb"]})
    publisher.observation(make.observation(1))
    publisher.close({})
    assert len(module.inits) == 1 and run.finished == 0  # type: ignore[attr-defined]
    seen = points(run, names.metric("probe_top1"), "train/global_step")
    assert [step for step, _ in seen] == [0, 1], "the look before the run was there is not lost"


def test_other_runs_with_the_trainers_config_do_not_get_its_axis(run: make.StrictRun) -> None:
    run.config.update({"report_to": ["wandb"]})
    publisher = WandbPublisher()
    publisher.start({"attached_to": "accelerate"})
    publisher.observation(make.observation(1))
    assert run.calls[0]["commit"] is False


# -- alerts ---------------------------------------------------------------------------------------------------------


def test_alerts_once_and_not_again_after_a_resume(run: make.StrictRun, tmp_path: Path) -> None:
    record = make.record(tmp_path / "run")
    publisher = WandbPublisher(box=AlertBox(interval=0))
    publisher.start({"run_dir": tmp_path / "run"})
    for event in record.events():
        publisher.event(event)
    publisher.verdict(record.verdicts()[0])
    assert run.alerts == []
    publisher.event(make.event(step=40))
    publisher.event(make.event(step=40))
    publisher.close({})
    assert [alert["title"] for alert in run.alerts] == ["induction: heads crossed the threshold, step 40"]


def test_a_history_in_pieces_is_said(run: make.StrictRun, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make.record(tmp_path / "run")
    WandbPublisher().start({"run_dir": tmp_path / "run"})
    assert not caplog.records
    run.dir = "another"
    WandbPublisher().start({"run_dir": tmp_path / "run"})
    assert f"spectral-monitor sync {tmp_path / 'run'}" in caplog.text and "offline piece of run r1" in caplog.text
    caplog.clear()
    run.id = "r2"
    WandbPublisher().start({"run_dir": tmp_path / "run"})
    assert "went to run r1, this session's goes to run r2" in caplog.text


# -- the real thing, offline, read back -----------------------------------------------------------------------------

SCRIPT = """
import sys, wandb
from pathlib import Path
from spectral_monitor.publish.wandb import WandbPublisher
from tests.publish import factories as make

mode, folder = sys.argv[1:]
run = wandb.init(project="tests", dir=folder)
if mode == "trainer":
    run.config.update({"report_to": ["wandb"]})
    run.define_metric("train/global_step")
    run.define_metric("*", step_metric="train/global_step", step_sync=True)
publisher = WandbPublisher()
publisher.start({"probes": {"induction": {"fingerprint": "f" * 64}}})
for step in range(21):
    if step in (0, 1, 2, 4, 8, 11, 16):
        publisher.observation(make.observation(step, formed=make.formed_at(step, 8)))
    if step == 11:
        publisher.event(make.event(step=11))
        publisher.verdict(make.verdict(11))
    if step % 5 == 0:
        if mode == "trainer":
            run.log({"train/loss": 1 / (1 + step), "train/global_step": step})
        elif mode == "step":
            run.log({"loss": 1 / (1 + step)}, step=step)
        else:
            run.log({"loss": 1 / (1 + step)})
publisher.close({})
run.finish()
"""


@pytest.fixture(scope="module", params=["trainer", "step", "plain"])
def offline(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, OfflineRun]:
    pytest.importorskip("wandb")
    folder = tmp_path_factory.mktemp(request.param)
    subprocess.run(
        [sys.executable, "-c", SCRIPT, request.param, str(folder)],
        check=True,
        env=offline_environment(folder),
        cwd=Path(__file__).parents[2],
        timeout=300,
    )
    return request.param, OfflineRun.find(folder)


def test_offline_file_has_every_point(offline: tuple[str, OfflineRun]) -> None:
    mode, run = offline
    user_key, user_axis = {"trainer": ("train/loss", "train/global_step"), "step": ("loss", "_step")}.get(
        mode, ("loss", "_step")
    )
    expected_x = [0, 5, 10, 15, 20] if mode != "plain" else [0, 1, 2, 3, 4]
    assert run.points(user_key, user_axis) == [
        (x, pytest.approx(1 / (1 + step))) for x, step in zip(expected_x, (0, 5, 10, 15, 20), strict=True)
    ]
    axis = "train/global_step" if mode == "trainer" else names.STEP
    seen = sorted(run.points(names.metric("probe_top1"), axis))
    assert [x for x, _ in seen] == [0, 1, 2, 4, 8, 11, 16]
    for step, value in seen:
        assert value == pytest.approx(make.observation(int(step), formed=make.formed_at(int(step), 8)).metrics.top1)
    assert run.points(names.verdict_metric("induction", "effect", "zero"), axis) == [(11, 3.1)]


def test_offline_file_has_alerts_once_and_few_keys(offline: tuple[str, OfflineRun]) -> None:
    _, run = offline
    assert sorted(alert["title"] for alert in run.alerts) == [
        "induction: causal (zero), step 11",
        "induction: heads crossed the threshold, step 11",
    ]
    ours = {key for key in run.all_keys() if key.startswith(names.PREFIX)}
    media = {key for key in ours if key.split(".")[0].endswith((names.TABLE, names.PICTURE, names.HISTOGRAM))}
    assert len(ours - media) <= names.MAX_KEYS
    assert media
    assert not [key for key, value in run.items() if value == "NaN"]


def test_offline_summary_has_the_last_look(offline: tuple[str, OfflineRun]) -> None:
    _, run = offline
    summary: dict[str, Any] = {}
    for record in run.records:
        if record["type"] == "summary":
            summary |= record["summary"].get("update", {})
    last = make.observation(16, formed=make.formed_at(16, 8))
    assert summary[names.STEP] == 16
    assert summary[names.metric("probe_loss")] == pytest.approx(last.metrics.loss)
    assert summary[names.metric("alarms/all")] == 1
    assert summary[names.verdict_metric("induction", "effect", "zero")] == 3.1


def test_offline_table_and_picture_are_whole(offline: tuple[str, OfflineRun]) -> None:
    mode, run = offline
    pytest.importorskip("PIL")
    from PIL import Image

    tables = run.files("media/table/spectral_monitor/*.json")
    pictures = run.files("media/images/spectral_monitor/*.png")
    assert tables and pictures
    if mode == "trainer":
        assert len(tables) == len(pictures) == 7
    table = json.loads(tables[0].read_text())
    assert len(table["data"]) == 8 and "selectivity_induction" in table["columns"]
    with Image.open(pictures[-1]) as picture:
        pixels = np.asarray(picture.convert("RGB"))
    assert pixels.shape[1] > 2 * pixels.shape[0] and len(np.unique(pixels.reshape(-1, 3), axis=0)) > 5


def test_offline_axis_definitions(offline: tuple[str, OfflineRun]) -> None:
    mode, run = offline
    globs = [metric["glob_name"] for metric in run.metrics if metric.get("glob_name")]
    assert globs == (["*"] if mode == "trainer" else [])
    if mode != "trainer":
        defined = {metric["name"]: metric.get("step_metric") for metric in run.metrics if metric.get("name")}
        assert defined[names.metric("probe_top1")] == names.STEP
        assert defined[names.metric(names.TABLE)] == names.STEP
    assert math.isfinite(run.rows[0]["_step"])


def test_histogram_in_the_file_has_finite_edges(offline: tuple[str, OfflineRun]) -> None:
    _, run = offline
    rows: list[Any] = [row[key] for row in run.rows for key in row if key == "spectral_monitor/pr_histogram.bins"]
    assert rows and all(np.isfinite(edges).all() for edges in rows)
