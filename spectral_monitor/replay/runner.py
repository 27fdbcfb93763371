"""The replay itself: download ahead, load, check, measure, record, in any number of processes, killed or not.

Each process walks the plan in order and claims what nobody has. A thread brings the next revision while the current
one is measured. Measuring is done in any order; recording is done in order of step under a lock, because crossings,
alarms and causal checks depend on the observation before: so the record is the same, however many processes share
the work and however often they are killed.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from spectral_monitor.errors import LoadError, RecordError, ScheduleError, SpectralMonitorError
from spectral_monitor.record import write_json
from spectral_monitor.replay.claims import Claims, Row, Table
from spectral_monitor.replay.downloads import Downloads
from spectral_monitor.replay.hub import Hub, OfflineError, RepositoryError, Stopped
from spectral_monitor.replay.integrity import TensorRecord, compare_tensors, tensor_hashes
from spectral_monitor.replay.loading import LoadedModel, LoadOptions, load_folder
from spectral_monitor.replay.plan import (
    DUPLICATE,
    FAILED,
    MEASURED,
    MIXED,
    NO_WEIGHTS,
    SKIPPED,
    Plan,
    Planned,
    SeriesPlan,
)

logger = logging.getLogger(__name__)

#: Exit statuses: everything done, a part of it, nothing.
COMPLETE, PARTLY, NOTHING = 0, 3, 4


class NeedsModel(Exception):
    """Recording this observation needs the model (a causal check is due) and it was not given."""


class Recorder(Protocol):
    """Measures and records one series: the monitor, see ``recorder.MonitorRecorder``."""

    def measure(self, loaded: LoadedModel, planned: Planned, mark: str | None) -> Any:
        """Look at the model; changes no state, so any process may do it at any time. Returns the reading."""

    def stage(self, reading: Any, folder: Path) -> None:
        """Write the reading below ``folder``, whole or not at all."""

    def staged(self, folder: Path) -> Any | None:
        """The reading in ``folder``, or None."""

    def record(self, reading: Any, loaded: LoadedModel | None) -> None:
        """Append the reading, with events and causal checks; in order of step. NeedsModel where one is due."""

    def recorded(self, step: int) -> bool:
        """Whether the observation of ``step`` is in the record already, with all that belongs to it."""

    def note(self, text: str, step: int) -> None:
        """Put a sentence into the record."""

    def finish(self, table: Mapping[str, Any]) -> None:
        """Keep the table of revisions in the run directory."""

    def close(self) -> None:
        """Let others write the record."""


@dataclass
class Settings:
    """How a replay runs.

    Attributes:
        out: run directory; with several series, ``out/<series>`` each.
        work: folder for downloads, claims and the table; kept beside the record for restarts.
        load: how checkpoints are loaded.
        ranks: processes that share the replay; with one, the record stays open and publishers hear of every look.
        budget: bytes of disk for downloads; ``keep``: leave finished revisions there.
        shard: (i, n): only every n-th revision from the i-th on (0-based); the process then never waits for others.
        ahead: revisions held beyond the one being measured.
        poll: seconds between looks at what other processes did.
    """

    out: Path
    work: Path
    load: LoadOptions = field(default_factory=LoadOptions)
    ranks: int = 1
    budget: int | None = None
    keep: bool = False
    shard: tuple[int, int] | None = None
    ahead: int = 1
    poll: float = 0.2


class Progress(Protocol):
    """What the runner tells the terminal; see ``progress``."""

    def downloading(self, name: str, size: int) -> None: ...

    def bytes(self, count: int) -> None: ...

    def measuring(self, name: str) -> None: ...

    def done(self, row: Row) -> None: ...


class Silent:
    """No progress shown."""

    def downloading(self, name: str, size: int) -> None:
        return None

    def bytes(self, count: int) -> None:
        return None

    def measuring(self, name: str) -> None:
        return None

    def done(self, row: Row) -> None:
        return None


@dataclass(frozen=True)
class Result:
    """What came of a replay: the table in order of the plan, and the exit status.

    Attributes:
        rows: of all revisions that are measured or settled otherwise.
        unfinished: names of those that are not; with ``--shard``, only of this process's own.
        unrecorded: names of those that are measured, and recorded once the earlier ones of other shards are.
    """

    rows: tuple[Row, ...]
    unfinished: tuple[str, ...] = ()
    unrecorded: tuple[str, ...] = ()

    @property
    def status(self) -> int:
        """COMPLETE, PARTLY or NOTHING. Duplicates and revisions left to other shards do not count against it."""
        good = sum(row.status in (MEASURED, MIXED) for row in self.rows)
        bad = any(row.status not in (MEASURED, MIXED, DUPLICATE) for row in self.rows)
        if not good:
            return NOTHING
        return PARTLY if bad or self.unfinished else COMPLETE


def run_directory(out: Path, series: str) -> Path:
    """Where a series is recorded: stages of one repository are never joined into one axis."""
    return out / series if series else out


class Replay:
    """One process's share of a replay of ``plan``.

    Args:
        make_recorder: (run directory, first loaded model or None) -> Recorder; called once a series, lazily.
    """

    def __init__(
        self,
        plan: Plan,
        settings: Settings,
        make_recorder: Callable[[SeriesPlan, Path], Recorder],
        hub: Hub | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.plan = plan
        self.settings = settings
        self._make_recorder = make_recorder
        self._progress: Progress = progress or Silent()
        self.claims = Claims(settings.work / "claims")
        self.table = Table(settings.work / "rows")
        self.downloads = Downloads(
            settings.work / "downloads", hub or Hub(), self.claims, settings.budget, settings.keep
        )
        self._recorders: dict[str, Recorder] = {}
        self._series = {planned.key: series for series in plan.series for planned in series.planned}
        self._failed_here: set[str] = set()
        self._stop = threading.Event()
        self._fatal: SpectralMonitorError | None = None

    # -- the walk -----------------------------------------------------------------------------------------------

    def run(self) -> Result:
        """Do this process's share. Raises RepositoryError when the repository as a whole is refused, RecordError
        when the run directory cannot be written; anything about one revision becomes its row."""
        try:
            mine = self._mine()
            if sentence := self.downloads.check_budget([item for item in mine if not self._is_settled(item)]):
                logger.warning(sentence)
            self._settle_unwanted()
            while True:
                self._walk(mine)
                if self._fatal is not None:
                    raise self._fatal
                self._record_staged()
                if not self._wait_for_others():
                    break
            self._close_series()
        finally:
            self._stop.set()
            for recorder in self._recorders.values():
                recorder.close()
            self.claims.close()
        return self.result()

    def result(self) -> Result:
        """The table as it is now."""
        rows, unfinished, unrecorded = [], [], []
        mine = {planned.key for planned in self._mine()}
        for planned in self.plan.planned:
            row = self.table.get(planned.key)
            if row is None and (row := self._read_pending(planned)) is not None:
                unrecorded.append(planned.checkpoint.name)
            if row is not None:
                rows.append(row)
            elif planned.key in mine:
                unfinished.append(planned.checkpoint.name)
        return Result(tuple(rows), tuple(unfinished), tuple(unrecorded))

    def _mine(self) -> list[Planned]:
        wanted = [planned for planned in self.plan.planned if planned.wanted]
        if self.settings.shard is not None:
            index, count = self.settings.shard
            wanted = wanted[index::count]
        return wanted

    def _settle_unwanted(self) -> None:
        """Rows of what is not going to be measured; revisions that failed in an earlier run get another try."""
        for planned in self.plan.planned:
            row = self.table.get(planned.key)
            if not planned.wanted:
                if row is None:
                    self._put(planned, planned.status, planned.reason, same_as=planned.same_as)
            elif (
                row is not None and row.status in (FAILED, SKIPPED, NO_WEIGHTS) and not self.claims.is_live(planned.key)
            ):
                self.table.drop(planned.key)

    def _wait_for_others(self) -> bool:
        """Whether another rank is still at work; waits a moment if so.

        So every rank ends with the same table, and what a dying rank leaves is taken over by those that live.
        """
        if self.settings.ranks < 2 or all(self._is_settled(item) for item in self.plan.planned if item.wanted):
            return False
        time.sleep(self.settings.poll)
        return True

    def _is_settled(self, planned: Planned) -> bool:
        return self.table.get(planned.key) is not None

    def _walk(self, mine: Sequence[Planned]) -> None:
        """Download thread and measuring loop, over and over until a round finds nothing to claim."""
        while True:
            ready: queue.Queue[tuple[Planned, Path | Exception] | None] = queue.Queue()
            slots = threading.Semaphore(1 + self.settings.ahead)
            thread = threading.Thread(
                target=self._bring_all, args=(mine, ready, slots), name="replay-download", daemon=True
            )
            thread.start()
            measured = 0
            try:
                while (item := ready.get()) is not None:
                    measured += 1
                    self._one(*item)
                    slots.release()
                    if self._fatal is not None:
                        break
            finally:
                self._stop.set()
                slots.release()
                thread.join(timeout=10)  # a hanging connection must not hold up the end; a partial file is continued
                self._stop.clear()
            if self._fatal is not None or not measured:
                return

    def _bring_all(
        self,
        mine: Sequence[Planned],
        ready: queue.Queue[tuple[Planned, Path | Exception] | None],
        slots: threading.Semaphore,
    ) -> None:
        """Claim and bring one revision after the other; runs in the download thread."""
        try:
            for planned in mine:
                slots.acquire()
                if self._stop.is_set():
                    return
                if self._is_settled(planned) or self._reading(planned) is not None or not self._claim(planned):
                    slots.release()
                    continue
                missing = self.downloads.missing(planned)
                self._progress.downloading(planned.checkpoint.name, sum(file.size for file in missing))
                try:
                    folder: Path | Exception = self.downloads.bring(
                        planned,
                        self._came,
                        self._stop.is_set,
                        lambda item=planned: self._may_reserve(item),  # type: ignore[misc]
                    )
                except Stopped:
                    return
                except Exception as error:
                    folder = error
                ready.put((planned, folder))
        finally:
            ready.put(None)

    def _came(self, count: int) -> None:
        """Bytes that came in; ends the transfer when the replay ends."""
        if self._stop.is_set():
            raise Stopped
        self._progress.bytes(count)

    def _may_reserve(self, planned: Planned) -> bool:
        """Room is given out in order of step: what is recorded earlier must not wait for room behind what waits
        for it to be recorded."""
        reserved = self.downloads.reserved()
        return all(
            item.key in reserved
            or self._is_settled(item)
            or (self._reading_folder(item) / "row.json").is_file()
            or not self.claims.is_live(item.key)
            for item in self._earlier(planned)
        )

    def _claim(self, planned: Planned) -> bool:
        """Claim, and look again: another process may have finished it in between."""
        if planned.key in self._failed_here or not self.claims.claim(planned.key):
            return False
        if self._is_settled(planned) or self._reading(planned) is not None:
            self.claims.release(planned.key)
            return False
        return True

    # -- one revision -------------------------------------------------------------------------------------------

    def _one(self, planned: Planned, brought: Path | Exception) -> None:
        """Load, check, measure, stage and record one revision; whatever is wrong with it becomes its row."""
        began = time.monotonic()
        self._progress.measuring(planned.checkpoint.name)
        loaded: LoadedModel | None = None
        try:
            if isinstance(brought, Exception):
                raise brought
            loaded = self._load(planned, brought)
            self._measure(planned, loaded, began)
        except RepositoryError as error:
            self._fatal = error
        except RecordError as error:
            self._fatal = error
        except SpectralMonitorError as error:
            status = SKIPPED if isinstance(error, OfflineError) else FAILED
            self._fail(planned, str(error), time.monotonic() - began, status)
        except (RuntimeError, MemoryError, OSError, ValueError, KeyError, TypeError, IndexError) as error:
            # A revision must not end a replay of days: its row says what happened, the log has the traceback.
            logger.warning("%s failed", planned.checkpoint.name, exc_info=True)
            lines = str(error).splitlines() or [""]
            self._fail(planned, f"{type(error).__name__}: {lines[0]}", time.monotonic() - began, FAILED)
        finally:
            del loaded
            _free_memory()
            self.downloads.release(planned)
            self.claims.release(planned.key)

    def _load(self, planned: Planned, folder: Path) -> LoadedModel:
        weights, checkpoint = planned.weights, planned.checkpoint
        gguf_file = weights.files[0] if weights is not None and weights.format == "gguf" else None
        where, commit = checkpoint.name, checkpoint.commit
        return load_folder(folder, self.settings.load, gguf_file=gguf_file, where=where, commit=commit)

    def _measure(self, planned: Planned, loaded: LoadedModel, began: float) -> None:
        checkpoint = planned.checkpoint
        hashes = tensor_hashes(loaded.model)
        finding = compare_tensors(checkpoint.name, checkpoint.step, hashes, self._tensors(planned))
        if finding.kind == "duplicate":
            reason = f"the same tensors as {finding.same_as}, which is measured"
            self._put(
                planned, DUPLICATE, reason, same_as=finding.same_as, mark=finding.mark, loaded=loaded, began=began
            )
            return
        mark = planned.mark or finding.mark
        status = MIXED if finding.kind == "mixed" else planned.status
        reason = planned.reason or (finding.mark or "")
        same_as = planned.same_as or finding.same_as
        recorder = self._recorder(planned)
        if not recorder.recorded(checkpoint.step):
            recorder.stage(recorder.measure(loaded, planned, mark), self._reading_folder(planned))
        write_json(
            self._tensor_file(planned), {"name": checkpoint.name, "step": checkpoint.step, "hashes": dict(hashes)}
        )
        self._pending_row(planned, status, reason, same_as, mark, loaded, began)
        # The files are no longer needed: another process may be waiting for their room.
        self.downloads.release(planned)
        while self.settings.shard is None and not self._earlier_settled(planned) and self._earlier_alive(planned):
            time.sleep(self.settings.poll)
        if self._earlier_settled(planned):
            self._record(planned, loaded)

    def _record(self, planned: Planned, loaded: LoadedModel | None) -> None:
        """Append a staged reading to the record and settle its row; in order of step, one process at a time."""
        recorder = self._recorder(planned)
        with self.claims.together(f"record-{self._series[planned.key].name}"):
            row = self._read_pending(planned)
            if row is None or self._is_settled(planned):
                return
            if not recorder.recorded(planned.checkpoint.step):
                recorder.record(recorder.staged(self._reading_folder(planned)), loaded)
            self._settle(planned, row)

    def _earlier(self, planned: Planned) -> list[Planned]:
        series = self._series[planned.key]
        return [item for item in series.planned if item.wanted and item.checkpoint.step < planned.checkpoint.step]

    def _earlier_settled(self, planned: Planned) -> bool:
        return all(self._is_settled(item) for item in self._earlier(planned))

    def _earlier_alive(self, planned: Planned) -> bool:
        """Whether a living process is at work on every earlier revision that is not settled."""
        return all(self.claims.is_live(item.key) for item in self._earlier(planned) if not self._is_settled(item))

    def _record_staged(self) -> None:
        """Record what was measured out of order, as far as the order allows; loads a model again where one is due."""
        for series in self.plan.series:
            for planned in series.planned:
                if not planned.wanted or self._is_settled(planned):
                    continue
                if self._reading(planned) is None or not self._earlier_settled(planned):
                    break
                if not self.claims.claim(planned.key):
                    break
                try:
                    self._record_late(planned)
                finally:
                    self.downloads.release(planned)
                    self.claims.release(planned.key)

    def _record_late(self, planned: Planned) -> None:
        try:
            self._record(planned, None)
            return
        except NeedsModel:
            pass
        loaded: LoadedModel | None = None
        try:
            loaded = self._load(planned, self.downloads.bring(planned, self._progress.bytes))
            self._record(planned, loaded)
        except LoadError as error:
            self._fail(planned, f"measured, but not loaded again for its causal check: {error}", None, FAILED)
        finally:
            del loaded
            _free_memory()

    # -- what is kept -------------------------------------------------------------------------------------------

    def _recorder(self, planned: Planned) -> Recorder:
        series = self._series[planned.key]
        if series.name not in self._recorders:
            self._recorders[series.name] = self._make_recorder(series, run_directory(self.settings.out, series.name))
        return self._recorders[series.name]

    def _reading_folder(self, planned: Planned) -> Path:
        return self.settings.work / "readings" / planned.key

    def _reading(self, planned: Planned) -> Any | None:
        folder = self._reading_folder(planned)
        return self._recorder(planned).staged(folder) if (folder / "row.json").is_file() else None

    def _tensor_file(self, planned: Planned) -> Path:
        path = self.settings.work / "tensors" / f"{planned.key}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _tensors(self, planned: Planned) -> list[TensorRecord]:
        """Tensor hashes of the revisions of this series that were measured before, in order of step.

        Those already known not to be what their names say are no evidence against others.
        """
        records = []
        for other in self._series[planned.key].planned:
            path = self._tensor_file(other)
            if other.key != planned.key and other.mark is None and path.is_file():
                records.append(TensorRecord(**_read_json(path)))
        return records

    def _row(
        self,
        planned: Planned,
        status: str,
        reason: str,
        same_as: str | None,
        mark: str | None,
        loaded: LoadedModel | None,
        seconds: float | None,
    ) -> Row:
        checkpoint = planned.checkpoint
        return Row(
            revision=checkpoint.name,
            step=checkpoint.step if checkpoint.step >= 0 else None,
            tokens=checkpoint.tokens,
            status=status,
            reason=reason,
            same_as=same_as,
            commit=checkpoint.commit,
            seconds=seconds,
            bytes=planned.bytes or None,
            series=checkpoint.series,
            repo=checkpoint.repo,
            mark=mark,
            tokens_from=checkpoint.tokens_from,
            notes=loaded.notes if loaded is not None else (),
            settings=measured_with(loaded) if loaded is not None else {},
        )

    def _put(
        self,
        planned: Planned,
        status: str,
        reason: str,
        same_as: str | None = None,
        mark: str | None = None,
        loaded: LoadedModel | None = None,
        began: float | None = None,
    ) -> None:
        seconds = None if began is None else time.monotonic() - began
        self._settle(planned, self._row(planned, status, reason, same_as, mark or planned.mark, loaded, seconds))

    def _settle(self, planned: Planned, row: Row) -> None:
        self.table.put(planned.key, row)
        self._progress.done(row)

    def _fail(self, planned: Planned, reason: str, seconds: float | None, status: str) -> None:
        self._failed_here.add(planned.key)
        self._settle(planned, self._row(planned, status, reason, planned.same_as, planned.mark, None, seconds))

    def _pending_row(
        self,
        planned: Planned,
        status: str,
        reason: str,
        same_as: str | None,
        mark: str | None,
        loaded: LoadedModel,
        began: float,
    ) -> None:
        """The row that the revision gets once its reading is recorded; its presence makes the reading whole."""
        row = self._row(planned, status, reason, same_as, mark, loaded, time.monotonic() - began)
        folder = self._reading_folder(planned)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "row.json", _plain(row))

    def _read_pending(self, planned: Planned) -> Row | None:
        path = self._reading_folder(planned) / "row.json"
        if not path.is_file():
            return None
        raw = _read_json(path)
        return Row(**{**raw, "notes": tuple(raw["notes"])})

    def _close_series(self) -> None:
        """Write each finished series' notes and table into its run directory, once."""
        for series in self.plan.series:
            wanted = [item for item in series.planned if item.wanted]
            if not wanted or not all(self._is_settled(item) for item in wanted):
                continue
            # Of earlier selections too: the table in the run directory is of the whole record.
            rows = [row for row in self.table.all() if row.series == series.name]
            if not any(row.status in (MEASURED, MIXED) for row in rows):
                continue
            with self.claims.together(f"record-{series.name}"):
                recorder = self._recorder(wanted[0])
                if series.notes:
                    # One event: of two notes at one step the record counts the first.
                    recorder.note("; ".join(series.notes), wanted[-1].checkpoint.step)
                recorder.finish({"notes": series.notes, "revisions": [_plain(row) for row in rows]})


def measured_with(loaded: LoadedModel) -> dict[str, Any]:
    """Library versions, dtype and attention backend of a measurement: series of different ones are not joined."""
    import torch
    import transformers

    return {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "dtype": loaded.dtype,
        "attention": str(getattr(loaded.model.config, "_attn_implementation", None)),
    }


def shard_of(text: str) -> tuple[int, int]:
    """``"1/4"`` -> (1, 4). Shards may be counted 0 to n-1 or 1 to n: n counts as 0, so either covers everything."""
    first, _, second = text.partition("/")
    try:
        index, count = int(first), int(second)
    except ValueError:
        raise ScheduleError(f"--shard {text!r}: give i/n, such as 0/4, 1/4, 2/4 and 3/4 for four jobs") from None
    if count < 1 or not 0 <= index <= count:
        raise ScheduleError(f"--shard {text}: i goes from 0 to n-1 (or from 1 to n), and n is 1 or more")
    return index % count, count


def report(result: Result, plan: Plan) -> dict[str, Any]:
    """What ``--json`` writes: every revision's row, what was skipped by name, and the notes."""
    return {
        "source": plan.source.text,
        "status": {COMPLETE: "complete", PARTLY: "partly", NOTHING: "nothing"}[result.status],
        "revisions": [_plain(row) for row in result.rows],
        "unfinished": list(result.unfinished),
        "unrecorded": list(result.unrecorded),
        "skipped": [{"name": item.name, "reason": item.reason} for item in plan.skipped],
        "notes": [sentence for series in plan.series for sentence in series.notes],
    }


def _plain(row: Row) -> dict[str, Any]:
    return dataclasses.asdict(row)


def _read_json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))


def _free_memory() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
