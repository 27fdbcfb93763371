from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from spectral_monitor.capture import Subject
from spectral_monitor.errors import ProbeError
from spectral_monitor.natural_text import natural_text_probe, repeats, texts_of
from spectral_monitor.reading import observation_of

from .models import tiny_llama


def text(seed: int = 0, length: int = 2000, vocabulary: int = 90) -> np.ndarray:
    """Random tokens in which phrases come back, as in real text."""
    rng = np.random.default_rng(seed)
    ids: list[int] = []
    while len(ids) < length:
        if len(ids) > 40 and rng.random() < 0.3:
            start = int(rng.integers(max(0, len(ids) - 40), len(ids) - 4))
            ids += ids[start : start + 4]
        else:
            ids.append(int(rng.integers(1, vocabulary)))
    return np.array(ids[:length])


def test_a_place_by_hand() -> None:
    window = [9, 5, 7, 1, 2, 3, 4, 6, 8, 10, 11, 5, 7, 12]
    found = repeats(window, 8)
    assert [(place.pair, place.query) for place in found] == [(1, 11)]
    assert repeats(window, 12) == []
    assert repeats(window, 8, frozenset({7})) == []
    near = [9, 1, 2, 3, 4, 6, 8, 5, 7, 10, 5, 7, 12]
    assert repeats(near, 4) == [], "B stands among the local positions"
    twice = [9, 5, 7, 1, 5, 2, 3, 4, 6, 8, 10, 5, 7, 12]
    assert repeats(twice, 8) == [], "A stood twice before"
    elsewhere = [9, 5, 7, 1, 2, 7, 3, 4, 6, 8, 10, 5, 7, 12]
    assert repeats(elsewhere, 8) == [], "B stood elsewhere too"
    first = [5, 7, 1, 2, 3, 4, 6, 8, 10, 11, 5, 7, 12]
    assert repeats(first, 8) == [], "A is the first token"


@pytest.mark.parametrize("start_token", [None, 0])
def test_every_row_asks_what_it_should(start_token: int | None) -> None:
    probe = natural_text_probe([text(seed) for seed in range(6)], rows=40, length=64, start_token=start_token)
    assert probe.rows == 40 and probe.length == 64 and len(set(probe.query.tolist())) > 5
    for row in range(probe.rows):
        tokens, query = probe.tokens[row], int(probe.query[row])
        copy, pair = int(probe.targets["induction"][row, 0]), int(probe.targets["duplicate_token"][row, 0])
        before = tokens[:query].tolist()
        assert copy == pair + 1 and tokens[pair] == tokens[query] and tokens[copy] == probe.target[row]
        assert before.count(tokens[query]) == 1 and before.count(probe.target[row]) == 1
        assert copy <= query - 6 and pair >= 1 + (start_token is not None)
        assert probe.companions["content"][row, copy] != probe.target[row]
        if start_token is not None:
            assert tokens[0] == start_token
    assert probe.sampled.max() < probe.query.min() - 5


def test_the_same_text_gives_the_same_batch_and_another_seed_another() -> None:
    documents = [text(seed) for seed in range(4)]
    first, again = natural_text_probe(documents, 20, 64), natural_text_probe(documents, 20, 64)
    assert first.fingerprint == again.fingerprint
    assert natural_text_probe(documents, 20, 64, seed=1).fingerprint != first.fingerprint


def test_windows_never_cross_documents() -> None:
    documents = [text(seed, 70) for seed in range(200)]
    probe = natural_text_probe(documents, 500, 64)
    starts = {tuple(document[:64].tolist()) for document in documents}
    assert all(tuple(row.tolist()) in starts for row in probe.tokens)
    assert probe.rows <= probe.params["windows_with_a_place"] <= probe.params["windows"] == 200


def test_a_model_is_read_at_differing_positions() -> None:
    model = tiny_llama()
    probe = natural_text_probe([text(seed) for seed in range(4)], rows=12, length=64)
    table = observation_of(Subject(model, probe).read(probe, 5), probe, step=0, tokens=None).heads
    model.set_attn_implementation("eager")
    import torch

    with torch.no_grad():
        attentions = model(torch.from_numpy(probe.tokens), output_attentions=True).attentions
    rows = torch.arange(probe.rows)
    slow = attentions[1][rows, :, torch.from_numpy(probe.query)]
    expected = slow[rows, :, torch.from_numpy(probe.targets["induction"][:, 0])].mean(0)
    got = table.attention["induction"][table.layer == 1]
    np.testing.assert_allclose(got, expected.numpy(), atol=1e-6)


@pytest.mark.parametrize(
    ("documents", "options", "says"),
    [
        ([], {}, "no place to ask"),
        ([np.arange(1000)], {"length": 64}, "no place to ask"),
        ([text()], {"rows": 0}, "at least one row"),
        ([text()], {"length": 16}, "at least 32 tokens"),
        ([text(length=40)], {"length": 64}, "no place to ask"),
    ],
)
def test_bad_input_is_one_sentence(documents: list[np.ndarray], options: dict[str, int], says: str) -> None:
    with pytest.raises(ProbeError, match=says):
        natural_text_probe(documents, **options)


def test_texts_from_files(tmp_path: Path) -> None:
    plain = tmp_path / "a.txt"
    plain.write_text("one\nline\n\n\n  two \n")
    assert texts_of(str(plain)) == ["one\nline", "two"]
    table = tmp_path / "a.jsonl"
    table.write_text('{"story": "once"}\n{"story": ""}\n{"story": "twice"}\n')
    assert texts_of(str(table), "story") == ["once", "twice"]
    with pytest.raises(ProbeError, match="no column 'text': it has story"):
        texts_of(str(table))
    with pytest.raises(ProbeError, match="no text file"):
        texts_of(str(tmp_path / "none.csv"))
    with pytest.raises(ProbeError, match="cannot be loaded as a dataset"):
        texts_of(str(tmp_path / "none"))
    (tmp_path / "empty.txt").write_text("\n\n")
    with pytest.raises(ProbeError, match="holds no text"):
        texts_of(str(tmp_path / "empty.txt"))
