"""Let no tracker hold up or take down a training run."""

from __future__ import annotations

import contextvars
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from spectral_monitor.observation import Event, Observation, Verdict

log = logging.getLogger("spectral_monitor")

#: Seconds that one training step waits for a tracker, and that the end of a run does.
LIMIT, CLOSE_LIMIT = 10.0, 30.0
#: Overruns of the limit, and failures in a row, after which a tracker is left alone.
OVERRUNS, FAILURES = 3, 20
#: Calls kept for a tracker that is late.
_QUEUE = 100


@dataclass
class _Call:
    method: str
    run: Callable[[], None]
    done: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None


class GuardedPublisher:
    """Runs another publisher's calls in one worker thread, in order, and waits for each at most ``limit`` seconds.

    All calls of one training step together wait at most ``limit``; while a call is late nothing waits at all: later
    calls queue up behind it. After ``OVERRUNS`` overruns or ``FAILURES`` failures in a row the publisher is left alone
    and the run goes on with its record only. No exception ever leaves this class; the first failure is logged when it
    happens, all of them are counted, ``close`` says how many there were.

    Args:
        publisher: the publisher to guard.
        limit: seconds, more than 0.
        close_limit: seconds that ``close`` waits for calls that are still under way.
        name: what messages call it; the publisher class's name by default.
    """

    def __init__(
        self, publisher: Any, *, limit: float = LIMIT, close_limit: float = CLOSE_LIMIT, name: str | None = None
    ) -> None:
        if not limit > 0 or not close_limit > 0:
            raise ValueError(f"the limit of a guarded publisher is {limit} s: give more than 0 seconds")
        self.publisher = publisher
        self.name = name or type(publisher).__name__.removesuffix("Publisher").lower()
        self.limit, self.close_limit = limit, close_limit
        self.calls = self.failed = self.overruns = self.left_out = 0
        self.first_error = ""
        self.given_up = ""
        self._in_a_row = 0
        self._queue: queue.Queue[_Call | None] = queue.Queue(_QUEUE)
        self._late: _Call | None = None
        self._waited: tuple[int | None, float] = (None, 0.0)
        self._thread: threading.Thread | None = None
        self._run_dir: Any = "RUN_DIR"
        self._closed = False

    # -- what the monitor calls ---------------------------------------------------------------------------------

    def start(self, monitor_info: Mapping[str, Any]) -> None:
        """As the inner publisher's, under the limit."""
        self._run_dir = monitor_info.get("run_dir", self._run_dir)
        self._do("start", None, monitor_info)

    def observation(self, observation: Observation, previous: Observation | None = None) -> None:
        """As the inner publisher's, under the limit."""
        self._do("observation", observation.step, observation, previous)

    def event(self, event: Event) -> None:
        """As the inner publisher's, under the limit."""
        self._do("event", event.step, event)

    def verdict(self, verdict: Verdict) -> None:
        """As the inner publisher's, under the limit."""
        self._do("verdict", verdict.step, verdict)

    def close(self, summary: Mapping[str, Any] | None = None) -> None:
        """Close the inner publisher, wait for it at most ``close_limit``, and say what failed."""
        if self._closed:
            return
        self._closed = True
        ends = time.monotonic() + self.close_limit
        if self._late is not None:
            self._late.done.wait(self.close_limit)
        self._waited = (None, 0.0)
        self._do("close", None, summary or {}, limit=max(0.01, ends - time.monotonic()))
        if self._late is not None and not self._late.done.is_set():
            # Still blocked: what waits behind it is given up, so that nothing runs after the end of the run.
            self.given_up = self.given_up or "the run has ended"
            self.left_out += self._queue.qsize()
        elif self._thread is not None:
            self._queue.put(None)
            self._thread.join(1.0)
        if self.failed or self.overruns or self.left_out:
            log.warning("%s", self.report())

    # -- accounts -----------------------------------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        """Counts for the run's summary: calls made, failed, over the limit, and left out."""
        return {
            "publisher": self.name,
            "calls": self.calls,
            "failed": self.failed,
            "over_the_limit": self.overruns,
            "left_out": self.left_out,
            "first_error": self.first_error,
        }

    def report(self) -> str:
        """One sentence about what did not reach the tracker, and what to do."""
        parts = [f"{self.failed} of {self.calls} calls failed"]
        if self.overruns:
            parts.append(f"{self.overruns} took longer than {self.limit:g} s")
        if self.left_out:
            parts.append(f"{self.left_out} were not made")
        first = f" (first: {self.first_error})" if self.first_error else ""
        return (
            f"{self.name}: {', '.join(parts)}{first}; the run record is complete, "
            f"`spectral-monitor sync {self._run_dir}` writes it into one W&B run"
        )

    # -- inside -------------------------------------------------------------------------------------------------

    def _do(self, method: str, step: int | None, *arguments: Any, limit: float | None = None) -> None:
        if self.given_up:
            self.left_out += 1
            return
        self.calls += 1
        context = contextvars.copy_context()
        function = getattr(self.publisher, method)
        call = _Call(method, lambda: context.run(function, *arguments))
        self._ensure_worker()
        try:
            self._queue.put_nowait(call)
        except queue.Full:
            self.left_out += 1
            return
        if self._late is not None and not self._late.done.is_set():
            return
        self._late = None
        spent = self._waited[1] if step is not None and self._waited[0] == step else 0.0
        began = time.monotonic()
        in_time = call.done.wait(max(0.0, (self.limit if limit is None else limit) - spent))
        self._waited = (step, spent + time.monotonic() - began)
        if not in_time:
            self._overrun(call)

    def _overrun(self, call: _Call) -> None:
        self._late = call
        self.overruns += 1
        if self.overruns == 1:
            self.first_error = self.first_error or f"{call.method} took longer than {self.limit:g} s"
            log.warning(
                "%s: %s took longer than %g s; the training goes on, the run record has everything",
                self.name,
                call.method,
                self.limit,
            )
        if self.overruns >= OVERRUNS:
            self._give_up(f"{self.overruns} calls took longer than {self.limit:g} s")

    def _give_up(self, reason: str) -> None:
        if not self.given_up:
            self.given_up = reason
            log.warning("%s: %s; from here on the run record only", self.name, reason)

    def _ensure_worker(self) -> None:
        if self._thread is None or not self._thread.is_alive():  # also in a forked child, which has no threads
            self._thread = threading.Thread(target=self._work, name=f"spectral-monitor-{self.name}", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while True:
            call = self._queue.get()
            if call is None:
                return
            if self.given_up:
                self.left_out += not self._closed  # after close they were counted there
                call.done.set()
                continue
            try:
                call.run()
                self._in_a_row = 0
            except Exception as error:
                self._failed(call, error)
            finally:
                call.done.set()

    def _failed(self, call: _Call, error: Exception) -> None:
        call.error = error
        self.failed += 1
        self._in_a_row += 1
        if self.failed == 1:
            self.first_error = f"{type(error).__name__}: {error}"
            log.warning(
                "%s: %s failed (%s); the training goes on, the run record has everything",
                self.name,
                call.method,
                self.first_error,
            )
        if self._in_a_row >= FAILURES:
            self._give_up(f"{self._in_a_row} calls failed in a row")


def guarded(publishers: tuple[Any, ...] | list[Any], limit: float = LIMIT) -> tuple[GuardedPublisher, ...]:
    """Each publisher behind its own guard (one thread each: a slow one does not hold up the others)."""
    return tuple(
        each if isinstance(each, GuardedPublisher) else GuardedPublisher(each, limit=limit) for each in publishers
    )
