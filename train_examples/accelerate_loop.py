"""The reference run as a bare Accelerate loop: the same model, data, probes and options, and the monitor by hand.

    python -m train_examples.accelerate_loop --preset cpu --output_dir runs/loop
    accelerate launch -m train_examples.accelerate_loop --output_dir runs/loop --data generated

Of the Trainer's options it heeds those that a loop of forty lines can: --max_steps, --per_device_train_batch_size,
--gradient_accumulation_steps, --learning_rate, --weight_decay, --adam_beta1, --adam_beta2, --warmup_steps,
--lr_scheduler_type, --lr_scheduler_kwargs, --max_grad_norm, --bf16, --logging_steps, --save_steps, --seed, --use_cpu,
--report_to and --resume_from_checkpoint (a path, or `last`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from train_examples.reference import (
    OptionError,
    ReferenceArguments,
    build,
    command,
    monitor_options,
    optimizer_of,
    rows_wanted,
    save_options,
    summary,
    trackers_of,
)

if TYPE_CHECKING:
    from torch.utils.data import DataLoader
    from transformers import TrainingArguments


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: 0 when the run came to its end, 1 after a mistake in what was asked for."""
    return command(__doc__ or "", run, arguments)


def run(options: ReferenceArguments, training: TrainingArguments) -> list[float]:
    """Train, and return the loss of every logged step."""
    import torch
    from accelerate import Accelerator
    from accelerate.utils import set_seed
    from torch.utils.data import DataLoader
    from transformers import get_scheduler

    from spectral_monitor.attach.accelerate import watch

    if options.seeds:
        raise OptionError("the loop trains one seed: give --seed, or use train_examples.tinystories_51m for --seeds")
    out = Path(training.output_dir or "tinystories")
    set_seed(training.seed)
    trackers = trackers_of(training)
    accelerator = Accelerator(
        cpu=training.use_cpu,
        mixed_precision="bf16" if training.bf16 else "no",
        gradient_accumulation_steps=training.gradient_accumulation_steps,
        log_with=trackers or None,
        project_dir=out,
    )
    if trackers:
        accelerator.init_trackers(
            "spectral_monitor_reference", config={"seed": training.seed, "preset": options.preset}
        )
    if accelerator.is_main_process:
        save_options(options, out)
    setup = build(options, training.seed, rows_wanted(training))
    optimizer = optimizer_of(options, training, setup.model)
    processes = accelerator.num_processes
    of_scheduler = training.lr_scheduler_kwargs
    scheduler = get_scheduler(
        training.lr_scheduler_type,
        optimizer,
        int(training.warmup_steps) * processes,
        training.max_steps * processes,
        scheduler_specific_kwargs=of_scheduler if isinstance(of_scheduler, dict) else None,
    )
    order = torch.Generator().manual_seed(training.seed)
    loader: DataLoader[Any] = DataLoader(
        setup.rows, training.per_device_train_batch_size, shuffle=True, generator=order, drop_last=True
    )
    model, optimizer, loader, scheduler = accelerator.prepare(setup.model, optimizer, loader, scheduler)

    monitor = watch(
        accelerator,
        out / "spectral_monitor",
        probes=setup.probes,
        **monitor_options(options, training.max_steps),
    )
    batch = training.per_device_train_batch_size * training.gradient_accumulation_steps * processes
    step = _resume(training, out, accelerator)
    if step == 0:
        monitor.step(model, 0, 0.0)
    losses = []
    model.train()
    for inputs in _batches(loader, accelerator, skip=step * training.gradient_accumulation_steps):
        with accelerator.accumulate(model):
            loss = model(**inputs).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), training.max_grad_norm)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if not accelerator.sync_gradients:
            continue
        step += 1
        monitor.step(model, step, float(step * batch * options.context))
        if step % int(training.logging_steps) == 0:
            losses.append(float(accelerator.gather(loss.detach()).mean()))
            accelerator.log({"train/loss": losses[-1]}, step=step)
            accelerator.print(f"step {step} of {training.max_steps}: loss {losses[-1]:.4f}", flush=True)
        ends = step >= training.max_steps or step == options.stop_after
        if ends or step % int(training.save_steps) == 0:
            accelerator.save_state(str(out / f"checkpoint-{step}"))  # with the monitor's state in it
        if ends:
            break
    if step >= training.max_steps:
        accelerator.unwrap_model(model).save_pretrained(out / "final")
        if accelerator.is_main_process:
            setup.tokenizer.save_pretrained(out / "final")
    monitor.close()
    if step >= training.max_steps and accelerator.is_main_process:
        print("\n".join(summary(out / "spectral_monitor")), flush=True)
    accelerator.end_training()
    return losses


def _batches(loader: DataLoader[Any], accelerator: Any, skip: int) -> Iterator[dict[str, Any]]:
    """Batches for ever, epoch after epoch, without the first ``skip``: a resumed run sees what it would have seen."""
    length, epoch = len(loader), 0
    if not length:
        raise OptionError("the data has fewer rows than one batch: give more data or a smaller batch")
    while True:
        if skip >= length:
            # The order of a skipped epoch is drawn all the same, so that the next one's is what it would have been.
            for _ in loader.batch_sampler or ():
                pass
            skip -= length
        else:
            yield from accelerator.skip_first_batches(loader, skip) if skip else loader
            skip = 0
        epoch += 1


def _resume(training: TrainingArguments, out: Path, accelerator: Any) -> int:
    """Load the checkpoint that ``--resume_from_checkpoint`` names; the step it stands at, 0 without one."""
    asked = training.resume_from_checkpoint
    if asked is None or asked.lower() in ("", "false", "none"):
        return 0
    if asked.lower() in ("last", "true"):
        found = sorted(out.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
        if not found:
            raise OptionError(f"there is no checkpoint in {out} to resume from")
        asked = str(found[-1])
    if not Path(asked).is_dir():
        raise OptionError(f"there is no checkpoint {asked}")
    accelerator.load_state(asked)
    return int(Path(asked).name.split("-")[1])


if __name__ == "__main__":
    raise SystemExit(main())
