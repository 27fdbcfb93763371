"""What an alarm does to a Trainer run: keep a checkpoint, look more often, stop; nothing when not asked to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spectral_monitor.attach.trainer import SpectralMonitorCallback
from spectral_monitor.observation import Event, Observation
from spectral_monitor.response import Actions
from spectral_monitor.schedule import LogSchedule
from spectral_monitor.warning import EarlyWarning
from tests.attach import tiny

ALARM_AT = 16


@pytest.fixture(autouse=True)
def one_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The detector's own rules are tested elsewhere; here one alarm comes at a known step."""

    def update(self: EarlyWarning, observation: Observation, members: Any = ()) -> list[Event]:
        if observation.step != ALARM_AT:
            return []
        return [Event("attention_rise", ALARM_AT, observation.tokens, "induction", "induction", ("L1H2",), "up")]

    monkeypatch.setattr(EarlyWarning, "update", update)


def run(out: Path, actions: Actions | None) -> tuple[Any, Any]:
    monitor = tiny.monitor(out / "record", schedule=LogSchedule(1, last_step=40), actions=actions, check=None)
    trainer = tiny.trainer(out, callbacks=[SpectralMonitorCallback(monitor)])
    trainer.train()
    return trainer, monitor.record


def test_an_alarm_keeps_a_checkpoint_and_makes_the_schedule_denser(tmp_path: Path) -> None:
    actions = Actions(save_on=("attention_rise",), densify_on=("attention_rise",), densify_octaves=0.5)
    trainer, record = run(tmp_path, actions)
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == [f"checkpoint-{ALARM_AT}"]
    assert trainer.state.global_step == 40
    # Half an octave from 16 is up to 22.6; at most 4% apart means every step there.
    assert record.steps() == [0, 1, 2, 4, 8, 16, 17, 18, 19, 20, 21, 22, 32, 40]


def test_an_alarm_can_stop_the_training(tmp_path: Path) -> None:
    trainer, record = run(tmp_path, Actions(stop_on=("attention_rise",)))
    assert trainer.state.global_step == ALARM_AT
    assert record.steps()[-1] == ALARM_AT


def test_with_all_off_nothing_changes(tmp_path: Path) -> None:
    plain = tiny.trainer(tmp_path / "plain")
    plain.train()
    watched, record = run(tmp_path / "watched", None)
    assert record.steps() == [0, 1, 2, 4, 8, 16, 32, 40]
    assert [event.kind for event in record.events()].count("attention_rise") == 1
    assert not list((tmp_path / "watched").glob("checkpoint-*"))
    assert tiny.difference(tiny.outcome(plain), tiny.outcome(watched)) == []


def test_saving_and_looking_more_often_leave_the_training_as_it_is(tmp_path: Path) -> None:
    plain = tiny.trainer(tmp_path / "plain")
    plain.train()
    actions = Actions(save_on=("attention_rise",), densify_on=("attention_rise",))
    watched, _ = run(tmp_path / "watched", actions)
    assert tiny.difference(tiny.weights(plain.model), tiny.weights(watched.model)) == []
