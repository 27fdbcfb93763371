"""Real, tiny Trainer runs for the end-to-end tests of this folder: ``python -m ... FOLDER SCENARIO...``.

A scenario is ``NAME:OPTION,OPTION``; each runs in ``FOLDER/NAME`` (two of one name share it) and the program prints one
JSON object: by scenario the SHA-256 of the final weights and what the publishers counted. Options: ``monitor`` attach
the monitor; ``resume`` go on from the last checkpoint; ``until=N`` crash after step N; ``break=alert|log|hang`` make
W&B fail; ``report=wandb|trackio|none`` the Trainer's own reporter.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import threading
from pathlib import Path
from typing import Any

import torch
import wandb
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

from spectral_monitor.publish.wandb import WandbPublisher

STEPS, EVERY = 20, 5


class Crash(RuntimeError):
    """What stops a run in the middle."""


class CrashAt(TrainerCallback):  # type: ignore[misc]
    """Crashes after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            raise Crash


def data() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    rows = torch.randint(0, 96, (64, 32), generator=generator)
    rows[:, 16:] = rows[:, :16]
    return [{"input_ids": row, "labels": row} for row in rows]


#: What the call that hangs waits for: set only after the training has ended.
RELEASE = threading.Event()
HUNG = threading.Event()


def breaking(publisher: WandbPublisher, kind: str) -> None:
    """Make W&B fail in the way of ``kind`` for this publisher."""
    run = publisher._run()
    original, calls = run.log, []

    def log(*args: Any, **options: Any) -> None:
        calls.append(1)
        if kind == "log" and len(calls) >= 3:
            raise BrokenPipeError("the service is gone")
        if kind == "hang" and len(calls) == 3:
            HUNG.set()
            RELEASE.wait()
            HUNG.clear()
        original(*args, **options)

    class Broken:
        """The run as the monitor sees it; the Trainer has the real one."""

        def __getattr__(self, name: str) -> Any:
            return getattr(run, name)

        def alert(self, **options: Any) -> None:
            if kind == "alert":
                raise RuntimeError("alerts are refused")
            run.alert(**options)

    broken = Broken()
    broken.log = log  # type: ignore[attr-defined]
    publisher._given = broken


class BreakingPublisher(WandbPublisher):
    """Joins the run, then lets it fail."""

    kind = ""

    def start(self, monitor_info: Any) -> None:
        super().start(monitor_info)
        breaking(self, self.kind)


def run(folder: Path, *options: str) -> dict[str, Any]:
    """One scenario."""
    given = dict(option.split("=", 1) if "=" in option else (option, "yes") for option in options if option)
    folder.mkdir(exist_ok=True)
    RELEASE.clear()
    set_seed(3)
    config = GPT2Config(
        vocab_size=96,
        n_positions=64,
        n_embd=32,
        n_layer=2,
        n_head=8,
        initializer_range=0.1,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    arguments = TrainingArguments(
        output_dir=str(folder / "out"),
        max_steps=STEPS,
        per_device_train_batch_size=4,
        logging_steps=EVERY,
        save_steps=8,
        eval_strategy="steps",
        eval_steps=10,
        report_to=given.get("report", "wandb"),
        disable_tqdm=True,
        use_cpu=True,
        seed=3,
        learning_rate=2e-2,
    )
    callbacks: list[Any] = []
    monitor = None
    if "monitor" in given:
        from spectral_monitor.attach.trainer import SpectralMonitorCallback
        from spectral_monitor.causal import CheckOptions
        from spectral_monitor.probe import induction_probe
        from spectral_monitor.publish.guarded import GuardedPublisher
        from spectral_monitor.publish.trackers import joining
        from spectral_monitor.screen import Thresholds

        publishers: Any = joining()
        if "break" in given:
            breaker = BreakingPublisher()
            breaker.kind = given["break"]
            publishers = (GuardedPublisher(breaker, limit=2.0, close_limit=2.0),)
        callback = SpectralMonitorCallback(
            publishers=publishers,
            trackers=False,
            probes=induction_probe(rows=24, length=48, token_range=(4, 96), vocabulary=96),
            thresholds=Thresholds(
                classify=1.0, member=1.045, hysteresis=0.99, previous_token=2.0, min_attention=0.001
            ),  # low: they fire
            check=CheckOptions(first_look=8, max_draws=19),
            max_overhead=None,
            on_error="raise",
        )
        monitor = callback.monitor
        callbacks.append(callback)
    if "until" in given:
        callbacks.append(CrashAt(int(given["until"])))
    rows = data()
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows[:8], callbacks=callbacks)
    with contextlib.suppress(Crash):
        trainer.train(resume_from_checkpoint="resume" in given)
    hung = HUNG.is_set()  # training has ended, and the call has not
    if monitor is not None and "until" in given:
        monitor.close()  # a crashed process lets go of the record's lock; here the process lives on
    directory = "" if wandb.run is None else str(Path(wandb.run.dir).parent)
    wandb.finish()
    RELEASE.set()
    weights = hashlib.sha256()
    for value in model.state_dict().values():
        weights.update(value.detach().numpy().tobytes())
    guards = [] if monitor is None else [publisher.summary() for publisher in monitor.publishers]
    return {"weights": weights.hexdigest(), "guards": guards, "hung": hung, "wandb": directory}


def main(folder: Path, *scenarios: str) -> dict[str, Any]:
    """All scenarios, in one process."""
    found = {}
    for number, scenario in enumerate(scenarios):
        name, _, options = scenario.partition(":")
        found[f"{number}:{name}"] = run(folder / name, *options.split(","))
    return found


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), *sys.argv[2:])))
