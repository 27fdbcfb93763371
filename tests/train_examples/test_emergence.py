"""The small recipes: seeded models and data, a Trainer as a user would write it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, GPTNeoXConfig, GPTNeoXForCausalLM, TrainerCallback

from train_examples.emergence import (
    RECIPES,
    RecipeError,
    build_dataset,
    build_model,
    recipe_named,
    train,
    training_arguments,
)
from train_examples.planting import build_optimizer

SMALL = dataclasses.replace(RECIPES["emergence"], heads=4, width=32, mlp_width=32, length=16, batch=4, steps=3)


def test_the_recipes_models_are_those_that_tests_data_and_the_docs_were_made_with() -> None:
    """The shared builder (``small_models``) may not change a weight of them."""
    neox, gpt2 = RECIPES["all-join"], RECIPES["gpt2-no-induction"]
    torch.manual_seed(3)
    by_hand = GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=64,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=256,
            max_position_embeddings=64,
            initializer_range=0.1,
            bos_token_id=None,
            eos_token_id=None,
            use_cache=False,
        )
    )
    torch.manual_seed(3)
    by_hand_gpt2 = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=64,
            n_embd=64,
            n_layer=2,
            n_head=4,
            n_inner=256,
            n_positions=64,
            initializer_range=0.1,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=None,
            eos_token_id=None,
            use_cache=False,
        )
    )
    for recipe, expected in ((neox, by_hand), (gpt2, by_hand_gpt2)):
        built = build_model(recipe, 3)
        weights = expected.state_dict()
        assert {key: tuple(value.shape) for key, value in built.state_dict().items()} == {
            key: tuple(value.shape) for key, value in weights.items()
        }
        assert all(torch.equal(value, weights[key]) for key, value in built.state_dict().items())
        assert built.config.to_dict() == expected.config.to_dict()


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_the_seed_decides_the_weights_and_the_callers_random_state_is_left_alone(name: str) -> None:
    before = torch.random.get_rng_state()
    one, same, other = (build_model(RECIPES[name], seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(one[key], same[key]) for key in one)
    assert any(not torch.equal(one[key], other[key]) for key in one)


def test_gains_spread_the_last_layers_queries_and_keys_only() -> None:
    plain = dataclasses.replace(SMALL, attention_gains=None)
    spread, flat = (build_model(recipe, 0).state_dict() for recipe in (SMALL, plain))
    name = "gpt_neox.layers.1.attention.query_key_value.weight"
    ratio = (spread[name] / flat[name]).view(4, 3, 8, 32)
    gains = sorted(ratio[:, 0, 0, 0].tolist())
    assert gains == pytest.approx([0.8 * 10 ** (n / 3) for n in range(4)], rel=1e-4)
    assert torch.allclose(ratio[:, 1], ratio[:, 0], rtol=1e-4)
    assert torch.allclose(ratio[:, 2], torch.ones(4, 8, 32))
    assert all(torch.equal(spread[key], flat[key]) for key in flat if key != name)


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_the_optimizer_holds_every_parameter_once(name: str) -> None:
    model = build_model(RECIPES[name], 0)
    gains = RECIPES[name].attention_gains is not None
    groups = build_optimizer(model, 3e-3, (0.9, 0.98), 0.01, gains).param_groups
    held = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(held) == sorted({id(parameter) for parameter in model.parameters()})
    assert len(groups) == 1 + gains


def test_a_run_sees_each_row_once_and_repeats_to_the_bit(tmp_path: Path) -> None:
    seen: list[int] = []

    class Count(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seen.append(state.num_input_tokens_seen)

    assert len(build_dataset(SMALL, 0)) == 12
    first = train(SMALL, 0, None, tmp_path / "a", callbacks=[Count()])
    again = train(SMALL, 0, None, tmp_path / "b")
    assert seen == [64, 128, 192]
    weights, same = first.model.state_dict(), again.model.state_dict()
    assert all(torch.equal(weights[key], same[key]) for key in weights)


def test_the_learning_rate_falls_only_at_the_end(tmp_path: Path) -> None:
    recipe = dataclasses.replace(SMALL, steps=200)
    arguments = training_arguments(recipe, 0, None, tmp_path)
    assert arguments.lr_scheduler_kwargs["num_decay_steps"] == 50
    constant = training_arguments(RECIPES["all-join"], 0, None, tmp_path)
    assert str(constant.lr_scheduler_type.value) == "constant_with_warmup"


def test_mistakes_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="choose one of emergence"):
        recipe_named("nonsense")
    with pytest.raises(RecipeError, match="at least one step"):
        training_arguments(SMALL, 0, 0, tmp_path)
