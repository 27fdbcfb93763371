"""The last layer's feed-forward at the query's row alone: same numbers, and off where it would not be safe."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from spectral_monitor.capture import Subject
from spectral_monitor.probe import induction_probe
from spectral_monitor.shortcut import parts_behind_attention, query_row_only
from tests.models import TINY, tiny_llama


@pytest.fixture(params=sorted(TINY))
def model(request):
    torch.manual_seed(0)
    return TINY[request.param]().eval()


def test_the_same_numbers_with_and_without(model):
    probe = induction_probe(24, 32, vocabulary=100)
    subject = Subject(model, probe)
    assert len(subject._behind_attention) == 1
    short = subject.read(probe, 8, 5, ("null",))
    subject._behind_attention = ()
    whole = subject.read(probe, 8, 5, ("null",))
    torch.testing.assert_close(
        torch.from_numpy(short.examples.logprob), torch.from_numpy(whole.examples.logprob), rtol=1e-5, atol=1e-5
    )
    for ours, theirs in zip(short.blocks, whole.blocks, strict=True):
        for a, b in zip(ours.tensors(), theirs.tensors(), strict=True):
            assert torch.equal(a, b)


def test_the_feed_forward_runs_on_one_row(model):
    probe = induction_probe(4, 32, vocabulary=100)
    subject = Subject(model, probe)
    seen = []
    part = parts_behind_attention(subject.anatomy)[0]
    handle = part.register_forward_hook(lambda module, args, output: seen.append(args[0].shape[1]))
    subject.read(probe, 4)
    handle.remove()
    assert seen == [1]
    assert not any(module._forward_pre_hooks for module in model.modules())


class MixesPositions(nn.Module):
    """A feed-forward that looks at other positions: with the query's row alone it would be wrong."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inner(hidden) + hidden.cumsum(1)


def test_off_where_the_last_layer_mixes_positions():
    torch.manual_seed(0)
    model = tiny_llama()
    model.model.layers[-1].mlp = MixesPositions(model.model.layers[-1].mlp)
    subject = Subject(model, induction_probe(4, 32, vocabulary=100))
    assert subject._behind_attention == ()


def test_hooks_go_also_after_an_exception(model):
    parts = parts_behind_attention(Subject(model, induction_probe(4, 32, vocabulary=100)).anatomy)
    with pytest.raises(RuntimeError, match="boom"), query_row_only(parts, lambda: torch.tensor([0])):
        raise RuntimeError("boom")
    assert not any(module._forward_pre_hooks for module in model.modules())
