"""What follows from an alarm: alerts, a kept checkpoint, more looks, a stop."""

from __future__ import annotations

import json

import pytest

from spectral_monitor.errors import ThresholdError
from spectral_monitor.observation import Event
from spectral_monitor.response import KINDS, TITLE_LIMIT, Actions, Responder


def event(kind: str = "content_rise", step: int = 400, heads: tuple[str, ...] = ("L1H2",), **fields: object) -> Event:
    values = {"tokens": step * 4096.0, "probe": "induction", "capability": "induction", "direction": "up"}
    return Event(kind=kind, step=step, heads=heads, **{**values, **fields})  # type: ignore[arg-type]


def test_by_default_an_alarm_only_tells() -> None:
    response = Responder().respond([event(text="content share rises: L1H2 0.2")])
    (alert,) = response.alerts
    assert alert.title == "induction: heads carry the answer (step 400)"
    assert alert.text == "content share rises: L1H2 0.2"
    assert alert.level == "info"
    assert (response.save, response.densify, response.stop) == (None, None, None)


def test_nothing_happens_without_events() -> None:
    response = Responder(Actions(save_on=KINDS, densify_on=KINDS, stop_on=KINDS)).respond([])
    assert (response.alerts, response.save, response.densify, response.stop) == ((), None, None, None)


def test_only_the_kinds_asked_for_are_told() -> None:
    responder = Responder(Actions(alert_on=("circuit_lost",)))
    assert responder.respond([event()]).alerts == ()
    (alert,) = responder.respond([event("circuit_lost")]).alerts
    assert alert.level == "warn"


@pytest.mark.parametrize("kind", KINDS)
def test_titles_fit_every_tracker(kind: str) -> None:
    responder = Responder(Actions(alert_on=KINDS))
    for capability in ("induction", "a_capability_with_a_very_long_name_that_somebody_chose_for_a_probe"):
        for step in (0, 10**9):
            (alert,) = responder.respond([event(kind, step, capability=capability)]).alerts
            assert len(alert.title) <= TITLE_LIMIT < 64
            assert str(step) in alert.title


def test_many_heads_are_named_up_to_a_limit_and_not_twice() -> None:
    heads = tuple(f"L1H{i}" for i in range(40))
    (alert,) = Responder().respond([event(heads=heads)]).alerts
    assert "L1H11 and 28 more" in alert.text
    assert "L1H12" not in alert.text
    (alert,) = Responder().respond([event(text="L1H2 rises")]).alerts
    assert alert.text.count("L1H2") == 1


def test_alerts_of_one_kind_are_limited_and_the_last_says_so() -> None:
    responder = Responder(Actions(alert_limit=3))
    told = [alert for step in range(10) for alert in responder.respond([event(step=step)]).alerts]
    assert [alert.step for alert in told] == [0, 1, 2]
    assert ["last alert" in alert.text for alert in told] == [False, False, True]
    assert len(responder.respond([event("circuit_formed"), event(capability="copying")]).alerts) == 2


def test_the_limit_survives_a_resume() -> None:
    first = Responder(Actions(alert_limit=3, densify_on=("content_rise",)))
    first.respond([event(step=1)])
    first.respond([event(step=2)])
    second = Responder(first.actions)
    second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    assert second.densified == first.densified is not None
    assert len(second.respond([event(step=3)]).alerts) == 1
    assert len(second.respond([event(step=4)]).alerts) == 0


def test_save_and_stop_say_why() -> None:
    responder = Responder(Actions(save_on=("content_rise",), stop_on=("circuit_formed",)))
    response = responder.respond([event()])
    assert response.save == "content_rise of induction at step 400"
    assert response.stop is None
    assert responder.respond([event("circuit_formed", 500)]).stop == "circuit_formed of induction at step 500"


def test_a_named_number_of_heads_is_asked_for() -> None:
    responder = Responder(Actions(stop_on=("selectivity_crossing", "sink_transition"), heads=3))
    assert responder.respond([event("selectivity_crossing")]).stop is None
    assert responder.respond([event("selectivity_crossing", heads=("L1H0", "L1H1", "L1H2"))]).stop is not None
    assert responder.respond([event("sink_transition", heads=())]).stop is not None


def test_a_head_that_leaves_saves_and_stops_nothing() -> None:
    responder = Responder(Actions(save_on=("selectivity_crossing",), stop_on=("selectivity_crossing",)))
    response = responder.respond([event("selectivity_crossing", direction="down")])
    assert (response.save, response.stop) == (None, None)
    assert responder.respond([event("selectivity_crossing")]).save is not None


def test_densify_lasts_some_octaves_and_is_prolonged() -> None:
    responder = Responder(Actions(densify_on=("content_rise",), densify_octaves=1.0, densify_spacing=1.02))
    first = responder.respond([event(step=400)]).densify
    assert first is not None
    assert (first.spacing, first.until) == (1.02, 2 * 400 * 4096)
    later = responder.respond([event(step=500)]).densify
    assert later is not None
    assert later.until == 2 * 500 * 4096
    by_steps = Responder(responder.actions).respond([event(step=400, tokens=None)]).densify
    assert by_steps is not None
    assert by_steps.until == 800


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"alert_on": ("rise",)}, "alert_on names 'rise'"),
        ({"stop_on": ("note",)}, "stop_on names 'note'"),
        ({"densify_octaves": 0.0}, "densify_octaves"),
        ({"densify_spacing": 1.0}, "densify_spacing"),
        ({"alert_limit": -1}, "alert_limit"),
    ],
)
def test_bad_actions_are_named(fields: dict[str, object], named: str) -> None:
    with pytest.raises(ThresholdError, match=named):
        Actions(**fields)  # type: ignore[arg-type]
