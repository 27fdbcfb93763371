"""A record's observations as arrays over (observation, head): the one input of all development analysis.

O observations in order of step, K heads in order of layer and head. A value that the record does not hold is NaN (or
``""`` for a class) and stays so; what needs it says so in ``notes`` or in its own result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from spectral_monitor.errors import RecordError
from spectral_monitor.heads import Head
from spectral_monitor.observation import CLASSES, UNCLASSIFIED, FloatArray, IntArray, Observation

BoolArray = npt.NDArray[np.bool_]
Axis = Literal["tokens", "step"]


@dataclass(frozen=True)
class Bars:
    """Bars of the screen as the analysis applies them (recipe section 3); ratios except ``min_attention``."""

    classify: float = 30.0
    member: float = 50.0
    previous_token: float = 100.0
    min_attention: float = 0.02

    @classmethod
    def of_run(cls, run: object) -> Bars:
        """The bars that a run's configuration names (run.json), the defaults where it names none."""
        found: dict[str, float] = {}
        for place in _mappings(run):
            thresholds = place.get("thresholds")
            if isinstance(thresholds, dict):
                for name in ("classify", "member", "previous_token", "min_attention"):
                    value = thresholds.get(name)
                    if isinstance(value, (int, float)):
                        found.setdefault(name, float(value))
        return cls(**found)


def _mappings(run: object) -> list[dict[str, object]]:
    if not isinstance(run, dict):
        return []
    config = run.get("config")
    return [run, config] if isinstance(config, dict) else [run]


@dataclass(frozen=True)
class Series:
    """All observations of one probe.

    Attributes:
        probe, fingerprint, capability, baseline: of the probe batch and the screen.
        steps, tokens: [O]; tokens are NaN where unknown.
        axis: what developmental time is counted in: ``"tokens"``, or ``"step"`` where tokens are unknown.
        usable: [O] False for observations that are marked (duplicate checkpoints) or not finite.
        heads: K heads; ``layer`` [K].
        pr, pr_moment: [O, K].
        attention, selectivity, extra: name -> [O, K].
        head_class: [O, K]; ``""`` where the record has neither classes nor selectivities.
        null_p99, top1, loss, seconds, share: [O].
        notes: sentences on what the record lacks and what was derived.
    """

    probe: str
    fingerprint: str
    capability: str
    baseline: str
    bars: Bars
    steps: IntArray
    tokens: FloatArray
    axis: Axis
    usable: BoolArray
    labels: tuple[str | None, ...]
    marks: tuple[str | None, ...]
    heads: tuple[Head, ...]
    layer: IntArray
    pr: FloatArray
    pr_moment: FloatArray
    attention: dict[str, FloatArray]
    selectivity: dict[str, FloatArray]
    extra: dict[str, FloatArray]
    head_class: npt.NDArray[np.str_]
    null_p99: FloatArray
    top1: FloatArray
    loss: FloatArray
    seconds: FloatArray
    share: FloatArray
    notes: tuple[str, ...] = field(default=())

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def x(self) -> FloatArray:
        """[O] developmental time: tokens, or steps where tokens are unknown."""
        return self.tokens if self.axis == "tokens" else self.steps.astype(np.float64)

    @property
    def layers(self) -> list[int]:
        """True layer numbers, in order."""
        return [int(layer) for layer in np.unique(self.layer)]

    @property
    def classes(self) -> list[str]:
        """Classes for which the record holds a selectivity, in the screen's order."""
        known = [name for name in CLASSES if name in self.selectivity]
        return known + [name for name in self.selectivity if name not in known]

    @property
    def has_classes(self) -> bool:
        """Whether every usable observation's heads have a class."""
        return bool(self.usable.any()) and not bool((self.head_class[self.usable] == "").all())

    @property
    def last(self) -> int:
        """Index of the last usable observation."""
        return int(np.flatnonzero(self.usable)[-1])

    def members(self, capability: str) -> BoolArray:
        """[O, K] circuit membership by the screen (recipe section 3), observation by observation.

        Selectivity >= ``bars.member`` whatever the best class; the previous-token circuit asks for
        ``bars.previous_token`` and for the best class. A head below ``min_attention`` is no member; where the record
        has no attention mass that floor cannot be applied (``notes`` says so). All False without the selectivity.
        """
        values = self.selectivity.get(capability)
        if values is None:
            return np.zeros(self.pr.shape, dtype=bool)
        bar = self.bars.previous_token if capability == "previous_token" else self.bars.member
        mass = self.attention.get(capability)
        with np.errstate(invalid="ignore"):
            inside = values >= bar
            if mass is not None:
                inside &= ~(mass < self.bars.min_attention)
        if capability == "previous_token":
            inside &= self.head_class == "previous_token"
        return inside

    def circuit(self, capability: str, index: int) -> list[Head]:
        """Members of one capability's circuit at one observation."""
        return [head for head, inside in zip(self.heads, self.members(capability)[index], strict=True) if inside]

    def column(self, head: Head) -> int:
        """Column of ``head``; RecordError when the record has no such head."""
        try:
            return self.heads.index(head)
        except ValueError:
            raise RecordError(
                f"the record has no head {head}: its heads are {self.heads[0]} to {self.heads[-1]}"
            ) from None


def series_of(observations: Sequence[Observation], capability: str = "induction", bars: Bars | None = None) -> Series:
    """Arrays of the observations of one probe.

    Raises RecordError when there is none, when they are of several probes, or when two belong to one step.
    """
    if not observations:
        raise RecordError("the record holds no observation: nothing can be analysed yet")
    names = sorted({observation.probe for observation in observations})
    if len(names) > 1:
        raise RecordError(f"the record holds several probes ({', '.join(names)}): choose one with --probe")
    ordered = sorted(observations, key=lambda observation: observation.step)
    steps = np.array([observation.step for observation in ordered], dtype=np.int64)
    if len(np.unique(steps)) < len(steps):
        raise RecordError(f"two observations of probe {names[0]!r} have the same step")
    bars = bars or Bars()
    notes: list[str] = []
    heads = _all_heads(ordered)
    rows = [_rows(heads, observation) for observation in ordered]
    if any(len(observation.heads) != len(heads) for observation in ordered):
        notes.append("the observations do not all hold the same heads: a head is missing where it was not observed")

    def spread(pick: str, name: str | None = None) -> FloatArray:
        return np.stack([_on(row, o, pick, name) for row, o in zip(rows, ordered, strict=True)])

    def present(mapping: str) -> list[str]:
        found: dict[str, None] = {}
        for observation in ordered:
            found |= dict.fromkeys(getattr(observation.heads, mapping))
        return list(found)

    selectivity = {name: spread("selectivity", name) for name in present("selectivity")}
    attention = {name: spread("attention", name) for name in present("attention")}
    head_class = np.stack([_classes_on(row, o) for row, o in zip(rows, ordered, strict=True)])
    head_class, derived = _derive_classes(head_class, selectivity, bars)
    if derived:
        notes.append(
            f"classes were derived from the selectivities present ({', '.join(selectivity)}; "
            f"largest one >= {bars.classify:g}x): the record holds none"
        )
    if not selectivity:
        notes.append("the record has no selectivity: circuits, recall and lead cannot be computed")
    elif capability not in attention:
        notes.append(f"the record has no attention mass for {capability}: the min_attention floor is not applied")
    tokens = np.array([np.nan if o.tokens is None else o.tokens for o in ordered], dtype=np.float64)
    axis: Axis = "tokens" if np.isfinite(tokens).all() else "step"
    if axis == "step":
        notes.append("tokens are unknown for some observations: time is counted in steps")
    elif (np.diff(tokens) < 0).any():
        raise RecordError("tokens fall while steps rise: the record mixes several runs or stages")
    if any(o.tokens_estimated for o in ordered):
        notes.append("tokens were estimated (batch size or a rounded label), not counted")
    usable = np.array([o.finite and o.mark is None for o in ordered], dtype=bool)
    for observation in ordered:
        if observation.mark is not None:
            notes.append(f"step {observation.step} is left out: {observation.mark}")
        elif not observation.finite:
            notes.append(f"step {observation.step} is left out: it met NaN or infinite values")
    if not usable.any():
        raise RecordError("every observation of the record is marked or not finite: nothing can be analysed")
    fingerprints = sorted({o.fingerprint for o in ordered})
    if len(fingerprints) > 1:
        raise RecordError("the record's observations were made with different probe batches: they do not form a series")
    baselines = sorted({o.baseline for o in ordered})
    if len(baselines) > 1:
        raise RecordError(
            f"the record's observations use different baselines ({', '.join(baselines)}): they do not form a series"
        )
    return Series(
        probe=names[0],
        fingerprint=fingerprints[0],
        capability=capability,
        baseline=baselines[0],
        bars=bars,
        steps=steps,
        tokens=tokens,
        axis=axis,
        usable=usable,
        labels=tuple(o.label for o in ordered),
        marks=tuple(o.mark if o.mark is not None or o.finite else "not finite" for o in ordered),
        heads=heads,
        layer=np.array([head.layer for head in heads], dtype=np.int64),
        pr=spread("pr"),
        pr_moment=spread("pr_moment"),
        attention=attention,
        selectivity=selectivity,
        extra={name: spread("extra", name) for name in present("extra")},
        head_class=head_class,
        null_p99=np.array([o.null_p99 for o in ordered], dtype=np.float64),
        top1=np.array([o.metrics.top1 for o in ordered], dtype=np.float64),
        loss=np.array([o.metrics.loss for o in ordered], dtype=np.float64),
        seconds=np.array([o.seconds for o in ordered], dtype=np.float64),
        share=np.array([o.share for o in ordered], dtype=np.float64),
        notes=tuple(notes),
    )


def _all_heads(observations: Sequence[Observation]) -> tuple[Head, ...]:
    first = tuple(observations[0].heads)
    layer, head = observations[0].heads.layer, observations[0].heads.head
    same = all(
        len(o.heads) == len(first) and (o.heads.layer == layer).all() and (o.heads.head == head).all()
        for o in observations[1:]
    )
    found = set(first) if same else {one for o in observations for one in o.heads}
    return tuple(sorted(found))


def _rows(heads: tuple[Head, ...], observation: Observation) -> IntArray:
    """[K] row of each head in the observation, -1 where it was not observed."""
    place = {head: row for row, head in enumerate(observation.heads)}
    return np.array([place.get(head, -1) for head in heads], dtype=np.int64)


def _on(rows: IntArray, observation: Observation, pick: str, name: str | None) -> FloatArray:
    values = getattr(observation.heads, pick)
    if name is not None:
        values = values.get(name)
    if values is None:
        return np.full(len(rows), np.nan)
    return np.where(rows >= 0, np.asarray(values, dtype=np.float64)[rows], np.nan)


def _classes_on(rows: IntArray, observation: Observation) -> npt.NDArray[np.str_]:
    result: npt.NDArray[np.str_] = np.where(rows >= 0, observation.heads.head_class.astype("<U32")[rows], "")
    return result


def _derive_classes(
    head_class: npt.NDArray[np.str_], selectivity: dict[str, FloatArray], bars: Bars
) -> tuple[npt.NDArray[np.str_], bool]:
    """Fill empty classes from the selectivities; says whether anything was filled."""
    empty = head_class == ""
    if not empty.any() or not selectivity:
        return head_class, False
    names = [name for name in CLASSES if name in selectivity] + [n for n in selectivity if n not in CLASSES]
    stacked = np.stack([np.nan_to_num(selectivity[name], nan=-1.0) for name in names])
    known = np.stack([np.isfinite(selectivity[name]) for name in names]).any(axis=0)
    best = np.array(names, dtype="<U32")[stacked.argmax(axis=0)]
    derived = np.where(stacked.max(axis=0) >= bars.classify, best, UNCLASSIFIED)
    return np.where(empty & known, derived, head_class), bool((empty & known).any())
