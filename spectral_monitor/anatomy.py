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
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from spectral_monitor import own_model
from spectral_monitor.errors import CaptureError

Kind = Literal["interface", "sdpa", "softmax"]
AttentionFunction = Callable[..., Any]
#: ``(module, call, original, args, kwargs) -> result``: what to do in place of one attention call.
OnAttention = Callable[[nn.Module, AttentionFunction, tuple[Any, ...], dict[str, Any]], Any]
#: ``(kind, original, args, kwargs) -> result``: what to do in place of a softmax over scores or an SDPA call.
OnTorchCall = Callable[[Kind, AttentionFunction, tuple[Any, ...], dict[str, Any]], Any]


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
    """Route every attention function that announces itself through ``on_attention``.

    These are the functions that a model looks up in transformers' registry, and those marked with
    ``own_model.attention_function``. The lookup itself is wrapped, so the delegate is exactly the function that the
    model would have called, whatever its name, and neither the registry nor any config changes. Undone on exit.
    """
    from transformers.modeling_utils import AttentionInterface

    original_lookup = AttentionInterface.__dict__.get("get_interface")
    if original_lookup is None:
        raise CaptureError("this transformers version has no AttentionInterface.get_interface: use transformers >= 5.1")

    def lookup(self: Any, *args: Any, **kwargs: Any) -> AttentionFunction:
        original = original_lookup(self, *args, **kwargs)

        def attention(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return on_attention(module, original, args, kwargs)

        return attention

    AttentionInterface.get_interface = lookup  # type: ignore[method-assign]
    own_model.watchers.append(on_attention)
    try:
        yield
    finally:
        own_model.watchers.remove(on_attention)
        AttentionInterface.get_interface = original_lookup  # type: ignore[method-assign]


class torch_calls(TorchFunctionMode):
    """Route every softmax over a score matrix and every SDPA call through ``on_call``."""

    _SOFTMAX = (torch.softmax, torch.nn.functional.softmax, Tensor.softmax, torch.special.softmax)

    def __init__(self, on_call: OnTorchCall) -> None:
        super().__init__()
        self._on_call = on_call

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            return self._on_call("sdpa", func, args, kwargs)
        if func in self._SOFTMAX:
            scores = args[0] if args else kwargs.get("input")
            if isinstance(scores, Tensor) and _is_score_matrix(scores):
                return self._on_call("softmax", func, args, kwargs)
        return func(*args, **kwargs)


def _is_score_matrix(scores: Tensor) -> bool:
    return scores.dim() in (3, 4, 5) and scores.shape[-2] > 1 and scores.shape[-1] >= scores.shape[-2]


# -- discovery --------------------------------------------------------------------------------------------------------


@dataclass
class _Found:
    """An attention call seen during discovery, until its projection is found."""

    module: nn.Module
    call: int
    kind: Kind
    heads: int
    path: str
    layer_path: str | None
    run: int
    marked: int
    size: int | None = None
    projection: nn.Module | None = None
    projection_call: int = 0
    head_dim: int = 0


def find_heads(model: nn.Module, run: Callable[[], object], batch: int, length: int) -> Anatomy:
    """Watch one forward pass and return where the heads are.

    The output projection of an attention is the first module with a matrix that its output reaches. That is followed
    with forward-mode differentiation: the output of one head carries a tangent until a projection takes it. So a
    gate that is computed next to the heads from an input of the same width is never taken for the projection.

    Args:
        model: the bare module (see ``guest.unwrap``), already in a ``guest`` context.
        run: does one forward pass of ``batch`` rows of ``length`` tokens.

    Raises:
        CaptureError: no softmax attention ran, or it ran in a way that cannot be read right; the message says which
            module and why.
    """
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise CaptureError(
            f"{type(model).__name__} is an encoder-decoder model: only decoder-only (causal) language models are read"
        )
    discovery = _Discovery(model, batch, length)
    with discovery.watching():
        run()
    return discovery.anatomy()


class _Discovery:
    def __init__(self, model: nn.Module, batch: int, length: int) -> None:
        self._model = model
        self._name = type(model).__name__
        self._batch, self._length = batch, length
        self._stack: list[tuple[str, nn.Module]] = []
        self._calls: dict[int, int] = {}
        self._found: list[_Found] = []
        self._inside_interface = 0
        self._list_layers = _layer_paths(model)
        self._runs: list[str] = []
        self._notes: set[str] = set()
        self._candidate: tuple[nn.Module, Tensor] | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        with ExitStack() as stack:
            for name, module in self._model.named_modules():
                before = module.register_forward_pre_hook(self._entering(name), with_kwargs=True)
                after = module.register_forward_hook(self._leaving, always_call=True)
                stack.callback(before.remove)
                stack.callback(after.remove)
            stack.enter_context(forward_ad.dual_level())
            stack.enter_context(interface_calls(self._on_interface))
            stack.enter_context(torch_calls(self._on_torch))
            yield

    # -- modules ----------------------------------------------------------------------------------------------------

    def _entering(self, name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self._calls[id(module)] = self._calls.get(id(module), 0) + 1
            self._stack.append((name, module))
            if name in self._list_layers:
                self._runs.append(name)
            value = args[0] if args else next(iter(kwargs.values()), None)
            if not isinstance(value, Tensor) or not self._offer(name, module, value):
                return None
            plain = _without_tangent(value)
            return ((plain, *args[1:]), kwargs) if args else (args, {**kwargs, next(iter(kwargs)): plain})

        return hook

    def _leaving(self, module: nn.Module, args: Any, output: Any) -> Any:
        name = ""
        while self._stack:
            name, inside = self._stack.pop()
            if inside is module:
                break
        at_projection = self._candidate is not None and self._candidate[0] is module
        if at_projection:
            self._candidate = None
        # A tangent that no projection took ends with its layer: later layers must not see it.
        return _without_tangents(output) if at_projection or name in self._list_layers else None

    def _offer(self, name: str, module: nn.Module, value: Tensor) -> bool:
        """Is ``module``, about to run on ``value``, the projection that the last attention call waits for?

        A wrapper (LoRA, or a module that also adds the residual) counts as the projection as long as what it hands
        on to the matrix inside is the value that it was given. True: the module holds the matrix itself.
        """
        found = self._found[-1] if self._found else None
        if found is None or (found.projection is not None and self._candidate is None) or not _multiplies(module):
            return False
        tangent = forward_ad.unpack_dual(value).tangent
        if tangent is None or not self._is_near(name, found):
            return False
        if self._candidate is None or not torch.equal(self._candidate[1], value):
            if value.dim() < 2 or value.shape[-1] % found.heads:
                return False
            found.projection, found.head_dim = module, value.shape[-1] // found.heads
            found.projection_call = self._calls[id(module)]
            found.marked = _strongest_slice(tangent, found.heads)
            if self._candidate is None:
                self._candidate = (module, value)
        return any(parameter.dim() >= 2 for parameter in module._parameters.values() if parameter is not None)

    def _is_near(self, name: str, found: _Found) -> bool:
        """Inside the attention module, or beside it within one layer."""
        parent = found.path.rpartition(".")[0]
        beside = parent != found.layer_path and name.startswith(f"{parent}.")
        return name.startswith(f"{found.path}.") or found.path == "" or beside

    # -- attention calls --------------------------------------------------------------------------------------------

    def _on_interface(
        self, module: nn.Module, original: AttentionFunction, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self._inside_interface += 1
        try:
            result = original(module, *args, **kwargs)
        finally:
            self._inside_interface -= 1
        query, key = (_argument(args, kwargs, place, name) for place, name in enumerate(("query", "key")))
        if query.shape[1] == self._length and query.shape[-2] != self._length:
            kind = type(module).__name__
            self._notes.add(f"{kind} attends over something else than tokens at each position: left out")
            return result
        self._check_square(module, query.shape[0], query.shape[-2], key.shape[-2])
        output = result[0] if isinstance(result, tuple) else result
        self._add(module, "interface", query.shape[1])
        marked = _with_tangent(output, dim=-2, index=query.shape[1] - 1)
        return (marked, *result[1:]) if isinstance(result, tuple) else marked

    def _on_torch(self, kind: Kind, original: AttentionFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = original(*args, **kwargs)
        if self._inside_interface or not self._stack:
            return result
        module = self._stack[-1][1]
        if kind == "sdpa":
            query, key = (_argument(args, kwargs, place, name) for place, name in enumerate(("query", "key")))
            if query.dim() != 4:
                raise CaptureError(
                    f"{self._name}: {self._path(module)} calls scaled_dot_product_attention on a query of shape "
                    f"{tuple(query.shape)}: its heads are told apart only in [rows, heads, positions, head size]"
                )
            self._check_square(module, query.shape[0], query.shape[-2], key.shape[-2])
            self._add(module, "sdpa", query.shape[1])
            return _with_tangent(result, dim=1, index=query.shape[1] - 1)
        scores = _argument(args, kwargs, 0, "input")
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        longer = scores.dim() == 4 and scores.shape[0] == self._batch and scores.shape[-2] > self._length
        if (scores.shape[-2] != self._length and not longer) or dim not in (-1, scores.dim() - 1):
            return result
        if scores.dim() == 3:
            if scores.shape[-1] != self._length or scores.shape[0] % self._batch:
                return result
            heads = scores.shape[0] // self._batch
            self._add(module, "softmax", heads)
            return _with_tangent(result.view(self._batch, heads, *scores.shape[1:]), 1, heads - 1).view(scores.shape)
        self._check_square(module, scores.shape[0], scores.shape[-2], scores.shape[-1])
        if scores.dim() == 5:
            raise CaptureError(
                f"{self._name}: {self._path(module)} has attention scores of shape {tuple(scores.shape)}: its heads "
                "are told apart only in [rows, heads, positions, positions]"
            )
        self._add(module, "softmax", scores.shape[1])
        return _with_tangent(result, dim=1, index=scores.shape[1] - 1)

    def _check_square(self, module: nn.Module, rows: int, queries: int, keys: int) -> None:
        if rows != self._batch or queries != self._length or keys != self._length:
            raise CaptureError(
                f"{self._name}: {self._path(module)} attends from {queries} to {keys} positions in {rows} rows, shown "
                f"{self._batch} rows of {self._length} tokens (chunks, patches, prompt or compressed tokens, or "
                "cross-attention): its attention rows are not the tokens', so it is not measured"
            )

    def _path(self, module: nn.Module) -> str:
        return next((name for name, inside in reversed(self._stack) if inside is module), type(module).__name__)

    def _add(self, module: nn.Module, kind: Kind, heads: int) -> None:
        layer = next((name for name, _ in self._stack if name in self._list_layers), None)
        call = self._calls.get(id(module), 1)
        self._found.append(
            _Found(module, call, kind, heads, self._path(module), layer, len(self._runs) - 1, marked=heads - 1)
        )

    # -- what came of it --------------------------------------------------------------------------------------------

    def anatomy(self) -> Anatomy:
        """The blocks, numbered; CaptureError where something cannot be read right."""
        if not self._found:
            raise CaptureError(
                f"{self._name} ran no softmax attention in its forward pass: there are no attention heads to watch "
                "(recurrent and state-space models have none; an attention written in another way can be announced, "
                "see docs/architectures.md)"
            )
        for found in self._found:
            self._check(found)
        self._check_none_missing()
        numbers, note = self._numbers()
        blocks = tuple(
            AttentionBlock(
                layer=number,
                module=found.module,
                call=found.call,
                projection=found.projection,  # type: ignore[arg-type]  # _check saw it
                projection_call=found.projection_call,
                heads=found.heads,
                head_dim=found.head_dim,
                kind=found.kind,
                name=found.path or type(found.module).__name__,
            )
            for number, found in zip(numbers, self._found, strict=True)
        )
        stack, without = self._layers(numbers)
        return Anatomy(blocks, stack, without, (*((note,) if note else ()), *sorted(self._notes)))

    def _check(self, found: _Found) -> None:
        where = found.path or type(found.module).__name__
        same = [other for other in self._found if other.module is found.module and other.call == found.call]
        if len(same) > 1:
            raise CaptureError(
                f"{self._name}: {where} calls its attention {len(same)} times before one output projection "
                "(differential attention and the like): its heads cannot be told apart, so it is not measured"
            )
        if found.projection is None:
            raise CaptureError(
                f"{self._name}: no output projection was found behind the attention of {where} "
                f"({found.heads} heads): its head outputs cannot be read or ablated"
            )
        if found.marked != found.heads - 1:
            raise CaptureError(
                f"{self._name}: the heads of {where} do not lie side by side, in order, in the input of their output "
                "projection: their outputs cannot be told apart, so it is not measured"
            )

    def _check_none_missing(self) -> None:
        """A module of the same class as another's attention that ran but showed no attention is a path unseen."""
        seen = {id(found.module) for found in self._found}
        kinds = {type(found.module) for found in self._found}
        for name, module in self._model.named_modules():
            if type(module) in kinds and id(module) in self._calls and id(module) not in seen:
                raise CaptureError(
                    f"{self._name}: {name} ran without an attention that can be seen, while others of its kind show "
                    "theirs: part of the heads would be missing, so it is not measured"
                )

    def _numbers(self) -> tuple[list[int], str | None]:
        """True layer number of each attention, and a note where it is not the place in the model's list of layers."""
        paths = [found.layer_path for found in self._found]
        if None not in paths and len(set(paths)) == len(paths):
            return [_number(path) for path in paths if path is not None], None
        runs = [found.run for found in self._found]
        if None not in paths and len(set(runs)) == len(runs):
            return runs, "layers run more than once in a forward pass: they are numbered in order of execution"
        own = [number for found in self._found if isinstance(number := getattr(found.module, "layer_idx", None), int)]
        if len(set(own)) == len(self._found):
            return own, None if paths[0] is None else "layers hold several attentions: numbered by their layer_idx"
        return list(range(len(self._found))), "attentions are numbered in order of execution"

    def _layers(self, numbers: list[int]) -> tuple[tuple[nn.Module, ...], tuple[int, ...]]:
        used = [found.layer_path for found in self._found]
        parents = {path.rpartition(".")[0] for path in used if path is not None}
        if None in used or len(parents) != 1 or numbers != [_number(path) for path in used if path is not None]:
            return (), ()
        parent = parents.pop()
        siblings = sorted({path for path in self._runs if path.rpartition(".")[0] == parent}, key=_number)
        stack = tuple(self._model.get_submodule(path) for path in siblings)
        without = tuple(_number(path) for path in siblings if _number(path) not in numbers)
        return stack, without


def _with_tangent(value: Tensor, dim: int, index: int) -> Tensor:
    """``value`` with a tangent of ones on one index (one head) of a dimension, zeros elsewhere."""
    value = _without_tangent(value)
    tangent = torch.zeros_like(value)
    tangent.select(dim, index).fill_(1)
    return forward_ad.make_dual(value, tangent)


def _without_tangent(value: Tensor) -> Tensor:
    return forward_ad.unpack_dual(value).primal


def _without_tangents(output: Any) -> Any:
    if isinstance(output, Tensor):
        return _without_tangent(output)
    if isinstance(output, (tuple, list)) and not hasattr(output, "_fields"):
        return type(output)(_without_tangents(item) for item in output)
    return output


def _strongest_slice(tangent: Tensor, heads: int) -> int:
    """Which of ``heads`` slices of the last dimension carries most of a tangent."""
    weight = tangent.view(*tangent.shape[:-1], heads, -1).to(torch.float64).square().sum(-1).flatten(0, -2).sum(0)
    return int(weight.argmax())


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
