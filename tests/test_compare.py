from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from spectral_monitor.compare import compare, probe_of
from spectral_monitor.errors import RecordError
from spectral_monitor.probe import induction_probe
from spectral_monitor.publish.model_tables import tables_of_comparison
from spectral_monitor.record import RunRecord, dumps

from .development.synthetic import observation

FINGERPRINT = "f" * 64


def run(place: Path, members: tuple[int, ...], fingerprint: str = FINGERPRINT, **shape: int) -> RunRecord:
    probes = {"induction": {"fingerprint": fingerprint, "capability": "induction"}}
    with RunRecord.create(place, {"probes": probes}) as record:
        for step in (1, 2, 4):
            count = shape.get("layers", 2) * shape.get("per_layer", 4)
            ratios, ranks = np.ones(count), np.full(count, 2.0)
            if step > 1:
                ratios[list(members)] = 80.0
                ranks[list(members)] = 9.0
            record.append(
                observation(step, pr=ranks, selectivity={"induction": ratios}, fingerprint=fingerprint, **shape)
            )
    return RunRecord.open(place)


def test_overlaps_stand_beside_chance(tmp_path: Path) -> None:
    found = compare([run(tmp_path / "a", (4, 5)), run(tmp_path / "b", (5, 6)), run(tmp_path / "c", (0, 1))])
    pairs = {(pair.first, pair.second): pair.overlaps for pair in found.pairs}
    one = pairs["a", "b"]["induction circuit"]
    # two of four heads of layer 1 each: by chance they share 0, 1, 2 with probability 1/6, 4/6, 1/6
    assert one.jaccard == pytest.approx(1 / 3)
    assert one.expected == pytest.approx(4 / 6 * 1 / 3 + 1 / 6)
    assert one.p_value == pytest.approx(5 / 6)
    assert pairs["a", "c"]["induction circuit"].expected == 0 and pairs["a", "c"]["induction circuit"].p_value == 1
    assert pairs["a", "b"]["picks by integral"].shared == 1
    assert found.picks["a"]["integral"] == found.runs["a"].final_circuits["induction"]
    plain = json.loads(dumps(found.to_json()))
    assert plain["runs"]["c"]["final_circuits"]["induction"] == ["L0H0", "L0H1"]
    assert {table.name for table in tables_of_comparison(found)} == {"runs", "milestones", "overlaps"}


def test_models_of_different_shape_compare_in_time_only(tmp_path: Path) -> None:
    found = compare([run(tmp_path / "a", (4, 5)), run(tmp_path / "b", (4, 5), layers=3)])
    assert found.pairs[0].overlaps == {} and "different heads" in found.notes[0]


def test_what_does_not_compare_is_one_sentence(tmp_path: Path) -> None:
    first = run(tmp_path / "a", (4,))
    with pytest.raises(RecordError, match="at least two"):
        compare([first])
    with pytest.raises(RecordError, match="given twice"):
        compare([first, RunRecord.open(tmp_path / "a")])
    with pytest.raises(RecordError, match="different probe batches"):
        compare([first, run(tmp_path / "b", (4,), fingerprint="0" * 64)])


def test_an_unknown_probe_is_noted(tmp_path: Path) -> None:
    found = compare([run(tmp_path / "a", (4,)), run(tmp_path / "b", (4,), fingerprint="")])
    assert any("unknown" in note for note in found.notes)


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    found = compare([run(tmp_path / "seed0" / "run", (4,)), run(tmp_path / "seed1" / "run", (4,))])
    assert list(found.runs) == ["seed0/run", "seed1/run"]


@pytest.mark.parametrize("options", [{}, {"protocol": "published"}, {"start_token": 1, "exclude": (5, 6)}])
def test_a_probe_is_made_again_from_its_description(options: dict[str, object], tmp_path: Path) -> None:
    vocabulary = None if "protocol" in options else 80
    probe = induction_probe(8, 64, vocabulary=vocabulary, **options)  # type: ignore[arg-type]
    with RunRecord.create(tmp_path / "run", {"probes": {"induction": probe.describe()}}) as record:
        assert probe_of(record).fingerprint == probe.fingerprint
        with pytest.raises(RecordError, match="no probe 'other'"):
            probe_of(record, "other")
    own = {"induction": {**probe.describe(), "fingerprint": "0" * 64}}
    with RunRecord.create(tmp_path / "own", {"probes": own}) as record, pytest.raises(RecordError, match="SHA-256"):
        probe_of(record)
