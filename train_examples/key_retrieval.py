"""Key retrieval: a code word is told early in a row and asked for later. The training examples and the probe batch.

A row carries "The secret code is WORD." and, after a gap, "What is the secret code? WORD." (several paired wordings).
The model is read at the last token of the question: the code word must come next, and a head that does the task
attends to the place where it was told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from spectral_monitor.errors import ProbeError
from spectral_monitor.probe import ProbeBatch, positional_targets, sampled_positions
from train_examples.stories import CODE_WORDS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tokens = npt.NDArray[np.int64]

#: (statement before the word, statement after it, question). The word itself is one token.
WORDINGS = (
    (" The secret code is", ".", " What is the secret code?"),
    (" The password is", ".", " What is the password?"),
    (" Remember the magic word:", ".", " What was the magic word?"),
    (" The hidden key is", ".", " Which key was hidden?"),
)
NAME = "key_retrieval"


class Rows(Protocol):
    """Rows of token ids by number: [length] int64 each."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Tokens: ...


@dataclass(frozen=True)
class KeyRetrieval:
    """The task for one tokenizer.

    Attributes:
        wordings: (tokens before the word, tokens after it, tokens of the question), one a wording.
        words: [W] token ids of the code words.
        share: chance that a training row carries the task.
        gap: (low, high): tokens between statement and question, low <= gap < high.
    """

    wordings: tuple[tuple[Tokens, Tokens, Tokens], ...]
    words: Tokens
    share: float = 0.10
    gap: tuple[int, int] = (16, 96)

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ProbeError(f"the share of rows with a secret code is {self.share}: give a number from 0 to 1")
        low, high = self.gap
        if low < 0 or high <= low:
            raise ProbeError(f"the gap between statement and question is [{low}, {high}): give LOW < HIGH, from 0 up")
        if len(self.words) < 2:
            raise ProbeError(f"key retrieval needs at least two code words, not {len(self.words)}")

    @property
    def longest(self) -> int:
        """Tokens of the longest statement, gap, question and answer together."""
        return max(len(a) + 1 + len(b) + len(q) + 1 for a, b, q in self.wordings) + self.gap[1] - 1

    def insert(self, row: Tokens, rng: np.random.Generator) -> Tokens:
        """``row`` with statement, question and answer put in (its last tokens fall off), or as it is: by chance."""
        if rng.random() >= self.share:
            return row
        before, after, question = self.wordings[rng.integers(len(self.wordings))]
        word = self.words[rng.integers(len(self.words))]
        gap = int(rng.integers(*self.gap))
        statement, asked = np.r_[before, word, after], np.r_[question, word, after]
        room = len(row) - len(statement) - gap - len(asked)
        if room < 0:
            raise ProbeError(
                f"a secret code with a gap of {gap} tokens does not fit into {len(row)}: "
                f"use a context of at least {self.longest + 1} or a shorter gap"
            )
        start = int(rng.integers(min(room, len(row) // 4) + 1))
        told = np.concatenate([row[:start], statement, row[start : start + gap], asked, row[start + gap :]])
        return np.asarray(told[: len(row)], dtype=np.int64)


def key_retrieval(
    tokenizer: PreTrainedTokenizerBase,
    words: int = 512,
    share: float = 0.10,
    gap: tuple[int, int] = (16, 96),
    seed: int = 0,
) -> KeyRetrieval:
    """The task in the tokens of ``tokenizer``; code words are those of ``CODE_WORDS`` that are one token each when
    there are enough of them, else ``words`` lower-case words of its vocabulary, drawn by ``seed``.

    Raises:
        ProbeError: the tokenizer has too few words that are one token.
    """
    ids = [_single(tokenizer, f" {word}") for word in CODE_WORDS]
    chosen = [token for token in ids if token is not None]
    if len(chosen) < words:
        chosen = _vocabulary_words(tokenizer)
        if len(chosen) < words:
            raise ProbeError(
                f"the tokenizer has {len(chosen)} lower-case words of one token, {words} code words were asked for: "
                "ask for fewer (--code_words)"
            )
        picked = np.random.default_rng(seed).permutation(len(chosen))[:words]
        chosen = [chosen[index] for index in picked]
    encoded = tuple((_ids(tokenizer, a), _ids(tokenizer, b), _ids(tokenizer, q)) for a, b, q in WORDINGS)
    return KeyRetrieval(encoded, np.array(sorted(chosen[:words]), dtype=np.int64), share, gap)


def key_retrieval_probe(
    task: KeyRetrieval,
    filler: Rows,
    rows: int = 2000,
    length: int = 256,
    gap: tuple[int, int] | None = None,
    seed: int = 42,
    name: str = NAME,
) -> ProbeBatch:
    """Rows ``[filler] statement [filler of gap tokens] question``; the query is the question's last token.

    Args:
        task: wordings and code words.
        filler: rows of ordinary text without the task, at least one; row n of the probe uses filler row n, over again.
        rows, length: N and T.
        gap: tokens between statement and question, low <= gap < high; default: the training range.
        seed: of the batch's own generator.
        name: in the record; give a set with longer gaps another one, for example ``key_retrieval_long``.

    Returns:
        A batch of capability ``key_retrieval``: its target position is the code word in the statement. Companions:
        ``content`` (another code word in the statement) and ``null`` (the statement overwritten by ordinary text: there
        is nothing to retrieve).

    Raises:
        ProbeError: the gap does not fit into the row.
    """
    if rows < 1 or not len(filler):
        raise ProbeError(f"the probe {name!r} needs at least one row and some text to fill it, not n = {rows}")
    low, high = gap or task.gap
    rng = np.random.default_rng(seed)
    tokens = np.empty((rows, length), dtype=np.int64)
    content, null = np.empty_like(tokens), np.empty_like(tokens)
    target, place = np.empty(rows, dtype=np.int64), np.empty(rows, dtype=np.int64)
    for number in range(rows):
        before, after, question = task.wordings[number % len(task.wordings)]
        word, other = task.words[rng.choice(len(task.words), 2, replace=False)]
        between = int(rng.integers(low, high))
        statement = np.r_[before, word, after]
        head = length - len(statement) - between - len(question)
        text = filler[number % len(filler)]
        if head < 0 or len(text) < length - len(question):
            raise ProbeError(
                f"probe {name!r}: a gap of {between} tokens does not fit into rows of {length} "
                f"(filler rows of {len(text)}): use longer rows or a shorter gap"
            )
        place[number], target[number] = head + len(before), word
        tokens[number] = np.r_[text[:head], statement, text[head : head + between], question]
        null[number] = np.r_[text[: length - len(question)], question]
        content[number] = tokens[number]
        content[number, place[number]] = other
    query = np.full(rows, length - 1, dtype=np.int64)
    return ProbeBatch(
        name=name,
        capability=NAME,
        tokens=tokens,
        query=query,
        target=target,
        targets={NAME: place[:, None], **positional_targets(query)},
        sampled=sampled_positions(length),
        companions={"null": null, "content": content},
        params={"seed": seed, "gap": [low, high], "code_words": len(task.words), "wordings": len(task.wordings)},
    )


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> Tokens:
    encoded: Any = tokenizer(text, add_special_tokens=False)["input_ids"]
    return np.array(encoded, dtype=np.int64)


def _single(tokenizer: PreTrainedTokenizerBase, text: str) -> int | None:
    ids: Sequence[int] = tokenizer(text, add_special_tokens=False)["input_ids"]  # type: ignore[assignment]
    return int(ids[0]) if len(ids) == 1 else None


def _vocabulary_words(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids that read as a space and a lower-case word of four letters or more, in order of id."""
    found = []
    for token in range(len(tokenizer)):
        text = str(tokenizer.decode([token]))
        if len(text) > 4 and text[0] == " " and text[1:].isascii() and text[1:].isalpha() and text[1:].islower():
            found.append(token)
    return found
