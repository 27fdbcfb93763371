import dataclasses
import json
import logging

import numpy as np
import pytest

from spectral_monitor.publish import names
from spectral_monitor.publish.rows import Rows, histogram, table_of_heads
from spectral_monitor.record import dumps

from . import factories as make


def test_names_are_unique_and_leave_room_for_the_capped_heads() -> None:
    fixed = list(names.fixed())
    assert len(set(fixed)) == len(fixed)
    assert names.metric("probe_top1") == "spectral_monitor/probe_top1"
    assert names.metric("probe_top1", "key_retrieval") == "spectral_monitor/key_retrieval/probe_top1"
    assert len(fixed) + names.HEAD_CAP * len(names.HEAD) <= names.MAX_KEYS


def test_no_name_is_the_folder_of_another() -> None:
    """MLflow's file store keeps a metric as a file: ``a`` and ``a/b`` cannot both be."""
    every = {*names.fixed(), *names.fixed("other")}
    every |= {names.head_metric("L0H0", item.suffix, "induction") for item in names.HEAD}
    folders = {name[:end] for name in every for end in range(len(name)) if name[end] == "/"}
    assert not every & folders


def test_every_row_key_is_one_of_the_names() -> None:
    rows = Rows()
    row = rows.observation(make.observation(16, formed=1.0))
    rows.event(make.event("pr_rise", 8))
    rows.event(make.event(step=16))
    row |= rows.verdict(make.verdict(16)) | rows.verdict(make.verdict(16, mode="mean"))
    row |= rows.observation(make.observation(17, formed=1.0))
    heads = {names.head_metric(head, item.suffix, "induction") for head in ("L1H0", "L1H2") for item in names.HEAD}
    assert set(row) | {names.GLOBAL_STEP} == set(names.fixed()) | heads
    assert row[names.metric("lead_ratio")] == pytest.approx(2.0)
    assert row["spectral_monitor/head/L1H0/attention/induction"] == pytest.approx(0.81)


@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (2, 12), (80, 64)])
def test_at_most_60_scalar_keys_whatever_the_size(layers: int, heads: int) -> None:
    """Case: 80 x 64 heads would be 10,240 keys with two metrics a head."""
    rows, keys = Rows(), {names.GLOBAL_STEP}
    every = tuple((layer, head) for layer in range(layers) for head in range(heads))
    for step in range(4):
        keys |= set(rows.observation(make.observation(step, layers=layers, heads=heads, circuit=every, formed=1.0)))
        rows.event(make.event("attention_rise", step, tuple(f"L{a}H{b}" for a, b in every)))
    keys |= set(rows.verdict(make.verdict(4, heads=tuple(f"L{a}H{b}" for a, b in every))))
    keys |= set(rows.verdict(make.verdict(4, capability="previous_token")))
    keys |= set(rows.verdict(make.verdict(4, mode="mean")))
    assert len(keys) <= 60
    shown = {key for key in keys if "/head/" in key}
    assert len(shown) == 3 * min(names.HEAD_CAP, layers * heads)


def test_no_option_goes_beyond_the_hard_limit() -> None:
    with pytest.raises(names.PublishError, match="from 1 to 500"):
        Rows(max_keys=501)
    rows = Rows(max_keys=500, head_cap=10_000)
    every = tuple((layer, head) for layer in range(80) for head in range(64))
    row = rows.observation(make.observation(1, layers=80, heads=64, circuit=every, formed=1.0))
    assert 450 < len(row) <= 500
    with pytest.raises(names.PublishError, match="head_cap"):
        Rows(head_cap=-1)


def test_alarms_alone_take_at_most_half_of_the_heads_keys() -> None:
    rows = Rows()
    rows.observation(make.observation(0, layers=4, heads=8, circuit=()))
    rows.event(make.event("pr_rise", 1, tuple(f"L0H{n}" for n in range(8))))
    assert len(rows.flagged) == names.HEAD_CAP // 2
    circuit = tuple((3, n) for n in range(4))
    row = rows.observation(make.observation(2, layers=4, heads=8, circuit=circuit, formed=1.0))
    assert all(f"spectral_monitor/head/L3H{n}/selectivity/induction" in row for n in range(4))


def test_a_head_below_the_attention_floor_is_no_candidate() -> None:
    seen = make.observation(1, formed=1.0)
    heads = seen.heads
    faint = dataclasses.replace(
        heads,
        attention={**heads.attention, "induction": np.full(8, 0.01)},
        selectivity={**heads.selectivity, "induction": np.full(8, 1e6)},
    )
    row = Rows().observation(dataclasses.replace(seen, heads=faint))
    assert row["spectral_monitor/candidates"] == 0
    assert not [key for key in row if "/head/" in key]


def broken(step: int, pr: list[float], status: list[str], **changes: object) -> object:
    seen = make.observation(step, heads=len(pr) // 2)
    heads = dataclasses.replace(seen.heads, pr=np.array(pr), status=np.array(status))
    return dataclasses.replace(seen, heads=heads, **changes)  # type: ignore[arg-type]


def test_dead_nan_and_infinite_heads_are_counted_and_left_out() -> None:
    """Case: one NaN crashes the histogram."""
    nan, inf = float("nan"), float("inf")
    seen = broken(3, [nan, nan, inf, 2.0, 3.0, 4.0], ["dead", "not_finite", "not_finite", "ok", "ok", "ok"])
    row = Rows().observation(seen)  # type: ignore[arg-type]
    assert row["spectral_monitor/pr_mean"] == pytest.approx(3.0)
    assert row["spectral_monitor/pr_max"] == 4.0
    assert row["spectral_monitor/heads_not_finite"] == 2
    assert row["spectral_monitor/heads_dead"] == 1
    counts, edges = histogram(seen) or (None, None)  # type: ignore[arg-type]
    assert counts is not None and edges is not None
    assert counts.sum() == 3 and edges[0] == 2.0 and edges[-1] == 4.0
    columns, table = table_of_heads(seen)  # type: ignore[arg-type]
    assert [line[columns.index("pr")] for line in table] == [None, None, None, 2.0, 3.0, 4.0]
    assert "NaN" not in dumps(table) and json.loads(dumps(row)) == row


def test_all_heads_not_finite() -> None:
    nan = float("nan")
    seen = broken(3, [nan] * 4, ["not_finite"] * 4, finite=False)
    row = Rows().observation(seen)  # type: ignore[arg-type]
    assert "spectral_monitor/pr_mean" not in row and "spectral_monitor/pr_max" not in row
    assert row["spectral_monitor/heads_not_finite"] == 4
    assert histogram(seen) is None  # type: ignore[arg-type]


def test_unknown_tokens_are_left_out_not_zero() -> None:
    row = Rows().observation(make.observation(4, tokens=None))
    assert names.TOKENS not in row and row[names.STEP] == 4


def test_an_event_counts_once() -> None:
    rows = Rows()
    assert rows.event(make.event()) and not rows.event(make.event())
    row = rows.observation(make.observation(9))
    assert row["spectral_monitor/alarms/selectivity_crossing"] == 1 == row["spectral_monitor/alarms/all"]


def test_verdict_shows_the_spread_of_its_control() -> None:
    row = Rows().verdict(make.verdict(24))
    assert row["spectral_monitor/verdict/induction/effect"] == 3.1
    assert row["spectral_monitor/verdict/induction/p_value"] == 0.04
    assert row["spectral_monitor/verdict/induction/control_max"] == pytest.approx(0.23)
    assert row["spectral_monitor/verdict/induction/control_mean"] == pytest.approx(0.115)
    none = Rows().verdict(make.verdict(24, p_value=float("nan"), random=(), draws=0, verdict="no control possible"))
    assert "spectral_monitor/verdict/induction/p_value" not in none


def test_counts_go_on_from_the_record(tmp_path) -> None:
    make.record(tmp_path / "run")
    rows = Rows()
    events, verdicts = rows.start(
        {"run_dir": tmp_path / "run", "config": {"thresholds": {"member": 20.0, "min_attention": 0.1}}}
    )
    assert len(events) == 3 and len(verdicts) == 1
    assert (rows.bars.selectivity, rows.bars.attention) == (20.0, 0.1)
    row = rows.observation(make.observation(40, formed=1.0))
    assert row["spectral_monitor/alarms/all"] == 3
    assert row["spectral_monitor/lead_ratio"] == pytest.approx(1.5)


def test_two_probes_share_a_run() -> None:
    rows = Rows()
    first = rows.observation(make.observation(1))
    second = rows.observation(make.observation(1, probe="key_retrieval"))
    assert set(first) & set(second) == {names.STEP, names.TOKENS, names.SHARE}
    assert "spectral_monitor/key_retrieval/probe_top1" in second


THREE = {"induction": "induction", "key_retrieval": "key_retrieval", "key_retrieval_long": "key_retrieval"}


def test_each_of_three_probes_keeps_its_scalars_and_its_heads(caplog: pytest.LogCaptureFixture) -> None:
    """Fault: 60 keys for all probes together dropped every number of the third."""
    rows, row = Rows(), {names.GLOBAL_STEP: 0.0}
    rows.start({"probes": {probe: {"capability": capability} for probe, capability in THREE.items()}})
    every = tuple((layer, head) for layer in range(4) for head in range(8))
    heads = tuple(f"L{a}H{b}" for a, b in every)
    for probe, capability in THREE.items():
        row |= rows.observation(make.observation(8, layers=4, heads=8, circuit=every, formed=1.0, probe=probe))
        rows.event(make.event("pr_rise", 8, heads, probe=probe, capability=capability))
        rows.event(make.event(step=9, heads=heads, probe=probe, capability=capability))
    for mode in ("zero", "mean"):
        for probe, capability in THREE.items():
            row |= rows.verdict(make.verdict(9, mode=mode, probe=probe, capability=capability))
    rows.say_left_out("wandb")
    assert not caplog.records
    for probe, capability in THREE.items():
        assert set(names.fixed(probe, capability)) - {names.metric("lead_ratio", probe)} <= set(row), probe
        of_heads = [key for key in row if key.startswith(names.metric("head/", probe))]
        assert len(of_heads) == 3 * names.HEAD_CAP, probe
    assert len(row) <= 3 * names.MAX_KEYS


@pytest.mark.parametrize(("max_keys", "probes", "short"), [(60, 20, {"p16", "p17", "p18", "p19"}), (20, 1, {"p0"})])
def test_what_finds_no_room_is_said_once_a_probe(
    caplog: pytest.LogCaptureFixture, max_keys: int, probes: int, short: set[str]
) -> None:
    every = [f"p{n}" for n in range(probes)]
    rows = Rows(max_keys)
    rows.start({"probes": {probe: {"capability": "induction"} for probe in every}})
    keys: set[str] = set()
    with caplog.at_level(logging.WARNING, "spectral_monitor"):
        for step in range(3):
            for probe in every:
                keys |= set(rows.observation(make.observation(step, probe=probe, formed=1.0)))
                rows.say_left_out("wandb")
    assert len(keys) <= min(names.HARD_LIMIT, max_keys * probes)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == len(short)
    assert {probe for probe in every if any(f"probe {probe} " in text for text in said)} == short
    assert f"{max_keys} keys a probe" in said[0] and "500 a run" in said[0]


def test_the_last_counts_of_every_probe_are_told() -> None:
    """Fault: the next probe's row made the events of the one before it look counted."""
    rows = Rows()
    for probe in THREE:
        rows.observation(make.observation(8, probe=probe))
        rows.event(make.event(step=8, probe=probe, capability=THREE[probe]))
    row = rows.counts_row()
    assert {probe: row.get(names.metric("alarms/all", probe)) for probe in THREE} == dict.fromkeys(THREE, 1.0)
    assert row[names.STEP] == 8
    assert rows.counts_row() == {}


def test_candidates_of_one_probe_leave_other_probes_their_heads() -> None:
    rows = Rows(head_cap=2)
    for probe in THREE:
        rows.observation(make.observation(8, probe=probe, formed=1.0))
    assert sorted(rows.flagged) == sorted((probe, head) for probe in THREE for head in ("L1H0", "L1H2"))
