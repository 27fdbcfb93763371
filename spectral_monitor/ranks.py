"""How the ranks of a distributed run share a probe's work, decide alike, and fail alike.

Every rank takes part in every look: a sharded model gathers its weights inside the forward pass, and a rank that stays
away leaves the others waiting. The rows of the probe batch are dealt out, sums are added up in float64, what is decided
is decided on rank 0, and an exception on one rank is raised on all of them. Everything goes through torch.distributed,
in whatever process group the run has made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from spectral_monitor.errors import CaptureError, RankError
from spectral_monitor.observation import IntArray


class Reduction:
    """How ranks share the rows of a probe batch; this one is for a single process."""

    def micro_batches(self, rows: int, batch_size: int) -> Iterator[tuple[IntArray, bool]]:
        """Row numbers of each micro-batch of this rank, and whether they count (False: run only to keep step)."""
        for start in range(0, rows, batch_size):
            yield np.arange(start, min(start + batch_size, rows)), True

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Add up over the ranks that got different rows, in place."""

    def sum_arrays(self, arrays: Sequence[np.ndarray]) -> None:
        """Add up over the ranks that got different rows, in place."""

    def join_heads(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Tensors [H of this rank, ...] of a layer whose heads lie on several ranks -> [H, ...] with all heads."""
        return list(tensors)

    @property
    def head_rank(self) -> tuple[int, int]:
        """This rank's place among those that hold the heads of one layer, and their number."""
        return 0, 1

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on all ranks."""
        return value

    def everywhere(self, flag: bool) -> bool:
        """Whether ``flag`` holds on every rank."""
        return flag

    @contextmanager
    def together(self) -> Iterator[None]:
        """Leave the block with an exception on every rank if one of them did."""
        yield

    @property
    def is_main(self) -> bool:
        """Whether this rank writes."""
        return True

    @property
    def alone(self) -> bool:
        """Whether no other rank has to run the same forwards at the same time."""
        return True


class Ranks(Reduction):
    """The ranks of a run under torch.distributed.

    Sums go to the first rank and from there to the others, so that every rank has the same bits.

    Args:
        heads: the process group that holds one copy of the model between them (tensor parallelism); its ranks run the
            same rows. None: every rank can run the model by itself, or gathers what it lacks.
        data: the process group of the ranks that get different rows, this one among them; None: all ranks.
    """

    def __init__(self, heads: Any = None, data: Any = None) -> None:
        import torch.distributed as dist

        self._dist = dist
        self._heads, self._data = heads, data
        whole = heads is not None and dist.get_world_size(heads) == dist.get_world_size()
        self._data_rank, self._data_size = (0, 1) if whole else (dist.get_rank(data), dist.get_world_size(data))
        self._first = 0 if whole or data is None else dist.get_global_rank(data, 0)
        backends = dist.get_backend_config(None)
        self._device = torch.device("cpu") if "cpu:" in backends else _accelerator()

    def micro_batches(self, rows: int, batch_size: int) -> Iterator[tuple[IntArray, bool]]:
        """Micro-batches dealt round (see ``deal``)."""
        return deal(rows, batch_size, self._data_rank, self._data_size)

    def sum(self, tensors: Sequence[Tensor]) -> None:
        if self._data_size == 1:
            return
        for tensor in tensors:
            moved = tensor.to(self._device)
            self._dist.reduce(moved, self._first, group=self._data)
            self._dist.broadcast(moved, self._first, group=self._data)
            if moved is not tensor:
                tensor.copy_(moved)

    def sum_arrays(self, arrays: Sequence[np.ndarray]) -> None:
        self.sum([torch.from_numpy(array) for array in arrays])

    def join_heads(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        if self._heads is None:
            return list(tensors)
        gathered: list[Any] = [None] * self.head_rank[1]
        self._dist.all_gather_object(gathered, [tensor.cpu() for tensor in tensors], group=self._heads)
        return [torch.cat(parts) for parts in zip(*gathered, strict=True)]

    @property
    def head_rank(self) -> tuple[int, int]:
        if self._heads is None:
            return 0, 1
        return self._dist.get_rank(self._heads), self._dist.get_world_size(self._heads)

    def broadcast(self, value: Any) -> Any:
        box = [value]
        self._dist.broadcast_object_list(box, 0, device=self._device)
        return box[0]

    def everywhere(self, flag: bool) -> bool:
        votes = torch.tensor(int(flag), device=self._device)
        self._dist.all_reduce(votes, self._dist.ReduceOp.MIN)
        return bool(votes)

    @contextmanager
    def together(self) -> Iterator[None]:
        own: Exception | None = None
        try:
            yield
        except Exception as error:
            own = error
        told: list[Any] = [None] * self._dist.get_world_size()
        memory = isinstance(own, torch.OutOfMemoryError)
        said = None if own is None else (memory, f"{type(own).__name__}: {own}")
        self._dist.all_gather_object(told, said)
        failed = {rank: said for rank, said in enumerate(told) if said is not None}
        if not failed:
            return
        if any(memory for memory, _ in failed.values()) and not memory:
            raise torch.OutOfMemoryError(f"out of memory on ranks {sorted(failed)}") from own
        if own is not None:
            raise own
        rank, (_, text) = next(iter(failed.items()))
        raise RankError(f"rank {rank} failed, so no rank goes on with this look ({text})")

    @property
    def is_main(self) -> bool:
        return bool(self._dist.get_rank() == 0)

    @property
    def alone(self) -> bool:
        return False


def deal(rows: int, batch_size: int, rank: int, ranks: int) -> Iterator[tuple[IntArray, bool]]:
    """The micro-batches of one rank: dealt round, every rank running the same number of them.

    A rank that gets none in the last round runs the first one again, without counting it.
    """
    size = min(batch_size, -(-rows // ranks))
    starts = range(0, rows, size)
    for turn in range(-(-len(starts) // ranks)):
        number = turn * ranks + rank
        counts = number < len(starts)
        start = starts[number] if counts else 0
        yield np.arange(start, min(start + size, rows)), counts


def _accelerator() -> torch.device:
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    return torch.device(kind.type, torch.accelerator.current_device_index())


def reduction_for(model: nn.Module) -> Reduction:
    """How the ranks of this process's run share a look at ``model``; one process: not at all.

    Raises:
        CaptureError: the model is spread over ranks in a way that is not read (said before the training starts).
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return Reduction()
    mesh = head_mesh(model)
    if mesh is None:
        return Ranks()
    heads = mesh.get_group()
    size, world = dist.get_world_size(heads), dist.get_world_size()
    if size == world:
        return Ranks(heads)
    return Ranks(heads, _across(heads))


def _across(heads: Any) -> Any:
    """The group of ranks that hold the same heads as this one in other copies of the model."""
    import torch.distributed as dist

    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, tuple(dist.get_process_group_ranks(heads)))
    copies = sorted(set(every))
    if len({len(copy) for copy in copies}) != 1 or len(copies) * len(copies[0]) != len(every):
        raise CaptureError(f"tensor-parallel groups of unequal size ({copies}) are not read: use equal ones")
    own = None
    for members in zip(*copies, strict=True):
        group = dist.new_group(list(members))
        if dist.get_rank() in members:
            own = group
    return own


def head_mesh(model: nn.Module) -> Any:
    """The one-dimensional device mesh over which the heads are split (tensor parallelism), or None."""
    for module in model.modules():
        mesh = split_over(module)
        if mesh is not None:
            return mesh
    return None


def split_over(module: nn.Module) -> Any:
    """The mesh over which a projection's *input* features are split (row-wise parallelism), or None.

    FSDP2 splits rows of a weight, [out, in], tensor parallelism its columns where the input is a rank's own.
    """
    weight = module._parameters.get("weight")
    mesh, placements = getattr(weight, "device_mesh", None), getattr(weight, "placements", ())
    if weight is None or mesh is None or weight.dim() != 2:
        return None
    for number, placement in enumerate(placements):
        if placement.is_shard(1):
            return mesh if mesh.ndim == 1 else mesh[mesh.mesh_dim_names[number]]
    return None
