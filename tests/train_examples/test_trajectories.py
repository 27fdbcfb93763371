"""The picture of a run: well-formed, with the circuit by name and the events where they happened."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np

from spectral_monitor.development import develop, load_series
from spectral_monitor.heads import Head
from tests.publish import factories
from train_examples.trajectories import draw, trajectories_svg

SVG = "{http://www.w3.org/2000/svg}"


def drawn(tmp_path: Path, title: str = "a run") -> ET.Element:
    record = factories.record(tmp_path / "run")
    found = develop(record)
    circuit = found.final_circuits["induction"]
    return ET.fromstring(trajectories_svg(found.series, circuit, record.events(), record.verdicts(), title))


def test_the_circuit_is_named_and_every_head_is_drawn(tmp_path: Path) -> None:
    root = drawn(tmp_path)
    texts = [element.text or "" for element in root.iter(f"{SVG}text")]
    assert texts.count("L1H0") == 2 and texts.count("L1H2") == 2 and "L0H3" not in texts
    lines = [path for path in root.iter(f"{SVG}path") if path.get("fill") == "none"]
    assert len(lines) == 1 + 2 * 8


def test_the_verdict_and_the_crossing_stand_at_their_tokens(tmp_path: Path) -> None:
    root = drawn(tmp_path)
    said = [element.text or "" for element in root.iter(f"{SVG}title")]
    assert "step 24, zero: causal (L1H0 L1H2)" in said
    assert "step 24: L1H0 L1H2 crossed up" in said
    circle = next(iter(root.iter(f"{SVG}circle")))
    share = (np.log10(24) - np.log10(1)) / (np.log10(32) - np.log10(1))
    assert float(circle.get("cx", "nan")) == float(f"{64 + share * (900 - 64 - 150):.1f}")


def test_markup_in_a_title_is_text(tmp_path: Path) -> None:
    texts = [element.text for element in drawn(tmp_path, "<b> & co").iter(f"{SVG}text")]
    assert "<b> & co" in texts


def test_a_missing_value_breaks_the_line(tmp_path: Path) -> None:
    series = load_series(factories.record(tmp_path / "run"))
    series.pr[3, 0] = np.nan
    root = ET.fromstring(trajectories_svg(series, [Head(0, 0)], [], [], "gap"))
    thick = [path.get("d", "") for path in root.iter(f"{SVG}path") if path.get("stroke-width") == "2"]
    assert thick[-1].count("M") == 2


def test_a_record_of_the_untrained_model_alone_says_so(tmp_path: Path) -> None:
    series = load_series(factories.record(tmp_path / "run", steps=(0,)))
    assert "no observation after the first training step" in trajectories_svg(series, [], [], [], "start")


def test_a_finished_run_gets_one_picture_a_probe(tmp_path: Path) -> None:
    run_dir = factories.record(tmp_path / "run").run_dir
    (file,) = draw(run_dir, "seed 1")
    assert file == run_dir / "trajectories-induction.svg"
    texts = [element.text for element in ET.parse(file).getroot().iter(f"{SVG}text")]
    assert "seed 1: induction" in texts
