"""``underwatt watch``: the live page of a run under way."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import typer
from rich.console import Console

from underwatt._imports import require
from underwatt.runlog.inbox import run_folder

app = typer.Typer()
_log = Console(stderr=True, highlight=False)


@app.callback()
def _group() -> None:
    """Keep this a group, though it has one command."""


@app.command("watch")
def watch(
    run: Path | None = typer.Option(
        None, "--run", help="Folder of the run; the one that is under way by default.", show_default=False
    ),
    port: int = typer.Option(0, min=0, max=65535, help="Port on this machine; a free one by default."),
    as_json: bool = typer.Option(False, "--json", help="Print the address as JSON, for programs."),
) -> None:
    """Watch a run in the browser: watts against the budget, progress, log; change the budget there."""
    for module in ("starlette", "uvicorn", "prometheus_client"):
        require(module, extra="watch")
    from underwatt.live.server import LiveServer

    folder = run_folder(run)
    server = LiveServer(folder, port)
    if as_json:
        typer.echo(json.dumps({"url": server.url, "port": server.port, "token": server.token, "run": str(folder)}))
    else:
        typer.echo(server.url)
        _log.print(
            "[dim]Whoever has this address can see the run and change its budget. From another machine, first: "
            f"ssh -L {server.port}:127.0.0.1:{server.port} HOST. Ctrl-C ends the page, not the run.[/]",
            soft_wrap=True,
        )
    with contextlib.suppress(OSError):
        os.nice(10)  # the training comes first
    server.run()
