"""Commands about whole runs: develop, compare, report, import, export, calibrate.

``register(app)`` adds them to the command line; heavy imports happen inside the commands.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spectral_monitor.errors import SpectralMonitorError, ThresholdError
from spectral_monitor.options import (
    Baseline,
    BaselineName,
    BatchSize,
    Device,
    Draws,
    Dtype,
    GgufFile,
    NullDraws,
    Protocol,
    ProtocolName,
    Revision,
    Rows,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable

    from spectral_monitor.compare import Comparison
    from spectral_monitor.interventions import Transplant
    from spectral_monitor.publish.tables import Table
    from spectral_monitor.record import RunRecord

RunDir = Annotated[Path, typer.Argument(help="Run directory: a live, replayed or imported record.", show_default=False)]
Probe = Annotated[
    str | None,
    typer.Option(
        "--probe", help="Probe to analyse, where the record holds several (default: induction).", show_default=False
    ),
]
Capability = Annotated[
    str | None,
    typer.Option(
        "--capability",
        help="Class whose circuit, lead and milestones are asked for (default: the probe's own).",
        show_default=False,
    ),
]
Phases = Annotated[
    list[str] | None,
    typer.Option(
        "--phase",
        metavar="NAME@STEP",
        help="The data called NAME from STEP on; repeat it. Circuits are compared across each switch.",
        show_default=False,
    ),
]
JsonFile = Annotated[
    Path | None,
    typer.Option("--json", help="Write everything as JSON to this file.", show_default=False),
]


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    app.command("develop")(develop_command)
    app.command("compare")(compare_command)
    app.command("calibrate")(calibrate_command)
    app.command("report")(report_command)
    app.command("import")(import_command)
    app.command("export")(export_command)


@contextmanager
def _one_sentence() -> Iterator[None]:
    """Turn an expected error into one line and exit status 1."""
    try:
        yield
    except SpectralMonitorError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from None


def develop_command(
    run_dir: RunDir,
    json_file: JsonFile = None,
    probe: Probe = None,
    capability: Capability = None,
    phase: Phases = None,
    rise: Annotated[
        float, typer.Option("--rise", help="PR over its own running minimum that counts as a rise.", min=1.0)
    ] = 3.0,
    figures: Annotated[
        Path | None,
        typer.Option(
            "--figures", help="Write figures (PNG, SVG) and every table (CSV) to this folder.", show_default=False
        ),
    ] = None,
) -> None:
    """When did circuits form? First-token heads, milestones, recall, lead and calibration of one run.

    Reads the record alone. Every onset is an interval between two observations.
    """
    with _one_sentence():
        from spectral_monitor.development import develop
        from spectral_monitor.development.phases import Phase
        from spectral_monitor.publish import story
        from spectral_monitor.publish.console import probe_note
        from spectral_monitor.publish.tables import tables_of
        from spectral_monitor.record import RunRecord

        record = RunRecord.open(run_dir)
        found = develop(record, probe, capability, [Phase.parse(text) for text in phase or ()], rise)
        verdicts = [verdict for verdict in record.verdicts() if verdict.probe == found.series.probe]
        events = record.events()
        if json_file is not None:
            _write_json(json_file, found.to_json())
        if figures is not None:
            _write_figures(found, verdicts, events, figures)
        console = _console()
        if probe is None and (note := probe_note(found.series.probe, record.probes)):
            console.print(note)
        console.print()
        for sentence in (
            story.formed_text(found),
            story.causal_text(found, verdicts),
            story.sink_text(found),
            story.lead_text(found),
            story.alarm_text(found, events),
        ):
            console.print(sentence, highlight=False)
        wanted = ("milestones", "circuits", "recall", "lead", "calibration", "phases")
        for table in tables_of(found, verdicts, events):
            if table.name in wanted:
                console.print()
                console.print(rich_table(table))
                if table.note:
                    console.print(table.note, style="dim", highlight=False)
        for note in found.series.notes:
            console.print(f"Note: {note}", style="dim", highlight=False)


def report_command(
    run_dir: RunDir,
    output: Annotated[Path, typer.Option("--output", "-o", help="HTML file to write.")] = Path("report.html"),
    title: Annotated[
        str | None,
        typer.Option("--title", help="Heading of the page (default: the run directory's name).", show_default=False),
    ] = None,
    probe: Probe = None,
    capability: Capability = None,
    phase: Phases = None,
    figures: Annotated[
        Path | None,
        typer.Option(
            "--figures", help="Write figures (PNG, SVG) and every table (CSV) to this folder.", show_default=False
        ),
    ] = None,
) -> None:
    """One self-contained HTML page about a run: what formed, when, whether it is causal, how sure that is.

    The file opens from disk; no request leaves it.
    """
    with _one_sentence():
        from spectral_monitor.development import develop
        from spectral_monitor.development.phases import Phase
        from spectral_monitor.publish.report import write_report
        from spectral_monitor.record import RunRecord

        record = RunRecord.open(run_dir)
        phases = [Phase.parse(text) for text in phase or ()]
        written = write_report(record, output, probe, capability, phases, title)
        typer.echo(f"{written} ({written.stat().st_size / 1e6:.1f} MB)")
        if figures is not None:
            found = develop(record, probe, capability, phases)
            verdicts = [verdict for verdict in record.verdicts() if verdict.probe == found.series.probe]
            _write_figures(found, verdicts, record.events(), figures)


def compare_command(
    run_dirs: Annotated[
        list[Path], typer.Argument(metavar="RUN_DIR...", help="Two or more run directories.", show_default=False)
    ],
    json_file: JsonFile = None,
    probe: Probe = None,
    capability: Capability = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            help="Model of each run, in the same order (folder, GGUF file or Hub id): adds the transplant test, every "
            "run's circuit ablated in every run's model.",
            show_default=False,
        ),
    ] = None,
    rows: Annotated[
        int | None, typer.Option("--rows", help="Transplant: use the first so many probe rows.", min=2)
    ] = None,
    draws: Annotated[int, typer.Option("--draws", help="Transplant: matched-random draws at most.", min=1)] = 64,
    mode: Annotated[str, typer.Option("--mode", help="Transplant: zero or mean ablation.")] = "zero",
) -> None:
    """Do several runs (seeds, data, sizes) form the same circuits at the same time?

    Overlap of circuits is Jaccard, beside the value expected by chance. Runs with different probe batches do not
    compare.
    """
    with _one_sentence():
        from dataclasses import asdict

        from spectral_monitor.compare import compare
        from spectral_monitor.errors import RecordError
        from spectral_monitor.publish.model_tables import tables_of_comparison, transplant_table
        from spectral_monitor.record import RunRecord

        records = [RunRecord.open(path) for path in run_dirs]
        found = compare(records, probe, capability)
        moved = []
        if model:
            if len(model) != len(records):
                raise RecordError(f"{len(records)} runs and {len(model)} models: give --model once a run, in order")
            moved = _transplant(records, found, model, probe, rows, draws, mode)
        if json_file is not None:
            plain = found.to_json()
            if model:
                plain["transplant"] = [asdict(entry) for entry in moved]
            _write_json(json_file, plain)
        console = _console()
        tables = tables_of_comparison(found)
        if moved:
            tables.append(transplant_table(moved))
        for table in tables:
            console.print()
            console.print(rich_table(table))
            if table.note:
                console.print(table.note, style="dim", highlight=False)
        for note in found.notes:
            console.print(f"Note: {note}", style="dim", highlight=False)


def _transplant(
    records: list[RunRecord],
    found: Comparison,
    models: list[str],
    probe: str | None,
    rows: int | None,
    draws: int,
    mode: str,
) -> list[Transplant]:
    import numpy as np

    from spectral_monitor.causal import CheckOptions
    from spectral_monitor.compare import probe_of
    from spectral_monitor.interventions import transplant
    from spectral_monitor.replay.loading import load_model

    batch = probe_of(records[0], probe or "induction")
    if rows is not None and rows < batch.rows:
        batch = batch.take(np.arange(rows))
    circuits = {name: run.final_circuits.get(run.series.capability, []) for name, run in found.runs.items()}
    loaders = {
        name: (lambda source=source: load_model(source, dtype="float32").model)
        for name, source in zip(found.runs, models, strict=True)
    }
    options = CheckOptions(first_look=min(32, draws), max_draws=draws)
    return transplant(circuits, loaders, batch, mode=mode, options=options, progress=_say)


def calibrate_command(
    model: Annotated[str, typer.Argument(help="Hub id, checkpoint folder or GGUF file.", show_default=False)],
    revision: Revision = None,
    gguf_file: GgufFile = None,
    n: Rows = 128,
    seq_len: Annotated[int, typer.Option("--seq-len", help="Tokens a row.")] = 256,
    protocol: ProtocolName = Protocol.published,
    baseline: BaselineName = Baseline.sampled,
    null_draws: NullDraws = 500,
    sweep: Annotated[
        list[float] | None,
        typer.Option("--sweep", help="Ablate all heads at or above this threshold; repeat it.", show_default=False),
    ] = None,
    composition: Annotated[
        bool,
        typer.Option("--composition", help="Previous-token circuit out: what happens to induction? And the reverse."),
    ] = False,
    composition_draws: Annotated[
        int, typer.Option("--composition-draws", help="Matched-random sets whose effect on attention is read.", min=1)
    ] = 19,
    text: Annotated[
        str | None,
        typer.Option(
            "--text",
            help="Natural text to try the circuit on: a text file (an empty line ends a document), a .jsonl, .csv or "
            ".parquet file, or a datasets name.",
            show_default=False,
        ),
    ] = None,
    text_column: Annotated[str, typer.Option("--text-column", help="Column of a table or dataset.")] = "text",
    text_split: Annotated[str, typer.Option("--text-split", help="Split of a dataset.")] = "train",
    draws: Draws = 64,
    mode: Annotated[str, typer.Option("--mode", help="zero or mean ablation.")] = "zero",
    dtype: Dtype = None,
    device: Device = None,
    batch_size: BatchSize = None,
    json_file: JsonFile = None,
) -> None:
    """Where the screen's bars stand on one model: noise floor, conserved fraction, threshold sweep, composition."""
    with _one_sentence():
        from spectral_monitor.calibrate import Job, run, to_json, tokenize
        from spectral_monitor.capture import default_batch_size
        from spectral_monitor.natural_text import texts_of
        from spectral_monitor.publish.model_tables import tables_of_calibration
        from spectral_monitor.replay.loading import load_model

        if draws < 1 or null_draws < 1 or (batch_size is not None and batch_size < 1):
            raise ThresholdError("--draws, --null-draws and --batch-size are 1 or more")
        documents = None
        if text is not None:
            documents = tokenize(texts_of(text, text_column, text_split), model, revision, gguf_file)
        loaded = load_model(model, revision=revision, gguf_file=gguf_file, dtype=dtype, device=device)
        job = Job(
            rows=n,
            length=seq_len,
            protocol=protocol.value,
            baseline=baseline.value,
            null_draws=null_draws,
            draws=draws,
            mode=mode,
            batch_size=batch_size or default_batch_size(loaded.model.device, seq_len),
            sweep=tuple(sorted(sweep or ())),
            composition=composition,
            composition_draws=composition_draws,
        )
        found = run(loaded, job, documents, text or "", _say)
        if json_file is not None:
            _write_json(json_file, to_json(found))
        console = _console()
        for table in tables_of_calibration(found):
            console.print()
            console.print(rich_table(table))
            if table.note:
                console.print(table.note, style="dim", highlight=False)


def _say(text: str) -> None:
    typer.echo(text, err=True)


def import_command(
    file: Annotated[
        Path, typer.Argument(help="CSV or Parquet file, one row a head and observation.", show_default=False)
    ],
    out: Annotated[Path, typer.Option("--out", help="New run directory.", show_default=False)],
    rename: Annotated[
        list[str] | None,
        typer.Option(
            "--rename", metavar="OLD=NEW", help="The file's column OLD is NEW here; repeat it.", show_default=False
        ),
    ] = None,
    capability: Annotated[str, typer.Option("--capability", help="Class that the probe asks for.")] = "induction",
) -> None:
    """Make a record of observations from elsewhere.

    Needs the columns layer, head and step (or tokens). It takes pr, pr_moment, baseline, attention_CLASS,
    selectivity_CLASS, head_class, null_p99, probe_top1, probe_loss, mark, label and the record's other columns. What is
    missing stays missing.
    """
    with _one_sentence():
        from spectral_monitor.errors import RecordError
        from spectral_monitor.exchange import import_table

        pairs: dict[str, str] = {}
        for text in rename or ():
            old, equals, new = text.partition("=")
            if not (old and equals and new):
                raise RecordError(f"{text!r} is no renaming: write OLD=NEW, for example iteration=step")
            pairs[old] = new
        done = import_table(file, out, pairs, capability)
        typer.echo(f"{done.run_dir}: {done.observations} observations of {done.heads} heads")
        for note in done.notes:
            typer.echo(f"Note: {note}")


def export_command(
    run_dir: RunDir,
    to: Annotated[str, typer.Option("--to", help="parquet: a dataset folder; hub: a dataset repository.")] = "parquet",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder to write (default: RUN_DIR-dataset).", show_default=False),
    ] = None,
    repo: Annotated[
        str | None,
        typer.Option("--repo", help="Dataset repository, with --to hub: owner/name.", show_default=False),
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="With --to hub: make a new repository public.")] = False,
) -> None:
    """Write the record as a dataset with a card, for pandas, DuckDB or datasets.load_dataset."""
    with _one_sentence():
        import tempfile

        from spectral_monitor.errors import RecordError
        from spectral_monitor.exchange import export_record, upload
        from spectral_monitor.record import RunRecord

        if to not in ("parquet", "hub"):
            raise RecordError(f"cannot export to {to!r}: use parquet or hub")
        record = RunRecord.open(run_dir)
        if to == "parquet":
            folder = output or run_dir.resolve().with_name(run_dir.resolve().name + "-dataset")
            done = export_record(record, folder)
            typer.echo(f"{done.folder}: " + ", ".join(f"{rows} {name}" for name, rows in done.rows.items()))
            return
        if repo is None:
            raise RecordError("--to hub needs --repo OWNER/NAME")
        with tempfile.TemporaryDirectory() as place:
            done = export_record(record, output or Path(place) / "dataset")
            upload(done.folder, repo, private=not public)
        typer.echo(f"{repo}: " + ", ".join(f"{rows} {name}" for name, rows in done.rows.items()))


# -- shared -----------------------------------------------------------------------------------------------------------


def _write_json(path: Path, value: object) -> None:
    from spectral_monitor.errors import RecordError
    from spectral_monitor.record import write_json

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, value)
    except OSError as error:
        raise RecordError(f"{path} cannot be written ({error.strerror or error}): choose another path") from error


def _write_figures(found: object, verdicts: object, events: object, folder: Path) -> None:
    from spectral_monitor.publish.figures import write_figures, write_tables

    files = write_figures(found, verdicts, folder) + write_tables(found, verdicts, events, folder)  # type: ignore[arg-type]
    typer.echo(f"{folder}: {len(files)} files")


def _console() -> Console:
    from spectral_monitor.publish.console import wide_when_piped

    return wide_when_piped(markup=False)


def rich_table(table: Table) -> RichTable:
    """A table for the terminal."""
    from rich.table import Table as RichTable

    from spectral_monitor.publish.tables import show

    shown = RichTable(title=table.title, title_justify="left", box=None, header_style="bold", pad_edge=False)
    columns = table.brief or table.columns
    for column in columns:
        shown.add_column(column, overflow="fold")
    for row in table.rows:
        cells = zip(table.columns, row, strict=True)
        shown.add_row(*(show(value, table.formats.get(column, "")) for column, value in cells if column in columns))
    return shown
