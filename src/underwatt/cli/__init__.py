"""The command line: arguments in, calls out. Parsing, progress and exit codes; no logic.

Exit codes: 0 done, 1 something went wrong, 2 the command line or a file makes no sense, 130 interrupted.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from underwatt import __version__
from underwatt.errors import InputError, UnderwattError

# Which module holds a command. Only that one is imported, so that `underwatt restore` does not wait for a database.
HOMES = {
    "devices": "devices",
    "set": "devices",
    "restore": "devices",
    "profile": "profile",
    "predict": "predict",
    "converge": "converge",
    "plan": "plan",
    "run": "run",
    "store": "store",
    "budget": "budget",
    "report": "report",
    "watch": "watch",
    "demo": "demo",
}


# \b keeps the lines as they are.
EXAMPLE = """\b
In order, for a job written as train.py:job (none at hand: `underwatt demo`):
  underwatt devices                        what is here, what may be set
  underwatt profile train.py:job           step time and watts of settings
  underwatt converge train.py:job          samples to target by batch size
  underwatt plan --budget 10W              what to train with, and the gain
  underwatt run train.py:job --budget 10W  train under the budget
  underwatt report                         what was chosen, and how it went

\b
Budgets are watts: 10W, 10W peak, or 10W mean over 60s. `run` and `budget`
also take a schedule: 08:00-18:00=15W,else=7W.
"""


class _LazyGroup(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        del ctx
        return list(HOMES)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        del ctx
        if cmd_name not in HOMES:
            return None
        module = import_module(f"underwatt.cli.{HOMES[cmd_name]}")
        command = typer.main.get_group(module.app).commands[cmd_name]
        _plain_help(command)
        return command


def _plain_help(command: Any) -> None:
    """Help without boxes, in which every flag would be called a <bool>; in lists, whole sentences."""
    command.rich_markup_mode = None
    command.short_help = command.help
    for part in getattr(command, "commands", {}).values():
        _plain_help(part)


app = typer.Typer(
    name="underwatt",
    cls=_LazyGroup,
    help="Train as fast as a power budget allows.",
    epilog=EXAMPLE,
    rich_markup_mode=None,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"underwatt {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_show_version, is_eager=True, help="Show the version."),
) -> None:
    del version


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; errors raised on purpose become one sentence and an exit code."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        app(args=arguments)
    except UnderwattError as exc:
        console.print(f"[bold red]error:[/] {escape(exc.message)}")
        if exc.hint:
            console.print(f"  [dim]→[/] {escape(exc.hint)}")
        sys.exit(2 if isinstance(exc, InputError) else 1)
    except KeyboardInterrupt:
        console.print("interrupted")
        sys.exit(130)
