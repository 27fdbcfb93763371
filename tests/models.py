"""Tiny models for tests: random ones, and one that learned induction (see ``tests/data/README.md``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"


def tiny_llama(**changes: Any) -> Any:
    """Random Llama: 3 layers, 4 query heads of size 16, 2 key/value heads, vocabulary 100."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **{
            "vocab_size": 100,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            **changes,
        }
    )
    return LlamaForCausalLM(config).eval()


def tiny_gpt2(**changes: Any) -> Any:
    """Random GPT-2: 2 layers, 4 heads of size 8, dropout 0.1, vocabulary 100."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        **{
            "vocab_size": 100,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 64,
            "bos_token_id": 0,
            "eos_token_id": 0,
            **changes,
        }
    )
    return GPT2LMHeadModel(config)


def tiny_gpt_neox() -> Any:
    """Random GPT-NeoX with parallel residuals: 2 layers, 4 heads of size 8, vocabulary 100."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(
        vocab_size=100,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=64,
        use_parallel_residual=True,
    )
    return GPTNeoXForCausalLM(config)


#: The three ways to lay out a block that most others follow.
TINY = {"gpt2": tiny_gpt2, "llama": tiny_llama, "gpt_neox": tiny_gpt_neox}


def trained_model() -> Any:
    """The demo's recipe, trained (seed 0, 700 steps): four or five of layer 1's twelve heads do induction.

    ``circuit_heads`` on the model lists them.
    """
    import json

    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(DATA / "emergence", dtype=torch.float32).eval()
    model.circuit_heads = json.loads((DATA / "emergence" / "circuit.json").read_text())
    return model
