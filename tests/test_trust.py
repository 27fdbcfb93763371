"""What alarms were worth: replays over synthetic runs whose right numbers are counted by hand."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from spectral_monitor.errors import RecordError, ThresholdError
from spectral_monitor.observation import CLASSES, OK, HeadTable, Observation, ProbeMetrics
from spectral_monitor.record import RunRecord, dumps
from spectral_monitor.trust import (
    LOW_ATTENTION,
    Alarm,
    Candidate,
    RunSeries,
    candidates,
    cells,
    choose,
    gate_alone,
    judge,
    markdown,
    operating_curve,
    random_times,
    read_run,
    replay,
    run_series,
    trust_table,
    wilson,
)
from spectral_monitor.trust_cli import parse_settings, register
from spectral_monitor.warning import Crossing, LevelRule, RiseRule, WarningParameters

T = 64
LOOKS = 40
SPACING = 1.04


def series(name: str = "run", **signals: np.ndarray) -> RunSeries:
    """Six heads, 40 looks 4% apart: heads 0 to 2 join the circuit at look 30, head 3 joins and leaves again."""
    member = np.zeros((LOOKS, 6), dtype=bool)
    member[30:, :3] = True
    member[30:35, 3] = True
    return RunSeries(
        name, 1e6 * SPACING ** np.arange(LOOKS), tuple(f"L1H{i}" for i in range(6)), signals, {"induction": member}
    )


def step(at: int, low: float, high: float, heads: list[int], count: int = 6) -> np.ndarray:
    values = np.full((LOOKS, count), low)
    values[at:, heads] = high
    return values


# -- judging ----------------------------------------------------------------------------------------------------------


def test_right_false_late_and_missed_alarms_are_counted() -> None:
    """Heads 0 and 3 alarm 10 looks ahead, head 1 at its crossing, head 4 for nothing; head 2 is missed."""
    run = series()
    raised = [Alarm(0, 0, 20), Alarm(0, 3, 20), Alarm(0, 1, 30), Alarm(0, 4, 20)]
    found = judge([run], raised, "hand")
    assert (found.alarms, found.right) == (4, 3)
    assert found.precision == 0.75
    assert (found.circuit, found.warned, found.early) == (3, 2, 1)
    assert found.recall == pytest.approx(2 / 3)
    assert found.false_per_100_heads == pytest.approx(100 / 6)
    assert found.lead == pytest.approx((SPACING**10 + 1) / 2)  # the median of two: one far ahead, one not at all
    assert found.lead_looks == 5
    assert found.resolution == pytest.approx(SPACING)
    assert (found.runs, found.heads) == (1, 6)


def test_an_alarm_beyond_the_horizon_is_false() -> None:
    run = series()
    raised = [Alarm(0, 0, 5)]  # 1.04 ** 25 = 2.67 times too early
    assert judge([run], raised, "hand", horizon=2.0).right == 0
    assert judge([run], raised, "hand", horizon=2.7).right == 1
    assert judge([run], raised, "hand", horizon=math.inf).lead == pytest.approx(SPACING**25)


def test_the_first_right_alarm_counts_for_the_lead_and_false_ones_do_not() -> None:
    run = series()
    raised = [Alarm(0, 0, 5), Alarm(0, 0, 20), Alarm(0, 0, 25)]
    found = judge([run], raised, "hand", horizon=2.0)
    assert (found.alarms, found.right, found.warned) == (3, 2, 1)
    assert found.lead == pytest.approx(SPACING**10)
    assert found.lead_tokens == pytest.approx(1e6 * (SPACING**30 - SPACING**20))


def test_a_head_in_the_circuit_from_the_start_is_no_part_of_recall() -> None:
    run = series()
    run.members["induction"][:, 5] = True
    found = judge([run], [], "hand")
    assert found.circuit == 3
    assert math.isnan(found.precision)
    assert found.recall == 0
    assert math.isnan(found.lead)
    assert found.within_resolution


def test_a_lead_of_one_look_is_within_the_resolution() -> None:
    run = series()
    assert judge([run], [Alarm(0, 0, 29)], "hand").within_resolution
    assert not judge([run], [Alarm(0, 0, 28)], "hand").within_resolution


def test_a_horizon_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ThresholdError, match="horizon is 1"):
        judge([series()], [], "hand", horizon=1.0)


def test_replay_leaves_out_heads_that_are_members_already() -> None:
    """All heads rise at look 31 (alarm at 32): heads 0 to 3 are in the circuit since look 30."""
    run = series(pr=step(31, 3.0, 9.0, list(range(6))))
    found = replay([run], Candidate("pr_rise", "pr", RiseRule()))
    assert [(alarm.head, alarm.look) for alarm in found] == [(4, 32), (5, 32)]


def test_replay_at_the_crossing_itself_is_kept() -> None:
    run = series(pr=step(29, 3.0, 9.0, [0]))
    found = replay([run], Candidate("pr_rise", "pr", RiseRule()))
    assert [(alarm.head, alarm.look) for alarm in found] == [(0, 30)]
    assert judge([run], found, "pr").lead == 1.0


def test_wilson_interval() -> None:
    """Against the textbook value for 9 of 10, and the ends."""
    assert wilson(9, 10) == pytest.approx((0.5958, 0.9821), abs=1e-4)
    assert wilson(10, 10)[1] == pytest.approx(1.0)
    assert wilson(0, 10)[0] == pytest.approx(0.0)
    assert all(math.isnan(end) for end in wilson(0, 0))


def test_lead_interval_needs_three_runs_and_covers_their_spread() -> None:
    runs = [series(f"run-{i}") for i in range(4)]
    raised = [Alarm(i, head, 20 + 2 * i) for i in range(4) for head in range(3)]
    found = judge(runs, raised, "hand")
    assert found.lead == pytest.approx((SPACING**8 + SPACING**6) / 2)
    low, high = found.lead_ci
    assert SPACING**3.9 < low < found.lead < high < SPACING**10.1
    assert found.lead_ci == judge(runs, raised, "hand").lead_ci  # the same every time
    assert math.isnan(judge(runs[:2], raised[:6], "hand").lead_ci[0])


def test_a_precursor_is_judged_by_its_own_class_and_leads_the_circuit() -> None:
    """Head 5 becomes a previous-token head at look 25; its alarm at look 12 is 18 looks ahead of the first member."""
    run = series(previous_token=step(11, 1.0, 6.0, [4, 5]))
    run.members["previous_token"] = np.zeros((LOOKS, 6), dtype=bool)
    run.members["previous_token"][25:, 5] = True
    precursor = Candidate("precursor", "previous_token", LevelRule(bar=3.0), ("previous_token",))
    raised = replay([run], precursor)
    assert [(alarm.head, alarm.look) for alarm in raised] == [(4, 12), (5, 12)]
    found = judge([run], raised, "precursor", joins=("previous_token",))
    assert (found.right, found.alarms, found.warned, found.circuit) == (1, 2, 1, 1)
    assert found.lead == pytest.approx(SPACING**13)
    assert found.circuit_lead == pytest.approx(SPACING**18)
    assert (found.runs_warned, found.runs_formed) == (1, 1)


def test_pr_may_lead_into_either_circuit_and_is_silent_once_the_circuit_is_there() -> None:
    """Head 5 becomes a previous-token head; head 4 rises only after the first member joined, at look 30."""
    pr = step(20, 3.0, 9.0, [0, 5])
    pr[33:, 4] = 9.0
    run = series(pr=pr)
    run.members["previous_token"] = np.zeros((LOOKS, 6), dtype=bool)
    run.members["previous_token"][32:, 5] = True
    found = {one.name: one for one in candidates()}["pr_rise"]
    raised = replay([run], found)
    assert [(alarm.head, alarm.look) for alarm in raised] == [(0, 21), (5, 21)]
    either = judge([run], raised, "pr", joins=found.joins)
    assert (either.right, either.alarms, either.warned, either.circuit) == (2, 2, 2, 4)
    assert judge([run], raised, "pr").right == 1
    every = replay([run], Candidate("pr", "pr", RiseRule()))
    assert [(alarm.head, alarm.look) for alarm in every] == [(0, 21), (5, 21), (4, 34)]


def test_the_circuits_lead_is_of_the_first_right_alarm_in_each_run() -> None:
    runs = [series(f"run-{i}") for i in range(3)]
    raised = [Alarm(0, 0, 20), Alarm(0, 1, 15), Alarm(0, 4, 14), Alarm(1, 2, 30), Alarm(2, 4, 14)]
    found = judge(runs, raised, "hand")
    assert found.circuit_lead == pytest.approx((SPACING**15 + 1) / 2)  # 15 looks in run 0, none in run 1
    assert found.circuit_lead_range == pytest.approx((1, SPACING**15))
    assert (found.runs_warned, found.runs_formed) == (1, 3)


def test_a_replay_raises_what_the_early_warning_raised() -> None:
    """Wandering series of every signal: the live state machine and the replay agree look by look and head by head."""
    from spectral_monitor.heads import Head
    from spectral_monitor.warning import EarlyWarning

    for seed in range(5):
        rng = np.random.default_rng(seed)
        walk = np.exp(np.cumsum(rng.normal(0, 0.25, size=(4, 60, 4)), axis=1))
        looks = [wandering(i, walk[:, i]) for i in range(60)]
        run = run_series("run", looks, T)
        warning, raised = EarlyWarning(T), set()
        for i, one in enumerate(looks):
            members = {Head.parse(name) for name, inside in zip(run.heads, run.member()[max(i - 1, 0)], strict=True)
                       if inside}  # fmt: skip
            for event in warning.update(one, members):
                if event.kind.endswith("rise"):
                    raised |= {(event.kind, event.capability, head, i) for head in event.heads}
        names = {
            "pr_rise": ("pr_rise", "induction"),
            "content_rise": ("content_rise", "induction"),
            "attention_rise": ("attention_rise", "induction"),
            "previous_token_rise": ("attention_rise", "previous_token"),
        }
        replayed = set()
        for one in candidates():
            if one.name in names:
                replayed |= {(*names[one.name], run.heads[alarm.head], alarm.look) for alarm in replay([run], one)}
        assert replayed == raised
        assert len(raised) > 3


def wandering(number: int, walk: np.ndarray) -> Observation:
    """Two layers of two heads, [4, heads] factors for PR, content, attention and previous token."""
    pr, content, attention, previous = walk
    table = look(number, 0.1).heads
    mass = {name: np.full(4, 1 / T) for name in CLASSES}
    mass |= {"induction": np.minimum(attention / T, 1.0), "previous_token": np.minimum(previous / T, 1.0)}
    heads = dataclasses.replace(
        table,
        layer=np.array([0, 0, 1, 1]),
        head=np.array([0, 1, 0, 1]),
        pr=1 + 2 * pr,
        pr_moment=1 + 2 * pr,
        attention=mass,
        selectivity={name: 8 * values * T for name, values in mass.items()},
        baselines={"others": np.full(4, 1 / T)},
        head_class=np.array(["none"] * 4),
        status=np.array([OK] * 4),
        sink=np.zeros(4),
        extra={"content_share": 0.05 * content},
    )
    return dataclasses.replace(look(number, 0.1), heads=heads)


# -- baselines --------------------------------------------------------------------------------------------------------


def test_random_times_hit_as_often_as_chance_says() -> None:
    """Right are the places of heads 0 to 3 at looks 13 to 30 (horizon 2 = 17 looks): 4 * 18 of all allowed ones."""
    run = series()
    raised = [Alarm(0, 0, 20)] * 3
    allowed = int((~run.members["induction"][:-1]).sum())
    found = random_times([run], raised, horizon=2.0, draws=400)
    assert found.alarms == 3
    assert found.precision == pytest.approx(4 * 18 / allowed, rel=0.15)
    assert found.precision == random_times([run], raised, horizon=2.0, draws=400).precision


def test_the_gate_alone_is_every_head_when_it_opens() -> None:
    """Head 5 rises at look 11 (gate open at 12): six alarms there, four of them right."""
    run = series(previous_token=step(11, 1.0, 3.0, [5]))
    raised = gate_alone([run], LevelRule(bar=2.0))
    assert [(alarm.head, alarm.look) for alarm in raised] == [(head, 12) for head in range(6)]
    assert judge([run], raised, "gate", horizon=2.1).right == 4
    assert gate_alone([series(previous_token=np.ones((LOOKS, 6)))], LevelRule(bar=2.0)) == []
    both = series(pr=np.full((LOOKS, 6), 3.0), previous_token=step(11, 1.0, 3.0, [5]))
    both.members["previous_token"] = np.zeros((LOOKS, 6), dtype=bool)
    last = trust_table([both], candidates(), horizon=2.1, draws=5).rows[-1]
    assert (last.name, last.right, last.alarms) == ("the gate alone, all heads", 4, 6)


def test_a_detector_that_knows_beats_random_times() -> None:
    runs = [series(f"run-{i}", pr=step(24, 3.0, 9.0, [0, 1, 2])) for i in range(3)]
    raised = replay(runs, Candidate("pr_rise", "pr", RiseRule()))
    assert judge(runs, raised, "pr").precision == 1.0
    assert random_times(runs, raised).precision < 0.5


# -- tables -----------------------------------------------------------------------------------------------------------


def every_signal(name: str) -> RunSeries:
    return series(
        name,
        pr=step(10, 3.0, 9.0, [0, 1, 2, 3, 4, 5]),  # everybody, long before
        pr_over_null=np.full((LOOKS, 6), np.nan),
        content_share=step(24, 0.0, 0.4, [0, 1, 2]),
        attention=step(26, 1.0, 4.0, [0, 1, 2, 3]),
    )


def test_the_table_has_one_row_a_signal_with_its_baselines() -> None:
    table = trust_table([every_signal(f"run-{i}") for i in range(3)], candidates(), draws=20)
    names = [
        "pr_rise",
        "pr_rise, no gate",
        "content_rise",
        "attention_rise",
        LOW_ATTENTION.name,
    ]
    assert [row.name for row in table.rows] == names
    pr, _, content, attention, low = table.rows
    assert pr.precision == 0.0  # 19 looks, a factor of 2.1: beyond the horizon
    assert content.precision == content.recall == 1.0
    assert content.lead == pytest.approx(SPACING**5)
    assert attention.right == attention.alarms == 12
    assert low.lead == attention.lead == pytest.approx(SPACING**3)
    assert all(at.alarms == row.alarms for row, at in zip(table.rows, table.random, strict=True))
    text = markdown(table)
    assert len(text.splitlines()) == 2 + 5
    assert cells(table)[2][:2] == ("content_rise", "9/9")
    assert json.loads(dumps(table.to_dict()))["rows"][2]["precision"] == 1.0


def test_pr_over_null_has_no_floor() -> None:
    """The ratio lies near 1: PR's floor of 2 would silence it."""
    names = {one.name: one for one in candidates()}
    assert names["pr_over_null"].rule.floor == 0
    assert names["pr_rise"].rule == RiseRule()
    assert [one.name for one in candidates(WarningParameters(pr=None, content=None))] == [
        "attention_rise",
        "previous_token_rise",
    ]


def test_the_operating_curve_goes_from_everything_to_nothing() -> None:
    """Heads 0 to 2 rise to 0.4, heads 4 and 5 to 0.1: a low bar takes all, a middle one the right ones, a high none."""
    content = step(24, 0.0, 0.4, [0, 1, 2])
    content[24:, 4:] = 0.1
    curve = operating_curve(
        [series(content_share=content)],
        Candidate("content_rise", "content_share", LevelRule(bar=0.2)),
        [0.05, 0.2, 0.5],
    )
    assert [value for value, _ in curve] == [0.05, 0.2, 0.5]
    assert [(one.right, one.alarms) for _, one in curve] == [(3, 5), (3, 3), (0, 0)]
    assert [one.recall for _, one in curve] == [1.0, 1.0, 0.0]


def test_choosing_balances_precision_and_early_warnings() -> None:
    """Content creeps up: heads 0 to 2 reach 0.05 at look 12, 0.1 at 18, 0.2 at 29, heads 4 and 5 0.05 at look 2."""
    content = np.full((LOOKS, 6), 0.0)
    for at, value in ((12, 0.05), (18, 0.1), (29, 0.2)):
        content[at:, :3] = value
    content[2:, 4:] = 0.05
    runs = [series(f"run-{i}", content_share=content) for i in range(2)]
    start = Candidate("content_rise", "content_share", LevelRule(bar=0.2))
    # 0.2 is as precise as 0.1, but confirmed at the crossing itself; 0.05 is as early, and wrong in 2 of 5.
    assert choose(runs, start).rule == LevelRule(bar=0.1)
    content[2:, 4:] = 0.0  # now every bar up to 0.1 is right: the least sensitive of equals
    runs = [series(f"run-{i}", content_share=content) for i in range(2)]
    assert choose(runs, start).rule == LevelRule(bar=0.1)


def test_choosing_without_the_signal_changes_nothing() -> None:
    start = Candidate("content_rise", "content_share", LevelRule(bar=0.2))
    assert choose([series(content_share=np.full((LOOKS, 6), np.nan))], start) == start


def test_sensitivity_is_the_ratio_or_the_bar() -> None:
    pr, *_, attention = candidates()
    assert pr.with_sensitivity(2.5).rule == RiseRule(ratio=2.5)
    assert attention.with_sensitivity(2.5).sensitivity == 2.5


# -- records ----------------------------------------------------------------------------------------------------------


def look(number: int, mass: float, *, content: bool = True, **fields: object) -> Observation:
    """Head 1 of two heads attends ``mass``; steps are 4% apart."""
    attention = np.array([1 / T, mass])
    every = {name: attention if name == "induction" else np.full(2, 1 / T) for name in CLASSES}
    heads = HeadTable(
        layer=np.array([0, 1]),
        head=np.array([0, 0]),
        pr=np.array([3.0, 3.0]),
        pr_moment=np.array([3.0, 3.0]),
        attention=every,
        baselines={"others": np.full(2, 1 / T)},
        selectivity={name: values * T for name, values in every.items()},
        head_class=np.array(["none", "none"]),
        status=np.array([OK, OK]),
        sink=np.zeros(2),
        extra={"content_share": np.array([0.0, mass])} if content else {},
    )
    at = round(1000 * SPACING**number)
    metrics = ProbeMetrics(0.0, 0.0, 4.0, 0.0, 128)
    options = {"tokens": float(at * 4096), "probe": "induction", "fingerprint": "0" * 64, "baseline": "others"}
    return Observation(step=at, heads=heads, metrics=metrics, **{**options, **fields})  # type: ignore[arg-type]


MASSES = [1 / T] * 10 + [0.06] * 4 + [0.9] * 6


def write_run(path: Path, looks: list[Observation], length: int | None = T) -> Path:
    probe = {"fingerprint": "0" * 64, "capability": "induction", "rows": 128}
    if length is not None:
        probe["length"] = length
    with RunRecord.create(path, {"probes": {"induction": probe}}) as record:
        for one in looks:
            record.append(one)
        record.close()
    return path


def test_a_record_is_read_as_series(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run-a", [look(i, mass) for i, mass in enumerate(MASSES)]))
    assert run.name == "run-a"
    assert run.heads == ("L0H0", "L1H0")
    assert run.crossing().tolist() == [-1, 14]
    assert run.final().tolist() == [False, True]
    assert run.signals["attention"][12] == pytest.approx([1.0, 0.06 * T])
    assert np.isnan(run.signals["pr_over_null"]).all()
    (row,) = [one for one in trust_table([run], candidates(), draws=5).rows if one.name == "attention_rise"]
    assert (row.right, row.alarms, row.lead_looks) == (1, 1, 3.0)


def test_a_records_own_thresholds_say_who_is_a_member(tmp_path: Path) -> None:
    """At 0.5 of the mass a head has 32x here: no member at the default 50x, one in a run that works with 20x."""
    looks = [look(i, mass) for i, mass in enumerate([1 / T] * 14 + [0.5] * 6)]
    path = write_run(tmp_path / "run", looks)
    assert read_run(path).final().sum() == 0
    with RunRecord.create(path, {"probes": {"induction": {"fingerprint": "0" * 64}}}) as record:
        record.update_run({"config": {"thresholds": {"member": 20.0, "min_attention": 0.02, "hysteresis": 0.8}}})
        record.close()
    assert read_run(path).final().tolist() == [False, True]
    assert read_run(path, crossing=Crossing(selectivity=40.0)).final().sum() == 0


def test_marked_and_non_finite_looks_neither_alarm_nor_count_as_members() -> None:
    looks = [look(i, mass) for i, mass in enumerate(MASSES)]
    looks[3] = look(3, 0.9, mark="duplicate of step 5")
    looks[5] = look(5, 0.9, finite=False)
    run = run_series("run", looks, T)
    assert run.crossing().tolist() == [-1, 14]
    assert np.isnan(run.signals["attention"][[3, 5]]).all()


def test_a_look_without_tokens_is_skipped() -> None:
    looks = [look(i, mass) for i, mass in enumerate(MASSES)]
    looks[11] = look(11, MASSES[11], tokens=None)
    run = run_series("run", looks, T)
    found = replay([run], Candidate("attention_rise", "attention", LevelRule(bar=3.0)))
    assert [alarm.look for alarm in found] == [12]  # 10 and 12 agree, 11 has no place


@pytest.mark.parametrize("looks", [[], [look(0, 0.1)]])
def test_too_short_a_record_is_refused(tmp_path: Path, looks: list[Observation]) -> None:
    with pytest.raises(RecordError, match="needs at least two"):
        read_run(write_run(tmp_path / "run", looks))


def test_records_that_cannot_be_replayed_say_why(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="no run directory"):
        read_run(tmp_path / "nowhere")
    run = write_run(tmp_path / "run", [look(0, 0.1), look(1, 0.1)])
    with pytest.raises(RecordError, match="no probe 'copying'; it has induction"):
        read_run(run, probe="copying")
    with pytest.raises(RecordError, match="does not say how long"):
        read_run(write_run(tmp_path / "short", [look(0, 0.1), look(1, 0.1)], length=None))
    other = look(2, 0.1)
    other.heads.head[:] = [4, 5]
    with pytest.raises(RecordError, match="other heads"):
        run_series("run", [look(0, 0.1), other], T)


# -- the command ------------------------------------------------------------------------------------------------------


def command(*arguments: object) -> tuple[int, str]:
    app = typer.Typer()
    app.callback()(lambda: None)  # with a second command a lone one keeps its name
    register(app)
    result = CliRunner().invoke(app, ["warn", *map(str, arguments)], env={"COLUMNS": "200"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_warn_prints_the_table_and_writes_the_numbers(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"run-{i}", [look(n, mass) for n, mass in enumerate(MASSES)]) for i in range(2)]
    out = tmp_path / "trust.json"
    code, text = command(*runs, "--draws", 5, "--curve", "attention_rise", "--json", out)
    assert code == 0
    assert "2 run(s), 4 heads, 2 of them in a final circuit" in text
    assert "Operating curve of attention_rise" in text
    written = json.loads(out.read_text())
    rows = {row["name"]: row for row in written["rows"]}
    assert rows["attention_rise"]["precision"] == 1.0
    assert rows["attention_rise"]["warned"] == 2
    assert rows["pr_rise"]["alarms"] == 0
    assert rows["pr_rise"]["precision"] is None
    assert len(written["curve"]["points"]) == 7


def test_warn_chooses_on_some_runs_and_reports_on_the_others(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"run-{i}", [look(n, mass) for n, mass in enumerate(MASSES)]) for i in range(3)]
    out = tmp_path / "trust.json"
    code, text = command(*runs, "--draws", 5, "--choose-on", 2, "--json", out)
    assert code == 0
    assert "Chosen on the first 2 run(s)" in text
    assert "1 run(s), 2 heads" in text
    written = json.loads(out.read_text())
    assert written["runs"] == ["run-2"]
    # 0.06 of the mass is 3.84 / T: the bar of 3 warns 3 looks ahead, the next lower ones no earlier.
    assert written["sensitivities"]["attention_rise"]["bar"] == 3.0


def test_warn_takes_other_parameters(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [look(n, mass) for n, mass in enumerate(MASSES)])
    code, text = command(run, "--markdown", "--draws", 5, "--set", "attention.bar=50", "--set", "pr.ratio=1.2")
    assert code == 0
    assert "| attention_rise | 0/0 |" in text
    assert "| attention >= 2/T | 1/1 |" in text
    code, text = command(run, "--markdown", "--draws", 5, "--set", "content=off")
    assert "content_rise" not in text
    code, text = command(run, "--draws", 5, "--set", "crossing.selectivity=1000")
    assert "No circuit formed" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--set", "pr.ratio"], "not understood"),
        (["--set", "prr.ratio=2"], "not understood"),
        (["--set", "pr=2"], "not understood"),
        (["--set", "pr_until_formed.x=2"], "not understood"),
        (["--set", "pr.ratio=high"], "no number"),
        (["--set", "pr.sensitivity=2"], "no parameter 'sensitivity'"),
        (["--set", "pr.ratio=0.5"], "ratio is 0.5"),
        (["--curve", "pr"], "no such alarm"),
        (["--horizon", "1"], "horizon is 1"),
        (["--probe", "copying"], "no probe 'copying'"),
        (["--json", "{run}/nowhere/x.json"], "cannot be written"),
        (["--choose-on", "1"], "leaves none of 1 run(s)"),
    ],
)
def test_a_users_mistake_is_one_sentence(tmp_path: Path, arguments: list[str], said: str) -> None:
    run = write_run(tmp_path / "run", [look(n, mass) for n, mass in enumerate(MASSES)])
    code, text = command(run, "--draws", 5, *(argument.replace("{run}", str(run)) for argument in arguments))
    assert code == 2
    (line,) = [line for line in text.splitlines() if line.startswith("error: ")]
    assert said in line


def test_settings_go_to_the_rules() -> None:
    parameters = parse_settings(
        ["pr_until_formed=off", "pr.ratio=2.5", "pr.persistence=3", "content=off", "attention.bar=2"]
    )
    assert parameters.pr == RiseRule(ratio=2.5, persistence=3)
    assert parameters.content is None
    assert not parameters.pr_until_formed
    assert parameters.attention == LevelRule(bar=2)
