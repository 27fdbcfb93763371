"""The run on disk: written atomically, read back whole, readable by ordinary tools.

Layout of a run directory (design "The record")::

    run.json                      format version, configuration, probes with their SHA-256, model and library versions
    observations/step-000000512.induction.parquet   one row a head; observation-wide values repeat in every row
    superseded/...                observations that a resumed run went back over
    events.jsonl                  crossings, alarms, notes; one JSON object a line
    verdicts/*.json               one causal verdict a file
    state.json                    the monitor's own state at its last observation

Every file is written under a temporary name, flushed to disk and renamed, so a half-written file is never read as
data. Only ``events.jsonl`` is appended to; a torn last line is dropped when the record is opened for writing.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock, Timeout

from spectral_monitor.errors import RecordError
from spectral_monitor.observation import (
    BASELINES,
    ConditionMetrics,
    Event,
    HeadTable,
    Observation,
    ProbeMetrics,
    Verdict,
)

#: Version of the layout. A reader refuses a newer one.
FORMAT = 1

_FILE = re.compile(r"step-(\d+)\.([\w-]+)\.parquet\Z")


class RunRecord:
    """A run directory. ``create`` or ``resume`` to write (one process at a time), ``open`` to read."""

    def __init__(self, run_dir: Path, run: dict[str, Any], lock: FileLock | None = None) -> None:
        self.run_dir = run_dir
        self.run = run
        self._lock = lock

    # -- opening ------------------------------------------------------------------------------------------------

    @classmethod
    def open(cls, run_dir: str | os.PathLike[str]) -> RunRecord:
        """Read-only view of an existing record; RecordError when there is none or it is of another format."""
        path = Path(run_dir)
        file = path / "run.json"
        if not path.is_dir():
            raise RecordError(f"no run directory at {path}: check the path")
        if not file.is_file():
            raise RecordError(f"{path} is no run directory: it has no run.json")
        try:
            run = json.loads(file.read_text())
            version = int(run["format"])
        except (ValueError, KeyError, TypeError) as error:
            raise RecordError(f"{file} cannot be read as a run record ({error})") from error
        if version != FORMAT:
            raise RecordError(
                f"{path} is a record of format {version}, this version reads format {FORMAT}: "
                "use the spectral_monitor version that wrote it (run.json, `versions`)"
            )
        return cls(path, run)

    @classmethod
    def create(cls, run_dir: str | os.PathLike[str], run: Mapping[str, Any]) -> RunRecord:
        """Open ``run_dir`` for writing: a new record, or the one that is there if it has the same probes.

        Raises RecordError when the directory cannot be written, belongs to other probes, or is being written by
        another process. Nothing is left behind by a refused call.
        """
        path = Path(run_dir)
        made = not path.exists()
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = _locked(path)
        except OSError as error:
            raise RecordError(
                f"run directory {path} cannot be written ({error.strerror or error}): choose another run_dir"
            ) from error
        try:
            _drop_temporaries(path)
            if (path / "run.json").exists():
                record = cls.open(path)
                record._lock = lock
                record._check_same_probes(run)
                record._drop_torn_event()
                return record
            if any(entry.name != ".lock" for entry in path.iterdir()):
                raise RecordError(f"{path} holds other files and no run.json: choose an empty or new directory")
            record = cls(path, {"format": FORMAT, **run}, lock)
            write_json(path / "run.json", record.run)
            for name in ("observations", "verdicts"):
                (path / name).mkdir(exist_ok=True)
            return record
        except OSError as error:
            lock.release()
            raise RecordError(
                f"run directory {path} cannot be written ({error.strerror or error}): choose another run_dir"
            ) from error
        except RecordError:
            lock.release()
            if made:
                (path / ".lock").unlink(missing_ok=True)
                path.rmdir()
            raise

    def close(self) -> None:
        """Let another process write; the record stays readable."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> RunRecord:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_same_probes(self, run: Mapping[str, Any]) -> None:
        ours, theirs = self.run.get("probes", {}), run.get("probes", {})
        for name, probe in theirs.items():
            if name in ours and ours[name]["fingerprint"] != probe["fingerprint"]:
                raise RecordError(
                    f"{self.run_dir} belongs to another probe: its {name!r} batch has SHA-256 "
                    f"{ours[name]['fingerprint'][:12]}, this one {probe['fingerprint'][:12]}. "
                    "Use the same probe settings, or another run_dir"
                )
        added = {name: probe for name, probe in theirs.items() if name not in ours}
        if added:
            self.update_run({"probes": {**ours, **added}})

    # -- writing ------------------------------------------------------------------------------------------------

    def update_run(self, values: Mapping[str, Any]) -> None:
        """Set top-level fields of run.json."""
        self._writable()
        self.run = {**self.run, **values}
        write_json(self.run_dir / "run.json", self.run)

    def append(self, observation: Observation) -> Observation:
        """Write one observation; returns it as written (with its ``attempt``).

        An observation of the same step and probe is moved to ``superseded/`` and the new one's attempt is one higher.
        """
        self._writable()
        path = self._path(observation.step, observation.probe)
        attempt = 1 + len(self._superseded(observation.step, observation.probe))
        if path.exists():
            self._supersede(path)
            attempt += 1
        observation = dataclasses.replace(observation, attempt=max(attempt, observation.attempt))
        _write_atomically(path, lambda file: pq.write_table(to_table(observation), file, compression="zstd"))
        return observation

    def add_event(self, event: Event) -> None:
        """Append one event, flushed to disk before this returns."""
        self._writable()
        line = dumps(dataclasses.asdict(event), indent=None) + "\n"
        with open(self.run_dir / "events.jsonl", "a", encoding="utf-8") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    def add_verdict(self, verdict: Verdict) -> Path:
        """Write one verdict; a verdict of the same step, probe, capability and mode is replaced."""
        self._writable()
        directory = self.run_dir / "verdicts"
        directory.mkdir(exist_ok=True)
        name = f"step-{verdict.step:09d}.{verdict.probe}.{verdict.capability}.{verdict.mode}.json"
        write_json(directory / name, dataclasses.asdict(verdict))
        return directory / name

    def save_state(self, state: Mapping[str, Any]) -> None:
        """Keep the monitor's own state (JSON values only)."""
        self._writable()
        write_json(self.run_dir / "state.json", state)

    def rewind(self, step: int) -> int:
        """Move observations later than ``step`` to ``superseded/``: the run went back to a checkpoint.

        Returns how many were moved. Events stay: what was announced was announced.
        """
        self._writable()
        later = [path for at, _, path in self._files() if at > step]
        for path in later:
            self._supersede(path)
        return len(later)

    # -- reading ------------------------------------------------------------------------------------------------

    @property
    def probes(self) -> dict[str, dict[str, Any]]:
        """Name -> ``{"fingerprint", "rows", "length", "protocol", ...}``."""
        return dict(self.run.get("probes", {}))

    def steps(self, probe: str | None = None) -> list[int]:
        """Observed steps in order."""
        return sorted({step for step, name, _ in self._files() if probe in (None, name)})

    def observation_files(self, probe: str | None = None) -> list[Path]:
        """Parquet files in order of step."""
        return [path for _, name, path in self._files() if probe in (None, name)]

    def observations(self, probe: str | None = None) -> list[Observation]:
        """All observations in order of step (then probe)."""
        return [read_observation(path) for path in self.observation_files(probe)]

    def table(self, probe: str | None = None) -> pa.Table:
        """All observations as one long table, one row a head and observation."""
        tables = [pq.read_table(path) for path in self.observation_files(probe)]
        if not tables:
            raise RecordError(f"{self.run_dir} holds no observation yet")
        return pa.concat_tables(tables, promote_options="permissive")

    def events(self) -> list[Event]:
        """All events in order of writing; a torn last line is left out, of two events of one key the first counts."""
        file = self.run_dir / "events.jsonl"
        if not file.exists():
            return []
        seen: dict[str, Event] = {}
        for line in file.read_bytes().split(b"\n")[:-1]:
            try:
                event = _event(json.loads(line))
            except (ValueError, TypeError, KeyError):
                continue
            seen.setdefault(event.key, event)
        return list(seen.values())

    def verdicts(self) -> list[Verdict]:
        """All verdicts in order of step."""
        files = sorted((self.run_dir / "verdicts").glob("step-*.json"))
        return [_verdict(json.loads(file.read_text())) for file in files]

    def load_state(self) -> dict[str, Any] | None:
        """The state kept by ``save_state``, or None."""
        file = self.run_dir / "state.json"
        return json.loads(file.read_text()) if file.exists() else None

    # -- inside -------------------------------------------------------------------------------------------------

    def _writable(self) -> None:
        if self._lock is None:
            raise RecordError(f"{self.run_dir} is open for reading only")

    def _path(self, step: int, probe: str) -> Path:
        return self.run_dir / "observations" / f"step-{step:09d}.{probe}.parquet"

    def _files(self) -> Iterator[tuple[int, str, Path]]:
        directory = self.run_dir / "observations"
        if not directory.is_dir():
            return
        for path in sorted(directory.iterdir()):
            match = _FILE.match(path.name)
            if match is not None:
                yield int(match[1]), match[2], path

    def _superseded(self, step: int, probe: str) -> list[Path]:
        return sorted((self.run_dir / "superseded").glob(f"step-{step:09d}.{probe}.*.parquet"))

    def _supersede(self, path: Path) -> None:
        match = _FILE.match(path.name)
        assert match is not None
        directory = self.run_dir / "superseded"
        directory.mkdir(exist_ok=True)
        number = 1 + len(self._superseded(int(match[1]), match[2]))
        path.replace(directory / f"step-{int(match[1]):09d}.{match[2]}.{number}.parquet")

    def _drop_torn_event(self) -> None:
        file = self.run_dir / "events.jsonl"
        if not file.exists():
            return
        content = file.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole != len(content):
            with open(file, "r+b") as handle:
                handle.truncate(whole)


def preferred_probe(names: Collection[str]) -> str | None:
    """The probe that is analysed where none is named: ``induction``, or the only one; None where one must be named."""
    if "induction" in names:
        return "induction"
    return next(iter(names)) if len(names) == 1 else None


def set_aside(run_dir: str | os.PathLike[str]) -> Path | None:
    """Rename the record in ``run_dir``, if there is one, so that a new run can begin there; returns its new place.

    Raises RecordError when another process is writing it.
    """
    path = Path(run_dir)
    if not (path / "run.json").exists():
        return None
    lock = _locked(path)
    number = 1
    while (aside := path.with_name(f"{path.name}-{number}")).exists():
        number += 1
    try:
        path.rename(aside)
    except OSError as error:
        raise RecordError(
            f"{path} holds the record of an earlier run and cannot be renamed ({error.strerror or error}): "
            "choose another run_dir"
        ) from error
    finally:
        lock.release()
    return aside


def _locked(path: Path) -> FileLock:
    lock = FileLock(path / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise RecordError(
            f"{path} is being written by another process: give this run another run_dir, or stop the other one"
        ) from None
    return lock


def _drop_temporaries(path: Path) -> None:
    """Remove what a killed process was writing; nobody else writes here, the lock is ours."""
    for directory in (path, path / "observations", path / "verdicts"):
        for file in directory.glob(".*.tmp"):
            file.unlink(missing_ok=True)


# -- observations as tables -----------------------------------------------------------------------------------------


def to_table(observation: Observation) -> pa.Table:
    """One observation in long form: one row a head, the column names of design "The record"."""
    heads = observation.heads
    count = len(heads)

    def same(value: Any, kind: pa.DataType) -> pa.Array:
        return pa.array([value] * count, type=kind)

    baseline = heads.baselines.get(observation.baseline)
    columns: dict[str, Any] = {
        "step": same(observation.step, pa.int64()),
        "tokens": same(observation.tokens, pa.float64()),
        "probe": same(observation.probe, pa.string()),
        "layer": pa.array(heads.layer, pa.int32()),
        "head": pa.array(heads.head, pa.int32()),
        "pr": pa.array(heads.pr, pa.float64()),
        "pr_moment": pa.array(heads.pr_moment, pa.float64()),
    }
    if baseline is not None:
        columns["baseline"] = pa.array(baseline, pa.float64())
    columns |= {f"attention_{name}": pa.array(values, pa.float64()) for name, values in heads.attention.items()}
    columns |= {f"selectivity_{name}": pa.array(values, pa.float64()) for name, values in heads.selectivity.items()}
    columns["head_class"] = pa.array(heads.head_class.tolist(), pa.string())
    columns["status"] = pa.array(heads.status.tolist(), pa.string())
    columns["attention_sink"] = pa.array(heads.sink, pa.float64())
    columns |= {f"baseline_{name}": pa.array(values, pa.float64()) for name, values in heads.baselines.items()}
    columns |= {f"reach_{name}": pa.array(values, pa.float64()) for name, values in heads.reach.items()}
    columns |= {f"extra_{name}": pa.array(values, pa.float64()) for name, values in heads.extra.items()}
    metrics = observation.metrics
    columns |= {
        "probe_top1": same(metrics.top1, pa.float64()),
        "probe_top5": same(metrics.top5, pa.float64()),
        "probe_loss": same(metrics.loss, pa.float64()),
        "probe_target_logit": same(metrics.target_logit, pa.float64()),
        "probe_rows": same(metrics.rows, pa.int64()),
        "fingerprint": same(observation.fingerprint, pa.string()),
        "baseline_name": same(observation.baseline, pa.string()),
        "tokens_estimated": same(observation.tokens_estimated, pa.bool_()),
        "finite": same(observation.finite, pa.bool_()),
        "mark": same(observation.mark, pa.string()),
        "label": same(observation.label, pa.string()),
        "null_p99": same(observation.null_p99, pa.float64()),
        "seconds": same(observation.seconds, pa.float64()),
        "share": same(observation.share, pa.float64()),
        "attempt": same(observation.attempt, pa.int32()),
        "time": same(observation.time, pa.float64()),
    }
    return pa.table(columns)


def from_table(table: pa.Table) -> Observation:
    """The observation that ``to_table`` wrote; columns that are missing stay missing (NaN, empty mapping)."""
    if not table.num_rows:
        raise RecordError("an observation without heads cannot be read")
    names = table.column_names

    def floats(name: str) -> np.ndarray:
        if name not in names:
            return np.full(table.num_rows, np.nan)
        return np.array(table[name].to_numpy(), dtype=np.float64)

    def strings(name: str, default: str) -> np.ndarray:
        if name not in names:
            return np.full(table.num_rows, default)
        return np.array([default if value is None else value for value in table[name].to_pylist()], dtype=np.str_)

    def prefixed(prefix: str, leave_out: tuple[str, ...] = ()) -> dict[str, np.ndarray]:
        return {
            name.removeprefix(prefix): floats(name)
            for name in names
            if name.startswith(prefix) and name.removeprefix(prefix) not in leave_out
        }

    def one(name: str, default: Any) -> Any:
        value = table[name][0].as_py() if name in names else None
        return default if value is None else value

    nan = math.nan
    baselines = {name: floats(f"baseline_{name}") for name in BASELINES if f"baseline_{name}" in names}
    chosen = str(one("baseline_name", "sampled"))
    if "baseline" in names and chosen not in baselines:
        baselines[chosen] = floats("baseline")
    heads = HeadTable(
        layer=np.array(table["layer"].to_numpy(), dtype=np.int64),
        head=np.array(table["head"].to_numpy(), dtype=np.int64),
        pr=floats("pr"),
        pr_moment=floats("pr_moment"),
        attention=prefixed("attention_", ("sink",)),
        baselines=baselines,
        selectivity=prefixed("selectivity_"),
        head_class=strings("head_class", ""),
        status=strings("status", "ok"),
        sink=floats("attention_sink"),
        reach=prefixed("reach_"),
        extra=prefixed("extra_"),
    )
    metrics = ProbeMetrics(
        top1=one("probe_top1", nan),
        top5=one("probe_top5", nan),
        loss=one("probe_loss", nan),
        target_logit=one("probe_target_logit", nan),
        rows=one("probe_rows", 0),
    )
    return Observation(
        step=int(one("step", 0)),
        tokens=one("tokens", None),
        probe=str(one("probe", "induction")),
        fingerprint=str(one("fingerprint", "")),
        heads=heads,
        metrics=metrics,
        baseline=chosen,
        tokens_estimated=bool(one("tokens_estimated", False)),
        finite=bool(one("finite", True)),
        mark=one("mark", None),
        label=one("label", None),
        null_p99=one("null_p99", nan),
        seconds=one("seconds", nan),
        share=one("share", nan),
        attempt=int(one("attempt", 1)),
        time=one("time", nan),
    )


def read_observation(path: Path) -> Observation:
    """The observation in one Parquet file; RecordError names the file when it cannot be read."""
    try:
        return from_table(pq.read_table(path))
    except (OSError, pa.ArrowException, KeyError) as error:
        raise RecordError(f"{path} cannot be read as an observation ({error})") from error


# -- JSON -----------------------------------------------------------------------------------------------------------


def jsonable(value: Any) -> Any:
    """``value`` with tuples, arrays and non-finite numbers turned into what strict JSON has (NaN becomes null)."""
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return jsonable(value.tolist())
    if isinstance(value, (list, tuple, set, frozenset)):
        return [jsonable(item) for item in value]
    if isinstance(value, np.generic):
        return jsonable(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value


def dumps(value: Any, indent: int | None = 1) -> str:
    """Strict JSON: never a bare NaN."""
    return json.dumps(jsonable(value), indent=indent, allow_nan=False, ensure_ascii=False)


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as JSON under a temporary name, flush it to disk and rename."""
    write_text(path, dumps(value))


def write_text(path: Path, text: str) -> None:
    """Write ``text`` as UTF-8 under a temporary name, flush it to disk and rename."""
    _write_atomically(path, lambda file: file.write(text.encode()))


def _write_atomically(path: Path, write: Any) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _pair(value: Any) -> tuple[float, float]:
    low, high = value or (None, None)
    return _number(low), _number(high)


def _event(raw: dict[str, Any]) -> Event:
    raw = {**raw, "heads": tuple(raw.get("heads", ()))}
    for name in ("value", "time"):
        raw[name] = _number(raw.get(name))
    return Event(**raw)


def _condition(raw: dict[str, Any]) -> ConditionMetrics:
    numbers = {name: _number(raw[name]) for name in ("logprob", "top1", "top5", "target_logit")}
    return ConditionMetrics(name=raw["name"], heads=tuple(raw["heads"]), **numbers)


def _verdict(raw: dict[str, Any]) -> Verdict:
    raw = {**raw, "heads": tuple(raw["heads"])}
    for name in ("p_value", "level", "effect", "excess", "seconds"):
        raw[name] = _number(raw.get(name))
    for name in ("effect_ci", "excess_ci"):
        raw[name] = _pair(raw.get(name))
    for name in ("conditions", "random"):
        raw[name] = tuple(_condition(item) for item in raw[name])
    return Verdict(**raw)
