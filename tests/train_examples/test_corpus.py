"""Text to rows: the same rows on every start, from generated stories and from files in TinyStories' layouts."""

from __future__ import annotations

from pathlib import Path

import pytest

from train_examples.corpus import (
    DataError,
    PackedRows,
    StoryRows,
    TrainingRows,
    load_corpus,
    load_tokenizer,
    own_tokenizer,
)
from train_examples.key_retrieval import key_retrieval
from train_examples.stories import CODE_WORDS, SYLLABLES, stories, story

TOKENIZER = own_tokenizer(700, sample=400)
END = TOKENIZER.eos_token_id


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def test_stories_are_seeded_and_their_names_recur() -> None:
    assert story(3, 7) == story(3, 7) != story(4, 7)
    assert list(stories(3, 2, first=7)) == [story(3, 7), story(3, 8)]
    for text in stories(0, 50):
        names = [word.strip('.,"') for word in text.split() if word[0].isupper() and len(word) >= 6]
        assert max(names.count(name) for name in names) >= 2
        assert not set(CODE_WORDS) & set(text.lower().split())


def test_long_songs_repeat_phrases_and_leave_the_other_stories_as_they_are() -> None:
    told = list(stories(0, 200, song_share=0.5))
    assert told == list(stories(0, 200, song_share=0.5))
    songs = [text for text in told if " sang: " in text and text.count(".") == 1]
    assert 70 < len(songs) < 130
    assert [text for text in told if text not in songs] == [
        story(0, n) for n, text in enumerate(told) if text not in songs
    ]
    phrases = 0
    for song in songs:
        syllables = song.split(": ")[1].rstrip(".").split()
        assert 64 <= len(syllables) <= 96 and set(syllables) <= set(SYLLABLES)
        triples = [tuple(syllables[at : at + 3]) for at in range(len(syllables) - 2)]
        phrases += len(triples) - len(set(triples))
    assert phrases / len(songs) > 20  # of unrelated syllables hardly one triple would come twice


def test_the_own_tokenizer_gives_the_text_back_and_one_token_a_code_word() -> None:
    text = story(0, 5)
    assert TOKENIZER.decode(TOKENIZER(text)["input_ids"]) == text
    assert all(len(TOKENIZER(f" {word}")["input_ids"]) == 1 for word in CODE_WORDS)
    assert own_tokenizer(700, sample=400)(text)["input_ids"] == TOKENIZER(text)["input_ids"]


def test_generated_rows_can_be_read_in_any_order() -> None:
    rows = StoryRows(TOKENIZER, length=64, count=10, seed=1)
    backwards = [rows[n].tolist() for n in reversed(range(10))][::-1]
    assert [rows[n].tolist() for n in range(10)] == backwards
    assert all(len(row) == 64 for row in backwards)
    assert TOKENIZER.decode(backwards[2]).startswith(story(1, 128)[:40])
    with pytest.raises(IndexError):
        rows[10]


def test_training_and_held_out_rows_of_generated_stories_differ() -> None:
    corpus = load_corpus("generated", TOKENIZER, 64, rows=30, seed=0, held_out=30)
    trained = {tuple(corpus.train[n]) for n in range(30)}
    assert not trained & {tuple(corpus.held_out[n]) for n in range(30)}


def test_a_text_file_in_tinystories_layout_is_packed_without_loss_of_order(tmp_path: Path) -> None:
    texts = list(stories(0, 40))
    file = tmp_path / "stories.txt"
    file.write_text("\n<|endoftext|>\n".join(texts) + "\n<|endoftext|>\n")
    corpus = load_corpus(str(file), TOKENIZER, 64, rows=0, seed=0, held_out=3)
    assert isinstance(corpus.train, PackedRows)
    packed = [*(corpus.held_out[n] for n in range(3)), *(corpus.train[n] for n in range(len(corpus.train)))]
    stream = [token for row in packed for token in row]
    expected = [token for text in texts for token in [*TOKENIZER(text)["input_ids"], END]]
    assert stream == expected[: len(stream)] and len(expected) - len(stream) < 64


@pytest.mark.parametrize("kind", ["parquet", "json"])
def test_parquet_and_json_give_the_same_rows_as_text(tmp_path: Path, kind: str) -> None:
    from datasets import Dataset

    table = Dataset.from_dict({"story": list(stories(0, 40))})
    file = tmp_path / f"stories.{kind}"
    table.to_parquet(file) if kind == "parquet" else table.to_json(file)
    corpus = load_corpus(str(file), TOKENIZER, 64, rows=0, seed=0, text_column="story", held_out=2)
    assert TOKENIZER.decode(corpus.held_out[0]).startswith(story(0, 0)[:40])


def test_the_task_is_put_in_by_row_number_alone() -> None:
    rows = StoryRows(TOKENIZER, length=96, count=20, seed=1)
    task = key_retrieval(TOKENIZER, words=32, share=0.5, gap=(8, 24))
    one, same = TrainingRows(rows, task, 5), TrainingRows(rows, task, 5)
    other = TrainingRows(rows, task, 6)
    list(one[n] for n in range(10))  # reading others first changes nothing
    assert all((one[n]["input_ids"] == same[n]["input_ids"]).all() for n in (19, 3, 11))
    assert any((one[n]["input_ids"] != other[n]["input_ids"]).any() for n in range(20))


def test_mistakes_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no file"):
        load_corpus(str(tmp_path / "missing.txt"), TOKENIZER, 64, rows=1, seed=0)
    short = tmp_path / "short.txt"
    short.write_text("One day.\n")
    with pytest.raises(DataError, match="too little"):
        load_corpus(str(short), TOKENIZER, 64, rows=1, seed=0)
    (tmp_path / "mixed").mkdir()
    (tmp_path / "mixed" / "a.txt").write_text("a")
    (tmp_path / "mixed" / "b.json").write_text("{}")
    with pytest.raises(DataError, match="one kind"):
        load_corpus(str(tmp_path / "mixed"), TOKENIZER, 64, rows=1, seed=0)
    with pytest.raises(DataError, match="--tokenizer own"):
        load_tokenizer(str(tmp_path / "nothing"), 100)
