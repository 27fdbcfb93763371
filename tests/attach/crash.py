"""A training process that is killed: forked from a server, so that twenty of them cost little."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from spectral_monitor import LogSchedule, SpectralMonitorCallback
from tests.attach import tiny
from tests.killing import count_file_operations, die_at_file_operation

STEPS, SAVE = 60, 7
SCHEDULE = LogSchedule(points_per_octave=2, last_step=STEPS)


@dataclass(frozen=True)
class Death:
    """A signal, ``delay`` seconds after the run's ``operation``-th file operation."""

    operation: int
    delay: float = 0.0
    how: int = signal.SIGKILL


def latest(out: Path) -> str | None:
    """The newest checkpoint that the Trainer finished, as a user would pick it.

    ``trainer_state.json`` comes last and is not written at once: after a kill it may be there and empty.
    """
    found = [path for path in out.glob("checkpoint-*") if _is_json(path / "trainer_state.json")]
    return str(max(found, key=lambda path: int(path.name.split("-")[1]))) if found else None


def _is_json(file: Path) -> bool:
    try:
        json.loads(file.read_text())
    except (OSError, ValueError):
        return False
    return True


def train(out: Path, watched: bool = True, restore: bool = False, monitors: int = 1, last: int | None = None) -> Any:
    """One process's part of the run: from the latest checkpoint, if there is one, to the end."""
    torch.set_num_threads(1)
    callbacks: list[Any] = []
    for number in range(monitors if watched else 0):
        given = tiny.monitor(
            out / f"record-{number}",
            tiny.Forced,
            schedule=SCHEDULE,
            probes=tiny.probe(rows=4, seed=42 + number),
            modes=("zero",),
        )
        callbacks.append(SpectralMonitorCallback(given, trackers=False))
        callbacks[-1]._default_schedule = False
    if last is not None:
        callbacks.append(tiny.StopAt(last))
    trainer = tiny.trainer(
        out,
        callbacks=callbacks,
        max_steps=STEPS,
        save_strategy="steps",
        save_steps=SAVE,
        restore_callback_states_from_checkpoint=restore,
    )
    trainer.train(resume_from_checkpoint=latest(out))
    return trainer


def _process(out: Path, restore: bool, end: Death | None) -> None:
    if end is None:
        operations = count_file_operations(out)
    else:
        operations = die_at_file_operation(out, end.operation, end.delay, end.how)
    train(out, restore=restore)
    done = operations()
    Path(out, "operations").write_text(str(done))
    os._exit(0)


def run(out: Path, end: Death | None = None, restore: bool = False) -> bool:
    """Train in a process of its own, which meets its ``end`` if one is given. Whether it did."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["tests.attach.workers", "tests.attach.crash"])
    process = context.Process(target=_process, args=(out, restore, end))
    process.start()
    process.join()
    if end is None:
        assert process.exitcode == 0, f"the process ended with {process.exitcode}: see its traceback in the output"
    return process.exitcode != 0
