"""Conditions that share their prefix, and a forward, have the numbers of conditions that share nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from spectral_monitor.capture import Ablation, Examples, Subject
from spectral_monitor.heads import Head
from spectral_monitor.prefix import Extent, Prefix, PrefixMemory
from spectral_monitor.probe import induction_probe
from spectral_monitor.ranks import Reduction
from tests.models import TINY, tiny_llama

ROWS = 6


@pytest.fixture(params=sorted(TINY))
def model(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    return TINY[request.param]().eval()


def conditions(layer: int) -> list[Ablation]:
    """Intact; heads of this layer; heads of this and the last."""
    return [
        Ablation("intact", frozenset()),
        Ablation("one", frozenset({Head(layer, 0)})),
        Ablation("two", frozenset({Head(layer, 1), Head(1, 3)})),
        Ablation("three", frozenset({Head(layer, 2), Head(1, 1), Head(1, 2)})),
    ]


@contextmanager
def textbook(subject: Subject) -> Iterator[None]:
    """Nothing replayed, no shortcut behind the last attention."""
    behind, kept = subject._behind_attention, Prefix.__init__

    def nothing(self: Prefix, *arguments: Any) -> None:
        kept(self, *arguments)
        self.extent = Extent.NOTHING

    try:
        subject._behind_attention = ()
        Prefix.__init__ = nothing  # type: ignore[method-assign]
        subject._replay = {}
        yield
    finally:
        subject._behind_attention = behind
        Prefix.__init__ = kept  # type: ignore[method-assign]
        subject._replay = {}


def close(first: list[Examples], second: list[Examples]) -> None:
    for ours, theirs in zip(first, second, strict=True):
        np.testing.assert_allclose(ours.logprob, theirs.logprob, atol=2e-6)
        np.testing.assert_allclose(ours.advantage, theirs.advantage, atol=2e-6)


def settled(subject: Subject) -> tuple[Extent, bool]:
    (found,) = subject._replay.values()
    return found


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("mean", [False, True], ids=["zero", "mean"])
def test_layers_and_attention_are_replayed_and_nothing_changes(model: Any, layer: int, mean: bool) -> None:
    probe = induction_probe(ROWS, 32, vocabulary=100)
    subject = Subject(model, probe)
    means = subject.mean_outputs(probe, [0, 1], 4) if mean else None
    with textbook(subject):
        slow = subject.run_conditions(probe, conditions(layer), 4, means)
    fast = subject.run_conditions(probe, conditions(layer), 4, means)
    assert settled(subject) == (Extent.LAYERS_AND_ATTENTION, False)
    close(fast, slow)
    assert len({round(examples.logprob.sum(), 6) for examples in fast}) == 4, "an ablation did nothing"


def test_what_is_shared_runs_once(model: Any) -> None:
    probe = induction_probe(ROWS, 32, vocabulary=100)
    subject = Subject(model, probe)
    subject.run_conditions(probe, conditions(1), ROWS)
    inputs = [
        module
        for name, module in model.named_modules()
        if name.endswith(("attn.c_attn", "self_attn.q_proj", "attention.query_key_value"))
    ][:2]
    calls: list[int] = []
    for number, module in enumerate(inputs):
        module.register_forward_hook(lambda *_, number=number: calls.append(number))
    subject.run_conditions(probe, conditions(1), ROWS)
    assert calls == [0, 1], "up to the ablated heads, the intact model alone"


@pytest.mark.parametrize("limit", [0, 3000, 1 << 20], ids=["nothing fits", "a part fits", "all fits"])
def test_a_memory_saves_the_intact_model_from_round_to_round(model: Any, limit: int) -> None:
    probe = induction_probe(ROWS, 32, vocabulary=100)
    subject = Subject(model, probe)
    once = subject.run_conditions(probe, conditions(1), 2)
    one_batch = ROWS // 3 * 100 * 4 + 3 * ROWS // 3 * 32 * model.config.hidden_size * 4
    memory = PrefixMemory(limit if limit != 3000 else int(1.5 * one_batch))
    calls: list[int] = []
    embedding = model.get_input_embeddings()
    handle = embedding.register_forward_hook(lambda *_: calls.append(1))
    rounds = [subject.run_conditions(probe, conditions(1)[part], 2, memory=memory) for part in (slice(2), slice(2, 4))]
    handle.remove()
    close([*rounds[0], *rounds[1]], once)
    runs_again = {0: 3, 3000: 2, 1 << 20: 0}[limit]
    assert len(calls) == (3 + 3) + (3 * 2 + runs_again), "intact and one condition; two conditions and what did not fit"


def test_conditions_share_a_forward_where_the_batch_has_room(model: Any) -> None:
    probe = induction_probe(ROWS, 32, vocabulary=100)
    subject = Subject(model, probe)
    slow = subject.run_conditions(probe, conditions(0), ROWS)
    subject._replay = {}
    fast = subject.run_conditions(probe, conditions(0), 3 * ROWS)
    assert settled(subject) == (Extent.LAYERS_AND_ATTENTION, True)
    close(fast, slow)
    rows: list[int] = []
    model.get_output_embeddings().register_forward_hook(lambda module, args, output: rows.append(len(output)))
    subject.run_conditions(probe, conditions(0), 2 * ROWS)
    assert rows == [ROWS, 2 * ROWS, ROWS], "the intact model, two conditions, the third"


def test_mean_ablation_of_conditions_that_share_a_forward(model: Any) -> None:
    probe = induction_probe(ROWS, 32, vocabulary=100)
    subject = Subject(model, probe)
    means = subject.mean_outputs(probe, [0, 1], 4)
    close(
        subject.run_conditions(probe, conditions(0), 4 * ROWS, means),
        subject.run_conditions(probe, conditions(0), ROWS, means),
    )


class AddsItsInput:
    """A forward of an attention that does not return what its projection gave."""

    def __init__(self, attention: Any) -> None:
        self.original = attention.forward

    def __call__(self, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        output, *rest = self.original(hidden_states=hidden_states, **kwargs)
        return (output + hidden_states, *rest)


def test_an_attention_that_changes_its_projections_output_is_run() -> None:
    torch.manual_seed(0)
    model = tiny_llama()
    attention = model.model.layers[1].self_attn
    attention.forward = AddsItsInput(attention)
    probe = induction_probe(ROWS, 32, vocabulary=100)
    subject = Subject(model, probe)
    fast = subject.run_conditions(probe, conditions(1), ROWS)
    assert settled(subject) == (Extent.LAYERS, False)
    with textbook(subject):
        close(fast, subject.run_conditions(probe, conditions(1), ROWS))
    assert isinstance(attention.__dict__["forward"], AddsItsInput), "its own forward is put back"


class MixesRows(nn.Module):
    """A feed-forward that looks at the other rows of the batch: conditions must not share one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inner(hidden) + 5 * hidden.mean(0, keepdim=True)


def test_a_model_that_mixes_rows_gets_one_condition_a_forward() -> None:
    torch.manual_seed(0)
    model = tiny_llama()
    model.model.layers[1].mlp = MixesRows(model.model.layers[1].mlp)
    probe = induction_probe(ROWS, 32, vocabulary=100)
    subject = Subject(model, probe)
    fast = subject.run_conditions(probe, conditions(0), 3 * ROWS)
    assert settled(subject) == (Extent.LAYERS_AND_ATTENTION, False)
    with textbook(subject):
        close(fast, subject.run_conditions(probe, conditions(0), ROWS))


def test_every_forward_is_put_back_also_after_an_exception(model: Any) -> None:
    probe = induction_probe(ROWS, 32, vocabulary=100)
    subject = Subject(model, probe)

    def fails(done: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        subject.run_conditions(probe, conditions(1), ROWS, progress=fails)
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_the_extent_goes_down_as_far_as_it_must(model: Any) -> None:
    prefix = Prefix(Subject(model, induction_probe(ROWS, 32, vocabulary=100)).anatomy, [1])
    tried: list[Extent] = []

    def never() -> bool:
        tried.append(prefix.extent)
        raise KeyError("built otherwise")

    prefix.settle(never, Reduction())
    assert tried == [Extent.LAYERS_AND_ATTENTION, Extent.LAYERS] and prefix.extent == Extent.NOTHING
