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
_BACK, _UNKNOWN, _INK = (20, 21, 26), (90, 20, 60), (170, 174, 182)
#: Digits, 3 x 5 dots each, one number a row of three bits.
_DIGITS = ("75557", "26227", "71747", "71717", "55711", "74717", "74757", "71111", "75757", "75717")


def layers_by_heads(observation: Observation, width: int = 900) -> Pixels:
    """[rows, columns, 3] pixels: three panels side by side, layers downwards, heads across.

    Layer numbers stand at the left edge. Left: effective rank (PR), dark = 1, bright = the largest of this
    observation. Middle: induction attention, dark = 0, bright = 1. Right: the head's class by colour. Heads that are
    dead or not finite are purple in all of them.
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
    drawn = [_grid(values, heads.layer, heads.head, side) for values in cells]
    gap = np.full((len(drawn[0]), side, 3), _BACK, dtype=np.uint8)
    return np.concatenate([_layer_numbers(len(drawn[0]), side), drawn[0], gap, drawn[1], gap, drawn[2]], axis=1)


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


def _layer_numbers(height: int, side: int) -> Pixels:
    """A margin with the number of every layer that has room for one."""
    dot = 2 if side >= 14 else 1
    margin = np.full((height, dot * 14, 3), _BACK, dtype=np.uint8)
    every = -(-7 * dot // side)
    for layer in range(0, height // side, every):
        top = layer * side + max(0, (side - 5 * dot) // 2)
        if top + 5 * dot > height:
            break
        for place, digit in enumerate(str(layer)):
            bits = np.array([[int(row) >> shift & 1 for shift in (2, 1, 0)] for row in _DIGITS[int(digit)]], dtype=bool)
            shape = bits.repeat(dot, axis=0).repeat(dot, axis=1)
            left = dot + place * 4 * dot
            margin[top : top + 5 * dot, left : left + 3 * dot][shape] = _INK
    return margin
