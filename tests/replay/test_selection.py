"""Selection of checkpoints, and the published sets."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spectral_monitor.errors import ScheduleError
from spectral_monitor.replay.names import parse_name, tokens_per_step
from spectral_monitor.replay.presets import PRESETS
from spectral_monitor.replay.selection import Selection, log_spaced, parse_steps, select_steps

PUBLISHED = Path(__file__).parents[2].parent / "shared" / "published" / "revisions.csv"


def test_points_are_log_spaced_over_what_exists() -> None:
    pythia = [0, *(2**k for k in range(10)), *range(1000, 144000, 1000)]
    chosen = log_spaced(pythia, 10)
    assert chosen == [0, 2, 16, 64, 256, 1000, 3000, 10000, 38000, 143000]


@given(st.sets(st.integers(0, 10**7), min_size=1, max_size=60), st.integers(1, 70))
def test_as_many_points_as_asked_for_or_there_are(steps: set[int], points: int) -> None:
    chosen = log_spaced(sorted(steps), points)
    assert len(chosen) == min(points, len(steps))
    assert chosen == sorted(set(chosen))
    assert set(chosen) <= steps
    assert max(steps) in chosen


def test_steps_last_all() -> None:
    steps = [0, 1, 64, 512]
    assert select_steps(Selection(steps=(512, 1)), steps, "x") == [1, 512]
    assert select_steps(Selection(last=True), steps, "x") == [512]
    assert select_steps(Selection(), steps, "x") == steps
    with pytest.raises(ScheduleError, match="no checkpoint at step 60; the nearest is at step 64"):
        select_steps(Selection(steps=(60,)), steps, "x")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"points": 0}, "selects nothing"),
        ({"points": 3, "last": True}, "not several"),
        ({"steps": (-1,)}, "negative"),
        ({"preset": "pythia-2b"}, "unknown preset 'pythia-2b': there are pythia-1b, olmo-1b, olmoe-1b-7b"),
    ],
)
def test_wrong_selections_get_one_sentence(arguments: dict[str, object], said: str) -> None:
    with pytest.raises(ScheduleError, match=said):
        Selection(**arguments)  # type: ignore[arg-type]


def test_steps_are_whole_numbers() -> None:
    assert parse_steps("1, 64,512") == (1, 64, 512)
    with pytest.raises(ScheduleError, match="whole numbers"):
        parse_steps("1,x")


@pytest.mark.skipif(not PUBLISHED.exists(), reason="../shared/published/revisions.csv is not here")
def test_presets_are_the_published_sets() -> None:
    rows = list(csv.DictReader(PUBLISHED.open()))
    published: dict[str, list[str]] = {}
    for row in rows:
        published.setdefault(row["repo"], []).append(row["revision"])
    assert {preset.repo: list(preset.revisions) for preset in PRESETS.values()} == published
    for row in rows:
        parsed = parse_name(row["revision"])
        assert parsed is not None
        assert parsed.step == int(row["step"])
        known = tokens_per_step(row["repo"])
        tokens = parsed.tokens if known is None else parsed.step * known[0]
        assert tokens == pytest.approx(float(row["tokens_B"]) * 1e9, rel=1e-3)
