"""What all conditions of an ablation share: the model in front of the first ablated heads' output projection.

Heads are ablated in the input of their layer's output projection. The layers in front of the first ablated layer, and
that layer's own attention up to the projection, are therefore the same under every condition: they run once a
micro-batch, intact, and are replayed under each condition.

How far this may go (``Extent``) depends on how the model is built; whoever uses a ``Prefix`` settles it by comparing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

from torch import Tensor, nn

from spectral_monitor.anatomy import Anatomy, AttentionBlock
from spectral_monitor.ranks import Reduction
from spectral_monitor.shortcut import holds_module, runs_and


class Extent(IntEnum):
    """How much of a forward is replayed."""

    NOTHING = 0
    LAYERS = 1
    LAYERS_AND_ATTENTION = 2


class SkipsBlocks(Protocol):
    """Whoever counts the attention blocks that ran must know of those that are skipped (numbers of blocks)."""

    skipped: frozenset[int]


@dataclass
class Recorded:
    """What an intact forward over one micro-batch left: outputs of the last layer in front and of the first ablated
    layer's attention, input of its projection; and the logits [B, V]."""

    layers: Any = None
    attention: Any = None
    projection: Any = None
    logits: Tensor | None = None


class PrefixMemory:
    """Recorded prefixes of a probe's micro-batches, so that several rounds of conditions run the intact model once.

    Holds at most ``limit`` bytes; micro-batches that do not fit any more are run again. What fits may differ between
    ranks, so this is for a model that each rank runs by itself.
    """

    def __init__(self, limit: int = 256 << 20) -> None:
        self._left = limit
        self._kept: dict[tuple[int, int], Recorded] = {}

    def recall(self, layer: int, number: int) -> Recorded | None:
        """What was kept of this rank's micro-batch ``number``, for conditions from ``layer`` on."""
        return self._kept.get((layer, number))

    def keep(self, layer: int, number: int, recorded: Recorded) -> None:
        """Keep a micro-batch if it fits."""
        size = _bytes_of([recorded.layers, recorded.attention, recorded.projection, recorded.logits])
        if size <= self._left:
            self._left -= size
            self._kept[layer, number] = recorded


class Prefix:
    """The shared part of a forward for conditions that ablate heads in ``layers``."""

    def __init__(self, anatomy: Anatomy, layers: Sequence[int]) -> None:
        self.layer = min(layers, default=-1)
        self.extent = Extent.NOTHING
        self._front: tuple[nn.Module, ...] = ()
        self._block: AttentionBlock | None = None
        self._skipped: frozenset[int] = frozenset()
        self.recorded = Recorded()
        # A block that runs twice in one forward is in front of itself.
        shared = any(block.call > 1 or block.projection_call > 1 for block in anatomy.blocks)
        if not layers or shared:
            return
        first = anatomy.block(self.layer)
        owner = next((place for place, layer in enumerate(anatomy.stack) if holds_module(layer, first.module)), 0)
        self._front = anatomy.stack[:owner]
        self._skipped = frozenset(n for n, block in enumerate(anatomy.blocks) if block.layer < first.layer)
        self.extent = Extent.LAYERS if self._front else Extent.NOTHING
        if holds_module(first.module, first.projection):
            self._block = first
            self.extent = Extent.LAYERS_AND_ATTENTION

    @contextmanager
    def recording(self) -> Iterator[Recorded]:
        """Inside, an intact forward leaves what will be replayed in what is yielded."""
        self.recorded = Recorded()
        with ExitStack() as stack:
            if self.extent >= Extent.LAYERS and self._front:

                def keep_layers(module: nn.Module, args: Any, output: Any) -> None:
                    self.recorded.layers = output

                stack.callback(self._front[-1].register_forward_hook(keep_layers).remove)
            if self.extent >= Extent.LAYERS_AND_ATTENTION and self._block is not None:

                def keep_attention(module: nn.Module, args: Any, output: Any) -> None:
                    self.recorded.attention = output

                def keep_input(module: nn.Module, args: Any, kwargs: Any) -> None:
                    self.recorded.projection = (args, kwargs)

                stack.callback(self._block.module.register_forward_hook(keep_attention).remove)
                hook = self._block.projection.register_forward_pre_hook(keep_input, prepend=True, with_kwargs=True)
                stack.callback(hook.remove)
            yield self.recorded

    def settle(self, holds: Callable[[], bool], reduce: Reduction) -> None:
        """Lower the extent until ``holds()``, a comparison of a replayed with an ordinary forward."""
        while self.extent > Extent.NOTHING and not holds_everywhere(holds, reduce):
            self.extent = Extent(self.extent - 1) if self._front else Extent.NOTHING

    @contextmanager
    def replaying(self, tap: SkipsBlocks, rows: int, copies: int = 1) -> Iterator[None]:
        """Inside, a forward over ``copies`` times the recorded ``rows`` replays what was recorded of them."""
        replaced: dict[nn.Module, Callable[..., Any]] = {}
        if self.extent >= Extent.LAYERS:
            output = _repeated(self.recorded.layers, rows, copies)
            replaced.update((module, lambda *args, **kwargs: output) for module in self._front)
        if self.extent >= Extent.LAYERS_AND_ATTENTION and self._block is not None:
            replaced[self._block.module] = self._attention(self._block.projection, rows, copies)
        kept = [(module, module.__dict__.get("forward")) for module in replaced]
        try:
            for module, forward in replaced.items():
                module.forward = forward
            tap.skipped = self._skipped if self.extent >= Extent.LAYERS else frozenset()
            yield
        finally:
            tap.skipped = frozenset()
            for module, own in kept:
                if own is None:
                    del module.__dict__["forward"]
                else:
                    module.__dict__["forward"] = own

    def _attention(self, projection: nn.Module, rows: int, copies: int) -> Callable[..., Any]:
        args, kwargs = (_repeated(kept, rows, copies) for kept in self.recorded.projection)
        recorded = _repeated(self.recorded.attention, rows, copies)

        def attend(*_: Any, **__: Any) -> Any:
            projected = projection(*args, **kwargs)
            return projected if isinstance(recorded, Tensor) else (projected, *recorded[1:])

        return attend


def holds_everywhere(holds: Callable[[], bool], reduce: Reduction) -> bool:
    """Whether ``holds()`` on every rank: on a sharded model, ranks that run and ranks that replay would wait for each
    other. A model that is built otherwise may make it raise, which counts as no."""
    with reduce.together():
        held = runs_and(holds)
    return reduce.everywhere(held)


def _repeated(value: Any, rows: int, copies: int) -> Any:
    """``value`` with every tensor that has one entry a row repeated ``copies`` times along its first axis."""
    if copies == 1:
        return value
    if isinstance(value, Tensor):
        return value.repeat(copies, *[1] * (value.dim() - 1)) if value.dim() and len(value) % rows == 0 else value
    if isinstance(value, dict):
        return {name: _repeated(item, rows, copies) for name, item in value.items()}
    if isinstance(value, (tuple, list)):
        return tuple(_repeated(item, rows, copies) for item in value)
    return value


def _bytes_of(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, dict):
        return _bytes_of(list(value.values()))
    return sum(_bytes_of(item) for item in value) if isinstance(value, (tuple, list)) else 0
