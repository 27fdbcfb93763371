"""When to raise a tracker's alert, and what it says: few, each once, with the heads in the text."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from spectral_monitor.observation import Event, Verdict
from spectral_monitor.publish import names

#: W&B and trackio refuse or cut longer titles.
TITLE_LIMIT = 63
#: Seconds between two alerts of one kind, probe and capability, and alerts in a run.
INTERVAL, PER_RUN = 60.0, 100

_TITLES = {
    "selectivity_crossing": "{what}: heads crossed the threshold",
    "pr_rise": "{what}: effective rank rises",
    "content_rise": "{what}: heads start to carry content",
    "attention_rise": "{what}: attention rises",
    "circuit_formed": "{what}: circuit formed",
    "circuit_lost": "{what}: circuit lost",
    "sink_transition": "{what}: transition",
}
#: Events that are worth an alert; the others (notes, changes of the candidate set) are in the record.
ALERT_KINDS = tuple(_TITLES)
#: What alerts must have in common to wait for each other: kind, probe, capability.
_Kind = tuple[str, str, str]


@dataclass(frozen=True)
class Alert:
    """``level`` is ``INFO``, ``WARN`` or ``ERROR``; ``title`` has at most ``TITLE_LIMIT`` characters."""

    title: str
    text: str
    level: str
    step: int


class AlertBox:
    """Decides which alerts go out, and when.

    Every event alerts at most once. Two alerts of one kind, probe and capability are at least ``interval`` seconds
    apart: what comes between waits and goes out as one alert, with all texts, when the time has come (``due``) or at
    the end of the run (``rest``). After ``per_run`` alerts only the last one goes out, which says so.
    """

    def __init__(
        self,
        interval: float = INTERVAL,
        per_run: int = PER_RUN,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.interval, self.per_run, self._clock = interval, per_run, clock
        self.sent = 0
        self.withheld = 0
        self._seen: set[str] = set()
        self._titles: set[str] = set()
        self._last: dict[_Kind, float] = {}
        self._waiting: dict[_Kind, list[Alert]] = {}

    def resume(self, events: Iterable[Event], verdicts: Iterable[Verdict]) -> None:
        """These were announced in an earlier session: they do not alert again."""
        self._seen.update(event.key for event in events)
        self._seen.update(verdict_key(verdict) for verdict in verdicts)

    def event(self, event: Event) -> list[Alert]:
        """The alerts that ``event`` raises now (none or one)."""
        if event.kind not in ALERT_KINDS or not self._first(event.key):
            return []
        return self._offer((event.kind + event.direction, event.probe, event.capability), of_event(event))

    def verdict(self, verdict: Verdict) -> list[Alert]:
        """The alerts that ``verdict`` raises now (none or one)."""
        if not self._first(verdict_key(verdict)):
            return []
        return self._offer(("verdict", verdict.probe, verdict.capability), of_verdict(verdict))

    def due(self) -> list[Alert]:
        """Waiting alerts whose time has come."""
        return self._release(lambda kind: self._clock() - self._last[kind] >= self.interval)

    def rest(self) -> list[Alert]:
        """All waiting alerts: the run ends."""
        return self._release(lambda kind: True)

    # -- inside -------------------------------------------------------------------------------------------------

    def _first(self, key: str) -> bool:
        if key in self._seen:
            return False
        self._seen.add(key)
        return True

    def _offer(self, kind: _Kind, alert: Alert) -> list[Alert]:
        last = self._last.get(kind)
        if last is not None and self._clock() - last < self.interval:
            self._waiting.setdefault(kind, []).append(alert)
            return []
        earlier = self._waiting.pop(kind, [])
        return self._send(kind, [*earlier, alert])

    def _release(self, when: Callable[[_Kind], bool]) -> list[Alert]:
        ready = [kind for kind in self._waiting if when(kind)]
        return [alert for kind in ready for alert in self._send(kind, self._waiting.pop(kind))]

    def _send(self, kind: _Kind, alerts: list[Alert]) -> list[Alert]:
        if self.sent >= self.per_run:
            self.withheld += len(alerts)
            return []
        self.sent += 1
        self._last[kind] = self._clock()
        alert = self._unlike_earlier(_merged(alerts))
        if self.sent == self.per_run:
            alert = replace(alert, text=f"{alert.text}\nThis is alert {self.sent} of this run, the last one.")
        return [alert]

    def _unlike_earlier(self, alert: Alert) -> Alert:
        """A tracker drops a title that it had a moment ago: number the second one."""
        title, number = alert.title, 2
        while title in self._titles:
            mark = f" ({number})"
            title, number = alert.title[: TITLE_LIMIT - len(mark)] + mark, number + 1
        self._titles.add(title)
        return replace(alert, title=title)


def verdict_key(verdict: Verdict) -> str:
    """Two verdicts of one key are the same verdict: a resumed run must not announce it twice."""
    return "|".join(("verdict", verdict.probe, verdict.capability, verdict.mode, str(verdict.step)))


def of_event(event: Event) -> Alert:
    """The alert of one event; the title carries kind, capability or probe, and step, the text the heads."""
    what = subject(event.probe, event.capability)
    if event.kind == "sink_transition":  # every probe sees these heads: the default one is not named
        what = "first-token heads" + (f" ({event.probe})" if event.probe not in ("", names.DEFAULT_PROBE) else "")
    title = _TITLES[event.kind].format(what=what)
    if event.kind == "selectivity_crossing" and event.direction == "down":
        title = f"{what}: heads fell below the threshold"
    lines = [event.text] if event.text else []
    if event.heads:
        shown = ", ".join(event.heads[:20]) + (f" and {len(event.heads) - 20} more" if len(event.heads) > 20 else "")
        lines.append(f"Heads: {shown}.")
    lines.append(_when(event.step, event.tokens))
    level = "WARN" if event.kind == "circuit_lost" or event.direction == "down" else "INFO"
    return Alert(_title(title, event.step), "\n".join(lines), level, event.step)


def of_verdict(verdict: Verdict) -> Alert:
    """The alert of one verdict, with its effect, p-value and number of draws in the text."""
    lines = [
        f"{verdict.verdict} ({verdict.mode} ablation): {verdict.reason}",
        f"Heads: {', '.join(verdict.heads) or 'none'}.",
        f"Effect {verdict.effect:.3g} nats, p = {verdict.p_value:.3g} "
        f"over {verdict.draws} matched-random draws of {verdict.distinct_draws} distinct ones.",
        _when(verdict.step, verdict.tokens),
    ]
    return Alert(
        _title(f"{subject(verdict.probe, verdict.capability)}: {verdict.verdict} ({verdict.mode})", verdict.step),
        "\n".join(lines),
        "INFO",
        verdict.step,
    )


def subject(probe: str, capability: str) -> str:
    """What a title is about: the capability, with the probe where it has a name of its own.

    ``induction``; ``key_retrieval_long`` (its capability, ``key_retrieval``, is in the name); ``induction (copies)``.
    """
    if not probe or not capability or capability in probe:
        return probe or capability or "probe"
    return f"{capability} ({probe})"


def _when(step: int, tokens: float | None) -> str:
    return f"Step {step}" + (f", {tokens:,.0f} tokens." if tokens is not None else ".")


def _title(text: str, step: int) -> str:
    """The step makes titles differ: a tracker drops a second alert of the same title within its own interval."""
    end = f", step {step}"
    room = TITLE_LIMIT - len(end)
    return (text if len(text) <= room else text[: room - 3] + "...") + end


def _merged(alerts: list[Alert]) -> Alert:
    if len(alerts) == 1:
        return alerts[0]
    worst = max(alerts, key=lambda alert: ("INFO", "WARN", "ERROR").index(alert.level))
    shown = alerts[-20:]
    text = "\n\n".join(f"{alert.title}\n{alert.text}" for alert in shown)
    left_out = len(alerts) - len(shown)
    return Alert(
        alerts[-1].title, text + (f"\n\n{left_out} earlier left out." if left_out else ""), worst.level, alerts[-1].step
    )
