"""Reads an offline W&B run file back, with the vendor's own tool."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def offline_environment(folder: Path) -> dict[str, str]:
    """The environment of a child process whose W&B files all stay inside ``folder``."""
    root = Path(__file__).parents[2]
    return {
        **os.environ,
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "WANDB_DIR": str(folder),
        "WANDB_DATA_DIR": str(folder / "data"),
        "WANDB_CACHE_DIR": str(folder / "cache"),
        "WANDB_CONFIG_DIR": str(folder / "config"),
        "WANDB_X_DISABLE_STATS": "true",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]),
    }


@dataclass
class OfflineRun:
    """All records of one ``.wandb`` file, in order."""

    directory: Path
    records: list[dict[str, Any]]

    @classmethod
    def find(cls, folder: Path, number: int = 0) -> OfflineRun:
        files = sorted(folder.glob("**/offline-run-*/run-*.wandb"))
        return cls.read(files[number])

    @classmethod
    def read(cls, file: Path) -> OfflineRun:
        tool = shutil.which("wandb", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
        assert tool is not None
        answer = subprocess.run(
            [tool, "leet", "inspect", str(file), "--json"], check=True, capture_output=True, text=True, timeout=300
        )
        return cls(file.parent, [json.loads(line) for line in answer.stdout.splitlines() if line.strip()])

    def _of(self, kind: str) -> list[dict[str, Any]]:
        return [record[kind] for record in self.records if record["type"] == kind]

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [record["item"] for record in self._of("history")]

    @property
    def alerts(self) -> list[dict[str, Any]]:
        return self._of("alert")

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return self._of("metric")

    def all_keys(self) -> set[str]:
        return {key for row in self.rows for key in row}

    def items(self) -> Iterator[tuple[str, Any]]:
        for row in self.rows:
            yield from row.items()

    def points(self, key: str, axis: str) -> list[tuple[float, float]]:
        """(x, value) of a key, in the order of the file; a row without the axis fails."""
        return [(row[axis], row[key]) for row in self.rows if key in row]

    def files(self, pattern: str) -> list[Path]:
        return sorted((self.directory / "files").glob(pattern), key=lambda file: file.stat().st_mtime)
