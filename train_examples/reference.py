"""What the two reference scripts share: options with their presets, model, data and probes of one seed's run."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spectral_monitor.errors import RecordError, SpectralMonitorError
from train_examples.corpus import Corpus, TrainingRows, load_corpus, load_tokenizer
from train_examples.key_retrieval import KeyRetrieval, key_retrieval, key_retrieval_probe
from train_examples.planting import build_optimizer, spread_attention_gains
from train_examples.small_models import FAMILIES, small_model

if TYPE_CHECKING:
    import torch
    from transformers import HfArgumentParser, PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments

    from spectral_monitor.probe import ProbeBatch

PRESETS = ("full", "cpu")


class OptionError(SpectralMonitorError, ValueError):
    """Options of the reference run that do not go together."""


@dataclass
class ReferenceArguments:
    """Options of the run beside the Trainer's own; the defaults shown are those of `--preset full`."""

    preset: str = field(
        default="full",
        metadata={"help": "full: 51M parameters, for a GPU. cpu: the same code at a size for two CPU cores."},
    )
    data: str = field(
        default="roneneldan/TinyStories",
        metadata={
            "help": "A data set's name on the Hub, a local .txt, .json, .jsonl or .parquet file or folder, or "
            "`generated` (seeded stories, no download)."
        },
    )
    text_column: str = field(default="text", metadata={"help": "Column with the text."})
    song_share: float = field(
        default=0.0,
        metadata={
            "help": "Share of the generated stories that are one long song in which phrases come back at random "
            "places. The rest are told by a fixed grammar, which asks for little induction over free tokens."
        },
    )
    tokenizer: str = field(
        default="gpt2", metadata={"help": "Hub name or local folder, or `own`: a small BPE for the generated stories."}
    )
    vocabulary: int = field(default=1024, metadata={"help": "Largest size of the `own` tokenizer."})
    family: str = field(
        default="gpt2", metadata={"help": "gpt2 (learned positions) or gpt_neox (rotary positions, as Pythia)."}
    )
    layers: int = field(default=8, metadata={"help": "Number of layers."})
    width: int = field(default=512, metadata={"help": "Hidden size."})
    heads: int = field(default=16, metadata={"help": "Attention heads a layer."})
    mlp_width: int = field(default=0, metadata={"help": "Width of the feed-forward layers; 0: four times --width."})
    context: int = field(default=256, metadata={"help": "Tokens a row, and the model's longest context."})
    init_std: float = field(default=0.02, metadata={"help": "Standard deviation of the initial weights."})
    attention_gains: list[float] = field(
        default_factory=list,
        metadata={
            "help": "gpt_neox only. LOW HIGH: the initial query and key weights of a third of the last layer's heads, "
            "drawn at random, are multiplied by LOW, those of the others by HIGH. Planted: the former form the "
            "induction circuit, the latter are left as a control. Default, and 1 1: none."
        },
    )
    code_share: float = field(default=0.10, metadata={"help": "Share of the rows that carry a secret code."})
    code_words: int = field(default=512, metadata={"help": "Number of code words, one token each."})
    gap: list[int] = field(
        default_factory=lambda: [16, 96],
        metadata={"help": "LOW HIGH: tokens between statement and question, LOW <= gap < HIGH."},
    )
    long_gap: list[int] = field(
        default_factory=lambda: [120, 190],
        metadata={"help": "LOW HIGH of the probe set with longer gaps than any in training."},
    )
    probe_rows: int = field(default=2000, metadata={"help": "Rows of each probe batch."})
    points_per_octave: float = field(default=4.0, metadata={"help": "Looks between a step and its double."})
    first_looks: int = field(default=0, metadata={"help": "Before this step only the doublings are looked at."})
    member: float = field(
        default=50.0, metadata={"help": "Selectivity (attention / baseline) from which a head counts as a member."}
    )
    max_overhead: float = field(
        default=0.01,
        metadata={"help": "Largest share of the run's time that optional looks may take; 1: no limit."},
    )
    seeds: list[int] = field(
        default_factory=list,
        metadata={"help": "Several seeds, one run after the other, each in OUTPUT_DIR/seed-N; default: --seed alone."},
    )
    stop_after: int = field(
        default=0,
        metadata={"help": "Stop after this step without changing the learning-rate schedule (to try out resuming)."},
    )


#: What `--preset` changes; anything given on the command line wins.
_PRESETS: dict[str, dict[str, Any]] = {
    "full": {
        "max_steps": 10_000,
        "per_device_train_batch_size": 64,
        "learning_rate": 1e-3,
        "weight_decay": 0.5,
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "warmup_steps": 500,
        "lr_scheduler_type": "cosine",
        "logging_steps": 50,
        "save_steps": 1000,
        "save_total_limit": 2,
    },
    "cpu": {
        "data": "generated",
        "song_share": 0.7,
        "tokenizer": "own",
        "vocabulary": 384,
        "family": "gpt_neox",
        "layers": 2,
        "width": 192,
        "mlp_width": 192,
        "heads": 12,
        "context": 64,
        "init_std": 0.07,
        "attention_gains": [1.0, 6.0],
        "code_share": 0.35,
        "code_words": 32,
        "gap": [4, 20],
        "long_gap": [24, 36],
        "probe_rows": 192,
        "points_per_octave": 6.0,
        "first_looks": 64,
        "max_overhead": 1.0,
        "max_steps": 900,
        "per_device_train_batch_size": 64,
        "learning_rate": 3e-3,
        "weight_decay": 0.01,
        "adam_beta1": 0.9,
        "adam_beta2": 0.98,
        "warmup_steps": 50,
        "lr_scheduler_type": "constant_with_warmup",
        "logging_steps": 25,
        "save_steps": 300,
        "save_total_limit": 1,
        "use_cpu": True,
    },
}


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows the defaults, and leaves the commands of the description as they are written."""


def parser(description: str) -> HfArgumentParser:
    """Parser of both groups of options; the Trainer's own are those of `transformers.TrainingArguments`."""
    from transformers import HfArgumentParser, TrainingArguments

    made = HfArgumentParser(
        (ReferenceArguments, TrainingArguments),  # type: ignore[arg-type]
        usage="python -m train_examples.%(prog)s [--preset full|cpu] [--output_dir DIR] [options below]",
        prog=Path(sys.argv[0]).stem,
        description=description,
        formatter_class=_Formatter,
    )
    made.set_defaults(output_dir="tinystories", include_num_input_tokens_seen=True, report_to="none")
    return made


def parse(
    made: HfArgumentParser, arguments: Sequence[str] | None = None
) -> tuple[ReferenceArguments, TrainingArguments]:
    """Options from the command line, on top of the chosen preset's.

    Raises:
        OptionError: no such preset, or a shape that makes no model.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    preset = _preset_of(arguments)
    made.set_defaults(**_PRESETS[preset])
    if preset == "full" and "--use_cpu" not in arguments:
        made.set_defaults(bf16=_has_bf16())
    options, training = made.parse_args_into_dataclasses(arguments)
    for name in ("gap", "long_gap"):
        if len(getattr(options, name)) != 2:
            raise OptionError(f"--{name} takes two numbers, LOW HIGH")
    if options.width % options.heads:
        raise OptionError(f"a width of {options.width} cannot be shared by {options.heads} heads: choose a multiple")
    if len(options.attention_gains) not in (0, 2) or min(options.attention_gains, default=1.0) <= 0:
        raise OptionError("--attention_gains takes two numbers above 0, LOW HIGH")
    if options.family not in FAMILIES:
        raise OptionError(f"there is no family {options.family!r}: choose {' or '.join(FAMILIES)}")
    if options.family != "gpt_neox" and has_gains(options):
        raise OptionError("--attention_gains needs --family gpt_neox: leave it out")
    if not 0 <= options.song_share <= 1:
        raise OptionError(f"--song_share is {options.song_share}: give a share from 0 to 1")
    return options, training


def command(
    description: str, run: Callable[[ReferenceArguments, TrainingArguments], object], arguments: Sequence[str] | None
) -> int:
    """A script's command line: 0 when ``run`` came to its end, 1 after a mistake in what was asked for."""
    try:
        options, training = parse(parser(description), arguments)
        run(options, training)
    except SpectralMonitorError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def has_gains(options: ReferenceArguments) -> bool:
    """Whether heads of the last layer are given different gains at the start."""
    return bool(options.attention_gains) and options.attention_gains != [1.0, 1.0]


def _preset_of(arguments: Sequence[str]) -> str:
    preset = "full"
    for index, argument in enumerate(arguments):
        if argument == "--preset" and index + 1 < len(arguments):
            preset = arguments[index + 1]
        elif argument.startswith("--preset="):
            preset = argument.removeprefix("--preset=")
    if preset not in PRESETS:
        raise OptionError(f"there is no preset {preset!r}: choose one of {', '.join(PRESETS)}")
    return preset


def _has_bf16() -> bool:
    import torch

    return torch.cuda.is_available() and torch.cuda.is_bf16_supported()


# -- one seed's run ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setup:
    """Everything of one seed's run but the loop."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    rows: TrainingRows
    probes: tuple[ProbeBatch, ...]


def build(options: ReferenceArguments, seed: int, rows: int) -> Setup:
    """Model, data and probes of one run; ``rows`` training rows are wanted (generated data makes exactly so many).

    The probe batches do not depend on ``seed``: runs of several seeds can be compared.

    Raises:
        DataError, ProbeError: the data or the probes cannot be built.
    """
    tokenizer = load_tokenizer(options.tokenizer, options.vocabulary, options.song_share)
    corpus = _corpus(options, tokenizer, rows, seed)
    low, high = options.gap
    task = key_retrieval(tokenizer, options.code_words, options.code_share, (low, high))
    return Setup(
        model=build_model(options, len(tokenizer), seed),
        tokenizer=tokenizer,
        rows=TrainingRows(corpus.train, task if task.share else None, seed),
        probes=build_probes(options, tokenizer, task, corpus),
    )


def build_model(options: ReferenceArguments, vocabulary: int, seed: int) -> PreTrainedModel:
    """The untrained model; its weights depend on ``seed`` alone."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = small_model(
            options.family,
            vocabulary=vocabulary,
            length=options.context,
            layers=options.layers,
            heads=options.heads,
            width=options.width,
            init_std=options.init_std,
            mlp_width=options.mlp_width or None,
        )
        if has_gains(options):
            low, high = options.attention_gains
            spread_attention_gains(model, low, high, low_heads=options.heads // 3)
        return model


def build_probes(
    options: ReferenceArguments, tokenizer: PreTrainedTokenizerBase, task: KeyRetrieval, corpus: Corpus
) -> tuple[ProbeBatch, ...]:
    """Induction, key retrieval at the training gaps, and key retrieval at longer gaps.

    With the `own` tokenizer the induction probe is drawn from ``song_syllables``: most other tokens of the generated
    stories follow a fixed grammar, so that nothing in training asks for induction over them.
    """
    from spectral_monitor.probe import induction_probe

    low, high = options.long_gap
    length = options.context
    filler = _fixed_filler(options, tokenizer, corpus)
    exclude = set(tokenizer.all_special_ids)
    if options.tokenizer == "own":
        exclude |= set(range(len(tokenizer))) - set(song_syllables(tokenizer))
    return (
        induction_probe(
            rows=options.probe_rows,
            length=length,
            token_range=(0, len(tokenizer)) if options.tokenizer == "own" else (100, 10_000),
            vocabulary=len(tokenizer),
            exclude=exclude,
        ),
        key_retrieval_probe(task, filler, options.probe_rows, length),
        key_retrieval_probe(task, filler, options.probe_rows, length, gap=(low, high), name="key_retrieval_long"),
    )


def song_syllables(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids of the syllables that the generated stories' songs are made of, those that are one token each."""
    from train_examples.stories import SYLLABLES

    encoded = [tokenizer(f" {syllable}", add_special_tokens=False)["input_ids"] for syllable in SYLLABLES]
    return [ids[0] for ids in encoded if len(ids) == 1]


def _fixed_filler(options: ReferenceArguments, tokenizer: PreTrainedTokenizerBase, corpus: Corpus) -> Any:
    """Text for the probes that is the same for every seed: held-out rows of the files, or stories of a fixed seed."""
    if options.data != "generated":
        return corpus.held_out
    return _corpus(options, tokenizer, rows=1, seed=0).held_out


def _corpus(options: ReferenceArguments, tokenizer: PreTrainedTokenizerBase, rows: int, seed: int) -> Corpus:
    return load_corpus(
        options.data, tokenizer, options.context, rows, seed, options.text_column, song_share=options.song_share
    )


def seeds_of(options: ReferenceArguments, training: TrainingArguments) -> list[int]:
    """The seeds to run, in order."""
    return list(options.seeds) or [training.seed]


def trackers_of(training: TrainingArguments) -> list[str]:
    """Names of the experiment trackers asked for (``--report_to``)."""
    asked = [training.report_to] if isinstance(training.report_to, str) else training.report_to or []
    return [name for name in asked if name != "none"]


def rows_wanted(training: TrainingArguments) -> int:
    """Rows that ``max_steps`` optimizer steps see once."""
    if training.max_steps < 1:
        raise OptionError(f"--max_steps is {training.max_steps}: the reference run counts in steps, give 1 or more")
    return int(
        training.max_steps
        * training.train_batch_size
        * training.gradient_accumulation_steps
        * max(1, training.world_size)
    )


def optimizer_of(options: ReferenceArguments, training: TrainingArguments, model: torch.nn.Module) -> Any:
    """AdamW as the options ask for it."""
    betas = (training.adam_beta1, training.adam_beta2)
    return build_optimizer(model, training.learning_rate, betas, training.weight_decay, has_gains(options))


#: Options of a run, beside its record: what the probes can be made again from.
OPTIONS_FILE = "reference.json"


def save_options(options: ReferenceArguments, run: Path) -> None:
    """Keep the options in the run's directory (``reference.json``)."""
    from spectral_monitor.record import write_json

    run.mkdir(parents=True, exist_ok=True)
    write_json(run / OPTIONS_FILE, asdict(options))


def load_options(run: Path) -> ReferenceArguments:
    """The options that ``save_options`` kept; OptionError where there are none."""
    try:
        return ReferenceArguments(**json.loads((run / OPTIONS_FILE).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise OptionError(f"{run} is no directory of a reference run ({OPTIONS_FILE}: {error})") from error


def probes_of(options: ReferenceArguments) -> tuple[ProbeBatch, ...]:
    """The probe batches of a run with these options; they do not depend on its seed."""
    tokenizer = load_tokenizer(options.tokenizer, options.vocabulary, options.song_share)
    corpus = _corpus(options, tokenizer, rows=1, seed=0)
    low, high = options.gap
    task = key_retrieval(tokenizer, options.code_words, options.code_share, (low, high))
    return build_probes(options, tokenizer, task, corpus)


def monitor_options(options: ReferenceArguments, steps: int) -> dict[str, Any]:
    """Arguments of the monitor beside its run directory and its probes."""
    from spectral_monitor.causal import CheckOptions
    from spectral_monitor.schedule import LogSchedule
    from spectral_monitor.screen import Thresholds

    return {
        "schedule": LogSchedule(options.points_per_octave, last_step=steps, start=options.first_looks),
        "thresholds": Thresholds(member=options.member),
        "modes": ("zero",) if options.preset == "cpu" else ("zero", "mean"),
        "check_rows": 64 if options.preset == "cpu" else 512,
        "check": CheckOptions(first_look=24, max_draws=40) if options.preset == "cpu" else CheckOptions(),
        "max_overhead": None if options.max_overhead >= 1 else options.max_overhead,
    }


def summary(run_dir: Path) -> list[str]:
    """What came of a finished run, one line a probe: accuracy at its last look, and its last causal check.

    One line that says why where the monitor recorded nothing: the training came to its end all the same.
    """
    from spectral_monitor.record import RunRecord

    try:
        record = RunRecord.open(run_dir)
    except RecordError as error:
        return [f"no summary: {error}"]
    last = {observation.probe: observation for observation in record.observations()}
    checks = {(verdict.probe, verdict.mode): verdict for verdict in record.verdicts()}
    lines = []
    for probe, observation in last.items():
        said = [
            f"{verdict.verdict} at step {verdict.step} ({mode} ablation of {' '.join(verdict.heads)})"
            for (of, mode), verdict in checks.items()
            if of == probe
        ]
        found = "; ".join(said) or "no circuit was found"
        lines.append(f"{probe}: top-1 {observation.metrics.top1:.1%} at step {observation.step}; {found}")
    return lines
