"""One HTML file that holds everything: text, tables, drawings and the program that draws them. It asks no network."""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING

from underwatt._imports import require
from underwatt.reports import draw_plan, draw_run, tables

if TYPE_CHECKING:
    from underwatt.reports import figures
    from underwatt.reports.draw_plan import Drawing

PAUSED = " Settings that draw more are shown as pauses between steps would hold them: at the budget, and slower."


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


def sections_of(report: figures.Report) -> tuple[Section, ...]:
    """The sections that the report has data for, in the order of reading."""
    simulated = report.title.simulated
    found = [
        None if report.front is None else _front(report.front, simulated),
        _maps(report.time_map, report.power_map, simulated),
        None if report.convergence is None else _convergence(report.convergence),
        None if report.parity is None else _parity(report.parity, simulated),
        None if report.trace is None else _trace(report.trace),
        _energy(report),
        None if report.energy_by_setting is None else _energy_by_setting(report.energy_by_setting),
    ]
    if report.measurements is not None:
        table = tables.measurements_table(report.measurements)
        found.append(Section("measurements", "Measurements", report.measurements.message, shown=table))
    if report.assumptions:
        items = "".join(f"<li>{escape(text)}</li>" for text in report.assumptions)
        found.append(Section("assumed", "What was assumed", "", shown=f"<ul>{items}</ul>"))
    return tuple(section for section in found if section is not None)


def _front(front: figures.Front, simulated: bool) -> Section:
    return Section(
        "front",
        "Time and power",
        front.message,
        (Plot("plot-front", front.message, draw_plan.draw_front(front, simulated)),),
        key="The line is the front: no setting is both faster and thriftier. Its band holds the truth nine times in "
        "ten. Filled dots were measured and keep the budget, open ones exceed it or may, by their interval."
        + (PAUSED if front.paused else "")
        + (" The watts shown are means; the budget bounds peaks, which are higher." if front.bounds == "peak" else ""),
        shown=tables.others_table(front.chosen.time_s.expected, front.others) if front.others else "",
        data=tables.front_table(front),
    )


def _maps(time_map: figures.HeatMap | None, power_map: figures.HeatMap | None, simulated: bool) -> Section | None:
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
        data=tables.map_table(time_map) + tables.map_table(power_map),
    )


def _convergence(found: figures.Convergence) -> Section:
    return Section(
        "convergence",
        "Convergence",
        found.message,
        (Plot("plot-convergence", found.message, draw_run.draw_convergence(found)),),
        key="Dots are trainings, the line is the fitted curve, its band holds the truth nine times in ten.",
        data=tables.convergence_table(found),
    )


def _parity(parity: figures.Parity, simulated: bool) -> Section:
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
        data=tables.parity_table(parity),
    )


def _trace(trace: figures.PowerTrace) -> Section:
    key = "Grey are the readings, the strong line their mean, the dashes the budget; dots lie above it."
    if len(trace.at_s) < trace.readings:
        key += (
            f" {len(trace.at_s):,} of {trace.readings:,} readings are drawn: of each stretch the lowest, the highest "
            "and the one furthest above the budget."
        )
    plot = Plot("plot-trace", trace.message, draw_run.draw_trace(trace))
    return Section("trace", "Power against the budget", trace.message, (plot,), key=key, data=tables.trace_table(trace))


def _energy(report: figures.Report) -> Section | None:
    over_time, spent = report.energy_over_time, report.energy_spent
    if over_time is None:
        return None
    plots = [Plot("plot-energy", over_time.message, draw_run.draw_energy(over_time))]
    message = over_time.message
    if spent is not None:
        plots.append(Plot("plot-spent", spent.message, draw_run.draw_spent(spent)))
        message = f"{message} {spent.message}"
    return Section("energy", "Energy of the run", message, tuple(plots), data=tables.energy_table(over_time, spent))


def _energy_by_setting(found: figures.EnergyBySetting) -> Section:
    return Section(
        "energy-by-setting",
        "Energy by setting",
        found.message,
        (Plot("plot-energy-by-setting", found.message, draw_run.draw_energy_by_setting(found)),),
        data=tables.choices_table(found),
    )


def render(report: figures.Report) -> str:
    """The report as one self-contained HTML file."""
    plotly_js = _inline(require("plotly.offline", extra="report").get_plotlyjs())
    own_js, style = _inline(_asset("report.js")), _asset("report.css")
    sections = sections_of(report)
    drawings = {plot.id: plot.drawing for section in sections for plot in section.plots}
    policy = (
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
        f"script-src {_hash(plotly_js)} {_hash(own_js)}"
    )
    name = _name(report.title)
    return "".join(
        (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n',
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n',
            '<meta name="color-scheme" content="light dark">\n',
            f"<title>{escape(name)}</title>\n<style>{style}</style>\n</head>\n<body>\n",
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


def _name(title: figures.Title) -> str:
    simulated = " (simulated)" if title.simulated and "simulated" not in title.device else ""
    target = "" if title.target is None else f" to {title.target:g}"
    return f"{title.workload}{target} on {title.device}{simulated}: Underwatt report"


def _header(report: figures.Report) -> str:
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
    if decision is not None:
        key_figures = "".join(
            f"<div><dt>{escape(f.name)}</dt><dd><strong>{escape(f.value)}</strong><span>{escape(f.detail)}</span></dd></div>"
            for f in decision.key_figures
        )
        text += (
            f'<section aria-labelledby="decision"><h2 id="decision" class="quiet">The decision</h2>\n'
            f'<p class="decision">{escape(decision.sentence)}</p>\n{happened}<dl class="figures">{key_figures}</dl>\n'
            f'<p class="why">Why: {escape(decision.reason)}</p></section>\n'
        )
    else:
        text += happened
    return f"{text}</header>\n"


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


def _missing(report: figures.Report) -> str:
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
