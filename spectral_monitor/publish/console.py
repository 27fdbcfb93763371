"""Where tables are printed: as wide as the terminal, and wide enough for a table where there is none."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

#: Columns in a pipe or a file, where rich would take 80 and break the cells of a wide table.
PIPED_WIDTH = 200


def probe_note(taken: str, names: Iterable[str]) -> str:
    """One sentence on the probes that were not taken; empty where there are none."""
    others = [name for name in names if name != taken]
    return f"Probe {taken}; --probe takes the others: {', '.join(others)}." if others else ""


def wide_when_piped(**options: Any) -> Console:
    """A console for standard output; ``COLUMNS`` has the last word, as everywhere."""
    from rich.console import Console

    piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(width=PIPED_WIDTH if piped else None, **options)
