"""Tiny random models, made lively enough that a wrong reading shows."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from spectral_monitor.probe import ProbeBatch, induction_probe

VOCABULARY = 64


def tiny_probe(rows: int = 8, length: int = 24, vocabulary: int = VOCABULARY, **options: Any) -> ProbeBatch:
    """A probe that every tiny model takes."""
    return induction_probe(rows=rows, length=length, token_range=(4, vocabulary), vocabulary=vocabulary, **options)


def lively(model: nn.Module, seed: int = 0) -> nn.Module:
    """Give every vector (bias, norm weight, sink) and every matrix that starts at zero random entries.

    Freshly built models have zero biases, unit norms and nearly uniform attention: too many faults hide in that.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_floating_point():
                continue
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            if parameter.dim() < 2:
                parameter.add_(0.1 * noise)
            elif not parameter.any():
                parameter.add_(0.05 * noise)
    return model


def build(config: Any, seed: int = 0) -> Any:
    """A causal language model of ``config`` with its own random weights; the global random state is left alone.

    A family that is only the text decoder of a composite configuration is built from the decoder's part.
    """
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    auto: Any = AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        decoder = getattr(config, "decoder", None)
        if decoder is None or isinstance(decoder, dict):
            model = auto.from_config(config)
        else:
            model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](decoder)
    return lively(model.eval(), seed)
