"""A training process that is killed: forked from a server, so that twenty of them cost little."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch

from spectral_monitor import LogSchedule, SpectralMonitorCallback
from tests.attach import tiny

STEPS, SAVE = 60, 7
SCHEDULE = LogSchedule(points_per_octave=2, last_step=STEPS)


def latest(out: Path) -> str | None:
    """The newest checkpoint that the Trainer finished, as a user would pick it."""
    found = [path for path in out.glob("checkpoint-*") if (path / "trainer_state.json").is_file()]
    return str(max(found, key=lambda path: int(path.name.split("-")[1]))) if found else None


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


def _process(out: str, restore: bool) -> None:
    train(Path(out), restore=restore)
    Path(out, "seconds").write_text(str(time.process_time()))
    os._exit(0)


def run(out: Path, kill_at: float | None = None, how: int = signal.SIGKILL, restore: bool = False) -> bool:
    """Train in a process of its own; kill it when it has used ``kill_at`` seconds of CPU. Whether it was killed.

    CPU time, not time of day: the same moments of the run on a busy machine.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["tests.attach.workers", "tests.attach.crash"])
    process = context.Process(target=_process, args=(str(out), restore))
    process.start()
    assert process.pid is not None
    while kill_at is not None and process.is_alive() and _cpu_seconds(process.pid) < kill_at:
        time.sleep(0.002)
    if kill_at is not None and process.is_alive():
        os.kill(process.pid, how)
    process.join()
    return process.exitcode != 0


def _cpu_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return float("inf")
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
