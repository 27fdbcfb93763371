"""What is measured, section by section. Equality of the numbers is checked in every section that compares routes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from spectral_monitor.capture import Subject
from spectral_monitor.causal import CheckOptions, MatchedSets, SequentialRule, check
from spectral_monitor.heads import Head
from spectral_monitor.probe import ProbeBatch, induction_probe
from spectral_monitor.reading import observation_of
from tests.benchmarks.measuring import Result, gpt2_51m, paired, plain_forward, random_llama, smollm2
from tests.benchmarks.memory import peak_mebibytes
from tests.benchmarks.routes import NNsight, PapersProtocol, Route, TransformerLens
from tests.models import trained_model

DRAWS = 32


@dataclass(frozen=True)
class Case:
    """A model with a probe of its own and a circuit to check."""

    name: str
    model: Any
    probe: ProbeBatch
    circuit: tuple[Head, ...]
    batch_size: int
    trained: bool = True


def cases(quick: bool) -> Iterator[Case]:
    """The demo's trained model, the reference run's shape, a real pretrained model (one at a time in memory)."""
    demo = trained_model()
    rows = 256 if quick else 512
    yield Case(
        "demo", demo, induction_probe(rows, 64, vocabulary=64), tuple(Head(1, h) for h in demo.circuit_heads), 32
    )
    rows = 16 if quick else 64
    middle = (Head(4, 1), Head(4, 7), Head(5, 3))
    yield Case("GPT-2 51M (random)", gpt2_51m(), induction_probe(rows, 256), middle, 8, trained=False)
    long = induction_probe(16, 1024, vocabulary=2000)
    yield Case("Llama (random), T = 1024", random_llama(4, 8, 1024), long, (Head(2, 1), Head(2, 5)), 4, trained=False)
    real = smollm2()
    if real is not None:
        known = tuple(Head.parse(name) for name in ("L17H3", "L17H4", "L17H5", "L18H6", "L18H7"))
        yield Case("SmolLM2-135M", real, induction_probe(16 if quick else 64, 256), known, 8)


# -- an observation ---------------------------------------------------------------------------------------------------


def observation(case: Case, quick: bool) -> list[Result]:
    """An observation, with everything it gives, against the plain forward."""
    subject = Subject(case.model, case.probe)
    repeats = 5 if case.name == "demo" or not quick else 3
    return [
        paired(
            "observation",
            f"observation, N = {case.probe.rows}",
            "plain forward",
            case.name,
            lambda: _observe(subject, case),
            plain_forward(case.model, case.probe, case.batch_size),
            repeats,
            goal=1.05,
        )
    ]


def _observe(subject: Subject, case: Case) -> tuple[np.ndarray, np.ndarray]:
    reading = subject.read(case.probe, case.batch_size, null_draws=20)
    heads = observation_of(reading, case.probe, step=0, tokens=None).heads
    return heads.pr, heads.attention["induction"]


# -- a causal check ---------------------------------------------------------------------------------------------------


def causal_check(case: Case, quick: bool) -> list[Result]:
    """A whole check with 32 draws (or all that exist) in plain forwards, against 1 + conditions x (L - l) / L."""
    few = _few(case, quick)
    subject = Subject(few.model, few.probe)
    draws, options = _fixed_draws(subject, few)
    total, first = len(subject.anatomy.stack), min(head.layer for head in few.circuit)
    bound = 1 + (draws + 2) * (total - first) / total
    found = paired(
        "causal check",
        f"circuit, {draws} draws, upper bound (layer {first} of {total}, N = {few.probe.rows})",
        f"plain forward (bound: {bound:.1f})",
        few.name,
        lambda: check(subject, few.probe, few.circuit, options=options, batch_size=few.batch_size),
        plain_forward(few.model, few.probe, few.batch_size),
        3 if few.name == "demo" else 1,
        goal=1.1 * bound,
    )
    return [found]


def _few(case: Case, quick: bool) -> Case:
    """As many rows as 35 forwards a route can be waited for."""
    rows = (64 if quick else 256) if case.name == "demo" else (4 if quick else 16)
    return replace(case, probe=case.probe.take(slice(0, rows)))


def _fixed_draws(subject: Subject, case: Case) -> tuple[int, CheckOptions]:
    """Options under which exactly ``DRAWS`` sets are drawn, or all that exist, whatever comes out."""
    draws = min(DRAWS, MatchedSets.of(frozenset(case.circuit), subject.anatomy, ()).count)
    return draws, CheckOptions(alpha=1 / (draws + 2), first_look=draws, max_draws=draws, capability_alpha=1 - 1e-9)


def draws_needed(seed: int = 0, checks: int = 20_000) -> list[str]:
    """Mean number of draws of the sequential rule with the default options, by simulation."""
    rng = np.random.default_rng(seed)
    defaults = CheckOptions()
    rule = SequentialRule(defaults.alpha, defaults.first_look, defaults.max_draws)
    lines = []
    for chance, meaning in ((0.0, "a clear circuit"), (0.01, "1%"), (0.05, "5%"), (0.5, "no circuit")):
        counts = []
        for _ in range(checks if chance else 1):
            exceeds = rng.random(defaults.max_draws) < chance
            counts.append(_draws_made(rule, exceeds))
        lines.append(f"a random set does as much with chance {chance:g} ({meaning}): {np.mean(counts):.1f} draws")
    return lines


def _draws_made(rule: SequentialRule, exceeds: np.ndarray) -> int:
    """Sets run until the rule decides; a round is run as a whole, also where its first draws decide."""
    made = exceedances = 0
    while True:
        end = made + rule.next_round(made)
        for draw in range(made, end):
            exceedances += bool(exceeds[draw])
            if rule.decision(draw + 1, exceedances) is not None:
                return end
        made = end


# -- other ways -------------------------------------------------------------------------------------------------------


def against_routes(case: Case, quick: bool) -> list[Result]:
    """Observation and full recipe (observation, circuit, draws, upper bound) against every other way to the numbers."""
    results = []
    for make in (PapersProtocol, TransformerLens, NNsight):
        try:
            route = make(case.model)
        except ImportError as error:
            print(f"{make.name} left out ({error}): make bench-peers installs it")
            continue
        results += _against(route, case, quick)
    return results


def _against(route: Route, case: Case, quick: bool) -> list[Result]:
    few = _few(case, quick)
    subject = Subject(few.model, few.probe)
    _assert_same_observation(_observe(subject, few), route.observe(few.probe, few.batch_size))
    results = [
        paired(
            "other ways",
            f"observation, N = {few.probe.rows}",
            route.name,
            few.name,
            lambda: _observe(subject, few),
            lambda: route.observe(few.probe, few.batch_size),
            3,
            goal=1 / 2.5 if isinstance(route, PapersProtocol) else 1.0,
            warm=False,
        )
    ]
    if isinstance(route, TransformerLens):
        _, attention = _observe(subject, few)
        np.testing.assert_allclose(route.detect(few.probe), attention, atol=1e-4)
        results.append(
            paired(
                "other ways",
                f"observation, N = {few.probe.rows}",
                "TransformerLens's detect_head (attention alone)",
                few.name,
                lambda: _observe(subject, few),
                lambda: route.detect(few.probe),
                1,
                goal=1.0,
                warm=False,
            )
        )
    if not few.trained:
        return results  # a check of random weights says nothing
    results += _recipe(route, few, subject, quick)
    return results


def _recipe(route: Route, case: Case, subject: Subject, quick: bool) -> list[Result]:
    draws, fixed = _fixed_draws(subject, case)
    every = {Head(layer, h) for layer, _ in case.circuit for h in range(subject.anatomy.block(layer).heads)}
    said: list[Any] = []

    def ours(options: CheckOptions) -> Callable[[], None]:
        def run() -> None:
            _observe(subject, case)
            said.append(check(subject, case.probe, case.circuit, options=options, batch_size=case.batch_size))

        return run

    ours(fixed)()  # which sets are drawn; and the warm-up
    sets = [case.circuit, *([Head.parse(name) for name in drawn.heads] for drawn in said[0].random), tuple(every)]
    theirs: list[list[np.ndarray]] = []

    def recipe() -> None:
        route.observe(case.probe, case.batch_size)
        theirs.append([route.without(heads, case.probe, case.batch_size) for heads in sets])

    what = f"full recipe, {draws} draws, N = {case.probe.rows}"
    repeats = 3 if case.name == "demo" else 1
    result = paired("other ways", what, route.name, case.name, ours(fixed), recipe, repeats, goal=1 / 5, warm=False)
    measured = [said[-1].condition("circuit"), *said[-1].random, said[-1].condition("upper bound")]
    for ours_of, theirs_of in zip(measured, theirs[-1], strict=True):
        np.testing.assert_allclose(ours_of.logprob, theirs_of.mean(), atol=1e-3)
    return [result]


def _assert_same_observation(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> None:
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-4)
    np.testing.assert_allclose(ours[1], theirs[1], atol=1e-5)


# -- memory and start-up ----------------------------------------------------------------------------------------------


def memory(quick: bool) -> list[Result]:
    """Peak memory of tensors above the loaded model's, each measured in a fresh process."""
    results = []
    for length, rows in ((1024, 8),) if quick else ((1024, 8), (1024, 64), (2048, 8)):
        ours = peak_mebibytes("observation", length, rows)
        name = f"random Llama, T = {length}, N = {rows}"
        against = [("plain forward", "plain", 1.1)]
        if rows == 8:  # one pass of the slow route is enough
            against.append(("output_attentions", "eager", 0.2))
        for said, what, goal in against:
            ratio = ours / peak_mebibytes(what, length, rows)
            results.append(Result("memory", "observation", said, name, ratio, ratio, ratio, ours, 1, "MiB", goal=goal))
    return results


def start_up(quick: bool) -> list[Result]:
    """``spectral-monitor --help`` and ``import spectral_monitor`` against Python's own start."""
    commands = {
        "spectral-monitor --help": [sys.executable, "-m", "spectral_monitor", "--help"],
        "import spectral_monitor": [sys.executable, "-c", "import spectral_monitor"],
    }

    def run(command: list[str]) -> Callable[[], Any]:
        return lambda: subprocess.run(command, check=True, capture_output=True)

    return [
        paired("start-up", what, "python -c pass", "", run(command), run([sys.executable, "-c", "pass"]), 5)
        for what, command in commands.items()
    ]


def idle_share(quick: bool) -> list[Result]:
    """Share of a replay's time in which neither download nor model is busy (see ``tests.replay.overlap``)."""
    import json

    command = [sys.executable, "-m", "tests.replay.overlap", "--seconds", "1" if quick else "2"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = json.loads(text.splitlines()[-1])
    share = found["idle"] / found["both"]
    return [
        Result(
            "replay",
            "neither download nor model busy",
            "whole replay",
            f"{found['revisions']} revisions, slow Hub",
            share,
            share,
            share,
            found["idle"],
            1,
            goal=0.1,
        )
    ]
