"""The fast path against the slow textbook path, and what capture leaves behind (issue 2, recipe sections 2 to 4)."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from spectral_monitor.capture import Ablation, Subject, default_batch_size
from spectral_monitor.guest import guest
from spectral_monitor.heads import Head
from spectral_monitor.observation import HeadTable
from spectral_monitor.reading import head_table
from spectral_monitor.screen import Thresholds
from tests.architectures.families import FAMILIES, family
from tests.architectures.sweep import captured
from tests.architectures.textbook import Textbook, class_means, rank_by_svd, textbook, without_head
from tests.architectures.tiny import tiny_probe

PROBE = tiny_probe()


class Case:
    """One family: the model, its slow reading, its fast reading."""

    def __init__(self, name: str) -> None:
        self.model: Any = family(name)
        self.slow: Textbook = textbook(self.model, PROBE)
        self.subject = Subject(self.model, PROBE)
        self.reading = self.subject.read(PROBE, batch_size=3)
        self.table: HeadTable = head_table(self.reading, PROBE, "others", Thresholds())


@pytest.fixture(scope="module", params=list(FAMILIES))
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    yield Case(request.param)


def test_all_heads_are_found(case: Case) -> None:
    assert case.slow.layers == [0, 1]
    expected = [Head(layer, head) for layer, rows in enumerate(case.slow.rows) for head in range(rows.shape[1])]
    assert list(case.table) == expected


def test_attention_of_every_class_equals_eager_attention(case: Case) -> None:
    for layer, rows in enumerate(case.slow.rows):
        inside = case.table.layer == layer
        for name, means in class_means(rows, PROBE).items():
            np.testing.assert_allclose(case.table.attention[name][inside], means.numpy(), rtol=0, atol=1e-6)


def test_rank_equals_one_svd_a_head(case: Case) -> None:
    slow = [rank_by_svd(rows[:, head]) for rows in case.slow.outputs for head in range(rows.shape[1])]
    np.testing.assert_allclose(case.table.pr, slow, rtol=1e-5)
    assert (case.table.status == "ok").all()


def test_sink_mass_is_what_the_row_lacks(case: Case) -> None:
    lacking = torch.cat([1 - rows.sum(-1).mean(0) for rows in case.slow.rows])
    np.testing.assert_allclose(case.table.sink, lacking.numpy(), atol=1e-6)
    if case.model.config.model_type == "gpt_oss":
        assert (case.table.sink > 0.01).all()
    else:
        assert (case.table.sink == 0).all()


def test_logits_are_equal_to_the_bit_while_attention_is_watched(case: Case) -> None:
    tokens, query = torch.from_numpy(PROBE.tokens), torch.from_numpy(PROBE.query)
    with guest(case.model):
        plain = case.subject.logits(tokens, query)
    _, watched = captured(case.subject, PROBE)
    assert torch.equal(watched, plain)
    expected = plain.double().log_softmax(-1)[torch.arange(PROBE.rows), torch.from_numpy(PROBE.target)]
    np.testing.assert_allclose(case.reading.examples.logprob, expected.numpy(), atol=1e-5)


def test_ablation_equals_zeroed_columns_of_the_output_projection(case: Case) -> None:
    heads = list(case.table)
    conditions = [Ablation(str(head), frozenset([head])) for head in heads]
    baseline, *ablated = case.subject.run_conditions(PROBE, [Ablation("baseline"), *conditions], batch_size=4)
    index = torch.arange(PROBE.rows)
    for (layer, head), examples in zip(heads, ablated, strict=True):
        twin: Any = without_head(case.model, case.slow.projections[layer], head, case.slow.rows[layer].shape[1])
        with torch.no_grad():
            logits = twin(torch.from_numpy(PROBE.tokens)).logits[index, torch.from_numpy(PROBE.query)].double()
        expected = logits.log_softmax(-1)[index, torch.from_numpy(PROBE.target)]
        np.testing.assert_allclose(examples.logprob, expected.numpy(), atol=2e-6, err_msg=f"L{layer}H{head}")
        assert np.abs(examples.logprob - baseline.logprob).max() > 1e-4, f"L{layer}H{head} changes nothing"


def test_mean_ablation_puts_the_mean_over_all_rows_of_each_position(case: Case) -> None:
    layer = int(case.table.layer[-1])
    means = case.subject.mean_outputs(PROBE, [layer], batch_size=3)
    name = case.slow.projections[layer]
    kept: list[torch.Tensor] = []
    handle = case.model.get_submodule(name).register_forward_pre_hook(lambda module, args: kept.append(args[0].clone()))
    with torch.no_grad():
        case.model(torch.from_numpy(PROBE.tokens))
    handle.remove()
    outputs = kept[0].view(PROBE.rows, PROBE.length, -1, means[layer].shape[-1]).double()
    torch.testing.assert_close(means[layer], outputs.mean(0), rtol=1e-5, atol=1e-7)
    head = Head(layer, 1)
    (examples,) = case.subject.run_conditions(PROBE, [Ablation("mean", frozenset([head]))], means=means)

    def mean_in(module: Any, args: Any) -> Any:
        value = args[0].clone()
        size = means[layer].shape[-1]
        value.view(PROBE.rows, PROBE.length, -1, size)[:, :, 1] = means[layer][:, 1].to(value.dtype)
        return (value, *args[1:])

    twin = copy.deepcopy(case.model)
    twin.get_submodule(name).register_forward_pre_hook(mean_in)
    index = torch.arange(PROBE.rows)
    with torch.no_grad():
        logits = twin(torch.from_numpy(PROBE.tokens)).logits[index, torch.from_numpy(PROBE.query)].double()
    expected = logits.log_softmax(-1)[index, torch.from_numpy(PROBE.target)]
    np.testing.assert_allclose(examples.logprob, expected.numpy(), atol=2e-6)


def test_micro_batches_do_not_change_the_numbers(case: Case) -> None:
    whole = head_table(case.subject.read(PROBE, batch_size=64), PROBE, "others", Thresholds())
    np.testing.assert_allclose(whole.pr, case.table.pr, rtol=1e-5)
    for name, values in whole.attention.items():
        np.testing.assert_allclose(values, case.table.attention[name], atol=1e-6)


@pytest.mark.parametrize(
    ("device", "length", "rows"), [("cpu", 64, 32), ("cpu", 256, 8), ("cpu", 8192, 1), ("cuda", 256, 64)]
)
def test_a_micro_batch_holds_as_many_tokens_as_its_device_likes(device: str, length: int, rows: int) -> None:
    assert default_batch_size(torch.device(device), length) == rows
