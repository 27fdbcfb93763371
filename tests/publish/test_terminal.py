"""The terminal view: plain lines where there is no terminal, a redrawn view where there is one."""

from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from spectral_monitor.heads import Head
from spectral_monitor.publish.terminal import TerminalPublisher, sparkline
from tests.publish import factories

INFO = {"probes": {"induction": {"capability": "induction"}}}


def plain() -> tuple[TerminalPublisher, io.StringIO]:
    out = io.StringIO()
    publisher = TerminalPublisher(Console(file=out, width=200))
    publisher.start(INFO)
    return publisher, out


def test_without_a_terminal_each_look_is_one_plain_line_with_the_leading_heads() -> None:
    publisher, out = plain()
    publisher.training(16, loss=2.5)
    publisher.observation(factories.observation(16, formed=0.9))
    lines = out.getvalue().splitlines()
    assert len(lines) == 1
    assert "\x1b" not in lines[0]
    assert lines[0].startswith("step     16   65.5K tokens  loss 2.500  induction top-1 83.0%")
    assert "L1H0 0.730" in lines[0] and "L1H2 0.730" in lines[0]


def test_a_long_line_is_not_wrapped_where_there_is_no_terminal() -> None:
    out = io.StringIO()
    publisher = TerminalPublisher(Console(file=out, width=20))
    publisher.start(INFO)
    publisher.observation(factories.observation(16, formed=0.9))
    assert len(out.getvalue().splitlines()) == 1


def test_a_verdict_is_shown_with_its_control() -> None:
    publisher, out = plain()
    publisher.verdict(factories.verdict(24))
    assert "CAUSAL" in out.getvalue()
    assert "24 matched random sets out 90.0% to 90.0% (p = 0.04)" in out.getvalue()
    assert "L1H0 L1H2" in out.getvalue()


def test_a_verdict_without_draws_or_conditions_is_shown_without_numbers() -> None:
    publisher, out = plain()
    publisher.verdict(factories.verdict(24, verdict="no control possible", random=(), conditions=(), p_value=math.nan))
    assert "NO CONTROL POSSIBLE" in out.getvalue()
    assert "nan" not in out.getvalue()


def test_text_that_looks_like_markup_is_printed_as_it_is() -> None:
    publisher, out = plain()
    publisher.event(factories.event("note", 3, (), text="head [bold] and [/] remain"))
    assert "head [bold] and [/] remain" in out.getvalue()


def test_the_live_view_shows_loss_accuracy_heads_and_events() -> None:
    out = io.StringIO()
    publisher = TerminalPublisher(Console(file=out, force_terminal=True, width=120, height=50), total_steps=32)
    publisher.start(INFO)
    for step in (0, 8, 16):
        publisher.training(step, loss=4.0 - step / 10)
        publisher.observation(factories.observation(step, formed=factories.formed_at(step)))
    publisher.event(factories.event("selectivity_crossing", 16, ("L1H0",)))
    publisher.close({})
    shown = Console(file=io.StringIO(), width=120, record=True)
    shown.print(publisher.render())
    text = shown.export_text()
    assert "step 16 of 32" in text
    assert "2.400" in text
    assert "47.0%" in text
    assert text.index("L1H0") < text.index("L0H")
    assert "selectivity crossing L1H0 up" in text
    assert "\x1b[" in out.getvalue()


def test_the_rise_of_a_head_is_measured_against_its_own_lowest_pr() -> None:
    publisher, _ = plain()
    first, second = factories.observation(1), factories.observation(2, formed=1.0)
    publisher.observation(first)
    publisher.observation(second)
    row = next(row for row in publisher.probes["induction"].rows(8) if row.head == Head(1, 0))
    at = first.heads.index(Head(1, 0))
    assert row.rise == pytest.approx(second.heads.pr[at] / first.heads.pr[at])


def test_the_latest_candidates_are_marked() -> None:
    publisher, _ = plain()
    publisher.observation(factories.observation(16, formed=0.9))
    publisher.event(factories.event("candidates_changed", 16, ("L1H0", "L1H2")))
    publisher.event(factories.event("candidates_changed", 20, ("L1H0",)))
    assert [str(row.head) for row in publisher.probes["induction"].rows(8) if row.member] == ["L1H0"]


def test_a_probe_without_its_class_shows_accuracy_and_no_heads() -> None:
    publisher, out = plain()
    publisher.observation(factories.observation(4, probe="key_retrieval"))
    assert "key_retrieval top-1 2.0%" in out.getvalue()
    assert publisher.probes["key_retrieval"].rows(8) == []


def test_sparkline_keeps_the_last_value_and_survives_what_is_not_finite() -> None:
    assert sparkline([]) == ""
    assert sparkline([0.0, 1.0], 0.0, 1.0) == "▁█"
    assert sparkline([math.nan, 1.0], 0.0, 1.0) == " █"
    assert sparkline([2.0, 2.0]) == "▅▅"
    long = sparkline([0.0] * 200 + [1.0], 0.0, 1.0)
    assert len(long) == 40 and long.endswith("█")
