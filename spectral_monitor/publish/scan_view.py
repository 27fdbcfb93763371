"""A scan in the terminal: progress while it runs, then one table and the verdicts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as Remaining
from rich.table import Table

from spectral_monitor.heads import names
from spectral_monitor.observation import Verdict
from spectral_monitor.publish.console import wide_when_piped
from spectral_monitor.screen import class_counts

if TYPE_CHECKING:
    from spectral_monitor.scan import Progress as Report
    from spectral_monitor.scan import ScanResult


@contextmanager
def scan_progress() -> Iterator[Report]:
    """A progress callback for ``scan``: one bar for the rows read, a count for the ablations."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), Remaining(), console=console, transient=True) as bar:
        tasks: dict[str, object] = {}

        def report(what: str, done: int, total: int) -> None:
            phase = what.split(",")[0]
            if phase not in tasks:
                for task in tasks.values():
                    bar.stop_task(task)  # type: ignore[arg-type]
                tasks[phase] = bar.add_task(what, total=total or None)
            bar.update(tasks[phase], completed=done, description=what)  # type: ignore[arg-type]

        yield report


def print_scan(result: ScanResult, top: int, console: Console | None = None) -> None:
    """Heads, circuits and verdicts of a scan."""
    console = console or wide_when_piped(highlight=False, soft_wrap=True)
    observation, heads = result.observation, result.observation.heads
    metrics = observation.metrics
    where = result.model + (f" @ {result.revision}" if result.revision else "")
    console.print(f"[bold]{where}[/]  {len(heads)} heads in {len(set(heads.layer.tolist()))} layers, {result.dtype}")
    console.print(
        f"probe {result.probe.name}: {metrics.rows} rows x {result.probe.length} tokens, "
        f"SHA-256 {observation.fingerprint[:12]}; top-1 {metrics.top1:.1%}, top-5 {metrics.top5:.1%}, "
        f"loss {metrics.loss:.3f}"
    )
    for note in result.notes:
        console.print(f"note: {note}")

    capability = result.probe.capability
    order = np.argsort(-np.nan_to_num(heads.selectivity[capability], nan=-math.inf))[:top]
    table = Table(title=f"heads by {capability} selectivity (baseline: {observation.baseline})", title_justify="left")
    for name in ("head", "class", "attention", "selectivity", "PR", "PR moment"):
        table.add_column(name, justify="left" if name in ("head", "class") else "right")
    members = {str(head) for head in result.circuits[capability]}
    rows = [str(head) for head in heads]
    for index in order:
        style = "bold" if rows[index] in members else ""
        table.add_row(
            rows[index],
            str(heads.head_class[index]),
            f"{heads.attention[capability][index]:.4f}",
            f"{heads.selectivity[capability][index]:.1f}x",
            f"{heads.pr[index]:.3f}",
            f"{heads.pr_moment[index]:.3f}",
            style=style,
        )
    console.print(table)
    counts = ", ".join(f"{name} {count}" for name, count in class_counts(heads).items())
    console.print(f"classes: {counts}")
    mass = result.threshold_mass
    console.print(f"membership threshold amounts to attention {mass:.2f} on the target with the rest spread evenly")
    if math.isfinite(observation.null_p99):
        console.print(f"noise floor: null selectivity p99 {observation.null_p99:.2f}x")
    for kind, circuit in result.circuits.items():
        listed = ", ".join(names(circuit)[:12]) + (f" and {len(circuit) - 12} more" if len(circuit) > 12 else "")
        console.print(f"{kind} circuit: {listed or 'no head'}")
    if not result.verdicts:
        console.print(f"no causal check: {'the circuit is empty' if not members else 'not asked for'}")
    for verdict in result.verdicts:
        print_verdict(verdict, console)


def print_verdict(verdict: Verdict, console: Console) -> None:
    """One verdict with its control."""
    colour = {"causal": "green", "not causal": "red"}.get(verdict.verdict, "yellow")
    console.print(f"\n[bold {colour}]{verdict.verdict}[/] ({verdict.mode} ablation): {verdict.reason}")
    table = Table()
    for name in ("condition", "heads", "log-prob", "top-1", "top-5", "target logit"):
        table.add_column(name, justify="left" if name == "condition" else "right")
    for condition in verdict.conditions:
        table.add_row(
            condition.name,
            str(len(condition.heads)),
            f"{condition.logprob:.3f}",
            f"{condition.top1:.2%}",
            f"{condition.top5:.2%}",
            f"{condition.target_logit:.3f}",
        )
    if verdict.random:
        values = {
            key: np.array([getattr(draw, key) for draw in verdict.random])
            for key in ("logprob", "top1", "top5", "target_logit")
        }
        table.add_row(
            f"matched random, {verdict.draws} of {verdict.distinct_draws}: median",
            str(len(verdict.random[0].heads)),
            f"{np.median(values['logprob']):.3f}",
            f"{np.median(values['top1']):.2%}",
            f"{np.median(values['top5']):.2%}",
            f"{np.median(values['target_logit']):.3f}",
        )
        table.add_row(
            "  lowest to highest",
            "",
            f"{values['logprob'].min():.3f} to {values['logprob'].max():.3f}",
            f"{values['top1'].min():.2%} to {values['top1'].max():.2%}",
            "",
            "",
        )
    console.print(table)
