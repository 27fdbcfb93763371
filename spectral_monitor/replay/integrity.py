"""Do the checkpoints hold what their names say? Compared by content, before loading and after.

Published step branches are wrong more often than one thinks: final weights under early names, single shards of
another step. Before anything is downloaded the hashes that the Hub lists are compared shard by shard; after loading,
every tensor's hash is compared with those of the revisions measured before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spectral_monitor.replay.hub import sha256_of

#: Step 0 and step 1 hold equal weights where the first update has learning rate 0 (all Pythias): no fault.
HARMLESS_PAIR = frozenset({0, 1})


@dataclass(frozen=True)
class Contents:
    """The weight shards of one checkpoint: ``shards`` maps file name to content hash; ``step`` None: not in a series
    (``main`` and the like), of use for comparison only."""

    name: str
    step: int | None
    shards: Mapping[str, str]

    @property
    def identity(self) -> frozenset[tuple[str, str]]:
        return frozenset(self.shards.items())


@dataclass(frozen=True)
class Finding:
    """What comparison says of one checkpoint.

    Attributes:
        kind: ``"fine"``, ``"duplicate"`` (the same weights are measured under ``same_as``) or ``"mixed"``.
        same_as: the checkpoint whose weights these are, or in part are.
        mark: why its step is not to be trusted; None when nothing speaks against it.
    """

    kind: str = "fine"
    same_as: str | None = None
    mark: str | None = None


@dataclass(frozen=True)
class Comparison:
    """Findings by name, and the groups of equal weights (names in order of step) that span several steps."""

    findings: Mapping[str, Finding]
    groups: tuple[tuple[str, ...], ...]

    def lowest_trusted(self, contents: Iterable[Contents]) -> int | None:
        """Lowest step under which a checkpoint is what it says; None when no checkpoint can be trusted."""
        steps = [
            item.step
            for item in contents
            if item.step is not None
            and self.findings[item.name].mark is None
            and self.findings[item.name].kind in ("fine", "duplicate")
        ]
        return min(steps, default=None)


def compare(contents: Sequence[Contents], measured: frozenset[str] | None = None) -> Comparison:
    """Find duplicates and mixtures among the checkpoints of one series (and nameless ones such as ``main``).

    Of a group of equal weights under several steps one is measured: the last step of the series, if ``main`` holds
    the same (then it is the final model, and the earlier names are wrong), else the latest of the group, marked.
    ``measured`` restricts which names can be that one (the selection). Steps 0 and 1 alone may be equal.
    """
    in_series = [item for item in contents if item.step is not None and item.shards]
    eligible = measured if measured is not None else frozenset(item.name for item in in_series)
    last = max((item.step for item in in_series if item.step is not None), default=None)
    finals = {item.identity for item in contents if item.step is None}
    owners = {item.name for item in in_series if item.step == last and item.identity in finals}
    findings = {item.name: Finding() for item in contents}

    groups: list[tuple[str, ...]] = []
    by_identity: dict[frozenset[tuple[str, str]], list[Contents]] = {}
    for item in in_series:
        by_identity.setdefault(item.identity, []).append(item)
    for identity, members in by_identity.items():
        members.sort(key=lambda item: (item.step, item.name))
        steps = {item.step for item in members}
        if len(steps) < 2:
            continue
        nameless = sorted(item.name for item in contents if item.step is None and item.identity == identity)
        harmless = steps == HARMLESS_PAIR
        candidates = [item for item in members if item.name in eligible] or members
        owner = next((item for item in members if item.name in owners), None)
        if harmless:
            chosen = candidates[0]
        else:
            groups.append((*(item.name for item in members), *nameless))
            chosen = owner if owner is not None and owner in candidates else candidates[-1]
        for item in members:
            others = [other.name for other in members if other is not item]
            mark = None if harmless or item is owner else f"same weights as {_listed([*others, *nameless])}"
            if item is chosen:
                findings[item.name] = Finding("fine", None, mark)
            else:
                findings[item.name] = Finding("duplicate", chosen.name, mark)

    _find_mixtures(in_series, owners, findings)
    return Comparison(findings, tuple(groups))


def _find_mixtures(in_series: Sequence[Contents], owners: set[str], findings: dict[str, Finding]) -> None:
    """Mark the checkpoints that share some but not all shards with another step."""
    holders: dict[tuple[str, str], list[Contents]] = {}
    for item in in_series:
        for shard in item.identity:
            holders.setdefault(shard, []).append(item)
    for item in in_series:
        if item.name in owners or findings[item.name].kind == "duplicate" or len(item.shards) < 2:
            continue
        shared: dict[str, list[str]] = {}
        for shard in sorted(item.identity):
            for other in holders[shard]:
                pair = {item.step, other.step}
                if other.identity != item.identity and len(pair) == 2 and pair != HARMLESS_PAIR:
                    shared.setdefault(other.name, []).append(shard[0])
        if shared:
            # The final model is the likeliest origin; else the one that most shards are shared with.
            origin = next((name for name in shared if name in owners), max(shared, key=lambda name: len(shared[name])))
            shards = shared[origin]
            findings[item.name] = Finding(
                "mixed", origin, f"{len(shards)} of {len(item.shards)} shards are those of {origin} ({shards[0]})"
            )


def _listed(names: Sequence[str], most: int = 4) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


# -- files on this machine --------------------------------------------------------------------------------------------

_SAMPLES, _SAMPLE = 16, 1 << 16


def file_hashes(paths: Iterable[Path]) -> dict[Path, str]:
    """A content identity for each file: equal exactly when the contents are equal.

    Files are read whole only where size and samples agree with another file's, so a series of distinct checkpoints
    costs 1 MiB a file.
    """
    sampled: dict[str, list[Path]] = {}
    by_inode: dict[tuple[int, int], Path] = {}
    first_of: dict[Path, Path] = {}
    for path in dict.fromkeys(paths):
        status = path.stat()
        first = by_inode.setdefault((status.st_dev, status.st_ino), path)
        first_of[path] = first
        if first is path:
            sampled.setdefault(_sample_hash(path, status.st_size), []).append(path)
    hashes: dict[Path, str] = {}
    for sample, members in sampled.items():
        for path in members:
            hashes[path] = f"sampled:{sample}" if len(members) == 1 else sha256_of(path)
    return {path: hashes[first] for path, first in first_of.items()}


def _sample_hash(path: Path, size: int) -> str:
    digest = hashlib.sha256(str(size).encode())
    with open(path, "rb") as handle:
        for index in range(_SAMPLES):
            handle.seek(max(0, size - _SAMPLE) * index // (_SAMPLES - 1))
            digest.update(handle.read(_SAMPLE))
    return digest.hexdigest()


# -- tensors after loading --------------------------------------------------------------------------------------------


def tensor_hashes(model: Any, threads: int = 2) -> dict[str, str]:
    """Parameter name -> hash of dtype, shape and bytes, for every matrix that is not constant.

    Vectors (norms and biases, which bfloat16 may round to the same values in neighbouring steps) and constant
    matrices say nothing about where weights come from and are left out.
    Parameters are read one at a time; nothing stays allocated.
    """
    import torch

    def one(item: tuple[str, Any]) -> tuple[str, str] | None:
        name, parameter = item
        with torch.no_grad():
            value = parameter.detach().to("cpu").contiguous()
            if bool((value == value.flatten()[0]).all()):
                return None
            data = value.flatten().view(torch.uint8).numpy()
        digest = hashlib.blake2b(f"{parameter.dtype}{tuple(parameter.shape)}".encode(), digest_size=16)
        digest.update(memoryview(data))
        return name, digest.hexdigest()

    with ThreadPoolExecutor(threads) as pool:
        matrices = [(name, value) for name, value in model.named_parameters() if value.dim() > 1 and value.numel() > 1]
        return dict(found for found in pool.map(one, matrices) if found is not None)


def compare_tensors(name: str, step: int, hashes: Mapping[str, str], earlier: Sequence[TensorRecord]) -> Finding:
    """Compare a loaded checkpoint's tensors with those measured before it.

    All equal to another step's: a duplicate. Some equal: a mixture, unless they are equal in every checkpoint so far
    (frozen parameters), which needs at least two others to tell.
    """
    others = [record for record in earlier if record.name != name and record.step != step]
    for record in others:
        if hashes and record.hashes == hashes:
            harmless = {step, record.step} == HARMLESS_PAIR
            return Finding("duplicate", record.name, None if harmless else f"same tensors as {record.name}")
    if len(others) < 2:
        return Finding()
    frozen = {
        tensor
        for tensor, value in hashes.items()
        if all(record.hashes.get(tensor) == value for record in others if {step, record.step} != HARMLESS_PAIR)
    }
    for record in others:
        if {step, record.step} == HARMLESS_PAIR:
            continue
        shared = sorted(
            tensor for tensor, value in hashes.items() if record.hashes.get(tensor) == value and tensor not in frozen
        )
        if shared:
            return Finding(
                "mixed",
                record.name,
                f"{len(shared)} of {len(hashes)} tensors are those of {record.name} ({shared[0]})",
            )
    return Finding()


@dataclass(frozen=True)
class TensorRecord:
    """Tensor hashes of a measured checkpoint (see ``tensor_hashes``)."""

    name: str
    step: int
    hashes: Mapping[str, str]
