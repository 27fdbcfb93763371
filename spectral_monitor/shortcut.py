"""Leave out what an observation does not need: the last layer's feed-forward at all positions but the query's.

The probe reads the logits at one position a row. Behind the last attention only that position matters, so the parts of
the last decoder layer that hold matrices and are not its attention get the query's row alone; what they return is added
to the residual stream by broadcasting, which is right at the query position and of no interest elsewhere.

Not every layer is built so. Whether it is safe is found out on two probe rows (``saves_work``): the logits must agree
with the plain forward's; where they do not, or something raises, the shortcut stays off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from spectral_monitor.anatomy import Anatomy

#: Largest difference of logits, relative to their spread, that rounding in another matrix shape explains.
TOLERANCE = 1e-4


def holds_module(outer: nn.Module, module: nn.Module) -> bool:
    """Whether ``module`` is ``outer`` or lies somewhere in it."""
    return any(inner is module for inner in outer.modules())


def parts_behind_attention(anatomy: Anatomy) -> tuple[nn.Module, ...]:
    """Direct parts of the last decoder layer that hold matrices and not the attention; empty where unknown."""
    if not anatomy.stack or not anatomy.blocks:
        return ()
    last, block = anatomy.stack[-1], anatomy.blocks[-1]
    if not holds_module(last, block.module) or last is block.module:
        return ()
    return tuple(
        part
        for part in last.children()
        if not holds_module(part, block.module)
        and not holds_module(part, block.projection)
        and any(parameter.dim() >= 2 for parameter in part.parameters())
    )


@contextmanager
def query_row_only(parts: tuple[nn.Module, ...], query: Callable[[], Tensor]) -> Iterator[None]:
    """Inside, ``parts`` see the query's row [B, 1, W] of their [B, T, W] input; ``query()`` gives the positions [B]."""

    def keep_row(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        value = args[0] if args else None
        positions = query()
        if not isinstance(value, Tensor) or value.dim() != 3 or value.shape[0] != len(positions):
            return None
        index = torch.arange(len(positions), device=value.device)
        row = value[index, positions.to(value.device)][:, None]
        return (row, *args[1:]), kwargs

    with ExitStack() as stack:
        for part in parts:
            stack.callback(part.register_forward_pre_hook(keep_row, with_kwargs=True).remove)
        yield


def saves_work(parts: tuple[nn.Module, ...], query: Tensor, plain: Tensor, run: Callable[[], Tensor]) -> bool:
    """Whether ``run()``, a forward whose ``plain`` logits [B, V] are known, gives them with the shortcut too."""
    if not parts or not bool(torch.isfinite(plain).all()):
        return False
    with query_row_only(parts, lambda: query):
        return runs_and(lambda: same_but_for_rounding(run(), plain))


def runs_and(holds: Callable[[], bool]) -> bool:
    """Whether ``holds()``; False as well where a model that is built otherwise makes it raise."""
    try:
        return holds()
    except torch.OutOfMemoryError:
        raise  # says nothing of how the model is built
    except (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError):
        return False


def same_bits(logits: Tensor, plain: Tensor) -> bool:
    """Equal to the bit, NaN equal to NaN."""
    return torch.equal(logits.nan_to_num(), plain.nan_to_num())


def same_but_for_rounding(logits: Tensor, plain: Tensor) -> bool:
    """Whether two [B, V] differ by no more than what another matrix shape rounds differently."""
    if logits.shape != plain.shape:
        return False
    spread = plain.to(torch.float32).std().item()
    worst = (logits.to(torch.float32) - plain.to(torch.float32)).abs().max().item()
    # In half precision another matrix shape rounds differently by far more than in float32.
    bound = TOLERANCE if plain.dtype == torch.float32 else 100 * TOLERANCE
    return worst <= bound * max(spread, 1e-12)
