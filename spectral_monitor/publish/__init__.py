"""Ways out of the monitor: trackers, terminal, reports. Nothing below this room imports it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from spectral_monitor.observation import Event, Observation, Verdict


class Publisher(Protocol):
    """Who is told what the monitor sees. The monitor keeps a failing publisher away from the training run."""

    def start(self, monitor_info: Mapping[str, Any]) -> None:
        """Before the first observation of a session; ``monitor_info`` is what run.json holds, plus ``run_dir``."""

    def observation(self, observation: Observation, previous: Observation | None = None) -> None:
        """A look; ``previous`` is the same probe's last one."""

    def event(self, event: Event) -> None:
        """A crossing, an alarm, a note."""

    def verdict(self, verdict: Verdict) -> None:
        """A causal check has ended."""

    def close(self, summary: Mapping[str, Any] | None = None) -> None:
        """The run has ended."""
