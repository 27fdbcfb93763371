"""Follow a run directory while another process writes it: read-only, each file once."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spectral_monitor.errors import RecordError
from spectral_monitor.observation import Event, Observation, Verdict
from spectral_monitor.record import RunRecord, read_observation


@dataclass(frozen=True)
class Snapshot:
    """What a run directory held at one moment. ``version`` grows by one whenever something changed."""

    run_dir: Path
    run: Mapping[str, Any]
    observations: tuple[Observation, ...]
    events: tuple[Event, ...]
    verdicts: tuple[Verdict, ...]
    version: int

    @property
    def probes(self) -> tuple[str, ...]:
        """Names of the probes that were observed, in order of appearance."""
        return tuple(dict.fromkeys(observation.probe for observation in self.observations))

    def of(self, probe: str) -> tuple[Observation, ...]:
        """The observations of one probe, in order of step."""
        return tuple(observation for observation in self.observations if observation.probe == probe)


class Follower:
    """Polls a run directory. Only files that are new or changed are read again.

    ``poll`` raises RecordError when there is no run directory (or one of another format).
    """

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        self.run_dir = Path(run_dir)
        self._read: dict[Path, tuple[tuple[int, int, int], Observation]] = {}
        self._seen: Any = None
        self._last: Snapshot | None = None

    def poll(self) -> Snapshot:
        """The run as it stands; the same object again while nothing changed."""
        record = RunRecord.open(self.run_dir)
        files = {}
        for path in record.observation_files():
            mark = _mark(path)
            if mark is not None:
                files[path] = mark
        seen = (
            _mark(self.run_dir / "run.json"),
            tuple(files.items()),
            _mark(self.run_dir / "events.jsonl"),
            tuple((path.name, _mark(path)) for path in sorted((self.run_dir / "verdicts").glob("step-*.json"))),
        )
        if self._last is not None and seen == self._seen:
            return self._last
        self._read = {path: entry for path, entry in self._read.items() if files.get(path) == entry[0]}
        for path, mark in files.items():
            if path not in self._read:
                try:
                    self._read[path] = (mark, read_observation(path))
                except RecordError:
                    if path.exists():
                        raise
                    continue  # superseded between the listing and the reading; the next poll sees why
        try:
            verdicts = tuple(record.verdicts())
        except (OSError, json.JSONDecodeError):
            verdicts = self._last.verdicts if self._last is not None else ()
        self._seen = seen
        self._last = Snapshot(
            self.run_dir,
            record.run,
            tuple(self._read[path][1] for path in files if path in self._read),
            tuple(record.events()),
            verdicts,
            1 if self._last is None else self._last.version + 1,
        )
        return self._last


def _mark(path: Path) -> tuple[int, int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino
