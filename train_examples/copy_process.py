"""A small synthetic language in which phrases recur: what makes an induction circuit worth having.

Each row is one sequence. Fresh tokens come from a Markov language with a Zipf background, or (in a share of the rows)
uniformly from the vocabulary. On top lies a *copy process*: at each position that is not inside a copy, a phrase
starts to be re-read, with a fixed chance, from a uniformly random earlier position of the same row, and ends with
another fixed chance at each step. A model that only knows the language is left on a plateau; finding the earlier
place and reading on from it (induction) takes it further down.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True)
class CopyProcess:
    """The language's constants.

    Attributes:
        vocabulary: number of token ids, all of them in use.
        length: tokens a row.
        copy_start: chance, at a position outside any copy, that a phrase starts to be re-read there.
        copy_end: chance at each copied token that the phrase ends after it.
        uniform_rows: share of the rows whose fresh tokens are uniform instead of drawn from the Markov language.
        successors: preferred successors that each token has.
        preferred: chance that a fresh token of the Markov language is one of them (else it is a Zipf draw).
    """

    vocabulary: int = 64
    length: int = 64
    copy_start: float = 0.2
    copy_end: float = 0.1
    uniform_rows: float = 0.5
    successors: int = 8
    preferred: float = 0.75

    def sample(self, rows: int, seed: int) -> Tokens:
        """Rows of the language: [rows, length] int64. The same seed gives the same language and the same rows."""
        rng = np.random.default_rng(seed)
        zipf = 1.0 / np.arange(1, self.vocabulary + 1)
        zipf = rng.permutation(zipf / zipf.sum())
        successor = rng.integers(0, self.vocabulary, size=(self.vocabulary, self.successors))
        uniform = rng.random(rows) < self.uniform_rows

        tokens = np.empty((rows, self.length), dtype=np.int64)
        tokens[:, 0] = rng.integers(0, self.vocabulary, size=rows)
        source = np.full(rows, -1)  # where the running copy reads next; -1 outside a copy
        every = np.arange(rows)
        for position in range(1, self.length):
            starts = (source < 0) & (rng.random(rows) < self.copy_start)
            source = np.where(starts, rng.integers(0, position, size=rows), source)
            fresh = np.where(
                rng.random(rows) < self.preferred,
                successor[tokens[:, position - 1], rng.integers(0, self.successors, size=rows)],
                rng.choice(self.vocabulary, size=rows, p=zipf),
            )
            fresh = np.where(uniform, rng.integers(0, self.vocabulary, size=rows), fresh)
            copying = source >= 0
            tokens[:, position] = np.where(copying, tokens[every, np.maximum(source, 0)], fresh)
            ends = rng.random(rows) < self.copy_end
            source = np.where(copying & ~ends, source + 1, -1)
        return tokens


def fixed_lag(rows: int, seed: int, vocabulary: int = 64, length: int = 64) -> Tokens:
    """[rows, length] int64: the second half of each row is its first half again, of uniformly drawn tokens.

    Everything that can be predicted stands at the same distance, so that a head that counts positions does the whole
    task and nothing has to be looked up by content: copying without induction.
    """
    half = length // 2
    first = np.random.default_rng(seed).integers(0, vocabulary, size=(rows, half))
    return np.concatenate([first, first], axis=1)


class TokenRows(Dataset[dict[str, torch.Tensor]]):
    """Rows of token ids as a causal language model's Trainer wants them: ``input_ids`` and ``labels`` alike."""

    def __init__(self, tokens: Tokens) -> None:
        self.tokens = torch.from_numpy(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self.tokens[index]
        return {"input_ids": row, "labels": row}
