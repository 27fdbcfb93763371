"""Key retrieval: what is told is what is asked for, at the stated gap, in training rows and in the probe."""

from __future__ import annotations

import numpy as np
import pytest

from spectral_monitor.errors import ProbeError
from train_examples.corpus import StoryRows, own_tokenizer
from train_examples.key_retrieval import KeyRetrieval, key_retrieval, key_retrieval_probe

TOKENIZER = own_tokenizer(700, sample=400)
TASK = key_retrieval(TOKENIZER, words=32, share=1.0, gap=(8, 24))
FILLER = StoryRows(TOKENIZER, length=96, count=20, seed=9)


def find(row: np.ndarray, part: np.ndarray) -> int:
    places = [at for at in range(len(row) - len(part) + 1) if (row[at : at + len(part)] == part).all()]
    assert len(places) <= 1
    return places[0] if places else -1


def test_code_words_are_one_token_and_no_story_uses_them() -> None:
    assert len(set(TASK.words.tolist())) == 32
    for word in TASK.words:
        text = TOKENIZER.decode([word])
        assert text.startswith(" ") and text[1:].isalpha()
        assert all(word not in FILLER[n] for n in range(20))


def test_training_rows_tell_a_code_early_and_ask_for_it_after_the_gap() -> None:
    rng = np.random.default_rng(0)
    gaps = set()
    for number in range(200):
        plain = FILLER[number % 20]
        row = TASK.insert(plain, rng)
        assert len(row) == len(plain)
        told = next(w for w in TASK.wordings if find(row, w[2]) >= 0)
        start, asked = find(row, told[0]), find(row, told[2])
        place = start + len(told[0])
        assert row[place] in TASK.words and row[asked + len(told[2])] == row[place]
        assert start <= len(row) // 4
        gaps.add(asked - (place + 1 + len(told[1])))
    assert min(gaps) == 8 and max(gaps) == 23


def test_the_share_of_rows_with_a_code() -> None:
    task = KeyRetrieval(TASK.wordings, TASK.words, share=0.1, gap=(8, 24))
    rng = np.random.default_rng(0)
    changed = [bool((task.insert(FILLER[0], rng) != FILLER[0]).any()) for _ in range(2000)]
    assert np.mean(changed) == pytest.approx(0.1, abs=0.03)


def test_the_probe_asks_for_what_stands_at_its_target_position() -> None:
    probe = key_retrieval_probe(TASK, FILLER, rows=50, length=80)
    rows = np.arange(50)
    assert probe.capability == "key_retrieval" and (probe.query == 79).all()
    assert (probe.tokens[rows, probe.targets["key_retrieval"][:, 0]] == probe.target).all()
    assert ((probe.tokens == probe.target[:, None]).sum(axis=1) == 1).all()
    questions = [wording[2] for wording in TASK.wordings]
    for row in probe.tokens:
        assert any((row[-len(question) :] == question).all() for question in questions)


def test_companions_take_away_what_is_asked_for() -> None:
    probe = key_retrieval_probe(TASK, FILLER, rows=20, length=80)
    place = probe.targets["key_retrieval"][:, 0]
    content = probe.companions["content"]
    assert ((content != probe.tokens).sum(axis=1) == 1).all()
    assert (content[np.arange(20), place] != probe.target).all()
    assert np.isin(content[np.arange(20), place], TASK.words).all()
    assert not np.isin(probe.companions["null"], TASK.words).any()


def test_longer_gaps_are_another_batch_of_the_same_capability() -> None:
    near = key_retrieval_probe(TASK, FILLER, rows=30, length=80)
    far = key_retrieval_probe(TASK, FILLER, rows=30, length=80, gap=(40, 60), name="key_retrieval_long")
    assert near.fingerprint != far.fingerprint
    assert far.targets["key_retrieval"].max() < near.targets["key_retrieval"].min() + 32
    distance = (far.query - far.targets["key_retrieval"][:, 0]).min()
    assert distance >= 40
    assert near.fingerprint == key_retrieval_probe(TASK, FILLER, rows=30, length=80).fingerprint


def test_mistakes_are_one_sentence() -> None:
    with pytest.raises(ProbeError, match="use longer rows or a shorter gap"):
        key_retrieval_probe(TASK, FILLER, rows=4, length=30)
    with pytest.raises(ProbeError, match="at least"):
        KeyRetrieval(TASK.wordings, TASK.words, share=1.0, gap=(90, 95)).insert(FILLER[0], np.random.default_rng(0))
    with pytest.raises(ProbeError, match="LOW < HIGH"):
        KeyRetrieval(TASK.wordings, TASK.words, gap=(5, 5))
    with pytest.raises(ProbeError, match="0 to 1"):
        KeyRetrieval(TASK.wordings, TASK.words, share=1.5)
    with pytest.raises(ProbeError, match="ask for fewer"):
        key_retrieval(TOKENIZER, words=5000)
