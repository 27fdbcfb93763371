"""At which steps to look. A step is counted in finished optimizer updates; step 0 is before the first."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from spectral_monitor.errors import ScheduleError


@dataclass(frozen=True)
class LogSchedule:
    """Log-spaced steps: 0, then ``points_per_octave`` a doubling, then the last step, and any listed extra steps.

    Attributes:
        points_per_octave: points between a step and its double. Early steps have fewer: there are no steps between.
        last_step: of the run, when known; always looked at.
        extra_steps: looked at too.
        start: no log-spaced point before this step (step 0, doublings and extra steps stay).
    """

    points_per_octave: float = 4.0
    last_step: int | None = None
    extra_steps: frozenset[int] = field(default_factory=frozenset)
    start: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "extra_steps", frozenset(self.extra_steps))
        if not math.isfinite(self.points_per_octave) or self.points_per_octave <= 0:
            raise ScheduleError(f"points_per_octave must be a number above 0, not {self.points_per_octave}")
        for step in self.extra_steps:
            if not isinstance(step, int) or step < 0:
                raise ScheduleError(f"extra steps are whole numbers from 0 up, not {step!r}")

    def point(self, number: int) -> int:
        """Step of the log-spaced point ``number``."""
        return round(2 ** (number / self.points_per_octave))

    def is_scheduled(self, step: int) -> bool:
        """Whether ``step`` is a point of the schedule."""
        return self.is_required(step) or (step >= self.start and self._is_point(step))

    def is_required(self, step: int) -> bool:
        """Points that no budget may drop: step 0, each doubling, the last step and the extra steps."""
        return step in (0, self.last_step) or step in self.extra_steps or (step > 0 and step & (step - 1) == 0)

    def is_due(self, step: int, previous: int | None) -> bool:
        """Whether a point lies in ``(previous, step]``: a loop that does not call at every step misses none."""
        first = 0 if previous is None else previous + 1
        if step < first:
            return False
        if previous is None:
            return self.is_scheduled(step)
        return self.next_after(previous) <= step

    def next_after(self, step: int) -> int:
        """The next scheduled step behind ``step``."""
        later = [extra for extra in self.extra_steps if extra > step]
        if self.last_step is not None and self.last_step > step:
            later.append(self.last_step)
        later.append(1 if step < 1 else 2 ** (step.bit_length()))
        base = max(step, self.start - 1, 0)
        number = math.floor(math.log2(base) * self.points_per_octave) if base >= 1 else 0
        while self.point(number) <= base:
            number += 1
        later.append(self.point(number))
        return min(later)

    def _is_point(self, step: int) -> bool:
        if step < 1:
            return False
        near = round(math.log2(step) * self.points_per_octave)
        return any(self.point(number) == step for number in (near - 1, near, near + 1) if number >= 0)

    def steps(self, last: int) -> list[int]:
        """All scheduled steps up to ``last``."""
        result, step = [0], 0
        while (step := self.next_after(step)) <= last:
            result.append(step)
        return result


def every(interval: int, last: int) -> Iterable[int]:
    """Extra steps at a fixed interval."""
    if interval < 1:
        raise ScheduleError(f"an interval is a whole number of steps from 1 up, not {interval}")
    return range(interval, last + 1, interval)
