from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from spectral_monitor.publish.picture import _UNKNOWN, CLASS_COLOURS, layers_by_heads

from . import factories as make


def has(pixels: np.ndarray, colour: tuple[int, int, int]) -> int:
    return int((pixels == np.array(colour)).all(axis=-1).sum())


@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (2, 12), (30, 9), (80, 64), (120, 128)])
def test_any_size_gives_a_picture_of_moderate_size(layers: int, heads: int) -> None:
    pixels = layers_by_heads(make.observation(3, layers=layers, heads=heads, circuit=((0, 0),), formed=1.0))
    assert pixels.dtype == np.uint8 and pixels.shape[2] == 3
    assert pixels.shape[0] >= 2 * layers and pixels.shape[1] <= 1000
    assert has(pixels, CLASS_COLOURS[0]) > 0, "the induction head is red in the right panel"


def test_a_head_brightens_as_it_attends() -> None:
    before, after = (layers_by_heads(make.observation(3, circuit=((1, 2),), formed=formed)) for formed in (0.0, 1.0))
    middle = slice(before.shape[1] // 3 + 20, 2 * before.shape[1] // 3)
    assert after[:, middle].max() > before[:, middle].max() + 60


def test_heads_that_are_not_ok_are_marked_in_all_panels() -> None:
    seen = make.observation(3)
    pr, status = seen.heads.pr.copy(), seen.heads.status.astype("<U12")
    pr[3], status[3] = np.nan, "dead"
    pixels = layers_by_heads(dataclasses.replace(seen, heads=dataclasses.replace(seen.heads, pr=pr, status=status)))
    one = has(pixels, _UNKNOWN)
    assert one > 0 and one % 3 == 0
    pr[:] = np.nan
    assert layers_by_heads(dataclasses.replace(seen, heads=dataclasses.replace(seen.heads, pr=pr))).any()


def test_layers_without_attention_stay_background() -> None:
    seen = make.observation(3, layers=2, heads=4)
    hybrid = dataclasses.replace(seen, heads=dataclasses.replace(seen.heads, layer=seen.heads.layer * 2 + 1))
    pixels = layers_by_heads(hybrid)
    side = pixels.shape[0] // 4
    assert len(np.unique(pixels[:side, 30:].reshape(-1, 3), axis=0)) == 1
    assert len(np.unique(pixels[side : 2 * side, 30:].reshape(-1, 3), axis=0)) > 3
