"""``spectral-monitor scan`` as a user types it: a table, a JSON file, a record, or one sentence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from spectral_monitor.observation import CLASSES
from spectral_monitor.record import RunRecord
from tests.models import DATA, tiny_llama


def scan(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "spectral_monitor", "scan", *map(str, arguments)]
    environment = {**os.environ, "COLUMNS": "200", "PYTHONPATH": str(Path(__file__).parents[1])}
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment)


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    tiny_llama().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scan")
    run = scan(
        DATA / "emergence", "--n", 64, "--member", 20, "--json", folder / "scan.json", "--out", folder / "record"
    )
    return run, folder


def test_the_trained_model_gives_a_causal_circuit(trained):
    run, folder = trained
    assert run.returncode == 0, run.stderr
    found = json.loads((folder / "scan.json").read_text())
    circuit = json.loads((DATA / "emergence" / "circuit.json").read_text())
    assert found["circuits"]["induction"] == [f"L1H{head}" for head in circuit]
    assert {verdict["mode"] for verdict in found["verdicts"]} == {"zero", "mean"}
    assert all(verdict["verdict"] == "causal" for verdict in found["verdicts"])
    assert found["confirmed"] is True
    assert "causal" in run.stdout and "matched random" in run.stdout


def test_the_json_has_the_documented_keys(trained):
    _, folder = trained
    found = json.loads((folder / "scan.json").read_text(), parse_constant=lambda name: pytest.fail(f"bare {name}"))
    head = found["heads"][13]
    assert {"layer", "head", "pr", "pr_moment", "attention", "selectivity", "baseline", "head_class"} <= head.keys()
    assert set(head["attention"]) == set(head["selectivity"]) == set(CLASSES) == set(found["circuits"])
    verdict = found["verdicts"][0]
    documented = {"capability", "heads", "mode", "verdict", "p_value", "draws", "distinct_draws", "effect", "effect_ci"}
    assert documented | {"metrics"} <= verdict.keys()
    assert set(verdict["metrics"]) == {"baseline", "circuit", "upper bound"}
    assert {"accuracy", "loss", "fingerprint"} <= found["probe"].keys()
    assert found["probe"]["accuracy"] > 0.8


def test_the_record_opens_with_ordinary_tools(trained):
    from datasets import load_dataset

    _, folder = trained
    record = RunRecord.open(folder / "record")
    assert len(record.observations()) == 1 and len(record.verdicts()) == 2
    files = str(folder / "record" / "observations" / "*.parquet")
    table = load_dataset("parquet", data_files=files, cache_dir=str(folder / "cache"))["train"]
    assert len(table) == 24 and {"pr", "attention_induction", "selectivity_induction"} <= set(table.column_names)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--n", 0], "at least one row, not n = 0"),
        (["--seq-len", 100], "takes at most 64"),
        (["--member", -1], "threshold member must be a number from 0 up"),
        (["--protocol", "published"], "vocabulary has 100"),
        (["--token-range", 0, 20], "at least 32 token ids"),
        (["--baseline", "uniform", "--member", 80], "no head can reach"),
        (["--draws", 0], "--draws is a number from 1 up"),
        (["--dtype", "float12"], "float12"),
        (["--json", "nowhere/x.json"], "folder does not exist"),
        (["--revision", "step5"], "step5"),
    ],
)
def test_a_mistake_ends_with_one_sentence(llama, tmp_path, arguments, said):
    run = scan(llama, *arguments, "--out", tmp_path / "record", cwd=tmp_path)
    assert run.returncode != 0
    assert said in run.stderr and "Traceback" not in run.stderr
    assert not (tmp_path / "record").exists()


def test_an_unknown_model_is_refused(tmp_path):
    run = scan(tmp_path / "nothing")
    assert run.returncode != 0 and "does not exist" in run.stderr and "Traceback" not in run.stderr


def test_a_model_without_attention_is_refused(tmp_path):
    from transformers import MambaConfig, MambaForCausalLM

    MambaForCausalLM(MambaConfig(vocab_size=100, hidden_size=16, num_hidden_layers=1, state_size=4)).save_pretrained(
        tmp_path / "mamba"
    )
    run = scan(tmp_path / "mamba", "--n", 4, "--out", tmp_path / "record")
    assert run.returncode != 0 and "no softmax attention" in run.stderr and "Traceback" not in run.stderr
    assert not (tmp_path / "record").exists()


def test_a_run_directory_of_another_probe_is_refused(llama, tmp_path):
    assert scan(llama, "--n", 4, "--no-check", "--out", tmp_path / "record").returncode == 0
    run = scan(llama, "--n", 8, "--no-check", "--out", tmp_path / "record")
    assert run.returncode != 0 and "belongs to another probe" in run.stderr
    assert len(RunRecord.open(tmp_path / "record").observations()) == 1


def test_an_unwritable_run_directory_is_refused(llama):
    run = scan(llama, "--n", 4, "--out", "/proc/spectral/record")
    assert run.returncode != 0 and "cannot be written" in run.stderr and "Traceback" not in run.stderr


def test_help_needs_no_torch():
    check = "import sys; from spectral_monitor.cli import _register; _register(); assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", check], cwd=Path(__file__).parents[1]).returncode == 0
