"""The names of everything that is published: the one source of truth for rows, dashboards and documentation.

A row is one flat mapping of metric names to numbers. Names of the default probe (``induction``) stand directly under
``spectral_monitor/``; those of any other probe under ``spectral_monitor/<probe>/``, so that two monitors with
different probes can share one run. No name is the folder of another: some trackers keep a metric as a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from spectral_monitor.errors import SpectralMonitorError
from spectral_monitor.observation import CLASSES, UNCLASSIFIED

PREFIX = "spectral_monitor"
DEFAULT_PROBE = "induction"

#: The x-axis that the Trainer's own W&B and trackio callbacks declare for everything in the run.
GLOBAL_STEP = "train/global_step"
#: The monitor's own x-axes: finished optimizer updates, and training tokens seen.
STEP = f"{PREFIX}/step"
TOKENS = f"{PREFIX}/tokens"
#: The monitor's share of the run's wall time so far.
SHARE = f"{PREFIX}/share"

#: Scalar keys that a probe gets by default, whatever the model's size; and those of a run, which no option goes beyond.
MAX_KEYS, HARD_LIMIT = 60, 500
#: Heads of a probe that get scalar keys of their own (three each); every head is in the table.
HEAD_CAP = 8

#: Alarm kinds with a running count of their own.
ALARM_KINDS = ("pr_rise", "content_rise", "attention_rise", "selectivity_crossing")


class PublishError(SpectralMonitorError, ValueError):
    """Something cannot be published as asked."""


@dataclass(frozen=True)
class Metric:
    """One metric of a probe: ``suffix`` under the probe's scope, and what it is, in one line."""

    suffix: str
    meaning: str


#: One value each observation.
OBSERVATION = (
    Metric("probe_top1", "share of probe rows whose most probable token is the target"),
    Metric("probe_top5", "share of probe rows with the target among the five most probable tokens"),
    Metric("probe_loss", "mean negative log-probability of the target (nats)"),
    Metric("pr_mean", "mean entropy effective rank over heads that have one"),
    Metric("pr_max", "largest entropy effective rank of a head"),
    *(
        Metric(f"class_fraction/{name}", f"share of all heads classified as {name}")
        for name in (*CLASSES, UNCLASSIFIED)
    ),
    Metric("attention_max", "largest attention of a head on the probe's target class (0 to 1)"),
    Metric("selectivity_max", "largest selectivity of a head for the probe's target class"),
    Metric("candidates", "heads over the circuit's selectivity threshold and the attention floor"),
    Metric("heads_not_finite", "heads with NaN or infinity in their output; left out of every other number"),
    Metric("heads_dead", "heads whose output is zero: they have no effective rank"),
    Metric("null_p99", "99th percentile of the null selectivity: the model's noise floor"),
    Metric("seconds", "what the look cost (seconds)"),
)
#: Running counts, in every row.
ALARMS = (
    Metric("alarms/all", "crossings and alarms so far, all kinds"),
    *(Metric(f"alarms/{kind}", f"{kind} events so far") for kind in ALARM_KINDS),
    Metric("lead_ratio", "median over heads of tokens at the crossing / tokens at the head's first alarm"),
)
#: Once a causal check, for its capability.
VERDICT = (
    Metric("effect", "fall of the target log-probability when the circuit is taken out (nats)"),
    Metric("p_value", "randomisation p-value over the matched-random draws"),
    Metric("control_mean", "mean fall over the matched-random draws (nats)"),
    Metric("control_max", "largest fall over the matched-random draws (nats)"),
)
#: What a second ablation mode adds.
BOTH_MODES = ("effect", "p_value")
#: Each observation, for heads that were flagged (a hard cap applies).
HEAD = (
    Metric("pr", "entropy effective rank"),
    Metric("attention", "mean attention on the class's target (0 to 1)"),
    Metric("selectivity", "attention / baseline"),
)
#: Not scalars: the table of all heads, the layer-by-head picture, the distribution of effective ranks.
TABLE, PICTURE, HISTOGRAM = "heads", "layers_by_heads", "pr_histogram"


def metric(suffix: str, probe: str = DEFAULT_PROBE) -> str:
    """Full name of a metric: ``metric("probe_top1") == "spectral_monitor/probe_top1"``."""
    return f"{PREFIX}/{suffix}" if probe == DEFAULT_PROBE else f"{PREFIX}/{probe}/{suffix}"


def head_metric(head: str, what: str, target: str, probe: str = DEFAULT_PROBE) -> str:
    """Full name of a flagged head's metric; ``target`` is the class that attention and selectivity are measured on."""
    suffix = f"head/{head}/{what}" if what == "pr" else f"head/{head}/{what}/{target}"
    return metric(suffix, probe)


def verdict_metric(capability: str, what: str, mode: str, probe: str = DEFAULT_PROBE) -> str:
    """Full name of a verdict's number; zero ablation (the default) is not named, other modes are.

    Modes other than zero get only ``effect`` and ``p_value`` (``BOTH_MODES``): the control's spread is shown once.
    """
    middle = capability if mode == "zero" else f"{capability}/{mode}"
    return metric(f"verdict/{middle}/{what}", probe)


def fixed(probe: str = DEFAULT_PROBE, capability: str = "induction") -> Iterator[str]:
    """Every scalar name of a probe that does not depend on which heads are flagged, the shared ones included."""
    yield from (GLOBAL_STEP, STEP, TOKENS, SHARE)
    for group in (OBSERVATION, ALARMS):
        yield from (metric(item.suffix, probe) for item in group)
    yield from (verdict_metric(capability, item.suffix, "zero", probe) for item in VERDICT)
    yield from (verdict_metric(capability, what, "mean", probe) for what in BOTH_MODES)


class KeyBudget:
    """Lets at most ``limit`` distinct scalar keys a probe into a run, and ``HARD_LIMIT`` of all probes together.

    The vendor advises against more than some thousands a project. Keys that all probes share count for the first one.
    PublishError for a limit outside 1..``HARD_LIMIT``.
    """

    def __init__(self, limit: int = MAX_KEYS) -> None:
        if not 1 <= limit <= HARD_LIMIT:
            raise PublishError(f"max_keys is {limit}: give a number from 1 to {HARD_LIMIT}")
        self.limit = limit
        #: Key -> the probe that it counts for.
        self.keys: dict[str, str] = {}
        #: Probe -> its keys that found no room.
        self.refused: dict[str, set[str]] = {}

    def reserve(self, keys: Iterable[str], probe: str = DEFAULT_PROBE) -> None:
        """Keep room for ``keys`` of ``probe`` (in order, as far as it goes)."""
        for key in keys:
            self.admit(key, probe)

    def room(self, probe: str = DEFAULT_PROBE) -> int:
        """Further keys that ``probe`` may have."""
        used = sum(of == probe for of in self.keys.values())
        return min(self.limit - used, HARD_LIMIT - len(self.keys))

    def admit(self, key: str, probe: str = DEFAULT_PROBE) -> bool:
        """Whether ``key`` of ``probe`` may be logged."""
        if key in self.keys:
            return True
        if self.room(probe) <= 0:
            self.refused.setdefault(probe, set()).add(key)
            return False
        self.keys[key] = probe
        return True
