"""The reference run with the HuggingFace Trainer: a 51M-parameter GPT-2 on TinyStories, with a secret code to keep.

One row in ten tells a secret code and asks for it later; the monitor rides along with three probe batches: induction,
key retrieval, and key retrieval over longer gaps than any in training. All options of `transformers.TrainingArguments`
work as usual, among them --output_dir, --max_steps, --bf16, --report_to wandb and --resume_from_checkpoint (a path, or
`last`). The optimizer is always AdamW, its weight decay on all weights; --optim changes nothing.

    python -m train_examples.tinystories_51m --output_dir runs/full
    python -m train_examples.tinystories_51m --preset cpu --seeds 42 271 149 --output_dir runs/cpu
    python -m train_examples.tinystories_51m --data my_stories.txt --tokenizer gpt2 --output_dir runs/mine
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spectral_monitor.errors import RecordError
from train_examples.reference import (
    OptionError,
    ReferenceArguments,
    build,
    command,
    monitor_options,
    optimizer_of,
    rows_wanted,
    save_options,
    seeds_of,
    summary,
    trackers_of,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: 0 when every seed's run came to its end, 1 after a mistake in what was asked for."""
    return command(__doc__ or "", run_seeds, arguments)


def run_seeds(options: ReferenceArguments, training: TrainingArguments) -> None:
    """Every seed that was asked for, one after the other; several go to ``OUTPUT_DIR/seed-N``."""
    out = Path(training.output_dir or "tinystories")
    for seed in seeds_of(options, training):
        run(options, training, seed, out / f"seed-{seed}" if options.seeds else out)
        if options.seeds and "wandb" in trackers_of(training):
            _end_wandb_run()


def run(options: ReferenceArguments, training: TrainingArguments, seed: int, out: Path) -> Trainer:
    """Train one seed to its end, with the monitor; the last checkpoint goes to ``out/final``."""
    import transformers
    from transformers import Trainer, default_data_collator

    from spectral_monitor.attach.trainer import SpectralMonitorCallback

    arguments = copy.deepcopy(training)
    arguments.output_dir, arguments.seed, arguments.data_seed = str(out), seed, seed
    save_options(options, out)
    transformers.set_seed(seed)
    setup = build(options, seed, rows_wanted(arguments))
    parameters = sum(p.numel() for p in setup.model.parameters())
    tokens = options.context * arguments.train_batch_size * arguments.gradient_accumulation_steps * arguments.world_size
    print(
        f"seed {seed}: {parameters:,} parameters, {len(setup.tokenizer):,} tokens in the vocabulary, "
        f"{tokens:,} tokens a step, {arguments.max_steps} steps, {len(setup.rows):,} rows",
        flush=True,
    )
    monitor = SpectralMonitorCallback(
        run_dir=out / "spectral_monitor",
        probes=setup.probes,
        **monitor_options(options, arguments.max_steps),
    )
    callbacks: list[TrainerCallback] = [monitor]
    if options.stop_after:
        callbacks.append(stop_after(options.stop_after))
    trainer = Trainer(
        model=setup.model,
        args=arguments,
        train_dataset=setup.rows,
        data_collator=default_data_collator,
        processing_class=setup.tokenizer,
        optimizers=(optimizer_of(options, arguments, setup.model), None),
        callbacks=callbacks,
    )
    checkpoint = _checkpoint(arguments, out, needed=not options.seeds)
    if checkpoint is not None:
        _load_weights(setup.model, checkpoint)
    trainer.train(resume_from_checkpoint=checkpoint)
    if trainer.state.global_step >= arguments.max_steps:
        trainer.save_model(str(out / "final"))
        _show(out / "spectral_monitor", f"seed {seed}")
    return trainer


def _end_wandb_run() -> None:
    """The Trainer leaves its W&B run open: the next seed would log into it."""
    import wandb

    if wandb.run is not None:
        wandb.finish()


def _show(run_dir: Path, title: str) -> None:
    """What came of the run, and pictures of the trajectories where the monitor recorded something."""
    from train_examples.trajectories import draw

    print("\n".join(summary(run_dir)), flush=True)
    with contextlib.suppress(RecordError):  # the summary has said it
        print("\n".join(map(str, draw(run_dir, title))), flush=True)


def _load_weights(model: PreTrainedModel, checkpoint: str) -> None:
    """The checkpoint's weights, by the names that transformers gave them there.

    transformers 5.24 writes GPT-NeoX's output matrix as ``embed_out`` and its Trainer, which resumes with
    ``load_state_dict(strict=False)``, then leaves the model's ``lm_head`` as it is, with a warning. ``from_pretrained``
    knows both names; loading through it first makes the resumed run the same as an unbroken one.
    """
    try:
        kept = type(model).from_pretrained(checkpoint)
    except (OSError, ValueError) as error:
        raise OptionError(f"{checkpoint} cannot be loaded as a checkpoint of this model") from error
    model.load_state_dict(kept.state_dict())


def stop_after(step: int) -> TrainerCallback:
    """Ends the training after ``step``, with a checkpoint; the learning-rate schedule stays that of the whole run."""
    from transformers import TrainerCallback

    class StopAfter(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            if state.global_step >= step:
                control.should_training_stop = control.should_save = True
            return control

    return StopAfter()


def _checkpoint(arguments: TrainingArguments, out: Path, needed: bool) -> str | None:
    """``--resume_from_checkpoint``: a path, or ``last`` (also ``true``) for the newest checkpoint of the run.

    ``needed``: OptionError where there is none; of several seeds those that had not begun start from the beginning.
    """
    asked = arguments.resume_from_checkpoint
    if asked is None or asked.lower() in ("", "false", "none"):
        return None
    if asked.lower() not in ("last", "true"):
        return asked
    from transformers.trainer_utils import get_last_checkpoint

    found = get_last_checkpoint(str(out)) if out.is_dir() else None
    if found is None and not needed:
        print(f"{out}: no checkpoint yet, starting from the beginning", flush=True)
        return None
    if found is None:
        raise OptionError(f"there is no checkpoint in {out} to resume from")
    return str(found)


if __name__ == "__main__":
    raise SystemExit(main())
