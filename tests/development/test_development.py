from __future__ import annotations

import json
import math
import time
from pathlib import Path

import numpy as np
import pytest

from spectral_monitor.development import Bars, develop, develop_series, series_of
from spectral_monitor.development.identity import overlap
from spectral_monitor.development.lead import rises
from spectral_monitor.development.milestones import onset
from spectral_monitor.development.phases import Phase, phase_changes
from spectral_monitor.development.trajectories import precision_at_k, rank
from spectral_monitor.errors import RecordError
from spectral_monitor.heads import Head
from spectral_monitor.observation import Observation
from spectral_monitor.record import RunRecord, dumps

from .synthetic import observation


def forming() -> list[Observation]:
    """Eight heads; L1H0 rises in PR at step 4 and crosses at 16, L1H1 at 8 and 8, L1H2 rises and never joins."""
    pr = {1: [2, 2, 2], 2: [1.2, 1.2, 2], 4: [6, 1.3, 2], 8: [7, 6, 9], 16: [8, 7, 9], 32: [8, 7, 9]}
    bar = {1: [1, 1], 2: [1, 1], 4: [2, 3], 8: [10, 60], 16: [70, 80], 32: [90, 90]}
    result = []
    for step in pr:
        ranks, ratios = np.full(8, 2.0), np.ones(8)
        ranks[4:7], ratios[4:6] = pr[step], bar[step]
        result.append(observation(step, pr=ranks, selectivity={"induction": ratios}))
    return result


def test_members_follow_the_screen() -> None:
    first = observation(
        1,
        selectivity={"induction": [60, 60, 49, 60, 1, 1, 1, 1], "first_token": [1, 300, 1, 1, 1, 1, 1, 1]},
        attention={"induction": [0.5, 0.5, 0.5, 0.01, 0.1, 0.1, 0.1, 0.1]},
    )
    second = observation(
        2, selectivity={"previous_token": [150, 99, 150, 1, 1, 1, 1, 1], "self": [1, 1, 200] + [1] * 5}
    )
    series = series_of([first, second])
    assert series.circuit("induction", 0) == [Head(0, 0), Head(0, 1)]
    assert series.circuit("previous_token", 1) == [Head(0, 0)]
    assert series.circuit("no such class", 0) == []


def test_an_onset_is_an_interval() -> None:
    series = series_of(forming())
    between = onset(series, series.steps >= 8)
    assert (between.after_step, between.by_step, between.after_tokens, between.by_tokens) == (4, 8, 400.0, 800.0)
    assert onset(series, series.steps >= 1).status == "at or before"
    never = onset(series, series.steps > 99)
    assert never.status == "not seen" and never.by_tokens is None and never.after_tokens is None


def test_marked_and_broken_observations_widen_the_interval() -> None:
    looks = forming()
    looks[3] = observation(8, selectivity={"induction": 90.0}, mark="duplicate of step32")
    looks[2] = observation(4, selectivity={"induction": 90.0}, finite=False)
    series = series_of(looks)
    found = onset(series, series.members("induction").sum(axis=1) >= 2)
    assert (found.after_step, found.by_step) == (2, 16)
    assert any("duplicate of step32" in note for note in series.notes)


def test_lead_and_its_base_rate() -> None:
    found = develop_series(series_of(forming()))
    first, second = found.leads
    assert (first.head, first.rise.by_step, first.crossing.by_step) == (Head(1, 0), 4, 16)
    assert (first.ratio, first.low, first.high, first.observations) == (4.0, 2.0, 8.0, 2)
    assert first.resolved
    assert (second.rise.by_step, second.crossing.by_step, second.ratio, second.observations) == (8, 8, 1.0, 0)
    assert not second.resolved
    base = found.base_rate
    # median crossing at 1,200 tokens; of six outside heads only L1H2 rises (at step 8 = 800 tokens)
    assert (base.heads, base.rose, base.rose_before) == (6, 1, 1)
    assert base.share_before == pytest.approx(1 / 6)
    assert base.circuit_share_before == 1.0


def test_a_rise_needs_an_earlier_minimum() -> None:
    series = series_of(
        [observation(1, pr=50.0), observation(2, pr=1.5), observation(3, pr=math.nan), observation(4, pr=5)]
    )
    assert rises(series)[:, 0].tolist() == [False, False, False, True]


def test_recall_is_first_reached_and_kept_apart_from_kept() -> None:
    ratios = {1: [60, 1, 1], 2: [60, 60, 1], 4: [1, 1, 1], 8: [60, 60, 60]}
    looks = [observation(step, per_layer=3, layers=1, selectivity={"induction": bar}) for step, bar in ratios.items()]
    levels = develop_series(series_of(looks)).recall["induction"].levels
    assert levels["33"].onset.by_step == 1 and levels["33"].holds_from.by_step == 8
    assert levels["67"].onset.by_step == 2 and levels["67"].fraction == 2 / 8
    assert levels["100"].onset.by_step == 8


def test_precision_at_k_and_ranking() -> None:
    series = series_of(forming())
    ranking = rank(series)
    assert ranking.top(series.heads, 1) == [Head(1, 2)] or ranking.top(series.heads, 1) == [Head(1, 0)]
    wanted = np.isin(np.arange(8), [4, 5, 6])
    entries = precision_at_k(ranking, wanted, (3, 8, 20))
    assert [(entry.k, entry.hits) for entry in entries] == [(3, 3), (8, 3)]
    assert entries[0].base_rate == pytest.approx(3 / 8)
    assert rank(series_of(forming()[:1])).score == "pr"


def test_jaccard_against_chance_agrees_with_simulation() -> None:
    heads = [Head(layer, head) for layer in range(3) for head in range(6)]
    a, b = {Head(0, 1), Head(1, 2), Head(1, 3)}, {Head(1, 3), Head(1, 4), Head(2, 0)}
    found = overlap(a, b, heads)
    assert (found.shared, found.jaccard) == (1, pytest.approx(1 / 5))
    generator = np.random.default_rng(0)
    draws = []
    for _ in range(20_000):
        layer1 = {Head(1, int(h)) for h in generator.choice(6, 2, replace=False)}
        drawn = layer1 | {Head(2, int(generator.integers(6)))}
        draws.append(len(a & drawn))
    shared = np.array(draws)
    assert found.expected == pytest.approx((shared / (6 - shared)).mean(), abs=0.005)
    assert found.p_value == pytest.approx((shared >= 1).mean(), abs=0.01)
    assert math.isnan(overlap([], [], heads).jaccard)


def test_phases_compare_the_ends() -> None:
    looks = forming()
    change = phase_changes(series_of(looks), "induction", [Phase.parse("books@10")])[0]
    assert (change.earlier, change.later, change.earlier_step, change.later_step) == ("before books", "books", 8, 32)
    assert change.kept == (Head(1, 1),) and change.gained == (Head(1, 0),) and change.overlap.jaccard == 0.5
    with pytest.raises(RecordError, match="holds no usable observation"):
        phase_changes(series_of(looks), "induction", [Phase("late", 100)])
    with pytest.raises(RecordError, match="NAME@STEP"):
        Phase.parse("books")


def test_the_circuit_is_compared_with_the_observation_before() -> None:
    steps = develop_series(series_of(forming())).stability
    assert steps[:3] == [None, None, None]
    assert steps[3] is not None and (steps[3].size_a, steps[3].size_b, steps[3].jaccard) == (0, 1, 0.0)
    assert steps[4] is not None and steps[4].jaccard == 0.5 and steps[5] is not None and steps[5].jaccard == 1.0
    # one head, and two of the same layer's four: by chance the one is among them in half of the cases
    assert steps[4].expected == 0.25


def test_unknown_tokens_fall_back_to_steps() -> None:
    looks = [observation(step, tokens=math.nan) for step in (1, 2, 4)]
    looks = [Observation(**{**vars(look), "tokens": None}) for look in looks]
    found = develop_series(series_of(looks))
    assert found.series.axis == "step"
    assert found.to_json()["shape"]["by_tokens"] is None


def test_one_observation_is_analysed_and_says_what_it_cannot_tell() -> None:
    found = develop_series(series_of(forming()[-1:]))
    assert found.shape.kind == "undetermined" and found.rankings["integral"].score == "pr"
    plain = json.loads(dumps(found.to_json()))
    assert plain["milestones"]["induction_heads>=3"]["status"] == "not seen"
    assert plain["lead"]["L1H0"]["ratio"] is None


def test_what_cannot_form_a_series_is_one_sentence() -> None:
    with pytest.raises(RecordError, match="no observation"):
        series_of([])
    with pytest.raises(RecordError, match="several probes"):
        series_of([observation(1), observation(2, probe="other")])
    with pytest.raises(RecordError, match="different probe batches"):
        series_of([observation(1), observation(2, fingerprint="0" * 64)])
    with pytest.raises(RecordError, match="different baselines"):
        series_of([observation(1), observation(2, baseline="sampled")])
    with pytest.raises(RecordError, match="tokens fall"):
        series_of([observation(1, tokens=10.0), observation(2, tokens=5.0)])
    with pytest.raises(RecordError, match="marked or not finite"):
        series_of([observation(1, finite=False)])


def test_bars_come_from_the_run() -> None:
    assert Bars.of_run({"config": {"thresholds": {"member": 20.0}}}) == Bars(member=20.0)
    assert Bars.of_run({}) == Bars()


def test_an_empty_record_is_one_sentence(tmp_path: Path) -> None:
    with (
        RunRecord.create(tmp_path / "run", {"probes": {}}) as record,
        pytest.raises(RecordError, match="no observation"),
    ):
        develop(record)


def test_two_probes_need_a_choice(tmp_path: Path) -> None:
    with RunRecord.create(tmp_path / "run", {"probes": {}}) as record:
        record.append(observation(1, probe="keys"))
        record.append(observation(1, probe="words"))
        with pytest.raises(RecordError, match="--probe"):
            develop(record)
        assert develop(record, probe="keys").series.probe == "keys"
        with pytest.raises(RecordError, match="keys, words"):
            develop(record, probe="none such")


@pytest.mark.slow
def test_a_large_record_is_analysed_whole(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    with RunRecord.create(tmp_path / "run", {"probes": {}}) as record:
        for index in range(154):
            ratios = {"induction": generator.gamma(1, 5, size=1024), "first_token": generator.gamma(1, index, 1024)}
            record.append(
                observation(
                    1000 * index, layers=32, per_layer=32, pr=generator.uniform(1, 40, 1024), selectivity=ratios
                )
            )
    started = time.perf_counter()
    found = develop(RunRecord.open(tmp_path / "run"))
    print(f"154 observations x 1,024 heads analysed in {time.perf_counter() - started:.2f} s")
    assert len(found.to_json()["integral"]) == 1024
