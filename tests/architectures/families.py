"""The ten families that the core is held against in every test run."""

from __future__ import annotations

from typing import Any

from tests.architectures.tiny import VOCABULARY, build

_COMMON = {"vocab_size": VOCABULARY, "initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_LLAMA = _COMMON | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}

#: name -> (model type, settings).
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", _COMMON | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "gpt_neox": ("gpt_neox", {key: value for key, value in _LLAMA.items() if key != "num_key_value_heads"}),
    "llama grouped-query": ("llama", _LLAMA),
    "olmo": ("olmo", _LLAMA),
    "olmo2": ("olmo2", _LLAMA),
    "olmoe": ("olmoe", _LLAMA | _EXPERTS),
    "qwen3 head_dim": ("qwen3", _LLAMA | {"head_dim": 16}),
    "gemma2": ("gemma2", _LLAMA | {"head_dim": 8, "sliding_window": 8, "attn_logit_softcapping": 5.0}),
    "gemma3": ("gemma3_text", _LLAMA | {"head_dim": 8, "sliding_window": 8, "sliding_window_pattern": 2}),
    "gpt_oss": ("gpt_oss", _LLAMA | {"head_dim": 8, "sliding_window": 8, "num_local_experts": 4}),
}


def family(name: str, **changes: Any) -> Any:
    """A tiny random model of a family.

    Gemma 2 is built eager in front of transformers 5.24: its SDPA path drops the softcap there (seen in 5.1.0), and the
    self-check refuses it.
    """
    from transformers import AutoConfig, __version__

    kind, settings = FAMILIES[name]
    if kind == "gemma2" and tuple(int(part) for part in __version__.split(".")[:2]) < (5, 24):
        changes = {"attn_implementation": "eager"} | changes
    return build(AutoConfig.for_model(kind, **(settings | changes)))
