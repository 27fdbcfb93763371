"""The tables of a run: one source for the report's HTML, the CSV files and the terminal."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import numpy as np

from spectral_monitor.development import Development
from spectral_monitor.development.milestones import Onset
from spectral_monitor.development.series import Series
from spectral_monitor.heads import names
from spectral_monitor.observation import ConditionMetrics, Event, Verdict

#: How many heads of a ranking are listed.
RANKED = 25


@dataclass(frozen=True)
class Table:
    """A table of plain values: None or NaN is shown as a dash and written to CSV as an empty field.

    ``columns`` are the headings with their units, ``formats`` maps a heading to a format (``"tokens"``, or a format
    specification such as ``".3f"``); CSV always has the full value. ``brief`` names the columns that HTML shows, where
    not all of them.
    """

    name: str
    title: str
    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    note: str = ""
    formats: dict[str, str] = field(default_factory=dict)
    brief: tuple[str, ...] = ()

    def csv(self) -> str:
        """The table as CSV with a heading line."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows(["" if missing(value) else value for value in row] for row in self.rows)
        return out.getvalue()

    def html(self) -> str:
        """The table as an HTML figure with its title and note."""
        shown_columns = self.brief or self.columns
        head = "".join(f'<th scope="col">{escape(column)}</th>' for column in shown_columns)
        lines = []
        for row in self.rows:
            cells = []
            for column, value in zip(self.columns, row, strict=True):
                if column not in shown_columns:
                    continue
                number = isinstance(value, (int, float)) and not isinstance(value, bool)
                shown = escape(show(value, self.formats.get(column, "")))
                cells.append(f'<td class="n">{shown}</td>' if number or missing(value) else f"<td>{shown}</td>")
            lines.append(f"<tr>{''.join(cells)}</tr>")
        body = "".join(lines) or f'<tr><td colspan="{len(shown_columns)}">none</td></tr>'
        note = f'<p class="note">{escape(self.note)}</p>' if self.note else ""
        return (
            f'<figure class="table" id="table-{self.name}"><figcaption>{escape(self.title)}</figcaption>'
            f'<div class="scroll"><table data-name="{self.name}"><thead><tr>{head}</tr></thead>'
            f"<tbody>{body}</tbody></table></div>{note}</figure>"
        )


def missing(value: Any) -> bool:
    """None and NaN: not measured, or never."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def show(value: Any, form: str = "") -> str:
    """One value for people: tokens as 264B, infinity as its sign, what is missing as a dash."""
    if missing(value):
        return "\u2013"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if math.isinf(value):
        return "∞"
    if form == "tokens":
        return tokens_text(float(value))
    if form == "percent":
        return f"{100 * value:.1f}%"
    if form:
        return format(value, form)
    return str(value) if isinstance(value, (int, np.integer)) else significant(float(value))


def significant(value: float, digits: int = 3) -> str:
    """Three significant digits, without exponents where they can be helped."""
    if value == 0:
        return "0"
    if 1e-4 <= abs(value) < 1e6:
        decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
        return f"{value:.{decimals}f}"
    return f"{value:.{digits - 1}e}"


def tokens_text(tokens: float) -> str:
    """``264e9 -> "264B"``, three significant digits."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(tokens) >= size * 0.9995:
            return f"{significant(tokens / size)}{letter}"
    return f"{tokens:g}"


def when(at: Onset, axis: str = "tokens") -> str:
    """An onset in words: ``between 117B and 264B tokens``."""
    if at.status == "not measured":
        return "not measured"
    if not at.seen:
        return "not seen"
    if axis == "step":
        by = f"step {at.by_step}"
        return f"at or before {by}" if at.after_step is None else f"between steps {at.after_step} and {at.by_step}"
    assert at.by_tokens is not None
    by = f"{tokens_text(at.by_tokens)} tokens"
    return f"at or before {by}" if at.after_tokens is None else f"between {tokens_text(at.after_tokens)} and {by}"


# -- the tables -------------------------------------------------------------------------------------------------------


def tables_of(found: Development, verdicts: Sequence[Verdict], events: Sequence[Event]) -> list[Table]:
    """Every table of a run; a table whose numbers the record lacks is left out."""
    series = found.series
    tables = [
        milestone_table(found),
        circuit_table(found),
        recall_table(found),
        lead_table(found),
        verdict_table(verdicts),
        ranking_table(found),
        precision_table(found),
        calibration_table(found),
        phase_table(found),
        first_token_table(found),
        alarm_table(events),
        observation_table(series),
    ]
    return [table for table in tables if table is not None]


def milestone_table(found: Development) -> Table:
    """F3: each milestone as an interval."""
    rows = [
        (name, at.status, at.after_step, at.by_step, at.after_tokens, at.by_tokens)
        for name, at in found.milestones.items()
    ]
    columns = ("milestone", "status", "after step", "by step", "after tokens", "by tokens")
    forms = {"after tokens": "tokens", "by tokens": "tokens"}
    return Table("milestones", "Milestones (F3)", columns, rows, "", forms)


def circuit_table(found: Development) -> Table:
    """The final circuit of each capability."""
    rows = [(capability, len(heads), " ".join(names(heads))) for capability, heads in found.final_circuits.items()]
    bars = found.series.bars
    note = (
        f"Selectivity at least {bars.member:g}x and target attention at least {bars.min_attention:g}; the "
        f"previous-token circuit also needs that class as its best one and {bars.previous_token:g}x."
    )
    return Table("circuits", "Final circuits", ("capability", "size", "heads"), rows, note)


def recall_table(found: Development) -> Table | None:
    """F4: when the screen knew a third, two thirds, all of the final circuit."""
    rows = []
    for capability, recall in found.recall.items():
        for level, reached in recall.levels.items():
            at = reached.onset
            rows.append(
                (
                    capability,
                    len(recall.final),
                    int(level),
                    at.by_step,
                    at.by_tokens,
                    reached.fraction,
                    reached.holds_from.by_step,
                    reached.holds_from.by_tokens,
                )
            )
    if not rows:
        return None
    columns = (
        "capability",
        "final heads",
        "recall %",
        "by step",
        "by tokens",
        "share of the run",
        "kept from step",
        "kept from tokens",
    )
    forms = {"by tokens": "tokens", "kept from tokens": "tokens", "share of the run": "percent"}
    note = "How early the same screen finds the heads of the final circuit (33% and 67% are one and two thirds)."
    return Table("recall", "Recall of the final circuit (F4)", columns, rows, note, forms)


def lead_table(found: Development) -> Table | None:
    """F5: PR rise against selectivity crossing, head by head."""
    if not found.leads:
        return None
    axis = found.series.axis
    rows = []
    for lead in found.leads:
        rise, crossing = (lead.rise.by_tokens, lead.crossing.by_tokens)
        if axis == "step":
            rise, crossing = lead.rise.by_step, lead.crossing.by_step
        rows.append(
            (
                str(lead.head),
                rise,
                crossing,
                lead.ratio,
                lead.low,
                lead.high,
                lead.observations,
                "certain" if lead.resolved else "within the schedule's resolution",
            )
        )
    unit = "tokens" if axis == "tokens" else "step"
    columns = ("head", f"PR rise, {unit}", f"crossing, {unit}", "lead x", "low", "high", "observations", "order")
    forms = {f"PR rise, {unit}": "tokens", f"crossing, {unit}": "tokens"} if axis == "tokens" else {}
    forms |= {"lead x": ".2f", "low": ".2f", "high": ".2f"}
    note = (
        f"Rise: PR at least {found.rise_factor:g} times its own running minimum. Low and high: what the distance "
        f"between observations allows. {base_rate_text(found)}"
    )
    return Table("lead", "Does PR come first? (F5)", columns, rows, note, forms)


def base_rate_text(found: Development) -> str:
    """The lead's base rate in a sentence."""
    base = found.base_rate
    if not base.heads:
        return "No head stayed outside the circuit: the lead has no base rate."
    if math.isnan(base.share_before):
        return f"Of {base.heads} heads that never joined, {base.rose} show the same rise."
    return (
        f"Base rate: of {base.heads} heads that never joined, {base.rose} show the same rise, "
        f"{base.rose_before} ({base.share_before:.0%}) no later than the circuit's median crossing."
    )


def condition_text(condition: ConditionMetrics | None) -> float:
    """Top-1 of a condition, NaN where there is none."""
    return math.nan if condition is None else condition.top1


#: Columns of the verdict table that the page shows elsewhere; CSV has them.
_UNSEEN = ("tokens", "heads", "reason", "probe rows", "excess low", "excess high")


def verdict_table(verdicts: Sequence[Verdict]) -> Table | None:
    """Every causal check."""
    if not verdicts:
        return None
    rows = []
    for verdict in verdicts:
        random = [draw.top1 for draw in verdict.random]
        rows.append(
            (
                verdict.step,
                verdict.tokens,
                verdict.capability,
                verdict.mode,
                verdict.verdict,
                " ".join(verdict.heads),
                verdict.p_value,
                verdict.draws,
                verdict.distinct_draws,
                verdict.effect,
                *verdict.effect_ci,
                verdict.excess,
                *verdict.excess_ci,
                condition_text(verdict.condition("baseline")),
                condition_text(verdict.condition("circuit")),
                float(np.mean(random)) if random else math.nan,
                condition_text(verdict.condition("upper bound")),
                verdict.rows,
                verdict.reason,
            )
        )
    columns = (
        "step",
        "tokens",
        "capability",
        "mode",
        "verdict",
        "heads",
        "p",
        "draws",
        "distinct draws",
        "effect, nats",
        "effect low",
        "effect high",
        "excess, nats",
        "excess low",
        "excess high",
        "top-1 intact",
        "top-1 circuit out",
        "top-1 random out",
        "top-1 all out",
        "probe rows",
        "reason",
    )
    forms = {"tokens": "tokens", "p": ".3g"} | {name: ".2f" for name in columns if "effect" in name or "excess" in name}
    forms |= {name: "percent" for name in columns if name.startswith("top-1")}
    note = "Effect: loss of target log-probability when the heads are taken out. Excess: the same over matched random."
    brief = tuple(name for name in columns if name not in _UNSEEN)
    return Table("verdicts", "Causal checks", columns, rows, note, forms, brief)


def ranking_table(found: Development) -> Table:
    """Heads by PR integral, with what the screen says of them."""
    series = found.series
    ranking, spread = found.rankings["integral"], found.rankings["spread"].values
    at = series.last
    rows = []
    for place, column in enumerate(ranking.order[:RANKED], 1):
        here = {name: float(np.nan_to_num(series.selectivity[name][at, column], nan=-1.0)) for name in series.classes}
        best = max(here, key=here.__getitem__, default="")
        rows.append(
            (
                place,
                str(series.heads[column]),
                float(ranking.values[column]),
                float(spread[column]),
                float(series.pr[at, column]),
                str(series.head_class[at, column]) or None,
                float(series.selectivity[best][at, column]) if best else math.nan,
                float(series.attention[best][at, column]) if best in series.attention else math.nan,
            )
        )
    score = {"integral": "PR integral", "pr": "PR", "spread": "PR spread"}[ranking.score]
    columns = ("rank", "head", score, "spread", "final PR", "class", "largest selectivity x", "attention there")
    note = "PR says that something specialised happens in a head, not what: the class column is the screen's answer."
    return Table("ranking", f"Heads by {score}", columns, rows, note, {"attention there": ".3f"})


def precision_table(found: Development) -> Table | None:
    """Precision at k of the two rankings."""
    if not found.precision:
        return None
    rows = [(entry.score, entry.k, entry.hits, entry.precision, entry.base_rate) for entry in found.precision]
    columns = ("ranking by", "k", "with a class", "precision", "among all heads")
    forms = {"precision": "percent", "among all heads": "percent"}
    return Table("precision", "Heads with a class among the best k", columns, rows, "", forms)


def calibration_table(found: Development) -> Table | None:
    """Noise floor, counts above bars, conserved fraction."""
    entry = found.calibration
    if entry is None:
        return None
    rows: list[tuple[Any, ...]] = [("null p99 (noise floor)", entry.null_p99), ("T_recall", entry.t_recall)]
    rows += [("T_precision", entry.t_precision), ("median selectivity", entry.median)]
    rows += [("largest selectivity", entry.largest)]
    rows += [(f"heads at or above {bar}x", count) for bar, count in entry.above.items()]
    rows += [("heads above the noise floor", entry.above_null)]
    rows += [("the same as a share of all heads", entry.conserved_by_null)]
    rows += [(f"with a class among the top {entry.top} by {entry.top_score}", entry.classified_in_top)]
    rows += [("the same as a share of all heads", entry.conserved_by_pr)]
    note = f"{entry.capability} at step {entry.step}, {entry.heads} heads."
    return Table("calibration", "Calibration of the screen", ("quantity", "value"), rows, note)


def phase_table(found: Development) -> Table | None:
    """The circuit before and after each switch of the data."""
    if not found.phase_changes:
        return None
    rows = [
        (
            f"{change.earlier} → {change.later}",
            change.earlier_step,
            change.later_step,
            " ".join(names(change.kept)),
            " ".join(names(change.lost)),
            " ".join(names(change.gained)),
            change.overlap.jaccard,
            change.overlap.expected,
            change.overlap.p_value,
        )
        for change in found.phase_changes
    ]
    columns = ("switch", "end step before", "end step after", "kept", "lost", "gained", "Jaccard", "by chance", "p")
    note = "By chance: as many heads in each layer, otherwise drawn at random."
    return Table("phases", "Circuits across a switch of the data", columns, rows, note)


def first_token_table(found: Development) -> Table | None:
    """F1: first-token heads a layer at each observation."""
    series = found.series
    if not series.has_classes:
        return None
    rows = []
    for index in range(len(series)):
        counts = [int(number) for number in found.first_token_by_layer[index]]
        rows.append(
            (int(series.steps[index]), tokens_at(series, index), float(found.first_token_fraction[index]), *counts)
        )
    columns = ("step", "tokens", "fraction", *(f"L{layer}" for layer in series.layers))
    forms = {"tokens": "tokens", "fraction": ".3f"}
    return Table("first_token", "First-token heads by layer (F1)", columns, rows, "", forms)


def alarm_table(events: Sequence[Event]) -> Table | None:
    """What was announced during the run."""
    if not events:
        return None
    rows = [
        (
            event.step,
            event.tokens,
            event.kind,
            event.capability or None,
            event.direction or None,
            " ".join(event.heads),
            event.text,
        )
        for event in events
    ]
    columns = ("step", "tokens", "kind", "capability", "direction", "heads", "text")
    return Table("events", "Events of the run", columns, rows, "", {"tokens": "tokens"})


def observation_table(series: Series) -> Table:
    """The observations themselves."""
    rows = [
        (
            int(series.steps[index]),
            tokens_at(series, index),
            series.labels[index],
            bool(series.usable[index]),
            series.marks[index],
            float(series.top1[index]),
            float(series.loss[index]),
            float(series.null_p99[index]),
            float(series.seconds[index]),
            float(series.share[index]),
        )
        for index in range(len(series))
    ]
    columns = ("step", "tokens", "label", "used", "why not", "probe top-1", "probe loss, nats", "null p99", "seconds")
    forms = {"tokens": "tokens", "probe top-1": "percent", "share of run time": "percent"}
    return Table("observations", "Observations", (*columns, "share of run time"), rows, "", forms)


def tokens_at(series: Series, index: int) -> float | None:
    """Tokens of an observation, None where unknown."""
    value = float(series.tokens[index])
    return None if math.isnan(value) else value
