"""Runs replays in forked processes, with everything imported before: for tests that kill them or run several.

``python -m tests.replay.driver SOURCE OUT [--ranks N] [--kills N --seed S] [--budget BYTES]`` prints one JSON line:
exit statuses of the processes, and how many were killed before they ended. A kill comes at one of the process's next
``--longest`` file operations, or up to 50 ms after it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from pathlib import Path

import torch

from spectral_monitor.replay.claims import Claims
from spectral_monitor.replay.hub import Hub, Patience
from spectral_monitor.replay.plan import Listings, make_plan
from spectral_monitor.replay.recorder import MonitorRecorder, ProbeSettings
from spectral_monitor.replay.runner import Replay, Settings
from spectral_monitor.replay.selection import Selection
from tests.killing import die_at_file_operation

from .training import TOKENS_PER_STEP, monitor_options, probe


def replay(source: str, out: Path, ranks: int = 1, budget: int | None = None) -> int:
    """One process's replay; returns its exit status."""
    hub = Hub(Patience(first_pause=0.05, longest_pause=0.5))
    settings = Settings(out, out.with_name(out.name + ".replay"), ranks=ranks, budget=budget, poll=0.02)
    with Claims(settings.work / "claims").together("plan"):
        plan = make_plan(source, Selection(), Listings(hub, settings.work / "listings"), per_step=TOKENS_PER_STEP)
    shown = ProbeSettings(probes=(probe(),), monitor=monitor_options())
    result = Replay(plan, settings, lambda series, folder: MonitorRecorder(folder, shown, shared=ranks > 1), hub).run()
    return result.status


def fork(source: str, out: Path, ranks: int, budget: int | None, kill: tuple[int, float] | None = None) -> int:
    """Start one replay in a child process, killed at file operation ``kill[0]``, ``kill[1]`` s late; its process id."""
    child = os.fork()
    if child == 0:
        if kill is not None:
            die_at_file_operation(out.parent, *kill)
        try:
            status = replay(source, out, ranks, budget)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            status = 99
        os._exit(status)
    return child


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("source")
    parser.add_argument("out", type=Path)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--longest", type=int, default=150)
    parser.add_argument("--budget", type=int)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    killed = 0
    chance = random.Random(arguments.seed)
    for _ in range(arguments.kills):
        kill = chance.randint(1, arguments.longest), chance.choice((0.0, chance.uniform(0.0, 0.05)))
        child = fork(arguments.source, arguments.out, arguments.ranks, arguments.budget, kill)
        killed += os.WIFSIGNALED(os.waitpid(child, 0)[1])
    children = [
        fork(arguments.source, arguments.out, arguments.ranks, arguments.budget) for _ in range(arguments.ranks)
    ]
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    print(json.dumps({"statuses": statuses, "killed": killed}))


if __name__ == "__main__":
    main()
