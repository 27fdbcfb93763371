"""End to end with the real monitor: a replayed training run gives the live record, whatever happens on the way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spectral_monitor.record import RunRecord
from spectral_monitor.replay.hub import Hub, Patience
from spectral_monitor.replay.loading import LoadedModel
from spectral_monitor.replay.plan import Listings, Planned, make_plan
from spectral_monitor.replay.recorder import MonitorRecorder, ProbeSettings
from spectral_monitor.replay.runner import COMPLETE, Replay, Result, Settings
from spectral_monitor.replay.selection import Selection

from .hub_server import Fault, HubServer
from .test_runner import DiskWatch
from .training import STEPS, TOKENS_PER_STEP, monitor_options, probe, train

REPO = "lab/trained"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``revisions/`` of a real training run and its live record in ``live/``."""
    folder = tmp_path_factory.mktemp("trained")
    train(folder / "revisions", folder / "live")
    return folder


@pytest.fixture
def published(server: HubServer, trained: Path) -> HubServer:
    server.add(REPO, {path.name: path for path in (trained / "revisions").iterdir()})
    return server


def replay(source: str, folder: Path, hub: Hub | None = None, **settings: Any) -> Result:
    hub = hub or Hub(Patience(first_pause=0.01, longest_pause=0.05))
    options = Settings(folder / "out", folder / "out.replay", poll=0.01, **settings)
    plan = make_plan(source, Selection(), Listings(hub, options.work / "listings"), per_step=TOKENS_PER_STEP)
    shown = ProbeSettings(probes=(probe(),), monitor=monitor_options())
    return Replay(plan, options, lambda _, run_dir: MonitorRecorder(run_dir, shown), hub).run()


def contents(run_dir: Path) -> dict[str, Any]:
    """Everything of a record that does not depend on when and how fast it was made."""
    record = RunRecord.open(run_dir)
    assert not (run_dir / "superseded").exists()
    verdicts = [
        (v.step, v.tokens, v.heads, v.mode, v.verdict, v.p_value, v.effect, v.effect_ci, v.draws, v.label)
        for v in record.verdicts()
    ]
    events = [(e.kind, e.step, e.tokens, e.heads, e.direction, e.value, e.text) for e in record.events()]
    tables = []
    for observation in record.observations():
        heads = observation.heads
        series = {"pr": heads.pr, "pr_moment": heads.pr_moment, **heads.attention, **heads.selectivity, **heads.extra}
        tables.append(
            (
                observation.step,
                observation.tokens,
                observation.label,
                observation.mark,
                observation.attempt,
                observation.fingerprint,
                {name: values.tolist() for name, values in series.items()},
                heads.head_class.tolist(),
                vars(observation.metrics),
            )
        )
    return json.loads(json.dumps({"observations": tables, "events": events, "verdicts": verdicts}))


@pytest.fixture(scope="module")
def expected(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What an undisturbed replay of the local folders records."""
    folder = tmp_path_factory.mktemp("undisturbed")
    assert replay(str(trained / "revisions"), folder).status == COMPLETE
    return contents(folder / "out")


def same(first: dict[str, Any], second: dict[str, Any]) -> None:
    """Compare two ``contents``; NaN equals NaN."""
    np.testing.assert_equal(first["events"], second["events"])
    np.testing.assert_equal(first["verdicts"], second["verdicts"])
    np.testing.assert_equal(first["observations"], second["observations"])


def test_replay_equals_the_live_record(trained: Path, expected: dict[str, Any]) -> None:
    live = contents(trained / "live")
    assert [row[0] for row in live["observations"]] == list(STEPS)
    assert live["events"] and live["verdicts"], "the run is too quiet to prove anything"
    assert [event[:5] for event in expected["events"]] == [event[:5] for event in live["events"]]
    assert [verdict[:5] for verdict in expected["verdicts"]] == [verdict[:5] for verdict in live["verdicts"]]
    for replayed, lived in zip(expected["observations"], live["observations"], strict=True):
        assert replayed[:3] == lived[:3]
        for name, values in lived[6].items():
            np.testing.assert_allclose(replayed[6][name], values, rtol=1e-6, atol=1e-6, err_msg=name)


FAULTS = {
    "429": [Fault("429", "/storage/", times=3, value=0, after=2)],
    "500": [Fault("500", "", times=3, after=20), Fault("500", "/storage/", times=2, after=5)],
    "cut": [Fault("cut", "/storage/", times=3, value=7_000, after=1)],
    "corrupt": [Fault("corrupt", "/storage/", after=3)],
}


@pytest.mark.parametrize("kind", [*FAULTS, "slow"])
def test_every_fault_gives_the_same_record_within_the_budget(
    published: HubServer, tmp_path: Path, expected: dict[str, Any], kind: str
) -> None:
    published.order(*[Fault(**vars(fault)) for fault in FAULTS.get(kind, [])])
    size = sum(len(data) for data in published.repos[REPO]["step0"].values())
    if kind == "slow":
        published.rate = 4.0 * size
    watch = DiskWatch(tmp_path / "out.replay" / "downloads")
    watch.start()
    hub = Hub(Patience(first_pause=0.01, longest_pause=0.05), sleep=lambda seconds: None)
    result = replay(REPO, tmp_path, hub, budget=2 * size + 5000)
    watch.over.set()
    watch.join()
    assert result.status == COMPLETE, [row.reason for row in result.rows]
    assert published.faults == [], "the fault was never met"
    assert 0 < watch.highest <= 2 * size + 5000
    same(contents(tmp_path / "out"), expected)


def run_driver(source: str, out: Path, *arguments: str) -> dict[str, Any]:
    """The driver in a process of its own (see ``driver``)."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-m", "tests.replay.driver", source, str(out), *arguments],
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.slow
def test_killed_at_ten_random_moments_the_record_is_the_same(
    published: HubServer, tmp_path: Path, expected: dict[str, Any]
) -> None:
    done = run_driver(REPO, tmp_path / "out", "--kills", "10", "--seed", "5")
    assert done["killed"] == 10, "the process ended before it could be killed"
    assert done["statuses"] == [COMPLETE]
    same(contents(tmp_path / "out"), expected)
    assert not list((tmp_path / "out.replay" / "downloads").glob("step*"))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_write_the_same_record(
    published: HubServer, tmp_path: Path, expected: dict[str, Any], ranks: int
) -> None:
    size = sum(len(data) for data in published.repos[REPO]["step0"].values())
    done = run_driver(REPO, tmp_path / "out", "--ranks", str(ranks), "--budget", str(3 * size))
    assert set(done["statuses"]) == {COMPLETE}
    same(contents(tmp_path / "out"), expected)
    assert published.count("/storage/.*safetensors", "GET") == len(STEPS)


class SlowRecorder(MonitorRecorder):
    """Measuring takes at least ``seconds``, so that there is something to overlap with on a tiny model."""

    seconds = 0.6

    def measure(self, loaded: LoadedModel, planned: Planned, mark: str | None) -> Any:
        began = time.monotonic()
        reading = super().measure(loaded, planned, mark)
        time.sleep(max(0.0, self.seconds - (time.monotonic() - began)))
        return reading


@pytest.mark.slow
def test_download_and_measuring_overlap(published: HubServer, tmp_path: Path) -> None:
    """The next revision arrives while one is measured: never are both idle in turn. Counted, not timed: at each
    measurement but the first the next download had begun before it ended."""
    size = sum(len(data) for data in published.repos[REPO]["step0"].values())
    published.rate = size / 0.6
    spans: list[tuple[float, float]] = []

    class Watched(SlowRecorder):
        def measure(self, loaded: LoadedModel, planned: Planned, mark: str | None) -> Any:
            began = time.monotonic()
            reading = super().measure(loaded, planned, mark)
            spans.append((began, time.monotonic()))
            return reading

    hub = Hub()
    settings = Settings(tmp_path / "out", tmp_path / "out.replay", poll=0.01)
    plan = make_plan(REPO, Selection(), Listings(hub), per_step=TOKENS_PER_STEP)
    shown = ProbeSettings(probes=(probe(),), monitor=monitor_options())
    assert Replay(plan, settings, lambda _, folder: Watched(folder, shown), hub).run().status == COMPLETE
    begun = [item.time for item in published.requests if item.path.startswith("/storage/")]
    during = sum(any(start <= moment <= end for moment in begun) for start, end in spans[:-1])
    assert during >= len(spans) // 2
    assert threading.active_count() < 20


def test_wrong_checkpoints_are_marked_in_the_record_and_raise_nothing(trained: Path, tmp_path: Path) -> None:
    """Final weights under early names: the circuit that they hold must not be reported as formed early."""
    folder = tmp_path / "repository"
    folder.mkdir()
    for name, origin in (("step0", 40), ("step10", 40), ("step20", 40), ("step30", 32), ("step35", 0)):
        (folder / name).symlink_to(trained / "revisions" / f"step{origin}")
    result = replay(str(folder), tmp_path)
    assert {row.revision: row.status for row in result.rows} == {
        "step0": "duplicate",
        "step10": "duplicate",
        "step20": "measured",
        "step30": "measured",
        "step35": "measured",
    }
    record = RunRecord.open(tmp_path / "out")
    assert {o.step: o.mark for o in record.observations()} == {
        20: "same weights as step0, step10",
        30: None,
        35: None,
    }
    events = record.events()
    assert [event.text for event in events if event.kind == "note"] == [
        "the same weights under step0, step10, step20; onset is not determinable below step 30: "
        "the checkpoints below it do not hold what their names say"
    ]
    assert not [event for event in events if event.kind != "note" and event.step == 20]
    assert not [verdict for verdict in record.verdicts() if verdict.step == 20]
    assert any(event.step == 30 for event in events if event.kind != "note"), "the trusted one raised nothing either"


def test_what_is_measured_late_lies_in_the_record_with_a_note(trained: Path, tmp_path: Path) -> None:
    revisions = tmp_path / "revisions"
    revisions.mkdir()
    for step in (2, 16, 40):
        (revisions / f"step{step}").symlink_to(trained / "revisions" / f"step{step}")
    missing = trained / "revisions" / "step16" / "model.safetensors"
    (revisions / "step16").unlink()
    (revisions / "step16").mkdir()
    (revisions / "step16" / "config.json").write_text((missing.parent / "config.json").read_text())
    (revisions / "step16" / "model.safetensors").write_bytes(missing.read_bytes()[:1000])
    assert replay(str(revisions), tmp_path).status != COMPLETE
    (revisions / "step16" / "model.safetensors").write_bytes(missing.read_bytes())
    assert replay(str(revisions), tmp_path).status == COMPLETE
    record = RunRecord.open(tmp_path / "out")
    assert record.steps() == [2, 16, 40]
    assert any(event.step == 16 and "measured late, after step 40" in event.text for event in record.events())
    assert replay(str(revisions), tmp_path).status == COMPLETE
    assert [o.attempt for o in record.observations()] == [1, 1, 1]
