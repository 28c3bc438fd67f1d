"""The command line: arguments in, calls out. Parsing, progress and exit codes; no logic.

Exit codes: 0 done, 1 something went wrong, 2 the command line or a file makes no sense, 130 interrupted.
"""

from __future__ import annotations

import sys

import typer
from rich.console import Console

from underwatt import __version__
from underwatt.cli import devices
from underwatt.errors import InputError, UnderwattError

app = typer.Typer(
    name="underwatt",
    help="Train as fast as a power budget allows.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
devices.add_to(app)


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
        console.print(f"[bold red]error:[/] {_plain(exc.message)}")
        if exc.hint:
            console.print(f"  [dim]→[/] {_plain(exc.hint)}")
        sys.exit(2 if isinstance(exc, InputError) else 1)
    except KeyboardInterrupt:
        console.print("interrupted")
        sys.exit(130)


def _plain(text: str) -> str:
    return text.replace("[", r"\[")
