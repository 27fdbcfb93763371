"""Names of attention heads: ``L4H4`` is head 4 of layer 4, both 0-based."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

_NAME = re.compile(r"L(\d+)H(\d+)\Z")


class Head(NamedTuple):
    """One query head. ``layer`` is the true layer number of the model, also in hybrid models."""

    layer: int
    head: int

    def __str__(self) -> str:
        return f"L{self.layer}H{self.head}"

    @classmethod
    def parse(cls, name: str) -> Head:
        """``Head.parse("L4H4") == Head(4, 4)``; ValueError for anything else."""
        match = _NAME.match(name.strip())
        if match is None:
            raise ValueError(f"{name!r} is no head name; heads are written like L4H4 (layer 4, head 4, 0-based)")
        return cls(int(match[1]), int(match[2]))


def names(heads: Iterable[Head]) -> list[str]:
    """Sorted names of ``heads``."""
    return [str(head) for head in sorted(heads)]
