"""Small models that are trained from scratch in about two minutes on two CPU cores, until induction has formed or not.

``RECIPES`` names three of them. Everything is what a user would write: a config, a seeded Dataset, a
``transformers.Trainer``. The monitor is attached by the caller (``callbacks=[SpectralMonitorCallback()]``).

What is planted, to be said wherever a result is shown: see ``Recipe.planted`` of each.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spectral_monitor.errors import SpectralMonitorError
from train_examples.planting import build_optimizer, spread_attention_gains
from train_examples.small_models import small_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

    from train_examples.copy_process import TokenRows


class RecipeError(SpectralMonitorError, ValueError):
    """A training recipe that does not exist, or a setting that it cannot be run with."""


@dataclass(frozen=True)
class Recipe:
    """One small training run.

    Attributes:
        name: as given on the command line.
        family: ``gpt_neox`` (rotary positions) or ``gpt2`` (learned absolute positions).
        layers, heads, width, mlp_width: the model's shape.
        vocabulary, length: token ids, and tokens a row (also the model's maximum).
        batch: rows an optimizer step.
        fixed_lag: train on rows whose second half repeats the first, instead of on the copy process.
        steps: the default number of optimizer steps.
        init_std: standard deviation of the initial weights.
        learning_rate: of AdamW (betas 0.9 and 0.98, weight decay 0.01), after 50 steps of warm-up.
        attention_gains: (low, high): the initial query and key weights of the last layer's heads are multiplied by
            gains from low to high (see ``planting``). None: left alone.
        decay_from: fraction of the steps after which the learning rate falls linearly to 5%; None: constant.
        planted: one sentence: what of the outcome is put in by hand.
        expected: one sentence: what the monitor should find.
    """

    name: str
    family: str
    layers: int
    heads: int
    width: int
    mlp_width: int
    steps: int
    planted: str
    expected: str
    vocabulary: int = 64
    length: int = 64
    batch: int = 64
    fixed_lag: bool = False
    init_std: float = 0.1
    learning_rate: float = 3e-3
    attention_gains: tuple[float, float] | None = None
    decay_from: float | None = None


RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            name="emergence",
            family="gpt_neox",
            layers=2,
            heads=12,
            width=192,
            mlp_width=192,
            steps=500,
            init_std=0.07,
            attention_gains=(0.8, 8.0),
            decay_from=0.75,
            planted=(
                "when the circuit forms is learned; which heads of layer 1 form it is planted "
                "(their query and key weights start smaller than the others')"
            ),
            expected="four or five of layer 1's twelve heads form the induction circuit; the verdict is causal",
        ),
        Recipe(
            name="all-join",
            family="gpt_neox",
            layers=2,
            heads=4,
            width=64,
            mlp_width=256,
            steps=500,
            planted="nothing but the data and a large initial scale",
            expected="every head of layer 1 joins, so no matched control exists: no control possible",
        ),
        Recipe(
            name="gpt2-no-induction",
            family="gpt2",
            layers=2,
            heads=4,
            width=64,
            mlp_width=256,
            steps=500,
            fixed_lag=True,
            planted="the data: what repeats always stands at the same distance",
            expected="copying is learned by position: the loss falls, no induction circuit is claimed",
        ),
    )
}


def recipe_named(name: str) -> Recipe:
    """The recipe of that name; RecipeError lists the names there are."""
    if name not in RECIPES:
        raise RecipeError(f"there is no recipe {name!r}: choose one of {', '.join(RECIPES)}")
    return RECIPES[name]


def build_model(recipe: Recipe, seed: int) -> PreTrainedModel:
    """The untrained model; its weights depend on ``seed`` alone (the caller's random state is left as it was)."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = small_model(
            recipe.family,
            vocabulary=recipe.vocabulary,
            length=recipe.length,
            layers=recipe.layers,
            heads=recipe.heads,
            width=recipe.width,
            init_std=recipe.init_std,
            mlp_width=recipe.mlp_width,
        )
        if recipe.attention_gains is not None:
            spread_attention_gains(model, *recipe.attention_gains)
    return model


def build_dataset(recipe: Recipe, seed: int, steps: int | None = None) -> TokenRows:
    """Rows for ``steps`` optimizer steps (default: the recipe's), each seen once; decided by ``seed`` alone."""
    from train_examples.copy_process import CopyProcess, TokenRows, fixed_lag

    rows = (steps or recipe.steps) * recipe.batch
    if recipe.fixed_lag:
        return TokenRows(fixed_lag(rows, seed, recipe.vocabulary, recipe.length))
    return TokenRows(CopyProcess(vocabulary=recipe.vocabulary, length=recipe.length).sample(rows, seed))


def training_arguments(
    recipe: Recipe, seed: int, steps: int | None, out: str | os.PathLike[str], **options: Any
) -> TrainingArguments:
    """Arguments of the Trainer; ``options`` override what stands here (``report_to="wandb"``, ``use_cpu=False``)."""
    from transformers import TrainingArguments

    steps = recipe.steps if steps is None else steps
    if steps < 1:
        raise RecipeError(f"steps is {steps}: training needs at least one step")
    schedule: dict[str, Any] = {"lr_scheduler_type": "constant_with_warmup"}
    if recipe.decay_from is not None:
        schedule = {
            "lr_scheduler_type": "warmup_stable_decay",
            "lr_scheduler_kwargs": {
                "num_decay_steps": max(1, round(steps * (1 - recipe.decay_from))),
                "decay_type": "linear",
                "min_lr_ratio": 0.05,
            },
        }
    return TrainingArguments(
        **{
            "output_dir": os.fspath(out),
            "max_steps": steps,
            "per_device_train_batch_size": recipe.batch,
            "learning_rate": recipe.learning_rate,
            "warmup_steps": min(50, steps),
            "max_grad_norm": 1.0,
            "seed": seed,
            "data_seed": seed,
            "logging_steps": 10,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "use_cpu": True,
            "include_num_input_tokens_seen": "all",
            **schedule,
            **options,
        }
    )


def train(
    recipe: Recipe,
    seed: int,
    steps: int | None,
    out: str | os.PathLike[str],
    callbacks: Sequence[TrainerCallback] = (),
    **options: Any,
) -> Trainer:
    """Train the recipe from scratch and return the Trainer when it is done.

    Args:
        recipe: one of ``RECIPES``.
        seed: decides the initial weights, the data and their order.
        steps: optimizer steps; None for the recipe's own number.
        out: output directory of the Trainer.
        callbacks: for example ``[SpectralMonitorCallback()]``.
        options: further ``TrainingArguments``.
    """
    from transformers import PrinterCallback, Trainer

    arguments = training_arguments(recipe, seed, steps, out, **options)
    model = build_model(recipe, seed)
    gains = recipe.attention_gains is not None
    optimizer = build_optimizer(model, recipe.learning_rate, (0.9, 0.98), 0.01, gains)
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=build_dataset(recipe, seed, steps),
        optimizers=(optimizer, None),
        callbacks=list(callbacks),
    )
    trainer.remove_callback(PrinterCallback)  # the Trainer puts it in where there is no progress bar
    trainer.train()
    return trainer
