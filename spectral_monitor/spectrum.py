"""The spectral signal: effective rank of a head's outputs, from Gram sums (recipe section 2).

M in R^[N, D] holds one head's output at the query position of each probe row, not centred. Only ``M^T M`` is kept: a
sum of Grams over micro-batches and over ranks gives the same number as M itself, and memory does not grow with N.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from spectral_monitor.integral import pr_integral
from spectral_monitor.observation import FloatArray

Definition = Literal["entropy", "moment"]

__all__ = ["Definition", "effective_rank", "effective_rank_of", "gram", "pr_integral"]


def gram(outputs: Tensor) -> Tensor:
    """``M^T M`` in float64 for outputs [N, H, D]: [H, D, D]. Squaring loses half the digits, hence float64."""
    rows = outputs.to(torch.float64)
    return torch.einsum("nhd,nhe->hde", rows, rows)


def effective_rank(grams: Tensor, definition: Definition = "entropy") -> FloatArray:
    """Participation ratio of each Gram matrix [..., D, D] (recipe section 2).

    ``entropy`` (the papers' numbers): ``exp(H(p))`` with ``p_i = s_i^2 / sum_j s_j^2``, H in nats.
    ``moment`` (the classical definition): ``(sum s^2)^2 / sum s^4``.

    Returns:
        [...] values in [1, min(N, D)]; NaN for an all-zero matrix (a dead head has no rank) and for a non-finite one.
    """
    if definition not in ("entropy", "moment"):
        raise ValueError(f"unknown definition {definition!r}: use 'entropy' or 'moment'")
    grams = grams.detach().to("cpu", torch.float64)
    finite = torch.isfinite(grams).flatten(-2).all(-1)
    safe = torch.where(finite[..., None, None], grams, torch.zeros_like(grams))
    scale = safe.diagonal(dim1=-2, dim2=-1).sum(-1)
    measurable = finite & (scale > 0)
    normal = safe / torch.where(measurable, scale, torch.ones_like(scale))[..., None, None]
    p = torch.linalg.eigvalsh(normal).clamp_min(0)
    p = p / p.sum(-1, keepdim=True).clamp_min(1e-300)
    entropy = definition == "entropy"
    rank = torch.special.entr(p).sum(-1).exp() if entropy else 1 / p.square().sum(-1).clamp_min(1e-300)
    result: FloatArray = torch.where(measurable, rank, torch.nan).numpy()
    return result


def effective_rank_of(outputs: Tensor, definition: Definition = "entropy") -> FloatArray:
    """``effective_rank`` of outputs [N, H, D]: [H]."""
    return effective_rank(gram(outputs), definition)
