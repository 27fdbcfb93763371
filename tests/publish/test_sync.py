from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from spectral_monitor.errors import RecordError
from spectral_monitor.publish import names
from spectral_monitor.publish.names import PublishError
from spectral_monitor.publish.sync import sync

from . import factories as make
from .offline import OfflineRun, offline_environment

STEPS = (0, 1, 2, 4, 8, 16, 24, 32)
SCRIPT = """
import sys
from spectral_monitor.publish.sync import sync
print(sync(sys.argv[1], offline=True, alerts=len(sys.argv) > 2))
"""


def run_sync(folder: Path, *more: str) -> OfflineRun:
    subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder / "run"), *more],
        check=True,
        env=offline_environment(folder),
        cwd=folder,
        timeout=300,
    )
    return OfflineRun.find(folder)


@pytest.fixture(scope="module")
def synced(tmp_path_factory: pytest.TempPathFactory) -> OfflineRun:
    pytest.importorskip("wandb")
    folder = tmp_path_factory.mktemp("sync")
    make.record(folder / "run", STEPS)
    return run_sync(folder)


def test_one_run_has_every_observation_at_its_step(synced: OfflineRun) -> None:
    seen = synced.points(names.metric("probe_top1"), names.STEP)
    assert [step for step, _ in seen] == list(STEPS)
    assert [value for _, value in seen] == pytest.approx(
        [make.observation(step, formed=make.formed_at(step)).metrics.top1 for step in STEPS]
    )
    assert [value for _, value in synced.points(names.TOKENS, names.STEP)] == [
        step * make.TOKENS_A_STEP for step in STEPS for _ in range(2 if step == 24 else 1)
    ]
    assert synced.points(names.verdict_metric("induction", "effect", "zero"), names.STEP) == [(24, 3.1)]
    assert len(synced.files("media/table/spectral_monitor/*.json")) == len(STEPS)


def test_flagged_heads_are_there_from_the_first_look(synced: OfflineRun) -> None:
    head = synced.points(names.head_metric("L1H0", "attention", "induction"), names.STEP)
    assert [step for step, _ in head] == list(STEPS)
    assert head[0][1] == pytest.approx(0.01 + 0.8 * make.formed_at(0))


def test_alarms_are_counted_and_no_alert_is_sent(synced: OfflineRun) -> None:
    counts = synced.points(names.metric("alarms/all"), names.STEP)
    assert counts[-1] == (32, 3) and counts[0] == (0, 0)
    assert synced.alerts == []
    assert not [key for key, value in synced.items() if value == "NaN"]


def test_alerts_on_request(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    make.record(tmp_path / "run", STEPS)
    titles = [alert["title"] for alert in run_sync(tmp_path, "alerts").alerts]
    assert len(titles) == len(set(titles)) == 4


def test_a_superseded_observation_is_written_once(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    make.record(tmp_path / "run", (8, 12))
    make.record(tmp_path / "run", (12, 16))
    run = run_sync(tmp_path)
    assert [step for step, _ in run.points(names.metric("probe_top1"), names.STEP)] == [8, 12, 16]


def test_bad_input_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RecordError, match="no run directory"):
        sync(tmp_path / "nowhere")
    make.record(tmp_path / "empty", ())
    with pytest.raises(PublishError, match="no observation yet"):
        sync(tmp_path / "empty")
    make.record(tmp_path / "run")
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(PublishError, match="needs wandb"):
        sync(tmp_path / "run")
    module = make.fake_wandb(make.StrictRun())
    monkeypatch.setitem(sys.modules, "wandb", module)
    with pytest.raises(PublishError, match="is active in this process"):
        sync(tmp_path / "run")

    def refuse(**options: object) -> None:
        raise RuntimeError("No API key configured.\nmore text")

    module.run, module.init = None, refuse  # type: ignore[attr-defined]
    with pytest.raises(PublishError, match=r"No API key configured.*--offline") as caught:
        sync(tmp_path / "run")
    assert "\n" not in str(caught.value)
