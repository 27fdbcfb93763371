"""Publish into the W&B run that is already there: never open one, never move its step, never lose a point of it.

How a row gets into the run without harm (tried against wandb 0.31; ``docs/wandb.md`` has the reasons):

* ``step=`` is never passed. The row carries its own x value.
* The Trainer's callback is there: its axis ``train/global_step`` is put into the row, which is committed as it is.
* A user's own loop: the row is handed over with ``commit=False`` and rides on the user's next (or pending) row, so
  the run's own counter stays what it would be without the monitor. Of several looks between two rows of the user one
  rides: the newest where it has all keys of the earlier one, else the first. The others are sent when the run
  finishes, where no row of the user can come after them; the run's summary then gets back the newest values, which
  these older rows have covered.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from spectral_monitor.observation import Event, Observation, Verdict
from spectral_monitor.publish import names
from spectral_monitor.publish.alerts import Alert, AlertBox
from spectral_monitor.publish.picture import layers_by_heads
from spectral_monitor.publish.rows import Row, Rows, histogram, table_of_heads

log = logging.getLogger("spectral_monitor")

Axis = Literal["auto", "trainer", "own"]
#: Files (tables and pictures) that a run gets: the vendor advises to stay under 1,000.
MAX_FILES = 800
#: Rows that are kept for a run that is not there yet.
_MAX_WAITING = 1000


class WandbPublisher:
    """Publisher for the active W&B run (``wandb.run``), or for ``run`` when one is given.

    Args:
        run: the run to write to. None: whichever run is active at the moment of each call. When there is none, or
            W&B is disabled or not installed, nothing is sent; the run record has everything.
        axis: ``"trainer"`` (rows carry ``train/global_step``), ``"own"`` (``spectral_monitor/step``), or ``"auto"``:
            the Trainer's when its callback has set up the run.
        max_keys: distinct scalar keys a probe; all probes together have at most ``names.HARD_LIMIT``.
        head_cap: heads of a probe with scalar keys of their own.
        media: also log the table, the picture and the histogram (at most ``max_files`` files a run).
        own_rows: commit each row at once also in a user's own loop. The run's step then advances by one a look.
        alerts: raise run alerts for crossings and verdicts.
    """

    def __init__(
        self,
        run: Any = None,
        *,
        axis: Axis = "auto",
        max_keys: int = names.MAX_KEYS,
        head_cap: int = names.HEAD_CAP,
        media: bool = True,
        max_files: int = MAX_FILES,
        own_rows: bool = False,
        alerts: bool = True,
        box: AlertBox | None = None,
    ) -> None:
        if axis not in ("auto", "trainer", "own"):
            raise names.PublishError(f"axis is {axis!r}: give 'auto', 'trainer' or 'own'")
        self._given = run
        self._axis: Axis = axis
        self._media, self._max_files, self._files, self._looks = media, max_files, 0, 0
        self._own_rows, self._alerts = own_rows, alerts
        self.rows = Rows(max_keys, head_cap)
        self.box = box or AlertBox()
        self._defined: set[str] = set()
        self._waiting: list[Row] = []
        self._newest: Row = {}
        self._riding: Row = {}
        self._riding_at: int | None = None
        self._hooked: Any = None
        self._joined: set[str] = set()
        self._info: Mapping[str, Any] = {}
        self.dropped = 0

    # -- what the monitor calls ---------------------------------------------------------------------------------

    def start(self, monitor_info: Mapping[str, Any]) -> None:
        """Learn the monitor's thresholds; a resumed run's counts go on, and what was announced stays announced."""
        self._info = dict(monitor_info)
        self.box.resume(*self.rows.start(monitor_info))
        self._run()

    def observation(self, observation: Observation, previous: Observation | None = None) -> None:
        """One row: scalars, table, picture, histogram, in one log call."""
        row = self.rows.observation(observation)
        run = self._run()
        self._send(run, row, self._media_of(observation) if run is not None else {})
        self._alert_all(run, self.box.due())

    def event(self, event: Event) -> None:
        """Count the event (it shows in the next row) and raise its alert."""
        self.rows.event(event)
        self._alert_all(self._run(), self.box.event(event))

    def verdict(self, verdict: Verdict) -> None:
        """One row with the verdict's numbers, and its alert."""
        run = self._run()
        self._send(run, self.rows.verdict(verdict), {})
        self._alert_all(run, self.box.verdict(verdict))

    def close(self, summary: Mapping[str, Any] | None = None) -> None:
        """Send what is left. The run itself is its owner's to finish."""
        run = self._run()
        counts = self.rows.counts_row()
        if counts:
            self._send(run, counts, {})
        self._alert_all(run, self.box.rest())
        if run is None:
            self._waiting.clear()
        elif self._waiting and self._hooked is not run:
            self.dropped = len(self._waiting)
            log.warning(
                "wandb: %d looks found no row of yours to ride on and are in the run record only; "
                "`spectral-monitor sync %s` writes them all into one run",
                self.dropped,
                self._info.get("run_dir", "RUN_DIR"),
            )
        if self.rows.not_shown:
            log.info(
                "wandb: %d flagged heads have no series of their own (head_cap=%d and max_keys=%d a probe); "
                "the table has them",
                len(self.rows.not_shown),
                self.rows.head_cap,
                self.rows.budget.limit,
            )

    # -- the run ------------------------------------------------------------------------------------------------

    def _run(self) -> Any:
        """The run to write to, or None. wandb is never imported here: no run is active in a process without it."""
        run = self._given
        if run is None:
            module = sys.modules.get("wandb")
            run = getattr(module, "run", None)
        if run is None or getattr(run, "disabled", False):
            return None
        if str(run.id) not in self._joined:
            self._join(run)
        return run

    def _join(self, run: Any) -> None:
        self._joined.add(str(run.id))
        self._defined.clear()
        self._riding, self._riding_at = {}, None
        probes = self._info.get("probes")
        if probes:
            with contextlib.suppress(Exception):  # a guest's note in the config, not worth a word when it fails
                run.config.update({names.PREFIX: {"probes": _plain(probes)}}, allow_val_change=True)
        self._remember(run)

    def _remember(self, run: Any) -> None:
        """Keep the ids of the runs that the history went to beside the record; say when it lies in several pieces."""
        directory = self._info.get("run_dir")
        if not directory or not Path(directory).is_dir():
            return
        file = Path(directory) / "wandb.json"
        try:
            earlier = json.loads(file.read_text())["runs"]
        except (OSError, ValueError, KeyError):
            earlier = []
        offline = bool(getattr(run, "offline", False))
        here = {"id": str(run.id), "offline": offline, "directory": str(getattr(run, "dir", ""))}
        if here in earlier:
            return
        if any(piece["id"] == here["id"] for piece in earlier) and offline:
            log.warning(
                "wandb: an offline piece of run %s exists already, and W&B counts each piece from step 0; "
                "`spectral-monitor sync %s` writes the whole history into one run",
                run.id,
                directory,
            )
        elif earlier and all(piece["id"] != here["id"] for piece in earlier):
            log.warning(
                "wandb: the history before this session went to run %s, this session's goes to run %s; "
                "`spectral-monitor sync %s` writes the whole history into one run",
                earlier[-1]["id"],
                run.id,
                directory,
            )
        temporary = file.with_name(".wandb.json.tmp")
        with contextlib.suppress(OSError):
            temporary.write_text(json.dumps({"runs": [*earlier, here]}, indent=1))
            temporary.replace(file)

    def _trainer_axis(self, run: Any) -> bool:
        """Whether the Trainer's callback has declared its axis for the whole run (it then also filled the config)."""
        if self._axis != "auto":
            return self._axis == "trainer"
        if self._info.get("attached_to") not in (None, "transformers.Trainer"):
            return False
        config = getattr(run, "config", {})
        with contextlib.suppress(Exception):
            reporters = config.get("report_to")
            listed = [reporters] if isinstance(reporters, str) else list(reporters or ())
            return "wandb" in listed or "all" in listed or config.get("model/num_parameters") is not None
        return False

    # -- rows ---------------------------------------------------------------------------------------------------

    def _send(self, run: Any, row: Row, media: dict[str, Any]) -> None:
        self.rows.say_left_out("wandb")
        if not row:
            return
        self._newest.update(row)
        if run is None:
            self._wait(row)
            return
        if self._trainer_axis(run):
            for waiting in self._take_waiting():
                run.log({names.GLOBAL_STEP: waiting[names.STEP], **waiting})
            run.log({names.GLOBAL_STEP: row[names.STEP], **row, **media})
            return
        self._define(run, (*row, *media))
        if self._own_rows:
            for waiting in self._take_waiting():
                run.log(waiting)
            run.log({**row, **media})
            return
        self._ride(run, row, media)

    def _ride(self, run: Any, row: Row, media: dict[str, Any]) -> None:
        """Hand the row over without committing it: the user's next log call takes it along."""
        if self._waiting:
            self._finish_later(run)
        at = int(run.step)
        pending = self._riding_at == at and bool(self._riding)
        if pending and self._riding[names.STEP] != row[names.STEP]:
            # The row of an earlier look is still pending: this one covers it if it has all its keys, else it waits.
            self._finish_later(run)
            if set(self._riding) - set(row):
                self._wait(row)
                return
            self._wait(self._riding)
            pending = False
        run.log({**row, **media}, commit=False)
        self._riding = {**self._riding, **row} if pending else row
        self._riding_at = at

    def _finish_later(self, run: Any) -> None:
        """Have the waiting rows sent when the owner finishes the run: after that, no row of his can be lost."""
        if self._hooked is run:
            return
        try:
            from wandb.sdk.wandb_run import TeardownHook, TeardownStage

            run._teardown_hooks.append(TeardownHook(lambda: self._send_waiting(run), TeardownStage.EARLY))
            self._hooked = run
        except (ImportError, AttributeError):  # another version of wandb: close() says what was not sent
            return

    def _send_waiting(self, run: Any) -> None:
        try:
            waiting = self._take_waiting()
            if waiting and self._riding_at == int(run.step):
                run.log({}, commit=True)  # what is pending keeps a row of its own
            said: Row = {}
            for row in waiting:
                run.log(row, commit=True)
                said.update(row)
            covered = {key: self._newest[key] for key, value in said.items() if value != self._newest[key]}
            if covered:
                run.summary.update(covered)
        except Exception as error:
            log.warning("wandb: rows that waited for the end of the run were not sent (%s)", error)

    def _define(self, run: Any, keys: tuple[str, ...]) -> None:
        """Exact names only: overlapping globs resolve at random (findings.md)."""
        new = [key for key in keys if key not in self._defined]
        if names.STEP not in self._defined:
            run.define_metric(names.STEP, hidden=True)
        for key in new:
            if key != names.STEP:
                run.define_metric(key, step_metric=names.STEP)
        self._defined.update(new, [names.STEP])

    def _wait(self, row: Row) -> None:
        """Keep the row; what the probes say at one step is one row."""
        if self._waiting and self._waiting[-1][names.STEP] == row[names.STEP]:
            row = {**self._waiting.pop(), **row}
        self._waiting.append(row)
        del self._waiting[:-_MAX_WAITING]

    def _take_waiting(self) -> list[Row]:
        taken, self._waiting = self._waiting, []
        return sorted(taken, key=lambda row: row[names.STEP])

    # -- media and alerts ---------------------------------------------------------------------------------------

    def _media_of(self, observation: Observation) -> dict[str, Any]:
        """Table, picture and histogram, thinned so that the number of files stays under ``max_files``."""
        self._looks += 1
        if not self._media or self._files + 2 > self._max_files:
            return {}
        halvings = int(self._max_files / (self._max_files - self._files)).bit_length() - 1
        if (self._looks - 1) % 8**halvings:  # half of the files left: every 8th look; a quarter: every 64th
            return {}
        wandb = sys.modules.get("wandb") or importlib.import_module("wandb")
        probe = observation.probe
        columns, data = table_of_heads(observation)
        media: dict[str, Any] = {names.metric(names.TABLE, probe): wandb.Table(columns=columns, data=data)}
        self._files += 1
        with contextlib.suppress(ImportError):  # without pillow there is no picture; the table has the numbers
            import PIL  # noqa: F401

            caption = (
                f"step {observation.step}: effective rank | induction attention | class; layers down, heads across"
            )
            media[names.metric(names.PICTURE, probe)] = wandb.Image(layers_by_heads(observation), caption=caption)
            self._files += 1
        bins = histogram(observation)
        if bins is not None:
            media[names.metric(names.HISTOGRAM, probe)] = wandb.Histogram(np_histogram=bins)
        return media

    def _alert_all(self, run: Any, alerts: list[Alert]) -> None:
        if run is None or not self._alerts:
            return
        for alert in alerts:
            run.alert(title=alert.title, text=alert.text, level=alert.level)


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))
