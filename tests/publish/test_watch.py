from __future__ import annotations

import io
import os
import time
from pathlib import Path

import pytest
from rich.console import Console

from spectral_monitor.errors import RecordError
from spectral_monitor.publish.follow import Follower
from spectral_monitor.publish.watch import view, watch
from spectral_monitor.record import RunRecord

from . import factories as make


def text_of(run_dir: Path, width: int = 110, height: int | None = None, **options: object) -> str:
    console = Console(file=io.StringIO(), width=width, height=height or 50, color_system=None)
    console.print(view(Follower(run_dir).poll(), 40.0, width=width, height=height, **options))  # type: ignore[arg-type]
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_follower_reads_each_file_once_and_sees_every_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from spectral_monitor.publish import follow

    read = []
    original = follow.read_observation
    monkeypatch.setattr(follow, "read_observation", lambda path: read.append(path.name) or original(path))
    make.record(tmp_path / "run", (0, 1))
    follower = Follower(tmp_path / "run")
    first = follower.poll()
    assert follower.poll() is first and len(read) == 2
    make.record(tmp_path / "run", (2,))
    second = follower.poll()
    assert [seen.step for seen in second.observations] == [0, 1, 2] and len(read) == 3
    assert second.version == first.version + 1
    with RunRecord.create(tmp_path / "run", {"probes": {}}) as record:
        record.rewind(0)
    assert [seen.step for seen in follower.poll().observations] == [0]
    with RunRecord.create(tmp_path / "run", {"probes": {}}) as record:
        record.append(make.observation(1, formed=0.5))
        record.add_event(make.event(step=1))
        record.add_verdict(make.verdict(1))
    last = follower.poll()
    assert last.observations[-1].attempt == 2 and len(last.events) == len(last.verdicts) == 1


def test_a_file_that_is_superseded_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from spectral_monitor.publish import follow

    make.record(tmp_path / "run", (0, 1))
    original = follow.read_observation

    def vanish(path: Path) -> object:
        if "000001" in path.name:
            path.unlink()
        return original(path)

    monkeypatch.setattr(follow, "read_observation", vanish)
    assert [seen.step for seen in Follower(tmp_path / "run").poll().observations] == [0]


def test_a_torn_file_is_one_sentence(tmp_path: Path) -> None:
    make.record(tmp_path / "run", (0, 1))
    (tmp_path / "run" / "observations" / "step-000000001.induction.parquet").write_bytes(b"torn")
    with pytest.raises(RecordError, match=r"step-000000001.*cannot be read"):
        Follower(tmp_path / "run").poll()


def test_the_view_shows_heads_verdict_and_events(tmp_path: Path) -> None:
    make.record(tmp_path / "run")
    text = text_of(tmp_path / "run")
    assert "step 32" in text and "131K tokens" in text and "last look 7 s ago" in text
    lines = text.splitlines()
    first_heads = [line for line in lines if line.startswith("│ L")][:2]
    assert {line.split()[1] for line in first_heads} == {"L1H0*", "L1H2*"}
    assert "CAUSAL" in text and "p = 0.04" in text
    assert "selectivity crossing L1H0 L1H2 up" in text


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
@pytest.mark.parametrize("height", [12, 24, 60])
def test_the_view_fits_the_terminal(tmp_path: Path, width: int, height: int) -> None:
    make.record(tmp_path / "run", layers=12, heads=12)
    lines = text_of(tmp_path / "run", width, height).splitlines()
    assert len(lines) <= height
    assert max(map(len, lines)) <= width


@pytest.mark.parametrize("height", [22, 30, 60])
def test_what_is_new_stays_in_view(tmp_path: Path, height: int) -> None:
    make.record(tmp_path / "run", layers=12, heads=12)
    text = text_of(tmp_path / "run", 72, height)
    assert "circuit formed" in text and "L1H0*" in text and "CAUSAL" in text


def test_nothing_observed_yet_and_not_finite(tmp_path: Path) -> None:
    make.record(tmp_path / "run", ())
    assert "No look yet" in text_of(tmp_path / "run")
    with RunRecord.create(tmp_path / "run", {"probes": {}}) as record:
        record.append(make.observation(3, finite=False, tokens=None, share=float("nan")))
    text = text_of(tmp_path / "run")
    assert "NOT FINITE" in text and "tokens" not in text.splitlines()[1]


def test_once_prints_and_returns_and_a_missing_run_is_one_sentence(tmp_path: Path) -> None:
    make.record(tmp_path / "run")
    console = Console(file=io.StringIO(), width=100, color_system=None)
    watch(tmp_path / "run", console=console, once=True)
    assert "L1H0*" in console.file.getvalue()  # type: ignore[attr-defined]
    with pytest.raises(RecordError, match="no run directory"):
        watch(tmp_path / "nowhere", console=console)


def test_without_a_terminal_each_thing_is_one_line_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make.record(tmp_path / "run", (0, 8))
    console = Console(file=io.StringIO(), width=100, color_system=None, force_terminal=False)
    polls = []

    def sleep(seconds: float) -> None:
        polls.append(seconds)
        if len(polls) == 1:
            make.record(tmp_path / "run", (16, 24))
        if len(polls) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", sleep)
    watch(tmp_path / "run", console=console, interval=0.5)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [line.split()[1] for line in lines] == ["0", "8", "16", "16", "24", "24", "24", "24"]
    assert "CAUSAL" in lines[-1] and len(set(lines)) == len(lines)


def test_waits_for_a_run_that_does_not_exist_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(file=io.StringIO(), width=100, color_system=None)
    polls = []

    def sleep(seconds: float) -> None:
        polls.append(seconds)
        if len(polls) == 2:
            make.record(tmp_path / "run", (0,))
        if len(polls) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", sleep)
    watch(tmp_path / "run", console=console, wait=True)
    assert console.file.getvalue().count("waiting for a run") == 1  # type: ignore[attr-defined]
    assert "step      0" in console.file.getvalue()  # type: ignore[attr-defined]


def test_reading_leaves_the_directory_as_it_was(tmp_path: Path) -> None:
    make.record(tmp_path / "run")
    before = {path: path.stat().st_mtime_ns for path in sorted((tmp_path / "run").rglob("*"))}
    text_of(tmp_path / "run")
    assert {path: path.stat().st_mtime_ns for path in sorted((tmp_path / "run").rglob("*"))} == before
    assert os.listdir(tmp_path) == ["run"]
