"""Cost of watching on a GPU, in bf16: seconds an observation, its share of what the card can do, overhead of a run.

``python -m tests.benchmarks.gpu [--json FILE]``; ``--small`` tries the same code on a CPU, with numbers that mean
nothing. Random weights of the shapes of the reference run (51M), Pythia 1B and OLMo 1B.

Two limits bound a forward pass from below (``--teraflops`` and ``--gigabytes`` are the card's, by default an H200's):

- arithmetic: 2 P N T for the P numbers in the layers' matrices, 2 L N T^2 W for causal attention over L layers of
  width W, 2 V W N for the one logit row, divided by the peak rate in bf16;
- memory: the weights read once a micro-batch, and the hidden states written and read once a layer (2 L N T W numbers of
  2 bytes), divided by the memory's bandwidth.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from spectral_monitor.capture import Subject
from spectral_monitor.probe import induction_probe
from spectral_monitor.schedule import LogSchedule
from tests.benchmarks.measuring import plain_forward, timed


@dataclass(frozen=True)
class Shape:
    """A model's size, and the training run that its overhead is told for."""

    name: str
    make: Callable[[], Any]
    layers: int
    width: int
    vocabulary: int
    train_rows: int
    train_steps: int


def _gpt2(layers: int = 8, width: int = 512, heads: int = 16, vocabulary: int = 50257) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(n_layer=layers, n_embd=width, n_head=heads, n_positions=256, vocab_size=vocabulary)
    )


def _pythia_1b() -> Any:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    return GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=50304,
            hidden_size=2048,
            num_hidden_layers=16,
            num_attention_heads=8,
            intermediate_size=8192,
            max_position_embeddings=2048,
        )
    )


def _olmo_1b() -> Any:
    from transformers import OlmoConfig, OlmoForCausalLM

    return OlmoForCausalLM(
        OlmoConfig(
            vocab_size=50304,
            hidden_size=2048,
            num_hidden_layers=16,
            num_attention_heads=16,
            intermediate_size=8192,
            max_position_embeddings=2048,
        )
    )


SHAPES = (
    Shape("GPT-2 51M", _gpt2, 8, 512, 50257, 64, 10_000),
    Shape("Pythia 1B", _pythia_1b, 16, 2048, 50304, 64, 143_000),
    Shape("OLMo 1B", _olmo_1b, 16, 2048, 50304, 64, 143_000),
)
SMALL = (Shape("GPT-2, tiny", lambda: _gpt2(2, 64, 4, 2000), 2, 64, 2000, 4, 100),)


@dataclass(frozen=True)
class Cost:
    """One line of the table; seconds are medians of ``repeats``."""

    name: str
    rows: int
    length: int
    batch_size: int
    observation: float
    plain: float
    arithmetic_limit: float
    memory_limit: float
    train_step: float
    looks: int
    overhead: float
    peak_gibibytes: float
    repeats: int


def measure(
    shape: Shape, rows: int, length: int, batch_size: int, repeats: int, teraflops: float, gigabytes: float
) -> Cost:
    """Observation, plain forward and training step of one shape; what the log schedule's looks add to its run."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = shape.make().to(device, torch.bfloat16)
    step = _train_step(model, shape, length)
    step()
    train = statistics.median(timed(step) for _ in range(repeats))
    model.zero_grad(set_to_none=True)
    model.eval()
    probe = induction_probe(rows, length, vocabulary=shape.vocabulary)
    subject, plain = Subject(model, probe), plain_forward(model, probe, batch_size)

    def observe() -> None:
        subject.read(probe, batch_size, null_draws=20)

    observe(), plain()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    pairs = [(timed(plain), timed(observe)) for _ in range(repeats)]
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else float("nan")
    observation = statistics.median(ours for _, ours in pairs)
    looks = len(LogSchedule(last_step=shape.train_steps).steps(shape.train_steps))
    in_layer = re.compile(r"\.(h|layers)\.\d+\.")
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and in_layer.search(name))
    tokens = rows * length
    flops = 2 * matrices * tokens + 2 * shape.layers * tokens * length * shape.width
    flops += 2 * shape.vocabulary * shape.width * rows
    weights = 2 * sum(p.numel() for p in model.parameters())
    moved = weights * -(-rows // batch_size) + 2 * 2 * shape.layers * tokens * shape.width
    return Cost(
        shape.name,
        rows,
        length,
        batch_size,
        observation,
        statistics.median(theirs for theirs, _ in pairs),
        flops / (teraflops * 1e12),
        moved / (gigabytes * 1e9),
        train,
        looks,
        looks * observation / (shape.train_steps * train),
        peak,
        repeats,
    )


def _train_step(model: Any, shape: Shape, length: int) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    device = next(model.parameters()).device
    tokens = torch.randint(0, shape.vocabulary, (shape.train_rows, length), device=device)

    def step() -> None:
        model.train()
        model(tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def profile(shape: Shape, rows: int, length: int, batch_size: int) -> str:
    """The ten largest costs of an observation, by torch's profiler."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = shape.make().to(device, torch.bfloat16).eval()
    probe = induction_probe(rows, length, vocabulary=shape.vocabulary)
    subject = Subject(model, probe)
    subject.read(probe, batch_size, null_draws=20)
    with torch.profiler.profile() as profiler:
        subject.read(probe, batch_size, null_draws=20)
    key = "self_cuda_time_total" if device == "cuda" else "self_cpu_time_total"
    return str(profiler.key_averages().table(sort_by=key, row_limit=10, max_name_column_width=60))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch_size", type=int, default=250)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--teraflops", type=float, default=989.0, help="peak rate in dense bf16 (default: H200)")
    parser.add_argument("--gigabytes", type=float, default=4800.0, help="memory bandwidth a second (default: H200)")
    parser.add_argument("--profile", action="store_true", help="also print the largest costs of each shape")
    parser.add_argument("--small", action="store_true", help="a tiny shape and few rows, to try the command on a CPU")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    a = parser.parse_args()
    if not a.small and not torch.cuda.is_available():
        sys.exit("no GPU is here: run this where there is one, or try the command with --small")
    rows, length, batch_size = (16, 64, 8) if a.small else (a.rows, a.length, a.batch_size)
    costs = []
    for shape in SMALL if a.small else SHAPES:
        costs.append(measure(shape, rows, length, batch_size, a.repeats, a.teraflops, a.gigabytes))
        if a.profile:
            print(profile(shape, rows, length, batch_size))
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    table = Table(title=f"{card}, torch {torch.__version__}, bf16, N = {rows}, T = {length}", title_justify="left")
    for name in ("model", "observation", "/ plain", "of arithmetic limit", "of memory limit", "train step", "looks"):
        table.add_column(name)
    table.add_column("overhead of the run")
    table.add_column("peak memory")
    for c in costs:
        table.add_row(
            c.name,
            f"{c.observation:.4f} s",
            f"{c.observation / c.plain:.3f}",
            f"{c.arithmetic_limit / c.observation:.1%}",
            f"{c.memory_limit / c.observation:.1%}",
            f"{c.train_step:.4f} s",
            str(c.looks),
            f"{c.overhead:.3%}",
            f"{c.peak_gibibytes:.2f} GiB",
        )
    Console(width=180).print(table)
    if a.json is not None:
        a.json.write_text(json.dumps({"card": card, "torch": torch.__version__, "costs": [asdict(c) for c in costs]}))


if __name__ == "__main__":
    main()
