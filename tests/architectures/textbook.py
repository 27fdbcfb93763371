"""The slow textbook path: what capture must agree with, got another way.

Attention comes from an eager copy's ``output_attentions``, head outputs from forward pre-hooks on output projections
found by *name*, ranks from one float64 SVD a head, ablation from a copy whose projection has zeroed columns.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from spectral_monitor.probe import ProbeBatch

#: ``model.layers.3.self_attn.o_proj`` and its like: the layer number, a part that says attention, the projection.
PROJECTION = re.compile(
    r"(?:[^.\d][^.]*\.)*(?P<layer>\d+)\.(?:[^.]+\.)*?(?:[^.]*(?:attn|attention|mixer)[^.]*)\.(?:[^.]+\.)*?"
    r"(?:o_proj|c_proj|dense|out_proj|out_lin|wo|o|dense_out|Wo|linear)"
)
_LISTED = re.compile(r"(?:.*\.)?attentions\.(?P<layer>\d+)\.out_lin|(?:.*\.)?(?P<layer_>\d+)\.temporal_block\.o_proj")
_NO_SOFTMAX_ATTENTION = re.compile(r"cross|encoder_attn|linear_attn|mamba|mlp|ffn|[qkv]_proj|mixer\.experts|bias\.")


@dataclass(frozen=True)
class Textbook:
    """What the slow path gives: one entry an attention, in order of execution.

    ``layers`` true layer numbers (None where layers run more than once or hold several attentions), ``rows``
    [N, H, T] attention of the query position, ``outputs`` [N, H, D] input of the output projection there,
    ``projections`` names of the output projections, ``logits`` [N, V].
    """

    layers: list[int] | None
    rows: list[Tensor]
    outputs: list[Tensor]
    projections: list[str]
    logits: Tensor


def eager_copy(model: nn.Module) -> Any:
    """A model of the same weights that is built to compute its attention the eager way."""
    config = copy.deepcopy(model.config)
    config._attn_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        twin: Any = type(model)(config)
    twin.load_state_dict(model.state_dict())
    return twin.eval()


def projections_by_name(model: nn.Module) -> list[str]:
    """Qualified names of modules that are called like the output projection of an attention."""
    return [
        name
        for name, module in model.named_modules()
        if _layer_of(name) is not None and not _NO_SOFTMAX_ATTENTION.search(name) and hasattr(module, "weight")
    ]


def textbook(model: nn.Module, probe: ProbeBatch) -> Textbook:
    """Run the slow path over all rows of a probe batch at once."""
    twin = eager_copy(model)
    inputs: list[tuple[str, Tensor]] = []
    handles = [
        twin.get_submodule(name).register_forward_pre_hook(_keeping(inputs, name)) for name in projections_by_name(twin)
    ]
    query = torch.from_numpy(probe.query)
    index = torch.arange(probe.rows)
    mask = {} if probe.mask is None else {"attention_mask": torch.from_numpy(probe.mask.astype(np.int64))}
    with torch.no_grad():
        output = twin(torch.from_numpy(probe.tokens), output_attentions=True, use_cache=False, **mask)
    for handle in handles:
        handle.remove()
    attentions = [
        attention
        for attention in output.attentions
        if isinstance(attention, Tensor) and attention.dim() == 4 and attention.shape[-2:] == (probe.length,) * 2
    ]
    if len(inputs) != len(attentions):
        kinds = _layer_types(twin.config)
        inputs = [(name, value) for name, value in inputs if kinds is None or _is_softmax(kinds[_layer_of(name) or 0])]
    assert len(attentions) == len(inputs), f"{len(attentions)} attentions, projections {[name for name, _ in inputs]}"
    rows = [attention[index, :, query].double() for attention in attentions]
    outputs = [
        value.view(probe.rows, probe.length, attention.shape[1], -1)[index, query].double()
        for (_, value), attention in zip(inputs, attentions, strict=True)
    ]
    names = [name for name, _ in inputs]
    layers = [layer for name in names if (layer := _layer_of(name)) is not None]
    distinct = len(set(layers)) == len(layers)
    return Textbook(layers if distinct else None, rows, outputs, names, output.logits[index, query])


def _layer_of(name: str) -> int | None:
    match = PROJECTION.fullmatch(name) or _LISTED.fullmatch(name)
    return None if match is None else next(int(number) for number in match.groups() if number is not None)


def _layer_types(config: Any) -> Any:
    config = config.get_text_config()
    return getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)


def _is_softmax(layer_type: str) -> bool:
    return ("attention" in layer_type and "linear" not in layer_type) or "hybrid" in layer_type


def _keeping(inputs: list[tuple[str, Tensor]], name: str) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
        inputs.append((name, args[0].detach().clone()))

    return hook


def rank_by_svd(outputs: Tensor) -> float:
    """Entropy effective rank of one head's outputs [N, D] (recipe section 2)."""
    squares = torch.linalg.svdvals(outputs.double()).square()
    share = squares / squares.sum()
    share = share[share > 0]
    return float((-(share * share.log()).sum()).exp())


def without_head(model: nn.Module, projection: str, head: int, heads: int) -> nn.Module:
    """A copy in which the columns of an output projection that take one of its heads' outputs are zero."""
    twin = copy.deepcopy(model).eval()
    module = twin.get_submodule(projection)
    with torch.no_grad():
        columns = module.weight if type(module).__name__ == "Conv1D" else module.weight.T  # [in, out]
        size = columns.shape[0] // heads
        columns[head * size : (head + 1) * size] = 0
    return twin


def class_means(rows: Tensor, probe: ProbeBatch) -> dict[str, Tensor]:
    """Class -> [H] mean attention on its target positions, over the rows and positions that the head can reach.

    A position that eager attention masks has exactly zero weight; a class that no row reaches is NaN.
    """
    means = {}
    for name, positions in probe.targets.items():
        index = torch.from_numpy(positions)[:, None, :].expand(-1, rows.shape[1], -1)
        value = rows.gather(-1, index)
        reach = value > 0
        counted = reach.any(-1)
        if name in probe.usable:
            counted &= torch.from_numpy(probe.usable[name])[:, None]
        per_row = value.sum(-1) / reach.sum(-1).clamp_min(1)
        means[name] = (per_row * counted).sum(0) / counted.sum(0)
    return means
