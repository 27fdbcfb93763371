"""The causal check: do these heads do the work, and not just any heads of these layers? (recipe section 4)

The circuit is ablated and compared with matched random sets: the same number of heads in the same layers, none of the
circuit's. The randomisation p-value is the share of sets, the circuit counted among them, that damage the target
log-probability at least as much as the circuit does.

The sequential rule. Draws come in rounds. After ``first_look`` draws the check ends with a rejection if no draw did as
much damage (p = 1 / (first_look + 1)); it ends without one as soon as so many draws have done so that no rejection is
possible any more; otherwise it goes on to ``max_draws`` and rejects at what is left of the level. By the union bound
the chance of a false rejection is at most ``alpha`` over both looks. Stopping for futility cannot raise it.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from spectral_monitor.anatomy import Anatomy
from spectral_monitor.capture import Ablation, Examples, Subject
from spectral_monitor.heads import Head, names
from spectral_monitor.observation import ConditionMetrics, FloatArray, Verdict
from spectral_monitor.prefix import PrefixMemory
from spectral_monitor.probe import ProbeBatch
from spectral_monitor.ranks import Reduction

CAUSAL, NOT_CAUSAL, INCONCLUSIVE = "causal", "not causal", "inconclusive"
NO_CAPABILITY, NO_CONTROL = "no capability", "no control possible"


@dataclass(frozen=True)
class CheckOptions:
    """How a causal check is done.

    Attributes:
        alpha: overall level of the randomisation test, both looks included.
        first_look, max_draws: matched-random draws before the first decision, and at most.
        confidence: of the intervals over probe rows.
        seed: of the draws; the same seed gives the same sets for the same circuit.
        max_seconds: no further round is begun after this time; None: no limit.
        upper_tolerance: the upper bound must do at least this share of the circuit's damage. Below 1, because both may
            sit on the same floor and then differ by noise only.
        capability_alpha: level of the one-sided test that the intact model does the task at all.
    """

    alpha: float = 0.05
    first_look: int = 32
    max_draws: int = 199
    confidence: float = 0.95
    seed: int = 0
    max_seconds: float | None = None
    upper_tolerance: float = 0.9
    capability_alpha: float = 0.01

    def __post_init__(self) -> None:
        if not 0 < self.alpha < 1 or not 0 < self.confidence < 1 or not 0 < self.capability_alpha < 1:
            raise ValueError("alpha, capability_alpha and confidence are probabilities between 0 and 1")
        if not 1 <= self.first_look <= self.max_draws:
            raise ValueError(f"draws: 1 <= first_look <= max_draws, not {self.first_look} and {self.max_draws}")


# -- matched random sets ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MatchedSets:
    """The sets from which matched-random draws come.

    ``free`` holds for each of the circuit's layers its other heads, ``wanted`` how many are needed there.
    """

    free: tuple[tuple[Head, ...], ...]
    wanted: tuple[int, ...]

    @classmethod
    def of(cls, circuit: Iterable[Head], anatomy: Anatomy, unusable: Iterable[Head] = ()) -> MatchedSets:
        """Matched sets of a circuit; ``unusable`` heads (out of reach, dead) are never drawn."""
        circuit, unusable = frozenset(circuit), frozenset(unusable)
        layers = sorted({head.layer for head in circuit})
        free = tuple(
            tuple(
                head
                for number in range(anatomy.block(layer).heads)
                if (head := Head(layer, number)) not in circuit and head not in unusable
            )
            for layer in layers
        )
        return cls(free, tuple(sum(head.layer == layer for head in circuit) for layer in layers))

    @property
    def count(self) -> int:
        """Number of distinct sets; 0 where a layer has too few other heads."""
        return math.prod(math.comb(len(free), wanted) for free, wanted in zip(self.free, self.wanted, strict=True))

    def draws(self, seed: int) -> Iterator[frozenset[Head]]:
        """Distinct sets in random order, until none is left. Few sets are enumerated and shuffled."""
        rng = np.random.default_rng(seed)
        if self.count <= 10_000:
            choices = [
                itertools.combinations(free, wanted) for free, wanted in zip(self.free, self.wanted, strict=True)
            ]
            every = [frozenset(itertools.chain(*parts)) for parts in itertools.product(*choices)]
            for index in rng.permutation(len(every)):
                yield every[index]
            return
        seen: set[frozenset[Head]] = set()
        while len(seen) < self.count:
            drawn = frozenset(
                free[index]
                for free, wanted in zip(self.free, self.wanted, strict=True)
                for index in rng.choice(len(free), wanted, replace=False)
            )
            if drawn not in seen:
                seen.add(drawn)
                yield drawn


# -- the sequential rule ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SequentialRule:
    """When to stop drawing (module docstring). ``limit`` draws exist or are allowed at most."""

    alpha: float
    first_look: int
    limit: int

    @property
    def first_rejects(self) -> bool:
        """Whether there is a first look: it must fit the level and leave the last look some room to reject.

        With fewer draws to make, one look at the end has more power.
        """
        left = self.alpha - 1 / (self.first_look + 1)
        return self.first_look < self.limit and left > 0 and _most_exceedances(left, self.limit) >= 1

    @property
    def final_level(self) -> float:
        """Level that is left for the last look."""
        return self.alpha - 1 / (self.first_look + 1) if self.first_rejects else self.alpha

    @property
    def most_exceedances(self) -> int:
        """Most exceedances with which the last look still rejects; -1 where it never can."""
        return _most_exceedances(self.final_level, self.limit)

    def decision(self, draws: int, exceedances: int) -> bool | None:
        """True: rejected (the circuit is special); False: no rejection possible any more; None: go on.

        Where no number of draws could ever reject, all sets are drawn, so that the reader sees them.
        """
        if self.first_rejects and draws == self.first_look and exceedances == 0:
            return True
        if draws >= self.limit:
            return exceedances <= self.most_exceedances
        if exceedances > self.most_exceedances >= 0:
            return False
        return None

    def next_round(self, draws: int) -> int:
        """How many draws to make before deciding again: rounds grow, since each may have to run the intact model once
        more, and end on the looks."""
        goal = self.first_look if self.first_rejects and draws < self.first_look else self.limit
        return min(max(8, 3 * draws), goal - draws)


def _most_exceedances(level: float, limit: int) -> int:
    return math.floor(level * (limit + 1) + 1e-12) - 1


# -- statistics over probe rows ---------------------------------------------------------------------------------------


def mean_interval(values: FloatArray, confidence: float) -> tuple[float, float]:
    """Two-sided t interval of the mean of per-row values [N]; (nan, nan) for fewer than two rows."""
    from scipy import stats

    count = len(values)
    if count < 2 or not np.isfinite(values).all():
        return math.nan, math.nan
    half = float(stats.t.ppf(0.5 + confidence / 2, count - 1)) * float(values.std(ddof=1)) / math.sqrt(count)
    mean = float(values.mean())
    return mean - half, mean + half


def has_capability(intact: Examples, alpha: float) -> bool:
    """Whether the intact model does the task at all: is the target more likely than the row's other tokens?

    A one-sided t-test over rows of the target's log-probability minus the mean log-probability of the other tokens of
    its row. A model that merely prefers tokens of its context does not pass.
    """
    from scipy import stats

    values = intact.advantage
    if len(values) < 2 or not np.isfinite(values).all():
        return False
    if values.std(ddof=1) == 0:
        return bool(values.mean() > 0)
    return bool(stats.ttest_1samp(values, 0.0, alternative="greater").pvalue < alpha)


def metrics_of(name: str, heads: Iterable[Head], examples: Examples) -> ConditionMetrics:
    """Means over probe rows."""
    return ConditionMetrics(
        name=name,
        heads=tuple(names(heads)),
        logprob=float(examples.logprob.mean()),
        top1=float(examples.top(1).mean()),
        top5=float(examples.top(5).mean()),
        target_logit=float(examples.logit.mean()),
    )


# -- the check --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Measured:
    """Everything the verdict is decided on; arrays are [N] target log-probabilities."""

    intact: Examples
    circuit: Examples
    upper: Examples
    random: list[Examples]
    exceedances: int
    rejected: bool
    distinct: int
    ended: str


def check(
    subject: Subject,
    probe: ProbeBatch,
    circuit: Iterable[Head],
    *,
    capability: str | None = None,
    mode: str = "zero",
    options: CheckOptions | None = None,
    unusable: Iterable[Head] = (),
    batch_size: int = 16,
    reduce: Reduction | None = None,
    step: int = 0,
    tokens: float | None = None,
    label: str | None = None,
    progress: Callable[[str, int], None] | None = None,
) -> Verdict:
    """Ablate ``circuit`` and matched random sets, and decide (recipe section 4).

    Args:
        subject: the model. probe: its task is what must suffer. circuit: heads to test, at least one.
        capability: name for the verdict; default the probe's own.
        mode: ``"zero"`` or ``"mean"`` (mean over all probe rows, position by position, from the intact model).
        unusable: heads never drawn as control.
        progress: called with what is running and the number of ablations done.

    Raises:
        CaptureError: a head does not exist. ProbeError: mean ablation with a single row. ValueError: unknown mode.
    """
    started = time.monotonic()
    options = options or CheckOptions()
    heads = frozenset(circuit)
    if not heads:
        raise ValueError("the causal check needs at least one head")
    if mode not in ("zero", "mean"):
        raise ValueError(f"unknown ablation mode {mode!r}: use 'zero' or 'mean'")
    reduce = reduce or Reduction()
    layers = sorted({head.layer for head in heads})
    everything = frozenset(Head(layer, head) for layer in layers for head in range(subject.anatomy.block(layer).heads))
    means = subject.mean_outputs(probe, layers, batch_size, reduce) if mode == "mean" else None
    memory = PrefixMemory() if reduce.alone else None
    done = 0

    def run(conditions: Sequence[Ablation]) -> list[Examples]:
        nonlocal done
        results = subject.run_conditions(probe, conditions, batch_size, means, reduce, memory=memory)
        done += len(conditions)
        if progress is not None:
            progress(conditions[-1].name, done)
        return results

    sets = MatchedSets.of(heads, subject.anatomy, unusable)
    limit = min(sets.count, options.max_draws)
    rule = SequentialRule(options.alpha, options.first_look, limit)
    draws = sets.draws(options.seed)
    intact, damaged, upper = run(
        [Ablation("baseline"), Ablation("circuit", heads), Ablation("upper bound", everything)]
    )
    random_sets: list[frozenset[Head]] = []
    random: list[Examples] = []
    exceedances, rejected, ended = 0, False, ""
    if limit and has_capability(intact, options.capability_alpha):
        decision: bool | None = None
        while decision is None:
            late = options.max_seconds is not None and time.monotonic() - started > options.max_seconds
            if reduce.broadcast(late):
                ended = f"the time budget of {options.max_seconds:g} s ended after {len(random)} draws"
                break
            new = list(itertools.islice(draws, rule.next_round(len(random))))
            results = run([Ablation(f"matched random {len(random) + n + 1}", s) for n, s in enumerate(new)])
            for drawn, result in zip(new, results, strict=True):
                random_sets.append(drawn)
                random.append(result)
                exceedances += bool(result.logprob.mean() <= damaged.logprob.mean())
                decision = rule.decision(len(random), exceedances)
                if decision is not None:
                    break
        rejected = bool(decision)
    measured = _Measured(intact, damaged, upper, random, exceedances, rejected, sets.count, ended)
    verdict, reason = decide(measured, options)
    effect = intact.logprob - damaged.logprob
    excess = np.mean([r.logprob for r in random], axis=0) - damaged.logprob if random else np.full(probe.rows, np.nan)
    return Verdict(
        step=step,
        tokens=tokens,
        probe=probe.name,
        capability=capability or probe.capability,
        heads=tuple(names(heads)),
        mode=mode,
        verdict=verdict,
        reason=reason,
        p_value=(exceedances + 1) / (len(random) + 1) if random else math.nan,
        level=options.alpha,
        draws=len(random),
        distinct_draws=sets.count,
        seed=options.seed,
        effect=float(effect.mean()),
        effect_ci=mean_interval(effect, options.confidence),
        excess=float(excess.mean()),
        excess_ci=mean_interval(excess, options.confidence),
        conditions=(
            metrics_of("baseline", (), intact),
            metrics_of("circuit", heads, damaged),
            metrics_of("upper bound", everything, upper),
        ),
        random=tuple(
            metrics_of(f"matched random {number}", drawn, result)
            for number, (drawn, result) in enumerate(zip(random_sets, random, strict=True), 1)
        ),
        rows=probe.rows,
        seconds=time.monotonic() - started,
        label=label,
    )


def decide(measured: _Measured, options: CheckOptions) -> tuple[str, str]:
    """The verdict and one sentence of reason (recipe section 4, "Verdict")."""
    finite = all(np.isfinite(e.logprob).all() for e in (measured.intact, measured.circuit, measured.upper))
    if not finite:
        return INCONCLUSIVE, "the model gave values that are not finite"
    if not has_capability(measured.intact, options.capability_alpha):
        return NO_CAPABILITY, (
            "the intact model does not prefer the target to other tokens of the row "
            f"(one-sided t-test over rows, level {options.capability_alpha:g}): nothing can be lost"
        )
    if not measured.distinct:
        return NO_CONTROL, "a layer has fewer other heads than the circuit takes there: no matched set exists"
    damage = measured.intact.logprob - measured.circuit.logprob
    low, high = mean_interval(damage, options.confidence)
    draws, exceedances = len(measured.random), measured.exceedances
    p = (exceedances + 1) / (draws + 1)
    hurts = low > 0
    if measured.rejected:
        if not hurts:
            return NOT_CAUSAL, (
                f"no reliable damage: {damage.mean():.3f} nats, {options.confidence:.0%} interval over rows "
                f"[{low:.3f}, {high:.3f}] does not lie above zero"
            )
        upper = float((measured.intact.logprob - measured.upper.logprob).mean())
        if upper < options.upper_tolerance * damage.mean():
            return INCONCLUSIVE, (
                f"all heads of these layers together do less damage ({upper:.3f} nats) than the circuit "
                f"({damage.mean():.3f}): the upper bound does not hold"
            )
        return CAUSAL, (
            f"damage {damage.mean():.3f} nats [{low:.3f}, {high:.3f}], reached by {exceedances} of {draws} matched "
            f"random sets (p = {p:.3g}, level {options.alpha:g})"
        )
    if measured.ended:
        return INCONCLUSIVE, measured.ended
    if not hurts:
        return NOT_CAUSAL, f"no reliable damage: {damage.mean():.3f} nats [{low:.3f}, {high:.3f}]"
    if 1 / (measured.distinct + 1) > options.alpha:
        return INCONCLUSIVE, (
            f"only {measured.distinct} distinct matched sets exist: no p-value below "
            f"{1 / (measured.distinct + 1):.3g} is possible, the level is {options.alpha:g}"
        )
    if not exceedances and 1 / (options.max_draws + 1) > options.alpha:
        return INCONCLUSIVE, (
            f"at most {options.max_draws} draws were allowed: no p-value below {1 / (options.max_draws + 1):.3g} is "
            f"possible, the level is {options.alpha:g}"
        )
    control = measured.intact.logprob - np.mean([r.logprob for r in measured.random], axis=0)
    control_low, _ = mean_interval(control, options.confidence)
    if control_low > 0 and control.mean() >= 0.5 * damage.mean():
        return INCONCLUSIVE, (
            f"the control damages the model as much: {control.mean():.3f} nats against the circuit's "
            f"{damage.mean():.3f} ({exceedances} of {draws} matched random sets do as much damage)"
        )
    return NOT_CAUSAL, f"{exceedances} of {draws} matched random sets do as much damage (p = {p:.3g})"


def confirmed(verdicts: Sequence[Verdict]) -> bool:
    """Whether every ablation mode says ``causal`` (and at least two modes were tried)."""
    return len({v.mode for v in verdicts}) > 1 and all(v.verdict == CAUSAL for v in verdicts)
