"""The commands: plan, exit status, table, refusals that leave nothing behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from spectral_monitor.errors import LoadError, RecordError, ScheduleError, SpectralMonitorError
from spectral_monitor.record import RunRecord
from spectral_monitor.replay import cli
from spectral_monitor.replay.runner import shard_of

from .hub_server import HubServer
from .models import save, tiny_model

REPO = "lab/cli"
SMALL = ["--n", "8", "--seq-len", "48", "--no-check", "--null-draws", "0"]


@pytest.fixture
def app() -> typer.Typer:
    made = typer.Typer()
    cli.register(made)
    return made


@pytest.fixture
def published(server: HubServer, tmp_path: Path) -> HubServer:
    for step in (0, 1, 2, 4):
        save(tiny_model(step), tmp_path / "pub" / f"step{step}")
    save(tiny_model(8), tmp_path / "pub" / "step8", pickled=True, safetensors=False)
    server.add(REPO, {path.name: path for path in (tmp_path / "pub").iterdir()})
    return server


def run(app: typer.Typer, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["replay", *arguments])


def refused(result: Result) -> SpectralMonitorError:
    assert isinstance(result.exception, SpectralMonitorError), result.output + repr(result.exception)
    assert "\n" not in str(result.exception)
    return result.exception


def test_dry_run_prints_the_plan_and_loads_nothing(
    published: HubServer, app: typer.Typer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    result = run(app, REPO, "--dry-run", "--json", "plan.json")
    assert result.exit_code == 0, result.output
    assert published.sent() == 0
    plan = json.loads(Path("plan.json").read_text())
    size = len(published.repos[REPO]["step0"]["model.safetensors"])
    assert plan["costs"]["bytes"] == 4 * size
    assert plan["costs"]["dtype"] == "float32"
    parameters = sum(value.numel() for value in tiny_model(0).parameters())
    assert plan["costs"]["parameters"] == pytest.approx(parameters, rel=0.1)
    assert plan["costs"]["memory_bytes"] == 4 * plan["costs"]["parameters"]
    assert plan["costs"]["seconds"] > 0
    statuses = {row["revision"]: row["status"] for row in plan["plan"]}
    assert statuses == {
        "step0": "measured",
        "step1": "measured",
        "step2": "measured",
        "step4": "measured",
        "step8": "no_weights",
    }
    assert "--allow-pickle" in result.output.replace("\n", " ")
    Path("plan.json").unlink()
    assert sorted(tmp_path.iterdir()) == before, "the dry run left something behind"


def test_replay_writes_record_and_table(published: HubServer, app: typer.Typer, tmp_path: Path) -> None:
    out, table = tmp_path / "run", tmp_path / "table.json"
    arguments = [REPO, "--out", str(out), "--json", str(table), "--tokens-per-step", "100", *SMALL]
    result = run(app, *arguments)
    assert result.exit_code == 3, result.output
    rows = json.loads(table.read_text())["revisions"]
    assert [(row["revision"], row["status"]) for row in rows] == [
        *((f"step{step}", "measured") for step in (0, 1, 2, 4)),
        ("step8", "no_weights"),
    ]
    assert [row["tokens"] for row in rows] == [0, 100, 200, 400, 800]
    observations = RunRecord.open(out).observations()
    assert [(o.step, o.tokens, o.label, o.tokens_estimated) for o in observations] == [
        (step, 100.0 * step, f"step{step}", True) for step in (0, 1, 2, 4)
    ]
    info = RunRecord.open(out).run["replay"]
    assert info["source"] == REPO and "--tokens-per-step" in info["tokens_from"][0]
    assert json.loads((out / "replay.json").read_text())["revisions"] == rows
    assert run(app, *arguments, "--allow-pickle").exit_code == 0, "what had no weights is tried with the new option"
    assert RunRecord.open(out).steps() == [0, 1, 2, 4, 8]
    assert run(app, REPO, "--out", str(out), "--steps", "1,4", *SMALL).exit_code == 0
    assert len(json.loads((out / "replay.json").read_text())["revisions"]) == 5


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ([], LoadError, "give a source"),
        (["lab/absent"], LoadError, "does not exist on the Hub"),
        ([REPO, "--steps", "1,3"], ScheduleError, "no checkpoint at step 3; the nearest is at step"),
        ([REPO, "--points", "0"], ScheduleError, "selects nothing"),
        ([REPO, "--points", "2", "--last"], ScheduleError, "not several"),
        ([REPO, "--preset", "olmo-1b"], ScheduleError, "preset olmo-1b belongs to allenai/OLMo-1B-0724-hf"),
        ([REPO, "--disk", "much"], LoadError, "--disk 'much'"),
        ([REPO, "--disk", "1kB"], LoadError, "cannot hold step"),
        ([REPO, "--dtype", "int3"], LoadError, "unknown dtype"),
        ([REPO, "--shard", "5/4"], ScheduleError, "--shard 5/4"),
        ([REPO, "--stage", "stage1"], ScheduleError, "no stage 'stage1'"),
        ([REPO, "--json", "no/such/folder/x.json"], LoadError, "its folder does not exist"),
        (["./nowhere"], LoadError, "does not exist"),
    ],
)
def test_wrong_input_gets_one_sentence_and_leaves_nothing(
    published: HubServer,
    app: typer.Typer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    error: type[Exception],
    said: str,
) -> None:
    place = tmp_path / "here"
    place.mkdir()
    monkeypatch.chdir(place)
    caught = refused(run(app, *arguments, *SMALL))
    assert isinstance(caught, error)
    assert said in str(caught)
    assert published.sent() == 0
    assert [path for path in place.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("option", ["--baseline", "--protocol"])
def test_an_unknown_choice_is_refused_with_the_choices_there_are(
    published: HubServer, app: typer.Typer, option: str
) -> None:
    refusal = run(app, REPO, option, "none")
    assert refusal.exit_code == 2 and published.sent() == 0
    assert "'none' is not one of" in refusal.output


def test_another_directory_for_other_library_versions(published: HubServer, app: typer.Typer, tmp_path: Path) -> None:
    out = tmp_path / "run"
    run(app, REPO, "--out", str(out), "--steps", "1", *SMALL)
    file = out / "run.json"
    record = json.loads(file.read_text())
    record["versions"]["transformers"] = "4.40.0"
    file.write_text(json.dumps(record))
    run(app, REPO, "--out", str(out), "--steps", "2", *SMALL)
    assert RunRecord.open(out).steps() == [1]
    (beside,) = [path for path in tmp_path.glob("run-transformers-*") if not path.name.endswith(".replay")]
    assert RunRecord.open(beside).steps() == [2]
    with pytest.raises(RecordError, match="was measured in float32, --dtype says bfloat16"):
        raise refused(run(app, REPO, "--out", str(beside), "--steps", "4", "--dtype", "bfloat16", *SMALL))


def test_list_file_of_two_repositories_makes_two_series(published: HubServer, app: typer.Typer, tmp_path: Path) -> None:
    published.add("lab/second", {"step4": tmp_path / "pub" / "step1"})
    listed = tmp_path / "list.csv"
    listed.write_text(f"repo,revision,step,tokens_B\n{REPO},step1,1,0.5\n{REPO},step2,2,1\nlab/second,step4,4,2\n")
    assert run(app, str(listed), "--out", str(tmp_path / "run"), *SMALL).exit_code == 0
    first = RunRecord.open(tmp_path / "run" / "lab--cli").observations()
    assert [(o.step, o.tokens) for o in first] == [(1, 5e8), (2, 1e9)]
    assert RunRecord.open(tmp_path / "run" / "lab--second").steps() == [4]
    listed.write_text(f"{REPO} step1\n{REPO} step3\n")
    assert "line 2" in str(refused(run(app, str(listed), "--out", str(tmp_path / "other"), *SMALL)))
    assert not (tmp_path / "other").exists()


def test_shards_cover_everything_however_they_are_counted() -> None:
    assert {shard_of(f"{index}/3") for index in range(3)} == {shard_of(f"{index}/3") for index in (1, 2, 3)}
    for text in ("x", "1", "-1/3", "4/3", "1/0"):
        with pytest.raises(ScheduleError, match="--shard"):
            shard_of(text)


@pytest.mark.parametrize(
    ("text", "size"), [("50GB", 50 * 10**9), ("1.5T", 1_500_000_000_000), ("2GiB", 2 * 1024**3), ("700 mb", 7 * 10**8)]
)
def test_sizes(text: str, size: int) -> None:
    assert cli.parse_size(text) == size
