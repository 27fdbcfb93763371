"""A Llama written by hand: rotary positions, grouped-query attention, RMSNorm, SwiGLU.

Its attention goes over the keys block by block and never builds a softmax over a whole row, so nothing of it can be
seen from outside. One line announces it: ``@attention_function``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spectral_monitor.own_model import attention_function


@dataclass
class LlamaConfig:
    """``block``: keys taken at a time by the attention."""

    vocab_size: int = 64
    max_seq_len: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    width: int = 32
    inner: int = 48
    block: int = 7


@attention_function
def blockwise_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, *, block: int
) -> Tensor:
    """Causal attention in blocks of keys, with a running maximum and a running sum.

    Args:
        module: holds the output projection (the monitor finds it from there).
        query: [B, H, T, d]; key, value: [B, Hkv, T, d].

    Returns:
        [B, T, H, d].
    """
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    query = query * query.shape[-1] ** -0.5
    place = torch.arange(query.shape[2], device=query.device)
    highest = torch.full(query.shape[:3], -torch.inf, device=query.device, dtype=query.dtype)
    total, output = torch.zeros_like(highest), torch.zeros_like(query)
    for start in range(0, key.shape[2], block):
        scores = query @ key[:, :, start : start + block].transpose(-1, -2)
        scores = scores.masked_fill(place[None, start : start + block] > place[:, None], -torch.inf)
        higher = torch.maximum(highest, scores.amax(-1))
        weights, keep = torch.exp(scores - higher[..., None]), torch.exp(highest - higher)
        output = output * keep[..., None] + weights @ value[:, :, start : start + block]
        total, highest = total * keep + weights.sum(-1), higher
    return (output / total[..., None]).transpose(1, 2)


def rotate(x: Tensor, base: float = 10_000.0) -> Tensor:
    """Rotary position embedding of [B, H, T, d], halves paired."""
    length, half = x.shape[2], x.shape[3] // 2
    angles = torch.arange(length, device=x.device)[:, None] * base ** (-torch.arange(half, device=x.device) / half)
    first, second = x[..., :half], x[..., half:]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Attention(nn.Module):
    """Grouped-query attention."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.wq = nn.Linear(config.width, config.heads * config.head_dim, bias=False)
        self.wk = nn.Linear(config.width, config.kv_heads * config.head_dim, bias=False)
        self.wv = nn.Linear(config.width, config.kv_heads * config.head_dim, bias=False)
        self.wo = nn.Linear(config.heads * config.head_dim, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        heads = blockwise_attention(self, rotate(q), rotate(k), v, block=self.config.block)
        return self.wo(heads.flatten(2))


class Layer(nn.Module):
    """Attention and SwiGLU feed-forward, each behind an RMSNorm."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(config.width), nn.RMSNorm(config.width)
        self.attention = Attention(config)
        self.gate = nn.Linear(config.width, config.inner, bias=False)
        self.up = nn.Linear(config.width, config.inner, bias=False)
        self.down = nn.Linear(config.inner, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        y = self.norm_2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Returns logits [B, T, V]."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits
