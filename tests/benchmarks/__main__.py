"""Cost of watching, as ratios within one process.

Every ratio is a median over paired repeats: the two things compared run one after the other, in turn, so that a noisy
machine disturbs both. Where routes are compared, their numbers are checked to be equal first.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from tests.benchmarks import growth, sections
from tests.benchmarks.measuring import Result

OF_MODELS: dict[str, Callable[[sections.Case, bool], list[Result]]] = {
    "observation": sections.observation,
    "check": sections.causal_check,
    "ways": sections.against_routes,
}
OF_PROCESSES: dict[str, Callable[[bool], list[Result]]] = {
    "memory": sections.memory,
    "start-up": sections.start_up,
    "replay": sections.idle_share,
}


def run(wanted: list[str], quick: bool, models: list[str]) -> list[Result]:
    """The sections that are ``wanted``, printed as they come."""
    results: list[Result] = []
    for name, measure in OF_PROCESSES.items():
        if name in wanted:
            results += shown(measure(quick))
    if set(wanted) & set(OF_MODELS):
        for case in sections.cases(quick):
            if models and not any(case.name.startswith(model) for model in models):
                continue
            for name, of_model in OF_MODELS.items():
                if name in wanted:
                    results += shown(of_model(case, quick))
    return results


def shown(results: list[Result]) -> list[Result]:
    """One line each, at once: a long run that is stopped has still said something."""
    for r in results:
        print(f"  {r.section}: {r.what} / {r.against} [{r.model}] = {r.ratio:.3f}", flush=True)
    return results


def machine() -> str:
    """What was measured on, in one line."""
    model = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        )
        if Path("/proc/cpuinfo").exists()
        else iter(()),
        platform.machine(),
    )
    load = f", load {os.getloadavg()[0]:.1f} at the end" if hasattr(os, "getloadavg") else ""
    return f"{model}, {torch.get_num_threads()} threads{load}, torch {torch.__version__}, float32"


def table(results: list[Result]) -> Table:
    """The results, with what was asked for and whether it was met."""
    made = Table(title=machine(), title_justify="left")
    for name in ("what", "against", "model", "ratio", "lowest to highest", "asked for", "absolute", "pairs"):
        made.add_column(name)
    for r in results:
        goal = "" if r.goal is None else f"{'met' if r.ratio <= r.goal else 'NOT met'}: at most {r.goal:.3g}"
        made.add_row(
            r.what,
            r.against,
            r.model,
            f"{r.ratio:.3g}",
            f"{r.low:.3g} to {r.high:.3g}",
            goal,
            f"{r.absolute:.3g} {r.unit}",
            str(r.repeats),
        )
    return made


def growth_table(points: list[growth.Point]) -> Table:
    """One line a size; the slopes in the title."""
    slopes = ", ".join(f"{axis}: {time:.2f} and {mem:.2f}" for axis, (time, mem) in growth.exponents(points).items())
    made = Table(title=f"around {growth.BASE}; slopes of log seconds and log memory: {slopes}", title_justify="left")
    for name in ("axis", "size", "observation", "plain forward", "ratio", "peak memory"):
        made.add_column(name)
    for p in points:
        made.add_row(
            p.axis,
            str(p.value),
            f"{p.seconds:.3f} s",
            f"{p.plain_seconds:.3f} s",
            f"{p.seconds / p.plain_seconds:.2f}",
            f"{p.mebibytes:.0f} MiB",
        )
    return made


def main() -> None:
    """Command line."""
    everything = [*OF_PROCESSES, *OF_MODELS, "draws", "growth"]
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rows, repeats and sizes")
    parser.add_argument("--only", nargs="+", choices=everything, default=everything, help="sections to run")
    parser.add_argument("--models", nargs="+", default=[], help="models to run, by how their names begin")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--picture", type=Path, help="draw how cost grows into this file (.svg or .png)")
    arguments = parser.parse_args()
    results = run(arguments.only, arguments.quick, arguments.models)
    console = Console(width=200)
    if results:
        console.print(table(results))
    if "draws" in arguments.only:
        console.print("Draws of the sequential rule (20,000 simulated checks each, seed 0):")
        for line in sections.draws_needed():
            console.print("  " + line)
    points = growth.grow(arguments.quick) if "growth" in arguments.only else []
    if points:
        console.print(growth_table(points))
        if arguments.picture is not None:
            growth.draw(points, arguments.picture)
    if arguments.json is not None:
        found = {"machine": machine(), "results": [asdict(r) for r in results], "growth": [asdict(p) for p in points]}
        arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    sys.exit(main())
