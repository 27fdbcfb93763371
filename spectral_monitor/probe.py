"""What is shown to the model: token rows, the query position of each, and where each attention class would look.

A probe batch is fixed for a run; its SHA-256 goes into the run's record, and two runs compare only where it is equal.
Definitions: recipe section 1 (the induction batch) and section 3 (target positions).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from spectral_monitor.errors import ProbeError
from spectral_monitor.observation import IntArray

BoolArray = npt.NDArray[np.bool_]

#: Fewest distinct token ids the default generator accepts: A, B and fillers that do not give the pair away.
MIN_VOCABULARY = 32
#: Shortest row: the local positions, the previous token and the query must not meet the A B pair.
MIN_LENGTH = 16
#: The published batch's first possible position of A.
FIRST_PAIR = 20
SAMPLED_POSITIONS = 50


@dataclass(frozen=True)
class ProbeBatch:
    """N rows of T tokens with one question each: what comes after the query position?

    Attributes:
        name: names the batch in the record, for example ``"induction"``.
        capability: the class of ``targets`` whose heads do this probe's own task.
        tokens: [N, T] token ids.
        query: [N] position at which the model is read; what stands behind it has no influence (causal models).
        target: [N] token id that must come next after the query.
        targets: class -> [N, K] target positions in the row, all at or before the query; the class's attention is
            the mean over the K positions.
        usable: class -> [N] rows that count for the class; classes that are missing use every row.
        sampled: positions of the ``sampled`` baseline, the same for all rows.
        mask: [N, T] True on real tokens where rows are padded, else None.
        companions: name -> [N, T] token rows of the same shape for extra signals: ``null`` (no token repeats) and
            ``content`` (the same rows with the target token replaced).
        params: how the batch was made; goes into the record.
    """

    name: str
    capability: str
    tokens: IntArray
    query: IntArray
    target: IntArray
    targets: Mapping[str, IntArray]
    usable: Mapping[str, BoolArray] = field(default_factory=dict)
    sampled: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    mask: BoolArray | None = None
    companions: Mapping[str, IntArray] = field(default_factory=dict)
    params: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.tokens.ndim != 2 or not self.tokens.size:
            raise ProbeError(f"probe {self.name!r}: tokens must be a non-empty [N, T] array, not {self.tokens.shape}")
        rows, length = self.tokens.shape
        if self.query.shape != (rows,) or self.target.shape != (rows,):
            raise ProbeError(f"probe {self.name!r}: query and target must have one entry for each of {rows} rows")
        if self.query.min() < 1 or self.query.max() >= length:
            raise ProbeError(f"probe {self.name!r}: query positions must lie in 1..{length - 1}")
        if self.capability not in self.targets:
            raise ProbeError(f"probe {self.name!r}: no target positions for its capability {self.capability!r}")
        for kind, positions in self.targets.items():
            if positions.ndim != 2 or positions.shape[0] != rows:
                raise ProbeError(f"probe {self.name!r}: targets[{kind!r}] must be [N, K], not {positions.shape}")
            if positions.min() < 0 or (positions > self.query[:, None]).any():
                raise ProbeError(f"probe {self.name!r}: targets[{kind!r}] must lie between 0 and the row's query")
        for name, tokens in self.companions.items():
            if tokens.shape != self.tokens.shape:
                raise ProbeError(f"probe {self.name!r}: companion {name!r} must have the shape of the tokens")

    @property
    def rows(self) -> int:
        """N."""
        return int(self.tokens.shape[0])

    @property
    def length(self) -> int:
        """T."""
        return int(self.tokens.shape[1])

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the attention classes."""
        return tuple(self.targets)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over everything that the model is shown and asked."""
        digest = hashlib.sha256()
        arrays: dict[str, np.ndarray] = {"tokens": self.tokens, "query": self.query, "target": self.target}
        arrays |= {f"targets.{name}": positions for name, positions in sorted(self.targets.items())}
        arrays |= {f"usable.{name}": rows for name, rows in sorted(self.usable.items())}
        arrays["sampled"] = self.sampled
        if self.mask is not None:
            arrays["mask"] = self.mask
        for name, array in arrays.items():
            digest.update(f"{name}{array.shape}".encode())
            digest.update(np.ascontiguousarray(array, dtype="<i8").tobytes())
        return digest.hexdigest()

    def describe(self) -> dict[str, Any]:
        """What the run record keeps of the batch."""
        return {
            "fingerprint": self.fingerprint,
            "capability": self.capability,
            "rows": self.rows,
            "length": self.length,
            "classes": list(self.classes),
            **self.params,
        }

    def take(self, rows: slice | IntArray) -> ProbeBatch:
        """The batch of those rows only (another batch: its fingerprint differs)."""
        return replace(
            self,
            tokens=self.tokens[rows],
            query=self.query[rows],
            target=self.target[rows],
            targets={name: positions[rows] for name, positions in self.targets.items()},
            usable={name: usable[rows] for name, usable in self.usable.items()},
            mask=None if self.mask is None else self.mask[rows],
            companions={name: tokens[rows] for name, tokens in self.companions.items()},
        )

    def null_positions(self, draws: int, seed: int = 0) -> IntArray:
        """[N, draws] positions for the null calibration (recipe section 3): uniform over the positions in front of
        the query that are no class's target in that row; -1 where a row has none."""
        rng = np.random.default_rng(seed)
        free = self.free_positions()
        count = free.sum(axis=1)
        ordered = np.argsort(~free, axis=1, kind="stable")
        pick = np.floor(rng.random((self.rows, draws)) * np.maximum(count, 1)[:, None]).astype(np.int64)
        positions = np.take_along_axis(ordered, pick, axis=1)
        positions[count == 0] = -1
        return positions

    def free_positions(self, rows: IntArray | None = None) -> BoolArray:
        """[B, T] True at the positions up to the query that are no class's target in that row (and no padding).

        ``rows``: numbers of the rows wanted; default all.
        """
        rows = np.arange(self.rows) if rows is None else rows
        free = np.arange(self.length)[None, :] <= self.query[rows][:, None]
        place = np.arange(len(rows))[:, None]
        for positions in self.targets.values():
            free[place, positions[rows]] = False
        if self.mask is not None:
            free &= self.mask[rows]
        return free


def positional_targets(query: IntArray) -> dict[str, IntArray]:
    """Target positions of the classes that follow from the query position alone (recipe section 3).

    ``local`` are the four positions in front of the previous token.
    """
    column = query[:, None]
    return {
        "previous_token": column - 1,
        "first_token": np.zeros_like(column),
        "self": column.copy(),
        "local": np.maximum(column - np.arange(5, 1, -1)[None, :], 0),
    }


def sampled_positions(length: int, query: int | None = None, count: int = SAMPLED_POSITIONS) -> IntArray:
    """Positions of the ``sampled`` baseline (recipe section 3): drawn once with ``RandomState(0)``.

    Fewer than ``count`` where the row is too short for so many distinct ones.
    """
    last = length - 1 if query is None else query
    refused = {0, last, last - 1, *range(last - 5, last - 1)}
    available = [position for position in range(1, last) if position not in refused]
    count = min(count, len(available))
    rng = np.random.RandomState(0)
    drawn: list[int] = []
    while len(drawn) < count:
        position = int(rng.randint(1, last))
        if position not in refused:
            refused.add(position)
            drawn.append(position)
    return np.array(drawn, dtype=np.int64)


def induction_probe(
    rows: int = 2000,
    length: int = 256,
    seed: int = 42,
    token_range: tuple[int, int] = (100, 10_000),
    vocabulary: int | None = None,
    exclude: Iterable[int] = (),
    protocol: str = "default",
    start_token: int | None = None,
    name: str = "induction",
) -> ProbeBatch:
    """Rows ``[filler] A B [filler] A``: a model with induction predicts B (recipe section 1).

    Args:
        rows, length, seed: N, T and the seed of the batch's own generator; no global random state is touched.
        token_range: ids are drawn from ``[lo, hi)``.
        vocabulary: the model's vocabulary; ``hi`` is lowered to it, and ``lo`` to 0 where too little would be left
            (both said in ``params``). None: no limit known.
        exclude: special and padding ids, never drawn.
        protocol: ``"default"`` (vectorised; no collision at all) or ``"published"`` (the papers' batch, token for
            token, collisions included: those rows are counted, and where B is not unique left out of the induction
            and duplicate-token means).
        start_token: put this id at position 0 and move everything else by one. Default: none, as published.
        name: the probe's name in the record.

    Raises:
        ProbeError: the vocabulary is too small, the row too short, or a number makes no sense.
    """
    if rows < 1:
        raise ProbeError(f"the probe batch needs at least one row, not n = {rows}")
    own_length = length - (start_token is not None)
    low, high = token_range
    if low < 0 or high <= low:
        raise ProbeError(f"token range [{low}, {high}) is empty or negative: give LO < HI, both from 0 up")
    if protocol == "published":
        if start_token is not None:
            raise ProbeError("the published protocol has no start token: use protocol 'default'")
        batch = _published(rows, length, seed, low, high, vocabulary)
    elif protocol == "default":
        batch = _default(rows, own_length, seed, low, high, vocabulary, frozenset(exclude))
    else:
        raise ProbeError(f"unknown probe protocol {protocol!r}: use 'default' or 'published'")
    tokens, first, second, pair, params = batch
    usable = (tokens[:, :-1] == second[:, None]).sum(axis=1) == 1
    strays = (tokens[:, :-1] == first[:, None]).sum(axis=1) > 1
    companions = {
        "null": _null_rows(tokens, params["ids"], seed),
        "content": _content_rows(tokens, pair, params["ids"], seed),
    }
    if start_token is not None:
        tokens, pair = _prepend(tokens, start_token), pair + 1
        companions = {key: _prepend(value, start_token) for key, value in companions.items()}
    query = np.full(rows, length - 1, dtype=np.int64)
    targets = {"induction": pair[:, None] + 1, "duplicate_token": pair[:, None], **positional_targets(query)}
    described = {key: value for key, value in params.items() if key != "ids"}
    return ProbeBatch(
        name=name,
        capability="induction",
        tokens=tokens,
        query=query,
        target=second,
        targets=targets,
        usable={} if usable.all() else {"induction": usable, "duplicate_token": usable},
        sampled=sampled_positions(length),
        companions=companions,
        params={
            "protocol": protocol,
            "seed": seed,
            "start_token": start_token,
            "collisions": {"second_token": int((~usable).sum()), "first_token": int(strays.sum())},
            **described,
        },
    )


_Rows = tuple[IntArray, IntArray, IntArray, IntArray, dict[str, Any]]


def _published(rows: int, length: int, seed: int, low: int, high: int, vocabulary: int | None) -> _Rows:
    if length // 2 <= FIRST_PAIR or length < MIN_LENGTH:
        raise ProbeError(f"the published protocol needs rows of at least {2 * FIRST_PAIR + 2} tokens, not {length}")
    if high - low < 3:
        raise ProbeError(f"token range [{low}, {high}) holds fewer than the three ids that a row needs")
    if vocabulary is not None and high > vocabulary:
        raise ProbeError(
            f"the published protocol draws ids up to {high - 1}, the model's vocabulary has {vocabulary}: "
            f"use protocol 'default', or a token range that ends at {vocabulary} at most"
        )
    rng = np.random.RandomState(seed)
    tokens = np.empty((rows, length), dtype=np.int64)
    first, second, pair = (np.empty(rows, dtype=np.int64) for _ in range(3))
    for index in range(rows):
        row = rng.randint(low, high, size=length)
        a, b = (int(token) for token in rng.choice(np.arange(low, high), 2, replace=False))
        at = int(rng.randint(FIRST_PAIR, length // 2))
        row[at], row[at + 1] = a, b
        for token, keep in ((a, at), (b, at + 1)):
            for position in np.flatnonzero(row == token):
                if position != keep:
                    row[position] = rng.randint(low, high)
        row[length - 1] = a
        tokens[index], first[index], second[index], pair[index] = row, a, b, at
    return tokens, first, second, pair, {"token_range": [low, high], "ids": np.arange(low, high)}


def _default(
    rows: int, length: int, seed: int, low: int, high: int, vocabulary: int | None, exclude: frozenset[int]
) -> _Rows:
    if length < MIN_LENGTH:
        raise ProbeError(f"probe rows need at least {MIN_LENGTH} tokens, not {length}")
    notes = []
    asked = (low, high)
    if vocabulary is not None and high > vocabulary:
        high = vocabulary
        if high - low < max(MIN_VOCABULARY, high // 2):
            low = 0
        notes.append(f"token range {asked} clamped to ({low}, {high}) by the vocabulary of {vocabulary}")
    ids = np.array([token for token in range(low, high) if token not in exclude], dtype=np.int64)
    if len(ids) < MIN_VOCABULARY:
        raise ProbeError(
            f"the probe needs at least {MIN_VOCABULARY} token ids that are not special, "
            f"the range [{low}, {high}) has {len(ids)}: use a larger vocabulary or token range"
        )
    rng = np.random.default_rng(seed)
    count = len(ids)
    first = rng.integers(count, size=rows)
    second = rng.integers(count - 1, size=rows)
    second += second >= first
    filler = _integers_without(rng, count, first, second, length)
    pair = rng.integers(min(FIRST_PAIR, length // 4), length // 2, size=rows)
    index = np.arange(rows)
    filler[index, pair], filler[index, pair + 1], filler[:, -1] = first, second, first
    params = {"token_range": [low, high], "ids": ids, "excluded_ids": sorted(exclude & set(range(low, high)))}
    return ids[filler], ids[first], ids[second], pair.astype(np.int64), {**params, "notes": notes}


def _integers_without(rng: np.random.Generator, count: int, first: IntArray, second: IntArray, width: int) -> IntArray:
    """[N, width] uniform draws from 0..count-1 that avoid ``first`` and ``second`` of their row."""
    draws: IntArray = rng.integers(count - 2, size=(len(first), width))
    draws += draws >= np.minimum(first, second)[:, None]
    draws += draws >= np.maximum(first, second)[:, None]
    return draws


def _null_rows(tokens: IntArray, ids: IntArray, seed: int) -> IntArray:
    """Rows of the same shape in which no token repeats, or as few as the vocabulary allows."""
    rng = np.random.default_rng([seed, 1])
    rows, length = tokens.shape
    laps, rest = divmod(length, len(ids))
    return np.stack(
        [
            np.concatenate([*(rng.permutation(ids) for _ in range(laps)), rng.choice(ids, rest, replace=False)])
            for _ in range(rows)
        ]
    )


def _content_rows(tokens: IntArray, pair: IntArray, ids: IntArray, seed: int) -> IntArray:
    """The same rows with B replaced by another id, neither A nor B."""
    rng = np.random.default_rng([seed, 2])
    index = np.arange(len(tokens))
    first, second = np.searchsorted(ids, tokens[index, pair]), np.searchsorted(ids, tokens[index, pair + 1])
    replaced = tokens.copy()
    replaced[index, pair + 1] = ids[_integers_without(rng, len(ids), first, second, 1)[:, 0]]
    return replaced


def _prepend(tokens: IntArray, token: int) -> IntArray:
    return np.concatenate([np.full((len(tokens), 1), token, dtype=np.int64), tokens], axis=1)
