"""How figures look on a terminal."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table

if TYPE_CHECKING:
    from rich.console import Console

KNOB_HEADINGS = {  # clocks in MHz, limits in watts
    "cpu_cores": "cores",
    "cpu_mhz": "CPU",
    "gpu_mhz": "GPU",
    "mem_mhz": "mem",
    "power_limit_w": "limit",
}


def plain_table(*headings: str) -> Table:
    """A table without lines, columns to the right, the way figures are read."""
    table = Table(box=None, header_style="dim", padding=(0, 1, 0, 0))
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def progress_bar(console: Console) -> Progress:
    """A bar with a count and a field ``left`` for the time left."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[left]}"),
        console=console,
        transient=True,
    )


def duration(seconds: float) -> str:
    """Seconds, minutes or hours, as a person says it."""
    if seconds < 10:
        return f"{seconds:.2g} s"
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def within(half_width: float, value: float) -> str:
    """Half the width of an interval as a share of the value."""
    return f"±{100 * half_width / value:.1f}%" if math.isfinite(half_width) else "± unknown"
