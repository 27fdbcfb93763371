"""Measures what downloading ahead is worth: ``python -m tests.replay.overlap [--seconds S]``.

Twelve revisions of a tiny trained model behind a slow loopback Hub. Printed: seconds for downloading alone, for loading
and measuring alone (both padded to ``--seconds`` a revision by waiting, so that a busy machine matters little), for the
replay of both, the replay over the larger of the two, and its seconds in which nothing was downloaded or measured.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

from .hub_server import HubServer

REPO = "lab/overlap"


def measure(seconds: float) -> dict[str, float]:
    """Seconds of each part, and their ratio."""
    with tempfile.TemporaryDirectory() as place, HubServer() as server:
        # The client reads its endpoint when it is imported: this process imports it only now.
        os.environ |= {"HF_ENDPOINT": server.endpoint, "HF_HUB_OFFLINE": "0", "HF_HOME": f"{place}/hf"}
        from spectral_monitor.replay.claims import Claims
        from spectral_monitor.replay.downloads import Downloads
        from spectral_monitor.replay.hub import Hub
        from spectral_monitor.replay.loading import LoadedModel
        from spectral_monitor.replay.plan import Listings, Planned, make_plan
        from spectral_monitor.replay.recorder import MonitorRecorder, ProbeSettings
        from spectral_monitor.replay.runner import COMPLETE, Replay, Settings
        from spectral_monitor.replay.selection import Selection

        from .training import STEPS, TOKENS_PER_STEP, monitor_options, probe, train

        folder = Path(place)
        train(folder / "revisions", folder / "live")
        server.add(REPO, {path.name: path for path in (folder / "revisions").iterdir()})
        server.rate = sum(len(data) for data in server.repos[REPO]["step0"].values()) / seconds

        busy: list[tuple[float, float]] = []

        class Padded(MonitorRecorder):
            def measure(self, loaded: LoadedModel, planned: Planned, mark: str | None) -> Any:
                began = time.monotonic()
                reading = super().measure(loaded, planned, mark)
                time.sleep(max(0.0, seconds - (time.monotonic() - began)))
                busy.append((began, time.monotonic()))
                return reading

        bring = Downloads.bring

        def timed_bring(self: Downloads, *arguments: Any, **options: Any) -> Any:
            began = time.monotonic()
            try:
                return bring(self, *arguments, **options)
            finally:
                busy.append((began, time.monotonic()))

        shown = ProbeSettings(probes=(probe(),), monitor=monitor_options())
        hub = Hub()

        def replay(source: str, name: str) -> float:
            plan = make_plan(source, Selection(), Listings(hub), per_step=float(TOKENS_PER_STEP))
            settings = Settings(folder / name, folder / f"{name}.replay")
            began = time.monotonic()
            result = Replay(plan, settings, lambda _, run_dir: Padded(run_dir, shown), hub).run()
            assert result.status == COMPLETE
            return time.monotonic() - began

        plan = make_plan(REPO, Selection(), Listings(hub), per_step=float(TOKENS_PER_STEP))
        downloads = Downloads(folder / "alone", hub, Claims(folder / "claims"))
        began = time.monotonic()
        for planned in plan.planned:
            downloads.bring(planned)
        download = time.monotonic() - began
        measuring = replay(str(folder / "revisions"), "local")
        busy.clear()
        with mock.patch.object(Downloads, "bring", timed_bring):
            both = replay(REPO, "both")
    return {
        "revisions": len(STEPS),
        "download": download,
        "measuring": measuring,
        "both": both,
        "ratio": both / max(download, measuring),
        "idle": both - covered(busy),
    }


def covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union of spans."""
    total, until = 0.0, float("-inf")
    for began, ended in sorted(spans):
        total += max(0.0, ended - max(began, until))
        until = max(until, ended)
    return total


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=2.0)
    print(json.dumps({name: round(value, 3) for name, value in measure(parser.parse_args().seconds).items()}))
