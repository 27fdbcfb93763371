"""All answers at once: what ``spectral-monitor develop`` prints, writes as JSON and the report draws."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from spectral_monitor.development.calibration import Calibration, calibrate
from spectral_monitor.development.identity import Overlap
from spectral_monitor.development.lead import RISE, BaseRate, Lead, base_rate, leads
from spectral_monitor.development.milestones import (
    Gap,
    Onset,
    class_fractions,
    first_token_by_layer,
    first_token_fraction,
    gaps,
    milestones,
)
from spectral_monitor.development.phases import Phase, PhaseChange, phase_changes, stability
from spectral_monitor.development.recall import Recall, recall_of
from spectral_monitor.development.series import Bars, Series, series_of
from spectral_monitor.development.shapes import Shape, shape_of
from spectral_monitor.development.trajectories import PrecisionAtK, Ranking, classified, precision_at_k, rank, top_size
from spectral_monitor.errors import RecordError
from spectral_monitor.heads import Head, names
from spectral_monitor.observation import FloatArray
from spectral_monitor.record import RunRecord, jsonable, preferred_probe

PRECISION_KS = (5, 10, 20)


@dataclass(frozen=True)
class Development:
    """Everything that one probe's observations say. O observations, K heads; see the modules for each part."""

    series: Series
    final_circuits: dict[str, list[Head]]
    first_token_fraction: FloatArray
    first_token_by_layer: FloatArray
    class_fractions: dict[str, FloatArray]
    shape: Shape
    milestones: dict[str, Onset]
    gaps: list[Gap]
    recall: dict[str, Recall]
    leads: list[Lead]
    base_rate: BaseRate
    rise_factor: float
    rankings: dict[str, Ranking]
    precision: list[PrecisionAtK]
    calibration: Calibration | None
    stability: list[Overlap | None]
    phase_changes: list[PhaseChange]

    @property
    def layers_0_1_empty(self) -> bool | None:
        """F1: whether layers 0 and 1 never hold a first-token head; None where it cannot be told."""
        early = [column for column, layer in enumerate(self.series.layers) if layer in (0, 1)]
        if not self.series.has_classes or not early:
            return None
        return not self.first_token_by_layer[self.series.usable][:, early].any()

    def to_json(self) -> dict[str, Any]:
        """Plain values for ``develop --json``: NaN and infinities become null (``record.dumps``)."""
        series = self.series
        by_name = {str(head): column for column, head in enumerate(series.heads)}
        integral = self.rankings["integral"]
        result = {
            "probe": series.probe,
            "fingerprint": series.fingerprint,
            "capability": series.capability,
            "baseline": series.baseline,
            "bars": asdict(series.bars),
            "axis": series.axis,
            "heads": len(series.heads),
            "layers": series.layers,
            "observations": [
                {
                    "step": int(series.steps[index]),
                    "tokens": series.tokens[index],
                    "label": series.labels[index],
                    "used": bool(series.usable[index]),
                    "mark": series.marks[index],
                }
                for index in range(len(series))
            ],
            "shape": {
                "kind": self.shape.kind,
                "after_tokens": self.shape.after if series.axis == "tokens" else None,
                "by_tokens": self.shape.by if series.axis == "tokens" else None,
                "after_step": self._step_at(self.shape.after),
                "by_step": self._step_at(self.shape.by),
                "share": self.shape.share,
                "ratio": self.shape.ratio,
                "reason": self.shape.reason,
            },
            "first_token_fraction": self.first_token_fraction,
            "first_token_by_layer": [[int(n) for n in row] for row in self.first_token_by_layer],
            "layers_0_1_empty": self.layers_0_1_empty,
            "class_fractions": self.class_fractions,
            "milestones": {name: _onset(at) for name, at in self.milestones.items()},
            "gaps": [asdict(gap) for gap in self.gaps],
            "final_circuits": {capability: names(heads) for capability, heads in self.final_circuits.items()},
            "recall": {capability: self._recall(found) for capability, found in self.recall.items()},
            "recall_by_observation": {
                capability: {"recall": found.recall, "precision": found.precision}
                for capability, found in self.recall.items()
            },
            "rise_factor": self.rise_factor,
            "lead": {str(lead.head): self._lead(lead) for lead in self.leads},
            "lead_base_rate": self.base_rate.share_before,
            "lead_base_rate_detail": asdict(self.base_rate),
            "ranking": {score: names_in_order(ranking, series) for score, ranking in self.rankings.items()},
            "integral": {name: integral.values[by_name[name]] for name in names_in_order(integral, series)},
            "integral_score": integral.score,
            "precision_at_k": [asdict(entry) for entry in self.precision],
            "calibration": None if self.calibration is None else asdict(self.calibration),
            "stability": [None if entry is None else asdict(entry) for entry in self.stability],
            "phases": [
                {
                    **asdict(change),
                    "kept": names(change.kept),
                    "lost": names(change.lost),
                    "gained": names(change.gained),
                }
                for change in self.phase_changes
            ],
            "notes": list(series.notes),
        }
        plain: dict[str, Any] = jsonable(result)
        return plain

    def _step_at(self, x: float | None) -> int | None:
        if x is None:
            return None
        return int(self.series.steps[np.flatnonzero(self.series.x == x)[0]])

    def _recall(self, found: Recall) -> dict[str, Any]:
        return {
            level: {
                "tokens": reached.onset.by_tokens,
                "after_tokens": reached.onset.after_tokens,
                "step": reached.onset.by_step,
                "fraction": reached.fraction,
                "holds_from_tokens": reached.holds_from.by_tokens,
                "holds_from_step": reached.holds_from.by_step,
            }
            for level, reached in found.levels.items()
        }

    def _lead(self, lead: Lead) -> dict[str, Any]:
        return {
            "rise_tokens": lead.rise.by_tokens,
            "crossing_tokens": lead.crossing.by_tokens,
            "rise_step": lead.rise.by_step,
            "crossing_step": lead.crossing.by_step,
            "ratio": lead.ratio,
            "low": lead.low,
            "high": lead.high,
            "observations": lead.observations,
            "resolved": lead.resolved,
        }


def names_in_order(ranking: Ranking, series: Series) -> list[str]:
    """Head names, best first."""
    return [str(series.heads[int(column)]) for column in ranking.order]


def _onset(at: Onset) -> dict[str, Any]:
    return {
        "after_tokens": at.after_tokens,
        "by_tokens": at.by_tokens,
        "after_step": at.after_step,
        "by_step": at.by_step,
        "status": at.status,
    }


def load_series(record: RunRecord, probe: str | None = None, capability: str | None = None) -> Series:
    """The observations of one probe of a record.

    ``probe`` defaults to the only one, or to ``"induction"``; ``capability`` to the probe's own. RecordError when the
    record is empty or has no such probe.
    """
    if probe is None:
        observed = sorted({_probe_of(path.name) for path in record.observation_files()})
        probe = preferred_probe(observed)
        if probe is None and observed:
            raise RecordError(f"{record.run_dir} holds several probes ({', '.join(observed)}): choose one with --probe")
    observations = record.observations(probe)
    if not observations:
        known = ", ".join(sorted({_probe_of(path.name) for path in record.observation_files()})) or "none"
        raise RecordError(
            f"{record.run_dir} holds no observation"
            + (f" of probe {probe!r} (it has: {known})" if known != "none" else " yet: there is nothing to analyse")
        )
    if capability is None:
        capability = str(record.probes.get(observations[0].probe, {}).get("capability", "induction"))
    return series_of(observations, capability, Bars.of_run(record.run))


def _probe_of(file: str) -> str:
    return file.split(".")[1]


def develop(
    record: RunRecord,
    probe: str | None = None,
    capability: str | None = None,
    phases: Sequence[Phase] = (),
    rise_factor: float = RISE,
) -> Development:
    """All answers about one probe of a record. RecordError: an empty record, no such probe, an empty phase."""
    return develop_series(load_series(record, probe, capability), phases, rise_factor)


def develop_series(series: Series, phases: Sequence[Phase] = (), rise_factor: float = RISE) -> Development:
    """All answers about one series of observations."""
    if not math.isfinite(rise_factor) or rise_factor <= 1:
        raise RecordError(f"the rise factor must be a number above 1, not {rise_factor:g}")
    rankings = {"integral": rank(series, "integral"), "spread": rank(series, "spread")}
    circuits = {capability: series.circuit(capability, series.last) for capability in series.classes}
    fraction = first_token_fraction(series)
    found = milestones(series)
    own = leads(series, series.capability, rise_factor)
    wanted = classified(series, series.last)
    ks = (*PRECISION_KS, top_size(len(series.heads)))
    precision = [entry for ranking in rankings.values() for entry in precision_at_k(ranking, wanted, ks)]
    recalls = {capability: recall_of(series, capability) for capability in series.classes}
    return Development(
        series=series,
        final_circuits=circuits,
        first_token_fraction=fraction,
        first_token_by_layer=first_token_by_layer(series),
        class_fractions=class_fractions(series),
        shape=shape_of(series.x[series.usable], fraction[series.usable]),
        milestones=found,
        gaps=gaps(series, found),
        recall={capability: recall for capability, recall in recalls.items() if recall is not None},
        leads=own,
        base_rate=base_rate(series, series.capability, own, rise_factor),
        rise_factor=rise_factor,
        rankings=rankings,
        precision=precision if series.has_classes else [],
        calibration=calibrate(series, rankings["integral"]),
        stability=stability(series, series.capability),
        phase_changes=phase_changes(series, series.capability, phases),
    )
