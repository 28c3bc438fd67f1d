"""A run as it is seen on a terminal: one line that moves, and what is worth keeping above it."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from rich.live import Live
from rich.markup import escape
from rich.text import Text

from underwatt.cli.format import duration
from underwatt.cli.profile import measured_line

if TYPE_CHECKING:
    from rich.console import Console
    from typing_extensions import Self

    from underwatt.run.pilot import Pilot

PERIOD_S = 0.25
COLOURS = {"searching": "cyan", "holding": "green", "correcting": "yellow", "restoring": "dim"}


class Display:
    """Watts against the budget, progress, joules and time left, a few times a second."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, transient=True, auto_refresh=False)
        self._next = 0.0
        self._score: tuple[float, float] | None = None

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._live.__exit__(*error)

    def listen(self, kind: str, fields: dict[str, Any]) -> None:
        """Something happened."""
        if kind == "measured":
            self._say(f"{measured_line(fields['measurement'])}")
        elif kind == "setting" and fields["state"] != "searching":
            self._say(
                f"[{COLOURS[fields['state']]}]{fields['state']}[/] {fields['setting']} [dim]{escape(fields['why'])}[/]"
            )
        elif kind == "budget" and fields["why"] != "start":
            self._say(f"[bold]budget {fields['power_w']:g} W[/] [dim]{fields['why']}[/]")
        elif kind == "note":
            self._say(f"[{'yellow' if fields['level'] == 'warning' else 'dim'}]{escape(fields['text'])}[/]")
        elif kind == "score":
            self._score = fields["value"], fields["target"]

    def watch(self, pilot: Pilot) -> None:
        """A step has ended."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + PERIOD_S
        controller = pilot.controller
        power_w = pilot.power_w
        over = power_w > controller.budget_w * 1.02
        line = Text.assemble(
            (controller.state.value, COLOURS[controller.state.value]),
            "  ",
            (f"{power_w:.2f} W", "bold red" if over else "bold"),
            f" of {controller.budget_w:g} W  batch {pilot.batch_size}  {pilot.samples:,} samples  ",
            f"{pilot.energy_j / 3600:.3g} Wh  {duration(pilot.elapsed_s)}",
        )
        if self._score is not None:
            line.append(f"  score {self._score[0]:.3g} of {self._score[1]:.3g}")
        left_s = pilot.time_left_s
        if math.isfinite(left_s):
            line.append(f"  about {duration(left_s)} left", "dim")
        self._live.update(line, refresh=True)

    def _say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)
