"""The public cases under "Attention capture", and the traps met in the sweep: each right, or refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from spectral_monitor.capture import Ablation, Subject
from spectral_monitor.errors import CaptureError
from spectral_monitor.heads import Head
from spectral_monitor.reading import head_table, observation_of
from spectral_monitor.screen import Thresholds
from tests.architectures.families import family
from tests.architectures.shrink import tiny_config
from tests.architectures.sweep import captured
from tests.architectures.textbook import textbook
from tests.architectures.tiny import VOCABULARY, build, tiny_probe

PROBE = tiny_probe()


def table_of(model: nn.Module, probe: Any = PROBE) -> Any:
    return head_table(Subject(model, probe).read(probe), probe, "others", Thresholds())


def projection_input(subject: Subject, number: int, ablation: Ablation) -> Tensor:
    """Input of a block's output projection on the whole probe, under an ablation."""
    kept: list[Tensor] = []
    handle = subject.anatomy.blocks[number].projection.register_forward_hook(
        lambda module, args, output: kept.append(args[0].clone())
    )
    try:
        subject.run_conditions(PROBE, [ablation], batch_size=PROBE.rows)
    finally:
        handle.remove()
    return kept[-1]


# -- patterns under SDPA, gradient checkpointing and train mode -------------------------------------------------------


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", ["llama", "opt"])
def test_patterns_under_sdpa_equal_an_eager_copy_and_nothing_is_changed(
    kind: str, checkpointing: bool, tmp_path: Any
) -> None:
    model = build(tiny_config(kind))
    slow = textbook(model, PROBE)
    if checkpointing:
        model.gradient_checkpointing_enable()
    model.train()
    model.save_pretrained(tmp_path / "before")
    config = model.config.to_dict()
    tap, _ = captured(Subject(model, PROBE), PROBE)
    for rows, expected in zip(tap.rows, slow.rows, strict=True):
        torch.testing.assert_close(rows, expected, rtol=0, atol=1e-6)
    assert model.config._attn_implementation == "sdpa"
    assert model.config.to_dict() == config
    model.save_pretrained(tmp_path / "after")
    assert (tmp_path / "before/config.json").read_bytes() == (tmp_path / "after/config.json").read_bytes()


# -- row sums ---------------------------------------------------------------------------------------------------------


def test_attention_dropout_in_train_mode_changes_nothing() -> None:
    model = family("gpt2", attn_pdrop=0.5, resid_pdrop=0.5).train()
    subject = Subject(model, PROBE)
    taps = [captured(subject, PROBE)[0] for _ in range(5)]
    for rows in zip(*(tap.rows for tap in taps), strict=True):
        torch.testing.assert_close(rows[0].sum(-1), torch.ones_like(rows[0].sum(-1)), rtol=0, atol=1e-4)
        assert all(torch.equal(rows[0], other) for other in rows[1:])


def test_a_sink_is_reported_and_not_divided_away() -> None:
    model = family("gpt_oss")
    tap, _ = captured(Subject(model, PROBE), PROBE)
    table = table_of(model)
    for number, (rows, sinks) in enumerate(zip(tap.rows, tap.sinks, strict=True)):
        assert (rows.sum(-1) < 1).all()
        torch.testing.assert_close(rows.sum(-1) + sinks, torch.ones_like(sinks), rtol=0, atol=1e-5)
        np.testing.assert_allclose(table.sink[table.layer == number], sinks.mean(0), atol=1e-6)


# -- half precision ---------------------------------------------------------------------------------------------------


def test_half_precision_overflow_marks_the_layer_and_later_ones_and_is_no_loss_of_induction() -> None:
    model = family("gpt_neox", num_hidden_layers=3)
    with torch.no_grad():
        model.gpt_neox.layers[1].attention.query_key_value.weight.mul_(200 * 500)
    model.half()
    reading = Subject(model, PROBE).read(PROBE)
    observation = observation_of(reading, PROBE, step=1, tokens=10.0)
    status = {layer: set(observation.heads.status[observation.heads.layer == layer]) for layer in range(3)}
    assert status[0] == {"ok"}
    assert status[1] == {"not_finite"} and status[2] == {"not_finite"}
    assert not observation.finite  # which keeps it out of crossings, onsets and alarms


def test_left_padded_rows_give_the_numbers_of_the_unpadded_rows() -> None:
    from dataclasses import replace

    model = family("gpt_neox")
    pad = 3
    shift = lambda a: np.concatenate([np.zeros((len(a), pad), dtype=a.dtype), a], axis=1)  # noqa: E731
    mask = np.ones((PROBE.rows, PROBE.length + pad), dtype=bool)
    mask[:, :pad] = False
    padded = replace(
        PROBE,
        tokens=shift(PROBE.tokens),
        query=PROBE.query + pad,
        targets={name: positions + pad for name, positions in PROBE.targets.items()},
        mask=mask,
        sampled=PROBE.sampled + pad,
        companions={},
    )
    plain, shifted = table_of(model), table_of(model, padded)
    for name in PROBE.classes:
        np.testing.assert_allclose(shifted.attention[name], plain.attention[name], atol=1e-5)
    np.testing.assert_allclose(shifted.pr, plain.pr, rtol=1e-4)


# -- heads, key/value heads, head size --------------------------------------------------------------------------------

_SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "8/2": ("llama", {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 4}),
    "8/8": ("llama", {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 4}),
    "8/1": ("llama", {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 4}),
    "4 x 32 in 64": ("qwen3", {"num_attention_heads": 4, "head_dim": 32, "hidden_size": 64}),
    "latent": ("deepseek_v3", {"v_head_dim": 16}),
}


@pytest.mark.parametrize("shape", list(_SHAPES))
def test_ablating_a_head_changes_its_slice_and_no_other(shape: str) -> None:
    kind, settings = _SHAPES[shape]
    model = build(tiny_config(kind, **settings))
    subject = Subject(model, PROBE)
    block = subject.anatomy.blocks[0]
    assert block.heads == model.config.num_attention_heads
    intact = projection_input(subject, 0, Ablation("baseline"))
    assert intact.shape[-1] == block.heads * block.head_dim
    assert block.head_dim == settings.get("v_head_dim", settings.get("head_dim"))
    for head in range(block.heads):
        changed = projection_input(subject, 0, Ablation("one", frozenset([Head(block.layer, head)])))
        slices, before = (value.unflatten(-1, (block.heads, -1)) for value in (changed, intact))
        assert not slices[..., head, :].any()
        others = [other for other in range(block.heads) if other != head]
        assert torch.equal(slices[..., others, :], before[..., others, :])


def test_a_layer_whose_heads_give_exactly_zero_is_refused() -> None:
    model = family("llama grouped-query")
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight.zero_()
    with pytest.raises(CaptureError, match=r"layer 1 .*exactly zero"):
        Subject(model, PROBE)


# -- hybrids ----------------------------------------------------------------------------------------------------------

_HYBRIDS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
}


@pytest.mark.parametrize("kind", list(_HYBRIDS))
def test_hybrids_have_true_layer_numbers(kind: str) -> None:
    model = build(tiny_config(kind, num_hidden_layers=4, **_HYBRIDS[kind]))
    subject = Subject(model, PROBE)
    assert subject.anatomy.layers == (1, 3)
    assert subject.anatomy.without_attention == (0, 2)
    assert {str(head) for head in table_of(model)} == {f"L{layer}H{head}" for layer in (1, 3) for head in range(4)}


def test_shared_attention_blocks_are_told_apart_by_layer() -> None:
    model = build(tiny_config("zamba2"))
    subject = Subject(model, PROBE)
    assert subject.anatomy.layers == (1, 2)
    baseline, first, second = subject.run_conditions(
        PROBE, [Ablation("b"), Ablation("1", frozenset([Head(1, 0)])), Ablation("2", frozenset([Head(2, 0)]))]
    )
    assert np.abs(first.logprob - second.logprob).max() > 1e-6
    assert np.abs(first.logprob - baseline.logprob).max() > 1e-6


def test_layers_that_run_more_than_once_are_numbered_as_they_run() -> None:
    subject = Subject(build(tiny_config("dory")), PROBE)
    assert subject.anatomy.layers == (0, 1, 2, 3)
    first, again = subject.anatomy.blocks[1:3]
    assert first.module is again.module and (first.projection_call, again.projection_call) == (1, 2)
    assert any("order of execution" in note for note in subject.anatomy.notes)


# -- windows ----------------------------------------------------------------------------------------------------------


def test_a_target_outside_the_window_is_out_of_reach_and_not_zero() -> None:
    table = table_of(family("gemma3"))
    windowed = table.layer == 0
    assert (table.reach["first_token"][windowed] == 0).all()
    assert np.isnan(table.attention["first_token"][windowed]).all()
    assert np.isnan(table.selectivity["first_token"][windowed]).all()
    assert (table.reach["first_token"][~windowed] == 1).all()
    assert (table.attention["first_token"][~windowed] > 0).all()
    assert (table.reach["previous_token"] == 1).all()


def test_chunked_attention_is_out_of_reach_in_front_of_the_chunk() -> None:
    """Llama 4: chunks of 8; the query of 24 tokens stands at the end of the third chunk (16 to 23)."""
    model = build(tiny_config("llama4_text", layer_types=["chunked_attention", "full_attention", "chunked_attention"]))
    table = table_of(model)
    chunked = table.layer != 1
    assert (table.reach["first_token"][chunked] == 0).all()
    assert (table.reach["local"][chunked] == 1).all()
    assert (table.reach["first_token"][~chunked] == 1).all()


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("mamba", "no softmax attention"),
        ("rwkv", "no softmax attention"),
        ("diffllama", "calls its attention 2 times"),
        ("cpmant", "attends from 55 to 55 positions"),
        ("deepseek_v4", "compressed tokens"),
        ("xlnet", "no output projection"),
        ("jetmoe", "do not lie side by side"),
    ],
)
def test_what_cannot_be_read_right_is_refused_with_a_sentence(kind: str, sentence: str) -> None:
    with pytest.raises(CaptureError, match=sentence):
        Subject(build(tiny_config(kind)), PROBE)


def test_an_encoder_is_refused_because_it_sees_behind_the_query() -> None:
    model = build(tiny_config("bert", is_decoder=False))
    with pytest.raises(CaptureError, match=r"lies on tokens behind the position.*is_decoder=True"):
        Subject(model, PROBE)


def test_an_encoder_decoder_is_refused() -> None:
    from transformers import BartConfig, BartForConditionalGeneration

    config = BartConfig(
        vocab_size=VOCABULARY, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=64,
    )  # fmt: skip
    with pytest.raises(CaptureError, match="encoder-decoder"):
        Subject(BartForConditionalGeneration(config), PROBE)


def test_a_gate_beside_the_heads_is_not_taken_for_the_projection() -> None:
    """Beam computes its gate after the attention call from an input as wide as all heads together."""
    model = build(tiny_config("beam"))
    assert model.config.hidden_size == model.config.num_attention_heads * model.config.head_dim
    names = {block.projection for block in Subject(model, PROBE).anatomy.blocks}
    assert names == {layer.self_attn.o_proj for layer in model.model.layers}


def test_an_attention_function_with_an_unknown_score_term_is_refused() -> None:
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def tempered(module: nn.Module, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        return sdpa_attention_forward(module, query * 2, *args, **kwargs)

    AttentionInterface.register("tempered", tempered)
    try:
        model = family("llama grouped-query")
        model.config._attn_implementation = "tempered"
        with pytest.raises(CaptureError, match="the scores hold something that is not known here"):
            Subject(model, PROBE)
    finally:
        AttentionInterface._global_mapping.pop("tempered")


def test_half_of_the_heads_unseen_is_refused() -> None:
    """One layer computes its attention by hand with exp and sum: nothing of it can be seen."""

    def by_hand(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        q, k, v = (
            p(hidden_states).unflatten(-1, (-1, 8)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        weights = (q @ k.repeat_interleave(2, 1).transpose(-1, -2)).exp().tril()
        out = weights / weights.sum(-1, keepdim=True) @ v.repeat_interleave(2, 1)
        return self.o_proj(out.transpose(1, 2).flatten(2)), None

    model = family("llama grouped-query")
    attention = model.model.layers[1].self_attn
    attention.forward = by_hand.__get__(attention)
    with pytest.raises(CaptureError, match="ran without an attention that can be seen"):
        Subject(model, PROBE)


def test_block_sparse_attention_stays_on_after_a_short_probe() -> None:
    model = build(tiny_config("big_bird", attention_type="block_sparse"))
    kinds = [type(layer.attention.self) for layer in model.bert.encoder.layer]
    Subject(model, PROBE).read(PROBE)
    assert model.bert.attention_type == "block_sparse"
    assert [type(layer.attention.self) for layer in model.bert.encoder.layer] == kinds


def test_a_model_that_needs_more_than_tokens_is_refused() -> None:
    with pytest.raises(CaptureError, match="could not be run on rows of token ids"):
        Subject(build(tiny_config("musicgen")), PROBE)


def test_a_dead_head_has_no_rank_and_says_so() -> None:
    model = family("gpt2")
    with torch.no_grad():
        model.transformer.h[0].attn.c_attn.weight[:, 64:72] = 0
        model.transformer.h[0].attn.c_attn.bias[64:72] = 0
    table = table_of(model)
    assert table.status[0] == "dead" and np.isnan(table.pr[0])
    assert (table.status[1:] == "ok").all()
