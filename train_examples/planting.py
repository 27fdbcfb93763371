"""What the small runs put in by hand, so that they show in minutes what larger runs show in days.

Each function says what it plants. A result of a run that uses one must say so too: with gains, *when* a circuit forms
is learned, *which* heads of the last layer form it is not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

#: Learning-rate factor and Adam epsilon of weights that were given gains. With so large an epsilon Adam's step is
#: proportional to the gradient, so that it does not undo the gains.
LEARNING_RATE_FACTOR, EPSILON = 6.0, 2e-3


def spread_attention_gains(model: Any, low: float, high: float, low_heads: int | None = None) -> None:
    """Multiply the last layer's query and key weights, head by head, by gains from ``low`` to ``high``.

    In geometric steps, or ``low`` for ``low_heads`` of them and ``high`` for the others; in an order drawn from torch's
    random state. Plants which heads form the circuit: those with the smallest gains. GPT-NeoX only.
    """
    import torch

    attention = model.gpt_neox.layers[-1].attention
    size, width = attention.head_size, model.config.hidden_size
    heads = width // size
    gains = torch.logspace(0, 1, heads, base=high / low) * low
    if low_heads is not None:
        gains = torch.tensor([low] * low_heads + [high] * (heads - low_heads))
    gains = gains[torch.randperm(heads)]
    with torch.no_grad():
        # GPT-NeoX keeps query, key and value of one head together: [heads, 3 * size, width].
        weight = attention.query_key_value.weight.view(heads, 3 * size, width)
        weight[:, : 2 * size] *= gains[:, None, None]


def build_optimizer(
    model: torch.nn.Module, learning_rate: float, betas: tuple[float, float], weight_decay: float, gains: bool
) -> torch.optim.Optimizer:
    """AdamW; with ``gains`` the last layer's query, key and value weights form a group of their own."""
    import torch

    named = list(model.named_parameters())
    apart = set[str]()
    if gains:
        last = max(int(name.split(".layers.")[1].split(".")[0]) for name, _ in named if ".layers." in name)
        apart = {name for name, _ in named if f".layers.{last}.attention.query_key_value" in name}
    groups: list[dict[str, Any]] = [{"params": [parameter for name, parameter in named if name not in apart]}]
    if apart:
        groups.append(
            {
                "params": [parameter for name, parameter in named if name in apart],
                "lr": learning_rate * LEARNING_RATE_FACTOR,
                "eps": EPSILON,
            }
        )
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, weight_decay=weight_decay)
