"""A run as it is seen on a terminal: one line that moves, and what is worth keeping above it."""

from __future__ import annotations

import contextlib
import math
import time
from typing import TYPE_CHECKING, Any

from rich.live import Live
from rich.markup import escape
from rich.text import Text

from underwatt.cli.format import duration
from underwatt.cli.profile import measured_line
from underwatt.report.words import allowed

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from rich.console import Console
    from typing_extensions import Self

    from underwatt.run.pilot import Pilot

PERIOD_S = 0.25
LINE_PERIOD_S = 30.0  # where there is no terminal, and each line stays
COLOURS = {"searching": "cyan", "holding": "green", "correcting": "yellow", "restoring": "dim"}


class Display:
    """Watts against the budget, progress, joules and time left: one line that moves, or lines now and then."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, transient=True, auto_refresh=False)
        self._period_s = PERIOD_S if console.is_terminal else LINE_PERIOD_S
        self._next = time.monotonic() + self._period_s
        self._score: tuple[float, float] | None = None

    def __enter__(self) -> Self:
        with _whoever_looks():
            self._live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        with _whoever_looks():
            self._live.__exit__(*error)

    def listen(self, kind: str, fields: dict[str, Any]) -> None:
        """Something happened."""
        if kind == "measured":
            self.say(measured_line(fields["measurement"]))
        elif kind == "setting" and fields["state"] != "searching":
            text = f"{escape(str(fields['setting']))} [dim]{escape(fields['why'])}[/]"
            self.say(f"[{COLOURS[fields['state']]}]{fields['state']}[/] {text}")
        elif kind == "budget" and fields["why"] != "start":
            self.say(f"[bold]budget {allowed(fields)}[/] [dim]{fields['why']}[/]")
        elif kind == "note" and fields["level"] == "warning":
            self.say(f"[bold yellow]Warning: {escape(fields['text'])}[/]")
        elif kind == "note":
            self.say(f"[dim]{escape(fields['text'])}[/]")
        elif kind == "score":
            self._score = fields["value"], fields["target"]

    def watch(self, pilot: Pilot) -> None:
        """A step has ended."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + self._period_s
        line = self._line(pilot)
        with _whoever_looks():
            if self._console.is_terminal:
                self._live.update(line, refresh=True)
            else:
                self._console.print(line, soft_wrap=True)

    def say(self, text: str) -> None:
        """Leave a line above the one that moves."""
        with _whoever_looks():
            self._console.print(text, soft_wrap=True)

    def _line(self, pilot: Pilot) -> Text:
        controller = pilot.controller
        power_w, budget_w = pilot.power_w, controller.budget_w
        line = Text.assemble(
            (controller.state.value, COLOURS[controller.state.value]),
            "  ",
            (
                f"{power_w:.2f} W" if math.isfinite(power_w) else "? W",
                "bold red" if power_w > 1.02 * budget_w else "bold",
            ),
            f" of {budget_w:g} W" if math.isfinite(budget_w) else "",
            f"  batch {pilot.batch_size}  {pilot.samples:,} samples  ",
            f"{pilot.energy_j / 3600:.3g} Wh  {duration(pilot.elapsed_s)}",
        )
        if self._score is not None:
            line.append(f"  score {self._score[0]:.3g} of {self._score[1]:.3g}")
        left_s = pilot.time_left_s
        if math.isfinite(left_s):
            line.append(f"  about {duration(left_s)} left", "dim")
        return line


def _whoever_looks() -> AbstractContextManager[None]:
    """Nobody may be looking any more: a terminal that was closed ends no training."""
    return contextlib.suppress(OSError)
