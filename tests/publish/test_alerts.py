import pytest

from spectral_monitor.publish.alerts import ALERT_KINDS, TITLE_LIMIT, AlertBox, of_event, of_verdict

from . import factories as make


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.mark.parametrize(
    "kind", ["selectivity_crossing", "pr_rise", "circuit_formed", "circuit_lost", "sink_transition"]
)
@pytest.mark.parametrize("capability", ["induction", "a_capability_with_a_very_long_name_that_goes_on_and_on"])
@pytest.mark.parametrize("step", [0, 123_456_789_012])
def test_titles_are_short_and_carry_the_step(kind: str, capability: str, step: int) -> None:
    alert = of_event(make.event(kind, step, capability=capability))
    assert len(alert.title) <= TITLE_LIMIT < 64
    assert alert.title.endswith(f"step {step}")
    assert "L1H0" in alert.text
    assert len(of_verdict(make.verdict(step, capability=capability)).title) <= TITLE_LIMIT


def test_one_alert_an_event(clock: Clock) -> None:
    box = AlertBox(clock=clock)
    assert len(box.event(make.event())) == 1
    clock.now = 1000
    assert box.event(make.event()) == [] == box.due() == box.rest()


def test_what_comes_too_soon_waits_and_goes_out_as_one(clock: Clock) -> None:
    box = AlertBox(interval=60, clock=clock)
    box.event(make.event(step=8))
    clock.now = 10
    assert box.event(make.event(step=9, heads=("L1H1",))) == []
    clock.now = 20
    assert box.event(make.event(step=10, heads=("L1H2",))) == []
    assert len(box.event(make.event("pr_rise", 10, ("L0H3",)))) == 1  # another kind does not wait
    assert box.due() == []
    clock.now = 61
    (alert,) = box.due()
    assert "L1H1" in alert.text and "L1H2" in alert.text and alert.title.endswith("step 10")
    assert box.due() == []


def test_the_end_of_the_run_sends_what_waits(clock: Clock) -> None:
    box = AlertBox(clock=clock)
    box.verdict(make.verdict(8))
    assert box.verdict(make.verdict(8, mode="mean")) == []
    (alert,) = box.rest()
    assert "mean ablation" in alert.text and "p = 0.04" in alert.text
    assert box.rest() == []


def test_a_run_raises_a_limited_number(clock: Clock) -> None:
    box = AlertBox(interval=1, per_run=3, clock=clock)
    sent = []
    for step in range(10):
        clock.now += 5
        sent += box.event(make.event(step=step))
    assert len(sent) == 3 and "last one" in sent[-1].text and box.withheld == 7


def test_what_an_earlier_session_announced_stays_announced(clock: Clock) -> None:
    box = AlertBox(clock=clock)
    box.resume([make.event(step=12)], [make.verdict(12)])
    assert box.event(make.event(step=12)) == [] == box.verdict(make.verdict(12))
    assert len(box.event(make.event(step=16))) == 1


def test_no_two_alerts_have_one_title(clock: Clock) -> None:
    """W&B drops an alert whose title it had within the last minute."""
    box = AlertBox(interval=0, clock=clock)
    titles = [alert.title for heads in ("L0H1", "L0H2", "L0H3") for alert in box.event(make.event(heads=(heads,)))]
    titles += [alert.title for mode in ("zero", "mean") for alert in box.verdict(make.verdict(8, mode=mode))]
    assert len(set(titles)) == 5 and all(len(title) <= TITLE_LIMIT for title in titles)


def test_a_title_names_the_probe_where_it_is_not_the_capabilitys_own() -> None:
    def titles(probe: str, capability: str) -> tuple[str, str]:
        of = {"probe": probe, "capability": capability}
        return of_event(make.event(step=8, **of)).title, of_verdict(make.verdict(8, **of)).title

    assert titles("key_retrieval", "key_retrieval") == (
        "key_retrieval: heads crossed the threshold, step 8",
        "key_retrieval: causal (zero), step 8",
    )
    assert titles("key_retrieval_long", "key_retrieval") == (
        "key_retrieval_long: heads crossed the threshold, step 8",
        "key_retrieval_long: causal (zero), step 8",
    )
    assert titles("copies", "induction") == (
        "induction (copies): heads crossed the threshold, step 8",
        "induction (copies): causal (zero), step 8",
    )


@pytest.mark.parametrize("direction", ["up", "down"])
@pytest.mark.parametrize("kind", ALERT_KINDS)
def test_alerts_of_two_probes_differ_and_do_not_wait_for_each_other(clock: Clock, kind: str, direction: str) -> None:
    box, titles = AlertBox(clock=clock), set()
    capability = "first_token" if kind == "sink_transition" else "induction"
    for probe in ("induction", "induction_long", "copies"):
        event = make.event(kind, 8, probe=probe, capability=capability, direction=direction)
        (alert,) = box.event(event)
        titles.add(of_event(event).title)
        assert alert.title == of_event(event).title, "numbered: it looked like an earlier one"
        assert len(box.verdict(make.verdict(8, probe=probe))) == 1
    assert len(titles) == 3


def test_notes_do_not_alert() -> None:
    box = AlertBox()
    assert box.event(make.event("note")) == [] == box.event(make.event("candidates_changed"))
