"""One HTML file that holds everything: text, tables, drawings and the program that draws them. It asks no network.

First the page, then the data of each figure as a table, for those who read numbers or hear the page.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING

from underwatt._imports import require
from underwatt.reports import draw_plan, draw_run
from underwatt.reports.words import KNOB_NAMES, duration, energy, figures, watts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from underwatt.records import Measurement
    from underwatt.reports.draw_plan import Drawing
    from underwatt.reports.report_records import (
        Along,
        Convergence,
        EnergyBySetting,
        EnergyOverTime,
        EnergySpent,
        Front,
        HeatMap,
        Levels,
        Measurements,
        Other,
        Parity,
        PowerTrace,
        Report,
        Title,
    )

PAUSED = " Settings that draw more are shown as pauses between steps would hold them: at the budget, and slower."
MOST_ROWS = 100
MANY_ROWS = 60  # from here on a table fills its box, and is laid out only when it is looked at
MEASURED_COLUMNS = ("batch size", "step time (ms)", "samples/s", "mean power (W)", "peak power (W)", "J/sample")


@dataclass(frozen=True, slots=True)
class Plot:
    """One drawing, and what it says to those who cannot see it."""

    id: str
    says: str
    drawing: Drawing


@dataclass(frozen=True, slots=True)
class Section:
    """A heading with drawings; ``shown`` and ``data`` are HTML, the latter folded away."""

    id: str
    heading: str
    message: str
    plots: tuple[Plot, ...] = ()
    key: str = ""
    side_by_side: bool = False
    shown: str = ""
    data: str = ""


def sections_of(report: Report) -> tuple[Section, ...]:
    """The sections that the report has data for, in the order of reading."""
    simulated = report.title.simulated
    found = [
        None if report.front is None else _front(report.front, simulated),
        _maps(report.time_map, report.power_map, simulated),
        None if report.convergence is None else _convergence(report.convergence),
        None if report.parity is None else _parity(report.parity, simulated),
        None if report.trace is None else _trace(report.trace),
        None if report.along is None else _along(report.along),
        None if report.levels is None else _levels(report.levels),
        _energy(report),
        None if report.energy_by_setting is None else _energy_by_setting(report.energy_by_setting),
    ]
    if report.measurements is not None:
        rows = measurements_table(report.measurements)
        found.append(Section("measurements", "Measurements", report.measurements.message, shown=rows))
    if report.assumptions:
        items = "".join(f"<li>{escape(text)}</li>" for text in report.assumptions)
        found.append(Section("assumed", "What was assumed", "", shown=f"<ul>{items}</ul>"))
    return tuple(section for section in found if section is not None)


def _front(front: Front, simulated: bool) -> Section:
    return Section(
        "front",
        "Time and power",
        front.message,
        (Plot("plot-front", front.message, draw_plan.draw_front(front, simulated)),),
        key="The line is the front: no setting is both faster and thriftier. Its band holds the truth nine times in "
        "ten. Filled dots were measured and keep the budget, open ones exceed it or may, by their interval."
        + (PAUSED if front.paused else "")
        + (" The watts shown are means; the budget bounds peaks, which are higher." if front.bounds == "peak" else ""),
        shown=others_table(front.chosen.time_s.expected, front.others) if front.others else "",
        data=front_table(front),
    )


def _maps(time_map: HeatMap | None, power_map: HeatMap | None, simulated: bool) -> Section | None:
    if time_map is None or power_map is None:
        return None
    at = f" with {time_map.others_at}" if time_map.others_at else ""
    return Section(
        "maps",
        "Batch size and clock",
        f"{time_map.message} {power_map.message}",
        (
            Plot("plot-time-map", time_map.message, draw_plan.draw_map(time_map, simulated)),
            Plot("plot-power-map", power_map.message, draw_plan.draw_map(power_map, simulated)),
        ),
        key=f"All cells{at}. The outline holds the cells that keep the budget at the accepted risk; dots were "
        f"measured, the ring is the choice.{PAUSED if time_map.paused else ''}",
        side_by_side=True,
        data=map_table(time_map) + map_table(power_map),
    )


def _convergence(found: Convergence) -> Section:
    return Section(
        "convergence",
        "Convergence",
        found.message,
        (Plot("plot-convergence", found.message, draw_run.draw_convergence(found)),),
        key="Dots are trainings, the line is the fitted curve, its band holds the truth nine times in ten.",
        data=convergence_table(found),
    )


def _parity(parity: Parity, simulated: bool) -> Section:
    settings = [str(setting) for setting in parity.settings]
    plots = tuple(
        Plot(
            f"plot-parity-{name}",
            f"{what} of held-back settings was predicted within {one.mean_error:.1f}% on average.",
            draw_run.draw_checked(one, settings, simulated),
        )
        for name, what, one in (("time", "Step time", parity.step_s), ("power", "Power", parity.power_w))
    )
    checked = len(set(settings))
    some = f" {checked} of {parity.measured:,} settings are checked." if checked < parity.measured else ""
    return Section(
        "parity",
        "Predicted against measured",
        parity.message,
        plots,
        key=f"Each setting was held back and predicted from the others; on the line, both agree.{some}",
        side_by_side=True,
        data=parity_table(parity),
    )


def _trace(trace: PowerTrace) -> Section:
    key = "Grey are the readings, the strong line their mean, the dashes the budget; dots lie above it."
    if len(trace.at_s) < trace.readings:
        key += (
            f" {len(trace.at_s):,} of {trace.readings:,} readings are drawn: of each stretch the lowest, the highest "
            "and the one furthest above the budget."
        )
    plot = Plot("plot-trace", trace.message, draw_run.draw_trace(trace))
    return Section("trace", "Power against the budget", trace.message, (plot,), key=key, data=trace_table(trace))


def _along(along: Along) -> Section:
    drawn = draw_run.draw_along(along)
    told = {name: (f"{says} over time, as it trained.", drawing) for name, (says, drawing) in drawn.items()}
    plots = tuple(Plot(f"plot-along-{name}", *plot) for name, plot in told.items())
    scores = zip(along.score_at_s, along.scores, strict=True)
    rows = [(duration(at_s), f"{score:.4g}") for at_s, score in scores]
    data = _some("Scores", ("at", "score"), rows) if rows else ""
    return Section("along", "The training as it went", along.message, plots, side_by_side=True, data=data)


def _levels(levels: Levels) -> Section:
    rows = [
        (
            level.allowed,
            duration(level.time_s),
            str(level.setting),
            f"{100 * level.share:.0f}%",
            figures(level.samples_a_second),
            watts(level.power_w),
            level.command or "–",
        )
        for level in levels.rows
    ]
    headings = ("allowed", "for", "setting", "of the time", "samples/s", "mean power", "to set it by hand")
    shown = table("The decision for each level of the budget", headings, rows, whole=True)
    return Section("levels", "By level of the budget", levels.message, shown=shown)


def _energy(report: Report) -> Section | None:
    over_time, spent = report.energy_over_time, report.energy_spent
    if over_time is None:
        return None
    plots = [Plot("plot-energy", over_time.message, draw_run.draw_energy(over_time))]
    message = over_time.message
    if spent is not None:
        plots.append(Plot("plot-spent", spent.message, draw_run.draw_spent(spent)))
        message = f"{message} {spent.message}"
    return Section("energy", "Energy of the run", message, tuple(plots), data=energy_table(over_time, spent))


def _energy_by_setting(found: EnergyBySetting) -> Section:
    return Section(
        "energy-by-setting",
        "Energy by setting",
        found.message,
        (Plot("plot-energy-by-setting", found.message, draw_run.draw_energy_by_setting(found)),),
        data=choices_table(found),
    )


def render(report: Report) -> str:
    """The report as one self-contained HTML file."""
    plotly_js = _inline(require("plotly.offline", extra="report").get_plotlyjs())
    own_js, style = _inline(_asset("report.js")), _asset("report.css")
    sections = sections_of(report)
    drawings = {plot.id: plot.drawing for section in sections for plot in section.plots}
    policy = (
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
        f"script-src {_hash(plotly_js)} {_hash(own_js)}"
    )
    return "".join(
        (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n',
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n',
            '<meta name="color-scheme" content="light dark">\n',
            f"<title>{escape(_name(report.title))}</title>\n<style>{style}</style>\n</head>\n<body>\n",
            '<a class="skip" href="#content">Skip to the report</a>\n',
            _header(report),
            _contents(sections),
            '<main id="content">\n',
            "".join(_section(section) for section in sections),
            _missing(report),
            "</main>\n",
            f"<footer><p>Made by Underwatt {escape(report.title.version)}. This file asks no network.</p></footer>\n",
            f'<script type="application/json" id="drawings">{_data(drawings)}</script>\n',
            f"<script>{plotly_js}</script>\n<script>{own_js}</script>\n</body>\n</html>\n",
        )
    )


def _name(title: Title) -> str:
    simulated = " (simulated)" if title.simulated and "simulated" not in title.device else ""
    target = "" if title.target is None else f" to {title.target:g}"
    return f"{title.workload}{target} on {title.device}{simulated}: Underwatt report"


def _header(report: Report) -> str:
    title, decision = report.title, report.decision
    happened = f'<p class="happened">{escape(report.happened)}</p>\n' if report.happened else ""
    chip = '<span class="chip">simulated device</span>' if title.simulated else ""
    budget = f"<span>Budget {escape(title.budget)}</span>" if title.budget else ""
    budget += "" if title.target is None else f"<span>Target {title.target:g}</span>"
    budget += f"<span>{escape(title.about_watts)}</span>" if title.about_watts else ""
    text = (
        f'<header>\n<p class="brand">Underwatt report</p>\n'
        f"<h1>{escape(title.workload)} <span>on {escape(title.device)}</span></h1>\n"
        f'<p class="about">{chip}{budget}<span>{escape(title.made_at)}</span></p>\n'
    )
    if report.verdict is not None and report.verdict.bounded_s:
        text += f'<p class="verdict{" not-held" * (report.verdict.held is False)}">{escape(str(report.verdict))}</p>\n'
    if decision is not None:
        key_figures = "".join(
            f"<div><dt>{escape(f.name)}</dt><dd><strong>{escape(f.value)}</strong><span>{escape(f.detail)}</span></dd></div>"
            for f in decision.key_figures
        )
        text += (
            f'<section aria-labelledby="decision"><h2 id="decision" class="quiet">The decision</h2>\n'
            f'<p class="decision">{escape(decision.sentence)}</p>\n{happened}<dl class="figures">{key_figures}</dl>\n'
            f'<p class="why">Why: {escape(decision.reason)}</p>{_by_hand(decision.command)}</section>\n'
        )
    else:
        text += happened
    return f"{text}</header>\n"


def _by_hand(command: str) -> str:
    return f'<p class="why">To set it by hand: <code>{escape(command)}</code></p>' if command else ""


def _contents(sections: tuple[Section, ...]) -> str:
    links = "".join(f'<li><a href="#{section.id}">{escape(section.heading)}</a></li>' for section in sections)
    return f'<nav aria-label="Contents"><ul>{links}</ul></nav>\n'


def _section(section: Section) -> str:
    plots = "".join(
        f'<div class="plot" id="{plot.id}" role="img" aria-label="{escape(plot.says)}" '
        f'style="min-height:{plot.drawing["layout"]["height"]}px"></div>'
        for plot in section.plots
    )
    parts = [f'<section aria-labelledby="{section.id}">\n<h2 id="{section.id}">{escape(section.heading)}</h2>\n']
    if section.plots:
        pair = " pair" if section.side_by_side else ""
        parts.append(f'<figure>\n<figcaption><p class="message">{escape(section.message)}</p>')
        if section.key:
            parts.append(f'<p class="key">{escape(section.key)}</p>')
        parts.append(f'</figcaption>\n<div class="plots{pair}">{plots}</div>\n</figure>\n')
    elif section.message:
        parts.append(f'<p class="message">{escape(section.message)}</p>\n')
    parts.append(section.shown)
    if section.data:
        parts.append(f"<details><summary>{escape(section.heading)} as numbers</summary>{section.data}</details>\n")
    return "".join([*parts, "</section>\n"])


def _missing(report: Report) -> str:
    if not report.missing:
        return ""
    items = "".join(
        f"<li><strong>{escape(item.section)}:</strong> {escape(item.why)} <code>{escape(item.command)}</code></li>"
        for item in report.missing
    )
    return f'<section aria-labelledby="missing"><h2 id="missing">Left out</h2><ul>{items}</ul></section>\n'


def _asset(name: str) -> str:
    return files("underwatt.reports").joinpath("assets").joinpath(name).read_text(encoding="utf-8")


def _inline(script: str) -> str:
    """A script that cannot end its own element; line ends as a browser reads them, or its hash would differ."""
    return script.replace("\r\n", "\n").replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _hash(script: str) -> str:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def _data(value: object) -> str:
    """JSON inside a script element: no text in it can end the element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


# The data of each figure.


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
