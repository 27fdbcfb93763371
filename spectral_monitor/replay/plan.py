"""What a replay is going to do, decided before anything large is fetched.

A plan says for every selected checkpoint whether it is measured, and if not, why; which files are loaded and how many
bytes that is. It depends on listings alone, which are asked for once and kept, so that a restart asks nothing again.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spectral_monitor.errors import LoadError, ScheduleError
from spectral_monitor.record import write_json
from spectral_monitor.replay.hub import Hub, OfflineError, RemoteFile, RepositoryError, is_offline
from spectral_monitor.replay.integrity import Comparison, Contents, Finding, compare, file_hashes
from spectral_monitor.replay.loading import FLOAT32_BELOW, WeightPlan, choose_weights, files_to_fetch
from spectral_monitor.replay.selection import Selection, find_preset, select_steps
from spectral_monitor.replay.sources import Checkpoint, Skipped, Source, open_source

#: Statuses of a revision, in the final table.
MEASURED, DUPLICATE, MIXED, NO_WEIGHTS, FAILED, SKIPPED = (
    "measured",
    "duplicate",
    "mixed",
    "no_weights",
    "failed",
    "skipped",
)


class Listings:
    """The Hub's refs and file listings, asked for once and kept in ``folder`` (None: only in memory).

    File listings belong to a commit and never change. Refs are kept too: a replay that is started again goes on with
    the commits it began with.
    """

    def __init__(self, hub: Hub, folder: Path | None = None) -> None:
        self._hub = hub
        self._folder = folder
        self._files: dict[tuple[str, str], tuple[RemoteFile, ...]] = {}
        self._refs: dict[str, dict[str, str]] = {}

    def refs(self, repo: str) -> dict[str, str]:
        if repo not in self._refs:
            kept = self._read(repo, "refs")
            if kept is None:
                kept = self._hub.refs(repo)
                self._write(repo, "refs", kept)
            self._refs[repo] = dict(kept)
        return self._refs[repo]

    def files(self, repo: str, commit: str) -> tuple[RemoteFile, ...]:
        key = (repo, commit)
        if key not in self._files:
            kept = self._read(repo, commit)
            if kept is None:
                found = self._hub.files(repo, commit)
                if not self._hub.offline:
                    self._write(repo, commit, [dataclasses.asdict(file) for file in found])
            else:
                found = tuple(RemoteFile(**file) for file in kept)
            self._files[key] = found
        return self._files[key]

    def _path(self, repo: str, name: str) -> Path | None:
        return None if self._folder is None else self._folder / repo.replace("/", "--") / f"{name}.json"

    def _read(self, repo: str, name: str) -> Any:
        path = self._path(repo, name)
        if path is None or not path.is_file():
            return None
        try:
            return json.loads(path.read_text())
        except ValueError:
            return None

    def _write(self, repo: str, name: str, value: Any) -> None:
        path = self._path(repo, name)
        if path is not None and not (name == "refs" and self._hub.offline):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, value)


@dataclass(frozen=True)
class Planned:
    """One selected checkpoint and what happens with it.

    Attributes:
        status: ``measured`` and ``mixed`` are going to be measured; the others are not, ``reason`` says why.
        same_as: the checkpoint whose weights these are, or in part are.
        mark: why its step is not to be trusted; goes into the observation.
        weights: the weight files; None where there are none to load.
        fetch: files to bring here (empty for local ones).
        bytes: size of the weight files.
    """

    checkpoint: Checkpoint
    status: str
    reason: str = ""
    same_as: str | None = None
    mark: str | None = None
    weights: WeightPlan | None = None
    fetch: tuple[RemoteFile, ...] = ()
    bytes: int = 0

    @property
    def wanted(self) -> bool:
        """Whether it is going to be measured."""
        return self.status in (MEASURED, MIXED)

    @property
    def key(self) -> str:
        """A file name of its own within the replay."""
        name = f"{self.checkpoint.series}__{self.checkpoint.name}" if self.checkpoint.series else self.checkpoint.name
        return "".join(char if char.isalnum() or char in "._-" else "_" for char in name)


@dataclass(frozen=True)
class SeriesPlan:
    """One series: its plan in order of step, groups of equal weights, and from which step on names can be trusted.

    ``onset_from`` is the lowest trusted step where untrusted ones lie below it, else None.
    """

    name: str
    planned: tuple[Planned, ...]
    groups: tuple[tuple[str, ...], ...] = ()
    onset_from: int | None = None
    compared: str = ""

    @property
    def notes(self) -> list[str]:
        """Sentences for the report."""
        lines = [f"the same weights under {', '.join(group)}" for group in self.groups]
        if self.onset_from is not None:
            lines.append(
                f"onset is not determinable below step {self.onset_from}: "
                "the checkpoints below it do not hold what their names say"
            )
        return lines


@dataclass(frozen=True)
class Plan:
    """Everything a replay is going to do."""

    source: Source
    series: tuple[SeriesPlan, ...]
    skipped: tuple[Skipped, ...]

    @property
    def planned(self) -> tuple[Planned, ...]:
        return tuple(item for series in self.series for item in series.planned)


def make_plan(
    text: str,
    selection: Selection,
    listings: Listings,
    *,
    per_step: float | None = None,
    allow_pickle: bool = False,
    code: bool = False,
    gguf_file: str | None = None,
    stage: str | None = None,
    compare_most: int = 200,
) -> Plan:
    """Read the source, select, compare contents, choose formats.

    ``compare_most``: listings asked for at most (one request each); the selected ones, ``main`` and the last come
    first. Raises LoadError and its kinds, ScheduleError. With a preset and no source text the preset's repository is
    the source.
    """
    preset = find_preset(selection.preset) if selection.preset else None
    if preset is not None and text and text != preset.repo and not Path(text).exists():
        raise ScheduleError(f"preset {selection.preset} belongs to {preset.repo}, not to {text}")
    source = open_source(text or (preset.repo if preset else ""), listings, per_step)
    groups = source.series()
    if stage is not None:
        if stage not in groups:
            raise ScheduleError(f"{text} has no stage {stage!r}: there are {', '.join(filter(None, groups)) or 'none'}")
        groups = {stage: groups[stage]}
    chosen: dict[str, list[Checkpoint]] = {}
    for name, checkpoints in groups.items():
        if preset is not None:
            names = set(preset.revisions)
            chosen[name] = [item for item in checkpoints if item.name in names]
        elif selection.steps and len(groups) > 1:
            # A step need not exist in every stage, but in one at least.
            chosen[name] = [item for item in checkpoints if item.step in selection.steps]
        else:
            wanted = set(select_steps(selection, [item.step for item in checkpoints], text))
            chosen[name] = [item for item in checkpoints if item.step in wanted]
    found_steps = {item.step for items in chosen.values() for item in items}
    if missing := set(selection.steps) - found_steps:
        raise ScheduleError(f"{text} has no checkpoint at step {min(missing)} in any stage")
    maker = _Maker(source, listings, allow_pickle, code, gguf_file, compare_most)
    series = [maker.series(name, groups[name], chosen[name]) for name in groups if chosen[name]]
    if preset is not None:
        series = _with_absent(series, preset.revisions)
    if not any(item.planned for item in series):
        raise ScheduleError(f"nothing is selected from {text}")
    return Plan(source, tuple(series), source.skipped)


def _with_absent(series: list[SeriesPlan], revisions: Sequence[str]) -> list[SeriesPlan]:
    """Add a row for each published revision that the source does not have."""
    present = {item.checkpoint.name for one in series for item in one.planned}
    absent = tuple(
        Planned(Checkpoint(name, -1), SKIPPED, "the source has no such revision (or, offline, the cache does not)")
        for name in revisions
        if name not in present
    )
    if not absent:
        return series
    if not series:
        return [SeriesPlan("", absent)]
    return [dataclasses.replace(series[0], planned=series[0].planned + absent), *series[1:]]


@dataclass
class _Maker:
    source: Source
    listings: Listings
    allow_pickle: bool
    code: bool
    gguf_file: str | None
    compare_most: int

    def series(self, name: str, existing: list[Checkpoint], chosen: list[Checkpoint]) -> SeriesPlan:
        prepared = {item.name: self._prepare(item) for item in chosen}
        contents, note = self._contents(existing, chosen, prepared)
        loadable = frozenset(item.name for item in chosen if prepared[item.name].wanted)
        comparison = compare(contents, loadable)
        planned = tuple(self._judged(prepared[item.name], comparison) for item in chosen)
        shown = {item.name for item in chosen}
        groups = tuple(group for group in comparison.groups if shown & set(group))
        lowest = comparison.lowest_trusted([item for item in contents if item.name in shown])
        below = [
            item for item in planned if item.mark is not None and (lowest is None or item.checkpoint.step < lowest)
        ]
        return SeriesPlan(name, planned, groups, lowest if below else None, note)

    def _prepare(self, checkpoint: Checkpoint) -> Planned:
        """Format, files and bytes of one checkpoint, or why it has nothing to load."""
        name = checkpoint.name
        try:
            files = self._files(checkpoint)
        except RepositoryError:
            raise
        except LoadError as error:
            return Planned(checkpoint, SKIPPED if isinstance(error, OfflineError) else FAILED, str(error))
        if not files:
            offline = checkpoint.repo is not None
            reason = "not in the local cache, and HF_HUB_OFFLINE forbids asking the Hub" if offline else "empty folder"
            return Planned(checkpoint, SKIPPED if offline else NO_WEIGHTS, reason)
        by_name = {file.path: file for file in files}
        try:
            weights = choose_weights(
                by_name, name, allow_pickle=self.allow_pickle, gguf_file=checkpoint.gguf_file or self.gguf_file
            )
        except LoadError as error:
            if checkpoint.repo is not None and is_offline():
                return Planned(checkpoint, SKIPPED, f"its weights are not in the local cache ({error})")
            return Planned(checkpoint, NO_WEIGHTS, str(error))
        size = sum(by_name[file].size for file in weights.files)
        fetch: tuple[RemoteFile, ...] = ()
        if checkpoint.repo is not None:
            fetch = tuple(by_name[file] for file in files_to_fetch(by_name, weights, self.code))
        return Planned(checkpoint, MEASURED, weights=weights, fetch=fetch, bytes=size)

    def _files(self, checkpoint: Checkpoint) -> tuple[RemoteFile, ...]:
        if checkpoint.repo is not None and checkpoint.commit is not None:
            return self.listings.files(checkpoint.repo, checkpoint.commit)
        assert checkpoint.folder is not None
        return tuple(
            RemoteFile(path.name, path.stat().st_size) for path in sorted(checkpoint.folder.iterdir()) if path.is_file()
        )

    def _contents(
        self, existing: list[Checkpoint], chosen: list[Checkpoint], prepared: Mapping[str, Planned]
    ) -> tuple[list[Contents], str]:
        """Content hashes of the selected checkpoints, ``main``, and others as far as ``compare_most`` allows."""
        repos = {item.repo for item in existing}
        references = [item for item in self.source.references if item.repo in repos]
        others = [item for item in existing if item.name not in prepared]
        room = max(0, self.compare_most - len(chosen) - len(references))
        kept = _spread(others, room)
        note = (
            "" if len(kept) == len(others) else f"contents compared with {len(kept)} of {len(others)} other revisions"
        )
        everything = [*((item, prepared[item.name]) for item in chosen)]
        for item in [*kept, *references]:
            try:
                everything.append((item, self._prepare(item)))
            except LoadError:
                continue
        local = [
            path
            for item, plan in everything
            if item.folder is not None and plan.weights is not None
            for path in (item.folder / name for name in plan.weights.files)
        ]
        hashes = file_hashes(local)
        contents = []
        for item, plan in everything:
            if plan.weights is None:
                shards: dict[str, str] = {}
            elif item.folder is not None:
                shards = {name: hashes[item.folder / name] for name in plan.weights.files}
            else:
                by_name = {file.path: file for file in plan.fetch}
                # A file without a listed hash cannot be told apart: it then counts as its own.
                shards = {name: by_name[name].sha256 or f"{item.name}/{name}" for name in plan.weights.files}
            contents.append(Contents(item.name, None if item.step < 0 else item.step, shards))
        return contents, note

    def _judged(self, planned: Planned, comparison: Comparison) -> Planned:
        finding = comparison.findings.get(planned.checkpoint.name, Finding())
        if not planned.wanted:
            return planned
        if finding.kind == "duplicate":
            reason = f"the same weights as {finding.same_as}, which is measured"
            return dataclasses.replace(
                planned, status=DUPLICATE, reason=reason, same_as=finding.same_as, mark=finding.mark
            )
        if finding.kind == "mixed":
            return dataclasses.replace(
                planned, status=MIXED, reason=finding.mark or "", same_as=finding.same_as, mark=finding.mark
            )
        if finding.mark is not None:
            return dataclasses.replace(planned, reason=f"{finding.mark}: its step is not trusted", mark=finding.mark)
        return planned


def _spread(items: Sequence[Checkpoint], most: int) -> list[Checkpoint]:
    """At most ``most`` of ``items``: the last, and the others evenly over the list."""
    if len(items) <= most:
        return list(items)
    if most <= 0:
        return []
    return [items[(len(items) - 1) * (index + 1) // most] for index in range(most)]


# -- what it costs ----------------------------------------------------------------------------------------------------

_ITEM_BYTES = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Cost:
    """What one revision costs, by its listing and its configuration.

    Attributes:
        parameters: estimated from the bytes of the weights and the dtype they are stored in.
        dtype: the dtype they will be loaded in.
        memory_bytes: of the loaded weights (activations come on top).
    """

    parameters: int
    stored: str
    dtype: str
    memory_bytes: int


def estimate(weight_bytes: int, config: Mapping[str, Any] | None, dtype: str | None) -> Cost:
    """Cost of a revision of ``weight_bytes``; ``config`` is its ``config.json`` (None: stored as float32)."""
    stored = str((config or {}).get("dtype") or (config or {}).get("torch_dtype") or "float32").removeprefix("torch.")
    parameters = weight_bytes // _ITEM_BYTES.get(stored, 4)
    loaded = dtype or ("float32" if parameters < FLOAT32_BELOW else "bfloat16")
    loaded = stored if loaded == "auto" else loaded
    return Cost(parameters, stored, loaded, parameters * _ITEM_BYTES.get(loaded, 4))
