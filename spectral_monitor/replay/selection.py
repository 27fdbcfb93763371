"""Which of the checkpoints that exist are measured: pure functions of their steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from spectral_monitor.errors import ScheduleError
from spectral_monitor.replay.presets import PRESETS, Preset

T = TypeVar("T")


@dataclass(frozen=True)
class Selection:
    """What the command line asks for; exactly one of the fields is set (``everything`` is the default).

    Attributes:
        points: so many checkpoints, evenly spaced in log(1 + step) over what exists.
        steps: exactly these steps; one that does not exist is an error.
        last: the latest checkpoint only.
        preset: name of a published set.
        everything: all of them.
    """

    points: int | None = None
    steps: tuple[int, ...] = ()
    last: bool = False
    preset: str | None = None
    everything: bool = False

    def __post_init__(self) -> None:
        asked = [self.points is not None, bool(self.steps), self.last, self.preset is not None, self.everything]
        if sum(asked) > 1:
            raise ScheduleError("give one of --points, --steps, --all, --last and --preset, not several")
        if self.points is not None and self.points < 1:
            raise ScheduleError(f"--points {self.points} selects nothing: give 1 or more")
        if any(step < 0 for step in self.steps):
            raise ScheduleError(f"--steps has a negative step: {min(self.steps)}")
        if self.preset is not None:
            find_preset(self.preset)


def find_preset(name: str) -> Preset:
    """The published set called ``name``; ScheduleError lists the names there are."""
    if name not in PRESETS:
        raise ScheduleError(f"unknown preset {name!r}: there are {', '.join(PRESETS)}")
    return PRESETS[name]


def parse_steps(text: str) -> tuple[int, ...]:
    """``"1,64,512"`` -> ``(1, 64, 512)``; ScheduleError for anything else."""
    try:
        return tuple(int(part) for part in text.replace(" ", "").split(",") if part)
    except ValueError:
        raise ScheduleError(
            f"--steps {text!r}: give whole numbers with commas between them, such as 1,64,512"
        ) from None


def log_spaced(steps: Sequence[int], points: int) -> list[int]:
    """Up to ``points`` of the existing ``steps``, evenly spaced in log(1 + step), first and last included.

    Each wanted position takes the nearest step that is still free, so exactly ``min(points, len(steps))`` come back,
    in order.
    """
    free = sorted(set(steps))
    if points >= len(free):
        return free
    if points == 1:
        return [free[-1]]
    low, high = math.log1p(free[0]), math.log1p(free[-1])
    chosen = [free.pop(0), free.pop()]
    for index in range(1, points - 1):
        position = low + (high - low) * index / (points - 1)
        nearest = min(free, key=lambda step: (abs(math.log1p(step) - position), step))
        free.remove(nearest)
        chosen.append(nearest)
    return sorted(chosen)


def select_steps(selection: Selection, steps: Sequence[int], where: str) -> list[int]:
    """The selected ones of the steps that exist in one series, in order.

    Raises ScheduleError when a step asked for does not exist, naming its nearest neighbour. Presets go by name, not
    by step: see ``find_preset``.
    """
    existing = sorted(set(steps))
    if not existing:
        return []
    if selection.points is not None:
        return log_spaced(existing, selection.points)
    if selection.last:
        return [existing[-1]]
    if selection.steps:
        missing = [step for step in selection.steps if step not in existing]
        if missing:
            nearest = min(existing, key=lambda step: abs(step - missing[0]))
            raise ScheduleError(f"{where} has no checkpoint at step {missing[0]}; the nearest is at step {nearest}")
        return sorted(set(selection.steps))
    return existing
