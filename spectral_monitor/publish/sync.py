"""Write the whole history of a run directory into one W&B run, from the record alone."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from spectral_monitor.observation import Event, Observation, Verdict
from spectral_monitor.publish.names import MAX_KEYS, PublishError
from spectral_monitor.publish.wandb import WandbPublisher
from spectral_monitor.record import RunRecord


@dataclass(frozen=True)
class Synced:
    """What was written, and where: ``place`` is the run's address, or its folder when W&B is offline."""

    run_id: str
    place: str
    observations: int
    events: int
    verdicts: int
    offline: bool


def sync(
    run_dir: str | os.PathLike[str],
    *,
    project: str | None = None,
    entity: str | None = None,
    run_id: str | None = None,
    name: str | None = None,
    offline: bool = False,
    alerts: bool = False,
    max_keys: int = MAX_KEYS,
) -> Synced:
    """Open one W&B run, write every observation, event and verdict of ``run_dir`` into it in order, and finish it.

    The rows have the names and the x-axis (``spectral_monitor/step``) that the live publisher uses in a user's own
    loop. Heads that are flagged anywhere in the run have their values from the first observation on. Alerts are left
    out unless asked for: they tell of the past.

    Raises RecordError when there is no record, PublishError when there is nothing in it, wandb is missing, W&B
    refuses, or a run is active in this process.
    """
    record = RunRecord.open(run_dir)
    observations, events, verdicts = record.observations(), record.events(), record.verdicts()
    if not observations:
        raise PublishError(f"{record.run_dir} holds no observation yet: there is nothing to write")
    try:
        import wandb
    except ImportError:
        raise PublishError("sync needs wandb: pip install 'spectral_monitor[wandb]'") from None
    if wandb.run is not None:
        raise PublishError(f"W&B run {wandb.run.id} is active in this process: finish it before you sync")
    run = _open(wandb, project, entity, run_id, name or record.run_dir.name, offline)
    try:
        publisher = WandbPublisher(run, axis="own", own_rows=True, alerts=alerts, max_keys=max_keys)
        publisher.start(record.run)  # without run_dir: nothing was announced in this run before
        for verdict in verdicts:
            for head in verdict.heads:
                publisher.rows.flag(head, verdict.capability, verdict.probe)
        for item in _in_order(observations, events, verdicts):
            if isinstance(item, Observation):
                publisher.observation(item)
            elif isinstance(item, Event):
                publisher.event(item)
            else:
                publisher.verdict(item)
        publisher.close()
        place = str(getattr(run, "url", None) or run.dir)
    finally:
        run.finish()
    return Synced(str(run.id), place, len(observations), len(events), len(verdicts), bool(run.offline))


def _open(wandb: Any, project: str | None, entity: str | None, run_id: str | None, name: str, offline: bool) -> Any:
    try:
        run = wandb.init(
            project=project or os.environ.get("WANDB_PROJECT") or "spectral-monitor",
            entity=entity,
            id=run_id,
            name=name,
            job_type="spectral-monitor-sync",
            mode="offline" if offline else None,
            resume="never" if run_id else None,
        )
    except Exception as error:
        raise PublishError(
            f"W&B did not open a run ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else error}); "
            "check `wandb login`, the entity and the project, choose another --run-id, or use --offline"
        ) from error
    if run.disabled:
        raise PublishError("W&B is disabled (WANDB_MODE=disabled): unset it, or use --offline")
    return run


def _in_order(
    observations: list[Observation], events: list[Event], verdicts: list[Verdict]
) -> list[Observation | Event | Verdict]:
    """By step; at one step the observation first, then what followed from it."""
    keyed: list[tuple[int, int, Observation | Event | Verdict]] = []
    keyed.extend((item.step, 0, item) for item in observations)
    keyed.extend((item.step, 1, item) for item in events)
    keyed.extend((item.step, 2, item) for item in verdicts)
    return [item for _, _, item in sorted(keyed, key=lambda entry: entry[:2])]
