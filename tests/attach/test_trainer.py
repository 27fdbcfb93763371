"""The callback in real Trainer runs on one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from transformers import TrainerCallback

from spectral_monitor import LogSchedule, RunRecord, SpectralMonitorCallback
from tests.attach import tiny

EVERY = LogSchedule(extra_steps=frozenset(range(41)))
LOG_STEPS = [0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 13, 16, 19, 23, 27, 32, 38, 40]


def callback(kind: type = tiny.SpectralMonitor, **options: Any) -> SpectralMonitorCallback:
    watched = SpectralMonitorCallback(tiny.monitor(None, kind, **options), trackers=False)
    watched._default_schedule = "schedule" not in options
    return watched


# -- promise 1: the training trajectory is the same to the bit --------------------------------------------------------


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    run = tiny.trainer(tmp_path_factory.mktemp("plain"))
    run.train()
    return tiny.outcome(run)


@pytest.mark.parametrize("frequency", ["log schedule", "every step, check forced"])
def test_training_is_bit_identical_with_the_monitor(frequency: str, plain: dict[str, Any], tmp_path: Path) -> None:
    if frequency == "log schedule":
        watched, steps = callback(), LOG_STEPS
    else:
        watched, steps = callback(tiny.Forced, schedule=EVERY), list(range(41))
    run = tiny.trainer(tmp_path, callbacks=[watched])
    run.train()
    assert tiny.difference(plain, tiny.outcome(run)) == []
    record = RunRecord.open(tmp_path / "spectral_monitor")
    assert record.steps() == steps
    if frequency != "log schedule":
        verdicts = record.verdicts()
        assert len(verdicts) == 2 * 41 and all(verdict.draws for verdict in verdicts)


def test_the_plain_run_depends_on_dropout_and_seed(plain: dict[str, Any], tmp_path: Path) -> None:
    """The comparison above can fail: another random stream gives other weights."""

    class Draws(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 5:
                torch.rand(1)

    run = tiny.trainer(tmp_path, callbacks=[Draws()])
    run.train()
    assert tiny.difference(plain["weights"], tiny.weights(run.model))


def test_works_without_arguments(tmp_path: Path) -> None:
    run = tiny.trainer(
        tmp_path, model=tiny.llama(), callbacks=[SpectralMonitorCallback(probes=tiny.probe())], max_steps=4
    )
    run.train()
    record = RunRecord.open(tmp_path / "spectral_monitor")
    assert {0, 1, 2, 4} <= set(record.steps())


def test_evaluation_saving_and_accumulation_are_the_same(tmp_path: Path) -> None:
    def run(name: str, callbacks: Any) -> dict[str, Any]:
        trainer = tiny.trainer(
            tmp_path / name,
            model=tiny.gpt2(),
            callbacks=callbacks,
            max_steps=12,
            gradient_accumulation_steps=3,
            per_device_train_batch_size=2,
            eval_strategy="steps",
            eval_steps=5,
            save_strategy="steps",
            save_steps=6,
            evaluation=tiny.rows(8, seed=9),
        )
        trainer.train()
        return tiny.outcome(trainer) | {
            "eval": [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
        }

    assert tiny.difference(run("plain", []), run("watched", [callback(schedule=EVERY)])) == []
    names = {path.name for path in (tmp_path / "plain" / "checkpoint-6").iterdir()}
    watched = {path.name for path in (tmp_path / "watched" / "checkpoint-6").iterdir()}
    assert watched - names == {"spectral_monitor.json"} and names <= watched
    for name in ("config.json", "generation_config.json", "model.safetensors", "scheduler.pt"):
        first, second = (tmp_path / run / "checkpoint-6" / name for run in ("plain", "watched"))
        assert first.read_bytes() == second.read_bytes(), name


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("kind", ["plain", "checkpointed", "compiled", "lora"])
def test_training_is_bit_identical_by_precision_and_kind(kind: str, precision: str, tmp_path: Path) -> None:
    if kind == "lora":
        peft = pytest.importorskip("peft")
    if kind == "compiled":
        torch._dynamo.reset()

    def run(name: str, callbacks: Any) -> dict[str, Any]:
        model: Any = tiny.llama()
        if kind == "lora":
            options = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj", "o_proj"], lora_dropout=0.1)
            torch.manual_seed(1)
            model = peft.get_peft_model(model, options)
        arguments: dict[str, Any] = {"bf16": precision == "bf16", "max_steps": 8}
        if kind == "checkpointed":
            arguments["gradient_checkpointing"] = True
        if kind == "compiled":
            arguments |= {"torch_compile": True, "torch_compile_backend": "eager"}
        trainer = tiny.trainer(tmp_path / name, model=model, callbacks=callbacks, **arguments)
        trainer.train()
        return tiny.outcome(trainer)

    watched = callback(tiny.Forced, schedule=EVERY)
    assert tiny.difference(run("plain", []), run("watched", [watched])) == []
    record = RunRecord.open(tmp_path / "watched" / "spectral_monitor")
    assert record.steps() == list(range(9))
    assert all(len(observation.heads) == 8 and observation.finite for observation in record.observations())
    assert watched.monitor.summary()["failures"] == {}


# -- tokens -----------------------------------------------------------------------------------------------------------


def token_run(
    out: Path, counter: Any, padded: bool, resume: bool, steps: int = 20
) -> tuple[list[float | None], list[bool]]:
    data = tiny.rows(240, length=16)
    if padded:
        for row in data:
            row["attention_mask"] = (torch.arange(16) < 8).long()
            row["labels"] = torch.where(row["attention_mask"] > 0, row["input_ids"], -100)

    def run(last: int, **resuming: Any) -> None:
        watched = callback(schedule=LogSchedule(extra_steps=frozenset(range(41))), check=None)
        trainer = tiny.trainer(
            out,
            data=data,
            callbacks=[watched, tiny.StopAt(last)],
            max_steps=steps,
            gradient_accumulation_steps=3,
            per_device_train_batch_size=2,
            eval_strategy="steps",
            eval_steps=5,
            save_strategy="steps",
            save_steps=10,
            include_num_input_tokens_seen=counter,
            evaluation=tiny.rows(8),
        )
        trainer.train(**resuming)

    if resume:
        run(10)
        run(steps, resume_from_checkpoint=str(out / "checkpoint-10"))
    else:
        run(steps)
    observations = RunRecord.open(out / "spectral_monitor").observations()
    assert [observation.step for observation in observations] == list(range(steps + 1))
    assert all(observation.attempt == 1 for observation in observations)
    return [o.tokens for o in observations], [o.tokens_estimated for o in observations]


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize(
    ("counter", "padded", "per_step", "estimated"),
    [("all", False, 96, False), ("no", False, 96, True), ("non_padding", True, 48, False), ("all", True, 96, False)],
)
def test_tokens_are_those_of_training_alone(
    counter: Any, padded: bool, per_step: int, estimated: bool, resume: bool, tmp_path: Path
) -> None:
    tokens, flags = token_run(tmp_path, counter, padded, resume)
    assert tokens == [step * per_step for step in range(21)]
    assert flags == [False] + [estimated] * 20


def test_padding_is_no_data_where_the_trainer_keeps_no_counter(tmp_path: Path) -> None:
    tokens, flags = token_run(tmp_path, "no", padded=True, resume=False, steps=6)
    assert tokens == [step * 48 for step in range(7)] and all(flags[1:])


class StopAfterEvaluation(TrainerCallback):
    """Early stopping: ends the training once it was evaluated after ``step``."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        control.should_training_stop = state.global_step >= self.step
        return control


def test_the_last_look_of_a_run_that_stops_early_is_not_at_its_best_model(tmp_path: Path) -> None:
    """``load_best_model_at_end`` puts other weights into the model before ``on_train_end``."""
    monitor = tiny.monitor(tmp_path / "record", schedule=LogSchedule(points_per_octave=1, last_step=40))
    run = tiny.trainer(
        tmp_path,
        callbacks=[StopAfterEvaluation(15), SpectralMonitorCallback(monitor, trackers=False)],
        evaluation=tiny.rows(8, seed=9),
        eval_strategy="steps",
        eval_steps=5,
        save_strategy="steps",
        save_steps=5,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=True,  # so that the best is not the last: the loss falls
    )
    run.train()
    assert run.state.global_step == 15 and run.state.best_global_step == 5
    record = RunRecord.open(tmp_path / "record")
    assert record.steps() == [0, 1, 2, 4, 8, 15]

    def seen(step: int) -> list[float]:
        model = tiny.GPT2LMHeadModel.from_pretrained(tmp_path / f"checkpoint-{step}")
        return list(tiny.monitor(None).observe(model, step, 0.0).observations[0].heads.pr)

    last = list(record.observations()[-1].heads.pr)
    assert last == pytest.approx(seen(15), rel=1e-5) and last != pytest.approx(seen(5), rel=1e-2)
