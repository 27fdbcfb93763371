"""What the two reference scripts share: options with their presets, model, data and probes of one seed's run."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spectral_monitor.errors import SpectralMonitorError
from train_examples.corpus import Corpus, TrainingRows, load_corpus, load_tokenizer
from train_examples.key_retrieval import KeyRetrieval, key_retrieval, key_retrieval_probe
from train_examples.planting import build_optimizer, plant_previous_token_head, spread_attention_gains

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
    context: int = field(default=256, metadata={"help": "Tokens a row, and the model's longest context."})
    init_std: float = field(default=0.02, metadata={"help": "Standard deviation of the initial weights."})
    previous_token_bias: float = field(
        default=0.0,
        metadata={
            "help": "gpt_neox only. Above 0: head 0 of layer 0 starts out attending to the previous token (its query "
            "and key biases have this size). Planted, so that a small run need not wait for it."
        },
    )
    attention_gains: list[float] = field(
        default_factory=list,
        metadata={
            "help": "gpt_neox only. LOW HIGH: the initial query and key weights of a third of the last layer's heads, "
            "drawn at random, are multiplied by LOW, those of the others by HIGH. Planted: the former form the "
            "circuits, the latter are left as a control. Default: none."
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
        "tokenizer": "own",
        "vocabulary": 640,
        "family": "gpt_neox",
        "layers": 2,
        "width": 144,
        "heads": 12,
        "context": 64,
        "init_std": 0.08,
        "previous_token_bias": 3.0,
        "code_share": 0.5,
        "code_words": 32,
        "gap": [4, 20],
        "long_gap": [24, 36],
        "probe_rows": 96,
        "points_per_octave": 3.0,
        "member": 20.0,
        "max_overhead": 1.0,
        "max_steps": 1000,
        "per_device_train_batch_size": 16,
        "learning_rate": 3e-3,
        "weight_decay": 0.1,
        "adam_beta1": 0.9,
        "adam_beta2": 0.98,
        "warmup_steps": 50,
        "lr_scheduler_type": "constant_with_warmup",
        "logging_steps": 25,
        "save_steps": 200,
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
    if options.family != "gpt_neox" and (options.attention_gains or options.previous_token_bias):
        raise OptionError("--attention_gains and --previous_token_bias need --family gpt_neox: leave them out")
    if options.family not in ("gpt2", "gpt_neox"):
        raise OptionError(f"there is no family {options.family!r}: choose gpt2 or gpt_neox")
    return options, training


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
    tokenizer = load_tokenizer(options.tokenizer, options.vocabulary)
    corpus = load_corpus(options.data, tokenizer, options.context, rows, seed, options.text_column)
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
    from transformers import GPT2Config, GPT2LMHeadModel, GPTNeoXConfig, GPTNeoXForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if options.family == "gpt2":
            return GPT2LMHeadModel(
                GPT2Config(
                    vocab_size=vocabulary,
                    n_positions=options.context,
                    n_embd=options.width,
                    n_layer=options.layers,
                    n_head=options.heads,
                    initializer_range=options.init_std,
                    resid_pdrop=0.0,
                    embd_pdrop=0.0,
                    attn_pdrop=0.0,
                    bos_token_id=None,
                    eos_token_id=None,
                    use_cache=False,
                )
            )
        model = GPTNeoXForCausalLM(
            GPTNeoXConfig(
                vocab_size=vocabulary,
                max_position_embeddings=options.context,
                hidden_size=options.width,
                intermediate_size=4 * options.width,
                num_hidden_layers=options.layers,
                num_attention_heads=options.heads,
                initializer_range=options.init_std,
                rope_parameters={"rope_type": "default", "rope_theta": 10.0, "partial_rotary_factor": 0.5}
                if options.previous_token_bias
                else None,
                bos_token_id=None,
                eos_token_id=None,
                use_cache=False,
            )
        )
        if options.attention_gains:
            smallest, largest = options.attention_gains
            spread_attention_gains(model, smallest, largest, low_heads=options.heads // 3)
        if options.previous_token_bias:
            plant_previous_token_head(model, options.previous_token_bias)
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
    return load_corpus("generated", tokenizer, options.context, rows=1, seed=0).held_out


def seeds_of(options: ReferenceArguments, training: TrainingArguments) -> list[int]:
    """The seeds to run, in order."""
    return list(options.seeds) or [training.seed]


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
    gains = bool(options.attention_gains)
    return build_optimizer(model, training.learning_rate, betas, training.weight_decay, gains)


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
    tokenizer = load_tokenizer(options.tokenizer, options.vocabulary)
    corpus = load_corpus(options.data, tokenizer, options.context, 1, 0, options.text_column)
    low, high = options.gap
    task = key_retrieval(tokenizer, options.code_words, options.code_share, (low, high))
    return build_probes(options, tokenizer, task, corpus)


def monitor_options(options: ReferenceArguments, steps: int) -> dict[str, Any]:
    """Arguments of the monitor beside its run directory and its probes."""
    from spectral_monitor.causal import CheckOptions
    from spectral_monitor.schedule import LogSchedule
    from spectral_monitor.screen import Thresholds

    return {
        "schedule": LogSchedule(options.points_per_octave, last_step=steps),
        "thresholds": Thresholds(member=options.member),
        "modes": ("zero",) if options.preset == "cpu" else ("zero", "mean"),
        "check_rows": 64 if options.preset == "cpu" else 512,
        "check": CheckOptions(first_look=24, max_draws=40) if options.preset == "cpu" else CheckOptions(),
        "max_overhead": None if options.max_overhead >= 1 else options.max_overhead,
    }
