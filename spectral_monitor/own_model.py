"""For a model of one's own whose attention cannot be seen from outside: announce it.

Plain torch models need nothing of this when they call ``torch.softmax`` on their scores or
``scaled_dot_product_attention``, and put the heads' outputs through a module (``nn.Linear``): see
``docs/architectures.md``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

#: ``(module, original, args, kwargs) -> result`` of whoever is watching attention right now (see ``anatomy``).
watchers: list[Callable[..., Any]] = []


def attention_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function or method that computes attention, so that a probe sees its heads.

    It must be called as ``function(module, query, key, value, attention_mask=None, **options)``: ``module`` the
    ``nn.Module`` that holds the output projection; ``query`` [B, H, T, d], ``key`` and ``value`` [B, Hkv, T, d] after
    rotary embedding and norms; ``attention_mask`` additive or boolean [B or 1, H or 1, T, T], or None for causal
    attention. Options that change the scores go by these names: ``scaling`` (default ``d ** -0.5``), ``softcap``,
    ``s_aux`` ([H] logits of a learned sink), ``position_bias`` (added to the scores), ``sliding_window``,
    ``is_causal``. It must return the heads' outputs [B, T, H, d] (alone, or first in a tuple).

    Outside of a probe it costs one check of an empty list.
    """

    @wraps(function)
    def watched(module: Any, *args: Any, **kwargs: Any) -> Any:
        if watchers:
            return watchers[-1](module, function, args, kwargs)
        return function(module, *args, **kwargs)

    return watched
