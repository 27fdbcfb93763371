"""The layer-by-head picture of one observation, drawn with numpy alone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from spectral_monitor.observation import CLASSES, OK, Observation

Pixels = npt.NDArray[np.uint8]

#: Dark to bright in equal steps of lightness; equal to the eye in print and for colour-blind readers.
_RAMP = np.array([[13, 16, 40], [44, 46, 110], [66, 96, 158], [66, 152, 164], [120, 200, 140], [236, 240, 170]], float)
#: One colour a class, in the order of ``CLASSES``; the last one for unclassified heads.
CLASS_COLOURS: tuple[tuple[int, int, int], ...] = (
    (214, 69, 65),
    (232, 152, 54),
    (62, 142, 208),
    (128, 128, 140),
    (150, 111, 191),
    (82, 168, 108),
    (38, 40, 48),
)
_BACK, _UNKNOWN = (20, 21, 26), (90, 20, 60)


def layers_by_heads(observation: Observation, width: int = 900) -> Pixels:
    """[rows, columns, 3] pixels: three panels side by side, layers downwards, heads across.

    Left: effective rank (PR), dark = 1, bright = the largest of this observation. Middle: induction attention, dark =
    0, bright = 1. Right: the head's class by colour. Heads that are dead or not finite are purple in all of them.
    """
    heads = observation.heads
    if not len(heads):
        return np.full((8, 8, 3), _BACK, dtype=np.uint8)
    top = float(np.nanmax(heads.pr)) if np.isfinite(heads.pr).any() else 1.0
    rank = (heads.pr - 1.0) / max(top - 1.0, 1e-9)
    attention = heads.attention.get("induction", np.full(len(heads), np.nan))
    order = {name: number for number, name in enumerate(CLASSES)}
    classes = np.array([order.get(str(name), len(CLASSES)) for name in heads.head_class])
    colours = np.array(CLASS_COLOURS, dtype=np.uint8)[classes]
    known = (heads.status == OK) & np.isfinite(heads.pr)
    panels = [_ramp(rank), _ramp(attention), colours]
    cells = [np.where(known[:, None], panel, np.array(_UNKNOWN, dtype=np.uint8)) for panel in panels]
    columns = int(heads.head.max()) + 1
    side = int(np.clip(width // (3 * columns + 2), 2, 28))
    gap = np.full(((int(heads.layer.max()) + 1) * side, side, 3), _BACK, dtype=np.uint8)
    drawn = [_grid(values, heads.layer, heads.head, side) for values in cells]
    return np.concatenate([drawn[0], gap, drawn[1], gap, drawn[2]], axis=1)


def _ramp(values: npt.NDArray[np.float64]) -> Pixels:
    position = np.clip(np.nan_to_num(values), 0.0, 1.0) * (len(_RAMP) - 1)
    low = np.minimum(position.astype(int), len(_RAMP) - 2)
    part = (position - low)[:, None]
    return (_RAMP[low] * (1 - part) + _RAMP[low + 1] * part).astype(np.uint8)


def _grid(colours: Pixels, layer: npt.NDArray[np.int64], head: npt.NDArray[np.int64], side: int) -> Pixels:
    """One square a head; layers without attention stay background."""
    grid = np.full((int(layer.max()) + 1, int(head.max()) + 1, 3), _BACK, dtype=np.uint8)
    grid[layer, head] = colours
    big = grid.repeat(side, axis=0).repeat(side, axis=1)
    if side >= 6:  # a dark line between the squares, where there is room for one
        big[side - 1 :: side] = _BACK
        big[:, side - 1 :: side] = _BACK
    return big
