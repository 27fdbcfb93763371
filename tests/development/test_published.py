"""Every published figure that follows from the published tables, recomputed from an imported CSV."""

from __future__ import annotations

from pathlib import Path

import pytest

from spectral_monitor.development import Development, develop
from spectral_monitor.exchange import import_table
from spectral_monitor.heads import Head
from spectral_monitor.record import RunRecord

from . import published

pytestmark = pytest.mark.skipif(not published.PUBLISHED.is_dir(), reason="the published tables (../shared) are absent")


def developed(file: Path, tmp_path: Path) -> Development:
    import_table(file, tmp_path / "run")
    return develop(RunRecord.open(tmp_path / "run"))


@pytest.mark.parametrize(("model", "kind"), [("pythia-1b", "ramp"), ("olmo-1b", "transition"), ("olmoe-1b-7b", "ramp")])
def test_f2_shapes_of_the_three_models(model: str, kind: str, tmp_path: Path) -> None:
    found = developed(published.bos_fraction(tmp_path / "in.csv", model), tmp_path)
    assert found.shape.kind == kind
    stated = [float(row["fraction"]) for row in published.rows_of("bos_fraction.csv") if row["model"] == model]
    assert found.first_token_fraction == pytest.approx(stated, abs=6e-4)
    if kind == "transition":
        shape = found.to_json()["shape"]
        assert (shape["after_tokens"], shape["by_tokens"]) == (117e9, 264e9)


@pytest.mark.parametrize("model", ["pythia-1b", "olmo-1b"])
def test_f1_layers_0_and_1_stay_empty(model: str, tmp_path: Path) -> None:
    found = developed(published.bos_per_layer(tmp_path / "in.csv", model), tmp_path)
    assert found.layers_0_1_empty is True
    assert found.first_token_by_layer[0].sum() == 0
    assert found.first_token_by_layer[-1].sum() > 0
    assert found.series.axis == "step"


@pytest.mark.parametrize("model", ["pythia-1b", "olmo-1b", "olmoe-1b-7b"])
def test_f3_milestones_come_back_as_stated(model: str, tmp_path: Path) -> None:
    found = developed(published.milestones(tmp_path / "in.csv", model), tmp_path).to_json()["milestones"]
    for row in published.rows_of("milestones.csv"):
        got = found[row["milestone"]]["by_tokens"]
        if row[model]:
            assert got == pytest.approx(float(row[model]) * 1e9, rel=1e-3), row["milestone"]
        else:
            assert got is None and found[row["milestone"]]["after_tokens"] is None


@pytest.mark.parametrize(("model", "gap"), [("olmo-1b", 11.5), ("olmoe-1b-7b", 21.0)])
def test_f3_gap_from_induction_to_first_token(model: str, gap: float, tmp_path: Path) -> None:
    found = developed(published.milestones(tmp_path / "in.csv", model), tmp_path)
    half = next(entry for entry in found.gaps if entry.later == "bos_fraction>=0.50")
    assert half.ratio == pytest.approx(gap, abs=0.06)
    assert half.low < half.ratio < half.high


@pytest.mark.parametrize(("model", "percent"), [("pythia-1b", 2.0), ("olmo-1b", 0.3), ("olmoe-1b-7b", 0.8)])
def test_f4_recall_as_a_fraction_of_the_run(model: str, percent: float, tmp_path: Path) -> None:
    found = developed(published.recall(tmp_path / "in.csv", model), tmp_path).to_json()
    stated = next(row for row in published.rows_of("recall.csv") if row["model"] == model)
    levels = found["recall"]["induction"]
    for level in ("33", "67", "100"):
        assert levels[level]["tokens"] == pytest.approx(float(stated[f"tokens_B_{level}"]) * 1e9, rel=2e-3)
    assert round(100 * levels["67"]["fraction"], 1) == pytest.approx(percent, abs=0.11)
    circuit = next(row for row in published.rows_of("circuits.csv") if row["model"] == model)["circuit"]
    assert found["final_circuits"]["induction"] == sorted(circuit.split(), key=Head.parse)


def test_f5_lead_of_pythia_1b_l4h4(tmp_path: Path) -> None:
    found = developed(published.lead_of_l4h4(tmp_path / "in.csv"), tmp_path)
    lead = found.to_json()["lead"]["L4H4"]
    assert (lead["rise_tokens"], lead["crossing_tokens"]) == (pytest.approx(0.536e9), pytest.approx(6.291e9))
    assert lead["ratio"] == pytest.approx(11.74, abs=0.01)
    assert lead["low"] == pytest.approx(1.073 / 0.536) and lead["high"] == pytest.approx(6.291 / 0.134)
    assert lead["observations"] == 2 and lead["resolved"]
    assert found.base_rate.share_before == 0


@pytest.mark.parametrize(("model", "percent"), [("pythia-160m", 18.1), ("pythia-410m", 18.5)])
def test_conserved_fraction(model: str, percent: float, tmp_path: Path) -> None:
    found = developed(published.null_calibration(tmp_path / "in.csv", model), tmp_path).calibration
    assert found is not None
    stated = next(row for row in published.rows_of("null_calibration.csv") if row["model"] == model)
    assert found.above == {bar: int(stated[f"above_{bar}"]) for bar in ("2", "10", "30", "50", "100")}
    assert found.above_null == int(stated["above_null_p99"])
    assert round(100 * found.conserved_by_null, 1) == percent
    assert found.t_recall == float(stated["null_p99"])
