"""What one look at a model gives, and what follows from it: plain data, no behaviour.

Everything that is written, published or analysed is one of the dataclasses of this file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from spectral_monitor.heads import Head

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

#: The six attention classes of the screen (recipe section 3), in the order in which ties are broken.
CLASSES = ("induction", "duplicate_token", "previous_token", "first_token", "self", "local")
UNCLASSIFIED = "none"
#: Names of the three baselines of the screen.
BASELINES = ("others", "sampled", "uniform")

#: A head's ``status``: what its numbers are worth.
OK, DEAD, NOT_FINITE = "ok", "dead", "not_finite"


@dataclass(frozen=True)
class HeadTable:
    """One entry a head, in order of layer and head; K heads in all.

    Attributes:
        layer, head: [K] 0-based.
        pr: [K] entropy effective rank of the head's output at the query (recipe section 2); NaN where it is
            undefined (``status`` says why).
        pr_moment: [K] the classical participation ratio.
        attention: class -> [K] mean attention mass on the class's target positions, 0 to 1.
        baselines: baseline name -> [K] mean attention on that baseline's positions.
        selectivity: class -> [K] attention / chosen baseline.
        head_class: [K] class of largest selectivity if that reaches the classification threshold, else ``"none"``.
        status: [K] ``"ok"``, ``"dead"`` (all-zero output) or ``"not_finite"``.
        sink: [K] attention mass on a learned sink outside the sequence (gpt-oss); 0 where there is none.
        reach: class -> [K] share of probe rows whose target lies inside the head's attention window; 1 for full
            attention. A class out of reach (0) has NaN attention and NaN selectivity, never 0.
        extra: further per-head series by name ([K] each), for example ``pr_null`` or ``content_share``.
    """

    layer: IntArray
    head: IntArray
    pr: FloatArray
    pr_moment: FloatArray
    attention: Mapping[str, FloatArray]
    baselines: Mapping[str, FloatArray]
    selectivity: Mapping[str, FloatArray]
    head_class: npt.NDArray[np.str_]
    status: npt.NDArray[np.str_]
    sink: FloatArray
    reach: Mapping[str, FloatArray] = field(default_factory=dict)
    extra: Mapping[str, FloatArray] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.layer)

    def __iter__(self) -> Iterator[Head]:
        return (Head(int(layer), int(head)) for layer, head in zip(self.layer, self.head, strict=True))

    def index(self, head: Head) -> int:
        """Row of ``head``; KeyError when the model has no such head."""
        found = np.flatnonzero((self.layer == head.layer) & (self.head == head.head))
        if not len(found):
            raise KeyError(f"no head {head} in this observation")
        return int(found[0])


@dataclass(frozen=True)
class ProbeMetrics:
    """How well the model does the probe's own task: means over ``rows`` probe rows (nats for the loss)."""

    top1: float
    top5: float
    loss: float
    target_logit: float
    rows: int


@dataclass(frozen=True)
class Observation:
    """One look at one model with one probe.

    Attributes:
        step: finished optimizer updates (0 = before the first).
        tokens: training tokens seen; None when unknown.
        tokens_estimated: the number was computed or read off a rounded label, not counted.
        probe: name of the probe batch; ``fingerprint`` its SHA-256.
        baseline: name of the baseline used for ``heads.selectivity``.
        finite: no NaN or infinity met. False keeps the observation out of crossings and alarms.
        mark: why the checkpoint itself is not to be trusted (``"duplicate of step1000"``), else None.
        label: the revision or checkpoint's name, else None.
        null_p99: 99th percentile of the null selectivity over heads and draws (recipe section 3), NaN if not drawn.
        seconds: what this look cost; ``share``: the monitor's share of the run's wall time so far (NaN if unknown).
        attempt: 1, or higher where a resumed run came past the same step again.
        time: Unix time at which the look ended.
    """

    step: int
    tokens: float | None
    probe: str
    fingerprint: str
    heads: HeadTable
    metrics: ProbeMetrics
    baseline: str
    tokens_estimated: bool = False
    finite: bool = True
    mark: str | None = None
    label: str | None = None
    null_p99: float = float("nan")
    seconds: float = float("nan")
    share: float = float("nan")
    attempt: int = 1
    time: float = float("nan")


@dataclass(frozen=True)
class Event:
    """Something that happened between two observations (recipe section 6, design "The record").

    ``kind`` is one of ``selectivity_crossing``, ``candidates_changed``, ``pr_rise``, ``content_rise``,
    ``attention_rise``, ``circuit_formed``, ``circuit_lost``, ``sink_transition``, ``note``, ``error``.
    ``direction`` is ``"up"`` or ``"down"`` where the kind has one. ``heads`` are names such as ``L4H4``.
    """

    kind: str
    step: int
    tokens: float | None
    probe: str = ""
    capability: str = ""
    heads: tuple[str, ...] = ()
    direction: str = ""
    value: float = float("nan")
    text: str = ""
    time: float = float("nan")
    detail: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Two events of one key are the same event: a resumed run must not raise it twice.

        What a note or an error says is part of its key; elsewhere the text holds values that need not come out alike.
        """
        said = (self.text,) if self.kind in ("note", "error") else ()
        what = (self.kind, self.probe, self.capability, ",".join(self.heads), self.direction, str(self.step))
        return "|".join((*what, *said))


@dataclass(frozen=True)
class ConditionMetrics:
    """The probe's task under one ablation: means over probe rows."""

    name: str
    heads: tuple[str, ...]
    logprob: float
    top1: float
    top5: float
    target_logit: float


@dataclass(frozen=True)
class Verdict:
    """The causal check's answer for one set of heads and one ablation mode (recipe section 4).

    Attributes:
        verdict: ``causal``, ``not causal``, ``inconclusive``, ``no capability`` or ``no control possible``.
        reason: one sentence.
        mode: ``"zero"`` or ``"mean"``.
        p_value: randomisation p-value over the draws; NaN when none was drawn.
        level: the test's overall level, all looks of the sequential rule included.
        draws, distinct_draws: draws made; distinct matched sets that exist.
        seed: of the draws.
        effect: mean over probe rows of baseline - circuit target log-probability (nats; positive = damage).
        effect_ci: its two-sided confidence interval over rows.
        excess: mean of matched random - circuit target log-probability (nats); ``excess_ci`` over rows.
        conditions: baseline, circuit, upper bound.
        random: one entry a matched-random draw, in order of drawing.
        rows: probe rows used.
    """

    step: int
    tokens: float | None
    probe: str
    capability: str
    heads: tuple[str, ...]
    mode: str
    verdict: str
    reason: str
    p_value: float
    level: float
    draws: int
    distinct_draws: int
    seed: int
    effect: float
    effect_ci: tuple[float, float]
    excess: float
    excess_ci: tuple[float, float]
    conditions: tuple[ConditionMetrics, ...]
    random: tuple[ConditionMetrics, ...]
    rows: int
    seconds: float = float("nan")
    label: str | None = None

    def condition(self, name: str) -> ConditionMetrics | None:
        """The condition of that name (``baseline``, ``circuit``, ``upper bound``), or None."""
        return next((c for c in self.conditions if c.name == name), None)
