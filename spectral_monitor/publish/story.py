"""What happened in a run, in a few sentences, each from recorded numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from spectral_monitor.development import Development
from spectral_monitor.heads import names
from spectral_monitor.observation import Event, Verdict
from spectral_monitor.publish.tables import tokens_text, when

#: More heads than this are counted, not listed.
LISTED = 6


def readable(capability: str) -> str:
    """``previous_token`` as people write it."""
    return capability.replace("_", "-")


def formed_text(found: Development) -> str:
    """What formed, and when."""
    series = found.series
    capability = series.capability
    name = readable(capability)
    end = time_text(found, series.last)
    if capability not in series.selectivity:
        return f"The record holds no {name} selectivity, so it cannot be told whether a circuit formed."
    heads = found.final_circuits[capability]
    if not heads:
        ever = series.members(capability)[series.usable].any(axis=0)
        if ever.any():
            return f"No {name} circuit stands at {end}; {int(ever.sum())} heads passed the bar earlier and fell back."
        return f"No {name} circuit was seen up to {end}."
    size = f"{len(heads)} head{'' if len(heads) == 1 else 's'}"
    listed = f" ({' '.join(names(heads))})" if len(heads) <= LISTED else ""
    levels = found.recall[capability].levels
    first, whole = levels["33"].onset, levels["100"].onset
    article = "An" if name[0] in "aeiou" else "A"
    text = f"{article} {name} circuit of {size}{listed} formed"
    if len(heads) == 1 or first.index == whole.index:
        return f"{text} {when(whole, series.axis)}."
    return f"{text}: its first third {when(first, series.axis)}, all of it {when(whole, series.axis)}."


def latest_verdicts(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """The last check of each probe, capability and ablation mode; zero ablation first."""
    last: dict[tuple[str, str, str], Verdict] = {}
    for verdict in verdicts:
        last[(verdict.probe, verdict.capability, verdict.mode)] = verdict
    return [last[key] for key in sorted(last, key=lambda key: (key[0], key[1], key[2] != "zero"))]


def causal_text(found: Development, verdicts: Sequence[Verdict]) -> str:
    """Whether the circuit does the work, by the last check of the run's capability."""
    own = [v for v in latest_verdicts(verdicts) if v.capability == found.series.capability]
    if not own:
        return "No causal check was made: whether these heads do the work is not known."
    verdict = next((v for v in own if v.mode == "zero"), own[0])
    answer = {"causal": "They do the work", "not causal": "They do not do the work"}.get(verdict.verdict)
    if answer is None:
        return f"Is it causal? {verdict.verdict[0].upper()}{verdict.verdict[1:]}: {verdict.reason}"
    text = f"{answer}: without them the right token loses {verdict.effect:.2f} nats of log-probability"
    baseline = verdict.condition("baseline")
    if verdict.random and baseline is not None:
        costs = [baseline.logprob - draw.logprob for draw in verdict.random]
        draws = f"{len(costs)} matched random removals"
        text += f", against {np.mean(costs):.2f} on average in {draws} (p = {verdict.p_value:.2g})"
    text += "."
    others = [v for v in own if v is not verdict]
    for other in others:
        if other.verdict == verdict.verdict:
            text += f" {other.mode.capitalize()} ablation agrees."
        else:
            text += f" {other.mode.capitalize()} ablation disagrees ({other.verdict}): treat it as open."
    return text


def sink_text(found: Development) -> str:
    """F1 and F2 in a sentence or two."""
    series, shape = found.series, found.shape
    if not series.has_classes:
        return "The record has no head classes, so first-token heads cannot be counted."
    last = float(found.first_token_fraction[series.last])
    if not np.nan_to_num(found.first_token_fraction).any():
        return "No head is a first-token head at any observation."
    if shape.kind == "none":
        text = f"First-token heads show no rise ({shape.reason})."
    elif shape.kind == "undetermined":
        text = f"First-token heads end at {last:.0%} of all heads; the shape is undetermined ({shape.reason})."
    else:
        assert shape.after is not None and shape.by is not None
        place = f"{x_text(found, shape.after)} and {x_text(found, shape.by)}"
        kind = "in a transition" if shape.kind == "transition" else "as a ramp"
        text = f"First-token heads rose {kind} between {place} and end at {last:.0%} of all heads."
    if len(series.layers) <= 2:
        return text
    if found.layers_0_1_empty is True:
        text += " Layers 0 and 1 never hold one."
    elif found.layers_0_1_empty is False:
        text += " Layers 0 and 1 hold some, unlike in the published models."
    return text


def lead_text(found: Development) -> str:
    """F5 with its base rate."""
    base, crossed = found.base_rate, [lead for lead in found.leads if lead.crossing.seen]
    if not crossed:
        return "No head of the final circuit was seen to cross the bar, so a lead cannot be told."
    early = [lead for lead in crossed if lead.observations is not None and lead.observations > 0]
    certain = [lead for lead in early if lead.resolved]
    text = f"PR rose before the pattern in {len(early)} of {len(crossed)} circuit heads"
    if early:
        text += f" ({len(certain)} of them beyond the schedule's resolution)"
    if math.isnan(base.share_before):
        return f"{text}."
    text += f"; so it did in {base.rose_before} of {base.heads} heads that never joined ({base.share_before:.0%})."
    if early and base.heads and base.share_before >= 0.5 * base.circuit_share_before:
        text += " Here a PR rise alone says little."
    return text


_ALARMS = {"pr_rise": "a PR alarm", "content_rise": "a content alarm", "attention_rise": "an attention alarm"}


def alarm_trust(found: Development, events: Sequence[Event]) -> list[tuple[str, int, int, float]]:
    """Each kind of head alarm: (kind, heads that raised one, those that were in the circuit then or later, share)."""
    series = found.series
    members = series.members(series.capability) & series.usable[:, None]
    result = []
    for kind in _ALARMS:
        first: dict[str, int] = {}
        for event in events:
            if event.kind == kind and event.probe in ("", series.probe):
                for head in event.heads:
                    first.setdefault(head, event.step)
        if not first:
            continue
        columns = {str(head): column for column, head in enumerate(series.heads)}
        joined = sum(
            bool(members[series.steps >= step, columns[head]].any()) for head, step in first.items() if head in columns
        )
        result.append((kind, len(first), joined, joined / len(first)))
    return result


def alarm_text(found: Development, events: Sequence[Event]) -> str:
    """How far the alarms of this run were to be believed."""
    trust = alarm_trust(found, events)
    if not trust:
        return "No head raised an alarm during the run."
    circuit = found.series.capability.replace("_", " ")
    parts = [
        f"{joined} of {raised} heads with {_ALARMS[kind]} joined the {circuit} circuit ({share:.0%})"
        for kind, raised, joined, share in trust
    ]
    return "Alarms measured: " + "; ".join(parts) + "."


def overhead_text(found: Development) -> str:
    """What watching cost."""
    series = found.series
    known = np.isfinite(series.seconds)
    if not known.any():
        return "The record does not say what watching cost."
    total = float(series.seconds[known].sum())
    text = f"{int(known.sum())} observations took {total:.1f} s, {total / known.sum():.2f} s each"
    share = series.share[np.isfinite(series.share)]
    return f"{text}; {share[-1]:.1%} of the run's time at the end." if len(share) else f"{text}."


def time_text(found: Development, index: int) -> str:
    """An observation's time: tokens, or its step."""
    return x_text(found, float(found.series.x[index]))


def x_text(found: Development, x: float) -> str:
    """A time on the series' axis."""
    return f"{tokens_text(x)} tokens" if found.series.axis == "tokens" else f"step {x:.0f}"
