"""The W&B workspace: which of the monitor's metrics stand together, as plain data, and its way to W&B.

The definition uses the names of ``names.py`` only. Names of flagged heads are known once a run has flagged them: given
a run directory the panels list exactly those heads, without one they match the pattern of head names.
"""

from __future__ import annotations

import importlib
import json
import os
import re
from dataclasses import dataclass
from typing import Any

from spectral_monitor.observation import CLASSES, UNCLASSIFIED
from spectral_monitor.publish import names
from spectral_monitor.publish.names import PublishError, head_metric, metric, verdict_metric

NAME = "Spectral monitor"


@dataclass(frozen=True)
class Lines:
    """A line plot over the monitor's step: of ``metrics`` (exact names), or of all that ``pattern`` matches."""

    title: str
    metrics: tuple[str, ...] = ()
    pattern: str = ""
    log_y: bool = False


@dataclass(frozen=True)
class Pictures:
    """A browser of logged pictures."""

    title: str
    keys: tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """The newest logged table."""

    key: str


Panel = Lines | Pictures | Table


@dataclass(frozen=True)
class Section:
    """A titled row of panels."""

    name: str
    panels: tuple[Panel, ...]
    open: bool = True


def sections(heads: tuple[str, ...] = (), probe: str = names.DEFAULT_PROBE) -> tuple[Section, ...]:
    """The workspace's sections. ``heads``: the flagged heads' metric names, when they are known."""

    def of(*suffixes: str) -> tuple[str, ...]:
        return tuple(metric(suffix, probe) for suffix in suffixes)

    def of_heads(title: str, what: str, log_y: bool = False) -> Lines:
        pattern = head_pattern(what, probe)
        exact = tuple(name for name in heads if re.fullmatch(pattern, name))
        return Lines(title, exact, "" if heads else pattern, log_y)

    fractions = of(*(f"class_fraction/{name}" for name in (*CLASSES, UNCLASSIFIED)))
    alarms = of(*(item.suffix for item in names.ALARMS if item.suffix != "lead_ratio"))
    verdict = tuple(verdict_metric("induction", item.suffix, "zero", probe) for item in names.VERDICT)
    effect, p_value, *control = verdict
    pictures = of(names.PICTURE)
    return (
        Section(
            "Overview",
            (
                Lines("Crossings and alarms so far", alarms),
                Lines("Causal check: effect (nats)", (effect,)),
                Lines("Causal check: p-value", (p_value,)),
                Lines("Probe accuracy", of("probe_top1", "probe_top5")),
                Lines("Probe loss (nats)", of("probe_loss")),
                Lines("Share of heads by class", fractions),
                Lines("Monitor's share of wall time", (names.SHARE,)),
            ),
        ),
        Section(
            "Early warning",
            (
                of_heads("Effective rank (PR) of flagged heads", "pr"),
                Lines("Alarms by kind", of(*(f"alarms/{kind}" for kind in names.ALARM_KINDS))),
                Lines("Lead: tokens at the crossing / tokens at the alarm", of("lead_ratio")),
                Lines("Effective rank, all heads", of("pr_mean", "pr_max")),
                Pictures("Distribution of effective ranks", of(names.HISTOGRAM)),
            ),
        ),
        Section(
            "Circuits",
            (
                of_heads("Selectivity of flagged heads", "selectivity", log_y=True),
                of_heads("Attention on the target, flagged heads", "attention"),
                Lines("Heads over both bars", of("candidates")),
                Lines("Strongest head: attention", of("attention_max")),
                Lines(
                    "Strongest head: selectivity, and the noise floor",
                    of("selectivity_max", "null_p99"),
                    log_y=True,
                ),
                Lines("Effect beside its matched-random control (nats)", (effect, *control)),
                Pictures("Layers by heads: effective rank | induction attention | class", pictures),
                Table(metric(names.TABLE, probe)),
            ),
        ),
        Section(
            "Sinks",
            (
                Lines("First-token heads (share of all)", of("class_fraction/first_token")),
                Lines("Self and local heads (share of all)", of("class_fraction/self", "class_fraction/local")),
                Pictures("By layer (right panel: grey = first token)", pictures),
            ),
        ),
        Section(
            "Run health",
            (
                Lines("Seconds a look", of("seconds")),
                Lines("Monitor's share of wall time", (names.SHARE,)),
                Lines("Heads not finite, heads dead", of("heads_not_finite", "heads_dead")),
                Lines("Training tokens", (names.TOKENS,)),
            ),
            open=False,
        ),
    )


def head_pattern(what: str, probe: str = names.DEFAULT_PROBE) -> str:
    """A pattern that matches exactly the names that ``head_metric`` gives for ``what``, whatever head and class."""
    example = head_metric("HEAD", what, "CLASS", probe)
    return "^" + re.escape(example).replace("HEAD", r"L\d+H\d+").replace("CLASS", r"\w+") + "$"


def flagged_heads(run_dir: str | os.PathLike[str], max_keys: int = names.MAX_KEYS) -> tuple[str, ...]:
    """Metric names of the heads that a run's record flags, in the order in which they were flagged."""
    from spectral_monitor.publish.rows import Rows
    from spectral_monitor.record import RunRecord

    record = RunRecord.open(run_dir)
    rows = Rows(max_keys)
    rows.start({**record.run, "run_dir": run_dir})
    for observation in record.observations():
        rows.observation(observation)
    return tuple(
        head_metric(head, item.suffix, target, probe)
        for (probe, head), target in rows.flagged.items()
        for item in names.HEAD
    )


def workspace(entity: str, project: str, heads: tuple[str, ...] = (), name: str = NAME) -> Any:
    """The ``wandb_workspaces`` object; PublishError when that package is missing."""
    try:
        panels: Any = importlib.import_module("wandb_workspaces.reports.v2")
        workspaces: Any = importlib.import_module("wandb_workspaces.workspaces")
    except ImportError:
        raise PublishError(
            "the W&B dashboard needs the package wandb-workspaces: pip install 'spectral_monitor[dashboard]'"
        ) from None

    def build(panel: Panel, place: int) -> Any:
        layout = panels.Layout(x=8 * (place % 3), y=6 * (place // 3), w=8, h=6)
        if isinstance(panel, Pictures):
            return panels.MediaBrowser(title=panel.title, media_keys=list(panel.keys), layout=layout)
        if isinstance(panel, Table):
            return panels.WeavePanelSummaryTable(table_name=panel.key, layout=layout)
        return panels.LinePlot(
            title=panel.title,
            x=names.STEP,
            y=list(panel.metrics),
            metric_regex=panel.pattern or None,
            log_y=panel.log_y or None,
            layout=layout,
        )

    return workspaces.Workspace(
        entity=entity,
        project=project,
        name=name,
        sections=[
            workspaces.Section(
                name=section.name,
                panels=[build(panel, place) for place, panel in enumerate(section.panels)],
                is_open=section.open,
            )
            for section in sections(heads)
        ],
        settings=workspaces.WorkspaceSettings(x_axis=names.STEP),
    )


def as_json(entity: str = "ENTITY", project: str = "PROJECT", heads: tuple[str, ...] = ()) -> str:
    """The workspace as W&B would store it, without a network; the same text each time (random ids are numbered)."""
    raw = json.loads(workspace(entity, project, heads)._to_model().model_dump_json(by_alias=True))
    return json.dumps(_numbered(raw, {}), indent=1, sort_keys=True) + "\n"


def push(entity: str, project: str, heads: tuple[str, ...] = ()) -> str:
    """Save the workspace as a new view of the project; returns its address. PublishError says why it could not."""
    made = workspace(entity, project, heads)
    try:
        made.save()
    except Exception as error:
        raise PublishError(
            f"the workspace could not be saved to {entity}/{project} ({type(error).__name__}: {error}); "
            "check `wandb login`, the entity and the project, or use `dashboard show` for the definition as JSON"
        ) from error
    return str(made.url)


def _numbered(value: Any, seen: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {
            key: seen.setdefault(item, f"id{len(seen)}")
            if key in ("id", "__id__") and isinstance(item, str) and item
            else _numbered(item, seen)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_numbered(item, seen) for item in value]
    return value
