"""The engine: looks at a model on schedule, keeps the record, raises events, runs the causal check.

``attach`` (live) and ``replay`` (offline) differ only in where the model comes from: both call ``observe``.
"""

from __future__ import annotations

import logging
import math
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from spectral_monitor.capture import (
    Forward,
    Subject,
    check_fit,
    default_batch_size,
    longest_input,
    vocabulary_of,
)
from spectral_monitor.causal import CAUSAL, CheckOptions, check, confirmed
from spectral_monitor.errors import ProbeError, RecordError, SpectralMonitorError
from spectral_monitor.guest import unwrap
from spectral_monitor.heads import Head, names
from spectral_monitor.observation import OK, Event, Observation, Verdict
from spectral_monitor.probe import ProbeBatch, induction_probe
from spectral_monitor.ranks import Reduction, reduction_for
from spectral_monitor.reading import observation_of
from spectral_monitor.record import RunRecord
from spectral_monitor.response import Actions, Densify, Responder, Response
from spectral_monitor.schedule import LogSchedule
from spectral_monitor.screen import Thresholds, check_reachable, circuit, mass_at
from spectral_monitor.warning import Crossing, EarlyWarning, WarningParameters

if TYPE_CHECKING:
    from spectral_monitor.publish import Publisher

log = logging.getLogger("spectral_monitor")

#: Builds a probe batch once the model is known: ``(model, tokenizer or None) -> ProbeBatch``.
ProbeBuilder = Callable[[nn.Module, Any], ProbeBatch]


#: Rows of the default probe: the published number, and what a CPU reads in a bearable time.
ROWS, ROWS_ON_CPU = 2000, 256


def default_probe(model: nn.Module, tokenizer: Any = None, *, rows: int | None = None, length: int = 256) -> ProbeBatch:
    """The induction probe fitted to a model: clamped to its vocabulary and length, special ids left out.

    ``rows``: default 2,000 where the model is on an accelerator, 256 on a CPU. Special ids come from the tokenizer
    where there is one, else from the model's config.
    """
    if rows is None:
        device = next((parameter.device.type for parameter in model.parameters()), "cpu")
        rows = ROWS_ON_CPU if device == "cpu" else ROWS
    limit = longest_input(model)
    vocabulary = vocabulary_of(model)
    if tokenizer is not None and vocabulary is not None and len(tokenizer) > 0:
        vocabulary = min(vocabulary, len(tokenizer))
    return induction_probe(
        rows=rows,
        length=length if limit is None else min(length, limit),
        vocabulary=vocabulary,
        exclude=special_ids(model, tokenizer),
    )


def special_ids(model: nn.Module, tokenizer: Any = None) -> frozenset[int]:
    """Ids that no probe may draw: the tokenizer's special ids, and what the config names."""
    ids: set[Any] = set(getattr(tokenizer, "all_special_ids", None) or ())
    config = getattr(unwrap(model), "config", None)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "cls_token_id"):
        value = getattr(config, name, None)
        ids.update(value if isinstance(value, (list, tuple)) else [value])
    return frozenset(number for number in ids if isinstance(number, int))


@dataclass
class _Track:
    """What the monitor knows of one probe's run so far."""

    probe: ProbeBatch
    warning: EarlyWarning | None
    members: frozenset[Head] = frozenset()
    checked: frozenset[Head] = frozenset()
    formed: frozenset[Head] = frozenset()
    last: Observation | None = None


@dataclass(frozen=True)
class Look:
    """One call of ``observe``: an observation a probe, the events and verdicts that came of it."""

    observations: tuple[Observation, ...]
    events: tuple[Event, ...]
    verdicts: tuple[Verdict, ...]
    response: Response


class SpectralMonitor:
    """Watches attention circuits form.

    Args:
        run_dir: where the record goes; a new or empty directory, or the directory of the run that is resumed.
        probes: one probe batch or several (separate series); builders are called with the model and the tokenizer.
            Default: the induction probe fitted to the model (up to 256 tokens; 2,000 rows, on a CPU 256).
        schedule: at which steps ``step`` looks; default four points an octave.
        baseline: of the selectivity: ``"others"``, ``"sampled"`` (the published numbers) or ``"uniform"``.
        thresholds: bars of the screen.
        check: how causal checks are done; None: none is run.
        modes: ablation modes of a check. A circuit counts as formed when every mode says ``causal``.
        check_seconds: time budget of one check, all modes together; None: no limit.
        check_rows: probe rows used by a check (the first ones); None: all.
        companions: extra passes: ``"null"`` (PR where nothing repeats), ``"content"`` (what depends on B).
        null_draws: random targets a head for the noise floor; 0: none.
        warning: rules of the early warning; None: none.
        actions: what follows from an alarm.
        publishers: who is told (see ``publish.Publisher``).
        on_event: called with every event; its exceptions are logged.
        batch_size: probe rows a micro-batch; default by device and length (``capture.default_batch_size``).
        max_overhead: largest share of the run's wall time; optional points of the schedule are dropped when the
            next look would exceed it. None: no limit.
        on_error: ``"log"`` (``step`` never raises) or ``"raise"``.
        forward: how to call a model with its own calling convention (see ``capture.Subject``).
        reduce: how ranks share the work; default: found out from torch.distributed. Under it, make the same monitor
            and the same calls on every rank: all of them take part in a look, rank 0 alone writes and publishes.
        tokenizer: tells the special ids; optional.

    Use: ``monitor.step(model, step, tokens)`` after each optimizer update (and once at step 0); ``close()`` at the end.
    """

    def __init__(
        self,
        run_dir: str | Path | None = None,
        probes: ProbeBatch | ProbeBuilder | Sequence[ProbeBatch | ProbeBuilder] | None = None,
        schedule: LogSchedule | None = None,
        *,
        baseline: str = "others",
        thresholds: Thresholds | None = None,
        check: CheckOptions | None = CheckOptions(),  # noqa: B008  (frozen)
        modes: Sequence[str] = ("zero", "mean"),
        check_seconds: float | None = 300.0,
        check_rows: int | None = 512,
        companions: Sequence[str] = ("null",),
        null_draws: int = 20,
        warning: WarningParameters | Literal["default"] | None = "default",
        actions: Actions | None = None,
        publishers: Iterable[Publisher] = (),
        on_event: Callable[[Event], None] | None = None,
        batch_size: int | None = None,
        max_overhead: float | None = 0.01,
        on_error: Literal["log", "raise"] = "log",
        forward: Forward | None = None,
        reduce: Reduction | None = None,
        tokenizer: Any = None,
    ) -> None:
        if on_error not in ("log", "raise"):
            raise ValueError(f"on_error is 'log' or 'raise', not {on_error!r}")
        if max_overhead is not None and not 0 < max_overhead <= 1:
            raise ValueError(f"max_overhead is a share of wall time in (0, 1], not {max_overhead}")
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size is a number of rows from 1 up, not {batch_size}")
        if check_rows is not None and check_rows < 2:
            raise ValueError(f"check_rows is a number of rows from 2 up, not {check_rows}")
        unknown = set(modes) - {"zero", "mean"}
        if unknown or not modes:
            raise ValueError(f"modes are 'zero' and 'mean', not {list(modes)}")
        self.run_dir = None if run_dir is None else Path(run_dir)
        self.schedule = schedule or LogSchedule()
        self.baseline = baseline
        self.thresholds = thresholds or Thresholds()
        self.check_options = check
        self.modes = tuple(modes)
        self.check_seconds, self.check_rows = check_seconds, check_rows
        self.companions = tuple(companions)
        self.null_draws = null_draws
        self._warning = self._warning_parameters(warning)
        self.responder = Responder(actions)
        self.publishers = list(publishers)
        self.on_event = on_event
        self.batch_size = batch_size
        self.max_overhead = max_overhead
        self.on_error = on_error
        self.reduce = reduce or Reduction()
        self._ranks_known = reduce is not None
        self.tokenizer = tokenizer
        self._forward = forward
        self._probes: ProbeBatch | ProbeBuilder | Sequence[ProbeBatch | ProbeBuilder] | None = probes
        self._tracks: dict[str, _Track] = {}
        self._record: RunRecord | None = None
        self._subject: Subject | None = None
        self._last_step: int | None = None
        self._last_tokens: float | None = None
        self._announced: list[tuple[int, str]] = []
        self._to_repeat: Counter[str] = Counter()
        self._repeated_until = -1
        self._densify: Densify | None = None
        self._state: dict[str, Any] | None = None
        self.seconds = 0.0
        self._began = time.monotonic()
        self._elapsed_before = 0.0
        self._look_seconds = math.nan
        self.skipped: list[int] = []
        self.failures: dict[str, int] = {}
        self.extra_info: dict[str, Any] = {}

    # -- the two ways in --------------------------------------------------------------------------------------------

    def step(self, model: nn.Module, step: int, tokens: float | None = None, **about: Any) -> Look | None:
        """Look if the schedule says so; never raises unless ``on_error="raise"``.

        Args:
            model: as it is in training; it is left exactly as found.
            step: finished optimizer updates. tokens: training tokens seen so far, None if unknown.
            about: passed on to ``observe`` (``tokens_estimated``, ``label`` ...).

        Returns:
            The look, or None when none was due, or it failed.
        """
        try:
            if not self.is_due(step, tokens):
                return None
            if self._last_step is None:
                # The first look of a session that brings no state: what a record holds of later steps is of a past
                # that the run went back over.
                self.prepare(model)
                self.rewind(step)
            return self.observe(model, step, tokens, **about)
        except Exception as error:
            if self.on_error == "raise":
                raise
            self._failed(error, step)
            self._last_step, self._last_tokens = step, tokens
            return None

    def observe(
        self,
        model: nn.Module,
        step: int,
        tokens: float | None = None,
        *,
        tokens_estimated: bool = False,
        label: str | None = None,
        mark: str | None = None,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> Look:
        """Look now, whatever the schedule says.

        Args:
            tokens_estimated: the token count was computed or read off a rounded label.
            label: name of the checkpoint. mark: why it is not to be trusted; such a look raises no event.
            progress: called with what is running, rows (or ablations) done and in all (0: unknown).

        Raises:
            SpectralMonitorError: the model cannot be read, the probe does not fit, the record cannot be written.
        """
        self.prepare(model)
        began = time.monotonic()
        try:
            return self._observe(model, step, tokens, progress, tokens_estimated, label, mark)
        finally:
            self._look_seconds = time.monotonic() - began
            self.seconds += self._look_seconds
            self._save_state()

    def _observe(
        self,
        model: nn.Module,
        step: int,
        tokens: float | None,
        progress: Callable[[str, int, int], None] | None,
        tokens_estimated: bool,
        label: str | None,
        mark: str | None,
    ) -> Look:
        with self.reduce.together():
            subject = self._subject_of(model)
        observations: list[Observation] = []
        events: list[Event] = []
        verdicts: list[Verdict] = []
        for track in self._tracks.values():
            with self.reduce.together():
                about = {"tokens_estimated": tokens_estimated, "label": label, "mark": mark}
                observation, new, found = self._look_with(track, subject, step, tokens, about, progress)
            observations.append(observation)
            events += new
            verdicts += found
        response = self.responder.respond(events)
        if response.densify is not None:
            self._densify = response.densify
        self._last_step, self._last_tokens = step, tokens
        return Look(tuple(observations), tuple(events), tuple(verdicts), response)

    def is_due(self, step: int, tokens: float | None = None) -> bool:
        """Whether ``step`` is to be looked at: by the schedule, or by a request to look more often."""
        if self._last_step is not None and step <= self._last_step:
            return False
        # A point that was dropped is behind us: it is not asked for again at every following step.
        previous = self.skipped[-1] if self.skipped and self.skipped[-1] > (self._last_step or 0) else self._last_step
        if not (self.schedule.is_due(step, previous) or self._densified(step, tokens)):
            return False
        if self.schedule.is_required(step) or self.max_overhead is None:
            return True
        affordable: bool = self.reduce.broadcast(self._affordable(step))
        if not affordable:
            self.skipped.append(step)
        return affordable

    def prepare(self, model: nn.Module) -> None:
        """Build the probes, examine the model and open the record. ``observe`` does this by itself.

        Raises:
            SpectralMonitorError: anything that would make every observation fail; better now than in the run.
        """
        if self._tracks:
            return
        began = self._began = time.monotonic()
        self.join_ranks(model)
        with self.reduce.together():
            probes, tracks = self._examine(model)
            run = self._run_info(model, probes)
            self._open_record(run)
        # What was announced already is known where the record is; all ranks must know it.
        self._announced = self.reduce.broadcast(self._announced)
        self._expect_repetitions(after=-1)
        self._tracks = tracks
        if self._state is not None:
            with self.reduce.together():
                self._restore(self._state)
        info = {**run, "run_dir": None if self.run_dir is None else str(self.run_dir)}
        if self.reduce.is_main:
            for publisher in self.publishers:
                self._tell(publisher, "start", info)
        self.seconds += time.monotonic() - began

    def _examine(self, model: nn.Module) -> tuple[list[ProbeBatch], dict[str, _Track]]:
        """Build the probes, fit them to the model, and find its heads."""
        probes = self._build_probes(model)
        for probe in probes:
            check_fit(model, probe)
            check_reachable(probe, self.thresholds, self.baseline)
        self._subject = Subject(model, probes[0], self._forward, self.reduce)
        tracks: dict[str, _Track] = {}
        for probe in probes:
            if probe.name in tracks:
                raise ProbeError(f"two probes are named {probe.name!r}: give each its own name")
            warning = None
            if self._warning is not None:
                warning = EarlyWarning(probe.length, self._warning, capability=probe.capability)
            tracks[probe.name] = _Track(probe, warning)
        return probes, tracks

    def join_ranks(self, model: nn.Module) -> None:
        """Find out how this run's ranks share the work, unless ``reduce`` was given. ``prepare`` does this by itself.

        Raises:
            CaptureError: the model is spread over ranks in a way that is not read.
        """
        if not self._ranks_known:
            self.reduce, self._ranks_known = reduction_for(unwrap(model)), True

    def forget(self) -> None:
        """Back to the state before the first look, for another run with the same settings."""
        if self._record is not None:
            self._record.close()
        self._record, self._subject, self._state, self._densify = None, None, None, None
        self._tracks, self._announced, self._to_repeat, self._repeated_until = {}, [], Counter(), -1
        self._last_step = self._last_tokens = None
        self.seconds = self._elapsed_before = 0.0
        self._look_seconds = math.nan
        self.skipped, self.failures = [], {}
        self.responder = Responder(self.responder.actions)

    def rewind(self, step: int) -> None:
        """Set aside what the record holds of later steps: the run went back there without the monitor's own state."""
        self._expect_repetitions(after=step - 1)
        if self._record is not None:
            self._record.rewind(step)

    def close(self, summary: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """End of the run: tell the publishers, close the record. Returns what there is to say."""
        said = {**self.summary(), **(summary or {})}
        for publisher in self.publishers if self.reduce.is_main else ():
            self._tell(publisher, "close", said)
        if self._record is not None and self.reduce.is_main:
            self._record.close()
        return said

    def summary(self) -> dict[str, Any]:
        """Time spent, points dropped, failures, and the circuits at the last look."""
        return {
            "seconds": self.seconds,
            "share": self._share(),
            "skipped_steps": list(self.skipped),
            "failures": dict(self.failures),
            "circuits": {name: names(track.members) for name, track in self._tracks.items()},
            "formed": {name: names(track.formed) for name, track in self._tracks.items()},
        }

    @property
    def record(self) -> RunRecord | None:
        """The run record; None before the first look, without a run directory, and on other ranks."""
        return self._record

    @property
    def probes(self) -> tuple[ProbeBatch, ...]:
        """The probe batches in use; empty before ``prepare``."""
        return tuple(track.probe for track in self._tracks.values())

    @property
    def last_step(self) -> int | None:
        """Step of the last look."""
        return self._last_step

    # -- one look ---------------------------------------------------------------------------------------------------

    def _look_with(
        self,
        track: _Track,
        subject: Subject,
        step: int,
        tokens: float | None,
        about: Mapping[str, Any],
        progress: Callable[[str, int, int], None] | None,
    ) -> tuple[Observation, list[Event], list[Verdict]]:
        """One probe's part of a look: measured, decided, checked, written."""
        started = time.monotonic()
        # Rank 0's numbers on every rank: whatever follows from them is then the same everywhere.
        observation: Observation = self.reduce.broadcast(self._look(subject, track, step, tokens, progress))
        observation = replace(observation, **about)
        new = self._events_of(track, observation)
        candidates = self._candidates(track, observation)
        if candidates is not None and candidates != track.members:
            new.append(self._candidates_event(track, observation, candidates))
        found = self._check(subject, track, observation, candidates, progress)
        new += self._formation(track, observation, candidates, found)
        seconds = time.monotonic() - started
        observation = replace(observation, seconds=seconds, share=self._share(seconds), time=time.time())
        previous, track.last = track.last, observation
        if candidates is not None:
            track.members = candidates
        fresh = [replace(event, time=observation.time) for event in new if not self._is_repeated(event)]
        self._announced += [(event.step, _identity(event)) for event in fresh]
        return self._write(observation, previous, fresh, found), fresh, found

    def _look(
        self,
        subject: Subject,
        track: _Track,
        step: int,
        tokens: float | None,
        progress: Callable[[str, int, int], None] | None,
    ) -> Observation:
        probe = track.probe
        companions = [name for name in self.companions if name in probe.companions]
        done = 0

        def rows_done(rows: int) -> None:
            nonlocal done
            done += rows
            if progress is not None:
                progress(f"reading {probe.name}", done, probe.rows)

        reading = self._with_smaller_batches(
            subject,
            probe,
            lambda size: subject.read(probe, size, self.null_draws, companions, self.reduce, rows_done),
        )
        return observation_of(
            reading, probe, step=step, tokens=tokens, baseline=self.baseline, thresholds=self.thresholds
        )

    def _events_of(self, track: _Track, observation: Observation) -> list[Event]:
        if track.warning is None:
            return []
        return track.warning.update(observation, track.members)

    def _candidates(self, track: _Track, observation: Observation) -> frozenset[Head] | None:
        """The candidate set, or None where this observation says nothing about it."""
        if not observation.finite or observation.mark is not None:
            return None
        return frozenset(circuit(observation.heads, track.probe.capability, self.thresholds, track.members))

    def _candidates_event(self, track: _Track, observation: Observation, now: frozenset[Head]) -> Event:
        came, went = names(now - track.members), names(track.members - now)
        said = " ".join(
            part for part in (f"+ {', '.join(came)}" if came else "", f"- {', '.join(went)}" if went else "") if part
        )
        return Event(
            kind="candidates_changed",
            step=observation.step,
            tokens=observation.tokens,
            probe=track.probe.name,
            capability=track.probe.capability,
            heads=tuple(names(now)),
            value=float(len(now)),
            text=f"{track.probe.capability} candidates: {len(now)} heads ({said})",
            detail={"came": came, "went": went},
        )

    def _check(
        self,
        subject: Subject,
        track: _Track,
        observation: Observation,
        candidates: frozenset[Head] | None,
        progress: Callable[[str, int, int], None] | None,
    ) -> list[Verdict]:
        if self.check_options is None or not candidates or candidates == track.checked:
            return []
        track.checked = candidates
        known: list[Verdict] = self.reduce.broadcast(self._verdicts_at(observation, candidates))
        if known:
            return known
        try:
            return self.check(
                subject.model,
                track.probe.name,
                candidates,
                step=observation.step,
                tokens=observation.tokens,
                label=observation.label,
                unusable=_unusable(observation, track.probe.capability),
                progress=progress,
            )
        except Exception as error:
            if self.on_error == "raise":
                raise
            self._note_failure("causal check", error)  # the observation itself is good
            return []

    def check(
        self,
        model: nn.Module,
        probe: str,
        heads: Iterable[Head],
        *,
        step: int = 0,
        tokens: float | None = None,
        label: str | None = None,
        unusable: Iterable[Head] = (),
        progress: Callable[[str, int, int], None] | None = None,
    ) -> list[Verdict]:
        """The causal check of any set of heads, one verdict an ablation mode; nothing is recorded."""
        self.prepare(model)
        subject, track = self._subject_of(model), self._tracks[probe]
        options = self.check_options or CheckOptions()
        batch = track.probe
        if self.check_rows is not None and self.check_rows < batch.rows:
            batch = batch.take(slice(0, self.check_rows))
        seconds = None if self.check_seconds is None else self.check_seconds / len(self.modes)
        verdicts = []
        for mode in self.modes:

            def ablations_done(name: str, done: int, mode: str = mode) -> None:
                if progress is not None:
                    progress(f"{mode} ablation, {name}", done, 0)

            def run(size: int, mode: str = mode) -> Verdict:
                return check(
                    subject,
                    batch,
                    heads,
                    mode=mode,
                    options=replace(options, max_seconds=options.max_seconds or seconds),
                    unusable=unusable,
                    batch_size=size,
                    reduce=self.reduce,
                    step=step,
                    tokens=tokens,
                    label=label,
                    progress=ablations_done,
                )

            verdicts.append(self._with_smaller_batches(subject, batch, run))
        return verdicts

    def _formation(
        self, track: _Track, observation: Observation, candidates: frozenset[Head] | None, verdicts: list[Verdict]
    ) -> list[Event]:
        """``circuit_formed`` after a causal verdict, ``circuit_lost`` when what was causal no longer is."""
        if candidates is None:
            return []
        is_causal = bool(verdicts) and all(verdict.verdict == CAUSAL for verdict in verdicts)
        shared: dict[str, Any] = {
            "step": observation.step,
            "tokens": observation.tokens,
            "probe": track.probe.name,
            "capability": track.probe.capability,
        }
        if is_causal and not track.formed:
            track.formed = candidates
            said = f"{track.probe.capability} circuit: {', '.join(names(candidates))}; {verdicts[0].reason}"
            if len(verdicts) > 1 and confirmed(verdicts):
                said += "; confirmed by mean ablation"
            return [
                Event(
                    kind="circuit_formed",
                    heads=tuple(names(candidates)),
                    direction="up",
                    value=verdicts[0].effect,
                    text=said,
                    **shared,
                )
            ]
        if is_causal:
            track.formed = candidates
            return []
        lost = not candidates or any(verdict.verdict in ("not causal", "no capability") for verdict in verdicts)
        if track.formed and lost:
            gone, track.formed = track.formed, frozenset()
            why = verdicts[0].reason if verdicts else "no head is a candidate any more"
            return [
                Event(
                    kind="circuit_lost",
                    heads=tuple(names(gone)),
                    direction="down",
                    text=f"{track.probe.capability} circuit lost: {why}",
                    **shared,
                )
            ]
        return []

    def _with_smaller_batches(self, subject: Subject, probe: ProbeBatch, run: Callable[[int], Any]) -> Any:
        """``run(batch_size)``; out of memory halves the micro-batch, down to one row."""
        size = self.batch_size or default_batch_size(subject.device, probe.length)
        while True:
            try:
                return run(size)
            except torch.OutOfMemoryError:
                if size == 1:
                    raise
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            size = max(1, size // 2)
            self.batch_size = size
            log.warning("spectral_monitor: out of memory in a probe; going on with %d rows a micro-batch", size)

    # -- record and publishers --------------------------------------------------------------------------------------

    def _open_record(self, run: dict[str, Any]) -> None:
        if self.run_dir is None or not self.reduce.is_main:
            return
        self._record = RunRecord.create(self.run_dir, run)
        self._announced = [(event.step, _identity(event)) for event in self._record.events()]

    def _write(
        self, observation: Observation, previous: Observation | None, events: list[Event], verdicts: list[Verdict]
    ) -> Observation:
        failed: Exception | None = None
        if self._record is not None:
            try:
                observation = self._record.append(observation)
                for event in events:
                    self._record.add_event(event)
                for verdict in verdicts:
                    self._record.add_verdict(verdict)
            except (OSError, RecordError) as error:
                failed = error
        if self.reduce.is_main:
            for publisher in self.publishers:
                self._tell(publisher, "observation", observation, previous)
                for event in events:
                    self._tell(publisher, "event", event)
                for verdict in verdicts:
                    self._tell(publisher, "verdict", verdict)
        if self.on_event is not None:
            for event in events:
                try:
                    self.on_event(event)
                except Exception as error:
                    self._note_failure("on_event", error)
        if failed is not None:
            if self.on_error == "raise":
                raise RecordError(
                    f"{self.run_dir} cannot be written ({failed}): free the disk or fix the rights"
                ) from failed
            self._note_failure("record", failed)
        return observation

    def _tell(self, publisher: Publisher, method: str, *arguments: Any) -> None:
        try:
            getattr(publisher, method)(*arguments)
        except Exception as error:
            self._note_failure(f"{type(publisher).__name__}.{method}", error)

    def _failed(self, error: Exception, step: int) -> None:
        self._note_failure("observation", error)
        if self._record is not None:
            text = f"no observation at step {step}: {error}"
            try:
                self._record.add_event(Event("error", step, None, text=text, time=time.time()))
            except (OSError, RecordError) as second:
                self._note_failure("record", second)

    def _note_failure(self, what: str, error: Exception) -> None:
        first = what not in self.failures
        self.failures[what] = self.failures.get(what, 0) + 1
        if first and self.reduce.is_main:
            ours = isinstance(error, (SpectralMonitorError, OSError))
            log.warning(
                "spectral_monitor: %s failed (%s: %s); training goes on, further failures of this kind are counted",
                what,
                type(error).__name__,
                error,
                exc_info=None if ours else error,
            )

    def _expect_repetitions(self, after: int) -> None:
        """The run goes on from step ``after``: what was announced of later steps will happen again."""
        self._to_repeat = Counter(identity for step, identity in self._announced if step > after)
        self._repeated_until = max((step for step, _ in self._announced), default=-1)

    def _is_repeated(self, event: Event) -> bool:
        """Whether a resumed run went over old ground and this event was announced the first time.

        Counted, since the same may happen twice in one run (a set of candidates changes, and changes back); without
        the step, since the second time it may come a little earlier or later.
        """
        identity = _identity(event)
        if event.step > self._repeated_until or not self._to_repeat[identity]:
            return False
        self._to_repeat[identity] -= 1
        return True

    def _verdicts_at(self, observation: Observation, heads: frozenset[Head]) -> list[Verdict]:
        if self._record is None or observation.step > self._repeated_until:
            return []
        wanted = tuple(names(heads))
        return [
            verdict
            for verdict in self._record.verdicts()
            if (verdict.step, verdict.probe, verdict.heads) == (observation.step, observation.probe, wanted)
        ]

    # -- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next look depends on; JSON values only."""
        return {
            "version": 1,
            "last_step": self._last_step,
            "last_tokens": self._last_tokens,
            "seconds": self.seconds,
            "elapsed": self._elapsed(),
            "skipped": list(self.skipped),
            "responder": self.responder.state_dict(),
            "tracks": {
                name: {
                    "fingerprint": track.probe.fingerprint,
                    "members": names(track.members),
                    "checked": names(track.checked),
                    "formed": names(track.formed),
                    "warning": None if track.warning is None else track.warning.state_dict(),
                }
                for name, track in self._tracks.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict``'s state: later observations in the record are set aside as superseded."""
        self._state = dict(state)
        if self._tracks:
            self._restore(self._state)

    def _restore(self, state: Mapping[str, Any]) -> None:
        self._last_step, self._last_tokens = state.get("last_step"), state.get("last_tokens")
        self.seconds = float(state.get("seconds", 0.0))
        self._elapsed_before = float(state.get("elapsed", 0.0))
        self._began = time.monotonic()
        self.skipped = list(state.get("skipped", ()))
        if state.get("responder"):
            self.responder.load_state_dict(state["responder"])
            self._densify = self.responder.densified
        for name, kept in state.get("tracks", {}).items():
            track = self._tracks.get(name)
            if track is None or kept["fingerprint"] != track.probe.fingerprint:
                continue
            track.members, track.checked, track.formed = (
                frozenset(Head.parse(head) for head in kept[key]) for key in ("members", "checked", "formed")
            )
            if track.warning is not None and kept.get("warning") is not None:
                track.warning.load_state_dict(kept["warning"])
        last = -1 if self._last_step is None else self._last_step
        self._expect_repetitions(after=last)
        if self._record is not None:
            self._record.rewind(last)
        self._state = None

    def _save_state(self) -> None:
        if self._record is None:
            return
        try:
            self._record.save_state(self.state_dict())
        except (OSError, RecordError) as error:
            if self.on_error == "raise":
                raise
            self._note_failure("record", error)

    # -- inside -----------------------------------------------------------------------------------------------------

    def _warning_parameters(self, warning: WarningParameters | str | None) -> WarningParameters | None:
        if warning == "default":
            bars = self.thresholds
            crossing = (
                Crossing(bars.member, max(bars.min_attention, 1e-9), bars.hysteresis) if bars.member > 0 else None
            )
            return WarningParameters(crossing=crossing)
        if warning is None or isinstance(warning, WarningParameters):
            return warning
        raise ValueError(f"warning is WarningParameters, 'default' or None, not {warning!r}")

    def _build_probes(self, model: nn.Module) -> list[ProbeBatch]:
        given = self._probes if self._probes is not None else default_probe
        several = given if isinstance(given, Sequence) else [given]
        if not several:
            raise ProbeError("no probe was given")
        return [item if isinstance(item, ProbeBatch) else item(unwrap(model), self.tokenizer) for item in several]

    def _subject_of(self, model: nn.Module) -> Subject:
        first = next(iter(self._tracks.values())).probe
        if self._subject is None or self._subject.model is not unwrap(model):
            self._subject = Subject(model, first, self._forward, self.reduce)
        return self._subject

    def release(self) -> None:
        """Forget the model (a replay drops each checkpoint before the next)."""
        self._subject = None

    def _densified(self, step: int, tokens: float | None) -> bool:
        request = self._densify
        if request is None or self._last_step is None:
            return False
        now, last = (tokens, self._last_tokens) if tokens is not None else (step, self._last_step)
        if now is None or last is None or now > request.until:
            return False
        return now >= last * request.spacing

    def _elapsed(self) -> float:
        return self._elapsed_before + time.monotonic() - self._began

    def _share(self, running: float = 0.0) -> float:
        elapsed = self._elapsed()
        return (self.seconds + running) / elapsed if elapsed > 0 else math.nan

    def _affordable(self, step: int) -> bool:
        """Whether one more look keeps the monitor within its share of the run's projected wall time."""
        assert self.max_overhead is not None
        if math.isnan(self._look_seconds) or step < 1:
            return True
        training = max(self._elapsed() - self.seconds, 0.0)
        last = self.schedule.last_step
        if last is None or last <= step:
            return self.seconds + self._look_seconds <= self.max_overhead * training
        # What the looks that are never dropped will take is set aside for them.
        required = sum(at > step and self.schedule.is_required(at) for at in self.schedule.steps(last))
        planned = self.seconds + (1 + required) * self._look_seconds
        return planned <= self.max_overhead * training / step * last

    def _run_info(self, model: nn.Module, probes: Sequence[ProbeBatch]) -> dict[str, Any]:
        inner = unwrap(model)
        assert self._subject is not None
        anatomy = self._subject.anatomy
        config = getattr(inner, "config", None)
        return {
            "created": time.time(),
            "versions": library_versions(),
            "probes": {probe.name: probe.describe() for probe in probes},
            "model": {
                "class": type(inner).__name__,
                "parameters": sum(parameter.numel() for parameter in inner.parameters()),
                "dtype": str(next(inner.parameters()).dtype).removeprefix("torch."),
                "layers": list(anatomy.layers),
                "heads_by_layer": [block.heads for block in anatomy.blocks],
                "head_dim_by_layer": [block.head_dim for block in anatomy.blocks],
                "layers_without_attention": list(anatomy.without_attention),
                "read_through": sorted({block.kind for block in anatomy.blocks}),
                "attention": getattr(config, "_attn_implementation", None),
                "name": getattr(config, "_name_or_path", "") or None,
            },
            "config": {
                "baseline": self.baseline,
                "thresholds": asdict(self.thresholds),
                "threshold_mass": {
                    probe.name: mass_at(self.thresholds.member, probe, probe.capability, self.baseline)
                    for probe in probes
                },
                "check": None if self.check_options is None else asdict(self.check_options),
                "modes": list(self.modes),
                "check_rows": self.check_rows,
                "companions": list(self.companions),
                "null_draws": self.null_draws,
                "warning": None if self._warning is None else self._warning.to_dict(),
                "points_per_octave": self.schedule.points_per_octave,
                "max_overhead": self.max_overhead,
            },
            **self.extra_info,
        }


def _unusable(observation: Observation, capability: str) -> list[Head]:
    """Heads that are no fair control: dead, not finite, or unable to reach the target at all."""
    table = observation.heads
    reach = table.reach.get(capability)
    return [
        head
        for number, head in enumerate(table)
        if table.status[number] != OK or (reach is not None and reach[number] == 0)
    ]


def _identity(event: Event) -> str:
    """An event without its step: the same thing told twice."""
    return "|".join((event.kind, event.probe, event.capability, ",".join(event.heads), event.direction))


def library_versions() -> dict[str, str]:
    """Versions that a number may depend on."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version()}
    for package in ("spectral_monitor", "torch", "transformers", "accelerate", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
