from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from spectral_monitor.development_cli import register
from spectral_monitor.record import RunRecord, write_json

from .development.synthetic import observation

app = typer.Typer()
register(app)


def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    probes = {"induction": {"fingerprint": "f" * 64, "capability": "induction"}}
    with RunRecord.create(tmp_path / "run", {"probes": probes}) as record:
        for step in (1, 2, 4, 8):
            bar = 80.0 if step > 2 else 1.0
            record.append(observation(step, selectivity={"induction": [bar, bar, bar, 1, 1, 1, 1, 1]}))
    return tmp_path / "run"


def test_develop_prints_and_writes(run: Path, tmp_path: Path) -> None:
    done = call("develop", run, "--json", tmp_path / "out" / "found.json", "--phase", "books@4")
    assert done.exit_code == 0, done.output
    assert "circuit of 3 heads" in done.output and "Circuits across a switch of the data" in done.output
    found = json.loads((tmp_path / "out" / "found.json").read_text())
    assert set(found) >= {
        "shape",
        "first_token_fraction",
        "first_token_by_layer",
        "milestones",
        "final_circuits",
        "recall",
        "lead",
        "lead_base_rate",
        "integral",
    }
    assert found["milestones"]["induction_heads>=3"]["after_tokens"] == 200
    assert found["milestones"]["induction_heads>=3"]["by_tokens"] == 400
    assert found["milestones"]["induction_heads>=5"]["by_tokens"] is None
    assert found["recall"]["induction"]["100"] == found["recall"]["induction"]["33"]
    assert found["recall"]["induction"]["100"]["tokens"] == 400
    assert found["recall"]["induction"]["100"]["fraction"] == 0.5


def test_import_develop_report_export_in_a_row(tmp_path: Path) -> None:
    file = tmp_path / "in.csv"
    lines = ["iteration,tokens,layer,head,pr"] + [f"{s},{s * 10},0,{h},{1 + s * h}" for s in (1, 2) for h in (0, 1)]
    file.write_text("\n".join(lines) + "\n")
    done = call("import", file, "--out", tmp_path / "run", "--rename", "iteration=step")
    assert done.exit_code == 0 and "2 observations of 2 heads" in done.output
    done = call("develop", tmp_path / "run")
    assert done.exit_code == 0 and "holds no induction selectivity" in done.output
    done = call("report", tmp_path / "run", "-o", tmp_path / "report.html", "--figures", tmp_path / "figures")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "report.html").stat().st_size > 20_000 and (tmp_path / "figures" / "ranking.csv").exists()
    done = call("export", tmp_path / "run")
    assert done.exit_code == 0 and (tmp_path / "run-dataset" / "observations.parquet").exists()


def test_compare_prints_overlaps(run: Path, tmp_path: Path) -> None:
    with RunRecord.create(tmp_path / "other", {"probes": {}}) as record:
        record.append(observation(1, selectivity={"induction": [80, 80, 1, 1, 1, 1, 1, 1]}))
    done = call("compare", run, tmp_path / "other", "--json", tmp_path / "found.json")
    assert done.exit_code == 0 and "The same heads?" in done.output
    pair = json.loads((tmp_path / "found.json").read_text())["pairs"][0]
    assert pair["overlaps"]["induction circuit"]["jaccard"] == pytest.approx(2 / 3)


def test_wrong_input_is_one_sentence_and_status_1(run: Path, tmp_path: Path) -> None:
    with RunRecord.create(tmp_path / "empty", {"probes": {}}):
        pass
    (tmp_path / "newer").mkdir()
    write_json(tmp_path / "newer" / "run.json", {"format": 99})
    with RunRecord.create(tmp_path / "other", {"probes": {}}) as record:
        record.append(observation(1, fingerprint="0" * 64))
    cases = [
        (("develop", tmp_path / "none"), "no run directory"),
        (("develop", tmp_path), "no run.json"),
        (("develop", tmp_path / "newer"), "format 99"),
        (("develop", tmp_path / "empty"), "no observation"),
        (("develop", run, "--probe", "keys"), "it has: induction"),
        (("develop", run, "--phase", "books"), "NAME@STEP"),
        (("develop", run, "--rise", "1"), "above 1"),
        (("report", tmp_path / "empty"), "no observation"),
        (("report", run, "-o", tmp_path), "is a directory"),
        (("compare", run), "at least two"),
        (("compare", run, tmp_path / "other"), "different probe batches"),
        (("compare", run, tmp_path / "other", "--model", "a"), "different probe batches"),
        (("export", run, "--to", "csv"), "parquet or hub"),
        (("export", run, "--to", "hub"), "--repo"),
        (("import", tmp_path / "none.csv", "--out", tmp_path / "made"), "no file at"),
        (("import", tmp_path / "none.csv", "--out", tmp_path / "made", "--rename", "x"), "OLD=NEW"),
        (("calibrate", tmp_path / "nothing"), "does not exist"),
        (("calibrate", tmp_path / "nothing", "--draws", "0"), "--draws, --null-draws and --batch-size are 1 or more"),
        (("calibrate", tmp_path / "nothing", "--batch-size", "0"), "are 1 or more"),
    ]
    for arguments, says in cases:
        done = call(*arguments)
        assert done.exit_code == 1, (arguments, done.output)
        lines = [line for line in done.output.splitlines() if line]
        assert len(lines) == 1 and lines[0].startswith("Error: ") and says in lines[0], (arguments, done.output)
    assert not (tmp_path / "made").exists()
