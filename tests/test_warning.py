"""The detector on series whose right answer is known, and the state machine over whole observations."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from spectral_monitor.errors import ThresholdError
from spectral_monitor.heads import Head
from spectral_monitor.observation import CLASSES, DEAD, OK, HeadTable, Observation, ProbeMetrics
from spectral_monitor.warning import (
    Crossing,
    EarlyWarning,
    JumpDetector,
    JumpRule,
    LevelRule,
    RiseRule,
    WarningParameters,
    alarms,
    detect,
    detector,
    signal,
    trust_note,
)

PUBLISHED = Path(__file__).resolve().parents[2] / "shared" / "published"
T = 64


def log_spaced(count: int, spacing: float = 1.04, start: float = 1e5) -> np.ndarray:
    return start * spacing ** np.arange(count)


def wobble(count: int, size: float = 0.02, seed: int = 0) -> np.ndarray:
    return np.exp(size * np.random.default_rng(seed).standard_normal(count))


# -- one series -----------------------------------------------------------------------------------------------------


def test_a_rise_that_stays_alarms_once() -> None:
    pr = np.r_[np.full(20, 3.0), np.full(20, 9.0)] * wobble(40)
    assert detect(log_spaced(40), pr) == [21]  # 20 is the first high one, 21 confirms it


def test_hovering_round_the_threshold_alarms_once() -> None:
    """Alarm level 6: values go back and forth over it, never down to the re-arming level 4.24."""
    hover = np.tile([6.2, 6.3, 5.7, 5.8], 15)
    assert len(detect(log_spaced(80), np.r_[np.full(20, 3.0), hover])) == 1


def test_hovering_one_at_a_time_never_persists() -> None:
    pr = np.r_[np.full(20, 3.0), np.tile([6.2, 5.8], 20)]
    assert detect(log_spaced(60), pr) == []


def test_up_down_up_alarms_twice() -> None:
    pr = np.r_[np.full(12, 3.0), np.full(12, 9.0), np.full(12, 3.0), np.full(12, 9.0)] * wobble(48)
    found = detect(log_spaced(48), pr)
    assert found == [13, 37]


def test_a_dip_inside_an_episode_does_not_end_it() -> None:
    pr = np.r_[np.full(12, 3.0), np.full(6, 9.0), 3.0, np.full(6, 9.0)]
    assert detect(log_spaced(25), pr) == [13]


def test_a_dip_is_no_ground_to_rise_from() -> None:
    """One low value makes a low minimum; coming back to the usual level is no rise."""
    pr = np.r_[np.full(12, 5.0), 2.0, np.full(12, 5.0)] * wobble(25)
    assert detect(log_spaced(25), pr) == []


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 0.0, -1.0])
def test_unusable_values_are_skipped(bad: float) -> None:
    pr = np.r_[np.full(10, 3.0), np.full(10, 9.0)]
    holes = np.insert(pr, [4, 10, 11, 15], bad)
    usable = np.flatnonzero(np.isfinite(holes) & (holes > 0))
    expected = int(usable[11])  # the second high value that can be used
    found = detect(log_spaced(24), holes)
    assert found == [expected]
    assert holes[found[0]] == 9.0


def test_nothing_but_missing_values_never_alarms() -> None:
    assert detect(log_spaced(10), np.full(10, np.nan)) == []
    assert detect([math.nan] * 20, np.r_[np.full(10, 3.0), np.full(10, 9.0)]) == []


def test_the_first_usable_value_never_alarms() -> None:
    assert detect(log_spaced(10), np.full(10, 50.0)) == []
    assert detect(log_spaced(10), np.r_[np.full(5, np.nan), np.full(5, 50.0)]) == []


def test_a_collapse_alone_never_alarms() -> None:
    """Random initialisation: a PR of 14 that falls to 2 and stays."""
    pr = (2 + 12 * np.exp(-np.arange(40) / 4)) * wobble(40)
    assert detect(log_spaced(40), pr) == []


def test_a_collapse_and_a_rise_alarms_at_the_rise() -> None:
    pr = np.r_[np.geomspace(14, 2, 10), np.full(10, 2.0), np.geomspace(2, 9, 10), np.full(10, 9.0)]
    found = detect(log_spaced(40), pr)
    assert len(found) == 1
    assert 20 <= found[0] < 30


def test_a_slow_ramp_alarms_once_and_never_with_a_finite_window() -> None:
    tokens = log_spaced(200)
    ramp = np.geomspace(3.0, 12.0, 200)  # two doublings in 11.3 doublings of the tokens
    assert len(detect(tokens, ramp)) == 1
    assert detect(tokens, ramp, octaves=2.0) == []


def test_a_finite_window_rearms_on_a_plateau() -> None:
    """3 -> 7 -> 16 with long plateaus: one rise to the start's minimum, two to the plateau's."""
    pr = np.r_[np.full(60, 3.0), np.full(60, 7.0), np.full(60, 16.0)]
    assert len(detect(log_spaced(180), pr)) == 1
    assert detect(log_spaced(180), pr, octaves=2.0) == [61, 121]


@pytest.mark.parametrize("octaves", [math.inf, 0.5])
def test_looks_further_apart_than_the_window_still_confirm_a_rise(octaves: float) -> None:
    """Token counts double from look to look: the second high value is compared with what came before the first."""
    pr = np.r_[np.full(5, 3.0), np.full(5, 9.0)]
    assert detect(log_spaced(10, spacing=2.0), pr, octaves=octaves) == [6]


def test_a_single_spike_never_alarms() -> None:
    pr = np.full(40, 3.0) * wobble(40)
    pr[20] = 30.0
    assert detect(log_spaced(40), pr) == []


def test_noise_alone_hardly_ever_alarms() -> None:
    """A series that jumps by 6% from one look to the next is soon at 1.2 x its minimum: that is nothing there."""
    series = [6.0 * wobble(60, size=0.06, seed=seed) for seed in range(40)]
    assert sum(bool(detect(log_spaced(60), pr, ratio=1.2)) for pr in series) <= 2
    assert sum(bool(detect(log_spaced(60), pr, ratio=1.2, deviations=0)) for pr in series) >= 25


def test_below_the_floor_nothing_alarms() -> None:
    pr = np.r_[np.full(10, 0.8), np.full(10, 1.8)]
    assert detect(log_spaced(20), pr) == []
    assert detect(log_spaced(20), pr, floor=1.5) == [11]


def test_going_back_in_tokens_is_ignored() -> None:
    """A resumed run passes the same ground again: nothing there is news, and nothing is counted twice."""
    tokens = log_spaced(30)
    pr = np.r_[np.full(15, 3.0), 9.0, np.full(14, 9.0)]
    again = np.r_[tokens[:16], tokens[10:16], tokens[16:]]
    values = np.r_[pr[:16], pr[10:16], pr[16:]]
    assert [again[i] for i in detect(again, values)] == [tokens[i] for i in detect(tokens, pr)]


def test_step_zero_counts_as_an_observation_from_which_to_rise() -> None:
    pr = np.r_[3.0, 3.0, 3.0, 9.0, 9.0]
    assert detect([0, 1e5, 2e5, 4e5, 8e5], pr) == [4]


@pytest.mark.parametrize("cut", range(1, 40))
@pytest.mark.parametrize("octaves", [math.inf, 1.0])
def test_resumed_anywhere_the_alarms_are_the_same(cut: int, octaves: float) -> None:
    tokens = log_spaced(40)
    pr = np.r_[np.full(12, 3.0), np.full(8, 9.0), np.full(8, 3.0), np.full(12, 9.0)] * wobble(40)
    rule = RiseRule(octaves=octaves)
    whole = alarms(rule, tokens, pr)
    first = detector(rule)
    found = [i for i in range(cut) if first.update(tokens[i], pr[i]) == "up"]
    second = detector(rule)
    second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    found += [i for i in range(cut, 40) if second.update(tokens[i], pr[i]) == "up"]
    assert found == whole
    assert len(whole) == 2


def test_units_do_not_matter() -> None:
    """The rule is of ratios: tokens or steps, PR of a head of 16 or of 128."""
    pr = np.r_[np.full(20, 3.0), np.geomspace(3, 12, 10), np.full(10, 12.0)] * wobble(40)
    at = detect(log_spaced(40), pr)
    assert detect(log_spaced(40) / 4096, pr) == at
    assert detect(log_spaced(40), 3 * pr) == at


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="the published tables are not beside the repository")
def test_published_pythia_1b_l4h4_alarms_before_the_crossing() -> None:
    with open(PUBLISHED / "pythia1b_L4H4.csv") as file:
        rows = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
    tokens = [row["tokens_B"] * 1e9 for row in rows]
    crossing = next(row["tokens_B"] for row in rows if row["induction_selectivity"] >= 50)
    found = detect(tokens, [row["pr"] for row in rows])
    assert len(found) == 1
    assert tokens[found[0]] / 1e9 < crossing == 6.291


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"ratio": 1.0}, "ratio"),
        ({"floor": -1.0}, "floor"),
        ({"persistence": 0}, "persistence"),
        ({"history": 2}, "history"),
        ({"octaves": 0.0}, "octaves"),
        ({"rearm": 1.0}, "rearm"),
        ({"deviations": -0.1}, "deviations"),
        ({"noise": -0.1}, "noise"),
        ({"sensitivity": 3}, "sensitivity"),
    ],
)
def test_bad_parameters_are_named(parameters: dict[str, float], named: str) -> None:
    with pytest.raises(ThresholdError, match=named):
        detect([1, 2], [1, 2], **parameters)


def test_series_of_different_lengths_are_refused() -> None:
    with pytest.raises(ThresholdError, match="3 token counts for 2 values"):
        detect([1, 2, 3], [1, 2])


def test_level_rule() -> None:
    rule = LevelRule(bar=3.0)
    tokens = log_spaced(12)
    assert alarms(rule, tokens, [1, 1, 1, 4, 4, 4, 4, 4, 4, 4, 4, 4]) == [4]
    assert alarms(rule, tokens, [4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4]) == []  # there from the start
    assert alarms(rule, tokens, [1, 1, 9, 1, 1, 9, 1, 1, 1, 1, 1, 1]) == []  # spikes
    assert alarms(rule, tokens, [1, 4, 4, 2, 4, 4, 2, 2, 4, 4, 4, 4]) == [2]  # over half the bar: the same episode
    assert alarms(rule, tokens, [1, 4, 4, 1, 1, 4, 4, 4, 1, 1, 4, 4]) == [2, 6, 11]
    assert alarms(rule, tokens, [1, 4, math.nan, 4, 4, 4, 4, 4, 4, 4, 4, 4]) == [3]


# -- the share of first-token heads -----------------------------------------------------------------------------------


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="the published tables are not beside the repository")
def test_published_sinks_one_transition_two_ramps() -> None:
    """F2: OLMo 1B jumps between 117B and 264B tokens; Pythia 1B and OLMoE ramp."""
    with open(PUBLISHED / "bos_fraction.csv") as file:
        rows = list(csv.DictReader(file))
    found: dict[str, list[str]] = {}
    for model in ("pythia-1b", "olmo-1b", "olmoe-1b-7b"):
        machine = JumpDetector(JumpRule())
        found[model] = [
            row["tokens_B"]
            for row in rows
            if row["model"] == model
            and machine.update(float(row["tokens_B"]) * 1e9, float(row["fraction"]), 256)[0] == "up"
        ]
    assert found == {"pythia-1b": [], "olmo-1b": ["264"], "olmoe-1b-7b": []}


def test_a_jump_does_not_depend_on_how_often_one_looks() -> None:
    """The same transition within half a doubling, looked at every 4% and every 41%."""
    for spacing in (1.04, 2**0.5):
        tokens = log_spaced(int(8 / math.log2(spacing)) + 1, spacing)
        octaves = np.log2(tokens / tokens[0])
        share = 0.6 / (1 + np.exp(-20 * (octaves - 4)))
        machine = JumpDetector(JumpRule())
        found = [at for at, value in zip(octaves, share, strict=True) if machine.update(2.0**at, value, 96)[0] == "up"]
        assert len(found) == 1
        assert 3.9 < found[0] < 4.6


def test_a_ramp_is_no_jump_and_few_heads_are_none() -> None:
    tokens = log_spaced(200)
    machine = JumpDetector(JumpRule())
    assert not any(machine.update(at, share, 96)[0] for at, share in zip(tokens, np.linspace(0, 0.9, 200), strict=True))
    machine = JumpDetector(JumpRule())
    shares = np.r_[np.zeros(5), np.full(5, 0.5)]
    assert not any(
        machine.update(at, share, 4)[0] for at, share in zip(tokens[:10], shares, strict=True)
    )  # two of four


# -- whole observations ---------------------------------------------------------------------------------------------


def observation(step: int, count: int = 4, **series: object) -> Observation:
    """An observation of ``count`` heads of one layer; series are [count] or one number for all."""

    def spread(name: str, default: float) -> np.ndarray:
        return np.array(np.broadcast_to(np.asarray(series.get(name, default), dtype=float), (count,)))

    attention = spread("attention", 1 / T)
    heads = HeadTable(
        layer=np.full(count, 1),
        head=np.arange(count),
        pr=spread("pr", 3.0),
        pr_moment=spread("pr", 3.0),
        attention={name: attention if name == "induction" else np.full(count, 1 / T) for name in CLASSES},
        baselines={"others": np.full(count, 1 / T)},
        selectivity={name: attention * T if name == "induction" else np.ones(count) for name in CLASSES},
        head_class=np.array(series.get("head_class", ["none"] * count)),
        status=np.array(series.get("status", [OK] * count)),
        sink=np.zeros(count),
        extra={"content_share": spread("content", 0.0)} if "content" in series else {},
    )
    return Observation(
        step=step,
        tokens=float(step * 4096),
        probe="induction",
        fingerprint="0" * 64,
        heads=heads,
        metrics=ProbeMetrics(0.0, 0.0, 4.0, 0.0, 128),
        baseline="others",
    )


def steps(count: int, spacing: float = 1.04) -> list[int]:
    return [round(1000 * spacing**i) for i in range(count)]


def rising_run() -> list[Observation]:
    """Head 2 rises in PR at look 10 (from 0), in content at 12, in attention at 14, and crosses at 16."""
    run = []
    for i, step in enumerate(steps(24)):
        attention = np.full(4, 1 / T)
        attention[2] = 0.9 if i >= 16 else 0.06 if i >= 14 else 1 / T
        content = np.zeros(4)
        content[2] = 0.3 if i >= 12 else 0.01
        pr = np.full(4, 3.0)
        pr[2] = 9.0 if i >= 10 else 3.0
        run.append(observation(step, attention=attention, content=content, pr=pr))
    return run


def test_each_kind_alarms_once_for_the_head_that_rises() -> None:
    warning = EarlyWarning(T)
    found = [(i, event) for i, look in enumerate(rising_run()) for event in warning.update(look)]
    assert [(i, event.kind, event.direction) for i, event in found] == [
        (11, "pr_rise", "up"),
        (13, "content_rise", "up"),
        (15, "attention_rise", "up"),
        (16, "selectivity_crossing", "up"),
    ]
    for i, event in found:
        assert event.heads == ("L1H2",)
        assert event.step == steps(24)[i]
        assert event.tokens == event.step * 4096
        assert event.capability == event.probe == "induction"
        assert "L1H2" in event.text
    by_kind = {event.kind: event for _, event in found}
    assert by_kind["pr_rise"].value == 9.0
    assert by_kind["pr_rise"].detail["minima"] == pytest.approx({"L1H2": 3.0})
    assert by_kind["attention_rise"].value == pytest.approx(0.06 * T)
    assert by_kind["selectivity_crossing"].value == pytest.approx(0.9 * T)


def test_a_previous_token_head_below_the_last_layer_is_a_precursor() -> None:
    """The same rise in both layers: only the lower one has a head above it that could build on it."""
    parameters = WarningParameters(pr=None, crossing=None, sink=None)
    events, elsewhere = [], []
    warning, other = EarlyWarning(T, parameters), EarlyWarning(T, parameters, capability="duplicate_token")
    for i, step in enumerate(steps(20)):
        look = observation(step)
        previous = np.array([1.0, 6.0, 1.0, 6.0]) / T if i >= 10 else np.full(4, 1 / T)
        heads = replace(
            look.heads,
            layer=np.array([0, 0, 1, 1]),
            head=np.array([0, 1, 0, 1]),
            attention={**look.heads.attention, "previous_token": previous},
        )
        look = replace(look, heads=heads)
        events += warning.update(look)
        elsewhere += other.update(look)
    (event,) = events
    assert (event.kind, event.capability, event.heads) == ("attention_rise", "previous_token", ("L0H1",))
    assert event.value == pytest.approx(6.0)
    assert event.step == steps(20)[11]
    assert elsewhere == []  # induction alone is built on previous-token heads


def test_early_alarms_carry_their_measured_trust_and_facts_do_not() -> None:
    warning = EarlyWarning(T)
    events = {event.kind: event for look in rising_run() for event in warning.update(look)}
    assert events["pr_rise"].text.endswith(trust_note("pr_rise", "induction"))
    assert events["attention_rise"].text.endswith(trust_note("attention_rise", "induction"))
    assert "such alarms led to a circuit head" in trust_note("attention_rise", "previous_token")
    assert trust_note("attention_rise", "copying") == "Not measured for this capability."
    assert trust_note("circuit_formed", "induction") == trust_note("selectivity_crossing", "induction") == ""
    assert "such alarms" not in events["selectivity_crossing"].text


def test_the_notes_are_the_documents_numbers() -> None:
    """The page's table and the alarms must not part ways."""
    page = (Path(__file__).resolve().parents[1] / "docs" / "early_warning.md").read_text()
    measured = page.split("### Measured")[1].split("A second, different recipe")[0]
    rows = {
        ("pr_rise", "induction"): "`pr_rise`",
        ("content_rise", "induction"): "`content_rise`",
        ("attention_rise", "induction"): "`attention_rise`",
        ("attention_rise", "previous_token"): "`previous_token_rise`",
    }
    for (kind, capability), name in rows.items():
        (line,) = [line for line in measured.splitlines() if line.startswith(f"| {name} |")]
        right, alarms_ = line.split("|")[2].split("=")[0].strip().split("/")
        assert f"{right} of {alarms_} such" in trust_note(kind, capability)


def test_heads_that_rise_together_share_one_event() -> None:
    warning = EarlyWarning(T)
    events = []
    for i, step in enumerate(steps(20)):
        events += warning.update(observation(step, pr=[9, 9, 3, 12] if i >= 10 else 3.0))
    assert [event.heads for event in events] == [("L1H0", "L1H1", "L1H3")]
    assert events[0].value == 12.0


@pytest.mark.parametrize("cut", range(1, 24))
def test_a_resumed_run_raises_the_same_events(cut: int) -> None:
    run = rising_run()
    whole = EarlyWarning(T)
    expected = [event.key for look in run for event in whole.update(look)]
    first = EarlyWarning(T)
    found = [event.key for look in run[:cut] for event in first.update(look)]
    second = EarlyWarning(T)
    second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    # The resumed run passes the last two looks before the cut again.
    found += [event.key for look in run[max(0, cut - 2) :] for event in second.update(look)]
    assert found == expected


def test_marked_and_non_finite_observations_are_skipped() -> None:
    """The damaged looks carry a rise; without them there is none."""
    warning = EarlyWarning(T)
    events = []
    for i, step in enumerate(steps(20)):
        look = observation(step, pr=90.0 if i >= 10 else 3.0, attention=0.9 if i >= 10 else 1 / T)
        if i >= 10:
            look = replace(look, mark="duplicate of step 5") if i % 2 else replace(look, finite=False)
        events += warning.update(look)
    assert events == []


def test_dead_and_missing_heads_do_not_alarm() -> None:
    warning = EarlyWarning(T)
    events = []
    for i, step in enumerate(steps(20)):
        high = i >= 10
        status = [OK, DEAD, OK, "not_finite"] if high else [OK] * 4
        pr = [3.0, 9.0, math.nan, 9.0] if high else 3.0
        events += warning.update(
            observation(step, pr=pr, attention=[0, 0.9, 0.01, 0.9] if high else 0.01, status=status)
        )
    assert events == []


def test_a_member_of_the_circuit_raises_no_early_warning() -> None:
    warning = EarlyWarning(T, WarningParameters(crossing=None))
    events = []
    for look in rising_run():
        events += warning.update(look, circuit_members={Head(1, 2)})
    assert events == []


def test_pr_is_silent_once_the_circuit_has_a_member_unless_asked_otherwise() -> None:
    """The member is head 0, the riser head 2; attention alarms go on."""
    for until_formed, kinds in ((True, ["attention_rise"]), (False, ["pr_rise", "attention_rise"])):
        warning = EarlyWarning(T, WarningParameters(pr_until_formed=until_formed, content=None, crossing=None))
        found = [event.kind for look in rising_run() for event in warning.update(look, circuit_members={Head(1, 0)})]
        assert found == kinds


def gated_run(pr: np.ndarray, previous: np.ndarray) -> list[Observation]:
    """Two layers of two heads: L1H0 has this PR, L0H1 this attention on the previous token (in units of 1 / T)."""
    run = []
    for step, value, mass in zip(steps(len(pr)), pr, previous, strict=True):
        look = observation(step, pr=[3.0, 3.0, value, 3.0])
        attention = {**look.heads.attention, "previous_token": np.array([1.0, mass, 1.0, 1.0]) / T}
        heads = replace(look.heads, layer=np.array([0, 0, 1, 1]), head=np.array([0, 1, 0, 1]), attention=attention)
        run.append(replace(look, heads=heads))
    return run


ONLY_PR = WarningParameters(content=None, attention=None, precursor=None, crossing=None, sink=None)


def alarmed(run: list[Observation], warning: EarlyWarning) -> list[tuple[int, tuple[str, ...]]]:
    return [(i, event.heads) for i, look in enumerate(run) for event in warning.update(look)]


def test_pr_waits_for_the_gate_and_is_announced_when_it_opens() -> None:
    """PR is high from look 5 (alarm at 6), the gate opens at look 13, or was open before, or never opens."""
    pr = np.r_[np.full(5, 3.0), np.full(20, 9.0)]
    late = np.r_[np.full(12, 1.0), np.full(13, 2.5)]
    early = np.r_[np.full(2, 1.0), np.full(23, 2.5)]
    never = np.full(25, 1.0)
    assert alarmed(gated_run(pr, late), EarlyWarning(T, ONLY_PR)) == [(13, ("L1H0",))]
    assert alarmed(gated_run(pr, early), EarlyWarning(T, ONLY_PR)) == [(6, ("L1H0",))]
    assert alarmed(gated_run(pr, never), EarlyWarning(T, ONLY_PR)) == []
    ungated = replace(ONLY_PR, pr_gate=None)
    assert alarmed(gated_run(pr, never), EarlyWarning(T, ungated)) == [(6, ("L1H0",))]


def test_only_induction_is_gated() -> None:
    pr = np.r_[np.full(5, 3.0), np.full(20, 9.0)]
    warning = EarlyWarning(T, ONLY_PR, capability="duplicate_token")
    assert alarmed(gated_run(pr, np.full(25, 1.0)), warning) == [(6, ("L1H0",))]


def test_a_pr_that_fell_back_before_the_gate_opens_is_not_announced() -> None:
    pr = np.r_[np.full(5, 3.0), np.full(5, 9.0), np.full(15, 3.0)]
    late = np.r_[np.full(14, 1.0), np.full(11, 2.5)]
    assert alarmed(gated_run(pr, late), EarlyWarning(T, ONLY_PR)) == []


def test_an_episode_is_announced_once_however_often_the_gate_opens() -> None:
    pr = np.r_[np.full(5, 3.0), np.full(25, 9.0)]
    flicker = np.r_[np.full(8, 1.0), np.full(4, 2.5), np.full(4, 0.5), np.full(14, 2.5)]
    assert alarmed(gated_run(pr, flicker), EarlyWarning(T, ONLY_PR)) == [(9, ("L1H0",))]


def test_a_gate_that_opens_at_a_missing_value_is_announced_at_the_next_one() -> None:
    pr = np.r_[np.full(5, 3.0), np.full(20, 9.0)]
    pr[13] = math.nan
    late = np.r_[np.full(12, 1.0), np.full(13, 2.5)]
    assert alarmed(gated_run(pr, late), EarlyWarning(T, ONLY_PR)) == [(14, ("L1H0",))]


@pytest.mark.parametrize("cut", range(1, 25))
def test_a_gated_alarm_survives_a_resume(cut: int) -> None:
    run = gated_run(np.r_[np.full(5, 3.0), np.full(20, 9.0)], np.r_[np.full(12, 1.0), np.full(4, 2.5), np.full(9, 0.5)])
    first = EarlyWarning(T, ONLY_PR)
    found = alarmed(run[:cut], first)
    second = EarlyWarning(T, ONLY_PR)
    second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    found += [(i + cut, heads) for i, heads in alarmed(run[cut:], second)]
    assert found == [(13, ("L1H0",))]


def test_an_observation_without_companion_raises_no_content_alarm() -> None:
    warning = EarlyWarning(T)
    looks = [replace(look, heads=replace(look.heads, extra={})) for look in rising_run()]
    assert "content_rise" not in {event.kind for look in looks for event in warning.update(look)}


def test_a_switched_off_alarm_is_silent() -> None:
    warning = EarlyWarning(T, WarningParameters(pr=None, content=None, attention=None, crossing=None, sink=None))
    assert [event for look in rising_run() for event in warning.update(look)] == []


def test_crossings_have_hysteresis_and_a_floor_on_attention() -> None:
    """50x at T = 64 is 0.78 of the mass; 45x is inside the hysteresis, 30x is out."""
    warning = EarlyWarning(T, WarningParameters(pr=None, content=None, attention=None))
    looks = [1 / T, 51 / T, 45 / T, 51 / T, 30 / T, 45 / T, 51 / T]
    found = [
        (i, event.direction)
        for i, (step, mass) in enumerate(zip(steps(7), looks, strict=True))
        for event in warning.update(observation(step, attention=[mass, 0.01, 0.01, 0.01]))
        if event.kind == "selectivity_crossing"
    ]
    assert found == [(1, "up"), (4, "down"), (6, "up")]

    tiny = EarlyWarning(T, WarningParameters(pr=None, content=None, attention=None))
    events = []
    for i, step in enumerate(steps(7)):
        look = observation(step, attention=0.01)
        ratio = np.array([200.0, 1, 1, 1]) if i >= 3 else np.ones(4)  # 200x of next to nothing
        events += tiny.update(replace(look, heads=replace(look.heads, selectivity={"induction": ratio})))
    assert events == []


def test_a_head_in_the_circuit_from_the_start_does_not_cross() -> None:
    warning = EarlyWarning(T)
    assert [event for step in steps(5) for event in warning.update(observation(step, attention=0.9))] == []


def test_sink_transition_is_one_event_without_heads() -> None:
    warning = EarlyWarning(T)
    events = []
    for i, step in enumerate(steps(30)):
        classes = ["first_token"] * 3 + ["none"] if i >= 15 else ["none"] * 4
        events += warning.update(observation(step, head_class=classes))
    assert [(event.kind, event.heads, event.step, event.value) for event in events] == [
        ("sink_transition", (), steps(30)[15], 0.75)
    ]
    assert events[0].capability == "first_token"


def test_tokens_unknown_from_the_start_counts_by_steps_and_one_missing_count_is_skipped() -> None:
    unknown = EarlyWarning(T)
    events = [event for look in rising_run() for event in unknown.update(replace(look, tokens=None))]
    assert events[0].kind == "pr_rise"
    assert len(events) == 4

    holes = EarlyWarning(T)
    found = []
    for i, look in enumerate(rising_run()):
        found += [(i, event.kind) for event in holes.update(replace(look, tokens=None) if i == 11 else look)]
    assert found[0] == (12, "pr_rise")


def test_changed_parameters_start_that_alarm_anew_and_leave_the_others() -> None:
    run = rising_run()
    first = EarlyWarning(T)
    for look in run[:13]:
        first.update(look)
    second = EarlyWarning(T, WarningParameters(pr=RiseRule(ratio=2.0)))
    second.load_state_dict(first.state_dict())
    found = [event.kind for look in run[13:] for event in second.update(look)]
    assert found == ["content_rise", "attention_rise", "selectivity_crossing"]


def test_state_of_another_format_is_refused() -> None:
    with pytest.raises(ThresholdError, match="format 99"):
        EarlyWarning(T).load_state_dict({"format": 99})


def test_parameters_go_through_json() -> None:
    chosen = WarningParameters(
        pr=RiseRule(ratio=1.3), pr_until_formed=False, content=None, crossing=Crossing(selectivity=20.0)
    )
    assert WarningParameters.from_dict(json.loads(json.dumps(chosen.to_dict(), allow_nan=False))) == chosen
    with pytest.raises(ThresholdError, match="no alarm 'prr'"):
        WarningParameters.from_dict({"prr": {}})
    with pytest.raises(ThresholdError, match="no parameter 'sensitivity'"):
        WarningParameters.from_dict({"pr": {"sensitivity": 1}})


def test_unknown_signal_is_refused() -> None:
    with pytest.raises(ThresholdError, match="no signal 'entropy'"):
        signal("entropy", observation(1).heads, T)


def test_pr_over_null_is_missing_where_the_null_is() -> None:
    look = observation(1)
    assert np.isnan(signal("pr_over_null", look.heads, T)).all()
    heads = replace(look.heads, extra={"pr_null": np.array([1.5, 3.0, 0.0, math.nan])})
    with_null = signal("pr_over_null", heads, T)
    assert with_null[:2] == pytest.approx([2.0, 1.0])
    assert not np.isfinite(with_null[2:]).any()
