"""Can this model be measured, and what would it cost? Asked before a run, answered from two probe rows."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from torch import nn

from spectral_monitor.anatomy import AttentionBlock
from spectral_monitor.capture import Ablation, Forward, Subject
from spectral_monitor.errors import SpectralMonitorError
from spectral_monitor.guest import guest
from spectral_monitor.heads import Head
from spectral_monitor.probe import ProbeBatch
from spectral_monitor.reading import head_table
from spectral_monitor.screen import Thresholds

#: How ``AttentionBlock.kind`` is told to a reader.
PATHS = {
    "interface": "attention function (registry or announced)",
    "sdpa": "scaled_dot_product_attention",
    "softmax": "softmax over scores",
}


@dataclass(frozen=True)
class LayerReport:
    """One attention: true ``layer`` number, module ``name``, ``heads``, ``head_dim``, ``path`` and what is special.

    ``sink``: largest mean attention mass of a head on a learned sink. ``reach``: class -> share of rows in which the
    class's target lies inside the window. ``ablation``: largest change of the target's log-probability (nats) over
    the rows when all heads of the layer are taken out; 0 means that the ablation does not reach the logits.
    """

    layer: int
    name: str
    heads: int
    head_dim: int
    path: str
    sink: float
    reach: dict[str, float]
    ablation: float


@dataclass(frozen=True)
class Diagnosis:
    """What ``examine`` found.

    Attributes:
        model: class name. ``readable``: False when the model is refused, with ``reason``.
        parameters, heads: counts. ``dtype``, ``device``: of the first parameter.
        layers: the attentions; ``without_attention``: numbers of layers that have none; ``notes`` of the examination.
        logits_difference: largest difference of logits with attention watched and not, on the rows tried.
        finite: no NaN or infinity met on the rows tried.
        rows, length: of the probe that costs are stated for.
        seconds_observation: expected time of one observation of that probe (measured on the rows tried).
        seconds_condition: expected time of one condition of the causal check over that probe.
        kept_bytes: what an observation keeps (sums), independent of N.
        row_bytes: extra memory of one micro-batch while it is read (attention rows of one layer at a time).
    """

    model: str
    readable: bool
    reason: str = ""
    parameters: int = 0
    heads: int = 0
    dtype: str = ""
    device: str = ""
    layers: tuple[LayerReport, ...] = ()
    without_attention: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    logits_difference: float = math.nan
    finite: bool = True
    rows: int = 0
    length: int = 0
    seconds_observation: float = math.nan
    seconds_condition: float = math.nan
    kept_bytes: int = 0
    row_bytes: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; what is not known is None."""
        return {name: _plain(value) for name, value in asdict(self).items()}


def examine(
    model: nn.Module, probe: ProbeBatch, *, forward: Forward | None = None, rows: int = 8, batch_size: int = 8
) -> Diagnosis:
    """Examine a model on the first rows of a probe; it is left as found. A refusal is a result, not an error.

    Args:
        model: as the monitor would get it. probe: the batch that a run would use; costs are stated for it.
        forward: see ``capture.Subject``. rows: how many probe rows are tried. batch_size: rows a micro-batch.
    """
    name = type(model).__name__
    first = next(model.parameters(), None)
    known: dict[str, Any] = {
        "model": name,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "dtype": "" if first is None else str(first.dtype).removeprefix("torch."),
        "device": "" if first is None else str(first.device),
        "rows": probe.rows,
        "length": probe.length,
    }
    few = probe.take(slice(0, rows))
    try:
        subject = Subject(model, few, forward)
        began = time.perf_counter()
        reading = subject.read(few, batch_size=batch_size)
        seconds = time.perf_counter() - began
        difference = _logits_difference(subject, few)
    except SpectralMonitorError as error:
        return Diagnosis(readable=False, reason=str(error), **known)
    table = head_table(reading, few, "others", Thresholds())
    effects, condition_seconds = _ablation_effects(subject, few, batch_size)
    blocks = subject.anatomy.blocks
    layers = []
    for block, effect in zip(blocks, effects, strict=True):
        inside = table.layer == block.layer
        reach = {kind: float(values[inside].mean()) for kind, values in table.reach.items()}
        sink = float(table.sink[inside].max())
        layers.append(
            LayerReport(block.layer, block.name, block.heads, block.head_dim, PATHS[block.kind], sink, reach, effect)
        )
    scale = probe.rows / few.rows
    return Diagnosis(
        readable=True,
        heads=len(table),
        layers=tuple(layers),
        without_attention=subject.anatomy.without_attention,
        notes=subject.anatomy.notes,
        logits_difference=difference,
        finite=bool((table.status != "not_finite").all()),
        seconds_observation=seconds * scale,
        seconds_condition=condition_seconds * scale,
        kept_bytes=sum(tensor.numel() * tensor.element_size() for sums in reading.blocks for tensor in sums.tensors()),
        row_bytes=max(_row_bytes(block, batch_size, probe.length) for block in blocks),
        **known,
    )


def _ablation_effects(subject: Subject, probe: ProbeBatch, batch_size: int) -> tuple[list[float], float]:
    """Largest effect (nats) of taking each layer's heads out, and the mean time of a condition."""
    whole = [
        Ablation(block.name, frozenset(Head(block.layer, head) for head in range(block.heads)))
        for block in subject.anatomy.blocks
    ]
    began = time.perf_counter()
    baseline, *results = subject.run_conditions(probe, [Ablation("baseline"), *whole], batch_size)
    seconds = (time.perf_counter() - began) / (1 + len(whole))
    return [float(np.abs(result.logprob - baseline.logprob).max()) for result in results], seconds


def _logits_difference(subject: Subject, probe: ProbeBatch) -> float:
    tokens, query, mask = subject._inputs(probe, np.arange(probe.rows))
    with guest(subject.model):
        plain = subject.logits(tokens, query, mask)
    watched = subject.watched_logits(probe)
    return float((plain - watched).abs().nan_to_num().max())


def _row_bytes(block: AttentionBlock, batch_size: int, length: int) -> int:
    """Attention rows in float32 and float64, the key in float32, the head outputs in float64."""
    heads, size = block.heads, block.head_dim
    return batch_size * heads * (length * (4 + 8) + size * 8) + batch_size * heads * length * size * 4


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def summary(diagnosis: Diagnosis) -> list[str]:
    """The diagnosis as lines of text."""
    lines = [f"{diagnosis.model}: {diagnosis.parameters:,} parameters, {diagnosis.dtype} on {diagnosis.device}"]
    if not diagnosis.readable:
        return [*lines, f"REFUSED: {diagnosis.reason}"]
    lines.append(f"{diagnosis.heads} heads in {len(diagnosis.layers)} attention layers")
    for layer in diagnosis.layers:
        line = f"  L{layer.layer}: {layer.heads} heads of {layer.head_dim}, {layer.path} ({layer.name})"
        out = [kind for kind, share in layer.reach.items() if share < 1]
        if layer.sink > 0:
            line += f"; up to {layer.sink:.2f} of the attention on a learned sink"
        if out:
            line += f"; out of reach in some rows or all: {', '.join(out)}"
        line += f"; taking it out moves the logits by up to {layer.ablation:.3g} nats"
        if layer.ablation == 0:
            line += " - ABLATION DOES NOT REACH THE LOGITS"
        lines.append(line)
    if diagnosis.without_attention:
        lines.append(f"  without attention: {', '.join(f'L{layer}' for layer in diagnosis.without_attention)}")
    lines += [f"  note: {note}" for note in diagnosis.notes]
    lines.append(f"logits with attention watched differ by {diagnosis.logits_difference:.3g}")
    if not diagnosis.finite:
        lines.append("NOT FINITE: some head outputs are NaN or infinite; use a wider dtype (float32, bfloat16)")
    lines.append(
        f"probe of {diagnosis.rows} x {diagnosis.length}: about {diagnosis.seconds_observation:.1f} s an observation, "
        f"{diagnosis.seconds_condition:.1f} s a condition of the causal check; "
        f"keeps {diagnosis.kept_bytes / 2**20:.1f} MiB, needs {diagnosis.row_bytes / 2**20:.1f} MiB more while it reads"
    )
    return lines
