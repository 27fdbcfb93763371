"""Ride along a bare Accelerate loop.

::

    monitor = watch(accelerator, "out/spectral_monitor")
    ...
    monitor.step(model, step, tokens)   # after each optimizer update, and once at step 0; on every rank
    ...
    monitor.close()
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from spectral_monitor.monitor import SpectralMonitor
from spectral_monitor.record import write_json


def watch(
    accelerator: Any,
    run_dir: str | Path,
    *,
    trackers: bool = True,
    log_step: bool = True,
    **options: Any,
) -> SpectralMonitor:
    """A monitor that publishes through the accelerator's trackers and goes into its checkpoints.

    Args:
        accelerator: an ``accelerate.Accelerator``, with ``init_trackers`` called before the first look.
        run_dir: where the record goes.
        trackers: publish through them, each call under a time limit.
        log_step: pass ``step=`` to them; False where the loop itself calls ``accelerator.log`` without a step.
        options: further arguments of ``SpectralMonitor``.
    """
    monitor = SpectralMonitor(run_dir, **options)
    if trackers:
        from spectral_monitor.publish.guarded import guarded
        from spectral_monitor.publish.trackers import AcceleratePublisher

        monitor.publishers += guarded([AcceleratePublisher(accelerator, log_step=log_step)])
    keep_with_checkpoints(accelerator, monitor)
    return monitor


def keep_with_checkpoints(accelerator: Any, monitor: SpectralMonitor) -> None:
    """Save the monitor's state in every ``accelerator.save_state`` and go on from it at ``load_state``.

    ``accelerator.register_for_checkpointing(monitor)`` works too, but then ``load_state`` refuses a checkpoint that was
    written without the monitor; with this one the monitor may be added to a run, or left out, at any checkpoint.
    """
    assert monitor.run_dir is not None
    name = f"{monitor.run_dir.name}.json"

    def save(models: Any, weights: Any, output_dir: str) -> None:
        if accelerator.is_main_process:
            write_json(Path(output_dir) / name, monitor.state_dict())

    def load(models: Any, input_dir: str) -> None:
        file = Path(input_dir) / name
        if file.is_file():
            monitor.load_state_dict(json.loads(file.read_text()))

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
