"""``spectral-monitor doctor``: can this model be measured, and what would it cost?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from spectral_monitor.errors import SpectralMonitorError


def register(app: typer.Typer) -> None:
    """Add ``doctor`` to the program's commands."""
    app.command("doctor")(doctor)


def doctor(
    model: Annotated[str, typer.Argument(help="Hub id (owner/name), local folder, or .gguf file.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub repository.")] = None,
    gguf_file: Annotated[str | None, typer.Option(help="Name of the GGUF file in the folder or repository.")] = None,
    n: Annotated[int, typer.Option("--n", min=1, help="Probe rows N that costs are stated for.")] = 512,
    seq_len: Annotated[
        int | None, typer.Option(help="Tokens a row T. Default: 256, or the model's maximum if that is less.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16, float16, auto. Default: float32 below 2B parameters.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 ... Default: cuda if there is one.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Probe rows a micro-batch.")] = 8,
    trust_remote_code: Annotated[bool, typer.Option(help="Run code that the checkpoint brings along.")] = False,
    allow_pickle: Annotated[bool, typer.Option(help="Accept .bin weights (read with weights_only=True).")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write it as JSON.")] = None,
) -> None:
    """Say whether a model's heads can be read and ablated, and what it would cost.

    Layers, heads, head sizes, the path by which each attention is read, learned sinks and windows, the difference of
    logits while attention is watched, whether ablation reaches the logits, expected time and memory; or why the model
    would be refused (exit status 1).
    """
    try:
        source: dict[str, Any] = {"revision": revision, "gguf_file": gguf_file, "dtype": dtype, "device": device}
        source |= {"trust_remote_code": trust_remote_code, "allow_pickle": allow_pickle}
        readable = _doctor(model, source, n, seq_len, batch_size, json_file)
    except SpectralMonitorError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    if not readable:
        raise typer.Exit(1)


def _doctor(
    name: str, source: dict[str, Any], n: int, seq_len: int | None, batch_size: int, json_file: Path | None
) -> bool:
    import json

    import torch

    from spectral_monitor.capture import longest_input, vocabulary_of
    from spectral_monitor.doctor import examine, summary
    from spectral_monitor.probe import induction_probe
    from spectral_monitor.replay.loading import load_model

    if json_file is not None and not json_file.resolve().parent.is_dir():
        raise SpectralMonitorError(f"cannot write {json_file}: there is no directory {json_file.resolve().parent}")
    if source["device"] is None and torch.cuda.is_available():
        source["device"] = "cuda"
    loaded = load_model(name, **source)
    sizes = [size for size in (vocabulary_of(loaded.model), loaded.tokenizer_size) if size]
    probe = induction_probe(
        rows=n,
        length=seq_len or min(256, longest_input(loaded.model) or 256),
        vocabulary=min(sizes) if sizes else None,
        exclude=loaded.tokenizer_special_ids,
    )
    diagnosis = examine(loaded.model, probe, batch_size=batch_size)
    for line in [*summary(diagnosis), *(f"note: {note}" for note in loaded.notes)]:
        typer.echo(line)
    if json_file is not None:
        try:
            json_file.write_text(json.dumps({"source": name, **diagnosis.to_dict()}, indent=2, allow_nan=False) + "\n")
        except OSError as error:
            raise SpectralMonitorError(f"cannot write {json_file}: {error.strerror or error}") from error
    return diagnosis.readable
