"""Plain torch models of one's own: equal to their own eager numbers, through the monitor, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from spectral_monitor.capture import Ablation, Subject
from spectral_monitor.errors import CaptureError
from spectral_monitor.heads import Head
from spectral_monitor.spectrum import effective_rank_of
from tests.architectures.sweep import captured
from tests.architectures.textbook import rank_by_svd, without_head
from tests.architectures.tiny import lively, tiny_probe
from train_examples.own_models.nano_gpt import GPT, GPTConfig
from train_examples.own_models.rotary_llama import Llama, LlamaConfig, rotate
from train_examples.own_models.train import main

PROBE = tiny_probe()
TOKENS, QUERY = torch.from_numpy(PROBE.tokens), torch.from_numpy(PROBE.query)
INDEX = torch.arange(PROBE.rows)


def nano(**changes: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return lively(GPT(GPTConfig(**changes))).eval()


def llama() -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return lively(Llama(LlamaConfig())).eval()


def nano_rows(model: Any, layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """Eager attention [N, H, T, T] and head outputs [N, T, H, D], written out once more from the weights."""
    attention = model.h[layer].attn
    q, k, v = (part.unflatten(-1, (attention.n_head, -1)).transpose(1, 2) for part in attention.c_attn(x).chunk(3, -1))
    return _attend(q, k, v)


def llama_rows(model: Any, layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
    attention = model.layers[layer].attention
    q, k, v = (w(x).unflatten(-1, (-1, 8)).transpose(1, 2) for w in (attention.wq, attention.wk, attention.wv))
    return _attend(rotate(q), rotate(k).repeat_interleave(2, 1), v.repeat_interleave(2, 1))


def _attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    scores = q.double() @ k.double().transpose(-1, -2) * q.shape[-1] ** -0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(future, -torch.inf).softmax(-1)
    return weights, (weights @ v.double()).transpose(1, 2)


_MODELS: dict[str, Any] = {
    "nanoGPT, SDPA": (nano, nano_rows, "h.{}.attn", "c_proj"),
    "nanoGPT, softmax": (lambda: nano(flash=False), nano_rows, "h.{}.attn", "c_proj"),
    "hand-written Llama": (llama, llama_rows, "layers.{}.attention", "wo"),
}


@pytest.mark.parametrize("name", list(_MODELS))
def test_a_model_of_ones_own_equals_its_own_eager_numbers(name: str) -> None:
    build, eager, path, projection = _MODELS[name]
    model = build()
    inputs: list[Tensor] = []
    handles = [
        model.get_submodule(path.format(layer)).register_forward_pre_hook(lambda m, args: inputs.append(args[0]))
        for layer in range(2)
    ]
    with torch.no_grad():
        plain = model(TOKENS)
        plain = (plain[0][:, -1] if isinstance(plain, tuple) else plain[:, -1]).clone()
        expected = [eager(model, layer, x) for layer, x in enumerate(inputs)]
    for handle in handles:
        handle.remove()
    subject = Subject(model, PROBE)
    assert [(b.layer, b.heads, b.head_dim, b.name) for b in subject.anatomy.blocks] == [
        (layer, 4, 8, path.format(layer)) for layer in range(2)
    ]
    tap, logits = captured(subject, PROBE)
    assert torch.equal(logits, plain)
    for number, (weights, outputs) in enumerate(expected):
        torch.testing.assert_close(tap.rows[number], weights[INDEX, :, QUERY], rtol=0, atol=1e-6)
        slow = [rank_by_svd(outputs[INDEX, QUERY, head]) for head in range(4)]
        np.testing.assert_allclose(effective_rank_of(tap.outputs[number]), slow, rtol=1e-5)
    for layer in range(2):
        (examples,) = subject.run_conditions(PROBE, [Ablation("one", frozenset([Head(layer, 2)]))])
        twin: Any = without_head(model, f"{path.format(layer)}.{projection}", 2, 4)
        with torch.no_grad():
            changed = twin(TOKENS)
        changed = changed[0][:, -1] if isinstance(changed, tuple) else changed[:, -1]
        logprob = changed.double().log_softmax(-1)[INDEX, torch.from_numpy(PROBE.target)]
        np.testing.assert_allclose(examples.logprob, logprob.numpy(), atol=2e-6)


def test_a_forward_of_ones_own_calling_convention() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nano()

        def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
            return {"scores": self.inner(batch["ids"])[0]}

    model = Wrapped()
    with pytest.raises(CaptureError, match="pass forward="):
        Subject(model, PROBE)
    subject = Subject(model, PROBE, forward=lambda m, tokens, mask: m({"ids": tokens})["scores"])
    assert subject.anatomy.layers == (0, 1)


def test_heads_without_a_projection_module_are_refused() -> None:
    model = nano()
    for block in model.h:
        weight = block.attn.c_proj.weight
        block.attn.c_proj = nn.Identity()
        block.attn.w_o = weight
        attend = block.attn.forward
        block.attn.forward = lambda x, attend=attend, weight=weight: attend(x) @ weight.T
    with pytest.raises(CaptureError, match="no output projection was found"):
        Subject(model, PROBE)


def test_interleaved_heads_are_refused() -> None:
    class Interleaved(nn.Module):
        def __init__(self, projection: nn.Module) -> None:
            super().__init__()
            self.projection = projection

        def forward(self, y: Tensor) -> Tensor:
            return self.projection(y.unflatten(-1, (4, 8)).transpose(-1, -2).flatten(-2))

    model = nano()
    for block in model.h:
        block.attn.c_proj = Interleaved(block.attn.c_proj)
    with pytest.raises(CaptureError, match="do not lie side by side"):
        Subject(model, PROBE)


def test_the_training_example_leaves_a_record(tmp_path: Path) -> None:
    from spectral_monitor import RunRecord

    state = torch.get_rng_state()
    main(str(tmp_path / "run"), steps=4)
    torch.set_rng_state(state)
    observations = list(RunRecord.open(tmp_path / "run").observations())
    assert [observation.step for observation in observations] == [0, 1, 2, 3, 4]
    assert len(observations[-1].heads) == 8
