"""From sums over probe rows to an observation: ranks, masses, ratios, classes."""

from __future__ import annotations

import math

import numpy as np
import torch

from spectral_monitor.capture import Examples, Reading
from spectral_monitor.observation import DEAD, NOT_FINITE, OK, FloatArray, HeadTable, Observation, ProbeMetrics
from spectral_monitor.probe import ProbeBatch
from spectral_monitor.screen import (
    NullCalibration,
    Thresholds,
    classify,
    null_calibration,
    selectivity,
    uniform_baseline,
)
from spectral_monitor.spectrum import effective_rank


def observation_of(
    reading: Reading,
    probe: ProbeBatch,
    *,
    step: int,
    tokens: float | None,
    baseline: str = "others",
    thresholds: Thresholds | None = None,
) -> Observation:
    """The observation that a reading amounts to (recipe sections 2 and 3)."""
    thresholds = thresholds or Thresholds()
    table = head_table(reading, probe, baseline, thresholds)
    metrics = probe_metrics(reading.examples)
    finite = bool((table.status != NOT_FINITE).all()) and math.isfinite(metrics.loss)
    null = null_of(reading, table.baselines[baseline])
    return Observation(
        step=step,
        tokens=tokens,
        probe=probe.name,
        fingerprint=probe.fingerprint,
        heads=table,
        metrics=metrics,
        baseline=baseline,
        finite=finite,
        null_p99=math.nan if null is None else null.p99,
    )


def head_table(reading: Reading, probe: ProbeBatch, baseline: str, thresholds: Thresholds) -> HeadTable:
    """One entry a head from the sums of a reading."""
    blocks, anatomy = reading.blocks, reading.anatomy.blocks
    columns = _stack([block.columns for block in blocks])
    counts = _stack([block.counts for block in blocks])
    with np.errstate(invalid="ignore", divide="ignore"):
        means = np.where(counts > 0, columns / counts, np.nan)
    column = {name: number for number, name in enumerate(reading.columns.names)}
    attention = {name: means[:, column[name]] for name in probe.classes}
    others, sampled = means[:, column["free"]], means[:, column["sampled"]]
    baselines = {
        "others": others,
        "sampled": sampled,
        "uniform": np.full(len(means), uniform_baseline(probe, probe.capability)),
    }
    uniform = {name: np.full(len(means), uniform_baseline(probe, name)) for name in probe.classes}
    ratios = {
        name: selectivity(values, uniform[name] if baseline == "uniform" else baselines[baseline])
        for name, values in attention.items()
    }
    pr = np.concatenate([effective_rank(block.gram) for block in blocks])
    pr_moment = np.concatenate([effective_rank(block.gram, "moment") for block in blocks])
    gram_finite = np.concatenate([_finite(block.gram) for block in blocks])
    mass_finite = np.isfinite(np.concatenate([_array(block.mass) for block in blocks]))
    status = np.where(gram_finite & mass_finite, np.where(np.isnan(pr), DEAD, OK), NOT_FINITE)
    return HeadTable(
        layer=np.concatenate([np.full(block.heads, block.layer) for block in anatomy]),
        head=np.concatenate([np.arange(block.heads) for block in anatomy]),
        pr=pr,
        pr_moment=pr_moment,
        attention=attention,
        baselines=baselines,
        selectivity=ratios,
        head_class=classify(ratios, thresholds),
        status=status,
        sink=np.concatenate([_array(block.sink) for block in blocks]) / reading.rows,
        reach=_reach(reading, probe, counts, column),
        extra=_extra(reading),
    )


def probe_metrics(examples: Examples) -> ProbeMetrics:
    """Means over probe rows."""
    return ProbeMetrics(
        top1=float(examples.top(1).mean()),
        top5=float(examples.top(5).mean()),
        loss=float(-examples.logprob.mean()),
        target_logit=float(examples.logit.mean()),
        rows=len(examples.logprob),
    )


def null_of(reading: Reading, baseline: FloatArray) -> NullCalibration | None:
    """The null calibration of a reading, or None when no null targets were drawn."""
    sums, counts = _stack([b.null for b in reading.blocks]), _stack([b.null_counts for b in reading.blocks])
    if not sums.size:
        return None
    with np.errstate(invalid="ignore", divide="ignore"):
        means = np.where(counts > 0, sums / counts, np.nan)
    return null_calibration(means, baseline)


def _reach(reading: Reading, probe: ProbeBatch, counts: FloatArray, column: dict[str, int]) -> dict[str, FloatArray]:
    """class -> [K] share of the rows that count in which the target lies in the head's window."""
    reach = {}
    for name in probe.classes:
        usable = probe.usable[name].sum() if name in probe.usable else reading.rows
        reach[name] = counts[:, column[name]] / max(float(usable), 1.0)
    return reach


def _extra(reading: Reading) -> dict[str, FloatArray]:
    extra: dict[str, FloatArray] = {}
    blocks = reading.blocks
    grams = [block.gram_null for block in blocks if block.gram_null is not None]
    if len(grams) == len(blocks):
        extra["pr_null"] = np.concatenate([effective_rank(gram) for gram in grams])
    if all(block.content is not None for block in blocks):
        extra["content_share"] = np.concatenate(
            [content_share(b.content, b.mean, b.spread, reading.rows) for b in blocks]  # type: ignore[arg-type]
        )
    return extra


def content_share(change: torch.Tensor, total: torch.Tensor, squares: torch.Tensor, rows: int) -> FloatArray:
    """Share of a head's output variance at the query that depends on B (findings, "Does PR lead?").

    ``E|m - m'|^2 / 2`` over ``E|m - mean|^2``, m and m' the outputs on a row and on the same row with B replaced: for
    independent B, half the expected squared change is the variance that B carries.

    Args:
        change: [H] sum over rows of the squared change. total: [H, D] sum of outputs. squares: [H] sum of squares.

    Returns:
        [H]; NaN where the output does not vary at all.
    """
    variance = _array(squares) / rows - np.square(_array(total) / rows).sum(-1)
    scale = _array(squares) / rows
    with np.errstate(invalid="ignore", divide="ignore"):
        share: FloatArray = np.where(variance > 1e-12 * scale, _array(change) / (2 * rows) / variance, np.nan)
    return share


def _array(tensor: torch.Tensor) -> FloatArray:
    array: FloatArray = tensor.detach().to("cpu", torch.float64).numpy()
    return array


def _stack(tensors: list[torch.Tensor]) -> FloatArray:
    return np.concatenate([_array(tensor) for tensor in tensors])


def _finite(gram: torch.Tensor) -> np.ndarray:
    return torch.isfinite(gram).flatten(1).all(-1).cpu().numpy()
