from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from spectral_monitor.capture import Subject
from spectral_monitor.causal import CheckOptions
from spectral_monitor.errors import CaptureError, RecordError
from spectral_monitor.heads import Head
from spectral_monitor.interventions import composition, controllable, threshold_sweep, transplant, without
from spectral_monitor.probe import induction_probe
from spectral_monitor.reading import observation_of

from .models import DATA, tiny_llama, trained_model

OPTIONS = CheckOptions(first_look=19, max_draws=19)


@pytest.fixture(scope="module")
def trained():
    model = trained_model()
    probe = induction_probe(32, 64, vocabulary=64)
    subject = Subject(model, probe)
    observation = observation_of(subject.read(probe, 32), probe, step=0, tokens=None)
    return subject, probe, observation.heads, [Head(1, head) for head in model.circuit_heads]


def test_without_equals_zeroed_columns_and_leaves_no_trace():
    model = tiny_llama()
    probe = induction_probe(4, 32, vocabulary=100)
    subject = Subject(model, probe)
    tokens = torch.from_numpy(probe.tokens)
    with torch.no_grad():
        intact = model(tokens).logits
        with without(subject, [Head(1, 2), Head(2, 0)]):
            ablated = model(tokens).logits
        for head, layer in ((2, 1), (0, 2)):
            weight = model.model.layers[layer].self_attn.o_proj.weight
            kept = weight.clone()
            weight[:, head * 16 : (head + 1) * 16] = 0
            model.model.layers[layer].self_attn.kept = kept
        zeroed = model(tokens).logits
        for layer in (1, 2):
            attention = model.model.layers[layer].self_attn
            attention.o_proj.weight.copy_(attention.kept)
        torch.testing.assert_close(ablated, zeroed, rtol=0, atol=1e-6)
        assert not torch.equal(ablated, intact)
        assert torch.equal(model(tokens).logits, intact)
        with pytest.raises(RuntimeError, match="inside"), without(subject, [Head(0, 0)]):
            raise RuntimeError("inside")
        assert torch.equal(model(tokens).logits, intact)
    with pytest.raises(CaptureError, match="L1H9"), without(subject, [Head(1, 9)]):
        pass


def test_a_sweep_finds_the_set_that_is_enough(trained):
    subject, probe, heads, circuit = trained
    sweep = threshold_sweep(subject, probe, heads, (1000.0, 20.0), options=OPTIONS, batch_size=32)
    low, high = sweep.points
    assert [point.threshold for point in sweep.points] == [20.0, 1000.0]
    assert set(circuit) <= set(low.heads) and low.verdict is not None and low.verdict.verdict == "causal"
    assert low.top1 < 0.2 < sweep.baseline_top1 and low.random_top1.min() > low.top1
    assert high.verdict is None and high.heads == () and np.isnan(high.top1)
    assert sweep.lowest_at_floor in (None, 20.0)


def test_composition_goes_one_way(trained):
    subject, probe, heads, circuit = trained
    previous = [
        head
        for head, mass in zip(heads, heads.attention["previous_token"], strict=True)
        if head.layer == 0 and mass > 0.5
    ]
    assert previous, "the trained model has previous-token heads in layer 0"
    forth = composition(
        subject, probe, "previous_token", previous, "induction", circuit, draws=4, options=OPTIONS, batch_size=32
    )
    assert forth.after.mean() < 0.5 * forth.before.mean()
    assert forth.after.mean() < forth.control.mean(axis=1).min()
    assert forth.p_value == pytest.approx(1 / 5) and forth.task is not None and forth.task.effect > 0.5
    back = composition(
        subject, probe, "induction", circuit, "previous_token", previous, draws=2, with_task=False, batch_size=32
    )
    np.testing.assert_array_equal(back.after, back.before)
    assert back.task is None
    with pytest.raises(RecordError, match="previous_token circuit is empty"):
        composition(subject, probe, "previous_token", [], "induction", circuit)


def test_a_set_too_large_for_a_control_keeps_its_strongest_heads(trained):
    subject = trained[0]
    heads = [Head(1, number) for number in range(8)]
    kept, out = controllable(heads, {head: float(head.head) for head in heads}, subject.anatomy)
    assert kept == tuple(heads[2:]) and out == tuple(heads[:2])
    kept, _ = controllable(
        heads, {head: float(head.head) for head in heads}, subject.anatomy, [Head(1, 10), Head(1, 11)]
    )
    assert kept == tuple(heads[3:])


def test_a_transplant_matters_only_where_heads_are_shared(trained):
    _, probe, _, circuit = trained
    others = [Head(1, number) for number in range(12) if Head(1, number) not in circuit][: len(circuit)]
    loads = {"a": trained_model, "b": trained_model}
    found = transplant({"a": circuit, "b": others}, loads, probe, options=OPTIONS, batch_size=32)
    by = {(entry.source, entry.target): entry for entry in found}
    assert len(by) == 4 and by["a", "b"].shared == 0 and by["a", "a"].shared == len(circuit)
    assert by["a", "a"].verdict is not None and by["b", "a"].verdict is not None
    assert by["a", "a"].verdict.effect > 5 * abs(by["b", "a"].verdict.effect)
    with pytest.raises(CaptureError):
        transplant({"a": [Head(7, 0)]}, {"b": trained_model}, probe)


@pytest.mark.slow
def test_the_command_measures_a_model(tmp_path: Path):
    import typer

    from spectral_monitor.development_cli import register

    app = typer.Typer()
    register(app)
    text = tmp_path / "text.txt"
    text.write_text("some text\n\nmore text\n")
    arguments = ["calibrate", str(DATA / "emergence"), "--protocol", "default", "--n", "32", "--seq-len", "64"]
    arguments += ["--baseline", "others", "--null-draws", "20", "--draws", "19", "--batch-size", "32"]
    file = tmp_path / "out.json"
    asked = ["--sweep", "20", "--composition", "--composition-draws", "1", "--json", str(file)]
    result = CliRunner().invoke(app, [*arguments, *asked])
    assert result.exit_code == 0, result.output
    found = json.loads(file.read_text())
    assert found["calibration"]["null_p99"] > 0 and found["calibration"]["above_null"] >= 4
    assert found["sweep"]["points"][0]["verdict"]["verdict"] == "causal"
    assert [entry["removed_class"] for entry in found["composition"]] == ["previous_token", "induction"]
    refused = CliRunner().invoke(app, [*arguments, "--text", str(text)])
    assert refused.exit_code == 1 and "tokenizer" in refused.output
    absent = CliRunner().invoke(app, [*arguments, "--text", str(tmp_path / "none")])
    assert absent.exit_code == 1 and "cannot be loaded as a dataset" in absent.output
