"""The natural-text probe batch: places in real text where the next token stood earlier after the same token.

The induction batch asks for a copy among random tokens. This one asks the same of a user's own text: at the query the
token is A, A stood once before, B came after it then, and B comes again. The screen and the causal check run on it
unchanged, so it can be asked whether the circuit found on random tokens does the work on real text. Queries stand at
different positions in different rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from spectral_monitor.errors import ProbeError
from spectral_monitor.observation import IntArray
from spectral_monitor.probe import MIN_LENGTH, ProbeBatch, positional_targets, sampled_positions

#: B must stand at least this far in front of the query, so that it is no local, previous or own position.
CLEARANCE = 6


@dataclass(frozen=True)
class Repeat:
    """One eligible place of a window: ``pair`` is A's earlier position, ``query`` its later one."""

    pair: int
    query: int


def repeats(window: Sequence[int] | IntArray, first_query: int, exclude: frozenset[int] = frozenset()) -> list[Repeat]:
    """Eligible places of one window of token ids.

    At the query stands A and next comes B. A stood exactly once before, with B behind it; B stood nowhere else before
    the query. So the target position is the only one that holds the answer. A stands neither at position 0 (which
    heads attend to for its own sake) nor within ``CLEARANCE`` of the query.
    """
    places: dict[int, list[int]] = {}
    found = []
    ids = [int(token) for token in window]
    for position, token in enumerate(ids[:-1]):
        earlier = places.get(token, [])
        if position >= first_query and len(earlier) == 1 and token not in exclude:
            pair, following = earlier[0], ids[position + 1]
            alone = places.get(following, []) == [pair + 1]
            if (
                pair >= 1
                and pair + 1 <= position - CLEARANCE
                and ids[pair + 1] == following
                and following not in exclude
                and following != token
                and alone
            ):
                found.append(Repeat(pair, position))
        places.setdefault(token, []).append(position)
    return found


def texts_of(source: str, column: str = "text", split: str = "train", limit: int = 5000) -> list[str]:
    """Documents of a text source.

    Args:
        source: a text file (an empty line ends a document); a .json, .jsonl, .csv or .parquet file; or the name of a
            ``datasets`` dataset, which is streamed.
        column, split: of a dataset or a table file.
        limit: documents at most.

    Raises ProbeError: no such source, no such column, or no text in it.
    """
    path = Path(source).expanduser()
    kind = _TABLES.get(path.suffix.lower())
    if path.is_file() and kind is None:
        try:
            content = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ProbeError(f"{path} cannot be read as UTF-8 text ({error})") from error
        texts = [part.strip() for part in content.split("\n\n") if part.strip()][:limit]
    elif kind is not None and not path.is_file():
        raise ProbeError(f"no text file at {path}: check the path")
    else:
        texts = _from_dataset(source, path if kind else None, kind, column, split, limit)
    if not texts:
        raise ProbeError(f"{source} holds no text")
    return texts


_TABLES = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}


def _from_dataset(source: str, file: Path | None, kind: str | None, column: str, split: str, limit: int) -> list[str]:
    from datasets import load_dataset

    try:
        if file is not None and kind is not None:
            rows = load_dataset(kind, data_files=str(file), split="train", streaming=True)
        else:
            rows = load_dataset(source, split=split, streaming=True)
        first = list(rows.take(limit))
    except Exception as error:  # datasets raises many kinds here
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ProbeError(f"{source} is no text file and cannot be loaded as a dataset ({reason})") from error
    if first and column not in first[0]:
        raise ProbeError(f"{source} has no column {column!r}: it has {', '.join(first[0])}")
    return [str(row[column]).strip() for row in first if row[column] and str(row[column]).strip()]


def natural_text_probe(
    documents: Iterable[Sequence[int] | IntArray],
    rows: int = 512,
    length: int = 256,
    seed: int = 42,
    exclude: Iterable[int] = (),
    start_token: int | None = None,
    name: str = "natural_text",
    source: str | None = None,
) -> ProbeBatch:
    """Build the batch from tokenised documents.

    Windows of ``length`` tokens are cut one behind the other, never across documents; each gives at most one row, with
    its query drawn at random among the eligible places of its second half, so that rows are independent stretches of
    text.

    Args:
        documents: token ids of each document.
        rows, length, seed: N (fewer when the text has fewer, said in ``params``), T, and the seed of the draws.
        exclude: special and padding ids; never A or B.
        start_token: put this id at position 0 of every row, as the model saw it in training. Default: none.
        source: what the text is, for the record.

    Raises:
        ProbeError: the text has no eligible place (too short, or nothing repeats), or a number makes no sense.
    """
    if rows < 1:
        raise ProbeError(f"the probe batch needs at least one row, not n = {rows}")
    if length < 2 * MIN_LENGTH:
        raise ProbeError(f"natural-text rows need at least {2 * MIN_LENGTH} tokens, not {length}")
    own = length - (start_token is not None)
    skip = frozenset(exclude) | (frozenset() if start_token is None else {start_token})
    rng = np.random.default_rng(seed)
    windows: list[IntArray] = []
    chosen: list[Repeat] = []
    seen = tokens_seen = 0
    for document in documents:
        ids = np.asarray(document, dtype=np.int64)
        tokens_seen += len(ids)
        for start in range(0, len(ids) - own + 1, own):
            seen += 1
            window = ids[start : start + own]
            eligible = repeats(window, own // 2, skip)
            if eligible:
                windows.append(window)
                chosen.append(eligible[int(rng.integers(len(eligible)))])
    if not windows:
        raise ProbeError(
            f"the text has no place to ask at: {tokens_seen} tokens in {seen} windows of {own} tokens, none with a "
            "pair that repeats once. Give more text, documents that are longer, or shorter rows"
        )
    found = len(windows)
    keep = np.sort(rng.permutation(found)[:rows])
    tokens = np.stack([windows[index] for index in keep])
    pair = np.array([chosen[index].pair for index in keep], dtype=np.int64)
    query = np.array([chosen[index].query for index in keep], dtype=np.int64)
    index = np.arange(len(keep))
    first, target = tokens[index, query], tokens[index, query + 1]
    replaced = _replace(tokens, pair + 1, first, target, rng)
    if start_token is not None:
        column = np.full((len(keep), 1), start_token, dtype=np.int64)
        tokens, replaced = np.hstack([column, tokens]), np.hstack([column, replaced])
        pair, query = pair + 1, query + 1
    return ProbeBatch(
        name=name,
        capability="induction",
        tokens=tokens,
        query=query,
        target=target,
        targets={"induction": pair[:, None] + 1, "duplicate_token": pair[:, None], **positional_targets(query)},
        sampled=sampled_positions(length, int(query.min())),
        companions={"content": replaced},
        params={
            "protocol": "natural_text",
            "seed": seed,
            "start_token": start_token,
            "source": source,
            "windows": seen,
            "windows_with_a_place": found,
            "asked_rows": rows,
            "query_positions": [int(query.min()), int(query.max())],
        },
    )


def _replace(tokens: IntArray, at: IntArray, first: IntArray, second: IntArray, rng: np.random.Generator) -> IntArray:
    """The rows with the token at ``at`` replaced by one of another row, neither A nor B."""
    pool = np.unique(tokens)
    replaced = tokens.copy()
    for row, position in enumerate(at):
        others = pool[(pool != first[row]) & (pool != second[row])]
        replaced[row, position] = rng.choice(others) if len(others) else tokens[row, position]
    return replaced
