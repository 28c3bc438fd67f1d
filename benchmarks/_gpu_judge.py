"""A judge that knows nothing of the run it judges: the card's own counter of joules, polled by a process of its own.

    python benchmarks/_gpu_judge.py OUT

polls NVML's total energy every 5 ms until it is told to end (SIGTERM, or its parent is gone), and writes a line each
time the counter moves: when (this machine's time of day), joules, and how long ago the poll before was. Windows begin
and end where the counter moves. A move that was seen late, because the machine was busy, may be of an earlier moment:
it begins and ends no window, and is counted. Where steps are so long that five of them with their pauses are a window,
the training's own process says when each began: a window is five of them, and a mean that of whole ones, as a piece of
such a step is no piece of its pause.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from underwatt.events import BudgetChanged, Progressed, Scored, SettingChanged

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from underwatt.runlog.run_record import RunRecord

POLL_S, LATE_S = 0.005, 0.015
WINDOW_S, WINDOW_STEPS = 5.0, 5
SETTLES_S = 3.0  # of a level's mean: windows count from its first moment on


def poll(out: Path) -> None:
    import pynvml

    pynvml.nvmlInit()
    card = pynvml.nvmlDeviceGetHandleByIndex(0)
    parent, ended = os.getppid(), []
    signal.signal(signal.SIGTERM, lambda *_: ended.append(True))
    before_mj, looked_s = pynvml.nvmlDeviceGetTotalEnergyConsumption(card), time.time()
    with out.open("w", encoding="ascii", buffering=1) as file:
        while not ended and os.getppid() == parent:
            time.sleep(POLL_S)
            counted_mj, now_s = pynvml.nvmlDeviceGetTotalEnergyConsumption(card), time.time()
            if counted_mj != before_mj:
                file.write(f"{now_s:.4f},{counted_mj / 1000:.3f},{now_s - looked_s:.4f}\n")
            before_mj, looked_s = counted_mj, now_s


@dataclass(frozen=True)
class Counter:
    """Moments at which the counter moved, and joules; moments count from where the run began."""

    at_s: NDArray[np.float64]
    energy_j: NDArray[np.float64]
    late: int

    @classmethod
    def read(cls, path: Path, began_s: float) -> Counter:
        at_s, energy_j, gap_s = np.loadtxt(path, delimiter=",", ndmin=2).T
        timely = gap_s <= LATE_S
        return cls(at_s[timely] - began_s, energy_j[timely], int((~timely).sum()))

    def between(self, begin_s: float, end_s: float) -> Counter:
        part = (self.at_s >= begin_s) & (self.at_s <= end_s)
        return Counter(self.at_s[part], self.energy_j[part], self.late)


def began_at_s(record: RunRecord) -> float:
    """When a run began, in this machine's time of day."""
    return datetime.fromisoformat(record.start.started_at).timestamp() - record.start.at_s


def allowed_j(budgets: list[BudgetChanged], at_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """Joules that the budgets allowed until each moment, from the first of them on."""
    begins = np.array([event.at_s for event in budgets] + [max(float(at_s.max()), budgets[-1].at_s + 1.0)])
    watts = np.array([event.power_w if event.power_w is not None else np.inf for event in budgets])
    return np.interp(at_s, begins, np.concatenate([[0.0], np.cumsum(watts * np.diff(begins))]))


def windows_over(counter: Counter, budgets: list[BudgetChanged], window_s: float) -> tuple[Any, Any]:
    """Ends of all windows of at least this length, and how far each lies above what was allowed in it, as a share."""
    first = np.searchsorted(counter.at_s, counter.at_s - window_s, "right") - 1
    ends = np.flatnonzero(first >= 0)
    allowed = allowed_j(budgets, counter.at_s)
    drawn_j = counter.energy_j[ends] - counter.energy_j[first[ends]]
    return counter.at_s[ends], drawn_j / (allowed[ends] - allowed[first[ends]]) - 1


def windows_of_steps(counter: Counter, budgets: list[BudgetChanged], begins_s: NDArray[np.float64]) -> tuple[Any, Any]:
    """The same of every five steps with the pauses after them; a step begins at the last move before it."""
    at = np.searchsorted(counter.at_s, begins_s[begins_s >= counter.at_s[0]], "right") - 1
    first, last = at[:-WINDOW_STEPS], at[WINDOW_STEPS:]
    allowed = allowed_j(budgets, counter.at_s)
    drawn_j = counter.energy_j[last] - counter.energy_j[first]
    return counter.at_s[last], drawn_j / (allowed[last] - allowed[first]) - 1


def period_s(record: RunRecord) -> float:
    """How long a step takes with the pause after it, from the second half of the run."""
    told = record.of(Progressed)
    half = told[len(told) // 2 :]
    steps = half[-1].steps - half[0].steps
    return float((half[-1].at_s - half[0].at_s) / steps) if steps else 0.0


def judge(record: RunRecord, path: Path, begins_s: NDArray[np.float64] | None = None) -> list[dict[str, Any]]:
    """A row for each level of the budget, judged by the counter; windows belong to the level in which they end.

    ``begins_s`` is when each step began, of a training whose steps are long.
    """
    ended_s = record.end.at_s if record.end else record.power.at_s[-1]
    counter = Counter.read(path, began_at_s(record)).between(0.0, ended_s)
    budgets = record.of(BudgetChanged)
    window_s = max(WINDOW_S, WINDOW_STEPS * period_s(record))
    if begins_s is None:
        ends_s, over = windows_over(counter, budgets, window_s)
    else:
        ends_s, over = windows_of_steps(counter, budgets, begins_s)
        window_s = float(np.median(begins_s[WINDOW_STEPS:] - begins_s[:-WINDOW_STEPS]))
    holds_s = [event.at_s for event in record.of(SettingChanged) if event.state == "holding"]
    tests, rows = record.of(Scored), []
    for number, budget in enumerate(budgets):
        until_s = budgets[number + 1].at_s if number + 1 < len(budgets) else ended_s
        found_s = min((at_s for at_s in holds_s if at_s >= budget.at_s), default=budget.at_s) if not number else 0.0
        begin_s = max(budget.at_s, found_s) + SETTLES_S
        inside = (ends_s > budget.at_s) & (ends_s <= until_s)
        whole_s = None if begins_s is None else begins_s[(begins_s >= begin_s) & (begins_s <= until_s)]
        begin_s, end_s = (begin_s, until_s) if whole_s is None or len(whole_s) < 2 else (whole_s[0], whole_s[-1])
        part = counter.between(begin_s, end_s)
        if budget.power_w is None or len(part.at_s) < 2 or not inside.any():
            continue
        mean_w = float((part.energy_j[-1] - part.energy_j[0]) / (part.at_s[-1] - part.at_s[0]))
        rows.append(
            {
                "why": budget.why,
                "budget_w": budget.power_w,
                "seconds": until_s - budget.at_s,
                "mean_over_pct": 100 * (mean_w / budget.power_w - 1),
                "window_s": window_s,
                "worst_over_pct": 100 * float(over[inside].max()),
                "worst_at_s": float(ends_s[inside][np.argmax(over[inside])]),
                "tests": sum(budget.at_s < test.at_s <= until_s for test in tests),
                "late": counter.late,
            }
        )
    return rows


if __name__ == "__main__":
    poll(Path(sys.argv[1]))
