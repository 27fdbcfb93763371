"""What is published of observations, events and verdicts, as flat rows of numbers: the same for every tracker."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from spectral_monitor.errors import RecordError
from spectral_monitor.heads import Head
from spectral_monitor.observation import CLASSES, DEAD, NOT_FINITE, UNCLASSIFIED, Event, Observation, Verdict
from spectral_monitor.publish import names
from spectral_monitor.record import RunRecord

log = logging.getLogger("spectral_monitor")

Row = dict[str, float]

#: Columns of the table of all heads; the classes' attention and selectivity follow.
TABLE_COLUMNS = ("layer", "head", "head_class", "status", "pr", "pr_moment")
#: Alarm kinds that come before a crossing, if they are worth anything.
_EARLY = ("pr_rise", "content_rise", "attention_rise")


@dataclass(frozen=True)
class Bars:
    """From where on a head counts as a candidate (recipe section 3)."""

    selectivity: float = 50.0
    attention: float = 0.02

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> Bars:
        """The monitor's own thresholds (run.json, ``config``) where they are known, else the recipe's."""
        config = info.get("config")
        given = config.get("thresholds") if isinstance(config, Mapping) else None
        given = given if isinstance(given, Mapping) else {}
        return cls(float(given.get("member", cls.selectivity)), float(given.get("min_attention", cls.attention)))


def capability_of(probe: str, info: Mapping[str, Any] | None = None) -> str:
    """The capability that the monitor states for ``probe``; ``""`` where it states none."""
    probes = (info or {}).get("probes")
    described = probes.get(probe) if isinstance(probes, Mapping) else None
    stated = described.get("capability") if isinstance(described, Mapping) else None
    return stated if isinstance(stated, str) else ""


def target_of(observation: Observation, info: Mapping[str, Any] | None = None) -> str:
    """The attention class that a probe is about: its capability, else the class of its name, else induction."""
    for name in (capability_of(observation.probe, info), observation.probe, names.DEFAULT_PROBE):
        if name in observation.heads.attention:
            return name
    return next(iter(observation.heads.attention), names.DEFAULT_PROBE)


class Rows:
    """Turns what a monitor says into rows, and keeps what rows need to know of the past.

    A head gets scalar keys of its own once it is flagged (a candidate by its attention and selectivity, named by a
    crossing, an alarm or a verdict) and keeps them for the run. At most ``head_cap`` heads of a probe are flagged, half
    of them by alarms alone, so that early false alarms leave room for the circuit.
    """

    def __init__(
        self, max_keys: int = names.MAX_KEYS, head_cap: int = names.HEAD_CAP, bars: Bars | None = None
    ) -> None:
        if head_cap < 0:
            raise names.PublishError(f"head_cap is {head_cap}: give 0 or a positive number of heads")
        self.budget = names.KeyBudget(max_keys)
        self.head_cap = head_cap
        self.bars = bars or Bars()
        self.flagged: dict[tuple[str, str], str] = {}
        self.not_shown: set[tuple[str, str]] = set()
        self._by_alarm: dict[str, int] = {}
        self._counts: dict[str, dict[str, int]] = {}
        self._first_alarm: dict[tuple[str, str], float] = {}
        self._leads: dict[tuple[str, str], float] = {}
        self._probes: set[str] = set()
        self._seen: set[str] = set()
        self._info: Mapping[str, Any] = {}
        #: Probe -> the last event that no row has counted yet.
        self._stale: dict[str, Event] = {}
        self._said: set[str] = set()

    def start(self, info: Mapping[str, Any]) -> tuple[list[Event], list[Verdict]]:
        """Take over the monitor's thresholds, and the counts of an earlier session of the same run directory.

        Returns the events and verdicts that the record holds already: they were announced, and are not again.
        """
        self.bars, self._info = Bars.of(info), info
        probes = info.get("probes")
        for probe in probes if isinstance(probes, Mapping) else ():  # all of them, before heads take what is left
            self._open(probe)
        events, verdicts = history_of(info)
        for event in events:
            self.event(event)
        for verdict in verdicts:
            self._open(verdict.probe, verdict.capability)
            for head in verdict.heads:
                self.flag(head, verdict.capability, verdict.probe)
        self._stale.clear()
        return events, verdicts

    # -- rows ---------------------------------------------------------------------------------------------------

    def observation(self, observation: Observation) -> Row:
        """One row for one observation; numbers that are not finite are left out, never logged as 0."""
        probe, heads, target = observation.probe, observation.heads, target_of(observation, self._info)
        self._open(probe, target)
        self._flag_candidates(observation)
        classes = heads.head_class
        values: dict[str, float] = {
            "probe_top1": observation.metrics.top1,
            "probe_top5": observation.metrics.top5,
            "probe_loss": observation.metrics.loss,
            "pr_mean": _reduce(np.mean, heads.pr),
            "pr_max": _reduce(np.max, heads.pr),
            "heads_not_finite": float(np.count_nonzero(heads.status == NOT_FINITE)),
            "heads_dead": float(np.count_nonzero(heads.status == DEAD)),
            "null_p99": observation.null_p99,
            "seconds": observation.seconds,
        }
        for name in (*CLASSES, UNCLASSIFIED):
            values[f"class_fraction/{name}"] = float(np.mean(classes == name)) if len(heads) else math.nan
        if target in heads.attention:
            values["attention_max"] = _reduce(np.max, heads.attention[target])
            values["selectivity_max"] = _reduce(np.max, heads.selectivity[target])
            values["candidates"] = float(np.count_nonzero(self._candidates(observation, target)))
        row = {names.metric(suffix, probe): value for suffix, value in values.items()}
        row |= self._alarm_counts(probe)
        row |= self._flagged_heads(observation)
        row[names.SHARE] = observation.share
        return self._finish(row, observation.step, observation.tokens, probe)

    def verdict(self, verdict: Verdict) -> Row:
        """One row for one verdict: its effect and p-value beside the spread of its control."""
        self._open(verdict.probe, verdict.capability)
        for head in verdict.heads:
            self.flag(head, verdict.capability, verdict.probe)
        values = {"effect": verdict.effect, "p_value": verdict.p_value}
        baseline = verdict.condition("baseline")
        if baseline is not None and verdict.random and verdict.mode == "zero":
            falls = np.array([baseline.logprob - draw.logprob for draw in verdict.random])
            values |= {"control_mean": _reduce(np.mean, falls), "control_max": _reduce(np.max, falls)}
        row = {
            names.verdict_metric(verdict.capability, what, verdict.mode, verdict.probe): value
            for what, value in values.items()
        }
        row |= self._alarm_counts(verdict.probe)
        return self._finish(row, verdict.step, verdict.tokens, verdict.probe)

    def event(self, event: Event) -> bool:
        """Count an event; False when it was counted before (a resumed run may tell it again)."""
        if event.key in self._seen:
            return False
        self._seen.add(event.key)
        alarm = event.kind in _EARLY
        if event.kind not in names.ALARM_KINDS and event.kind not in ("circuit_formed", "circuit_lost"):
            return True
        probe = event.probe or names.DEFAULT_PROBE
        self._open(probe, event.capability)
        counts = self._counts[probe]
        counts["alarms/all"] = counts.get("alarms/all", 0) + 1
        if event.kind in names.ALARM_KINDS:
            counts[f"alarms/{event.kind}"] = counts.get(f"alarms/{event.kind}", 0) + 1
        self._stale[probe] = event
        for head in event.heads:
            self.flag(head, event.capability or "induction", probe, by_alarm=alarm)
            self._note_lead(event, probe, head, alarm)
        return True

    def counts_row(self) -> Row:
        """The running counts alone: for the end of a run whose last events came after their probes' last rows."""
        if not self._stale:
            return {}
        stale = dict(self._stale)
        last = max(stale.values(), key=lambda event: event.step)
        row = {key: value for probe in stale for key, value in self._alarm_counts(probe).items()}
        return self._finish(row, last.step, last.tokens, next(iter(stale)))

    def say_left_out(self, where: str) -> None:
        """Warn, once a probe, of numbers that found no room among the keys; heads' own keys are not meant."""
        for probe, keys in self.budget.refused.items():
            if probe in self._said:
                continue
            self._said.add(probe)
            log.warning(
                "%s: %d numbers of the probe %s are left out (%s and the like): at most %d keys a probe (max_keys) and "
                "%d a run; the run record has them all",
                where,
                len(keys),
                probe,
                min(keys),
                self.budget.limit,
                names.HARD_LIMIT,
            )

    # -- flagged heads ------------------------------------------------------------------------------------------

    def flag(self, head: str, target: str, probe: str = names.DEFAULT_PROBE, by_alarm: bool = False) -> bool:
        """Give ``head`` scalar keys from now on, if there is room; ``target`` is the class to show."""
        key = (probe, head)
        if key in self.flagged:
            return True
        self._open(probe, target)
        shown, alarmed = sum(of == probe for of, _ in self.flagged), self._by_alarm.get(probe, 0)
        full = shown >= self.head_cap or (by_alarm and alarmed >= max(1, self.head_cap // 2))
        if full or self.budget.room(probe) < len(names.HEAD):
            self.not_shown.add(key)
            return False
        self.budget.reserve((names.head_metric(head, item.suffix, target, probe) for item in names.HEAD), probe)
        self.flagged[key] = target
        self.not_shown.discard(key)
        self._by_alarm[probe] = alarmed + by_alarm
        return True

    def _flag_candidates(self, observation: Observation) -> None:
        target = target_of(observation, self._info)
        if not observation.finite or target not in observation.heads.selectivity:
            return
        found = np.flatnonzero(self._candidates(observation, target))
        strongest = found[np.argsort(-observation.heads.attention[target][found], kind="stable")]
        all_heads = list(observation.heads)
        for index in strongest:
            self.flag(str(all_heads[index]), target, observation.probe)

    def _candidates(self, observation: Observation, target: str) -> np.ndarray:
        heads = observation.heads
        with np.errstate(invalid="ignore"):
            passed: np.ndarray = (heads.selectivity[target] >= self.bars.selectivity) & (
                heads.attention[target] >= self.bars.attention
            )
        return passed

    def _flagged_heads(self, observation: Observation) -> Row:
        row: Row = {}
        table = observation.heads
        for (probe, head), target in self.flagged.items():
            if probe != observation.probe:
                continue
            try:
                index = table.index(Head.parse(head))
            except (KeyError, ValueError):
                continue
            for item, values in zip(
                names.HEAD, (table.pr, table.attention.get(target), table.selectivity.get(target)), strict=True
            ):
                if values is not None:
                    row[names.head_metric(head, item.suffix, target, probe)] = float(values[index])
        return row

    # -- inside -------------------------------------------------------------------------------------------------

    def _open(self, probe: str, capability: str = "") -> None:
        """Keep room for the names that every probe has, before heads take what is left."""
        if probe in self._probes:
            return
        self._probes.add(probe)
        self._counts[probe] = {}
        capability = capability_of(probe, self._info) or capability or names.DEFAULT_PROBE
        self.budget.reserve(names.fixed(probe, capability), probe)

    def _note_lead(self, event: Event, probe: str, head: str, alarm: bool) -> None:
        tokens = event.tokens if event.tokens is not None else float(event.step)
        if not tokens > 0:
            return
        if alarm:
            self._first_alarm.setdefault((probe, head), tokens)
        elif event.kind == "selectivity_crossing" and event.direction != "down":
            start = self._first_alarm.get((probe, head))
            if start is not None:
                self._leads.setdefault((probe, head), tokens / start)

    def _alarm_counts(self, probe: str) -> Row:
        self._stale.pop(probe, None)
        counts = self._counts[probe]
        row = {
            names.metric(item.suffix, probe): float(counts.get(item.suffix, 0))
            for item in names.ALARMS
            if item.suffix != "lead_ratio"
        }
        leads = [value for (of, _), value in self._leads.items() if of == probe]
        if leads:
            row[names.metric("lead_ratio", probe)] = float(np.median(leads))
        return row

    def _finish(self, row: Mapping[str, float], step: int, tokens: float | None, probe: str) -> Row:
        whole = {names.STEP: float(step), names.TOKENS: math.nan if tokens is None else float(tokens), **row}
        return {key: value for key, value in whole.items() if math.isfinite(value) and self.budget.admit(key, probe)}


def history_of(info: Mapping[str, Any]) -> tuple[list[Event], list[Verdict]]:
    """Events and verdicts that the record of ``info["run_dir"]`` holds already; none where there is no record."""
    if not info.get("run_dir"):
        return [], []
    try:
        record = RunRecord.open(info["run_dir"])
        return record.events(), record.verdicts()
    except (RecordError, OSError, ValueError, KeyError):
        return [], []


def table_of_heads(observation: Observation) -> tuple[list[str], list[list[Any]]]:
    """Column names and one list a head: everything that was measured. What is not finite is None."""
    heads = observation.heads
    columns: dict[str, Iterable[Any]] = {
        "layer": heads.layer.tolist(),
        "head": heads.head.tolist(),
        "head_class": heads.head_class.tolist(),
        "status": heads.status.tolist(),
        "pr": _cells(heads.pr),
        "pr_moment": _cells(heads.pr_moment),
    }
    columns |= {f"attention_{name}": _cells(values) for name, values in heads.attention.items()}
    columns |= {f"selectivity_{name}": _cells(values) for name, values in heads.selectivity.items()}
    columns |= {name: _cells(values) for name, values in heads.extra.items()}
    return list(columns), [list(row) for row in zip(*columns.values(), strict=True)]


def histogram(observation: Observation, bins: int = 30) -> tuple[np.ndarray, np.ndarray] | None:
    """Counts and bin edges of the finite effective ranks; None when there is none (nothing is to be logged then)."""
    finite = observation.heads.pr[np.isfinite(observation.heads.pr)]
    if not len(finite):
        return None
    counts, edges = np.histogram(finite, bins=bins)
    return counts, edges


def _reduce(function: Any, values: np.ndarray) -> float:
    finite = np.asarray(values)[np.isfinite(values)]
    return float(function(finite)) if len(finite) else math.nan


def _cells(values: np.ndarray) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in np.asarray(values, dtype=np.float64).tolist()]
