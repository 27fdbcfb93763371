"""One checkpoint is loaded right, or refused with one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from spectral_monitor.errors import LoadError
from spectral_monitor.replay.loading import choose_weights, files_to_fetch, load_model

from .models import save, save_tokenizer, tiny_config, tiny_model

#: Name of the output layer's weights in a saved GPT-NeoX checkpoint.
HEAD = "embed_out.weight"


def test_loads_a_folder_with_its_own_weights(tmp_path: Path) -> None:
    model = tiny_model(3)
    save_tokenizer(save(model, tmp_path / "m"), size=60, special=(0, 1))
    loaded = load_model(tmp_path / "m")
    assert loaded.dtype == "float32"
    assert not loaded.model.training
    assert loaded.files == ("model.safetensors",)
    assert loaded.commit is None
    assert loaded.tokenizer_special_ids == (0, 1)
    assert loaded.tokenizer_size == 60
    for name, value in model.state_dict().items():
        assert torch.equal(value, loaded.model.state_dict()[name]), name


def test_half_precision_checkpoint_is_measured_in_float32_and_says_so(tmp_path: Path) -> None:
    save(tiny_model().half(), tmp_path)
    loaded = load_model(tmp_path)
    assert loaded.dtype == "float32"
    assert any("float32 by default" in note for note in loaded.notes)
    assert load_model(tmp_path, dtype="auto").dtype == "float16"
    assert load_model(tmp_path, dtype="bfloat16").dtype == "bfloat16"


def test_large_models_default_to_bfloat16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tiny_model(), tmp_path)
    monkeypatch.setattr("spectral_monitor.replay.loading.FLOAT32_BELOW", 1000)
    assert load_model(tmp_path).dtype == "bfloat16"


def test_shards_are_joined_and_checked_against_their_index(tmp_path: Path) -> None:
    model = tiny_model(1)
    save(model, tmp_path, shard="20KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2
    loaded = load_model(tmp_path)
    assert loaded.files == tuple(path.name for path in shards)
    assert torch.equal(loaded.model.get_output_embeddings().weight, model.get_output_embeddings().weight)

    shards[1].rename(tmp_path / "elsewhere")
    with pytest.raises(LoadError, match=f"{shards[1].name} is named in .* and is not there"):
        load_model(tmp_path)


@pytest.mark.parametrize(("content", "said"), [(b"", "is empty"), (b"half", "cut off or damaged")])
def test_damaged_weights_are_refused(tmp_path: Path, content: bytes, said: str) -> None:
    save(tiny_model(), tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2] if content else b"")
    with pytest.raises(LoadError, match=said) as caught:
        load_model(tmp_path)
    assert "\n" not in str(caught.value)


def test_tensor_named_in_the_index_and_held_by_no_shard(tmp_path: Path) -> None:
    save(tiny_model(), tmp_path, shard="20KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    name, shard = next(iter(index["weight_map"].items()))
    tensors = load_file(tmp_path / shard)
    del tensors[name]
    save_file(tensors or {"x": torch.zeros(1)}, tmp_path / shard)
    with pytest.raises(LoadError, match="in no shard"):
        load_model(tmp_path)


def test_pickles_only_where_asked_for_and_never_code(tmp_path: Path) -> None:
    model = tiny_model(2)
    save(model, tmp_path, pickled=True, safetensors=False)
    with pytest.raises(LoadError, match="--allow-pickle"):
        load_model(tmp_path)
    loaded = load_model(tmp_path, allow_pickle=True)
    assert loaded.files == ("pytorch_model.bin",)
    assert torch.equal(loaded.model.get_output_embeddings().weight, model.get_output_embeddings().weight)

    torch.save({HEAD: tmp_path}, tmp_path / "pytorch_model.bin")  # a Path needs code to come back
    with pytest.raises(LoadError, match="cannot be read as plain weights"):
        load_model(tmp_path, allow_pickle=True)


def test_one_format_only_safetensors_first() -> None:
    both = ["config.json", "model.safetensors", "pytorch_model.bin", "tf_model.h5", "tokenizer.json", "modeling_x.py"]
    plan = choose_weights(both, "x", allow_pickle=True)
    assert (plan.format, plan.files) == ("safetensors", ("model.safetensors",))
    assert files_to_fetch(both, plan, code=False) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert "modeling_x.py" in files_to_fetch(both, plan, code=True)
    with pytest.raises(LoadError, match="holds no weights"):
        choose_weights(["config.json", "optimizer.pt"], "x", allow_pickle=True)
    with pytest.raises(LoadError, match="--gguf-file"):
        choose_weights(["a.gguf"], "x")
    with pytest.raises(LoadError, match="an adapter, not a model"):
        choose_weights(["adapter_config.json", "adapter_model.safetensors"], "x")


def _rewrite(folder: Path, change) -> None:  # type: ignore[no-untyped-def]
    tensors = change(load_file(folder / "model.safetensors"))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: {k: v for k, v in t.items() if k != HEAD}, "1 missing in the checkpoint"),
        (lambda t: t | {"extra.weight": torch.zeros(2)}, "1 unknown to the model"),
        (lambda t: t | {HEAD: torch.zeros(65, 32)}, "(another shape|mismatch)"),
    ],
)
def test_tensors_that_do_not_fit_stop_the_checkpoint(tmp_path: Path, change, said: str) -> None:  # type: ignore[no-untyped-def]
    save(tiny_model(), tmp_path)
    _rewrite(tmp_path, change)
    with pytest.raises(LoadError, match=said) as caught:
        load_model(tmp_path)
    assert "\n" not in str(caught.value)


def test_tied_weights_and_old_buffers_are_no_fault(tmp_path: Path) -> None:
    model = tiny_model(4, tie_word_embeddings=True)
    save(model, tmp_path)
    assert HEAD not in load_file(tmp_path / "model.safetensors")
    _rewrite(tmp_path, lambda t: t | {"gpt_neox.layers.0.attention.masked_bias": torch.zeros(())})
    loaded = load_model(tmp_path)
    assert torch.equal(loaded.model.get_output_embeddings().weight, model.gpt_neox.embed_in.weight)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_wrapper_prefix_is_taken_off_and_reported(tmp_path: Path, prefix: str) -> None:
    model = tiny_model(5)
    save(model, tmp_path)
    _rewrite(tmp_path, lambda t: {prefix + k: v for k, v in t.items()})
    loaded = load_model(tmp_path)
    assert any("wrapper prefix" in note for note in loaded.notes)
    for name, value in model.state_dict().items():
        assert torch.equal(value, loaded.model.state_dict()[name]), name


def test_accelerate_state_takes_its_configuration_from_where_it_is_given(tmp_path: Path) -> None:
    model = tiny_model(6)
    state = save(model, tmp_path / "states" / "step_360")
    (state / "config.json").unlink()
    with pytest.raises(LoadError, match="--config"):
        load_model(state)
    other = tmp_path / "other"
    model.config.save_pretrained(other)
    assert torch.equal(
        load_model(state, config=other).model.get_output_embeddings().weight, model.get_output_embeddings().weight
    )
    model.config.save_pretrained(state.parent)
    assert any("parent folder" in note for note in load_model(state).notes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "secret_internal"}, "does not know its model type 'secret_internal'"),
        (
            {"model_type": "custom", "auto_map": {"AutoConfig": "configuration_custom.CustomConfig"}},
            "--trust-remote-code",
        ),
        ({"model_type": "vit"}, "no causal language model"),
    ],
)
def test_configurations_that_cannot_be_used(tmp_path: Path, changes: dict[str, object], said: str) -> None:
    save(tiny_model(), tmp_path)
    raw = {**tiny_config().to_dict(), **changes}
    (tmp_path / "config.json").write_text(json.dumps(raw, default=str))
    with pytest.raises(LoadError, match=said):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"model": "./nowhere"}, "does not exist"),
        ({"model": "a b c"}, "neither a folder"),
        ({"model": ".", "dtype": "float31"}, "unknown dtype"),
        ({"model": ".", "device": "tpu9z"}, "unknown device"),
        ({"model": ".", "device": "cuda:99"}, "is not there"),
        ({"model": ".", "revision": "step1"}, "has no revisions"),
        ({"model": ".", "device": "cpu", "device_map": "auto"}, "not both"),
        ({"model": ".", "gguf_file": "x.gguf"}, "has no file x.gguf"),
    ],
)
def test_wrong_arguments_get_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LoadError, match=said) as caught:
        load_model(**arguments)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_weights_too_large_for_the_device_are_spread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decided by the device's free memory; there is none here, so it is pretended, and the model loads on CPU."""
    save(tiny_model(1), tmp_path)
    monkeypatch.setattr("spectral_monitor.replay.loading._fits", lambda device, parameters, dtype: parameters < 1000)
    loaded = load_model(tmp_path, device="cpu")
    assert any("spread over all devices" in note for note in loaded.notes)
    assert torch.equal(loaded.model.get_output_embeddings().weight, tiny_model(1).get_output_embeddings().weight)


def test_gguf_file_is_loaded_with_its_own_weights(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    file = tmp_path / "step40.gguf"
    weights = write_gguf(gguf, file)
    for loaded in (load_model(file), load_model(tmp_path, gguf_file=file.name)):
        assert loaded.files == (file.name,)
        assert loaded.dtype == "float32"
        assert any("quantized file" in note for note in loaded.notes)
        state = loaded.model.state_dict()
        assert torch.equal(state["model.embed_tokens.weight"], torch.from_numpy(weights["token_embd.weight"]))
        assert torch.equal(state["model.layers.1.mlp.up_proj.weight"], torch.from_numpy(weights["blk.1.ffn_up.weight"]))
        assert 1 in loaded.tokenizer_special_ids


def write_gguf(gguf, file: Path, seed: int = 0) -> dict[str, np.ndarray]:  # type: ignore[no-untyped-def]
    """A Llama of two layers, width 32, 64 tokens, as llama.cpp's converter would write it."""
    draw = np.random.default_rng(seed)
    shapes = {"token_embd.weight": (64, 32), "output.weight": (64, 32), "output_norm.weight": (32,)}
    for layer in range(2):
        shapes |= {f"blk.{layer}.attn_{part}.weight": (32, 32) for part in ("q", "k", "v", "output")}
        shapes |= {f"blk.{layer}.ffn_gate.weight": (48, 32), f"blk.{layer}.ffn_up.weight": (48, 32)}
        shapes |= {f"blk.{layer}.ffn_down.weight": (32, 48)}
        shapes |= {f"blk.{layer}.attn_norm.weight": (32,), f"blk.{layer}.ffn_norm.weight": (32,)}
    weights = {name: draw.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(64)
    writer.add_rope_dimension_count(8)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"t{index}" for index in range(64)])
    writer.add_token_scores([0.0] * 64)
    writer.add_token_types([3 if index < 2 else 1 for index in range(64)])
    for name, value in weights.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights
