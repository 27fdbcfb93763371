"""Ablations with a replayed prefix on models that are built otherwise: less is replayed, the numbers stay.

All families and layers: ``python -m tests.architectures.test_replay``.
"""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import numpy as np
import pytest

from spectral_monitor.capture import Ablation, Subject
from spectral_monitor.heads import Head
from spectral_monitor.prefix import Extent
from tests.architectures.sweep import build, families, tiny_config, tiny_probe
from tests.test_prefix import textbook

#: Extent settled for conditions in layer 1, and why it is not the whole.
EXPECTED = {
    "gpt2": Extent.LAYERS_AND_ATTENTION,
    "qwen3_moe": Extent.LAYERS_AND_ATTENTION,
    "gemma3_text": Extent.LAYERS_AND_ATTENTION,
    "bert": Extent.LAYERS,  # the attention adds its input and normalises
    "bloom": Extent.LAYERS,  # so does this one, without the norm
    "gemma3n_text": Extent.NOTHING,  # its layers hand on more than what they return
    "hrm_text": Extent.NOTHING,  # its layers run more than once
}


def settled(model: Any, layer: int, share: bool) -> tuple[Extent, float]:
    """The extent for conditions in ``layer``, and the largest difference from running everything (nats)."""
    probe = tiny_probe()
    subject = Subject(model, probe)
    heads = range(min(3, subject.anatomy.block(layer).heads))
    conditions = [Ablation(str(head), frozenset({Head(layer, head)})) for head in heads]
    with textbook(subject):
        slow = subject.run_conditions(probe, conditions, probe.rows)
    fast = subject.run_conditions(probe, conditions, (3 if share else 1) * probe.rows)
    ((extent, _),) = subject._replay.values()
    return extent, max(float(np.abs(f.logprob - s.logprob).max()) for f, s in zip(fast, slow, strict=True))


@pytest.mark.parametrize("share", [False, True], ids=["alone", "sharing a forward"])
@pytest.mark.parametrize("family", sorted(EXPECTED))
def test_replay_on_other_architectures(family: str, share: bool) -> None:
    extent, difference = settled(build(tiny_config(family)), 1, share)
    assert extent == EXPECTED[family] and difference < 1e-4


def main() -> None:
    """Every family that can be read, every layer with attention, both ways."""
    found: Counter[str] = Counter()
    worst = 0.0
    for family in families():
        try:
            model = build(tiny_config(family))
            layers = sorted({block.layer for block in Subject(model, tiny_probe()).anatomy.blocks})
        except Exception as error:
            found[f"not read ({type(error).__name__})"] += 1
            continue
        for layer in layers:
            for share in (False, True):
                extent, difference = settled(model, layer, share)
                found[extent.name] += 1
                worst = max(worst, difference)
    print(dict(found), f"largest difference {worst:.2g} nats")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
