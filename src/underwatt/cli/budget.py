"""``underwatt budget``: change the budget of a run under way."""

from __future__ import annotations

import json
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape

from underwatt.budget import parse_watts
from underwatt.runlog.inbox import post_budget, run_folder

app = typer.Typer()
_out = Console(highlight=False, soft_wrap=True)


@app.callback()
def _group() -> None:
    """Keep this a group, though it has one command."""


@app.command("budget")
def budget(
    watts: str = typer.Argument(..., help="Watts such as 7W or 7W peak, or a schedule: 08:00-18:00=15W,else=7W."),
    run: Path | None = typer.Option(
        None, "--run", help="Folder of the run; the one under way by default.", show_default=False
    ),
    as_json: bool = typer.Option(False, "--json", help="For programs."),
) -> None:
    """Change the budget of the run under way."""
    parse_watts(watts)  # what makes no sense is refused before a run is looked for
    folder = run_folder(run)
    post_budget(folder, watts, "command")
    if as_json:
        typer.echo(json.dumps({"folder": str(folder), "budget": watts}))
    else:
        _out.print(f"The run in {escape(str(folder))} will now keep [bold]{escape(watts)}[/].")
