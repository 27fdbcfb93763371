"""Which steps are looked at."""

from __future__ import annotations

import pytest

from spectral_monitor.errors import ScheduleError
from spectral_monitor.schedule import LogSchedule, every


@pytest.mark.parametrize("points", [1, 2, 4, 8, 17.3])
def test_the_three_ways_to_ask_agree(points):
    schedule = LogSchedule(points, last_step=1000, extra_steps=frozenset({77}))
    listed = schedule.steps(1000)
    assert listed == [step for step in range(1001) if schedule.is_scheduled(step)]
    previous, due = None, []
    for step in range(1001):
        if schedule.is_due(step, previous):
            due.append(step)
            previous = step
    assert due == listed
    assert {0, 1, 2, 4, 8, 64, 512, 77, 1000} <= set(listed)


def test_points_per_octave():
    assert LogSchedule(4).steps(64)[-5:] == [32, 38, 45, 54, 64]


def test_a_loop_that_calls_seldom_misses_no_point():
    schedule = LogSchedule(1, last_step=100)
    previous, looked = None, []
    for step in range(0, 101, 10):
        if schedule.is_due(step, previous):
            looked.append(step)
            previous = step
    assert looked == [0, 10, 20, 40, 70, 100]


def test_required_points_are_zero_doublings_last_and_extra():
    schedule = LogSchedule(4, last_step=700, extra_steps=frozenset({33}))
    required = [step for step in schedule.steps(700) if schedule.is_required(step)]
    assert required == [0, 1, 2, 4, 8, 16, 32, 33, 64, 128, 256, 512, 700]


def test_a_step_is_looked_at_once():
    assert not LogSchedule(4).is_due(8, 8)
    assert not LogSchedule(4).is_due(4, 8)


@pytest.mark.parametrize("options", [{"points_per_octave": 0}, {"points_per_octave": -1}, {"extra_steps": {-3}}])
def test_senseless_schedules_are_refused(options):
    with pytest.raises(ScheduleError):
        LogSchedule(**options)


def test_a_fixed_interval_as_extra_steps():
    assert list(every(25, 100)) == [25, 50, 75, 100]
    with pytest.raises(ScheduleError):
        every(0, 100)
