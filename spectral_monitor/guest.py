"""Leave a model exactly as it was found (design, promises 1 and 4)."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn


def unwrap(model: nn.Module) -> nn.Module:
    """The module under the wrappers of ``torch.compile``, DistributedDataParallel and DeepSpeed: what the probe runs.

    A forward of the bare module takes part in no gradient synchronisation and runs uncompiled.
    """
    while True:
        inner = getattr(model, "_orig_mod", None)
        wrapped = isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel))
        if inner is None and (wrapped or type(model).__name__ == "DeepSpeedEngine"):
            inner = model.module
        if inner is None:
            return model
        model = inner


@contextmanager
def guest(model: nn.Module) -> Iterator[None]:
    """Evaluation without a trace: inside, every module is in eval mode, without gradients, dropout or compilation.

    Put back afterwards, also after an exception: each module's own training flag, the Python, NumPy and torch random
    states, autocast's weight cache setting, buffers, settings and submodules that the forward changed (BigBird turns
    its block-sparse attention off for good on a short row), compiled calls, the sharding of weights.
    """
    with ExitStack() as stack:
        stack.enter_context(_sharded_again(model))
        stack.enter_context(_random_states())
        stack.enter_context(_eval_mode(model))
        stack.enter_context(_attributes(model))
        stack.enter_context(_buffers(model))
        stack.enter_context(_autocast_cache_off())
        stack.enter_context(_uncompiled(model))
        stack.enter_context(torch.no_grad())
        yield


@contextmanager
def _random_states() -> Iterator[None]:
    # The legacy NumPy state is the one that a training script's data order hangs on.
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)


@contextmanager
def _sharded_again(model: nn.Module) -> Iterator[None]:
    """FSDP2 keeps the root's weights gathered after a forward without a backward: memory, and stale after an update."""
    try:
        yield
    finally:
        if "torch.distributed.fsdp" in sys.modules:
            from torch.distributed.fsdp import FSDPModule

            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    # The attribute itself, not .eval(): some models override train() to merge weights or to refuse.
    flags = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in flags:
            module.training = False
        yield
    finally:
        for module, training in flags:
            module.training = training


@contextmanager
def _attributes(model: nn.Module) -> Iterator[None]:
    simple = (bool, int, float, str, type(None))
    kept = [
        (module, {k: v for k, v in module.__dict__.items() if isinstance(v, simple)}, dict(module._modules))
        for module in model.modules()
    ]
    try:
        yield
    finally:
        for module, values, children in kept:
            for name, value in values.items():
                if module.__dict__.get(name, value) != value:
                    module.__dict__[name] = value
            if any(module._modules.get(name) is not child for name, child in children.items()):
                module._modules.update(children)


@contextmanager
def _buffers(model: nn.Module) -> Iterator[None]:
    kept = [
        (module, name, buffer, buffer._version, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, version, value in kept:
                if buffer._version != version:
                    buffer.copy_(value)
                if module._buffers.get(name) is not buffer:
                    module._buffers[name] = buffer


@contextmanager
def _autocast_cache_off() -> Iterator[None]:
    # Weights cast inside no_grad would stay in the cache of a live autocast block and cut the training gradients.
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


@contextmanager
def _uncompiled(model: nn.Module) -> Iterator[None]:
    compiled = [(module, module.__dict__["_compiled_call_impl"]) for module in model.modules() if _is_compiled(module)]
    try:
        for module, _ in compiled:
            module._compiled_call_impl = None
        if "torch._dynamo" in sys.modules:
            with torch.compiler.set_stance("force_eager"):
                yield
        else:
            yield
    finally:
        for module, call in compiled:
            module._compiled_call_impl = call


def _is_compiled(module: nn.Module) -> bool:
    call: Any = module.__dict__.get("_compiled_call_impl")
    return call is not None
