"""Revisions brought to this machine within a disk budget, and taken away again.

Each revision gets a folder of its own below the replay's work folder. Room is reserved in a ledger that all processes
of the replay share before a byte is fetched, so the budget holds for all of them together and across restarts. Only
folders that the ledger names are ever deleted: the Hub client's own cache and kept folders are read, never touched.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from spectral_monitor.errors import LoadError
from spectral_monitor.record import write_json
from spectral_monitor.replay.claims import Claims
from spectral_monitor.replay.hub import Hub, OfflineError, RemoteFile, Stopped, cached_path, mismatch
from spectral_monitor.replay.plan import Planned

#: Left free on the disk at any time.
_SPARE_BYTES = 256 << 20


@dataclass(frozen=True)
class _Entry:
    """Room taken by a revision; ``ours``: this replay made its folder and may delete it."""

    bytes: int
    ours: bool


class Downloads:
    """Folders of revisions below ``folder``.

    Args:
        budget: bytes that all folders together may take; None: the free disk space is the only limit.
        keep: leave finished revisions where they are.
        claims: tells whose revision is being worked on, so that what a dead process left can be evicted.
    """

    def __init__(
        self,
        folder: Path,
        hub: Hub,
        claims: Claims,
        budget: int | None = None,
        keep: bool = False,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._folder = folder
        self._hub = hub
        self._claims = claims
        self._budget = budget
        self._keep = keep
        self._sleep = sleep

    # -- what is there ------------------------------------------------------------------------------------------

    def folder_of(self, planned: Planned) -> Path:
        """Where the revision's files are or will be; local checkpoints stay where they are."""
        if planned.checkpoint.folder is not None:
            return planned.checkpoint.folder
        return self._folder / f"{planned.key}@{(planned.checkpoint.commit or '')[:12]}"

    def missing(self, planned: Planned) -> list[RemoteFile]:
        """Files of the revision that are neither in the Hub client's cache nor in its folder."""
        return [file for file in planned.fetch if self._present(planned, file) is None]

    def _present(self, planned: Planned, file: RemoteFile) -> Path | None:
        own = self.folder_of(planned) / file.path
        if own.is_file() and own.stat().st_size == file.size:
            return own
        checkpoint = planned.checkpoint
        assert checkpoint.repo is not None and checkpoint.commit is not None
        return cached_path(checkpoint.repo, checkpoint.commit, file)

    # -- bringing -----------------------------------------------------------------------------------------------

    def bring(
        self,
        planned: Planned,
        progress: Callable[[int], None] | None = None,
        stopping: Callable[[], bool] = lambda: False,
        my_turn: Callable[[], bool] = lambda: True,
    ) -> Path:
        """Have all files of the revision in one folder, checked against the listing; returns the folder.

        Waits for ``my_turn()`` and for room within the budget. Raises LoadError and its kinds; Stopped when
        ``stopping()`` while waiting.
        """
        checkpoint = planned.checkpoint
        if checkpoint.folder is not None:
            require_finished(checkpoint.folder)
            return checkpoint.folder
        assert checkpoint.repo is not None and checkpoint.commit is not None
        folder = self.folder_of(planned)
        missing = self.missing(planned)
        if missing and self._hub.offline:
            raise OfflineError(
                f"{checkpoint.name}: {missing[0].path} is not in the local cache, "
                "and HF_HUB_OFFLINE forbids asking the Hub"
            )
        self._reserve(planned, folder, sum(file.size for file in missing), stopping, my_turn)
        weights = set(planned.weights.files) if planned.weights else set()
        for file in planned.fetch:
            target = folder / file.path
            present = self._present(planned, file)
            if present is None:
                self._hub.fetch(checkpoint.repo, checkpoint.commit, file, target, progress)
                continue
            if present != target:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.unlink(missing_ok=True)
                target.symlink_to(present.resolve())
            wrong = mismatch(target, file) if file.path in weights else None
            if wrong is not None:
                target.unlink()
                if self._hub.offline:
                    raise LoadError(f"{checkpoint.name}: the cached {file.path} is damaged ({wrong})")
                self._hub.fetch(checkpoint.repo, checkpoint.commit, file, target, progress)
        return folder

    def release(self, planned: Planned) -> None:
        """The revision is no longer needed: delete its folder, unless it is to be kept or was there before."""
        with self._claims.together("ledger"):
            ledger = self._ledger()
            if planned.key not in ledger:
                return
            if ledger[planned.key].ours and not self._keep:
                shutil.rmtree(self.folder_of(planned), ignore_errors=True)
            del ledger[planned.key]
            self._write(ledger)

    def reserved(self) -> frozenset[str]:
        """Keys of the revisions that have their room."""
        return frozenset(self._ledger())

    # -- room ---------------------------------------------------------------------------------------------------

    def check_budget(self, planned: list[Planned]) -> str | None:
        """LoadError when the largest revision does not fit the budget; a sentence when two do not fit together."""
        if self._budget is None or not planned:
            return None
        sizes = {item.checkpoint.name: sum(file.size for file in self.missing(item)) for item in planned if item.fetch}
        if not sizes:
            return None
        largest = max(sizes, key=lambda name: sizes[name])
        if sizes[largest] > self._budget:
            raise LoadError(
                f"--disk {self._budget:,} bytes cannot hold {largest} ({sizes[largest]:,} bytes): give it more room"
            )
        if 2 * sizes[largest] > self._budget:
            return "the disk budget holds one revision at a time: nothing is downloaded ahead"
        return None

    def _reserve(
        self, planned: Planned, folder: Path, size: int, stopping: Callable[[], bool], my_turn: Callable[[], bool]
    ) -> None:
        """Note the revision in the ledger once it fits; evict what dead processes left when it does not."""
        while True:
            with self._claims.together("ledger"):
                ledger = self._ledger()
                # A folder that the ledger does not know was kept by an earlier replay: its files are not ours.
                before = ledger.get(planned.key, _Entry(0, ours=not folder.exists()))
                entry = _Entry(max(before.bytes, size + (_size_of(folder) if before.ours else 0)), before.ours)
                others = sum(other.bytes for key, other in ledger.items() if key != planned.key)
                fits = self._budget is None or others + entry.bytes <= self._budget
                if fits and my_turn():
                    ledger[planned.key] = entry
                    self._write(ledger)
                    folder.mkdir(parents=True, exist_ok=True)
                    break
                if not fits and self._evict(ledger, planned.key):
                    continue
            if stopping():
                raise Stopped
            self._sleep(0.1)
        free = shutil.disk_usage(folder).free
        if size + _SPARE_BYTES > free:
            raise LoadError(
                f"{planned.checkpoint.name} needs {size:,} bytes and {folder.parent} has {free:,} free: "
                "free some space, or choose another --work folder"
            )

    def _evict(self, ledger: dict[str, _Entry], but: str) -> bool:
        """Delete one revision that no living process works on; called with the ledger locked."""
        for key, entry in list(ledger.items()):
            if key != but and not self._claims.is_live(key):
                for path in self._folder.glob(f"{key}@*") if entry.ours else ():
                    shutil.rmtree(path, ignore_errors=True)
                del ledger[key]
                self._write(ledger)
                return True
        return False

    def _ledger(self) -> dict[str, _Entry]:
        try:
            return {str(key): _Entry(**entry) for key, entry in json.loads(self._path().read_text()).items()}
        except (OSError, ValueError, TypeError):
            return {}

    def _write(self, ledger: dict[str, _Entry]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        write_json(self._path(), {key: dataclasses.asdict(entry) for key, entry in ledger.items()})

    def _path(self) -> Path:
        return self._folder / "ledger.json"


def require_finished(folder: Path) -> None:
    """LoadError when a Trainer is still writing ``folder``: ``trainer_state.json`` is what it writes last."""
    if not folder.name.startswith("checkpoint-") or not folder.name.removeprefix("checkpoint-").isdigit():
        return
    try:
        json.loads((folder / "trainer_state.json").read_text())
    except (OSError, ValueError):
        raise LoadError(
            f"{folder.name} has no whole trainer_state.json: it is still being written, or its run was killed in the "
            "middle"
        ) from None


def _size_of(folder: Path) -> int:
    """Bytes of the real files below ``folder`` (links point out of it and do not count)."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
