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

from spectral_monitor.heads import Head
from spectral_monitor.probe import ProbeBatch

#: ``model.layers.3.self_attn.o_proj`` and its like: the layer number, a part that says attention, the projection.
PROJECTION = re.compile(
    r"(?:[^.\d][^.]*\.)*(?P<layer>\d+)\.(?:[^.]+\.)*?(?:[^.]*(?:attn|attention|mixer)[^.]*)\.(?:[^.]+\.)*?"
    r"(?:o_proj|c_proj|dense|out_proj|wo|o|dense_out|Wo)"
)
_NO_SOFTMAX_ATTENTION = re.compile(r"cross|encoder_attn|linear_attn|mamba|mlp|ffn")


@dataclass(frozen=True)
class Textbook:
    """What the slow path gives; keys are true layer numbers.

    ``rows`` [N, H, T] attention of the query position, ``outputs`` [N, H, D] input of the output projection there,
    ``logits`` [N, V], ``projections`` names of the output projections.
    """

    rows: dict[int, Tensor]
    outputs: dict[int, Tensor]
    logits: Tensor
    projections: dict[int, str]


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
        for name, _ in model.named_modules()
        if PROJECTION.fullmatch(name) is not None and not _NO_SOFTMAX_ATTENTION.search(name)
    ]


def textbook(model: nn.Module, probe: ProbeBatch) -> Textbook:
    """Run the slow path over all rows of a probe batch at once."""
    twin = eager_copy(model)
    inputs: dict[str, Tensor] = {}
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
    attentions = [attention for attention in output.attentions if isinstance(attention, Tensor)]
    names = {int(PROJECTION.fullmatch(name)["layer"]): name for name in inputs}  # type: ignore[index]
    if len(names) != len(attentions):
        names = {layer: name for layer, name in names.items() if _has_softmax_attention(twin.config, layer)}
    assert len(attentions) == len(names), f"{len(attentions)} attentions, projections {list(names.values())}"
    rows, outputs = {}, {}
    for layer, attention in zip(sorted(names), attentions, strict=True):
        heads = attention.shape[1]
        rows[layer] = attention[index, :, query].double()
        value = inputs[names[layer]]
        outputs[layer] = value.view(probe.rows, probe.length, heads, -1)[index, query].double()
    return Textbook(rows, outputs, output.logits[index, query], names)


def _has_softmax_attention(config: Any, layer: int) -> bool:
    config = config.get_text_config()
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    if kinds is None:
        return True
    return ("attention" in kinds[layer] and "linear" not in kinds[layer]) or "hybrid" in kinds[layer]


def _keeping(inputs: dict[str, Tensor], name: str) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
        inputs[name] = args[0].detach().clone()

    return hook


def rank_by_svd(outputs: Tensor) -> float:
    """Entropy effective rank of one head's outputs [N, D] (recipe section 2)."""
    squares = torch.linalg.svdvals(outputs.double()).square()
    share = squares / squares.sum()
    share = share[share > 0]
    return float((-(share * share.log()).sum()).exp())


def without_heads(model: nn.Module, names: dict[int, str], heads: list[Head], counts: dict[int, int]) -> nn.Module:
    """A copy in which the columns of the output projection that take a head's output are zero.

    ``counts``: layer -> number of heads.
    """
    twin = copy.deepcopy(model).eval()
    for layer, head in heads:
        projection = twin.get_submodule(names[layer])
        weight = projection.weight
        with torch.no_grad():
            columns = weight if type(projection).__name__ == "Conv1D" else weight.T  # [in, out]
            size = columns.shape[0] // counts[layer]
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
