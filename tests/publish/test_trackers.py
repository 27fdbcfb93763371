"""Accelerate's own trackers and trackio, each for real where it is installed, read back from its own files."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from spectral_monitor.publish import names
from spectral_monitor.publish.trackers import AcceleratePublisher, TrackioPublisher, joining
from spectral_monitor.publish.wandb import WandbPublisher
from spectral_monitor.record import RunRecord

from . import factories as make
from .offline import OfflineRun, offline_environment

LOOP = """
import json, sys
from pathlib import Path
from accelerate import Accelerator
from spectral_monitor.publish.trackers import AcceleratePublisher
from tests.publish import factories as make

kinds, folder, with_step = sys.argv[1].split(","), Path(sys.argv[2]), sys.argv[3] == "step"
accelerator = Accelerator(log_with=kinds, project_dir=folder, cpu=True)
accelerator.init_trackers("tests", config={"lr": 0.1})
publisher = AcceleratePublisher(accelerator, log_step=with_step)
publisher.start({})
for step in range(1, 13):
    if step in (1, 2, 4, 8, 12):
        publisher.observation(make.observation(step, formed=make.formed_at(step, 6)))
    if step == 8:
        publisher.event(make.event(step=8))
        publisher.verdict(make.verdict(8))
    if step % 3 == 0:
        accelerator.log({"loss": 1 / step}, step=step if with_step else None)
publisher.close({})
accelerator.end_training()
"""
LOOKS = [1, 2, 4, 8, 12]


KINDS = {"wandb": "wandb", "tensorboard": "tensorboard", "mlflow": "mlflow", "trackio": "trackio"}


@pytest.fixture(scope="module", params=["step", "plain"])
def loop(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[bool, Path]:
    """One loop of Accelerate with every tracker that is installed; the loop logs with or without a step."""
    folder = tmp_path_factory.mktemp(request.param)
    kinds = ",".join(kind for kind, package in KINDS.items() if importlib.util.find_spec(package) is not None)
    environment = offline_environment(folder) | {
        "TRACKIO_DIR": str(folder / "trackio"),
        "MLFLOW_TRACKING_URI": (folder / "mlruns").as_uri(),
        "MLFLOW_ALLOW_FILE_STORE": "true",  # the skinny package has no database driver
        "GIT_PYTHON_REFRESH": "quiet",
        "MLFLOW_ENABLE_ASYNC_LOGGING": "false",
    }
    subprocess.run(
        [sys.executable, "-c", LOOP, kinds, str(folder), request.param],
        check=True,
        env=environment,
        cwd=Path(__file__).parents[2],
        timeout=300,
    )
    return request.param == "step", folder


def test_wandb_through_accelerate(loop: tuple[bool, Path]) -> None:
    pytest.importorskip("wandb")
    with_step, folder = loop
    run = OfflineRun.find(folder)
    expected = [3, 6, 9, 12] if with_step else [0, 1, 2, 3]
    assert [x for x, _ in run.points("loss", "_step")] == expected
    assert sorted(x for x, _ in run.points(names.metric("probe_top1"), names.STEP)) == LOOKS
    assert len(run.alerts) == 2
    assert run.files("media/table/spectral_monitor/*.json")


def test_tensorboard_through_accelerate(loop: tuple[bool, Path]) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with_step, folder = loop
    if not with_step:
        pytest.skip("TensorBoard itself puts every point without a step at 0")
    events = EventAccumulator(str(folder / "tests"))
    events.Reload()
    assert [point.step for point in events.Scalars("loss")] == [3, 6, 9, 12]
    seen = events.Scalars(names.metric("probe_top1"))
    assert [point.step for point in seen] == LOOKS
    assert seen[-1].value == pytest.approx(make.observation(12, formed=make.formed_at(12, 6)).metrics.top1)
    assert events.Scalars(names.verdict_metric("induction", "effect", "zero"))[0].step == 8


def test_mlflow_through_accelerate(loop: tuple[bool, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    with_step, folder = loop
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = MlflowClient((folder / "mlruns").as_uri())
    (experiment,) = client.search_experiments(filter_string="name = 'tests'")
    (found,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(found.info.run_id, names.metric("probe_top1"))
    assert len(history) == len(LOOKS)
    if with_step:
        assert [point.step for point in history] == LOOKS
        assert [point.step for point in client.get_metric_history(found.info.run_id, "loss")] == [3, 6, 9, 12]


READ_TRACKIO = """
import json, sys
from trackio.sqlite_storage import SQLiteStorage as storage
(run,) = storage.get_runs("tests")
print(json.dumps({"logs": storage.get_logs("tests", run), "alerts": storage.get_alerts("tests")}, default=str))
"""


def test_trackio_through_accelerate(loop: tuple[bool, Path]) -> None:
    pytest.importorskip("trackio")
    with_step, folder = loop
    answer = subprocess.run(
        [sys.executable, "-c", READ_TRACKIO],
        check=True,
        env=offline_environment(folder) | {"TRACKIO_DIR": str(folder / "trackio")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    read: dict[str, Any] = json.loads(answer.stdout.strip().splitlines()[-1])
    losses = [row["step"] for row in read["logs"] if "loss" in row]
    assert losses == ([3, 6, 9, 12] if with_step else [0, 1, 2, 3])
    looks = [row for row in read["logs"] if names.metric("probe_top1") in row]
    assert sorted(row[names.STEP] for row in looks) == LOOKS
    if with_step:
        assert sorted(row["step"] for row in looks) == LOOKS
    assert sorted(alert["title"] for alert in read["alerts"]) == [
        "induction: causal (zero), step 8",
        "induction: heads crossed the threshold, step 8",
    ]


THREE_PROBES = """
import dataclasses, sys
from pathlib import Path
import torch
from accelerate import Accelerator
from spectral_monitor.attach.accelerate import watch
from tests.attach import tiny

folder = Path(sys.argv[1])
torch.set_num_threads(1)
accelerator = Accelerator(log_with="wandb", project_dir=folder, cpu=True)
accelerator.init_trackers("tests")
NAMES = ("induction", "copies", "induction_long")
probes = [dataclasses.replace(tiny.probe(seed=seed), name=name) for seed, name in enumerate(NAMES)]
monitor = watch(
    accelerator, folder / "record", probes=probes, thresholds=tiny.EASY, check=tiny.DRAWS, max_overhead=None,
    null_draws=3, on_error="raise",
)
model = tiny.gpt2(dropout=0.0)
optimizer = torch.optim.SGD(model.parameters(), lr=3.0)
model, optimizer = accelerator.prepare(model, optimizer)
tokens = torch.stack([row["input_ids"] for row in tiny.rows(8)])
for step in range(13):
    if step:
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    if step in (0, 1, 2, 3, 6, 12):
        monitor.observe(model, step, 128.0 * step)
    if step in (5, 10, 12):
        accelerator.log({"loss": float(loss.detach())}, step=step)
monitor.close()
accelerator.end_training()
"""


@pytest.fixture(scope="module")
def three_probes(tmp_path_factory: pytest.TempPathFactory) -> tuple[OfflineRun, RunRecord]:
    """A bare loop with three probes on a small random model; the loop logs less often than the monitor looks."""
    pytest.importorskip("wandb")
    folder = tmp_path_factory.mktemp("three_probes")
    subprocess.run(
        [sys.executable, "-c", THREE_PROBES, str(folder)],
        check=True,
        env=offline_environment(folder),
        cwd=Path(__file__).parents[2],
        timeout=300,
    )
    return OfflineRun.find(folder), RunRecord.open(folder / "record")


PROBES = ("induction", "copies", "induction_long")


@pytest.mark.parametrize("probe", PROBES)
def test_the_summary_of_a_loop_holds_each_probes_last_look(
    three_probes: tuple[OfflineRun, RunRecord], probe: str
) -> None:
    """Faults: old looks, sent at the end, covered the new values; the third probe's numbers were left out."""
    run, record = three_probes
    summary: dict[str, Any] = {}
    for entry in run.records:
        if entry["type"] == "summary":
            summary |= entry["summary"].get("update", {})
    looks = [look for look in record.observations() if look.probe == probe]
    assert [look.step for look in looks] == [0, 1, 2, 3, 6, 12] and summary[names.STEP] == 12
    # The order of the file is what makes the summary hard: the last row is an older look's.
    assert run.points(names.metric("probe_loss", probe), names.STEP)[-1][0] == 3
    assert summary[names.metric("probe_top1", probe)] == looks[-1].metrics.top1
    assert summary[names.metric("probe_loss", probe)] == looks[-1].metrics.loss
    counted = (*names.ALARM_KINDS, "circuit_formed", "circuit_lost")
    alarms = [event for event in record.events() if event.probe == probe and event.kind in counted]
    assert alarms, "the bars are so low that heads cross them"
    assert summary[names.metric("alarms/all", probe)] == len(alarms)
    shown = sorted(run.points(names.metric("probe_loss", probe), names.STEP))
    assert shown == [(look.step, look.metrics.loss) for look in looks]
    verdict = [one for one in record.verdicts() if one.probe == probe and one.mode == "zero"][-1]
    assert summary[names.verdict_metric("induction", "effect", "zero", probe)] == pytest.approx(verdict.effect)


def test_every_alert_of_a_loop_names_its_probe(three_probes: tuple[OfflineRun, RunRecord]) -> None:
    run, _ = three_probes
    titles = [alert["title"] for alert in run.alerts]
    assert {title.split(":")[0] for title in titles} - {"first-token heads"} >= {
        "induction",
        "induction (copies)",
        "induction_long",
    }
    assert len(set(titles)) == len(titles)


class FakeTracker:
    def __init__(self, name: str) -> None:
        self.name, self.logged = name, []  # type: ignore[var-annotated]

    def log(self, values: dict[str, Any], step: int | None = None, **options: Any) -> None:
        self.logged.append((step, dict(values)))


class FakeAccelerator:
    def __init__(self, main: bool = True) -> None:
        self.trackers, self.is_main_process = [FakeTracker("mine")], main


@pytest.mark.parametrize("main", [True, False])
def test_a_tracker_of_ones_own_gets_the_rows_on_the_main_process_only(main: bool) -> None:
    accelerator = FakeAccelerator(main)
    publisher = AcceleratePublisher(accelerator)
    publisher.start({})
    publisher.observation(make.observation(3))
    publisher.event(make.event(step=3))
    publisher.verdict(make.verdict(3))
    publisher.close({})
    steps = [step for step, _ in accelerator.trackers[0].logged]
    assert steps == ([3, 3] if main else [])


class FakeTrackioRun:
    def __init__(self) -> None:
        self._next_step, self.rows = 0, []  # type: ignore[var-annotated]

    def log(self, metrics: dict[str, Any], step: int | None = None) -> None:
        step = self._next_step if step is None else step
        self._next_step = max(self._next_step, step + 1)
        self.rows.append((step, metrics))


def test_trackio_counter_stays_the_trainers() -> None:
    """The Trainer's callback logs without a step: its rows must keep the numbers that they have without us."""
    run = FakeTrackioRun()
    publisher = TrackioPublisher(run, alerts=False)
    publisher.start({})
    for step in range(13):
        if step in (0, *LOOKS):
            publisher.observation(make.observation(step))
        if step and step % 3 == 0:
            run.log({"train/loss": 1 / step, "train/global_step": step})
    publisher.close({})
    assert [step for step, row in run.rows if "train/loss" in row] == [0, 1, 2, 3]
    looks = [row["train/global_step"] for _, row in run.rows if names.metric("probe_top1") in row]
    assert looks == [0, *LOOKS]


def test_trackio_without_a_run_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    publisher = TrackioPublisher()
    publisher.start({})
    publisher.observation(make.observation(1))
    publisher.event(make.event())
    publisher.close({})


def test_joining_leaves_out_what_is_there_already() -> None:
    both = joining()
    assert [type(guard.publisher) for guard in both] == [WandbPublisher, TrackioPublisher]
    assert joining(both) == ()
    assert [type(guard.publisher) for guard in joining([WandbPublisher()])] == [TrackioPublisher]
