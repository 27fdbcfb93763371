"""The causal check: draws, the sequential rule, verdicts (recipe section 4)."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from spectral_monitor.anatomy import Anatomy
from spectral_monitor.capture import Ablation, Examples, Subject
from spectral_monitor.causal import (
    CAUSAL,
    INCONCLUSIVE,
    NO_CAPABILITY,
    NO_CONTROL,
    NOT_CAUSAL,
    CheckOptions,
    MatchedSets,
    SequentialRule,
    _Measured,
    check,
    confirmed,
    decide,
    has_capability,
    mean_interval,
)
from spectral_monitor.errors import CaptureError, ProbeError
from spectral_monitor.heads import Head
from spectral_monitor.probe import induction_probe
from tests.models import tiny_llama, trained_model

# -- draws ------------------------------------------------------------------------------------------------------------


class FakeBlock:
    def __init__(self, layer: int, heads: int) -> None:
        self.layer, self.heads = layer, heads


def anatomy(*heads: int) -> Anatomy:
    return Anatomy(tuple(FakeBlock(layer, count) for layer, count in enumerate(heads)))  # type: ignore[arg-type]


def test_draws_match_the_layers_avoid_the_circuit_and_are_distinct():
    circuit = {Head(0, 1), Head(0, 2), Head(2, 5)}
    sets = MatchedSets.of(circuit, anatomy(8, 8, 8))
    assert sets.count == math.comb(6, 2) * 7
    drawn = list(sets.draws(seed=1))
    assert len(drawn) == len(set(drawn)) == sets.count
    for heads in drawn:
        assert not heads & circuit
        assert sorted(head.layer for head in heads) == [0, 0, 2]


def test_few_sets_are_enumerated_whole():
    sets = MatchedSets.of({Head(0, 0)}, anatomy(4))
    assert set(sets.draws(0)) == {frozenset({Head(0, h)}) for h in (1, 2, 3)}


def test_many_sets_are_sampled_without_repeats_and_repeatably():
    sets = MatchedSets.of({Head(0, h) for h in range(8)}, anatomy(32))
    first = list(itertools.islice(sets.draws(7), 300))
    assert len(set(first)) == 300
    assert first == list(itertools.islice(sets.draws(7), 300))
    assert first != list(itertools.islice(sets.draws(8), 300))


def test_no_set_where_a_layer_has_too_few_other_heads():
    assert MatchedSets.of({Head(0, 0), Head(0, 1), Head(0, 2)}, anatomy(4)).count == 0
    assert MatchedSets.of({Head(0, 0)}, anatomy(3), unusable=[Head(0, 1), Head(0, 2)]).count == 0


# -- the sequential rule ----------------------------------------------------------------------------------------------


def run_rule(rule: SequentialRule, exceeds: list[bool]) -> tuple[bool, int]:
    exceedances = 0
    for number, hit in enumerate(exceeds, 1):
        exceedances += hit
        decision = rule.decision(number, exceedances)
        if decision is not None:
            return decision, number
    raise AssertionError("the rule must decide at its limit")


def test_a_clear_case_stops_at_the_first_look():
    rule = SequentialRule(0.05, 32, 199)
    assert run_rule(rule, [False] * 199) == (True, 32)


def test_a_clear_null_stops_early():
    rule = SequentialRule(0.05, 32, 199)
    assert run_rule(rule, [True] * 199) == (False, rule.most_exceedances + 1)


@pytest.mark.parametrize("limit", [19, 20, 32, 40, 70, 199, 500])
def test_the_level_holds_for_an_exchangeable_circuit(limit):
    """Under the null the circuit's rank among the draws is uniform: the exact chance of a rejection by simulation."""
    rng = np.random.default_rng(limit)
    rule = SequentialRule(0.05, 32, limit)
    trials, rejected = 20_000, 0
    for _ in range(trials):
        quantile = rng.random()
        rejected += run_rule(rule, list(rng.random(limit) < quantile))[0]
    assert rejected / trials <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / trials)


def test_too_few_sets_never_reject_and_are_all_drawn():
    rule = SequentialRule(0.05, 32, 10)
    assert run_rule(rule, [False] * 10) == (False, 10)


def test_rounds_end_on_the_looks():
    rule, draws, ends = SequentialRule(0.05, 32, 199), 0, []
    while draws < 199:
        draws += rule.next_round(draws)
        ends.append(draws)
    assert 32 in ends and ends[-1] == 199


# -- verdicts ---------------------------------------------------------------------------------------------------------

ROWS = 100


def examples(logprob: float, noise: float = 0.1, advantage: float = 3.0, seed: int = 0) -> Examples:
    rng = np.random.default_rng(seed)
    values = logprob + noise * rng.standard_normal(ROWS)
    return Examples(values, values, np.zeros(ROWS, dtype=np.int64), advantage + rng.standard_normal(ROWS))


def measured(**changes) -> _Measured:
    given = {
        "intact": examples(-1.0, seed=1),
        "circuit": examples(-4.0, seed=2),
        "upper": examples(-4.2, seed=3),
        "random": [examples(-1.0, seed=10 + n) for n in range(32)],
        "exceedances": 0,
        "rejected": True,
        "distinct": 500,
        "ended": "",
    }
    return _Measured(**{**given, **changes})


def test_verdict_causal():
    verdict, reason = decide(measured(), CheckOptions())
    assert verdict == CAUSAL
    assert "0 of 32 matched random sets" in reason


def test_verdict_causal_needs_an_upper_bound_that_holds():
    verdict, reason = decide(measured(upper=examples(-2.0)), CheckOptions())
    assert verdict == INCONCLUSIVE and "upper bound" in reason
    # Both on the same floor: the upper bound may be a little less damaging.
    assert decide(measured(upper=examples(-3.9)), CheckOptions())[0] == CAUSAL


def test_verdict_not_causal_without_damage():
    assert decide(measured(circuit=examples(-1.0, seed=2)), CheckOptions())[0] == NOT_CAUSAL
    harmless = measured(circuit=examples(-1.0, seed=2), rejected=False, exceedances=5)
    assert decide(harmless, CheckOptions())[0] == NOT_CAUSAL


def test_verdict_inconclusive_when_too_few_draws_were_allowed():
    options = CheckOptions(first_look=8, max_draws=8)
    draws = [examples(-1.0, seed=10 + n) for n in range(8)]
    verdict, reason = decide(measured(random=draws, rejected=False), options)
    assert verdict == INCONCLUSIVE and "no p-value below 0.111" in reason
    assert decide(measured(random=draws, rejected=False, exceedances=4), options)[0] == NOT_CAUSAL


def test_verdict_not_causal_when_a_few_draws_do_as_much():
    verdict, reason = decide(measured(rejected=False, exceedances=4), CheckOptions())
    assert verdict == NOT_CAUSAL and "4 of 32" in reason


def test_verdict_inconclusive_when_the_control_does_as_much():
    control = [examples(-3.8, seed=10 + n) for n in range(8)]
    verdict, reason = decide(measured(rejected=False, exceedances=3, random=control), CheckOptions())
    assert verdict == INCONCLUSIVE and "control damages the model as much" in reason


def test_verdict_inconclusive_with_too_few_sets():
    few = measured(rejected=False, distinct=10, random=[examples(-1.0, seed=10 + n) for n in range(10)])
    verdict, reason = decide(few, CheckOptions())
    assert verdict == INCONCLUSIVE and "only 10 distinct matched sets" in reason


def test_verdict_no_control_and_no_capability():
    assert decide(measured(distinct=0, random=[], rejected=False), CheckOptions())[0] == NO_CONTROL
    helpless = measured(intact=examples(-1.0, advantage=-0.1), random=[], rejected=False)
    assert decide(helpless, CheckOptions())[0] == NO_CAPABILITY


def test_verdict_on_values_that_are_not_finite():
    broken = examples(-1.0)
    broken.logprob[3] = np.nan
    assert decide(measured(circuit=broken), CheckOptions())[0] == INCONCLUSIVE


def test_confirmed_needs_both_modes(trained_verdict):
    assert confirmed(trained_verdict["both"])
    assert not confirmed(trained_verdict["both"][:1])


def test_interval_and_capability():
    values = np.random.default_rng(0).standard_normal(400) + 0.5
    low, high = mean_interval(values, 0.95)
    assert low < values.mean() < high and high - low == pytest.approx(4 * values.std(ddof=1) / 20, rel=0.03)
    assert all(math.isnan(bound) for bound in mean_interval(values[:1], 0.95))
    assert has_capability(examples(-1.0, advantage=0.6), 0.01)
    assert not has_capability(examples(-1.0, advantage=0.0), 0.01)


@pytest.mark.parametrize("wrong", [{"alpha": 0}, {"alpha": 1.5}, {"first_look": 0}, {"first_look": 9, "max_draws": 8}])
def test_senseless_options_are_refused(wrong):
    with pytest.raises(ValueError):
        CheckOptions(**wrong)


# -- on models --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained():
    model = trained_model()
    probe = induction_probe(64, 64, vocabulary=64)
    return Subject(model, probe), probe, [Head(1, head) for head in model.circuit_heads]


@pytest.fixture(scope="module")
def trained_verdict(trained):
    subject, probe, circuit = trained
    both = [check(subject, probe, circuit, mode=mode, batch_size=64) for mode in ("zero", "mean")]
    return {"both": both, "zero": both[0]}


def test_a_real_circuit_is_causal_and_its_control_leaves_accuracy_where_it_was(trained_verdict):
    verdict = trained_verdict["zero"]
    assert verdict.verdict == CAUSAL, verdict.reason
    intact, damaged = verdict.condition("baseline"), verdict.condition("circuit")
    assert intact.top1 > 0.8 and damaged.top1 < 0.2
    assert np.median([draw.top1 for draw in verdict.random]) > intact.top1 - 0.1
    assert verdict.draws >= 20 and len({draw.heads for draw in verdict.random}) == verdict.draws
    assert verdict.effect_ci[0] > 0 and verdict.excess_ci[0] > 0


def test_all_heads_of_a_layer_have_no_control(trained):
    subject, probe, _ = trained
    verdict = check(subject, probe, [Head(1, head) for head in range(12)], batch_size=64)
    assert verdict.verdict == NO_CONTROL and verdict.draws == 0 and math.isnan(verdict.p_value)


def test_an_untrained_model_has_no_capability():
    torch.manual_seed(0)
    model, probe = tiny_llama(), induction_probe(64, 32, vocabulary=100)
    verdict = check(Subject(model, probe), probe, [Head(1, 0)])
    assert verdict.verdict == NO_CAPABILITY and verdict.draws == 0


def test_the_time_budget_ends_the_draws(trained):
    subject, probe, circuit = trained
    verdict = check(subject, probe, circuit, options=CheckOptions(max_seconds=0.0), batch_size=64)
    assert verdict.verdict == INCONCLUSIVE and "time budget" in verdict.reason


def test_the_same_seed_gives_the_same_sets(trained, trained_verdict):
    subject, probe, circuit = trained
    again = check(subject, probe, circuit, batch_size=64)
    assert again.random == trained_verdict["zero"].random


def test_replaying_the_front_layers_equals_running_them(trained):
    subject, probe, circuit = trained
    condition = Ablation("circuit", frozenset(circuit))
    fast = subject.run_conditions(probe, [condition], batch_size=64)[0]
    stack = subject.anatomy.stack
    try:
        object.__setattr__(subject.anatomy, "stack", ())
        slow = subject.run_conditions(probe, [condition], batch_size=64)[0]
    finally:
        object.__setattr__(subject.anatomy, "stack", stack)
    assert stack and (fast.logprob == slow.logprob).all()


def test_mean_ablation_of_unequal_batches_is_the_mean_over_their_union(trained):
    subject, probe, _ = trained
    whole = subject.mean_outputs(probe, [1], batch_size=64)[1]
    parts = subject.mean_outputs(probe, [1], batch_size=25)[1]
    assert torch.allclose(whole, parts, rtol=1e-6, atol=1e-9)


def test_mean_ablation_of_one_row_is_refused(trained):
    subject, probe, circuit = trained
    with pytest.raises(ProbeError, match="at least two probe rows"):
        check(subject, probe.take(slice(0, 1)), circuit, mode="mean")


def test_a_head_that_is_not_there_is_refused(trained):
    subject, probe, _ = trained
    with pytest.raises(CaptureError, match="L1H99"):
        check(subject, probe, [Head(1, 99)])
    with pytest.raises(CaptureError, match="layer 7"):
        check(subject, probe, [Head(7, 0)])


def test_a_constant_head_matters_under_zero_ablation_alone():
    """The value put in place of the head decides the answer: the mean of a constant is itself."""
    torch.manual_seed(1)
    model = tiny_llama(attention_bias=True)
    value = model.model.layers[1].self_attn.v_proj
    with torch.no_grad():
        value.weight[:16] = 0
        value.bias[:16] = 1.0
    probe = induction_probe(16, 32, vocabulary=100)
    subject = Subject(model, probe)
    condition = [Ablation("constant", frozenset({Head(1, 0), Head(1, 1)}))]
    intact = subject.run_conditions(probe, [Ablation("baseline")])[0]
    zero = subject.run_conditions(probe, condition)[0]
    mean = subject.run_conditions(probe, condition, means=subject.mean_outputs(probe, [1]))[0]
    assert np.abs(zero.logprob - intact.logprob).max() > 1e-4
    assert np.abs(mean.logprob - intact.logprob).max() < 1e-5


@pytest.mark.slow
def test_false_positive_rate_of_random_sets_of_a_trained_model(trained):
    """200 checks of random sets of heads outside the circuit: ``causal`` at no more than the stated level."""
    subject, _, circuit = trained
    rng = np.random.default_rng(2026)
    outside = [Head(1, head) for head in range(12) if Head(1, head) not in circuit]
    options = CheckOptions(first_look=19, max_draws=19)
    causal = 0
    for number in range(200):
        probe = induction_probe(24, 64, seed=1000 + number, vocabulary=64)
        heads = [outside[index] for index in rng.choice(len(outside), 3, replace=False)]
        causal += check(subject, probe, heads, options=options, batch_size=24).verdict == CAUSAL
    assert causal / 200 <= 0.05
