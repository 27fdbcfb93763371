"""``spectral-monitor``: the command line. Heavy imports happen inside the commands, so that help is quick."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spectral_monitor.options import (
    AllowPickle,
    Baseline,
    BaselineName,
    BatchSize,
    Classify,
    Device,
    Draws,
    Dtype,
    GgufFile,
    Member,
    MinAttention,
    NullDraws,
    PreviousToken,
    ProbeSeed,
    Protocol,
    ProtocolName,
    Revision,
    Rows,
    TokenRange,
    TrustRemoteCode,
)

if TYPE_CHECKING:
    from spectral_monitor.scan import ScanResult

app = typer.Typer(
    name="spectral-monitor",
    help="Watch attention circuits form while a language model trains: spectral signal, screen, causal check.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.command()
def scan(
    model: Annotated[str, typer.Argument(help="Hub id (owner/name), local folder, or .gguf file.")],
    revision: Revision = None,
    gguf_file: GgufFile = None,
    n: Rows = 512,
    seq_len: Annotated[
        int | None, typer.Option(help="Tokens a row T. Default: 256, or the model's maximum if that is less.")
    ] = None,
    seed: ProbeSeed = 42,
    token_range: TokenRange = (100, 10_000),
    protocol: ProtocolName = Protocol.default,
    baseline: BaselineName = Baseline.others,
    member: Member = 50.0,
    classify: Classify = 30.0,
    previous_token: PreviousToken = 100.0,
    min_attention: MinAttention = 0.02,
    null_draws: NullDraws = 20,
    draws: Draws = 199,
    draw_seed: Annotated[int, typer.Option(help="Seed of the matched-random draws.")] = 0,
    alpha: Annotated[float, typer.Option(help="Level of the causal check.")] = 0.05,
    modes: Annotated[str, typer.Option(help="Ablation modes: zero, mean, or zero,mean.")] = "zero,mean",
    check: Annotated[bool, typer.Option(help="Run the causal check of the induction circuit.")] = True,
    check_seconds: Annotated[float | None, typer.Option(help="Time budget of the causal check. Default: none.")] = None,
    dtype: Dtype = None,
    device: Device = None,
    batch_size: BatchSize = None,
    trust_remote_code: TrustRemoteCode = False,
    allow_pickle: AllowPickle = False,
    json: Annotated[Path | None, typer.Option(help="Write everything measured to this file.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write a run record into this directory.")] = None,
    top: Annotated[int, typer.Option(help="Heads in the printed table.")] = 15,
) -> None:
    """Measure one checkpoint: spectrum, screen and causal check of its induction circuit."""
    from spectral_monitor.errors import RecordError, SpectralMonitorError

    if json is not None and not json.absolute().parent.is_dir():
        raise RecordError(f"--json {json}: its folder does not exist; make it first")
    options = _scan_options(
        rows=n,
        length=seq_len,
        seed=seed,
        token_range=token_range,
        protocol=protocol.value,
        baseline=baseline.value,
        thresholds=dict(classify=classify, member=member, previous_token=previous_token, min_attention=min_attention),
        null_draws=null_draws,
        draws=draws,
        draw_seed=draw_seed,
        alpha=alpha,
        modes=tuple(mode.strip() for mode in modes.split(",") if mode.strip()),
        check=check,
        check_seconds=check_seconds,
        batch_size=batch_size,
    )
    from spectral_monitor.publish.scan_view import print_scan, scan_progress
    from spectral_monitor.record import write_json
    from spectral_monitor.replay.loading import load_model
    from spectral_monitor.replay.names import parse_name
    from spectral_monitor.scan import scan as run_scan

    loaded = load_model(
        model,
        revision=revision,
        gguf_file=gguf_file,
        dtype=dtype,
        device=device or _best_device(),
        trust_remote_code=trust_remote_code,
        allow_pickle=allow_pickle,
    )
    parsed = parse_name(revision or Path(model).name)
    with scan_progress() as progress:
        try:
            result: ScanResult = run_scan(
                loaded.model,
                options,
                name=model,
                revision=revision,
                commit=loaded.commit,
                dtype=loaded.dtype,
                exclude=loaded.tokenizer_special_ids,
                tokenizer_size=loaded.tokenizer_size,
                run_dir=out,
                step=(parsed.step or 0) if parsed is not None else 0,
                tokens=parsed.tokens if parsed is not None else None,
                notes=loaded.notes,
                progress=progress,
            )
        except ValueError as error:
            if isinstance(error, SpectralMonitorError):
                raise
            raise SpectralMonitorError(str(error)) from error
    print_scan(result, top)
    if json is not None:
        write_json(json, result.to_dict())
        typer.echo(f"written: {json}")
    if out is not None:
        typer.echo(f"run record: {out}")


def _scan_options(thresholds: dict[str, float], **options: object):  # type: ignore[no-untyped-def]
    """Options as the scan room wants them; a senseless number becomes one sentence."""
    from spectral_monitor.causal import CheckOptions
    from spectral_monitor.errors import SpectralMonitorError, ThresholdError
    from spectral_monitor.probe import induction_probe
    from spectral_monitor.scan import ScanOptions
    from spectral_monitor.screen import Thresholds

    made = ScanOptions(thresholds=Thresholds(**thresholds), **options)  # type: ignore[arg-type]
    if made.draws < 1:
        raise ThresholdError(f"--draws is a number from 1 up, not {made.draws}; use --no-check for no causal check")
    if made.null_draws < 0:
        raise ThresholdError(f"--null-draws is a number from 0 up, not {made.null_draws}")
    try:
        CheckOptions(alpha=made.alpha, first_look=min(32, made.draws), max_draws=made.draws)
    except ValueError as error:
        raise SpectralMonitorError(f"--alpha {made.alpha}: {error}") from error
    # Before a model is loaded: what is wrong with the probe's own numbers is said at once.
    induction_probe(
        rows=min(made.rows, 2), length=made.length or 256, token_range=made.token_range, protocol=made.protocol
    )
    return made


def _best_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


@app.command()
def version() -> None:
    """Print the versions that a number may depend on."""
    from spectral_monitor.monitor import library_versions

    for package, number in library_versions().items():
        typer.echo(f"{package} {number}")


def _register() -> None:
    """Commands that live beside the room they serve."""
    from importlib import import_module

    for module in (
        "spectral_monitor.development_cli",
        "spectral_monitor.trust_cli",
        "spectral_monitor.doctor_cli",
        "spectral_monitor.publish.cli",
        "spectral_monitor.replay.cli",
    ):
        try:
            import_module(module).register(app)
        except ModuleNotFoundError as error:
            if error.name is None or not module.startswith(error.name):
                raise
    from train_examples.demo import demo

    app.command()(demo)


def main() -> None:
    """Entry point: a user's mistake ends with one sentence and exit code 2, never with a traceback."""
    from spectral_monitor.errors import SpectralMonitorError

    _register()
    try:
        app()
    except SpectralMonitorError as error:
        print(f"spectral-monitor: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("spectral-monitor: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
