"""The routes that ours is measured against give the same numbers; those that are not installed are skipped by name."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spectral_monitor.capture import Ablation, Subject
from spectral_monitor.heads import Head
from spectral_monitor.probe import induction_probe
from spectral_monitor.reading import observation_of
from tests.benchmarks import routes
from tests.benchmarks.growth import Point, exponents
from tests.models import DATA, trained_model
from tests.replay.overlap import covered

pytestmark = pytest.mark.skipif(not (DATA / "emergence").is_dir(), reason="the trained test model is not there")
PACKAGES = {"PapersProtocol": "torch", "TransformerLens": "transformer_lens", "NNsight": "nnsight"}


@pytest.fixture(params=sorted(PACKAGES))
def make(request: pytest.FixtureRequest) -> Any:
    if importlib.util.find_spec(PACKAGES[request.param]) is None:
        pytest.skip(f"{PACKAGES[request.param]} is not installed: make bench-peers installs it")
    return getattr(routes, request.param)


def test_every_route_gives_the_same_numbers(make: Any) -> None:
    model, probe = trained_model(), induction_probe(12, 64, vocabulary=64)
    subject, route = Subject(model, probe), make(model)
    heads = observation_of(subject.read(probe, 8), probe, step=0, tokens=None).heads
    ranks, attention = route.observe(probe, 5)
    np.testing.assert_allclose(heads.pr, ranks, rtol=1e-4)
    np.testing.assert_allclose(heads.attention["induction"], attention, atol=1e-5)
    out = frozenset({Head(0, 2), Head(1, model.circuit_heads[0]), Head(1, model.circuit_heads[1])})
    (ours,) = subject.run_conditions(probe, [Ablation("out", out)], 8)
    np.testing.assert_allclose(ours.logprob, route.without(out, probe, 5), atol=1e-4)
    if isinstance(route, routes.TransformerLens):
        np.testing.assert_allclose(route.detect(probe), attention, atol=1e-5)


def test_straight_growth_has_slope_one() -> None:
    points = [Point(axis, size, 0.1 * size, 0.1, 5.0) for axis in "NTLH" for size in (2, 4, 8)]
    assert exponents(points)["N"] == pytest.approx((1.0, 0.0))


def test_the_union_of_spans() -> None:
    assert covered([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0), (5.5, 5.7)]) == pytest.approx(4.0)


@pytest.mark.parametrize("module", ["tests.benchmarks", "tests.benchmarks.gpu"])
def test_the_commands_explain_themselves(module: str) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-m", module, "--help"], capture_output=True, text=True, cwd=root, env=environment
    )
    assert done.returncode == 0 and "--json" in done.stdout
