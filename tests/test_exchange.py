from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spectral_monitor import exchange
from spectral_monitor.development import develop
from spectral_monitor.errors import RecordError
from spectral_monitor.exchange import export_record, import_table, upload
from spectral_monitor.observation import Event
from spectral_monitor.record import RunRecord

HEADER = "step,tokens,layer,head,pr,selectivity_induction,attention_induction\n"
BODY = "".join(
    f"{step},{step * 100},{layer},{head},{step + layer},{60 if head == 0 and step > 1 else 1},0.{head}5\n"
    for step in (1, 2, 4)
    for layer in range(2)
    for head in range(3)
)


def csv(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "in.csv"
    file.write_text(text)
    return file


def test_a_csv_becomes_a_record(tmp_path: Path) -> None:
    done = import_table(csv(tmp_path, HEADER + BODY), tmp_path / "run")
    assert (done.observations, done.heads, done.probes) == (3, 6, ("induction",))
    found = develop(RunRecord.open(tmp_path / "run"))
    assert [str(head) for head in found.final_circuits["induction"]] == ["L0H0", "L1H0"]
    assert found.series.tokens.tolist() == [100, 200, 400]
    assert found.series.pr[2].tolist() == [4, 4, 4, 5, 5, 5]


def test_missing_columns_stay_missing_and_are_named(tmp_path: Path) -> None:
    lines = [line.rsplit(",", 2)[0] for line in (HEADER + BODY).splitlines()]
    import_table(csv(tmp_path, "\n".join(lines) + "\n"), tmp_path / "run")
    found = develop(RunRecord.open(tmp_path / "run"))
    assert "selectivity_induction" not in RunRecord.open(tmp_path / "run").table().column_names
    assert any("no selectivity" in note for note in found.series.notes)
    plain = found.to_json()
    assert plain["milestones"]["induction_heads>=3"]["status"] == "not measured"
    assert plain["shape"]["kind"] == "undetermined" and plain["calibration"] is None
    assert plain["integral"]["L1H0"] > plain["integral"]["L0H0"] > 0


def test_parquet_and_a_round_trip(tmp_path: Path) -> None:
    import_table(csv(tmp_path, HEADER + BODY), tmp_path / "run")
    table = RunRecord.open(tmp_path / "run").table()
    pq.write_table(table, tmp_path / "again.parquet")
    import_table(tmp_path / "again.parquet", tmp_path / "again")
    first, second = develop(RunRecord.open(tmp_path / "run")), develop(RunRecord.open(tmp_path / "again"))
    np.testing.assert_array_equal(first.series.pr, second.series.pr)
    assert first.to_json() == second.to_json()


def test_without_steps_observations_are_numbered_by_tokens(tmp_path: Path) -> None:
    file = csv(tmp_path, "tokens_B,layer,head,pr\n2,0,0,1.5\n1,0,0,1.2\n")
    done = import_table(file, tmp_path / "run")
    assert any("numbered" in note for note in done.notes)
    series = develop(RunRecord.open(tmp_path / "run")).series
    assert (
        series.steps.tolist() == [0, 1]
        and series.tokens.tolist() == [1e9, 2e9]
        and series.pr[:, 0].tolist() == [1.2, 1.5]
    )


def test_rename_and_unknown_columns(tmp_path: Path) -> None:
    file = csv(tmp_path, "iteration,layer,head,rank,colour\n1,0,0,1.5,red\n")
    done = import_table(file, tmp_path / "run", rename={"iteration": "step", "rank": "pr"})
    assert any("colour" in note for note in done.notes)
    assert develop(RunRecord.open(tmp_path / "run")).series.pr[0, 0] == 1.5


def test_empty_mark_and_label_are_no_marks(tmp_path: Path) -> None:
    import_table(
        csv(tmp_path, "step,layer,head,pr,mark,label\n1,0,0,2,,\n2,0,0,2,duplicate of 1,main\n"), tmp_path / "run"
    )
    first, second = RunRecord.open(tmp_path / "run").observations()
    assert (first.mark, first.label, second.mark, second.label) == (None, None, "duplicate of 1", "main")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("step,layer,pr\n1,0,2\n", "no column head"),
        ("layer,head,pr\n0,0,2\n", "step or tokens"),
        (HEADER, "no rows"),
        ("", "cannot be read"),
        ("step,layer,head,pr\n1,0,0,high\n", "'high' in data row 1"),
        ("step,layer,head,pr\n1,0.5,0,2\n", "whole number"),
        ("step,layer,head,pr\n1,0,0,2\n1,0,0,3\n", "L0H0 stands twice at step 1"),
        ("step,layer,head,pr\n-1,0,0,2\n", "must not be negative"),
        ("step,layer,head,pr\n1,,0,2\n", "empty in some rows"),
        ("step,layer,head,attention_induction\n1,0,0,1.5\n", "between 0 and 1"),
        ("step,layer,head,selectivity_self\n1,0,0,-2\n", "at least 0"),
        ("step,layer,head,head_class\n1,0,0,bos\n", "'bos' is unknown"),
        ("step,tokens,layer,head\n1,5,0,0\n1,6,0,1\n", "several values at step 1"),
        ("step,layer,head,pr,pr\n1,0,0,2,2\n", "twice"),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=says) as caught:
        import_table(csv(tmp_path, text), tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.csv"]


def test_wrong_places_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="no file at"):
        import_table(tmp_path / "none.csv", tmp_path / "run")
    (tmp_path / "in.json").write_text("{}")
    with pytest.raises(RecordError, match=r"neither .csv nor .parquet"):
        import_table(tmp_path / "in.json", tmp_path / "run")
    file = csv(tmp_path, HEADER + BODY)
    with pytest.raises(RecordError, match="not empty"):
        import_table(file, tmp_path)
    with pytest.raises(RecordError, match="no column 'x'"):
        import_table(file, tmp_path / "run", rename={"x": "pr"})
    with pytest.raises(RecordError, match="already has a column 'pr'"):
        import_table(file, tmp_path / "run", rename={"tokens": "pr"})


def test_an_export_is_a_dataset_that_others_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import_table(csv(tmp_path, HEADER + BODY), tmp_path / "run")
    record = RunRecord.open(tmp_path / "run")
    done = export_record(record, tmp_path / "out")
    assert done.rows == {"observations": 18}
    card = (tmp_path / "out" / "README.md").read_text()
    assert "config_name: observations" in card and "step 1 to step 4" in card
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets = pytest.importorskip("datasets")
    loaded = datasets.load_dataset(
        str(tmp_path / "out"), "observations", split="train", cache_dir=str(tmp_path / "cache")
    )
    assert loaded.num_rows == 18 and {"step", "layer", "head", "pr", "selectivity_induction"} <= set(
        loaded.column_names
    )
    with pytest.raises(RecordError, match="not empty"):
        export_record(record, tmp_path / "out")


def test_events_and_verdicts_go_along(tmp_path: Path) -> None:
    import_table(csv(tmp_path, HEADER + BODY), tmp_path / "run")
    with RunRecord.create(tmp_path / "run", {"probes": {}}) as record:
        record.add_event(Event("pr_rise", 2, 200.0, probe="induction", heads=("L0H0",), text="PR rises"))
        done = export_record(record, tmp_path / "out")
    assert done.rows["events"] == 1
    events: pa.Table = pq.read_table(tmp_path / "out" / "events.parquet")
    assert events["heads"].to_pylist() == [["L0H0"]]


def test_upload_says_why_the_hub_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def refuse(command: list[str], **_: object) -> SimpleNamespace:
        asked.append(command)
        return SimpleNamespace(returncode=1, stdout="", stderr="Traceback\n401 Unauthorized\n")

    monkeypatch.setattr(subprocess, "run", refuse)
    with pytest.raises(RecordError, match="401 Unauthorized"):
        upload(tmp_path, "me/run")
    assert asked[0][-2:] == ["dataset", "--private"] and exchange.__doc__
