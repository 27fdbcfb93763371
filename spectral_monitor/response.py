"""What follows from an alarm: who is told, whether a checkpoint is kept, whether to look more often, whether to stop.

Pure decisions over events; carrying them out (a tracker's alert, the Trainer's save, the schedule) is the work of the
rooms above. The state is small and survives a resume, so that nothing is announced twice.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spectral_monitor.errors import ThresholdError
from spectral_monitor.observation import Event

#: Kinds of events that actions can be bound to.
KINDS = (
    "pr_rise",
    "content_rise",
    "attention_rise",
    "selectivity_crossing",
    "circuit_formed",
    "circuit_lost",
    "sink_transition",
)
#: W&B refuses titles of 64 characters or more.
TITLE_LIMIT = 63
#: Heads named in an alert's text; the record holds them all.
HEADS_NAMED = 12

_TITLES = {
    "pr_rise": "PR rises",
    "content_rise": "heads carry the answer",
    "attention_rise": "attention rises",
    "selectivity_crossing": "heads cross the threshold",
    "circuit_formed": "circuit formed",
    "circuit_lost": "circuit lost",
    "sink_transition": "sink transition",
}


@dataclass(frozen=True)
class Actions:
    """What to do at which events; kinds are those of ``Event.kind``.

    Attributes:
        alert_on: tell the trackers and the terminal, once a look, kind and capability.
        alert_limit: at most so many alerts of one kind and capability in a run; the last one says so. Every event is
            in the record all the same.
        save_on: keep a checkpoint at that step.
        densify_on: look more often from that step on: at most ``densify_spacing`` times the tokens apart, until the
            tokens have doubled ``densify_octaves`` times. The schedule's overhead budget stands above this.
        stop_on: end the training there.
        heads: an event with fewer heads in it neither saves, densifies nor stops (``sink_transition`` has none and
            is not held to it). Neither does a head that leaves a circuit (``selectivity_crossing`` downwards).
    """

    alert_on: tuple[str, ...] = (
        "pr_rise",
        "content_rise",
        "attention_rise",
        "circuit_formed",
        "circuit_lost",
        "sink_transition",
    )
    alert_limit: int = 20
    save_on: tuple[str, ...] = ()
    densify_on: tuple[str, ...] = ()
    densify_octaves: float = 0.5
    densify_spacing: float = 1.04
    stop_on: tuple[str, ...] = ()
    heads: int = 1

    def __post_init__(self) -> None:
        for name in ("alert_on", "save_on", "densify_on", "stop_on"):
            for kind in getattr(self, name):
                if kind not in KINDS:
                    raise ThresholdError(f"alarm actions: {name} names {kind!r}; the kinds are {', '.join(KINDS)}")
        if self.alert_limit < 0 or self.heads < 0:
            raise ThresholdError("alarm actions: alert_limit and heads are counts, 0 or more")
        if not (self.densify_octaves > 0 and math.isfinite(self.densify_octaves)):
            raise ThresholdError(f"alarm actions: densify_octaves is {self.densify_octaves}, but must be above 0")
        if not self.densify_spacing > 1:
            raise ThresholdError(f"alarm actions: densify_spacing is {self.densify_spacing}, but must be above 1")


@dataclass(frozen=True)
class Alert:
    """One message; ``title`` is short enough for every tracker, ``level`` is ``"info"`` or ``"warn"``."""

    title: str
    text: str
    level: str
    kind: str
    capability: str
    step: int


@dataclass(frozen=True)
class Densify:
    """Look at most ``spacing`` times the position apart, up to ``until`` (tokens, or steps where they are unknown)."""

    spacing: float
    until: float


@dataclass(frozen=True)
class Response:
    """What the events of one look ask for. ``save`` and ``stop`` are the sentence that says why, or None."""

    alerts: tuple[Alert, ...] = ()
    save: str | None = None
    densify: Densify | None = None
    stop: str | None = None


class Responder:
    """Decides over the events of a run, look by look."""

    def __init__(self, actions: Actions | None = None) -> None:
        self.actions = actions if actions is not None else Actions()
        self._sent: dict[str, int] = {}
        self._until: float | None = None

    def respond(self, events: Sequence[Event]) -> Response:
        """What the events of one look ask for; the same event asked again after a resume is the caller's to drop."""
        actions = self.actions
        weighty = [event for event in events if self._is_weighty(event)]
        return Response(
            alerts=tuple(alert for event in events if (alert := self._alert(event)) is not None),
            save=_reason(weighty, actions.save_on),
            densify=self._densify([event for event in weighty if event.kind in actions.densify_on]),
            stop=_reason(weighty, actions.stop_on),
        )

    def _is_weighty(self, event: Event) -> bool:
        if event.kind == "selectivity_crossing" and event.direction == "down":
            return False
        return event.kind == "sink_transition" or len(event.heads) >= self.actions.heads

    def _alert(self, event: Event) -> Alert | None:
        if event.kind not in self.actions.alert_on:
            return None
        key = f"{event.kind}|{event.probe}|{event.capability}|{event.direction}"
        sent = self._sent.get(key, 0)
        if sent >= self.actions.alert_limit:
            return None
        self._sent[key] = sent + 1
        text = event.text or _TITLES[event.kind]
        if event.heads and not any(head in text for head in event.heads):
            text += f"\nHeads: {_heads(event.heads)}"
        if sent + 1 == self.actions.alert_limit:
            text += "\nThis was the last alert of its kind; further ones are in the record only."
        level = "warn" if event.kind == "circuit_lost" else "info"
        return Alert(_title(event), text, level, event.kind, event.capability, event.step)

    def _densify(self, events: Sequence[Event]) -> Densify | None:
        places = [float(event.step if event.tokens is None else event.tokens) for event in events]
        if not places:
            return None
        until = max(places) * 2**self.actions.densify_octaves
        self._until = until if self._until is None else max(self._until, until)
        return Densify(self.actions.densify_spacing, self._until)

    @property
    def densified(self) -> Densify | None:
        """The last request to look more often (after a resume too); the schedule drops it when it is past."""
        return None if self._until is None else Densify(self.actions.densify_spacing, self._until)

    def state_dict(self) -> dict[str, Any]:
        """JSON values only."""
        return {"sent": dict(self._sent), "until": self._until}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict``'s state."""
        self._sent = {str(key): int(count) for key, count in state["sent"].items()}
        self._until = None if state["until"] is None else float(state["until"])


def _reason(events: Sequence[Event], kinds: Collection[str]) -> str | None:
    said = [f"{event.kind} of {event.capability} at step {event.step}" for event in events if event.kind in kinds]
    return "; ".join(said) if said else None


def _title(event: Event) -> str:
    lost = event.kind == "selectivity_crossing" and event.direction == "down"
    what = "heads leave the circuit" if lost else _TITLES[event.kind]
    end = f" (step {event.step})"
    start = f"{event.capability}: {what}" if event.capability else what
    room = TITLE_LIMIT - len(end)
    return (start if len(start) <= room else start[: room - 1] + "…") + end


def _heads(heads: Sequence[str]) -> str:
    more = len(heads) - HEADS_NAMED
    return ", ".join(heads[:HEADS_NAMED]) + (f" and {more} more" if more > 0 else "")
