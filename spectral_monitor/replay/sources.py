"""Where checkpoints come from: a Hub repository's revisions, folders on this machine, list files, GGUF files.

A source is read once into plain ``Checkpoint`` entries in numeric order; what has no place on a step axis is listed
with its reason. Nothing is downloaded here.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from spectral_monitor.errors import LoadError
from spectral_monitor.replay.hub import RemoteFile, RevisionError, is_offline
from spectral_monitor.replay.names import RevisionName, parse_name, tokens_per_step

LIST_SUFFIXES = (".txt", ".csv", ".tsv")
_WEIGHTS = re.compile(r"(model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)\Z")


class Catalogue(Protocol):
    """What a source asks of the Hub: see ``hub.Hub`` and ``plan.Listings``."""

    def refs(self, repo: str) -> Mapping[str, str]: ...

    def files(self, repo: str, commit: str) -> tuple[RemoteFile, ...]: ...


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint of a source.

    Attributes:
        name: revision or folder name; unique within ``series``.
        step: finished optimizer updates.
        tokens: training tokens; None when unknown.
        tokens_from: where that number comes from, in words.
        tokens_estimated: it was computed or read off a rounded label, not counted.
        series: checkpoints of one series lie on one axis; ``""`` where a source has only one.
        repo, commit: of a Hub revision. ``folder``: of one on this machine. ``gguf_file``: name inside the folder.
    """

    name: str
    step: int
    tokens: float | None = None
    tokens_from: str = "unknown"
    tokens_estimated: bool = False
    series: str = ""
    repo: str | None = None
    commit: str | None = None
    folder: Path | None = None
    gguf_file: str | None = None


@dataclass(frozen=True)
class Skipped:
    """A name of the source that is not replayed, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Source:
    """A source read through. ``references`` are checkpoints without a step (``main``), used for comparison only."""

    text: str
    kind: str
    checkpoints: tuple[Checkpoint, ...]
    skipped: tuple[Skipped, ...] = ()
    references: tuple[Checkpoint, ...] = ()

    def series(self) -> dict[str, list[Checkpoint]]:
        """Checkpoints by series, in order."""
        found: dict[str, list[Checkpoint]] = {}
        for checkpoint in self.checkpoints:
            found.setdefault(checkpoint.series, []).append(checkpoint)
        return found


def open_source(text: str, catalogue: Catalogue, per_step: float | None = None) -> Source:
    """Read a source: a folder, a ``.gguf`` file, a list file (``.txt``, ``.csv``, ``.tsv``) or a Hub repository.

    ``per_step``: tokens of one optimizer step, over all other statements. Raises LoadError and its kinds when the
    source does not exist or holds no checkpoint.
    """
    path = Path(text).expanduser()
    if path.is_dir():
        source = _folder(text, path, per_step)
    elif path.is_file():
        if path.suffix.lower() == ".gguf":
            source = _single(text, path.parent, path.stem, per_step, gguf_file=path.name)
        elif path.suffix.lower() in LIST_SUFFIXES:
            source = _list_file(text, path, catalogue, per_step)
        else:
            raise LoadError(
                f"{path} is no source: give a folder, a .gguf file, a list ({', '.join(LIST_SUFFIXES)}) "
                "or a Hub repository (owner/name)"
            )
    elif text.startswith((".", "/", "~")) or path.suffix.lower() in (*LIST_SUFFIXES, ".gguf"):
        raise LoadError(f"{text} does not exist: give a folder, a list file, a .gguf file or a Hub repository")
    else:
        source = _repository(text, catalogue, per_step)
    if not source.checkpoints:
        names = ", ".join(item.name for item in source.skipped[:5])
        raise LoadError(
            f"{text} holds no checkpoint whose name tells its step"
            + (f" (it has: {names})" if names else "")
            + ": names such as step3000, stage1-step1000-tokens2B or checkpoint-500 are read"
        )
    return source


def _placed(parsed: RevisionName, repo: str | None, per_step: float | None) -> Checkpoint:
    """A checkpoint with its tokens by the first statement there is: the user's, the label's, the repository's."""
    tokens, origin, estimated = parsed.tokens, "unknown", False
    known = tokens_per_step(repo) if repo else None
    if per_step is not None:
        tokens, origin, estimated = parsed.step * per_step, f"step x {per_step:,.0f} (--tokens-per-step)", True
    elif parsed.tokens is not None:
        origin, estimated = f"the label, rounded to within {parsed.rounding:,.0f}", True
    elif known is not None:
        tokens, origin, estimated = float(parsed.step * known[0]), f"step x {known[0]:,} ({known[1]})", True
    return Checkpoint(parsed.name, parsed.step, tokens, origin, estimated, parsed.series, repo)


def _sorted_apart(found: Iterable[tuple[RevisionName, Checkpoint]], skipped: list[Skipped]) -> tuple[Checkpoint, ...]:
    """In numeric order; of two checkpoints of one series and step the second is skipped."""
    kept: list[Checkpoint] = []
    at: dict[tuple[str, int], str] = {}
    for _, checkpoint in sorted(found, key=lambda item: item[0].order):
        key = (checkpoint.series, checkpoint.step)
        if key in at:
            skipped.append(Skipped(checkpoint.name, f"another checkpoint of step {checkpoint.step}: {at[key]} is used"))
        else:
            at[key] = checkpoint.name
            kept.append(checkpoint)
    return tuple(kept)


# -- the Hub ----------------------------------------------------------------------------------------------------------


def _repository(repo: str, catalogue: Catalogue, per_step: float | None) -> Source:
    refs = catalogue.refs(repo)
    found, skipped, references = [], [], []
    for name, commit in refs.items():
        parsed = parse_name(name)
        if parsed is None:
            skipped.append(Skipped(name, "its name tells no step"))
            references.append(Checkpoint(name, -1, repo=repo, commit=commit))
        else:
            found.append((parsed, dataclasses.replace(_placed(parsed, repo, per_step), commit=commit)))
    checkpoints = _sorted_apart(found, skipped)
    main = tuple(item for item in references if item.name in ("main", "master"))
    return Source(repo, "hub", checkpoints, tuple(sorted(skipped, key=lambda item: item.name)), main)


# -- list files -------------------------------------------------------------------------------------------------------


def _list_file(text: str, path: Path, catalogue: Catalogue, per_step: float | None) -> Source:
    """Pairs of repository and revision; a header line ``repo,revision[,step][,tokens|tokens_B]`` may give more."""
    rows = _list_rows(path)
    repos = list(dict.fromkeys(row["repo"] for row in rows))
    refs = {repo: catalogue.refs(repo) for repo in repos}
    found: list[tuple[RevisionName, Checkpoint]] = []
    skipped: list[Skipped] = []
    for row in rows:
        repo, revision = row["repo"], row["revision"]
        commit = refs[repo].get(revision) or (revision if re.fullmatch(r"[0-9a-f]{40}", revision) else None)
        if commit is None:
            if is_offline():
                skipped.append(Skipped(revision, "not in the local cache, and HF_HUB_OFFLINE forbids asking the Hub"))
                continue
            raise RevisionError(f"{path.name} line {row['line']}: {repo} has no revision {revision}")
        parsed = parse_name(revision)
        try:
            if row.get("step"):
                step = int(row["step"])
                parsed = dataclasses.replace(parsed, step=step) if parsed else RevisionName(revision, step)
            counted = float(row["tokens"]) if row.get("tokens") else None
            counted = float(row["tokens_B"]) * 1e9 if row.get("tokens_B") else counted
        except ValueError:
            raise LoadError(f"{path.name} line {row['line']}: step and tokens must be numbers") from None
        if parsed is None:
            skipped.append(Skipped(revision, "its name tells no step: add a step column to the list"))
            continue
        checkpoint = dataclasses.replace(_placed(parsed, repo, per_step), commit=commit)
        if counted is not None and per_step is None:
            checkpoint = dataclasses.replace(
                checkpoint, tokens=counted, tokens_from=f"the list {path.name}", tokens_estimated=True
            )
        if len(repos) > 1:
            series = repo.replace("/", "--") + (f"-{checkpoint.series}" if checkpoint.series else "")
            checkpoint = dataclasses.replace(checkpoint, series=series)
        found.append((parsed, checkpoint))
    references = tuple(
        Checkpoint("main", -1, repo=repo, commit=names["main"]) for repo, names in refs.items() if "main" in names
    )
    return Source(text, "list", _sorted_apart(found, skipped), tuple(skipped), references)


def _list_rows(path: Path) -> list[dict[str, str]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"{path} cannot be read as a list of revisions ({error})") from error
    rows: list[dict[str, str]] = []
    header: list[str] | None = None
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        cells = next(csv.reader([line])) if "," in line else line.split()
        cells = [cell.strip() for cell in cells]
        if header is None and "revision" in cells and "repo" in cells:
            header = cells
            continue
        row = dict(zip(header or ["repo", "revision"], cells, strict=False)) | {"line": str(number)}
        if not row.get("repo") or not row.get("revision"):
            raise LoadError(f"{path.name} line {number}: give a repository and a revision, such as owner/name step1000")
        rows.append(row)
    if not rows:
        raise LoadError(f"{path} lists no revision")
    return rows


# -- this machine -----------------------------------------------------------------------------------------------------


def _folder(text: str, folder: Path, per_step: float | None) -> Source:
    """Checkpoint folders (and GGUF files) inside ``folder``; or ``folder`` itself where it is one."""
    found, skipped, references = [], [], []
    for child in sorted(folder.iterdir()):
        is_gguf = child.is_file() and child.suffix.lower() == ".gguf"
        if not (child.is_dir() or is_gguf) or child.name.startswith("."):
            continue
        parsed = parse_name(child.stem if is_gguf else child.name)
        if parsed is None:
            skipped.append(Skipped(child.name, "its name tells no step"))
            if child.is_dir() and child.name in ("main", "master"):
                references.append(Checkpoint(child.name, -1, folder=child))
        elif is_gguf:
            place = dataclasses.replace(_placed(parsed, None, per_step), folder=folder, gguf_file=child.name)
            found.append((parsed, place))
        else:
            found.append((parsed, _local(parsed, child, per_step)))
    if not found and any(child.is_file() and _WEIGHTS.match(child.name) for child in folder.iterdir()):
        return _single(text, folder, folder.resolve().name, per_step)
    checkpoints = _sorted_apart(found, skipped)
    return Source(text, "folder", checkpoints, tuple(skipped), tuple(references))


def _single(text: str, folder: Path, name: str, per_step: float | None, gguf_file: str | None = None) -> Source:
    """One checkpoint named by the user: its step is in its name, in ``trainer_state.json``, or taken as 0."""
    parsed = parse_name(name)
    if parsed is None:
        step = 0 if gguf_file else _trainer_state(folder).get("global_step", 0)
        parsed = RevisionName(name, step if isinstance(step, int) else 0)
    checkpoint = dataclasses.replace(_local(parsed, folder, per_step), gguf_file=gguf_file, series="")
    return Source(text, "gguf" if gguf_file else "folder", (checkpoint,))


def _local(parsed: RevisionName, folder: Path, per_step: float | None) -> Checkpoint:
    checkpoint = dataclasses.replace(_placed(parsed, None, per_step), folder=folder)
    seen = _trainer_state(folder).get("num_input_tokens_seen", 0)
    if checkpoint.tokens is None and isinstance(seen, (int, float)) and seen > 0:
        # The Trainer counts tokens only where its token option is on; else the field is 0.
        checkpoint = dataclasses.replace(checkpoint, tokens=float(seen), tokens_from="trainer_state.json")
    return checkpoint


def _trainer_state(folder: Path) -> dict[str, object]:
    try:
        state = json.loads((folder / "trainer_state.json").read_text())
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}
