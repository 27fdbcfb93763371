"""Which probe a table is of."""

from __future__ import annotations

import pytest

from spectral_monitor.publish.console import probe_note
from spectral_monitor.record import preferred_probe


@pytest.mark.parametrize(
    ("names", "taken"),
    [([], None), (["keys"], "keys"), (["keys", "other"], None), (["keys", "induction"], "induction")],
)
def test_the_probe_that_is_taken_where_none_is_named(names: list[str], taken: str | None) -> None:
    assert preferred_probe(names) == taken


def test_the_probes_that_were_not_taken_are_named() -> None:
    assert probe_note("induction", ["induction", "keys"]) == "Probe induction; --probe takes the others: keys."
    assert probe_note("keys", ["keys"]) == ""
