"""Several records of one run joined into one: for replays that were split over machines without a shared disk.

Observations are taken in order of step through the monitor's own bookkeeping, so crossings, alarms and candidate
changes are those of one run over all of them; causal verdicts are kept where they were made.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from spectral_monitor.errors import RecordError
from spectral_monitor.heads import Head, names
from spectral_monitor.observation import Observation, Verdict
from spectral_monitor.record import RunRecord, write_json
from spectral_monitor.replay.recorder import Keeper
from spectral_monitor.screen import Thresholds
from spectral_monitor.warning import WarningParameters

#: Parts of run.json that have to be equal: section -> fields (None: the whole section).
_ALIKE: tuple[tuple[str, tuple[str, ...] | None], ...] = (
    ("versions", ("torch", "transformers")),
    ("model", ("dtype", "attention")),
    ("config", ("baseline", "thresholds", "modes")),
    ("replay", ("series",)),
)


@dataclass(frozen=True)
class Merged:
    """How much came together."""

    observations: int
    events: int
    verdicts: int


@dataclass(frozen=True)
class _ProbeName:
    """What bookkeeping needs of a probe batch: the tokens stay where they were shown."""

    name: str
    capability: str
    length: int
    fingerprint: str


def merge_runs(out: Path, runs: Sequence[Path], *, mix_versions: bool = False) -> Merged:
    """Join the records in ``runs`` into the new run directory ``out``; nothing is left behind by a refused call.

    Raises RecordError: no record, other probes, settings or library versions (the latter but with ``mix_versions``),
    two different observations of one step, or ``out`` exists.
    """
    if out.exists():
        raise RecordError(f"{out} exists already: give a new directory")
    records = [RunRecord.open(run) for run in runs]
    if len(records) < 2:
        raise RecordError("give two run directories or more to join")
    for record in records[1:]:
        _require_alike(records[0], record, mix_versions)
    observations = _observations(records)
    if not observations:
        raise RecordError("the records hold no observation yet: there is nothing to join")
    temporary = out.with_name(f".{out.name}.merging")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        merged = _write(temporary, records, observations)
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return merged


def _require_alike(first: RunRecord, other: RunRecord, mix_versions: bool) -> None:
    prints = [{name: probe["fingerprint"] for name, probe in record.probes.items()} for record in (first, other)]
    if prints[0] != prints[1]:
        raise RecordError(
            f"{other.run_dir} was made with other probes than {first.run_dir} (SHA-256 of the batches): not joined"
        )
    for section, fields in _ALIKE:
        ours, theirs = first.run.get(section) or {}, other.run.get(section) or {}
        for name in fields or sorted({*ours, *theirs}):
            if ours.get(name) != theirs.get(name) and not (mix_versions and section in ("versions", "model")):
                hint = "; join them all the same with --mix-versions" if section in ("versions", "model") else ""
                raise RecordError(
                    f"{other.run_dir} differs from {first.run_dir} in {name}: "
                    f"{_short(theirs.get(name))} against {_short(ours.get(name))}{hint}"
                )


def _observations(records: Sequence[RunRecord]) -> list[tuple[Observation, ...]]:
    """All observations, those of one step together, in order of step; RecordError where two records disagree."""
    found: dict[tuple[int, str], tuple[Observation, RunRecord]] = {}
    for record in records:
        for observation in record.observations():
            key = (observation.step, observation.probe)
            if key in found and not _same_numbers(found[key][0], observation):
                raise RecordError(
                    f"{record.run_dir} and {found[key][1].run_dir} hold different observations of step "
                    f"{observation.step}: they are not of one run"
                )
            found.setdefault(key, (observation, record))
    steps: dict[int, list[Observation]] = {}
    for (step, _), (observation, _) in sorted(found.items(), key=lambda item: item[0]):
        steps.setdefault(step, []).append(observation)
    return [tuple(group) for group in steps.values()]


def _same_numbers(first: Observation, second: Observation) -> bool:
    if set(first.heads.attention) != set(second.heads.attention) or len(first.heads) != len(second.heads):
        return False
    pairs = [(first.heads.pr, second.heads.pr)]
    pairs += [(first.heads.attention[name], second.heads.attention[name]) for name in first.heads.attention]
    return all(np.allclose(one, other, rtol=1e-6, atol=1e-6, equal_nan=True) for one, other in pairs)


def _verdicts(records: Sequence[RunRecord]) -> list[Verdict]:
    found: dict[tuple[int, str, str, str], Verdict] = {}
    for record in records:
        for verdict in record.verdicts():
            found.setdefault((verdict.step, verdict.probe, verdict.capability, verdict.mode), verdict)
    return [found[key] for key in sorted(found)]


class _Joiner(Keeper):
    """The monitor's bookkeeping over observations and verdicts that exist already."""

    def __init__(self, run: Mapping[str, Any], verdicts: Sequence[Verdict], run_dir: Path) -> None:
        config = run.get("config", {})
        thresholds = Thresholds(**config["thresholds"]) if config.get("thresholds") else None
        warning = config.get("warning")
        super().__init__(
            (),
            run_dir=run_dir,
            baseline=config.get("baseline", "others"),
            thresholds=thresholds,
            warning=None if warning is None else WarningParameters.from_dict(warning),
            modes=config.get("modes") or ("zero", "mean"),
        )
        self._run = dict(run)
        self._known = list(verdicts)

    def open(self) -> None:
        """Tracks by the names in run.json, and the new record."""
        for name, probe in self._run["probes"].items():
            shown = _ProbeName(name, probe.get("capability", "induction"), probe["length"], probe["fingerprint"])
            self._add_track(shown)
        self._open_record({key: value for key, value in self._run.items() if key != "format"})

    def _is_check_due(self, track: Any, observation: Observation, candidates: frozenset[Head] | None) -> bool:
        return False

    def _stamped(self, observation: Observation, given: Observation) -> Observation:
        return dataclasses.replace(observation, seconds=given.seconds, share=given.share, time=given.time)

    def _check(
        self, subject: Any, track: Any, observation: Observation, candidates: Any, progress: Any
    ) -> list[Verdict]:
        if not candidates:
            return []
        track.checked = candidates
        wanted = tuple(names(candidates))
        return [
            verdict
            for verdict in self._known
            if (verdict.step, verdict.probe, verdict.heads) == (observation.step, observation.probe, wanted)
        ]


def _write(folder: Path, records: Sequence[RunRecord], groups: Sequence[tuple[Observation, ...]]) -> Merged:
    verdicts = _verdicts(records)
    run = {**records[0].run, "merged_from": [str(record.run_dir) for record in records]}
    joiner = _Joiner(run, verdicts, folder)
    joiner.open()
    record = joiner.record
    assert record is not None
    for group in groups:
        joiner.take(group, None)
    # Verdicts of candidate sets that the joined run does not have at that step are kept as they were made.
    for verdict in verdicts:
        record.add_verdict(verdict)
    kept = {event.key: event for other in records for event in other.events() if event.kind in ("note", "error")}
    for event in kept.values():
        record.add_event(event)
    tables = [json.loads(path.read_text()) for item in records if (path := item.run_dir / "replay.json").is_file()]
    if tables:
        rows = {(row["series"], row["revision"]): row for table in tables for row in table["revisions"]}
        notes = list(dict.fromkeys(note for table in tables for note in table["notes"]))
        ordered = sorted(rows.values(), key=lambda row: (row["step"] is None, row["step"] or 0, row["revision"]))
        write_json(folder / "replay.json", {"notes": notes, "revisions": ordered})
    merged = Merged(sum(len(group) for group in groups), len(record.events()), len(record.verdicts()))
    joiner.close()
    return merged


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
