"""The replay against the loopback Hub, with a small recorder that depends on the order as the monitor does."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from spectral_monitor.errors import LoadError
from spectral_monitor.record import write_json
from spectral_monitor.replay.claims import Claims
from spectral_monitor.replay.hub import Hub, Patience, RepositoryError
from spectral_monitor.replay.loading import LoadedModel, LoadOptions
from spectral_monitor.replay.plan import Listings, Planned, SeriesPlan, make_plan
from spectral_monitor.replay.runner import COMPLETE, NOTHING, PARTLY, NeedsModel, Replay, Result, Settings, report
from spectral_monitor.replay.selection import Selection

from .hub_server import Fault, HubServer
from .models import save, tiny_model
from .test_loading import write_gguf

REPO = "lab/series"
STEPS = (0, 1, 2, 4, 8, 64)


class LineRecorder:
    """Records a number a revision and, where it moves against the revision before, an "event" that needs the model."""

    def __init__(self, series: SeriesPlan | None, folder: Path) -> None:
        self.folder = folder
        self.looks = 0
        folder.mkdir(parents=True, exist_ok=True)

    def measure(self, loaded: LoadedModel, planned: Planned, mark: str | None) -> dict[str, Any]:
        self.looks += 1
        with torch.no_grad():
            value = float(sum(parameter.double().abs().sum() for parameter in loaded.model.parameters()))
        checkpoint = planned.checkpoint
        return {"step": checkpoint.step, "tokens": checkpoint.tokens, "value": value, "mark": mark}

    def stage(self, reading: dict[str, Any], folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "reading.json", reading)

    def staged(self, folder: Path) -> dict[str, Any] | None:
        file = folder / "reading.json"
        return json.loads(file.read_text()) if file.is_file() else None

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(file.read_text()) for file in sorted(self.folder.glob("line-*.json"))]

    def record(self, reading: dict[str, Any], loaded: LoadedModel | None) -> None:
        before = [line for line in self.lines() if line["step"] < reading["step"]]
        event = bool(before) and reading["value"] < before[-1]["value"]
        if event and loaded is None:
            raise NeedsModel
        write_json(self.folder / f"line-{reading['step']:09d}.json", {**reading, "event": event})

    def recorded(self, step: int) -> bool:
        return (self.folder / f"line-{step:09d}.json").is_file()

    def note(self, text: str, step: int) -> None:
        write_json(self.folder / "notes.json", text)

    def finish(self, table: Mapping[str, Any]) -> None:
        write_json(self.folder / "replay.json", dict(table))

    def close(self) -> None:
        return None


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight different checkpoints in folders named as revisions."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for step in STEPS:
        save(tiny_model(step), folder / f"step{step}")
    return folder


@pytest.fixture
def published(server: HubServer, checkpoints: Path) -> HubServer:
    server.add(REPO, {path.name: path for path in checkpoints.iterdir()} | {"main": checkpoints / "step64"})
    return server


def quick_hub() -> Hub:
    return Hub(Patience(tries=4, first_pause=0.01, longest_pause=0.05))


class Run:
    """One replay of a source into ``tmp/out``; ``go()`` may be called again, as after a restart."""

    def __init__(self, folder: Path, source: str = REPO, hub: Hub | None = None, **options: Any) -> None:
        self.folder = folder
        self.source = source
        self.hub = hub or quick_hub()
        self.selection = options.pop("selection", Selection())
        self.plan_options = {key: options.pop(key) for key in ("per_step", "allow_pickle", "code") if key in options}
        self.settings = Settings(folder / "out", folder / "out.replay", poll=0.01, **options)
        self.recorders: dict[str, LineRecorder] = {}

    def go(self) -> Result:
        listings = Listings(self.hub, self.settings.work / "listings")
        with Claims(self.settings.work / "claims").together("plan"):
            plan = make_plan(self.source, self.selection, listings, **self.plan_options)
        self.plan = plan
        self.recorders = {}

        def make(series: SeriesPlan, folder: Path) -> LineRecorder:
            return self.recorders.setdefault(series.name, LineRecorder(series, folder))

        self.result = Replay(plan, self.settings, make, self.hub).run()
        return self.result

    @property
    def statuses(self) -> dict[str, str]:
        return {row.revision: row.status for row in self.result.rows}

    def lines(self, series: str = "") -> list[dict[str, Any]]:
        out = self.folder / "out"
        return LineRecorder.lines(LineRecorder(self.plan.series[0], out / series if series else out))

    @property
    def looks(self) -> int:
        return sum(recorder.looks for recorder in self.recorders.values())


@pytest.fixture(scope="module")
def expected(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What a plain replay of the folders records."""
    run = Run(tmp_path_factory.mktemp("plain"), str(checkpoints))
    run.go()
    lines = run.lines()
    assert [line["step"] for line in lines] == list(STEPS)
    assert any(line["event"] for line in lines)
    return lines


def test_a_hub_repository_is_replayed_once_and_in_order(
    published: HubServer, tmp_path: Path, expected: list[dict[str, Any]]
) -> None:
    run = Run(tmp_path)
    assert run.go().status == COMPLETE
    assert run.lines() == expected
    assert run.looks == len(STEPS)
    weights = [item for item in published.requests if item.path.startswith("/storage/") and item.method == "GET"]
    assert len(weights) == len(STEPS)
    assert not list((tmp_path / "out.replay/downloads").glob("step*")), "finished revisions are still on the disk"
    unpinned = [item.path for item in published.requests if "/resolve/" in item.path and "/resolve/main" in item.path]
    assert unpinned == []
    # One request for the refs; one a revision for its files.
    assert published.count("/refs") == 1
    assert published.count("/tree/") == len(STEPS) + 1


FAULTS = {
    "rate limit": [Fault("429", "/tree/", times=2, value=0), Fault("429", "/storage/", times=2, value=0, after=3)],
    "server errors": [Fault("500", "", times=3, after=4), Fault("500", "/storage/", times=3, after=2)],
    "cut connections": [Fault("cut", "/storage/", times=2, value=10_000), Fault("cut", "/storage/", value=0, after=3)],
    "wrong bytes": [Fault("corrupt", "/storage/", times=1, after=2)],
    "cut small files": [Fault("cut", "/resolve/.*config.json", times=2, value=5)],
}


@pytest.mark.parametrize("kind", FAULTS)
def test_every_passing_fault_is_survived(
    published: HubServer, tmp_path: Path, expected: list[dict[str, Any]], kind: str
) -> None:
    published.order(*[Fault(**vars(fault)) for fault in FAULTS[kind]])
    run = Run(tmp_path)
    run.hub.sleep = lambda seconds: None
    assert run.go().status == COMPLETE, [row.reason for row in run.result.rows]
    assert published.faults == [], "the fault was never met"
    assert run.lines() == expected
    assert run.looks == len(STEPS)


def test_a_revision_that_stays_broken_gets_its_row_and_is_tried_again_at_the_next_start(
    published: HubServer, tmp_path: Path
) -> None:
    published.order(Fault("corrupt", "/storage/step4/", times=99))
    run = Run(tmp_path)
    assert run.go().status == PARTLY
    assert run.statuses == {f"step{step}": "failed" if step == 4 else "measured" for step in STEPS}
    (row,) = [row for row in run.result.rows if row.status == "failed"]
    assert "SHA-256 is not the listed one" in row.reason
    published.faults.clear()
    assert run.go().status == COMPLETE
    assert run.looks == 1
    assert [line["step"] for line in run.lines()] == list(STEPS)


def test_gated_repository_stops_the_replay_with_one_message(published: HubServer, tmp_path: Path) -> None:
    published.order(Fault("gated", "/resolve/", times=99))
    run = Run(tmp_path)
    with pytest.raises(RepositoryError, match=f"{REPO} is gated"):
        run.go()
    assert published.count("/resolve/") <= 2, "asked for one revision after the other"


def test_started_again_nothing_is_asked_and_nothing_measured_twice(published: HubServer, tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.go()
    before = len(published.requests)
    assert run.go().status == COMPLETE
    assert run.looks == 0
    assert len(published.requests) == before


class DiskWatch(threading.Thread):
    """Highest number of bytes below a folder while it runs."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self.folder, self.highest, self.over = folder, 0, threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.002):
            total = 0
            for folder, _, names in os.walk(self.folder):  # unlike rglob, does not mind folders that vanish meanwhile
                for path in (Path(folder, name) for name in names if name != "ledger.json"):
                    with contextlib.suppress(OSError):
                        total += 0 if path.is_symlink() else path.stat().st_size
            self.highest = max(self.highest, total)


def test_disk_budget_is_never_exceeded_and_foreign_files_stay(
    published: HubServer, tmp_path: Path, expected: list[dict[str, Any]], hub_cache: Path
) -> None:
    from huggingface_hub import hf_hub_download

    mine = Path(hf_hub_download(REPO, "model.safetensors", revision="step8"))
    size = sum(len(data) for data in published.repos[REPO]["step0"].values())
    budget = 2 * size + 2000
    published.rate = size * 20
    run = Run(tmp_path, budget=budget)
    watch = DiskWatch(tmp_path / "out.replay" / "downloads")
    watch.start()
    assert run.go().status == COMPLETE
    watch.over.set()
    watch.join()
    assert size < watch.highest <= budget
    assert run.lines() == expected
    assert mine.is_file(), "a file that was there before is gone"
    assert published.count("/storage/step8/", "GET") == 1, "a cached file was downloaded again"


def test_budget_smaller_than_a_revision_is_said_before_any_download(published: HubServer, tmp_path: Path) -> None:
    run = Run(tmp_path, budget=1000)
    with pytest.raises(LoadError, match="--disk 1,000 bytes cannot hold step"):
        run.go()
    assert published.sent() == 0


def test_kept_revisions_are_used_and_left_alone(published: HubServer, tmp_path: Path) -> None:
    run = Run(tmp_path, keep=True)
    run.go()
    kept = sorted((tmp_path / "out.replay/downloads").glob("step*/model.safetensors"))
    assert len(kept) == len(STEPS)
    shutil.rmtree(tmp_path / "out")
    for name in ("rows", "readings", "tensors"):
        shutil.rmtree(tmp_path / "out.replay" / name)
    sent = published.sent()
    again = Run(tmp_path)
    assert again.go().status == COMPLETE
    assert published.sent() == sent
    assert sorted((tmp_path / "out.replay/downloads").glob("step*/model.safetensors")) == kept


def test_ranks_share_the_work_and_write_the_same_record(
    published: HubServer, tmp_path: Path, expected: list[dict[str, Any]]
) -> None:
    """Threads stand in for ranks here; test_processes does it with processes."""
    size = sum(len(data) for data in published.repos[REPO]["step0"].values())
    runs = [Run(tmp_path, budget=3 * size) for _ in range(4)]
    threads = [threading.Thread(target=run.go) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert runs[0].lines() == expected
    assert sum(run.looks for run in runs) == len(STEPS), "a revision was measured twice"
    assert published.count("/storage/", "GET") == len(STEPS)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_shards_run_one_after_the_other_in_any_order(
    published: HubServer, tmp_path: Path, expected: list[dict[str, Any]], order: tuple[int, ...]
) -> None:
    runs = [Run(tmp_path, shard=(index, 3)) for index in order]
    results = [run.go() for run in runs]
    assert [result.status for result in results] == [COMPLETE] * 3
    assert results[0].unrecorded and not results[-1].unrecorded, "the last shard records what the others measured"
    assert len(results[-1].rows) == len(STEPS)
    assert runs[-1].lines() == expected
    assert sum(run.looks for run in runs) == len(STEPS)


def test_stages_are_never_joined(server: HubServer, tmp_path: Path) -> None:
    names = ["stage1-step100-tokens1B", "stage1-step200-tokens2B", "stage2-ingredient1-step100-tokens1B"]
    for index, name in enumerate(names):
        save(tiny_model(index), tmp_path / "pub" / name)
    server.add(REPO, {name: tmp_path / "pub" / name for name in names})
    run = Run(tmp_path)
    assert run.go().status == COMPLETE
    assert [line["step"] for line in run.lines("stage1")] == [100, 200]
    assert [line["step"] for line in run.lines("stage2-ingredient1")] == [100]
    assert [line["tokens"] for line in run.lines("stage1")] == [1e9, 2e9]


def test_report_has_a_row_for_everything(published: HubServer, tmp_path: Path) -> None:
    run = Run(tmp_path, selection=Selection(steps=(0, 64)))
    result = report(run.go(), run.plan)
    assert [row["revision"] for row in result["revisions"]] == ["step0", "step64"]
    wanted = {"revision", "step", "tokens", "status", "reason", "same_as", "commit", "seconds", "bytes"}
    assert all(wanted <= set(row) for row in result["revisions"])
    assert result["skipped"] == [{"name": "main", "reason": "its name tells no step"}]
    assert result["status"] == "complete"
    assert all(row["commit"] == published.commit(REPO, row["revision"]) for row in result["revisions"])
    json.dumps(result, allow_nan=False)


def test_nothing_measured_says_nothing(server: HubServer, tmp_path: Path) -> None:
    server.add(REPO, {"step1": {"config.json": b"{}", "README.md": b"x"}})
    run = Run(tmp_path)
    assert run.go().status == NOTHING
    assert run.statuses == {"step1": "no_weights"}
    assert not (tmp_path / "out").exists(), "an empty record was left behind"


# -- the cases of ../shared/cases.md, "Replaying published checkpoints" -----------------------------------------------


def test_case_step_branches_that_hold_the_final_model(tmp_path: Path) -> None:
    """Local folder imitating a repository with two groups of equal files."""
    folder = tmp_path / "repository"
    for seed, names in (
        (1, ("step0", "step1000", "step53000", "main")),
        (2, ("step54000", "step143000")),
        (3, ("step66000",)),
    ):
        for name in names:
            save(tiny_model(seed), folder / name)
    run = Run(tmp_path, str(folder))
    assert run.go().status == COMPLETE
    groups = run.plan.series[0].groups
    assert sorted(groups) == [("step0", "step1000", "step53000", "main"), ("step54000", "step143000")]
    assert run.statuses == {
        "step0": "duplicate",
        "step1000": "duplicate",
        "step53000": "measured",
        "step54000": "duplicate",
        "step66000": "measured",
        "step143000": "measured",
    }
    assert run.looks == 3
    marks = {line["step"]: line["mark"] for line in run.lines()}
    assert marks[66000] is None
    assert marks[53000] is not None and "step0" in marks[53000]
    assert marks[143000] is not None
    assert run.plan.series[0].onset_from == 66000
    assert any("onset is not determinable below step 66000" in note for note in report(run.result, run.plan)["notes"])
    same = {row.revision: row.same_as for row in run.result.rows}
    assert (same["step0"], same["step1000"], same["step54000"]) == ("step53000", "step53000", "step143000")


def test_case_final_weights_under_early_names_known_from_the_listing_alone(server: HubServer, tmp_path: Path) -> None:
    for seed in (0, 1):
        save(tiny_model(seed), tmp_path / str(seed))
    names = {"step0": "0", "step1000": "1", "step2000": "0", "main": "0"}
    server.add(REPO, {name: tmp_path / folder for name, folder in names.items()})
    run = Run(tmp_path)
    run.go()
    assert run.statuses == {"step0": "duplicate", "step1000": "measured", "step2000": "measured"}
    assert server.count("/storage/.*safetensors", "GET") == 2
    assert {line["step"]: line["mark"] for line in run.lines()} == {1000: None, 2000: None}


def test_step_zero_and_one_may_be_equal(server: HubServer, tmp_path: Path) -> None:
    for seed in (0, 2):
        save(tiny_model(seed), tmp_path / str(seed))
    server.add(REPO, {"step0": tmp_path / "0", "step1": tmp_path / "0", "step2": tmp_path / "2"})
    run = Run(tmp_path)
    run.go()
    assert run.statuses == {"step0": "measured", "step1": "duplicate", "step2": "measured"}
    assert [line["mark"] for line in run.lines()] == [None, None]
    assert run.plan.series[0].onset_from is None


def test_single_shards_of_another_step_are_found_and_marked(server: HubServer, tmp_path: Path) -> None:
    for seed in (0, 1, 2):
        save(tiny_model(seed), tmp_path / str(seed), shard="20KB")
    shards = sorted(path.name for path in (tmp_path / "2").glob("model-*.safetensors"))
    shutil.copytree(tmp_path / "1", tmp_path / "mixed")
    shutil.copy(tmp_path / "2" / shards[0], tmp_path / "mixed" / shards[0])
    names = {"step0": "0", "step50000": "mixed", "step143000": "2", "main": "2"}
    server.add(REPO, {name: tmp_path / folder for name, folder in names.items()})
    run = Run(tmp_path)
    run.go()
    assert run.statuses == {"step0": "measured", "step50000": "mixed", "step143000": "measured"}
    (row,) = [row for row in run.result.rows if row.status == "mixed"]
    assert row.same_as == "step143000"
    assert f"1 of {len(shards)} shards are those of step143000" in row.reason
    assert {line["step"]: bool(line["mark"]) for line in run.lines()} == {0: False, 50000: True, 143000: False}


def test_equal_tensors_in_another_file_are_found_after_loading(tmp_path: Path) -> None:
    folder = tmp_path / "repository"
    save(tiny_model(0), folder / "step10")
    save(tiny_model(0), folder / "step20", shard="20KB")  # the same weights, cut into other files
    save(tiny_model(1), folder / "step30")
    run = Run(tmp_path, str(folder))
    run.go()
    assert run.statuses == {"step10": "measured", "step20": "duplicate", "step30": "measured"}


def test_case_every_request_names_a_commit(published: HubServer, tmp_path: Path) -> None:
    run = Run(tmp_path, selection=Selection(steps=(1, 64)))
    run.go()
    commits = {published.commit(REPO, name) for name in published.repos[REPO]}
    for item in published.requests:
        if "/resolve/" in item.path or "/tree/" in item.path:
            assert any(commit in item.path for commit in commits), item.path
    first, second = run.lines()
    assert first["value"] != second["value"]


def test_case_configurations_differ_between_revisions(tmp_path: Path) -> None:
    folder = tmp_path / "repository"
    for step in (1, 2, 3):
        save(tiny_model(step), folder / f"step{step}")
    for step, changes in (
        (2, {"model_type": "hf_internal"}),
        (3, {"model_type": "custom", "auto_map": {"AutoConfig": "c.C"}}),
    ):
        file = folder / f"step{step}" / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    run = Run(tmp_path, str(folder))
    assert run.go().status == PARTLY
    reasons = {row.revision: row.reason for row in run.result.rows}
    assert run.statuses == {"step1": "measured", "step2": "failed", "step3": "failed"}
    assert "does not know its model type 'hf_internal'" in reasons["step2"]
    assert "--trust-remote-code" in reasons["step3"]
    (measured,) = [row for row in run.result.rows if row.status == "measured"]
    assert set(measured.settings) == {"transformers", "torch", "dtype", "attention"}


def test_case_one_format_a_revision(server: HubServer, tmp_path: Path) -> None:
    save(tiny_model(1), tmp_path / "1")
    save(tiny_model(2), tmp_path / "2", pickled=True)
    save(tiny_model(3), tmp_path / "3", pickled=True, safetensors=False)
    server.add(REPO, {f"step{step}": tmp_path / str(step) for step in (1, 2, 3)})
    run = Run(tmp_path / "a")
    assert run.go().status == PARTLY
    assert run.statuses == {"step1": "measured", "step2": "measured", "step3": "no_weights"}
    assert "--allow-pickle" in run.result.rows[2].reason
    assert server.count(r"/storage/.*\.bin", "GET") == 0
    run = Run(tmp_path / "b", allow_pickle=True, load=LoadOptions(allow_pickle=True))
    assert run.go().status == COMPLETE
    assert server.count(r"/storage/.*\.bin", "GET") == 1


def test_case_rate_limit_on_the_fourth_call(
    published: HubServer, tmp_path: Path, expected: list[dict[str, Any]]
) -> None:
    published.order(Fault("429", "/api/", after=3, value=30))
    waits: list[float] = []
    hub = quick_hub()
    hub.sleep = waits.append
    run = Run(tmp_path, hub=hub)
    # The client's own back-off for listings obeys the header as well; keep the test from waiting for it.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.utils._http.time.sleep", waits.append)
        assert run.go().status == COMPLETE
    assert 31.0 in waits
    assert run.lines() == expected
    assert run.looks == len(STEPS)


def test_case_offline_measures_what_is_cached_and_lists_the_rest(
    published: HubServer, tmp_path: Path, offline_switch: Any
) -> None:
    from huggingface_hub import hf_hub_download, snapshot_download

    for step in (0, 4, 64):
        snapshot_download(REPO, revision=f"step{step}")
    for step in (1, 2, 8):
        hf_hub_download(REPO, "config.json", revision=f"step{step}")
    offline_switch()
    before = len(published.requests)
    run = Run(tmp_path)
    assert run.go().status == PARTLY
    assert len(published.requests) == before
    assert run.statuses == {f"step{s}": "measured" if s in (0, 4, 64) else "skipped" for s in (0, 1, 2, 4, 8, 64)}
    assert all("not in the local cache" in row.reason for row in run.result.rows if row.status == "skipped")


def test_case_half_written_checkpoints(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for step in (10, 20, 30, 40, 50, 60):
        save(tiny_model(step), folder / f"checkpoint-{step}", shard="20KB" if step in (20, 30) else None)
        (folder / f"checkpoint-{step}" / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    shards = sorted((folder / "checkpoint-20").glob("model-*.safetensors"))
    shards[0].write_bytes(shards[0].read_bytes()[: shards[0].stat().st_size // 2])
    sorted((folder / "checkpoint-30").glob("model-*.safetensors"))[0].unlink()
    (folder / "checkpoint-40" / "model.safetensors").write_bytes(b"")
    (folder / "checkpoint-50" / "trainer_state.json").unlink()
    (folder / "checkpoint-60" / "trainer_state.json").write_text("")
    run = Run(tmp_path, str(folder))
    assert run.go().status == PARTLY
    reasons = {row.revision: row.reason for row in run.result.rows}
    assert run.statuses == {f"checkpoint-{s}": "measured" if s == 10 else "failed" for s in (10, 20, 30, 40, 50, 60)}
    assert "cut off or damaged" in reasons["checkpoint-20"]
    assert "is not there" in reasons["checkpoint-30"]
    assert "is empty" in reasons["checkpoint-40"]
    assert "no whole trainer_state.json" in reasons["checkpoint-50"]
    assert "no whole trainer_state.json" in reasons["checkpoint-60"]


def test_no_model_outlives_its_measurement(checkpoints: Path, tmp_path: Path) -> None:
    import weakref

    alive: list[int] = []
    models: list[Any] = []

    class Watching(LineRecorder):
        def measure(self, loaded: LoadedModel, planned: Planned, mark: str | None) -> dict[str, Any]:
            alive.append(sum(model() is not None for model in models))
            models.append(weakref.ref(loaded.model))
            return super().measure(loaded, planned, mark)

    plan = make_plan(str(checkpoints), Selection(), Listings(quick_hub()))
    Replay(plan, Settings(tmp_path / "out", tmp_path / "work"), Watching, quick_hub()).run()
    assert alive == [0] * len(STEPS)
    assert [model() for model in models] == [None] * len(STEPS)


def test_gguf_files_are_replayed(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    folder = tmp_path / "files"
    folder.mkdir()
    for step in (40, 5):
        write_gguf(gguf, folder / f"step{step}.gguf", seed=step)
    run = Run(tmp_path, str(folder))
    assert run.go().status == COMPLETE, [row.reason for row in run.result.rows]
    first, second = run.lines()
    assert (first["step"], second["step"]) == (5, 40)
    assert first["value"] != second["value"]
