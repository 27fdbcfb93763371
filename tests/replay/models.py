"""Tiny checkpoints for the replay tests: real ``transformers`` models, written by ``save_pretrained``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM


def tiny_config(**changes: Any) -> GPTNeoXConfig:
    settings: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 32,
        "max_position_embeddings": 64,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    return GPTNeoXConfig(**(settings | changes))


def tiny_model(seed: int = 0, **changes: Any) -> GPTNeoXForCausalLM:
    """A model of its own weights for each seed; the global random state is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GPTNeoXForCausalLM(tiny_config(**changes)).eval()


def save(
    model: Any, folder: Path, *, pickled: bool = False, safetensors: bool = True, shard: str | None = None
) -> Path:
    """Write ``model`` to ``folder`` with safetensors, pickled weights, or both."""
    folder.mkdir(parents=True, exist_ok=True)
    if safetensors:
        model.save_pretrained(folder, **({"max_shard_size": shard} if shard else {}))
    else:
        model.config.save_pretrained(folder)
    if pickled:
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
    return folder


def save_tokenizer(folder: Path, size: int = 60, special: tuple[int, ...] = (0, 1)) -> None:
    """A ``tokenizer.json`` of ``size`` words with some special ids: enough for what the loader reads."""
    tokenizer = {
        "added_tokens": [{"id": item, "content": f"<{item}>", "special": True} for item in special],
        "model": {"type": "WordLevel", "vocab": {f"w{item}": item for item in range(size)}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
