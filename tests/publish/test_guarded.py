"""Case: W&B or an alert failing takes training down."""

from __future__ import annotations

import contextvars
import sys
import threading
from typing import Any

import pytest

from spectral_monitor.publish import guarded as module
from spectral_monitor.publish.guarded import GuardedPublisher, guarded
from spectral_monitor.publish.wandb import WandbPublisher

from . import factories as make

VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("VARIABLE", default="unset")


class Recorder:
    """A publisher that keeps what it was told, and fails or blocks when asked to."""

    def __init__(self, fail: tuple[int, ...] = (), block: tuple[int, ...] = ()) -> None:
        self.told: list[tuple[str, int | None]] = []
        self.threads: set[int] = set()
        self.fail, self.block = fail, block
        self.release = threading.Event()
        self.seen_variable = ""

    def _tell(self, method: str, step: int | None) -> None:
        self.threads.add(threading.get_ident())
        self.seen_variable = VARIABLE.get()
        number = len(self.told)
        self.told.append((method, step))
        if number in self.fail:
            raise BrokenPipeError("the service is gone")
        if number in self.block:
            self.release.wait(120)

    def start(self, info: Any) -> None:
        self._tell("start", None)

    def observation(self, observation: Any, previous: Any = None) -> None:
        self._tell("observation", observation.step)

    def event(self, event: Any) -> None:
        self._tell("event", event.step)

    def verdict(self, verdict: Any) -> None:
        self._tell("verdict", verdict.step)

    def close(self, summary: Any = None) -> None:
        self._tell("close", None)


def whole_run(guard: GuardedPublisher, steps: int = 5) -> None:
    guard.start({"run_dir": "runs/one"})
    for step in range(steps):
        guard.observation(make.observation(step), None)
        guard.event(make.event(step=step))
        guard.verdict(make.verdict(step))
    guard.close({})


def expected(steps: int = 5) -> list[tuple[str, int | None]]:
    looks = [(method, step) for step in range(steps) for method in ("observation", "event", "verdict")]
    return [("start", None), *looks, ("close", None)]


def test_calls_arrive_in_order_in_one_other_thread() -> None:
    inner = Recorder()
    guard = GuardedPublisher(inner)
    VARIABLE.set("the caller's")
    whole_run(guard)
    assert inner.told == expected()
    assert len(inner.threads) == 1 and threading.get_ident() not in inner.threads
    assert inner.seen_variable == "the caller's", "trackio keeps its run in a context variable"
    assert guard.summary()["failed"] == 0


def test_a_failure_is_counted_said_once_and_summed_up(caplog: pytest.LogCaptureFixture) -> None:
    inner = Recorder(fail=(3, 5, 6))
    guard = GuardedPublisher(inner, name="wandb")
    whole_run(guard)
    assert inner.told == expected()
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 2
    assert "verdict failed" in texts[0] and "BrokenPipeError: the service is gone" in texts[0]
    assert "3 of 17 calls failed" in texts[1] and "spectral-monitor sync runs/one" in texts[1]


def test_a_blocked_call_holds_a_step_up_no_longer_than_the_limit() -> None:
    inner = Recorder(block=(1,))
    guard = GuardedPublisher(inner, limit=0.2, close_limit=60.0)
    guard.start({})
    guard.observation(make.observation(0), None)
    assert guard.overruns == 1
    guard.limit = 3600.0  # a later call that waited would now wait until the blocked one ends
    for step in range(1, 20):
        guard.observation(make.observation(step), None)
        guard.event(make.event(step=step))
    assert inner.told == [("start", None), ("observation", 0)], "the call is still blocked, and nobody waited"
    inner.release.set()
    guard.close({})
    assert inner.told[-1] == ("close", None) and len(inner.told) == 2 + 38 + 1, "late, but all of it"
    assert guard.overruns == 1


def test_all_calls_of_one_step_share_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    guard = GuardedPublisher(Recorder(), limit=1.0)
    guard.start({})
    guard._waited = (7, 0.75)
    original = threading.Event.wait

    def wait(self: threading.Event, timeout: float | None = None) -> bool:
        if threading.current_thread() is threading.main_thread() and timeout is not None:
            waits.append(timeout)
        return original(self, timeout)

    monkeypatch.setattr(threading.Event, "wait", wait)
    guard.event(make.event(step=7))
    guard.event(make.event(step=8))
    assert waits[0] == pytest.approx(0.25) and waits[1] == pytest.approx(1.0)


def test_left_alone_after_some_overruns(caplog: pytest.LogCaptureFixture) -> None:
    class Slow(Recorder):
        def _tell(self, method: str, step: int | None) -> None:
            super()._tell(method, step)
            if method == "observation":
                assert self.release.wait(120)
                self.release.clear()

    inner = Slow()
    guard = GuardedPublisher(inner, limit=0.05, close_limit=1.0)
    guard.start({})
    for step in range(module.OVERRUNS):
        guard.observation(make.observation(step), None)
        late = guard._late
        assert late is not None
        inner.release.set()
        assert late.done.wait(10)
    told = len(inner.told)
    guard.observation(make.observation(9), None)
    guard.close({})
    assert len(inner.told) == told
    assert guard.left_out == 2 and "the run record only" in caplog.text


def test_left_alone_after_failures_in_a_row() -> None:
    inner = Recorder(fail=tuple(range(1, 100)))
    guard = GuardedPublisher(inner)
    guard.start({})
    for step in range(40):
        guard.observation(make.observation(step), None)
    assert len(inner.told) == 1 + module.FAILURES
    assert guard.summary()["left_out"] == 40 - module.FAILURES


def test_close_does_not_wait_for_ever_and_runs_once() -> None:
    inner = Recorder(block=(1, 2))
    guard = GuardedPublisher(inner, limit=0.05, close_limit=0.3)
    guard.start({})
    guard.observation(make.observation(0), None)
    guard.event(make.event(step=0))
    guard.close({})
    guard.close({})
    late = guard._late
    assert late is not None and not late.done.is_set(), "closed while the call was blocked"
    assert guard.left_out == 2 and "2 were not made" in guard.report()
    inner.release.set()
    assert guard._thread is not None
    guard._queue.put(None)
    guard._thread.join(60)
    assert inner.told == [("start", None), ("observation", 0)], "nothing runs after the end"
    assert guard.left_out == 2


@pytest.mark.parametrize("what", ["log", "alert"])
def test_wandb_that_breaks_never_raises(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    run = make.StrictRun()
    for name, fake in make.fake_wandb_modules(run).items():
        monkeypatch.setitem(sys.modules, name, fake)
    original = getattr(run, what)
    calls = []

    def third_time_broken(*args: Any, **options: Any) -> None:
        calls.append(1)
        if what == "alert" or len(calls) == 3:
            raise BrokenPipeError("pipe")
        original(*args, **options)

    setattr(run, what, third_time_broken)
    (guard,) = guarded([WandbPublisher(axis="trainer")])
    whole_run(guard, steps=6)
    assert guard.failed >= 1 and "BrokenPipeError" in guard.first_error
    if what == "log":
        assert len(run.rows) == len(calls) - 1 == 11


def test_a_limit_that_makes_no_sense() -> None:
    with pytest.raises(ValueError, match="more than 0"):
        GuardedPublisher(Recorder(), limit=0)
