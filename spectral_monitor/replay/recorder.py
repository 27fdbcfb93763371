"""The monitor as the replay uses it: looking apart from recording, so that looks may be made in any order.

``measure`` looks with the monitor's own code and changes nothing; ``record`` hands the finished look to the monitor,
which raises the events, runs the causal check where one is due, and writes: the same code, in the same order, as in a
live run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from torch import nn

from spectral_monitor.capture import Subject, check_fit, longest_input, vocabulary_of
from spectral_monitor.errors import RecordError
from spectral_monitor.heads import Head
from spectral_monitor.monitor import Look, SpectralMonitor, _Track, special_ids
from spectral_monitor.observation import Event, Observation, Verdict
from spectral_monitor.probe import ProbeBatch, induction_probe
from spectral_monitor.record import RunRecord, read_observation, to_table, write_json
from spectral_monitor.replay.loading import LoadedModel
from spectral_monitor.replay.plan import Plan, Planned, SeriesPlan
from spectral_monitor.replay.runner import NeedsModel
from spectral_monitor.warning import EarlyWarning

logger = logging.getLogger(__name__)

#: Called with what is running, rows done and rows in all.
LookProgress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class ProbeSettings:
    """Which probe batch is shown, and how the monitor reads it.

    Attributes:
        rows, length, seed, token_range, protocol: of the induction probe (see ``probe.induction_probe``); the length
            is lowered to what the model takes.
        probes: fixed probe batches instead of these.
        monitor: further arguments of ``SpectralMonitor`` (``baseline``, ``thresholds``, ``check``, ...).
    """

    rows: int = 2000
    length: int = 256
    seed: int = 42
    token_range: tuple[int, int] = (100, 10_000)
    protocol: str = "default"
    probes: tuple[ProbeBatch, ...] = ()
    monitor: Mapping[str, Any] = field(default_factory=dict)

    def build(self, loaded: LoadedModel) -> tuple[ProbeBatch, ...]:
        """The probes for a series, by its first model: fitted to its vocabulary and length, special ids left out."""
        if self.probes:
            return self.probes
        limit = longest_input(loaded.model)
        known = [size for size in (vocabulary_of(loaded.model), loaded.tokenizer_size) if size is not None]
        batch = induction_probe(
            rows=self.rows,
            length=self.length if limit is None else min(self.length, limit),
            seed=self.seed,
            token_range=self.token_range,
            vocabulary=min(known, default=None),
            exclude=()
            if self.protocol == "published"
            else special_ids(loaded.model) | set(loaded.tokenizer_special_ids),
            protocol=self.protocol,
        )
        return (batch,)


class Keeper(SpectralMonitor):
    """A monitor that is given its looks, and that can record without a model as long as no causal check is due."""

    def __init__(self, probes: Sequence[ProbeBatch], **options: Any) -> None:
        super().__init__(probes=list(probes), max_overhead=None, on_error="raise", **options)
        self._given: dict[str, Observation] = {}

    def take(self, reading: Sequence[Observation], model: nn.Module | None) -> Look:
        """Record one look. NeedsModel (and nothing changed) where ``model`` is None and a check is due."""
        self._given = {observation.probe: observation for observation in reading}
        first = reading[0]
        if model is None:
            for name, track in self._tracks.items():
                candidates = self._candidates(track, self._given[name])
                if self._is_check_due(track, self._given[name], candidates):
                    raise NeedsModel
        return self.observe(
            model,  # type: ignore[arg-type]
            first.step,
            first.tokens,
            tokens_estimated=first.tokens_estimated,
            label=first.label,
            mark=first.mark,
        )

    def insert(self, reading: Sequence[Observation]) -> None:
        """Put a look into the record that comes before ones already recorded: without events and checks."""
        assert self.record is not None and self.last_step is not None
        for observation in reading:
            self.record.append(dataclasses.replace(observation, time=time.time()))
            text = (
                f"measured late, after step {self.last_step} was recorded: no crossing and no causal check was made "
                "at this step"
            )
            self.record.add_event(
                Event("note", observation.step, observation.tokens, observation.probe, text=text, time=time.time())
            )

    def _add_track(self, probe: Any) -> None:
        """Bookkeeping for a probe of which only name, capability, length and fingerprint are known."""
        warning = None
        if self._warning is not None:
            warning = EarlyWarning(probe.length, self._warning, capability=probe.capability)
        self._tracks[probe.name] = _Track(probe, warning)

    def _is_check_due(self, track: Any, observation: Observation, candidates: frozenset[Head] | None) -> bool:
        if self.check_options is None or not candidates or candidates == track.checked:
            return False
        return not self._verdicts_at(observation, candidates)

    def _look(self, subject: Any, track: Any, step: int, tokens: float | None, progress: Any) -> Observation:
        return self._given[track.probe.name]

    def _subject_of(self, model: nn.Module) -> Subject:
        return None if model is None else super()._subject_of(model)  # type: ignore[return-value]

    def _stamped(self, observation: Observation, given: Observation) -> Observation:
        """What it cost: the look was made before, maybe elsewhere; no training is there to take a share of."""
        return dataclasses.replace(observation, seconds=observation.seconds + given.seconds, share=math.nan)

    def _write(
        self, observation: Observation, previous: Observation | None, events: list[Event], verdicts: list[Verdict]
    ) -> Observation:
        observation = self._stamped(observation, self._given[observation.probe])
        return super()._write(observation, previous, events, verdicts)


class MonitorRecorder:
    """Measures and records one series with ``SpectralMonitor`` (see ``runner.Recorder``).

    Args:
        folder: run directory of the series.
        probe: what is shown to the models.
        shared: other processes record into the same directory: it is opened for each record and closed again, and
            nothing is published live.
        publishers: told of every look where ``shared`` is False.
        info: goes into run.json under ``replay``.
    """

    def __init__(
        self,
        folder: Path,
        probe: ProbeSettings,
        *,
        shared: bool = False,
        publishers: Sequence[Any] = (),
        info: Mapping[str, Any] | None = None,
        progress: LookProgress | None = None,
    ) -> None:
        self.folder = folder
        self._probe = probe
        self._shared = shared
        self._publishers = tuple(publishers)
        self._info = dict(info or {})
        self._progress = progress
        self._looker: SpectralMonitor | None = None
        self._keeper: Keeper | None = None

    # -- looking ------------------------------------------------------------------------------------------------

    def measure(self, loaded: LoadedModel, planned: Planned, mark: str | None) -> tuple[Observation, ...]:
        """Look at ``loaded`` with every probe. Raises SpectralMonitorError where the model cannot be read."""
        looker = self._prepared(loaded)
        checkpoint = planned.checkpoint
        reading = []
        for probe in looker.probes:
            check_fit(loaded.model, probe)
            began = time.monotonic()
            observation = looker._look(
                looker._subject_of(loaded.model),
                looker._tracks[probe.name],
                checkpoint.step,
                checkpoint.tokens,
                self._progress,
            )
            reading.append(
                dataclasses.replace(
                    observation,
                    tokens_estimated=checkpoint.tokens_estimated,
                    label=checkpoint.name,
                    mark=mark,
                    seconds=time.monotonic() - began,
                )
            )
        looker.release()
        return tuple(reading)

    def _prepared(self, loaded: LoadedModel) -> SpectralMonitor:
        if self._looker is None:
            options = {
                name: value for name, value in self._probe.monitor.items() if name not in ("publishers", "check")
            }
            looker = SpectralMonitor(
                probes=list(self._probe.build(loaded)), max_overhead=None, on_error="raise", check=None, **options
            )
            looker.prepare(loaded.model)
            self._looker = looker
        return self._looker

    # -- readings on disk ---------------------------------------------------------------------------------------

    def stage(self, reading: tuple[Observation, ...], folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for observation in reading:
            temporary = folder / f".{observation.probe}.tmp"
            pq.write_table(to_table(observation), temporary, compression="zstd")
            temporary.replace(folder / f"{observation.probe}.parquet")

    def staged(self, folder: Path) -> tuple[Observation, ...] | None:
        files = sorted(folder.glob("*.parquet"))
        return tuple(read_observation(file) for file in files) or None

    # -- recording ----------------------------------------------------------------------------------------------

    def record(self, reading: tuple[Observation, ...] | None, loaded: LoadedModel | None) -> None:
        if not reading:
            raise NeedsModel
        model = None if loaded is None else loaded.model
        keeper = self._opened(loaded)
        try:
            if keeper.last_step is not None and reading[0].step < keeper.last_step:
                keeper.insert(reading)
            else:
                keeper.take(reading, model)
        except BaseException:
            # What the monitor has in memory may be ahead of its record: read it back next time.
            self.close()
            raise
        keeper.release()
        if self._shared:
            self.close()

    def _opened(self, loaded: LoadedModel | None) -> Keeper:
        """The monitor with its record open, at the state of the last recorded look."""
        if self._keeper is not None:
            return self._keeper
        if loaded is None:
            # Probes and run.json are made from a model; without one there is nothing to open the record with.
            raise NeedsModel
        looker = self._prepared(loaded)
        publishers = () if self._shared else self._publishers
        options = {name: value for name, value in self._probe.monitor.items() if name != "publishers"}
        keeper = Keeper(looker.probes, run_dir=self.folder, publishers=publishers, **options)
        keeper.extra_info = {"replay": self._info}
        state = self.folder / "state.json"
        if state.is_file():
            keeper.load_state_dict(json.loads(state.read_text()))
        else:
            keeper.load_state_dict({})
        before = set((self.folder / "superseded").glob("*"))
        keeper.prepare(loaded.model)
        # What a killed process had half recorded is recorded again from the same reading: no second attempt.
        for path in set((self.folder / "superseded").glob("*")) - before:
            path.unlink()
        if not before:
            shutil.rmtree(self.folder / "superseded", ignore_errors=True)
        self._keeper = keeper
        return keeper

    def recorded(self, step: int) -> bool:
        """Whether the record holds ``step`` with all that belongs to it: the state is written last."""
        state = self.folder / "state.json"
        if not state.is_file():
            return False
        last = json.loads(state.read_text()).get("last_step")
        return last is not None and step <= last and step in RunRecord.open(self.folder).steps()

    def note(self, text: str, step: int) -> None:
        """Add a note event, once."""
        with self._writing() as record:
            if text not in {event.text for event in record.events()}:
                record.add_event(Event("note", step, None, text=text, time=time.time()))

    def finish(self, table: Mapping[str, Any]) -> None:
        write_json(self.folder / "replay.json", table)

    def close(self) -> None:
        if self._keeper is not None:
            keeper, self._keeper = self._keeper, None
            keeper.close()

    def _writing(self) -> Any:
        if self._keeper is not None and self._keeper.record is not None:
            return contextlib.nullcontext(self._keeper.record)
        return RunRecord.create(self.folder, {})


def series_info(plan: Plan, series: SeriesPlan) -> dict[str, Any]:
    """What run.json says of a replay: the source, the tokens' origin, and what was found wrong with the checkpoints."""
    origins = {item.checkpoint.tokens_from for item in series.planned if item.wanted}
    return {
        "source": plan.source.text,
        "kind": plan.source.kind,
        "series": series.name,
        "tokens_from": sorted(origins),
        "tokens_rounded": any(item.checkpoint.tokens_estimated for item in series.planned),
        "notes": series.notes,
        "compared": series.compared,
        "skipped": [item.name for item in plan.skipped],
    }


def settle_out(out: Path, dtype: str | None) -> Path:
    """The run directory to use for ``out``: another one beside it where it was begun with other library versions.

    Numbers of two versions are not joined into one series: a library that reads a configuration otherwise has moved
    published results before. RecordError where ``out`` was begun with another ``--dtype``.
    """
    from spectral_monitor.monitor import library_versions

    now = {name: version for name, version in library_versions().items() if name in ("torch", "transformers")}
    for file in (out / "run.json", *sorted(out.glob("*/run.json"))):
        if not file.is_file():
            continue
        run = RunRecord.open(file.parent).run
        then = run.get("versions", {})
        other = {name: then[name] for name in now if name in then and then[name] != now[name]}
        if other:
            words = ", ".join(f"{name} {version}" for name, version in other.items())
            beside = out.with_name(out.name + "".join(f"-{name}-{now[name]}" for name in sorted(other)))
            logger.warning(
                "%s was measured with %s: numbers of other versions are not joined, this series goes to %s",
                out,
                words,
                beside,
            )
            return beside
        had = run.get("model", {}).get("dtype")
        if dtype not in (None, "auto") and had is not None and had != dtype:
            raise RecordError(f"{out} was measured in {had}, --dtype says {dtype}: use another --out")
    return out
