"""Do the seeds of a reference run use the same heads? Picks, overlaps, and every seed's heads taken out of every model.

    python -m train_examples.compare_seeds runs/cpu/seed-42 runs/cpu/seed-271 runs/cpu/seed-149

Needs what the reference run leaves in each directory: ``reference.json``, ``spectral_monitor/`` and ``final/``.
``spectral-monitor compare`` does the same for the induction probe of any runs; this script also knows how to make the
key-retrieval probe again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spectral_monitor.errors import SpectralMonitorError
from train_examples.reference import OptionError, build_model, load_options, probes_of

if TYPE_CHECKING:
    from spectral_monitor.compare import Comparison
    from spectral_monitor.heads import Head
    from spectral_monitor.interventions import Transplant
    from spectral_monitor.probe import ProbeBatch

#: Probes that are compared; the longer gaps are the same task.
PROBES = ("induction", "key_retrieval")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: 0, or 1 when the directories do not hold what is needed."""
    parser = argparse.ArgumentParser(
        prog="compare_seeds", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="Two or more run directories.")
    parser.add_argument("--rows", type=int, default=128, help="Probe rows used (default: 128).")
    parser.add_argument("--draws", type=int, default=32, help="Matched-random draws at most (default: 32).")
    parser.add_argument("--json", type=Path, help="Write everything to this file too.")
    parser.add_argument("--picture", type=Path, help="Draw the accuracy of every seed to this SVG file.")
    asked = parser.parse_args(arguments)
    try:
        if asked.picture is not None:
            draw_accuracy(asked.runs, asked.picture)
        result = {name: compare_probe(asked.runs, name, asked.rows, asked.draws) for name in PROBES}
    except SpectralMonitorError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if asked.json is not None:
        from spectral_monitor.record import write_json

        write_json(asked.json, result)
    return 0


def compare_probe(runs: Sequence[Path], probe: str, rows: int, draws: int) -> dict[str, Any]:
    """Overlaps and transplant matrices of one probe: printed, and returned as plain values.

    Raises:
        SpectralMonitorError: a run lacks something, or the runs do not compare.
    """
    from spectral_monitor.causal import CheckOptions
    from spectral_monitor.compare import compare
    from spectral_monitor.interventions import transplant
    from spectral_monitor.record import RunRecord

    found = compare([RunRecord.open(run / "spectral_monitor") for run in runs], probe)
    batch = _batch(runs[0], probe, rows)
    names = list(found.runs)
    models = {name: (lambda run=run: _model(run)) for name, run in zip(names, runs, strict=True)}
    sets: dict[str, dict[str, list[Head]]] = {
        "circuit": {name: entry.final_circuits.get(entry.series.capability, []) for name, entry in found.runs.items()},
        "PR integral": {name: found.picks[name]["integral"] for name in names},
        "PR spread": {name: found.picks[name]["spread"] for name in names},
    }
    options = CheckOptions(first_look=min(32, draws), max_draws=draws)
    moved = {what: transplant(heads, models, batch, options=options) for what, heads in sets.items()}
    _show(probe, found, sets, moved)
    return {
        **found.to_json(),
        "heads": {what: {name: [str(h) for h in of] for name, of in chosen.items()} for what, chosen in sets.items()},
        "transplant": {what: [asdict(entry) for entry in entries] for what, entries in moved.items()},
    }


def draw_accuracy(runs: Sequence[Path], file: Path) -> None:
    """Top-1 of every run over tokens, one panel a probe (the longer gaps too), as an SVG file.

    Raises:
        SpectralMonitorError: a run lacks something, or the file cannot be written.
    """
    from spectral_monitor.development import load_series
    from spectral_monitor.record import RunRecord
    from train_examples.trajectories import accuracy_svg

    records = {run.name: RunRecord.open(run / "spectral_monitor") for run in runs}
    panels = {
        probe: {name: load_series(record, probe) for name, record in records.items()}
        for probe in (*PROBES, "key_retrieval_long")
    }
    try:
        file.write_text(accuracy_svg(panels, "reference run, small size"))
    except OSError as error:
        raise OptionError(f"the picture {file} cannot be written: {error}") from error
    print(file)


def _batch(run: Path, probe: str, rows: int) -> ProbeBatch:
    batch = next(batch for batch in probes_of(load_options(run)) if batch.name == probe)
    return batch.take(slice(0, rows)) if rows < batch.rows else batch


def _model(run: Path) -> Any:
    """The trained model of a run (``final/``)."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    folder = run / "final"
    if not folder.is_dir():
        raise OptionError(f"{run} has no final model ({folder}): let the run come to its end")
    options = load_options(run)
    vocabulary = int(json.loads((folder / "config.json").read_text())["vocab_size"])
    return type(build_model(options, vocabulary, 0)).from_pretrained(folder).eval()


def _show(
    probe: str, found: Comparison, sets: dict[str, dict[str, list[Head]]], moved: dict[str, list[Transplant]]
) -> None:
    from rich.console import Console
    from rich.table import Table

    from spectral_monitor.publish.tables import show

    console = Console()
    short = {name: name.removesuffix("/spectral_monitor") for name in found.runs}
    for pair in found.pairs:
        shared = ", ".join(f"{what} {show(one.jaccard, '.2f')}" for what, one in pair.overlaps.items())
        said = f"{probe}: Jaccard of {short[pair.first]} and {short[pair.second]}: {shared}"
        console.print(said, highlight=False, soft_wrap=True)
    for what, entries in moved.items():
        table = Table(title=f"{probe}, {what}: top-1 of the column's model without the row's heads", show_lines=True)
        table.caption = "in brackets: lowest and highest without as many random other heads of the same layers"
        table.add_column("heads of")
        for target in found.runs:
            table.add_column(f"in {short[target]}", justify="right")
        intact = {entry.target: _top1(entry, "baseline") for entry in entries if entry.verdict is not None}
        table.add_row("(none out)", *(show(intact.get(target), ".3f") for target in found.runs))
        for source in found.runs:
            cells = []
            for target in found.runs:
                entry = next(e for e in entries if (e.source, e.target) == (source, target))
                verdict = "" if entry.verdict is None else f" {entry.verdict.verdict}"
                cells.append(f"{show(_top1(entry, 'circuit'), '.3f')}{verdict}{_control(entry)}")
            heads = " ".join(str(head) for head in sets[what][source]) or "none"
            table.add_row(f"{short[source]}: {heads}", *cells)
        console.print(table)


def _control(entry: Transplant) -> str:
    """The range of top-1 over the matched-random sets, on a line of its own; nothing where there is no control."""
    if entry.verdict is None or not entry.verdict.random:
        return ""
    top1 = [draw.top1 for draw in entry.verdict.random]
    return f"\n({min(top1):.3f} to {max(top1):.3f})"


def _top1(entry: Transplant, condition: str) -> float | None:
    found = None if entry.verdict is None else entry.verdict.condition(condition)
    return None if found is None else found.top1


if __name__ == "__main__":
    raise SystemExit(main())
