"""``spectral-monitor warn``: replay the early warning over finished records and say how far to believe it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spectral_monitor.errors import SpectralMonitorError, ThresholdError

if TYPE_CHECKING:
    from spectral_monitor.trust import Candidate, RunSeries, Trust
    from spectral_monitor.warning import Crossing, WarningParameters


def register(app: typer.Typer) -> None:
    """Add ``warn`` to the program's commands."""
    app.command("warn")(warn)


def warn(
    run_dirs: Annotated[
        list[Path], typer.Argument(metavar="RUN_DIR...", help="Finished run directories, all with the same probe.")
    ],
    probe: Annotated[
        str | None, typer.Option("--probe", help="Name of the probe (default: induction, or the only one).")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="ALARM.PARAMETER=VALUE",
            help="Change a parameter of an alarm, for example pr.ratio=2 or attention.bar=3 (repeatable). ALARM=off "
            "leaves it out. Alarms: pr, pr_gate, content, attention, precursor. crossing.selectivity=20 changes who "
            "counts as a member (the runs' own thresholds otherwise); pr_until_formed=off keeps PR alarms "
            "after the circuit's first member.",
        ),
    ] = None,
    horizon: Annotated[
        float,
        typer.Option(
            "--horizon",
            help="An alarm is right when its head joins a circuit before so many times the tokens have passed.",
        ),
    ] = 2.0,
    curve: Annotated[
        str | None,
        typer.Option(
            "--curve", metavar="NAME", help="Also the operating curve of one alarm, by its name in the table."
        ),
    ] = None,
    choose_on: Annotated[
        int | None,
        typer.Option(
            "--choose-on",
            metavar="N",
            min=1,
            help="Choose each alarm's sensitivity (its ratio or bar) on the first N runs and report on the others.",
        ),
    ] = None,
    draws: Annotated[int, typer.Option("--draws", min=1, help="Draws of the random-times baseline.")] = 200,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown.")] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write everything as JSON to FILE.")
    ] = None,
) -> None:
    """Replay the early warning over finished runs: which alarms led to circuit heads, how early, and how many did not.

    One row an alarm: how many were right (the head joined a circuit within the horizon), the precision with its 95%
    interval and that of as many alarms at random looks of random heads, how many heads of the final circuit were
    warned of and how many of those before their crossing, the median lead (tokens at the crossing / tokens at the
    alarm, with a 95% interval over runs), and false alarms per 100 heads. The last rows are what every alarm has to
    beat: attention on the target itself at a low bar, and for PR its gate alone (every head when it opens).
    """
    try:
        _warn(run_dirs, probe, settings or [], horizon, curve, choose_on, draws, markdown, json_file)
    except SpectralMonitorError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None


def _warn(
    run_dirs: list[Path],
    probe: str | None,
    settings: list[str],
    horizon: float,
    curve: str | None,
    choose_on: int | None,
    draws: int,
    as_markdown: bool,
    json_file: Path | None,
) -> None:
    from spectral_monitor import trust
    from spectral_monitor.warning import Crossing

    parameters = parse_settings(settings)
    asked = any(setting.strip().startswith("crossing") for setting in settings)
    crossing = (parameters.crossing or Crossing()) if asked else None
    runs = [trust.read_run(path, probe, crossing) for path in run_dirs]
    if probe is None:
        _say_probe(run_dirs)
    chosen = trust.candidates(parameters)
    if choose_on is not None:
        if choose_on >= len(runs):
            raise ThresholdError(
                f"--choose-on {choose_on} leaves none of {len(runs)} run(s) to report on: give more runs"
            )
        chosen = [trust.choose(runs[:choose_on], candidate, horizon) for candidate in chosen]
        runs = runs[choose_on:]
        said = ", ".join(f"{one.name} {_parameter(one)} {one.sensitivity:.3g}" for one in chosen)
        typer.echo(f"Chosen on the first {choose_on} run(s): {said}.")
    picked = _picked(curve, chosen)
    table = trust.trust_table(runs, chosen, horizon, draws)
    if as_markdown:
        typer.echo(trust.markdown(table))
    else:
        _print("Early warning: what its alarms were worth", trust.COLUMNS, trust.cells(table))
    typer.echo(_summary(runs, table.rows[0].resolution if table.rows else math.nan, horizon, crossing))
    result: dict[str, Any] = {
        "runs": [run.name for run in runs],
        "sensitivities": {one.name: {_parameter(one): one.sensitivity} for one in chosen},
        **table.to_dict(),
    }
    if picked is not None:
        rows = trust.operating_curve(runs, picked, trust.sensitivities(picked), horizon)
        lines = [(f"{value:.3g}", *_point(one)) for value, one in rows]
        columns = (_parameter(picked), "right / alarms", "precision", "recall", "lead", "false / 100 heads")
        _print(f"Operating curve of {picked.name}", columns, lines)
        result["curve"] = {
            "alarm": picked.name,
            "parameter": _parameter(picked),
            "points": [{"value": value, **one.to_dict()} for value, one in rows],
        }
    if json_file is not None:
        from spectral_monitor.record import write_json

        try:
            write_json(json_file, result)
        except OSError as error:
            raise SpectralMonitorError(
                f"{json_file} cannot be written ({error.strerror or error}): choose another file for --json"
            ) from error


def parse_settings(settings: list[str]) -> WarningParameters:
    """``["pr.ratio=2", "content=off"]`` as parameters; ThresholdError names what is not understood."""
    from spectral_monitor.warning import WarningParameters

    raw = WarningParameters().to_dict()
    for setting in settings:
        name, given, text = setting.partition("=")
        alarm, _, parameter = name.strip().partition(".")
        text = text.strip()
        takes = isinstance(raw.get(alarm), dict) or raw.get(alarm, "") is None
        if not given or alarm not in raw or (not takes if parameter else text != "off"):
            raise ThresholdError(
                f"--set {setting!r} is not understood: write ALARM.PARAMETER=VALUE or ALARM=off, with ALARM one of "
                f"{', '.join(raw)}"
            )
        if not parameter:
            raw[alarm] = None
            continue
        if raw[alarm] is None:
            raise ThresholdError(f"--set {setting!r}: the alarm {alarm!r} was switched off before")
        try:
            raw[alarm][parameter] = int(text) if text.lstrip("-").isdigit() else float(text)
        except ValueError:
            raise ThresholdError(f"--set {setting!r}: {text!r} is no number") from None
    return WarningParameters.from_dict(raw)


def _picked(curve: str | None, chosen: list[Candidate]) -> Candidate | None:
    if curve is None:
        return None
    for candidate in chosen:
        if candidate.name == curve:
            return candidate
    raise ThresholdError(f"--curve {curve!r}: no such alarm; there are {', '.join(one.name for one in chosen)}")


def _parameter(candidate: Candidate) -> str:
    from spectral_monitor.warning import RiseRule

    return "ratio" if isinstance(candidate.rule, RiseRule) else "bar"


def _summary(runs: list[RunSeries], resolution: float, horizon: float, crossing: Crossing | None) -> str:
    heads = sum(len(run.heads) for run in runs)
    bar = "at the runs' own thresholds" if crossing is None else f">= {crossing.selectivity:g}x"
    members = sum(int(run.final().sum()) for run in runs)
    text = (
        f"{len(runs)} run(s), {heads} heads, {members} of them in a final circuit ({bar}); "
        f"horizon {horizon:g} x the tokens at the alarm."
    )
    if not members:
        return f"{text} No circuit formed within these records: precision and recall say nothing."
    if math.isfinite(resolution):
        text += f" Looks are {resolution:.3g}x apart at the crossings: a lead up to that cannot be told from none."
    return text


def _point(one: Trust) -> tuple[str, ...]:
    counts = f"{one.right:g}/{one.alarms:g}"
    return counts, _share(one.precision), _share(one.recall), _lead(one.lead), f"{one.false_per_100_heads:.1f}"


def _share(value: float) -> str:
    return "-" if math.isnan(value) else f"{100 * value:.0f}%"


def _lead(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}x"


def _say_probe(run_dirs: Sequence[Path]) -> None:
    """Which probe was taken, where a record holds others too."""
    from spectral_monitor.publish.console import probe_note
    from spectral_monitor.record import RunRecord

    names = sorted({name for path in run_dirs for name in RunRecord.open(path).probes})
    if "induction" in names and (note := probe_note("induction", names)):
        typer.echo(note)


def _print(title: str, columns: Sequence[str], lines: Sequence[tuple[str, ...]]) -> None:
    from rich.table import Table

    from spectral_monitor.publish.console import wide_when_piped

    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    for line in lines:
        table.add_row(*line)
    wide_when_piped().print(table)
