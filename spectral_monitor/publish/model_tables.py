"""Tables of comparisons and of calibrations, for the terminal and for CSV."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from spectral_monitor.heads import names
from spectral_monitor.publish.tables import Table, when

if TYPE_CHECKING:
    from spectral_monitor.calibrate import Calibrated, NaturalText
    from spectral_monitor.compare import Comparison
    from spectral_monitor.interventions import Composition, Sweep, Transplant
    from spectral_monitor.observation import Verdict


def tables_of_comparison(found: Comparison) -> list[Table]:
    """Circuits, times and overlaps of several runs."""
    runs = []
    for name, run in found.runs.items():
        heads = run.final_circuits.get(run.series.capability, [])
        shape = run.shape.kind
        runs.append((name, run.series.capability, len(heads), " ".join(names(heads)), shape))
    headings = ("run", "capability", "size", "final circuit", "first-token shape")
    tables = [Table("runs", "Runs", headings, list(runs))]
    milestones = list(next(iter(found.runs.values())).milestones)
    rows: list[tuple[Any, ...]] = []
    for milestone in milestones:
        cells = []
        for run in found.runs.values():
            at = run.milestones.get(milestone)
            cells.append("not measured" if at is None else when(at, run.series.axis))
        rows.append((milestone, *cells))
    tables.append(Table("milestones", "When", ("milestone", *found.runs), rows))
    overlaps = [
        (f"{pair.first} / {pair.second}", what, o.size_a, o.size_b, o.shared, o.jaccard, o.expected, o.p_value)
        for pair in found.pairs
        for what, o in pair.overlaps.items()
    ]
    if overlaps:
        columns = ("runs", "compared", "first", "second", "shared", "Jaccard", "by chance", "p")
        forms = {"Jaccard": ".3f", "by chance": ".3f", "p": ".3g"}
        note = "By chance: as many heads in each layer, otherwise drawn at random; p: chance of at least this overlap."
        tables.append(Table("overlaps", "The same heads?", columns, overlaps, note, forms))
    return tables


def transplant_table(found: list[Transplant]) -> Table:
    """Every circuit in every model."""
    rows = []
    for entry in found:
        rows.append((entry.source, entry.target, entry.shared, *_verdict_cells(entry.verdict)))
    columns = ("circuit of", "in the model of", "heads shared", *_VERDICT_COLUMNS)
    note = "Each run's circuit, ablated in each run's model. It should matter only where heads are shared."
    return Table("transplant", "Transplant", columns, rows, note, _VERDICT_FORMS)


_VERDICT_COLUMNS = (
    "verdict",
    "effect, nats",
    "low",
    "high",
    "p",
    "draws",
    "top-1 intact",
    "circuit out",
    "random out",
    "lowest",
    "highest",
)
_VERDICT_FORMS = {name: ".2f" for name in ("effect, nats", "low", "high")} | {"p": ".3g"}
_VERDICT_FORMS |= {name: "percent" for name in _VERDICT_COLUMNS[6:]}


def _verdict_cells(verdict: Verdict | None) -> tuple[Any, ...]:
    if verdict is None:
        return ("no heads", *([math.nan] * (len(_VERDICT_COLUMNS) - 1)))
    intact, out = verdict.condition("baseline"), verdict.condition("circuit")
    random = [draw.top1 for draw in verdict.random]
    return (
        verdict.verdict,
        verdict.effect,
        *verdict.effect_ci,
        verdict.p_value,
        verdict.draws,
        math.nan if intact is None else intact.top1,
        math.nan if out is None else out.top1,
        float(np.mean(random)) if random else math.nan,
        min(random, default=math.nan),
        max(random, default=math.nan),
    )


def tables_of_calibration(found: Calibrated) -> list[Table]:
    """What ``calibrate`` measured."""
    entry = found.calibration
    rows: list[tuple[Any, ...]] = [("noise floor (null p99)", entry.null_p99), ("T_recall", entry.t_recall)]
    rows += [("T_precision", entry.t_precision), ("median selectivity", entry.median)]
    rows += [("largest selectivity", entry.largest)]
    rows += [(f"heads at or above {bar}x", count) for bar, count in entry.above.items()]
    rows += [("heads above the noise floor", entry.above_null), ("as a share of all heads", entry.conserved_by_null)]
    rows += [(f"with a class among the top {entry.top} by PR", entry.classified_in_top)]
    rows += [("as a share of all heads", entry.conserved_by_pr)]
    rows += [(f"{name} circuit", " ".join(names(heads)) or "empty") for name, heads in found.circuits.items()]
    note = (
        f"{entry.capability}, {entry.heads} heads, {found.probe.rows} rows of {found.probe.length} tokens, baseline "
        f"{found.observation.baseline}; probe top-1 {found.observation.metrics.top1:.1%}, "
        f"loss {found.observation.metrics.loss:.2f} nats."
    )
    tables = [Table("calibration", "Calibration", ("quantity", "value"), rows, note)]
    if found.sweep is not None:
        tables.append(sweep_table(found.sweep))
    if found.compositions:
        tables.append(composition_table(found.compositions))
    if found.text is not None:
        tables.append(text_table(found.text))
    return tables


def sweep_table(sweep: Sweep) -> Table:
    """One row a threshold."""
    rows = [(point.threshold, len(point.heads), *_verdict_cells(point.verdict)) for point in sweep.points]
    columns = ("threshold x", "heads", *_VERDICT_COLUMNS)
    if sweep.highest_at_floor is None:
        reached = "no threshold's set takes it there"
    else:
        reached = (
            f"reached from {sweep.lowest_at_floor:g}x (the largest set) to {sweep.highest_at_floor:g}x (the smallest "
            "set that is enough)"
        )
    note = f"Floor: top-1 at or below {sweep.floor:.2%}; {reached}. Matched random: mean, lowest, highest of the draws."
    return Table("sweep", "Threshold sweep", columns, rows, note, {**_VERDICT_FORMS, "threshold x": "g"})


def composition_table(found: tuple[Composition, ...]) -> Table:
    """What taking one circuit out does to the other's attention, and to the task."""
    rows = []
    for entry in found:
        controls = entry.control.mean(axis=1) if len(entry.control) else np.array([])
        task = entry.task
        rows.append(
            (
                f"{entry.removed_class} ({len(entry.removed)})",
                f"{entry.measured_class} ({len(entry.measured)})",
                float(entry.before.mean()),
                float(entry.after.mean()),
                float(controls.mean()) if len(controls) else math.nan,
                float(controls.min()) if len(controls) else math.nan,
                float(controls.max()) if len(controls) else math.nan,
                len(controls),
                entry.p_value,
                math.nan if task is None else task.effect,
                None if task is None else task.verdict,
                math.nan if task is None else task.p_value,
            )
        )
    columns = ("taken out", "looked at", "attention intact", "attention after", "after random", "lowest", "highest")
    columns_rest = ("draws", "p", "task effect, nats", "task verdict", "task p")
    forms = {name: ".3f" for name in (*columns[2:], "p", "task p")} | {"task effect, nats": ".2f"}
    note = "Attention: mean over the looked-at heads on their own target."
    for entry in found:
        if entry.left_out:
            note += (
                f" Of the {entry.removed_class} circuit {' '.join(names(entry.left_out))} stayed in: "
                "their layers have too few other heads for a control."
            )
    return Table("composition", "Composition", (*columns, *columns_rest), rows, note, forms)


def text_table(found: NaturalText) -> Table:
    """Attention of each head on random tokens and on text, and the verdict on the text."""
    rows: list[tuple[Any, ...]] = [
        (
            head,
            "yes" if head in names(found.circuit) else "no",
            "yes" if head in names(found.found_on_text) else "no",
            *masses,
        )
        for head, masses in found.attention.items()
    ]
    columns = ("head", "circuit on random tokens", "circuit on text", "attention, random", "attention, text")
    note = f"{found.rows} rows of {found.source or 'text'}, intact top-1 {found.intact_top1:.1%}."
    if found.verdict is not None:
        v = found.verdict
        note += (
            f" The random-token circuit taken out on the text: {v.verdict}, effect {v.effect:.2f} nats "
            f"({v.effect_ci[0]:.2f} to {v.effect_ci[1]:.2f}), p = {v.p_value:.3g} over {v.draws} draws. {v.reason}"
        )
    forms = {"attention, random": ".3f", "attention, text": ".3f"}
    return Table("natural_text", "On natural text", columns, rows, note, forms)
