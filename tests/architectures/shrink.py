"""A tiny configuration of any causal-LM family, made from the family's own defaults by rules of size.

Every integer of a known name is replaced; lists a layer long are left to the family to make again. What the rules get
wrong is put right in ``OVERRIDES``, one line a family.
"""

from __future__ import annotations

from typing import Any

from tests.architectures.tiny import VOCABULARY

LAYERS = 3
_WIDTH, _HEADS, _KV_HEADS, _HEAD_DIM, _INNER, _POSITIONS = 32, 4, 2, 8, 48, 64

_BY_VALUE = (
    (
        _WIDTH,
        "hidden_size n_embd d_model embedding_size embedding_dim emb_dim word_embed_proj_dim dim_model "
        "attention_hidden_size lru_width input_embedding_size output_embedding_size backbone_hidden_size "
        "pronunciation_embed_dim shape_embed_dim router_hidden_size",
    ),
    (
        _INNER,
        "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim n_inner dff d_inner dim_ff ffn_hidden_size "
        "feed_forward_size intermediate_size_mlp dense_intermediate_size expert_ffn_hidden_size",
    ),
    (
        LAYERS,
        "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers "
        "num_encoder_layers num_blocks max_window_layers",
    ),
    (
        _HEADS,
        "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads "
        "attention_heads num_decoder_attention_heads num_encoder_attention_heads swa_num_attention_heads "
        "mamba_n_heads n_mamba_heads mamba_num_heads index_n_heads linear_num_value_heads linear_num_heads",
    ),
    (_KV_HEADS, "num_key_value_heads num_kv_heads swa_num_key_value_heads linear_num_key_heads num_query_groups"),
    (
        _HEAD_DIM,
        "head_dim swa_head_dim kv_channels attention_head_size d_head dim_head v_head_dim qk_nope_head_dim "
        "global_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim index_head_dim "
        "local_attn_chunk_length lsh_attn_chunk_length query_pre_attn_scalar",
    ),
    (
        _POSITIONS,
        "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions model_max_length "
        "context_length original_max_position_embeddings",
    ),
    (
        16,
        "moe_intermediate_size shared_expert_intermediate_size kv_lora_rank q_lora_rank "
        "shared_intermediate_size shared_experts_intermediate_size moe_shared_expert_intermediate_size "
        "mamba_d_head mamba_head_dim mamba_headdim mamba_d_state ssm_state_size state_size "
        "hidden_size_per_layer_input laurel_rank prompt_mid_dim expert_intermediate_size mamba_dt_rank time_step_rank "
        "ple_embed_dim hc_lowrank o_lora_rank gated_norm_rank adapter_rank loop_gate_rank index_block_size rel_extent",
    ),
    (
        4,
        "num_experts n_routed_experts num_local_experts moe_num_experts qk_rope_head_dim rotary_dim chunk_size "
        "mamba_chunk_size zero_expert_num index_topk_blocks",
    ),
    (
        8,
        "sliding_window sliding_window_size window_size attention_window_size attention_chunk_size local_attention "
        "keep_window_size index_topk d_rel local_attention_window_len",
    ),
    (
        2,
        "num_experts_per_tok num_experts_per_token moe_k moe_topk top_k_experts sliding_window_pattern "
        "_sliding_window_pattern global_attn_every_n_layers attn_layer_period no_rope_layer_interval o_groups n_groups "
        "full_attention_interval layer_group_size mamba_n_groups mamba_ngroups hc_mult hc_count num_layers_per_stack "
        "intermediate_multiple_size",
    ),
    (
        1,
        "n_group topk_group num_expert_group first_k_dense_replace num_dense_layers attn_layer_offset "
        "num_kv_shared_layers decoder_start_token_id n_shared_experts num_nextn_predict_layers",
    ),
    (
        VOCABULARY,
        "vocab_size vocab_size_per_layer_input decoder_vocab_size pronunciation_vocab_size shape_vocab_size "
        "unpadded_vocab_size",
    ),
)
SIZES = {name: value for value, names in _BY_VALUE for name in names.split()}

_LINEAR = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
_LATENT = {"num_key_value_heads": _HEADS, "head_dim": 4}
_GEMMA4: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "num_kv_shared_layers": 0,
    "head_dim": 4,
    "per_layer_config": {1: {"head_dim": 8}, 2: {"head_dim": 8}},
}
_ASSISTANT = {
    "text_config": _GEMMA4
    | {"num_hidden_layers": LAYERS, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": LAYERS}
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_INDEXED = _LINEAR | {
    "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
    "rope_parameters": _ROPE,
}
_DOTS3 = {"head_dim": 12, "per_layer_config": {}}

_ZAMBA = {
    "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
    "attention_hidden_size": 2 * _WIDTH,
    "attention_head_dim": 2 * _WIDTH // _HEADS,
}

#: ``...`` leaves a setting out; a dict is merged into the family's own.
OVERRIDES: dict[str, dict[str, Any]] = {
    "big_bird": {"attention_type": "original_full"},
    "bamba": {"attn_layer_indices": [1]},
    "granite": {"attention_multiplier": 0.25},
    "granitemoe": {"attention_multiplier": 0.25},
    "granitemoeshared": {"attention_multiplier": 0.25},
    "blt": {"encoder_hash_byte_group_vocab": 32},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {"sliding_attention": _ROPE, "full_attention": _ROPE},
    },
    "dbrx": {"attn_config": {"kv_n_heads": _KV_HEADS, "clip_qkv": 8, "rope_theta": 10000.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "diffllama": {"attention_dropout": 0.0},
    "dory": {
        "layer_types": ["sliding_attention", "mlp", "full_attention", "mlp", "sliding_attention", "mlp"],
        "num_hidden_layers": 6,
        "n_input_layers": 2,
        "n_recurrent_layers": 2,
        "n_output_layers": 2,
    },
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2},
    "dots3_note": {"text_config": _DOTS3, "vision_config": {"adapter_in_dim": _WIDTH, "adapter_input_size": _WIDTH}},
    "dots3_note_text": _DOTS3,
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma4": {"text_config": _GEMMA4},
    "gemma4_text": _GEMMA4,
    "gemma4_unified": {"text_config": _GEMMA4},
    "gemma4_unified_text": _GEMMA4,
    "gemma4_assistant": _ASSISTANT,
    "gemma4_unified_assistant": _ASSISTANT,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "num_layers": 4},
    "granitemoehybrid": _LINEAR,
    "hrm_text": {"num_hidden_layers": 2, "num_layers_per_stack": None},
    "hunyuan_v1_dense": {"head_dim": _HEAD_DIM},
    "hunyuan_v1_moe": {"head_dim": _HEAD_DIM},
    "kimi_linear": _LINEAR,
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "mamba2": {"head_dim": 16},
    "ministral": {"head_dim": _HEAD_DIM},
    "nemotron": {"num_key_value_heads": _KV_HEADS},
    "qwen3_5_moe_text": _LINEAR,
    "qwen3_5_text": _LINEAR,
    "qwen3_next": _LINEAR,
    "qwen3_5": {"text_config": _LINEAR},
    "qwen3_5_moe": {"text_config": _LINEAR},
    "qwen4_exp": {"text_config": _INDEXED},
    "qwen4_exp_text": _INDEXED,
    "reformer": {"axial_pos_shape": [8, 8], "axial_pos_embds_dim": [8, 24], "attn_layers": ["local", "lsh", "local"]},
    "xmod": {"default_language": "en_XX"},
    "xlm": {"causal": True},
    "zamba": _ZAMBA,
    "zamba2": _ZAMBA,
    "zaya": {"num_experts_per_tok": 1},
}


def tiny_settings(defaults: dict[str, Any]) -> dict[str, Any]:
    """Settings to build a small configuration from, given the family's default settings."""
    settings: dict[str, Any] = {}
    for name, value in defaults.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if name in SIZES and number:
            settings[name] = min(SIZES[name], value) if name.endswith("key_value_heads") else SIZES[name]
        elif name.endswith(("_token_id", "_token_index")) and number:
            settings[name] = value if value < 4 else 3
        elif name.endswith("_config") and isinstance(value, dict):
            settings[name] = tiny_settings(value)
            if "model_type" in value:
                settings[name]["model_type"] = value["model_type"]
        elif isinstance(value, float) and ("dropout" in name or name.startswith("init")):
            settings[name] = 0.1
    if "is_decoder" in defaults:
        settings["is_decoder"] = True
    if settings.get("kv_lora_rank"):
        settings |= {name: value for name, value in _LATENT.items() if name in defaults}
    for name in ("layer_types", "mlp_layer_types"):
        kinds = list(dict.fromkeys(defaults.get(name) or ()))
        if len(kinds) > 1:
            settings[name] = [kinds[layer % len(kinds)] for layer in range(LAYERS)]
    return settings


def tiny_config(model_type: str, **changes: Any) -> Any:
    """A small configuration of the family, as its own class makes it."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    try:
        defaults = kind().to_dict()
    except Exception:
        defaults = {}
    settings = tiny_settings(defaults)
    for name, value in (OVERRIDES.get(model_type, {}) | changes).items():
        if isinstance(value, dict) and isinstance(settings.get(name), dict):
            settings[name] = settings[name] | value
        else:
            settings[name] = value
    settings = {name: value for name, value in settings.items() if value is not ...}
    return kind(**settings)
