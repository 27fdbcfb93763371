"""The early warning: a pure state machine over each head's series, no model needed (recipe sections 5 and 6).

A head's series is one number an observation: its PR, its content share, its induction attention. A *rule* says when
such a series alarms; a *detector* carries the rule's state from observation to observation, so that a resumed run
goes on where it was. ``EarlyWarning`` runs the rules over all heads of one probe and returns the events to announce.

What all rules share:

* the first usable observation of a series never alarms: there is nothing to rise from;
* missing, non-finite and marked observations are skipped: they neither alarm nor end an episode;
* an observation at or before the last one seen (a resumed run that goes over old ground) is skipped;
* an alarm needs ``persistence`` usable observations in a row, so a single spike is none;
* one alarm an episode: the next one needs the series to come down first (``rearm``, a level below the alarm's).

How far each alarm is to be believed is measured by ``spectral_monitor.trust``.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from spectral_monitor.errors import ThresholdError
from spectral_monitor.heads import Head
from spectral_monitor.observation import OK, Event, FloatArray, HeadTable, Observation

Direction = Literal["up", "down", ""]

#: A MAD of normal noise times this is its standard deviation.
_MAD_TO_SD = 1.4826
#: Logarithms are kept to so many digits: enough for any rule, and half the size of the saved state.
_DIGITS = 6
#: Usable observations before a rise can be told: with fewer the median is one of the values itself.
_BEFORE_A_RISE = 3


# -- rules ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RiseRule:
    """Alarm when a positive series climbs clearly above its own running minimum (for PR).

    A plain threshold is useless: random initialisation gives a PR that first collapses (recipe section 5, F5). All
    comparisons are of logarithms, so that the rule does not depend on the head size.

    Attributes:
        ratio: the value must reach this many times the running minimum.
        floor: no value below this alarms.
        octaves: the running minimum looks back this many doublings of the token count; infinite = to the start.
            With a finite window a long plateau becomes the new minimum, and a slow ramp never alarms.
        deviations: the value must also lie this many robust standard deviations above the running minimum of the
            running median, so that one low value is no ground to rise from. The deviation is that of successive
            differences: a noisy series asks for more, a steady ramp does not hide itself.
        noise: the smallest standard deviation of the logarithm that is assumed.
        history: how many observations running median and deviation are taken from.
        persistence: usable observations in a row that must agree, to alarm and to re-arm.
        rearm: the episode is over when the value falls under ``minimum * ratio ** rearm``.
    """

    ratio: float = 2.0
    floor: float = 2.0
    octaves: float = math.inf
    deviations: float = 3.0
    noise: float = 0.05
    history: int = 16
    persistence: int = 2
    rearm: float = 0.5

    def __post_init__(self) -> None:
        _require(self.ratio > 1, "ratio", self.ratio, "above 1 (a rise is a multiple of the running minimum)")
        _require(self.floor >= 0, "floor", self.floor, "0 or more")
        _require(self.octaves > 0, "octaves", self.octaves, "above 0 doublings of the token count")
        _require(self.deviations >= 0, "deviations", self.deviations, "0 or more standard deviations")
        _require(self.noise >= 0, "noise", self.noise, "0 or more")
        expected = f"{_BEFORE_A_RISE} observations or more"
        _require(self.history >= _BEFORE_A_RISE, "history", self.history, expected)
        _require(self.persistence >= 1, "persistence", self.persistence, "1 observation or more")
        _require(0 <= self.rearm < 1, "rearm", self.rearm, "from 0 to below 1 (1 would be the alarm's own level)")


@dataclass(frozen=True)
class LevelRule:
    """Alarm when a series comes from below and stays at or above ``bar`` (content share, attention, crossings).

    A series whose first usable observation is already at the bar starts inside an episode and does not alarm.

    Attributes:
        bar: the level, in the series' own unit.
        persistence: usable observations in a row at or above the bar.
        rearm: the episode is over when the value stays under ``rearm * bar`` for as many observations.
    """

    bar: float
    persistence: int = 2
    rearm: float = 0.5

    def __post_init__(self) -> None:
        _require(self.bar > 0, "bar", self.bar, "above 0")
        _require(self.persistence >= 1, "persistence", self.persistence, "1 observation or more")
        _require(0 <= self.rearm <= 1, "rearm", self.rearm, "from 0 to 1")


@dataclass(frozen=True)
class JumpRule:
    """Alarm when a share jumps: the sink transition (recipe section 5, F2: transition as against ramp).

    Attributes:
        rise: how much the share must gain within one doubling of the token count. Where observations are further
            apart than that, the gain is taken per doubling. (Published: OLMo 1B 0.54 an octave, a transition; OLMoE
            1B-7B 0.16 and Pythia 1B 0.10, ramps.)
        heads: at least so many heads must have changed, so that a model of few heads does not jump with one.
        rearm: the episode is over when the gain falls under ``rearm * rise``.
    """

    rise: float = 0.3
    heads: int = 3
    rearm: float = 0.5

    def __post_init__(self) -> None:
        _require(0 < self.rise <= 1, "rise", self.rise, "above 0 and at most 1 (a share of all heads)")
        _require(self.heads >= 1, "heads", self.heads, "1 head or more")
        _require(0 <= self.rearm <= 1, "rearm", self.rearm, "from 0 to 1")


Rule = RiseRule | LevelRule


def _require(holds: bool, name: str, value: float, expected: str) -> None:
    if not holds:
        raise ThresholdError(f"early warning: {name} is {value}, but must be {expected}")


# -- detectors: a rule and its state over one series ------------------------------------------------------------------


@dataclass
class _Episode:
    """Inside an episode or not, and how many observations in a row speak for the other side."""

    inside: bool = False
    count: int = 0

    def advance(self, enter: bool, leave: bool, persistence: int) -> Direction:
        """Take one usable observation; returns ``"up"`` where an episode begins and ``"down"`` where it ends."""
        self.count = self.count + 1 if (leave if self.inside else enter) else 0
        if self.count < persistence:
            return ""
        self.count = 0
        self.inside = not self.inside
        return "up" if self.inside else "down"


@dataclass
class _RunningMinimum:
    """Minimum of the values of the last ``octaves``; ``candidates`` are (position, value) pairs of rising value."""

    octaves: float
    candidates: list[tuple[float, float]] = field(default_factory=list)

    def forget(self, at: float) -> None:
        """Drop what is too old at position ``at``; the newest value always stays."""
        while len(self.candidates) > 1 and self.candidates[0][0] < at - self.octaves:
            self.candidates.pop(0)

    def add(self, at: float, value: float) -> None:
        while self.candidates and self.candidates[-1][1] >= value:
            self.candidates.pop()
        if not self.candidates or math.isfinite(self.octaves):
            self.candidates.append((at, value))

    @property
    def value(self) -> float:
        return self.candidates[0][1] if self.candidates else math.nan


@dataclass
class RiseDetector:
    """``RiseRule`` over one series; all values are kept as logarithms.

    ``settled`` are the last values that are not part of a rise in question, and ``pending`` the (position, value)
    pairs that are. While there are any, what they are compared with stays as it was before them.
    """

    rule: RiseRule
    last: float | None = None
    settled: list[float] = field(default_factory=list)
    pending: list[tuple[float, float]] = field(default_factory=list)
    episode: _Episode = field(default_factory=_Episode)

    def __post_init__(self) -> None:
        self._low = _RunningMinimum(self.rule.octaves)
        self._usual = _RunningMinimum(self.rule.octaves)

    def update(self, tokens: float, value: float) -> Direction:
        """Take one observation; ``"up"`` at an alarm, ``"down"`` at its episode's end. A value <= 0 is missing."""
        at = position(tokens)
        if at is None or not (math.isfinite(value) and value > 0) or (self.last is not None and at <= self.last):
            return ""
        self.last = at
        rule, y, ratio = self.rule, round(math.log(value), _DIGITS), math.log(self.rule.ratio)
        if not self.pending:
            self._low.forget(at)
            self._usual.forget(at)
        enter = (
            len(self.settled) >= _BEFORE_A_RISE
            and value >= rule.floor
            and y >= self._low.value + ratio
            and y >= self._usual.value + rule.deviations * self._noise()
        )
        direction = self.episode.advance(enter, y < self._low.value + rule.rearm * ratio, rule.persistence)
        self.pending.append((at, y))
        if not enter or self.episode.inside:
            self._settle()
        return direction

    def _settle(self) -> None:
        for at, y in self.pending:
            self.settled = [*self.settled, y][-self.rule.history :]
            self._low.add(at, y)
            if len(self.settled) >= _BEFORE_A_RISE:
                self._usual.add(at, statistics.median(self.settled))
        self.pending = []

    @property
    def minimum(self) -> float:
        """The running minimum that the next observation is compared with; NaN before the first one."""
        return math.exp(self._low.value)

    def _noise(self) -> float:
        """Robust standard deviation of the log value, from its successive differences."""
        steps = [b - a for a, b in zip(self.settled, self.settled[1:], strict=False)]
        middle = statistics.median(steps)
        spread = statistics.median([abs(step - middle) for step in steps])
        return max(self.rule.noise, _MAD_TO_SD * spread / math.sqrt(2))

    def state_dict(self) -> dict[str, Any]:
        """JSON values only."""
        return {
            "last": self.last,
            "low": [list(item) for item in self._low.candidates],
            "usual": [list(item) for item in self._usual.candidates],
            "settled": list(self.settled),
            "pending": [list(item) for item in self.pending],
            "episode": [self.episode.inside, self.episode.count],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict``'s state."""
        self.last = state["last"]
        self._low.candidates = [(float(at), float(y)) for at, y in state["low"]]
        self._usual.candidates = [(float(at), float(y)) for at, y in state["usual"]]
        self.settled = [float(y) for y in state["settled"]]
        self.pending = [(float(at), float(y)) for at, y in state["pending"]]
        self.episode = _Episode(bool(state["episode"][0]), int(state["episode"][1]))


@dataclass
class LevelDetector:
    """``LevelRule`` over one series."""

    rule: LevelRule
    last: float | None = None
    episode: _Episode = field(default_factory=_Episode)

    def update(self, tokens: float, value: float) -> Direction:
        """Take one observation; returns ``"up"`` at an alarm, ``"down"`` at its end."""
        at = position(tokens)
        if at is None or not math.isfinite(value) or (self.last is not None and at <= self.last):
            return ""
        first, self.last = self.last is None, at
        if first:
            self.episode = _Episode(inside=value >= self.rule.bar)
            return ""
        leave = value < self.rule.rearm * self.rule.bar
        return self.episode.advance(value >= self.rule.bar, leave, self.rule.persistence)

    def state_dict(self) -> dict[str, Any]:
        """JSON values only."""
        return {"last": self.last, "episode": [self.episode.inside, self.episode.count]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict``'s state."""
        self.last = state["last"]
        self.episode = _Episode(bool(state["episode"][0]), int(state["episode"][1]))


@dataclass
class JumpDetector:
    """``JumpRule`` over one series of shares; ``past`` are the (position, share) pairs of the last doubling."""

    rule: JumpRule
    past: list[tuple[float, float]] = field(default_factory=list)
    episode: _Episode = field(default_factory=_Episode)

    def update(self, tokens: float, share: float, heads: int) -> tuple[Direction, float]:
        """Take the share of ``heads`` heads; returns the direction and the gain it was judged by (NaN: none)."""
        at = position(tokens)
        if at is None or not math.isfinite(share) or (self.past and at <= self.past[-1][0]):
            return "", math.nan
        # Keep all of the last doubling, and one observation from before it: with wide spacing there is no other.
        while len(self.past) > 1 and self.past[1][0] <= at - 1:
            self.past.pop(0)
        if not self.past:
            self.past.append((at, share))
            return "", math.nan
        gain = max((share - then) / max(1.0, at - when) for when, then in self.past)
        changed = (share - min(then for _, then in self.past)) * heads
        self.past.append((at, share))
        # Counts of heads are whole numbers: half a head absorbs what division and multiplication lose.
        enter = gain >= self.rule.rise and changed > self.rule.heads - 0.5
        return self.episode.advance(enter, gain < self.rule.rearm * self.rule.rise, 1), gain

    def state_dict(self) -> dict[str, Any]:
        """JSON values only."""
        return {
            "past": [list(item) for item in self.past],
            "episode": [self.episode.inside, self.episode.count],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict``'s state."""
        self.past = [(float(at), float(share)) for at, share in state["past"]]
        self.episode = _Episode(bool(state["episode"][0]), int(state["episode"][1]))


Detector = RiseDetector | LevelDetector


def detector(rule: Rule) -> Detector:
    """A fresh detector for ``rule``."""
    return RiseDetector(rule) if isinstance(rule, RiseRule) else LevelDetector(rule)


def position(tokens: float | None) -> float | None:
    """``tokens`` in doublings; step 0 (which has no logarithm) counts as one token. None for anything unusable."""
    if tokens is None or not math.isfinite(tokens) or tokens < 0:
        return None
    return math.log2(max(tokens, 1.0))


def alarms(rule: Rule, tokens: Sequence[float] | FloatArray, values: Sequence[float] | FloatArray) -> list[int]:
    """Indices at which ``rule`` alarms over one series.

    Args:
        tokens: [n] training tokens at each observation, in order; an observation without is skipped (NaN).
        values: [n] the series; NaN and infinities are skipped.

    Raises:
        ThresholdError: the two differ in length.
    """
    if len(tokens) != len(values):
        raise ThresholdError(
            f"early warning: {len(tokens)} token counts for {len(values)} values; give one token count a value"
        )
    machine = detector(rule)
    return [
        index
        for index, (at, value) in enumerate(zip(tokens, values, strict=True))
        if machine.update(float(at), float(value)) == "up"
    ]


def detect(tokens: Sequence[float] | FloatArray, pr: Sequence[float] | FloatArray, **parameters: Any) -> list[int]:
    """Indices at which one head's PR series alarms.

    Args:
        tokens: [n] training tokens at each observation, in order.
        pr: [n] the head's PR; NaN where it is missing or undefined.
        **parameters: fields of ``RiseRule``; its defaults are the product's.

    Raises:
        ThresholdError: unknown parameter, a value out of range, or series of different lengths.
    """
    known = [item.name for item in dataclasses.fields(RiseRule)]
    for name in parameters:
        if name not in known:
            raise ThresholdError(f"early warning: no parameter {name!r}; the PR rule has {', '.join(known)}")
    return alarms(RiseRule(**parameters), tokens, pr)


# -- signals: which number of an observation a rule looks at ---------------------------------------------------------


def signal(name: str, heads: HeadTable, length: int, capability: str = "induction") -> FloatArray:
    """[K] one signal of all heads; NaN where the observation does not have it.

    ``pr``: as it is. ``pr_centred``: PR of the rows less their mean. ``pr_over_null``: PR / PR on the null batch.
    ``content_share``: share of the output's variance at the query that changes with B alone. ``attention``: mass on
    the capability's target in units of 1 / ``length`` (what an even spread over T positions would give).
    ``selectivity``: of the capability.
    ``previous_token``: the same as ``attention`` for the previous token, but NaN in the last layer: no head comes
    after it that could build on it.

    Raises:
        ThresholdError: unknown name.
    """
    missing = np.full(len(heads), np.nan)
    if name == "pr":
        return heads.pr
    if name in ("content_share", "pr_centred"):
        return heads.extra.get(name, missing)
    if name == "pr_over_null":
        with np.errstate(divide="ignore", invalid="ignore"):
            return heads.pr / heads.extra.get("pr_null", missing)
    if name == "attention":
        return heads.attention.get(capability, missing) * length
    if name == "previous_token":
        mass = heads.attention.get("previous_token", missing) * length
        return np.where(heads.layer < heads.layer.max(), mass, np.nan)
    if name == "selectivity":
        return heads.selectivity.get(capability, missing)
    raise ThresholdError(f"early warning: no signal {name!r}; there are {', '.join(SIGNALS)}")


#: Names that ``signal`` knows.
SIGNALS = ("pr", "pr_centred", "pr_over_null", "content_share", "attention", "previous_token", "selectivity")


class HeadAlarms:
    """One rule over all heads, look by look.

    ``gated``: an episode is announced only while a gate is open, at once or when the gate opens later in it.
    """

    def __init__(self, rule: Rule, gated: bool = False) -> None:
        self.rule = rule
        self.gated = gated
        self.machines: dict[str, Detector] = {}
        self.announced: set[str] = set()

    def update(
        self, tokens: float, names: Sequence[str], values: FloatArray, gate: bool = True
    ) -> dict[Direction, list[str]]:
        """Take the [K] values of one look; returns the heads whose alarm (``"up"``) or end (``"down"``) is now."""
        moved: dict[Direction, list[str]] = {"up": [], "down": []}
        for name, value in zip(names, values, strict=True):
            machine = self.machines.setdefault(name, detector(self.rule))
            direction = machine.update(tokens, float(value))
            if direction == "down":
                self.announced.discard(name)
            if self.gated and direction != "down":
                news = machine.episode.inside and gate and name not in self.announced and math.isfinite(value)
                direction = "up" if news else ""
            if direction == "up":
                self.announced.add(name)
            if direction:
                moved[direction].append(name)
        return moved

    @property
    def any_inside(self) -> bool:
        """Some head is in an episode."""
        return any(machine.episode.inside for machine in self.machines.values())

    def minimum(self, name: str) -> float:
        """The head's running minimum, which its next value is compared with; NaN for level rules."""
        machine = self.machines.get(name)
        return machine.minimum if isinstance(machine, RiseDetector) else math.nan

    def state_dict(self) -> dict[str, Any]:
        """JSON values only."""
        return {
            "machines": {name: machine.state_dict() for name, machine in self.machines.items()},
            "announced": sorted(self.announced),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict``'s state."""
        self.announced = set(state["announced"])
        self.machines = {}
        for name, saved in state["machines"].items():
            self.machines[name] = detector(self.rule)
            self.machines[name].load_state_dict(saved)


@dataclass(frozen=True)
class Crossing:
    """When a head counts as a circuit candidate: selectivity and attention both at their thresholds (recipe 3).

    ``rearm``: it counts as out again only when either falls under this share of its threshold, so that a head that
    hovers round 50x does not come and go.
    """

    selectivity: float = 50.0
    min_attention: float = 0.02
    rearm: float = 0.8
    persistence: int = 1

    def __post_init__(self) -> None:
        _require(self.selectivity > 0, "selectivity", self.selectivity, "above 0")
        _require(self.min_attention > 0, "min_attention", self.min_attention, "above 0")

    @property
    def rule(self) -> LevelRule:
        """The rule over ``score``."""
        return LevelRule(bar=1.0, persistence=self.persistence, rearm=self.rearm)

    def score(self, heads: HeadTable, capability: str) -> FloatArray:
        """[K] 1 or more where a head is a candidate: the smaller of its two values over their thresholds."""
        missing = np.full(len(heads), np.nan)
        selectivity = heads.selectivity.get(capability, missing) / self.selectivity
        return np.minimum(selectivity, heads.attention.get(capability, missing) / self.min_attention)


#: The previous-token circuit's own bar (recipe section 3).
PREVIOUS_TOKEN = Crossing(selectivity=100.0)


@dataclass(frozen=True)
class Watch:
    """One head alarm: the signal it looks at, its rule, and the kind and capability of the event it raises.

    ``joins`` are the circuits that it warns of ("" is that of the probe's own capability), ``until_formed`` means that
    it is silent once that one has a member. ``gate``: it is silent as long as no previous-token head has risen by this
    rule.
    """

    signal: str
    rule: Rule
    kind: str
    capability: str | None = None
    joins: tuple[str, ...] = ("",)
    until_formed: bool = False
    gate: LevelRule | None = None


@dataclass(frozen=True)
class WarningParameters:
    """Which alarms run, and by which rules; None switches one off.

    The defaults come from measurement (docs/early_warning.md), chosen on other seeds than those reported there.

    Attributes:
        pr: ``pr_rise``, over PR.
        pr_gate: PR alarms of induction probes only once a previous-token head of some layer but the last has risen by
            this rule (over the same series as ``precursor``). PR alone rises in most heads while the language is
            learned; one that stands high when the precursor appears is another matter. None: no gate.
        pr_until_formed: PR alarms only while the probe's circuit has no member yet. Once there is one, the PR of many
            heads rises because what they read has become richer, not because they form anything.
        content: ``content_rise``, over the content share (0 to 1); silent where observations lack it.
        attention: ``attention_rise``, over the capability's attention in units of 1 / T.
        precursor: ``attention_rise`` of capability ``previous_token``, over the attention on the previous token in
            units of 1 / T, for induction probes: an induction head reads what a previous-token head of an earlier
            layer wrote, so that one rises first.
        crossing: ``selectivity_crossing``, up and down.
        sink: ``sink_transition``, over the share of heads classified as first token.
    """

    pr: RiseRule | None = field(default_factory=RiseRule)
    pr_gate: LevelRule | None = field(default_factory=lambda: LevelRule(bar=2.0))
    pr_until_formed: bool = True
    content: LevelRule | None = field(default_factory=lambda: LevelRule(bar=0.1))
    attention: LevelRule | None = field(default_factory=lambda: LevelRule(bar=3.0))
    precursor: LevelRule | None = field(default_factory=lambda: LevelRule(bar=5.0))
    crossing: Crossing | None = field(default_factory=Crossing)
    sink: JumpRule | None = field(default_factory=JumpRule)

    def to_dict(self) -> dict[str, Any]:
        """JSON values only (an infinite window becomes None)."""
        raw = dataclasses.asdict(self)
        if raw["pr"] is not None and math.isinf(raw["pr"]["octaves"]):
            raw["pr"]["octaves"] = None
        return raw

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> WarningParameters:
        """What ``to_dict`` gave. ThresholdError names an unknown alarm or field."""
        kinds: dict[str, type] = {
            "pr": RiseRule,
            "pr_gate": LevelRule,
            "content": LevelRule,
            "attention": LevelRule,
            "precursor": LevelRule,
            "crossing": Crossing,
            "sink": JumpRule,
        }
        rules: dict[str, Any] = {}
        for name, fields in raw.items():
            if name == "pr_until_formed":
                rules[name] = bool(fields)
                continue
            if name not in kinds:
                raise ThresholdError(f"early warning: no alarm {name!r}; there are {', '.join(kinds)}")
            if fields is None:
                rules[name] = None
                continue
            known = [item.name for item in dataclasses.fields(kinds[name])]
            for unknown in set(fields) - set(known):
                raise ThresholdError(f"early warning: {name} has no parameter {unknown!r}; it has {', '.join(known)}")
            values = dict(fields)
            if name == "pr" and values.get("octaves", 0) is None:
                values["octaves"] = math.inf
            rules[name] = kinds[name](**values)
        return cls(**rules)

    def watches(self) -> dict[str, Watch]:
        """The head alarms that run, by name."""
        previous = "previous_token"
        found: dict[str, Watch] = {}
        if self.pr is not None:
            found["pr_rise"] = Watch(
                "pr", self.pr, "pr_rise", joins=("", previous), until_formed=self.pr_until_formed, gate=self.pr_gate
            )
        if self.content is not None:
            found["content_rise"] = Watch("content_share", self.content, "content_rise")
        if self.attention is not None:
            found["attention_rise"] = Watch("attention", self.attention, "attention_rise")
        if self.precursor is not None:
            found["previous_token_rise"] = Watch(previous, self.precursor, "attention_rise", previous, (previous,))
        return found


#: The format of ``EarlyWarning.state_dict``.
STATE_FORMAT = 2

_UNITS = {
    "pr": "PR",
    "content_share": "content share",
    "attention": "attention on the target (x 1/T)",
    "previous_token": "attention on the previous token (x 1/T)",
}


#: What became of such alarms in the runs of docs/early_warning.md ("Measured") that no default was chosen on. Small
#: models: a first expectation, to be replaced by ``spectral-monitor warn`` over runs of one's own.
_MEASURED = {
    ("pr_rise", "induction"): "22 of 24",
    ("content_rise", "induction"): "18 of 25",
    ("attention_rise", "induction"): "22 of 32",
    ("attention_rise", "previous_token"): "17 of 29",
}


def trust_note(kind: str, capability: str) -> str:
    """One sentence on how far to believe an early alarm; empty for events that are facts and not warnings."""
    share = _MEASURED.get((kind, capability))
    if share is not None:
        return f"Measured on small models: {share} such alarms led to a circuit head (docs/early_warning.md)."
    return "Not measured for this capability." if kind in ("pr_rise", "content_rise", "attention_rise") else ""


class EarlyWarning:
    """All head alarms of one probe, from observation to observation.

    Args:
        length: T of the probe batch, in tokens.
        parameters: which alarms run, and how; None for the defaults.
        capability: the screen's class that the probe asks for.

    ``update`` takes the observations in order and returns what to announce. Nothing here reads a clock, a model or a
    random number: the same observations give the same events.
    """

    def __init__(
        self, length: int, parameters: WarningParameters | None = None, *, capability: str = "induction"
    ) -> None:
        _require(length > 1, "length", length, "the probe's length in tokens")
        self.length = length
        self.parameters = parameters if parameters is not None else WarningParameters()
        self.capability = capability
        induction = capability == "induction"  # the one capability that is known to be built on previous-token heads
        self._watches = {
            name: watch if induction else dataclasses.replace(watch, gate=None)
            for name, watch in self.parameters.watches().items()
            if watch.signal != "previous_token" or induction
        }
        self._axis: str | None = None
        self._alarms = {name: HeadAlarms(watch.rule, watch.gate is not None) for name, watch in self._watches.items()}
        if self.parameters.crossing is not None:
            self._alarms["selectivity_crossing"] = HeadAlarms(self.parameters.crossing.rule)
        gates = {name: watch.gate for name, watch in self._watches.items()}
        self._gates = {name: HeadAlarms(rule) for name, rule in gates.items() if rule is not None}
        self._sink = JumpDetector(self.parameters.sink) if self.parameters.sink is not None else None

    def update(self, observation: Observation, circuit_members: Collection[Head] = ()) -> list[Event]:
        """Take the next observation; returns its alarms, one event a kind (and direction) with all heads in it.

        ``circuit_members``: the heads that were in the circuit *before* this observation. They raise no early
        warning: what they warn of is there already. Their state goes on all the same.

        A marked or non-finite observation is skipped. An observation without a token count counts by steps when the
        first one had none either, and is skipped otherwise: the two cannot share an axis.
        """
        at = self._position(observation)
        if at is None or observation.mark is not None or not observation.finite:
            return []
        members = {str(head) for head in circuit_members}
        heads = observation.heads
        names = [str(head) for head in heads]
        usable = heads.status == OK
        events: list[Event] = []
        for name, watch in self._watches.items():
            values = self._series(watch.signal, heads, usable)
            lows = {head: self._alarms[name].minimum(head) for head in names}
            gate = self._gate(name, at, names, heads, usable)
            moved = self._alarms[name].update(at, names, values, gate)
            rising = [head for head in moved["up"] if head not in members]
            if rising and not (watch.until_formed and members):
                events.append(self._rise(observation, watch, rising, dict(zip(names, values, strict=True)), lows))
        if self.parameters.crossing is not None:
            scores = np.where(usable, self.parameters.crossing.score(heads, self.capability), np.nan)
            moved = self._alarms["selectivity_crossing"].update(at, names, scores)
            selectivity = dict(zip(names, signal("selectivity", heads, self.length, self.capability), strict=True))
            for direction in ("up", "down"):
                if moved[direction]:
                    events.append(self._crossing(observation, direction, moved[direction], selectivity))
        events += self._sink_transition(observation, at, usable)
        return events

    # -- inside -------------------------------------------------------------------------------------------------

    def _position(self, observation: Observation) -> float | None:
        if self._axis is None:
            self._axis = "steps" if observation.tokens is None else "tokens"
        value = observation.tokens if self._axis == "tokens" else float(observation.step)
        return None if position(value) is None else value

    def _series(self, name: str, heads: HeadTable, usable: np.ndarray) -> FloatArray:
        return np.where(usable, signal(name, heads, self.length, self.capability), np.nan)

    def _gate(self, name: str, at: float, names: Sequence[str], heads: HeadTable, usable: np.ndarray) -> bool:
        """Open where there is no gate, or no head that could ever open it (a single layer)."""
        gate = self._gates.get(name)
        if gate is None:
            return True
        values = self._series("previous_token", heads, usable)
        gate.update(at, names, values)
        return gate.any_inside or not bool(np.isfinite(values).any())

    def _rise(
        self,
        observation: Observation,
        watch: Watch,
        rising: list[str],
        values: Mapping[str, float],
        lows: Mapping[str, float],
    ) -> Event:
        note = trust_note(watch.kind, watch.capability or self.capability)
        gate = self._gates.get("pr_rise") if watch.gate is not None else None
        verb = "rises" if gate is None or not gate.any_inside else "has risen, and a previous-token head rises below"
        detail: dict[str, Any] = {"values": {head: float(values[head]) for head in rising}}
        if isinstance(watch.rule, RiseRule):
            detail["minima"] = {head: lows[head] for head in rising}
            said = [f"{head} {values[head]:.3g} ({values[head] / lows[head]:.1f} x its minimum)" for head in rising]
        else:
            detail["bar"] = watch.rule.bar
            said = [f"{head} {values[head]:.3g}" for head in rising]
        return self._event(
            observation,
            watch.kind,
            tuple(rising),
            capability=watch.capability,
            direction="up",
            value=max(detail["values"].values()),
            text=f"{_UNITS[watch.signal]} {verb}: {', '.join(said)}. {note}",
            detail=detail,
        )

    def _crossing(
        self, observation: Observation, direction: str, moved: list[str], selectivity: Mapping[str, float]
    ) -> Event:
        crossing = self.parameters.crossing
        assert crossing is not None
        verb = "reaches" if direction == "up" else "leaves"
        said = ", ".join(f"{head} {selectivity[head]:.3g}x" for head in moved)
        return self._event(
            observation,
            "selectivity_crossing",
            tuple(moved),
            direction=direction,
            value=max(float(selectivity[head]) for head in moved),
            text=f"{self.capability} selectivity {verb} {crossing.selectivity:g}x: {said}",
            detail={"values": {head: float(selectivity[head]) for head in moved}, "bar": crossing.selectivity},
        )

    def _sink_transition(self, observation: Observation, at: float, usable: np.ndarray) -> list[Event]:
        if self._sink is None or not usable.any():
            return []
        share = float(np.mean(observation.heads.head_class[usable] == "first_token"))
        direction, gain = self._sink.update(at, share, int(usable.sum()))
        if direction != "up":
            return []
        text = f"first-token heads jump to {share:.1%} of all heads, {100 * gain:.0f} points a doubling of the tokens"
        fields = {"direction": "up", "value": share, "text": text, "detail": {"gain": gain}}
        return [self._event(observation, "sink_transition", (), capability="first_token", **fields)]

    def _event(
        self, observation: Observation, kind: str, heads: tuple[str, ...], capability: str | None = None, **fields: Any
    ) -> Event:
        return Event(
            kind=kind,
            step=observation.step,
            tokens=observation.tokens,
            probe=observation.probe,
            capability=capability if capability is not None else self.capability,
            heads=heads,
            time=observation.time,
            **fields,
        )

    # -- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next ``update`` depends on; JSON values only."""
        return {
            "format": STATE_FORMAT,
            "parameters": self.parameters.to_dict(),
            "axis": self._axis,
            "alarms": {name: one.state_dict() for name, one in self._alarms.items()},
            "gates": {name: gate.state_dict() for name, gate in self._gates.items()},
            "sink": self._sink.state_dict() if self._sink is not None else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict``'s state.

        An alarm whose rule has changed since starts anew (its next observation is its first): its old state speaks
        of other thresholds.

        Raises:
            ThresholdError: the state is of another format.
        """
        if state.get("format") != STATE_FORMAT:
            raise ThresholdError(
                f"early warning: the saved state has format {state.get('format')!r}, this version reads "
                f"{STATE_FORMAT}: resume with the version that wrote it, or start a new run_dir"
            )
        before = WarningParameters.from_dict(state["parameters"])
        self._axis = state["axis"]
        watched = before.watches()
        same = {name for name, watch in self._watches.items() if name in watched and watched[name].rule == watch.rule}
        if before.crossing == self.parameters.crossing:
            same.add("selectivity_crossing")
        for name in same & set(self._alarms) & set(state["alarms"]):
            self._alarms[name].load_state_dict(state["alarms"][name])
        for name in same & set(self._gates) & set(state["gates"]):
            if watched[name].gate == self._watches[name].gate:
                self._gates[name].load_state_dict(state["gates"][name])
        if self._sink is not None and state["sink"] is not None and before.sink == self.parameters.sink:
            self._sink.load_state_dict(state["sink"])
