"""Where the text comes from, how it becomes rows of tokens, and which row is which: the same for every run of a seed.

``--data generated`` needs no files: row n is stories number n*K and on, told one after the other. A local text, JSON
or Parquet file or folder, and a data set's name on the Hub, go through ``datasets`` and are packed end to end.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from spectral_monitor.errors import SpectralMonitorError
from train_examples.key_retrieval import WORDINGS, KeyRetrieval, Rows
from train_examples.stories import CODE_WORDS, stories, story

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

Tokens = npt.NDArray[np.int64]

GENERATED = "generated"
END = "<|endoftext|>"
#: Stories that the held-out rows are made of start here; no training row gets so far.
HELD_OUT = 10**9
_KINDS = {".txt": "text", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}


class DataError(SpectralMonitorError, ValueError):
    """The training text cannot be read, or is not enough."""


# -- tokenizers -------------------------------------------------------------------------------------------------------


def own_tokenizer(
    vocabulary: int, seed: int = 0, sample: int = 2000, song_share: float = 0.0
) -> PreTrainedTokenizerFast:
    """A byte-level BPE of at most ``vocabulary`` tokens, trained on generated stories and on the code words.

    Each code word is written often enough to become one token; ``<|endoftext|>`` is id 0. The characters of the
    stories are its alphabet: text with other characters wants another tokenizer (``--tokenizer``).
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    codes = [f"{a} {word}{b}{q} {word}{b}" for word in CODE_WORDS for a, b, q in WORDINGS]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=[END], show_progress=False)
    tokenizer.train_from_iterator(
        [*stories(seed, sample, song_share=song_share), *(codes * max(1, sample // 40))], trainer
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, bos_token=END)


def load_tokenizer(name: str, vocabulary: int, song_share: float = 0.0) -> PreTrainedTokenizerBase:
    """``own`` builds the small BPE for stories of that ``song_share``; anything else is a Hub name or a local folder.

    Raises:
        DataError: the tokenizer cannot be loaded.
    """
    if name == "own":
        return own_tokenizer(vocabulary, song_share=song_share)
    from transformers import AutoTokenizer

    try:
        return cast("PreTrainedTokenizerBase", AutoTokenizer.from_pretrained(name))
    except (OSError, ValueError) as error:
        raise DataError(
            f"the tokenizer {name!r} cannot be loaded ({_first_line(error)}): give a local folder, or `--tokenizer own`"
        ) from error


# -- rows -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoryRows:
    """Row n: generated stories, one after the other with an end-of-text token behind each, cut at ``length`` tokens."""

    tokenizer: PreTrainedTokenizerBase
    length: int
    count: int
    seed: int
    first: int = 0
    song_share: float = 0.0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tokens:
        if not 0 <= index < self.count:
            raise IndexError(index)
        stride = self.length  # a story has more than one token, so no row runs into the next one's stories
        number, ids = self.first + index * stride, list[int]()
        while len(ids) < self.length:
            text = story(self.seed, number, self.song_share)
            ids += self.tokenizer(text, add_special_tokens=False)["input_ids"]  # type: ignore[operator]
            ids.append(cast(int, self.tokenizer.eos_token_id))
            number += 1
        return np.array(ids[: self.length], dtype=np.int64)


@dataclass(frozen=True)
class PackedRows:
    """Rows ``first`` to ``first + count - 1`` of a packed ``datasets.Dataset``."""

    packed: Any
    first: int
    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tokens:
        if not 0 <= index < self.count:
            raise IndexError(index)
        return np.asarray(self.packed[self.first + index]["input_ids"], dtype=np.int64)


class TrainingRows(Dataset[dict[str, torch.Tensor]]):
    """``rows`` with the key-retrieval task put into some of them; which, and how, follows from ``seed`` and the row."""

    def __init__(self, rows: Rows, task: KeyRetrieval | None, seed: int) -> None:
        self.rows, self.task, self.seed = rows, task, seed

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self.rows[index]
        if self.task is not None:
            row = self.task.insert(row, np.random.default_rng([self.seed, index]))
        tokens = torch.from_numpy(row)
        return {"input_ids": tokens, "labels": tokens}


@dataclass(frozen=True)
class Corpus:
    """Training rows, and rows of the same kind that are never trained on (text for the probe batches)."""

    train: Rows
    held_out: Rows


def load_corpus(
    data: str,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    rows: int,
    seed: int,
    text_column: str = "text",
    held_out: int = 256,
    song_share: float = 0.0,
) -> Corpus:
    """``rows`` training rows of ``length`` tokens, in an order that is the same on every start.

    Args:
        data: ``generated``; a local ``.txt``, ``.json``, ``.jsonl`` or ``.parquet`` file; a folder of one such kind;
            or a data set's name on the Hub (its ``train`` split).
        seed: of the story generator.
        text_column: where the text stands in JSON, Parquet and Hub data.
        held_out: rows kept aside; they come first in the packed text.
        song_share: share of the generated stories that are one long song (see ``stories``).

    Raises:
        DataError: nothing is there, it cannot be read, or it has too few tokens for even one training row.
    """
    if data == GENERATED:
        return Corpus(
            StoryRows(tokenizer, length, rows, seed, song_share=song_share),
            StoryRows(tokenizer, length, held_out, seed, HELD_OUT, song_share),
        )
    packed = _pack(_read(data, text_column), tokenizer, length)
    held_out = min(held_out, max(1, len(packed) // 10))
    if len(packed) <= held_out:
        raise DataError(
            f"{data} fills {len(packed)} rows of {length} tokens: too little to train on and to hold some back"
        )
    available = len(packed) - held_out
    return Corpus(PackedRows(packed, held_out, available), PackedRows(packed, 0, held_out))


def _read(data: str, text_column: str) -> Any:
    """A ``datasets.Dataset`` with one column ``text``."""
    import datasets

    path = Path(data)
    try:
        if path.exists():
            files = sorted(p for p in path.rglob("*") if p.suffix in _KINDS) if path.is_dir() else [path]
            kinds = {_KINDS.get(file.suffix, "") for file in files}
            if len(kinds) != 1 or "" in kinds:
                raise DataError(f"{data} must hold files of one kind ({', '.join(_KINDS)}), found {sorted(kinds)}")
            table = datasets.load_dataset(kinds.pop(), data_files=[str(file) for file in files], split="train")
        elif path.is_absolute() or path.suffix in _KINDS:
            raise DataError(f"there is no file {data}: check --data")
        else:
            table = datasets.load_dataset(data, split="train")
    except DataError:
        raise
    except Exception as error:  # datasets raises whatever its readers and its HTTP client raise
        raise DataError(
            f"the data {data!r} cannot be loaded ({_first_line(error)}): give a local file or folder, "
            f"a data set's name on the Hub, or `--data {GENERATED}`"
        ) from error
    column = "text" if "text" in table.column_names and text_column not in table.column_names else text_column
    if column not in table.column_names:
        raise DataError(f"{data} has no column {column!r}, only {', '.join(table.column_names)}: give --text_column")
    return (
        table.select_columns(column).rename_column(column, "text") if column != "text" else table.select_columns(column)
    )


def _pack(table: Any, tokenizer: PreTrainedTokenizerBase, length: int) -> Any:
    """Documents end to end with an end-of-text token behind each, cut into rows; what is left of a batch is dropped.

    A line that is ``<|endoftext|>`` alone (TinyStories' text files) is that token; other lines of a text file keep
    their line break.
    """
    end = cast(int, tokenizer.eos_token_id)
    lines = any(text == END for text in table[:2000]["text"])

    def pack(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        stream: list[int] = []
        if lines:
            text = "\n".join(batch["text"])
            documents = [part.strip("\n") for part in text.split(END)]
        else:
            documents = batch["text"]
        encoded = cast("list[list[int]]", tokenizer([d for d in documents if d], add_special_tokens=False)["input_ids"])
        for ids in encoded:
            stream += [*ids, end]
        whole = len(stream) // length * length
        return {"input_ids": [stream[at : at + length] for at in range(0, whole, length)]}

    return table.map(pack, batched=True, batch_size=20_000, remove_columns=["text"], desc="packing")


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
