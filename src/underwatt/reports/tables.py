"""The data of each figure as an HTML table, for those who read numbers or hear the page."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING, TypeVar

from underwatt.reports.words import KNOB_NAMES, duration, energy, figures, watts

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

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

T = TypeVar("T")

MOST_ROWS = 100
MANY_ROWS = 60  # from here on a table fills its box, and is laid out only when it is looked at
MEASURED_COLUMNS = ("batch size", "step time (ms)", "samples/s", "mean power (W)", "peak power (W)", "J/sample")


def table(caption: str, headings: Sequence[str], rows: Iterable[Sequence[str]], *, whole: bool = False) -> str:
    """A table; the first cell of a row is its heading. It scrolls in itself, unless it is shown ``whole``."""
    head = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in headings)
    body = []
    for first, *rest in rows:
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in rest)
        body.append(f'<tr><th scope="row">{escape(first)}</th>{cells}</tr>')
    return (
        f'<div class="scroll{" whole" if whole else ""}" tabindex="0" role="region" aria-label="{escape(caption)}">'
        f"<table><caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


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
        for point in _spread(front.front)
    ]
    headings = ("setting", "time", "9 in 10", "mean power", "energy", "known by")
    return table(_some("The settings that no other beats, fastest first", front.front), headings, rows)


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
    lines = [
        (
            str(setting),
            duration(step.measured[at]),
            duration(step.predicted[at]),
            watts(power.measured[at]),
            watts(power.predicted[at]),
        )
        for at, setting in enumerate(parity.settings)
    ]
    headings = ("setting", "step time", "predicted", "mean power", "predicted")
    return table(_some("Held-back settings, measured and predicted", lines), headings, _spread(lines))


def trace_table(trace: PowerTrace) -> str:
    """What the run did, and its power by stretches."""
    told = [(duration(c.at_s), c.kind, c.text) for c in _spread(trace.changes)]
    changes = table(_some("What the run did", trace.changes), ("at", "what", ""), told)
    columns = list(zip(trace.mean_at_s, trace.low_w, trace.mean_w, trace.high_w, strict=True))
    rows = [(duration(at), watts(low), watts(mean), watts(high)) for at, low, mean, high in _spread(columns)]
    caption = _some("Power by stretches of the run", columns)
    return changes + table(caption, ("around", "lowest", "mean", "highest"), rows)


def energy_table(found: EnergyOverTime, spent: EnergySpent | None) -> str:
    """Energy over time, and by setting."""
    points = _spread(list(zip(found.at_s, found.energy_j, strict=True)))
    text = table("Energy over time", ("at", "energy"), [(duration(at), energy(joules)) for at, joules in points])
    if spent is not None:
        rows = [(str(share.setting), energy(share.energy_j), duration(share.time_s)) for share in _spread(spent.shares)]
        text += table(_some("Energy by setting", spent.shares), ("setting", "energy", "time"), rows)
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
    many = " many" if len(found.rows) > MANY_ROWS else ""
    return (
        f'<div class="scroll tall{many}" tabindex="0" role="region" aria-label="{caption}">'
        f'<table class="sortable"><caption>{caption}</caption><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _measured_cells(row: Measurement, knobs: Sequence[str]) -> str:
    size, mode = row.setting.batch_size, row.setting.mode.knobs()
    numbers = (size, 1e3 * row.step_s, size / row.step_s, row.power_w, row.peak_w, row.power_w * row.step_s / size)
    cells = [f"{size}", *(figures(number, 4) for number in numbers[1:])]
    cells += [f"{mode[knob]:g}" if knob in mode else "–" for knob in knobs]
    texts = (row.status.value.replace("_", " "), row.note)
    return "".join(f"<td>{cell}</td>" for cell in cells) + "".join(f'<td class="text">{escape(t)}</td>' for t in texts)


def _some(caption: str, items: Sequence[object]) -> str:
    """A caption that says so where not all items are shown."""
    return caption if len(items) <= MOST_ROWS else f"{caption} ({MOST_ROWS} of {len(items):,} are shown)"


def _spread(items: Sequence[T]) -> Sequence[T]:
    """At most so many items as a person reads, with both ends."""
    if len(items) <= MOST_ROWS:
        return items
    return [items[round(at * (len(items) - 1) / (MOST_ROWS - 1))] for at in range(MOST_ROWS)]
