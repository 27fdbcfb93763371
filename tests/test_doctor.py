"""The examination of a model before a run, and its command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from spectral_monitor import doctor, doctor_cli
from tests.architectures.families import family
from tests.architectures.shrink import tiny_config
from tests.architectures.tiny import build, tiny_probe

PROBE = tiny_probe(rows=16)


@pytest.fixture
def app() -> typer.Typer:
    app = typer.Typer()
    doctor_cli.register(app)
    app.callback()(lambda: None)
    return app


def test_a_readable_model_is_described() -> None:
    model = family("gpt_oss")
    diagnosis = doctor.examine(model, PROBE)
    assert diagnosis.readable and diagnosis.finite
    assert diagnosis.heads == 8
    assert [(layer.layer, layer.heads, layer.head_dim) for layer in diagnosis.layers] == [(0, 4, 8), (1, 4, 8)]
    assert diagnosis.logits_difference == 0
    assert all(layer.ablation > 1e-3 for layer in diagnosis.layers)
    assert all(layer.sink > 0.01 for layer in diagnosis.layers)
    assert diagnosis.layers[0].reach["first_token"] == 0  # window of 8 in rows of 24
    assert diagnosis.layers[1].reach["first_token"] == 1
    assert diagnosis.seconds_observation > 0 and diagnosis.kept_bytes > 0
    text = "\n".join(doctor.summary(diagnosis))
    assert "8 heads in 2 attention layers" in text
    assert "learned sink" in text and "out of reach" in text


def test_a_projection_that_ignores_its_input_is_told() -> None:
    model = family("llama grouped-query")
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight.zero_()
    diagnosis = doctor.examine(model, PROBE)
    assert [layer.ablation == 0 for layer in diagnosis.layers] == [False, True]
    assert "ABLATION DOES NOT REACH" in doctor.summary(diagnosis)[3]


def test_a_refused_model_is_told_with_the_reason() -> None:
    diagnosis = doctor.examine(build(tiny_config("mamba")), PROBE)
    assert not diagnosis.readable
    assert "no softmax attention" in diagnosis.reason
    assert doctor.summary(diagnosis)[1].startswith("REFUSED: ")


def test_half_precision_overflow_is_told() -> None:
    model = family("gpt_neox")
    with torch.no_grad():
        model.gpt_neox.layers[1].attention.query_key_value.weight.mul_(1e5)
    diagnosis = doctor.examine(model.half(), PROBE)
    assert diagnosis.readable and not diagnosis.finite
    assert any(line.startswith("NOT FINITE") for line in doctor.summary(diagnosis))


def test_command_prints_and_writes_json(app: typer.Typer, tmp_path: Path) -> None:
    model: Any = family("llama grouped-query")
    model.save_pretrained(tmp_path / "model")
    report = tmp_path / "report.json"
    result = CliRunner().invoke(app, ["doctor", str(tmp_path / "model"), "--n", "16", "--json", str(report)])
    assert result.exit_code == 0, result.output
    assert "L1: 4 heads of 8" in result.output
    data = json.loads(report.read_text())
    assert data["readable"] is True and data["heads"] == 8
    assert data["source"] == str(tmp_path / "model")


def test_command_refuses_with_status_one_and_bad_input_with_two(app: typer.Typer, tmp_path: Path) -> None:
    build(tiny_config("mamba")).save_pretrained(tmp_path / "mamba")
    result = CliRunner().invoke(app, ["doctor", str(tmp_path / "mamba"), "--n", "8", "--seq-len", "24"])
    assert result.exit_code == 1
    assert "REFUSED" in result.output
    result = CliRunner().invoke(app, ["doctor", str(tmp_path / "nothing")])
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    target = tmp_path / "missing" / "report.json"
    result = CliRunner().invoke(app, ["doctor", str(tmp_path / "mamba"), "--json", str(target)])
    assert result.exit_code == 2
    assert not target.exists()
