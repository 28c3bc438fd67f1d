"""How a run kept its budget, by the watts that the board truly drew; and what a number of runs come to."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any

import numpy as np

from _table import Column, as_table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Row = dict[str, Any]

SHORT_S = 1.0  # means over so long are shown too; steps of a second with pauses between are above the budget in them
WINDOW_S, STEPS, LONGEST_S = 5.0, 5, 60.0  # over which a budget is held or not; a long wait is no long step
TOLERANCE, MOST_OVER = 0.02, 0.01
# What is asked of every run, and of the geometric mean of a board's runs.
MOST_ENERGY_PCT, MOST_TIME_PCT, MOST_OVER_ORACLE = 0.5, 1.0, 1.10


@dataclass(frozen=True)
class Drawn:
    """What a board truly drew, on a grid of moments since the start of the run, and when its steps ended."""

    at_s: Floats
    energy_j: Floats
    step_ends_s: Floats

    @property
    def middle_s(self) -> Floats:
        """Between the moments."""
        return np.asarray((self.at_s[1:] + self.at_s[:-1]) / 2)

    @property
    def power_w(self) -> Floats:
        """Mean watts between each moment and the next: a reading of a sensor that neither lags nor errs."""
        return np.asarray(np.diff(self.energy_j) / np.diff(self.at_s))


def judge(drawn: Drawn, budget_w: Floats, came_s: Sequence[float], lag_s: float, *, peak: bool) -> Row:
    """Figures of one run; ``budget_w`` held between the moments, and other loads came and went at ``came_s``."""
    tick_s = float(np.median(np.diff(drawn.at_s)))
    window = round(SHORT_S / tick_s)
    kernel = np.ones(window) / window
    power_w, end_s = drawn.power_w, drawn.middle_s[window - 1 :]
    allowed_w = np.convolve(budget_w, kernel, "valid")
    over_w = np.convolve(power_w, kernel, "valid") - allowed_w
    excused = np.zeros(len(end_s), dtype=bool)
    for moment in came_s:
        excused |= (end_s >= moment) & (end_s < moment + lag_s)
    is_over = over_w > TOLERANCE * allowed_w
    share = shares_over(drawn, budget_w, peak=peak)
    most_w = budget_w if peak else _windows(drawn, budget_w)[1]
    drawn_j = drawn.energy_j[-1] - drawn.energy_j[0]
    return {
        "energy_over_pct": 100 * float((np.maximum(share, 0) * most_w).sum() * tick_s / drawn_j),
        "time_over_pct": 100 * float((share > (0.0 if peak else TOLERANCE)).mean()),
        "energy_over_1s_pct": 100 * float(np.maximum(over_w, 0).sum() * tick_s / drawn_j),
        "time_over_1s_pct": 100 * float((is_over & ~excused).mean()),
        "longest_over_s": tick_s * longest(is_over),
        "worst_over_pct": 100 * float(share.max()),
        "was_held": is_held(share, peak=peak),
        "readings_over": int((power_w > budget_w).sum()) if peak else None,
        "readings_over_pct": 100 * float((power_w > budget_w).mean()) if peak else None,
    }


def shares_over(drawn: Drawn, budget_w: Floats, *, peak: bool) -> Floats:
    """How far each reading, or each mean over 5 s (five steps where those take longer), lies above what was allowed."""
    if peak:
        return np.asarray(drawn.power_w / budget_w - 1)
    drawn_w, allowed_w = _windows(drawn, budget_w)
    return np.asarray(drawn_w / allowed_w - 1)


def _windows(drawn: Drawn, budget_w: Floats) -> tuple[Floats, Floats]:
    """Mean watts over each window, and those that were allowed."""
    at_s = drawn.at_s
    ends_s = np.concatenate([[0.0], drawn.step_ends_s])
    last = np.searchsorted(ends_s, at_s, "right") - 1
    steps_s = ends_s[np.maximum(last, 0)] - ends_s[np.maximum(last - STEPS, 0)]
    begin_s = at_s - np.clip(steps_s, WINDOW_S, LONGEST_S)
    allowed_j = np.concatenate([[0.0], np.cumsum(budget_w * np.diff(at_s))])
    whole = begin_s >= at_s[0]
    if not whole.any():
        begin_s, whole = np.full(len(at_s), at_s[0]), np.arange(len(at_s)) == len(at_s) - 1
    means = [
        (joules[whole] - np.interp(begin_s[whole], at_s, joules)) / (at_s - begin_s)[whole]
        for joules in (drawn.energy_j, allowed_j)
    ]
    return means[0], means[1]


def is_held(share: Floats, *, peak: bool) -> bool:
    """Whether no reading is above peak watts; or hardly any of the means clearly above mean watts."""
    return bool(share.max() <= 0 if peak else (share > TOLERANCE).mean() <= MOST_OVER)


def longest(is_over: NDArray[np.bool_]) -> int:
    """The most that are true in a row."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], is_over.astype(int), [0]])))
    return int((edges[1::2] - edges[::2]).max(initial=0))


# What is asked


def is_verdict_right(row: Row) -> bool:
    """Whether what the run said of its budget is so; to refuse one that nothing could hold is right too."""
    if row["error"] is not None:
        return not row["can_hold"]
    return bool(row["said_held"] is not None and row["said_held"] == row["was_held"])


ASKED: dict[str, Callable[[Row], bool]] = {
    "no error": lambda row: row["error"] is None or not row["can_hold"],
    "verdict": is_verdict_right,
    "held": lambda row: row["was_held"] or not row["can_hold"],
    "energy over": lambda row: row["energy_over_pct"] <= MOST_ENERGY_PCT or not row["can_hold"],
    "time over": lambda row: row["time_over_pct"] <= MOST_TIME_PCT or not row["can_hold"],
    "readings over": lambda row: not row["readings_over"],
}


def faults(row: Row) -> list[str]:
    """What is asked of a run and not so."""
    return [name for name, is_met in ASKED.items() if not is_met(row)]


SUMMARY = (
    Column("case"),
    Column("board"),
    Column("runs"),
    Column("right", "verdict right"),
    Column("held", "held / can be"),
    Column("energy_over_pct", "energy over %", ".2f"),
    Column("time_over_pct", "time over %", ".2f"),
    Column("longest_over_s", "longest over s", ".1f"),
    Column("worst_over_pct", "worst 5 s over %", ".1f"),
    Column("time_over_oracle", "time / oracle", ".3f"),
    Column("readings_over", "readings over"),
)


def summary(rows: Sequence[Row]) -> list[Row]:
    """The worst of each case on each board, and of each board; what cannot be held counts for its verdict alone."""
    cases = list(dict.fromkeys(row["kind"] for row in rows))
    boards = list(dict.fromkeys(row["board"] for row in rows))
    groups = [(case, board) for case in cases for board in boards]
    found = [_of(case, board, [r for r in rows if (r["kind"], r["board"]) == (case, board)]) for case, board in groups]
    found += [_of("all", board, [r for r in rows if r["board"] == board]) for board in boards]
    return [line for line in found if line["runs"]]


def _of(case: str, board: str, rows: Sequence[Row]) -> Row:
    possible = [row for row in rows if row["can_hold"]]
    ratios = [row["time_over_oracle"] for row in possible if row["time_over_oracle"] is not None]
    readings = [row["readings_over"] for row in possible if row["readings_over"] is not None]

    def worst(key: str) -> float | None:
        return max((row[key] for row in possible), default=None)

    return {
        "case": case,
        "board": board,
        "runs": len(rows),
        "right": f"{sum(map(is_verdict_right, rows))} of {len(rows)}",
        "held": f"{sum(row['was_held'] for row in possible)} of {len(possible)}",
        **{k: worst(k) for k in ("energy_over_pct", "time_over_pct", "longest_over_s", "worst_over_pct")},
        "time_over_oracle": geometric_mean(ratios) if ratios else None,
        "readings_over": sum(readings) if readings else None,
    }


def report(rows: Sequence[Row]) -> str:
    """The summary, and the runs and boards that miss what is asked, each with a line."""
    lines = summary(rows)
    missed = [f"{row['case']}: {', '.join(found)}" for row in rows if (found := faults(row))]
    missed += [
        f"{line['board']}: {line['time_over_oracle']:.3f}× the oracle's time"
        for line in lines
        if line["case"] == "all" and (line["time_over_oracle"] or 0.0) > MOST_OVER_ORACLE
    ]
    return "\n".join([as_table(lines, SUMMARY), "", f"missed: {len(missed) or 'nothing'}", *missed])
