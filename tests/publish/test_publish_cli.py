from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from spectral_monitor.errors import RecordError
from spectral_monitor.publish import cli
from spectral_monitor.publish.names import PublishError

from . import factories as make
from .offline import offline_environment

app = typer.Typer()
cli.register(app)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    make.record(tmp_path / "run")
    return tmp_path / "run"


def test_watch_once(run_dir: Path) -> None:
    result = CliRunner().invoke(app, ["watch", str(run_dir), "--once"])
    assert result.exit_code == 0 and "L1H0*" in result.output and "CAUSAL" in result.output


@pytest.mark.parametrize("command", ["watch", "serve", "sync"])
def test_a_directory_without_a_run_is_one_sentence(tmp_path: Path, command: str) -> None:
    result = CliRunner().invoke(app, [command, str(tmp_path)])
    assert result.exit_code != 0 and isinstance(result.exception, RecordError)
    assert "no run.json" in str(result.exception) and "\n" not in str(result.exception)
    assert os.listdir(tmp_path) == []


def test_dashboard_show(run_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip("wandb_workspaces")
    result = CliRunner().invoke(app, ["dashboard", "show", "--entity", "me"])
    assert result.exit_code == 0 and json.loads(result.output)["entity"] == "me"
    out = tmp_path / "workspace.json"
    result = CliRunner().invoke(app, ["dashboard", "show", "--run-dir", str(run_dir), "--out", str(out)])
    assert result.exit_code == 0 and "spectral_monitor/head/L1H0/pr" in out.read_text()
    result = CliRunner().invoke(app, ["dashboard", "show", "--out", str(tmp_path / "no" / "where.json")])
    assert isinstance(result.exception, PublishError) and "cannot be written" in str(result.exception)


def test_sync_offline(run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    answer = subprocess.run(
        [sys.executable, "-c", PROGRAM, "sync", str(run_dir), "--offline", "--name", "mine"],
        check=True,
        env=offline_environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "8 observations, 3 events and 1 verdicts" in answer.stdout
    folder = re.search(r"wandb sync (\S+)", answer.stdout)
    assert folder is not None and list(Path(folder[1]).glob("run-*.wandb"))


PROGRAM = """
import signal
import typer
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test started in the background inherits "ignore"
from spectral_monitor.publish import cli
app = typer.Typer()
cli.register(app)
app()
"""


def test_serve_says_where_and_ends_on_interrupt(run_dir: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "serve", str(run_dir), "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        address = re.search(r"http://127\.0\.0\.1:\d+/", line)
        assert address is not None, line
        with urllib.request.urlopen(address[0] + "live.json", timeout=300) as answer:
            assert json.load(answer)["name"] == "run"
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 0
    finally:
        process.kill()
        process.wait()
