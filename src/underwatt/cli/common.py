"""How things look on a terminal, and the arguments that several commands share."""

from __future__ import annotations

import json
import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from typer import Option

from underwatt.events import Noted
from underwatt.records import Status, to_json

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.progress import Progress

    from underwatt.records import Measurement

OUT = Console()
LOG = Console(stderr=True)  # what is no answer: progress and notes

DEVICE_HELP = "Address of the device, such as jetson, nvml:0 or virtual:nano; the likeliest one by default."
DEVICE: Any = Option("", "--device", "-d", help=DEVICE_HELP)
BATCH_SIZES: Any = Option("", "--batch-sizes", "-b", help="Such as 8,16,32; the job's own by default.")
REFERENCE_HELP = "A profile of another workload or device: its number, a CSV file, or builtin:BOARD (simulated)."
REFERENCES: Any = Option([], "--reference", "-r", help=f"{REFERENCE_HELP} Repeatable.")
LR: Any = Option(None, help="For a command: what {lr} stands for ...")
LR_BATCH_SIZE: Any = Option(128, min=1, help="... at this batch size; scaled by its square root elsewhere.")
STORE_HELP = "Where measurements are kept; $UNDERWATT_STORE, or underwatt.db in this folder, by default."
STORE: Any = Option(None, "--store", help=STORE_HELP, show_default=False)
AS_JSON: Any = Option(False, "--json", help="For programs.")

# Clocks in MHz, limits in watts.
KNOB_HEADINGS = {"cpu_cores": "cores", "cpu_mhz": "CPU", "gpu_mhz": "GPU", "mem_mhz": "mem", "power_limit_w": "limit"}


def options_of(given: dict[str, Any], *others: str) -> dict[str, Any]:
    """The arguments of a command, all but some, which a function of the library takes under the same names."""
    return {name: value for name, value in given.items() if name not in others}


def plain_table(*headings: str) -> Table:
    """A table without lines, columns to the right, the way figures are read."""
    columns = (Column(heading, justify="right", no_wrap=True) for heading in headings)
    return Table(*columns, box=None, header_style="dim", padding=(0, 1, 0, 0))


def progress_bar() -> Progress:
    """A bar with a count and a field ``left`` for the time left."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn

    columns = SpinnerColumn(), "{task.description}", BarColumn(), MofNCompleteColumn(), "{task.fields[left]}"
    return Progress(*columns, console=LOG, transient=True)


def say(text: str) -> None:
    """A line of the answer, however long."""
    OUT.print(text, soft_wrap=True)


def say_json(record: object, indent: int | None = 2) -> None:
    """The answer for programs."""
    typer.echo(json.dumps(to_json(record), indent=indent))


@contextmanager
def interruptible(what: str) -> Iterator[None]:
    """Say that a command can be gone on with."""
    try:
        yield
    except KeyboardInterrupt:
        LOG.print(f"Interrupted; {what} kept. Run the same command again to go on.")
        raise


def say_note(event: object) -> None:
    """The listener that shows notes and nothing else."""
    if isinstance(event, Noted):
        style = "yellow" if event.level == "warning" else "dim"
        LOG.print(f"[{style}]{escape(event.text)}[/]", soft_wrap=True)


def within(half_width: float, value: float) -> str:
    """Half the width of an interval as a share of the value."""
    return f"±{100 * half_width / value:.1f}%" if math.isfinite(half_width) else "± unknown"


def measured_line(found: Measurement) -> str:
    """One measurement as a line for people."""
    if found.usable:
        mark = "[green]✓[/]" if found.status is Status.OK else "[yellow]![/]"
        return (
            f"{mark} {found.setting}: {found.step_s * 1e3:.1f} ms {within(found.step_s_ci95, found.step_s)}, "
            f"{found.power_w:.2f} W {within(found.power_w_ci95, found.power_w)} [dim]{escape(found.note)}[/]"
        )
    return f"[red]✗[/] {found.setting}: {found.status.value.replace('_', ' ')} [dim]{escape(found.note)}[/]"
