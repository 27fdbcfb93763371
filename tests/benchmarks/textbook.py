"""The papers' protocol as it is described, written plainly: what the fast path is measured against."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import nn

from spectral_monitor.probe import ProbeBatch


def eager_copy(model: Any) -> Any:
    """The same weights with eager attention."""
    copied = copy.deepcopy(model)
    copied.set_attn_implementation("eager")
    return copied.eval()


def projections(model: Any) -> list[nn.Module]:
    """Output projections of GPT-2, GPT-NeoX and Llama-like models, in order of layers."""
    names = ("self_attn.o_proj", "attn.c_proj", "attention.dense")
    return [module for name, module in model.named_modules() if name.endswith(names)]


@torch.no_grad()
def protocol_observation(model: Any, probe: ProbeBatch, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Eager attentions in one pass, head outputs in another, all logits, one SVD a head.

    Returns [K] effective ranks and [K] induction attention.
    """
    attention, outputs = [], []
    index = torch.arange(probe.rows)
    targets = torch.from_numpy(probe.targets["induction"][:, 0])
    heads = 0
    for start in range(0, probe.rows, batch_size):
        rows = slice(start, start + batch_size)
        tokens = torch.from_numpy(probe.tokens[rows])
        found = model(tokens, output_attentions=True, use_cache=False).attentions
        heads = found[0].shape[1]
        place = index[: len(tokens)]
        attention.append(torch.stack([layer[place, :, -1, targets[rows]] for layer in found], dim=1))
    kept: list[torch.Tensor] = []
    handles = [p.register_forward_pre_hook(lambda _, a: kept.append(a[0][:, -1])) for p in projections(model)]
    try:
        for start in range(0, probe.rows, batch_size):
            kept.clear()
            model(torch.from_numpy(probe.tokens[start : start + batch_size]), use_cache=False)
            outputs.append(torch.stack([k.view(len(k), heads, -1) for k in kept], dim=1))
    finally:
        for handle in handles:
            handle.remove()
    ranks = []
    for layer in torch.cat(outputs).double().permute(1, 2, 0, 3):
        for head in layer:
            p = torch.linalg.svdvals(head).square()
            p = p / p.sum()
            ranks.append(float(torch.special.entr(p).sum().exp()))
    return np.array(ranks), torch.cat(attention).double().mean(0).flatten().numpy()
