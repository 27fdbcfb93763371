"""How far to believe an alarm: detectors replayed over finished records, and what became of the heads (recipe 5, 6).

A record knows how the story ended. So every rule of ``spectral_monitor.warning`` can be run again over its series,
with any parameters, and each alarm judged by what the head did next:

* an alarm is *right* when its head becomes a circuit member at that look or later, at most ``horizon`` times the
  tokens away; otherwise it is *false*. PR knows no classes: its alarms may lead into the probe's circuit or into the
  previous-token circuit. Alarms that the early warning would not have raised (heads that were members of the
  probe's circuit at the look before; PR once there is one) are not counted at all;
* *precision* = right alarms / alarms; *recall* = heads of the final circuit with a right alarm / heads of the final
  circuit that crossed within the record;
* *lead* of a head = tokens at its crossing / tokens at its first right alarm: 1 = at the same look, no warning at all;
* *circuit lead* of a run = tokens at which the first head of its final circuit crossed / tokens at its first right
  alarm. Precursors (previous-token heads, on which induction is built) are right when they join their own class's
  circuit, and are compared with the others by this.

Three baselines: as many alarms at random looks of random heads, the capability's attention itself at a low bar, and for
a gated rule the gate alone (every head alarms when it opens): what is better than that, the signal itself has earned.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from spectral_monitor.errors import RecordError, ThresholdError
from spectral_monitor.observation import OK, FloatArray, IntArray
from spectral_monitor.warning import (
    PREVIOUS_TOKEN,
    Crossing,
    HeadAlarms,
    LevelRule,
    RiseRule,
    Rule,
    WarningParameters,
    signal,
)

if TYPE_CHECKING:
    from spectral_monitor.observation import Observation

BoolArray = npt.NDArray[np.bool_]

#: Names of circuits, either of which will do; "" is that of the probe's own capability.
Joins = tuple[str, ...]
OWN: Joins = ("",)

#: Signals that a record can be replayed with.
REPLAYED = ("pr", "pr_centred", "pr_over_null", "content_share", "attention", "previous_token")
#: Resamples of the intervals, and draws of the random baseline.
RESAMPLES = 2000
DRAWS = 200


@dataclass(frozen=True)
class RunSeries:
    """One finished run as the detectors see it: n looks, K heads.

    Attributes:
        name: of the run.
        tokens: [n] training tokens; NaN where unknown.
        heads: K names.
        signals: signal -> [n, K]; NaN where missing, and everywhere at a marked or non-finite look.
        members: capability -> [n, K] True where the head is in that circuit, with the crossing's hysteresis.
        capability: the probe's own.
    """

    name: str
    tokens: FloatArray
    heads: tuple[str, ...]
    signals: Mapping[str, FloatArray]
    members: Mapping[str, BoolArray]
    capability: str = "induction"

    def member(self, joins: Joins = OWN) -> BoolArray:
        """[n, K] True where the head is in one of the circuits of ``joins``."""
        wanted = {name or self.capability for name in joins}
        chosen = [member for name, member in self.members.items() if name in wanted]
        either: BoolArray = np.logical_or.reduce(chosen, axis=0)
        return either

    def crossing(self, joins: Joins = OWN) -> IntArray:
        """[K] look at which the head first joined; -1 for never, and for heads that were in at the first look."""
        member = self.member(joins)
        first = member.argmax(axis=0)
        return np.where(member.any(axis=0) & (first > 0), first, -1)

    def final(self, joins: Joins = OWN) -> BoolArray:
        """[K] heads of the final circuit that could be warned of: in at the last look, and joined within the record."""
        result: BoolArray = self.member(joins)[-1] & (self.crossing(joins) >= 0)
        return result

    @property
    def formed(self) -> int:
        """Look at which the first head of the final circuit joined; -1 where none did."""
        crossing = self.crossing()[self.final()]
        return int(crossing.min()) if len(crossing) else -1


def run_series(
    name: str,
    observations: Sequence[Observation],
    length: int,
    capability: str = "induction",
    crossing: Crossing | None = None,
) -> RunSeries:
    """The observations of one run and probe as series.

    Raises:
        RecordError: fewer than two observations, or observations of different models.
    """
    crossing = crossing if crossing is not None else Crossing()
    if len(observations) < 2:
        raise RecordError(f"{name}: {len(observations)} observation(s), but a replay needs at least two")
    heads = tuple(str(head) for head in observations[0].heads)
    tokens, usable = np.full(len(observations), np.nan), np.zeros((len(observations), len(heads)), dtype=bool)
    signals = {key: np.full(usable.shape, np.nan) for key in REPLAYED}
    bars = {capability: crossing, "previous_token": PREVIOUS_TOKEN}
    scores = {key: np.full(usable.shape, np.nan) for key in bars}
    for row, look in enumerate(observations):
        if tuple(str(head) for head in look.heads) != heads:
            raise RecordError(f"{name}: the look at step {look.step} has other heads than the first one")
        tokens[row] = math.nan if look.tokens is None else look.tokens
        usable[row] = (look.heads.status == OK) & look.finite & (look.mark is None)
        for key in REPLAYED:
            signals[key][row] = signal(key, look.heads, length, capability)
        for key, bar in bars.items():
            scores[key][row] = bar.score(look.heads, key)
    for values in (*scores.values(), *signals.values()):
        values[~usable] = np.nan
    members = {key: _members(scores[key], bar.rearm) for key, bar in bars.items()}
    return RunSeries(name, tokens, heads, signals, members, capability)


def _members(scores: FloatArray, rearm: float) -> BoolArray:
    """[n, K]: in from a score of 1, out again below ``rearm``; a missing score changes nothing."""
    member = np.zeros(scores.shape, dtype=bool)
    now = np.zeros(scores.shape[1], dtype=bool)
    for row, score in enumerate(scores):
        with np.errstate(invalid="ignore"):
            now = (now | (score >= 1)) & ~(score < rearm)
        member[row] = now
    return member


def read_run(run_dir: str | os.PathLike[str], probe: str | None = None, crossing: Crossing | None = None) -> RunSeries:
    """The series of one run directory.

    Args:
        run_dir: a run record.
        probe: name of the probe; None for ``induction``, or the only one that the record has.
        crossing: when a head counts as a circuit member; None for the run's own thresholds (the defaults where its
            record names none).

    Raises:
        RecordError: no such record or probe, several probes and none to prefer, or too few observations.
    """
    from spectral_monitor.record import RunRecord, preferred_probe

    record = RunRecord.open(run_dir)
    known = record.probes
    if probe is None:
        probe = preferred_probe(known)
        if probe is None:
            raise RecordError(f"{run_dir} holds {len(known)} probes ({', '.join(known)}): say which one with --probe")
    if probe not in known:
        raise RecordError(f"{run_dir} holds no probe {probe!r}; it has {', '.join(known) or 'none'}")
    described = known[probe]
    try:
        length, capability = int(described["length"]), str(described.get("capability", probe))
    except (KeyError, TypeError, ValueError) as error:
        raise RecordError(f"{run_dir}: run.json does not say how long the rows of probe {probe!r} are") from error
    if crossing is None:
        crossing = _crossing_of(record.run)
    return run_series(Path(run_dir).name, record.observations(probe), length, capability, crossing)


def _crossing_of(run: Mapping[str, Any]) -> Crossing:
    """The thresholds that the monitor of this run worked with."""
    bars, usual = (run.get("config") or {}).get("thresholds") or {}, Crossing()
    return Crossing(
        selectivity=float(bars.get("member") or usual.selectivity),
        min_attention=float(bars.get("min_attention") or usual.min_attention),
        rearm=float(bars.get("hysteresis") or usual.rearm),
    )


# -- candidates: what is replayed -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidate:
    """A rule over a signal, under the name that stands in the table.

    ``joins``: the circuits that its heads should join; ``until_formed``: it is silent once the probe's circuit has a
    member; ``gate``: it is silent as long as no previous-token head has risen by this rule.
    """

    name: str
    signal: str
    rule: Rule
    joins: Joins = OWN
    until_formed: bool = False
    gate: LevelRule | None = None

    def with_sensitivity(self, value: float) -> Candidate:
        """The same rule with another ``ratio`` (rise rules) or ``bar`` (level rules)."""
        changed: Rule = (
            dataclasses.replace(self.rule, ratio=value)
            if isinstance(self.rule, RiseRule)
            else dataclasses.replace(self.rule, bar=value)
        )
        return dataclasses.replace(self, rule=changed)

    @property
    def sensitivity(self) -> float:
        """The parameter that ``with_sensitivity`` sets."""
        return self.rule.ratio if isinstance(self.rule, RiseRule) else self.rule.bar


def candidates(parameters: WarningParameters | None = None) -> list[Candidate]:
    """The alarms of ``parameters`` that run, in the table's order, and three relatives of the PR alarm."""
    parameters = parameters if parameters is not None else WarningParameters()
    found = []
    for name, watch in parameters.watches().items():
        found.append(Candidate(name, watch.signal, watch.rule, watch.joins, watch.until_formed, watch.gate))
        if name == "pr_rise":
            found.append(dataclasses.replace(found[0], name="pr_rise, no gate", gate=None))
            found.append(dataclasses.replace(found[0], name="pr_centred", signal="pr_centred"))
            # This ratio is near 1 by construction: PR's floor means nothing there.
            rule = dataclasses.replace(parameters.pr or RiseRule(), floor=0.0)
            found.append(dataclasses.replace(found[0], name="pr_over_null", signal="pr_over_null", rule=rule))
    return found


#: The baseline that every alarm has to beat: attention on the target itself, at the lowest bar in use.
LOW_ATTENTION = Candidate("attention >= 2/T", "attention", LevelRule(bar=2.0))


# -- judging ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Alarm:
    """One alarm of a replay: indices of run, head and look."""

    run: int
    head: int
    look: int


@dataclass(frozen=True)
class Trust:
    """What the alarms of one detector were worth. NaN where there is nothing to divide by.

    Attributes:
        name: of the detector.
        alarms, right: how many, and how many of them led to a member within the horizon.
        precision: right / alarms; ``precision_ci``: its 95% Wilson interval.
        circuit, warned: heads of the final circuits, and how many of them had a right alarm.
        early: how many had it at an earlier look than their crossing.
        recall: warned / circuit; ``recall_ci``: its 95% Wilson interval.
        lead: median of tokens at the crossing / tokens at the first right alarm, over the warned heads.
        lead_ci: 95% interval from resampling whole runs (heads of one run are not independent); NaN below three runs.
        lead_tokens, lead_looks: medians of the same distances in tokens and in looks.
        false_per_100_heads: false alarms / heads watched * 100.
        circuit_lead: median over runs of tokens at the first crossing of the probe's final circuit / tokens at the
            first right alarm; ``circuit_lead_range`` from the worst run to the best.
        runs_warned, runs_formed: runs whose first right alarm came at an earlier look than that, and runs in which a
            circuit formed.
        resolution: median of tokens at the crossing / tokens at the look before it: a lead below it cannot be told
            from none.
        runs, heads: how much was watched.
    """

    name: str
    alarms: float
    right: float
    precision: float
    precision_ci: tuple[float, float]
    circuit: int
    warned: float
    early: float
    recall: float
    recall_ci: tuple[float, float]
    lead: float
    lead_ci: tuple[float, float]
    lead_tokens: float
    lead_looks: float
    false_per_100_heads: float
    circuit_lead: float
    circuit_lead_range: tuple[float, float]
    runs_warned: float
    runs_formed: int
    resolution: float
    runs: int
    heads: int

    @property
    def within_resolution(self) -> bool:
        """The median lead is not longer than the distance between two looks (or there is none)."""
        return not self.lead > self.resolution * (1 + 1e-9)

    def to_dict(self) -> dict[str, Any]:
        """All fields, and ``within_resolution``."""
        return {**dataclasses.asdict(self), "within_resolution": self.within_resolution}


def replay(runs: Sequence[RunSeries], candidate: Candidate) -> list[Alarm]:
    """The alarms of ``candidate`` over all heads of all runs, without those of heads that were members by then."""
    found = []
    for number, run in enumerate(runs):
        if candidate.signal not in run.signals:
            raise ThresholdError(f"no signal {candidate.signal!r} to replay; there are {', '.join(run.signals)}")
        member = run.member()
        for look, risen in enumerate(_risen(run, candidate)):
            before = member[max(look - 1, 0)]
            if not (candidate.until_formed and before.any()):
                found += [Alarm(number, head, look) for head in risen if not before[head]]
    return found


def _risen(run: RunSeries, candidate: Candidate) -> Iterator[list[int]]:
    """Indices of the heads that alarm, look by look, as ``EarlyWarning`` would have it."""
    index = {name: number for number, name in enumerate(run.heads)}
    heads = HeadAlarms(candidate.rule, candidate.gate is not None)
    opened = _opened(run, candidate.gate)
    for look, tokens in enumerate(run.tokens):
        moved = heads.update(tokens, run.heads, run.signals[candidate.signal][look], bool(opened[look]))
        yield [index[name] for name in moved["up"]]


def _opened(run: RunSeries, rule: LevelRule | None) -> BoolArray:
    """[n] True where the gate is open: always, where there is none or nothing that could open it."""
    previous = run.signals.get("previous_token", np.zeros(0))
    if rule is None or run.capability != "induction" or not np.isfinite(previous).any():
        return np.ones(len(run.tokens), dtype=bool)
    gate = HeadAlarms(rule)
    opened = np.zeros(len(run.tokens), dtype=bool)
    for look, tokens in enumerate(run.tokens):
        gate.update(tokens, run.heads, previous[look])
        opened[look] = gate.any_inside
    return opened


def gate_alone(runs: Sequence[RunSeries], gate: LevelRule) -> list[Alarm]:
    """The baseline of a gated rule: every head alarms at the first look (after the very first) with an open gate."""
    found = []
    for number, run in enumerate(runs):
        opened = np.flatnonzero(_opened(run, gate)[1:])
        if len(opened):
            look = int(opened[0]) + 1
            found += [Alarm(number, head, look) for head in np.flatnonzero(~run.member()[look - 1]).tolist()]
    return found


def judge(
    runs: Sequence[RunSeries],
    raised: Sequence[Alarm],
    name: str,
    horizon: float = 2.0,
    joins: Joins = OWN,
    resamples: int = RESAMPLES,
) -> Trust:
    """What ``raised`` was worth.

    Args:
        runs: the runs that the alarms index.
        raised: as ``replay`` gives them.
        name: for the table.
        horizon: how many times the tokens of the alarm the crossing may come after it; infinite = any time.
        joins: the circuits that the heads should join.
        resamples: of the lead's interval; 0 leaves it out.

    Raises:
        ThresholdError: a horizon of 1 or less.
    """
    if not horizon > 1:
        raise ThresholdError(f"horizon is {horizon}, but must be above 1 (times the tokens at the alarm)")
    crossings = [run.crossing(joins) for run in runs]
    first: dict[tuple[int, int], int] = {}
    right = 0
    for alarm in raised:
        tokens, at = runs[alarm.run].tokens, int(crossings[alarm.run][alarm.head])
        if at < alarm.look or not tokens[at] <= horizon * tokens[alarm.look]:
            continue
        right += 1
        key = (alarm.run, alarm.head)
        first[key] = min(first.get(key, alarm.look), alarm.look)
    final = [(number, int(head)) for number, run in enumerate(runs) for head in np.flatnonzero(run.final(joins))]
    warned = [key for key in final if key in first]
    leads: dict[int, list[tuple[float, float, float]]] = {}
    for number, head in warned:
        tokens, at, look = runs[number].tokens, int(crossings[number][head]), first[number, head]
        ahead = (float(tokens[at] / tokens[look]), float(tokens[at] - tokens[look]), float(at - look))
        leads.setdefault(number, []).append(ahead)
    middle = np.median([lead for group in leads.values() for lead in group], axis=0) if leads else [math.nan] * 3
    heads = sum(len(run.heads) for run in runs)
    ahead_of_circuit = [
        float(run.tokens[run.formed] / run.tokens[min(look for (at, _), look in first.items() if at == number)])
        for number, run in enumerate(runs)
        if run.formed >= 0 and any(at == number for at, _ in first)
    ]
    return Trust(
        name=name,
        alarms=len(raised),
        right=right,
        precision=_share(right, len(raised)),
        precision_ci=wilson(right, len(raised)),
        circuit=len(final),
        warned=len(warned),
        early=sum(first[key] < crossings[key[0]][key[1]] for key in warned),
        recall=_share(len(warned), len(final)),
        recall_ci=wilson(len(warned), len(final)),
        lead=float(middle[0]),
        lead_ci=_lead_interval([[lead[0] for lead in group] for group in leads.values()], resamples),
        lead_tokens=float(middle[1]),
        lead_looks=float(middle[2]),
        false_per_100_heads=100 * _share(len(raised) - right, heads),
        circuit_lead=float(np.median(ahead_of_circuit)) if ahead_of_circuit else math.nan,
        circuit_lead_range=(min(ahead_of_circuit), max(ahead_of_circuit)) if ahead_of_circuit else (math.nan, math.nan),
        runs_warned=sum(lead > 1 for lead in ahead_of_circuit),
        runs_formed=sum(run.formed >= 0 for run in runs),
        resolution=_resolution(runs, final, crossings),
        runs=len(runs),
        heads=heads,
    )


def random_times(
    runs: Sequence[RunSeries],
    raised: Sequence[Alarm],
    horizon: float = 2.0,
    joins: Joins = OWN,
    draws: int = DRAWS,
    seed: int = 0,
) -> Trust:
    """The first baseline: in each run as many alarms as ``raised`` has there, at random looks of random heads.

    Drawn from the looks at which the head was no member yet and not from the first look, as the detectors' own
    alarms are. Returns means over ``draws`` (of the lead: the median of medians).
    """
    rng = np.random.default_rng(seed)
    counts = np.bincount([alarm.run for alarm in raised], minlength=len(runs))
    allowed = [np.argwhere(~run.member(joins)[:-1]) + np.array([1, 0]) for run in runs]
    found = []
    for _ in range(draws):
        drawn = []
        for number, (count, places) in enumerate(zip(counts, allowed, strict=True)):
            picks = rng.choice(len(places), size=min(int(count), len(places)), replace=False)
            drawn += [Alarm(number, int(head), int(look)) for look, head in places[picks]]
        found.append(judge(runs, drawn, "random times", horizon, joins, resamples=0))
    return _mean("random times", found)


def wilson(hits: float, trials: float) -> tuple[float, float]:
    """95% Wilson interval of a share; NaN for no trials."""
    if not trials:
        return math.nan, math.nan
    z = 1.959963984540054
    share = hits / trials
    scale = 1 + z * z / trials
    middle = (share + z * z / (2 * trials)) / scale
    half = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials)) / scale
    return max(0.0, middle - half), min(1.0, middle + half)


def _share(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def _lead_interval(groups: Sequence[Sequence[float]], resamples: int, seed: int = 0) -> tuple[float, float]:
    """Percentile interval of the median when whole runs are drawn with replacement."""
    if len(groups) < 3 or not resamples:
        return math.nan, math.nan
    rng = np.random.default_rng(seed)
    medians = [
        np.median(np.concatenate([groups[pick] for pick in rng.integers(len(groups), size=len(groups))]))
        for _ in range(resamples)
    ]
    low, high = np.percentile(medians, [2.5, 97.5])
    return float(low), float(high)


def _resolution(runs: Sequence[RunSeries], final: Iterable[tuple[int, int]], crossings: Sequence[IntArray]) -> float:
    steps = []
    for number, head in final:
        run = runs[number]
        at = int(crossings[number][head])
        before = run.tokens[at - 1]
        if before > 0:
            steps.append(float(run.tokens[at] / before))
    return float(np.median(steps)) if steps else math.nan


def _mean(name: str, found: Sequence[Trust]) -> Trust:
    def over(pick: Callable[[Trust], float]) -> float:
        values = [pick(one) for one in found]
        return float(np.mean([v for v in values if math.isfinite(v)])) if np.isfinite(values).any() else math.nan

    leads = [one.lead for one in found if math.isfinite(one.lead)]
    ahead = [one.circuit_lead for one in found if math.isfinite(one.circuit_lead)]
    nowhere = (math.nan, math.nan)
    return Trust(
        name=name,
        alarms=over(lambda one: one.alarms),
        right=over(lambda one: one.right),
        precision=over(lambda one: one.precision),
        precision_ci=nowhere,
        circuit=found[0].circuit,
        warned=over(lambda one: one.warned),
        early=over(lambda one: one.early),
        recall=over(lambda one: one.recall),
        recall_ci=nowhere,
        lead=float(np.median(leads)) if leads else math.nan,
        lead_ci=nowhere,
        lead_tokens=over(lambda one: one.lead_tokens),
        lead_looks=over(lambda one: one.lead_looks),
        false_per_100_heads=over(lambda one: one.false_per_100_heads),
        circuit_lead=float(np.median(ahead)) if ahead else math.nan,
        circuit_lead_range=nowhere,
        runs_warned=over(lambda one: one.runs_warned),
        runs_formed=found[0].runs_formed,
        resolution=found[0].resolution,
        runs=found[0].runs,
        heads=found[0].heads,
    )


# -- tables -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrustTable:
    """One row a detector, each with its random baseline; ``horizon`` as they were judged."""

    rows: tuple[Trust, ...]
    random: tuple[Trust, ...]
    horizon: float

    def to_dict(self) -> dict[str, Any]:
        """JSON-able but for NaN (``record.dumps`` turns it into null)."""
        rows = [{**row.to_dict(), "random": at.to_dict()} for row, at in zip(self.rows, self.random, strict=True)]
        return {"horizon": self.horizon, "rows": rows}


def trust_table(
    runs: Sequence[RunSeries], chosen: Sequence[Candidate], horizon: float = 2.0, draws: int = DRAWS
) -> TrustTable:
    """Every candidate that the runs have a signal for, then the baselines: the low attention bar, the gate alone."""
    wanted = [*chosen]
    if all(one.signal != LOW_ATTENTION.signal or one.rule != LOW_ATTENTION.rule for one in wanted):
        wanted.append(LOW_ATTENTION)
    rows, random = [], []
    for candidate in wanted:
        if not _measured(runs, candidate.signal):
            continue
        raised = replay(runs, candidate)
        rows.append(judge(runs, raised, candidate.name, horizon, candidate.joins))
        random.append(random_times(runs, raised, horizon, candidate.joins, draws))
    gated = next((one for one in chosen if one.gate is not None), None)
    if gated is not None and gated.gate is not None and _measured(runs, "previous_token"):
        raised = gate_alone(runs, gated.gate)
        rows.append(judge(runs, raised, "the gate alone, all heads", horizon, gated.joins))
        random.append(random_times(runs, raised, horizon, gated.joins, draws))
    return TrustTable(tuple(rows), tuple(random), horizon)


def _measured(runs: Sequence[RunSeries], name: str) -> bool:
    return any(bool(np.isfinite(run.signals.get(name, np.nan)).any()) for run in runs)


def operating_curve(
    runs: Sequence[RunSeries], candidate: Candidate, sensitivities: Sequence[float], horizon: float = 2.0
) -> list[tuple[float, Trust]]:
    """``candidate`` judged at each sensitivity (``ratio`` of a rise rule, ``bar`` of a level rule)."""
    curve = []
    for value in sensitivities:
        changed = candidate.with_sensitivity(value)
        found = judge(runs, replay(runs, changed), candidate.name, horizon, candidate.joins, resamples=0)
        curve.append((value, found))
    return curve


#: Sensitivities that are tried: multiples of a bar, or of what a ratio exceeds 1 by.
GRID = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)


def sensitivities(candidate: Candidate) -> list[float]:
    """``GRID`` round the candidate's own sensitivity."""
    own = candidate.sensitivity
    if isinstance(candidate.rule, RiseRule):
        return [1 + (own - 1) * factor for factor in GRID]
    return [own * factor for factor in GRID]


def choose(runs: Sequence[RunSeries], candidate: Candidate, horizon: float = 2.0) -> Candidate:
    """``candidate`` at the sensitivity that serves best on ``runs`` (report it on others).

    The greatest harmonic mean of precision and the share of the final circuit's heads that were warned of at an earlier
    look than their crossing; of equals, the least sensitive. Where nothing serves (or the runs lack the signal), the
    candidate stays as it is.
    """

    def worth(found: Trust) -> float:
        precision, early = found.precision, _share(found.early, found.circuit)
        return 2 * precision * early / (precision + early) if found.right and found.early else 0.0

    curve = operating_curve(runs, candidate, sensitivities(candidate), horizon)
    best, found = max(curve, key=lambda point: (worth(point[1]), point[0]))
    return candidate.with_sensitivity(best) if worth(found) else candidate


COLUMNS = (
    "alarm",
    "right / alarms",
    "precision",
    "at random",
    "heads warned",
    "earlier",
    "lead of a head",
    "lead of the circuit",
    "runs warned",
    "false / 100 heads",
)


def cells(table: TrustTable) -> list[tuple[str, ...]]:
    """The table as text, one tuple a row in the order of ``COLUMNS``."""
    lines: list[tuple[str, ...]] = []
    for row, at in zip(table.rows, table.random, strict=True):
        lead = "-" if math.isnan(row.lead) else f"{row.lead:.2f}x{_interval(row.lead_ci)}"
        if not math.isnan(row.lead) and row.within_resolution:
            lead += " (none)" if row.lead <= 1 else " (one look)"
        lines.append(
            (
                row.name,
                f"{row.right:g}/{row.alarms:g}",
                f"{_percent(row.precision)}{_interval(row.precision_ci, 100)}",
                _percent(at.precision),
                f"{row.warned:g}/{row.circuit}",
                f"{row.early:g}/{row.circuit}",
                lead,
                "-" if math.isnan(row.circuit_lead) else f"{row.circuit_lead:.2f}x ({_range(row.circuit_lead_range)})",
                f"{row.runs_warned:g}/{row.runs_formed}",
                f"{row.false_per_100_heads:.1f}",
            )
        )
    return lines


def markdown(table: TrustTable) -> str:
    """The table for a document."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS)]
    return "\n".join([*lines, *("| " + " | ".join(line) + " |" for line in cells(table))])


def _range(pair: tuple[float, float]) -> str:
    return f"{pair[0]:.2f} to {pair[1]:.2f}"


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{100 * share:.0f}%"


def _interval(pair: tuple[float, float], scale: float = 1.0) -> str:
    low, high = pair
    if math.isnan(low):
        return ""
    digits = 0 if scale > 1 else 2
    return f" [{scale * low:.{digits}f}, {scale * high:.{digits}f}]"
