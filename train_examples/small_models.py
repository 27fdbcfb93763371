"""GPT-2 and GPT-NeoX from scratch, as the recipes and the reference run build them: no dropout, no special tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FAMILIES = ("gpt2", "gpt_neox")


def small_model(
    family: str,
    *,
    vocabulary: int,
    length: int,
    layers: int,
    heads: int,
    width: int,
    init_std: float,
    mlp_width: int | None = None,
) -> PreTrainedModel:
    """The untrained model; its weights follow from torch's random state.

    Args:
        family: ``gpt2`` (learned absolute positions) or ``gpt_neox`` (rotary positions, as Pythia).
        vocabulary, length: token ids, and the longest row.
        layers, heads, width: the shape; heads are counted a layer.
        init_std: standard deviation of the initial weights.
        mlp_width: of the feed-forward layers; None: four times ``width``.
    """
    from transformers import GPT2Config, GPT2LMHeadModel, GPTNeoXConfig, GPTNeoXForCausalLM

    if family == "gpt2":
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=vocabulary,
                n_positions=length,
                n_embd=width,
                n_layer=layers,
                n_head=heads,
                n_inner=mlp_width,
                initializer_range=init_std,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                bos_token_id=None,
                eos_token_id=None,
                use_cache=False,
            )
        )
    return GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=vocabulary,
            max_position_embeddings=length,
            hidden_size=width,
            intermediate_size=mlp_width or 4 * width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            initializer_range=init_std,
            bos_token_id=None,
            eos_token_id=None,
            use_cache=False,
        )
    )
