"""Ride along a HuggingFace Trainer: ``Trainer(..., callbacks=[SpectralMonitorCallback()])``."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from spectral_monitor.errors import SpectralMonitorError
from spectral_monitor.monitor import Look, SpectralMonitor
from spectral_monitor.record import set_aside, write_json
from spectral_monitor.schedule import LogSchedule

log = logging.getLogger("spectral_monitor")


class SpectralMonitorCallback(TrainerCallback):  # type: ignore[misc]
    """Watches attention circuits form during a Trainer run; works without arguments.

    Args:
        monitor: a ready monitor; else one is made from ``options`` (see ``SpectralMonitor``).
        run_dir: default ``<output_dir>/spectral_monitor``.
        trackers: publish into the W&B and trackio runs that are active, if any, under a time limit.
        options: further arguments of ``SpectralMonitor``.

    Looks happen in ``on_step_end``, after the optimizer update and before the Trainer logs and saves; step 0 in
    ``on_train_begin``. Tokens come from the Trainer's own counter (``include_num_input_tokens_seen``); without it they
    are computed from the shape of the first training batch and marked as estimated.

    The monitor's state is kept in the run directory and in every ``checkpoint-N``, so a resumed run goes on where it
    was. Errors never leave the callback, unless ``on_error="raise"``.
    """

    def __init__(
        self,
        monitor: SpectralMonitor | None = None,
        *,
        run_dir: str | Path | None = None,
        trackers: bool = True,
        **options: Any,
    ) -> None:
        if monitor is not None and (options or run_dir is not None):
            raise ValueError("give either a ready monitor or the options to make one, not both")
        self._default_schedule = "schedule" not in options
        self.monitor = monitor or SpectralMonitor(run_dir, **options)
        self._trackers = trackers
        self._tokens = _TokenCount()
        self._ready = False

    # -- events -----------------------------------------------------------------------------------------------------

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        model = kwargs["model"]
        self._guarded(self._begin, args, state, model, kwargs.get("processing_class"))
        if self._ready and state.global_step == 0:
            self._look(control, args, state, model)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._ready:
            self._look(control, args, state, kwargs["model"])

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._ready and state.is_world_process_zero:
            self._guarded(self._save_beside, args, state)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # A run that ends before its planned last step is looked at all the same: here, since with
        # ``load_best_model_at_end`` the weights are others by ``on_train_end``.
        if control.should_training_stop:
            self._look_at_the_end(args, state, kwargs["model"])

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._tokens.stop()
        if not self._ready:
            return
        if not args.load_best_model_at_end:
            self._look_at_the_end(args, state, kwargs["model"])
        self._guarded(self._end)

    # -- inside -----------------------------------------------------------------------------------------------------

    def _begin(self, args: TrainingArguments, state: TrainerState, model: nn.Module, processing_class: Any) -> None:
        monitor = self.monitor
        if self._ready:  # the same callback in a second call of train()
            monitor.forget()
            self._ready = False
        monitor.join_ranks(model)
        if monitor.run_dir is None:
            monitor.run_dir = _output_dir(args) / "spectral_monitor"
        if self._default_schedule:
            monitor.schedule = LogSchedule(monitor.schedule.points_per_octave, last_step=state.max_steps)
        if monitor.tokenizer is None and hasattr(processing_class, "all_special_ids"):
            monitor.tokenizer = processing_class
        if self._trackers:
            from spectral_monitor.publish.trackers import joining

            monitor.publishers += joining(monitor.publishers)
            self._trackers = False
        monitor.extra_info = {
            "attached_to": "transformers.Trainer",
            "planned_steps": state.max_steps,
            "training": {"seed": args.seed, "data_seed": args.data_seed, "bf16": args.bf16, "fp16": args.fp16},
        }
        kept = None
        with monitor.reduce.together():
            if not monitor.reduce.is_main:
                pass
            elif state.global_step > 0:
                kept = self._state_at(args, state)
            elif (aside := set_aside(monitor.run_dir)) is not None:
                log.info("spectral_monitor: the record of an earlier training was kept as %s", aside)
        kept = monitor.reduce.broadcast(kept)
        if kept is not None:
            monitor.load_state_dict(kept)
        monitor.prepare(model)
        if kept is None and state.global_step > 0:
            log.info("spectral_monitor: no monitor state for step %d; it begins there", state.global_step)
            monitor.rewind(state.global_step)
        if not _counts_tokens(args):
            self._tokens.watch(model, args)
        self._ready = True

    def _look(self, control: TrainerControl, args: TrainingArguments, state: TrainerState, model: nn.Module) -> None:
        where = self._where(args, state)
        look = self.monitor.step(model, state.global_step, **where)
        if look is not None:
            self._respond(look, control)

    def _look_at_the_end(self, args: TrainingArguments, state: TrainerState, model: nn.Module) -> None:
        if self._ready and self.monitor.last_step != state.global_step:
            self._guarded(self.monitor.observe, model, state.global_step, **self._where(args, state))

    def _respond(self, look: Look, control: TrainerControl) -> None:
        if look.response.save is not None:
            log.info("spectral_monitor: keeping a checkpoint: %s", look.response.save)
            control.should_save = True
        if look.response.stop is not None:
            log.info("spectral_monitor: stopping the training: %s", look.response.stop)
            control.should_training_stop = True

    def _where(self, args: TrainingArguments, state: TrainerState) -> dict[str, Any]:
        if state.global_step == 0:
            return {"tokens": 0.0, "tokens_estimated": False}
        if _counts_tokens(args) and state.num_input_tokens_seen:
            return {"tokens": float(state.num_input_tokens_seen), "tokens_estimated": False}
        tokens = self._tokens.at(state.global_step)
        return {"tokens": tokens, "tokens_estimated": tokens is not None}

    def _end(self) -> None:
        summary = self.monitor.close()
        if summary["failures"]:
            failed = ", ".join(f"{what}: {count}" for what, count in summary["failures"].items())
            log.warning("spectral_monitor: training was not disturbed, but some calls failed (%s)", failed)
        if summary["skipped_steps"]:
            log.info(
                "spectral_monitor: %d optional looks were left out to stay within max_overhead=%g",
                len(summary["skipped_steps"]),
                self.monitor.max_overhead,
            )
        limit = self.monitor.max_overhead
        if limit is not None and summary["share"] > limit:
            log.info(
                "spectral_monitor took %.1f%% of the run's time, more than max_overhead=%g: the looks at step 0, at "
                "each doubling and at the end are never left out; a probe of fewer rows makes them cheaper",
                100 * summary["share"],
                limit,
            )

    def _state_file(self, args: TrainingArguments) -> str:
        """Name of the monitor's file in a checkpoint; two monitors in one run have two."""
        assert self.monitor.run_dir is not None
        run_dir, out = self.monitor.run_dir.absolute(), _output_dir(args).absolute()
        inside = run_dir.relative_to(out) if run_dir.is_relative_to(out) else Path(*run_dir.parts[1:])
        return f"{'-'.join(inside.parts)}.json"

    def _save_beside(self, args: TrainingArguments, state: TrainerState) -> None:
        checkpoint = _output_dir(args) / f"checkpoint-{state.global_step}"
        if checkpoint.is_dir():
            write_json(checkpoint / self._state_file(args), self.monitor.state_dict())

    def _state_at(self, args: TrainingArguments, state: TrainerState) -> dict[str, Any] | None:
        """The monitor's state at the checkpoint that the run resumes from.

        A run killed between the Trainer's save and ``on_save`` left none there: then the run directory's own state
        serves, if it is not from a later step.
        """
        assert self.monitor.run_dir is not None
        candidates = [
            _output_dir(args) / f"checkpoint-{state.global_step}" / self._state_file(args),
            self.monitor.run_dir / "state.json",
        ]
        resumed_from = args.resume_from_checkpoint
        if isinstance(resumed_from, str):
            candidates.insert(0, Path(resumed_from) / self._state_file(args))
        for file in candidates:
            try:
                kept: dict[str, Any] = json.loads(file.read_text())
            except (OSError, ValueError):
                continue
            if (kept.get("last_step") or 0) <= state.global_step:
                return kept
        return None

    def _guarded(self, call: Any, *arguments: Any, **named: Any) -> None:
        """Nothing that fails in the monitor leaves the callback."""
        try:
            call(*arguments, **named)
        except Exception as error:
            if self.monitor.on_error == "raise":
                raise
            if not self.monitor.reduce.is_main:
                return
            if isinstance(error, SpectralMonitorError):
                log.warning("spectral_monitor is off: %s", error)
            else:
                log.warning("spectral_monitor failed; training goes on", exc_info=error)


class _TokenCount:
    """Tokens an optimizer update, from the shape of the first training batch."""

    def __init__(self) -> None:
        self._per_step: int | None = None
        self._handle: Any = None

    def watch(self, model: nn.Module, args: TrainingArguments) -> None:
        if args.torch_compile:
            log.info(
                "spectral_monitor: tokens are unknown (no hook is put into a compiled model): "
                "set include_num_input_tokens_seen in TrainingArguments"
            )
            return
        copies = args.world_size // max(getattr(model, "_tp_size", None) or 1, 1)
        factor = args.gradient_accumulation_steps * copies

        def first_batch(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            ids = named.get("input_ids", inputs[0] if inputs else None)
            if module.training and isinstance(ids, Tensor) and ids.dim() == 2:
                mask = named.get("attention_mask")
                real = int(mask.sum()) if isinstance(mask, Tensor) and mask.shape == ids.shape else ids.numel()
                self._per_step = real * factor
                self.stop()

        self._handle = model.register_forward_pre_hook(first_batch, with_kwargs=True)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def at(self, step: int) -> float | None:
        return None if self._per_step is None else float(step * self._per_step)


def _output_dir(args: TrainingArguments) -> Path:
    return Path(args.output_dir or ".")


def _counts_tokens(args: TrainingArguments) -> bool:
    kept = getattr(args, "include_num_input_tokens_seen", "no")
    return kept is True or kept in ("all", "non_padding")
