"""Commands that publish: ``watch``, ``serve``, ``sync``, ``dashboard push|show``. ``register`` adds them to an app."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RunDir = Annotated[
    Path, typer.Argument(help="Run directory of the monitor (the one with run.json).", show_default=False)
]
HeadsOf = Annotated[
    Path | None,
    typer.Option("--run-dir", help="List exactly the heads that this run flags, instead of a pattern of head names."),
]

dashboard = typer.Typer(
    no_args_is_help=True, help="The monitor's W&B workspace: save it to a project, or write it as JSON."
)


def watch(
    run_dir: RunDir,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks at the directory.")] = 1.0,
    heads: Annotated[int, typer.Option(min=0, help="Heads to list; 0: as many as fit.")] = 0,
    once: Annotated[bool, typer.Option("--once", help="Print the view once and end.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for a run directory that does not exist yet.")] = False,
) -> None:
    """Watch a run in the terminal while it goes on, also over ssh. Reads the run directory, nothing else.

    Where there is no terminal (a pipe, a log) each look, event and verdict is one line.
    """
    from spectral_monitor.publish.watch import watch as show

    show(run_dir, interval=interval, heads=heads or None, once=once, wait=wait)


def serve(
    run_dir: RunDir,
    port: Annotated[int, typer.Option(help="Port on this machine's loopback; 0: any free one.")] = 8321,
    open_browser: Annotated[bool, typer.Option("--open", help="Open the page in this machine's browser.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Start before the run directory exists.")] = False,
) -> None:
    """Serve one live page for a run, on this machine only. Read-only; charts grow as observations land.

    From another machine: ssh -L 8321:localhost:8321 HOST, then open http://localhost:8321/.
    """
    from spectral_monitor.publish.serve import serve as make

    with make(run_dir, port, wait) as server:
        typer.echo(f"{run_dir} is live at {server.address} (Ctrl-C to end)")
        if open_browser:
            import webbrowser

            webbrowser.open(server.address)
        _until_interrupted()


def sync(
    run_dir: RunDir,
    project: Annotated[
        str | None, typer.Option(help="W&B project; default: WANDB_PROJECT, else spectral-monitor.")
    ] = None,
    entity: Annotated[str | None, typer.Option(help="W&B user or team; default: your own.")] = None,
    run_id: Annotated[str | None, typer.Option(help="Id of the new W&B run; default: a new one.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the new W&B run; default: the directory's.")] = None,
    offline: Annotated[
        bool, typer.Option("--offline", help="Write an offline run; `wandb sync` uploads it later.")
    ] = False,
    alerts: Annotated[bool, typer.Option("--alerts", help="Also raise the run's alerts again.")] = False,
) -> None:
    """Write the whole history of a run directory into one new W&B run.

    For runs that were resumed, trained without W&B, or lost their tracker on the way: the record has every look.
    """
    from spectral_monitor.publish.sync import sync as write

    done = write(run_dir, project=project, entity=entity, run_id=run_id, name=name, offline=offline, alerts=alerts)
    typer.echo(
        f"{done.observations} observations, {done.events} events and {done.verdicts} verdicts are in W&B run "
        f"{done.run_id}: {done.place}"
    )
    if done.offline:
        typer.echo(f"Upload it with: wandb sync {Path(done.place).parent}")


@dashboard.command("push")
def push(
    entity: Annotated[str, typer.Option(help="W&B user or team.", show_default=False)],
    project: Annotated[str, typer.Option(help="W&B project.", show_default=False)],
    run_dir: HeadsOf = None,
) -> None:
    """Save the workspace as a new view of a W&B project; prints its address."""
    from spectral_monitor.publish import dashboard as definition

    heads = definition.flagged_heads(run_dir) if run_dir is not None else ()
    typer.echo(definition.push(entity, project, heads))


@dashboard.command("show")
def show(
    entity: Annotated[str, typer.Option(help="W&B user or team.")] = "ENTITY",
    project: Annotated[str, typer.Option(help="W&B project.")] = "PROJECT",
    run_dir: HeadsOf = None,
    out: Annotated[Path | None, typer.Option(help="File to write; default: standard output.")] = None,
) -> None:
    """Write the workspace as JSON, without a network or an account."""
    from spectral_monitor.publish import dashboard as definition
    from spectral_monitor.publish.names import PublishError
    from spectral_monitor.record import write_text

    heads = definition.flagged_heads(run_dir) if run_dir is not None else ()
    text = definition.as_json(entity, project, heads)
    if out is None:
        typer.echo(text, nl=False)
        return
    try:
        write_text(out, text)
    except OSError as error:
        raise PublishError(f"{out} cannot be written ({error.strerror or error}): choose another --out") from error


def register(app: typer.Typer) -> None:
    """Add the commands of this file to the program."""
    app.command("watch")(watch)
    app.command("serve")(serve)
    app.command("sync")(sync)
    app.add_typer(dashboard, name="dashboard")


def _until_interrupted() -> None:
    import threading

    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        return
