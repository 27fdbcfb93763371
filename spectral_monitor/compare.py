"""Two or more runs side by side: the same circuits? the same times? (recipe section 5, circuit identity)

Reads records only. Runs compare only where their probe batch is the same; circuits only where the models have the same
heads. Every overlap stands beside what chance gives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from spectral_monitor.development import Development, develop
from spectral_monitor.development.identity import Overlap, overlap
from spectral_monitor.errors import RecordError
from spectral_monitor.heads import Head, names
from spectral_monitor.probe import ProbeBatch, induction_probe
from spectral_monitor.record import RunRecord, jsonable

#: Heads that a ranking picks where the run has no circuit to take the number from.
PICKS = 5


@dataclass(frozen=True)
class Pair:
    """Two runs. ``overlaps``: what is compared -> Overlap; empty where the models have different heads.

    Compared are the final circuit of each capability, and the heads that PR integral and PR spread pick (as many as the
    first run's circuit of its own capability has).
    """

    first: str
    second: str
    overlaps: dict[str, Overlap]
    same_class: float


@dataclass(frozen=True)
class Comparison:
    """All runs: ``runs`` name -> its development, ``picks`` name -> ranking -> heads, ``pairs``, ``notes``."""

    runs: dict[str, Development]
    picks: dict[str, dict[str, list[Head]]]
    pairs: list[Pair]
    notes: list[str]

    def to_json(self) -> dict[str, Any]:
        """Plain values for ``compare --json``."""
        result = {
            "runs": {
                name: {
                    "fingerprint": found.series.fingerprint,
                    "capability": found.series.capability,
                    "final_circuits": {cap: names(heads) for cap, heads in found.final_circuits.items()},
                    "milestones": found.to_json()["milestones"],
                    "shape": found.to_json()["shape"],
                    "picks": {ranking: [str(head) for head in heads] for ranking, heads in self.picks[name].items()},
                }
                for name, found in self.runs.items()
            },
            "pairs": [
                {
                    "runs": [pair.first, pair.second],
                    "same_class": pair.same_class,
                    "overlaps": {what: asdict(found) for what, found in pair.overlaps.items()},
                }
                for pair in self.pairs
            ],
            "notes": self.notes,
        }
        plain: dict[str, Any] = jsonable(result)
        return plain


def compare(records: Sequence[RunRecord], probe: str | None = None, capability: str | None = None) -> Comparison:
    """Compare the final states and the times of two or more runs.

    Raises RecordError: fewer than two runs, the same run twice, or runs with different probe batches.
    """
    if len(records) < 2:
        raise RecordError("a comparison needs at least two run directories")
    paths = [record.run_dir.resolve() for record in records]
    if len(set(paths)) < len(paths):
        raise RecordError("the same run directory is given twice: compare different runs")
    runs = dict(zip(_names(paths), (develop(record, probe, capability) for record in records), strict=True))
    notes = _check_probes(runs)
    picks = {name: _picks(found) for name, found in runs.items()}
    pairs = []
    for first, second in combinations(runs, 2):
        one, other = runs[first], runs[second]
        if one.series.heads != other.series.heads:
            notes.append(f"{first} and {second} have different heads: their circuits cannot be laid over each other")
            pairs.append(Pair(first, second, {}, float("nan")))
            continue
        found = {
            f"{cap} circuit": overlap(one.final_circuits[cap], other.final_circuits[cap], one.series.heads)
            for cap in one.final_circuits
            if cap in other.final_circuits and (one.final_circuits[cap] or other.final_circuits[cap])
        }
        for ranking in picks[first]:
            found[f"picks by {ranking}"] = overlap(picks[first][ranking], picks[second][ranking], one.series.heads)
        classes = one.series.head_class[one.series.last], other.series.head_class[other.series.last]
        same = (
            float(np.mean(classes[0] == classes[1]))
            if one.series.has_classes and other.series.has_classes
            else float("nan")
        )
        pairs.append(Pair(first, second, found, same))
    return Comparison(runs, picks, pairs, notes)


def _names(paths: Sequence[Path]) -> list[str]:
    """Shortest trailing parts of the paths that tell them apart."""
    for parts in range(1, max(len(path.parts) for path in paths) + 1):
        found = ["/".join(path.parts[-parts:]) for path in paths]
        if len(set(found)) == len(found):
            return found
    return [str(path) for path in paths]


def _check_probes(runs: Mapping[str, Development]) -> list[str]:
    prints = {name: found.series.fingerprint for name, found in runs.items()}
    known = {name: value for name, value in prints.items() if value}
    if len(set(known.values())) > 1:
        listed = ", ".join(f"{name} {value[:12]}" for name, value in known.items())
        raise RecordError(
            f"the runs were observed with different probe batches (SHA-256: {listed}): "
            "they do not compare. Observe them with the same probe settings"
        )
    notes = [
        f"{name}: its probe batch is unknown, so whether it compares is not certain"
        for name in prints
        if not prints[name]
    ]
    baselines = {found.series.baseline for found in runs.values()}
    if len(baselines) > 1:
        raise RecordError(
            f"the runs use different baselines ({', '.join(sorted(baselines))}): selectivities do not compare"
        )
    return notes


def _picks(found: Development) -> dict[str, list[Head]]:
    number = len(found.final_circuits.get(found.series.capability, [])) or PICKS
    return {ranking: entry.top(found.series.heads, number) for ranking, entry in found.rankings.items()}


def probe_of(record: RunRecord, name: str = "induction") -> ProbeBatch:
    """The induction batch that a run was observed with, made again from its description.

    RecordError when the description does not lead to the same SHA-256 (a batch of one's own, or another version).
    """
    described = record.probes.get(name)
    if described is None:
        raise RecordError(f"{record.run_dir} has no probe {name!r}: it has {', '.join(record.probes) or 'none'}")
    wanted = str(described.get("fingerprint", ""))
    try:
        made = induction_probe(
            rows=int(described["rows"]),
            length=int(described["length"]),
            seed=int(described["seed"]),
            token_range=tuple(described["token_range"]),
            exclude=described.get("excluded_ids", ()),
            protocol=str(described["protocol"]),
            start_token=described.get("start_token"),
            name=name,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise RecordError(
            f"probe {name!r} of {record.run_dir} is not described well enough to be made again ({error})"
        ) from error
    if made.fingerprint != wanted:
        raise RecordError(
            f"probe {name!r} of {record.run_dir} cannot be made again: its SHA-256 is {wanted[:12]}, "
            f"the batch made from its description has {made.fingerprint[:12]}"
        )
    return made
