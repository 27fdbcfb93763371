"""Kills a process at a moment that no clock decides: its n-th file operation, or a few milliseconds after it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: What Python reports (`sys.addaudithook`) when it opens, moves, makes or removes a file, or looks into a folder.
OPERATIONS = frozenset(
    {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.listdir", "os.scandir", "shutil.rmtree"}
)


def count_file_operations(below: Path, each: Callable[[int], None] = lambda number: None) -> Callable[[], int]:
    """Count this process's file operations on paths below ``below``, from now on; ``each`` is told the number."""
    operations = 0
    start = str(below)

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal operations
        if event in OPERATIONS and arguments and str(arguments[0]).startswith(start):
            operations += 1
            each(operations)

    sys.addaudithook(hear)
    return lambda: operations


def die_at_file_operation(below: Path, number: int, delay: float = 0.0, how: int = signal.SIGKILL) -> Callable[[], int]:
    """Send this process ``how``, ``delay`` seconds after it began its ``number``-th file operation below ``below``."""

    def die() -> None:
        time.sleep(delay)
        os.kill(os.getpid(), how)

    def each(operation: int) -> None:
        if operation == number and delay:
            threading.Thread(target=die, daemon=True).start()
        elif operation == number:
            die()

    return count_file_operations(below, each)
