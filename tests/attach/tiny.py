"""Tiny models, data and Trainer runs for the tests of live training; also imported by their subprocesses."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from spectral_monitor import (
    CheckOptions,
    Head,
    Observation,
    ProbeBatch,
    SpectralMonitor,
    Thresholds,
    induction_probe,
)

VOCABULARY, LENGTH = 64, 48

#: Bars so low that heads of a random model cross them, and a check that always draws.
EASY = Thresholds(classify=1.0, member=1.0, previous_token=1.0, min_attention=0.0, hysteresis=1.0)
DRAWS = CheckOptions(first_look=2, max_draws=3, alpha=0.5, capability_alpha=0.9999)


def gpt2(layers: int = 2, dropout: float = 0.1, seed: int = 0, **config: Any) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=LENGTH,
            n_embd=32,
            n_layer=layers,
            n_head=4,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            bos_token_id=None,
            eos_token_id=None,
            **config,
        )
    )


def llama(layers: int = 2, seed: int = 0, **config: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    options: dict[str, Any] = {"num_key_value_heads": 2, "attention_dropout": 0.1, **config}
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            max_position_embeddings=LENGTH,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=layers,
            num_attention_heads=4,
            bos_token_id=None,
            eos_token_id=None,
            **options,
        )
    )


def probe(rows: int = 6, **options: Any) -> ProbeBatch:
    return induction_probe(rows=rows, length=LENGTH, vocabulary=VOCABULARY, token_range=(0, VOCABULARY), **options)


def rows(count: int = 128, length: int = 16, seed: int = 3) -> list[dict[str, Tensor]]:
    """Random training rows; ``labels`` are the tokens themselves."""
    tokens = torch.randint(0, VOCABULARY, (count, length), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": row} for row in tokens]


class Forced(SpectralMonitor):
    """Runs the causal check at every look: the candidate set, a real one with controls, changes each time."""

    def _candidates(self, track: Any, observation: Observation) -> frozenset[Head]:
        super()._candidates(track, observation)
        return frozenset({Head(0, observation.step % 2), Head(1, 1)})


def monitor(run_dir: Path | str | None, kind: type[SpectralMonitor] = SpectralMonitor, **options: Any) -> Any:
    """A small monitor without a budget (a tiny run has none to keep), with a check that really draws."""
    given: dict[str, Any] = {
        "probes": probe(),
        "thresholds": EASY,
        "check": DRAWS,
        "max_overhead": None,
        "null_draws": 3,
        "on_error": "raise",
        **options,
    }
    return kind(run_dir, **given)


def trainer(
    out: Path | str,
    model: PreTrainedModel | None = None,
    callbacks: Iterable[TrainerCallback] = (),
    data: list[dict[str, Tensor]] | None = None,
    evaluation: list[dict[str, Tensor]] | None = None,
    **arguments: Any,
) -> Trainer:
    given: dict[str, Any] = {
        "output_dir": str(out),
        "per_device_train_batch_size": 4,
        "max_steps": 40,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 7,
        "dataloader_pin_memory": False,
        **arguments,
    }
    return Trainer(
        model=gpt2() if model is None else model,
        args=TrainingArguments(**given),
        train_dataset=rows() if data is None else data,
        eval_dataset=evaluation,
        callbacks=list(callbacks),
    )


class StopAt(TrainerCallback):
    """Ends the training after a step, as a time limit would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if state.global_step >= self.step:
            control.should_training_stop = True
        return control


# -- what must not change ---------------------------------------------------------------------------------------------


def random_states() -> tuple[Any, ...]:
    """States of every random stream that a training run draws from, comparable with ==."""
    kind, keys, place, has_gauss, gauss = np.random.get_state()  # noqa: NPY002
    return (
        random.getstate(),
        (kind, keys.tolist(), place, has_gauss, gauss),
        torch.get_rng_state().tolist(),
    )


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def difference(first: Any, second: Any, path: str = "") -> list[str]:
    """Paths at which two nested states are not equal to the bit; [] where they are the same."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        same = first.dtype == second.dtype and first.shape == second.shape and torch.equal(first, second)
        return [] if same else [path]
    if isinstance(first, dict) and isinstance(second, dict):
        if first.keys() != second.keys():
            return [f"{path}: keys {first.keys() ^ second.keys()}"]
        return [found for key in first for found in difference(first[key], second[key], f"{path}.{key}")]
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        if len(first) != len(second):
            return [f"{path}: lengths {len(first)} and {len(second)}"]
        pairs = enumerate(zip(first, second, strict=True))
        return [found for number, (a, b) in pairs for found in difference(a, b, f"{path}[{number}]")]
    return [] if first == second else [f"{path}: {first!r} and {second!r}"]


def outcome(run: Trainer) -> dict[str, Any]:
    """All that a finished training run left: weights, optimizer, schedule, losses, random streams, data position."""
    return {
        "weights": weights(run.model),
        "optimizer": run.optimizer.state_dict(),
        "schedule": run.lr_scheduler.state_dict(),
        "losses": [entry["loss"] for entry in run.state.log_history if "loss" in entry],
        "norms": [entry["grad_norm"] for entry in run.state.log_history if "grad_norm" in entry],
        "random": random_states(),
    }
