"""``spectral-monitor demo``: train a small model from scratch with the monitor attached, and watch a circuit form.

What a user would write is in ``run``: a Trainer with ``SpectralMonitorCallback`` among its callbacks. The rest is how
it is shown.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spectral_monitor.errors import SpectralMonitorError
from train_examples.emergence import RECIPES, Recipe, RecipeError, recipe_named, train

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import TrainerCallback

    from spectral_monitor.development import Development
    from spectral_monitor.observation import Verdict
    from spectral_monitor.publish.terminal import TerminalPublisher
    from spectral_monitor.record import RunRecord


#: A run of two minutes is looked at often: about every 6% of the steps so far.
POINTS_PER_OCTAVE = 12
#: Before this step only the doublings are looked at.
FIRST_LOOKS = 32
#: Rows of the probe batch, of 64 tokens.
PROBE_ROWS = 256
#: Selectivity from which a head counts as a member: at T = 64 about a quarter of the head's attention. The default of
#: 50 would ask for nearly half of it.
MEMBER = 20.0


def demo(
    recipe: Annotated[str, typer.Option(help=f"What to train: {', '.join(RECIPES)}.")] = "emergence",
    seed: Annotated[int, typer.Option(min=0, help="Decides the initial weights, the data and their order.")] = 0,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Optimizer steps; by default the recipe's own number.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Output directory; by default ./demo/RECIPE-seedSEED (an earlier record there is renamed)."),
    ] = None,
    report_to: Annotated[
        str, typer.Option(help="Where the Trainer logs besides: none, or wandb (which the monitor then joins).")
    ] = "none",
) -> None:
    """Train a small language model from scratch on this machine's CPU, with the monitor attached.

    Shows loss, probe accuracy and the rising heads while it trains (one plain line an observation where the output is
    no terminal). At the end: when each head of the circuit rose and crossed, the causal verdict with its control, the
    run directory, and a picture of the trajectories. With the recipe `emergence` it takes about two minutes on two idle
    CPU cores. `all-join` and `gpt2-no-induction` are runs on which the monitor must not claim a causal circuit.
    """
    from rich.console import Console

    console = Console()
    try:
        run(recipe_named(recipe), seed, steps, out or Path("demo") / f"{recipe}-seed{seed}", report_to, console)
    except SpectralMonitorError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None


def run(recipe: Recipe, seed: int, steps: int | None, out: Path, report_to: str, console: Console) -> Path:
    """Train ``recipe`` with the monitor and print what it found; the run directory is returned.

    Raises:
        RecipeError: ``out`` cannot be written.
    """
    run_dir = out / "spectral_monitor"
    _writable(out)
    _quiet()
    from spectral_monitor.attach.trainer import SpectralMonitorCallback
    from spectral_monitor.monitor import default_probe
    from spectral_monitor.publish.terminal import TerminalPublisher
    from spectral_monitor.record import RunRecord
    from spectral_monitor.schedule import LogSchedule
    from spectral_monitor.screen import Thresholds

    steps = recipe.steps if steps is None else steps
    console.print(f"recipe {recipe.name}: {recipe.layers} layers x {recipe.heads} heads, {steps} steps, seed {seed}")
    console.print(f"planted: {recipe.planted}", soft_wrap=True)
    console.print(f"expected: {recipe.expected}", soft_wrap=True)

    terminal = TerminalPublisher(console, total_steps=steps)
    monitor = SpectralMonitorCallback(
        run_dir=run_dir,
        probes=lambda model, tokenizer: default_probe(model, tokenizer, rows=PROBE_ROWS, length=recipe.length),
        schedule=LogSchedule(points_per_octave=POINTS_PER_OCTAVE, last_step=steps, start=FIRST_LOOKS),
        thresholds=Thresholds(member=MEMBER),
        max_overhead=None,
        publishers=(terminal,),
    )
    try:
        train(recipe, seed, steps, out, callbacks=[monitor, show_loss(terminal)], report_to=report_to)
    finally:
        terminal.close()
    summarise(RunRecord.open(run_dir), run_dir, recipe, console)
    return run_dir


def show_loss(terminal: TerminalPublisher) -> TrainerCallback:
    """A Trainer callback that tells the terminal view where the training stands (the monitor knows no loss)."""
    from transformers import TrainerCallback

    class ShowLoss(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
            terminal.training(state.global_step, state.num_input_tokens_seen or None, (logs or {}).get("loss"))

    return ShowLoss()


def summarise(record: RunRecord, run_dir: Path, recipe: Recipe, console: Console) -> None:
    """Print the tables of a finished run and draw its picture."""
    from spectral_monitor.development import develop
    from train_examples.trajectories import trajectories_svg

    found = develop(record)
    verdicts = record.verdicts()
    circuit = found.final_circuits.get(found.series.capability, [])
    console.print()
    console.print(_head_table(found))
    if verdicts:
        console.print(_verdict_table(verdicts))
    else:
        console.print("No causal check was made: no head became a candidate, no circuit is claimed.", soft_wrap=True)
    picture = run_dir / "trajectories.svg"
    title = f"{recipe.name}: {len(found.series.heads)} heads, circuit {' '.join(map(str, circuit)) or 'none'}"
    picture.write_text(trajectories_svg(found.series, circuit, record.events(), verdicts, title))
    console.print(f"run directory  {run_dir}", soft_wrap=True)
    console.print(f"picture        {picture}", soft_wrap=True)


def _head_table(found: Development) -> Any:
    from rich.table import Table

    from spectral_monitor.publish.tables import show

    series = found.series
    circuit = found.final_circuits.get(series.capability, [])
    table = Table(
        title=f"Heads of the {series.capability} circuit at the last observation",
        caption=f"PR rise: first step at {found.rise_factor:g} x the head's own lowest PR. Crossing: first step with "
        f"selectivity (attention / baseline) {series.bars.member:g} or more. {_base_rate(found)}"
        if circuit
        else f"No head reached {series.bars.member:g} x the baseline with {series.bars.min_attention:g} attention.",
    )
    for heading in ("head", "PR rise", "tokens", "crossing", "tokens", "final PR", "attention", "x base"):
        table.add_column(heading, justify="left" if heading == "head" else "right")
    for lead in found.leads:
        if lead.head not in circuit:
            continue
        at = series.heads.index(lead.head)
        table.add_row(
            str(lead.head),
            show(lead.rise.by_step),
            show(lead.rise.by_tokens, "tokens"),
            show(lead.crossing.by_step),
            show(lead.crossing.by_tokens, "tokens"),
            show(float(series.pr[series.last, at]), ".2f"),
            show(float(series.attention[series.capability][series.last, at]), ".3f"),
            show(float(series.selectivity[series.capability][series.last, at]), ".1f"),
        )
    return table


def _base_rate(found: Development) -> str:
    from spectral_monitor.publish.tables import base_rate_text

    return base_rate_text(found)


def _verdict_table(verdicts: list[Verdict]) -> Any:
    """The last check of each capability and ablation mode, one a column."""
    from rich.table import Table

    from spectral_monitor.publish.story import latest_verdicts
    from spectral_monitor.publish.tables import show, tokens_text

    latest = latest_verdicts(verdicts)
    table = Table(title="Causal check of the circuit")
    table.add_column("")
    for verdict in latest:
        table.add_column(f"{verdict.capability}, {verdict.mode} ablation", overflow="fold")
    rows: dict[str, list[str]] = {
        "verdict": [verdict.verdict for verdict in latest],
        "heads": [" ".join(verdict.heads) for verdict in latest],
        "at": [
            f"step {verdict.step}" + (f", {tokens_text(verdict.tokens)} tokens" if verdict.tokens is not None else "")
            for verdict in latest
        ],
        "top-1 intact": [_top1(verdict, "baseline") for verdict in latest],
        "circuit out": [_top1(verdict, "circuit") for verdict in latest],
        "matched random out": [_range([draw.top1 for draw in verdict.random]) for verdict in latest],
        "all heads of the layer out": [_top1(verdict, "upper bound") for verdict in latest],
        "random draws": [f"{verdict.draws} (of {verdict.distinct_draws} that exist)" for verdict in latest],
        "p": [show(verdict.p_value, ".3f") for verdict in latest],
        "reason": [verdict.reason for verdict in latest],
    }
    for name, values in rows.items():
        table.add_row(name, *values)
    return table


def _range(top1: list[float]) -> str:
    from spectral_monitor.publish.tables import show

    return f"{min(top1):.1%} to {max(top1):.1%}" if top1 else show(None)


def _top1(verdict: Verdict, name: str) -> str:
    from spectral_monitor.publish.tables import show

    condition = verdict.condition(name)
    return show(None) if condition is None else f"{condition.top1:.1%}"


def _writable(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecipeError(f"{out} cannot be written ({error.strerror}): give another --out") from error
    if not os.access(out, os.W_OK):
        raise RecipeError(f"{out} cannot be written: give another --out")


def _quiet() -> None:
    """Keep the libraries' own notices out of the view; warnings of the monitor stay."""
    import transformers

    transformers.logging.set_verbosity_error()
    for name in ("accelerate", "datasets"):
        logging.getLogger(name).setLevel(logging.ERROR)
