"""A real Trainer with W&B offline and trackio: what is in their own files, with the monitor and without it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from spectral_monitor.publish import names
from spectral_monitor.record import RunRecord

from .offline import OfflineRun, offline_environment

pytest.importorskip("wandb")

SCENARIOS = (
    "plain:",
    "monitor:monitor",
    "alert:monitor,break=alert",
    "log:monitor,break=log",
    "hang:monitor,break=hang",
    "none:monitor,report=none",
    "crashed:monitor,until=12",
    "crashed:monitor,resume",
)
TRACKIO = ("trackio_plain:report=trackio", "trackio:monitor,report=trackio")


class Runs:
    """All scenarios, run once in one process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            import trackio  # noqa: F401

            scenarios = SCENARIOS + TRACKIO
        except ImportError:
            scenarios = SCENARIOS
        answer = subprocess.run(
            [sys.executable, "-m", "tests.publish.tiny_run", str(folder), *scenarios],
            check=False,
            env=offline_environment(folder) | {"TRACKIO_DIR": str(folder / "trackio")},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert answer.returncode == 0, answer.stderr[-4000:]
        self.said = answer.stderr
        self.results: dict[str, Any] = json.loads(answer.stdout.strip().splitlines()[-1])

    def of(self, name: str, last: bool = True) -> dict[str, Any]:
        found = [result for key, result in self.results.items() if key.split(":")[1] == name]
        result: dict[str, Any] = found[-1 if last else 0]
        return result

    def wandb(self, name: str, last: bool = True) -> OfflineRun:
        (file,) = Path(self.of(name, last)["wandb"]).glob("run-*.wandb")
        return OfflineRun.read(file)

    def record(self, name: str) -> RunRecord:
        return RunRecord.open(self.folder / name / "out" / "spectral_monitor")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("end_to_end"))


def test_every_point_of_the_trainer_is_there_on_the_same_axis(runs: Runs) -> None:
    plain, watched = runs.wandb("plain"), runs.wandb("monitor")
    keys = {key for key in plain.all_keys() if key.startswith(("train/", "eval/")) and "second" not in key}
    keys -= {key for key in keys if "runtime" in key}
    assert {"train/loss", "train/grad_norm", "train/learning_rate", "eval/loss"} <= keys
    for key in keys:
        if key != names.GLOBAL_STEP:
            assert watched.points(key, names.GLOBAL_STEP) == plain.points(key, names.GLOBAL_STEP), key
    assert [x for x, _ in watched.points("train/loss", names.GLOBAL_STEP)] == [5, 10, 15, 20]
    assert watched.metrics == plain.metrics, "no axis was defined beside the Trainer's own"


def test_every_look_is_there_at_its_step(runs: Runs) -> None:
    seen = runs.record("monitor").observations()
    points = runs.wandb("monitor").points(names.metric("probe_loss"), names.GLOBAL_STEP)
    assert [x for x, _ in points] == [one.step for one in seen] and seen[0].step == 0 and seen[-1].step == 20
    assert [value for _, value in points] == pytest.approx([one.metrics.loss for one in seen])
    tokens = runs.wandb("monitor").points(names.TOKENS, names.GLOBAL_STEP)
    assert tokens[-1] == (20, 20 * 4 * 32)


def test_keys_alerts_and_files(runs: Runs) -> None:
    run, record = runs.wandb("monitor"), runs.record("monitor")
    media = {names.metric(name) for name in (names.TABLE, names.PICTURE, names.HISTOGRAM)}
    ours = {key.split(".")[0] for key in run.all_keys() if key.startswith(names.PREFIX)}
    assert len(ours - media) <= names.MAX_KEYS
    titles = [alert["title"] for alert in run.alerts]
    assert len(titles) == len(set(titles)) and all(len(title) < 64 for title in titles)
    crossings = [event for event in record.events() if event.kind == "selectivity_crossing"]
    assert crossings, "the run was made so that heads cross"
    told = "\n".join(alert["title"] + alert["text"] for alert in run.alerts)
    assert all(f"step {event.step}" in told for event in crossings)
    assert all(f"step {verdict.step}" in told for verdict in record.verdicts())
    looks = len(record.observations())
    assert len(run.files("media/table/**/*.json")) == looks
    counts = run.points(names.metric("alarms/selectivity_crossing"), names.GLOBAL_STEP)
    assert counts[-1][1] == len(crossings)


@pytest.mark.parametrize("name", ["monitor", "alert", "log", "hang", "none", "crashed"])
def test_the_training_is_the_same_to_the_bit(runs: Runs, name: str) -> None:
    assert runs.of(name)["weights"] == runs.of("plain")["weights"]


@pytest.mark.parametrize("name", ["alert", "log", "hang", "none"])
def test_whatever_breaks_the_record_has_every_look(runs: Runs, name: str) -> None:
    def looks(of: str) -> list[tuple[int, float]]:
        return [(one.step, one.metrics.loss) for one in runs.record(of).observations()]

    assert looks(name) == looks("monitor")
    assert runs.record(name).steps() == runs.record("monitor").steps()


def test_what_failed_is_said_once_and_summed_up(runs: Runs) -> None:
    guard = {name: runs.of(name)["guards"][0] for name in ("monitor", "alert", "log", "hang")}
    assert guard["monitor"]["failed"] == 0
    assert guard["alert"]["failed"] > 0 and guard["log"]["failed"] > 3
    assert guard["hang"]["over_the_limit"] >= 1
    assert runs.said.count("failed (BrokenPipeError: the service is gone); the training goes on") == 1
    assert runs.said.count("calls failed (first: BrokenPipeError: the service is gone)") == 1
    assert "spectral-monitor sync" in runs.said


def test_a_call_that_hangs_does_not_hold_the_training_up(runs: Runs) -> None:
    """The call returns only after the training has ended: a training that waited for it would never end."""
    assert runs.of("hang")["hung"] and not runs.of("monitor")["hung"]
    trained = runs.wandb("hang").points("train/loss", names.GLOBAL_STEP)
    assert trained == runs.wandb("plain").points("train/loss", names.GLOBAL_STEP)


def test_no_run_is_opened_when_the_trainer_has_none(runs: Runs) -> None:
    assert runs.of("none")["wandb"] == ""
    opened = {result["wandb"] for result in runs.results.values()} - {""}
    assert len(list(runs.folder.glob("**/offline-run-*"))) == len(opened)


def test_a_resumed_run_announces_nothing_twice_and_says_that_its_history_is_in_pieces(runs: Runs) -> None:
    first, second = runs.wandb("crashed", last=False), runs.wandb("crashed")
    titles = [alert["title"] for run in (first, second) for alert in run.alerts]
    assert titles and len(titles) == len(set(titles))
    assert "`spectral-monitor sync" in runs.said and "goes to run" in runs.said
    record = runs.record("crashed")
    assert record.steps() == runs.record("monitor").steps()
    redone = [one.step for one in record.observations() if one.attempt > 1]
    assert redone and all(8 < step <= 12 for step in redone)
    counts = second.points(names.metric("alarms/selectivity_crossing"), names.GLOBAL_STEP)
    whole = runs.wandb("monitor").points(names.metric("alarms/selectivity_crossing"), names.GLOBAL_STEP)
    assert counts[-1] == whole[-1], "counts go on where they were"


def test_trackio_rows_of_the_trainer_keep_their_numbers(runs: Runs) -> None:
    pytest.importorskip("trackio")
    script = """
import json
from trackio.sqlite_storage import SQLiteStorage as storage
print(json.dumps({run: storage.get_logs("huggingface", run) for run in storage.get_runs("huggingface")}, default=str))
"""
    answer = subprocess.run(
        [sys.executable, "-c", script],
        check=True,
        env=offline_environment(runs.folder) | {"TRACKIO_DIR": str(runs.folder / "trackio")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    read = json.loads(answer.stdout.strip().splitlines()[-1])

    def trained(rows: list[dict[str, Any]]) -> list[tuple[int, int, float]]:
        return [(row["step"], row["train/global_step"], row["train/loss"]) for row in rows if "train/loss" in row]

    looks = {run: [row for row in rows if names.metric("probe_top1") in row] for run, rows in read.items()}
    (watched,) = [run for run, rows in looks.items() if rows]
    (plain,) = [run for run, rows in looks.items() if not rows]
    assert trained(read[watched]) == trained(read[plain]) and len(trained(read[plain])) == 4
    steps = sorted(row["train/global_step"] for row in looks[watched])
    assert steps == runs.record("trackio").steps()
