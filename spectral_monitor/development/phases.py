"""Circuits over time and across a switch of the data (recipe section 5, circuit identity)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from spectral_monitor.development.identity import Overlap, overlap
from spectral_monitor.development.series import Series
from spectral_monitor.errors import RecordError
from spectral_monitor.heads import Head

_PHASE = re.compile(r"(?P<name>[^@]+)@(?P<step>\d+)\Z")


@dataclass(frozen=True)
class Phase:
    """Training from ``start`` (a step) until the next phase."""

    name: str
    start: int

    @classmethod
    def parse(cls, text: str) -> Phase:
        """``"books@5000"``: the data called books from step 5000 on; RecordError for anything else."""
        match = _PHASE.match(text)
        if match is None:
            raise RecordError(f"{text!r} is no phase: write NAME@STEP, for example books@5000")
        return cls(match["name"], int(match["step"]))


@dataclass(frozen=True)
class PhaseChange:
    """The circuit at the end of one phase against the one at the end of the next."""

    capability: str
    earlier: str
    later: str
    earlier_step: int
    later_step: int
    kept: tuple[Head, ...]
    lost: tuple[Head, ...]
    gained: tuple[Head, ...]
    overlap: Overlap


def phase_changes(series: Series, capability: str, phases: Sequence[Phase]) -> list[PhaseChange]:
    """Compare the circuit across each switch; RecordError when a phase holds no usable observation."""
    cuts = sorted(phases, key=lambda phase: phase.start)
    if not cuts:
        return []
    if cuts[0].start > int(series.steps[series.usable][0]):
        cuts = [Phase(f"before {cuts[0].name}", int(series.steps[series.usable][0])), *cuts]
    ends = []
    for number, phase in enumerate(cuts):
        until = cuts[number + 1].start if number + 1 < len(cuts) else int(series.steps[-1]) + 1
        inside = np.flatnonzero(series.usable & (series.steps >= phase.start) & (series.steps < until))
        if not len(inside):
            raise RecordError(f"phase {phase.name!r} (steps {phase.start} to {until - 1}) holds no usable observation")
        ends.append((phase, int(inside[-1])))
    changes = []
    for (first, at), (second, then) in pairwise(ends):
        before, after = set(series.circuit(capability, at)), set(series.circuit(capability, then))
        changes.append(
            PhaseChange(
                capability=capability,
                earlier=first.name,
                later=second.name,
                earlier_step=int(series.steps[at]),
                later_step=int(series.steps[then]),
                kept=tuple(sorted(before & after)),
                lost=tuple(sorted(before - after)),
                gained=tuple(sorted(after - before)),
                overlap=overlap(before, after, series.heads),
            )
        )
    return changes


def stability(series: Series, capability: str) -> list[Overlap | None]:
    """[O] overlap of the circuit with that of the usable observation before; None where there is none, or no head."""
    members = series.members(capability)
    result: list[Overlap | None] = [None] * len(series)
    usable = [int(index) for index in np.flatnonzero(series.usable)]
    for before, at in pairwise(usable):
        if (members[before] | members[at]).any():
            result[at] = overlap(series.circuit(capability, before), series.circuit(capability, at), series.heads)
    return result
