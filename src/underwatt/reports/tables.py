"""The data of each figure as an HTML table, for those who read numbers or hear the page."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

from underwatt.reports.words import KNOB_NAMES, duration, energy, figures, watts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from underwatt.records import Measurement
    from underwatt.reports.figures import (
        Convergence,
        EnergyBySetting,
        EnergyOverTime,
        EnergySpent,
        Front,
        HeatMap,
        Measurements,
        Other,
        Parity,
        PowerTrace,
    )

MOST_ROWS = 100
MANY_ROWS = 60  # from here on a table fills its box, and is laid out only when it is looked at
MEASURED_COLUMNS = ("batch size", "step time (ms)", "samples/s", "mean power (W)", "peak power (W)", "J/sample")


def table(caption: str, headings: Sequence[str], rows: Sequence[Sequence[str]], *, whole: bool = False) -> str:
    """A table; the first cell of a row is its heading. It scrolls in itself, unless it is shown ``whole``."""
    head = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in headings)
    body = []
    for first, *rest in rows:
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in rest)
        body.append(f'<tr><th scope="row">{escape(first)}</th>{cells}</tr>')
    return _framed(caption, head, "".join(body), "scroll whole" if whole else "scroll")


def _framed(caption: str, head: str, body: str, shape: str, kind: str = "") -> str:
    return (
        f'<div class="{shape}" tabindex="0" role="region" aria-label="{escape(caption)}">'
        f"<table{kind}><caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


def _some(caption: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of at most so many rows as a person reads, which says so."""
    shown = f" ({MOST_ROWS} of {len(rows):,} are shown)" if len(rows) > MOST_ROWS else ""
    return table(caption + shown, headings, _spread(rows))


def _spread(rows: Sequence[Sequence[str]]) -> Sequence[Sequence[str]]:
    """Not too many rows, with both ends."""
    if len(rows) <= MOST_ROWS:
        return rows
    return [rows[round(at * (len(rows) - 1) / (MOST_ROWS - 1))] for at in range(MOST_ROWS)]


def others_table(chosen_s: float, others: Sequence[Other]) -> str:
    """What others would choose, beside the choice."""
    rows = [
        (
            f"{other.letter}: {other.choice.name}",
            {"yes": "yes", "risky": "may exceed", "over": "no"}[other.choice.fits],
            duration(other.choice.time_s),
            f"{other.choice.time_s / chosen_s:.2f}×" if math.isfinite(other.choice.time_s) else "–",
            watts(other.choice.power_w),
            other.choice.known,
            str(other.choice.setting),
        )
        for other in others
    ]
    headings = ("rule", "keeps the budget", "time", "to the choice's", "mean power", "known by", "setting")
    return table("What others would choose", headings, rows, whole=True)


def front_table(front: Front) -> str:
    """The settings on the front."""
    rows = [
        (
            str(point.setting),
            duration(point.time_s.expected),
            f"{duration(point.time_s.low)} to {duration(point.time_s.high)}",
            watts(point.power_w.expected),
            energy(point.energy_j.expected),
            "measured" if point.measured else "predicted",
        )
        for point in front.front
    ]
    headings = ("setting", "time", "9 in 10", "mean power", "energy", "known by")
    return _some("The settings that no other beats, fastest first", headings, rows)


def map_table(heat: HeatMap) -> str:
    """A heat map as numbers; a star keeps the budget."""
    is_time = heat.quantity == "time_s"
    say = duration if is_time else watts
    rows = []
    for value, line, kept in zip(heat.knob_values, heat.values, heat.keeps, strict=True):
        cells = [f"{say(cell)}{' *' if keeps else ''}" for cell, keeps in zip(line, kept, strict=True)]
        rows.append((f"{value:g}", *cells))
    headings = (KNOB_NAMES[heat.knob], *(f"batch {size}" for size in heat.batch_sizes))
    return table(f"{'Time' if is_time else 'Mean power'}; * keeps the budget", headings, rows)


def convergence_table(found: Convergence) -> str:
    """Every training."""
    rows = [
        (
            str(run.batch_size),
            str(run.seed),
            figures(run.samples, 4) if run.reached else "never reached",
            f"{run.learning_rate:g}" if math.isfinite(run.learning_rate) else "–",
        )
        for run in sorted(found.runs, key=lambda run: (run.batch_size, run.seed))
    ]
    return table(f"Trainings to {found.target:g}", ("batch size", "seed", "samples", "learning rate"), rows)


def parity_table(parity: Parity) -> str:
    """Measured and predicted, a line a setting."""
    step, power = parity.step_s, parity.power_w
    times = [map(duration, pair) for pair in zip(step.measured, step.predicted, strict=True)]
    powers = [map(watts, pair) for pair in zip(power.measured, power.predicted, strict=True)]
    rows = [(str(one), *took, *drew) for one, took, drew in zip(parity.settings, times, powers, strict=True)]
    headings = ("setting", "step time", "predicted", "mean power", "predicted")
    return _some("Held-back settings, measured and predicted", headings, rows)


def trace_table(trace: PowerTrace) -> str:
    """What the run did, and its power by stretches."""
    told = [(duration(change.at_s), change.kind, change.text) for change in trace.changes]
    columns = zip(trace.mean_at_s, trace.low_w, trace.mean_w, trace.high_w, strict=True)
    rows = [(duration(at_s), *map(watts, readings)) for at_s, *readings in columns]
    by_stretch = _some("Power by stretches of the run", ("around", "lowest", "mean", "highest"), rows)
    return _some("What the run did", ("at", "what", ""), told) + by_stretch


def energy_table(found: EnergyOverTime, spent: EnergySpent | None) -> str:
    """Energy over time, and by setting."""
    points = [(duration(at_s), energy(joules)) for at_s, joules in zip(found.at_s, found.energy_j, strict=True)]
    text = table("Energy over time", ("at", "energy"), _spread(points))
    if spent is not None:
        rows = [(str(share.setting), energy(share.energy_j), duration(share.time_s)) for share in spent.shares]
        text += _some("Energy by setting", ("setting", "energy", "time"), rows)
    return text


def choices_table(found: EnergyBySetting) -> str:
    """Energy of the choice and of what others would choose."""
    rows = [("the choice", energy(found.chosen.energy_j.expected), duration(found.chosen.time_s.expected))]
    rows += [(o.choice.name, energy(o.choice.energy_j), duration(o.choice.time_s)) for o in found.others]
    return table("Energy by choice", ("choice", "energy", "time"), rows)


def measurements_table(found: Measurements) -> str:
    """Every measurement; the page makes its headings buttons that sort."""
    headings = (*MEASURED_COLUMNS, *(KNOB_NAMES[knob] for knob in found.knobs), "status", "note")
    head = "".join(
        f'<th scope="col" aria-sort="none"><button type="button">{escape(heading)}</button></th>'
        for heading in headings
    )
    body = "".join(f"<tr>{_measured_cells(row, found.knobs)}</tr>" for row in found.rows)
    caption = "All measurements; choose a heading to sort by it"
    shape = "scroll tall many" if len(found.rows) > MANY_ROWS else "scroll tall"
    return _framed(caption, head, body, shape, ' class="sortable"')


def _measured_cells(row: Measurement, knobs: Sequence[str]) -> str:
    size, mode = row.setting.batch_size, row.setting.mode.knobs()
    numbers = (1e3 * row.step_s, size / row.step_s, row.power_w, row.peak_w, row.power_w * row.step_s / size)
    cells = [f"{size}", *(figures(number, 4) for number in numbers)]
    cells += [f"{mode[knob]:g}" if knob in mode else "–" for knob in knobs]
    texts = (row.status.value.replace("_", " "), row.note)
    return "".join(f"<td>{cell}</td>" for cell in cells) + "".join(f'<td class="text">{escape(t)}</td>' for t in texts)
