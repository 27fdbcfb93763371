"""Publish through the trackers that the user gave Accelerate, and into an active trackio run."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from spectral_monitor.observation import Event, Observation, Verdict
from spectral_monitor.publish import names
from spectral_monitor.publish.alerts import Alert, AlertBox
from spectral_monitor.publish.guarded import guarded
from spectral_monitor.publish.rows import Row, Rows
from spectral_monitor.publish.wandb import WandbPublisher


class _RowPublisher:
    """Rows and alerts for a tracker that takes numbers; subclasses say where they go."""

    def __init__(self, max_keys: int, head_cap: int, alerts: bool, box: AlertBox | None) -> None:
        self.rows = Rows(max_keys, head_cap)
        self.box = box or AlertBox()
        self._alerts = alerts

    def start(self, monitor_info: Mapping[str, Any]) -> None:
        """Learn the thresholds; counts and announcements of an earlier session go on."""
        self.box.resume(*self.rows.start(monitor_info))

    def observation(self, observation: Observation, previous: Observation | None = None) -> None:
        """One row of scalars."""
        self._log(self.rows.observation(observation), observation.step)
        self._alert(self.box.due())

    def event(self, event: Event) -> None:
        """Count the event and raise its alert."""
        self.rows.event(event)
        self._alert(self.box.event(event))

    def verdict(self, verdict: Verdict) -> None:
        """One row with the verdict's numbers, and its alert."""
        self._log(self.rows.verdict(verdict), verdict.step)
        self._alert(self.box.verdict(verdict))

    def close(self, summary: Mapping[str, Any] | None = None) -> None:
        """Send the last counts and the alerts that still wait. The tracker is its owner's to finish."""
        row = self.rows.counts_row()
        if row:
            self._log(row, int(row[names.STEP]))
        self._alert(self.box.rest())

    def _log(self, row: Row, step: int) -> None:
        raise NotImplementedError

    def _send_alert(self, alert: Alert) -> None:
        raise NotImplementedError

    def _alert(self, alerts: list[Alert]) -> None:
        if self._alerts:
            for alert in alerts:
                self._send_alert(alert)


def joining(present: Iterable[Any] = ()) -> tuple[Any, ...]:
    """Guarded publishers for whichever W&B and trackio runs are active when something is to be said.

    They open no run and import neither package; a kind that ``present`` has already is left out.
    """
    kinds = {type(getattr(publisher, "publisher", publisher)) for publisher in present}
    return guarded([make() for make in (WandbPublisher, TrackioPublisher) if make not in kinds])


class AcceleratePublisher(_RowPublisher):
    """Publisher for a loop that uses Accelerate's trackers (TensorBoard, trackio, MLflow, W&B, a tracker of one's own).

    Rows go to each tracker's ``log(values, step=...)``, what ``accelerator.log`` calls. Two trackers get more: W&B
    through ``WandbPublisher`` on the tracker's own run (table, picture, alerts; no step passed), trackio with alerts.

    Args:
        accelerator: after ``init_trackers``.
        log_step: pass ``step=`` (finished optimizer updates) to the trackers. Set it to False when the loop itself
            calls ``accelerator.log`` without a step: the trackers' own counters then stay the loop's.
        max_keys, head_cap, alerts: as for ``WandbPublisher``.
    """

    def __init__(
        self,
        accelerator: Any,
        *,
        log_step: bool = True,
        max_keys: int = names.MAX_KEYS,
        head_cap: int = names.HEAD_CAP,
        alerts: bool = True,
        box: AlertBox | None = None,
    ) -> None:
        super().__init__(max_keys, head_cap, alerts, box)
        self.accelerator = accelerator
        self.log_step = log_step
        self._wandb: dict[int, WandbPublisher] = {}
        self._trackio = _AtLatestStep()
        self._options: dict[str, Any] = {"max_keys": max_keys, "head_cap": head_cap, "alerts": alerts, "axis": "own"}
        self._info: Mapping[str, Any] = {}

    def start(self, monitor_info: Mapping[str, Any]) -> None:
        """Learn the thresholds; counts and announcements of an earlier session go on."""
        super().start(monitor_info)
        self._info = monitor_info
        for publisher in self._on_wandb():
            publisher.start(monitor_info)

    def observation(self, observation: Observation, previous: Observation | None = None) -> None:
        """One row of scalars to each tracker; W&B gets table and picture too."""
        super().observation(observation, previous)
        for publisher in self._on_wandb():
            publisher.observation(observation, previous)

    def event(self, event: Event) -> None:
        """Count the event and raise its alert where the tracker has alerts."""
        super().event(event)
        for publisher in self._on_wandb():
            publisher.event(event)

    def verdict(self, verdict: Verdict) -> None:
        """One row with the verdict's numbers, and its alert."""
        super().verdict(verdict)
        for publisher in self._on_wandb():
            publisher.verdict(verdict)

    def close(self, summary: Mapping[str, Any] | None = None) -> None:
        """Send what is left; ``accelerator.end_training`` is the user's."""
        super().close(summary)
        for tracker in self._trackers():
            if tracker.name == "trackio":
                self._trackio.send_early(tracker.tracker)
        for publisher in self._on_wandb():
            publisher.close(summary)

    def _trackers(self) -> list[Any]:
        return list(self.accelerator.trackers) if self.accelerator.is_main_process else []

    def _on_wandb(self) -> list[WandbPublisher]:
        found = []
        for tracker in self._trackers():
            if tracker.name == "wandb":
                if id(tracker) not in self._wandb:
                    self._wandb[id(tracker)] = WandbPublisher(tracker.tracker, **self._options)
                    self._wandb[id(tracker)].start(self._info)
                found.append(self._wandb[id(tracker)])
        return found

    def _log(self, row: Row, step: int) -> None:
        for tracker in self._trackers():
            if tracker.name != "wandb":  # its own publisher says so itself
                self.rows.say_left_out(tracker.name)
            if tracker.name == "trackio" and not self.log_step:
                self._trackio.log(tracker.tracker, row)
            elif tracker.name != "wandb":
                tracker.log(row, step=step if self.log_step else None)

    def _send_alert(self, alert: Alert) -> None:
        for tracker in self._trackers():
            if tracker.name == "trackio":
                _trackio_alert(tracker.tracker, alert)


class TrackioPublisher(_RowPublisher):
    """Publisher for the active trackio run (the Trainer's callback's, the user's); never opens one.

    Rows carry ``train/global_step`` and the monitor's own step, and are logged at the run's latest step, so that its
    own counter stays what it would be without the monitor.
    """

    def __init__(
        self,
        run: Any = None,
        *,
        max_keys: int = names.MAX_KEYS,
        head_cap: int = names.HEAD_CAP,
        alerts: bool = True,
        box: AlertBox | None = None,
    ) -> None:
        super().__init__(max_keys, head_cap, alerts, box)
        self._given = run
        self._rows_of = _AtLatestStep()

    def close(self, summary: Mapping[str, Any] | None = None) -> None:
        """Send the last counts and what still waits. The run is its owner's to finish."""
        super().close(summary)
        run = self._run()
        if run is not None:
            self._rows_of.send_early(run)

    def _run(self) -> Any:
        if self._given is not None:
            return self._given
        module = sys.modules.get("trackio")
        return module.context_vars.current_run.get() if module is not None else None

    def _log(self, row: Row, step: int) -> None:
        run = self._run()
        if run is not None:
            self.rows.say_left_out("trackio")
            self._rows_of.log(run, {names.GLOBAL_STEP: float(step), **row})

    def _send_alert(self, alert: Alert) -> None:
        run = self._run()
        if run is not None:
            _trackio_alert(run, alert)


class _AtLatestStep:
    """Logs rows at the step of a trackio run's last row: that leaves the run's own counter alone.

    Before the run has a row, ours wait: one logged now would take the number of the owner's first row.
    """

    def __init__(self) -> None:
        self._early: list[Row] = []

    def log(self, run: Any, row: Row) -> None:
        self._early.append(row)
        if getattr(run, "_next_step", 1):
            self.send_early(run)

    def send_early(self, run: Any) -> None:
        step = max(int(getattr(run, "_next_step", 1)) - 1, 0)
        for row in self._early:
            run.log(row, step=step)
        self._early.clear()


def _trackio_alert(run: Any, alert: Alert) -> None:
    from trackio.alerts import AlertLevel

    run.alert(title=alert.title, text=alert.text, level=AlertLevel[alert.level])
