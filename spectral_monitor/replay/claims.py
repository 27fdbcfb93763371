"""Who measures what, where several processes share one replay; and the table of what is finished.

A claim is a lock file that the operating system releases when its process ends, however it ends: a dead rank's
revision is free again at once, and a living one's is never taken. On a shared file system this needs working
``flock`` (local disks, NFS 4, Lustre with ``-o flock``).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from spectral_monitor.record import write_json


class Claims:
    """Claims of this process in ``folder``, one lock file a key."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: dict[str, FileLock] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def claim(self, key: str) -> bool:
        """Take ``key`` for this process; False when another living process (or this one) has it."""
        if key in self._held:
            return False
        lock = self._lock(key)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            return False
        self._held[key] = lock
        return True

    def release(self, key: str) -> None:
        """Let others have ``key``; no claim, no effect."""
        lock = self._held.pop(key, None)
        if lock is not None:
            lock.release()

    def is_live(self, key: str) -> bool:
        """Whether some living process, this one included, has ``key``."""
        if key in self._held:
            return True
        lock = self._lock(key)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            return True
        lock.release()
        return False

    def close(self) -> None:
        """Release everything."""
        for key in list(self._held):
            self.release(key)

    @contextmanager
    def together(self, name: str) -> Iterator[None]:
        """Wait for, and hold, a lock that every process of the replay asks for (``name`` says for what)."""
        with self._lock(f".{name}"):
            yield

    def _lock(self, key: str) -> FileLock:
        # Not thread-local: the download thread claims, the measuring thread releases.
        return FileLock(self._folder / f"{key}.lock", thread_local=False)


@dataclass(frozen=True)
class Row:
    """One line of the final table: what became of a revision.

    ``status`` is one of ``measured``, ``duplicate``, ``mixed``, ``no_weights``, ``failed`` and ``skipped``.
    ``seconds``: loading and measuring; ``bytes``: of the weight files loaded. ``settings``: library versions, dtype
    and attention backend of the measurement.
    """

    revision: str
    step: int | None
    tokens: float | None
    status: str
    reason: str = ""
    same_as: str | None = None
    commit: str | None = None
    seconds: float | None = None
    bytes: int | None = None
    series: str = ""
    repo: str | None = None
    mark: str | None = None
    tokens_from: str = "unknown"
    notes: tuple[str, ...] = ()
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)


class Table:
    """The finished revisions, one JSON file each in ``folder``, written whole or not at all."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def put(self, key: str, row: Row) -> None:
        write_json(self._folder / f"{key}.json", dataclasses.asdict(row))

    def get(self, key: str) -> Row | None:
        path = self._folder / f"{key}.json"
        try:
            raw = json.loads(path.read_text())
        except (OSError, ValueError):
            return None
        return Row(**{**raw, "notes": tuple(raw.get("notes", ()))})

    def all(self) -> list[Row]:
        """Every row there is, in order of series and step."""
        rows = [row for path in self._folder.glob("*.json") if (row := self.get(path.stem)) is not None]
        return sorted(rows, key=lambda row: (row.series, row.step is None, row.step or 0, row.revision))

    def drop(self, key: str) -> None:
        (self._folder / f"{key}.json").unlink(missing_ok=True)
