"""The report: a whole run on one self-contained HTML page, from its record alone.

No request leaves the file: styles, script and data are inside, and a content-security policy forbids the rest. Per-head
values travel as 16-bit codes (one part in 65,535 of their range, logarithmic where the quantity is), so that 154
observations of 1,024 heads stay a few megabytes.
"""

from __future__ import annotations

import base64
import math
import os
import re
from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from spectral_monitor.development import Development, develop
from spectral_monitor.development.milestones import Onset
from spectral_monitor.development.phases import Phase
from spectral_monitor.errors import RecordError
from spectral_monitor.observation import FloatArray, Verdict
from spectral_monitor.publish import story
from spectral_monitor.publish.tables import Table, show, tables_of, tokens_text
from spectral_monitor.record import RunRecord, dumps, write_text

#: Heads that are followed from the start: the final circuit, or the best of the ranking where there is none.
FOLLOWED = 8
#: Tables that stand beside their chart while they are short; longer ones go to the end.
BESIDE, LONGEST_BESIDE = ("verdicts", "lead", "recall", "calibration"), 14
_MISSING = 65_535


def write_report(
    record: RunRecord,
    path: str | os.PathLike[str],
    probe: str | None = None,
    capability: str | None = None,
    phases: Sequence[Phase] = (),
    title: str | None = None,
) -> Path:
    """Write the report of a record; the file appears only when it is whole.

    RecordError: nothing to report (``development.develop`` says what), or the file cannot be written.
    """
    target = Path(path)
    if target.is_dir():
        raise RecordError(f"{target} is a directory: give the report a file name, for example {target / 'report.html'}")
    html = build_report(record, probe, capability, phases, title)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_text(target, html)
    except OSError as error:
        raise RecordError(
            f"report {target} cannot be written ({error.strerror or error}): choose another path"
        ) from error
    return target


def build_report(
    record: RunRecord,
    probe: str | None = None,
    capability: str | None = None,
    phases: Sequence[Phase] = (),
    title: str | None = None,
) -> str:
    """The report of a record as HTML."""
    found = develop(record, probe, capability, phases)
    verdicts = [verdict for verdict in record.verdicts() if verdict.probe == found.series.probe]
    events = record.events()
    tables = tables_of(found, verdicts, events)
    beside = [table for table in tables if table.name in BESIDE and len(table.rows) <= LONGEST_BESIDE]
    parts = {
        "title": escape(title or record.run_dir.resolve().name),
        "overline": escape(f"spectral_monitor · attention circuits over training · {record.run_dir.resolve()}"),
        "lede": escape(f"{story.formed_text(found)} {story.causal_text(found, verdicts)}"),
        "facts": _facts(found, record),
        "when": escape(_when(found)),
        "causal": escape(_causal_note(verdicts)),
        "verdict_table": _html(beside, "verdicts"),
        "sinks": escape(story.sink_text(found)),
        "shape_words": escape(_shape_words(found)),
        "lead": escape(story.lead_text(found)),
        "alarms": escape(story.alarm_text(found, events)),
        "lead_table": _html(beside, "lead"),
        "recall_table": _html(beside, "recall"),
        "calibration_table": _html(beside, "calibration"),
        "notes": "".join(f"<li>{escape(note)}</li>" for note in _notes(found, record)),
        "tables": "".join(table.html() for table in tables if table not in beside),
        "footer": _footer(found, record),
        "data": _script_safe(dumps(payload(found, record, verdicts), indent=None)),
        "css": _template("report.css"),
        "js": _template("report.js"),
    }
    # one pass, so that no inserted text is ever searched for placeholders
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _template("report.html"))


def _template(name: str) -> str:
    return (files("spectral_monitor.publish") / "templates" / name).read_text(encoding="utf-8")


def _script_safe(text: str) -> str:
    """JSON that cannot close its script element."""
    return text.replace("<", "\\u003c")


def _html(tables: Sequence[Table], name: str) -> str:
    return "".join(table.html() for table in tables if table.name == name)


# -- words ------------------------------------------------------------------------------------------------------------


def _facts(found: Development, record: RunRecord) -> str:
    series = found.series
    last = float(series.tokens[series.last])
    model = record.run.get("model") or {}
    facts = [
        (
            "model",
            f"{_family(str(model.get('class')))}, {tokens_text(model['parameters'])} parameters"
            if "parameters" in model
            else "",
        ),
        ("observations", f"{int(series.usable.sum())}" + (f" of {len(series)}" if not series.usable.all() else "")),
        ("heads", f"{len(series.heads)} in {len(series.layers)} layers"),
        ("trained", f"{int(series.steps[-1]):,} steps" + ("" if math.isnan(last) else f", {tokens_text(last)} tokens")),
        ("probe", f"{series.probe}" + _probe_size(record, series.probe)),
        ("probe top-1 at the end", show(float(series.top1[series.last]), "percent")),
        ("watching cost", _cost(series.seconds, series.share)),
    ]
    return "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>" for name, text in facts if text)


def _family(name: str) -> str:
    return name.removesuffix("ForCausalLM").removesuffix("LMHeadModel")


def _probe_size(record: RunRecord, probe: str) -> str:
    described = record.probes.get(probe, {})
    if "rows" in described:
        return f", {described['rows']} rows"
    return ""


def _cost(seconds: FloatArray, share: FloatArray) -> str:
    known = np.isfinite(seconds)
    if not known.any():
        return "not recorded"
    shares = share[np.isfinite(share)]
    total = f"{seconds[known].sum():.1f} s"
    return f"{total}, {shares[-1]:.1%} of the run" if len(shares) else total


def _when(found: Development) -> str:
    parts = []
    reached = [gap for gap in found.gaps if gap.later.endswith("0.50")]
    if reached:
        gap = reached[0]
        parts.append(
            f"Half of all heads attend to the first token {gap.ratio:.1f}x later in {found.series.axis} than the third "
            f"{story.readable(found.series.capability)} head appears"
            + (f" (between {gap.low:.1f}x and {show(gap.high, '.1f')}x)." if gap.low > 0 else ".")
        )
    parts.append("An onset is known only to lie between two observations; observations left out widen it.")
    return " ".join(parts)


def _causal_note(verdicts: Sequence[Verdict]) -> str:
    if not verdicts:
        return (
            "The record holds no causal check. The screen alone says what heads attend to, "
            "not that the model uses them."
        )
    return (
        "Each dot is one matched-random removal: as many heads in the same layers, none of the circuit's. A circuit "
        "matters when it does more damage than all of them; where no other head is left, no control exists."
    )


def _shape_words(found: Development) -> str:
    shape = found.shape
    if shape.after is None:
        return f"shape {shape.kind}: {shape.reason}"
    words = {"transition": "the transition", "ramp": "the ramp, from 10% to 90%"}.get(shape.kind, "the gap")
    return f"shaded: {words}"


def _notes(found: Development, record: RunRecord) -> list[str]:
    series = found.series
    notes = list(series.notes)
    notes += [note for note in record.run.get("notes", []) if isinstance(note, str)]
    for note in record.probes.get(series.probe, {}).get("notes", []) or []:
        notes.append(str(note))
    others = [name for name in record.probes if name != series.probe]
    if others:
        notes.append(f"The record also holds the probe{'s' if len(others) > 1 else ''} {', '.join(others)}.")
    notes.append(f"Watching: {story.overhead_text(found)}")
    notes.append(
        f"Selectivity is attention over the {series.baseline!r} baseline. A ratio can be huge at little attention, so "
        f"the mass stands beside it and a head below {series.bars.min_attention:g} is no member."
    )
    notes.append("PR says that something specialised happens in a head, not what; by itself it finds no circuit.")
    return list(dict.fromkeys(notes))


def _footer(found: Development, record: RunRecord) -> str:
    series = found.series
    versions = record.run.get("versions") or {}
    text = ", ".join(f"{name} {version}" for name, version in versions.items()) if isinstance(versions, dict) else ""
    lines = [f"Probe SHA-256: {series.fingerprint or 'unknown'}."]
    if text:
        lines.append(f"Written with {text}.")
    source = record.run.get("source")
    if isinstance(source, dict) and source.get("kind") == "import":
        lines.append(f"Imported from {source.get('file')} (SHA-256 {source.get('sha256')}).")
    return "".join(f"<p>{escape(line)}</p>" for line in lines)


# -- data -------------------------------------------------------------------------------------------------------------


def payload(found: Development, record: RunRecord, verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """What the page's script draws."""
    series = found.series
    classes = ["", "none", *series.classes]
    classes += [str(name) for name in np.unique(series.head_class) if name not in classes]
    circuit = found.final_circuits.get(series.capability, [])
    followed = circuit[:FOLLOWED] or found.rankings["integral"].top(series.heads, FOLLOWED)
    layers = series.layers
    onsets = []
    if series.capability in found.recall:
        levels = found.recall[series.capability].levels
        for level, words in (("33", "circuit, first third"), ("100", "circuit, all of it")):
            onsets.append(_milestone(words, series.capability, levels[level].onset, series.axis, True))
    for name, at in found.milestones.items():
        kind = "first_token" if name.startswith("bos") else name.split("_heads")[0]
        # a model of 24 heads cannot have 30 self heads: no need to say that they were not seen
        possible = "_heads>=" not in name or int(name.split(">=")[1]) <= len(series.heads)
        onsets.append(_milestone(name, kind, at, series.axis, possible))
    leads = []
    for lead in found.leads:
        rise, crossing = _span(lead.rise, series.axis), _span(lead.crossing, series.axis)
        leads.append(
            {
                "head": str(lead.head),
                "rise": rise["by"],
                "rise_after": rise["after"],
                "crossing": crossing["by"],
                "crossing_after": crossing["after"],
            }
        )
    return {
        "axis": series.axis,
        "steps": series.steps,
        "x": series.x,
        "used": [bool(used) for used in series.usable],
        "marks": series.marks,
        "labels": series.labels,
        "start": series.last,
        "layers": layers,
        "heads": [[head.layer, head.head] for head in series.heads],
        "heads_by_layer": [int((series.layer == layer).sum()) for layer in layers],
        "capability": series.capability,
        "baseline": "" if series.baseline == "unknown" else series.baseline,
        "bars": asdict(series.bars),
        "null_p99": series.null_p99,
        "pr": pack(series.pr, log=True, least=1.0),
        "selectivity": {name: pack(series.selectivity[name], log=True, least=1e-3) for name in series.classes},
        "attention": {name: pack(values, log=False) for name, values in series.attention.items()},
        "class": {"names": classes, "data": _bytes(_codes(series.head_class, classes))},
        "followed": [str(head) for head in followed],
        "top1": series.top1,
        "fractions": found.class_fractions,
        "first_token_fraction": found.first_token_fraction,
        "first_token_by_layer": found.first_token_by_layer.astype(int) if series.has_classes else None,
        "shape": {"kind": found.shape.kind, "after": found.shape.after, "by": found.shape.by},
        "milestones": onsets,
        "leads": leads,
        "recall": {name: {"recall": r.recall, "precision": r.precision} for name, r in found.recall.items()},
        "events": [
            {"step": event.step, "kind": event.kind, "heads": event.heads, "text": event.text}
            for event in record.events()
            if event.probe in ("", series.probe) and event.heads
        ],
        "verdicts": [_verdict(number, verdict) for number, verdict in enumerate(story.latest_verdicts(verdicts))],
    }


def _span(at: Onset, axis: str) -> dict[str, float | None]:
    if axis == "tokens":
        return {"after": at.after_tokens, "by": at.by_tokens}
    return {"after": at.after_step, "by": at.by_step}


def _milestone(name: str, kind: str, at: Onset, axis: str, possible: bool) -> dict[str, Any]:
    return {"name": name, "class": kind, "status": at.status, "possible": possible, **_span(at, axis)}


def _verdict(number: int, verdict: Verdict) -> dict[str, Any]:
    baseline = verdict.condition("baseline")
    intact = math.nan if baseline is None else baseline.logprob

    def damage(name: str) -> float | None:
        condition = verdict.condition(name)
        return None if condition is None else intact - condition.logprob

    return {
        "id": number,
        "step": verdict.step,
        "capability": verdict.capability,
        "mode": verdict.mode,
        "verdict": verdict.verdict,
        "reason": verdict.reason,
        "heads": verdict.heads,
        "circuit": damage("circuit"),
        "bound": damage("upper bound"),
        "random": [intact - draw.logprob for draw in verdict.random],
        "ci": verdict.effect_ci,
    }


def _codes(values: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """uint8 index of each value in ``names``."""
    codes = np.zeros(values.shape, dtype=np.uint8)
    for number, name in enumerate(names):
        codes[values == name] = number
    return codes


def pack(values: FloatArray, log: bool, least: float = 0.0) -> dict[str, Any]:
    """[O, K] values as 16-bit codes, evenly spaced from ``lo`` to ``hi`` (in the logarithm if ``log``).

    65,535 stands for what is missing. With ``log``, values below ``least`` are put there; without it the range is 0 to
    the largest value, at least 1.
    """
    known = np.isfinite(values)
    found = values[known]
    if log:
        low = max(least, float(found.min())) if found.size else least
        high = max(float(found.max()) if found.size else low, low * 1.000001)
        with np.errstate(invalid="ignore", divide="ignore"):
            t = np.log(np.maximum(values, low) / low) / math.log(high / low)
    else:
        low, high = 0.0, max(1.0, float(found.max()) if found.size else 1.0)
        t = values / high
    codes = np.where(known, np.round(np.clip(np.nan_to_num(t), 0, 1) * (_MISSING - 1)), _MISSING)
    return {"lo": low, "hi": high, "log": log, "data": _bytes(codes.astype("<u2"))}


def _bytes(array: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode("ascii")
