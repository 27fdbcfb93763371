"""Records of one run made apart, joined: the same as made in one go."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from spectral_monitor.errors import RecordError
from spectral_monitor.record import RunRecord
from spectral_monitor.replay.hub import Hub
from spectral_monitor.replay.merge import merge_runs
from spectral_monitor.replay.plan import Listings, make_plan
from spectral_monitor.replay.recorder import MonitorRecorder, ProbeSettings
from spectral_monitor.replay.runner import Replay, Settings
from spectral_monitor.replay.selection import Selection

from .training import STEPS, TOKENS_PER_STEP, monitor_options, probe, train


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``live``: the whole run; ``odd`` and ``even``: replays of every other checkpoint, apart from each other."""
    folder = tmp_path_factory.mktemp("parts")
    train(folder / "revisions", folder / "live")
    for name, steps in (("even", STEPS[::2]), ("odd", STEPS[1::2])):
        plan = make_plan(
            str(folder / "revisions"), Selection(steps=steps), Listings(Hub()), per_step=float(TOKENS_PER_STEP)
        )
        shown = ProbeSettings(probes=(probe(),), monitor=monitor_options())
        settings = Settings(folder / name, folder / f"{name}.replay")
        Replay(plan, settings, lambda _, run_dir, shown=shown: MonitorRecorder(run_dir, shown)).run()
    return folder


def test_joined_parts_are_the_whole_run(parts: Path, tmp_path: Path) -> None:
    merged = merge_runs(tmp_path / "joined", [parts / "odd", parts / "even"])
    joined, live = RunRecord.open(tmp_path / "joined"), RunRecord.open(parts / "live")
    assert merged.observations == len(STEPS)
    assert joined.steps() == list(STEPS)
    found = {(e.kind, e.step, e.heads, e.direction) for e in joined.events()}
    lived = {(e.kind, e.step, e.heads, e.direction) for e in live.events() if not e.kind.startswith("circuit_")}
    assert lived, "the run is too quiet to prove anything"
    assert lived <= found
    assert {(v.step, v.mode) for v in joined.verdicts()} >= {
        (v.step, v.mode) for name in ("odd", "even") for v in RunRecord.open(parts / name).verdicts()
    }
    rows = json.loads((tmp_path / "joined" / "replay.json").read_text())["revisions"]
    assert [row["step"] for row in rows] == list(STEPS)
    assert (parts / "odd" / "run.json").is_file(), "a source record was touched"
    assert [path.name for path in tmp_path.iterdir()] == ["joined"]


def _changed(source: Path, target: Path, section: str, **values: object) -> Path:
    shutil.copytree(source, target)
    run = json.loads((target / "run.json").read_text())
    run[section] |= values
    (target / "run.json").write_text(json.dumps(run))
    return target


def test_other_library_versions_are_joined_only_on_demand(parts: Path, tmp_path: Path) -> None:
    other = _changed(parts / "odd", tmp_path / "old", "versions", transformers="4.40.0")
    with pytest.raises(RecordError, match=r'in transformers: "4\.40\.0" against .* --mix-versions'):
        merge_runs(tmp_path / "joined", [parts / "even", other])
    assert not (tmp_path / "joined").exists()
    assert merge_runs(tmp_path / "joined", [parts / "even", other], mix_versions=True).observations == len(STEPS)


def test_refusals(parts: Path, tmp_path: Path) -> None:
    stage = _changed(parts / "odd", tmp_path / "stage", "replay", series="stage2")
    with pytest.raises(RecordError, match="in series"):
        merge_runs(tmp_path / "joined", [parts / "even", stage], mix_versions=True)
    prints = _changed(parts / "odd", tmp_path / "probe", "probes", induction={"fingerprint": "0" * 64, "length": 48})
    with pytest.raises(RecordError, match="other probes"):
        merge_runs(tmp_path / "joined", [parts / "even", prints])
    with pytest.raises(RecordError, match="two run directories or more"):
        merge_runs(tmp_path / "joined", [parts / "even"])
    with pytest.raises(RecordError, match="exists already"):
        merge_runs(parts / "odd", [parts / "even", parts / "odd"])
    other = tmp_path / "other"
    shutil.copytree(parts / "even", other)
    files = sorted((other / "observations").glob("*.parquet"))
    shutil.copy(files[1], files[0])  # another step's numbers under this step's name ...
    with pytest.raises(RecordError):  # ... are read as what they say: a step twice with different numbers or none
        merge_runs(tmp_path / "joined", [parts / "even", _relabelled(other)])
    assert not (tmp_path / "joined").exists()


def _relabelled(run_dir: Path) -> Path:
    """Give the first observation's file the right step again, keeping the wrong numbers."""
    import dataclasses

    import pyarrow.parquet as pq

    from spectral_monitor.record import read_observation, to_table

    files = sorted((run_dir / "observations").glob("*.parquet"))
    step = int(files[0].name.split(".")[0].removeprefix("step-"))
    pq.write_table(to_table(dataclasses.replace(read_observation(files[0]), step=step)), files[0])
    return run_dir
