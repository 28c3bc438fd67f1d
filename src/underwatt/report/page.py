"""One HTML file that holds everything: text, tables, drawings and the program that draws them. It asks no network."""

from __future__ import annotations

import base64
import hashlib
import json
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING

from underwatt._imports import require
from underwatt.report.sections import sections_of

if TYPE_CHECKING:
    from underwatt.report.figures import Report, Title
    from underwatt.report.sections import Section


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
            _footer(report.title),
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
    text = (
        f'<header>\n<p class="brand">Underwatt report</p>\n'
        f"<h1>{escape(title.workload)} <span>on {escape(title.device)}</span></h1>\n"
        f'<p class="about">{chip}{budget}<span>{escape(title.made_at)}</span></p>\n'
    )
    if decision is not None:
        figures = "".join(
            f"<div><dt>{escape(f.name)}</dt><dd><strong>{escape(f.value)}</strong><span>{escape(f.detail)}</span></dd></div>"
            for f in decision.key_figures
        )
        text += (
            f'<section aria-labelledby="decision"><h2 id="decision" class="quiet">The decision</h2>\n'
            f'<p class="decision">{escape(decision.sentence)}</p>\n{happened}<dl class="figures">{figures}</dl>\n'
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


def _missing(report: Report) -> str:
    if not report.missing:
        return ""
    items = "".join(
        f"<li><strong>{escape(item.section)}:</strong> {escape(item.why)} <code>{escape(item.command)}</code></li>"
        for item in report.missing
    )
    return f'<section aria-labelledby="missing"><h2 id="missing">Left out</h2><ul>{items}</ul></section>\n'


def _footer(title: Title) -> str:
    return f"<footer><p>Made by Underwatt {escape(title.version)}. This file asks no network.</p></footer>\n"


def _asset(name: str) -> str:
    return files("underwatt.report").joinpath("assets").joinpath(name).read_text(encoding="utf-8")


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
