"""Names are read as a whole, ordered by number, and never guessed at."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spectral_monitor.replay.names import parse_name, parse_names, tokens_per_step


@pytest.mark.parametrize(
    ("name", "step", "tokens", "rounding", "series"),
    [
        ("step0", 0, None, None, ""),
        ("step143000", 143000, None, None, ""),
        ("step_360", 360, None, None, ""),
        ("step-500", 500, None, None, ""),
        ("checkpoint-10", 10, None, None, ""),
        ("step1000-tokens4B", 1000, 4e9, 0.5e9, ""),
        ("stage1-step102500-tokens860B", 102500, 860e9, 0.5e9, "stage1"),
        ("stage2-ingredient1-step23852-tokens51B", 23852, 51e9, 0.5e9, "stage2-ingredient1"),
        ("stage1-step-40000", 40000, None, None, "stage1"),
        ("step10-tokens2.5M", 10, 2.5e6, 0.05e6, ""),
        ("step10-tokens1.25T", 10, 1.25e12, 0.005e12, ""),
        ("step10-tokens500MB", 10, 500e6, 0.5e6, ""),
        ("step10-tokens1.5GB", 10, 1.5e9, 0.05e9, ""),
        ("step10-tokens20971520", 10, 20971520.0, 0.0, ""),
        ("step-001000-2BT", 1000, 2e9, 0.5e9, ""),
    ],
)
def test_known_names(name: str, step: int, tokens: float | None, rounding: float | None, series: str) -> None:
    parsed = parse_name(name)
    assert parsed is not None
    assert (parsed.name, parsed.step, parsed.series) == (name, step, series)
    assert parsed.tokens == (None if tokens is None else pytest.approx(tokens))
    assert parsed.rounding == (None if rounding is None else pytest.approx(rounding))


@pytest.mark.parametrize(
    "name",
    [
        "main",
        "checkpoint-10-backup",
        "refs/pr/1",
        "STEP5",
        "step",
        "step12x",
        "my-step12",
        "step1000-tokens",
        "step1000-tokens4X",
        "ingredient1",
        "checkpoint-",
        "v1.0",
        "step--5",
        "",
    ],
)
def test_unknown_names_are_left_alone(name: str) -> None:
    assert parse_name(name) is None


def test_the_table_of_the_cases_in_order() -> None:
    steps = ["step0", "step1", "step512", "step9000", "step10000", "step143000"]
    labelled = ["stage1-step102500-tokens860B", "stage2-ingredient1-step23852-tokens51B", "step1000-tokens4B"]
    local = ["step_360", "checkpoint-9", "checkpoint-10", "step-500"]
    names = [*steps, *labelled, *local, "main", "checkpoint-10-backup", "refs/pr/1", "STEP5"]
    known, unknown = parse_names(reversed(names))
    assert [item.name for item in known] == [
        "step0",
        "step1",
        "checkpoint-9",
        "checkpoint-10",
        "step_360",
        "step-500",
        "step512",
        "step1000-tokens4B",
        "step9000",
        "step10000",
        "step143000",
        "stage1-step102500-tokens860B",
        "stage2-ingredient1-step23852-tokens51B",
    ]
    assert unknown == ["STEP5", "checkpoint-10-backup", "main", "refs/pr/1"]


@given(st.lists(st.integers(0, 10**9), min_size=2, unique=True))
def test_order_is_numeric_for_any_steps(steps: list[int]) -> None:
    known, _ = parse_names(f"step{step}" for step in steps)
    assert [item.step for item in known] == sorted(steps)


@given(st.text(max_size=40))
def test_no_text_breaks_the_parser(text: str) -> None:
    parsed = parse_name(text)
    assert parsed is None or parsed.name == text


@pytest.mark.parametrize(
    ("repo", "count"),
    [
        ("EleutherAI/pythia-160m", 2_097_152),
        ("EleutherAI/pythia-1b-deduped", 2_097_152),
        ("EleutherAI/pythia-160m-seed3", 2_097_152),
        ("EleutherAI/pythia-160m-v0", None),
        ("HuggingFaceTB/SmolLM3-3B-checkpoints", 2_359_296),
        ("somebody/pythia-160m", None),
    ],
)
def test_tokens_per_step_only_where_stated(repo: str, count: int | None) -> None:
    known = tokens_per_step(repo)
    assert (None if known is None else known[0]) == count
