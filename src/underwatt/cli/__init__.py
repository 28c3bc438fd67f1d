"""The command line: arguments in, calls out. Parsing, progress and exit codes; no logic.

Exit codes: 0 done, 1 something went wrong, 2 the command line or a file makes no sense, 130 interrupted.
"""

from __future__ import annotations

import errno
import io
import sys
from importlib import import_module
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

import underwatt
from underwatt.errors import InputError, UnderwattError

# Which module holds a command, and its help. Only that module is imported, and none for the list of commands, so that
# `underwatt restore` does not wait for a database, nor `underwatt --help` for anything.
COMMANDS = {
    "check": (
        "check",
        "Check a board or GPU: what it can do, whether it is ready, and one file about it that you can send to us.",
    ),
    "devices": ("devices", "Show what is here, what can be read and set, and what would permit the rest."),
    "set": ("devices", "Set a power mode and leave it so; `underwatt restore` brings back what was there before."),
    "restore": ("devices", "Put back whatever a killed session or `underwatt set` left changed."),
    "helper": (
        "helper",
        "The service that sets this Jetson's knobs for a group: install it, remove it, look at it.",
    ),
    "profile": (
        "profile",
        "Measure step time and power of a job at several settings; interrupt and run again to go on where it stopped.",
    ),
    "predict": ("plan", "Predict step time and power of settings from those that were measured."),
    "converge": (
        "profile",
        "Train on proxy data until the target at some batch sizes; interrupt and run again to go on where it stopped.",
    ),
    "plan": ("plan", "Choose batch size and power mode together: soonest to the target within the budget."),
    "run": (
        "run",
        "Train under a budget: measure what is missing by training steps, hold the budget, restore; Ctrl-C is safe.",
    ),
    "store": ("store", "Look at, export, import and delete what was measured."),
    "budget": ("run", "Change the budget of the run under way."),
    "report": ("run", "Make one self-contained HTML page: what was chosen, why, and how the training went."),
    "watch": (
        "run",
        "Watch a run in the browser: watts against the budget, progress, log; change the budget there.",
    ),
    "fleet": ("fleet", "Train one model on many boards, each within its own watts, on Flower."),
    "demo": (
        "demo",
        "Train a small network for real on virtual boards, under budgets that change, beside the usual way to do it.",
    ),
}


# Looking whether a file is there fails so where a folder above it is closed to this user, or no disk takes its name.
CLOSED_PATHS = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG)

# \b keeps the lines as they are.
EXAMPLE = """\b
In order, for a job written as train.py:job (none at hand: `underwatt demo`):
  underwatt check                          is all well? what can it do?
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
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        del ctx
        if cmd_name not in COMMANDS:
            return None
        module = import_module(f"underwatt.cli.{COMMANDS[cmd_name][0]}")
        command = typer.main.get_group(module.app).commands[cmd_name]
        _plain_help(command)
        return command

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


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
        typer.echo(f"underwatt {underwatt.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_show_version, is_eager=True, help="Show the version."),
) -> None:
    del version


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; errors raised on purpose become one sentence and an exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that knows no ✓ still gets the rest
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        app(args=arguments)
    except UnderwattError as exc:
        console.print(f"[bold red]error:[/] {escape(exc.message)}")
        if exc.hint:
            console.print(f"  [dim]→[/] {escape(exc.hint)}")
        sys.exit(2 if isinstance(exc, InputError) else 1)
    except OSError as exc:
        if exc.errno not in CLOSED_PATHS or exc.filename is None:
            raise
        console.print(f"[bold red]error:[/] {escape(str(exc.filename))} cannot be looked at ({exc.strerror}).")
        console.print("  [dim]→[/] Name another one, or have its owner let you in.")
        sys.exit(2)
    except KeyboardInterrupt:
        console.print("interrupted")
        sys.exit(130)
