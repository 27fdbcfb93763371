"""A probe leaves a model, and the process around it, as it found them."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spectral_monitor import anatomy, capture
from spectral_monitor.attach.trainer import SpectralMonitorCallback
from spectral_monitor.capture import Ablation, Subject
from spectral_monitor.guest import guest, unwrap
from spectral_monitor.heads import Head
from tests.attach import tiny

HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


def hooks(model: nn.Module) -> list[tuple[str, str, list[Any]]]:
    return [
        (name, kind, list(getattr(module, kind).values()))
        for name, module in model.named_modules()
        for kind in HOOKS
        if getattr(module, kind)
    ]


def flags(model: nn.Module) -> list[tuple[str, bool]]:
    return [(name, module.training) for name, module in model.named_modules()]


def everything(model: nn.Module, directory: Path) -> dict[str, Any]:
    """All that a probe could leave behind."""
    model.save_pretrained(directory)
    return {
        "flags": flags(model),
        "hooks": hooks(model),
        "config": model.config.to_dict(),
        "files": {path.name: path.read_bytes() for path in sorted(directory.iterdir())},
        "attributes": {name: sorted(module.__dict__) for name, module in model.named_modules()},
        "weights": tiny.weights(model),
        "buffers": [(name, id(buffer), buffer.clone()) for name, buffer in model.named_buffers()],
        "requires_grad": [(name, p.requires_grad) for name, p in model.named_parameters()],
        "gradients": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "random": tiny.random_states(),
        "grad_enabled": torch.is_grad_enabled(),
        "autocast": (torch.is_autocast_cache_enabled(), torch.is_autocast_enabled("cpu")),
        "registry": (
            anatomy.interface_calls.__name__,
            vars(__import__("transformers").modeling_utils.AttentionInterface)["get_interface"],
        ),
    }


class Broken(RuntimeError):
    pass


def breaking(model: nn.Module) -> Any:
    """A hook of the user's in the middle of the model that raises on every call but the first two.

    The first two forward passes are those of the model's examination; the probe itself comes after them.
    """
    calls = 0

    def hook(module: nn.Module, args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > 2:
            raise Broken("a hook failed in the middle of the probe")

    return model.transformer.h[1].register_forward_pre_hook(hook)


def set_train(model: nn.Module) -> None:
    model.train()


def set_frozen_part(model: nn.Module) -> None:
    model.train()
    model.transformer.h[0].attn.resid_dropout.eval()


def set_eval(model: nn.Module) -> None:
    model.eval()


MODES = pytest.mark.parametrize("mode", [set_train, set_frozen_part, set_eval])


@MODES
def test_everything_is_as_before_after_a_look_with_a_causal_check(mode: Any, tmp_path: Path) -> None:
    model = tiny.gpt2()
    mode(model)
    model(torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    before = everything(model, tmp_path / "before")
    look = tiny.monitor(tmp_path / "run", kind=tiny.Forced).observe(model, 1, 10.0)
    assert look.verdicts and all(verdict.draws for verdict in look.verdicts)
    assert tiny.difference(before, everything(model, tmp_path / "after")) == []


@MODES
def test_everything_is_as_before_after_a_probe_that_raised(mode: Any, tmp_path: Path) -> None:
    model = tiny.gpt2()
    mode(model)
    handle = breaking(model)
    before = everything(model, tmp_path / "before")
    with pytest.raises(Broken):
        tiny.monitor(tmp_path / "run").observe(model, 1, 10.0)
    assert tiny.difference(before, everything(model, tmp_path / "after")) == []
    handle.remove()


def test_everything_is_as_before_after_an_ablation_that_raised(tmp_path: Path) -> None:
    model = tiny.gpt2(layers=3).train()
    subject = Subject(model, tiny.probe())
    before = everything(model, tmp_path / "before")
    calls = 0

    def fail(module: nn.Module, args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > 3:
            raise Broken

    handle = model.transformer.h[2].register_forward_pre_hook(fail)
    with pytest.raises(Broken):
        subject.run_conditions(
            tiny.probe(), [Ablation("baseline"), *(Ablation("x", frozenset({Head(2, h)})) for h in range(4))]
        )
    handle.remove()
    assert tiny.difference(before, everything(model, tmp_path / "after")) == []


def test_neither_building_a_monitor_nor_a_probe_touches_a_random_stream(tmp_path: Path) -> None:
    model = tiny.gpt2()
    before = tiny.random_states()
    monitor = tiny.monitor(tmp_path / "run")
    assert tiny.random_states() == before
    monitor.prepare(model)
    assert tiny.random_states() == before
    monitor.observe(model, 0, 0.0)
    assert tiny.random_states() == before


def test_random_streams_are_put_back_also_when_the_model_draws(tmp_path: Path) -> None:
    model = tiny.gpt2()
    before = tiny.random_states()
    with guest(model):
        torch.rand(5)
    assert tiny.random_states() == before


def test_same_numbers_in_train_mode_with_attention_dropout(tmp_path: Path) -> None:
    model = tiny.gpt2(dropout=0.5).train()
    looks = [tiny.monitor(None, check=None).observe(model, 1, 1.0).observations[0] for _ in range(3)]
    model.eval()
    looks.append(tiny.monitor(None, check=None).observe(model, 1, 1.0).observations[0])
    for look in looks[1:]:
        assert look.heads.pr.tolist() == looks[0].heads.pr.tolist()
        assert look.heads.attention["induction"].tolist() == looks[0].heads.attention["induction"].tolist()


# -- nothing stays behind -------------------------------------------------------------------------------------------


def live_tensors() -> int:
    gc.collect()
    return sum(isinstance(item, Tensor) for item in gc.get_objects())


def test_no_hook_and_no_tensor_stays_over_fifty_probes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.gpt2().train()
    rows: list[weakref.ref[Tensor]] = []
    original = capture._ReadTap.attention_ran

    def watched(self: Any, number: int, row: Any) -> None:
        rows.append(weakref.ref(row[0]))
        original(self, number, row)

    monkeypatch.setattr(capture._ReadTap, "attention_ran", watched)
    monitor = tiny.monitor(None, kind=tiny.Forced)
    monitor.observe(model, 0, 0.0)
    hooks_before, tensors_before = hooks(model), live_tensors()
    for step in range(1, 51):
        if step == 25:
            handle = model.transformer.h[1].attn.register_forward_pre_hook(_raise)
            with pytest.raises(Broken):
                monitor.observe(model, step, float(step))
            handle.remove()
        else:
            monitor.observe(model, step, float(step))
    assert hooks(model) == hooks_before
    assert live_tensors() <= tensors_before
    assert len(rows) > 100
    assert [row for row in rows if row() is not None] == []


def _raise(module: nn.Module, args: Any) -> None:
    raise Broken


# -- autocast, gradients, checkpointing -------------------------------------------------------------------------------


def gradients(model: nn.Module) -> list[Tensor]:
    return [torch.zeros(0) if p.grad is None else p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_probe_inside_a_live_autocast_block_leaves_the_gradients(dtype: torch.dtype, tmp_path: Path) -> None:
    tokens = tiny.rows(4)
    batch = torch.stack([row["input_ids"] for row in tokens])

    def run(look: bool) -> list[Tensor]:
        model = tiny.gpt2().train()
        monitor = tiny.monitor(None)
        torch.manual_seed(5)
        with torch.autocast("cpu", dtype=dtype):
            if look:
                monitor.observe(model, 0, 0.0)
            loss = model(batch, labels=batch).loss
            if look:
                monitor.observe(model, 1, 1.0)
            second = model(batch, labels=batch).loss
        (loss + second).backward()
        return gradients(model)

    plain, watched = run(False), run(True)
    assert any(gradient.abs().sum() > 0 for gradient in plain)
    assert tiny.difference(plain, watched) == []


def test_a_probe_between_backward_and_step_leaves_the_gradients(tmp_path: Path) -> None:
    batch = torch.stack([row["input_ids"] for row in tiny.rows(4)])

    def run(look: bool) -> list[Tensor]:
        model = tiny.gpt2().train()
        torch.manual_seed(5)
        model(batch, labels=batch).loss.backward()
        if look:
            tiny.monitor(None).observe(model, 0, 0.0)
        model(batch, labels=batch).loss.backward()
        return gradients(model)

    assert tiny.difference(run(False), run(True)) == []


@pytest.mark.parametrize("build", [tiny.gpt2, tiny.llama])
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_stays_on_and_does_not_disturb(build: Any, reentrant: bool) -> None:
    plain = build()
    expected = tiny.monitor(None, check=None).observe(plain, 0, 0.0).observations[0]
    model = build().train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    before = model.config.to_dict()
    seen = tiny.monitor(None, check=None).observe(model, 0, 0.0).observations[0]
    assert model.is_gradient_checkpointing and model.config.to_dict() == before
    assert seen.heads.pr.tolist() == expected.heads.pr.tolist()
    assert seen.heads.selectivity["induction"].tolist() == expected.heads.selectivity["induction"].tolist()


def test_buffers_that_a_forward_changes_are_put_back() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = tiny.gpt2()
            self.register_buffer("calls", torch.zeros(1))
            self.register_buffer("last", torch.zeros(1))

        def forward(self, tokens: Tensor) -> Tensor:
            self.calls += 1
            self.last = self.calls.clone()
            return self.inner(tokens, use_cache=False).logits

    model = Counting()
    calls, last = model.calls, model.last
    tiny.monitor(None, check=None).observe(model, 0, 0.0)
    assert model.calls is calls and model.last is last
    assert model.calls.item() == 0 and model.last.item() == 0


def test_tied_embeddings_stay_tied(tmp_path: Path) -> None:
    model = tiny.gpt2()
    assert model.lm_head.weight is model.transformer.wte.weight
    tiny.monitor(tmp_path / "run").observe(model, 0, 0.0)
    assert model.lm_head.weight is model.transformer.wte.weight


# -- compiled models --------------------------------------------------------------------------------------------------


def compile_counters() -> dict[str, int]:
    from torch._dynamo.utils import counters

    return {f"{kind}.{name}": value for kind, found in counters.items() for name, value in found.items()}


@pytest.fixture
def fresh_dynamo() -> Any:
    import torch._dynamo

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("way", ["torch.compile", "module.compile"])
def test_probes_of_a_compiled_model_do_not_recompile_it(way: str, fresh_dynamo: None, tmp_path: Path) -> None:
    batch = torch.stack([row["input_ids"] for row in tiny.rows(4)])
    bare = tiny.llama()
    expected = tiny.monitor(None, check=None).observe(tiny.llama(), 0, 0.0).observations[0]
    if way == "torch.compile":
        model = torch.compile(bare, backend="eager")
    else:
        model = bare
        model.compile(backend="eager")
    model.train()

    def train() -> None:
        model(input_ids=batch, labels=batch).loss.backward()

    train()
    compiled_call = bare.__dict__.get("_compiled_call_impl")
    counters = compile_counters()
    assert counters["stats.unique_graphs"] > 0
    monitor = tiny.monitor(tmp_path / "run", kind=tiny.Forced)
    for number in range(10):
        seen = monitor.observe(model, number, float(number)).observations[0]
        assert seen.heads.pr.tolist() == expected.heads.pr.tolist()
        assert seen.heads.attention["induction"].tolist() == expected.heads.attention["induction"].tolist()
        assert len(seen.heads) == 8
        train()
    assert compile_counters() == counters
    assert bare.__dict__.get("_compiled_call_impl") is compiled_call


def test_wrappers_are_looked_through() -> None:
    model = tiny.gpt2()
    assert unwrap(torch.compile(model, backend="eager")) is model
    assert unwrap(nn.DataParallel(model)) is model


def test_config_file_is_the_same_after_a_probe(tmp_path: Path) -> None:
    for attention in ("sdpa", "eager"):
        model = tiny.llama(attn_implementation=attention)
        model.config.save_pretrained(tmp_path / "before")
        tiny.monitor(None).observe(model, 0, 0.0)
        model.config.save_pretrained(tmp_path / "after")
        before, after = ((tmp_path / name / "config.json").read_text() for name in ("before", "after"))
        assert before == after and json.loads(after)
        assert model.config._attn_implementation == attention
        assert model.config.use_cache is True


@pytest.mark.parametrize(("kind", "said"), [("zero", "ZeRO-3"), ("empty", "holds no elements"), ("fsdp1", "FSDP1")])
def test_weights_that_are_sharded_away_are_refused_and_the_training_goes_on(
    kind: str, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.gpt2()
    if kind == "zero":
        model.lm_head.weight.ds_id = 0
    elif kind == "empty":
        model.extra = torch.nn.Parameter(torch.zeros(0))
    else:
        monkeypatch.setattr("torch.distributed.fsdp.FullyShardedDataParallel", type(model))
    run = tiny.trainer(tmp_path / "out", model, [SpectralMonitorCallback(probes=tiny.probe())], max_steps=2)
    with caplog.at_level("WARNING", logger="spectral_monitor"):
        run.train()
    assert said in caplog.text and run.state.global_step == 2
