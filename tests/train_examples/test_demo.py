"""The demo command: the real Trainer, the real callback, a record and a picture at the end."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from spectral_monitor.record import RunRecord
from train_examples.demo import demo
from train_examples.emergence import RECIPES

APP = typer.Typer()
APP.command()(demo)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    small = dataclasses.replace(RECIPES["all-join"], name="small", heads=2, width=16, mlp_width=16, batch=2, steps=12)
    monkeypatch.setitem(RECIPES, "small", small)


def test_a_run_leaves_a_record_and_a_picture_and_says_where(tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = CliRunner().invoke(APP, ["--recipe", "small", "--out", str(out), "--seed", "3"])
    assert result.exit_code == 0, result.output
    record = RunRecord.open(out / "spectral_monitor")
    steps = sorted({observation.step for observation in record.observations()})
    assert steps[0] == 0 and steps[-1] == 12
    last = [observation for observation in record.observations() if observation.step == 12]
    assert last[0].tokens == 12 * 2 * 64 and not last[0].tokens_estimated
    assert (out / "spectral_monitor" / "trajectories.svg").read_text().startswith("<svg")
    assert re.search(r"step +12 .*top-1", result.output)
    assert "loss" in result.output and "planted: nothing but the data" in result.output
    assert "No head reached 20" in result.output and "no circuit is claimed" in result.output


def test_a_second_run_keeps_the_first_ones_record(tmp_path: Path) -> None:
    for _ in range(2):
        result = CliRunner().invoke(APP, ["--recipe", "small", "--steps", "2", "--out", str(tmp_path)])
        assert result.exit_code == 0, result.output
    assert (tmp_path / "spectral_monitor" / "run.json").exists()
    assert (tmp_path / "spectral_monitor-1" / "run.json").exists()


def test_mistakes_are_one_sentence_and_leave_nothing(tmp_path: Path) -> None:
    wrong = CliRunner().invoke(APP, ["--recipe", "nonsense", "--out", str(tmp_path / "a")])
    assert wrong.exit_code == 1 and "choose one of" in wrong.output and not (tmp_path / "a").exists()
    (tmp_path / "file").write_text("")
    blocked = CliRunner().invoke(APP, ["--recipe", "small", "--out", str(tmp_path / "file")])
    assert blocked.exit_code == 1 and "give another --out" in blocked.output
    assert CliRunner().invoke(APP, ["--steps", "0"]).exit_code != 0
