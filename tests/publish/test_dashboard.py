from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from spectral_monitor.publish import dashboard, names
from spectral_monitor.publish.dashboard import Lines, Pictures, Table
from spectral_monitor.publish.rows import Rows

from . import factories as make

SAVED = Path(__file__).parents[2] / "dashboards" / "workspace.json"
MEDIA = {names.metric(suffix) for suffix in (names.TABLE, names.PICTURE, names.HISTOGRAM)}


def logged(tmp_path: Path) -> set[str]:
    """Every scalar name that a whole run really logs."""
    record = make.record(tmp_path / "run")
    rows, keys = Rows(), {names.GLOBAL_STEP}
    for event in record.events():
        rows.event(event)
    for verdict in record.verdicts():
        keys |= set(rows.verdict(verdict))
    for observation in record.observations():
        keys |= set(rows.observation(observation))
    return keys


def used(heads: tuple[str, ...]) -> set[str]:
    panels = [panel for section in dashboard.sections(heads) for panel in section.panels]
    lines = {name for panel in panels if isinstance(panel, Lines) for name in panel.metrics}
    media = {name for panel in panels if isinstance(panel, Pictures) for name in panel.keys}
    return lines | media | {panel.key for panel in panels if isinstance(panel, Table)}


def test_only_names_that_the_monitor_logs(tmp_path: Path) -> None:
    keys = logged(tmp_path)
    heads = dashboard.flagged_heads(tmp_path / "run")
    assert used(heads) <= keys | MEDIA
    shown = used(heads) | {names.GLOBAL_STEP, names.STEP}
    left_out = {key for key in keys - shown if "/mean/" not in key}
    assert not left_out, "every number that is logged has its place in the dashboard"
    assert len(heads) == 3 * 3


def test_head_patterns_match_head_names_and_nothing_else(tmp_path: Path) -> None:
    keys = logged(tmp_path)
    for what in ("pr", "attention", "selectivity"):
        found = {key for key in keys if re.search(dashboard.head_pattern(what), key)}
        assert found == {key for key in keys if re.match(rf"spectral_monitor/head/[^/]+/{what}\b", key)}
        assert found


def test_sections() -> None:
    found = [section.name for section in dashboard.sections()]
    assert found == ["Overview", "Early warning", "Circuits", "Sinks", "Run health"]


def test_the_saved_workspace_is_the_current_one() -> None:
    pytest.importorskip("wandb_workspaces")
    assert SAVED.read_text() == dashboard.as_json(), (
        "run: spectral-monitor dashboard show --out dashboards/workspace.json"
    )


def test_json_has_every_metric_and_no_random_id(tmp_path: Path) -> None:
    pytest.importorskip("wandb_workspaces")
    make.record(tmp_path / "run")
    heads = dashboard.flagged_heads(tmp_path / "run")
    text = dashboard.as_json("someone", "something", heads)
    assert text == dashboard.as_json("someone", "something", heads)
    raw = json.loads(text)
    assert raw["entity"] == "someone"
    for name in used(heads):
        assert json.dumps(name) in text
    with_pattern = dashboard.as_json()
    assert '"useMetricRegex": true' in with_pattern and '"useMetricRegex": true' not in text


def test_without_the_package_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("wandb_workspaces", "wandb_workspaces.workspaces", "wandb_workspaces.reports.v2"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(names.PublishError, match="pip install"):
        dashboard.as_json()


def test_a_push_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def save(self) -> None:
            raise ConnectionError("no route")

    monkeypatch.setattr(dashboard, "workspace", lambda *_: Broken())
    with pytest.raises(names.PublishError, match=r"someone/project \(ConnectionError: no route\).*wandb login"):
        dashboard.push("someone", "project")
