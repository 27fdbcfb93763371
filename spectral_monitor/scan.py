"""The whole recipe on one checkpoint: spectrum, screen, causal check (``spectral-monitor scan``)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from spectral_monitor.causal import CheckOptions, confirmed
from spectral_monitor.heads import Head, names
from spectral_monitor.monitor import SpectralMonitor, library_versions, special_ids
from spectral_monitor.observation import Observation, Verdict
from spectral_monitor.probe import ProbeBatch, induction_probe
from spectral_monitor.screen import Thresholds, circuit, class_counts, mass_at

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class ScanOptions:
    """What a scan looks at, and how (see ``SpectralMonitor`` and ``induction_probe`` for the meaning)."""

    rows: int = 512
    length: int | None = None
    seed: int = 42
    token_range: tuple[int, int] = (100, 10_000)
    protocol: str = "default"
    baseline: str = "others"
    thresholds: Thresholds = field(default_factory=Thresholds)
    null_draws: int = 20
    draws: int = 199
    alpha: float = 0.05
    modes: tuple[str, ...] = ("zero", "mean")
    draw_seed: int = 0
    check: bool = True
    check_seconds: float | None = None
    batch_size: int | None = None
    companions: tuple[str, ...] = ()


@dataclass(frozen=True)
class ScanResult:
    """One checkpoint, measured."""

    model: str
    revision: str | None
    commit: str | None
    dtype: str
    observation: Observation
    circuits: Mapping[str, list[Head]]
    verdicts: tuple[Verdict, ...]
    probe: ProbeBatch
    threshold_mass: float
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON values; the keys are the documented interface of ``scan --json``."""
        return {
            "model": self.model,
            "revision": self.revision,
            "commit": self.commit,
            "dtype": self.dtype,
            "versions": library_versions(),
            "probe": {
                "accuracy": self.observation.metrics.top1,
                "top5": self.observation.metrics.top5,
                "loss": self.observation.metrics.loss,
                "target_logit": self.observation.metrics.target_logit,
                **self.probe.describe(),
            },
            "heads": head_rows(self.observation),
            "class_counts": class_counts(self.observation.heads),
            "circuits": {name: names(heads) for name, heads in self.circuits.items()},
            "threshold_mass": self.threshold_mass,
            "null_p99": self.observation.null_p99,
            "verdicts": [verdict_row(verdict) for verdict in self.verdicts],
            "confirmed": confirmed(self.verdicts) if self.verdicts else None,
            "notes": list(self.notes),
            "seconds": self.observation.seconds,
        }


def scan(
    model: Any,
    options: ScanOptions,
    *,
    name: str = "",
    revision: str | None = None,
    commit: str | None = None,
    dtype: str | None = None,
    exclude: tuple[int, ...] = (),
    tokenizer_size: int | None = None,
    run_dir: str | Path | None = None,
    step: int = 0,
    tokens: float | None = None,
    notes: tuple[str, ...] = (),
    progress: Progress | None = None,
) -> ScanResult:
    """Look once at a loaded model.

    Args:
        exclude: special ids that the probe leaves out, besides those of the model's config.
        tokenizer_size: ids that the tokenizer knows; embedding rows behind them are padding.
        run_dir: also write a run record there.

    Raises:
        SpectralMonitorError: the probe does not fit the model, a threshold cannot be reached, the heads cannot be
            read, the run directory cannot be written.
    """
    probe = fitted_probe(model, options, exclude, tokenizer_size)
    check = CheckOptions(
        alpha=options.alpha,
        first_look=min(32, options.draws),
        max_draws=options.draws,
        seed=options.draw_seed,
    )
    monitor = SpectralMonitor(
        run_dir,
        probe,
        baseline=options.baseline,
        thresholds=options.thresholds,
        check=check if options.check else None,
        modes=options.modes,
        check_seconds=options.check_seconds,
        check_rows=None,
        companions=options.companions,
        null_draws=options.null_draws,
        warning=None,
        batch_size=options.batch_size,
        max_overhead=None,
        on_error="raise",
    )
    monitor.extra_info = {"source": {"model": name, "revision": revision, "commit": commit, "dtype": dtype}}
    try:
        look = monitor.observe(model, step, tokens, label=revision or name or None, progress=progress)
    finally:
        monitor.close()
    observation = look.observations[0]
    said = [*notes, *probe.params.get("notes", ())]
    if not observation.finite:
        said.append("some heads gave values that are not finite: their numbers are missing")
    return ScanResult(
        model=name,
        revision=revision,
        commit=commit,
        dtype=dtype or str(next(model.parameters()).dtype).removeprefix("torch."),
        observation=observation,
        circuits={kind: circuit(observation.heads, kind, options.thresholds) for kind in probe.classes},
        verdicts=look.verdicts,
        probe=probe,
        threshold_mass=mass_at(options.thresholds.member, probe, probe.capability, options.baseline),
        notes=tuple(said),
    )


def fitted_probe(
    model: Any, options: ScanOptions, exclude: tuple[int, ...] = (), tokenizer_size: int | None = None
) -> ProbeBatch:
    """The scan's induction probe for a model: a stated length is taken as it is, the default one fits itself."""
    from spectral_monitor.capture import longest_input, vocabulary_of

    limit, vocabulary = longest_input(model), vocabulary_of(model)
    if tokenizer_size and vocabulary is not None:
        vocabulary = min(vocabulary, tokenizer_size)
    length = options.length if options.length is not None else min(256, limit or 256)
    return induction_probe(
        rows=options.rows,
        length=length,
        seed=options.seed,
        token_range=options.token_range,
        vocabulary=vocabulary,
        exclude=special_ids(model) | set(exclude),
        protocol=options.protocol,
    )


def head_rows(observation: Observation) -> list[dict[str, Any]]:
    """One dictionary a head; values that do not exist are null."""
    table = observation.heads
    baseline = table.baselines[observation.baseline]
    rows = []
    for number, head in enumerate(table):
        row: dict[str, Any] = {
            "layer": head.layer,
            "head": head.head,
            "pr": _number(table.pr[number]),
            "pr_moment": _number(table.pr_moment[number]),
            "attention": {name: _number(values[number]) for name, values in table.attention.items()},
            "selectivity": {name: _number(values[number]) for name, values in table.selectivity.items()},
            "baseline": _number(baseline[number]),
            "head_class": str(table.head_class[number]),
            "status": str(table.status[number]),
            "attention_sink": _number(table.sink[number]),
        }
        row |= {name: _number(values[number]) for name, values in table.extra.items()}
        out_of_reach = [name for name, reach in table.reach.items() if reach[number] == 0]
        if out_of_reach:
            row["out_of_reach"] = out_of_reach
        rows.append(row)
    return rows


def verdict_row(verdict: Verdict) -> dict[str, Any]:
    """A verdict with its conditions as ``metrics`` by name."""
    row = asdict(verdict)
    del row["conditions"], row["random"]
    row["metrics"] = {condition.name: asdict(condition) for condition in verdict.conditions}
    row["matched_random"] = [asdict(condition) for condition in verdict.random]
    return row


def _number(value: float | np.floating[Any]) -> float | None:
    return float(value) if math.isfinite(value) else None
