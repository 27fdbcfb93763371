"""``spectral-monitor replay`` and ``merge``. ``register(app)`` adds them; heavy imports happen inside."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
    Rows,
    TokenRange,
    TrustRemoteCode,
)

if TYPE_CHECKING:
    from spectral_monitor.replay.hub import Hub
    from spectral_monitor.replay.loading import LoadOptions
    from spectral_monitor.replay.plan import Plan
    from spectral_monitor.replay.recorder import ProbeSettings

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def register(app: typer.Typer) -> None:
    """Add the commands of this room."""
    app.command("replay")(replay)
    app.command("merge")(merge)


def replay(
    source: Annotated[
        str,
        typer.Argument(
            help="Hub repository (owner/name), folder of checkpoints, list of repository and revision (.txt, .csv), "
            "or .gguf file. Not needed with --preset.",
            show_default=False,
        ),
    ] = "",
    points: Annotated[
        int | None, typer.Option(help="So many checkpoints, log-spaced over what exists.", show_default=False)
    ] = None,
    steps: Annotated[
        str | None, typer.Option(help="Exactly these steps, such as 1,64,512.", show_default=False)
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All checkpoints (the default).")] = False,
    last: Annotated[bool, typer.Option("--last", help="The latest checkpoint only.")] = False,
    preset: Annotated[
        str | None,
        typer.Option(help="A published ten-point set: pythia-1b, olmo-1b, olmoe-1b-7b.", show_default=False),
    ] = None,
    stage: Annotated[
        str | None,
        typer.Option(help="One training stage only, such as stage1 or stage2-ingredient1.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Run directory; with several stages OUT/<stage> each. Default: runs/<source>.", show_default=False
        ),
    ] = None,
    json: Annotated[
        Path | None, typer.Option("--json", help="Write the table of revisions to this file.", show_default=False)
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and what it costs; load nothing.")] = False,
    disk: Annotated[
        str | None,
        typer.Option(
            help="Disk budget for downloads, such as 50GB, all processes together. Default: what is free.",
            show_default=False,
        ),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep downloaded revisions after measuring.")] = False,
    work: Annotated[
        Path | None,
        typer.Option(
            help="Folder for downloads and for what a restart needs. Default: OUT.replay.", show_default=False
        ),
    ] = None,
    tokens_per_step: Annotated[
        float | None,
        typer.Option(
            help="Training tokens of one step. Known for Pythia, SmolLM2-1.7B and SmolLM3; else read off labels.",
            show_default=False,
        ),
    ] = None,
    dtype: Dtype = None,
    device: Device = None,
    device_map: Annotated[
        str | None, typer.Option(help="auto: spread a model over all devices.", show_default=False)
    ] = None,
    gguf_file: GgufFile = None,
    config: Annotated[
        Path | None,
        typer.Option(help="Folder of the model's config.json, for states saved without one.", show_default=False),
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
    allow_pickle: AllowPickle = False,
    shard: Annotated[str | None, typer.Option(help="i/n: this job's share of a job array.", show_default=False)] = None,
    compare: Annotated[
        int, typer.Option(help="Revisions whose listed hashes are compared, at most (one request each).")
    ] = 200,
    refresh: Annotated[bool, typer.Option("--refresh", help="Ask the Hub again which revisions there are.")] = False,
    n: Rows = 2000,
    seq_len: Annotated[int, typer.Option(help="Tokens a row T, lowered to what the model takes.")] = 256,
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
    check: Annotated[bool, typer.Option(help="Run the causal check when the candidate set changes.")] = True,
    check_seconds: Annotated[float, typer.Option(help="Time budget of one causal check; 0: none.")] = 300.0,
    batch_size: BatchSize = None,
    wandb: Annotated[
        str | None, typer.Option(help="Write the finished record into this W&B project.", show_default=False)
    ] = None,
) -> None:
    """Walk through published or saved checkpoints: the same record, events and verdicts as a live run.

    Killed and started again with the same --out it goes on where it was. Several processes share the work:
    `accelerate launch --num_processes N -m spectral_monitor replay ...`, `torchrun`, or --shard i/n in a job array.

    Exit status: 0 complete, 3 partly (some revisions failed: see the table), 4 nothing measured, 2 wrong input.
    """
    from spectral_monitor.errors import LoadError
    from spectral_monitor.record import write_json
    from spectral_monitor.replay.hub import Hub
    from spectral_monitor.replay.loading import LoadOptions, check_options
    from spectral_monitor.replay.plan import Listings
    from spectral_monitor.replay.progress import Bars, print_plan, print_result
    from spectral_monitor.replay.recorder import MonitorRecorder, series_info, settle_out
    from spectral_monitor.replay.runner import Replay, Settings, report, shard_of

    if not source and preset is None:
        raise LoadError("give a source (Hub repository, folder, list or .gguf file), or a --preset")
    if json is not None and not json.absolute().parent.is_dir():
        raise LoadError(f"--json {json}: its folder does not exist; make it first")
    rank, ranks = _ranks()
    chosen_device = device if device is not None or device_map is not None else _device(rank)
    load = LoadOptions(dtype, chosen_device, device_map, trust_remote_code, allow_pickle, config)
    check_options(load)
    hub = Hub()
    selection = _selection(points, steps, everything, last, preset)
    planning = dict(
        per_step=tokens_per_step,
        allow_pickle=allow_pickle,
        code=trust_remote_code,
        gguf_file=gguf_file,
        stage=stage,
        compare_most=compare,
    )
    probe = _probe_settings(
        (n, seq_len, seed, token_range, protocol.value),
        dict(member=member, classify=classify, previous_token=previous_token, min_attention=min_attention),
        baseline=baseline.value,
        null_draws=null_draws,
        draws=draws,
        check=check,
        check_seconds=check_seconds,
        batch_size=batch_size,
    )
    if dry_run:
        plan = _make_plan(source, selection, Listings(hub), planning)
        costs = _costs(plan, hub, load, probe)
        print_plan(plan, costs["text"])
        if json is not None:
            write_json(json, {"plan": _plan_json(plan), "costs": costs})
        return
    folder = out or Path("runs") / re.sub(r"[^\w.-]+", "--", (source or str(preset)).strip("/."))
    folder = settle_out(folder, load.dtype)
    place = work or folder.with_name(folder.name + ".replay")
    settings = Settings(
        folder,
        place,
        load,
        ranks=ranks,
        budget=None if disk is None else parse_size(disk),
        keep=keep,
        shard=None if shard is None else shard_of(shard),
    )
    fresh = not place.exists()
    plan = _shared_plan(source, selection, hub, place, planning, refresh and rank == 0)
    with _nothing_left(place, fresh and ranks == 1), Bars(plan, rank) as bars:
        walk = Replay(
            plan,
            settings,
            lambda series, run_dir: MonitorRecorder(
                run_dir, probe, shared=ranks > 1 or shard is not None, info=series_info(plan, series)
            ),
            hub,
            bars,
        )
        result = walk.run()
    if rank == 0:
        if json is not None:
            write_json(json, report(result, plan))
        print_result(result, plan, bars.console)
        if wandb is not None:
            _to_wandb(plan, folder, wandb)
    raise typer.Exit(result.status)


def merge(
    out: Annotated[Path, typer.Argument(help="New run directory.", show_default=False)],
    runs: Annotated[list[Path], typer.Argument(help="Run directories to join.", show_default=False)],
    mix_versions: Annotated[
        bool, typer.Option("--mix-versions", help="Join records made with other library versions or dtypes.")
    ] = False,
) -> None:
    """Join the records of one run, made on several machines, into one.

    Observations come in order of step; crossings are found again over the whole; causal verdicts are kept. Records of
    other probes, and two different observations of one step, are refused.
    """
    from spectral_monitor.replay.merge import merge_runs

    merged = merge_runs(out, runs, mix_versions=mix_versions)
    typer.echo(f"{out}: {merged.observations} observations, {merged.events} events, {merged.verdicts} verdicts")


# -- pieces -----------------------------------------------------------------------------------------------------------


def parse_size(text: str) -> int:
    """``"50GB"`` -> 50,000,000,000 (decimal units; ``GiB`` and the like are binary)."""
    from spectral_monitor.errors import LoadError

    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", text, re.IGNORECASE)
    if match is None or float(match[1]) <= 0:
        raise LoadError(f"--disk {text!r}: give a size such as 50GB, 500MB or 1.5TB")
    power = ("", "K", "M", "G", "T").index(match[2].upper())
    return int(float(match[1]) * (1024**power if match[3] else _UNITS[match[2].upper()]))


def _ranks() -> tuple[int, int]:
    """This process's rank and the number of ranks, as ``accelerate launch`` and ``torchrun`` set them."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _device(rank: int) -> str:
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    local = int(os.environ.get("LOCAL_RANK", str(rank)))
    return f"cuda:{local % torch.cuda.device_count()}"


def _selection(points: int | None, steps: str | None, everything: bool, last: bool, preset: str | None) -> Any:
    from spectral_monitor.replay.selection import Selection, parse_steps

    return Selection(points, parse_steps(steps) if steps is not None else (), last, preset, everything)


def _probe_settings(
    probe: tuple[int, int, int, tuple[int, int], str],
    thresholds: Mapping[str, float],
    *,
    baseline: str,
    null_draws: int,
    draws: int,
    check: bool,
    check_seconds: float,
    batch_size: int | None,
) -> ProbeSettings:
    """Options of the monitor; what is senseless is said before anything is loaded."""
    from spectral_monitor.causal import CheckOptions
    from spectral_monitor.errors import ThresholdError
    from spectral_monitor.probe import induction_probe
    from spectral_monitor.replay.recorder import ProbeSettings
    from spectral_monitor.screen import Thresholds

    rows, length, seed, token_range, protocol = probe
    if draws < 1 or null_draws < 0 or check_seconds < 0:
        raise ThresholdError("--draws is 1 or more, --null-draws and --check-seconds are 0 or more")
    induction_probe(rows=min(rows, 2), length=length, seed=seed, token_range=token_range, protocol=protocol)
    monitor = {
        "baseline": baseline,
        "thresholds": Thresholds(**thresholds),
        "check": CheckOptions(first_look=min(32, draws), max_draws=draws) if check else None,
        "check_seconds": check_seconds or None,
        "null_draws": null_draws,
        "batch_size": batch_size,
    }
    return ProbeSettings(rows, length, seed, token_range, protocol, monitor=monitor)


def _make_plan(source: str, selection: Any, listings: Any, planning: Mapping[str, Any]) -> Plan:
    from spectral_monitor.replay.plan import make_plan

    return make_plan(source, selection, listings, **planning)


def _shared_plan(source: str, selection: Any, hub: Hub, work: Path, planning: Mapping[str, Any], refresh: bool) -> Plan:
    """The plan, made by one process at a time: the Hub is asked once, the others read what it said."""
    import shutil

    from spectral_monitor.errors import LoadError
    from spectral_monitor.replay.claims import Claims
    from spectral_monitor.replay.plan import Listings

    existed = work.exists()
    try:
        claims = Claims(work / "claims")
    except OSError as error:
        raise LoadError(
            f"{work} cannot be written ({error.strerror or error}): choose another --work or --out"
        ) from error
    try:
        with claims.together("plan"):
            if refresh:
                for kept in (work / "listings").glob("*/refs.json"):
                    kept.unlink()
            return _make_plan(source, selection, Listings(hub, work / "listings"), planning)
    except Exception:
        if not existed:  # a refused start leaves nothing behind
            shutil.rmtree(work, ignore_errors=True)
        raise


@contextmanager
def _nothing_left(work: Path, fresh: bool) -> Iterator[None]:
    """Remove a work folder that this call made when it is refused before anything was measured."""
    import shutil

    from spectral_monitor.errors import SpectralMonitorError

    try:
        yield
    except SpectralMonitorError:
        if fresh and not any((work / "rows").glob("*")) and not any((work / "readings").glob("*")):
            shutil.rmtree(work, ignore_errors=True)
        raise


def _plan_json(plan: Plan) -> list[dict[str, Any]]:
    return [
        {
            "revision": item.checkpoint.name,
            "step": item.checkpoint.step if item.checkpoint.step >= 0 else None,
            "tokens": item.checkpoint.tokens,
            "tokens_from": item.checkpoint.tokens_from,
            "series": item.checkpoint.series,
            "status": item.status,
            "reason": item.reason,
            "same_as": item.same_as,
            "commit": item.checkpoint.commit,
            "format": None if item.weights is None else item.weights.format,
            "files": [] if item.weights is None else list(item.weights.files),
            "bytes": item.bytes,
        }
        for item in plan.planned
    ]


def _costs(plan: Plan, hub: Hub, load: LoadOptions, probe: ProbeSettings) -> dict[str, Any]:
    """Bytes, memory and time of a plan: by the listings, one config.json, and this machine's speed just now."""
    import json

    from spectral_monitor.errors import SpectralMonitorError
    from spectral_monitor.replay.plan import estimate
    from spectral_monitor.replay.progress import size_text

    wanted = [item for item in plan.planned if item.wanted]
    if not wanted:
        return {"text": "nothing to measure", "bytes": 0}
    first = max(wanted, key=lambda item: item.bytes)
    config: dict[str, Any] | None = None
    place = first.checkpoint
    try:
        if place.repo is not None and place.commit is not None:
            config = json.loads(hub.text(place.repo, place.commit, "config.json"))
        elif place.folder is not None:
            config = json.loads((place.folder / "config.json").read_text())
    except (SpectralMonitorError, OSError, ValueError):
        config = None
    cost = estimate(first.bytes, config, load.dtype)
    loaded = sum(item.bytes for item in wanted)
    fetched = sum(sum(file.size for file in item.fetch) for item in wanted)
    speed = _multiplications_a_second(load.device)
    # Two operations a parameter and token; the probe and its null companion; each revision.
    seconds = len(wanted) * 2 * 2.0 * cost.parameters * probe.rows * probe.length / speed
    lines = [
        f"{len(wanted)} revisions to measure: {size_text(loaded)} of weights to load, {size_text(fetched)} to fetch "
        "(less what is cached)",
        f"about {cost.parameters / 1e9:.3g}B parameters stored as {cost.stored}, loaded as {cost.dtype}: "
        f"{size_text(cost.memory_bytes)} of memory for the weights, activations on top",
        f"reading the probe: about {_duration(seconds)} in all at {speed / 1e9:.0f} GFLOP/s "
        f"({load.device or 'cpu'}, measured just now; dense models: a mixture of experts needs its active part only), "
        "causal checks on top; downloads run alongside",
    ]
    return {
        "text": "\n".join(lines),
        "bytes": loaded,
        "fetch_bytes": fetched,
        "parameters": cost.parameters,
        "dtype": cost.dtype,
        "memory_bytes": cost.memory_bytes,
        "seconds": seconds,
    }


def _multiplications_a_second(device: str | None) -> float:
    """Floating-point operations a second of a matrix product here; the best of three."""
    import time

    import torch

    place = torch.device(device or "cpu")
    size = 1024 if place.type == "cpu" else 4096
    matrix = torch.ones(size, size, device=place)
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        (matrix @ matrix)[0, 0].item()
        best = min(best, time.perf_counter() - began)
    return 2.0 * size**3 / best


def _duration(seconds: float) -> str:
    for unit, length in (("days", 86_400.0), ("hours", 3_600.0), ("minutes", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} seconds"


def _to_wandb(plan: Plan, out: Path, project: str) -> None:
    from spectral_monitor.publish.sync import sync
    from spectral_monitor.replay.runner import run_directory

    for series in plan.series:
        run_dir = run_directory(out, series.name)
        if (run_dir / "run.json").is_file():
            done = sync(run_dir, project=project)
            typer.echo(f"{done.observations} observations are in W&B run {done.run_id}: {done.place}")
