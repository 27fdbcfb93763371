"""Where a model's attention heads are: found by watching one forward pass, not by module names.

In transformers 5 nearly every model calls its attention through ``AttentionInterface.get_interface``. While a probe
runs, that lookup hands out the model's *own* function, wrapped: the wrapper sees query and key after rotary embedding
and norms, the mask and the model's extras, and the model's config is never touched, so no mask can go missing. Models
that do not ask the registry (Bloom, Falcon, MPT, nanoGPT ...) are watched through torch itself: the softmax over the
scores, or the ``scaled_dot_product_attention`` call, inside the attention module. In both cases the head outputs are
read, and ablated, at the input of the output projection.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from spectral_monitor.errors import CaptureError

Kind = Literal["interface", "sdpa", "softmax"]
AttentionFunction = Callable[..., Any]
#: ``(module, call, original, args, kwargs) -> result``: what to do in place of one attention call.
OnAttention = Callable[[nn.Module, AttentionFunction, tuple[Any, ...], dict[str, Any]], Any]
#: ``(kind, args, kwargs)``: a softmax over scores or an SDPA call that did not come through the registry.
OnTorchCall = Callable[[Kind, tuple[Any, ...], dict[str, Any]], None]


@dataclass(frozen=True)
class AttentionBlock:
    """One attention of the model.

    Attributes:
        layer: true layer number, 0-based, also in models where not every layer has attention.
        module: the module that calls the attention; ``call`` counts its calls within one forward (shared blocks).
        projection: the output projection; its input holds the heads' outputs side by side.
        projection_call: which call of the projection within one forward.
        heads, head_dim: query heads, and size of one head's slice of the projection's input.
        kind: how the attention row is read.
        name: qualified module name, for messages.
    """

    layer: int
    module: nn.Module
    call: int
    projection: nn.Module
    projection_call: int
    heads: int
    head_dim: int
    kind: Kind
    name: str


@dataclass(frozen=True)
class Anatomy:
    """All attention blocks of a model in order of execution.

    ``stack`` holds the decoder layers in order (``()`` where they form no single list); ``without_attention`` the
    numbers of layers in which no softmax attention ran.
    """

    blocks: tuple[AttentionBlock, ...]
    stack: tuple[nn.Module, ...] = ()
    without_attention: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def head_count(self) -> int:
        """K: all query heads."""
        return sum(block.heads for block in self.blocks)

    @property
    def layers(self) -> tuple[int, ...]:
        """True numbers of the layers with attention."""
        return tuple(block.layer for block in self.blocks)

    def block(self, layer: int) -> AttentionBlock:
        """The attention block of a layer; CaptureError when it has none."""
        for block in self.blocks:
            if block.layer == layer:
                return block
        raise CaptureError(f"layer {layer} has no attention heads; layers with heads: {list(self.layers)}")


# -- intercepting attention -----------------------------------------------------------------------------------------


@contextmanager
def interface_calls(on_attention: OnAttention) -> Iterator[None]:
    """Route every attention function that a model looks up in transformers' registry through ``on_attention``.

    The lookup itself is wrapped, so the delegate is exactly the function that the model would have called, whatever
    its name, and neither the registry nor any config changes. Undone on exit.
    """
    from transformers.modeling_utils import AttentionInterface

    original_lookup = AttentionInterface.__dict__.get("get_interface")
    if original_lookup is None:
        raise CaptureError("this transformers version has no AttentionInterface.get_interface: use transformers >= 5.0")

    def lookup(self: Any, *args: Any, **kwargs: Any) -> AttentionFunction:
        original = original_lookup(self, *args, **kwargs)

        def attention(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return on_attention(module, original, args, kwargs)

        return attention

    AttentionInterface.get_interface = lookup  # type: ignore[method-assign]
    try:
        yield
    finally:
        AttentionInterface.get_interface = original_lookup  # type: ignore[method-assign]


class torch_calls(TorchFunctionMode):
    """Tell ``on_call`` of every softmax over a score matrix and every SDPA call."""

    _SOFTMAX = (torch.softmax, torch.nn.functional.softmax, Tensor.softmax, torch.special.softmax)

    def __init__(self, on_call: OnTorchCall) -> None:
        super().__init__()
        self._on_call = on_call

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            self._on_call("sdpa", args, kwargs)
        elif func in self._SOFTMAX:
            scores = args[0] if args else kwargs.get("input")
            if isinstance(scores, Tensor) and _is_score_matrix(scores):
                self._on_call("softmax", args, kwargs)
        return func(*args, **kwargs)


def _is_score_matrix(scores: Tensor) -> bool:
    return scores.dim() in (3, 4) and scores.shape[-2] > 1 and scores.shape[-1] >= scores.shape[-2]


# -- discovery --------------------------------------------------------------------------------------------------------


@dataclass
class _Found:
    """An attention call seen during discovery, until its projection is found."""

    module: nn.Module
    call: int
    kind: Kind
    heads: int
    value_dim: int | None
    path: str
    layer_path: str | None
    scores: list[str] = field(default_factory=list)
    projection: nn.Module | None = None
    projection_call: int = 0
    head_dim: int = 0


def find_heads(model: nn.Module, run: Callable[[], object], batch: int) -> Anatomy:
    """Watch one forward pass and return where the heads are.

    Args:
        model: the bare module (see ``guest.unwrap``), already in a ``guest`` context.
        run: does one forward pass of ``batch`` rows.

    Raises:
        CaptureError: no softmax attention ran, or it ran in a way that cannot be read right; the message says which
            module and why.
    """
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise CaptureError(
            f"{type(model).__name__} is an encoder-decoder model: only decoder-only (causal) language models are read"
        )
    discovery = _Discovery(model, batch)
    with discovery.watching():
        run()
    return discovery.anatomy()


class _Discovery:
    def __init__(self, model: nn.Module, batch: int) -> None:
        self._model = model
        self._batch = batch
        self._stack: list[tuple[str, nn.Module]] = []
        self._calls: dict[int, int] = {}
        self._found: list[_Found] = []
        self._inside_interface = 0
        self._list_layers = _layer_paths(model)
        self._ran: set[str] = set()

    @contextmanager
    def watching(self) -> Iterator[None]:
        with ExitStack() as stack:
            for name, module in self._model.named_modules():
                before = module.register_forward_pre_hook(self._entering(name), with_kwargs=True)
                after = module.register_forward_hook(self._leaving, always_call=True)
                stack.callback(before.remove)
                stack.callback(after.remove)
            stack.enter_context(interface_calls(self._on_interface))
            stack.enter_context(torch_calls(self._on_torch))
            yield

    def _entering(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._calls[id(module)] = self._calls.get(id(module), 0) + 1
            value = args[0] if args else next(iter(kwargs.values()), None)
            if isinstance(value, Tensor):
                self._offer_projection(name, module, value)
            self._stack.append((name, module))
            if name in self._list_layers:
                self._ran.add(name)

        return hook

    def _leaving(self, module: nn.Module, args: Any, output: Any) -> None:
        while self._stack and self._stack.pop()[1] is not module:
            pass

    def _on_interface(self, module: nn.Module, original: AttentionFunction, args: Any, kwargs: Any) -> Any:
        self._inside_interface += 1
        try:
            result = original(module, *args, **kwargs)
        finally:
            self._inside_interface -= 1
        query = args[0] if args else kwargs["query"]
        self._add(module, "interface", query.shape[1], result[0].shape[-1])
        return result

    def _on_torch(self, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._inside_interface or not self._stack:
            return
        if kind == "sdpa":
            query, key, value = (_argument(args, kwargs, place, name) for place, name in enumerate(_QKV))
            if query.dim() != 4 or query.shape[0] != self._batch or query.shape[-2] != key.shape[-2]:
                return
            self._add(self._stack[-1][1], "sdpa", query.shape[1], value.shape[-1])
        else:
            scores = _argument(args, kwargs, 0, "input")
            if scores.shape[-2] != scores.shape[-1]:
                return
            heads = scores.shape[1] if scores.dim() == 4 else scores.shape[0] // self._batch
            self._add(self._stack[-1][1], "softmax", heads, None)

    def _add(self, module: nn.Module, kind: Kind, heads: int, value_dim: int | None) -> None:
        path = next((name for name, inside in reversed(self._stack) if inside is module), "")
        layer = next((name for name, _ in self._stack if name in self._list_layers), None)
        self._found.append(_Found(module, self._calls.get(id(module), 1), kind, heads, value_dim, path, layer))

    def _offer_projection(self, name: str, module: nn.Module, value: Tensor) -> None:
        """``module`` is about to run on ``value``: is it the projection that an attention call waits for?"""
        if not self._found or self._found[-1].projection is not None or not _multiplies(module):
            return
        found = self._found[-1]
        parent = found.path.rpartition(".")[0]
        beside = parent != found.layer_path and name.startswith(f"{parent}.")
        if not (name.startswith(f"{found.path}.") or beside):
            return
        if value.dim() < 2 or value.shape[-1] % found.heads:
            return
        if found.value_dim is not None and value.shape[-1] != found.heads * found.value_dim:
            return
        found.projection, found.head_dim = module, value.shape[-1] // found.heads
        found.projection_call = self._calls[id(module)]

    def anatomy(self) -> Anatomy:
        name = type(self._model).__name__
        if not self._found:
            raise CaptureError(
                f"{name} ran no softmax attention in its forward pass: there are no attention heads to watch "
                "(recurrent and state-space models have none)"
            )
        blocks = []
        for order, found in enumerate(self._found):
            where = found.path or type(found.module).__name__
            same = [other for other in self._found if other.module is found.module and other.call == found.call]
            if len(same) > 1:
                raise CaptureError(
                    f"{name}: {where} calls its attention {len(same)} times before one output projection "
                    "(differential attention and the like): its heads cannot be told apart, so it is not measured"
                )
            if found.projection is None:
                raise CaptureError(
                    f"{name}: no output projection was found behind the attention of {where} "
                    f"({found.heads} heads): its head outputs cannot be read or ablated"
                )
            layer = self._layer(found, order)
            blocks.append(
                AttentionBlock(
                    layer=layer,
                    module=found.module,
                    call=found.call,
                    projection=found.projection,
                    projection_call=found.projection_call,
                    heads=found.heads,
                    head_dim=found.head_dim,
                    kind=found.kind,
                    name=where,
                )
            )
        numbers = [block.layer for block in blocks]
        twice = sorted({number for number in numbers if numbers.count(number) > 1})
        if twice:
            raise CaptureError(f"{name}: layer {twice[0]} runs more than one attention: its heads have no single name")
        stack, without = self._layers(numbers)
        return Anatomy(tuple(blocks), stack, without)

    def _layer(self, found: _Found, order: int) -> int:
        if found.layer_path is not None:
            return _number(found.layer_path)
        number = getattr(found.module, "layer_idx", None)
        return number if isinstance(number, int) else order

    def _layers(self, numbers: list[int]) -> tuple[tuple[nn.Module, ...], tuple[int, ...]]:
        used = [found.layer_path for found in self._found]
        parents = {path.rsplit(".", 1)[0] for path in used if path is not None}
        if None in used or len(parents) != 1:
            return (), ()
        parent = parents.pop()
        siblings = sorted((path for path in self._ran if path.rsplit(".", 1)[0] == parent), key=_number)
        stack = tuple(self._model.get_submodule(path) for path in siblings)
        without = tuple(_number(path) for path in siblings if _number(path) not in numbers)
        return stack, without


_QKV = ("query", "key", "value")


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], place: int, name: str) -> Any:
    return args[place] if len(args) > place else kwargs.get(name)


def _layer_paths(model: nn.Module) -> set[str]:
    """Names of modules that are the first numbered part of their path, such as ``model.layers.3``."""
    return {name for name, _ in model.named_modules() if re.fullmatch(r"(?:[^.\d][^.]*\.)*\d+", name)}


def _number(path: str) -> int:
    return int(path.rsplit(".", 1)[-1])


def _multiplies(module: nn.Module) -> bool:
    """Whether a module holds a matrix (a projection, or a wrapper of one such as a LoRA layer), no mere norm."""
    return any(parameter.dim() >= 2 or parameter.dtype == torch.uint8 for parameter in module.parameters())
