"""What the ranks of the distributed tests run: gloo processes on CPU, forked from a server that imported it all."""

from __future__ import annotations

import multiprocessing as mp
import os
import random
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from spectral_monitor import Head, LogSchedule, Observation, SpectralMonitor, SpectralMonitorCallback
from spectral_monitor.guest import unwrap
from tests.attach import tiny

#: Seconds after which a test's ranks are ended and the test fails: a hang must not hold up the suite.
BOUND = float(os.environ.get("SPECTRAL_MONITOR_TEST_BOUND", "60"))


def ranks(function: Callable[..., Any], *arguments: Any, world: int = 2) -> list[Any]:
    """Run ``function(rank, *arguments)`` on ``world`` gloo ranks; their results, or the first one's traceback."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["tests.attach.workers"])
    with tempfile.TemporaryDirectory() as directory:
        processes = [
            context.Process(target=_rank, args=(rank, world, directory, function, arguments)) for rank in range(world)
        ]
        for process in processes:
            process.start()
        ends = time.monotonic() + BOUND
        for process in processes:
            process.join(max(0.0, ends - time.monotonic()))
        hung = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
        texts = [Path(directory, f"error-{rank}") for rank in range(world)]
        said = "\n".join(f"rank {rank}: {text.read_text()}" for rank, text in enumerate(texts) if text.exists())
        assert not hung, f"ranks {hung} did not end within {BOUND:g} s\n{said}"
        assert not said, said
        return [torch.load(Path(directory, f"result-{rank}"), weights_only=False) for rank in range(world)]


def _rank(rank: int, world: int, directory: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
        ACCELERATE_USE_CPU="true",
    )
    try:
        dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=world)
        result = function(rank, *arguments)
        torch.save(result, Path(directory, f"result-{rank}"))
    except BaseException:
        Path(directory, f"error-{rank}").write_text(traceback.format_exc())
    os._exit(0)  # a rank that failed must not wait for the others in a destructor


# -- monitors that make trouble ---------------------------------------------------------------------------------------


class Disagreeing(SpectralMonitor):
    """Rank 1 sees other numbers: what is decided by a threshold on each rank would differ."""

    def _look(self, *arguments: Any, **named: Any) -> Observation:
        observation = super()._look(*arguments, **named)
        if dist.get_rank() == 1:
            for values in observation.heads.selectivity.values():
                values *= 0.5
            observation.heads.pr[:] *= 3
        return observation

    def _candidates(self, track: Any, observation: Observation) -> frozenset[Head] | None:
        own = super()._candidates(track, observation)
        return own if own is None else frozenset(head for head in own if head.head < 2)


def trouble_on_rank_1(kind: str, model: nn.Module) -> None:
    """Rank 1's model fails in its 30th forward pass in eval mode."""
    calls = 0

    def hook(module: nn.Module, args: Any) -> None:
        nonlocal calls
        calls += not module.training
        if dist.get_rank() == 1 and not module.training and calls == 30:
            raise torch.OutOfMemoryError("no memory") if kind == "memory" else RuntimeError("rank 1 is broken")

    model.register_forward_pre_hook(hook)


# -- a bare torch loop ------------------------------------------------------------------------------------------------


def full(model: nn.Module) -> dict[str, Tensor]:
    """All weights, gathered from wherever they are."""
    gathered = {}
    for name, value in unwrap(model).state_dict().items():
        value = value.detach()
        if isinstance(value, DTensor):
            value = value.full_tensor()
        gathered[name] = value.clone()
    return gathered


def parallel(engine: str, precision: str) -> nn.Module:
    """The model as it is trained."""
    if engine == "tp":
        from transformers import LlamaForCausalLM
        from transformers.distributed import DistributedConfig

        with tempfile.TemporaryDirectory() as own:
            place = [own]
            dist.broadcast_object_list(place)  # only rank 0 saves
            tiny.llama(num_key_value_heads=4).save_pretrained(place[0])
            dist.barrier()
            plan = DistributedConfig(tp_plan="auto", tp_size=dist.get_world_size())
            model = LlamaForCausalLM.from_pretrained(place[0], distributed_config=plan, dtype=torch.float32)
            dist.barrier()
        return model
    model = tiny.llama()
    if engine == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    options: dict[str, Any] = {"mesh": mesh}
    if engine == "fsdp2-offload":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    if precision == "bf16":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for layer in model.model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


def loop(
    rank: int, engine: str, out: str | None, steps: int = 40, precision: str = "float32", check: bool = True
) -> Any:
    """Train ``steps`` steps, with a monitor where ``out`` says where its record goes."""
    random.seed(rank)
    np.random.seed(rank)  # noqa: NPY002  (what a training script would seed)
    model = parallel(engine, precision)
    model.train()
    torch.manual_seed(11 + rank if engine != "tp" else 11)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.stack([row["input_ids"] for row in tiny.rows(64)])
    monitor = None
    if out is not None:
        monitor = tiny.monitor(
            out,
            tiny.Forced if check else SpectralMonitor,
            probes=tiny.probe(rows=7),
            batch_size=2,
            schedule=LogSchedule(last_step=steps),
            companions=("null", "content"),
            **({} if check else {"check": None}),
        )
    looked: dict[int, dict[str, Tensor]] = {}
    losses = []
    for step in range(steps + 1):
        if step:
            place = step * (dist.get_world_size() if engine != "tp" else 1) + (rank if engine != "tp" else 0)
            batch = data[(place * 4) % 64 : (place * 4) % 64 + 4]
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16" and engine in ("ddp", "tp")):
                loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if monitor is not None and monitor.step(model, step, step * 128.0) is not None and step in (0, 5, steps):
            looked[step] = full(model)
    flags = [module.training for module in model.modules()]
    gathered = [
        name
        for name, module in model.named_modules()
        if isinstance(module, FSDPModule) and not all(isinstance(p, DTensor) for p in module.parameters())
    ]
    summary = monitor.close() if monitor is not None else None
    return {
        "losses": losses,
        "weights": full(model),
        "random": tiny.random_states(),
        "training": flags,
        "gathered": gathered,
        "looked": looked,
        "record": monitor is not None and monitor.record is not None,
        "failures": None if summary is None else summary["failures"],
    }


# -- the Trainer ------------------------------------------------------------------------------------------------------


def train_with(
    rank: int,
    out: str,
    watched: bool,
    steps: int = 20,
    kind: str = "plain",
    resume: str | None = None,
    stop: int | None = None,
    arguments: dict[str, Any] | None = None,
) -> Any:
    """A Trainer run under DDP."""
    model = tiny.gpt2()
    callbacks: list[Any] = []
    watching = None
    if watched:
        schedule = LogSchedule(points_per_octave=1, last_step=steps)
        monitors = {"disagreeing": Disagreeing, "plain": tiny.Forced}
        options = {"on_error": "log"} if kind in ("broken", "memory", "unwritable") else {}
        monitor = tiny.monitor(
            "/dev/null/record" if kind == "unwritable" else None,
            monitors.get(kind, SpectralMonitor),
            schedule=schedule,
            probes=tiny.probe(rows=7),
            batch_size=2,
            **options,
        )
        watching = SpectralMonitorCallback(monitor, trackers=False)
        watching._default_schedule = False
        callbacks.append(watching)
    if stop is not None:
        callbacks.append(tiny.StopAt(stop))
    trainer = tiny.trainer(
        out, model=model, callbacks=callbacks, max_steps=steps, ddp_backend="gloo", **(arguments or {})
    )
    if kind in ("broken", "memory"):
        trouble_on_rank_1(kind, trainer.model)
    trainer.train(resume_from_checkpoint=resume)
    result = tiny.outcome(trainer)
    result["optimizer"] = {key: value for key, value in result["optimizer"].items() if key == "state"}
    if watching is not None:
        result["summary"] = watching.monitor.summary()
        result["ready"] = watching._ready
        result["batch_size"] = watching.monitor.batch_size
    return result
