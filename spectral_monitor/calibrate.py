"""One model measured for its own bars: noise floor, counts, threshold sweep, composition, natural text.

What ``spectral-monitor calibrate`` runs. The parts are in ``development.calibration`` (from an observation) and
``interventions`` (with the model).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from spectral_monitor.capture import Subject, vocabulary_of
from spectral_monitor.causal import CheckOptions, check
from spectral_monitor.development.calibration import Calibration, calibrate
from spectral_monitor.development.identity import Overlap, overlap
from spectral_monitor.development.series import series_of
from spectral_monitor.errors import LoadError, RecordError
from spectral_monitor.heads import Head, names
from spectral_monitor.interventions import Composition, Sweep, composition, threshold_sweep
from spectral_monitor.natural_text import natural_text_probe
from spectral_monitor.observation import Observation, Verdict
from spectral_monitor.probe import ProbeBatch, induction_probe
from spectral_monitor.reading import observation_of
from spectral_monitor.record import jsonable
from spectral_monitor.replay.loading import LoadedModel
from spectral_monitor.screen import Thresholds, check_reachable, circuit

Say = Callable[[str], None]


@dataclass(frozen=True)
class Job:
    """What to measure, on which model: the options of ``spectral-monitor calibrate``."""

    rows: int = 128
    length: int = 256
    protocol: str = "published"
    baseline: str = "sampled"
    null_draws: int = 500
    draws: int = 64
    mode: str = "zero"
    batch_size: int = 16
    sweep: tuple[float, ...] = ()
    composition: bool = False
    composition_draws: int = 19

    def check_options(self) -> CheckOptions:
        """Options of every causal check in it."""
        return CheckOptions(first_look=min(32, self.draws), max_draws=self.draws)


@dataclass(frozen=True)
class NaturalText:
    """The circuit found on random tokens, tried on real text.

    Attributes:
        rows, intact_top1: of the natural-text batch. circuit: found on random tokens; found_on_text: by the same
            screen on the text. overlap: of the two.
        attention: head -> (on random tokens, on text), for the heads of either circuit.
        verdict: the random-token circuit ablated on the text.
    """

    rows: int
    source: str
    intact_top1: float
    circuit: tuple[Head, ...]
    found_on_text: tuple[Head, ...]
    overlap: Overlap
    attention: dict[str, tuple[float, float]]
    verdict: Verdict | None


@dataclass(frozen=True)
class Calibrated:
    """Results of a job; what was not asked for is None or empty."""

    probe: ProbeBatch
    observation: Observation
    calibration: Calibration
    circuits: dict[str, list[Head]]
    sweep: Sweep | None = None
    compositions: tuple[Composition, ...] = ()
    text: NaturalText | None = None
    notes: tuple[str, ...] = field(default=())


def run(
    loaded: LoadedModel, job: Job, documents: Sequence[Any] | None = None, source: str = "", say: Say | None = None
) -> Calibrated:
    """Measure a loaded model.

    Args:
        documents: token ids of each document of a natural text, or None.
        source: what that text is.

    Raises ProbeError, ThresholdError, CaptureError: the probe or the model does not allow it (one sentence).
    """
    say = say or (lambda _: None)
    model = loaded.model
    probe = induction_probe(
        rows=job.rows,
        length=job.length,
        vocabulary=loaded.tokenizer_size or vocabulary_of(model),
        exclude=loaded.tokenizer_special_ids,
        protocol=job.protocol,
    )
    thresholds = Thresholds()
    check_reachable(probe, thresholds, job.baseline)
    subject = Subject(model, probe)
    say(f"observing {job.rows} rows of {job.length} tokens, {job.null_draws} null draws a head")
    observation = _observe(subject, probe, job, thresholds, job.null_draws)
    calibration = calibrate(series_of([observation], probe.capability))
    if calibration is None:
        raise RecordError("no head has a selectivity for the probe's capability: nothing can be calibrated")
    circuits = {name: circuit(observation.heads, name, thresholds) for name in ("induction", "previous_token")}
    sweep = None
    if job.sweep:
        sweep = threshold_sweep(
            subject,
            probe,
            observation.heads,
            job.sweep,
            mode=job.mode,
            options=job.check_options(),
            batch_size=job.batch_size,
            progress=say,
        )
    compositions = []
    if job.composition:
        pairs = (("previous_token", "induction"), ("induction", "previous_token"))
        for removed, measured in pairs:
            compositions.append(
                composition(
                    subject,
                    probe,
                    removed,
                    circuits[removed],
                    measured,
                    circuits[measured],
                    draws=job.composition_draws,
                    options=job.check_options(),
                    batch_size=job.batch_size,
                    progress=say,
                )
            )
    text = None
    if documents is not None:
        say("natural text")
        text = _on_text(subject, observation, circuits["induction"], documents, source, job, loaded, thresholds)
    return Calibrated(probe, observation, calibration, circuits, sweep, tuple(compositions), text, loaded.notes)


def _observe(subject: Subject, probe: ProbeBatch, job: Job, thresholds: Thresholds, null_draws: int = 0) -> Observation:
    reading = subject.read(probe, job.batch_size, null_draws)
    return observation_of(reading, probe, step=0, tokens=None, baseline=job.baseline, thresholds=thresholds)


def _on_text(
    subject: Subject,
    random: Observation,
    found: Sequence[Head],
    documents: Sequence[Any],
    source: str,
    job: Job,
    loaded: LoadedModel,
    thresholds: Thresholds,
) -> NaturalText:
    probe = natural_text_probe(documents, job.rows, job.length, exclude=loaded.tokenizer_special_ids, source=source)
    on_text = _observe(subject, probe, job, thresholds)
    there = circuit(on_text.heads, "induction", thresholds)
    both = sorted(set(found) | set(there))
    attention = {
        str(head): (
            float(random.heads.attention["induction"][random.heads.index(head)]),
            float(on_text.heads.attention["induction"][on_text.heads.index(head)]),
        )
        for head in both
    }
    verdict = None
    if found:
        verdict = check(subject, probe, found, mode=job.mode, options=job.check_options(), batch_size=job.batch_size)
    return NaturalText(
        rows=probe.rows,
        source=source,
        intact_top1=on_text.metrics.top1,
        circuit=tuple(found),
        found_on_text=tuple(there),
        overlap=overlap(found, there, list(random.heads)),
        attention=attention,
        verdict=verdict,
    )


def tokenize(texts: Sequence[str], model: str, revision: str | None = None, gguf_file: str | None = None) -> list[Any]:
    """Token ids of each document, by the model's own tokenizer; LoadError where it has none."""
    from transformers import AutoTokenizer

    place = Path(model).expanduser()
    options: dict[str, Any] = {"gguf_file": gguf_file} if gguf_file else {}
    if place.is_file():
        options = {"gguf_file": place.name}
        model = str(place.parent)
    elif revision is not None:
        options["revision"] = revision
    try:
        tokenizer = AutoTokenizer.from_pretrained(model, **options)
    except Exception as error:  # transformers raises many kinds here
        raise LoadError(
            f"the tokenizer of {model} cannot be loaded ({str(error).splitlines()[0]}): --text needs it"
        ) from error
    documents = [np.asarray(tokenizer(part, add_special_tokens=False)["input_ids"], dtype=np.int64) for part in texts]
    # transformers makes an empty tokenizer of the right class where the checkpoint has none
    if not any(len(ids) for ids in documents):
        raise LoadError(f"{model} has no tokenizer (it turns the text into no tokens at all): --text needs one")
    return documents


def to_json(found: Calibrated) -> dict[str, Any]:
    """Plain values for ``calibrate --json``."""
    result: dict[str, Any] = {
        "probe": {**found.probe.describe(), "name": found.probe.name, **asdict(found.observation.metrics)},
        "baseline": found.observation.baseline,
        "calibration": asdict(found.calibration),
        "circuits": {name: names(heads) for name, heads in found.circuits.items()},
        "sweep": None,
        "composition": [
            {
                **{key: value for key, value in vars(entry).items() if key != "task"},
                "removed": names(entry.removed),
                "left_out": names(entry.left_out),
                "measured": names(entry.measured),
                "task": None if entry.task is None else asdict(entry.task),
            }
            for entry in found.compositions
        ],
        "natural_text": None,
        "notes": found.notes,
    }
    if found.sweep is not None:
        result["sweep"] = {
            "floor_top1": found.sweep.floor,
            "lowest_at_floor": found.sweep.lowest_at_floor,
            "highest_at_floor": found.sweep.highest_at_floor,
            "points": [
                {
                    "threshold": point.threshold,
                    "heads": names(point.heads),
                    "verdict": None if point.verdict is None else asdict(point.verdict),
                }
                for point in found.sweep.points
            ],
        }
    if found.text is not None:
        result["natural_text"] = {
            **asdict(found.text),
            "circuit": names(found.text.circuit),
            "found_on_text": names(found.text.found_on_text),
        }
    plain: dict[str, Any] = jsonable(result)
    return plain
