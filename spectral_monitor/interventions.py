"""Questions to a model beyond one causal check: threshold sweep, composition, transplant (recipe sections 3 and 5).

All of them ablate and measure through ``causal.check`` and ``capture``; they need the model, not only its record.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from spectral_monitor.anatomy import Anatomy
from spectral_monitor.capture import Subject
from spectral_monitor.causal import CheckOptions, MatchedSets, check
from spectral_monitor.errors import CaptureError, RecordError
from spectral_monitor.heads import Head
from spectral_monitor.observation import FloatArray, HeadTable, Verdict
from spectral_monitor.probe import ProbeBatch
from spectral_monitor.reading import observation_of

Progress = Callable[[str], None]

#: Top-1 at or below this share of the intact model's is the floor: the papers' circuits lose 94% to 100% of it.
FLOOR_SHARE = 0.06


# -- threshold sweep --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SweepPoint:
    """All heads at or above one threshold, ablated. ``verdict`` is None where no head reaches it."""

    threshold: float
    heads: tuple[Head, ...]
    verdict: Verdict | None

    @property
    def top1(self) -> float:
        """Top-1 with these heads out."""
        condition = None if self.verdict is None else self.verdict.condition("circuit")
        return math.nan if condition is None else condition.top1

    @property
    def random_top1(self) -> FloatArray:
        """[draws] top-1 of each matched-random draw."""
        draws = () if self.verdict is None else self.verdict.random
        return np.array([draw.top1 for draw in draws], dtype=np.float64)


@dataclass(frozen=True)
class Sweep:
    """A sweep over thresholds, in increasing order.

    Attributes:
        baseline_top1: of the intact model; ``floor``: ``FLOOR_SHARE`` of it.
        lowest_at_floor, highest_at_floor: thresholds whose set takes top-1 to the floor; None where none does. The
            highest one names the smallest set that is enough.
    """

    capability: str
    points: tuple[SweepPoint, ...]
    baseline_top1: float

    @property
    def floor(self) -> float:
        return FLOOR_SHARE * self.baseline_top1

    @property
    def at_floor(self) -> list[float]:
        """Thresholds whose set takes top-1 to the floor."""
        return [point.threshold for point in self.points if point.top1 <= self.floor]

    @property
    def lowest_at_floor(self) -> float | None:
        return min(self.at_floor, default=None)

    @property
    def highest_at_floor(self) -> float | None:
        return max(self.at_floor, default=None)


def threshold_sweep(
    subject: Subject,
    probe: ProbeBatch,
    heads: HeadTable,
    thresholds: Sequence[float] = (2, 10, 30, 50, 100),
    *,
    mode: str = "zero",
    options: CheckOptions | None = None,
    batch_size: int = 16,
    progress: Progress | None = None,
) -> Sweep:
    """Ablate all heads at or above each threshold, with matched-random controls each.

    As published, the ratio alone decides (no ``min_attention``), whatever a head's best class.

    Args:
        heads: an observation's heads on this probe.
        thresholds: of the probe's own capability.
    """
    values = heads.selectivity.get(probe.capability)
    if values is None:
        raise RecordError(f"the observation has no {probe.capability} selectivity: a sweep needs it")
    points, top1 = [], math.nan
    for threshold in sorted(thresholds):
        with np.errstate(invalid="ignore"):
            members = tuple(head for head, inside in zip(heads, values >= threshold, strict=True) if inside)
        if progress is not None:
            progress(f"threshold {threshold:g}: {len(members)} heads")
        verdict = None
        if members:
            verdict = check(subject, probe, members, mode=mode, options=options, batch_size=batch_size)
            intact = verdict.condition("baseline")
            top1 = math.nan if intact is None else intact.top1
        points.append(SweepPoint(float(threshold), members, verdict))
    return Sweep(probe.capability, tuple(points), top1)


# -- composition ------------------------------------------------------------------------------------------------------


@contextmanager
def without(subject: Subject, heads: Iterable[Head]) -> Iterator[None]:
    """The model with some heads' outputs set to zero in front of the output projection, undone on exit.

    Unlike ``Subject.run_conditions`` this leaves room for a reading at the same time.
    """
    by_layer: dict[int, list[int]] = {}
    for head in sorted(set(heads)):
        block = subject.anatomy.block(head.layer)
        if not 0 <= head.head < block.heads:
            raise CaptureError(f"no head {head}: layer {head.layer} has heads 0 to {block.heads - 1}")
        by_layer.setdefault(head.layer, []).append(head.head)
    handles = []
    try:
        for layer, numbers in by_layer.items():
            block = subject.anatomy.block(layer)
            if sum(other.projection is block.projection for other in subject.anatomy.blocks) > 1:
                raise CaptureError(
                    f"layer {layer} shares its output projection with another layer: it cannot be read ablated"
                )
            handles.append(block.projection.register_forward_pre_hook(_silence(numbers, block.head_dim)))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _silence(numbers: list[int], size: int) -> Callable[[Any, tuple[Any, ...]], tuple[Any, ...]]:
    def hook(_: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        outputs: Tensor = args[0].clone()
        for number in numbers:
            outputs[..., number * size : (number + 1) * size] = 0
        return (outputs, *args[1:])

    return hook


@dataclass(frozen=True)
class Composition:
    """What taking one circuit out does to the attention of another.

    Attributes:
        removed_class, removed: the heads taken out; measured_class, measured: the heads looked at.
        left_out: members of the removed circuit that stay in, so that their layer has enough other heads for a control.
        before, after: [heads] their attention mass on their class's target, intact and with ``removed`` out.
        control: [draws, heads] the same with matched-random sets out (none of either circuit).
        distinct: matched sets that exist.
        p_value: share of sets, ``removed`` among them, after which mean attention is at most as large; NaN without.
        task: the causal check of ``removed`` on the probe's own task, or None.
    """

    removed_class: str
    removed: tuple[Head, ...]
    left_out: tuple[Head, ...]
    measured_class: str
    measured: tuple[Head, ...]
    before: FloatArray
    after: FloatArray
    control: FloatArray
    distinct: int
    p_value: float
    task: Verdict | None


def controllable(
    heads: Iterable[Head], strength: Mapping[Head, float], anatomy: Anatomy, unusable: Iterable[Head] = ()
) -> tuple[tuple[Head, ...], tuple[Head, ...]]:
    """The largest part of a set for which matched-random sets exist, and what had to be left out.

    A layer of H heads, u of them unusable, gives a control for at most ``(H - u) // 2`` heads; of more, those of the
    least ``strength`` are left out.
    """
    heads, unusable = set(heads), set(unusable)
    kept: list[Head] = []
    for layer in sorted({head.layer for head in heads}):
        inside = sorted((head for head in heads if head.layer == layer), key=lambda head: -strength[head])
        usable = anatomy.block(layer).heads - sum(head.layer == layer and head not in heads for head in unusable)
        kept += inside[: usable // 2]
    return tuple(sorted(kept)), tuple(sorted(heads - set(kept)))


def composition(
    subject: Subject,
    probe: ProbeBatch,
    removed_class: str,
    removed: Iterable[Head],
    measured_class: str,
    measured: Iterable[Head],
    *,
    draws: int = 19,
    options: CheckOptions | None = None,
    with_task: bool = True,
    batch_size: int = 16,
    progress: Progress | None = None,
) -> Composition:
    """Take ``removed`` out and measure the attention of ``measured`` to the targets of ``measured_class``.

    If induction is built on previous-token heads, taking those out must take the induction heads' attention away; the
    reverse must not, since the previous-token heads come first. Where ``removed`` takes so many heads of a layer that
    no control is left, its weakest heads there stay in (``left_out``).
    """
    whole, measured = set(removed), tuple(sorted(set(measured)))
    if not whole or not measured:
        missing = removed_class if not whole else measured_class
        raise RecordError(f"the {missing} circuit is empty: its composition cannot be tested")
    options = options or CheckOptions()

    def read(out: Iterable[Head]) -> HeadTable:
        with without(subject, out):
            return observation_of(subject.read(probe, batch_size), probe, step=0, tokens=None).heads

    def attention(table: HeadTable) -> FloatArray:
        found: FloatArray = table.attention[measured_class][[table.index(head) for head in measured]]
        return found

    intact = read(())
    strength = {head: float(intact.attention[removed_class][intact.index(head)]) for head in whole}
    removed, left_out = controllable(whole, strength, subject.anatomy, measured)
    if not removed:
        removed, left_out = tuple(sorted(whole)), ()
    before, after = attention(intact), attention(read(removed))
    sets = MatchedSets.of(removed, subject.anatomy, unusable=measured)
    control = []
    for number, drawn in enumerate(itertools.islice(sets.draws(options.seed) if sets.count else iter(()), draws), 1):
        if progress is not None:
            progress(f"{removed_class} out, control {number} of {min(draws, sets.count)}")
        control.append(attention(read(drawn)))
    stacked = np.array(control) if control else np.zeros((0, len(measured)))
    below = int((stacked.mean(axis=1) <= after.mean()).sum()) if len(stacked) else 0
    task = None
    if with_task:
        if progress is not None:
            progress(f"{removed_class} out: the task")
        task = check(subject, probe, removed, capability=removed_class, options=options, batch_size=batch_size)
    return Composition(
        removed_class=removed_class,
        removed=removed,
        left_out=left_out,
        measured_class=measured_class,
        measured=measured,
        before=before,
        after=after,
        control=stacked,
        distinct=sets.count,
        p_value=(below + 1) / (len(stacked) + 1) if len(stacked) else math.nan,
        task=task,
    )


# -- transplant -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Transplant:
    """The circuit found in ``source``, ablated in ``target``. ``shared`` counts heads of the target's own circuit."""

    source: str
    target: str
    shared: int
    verdict: Verdict | None


def transplant(
    circuits: Mapping[str, Sequence[Head]],
    models: Mapping[str, Callable[[], Any]],
    probe: ProbeBatch,
    *,
    mode: str = "zero",
    options: CheckOptions | None = None,
    batch_size: int = 16,
    progress: Progress | None = None,
) -> list[Transplant]:
    """Ablate every run's circuit in every run's model (the diagonal is each circuit in its own model).

    Args:
        circuits: run -> its circuit. models: run -> a function that loads its model; one is held at a time.
        probe: the batch that all runs share.

    Raises CaptureError where a model lacks a head of another's circuit: the models differ in shape.
    """
    results = []
    for target, load in models.items():
        subject = Subject(load(), probe)
        for source, heads in circuits.items():
            if progress is not None:
                progress(f"{source} in {target}")
            verdict = None
            if heads:
                verdict = check(subject, probe, heads, mode=mode, options=options, batch_size=batch_size, label=target)
            shared = len(set(heads) & set(circuits.get(target, ())))
            results.append(Transplant(source, target, shared, verdict))
        del subject
    return results
