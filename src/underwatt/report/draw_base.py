"""What all drawings share. Colours are names of CSS variables: the page resolves them, light or dark."""

from __future__ import annotations

import math
from typing import Any

INK, QUIET, LINE = "var(--ink)", "var(--quiet)", "var(--line)"
ACCENT, BAND, OVER, GROUND = "var(--accent)", "var(--band)", "var(--over)", "var(--ground)"
SCALE = [[0.0, "var(--scale-0)"], [0.5, "var(--scale-1)"], [1.0, "var(--scale-2)"]]

Drawing = dict[str, Any]
MOST_TICKS = 7


def axis(title: str, **more: Any) -> dict[str, Any]:
    """An axis: quiet lines, title at its end."""
    return {
        "title": {"text": title, "standoff": 8, "font": {"size": 12, "color": QUIET}},
        "gridcolor": LINE,
        "linecolor": LINE,
        "zeroline": False,
        "ticks": "",
        "fixedrange": True,
        **more,
    }


def log_axis(title: str, low: float, high: float, **more: Any) -> dict[str, Any]:
    """A logarithmic axis with the numbers that people say: 1, 2, 5, 10, 20 and so on."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1, 1.5, 2, 3, 4, 5, 7), (1, 2, 5), (1,)):
        ticks = [step * 10.0**decade for decade in decades for step in steps if low <= step * 10.0**decade <= high]
        if len(ticks) <= MOST_TICKS:
            break
    text = [f"{tick:,.6g}" if tick < 1e4 else f"{tick / 1e3:,.6g}k" for tick in ticks]
    bounds = [math.log10(low), math.log10(high)]
    return axis(title, type="log", range=bounds, tickvals=ticks, ticktext=text, **more)


def drawing(traces: list[dict[str, Any]], *, height: int = 400, **layout: Any) -> Drawing:
    """A Plotly figure as plain JSON."""
    base = {
        "height": height,
        "margin": {"l": 64, "r": 16, "t": 24, "b": 52},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 13, "color": INK},
        "hoverlabel": {"bgcolor": GROUND, "bordercolor": LINE, "font": {"color": INK}},
        "showlegend": False,
        "dragmode": False,
        "hovermode": "closest",
    }
    return {"data": traces, "layout": base | layout}


def label(text: str, x: float | str, y: float | str, short: str = "", **more: Any) -> dict[str, Any]:
    """A direct label; ``short`` stands for it on a narrow screen (Plotly keeps it in ``name``)."""
    return {
        "text": plain(text),
        "name": plain(short),
        "x": x,
        "y": y,
        "showarrow": False,
        "font": {"color": QUIET, "size": 12},
        "bgcolor": "rgba(0,0,0,0)",
        **more,
    }


def plain(text: str) -> str:
    """Text for Plotly, which reads some HTML in labels."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def line(x: list[Any], y: list[Any], *, color: str = ACCENT, width: float = 2, **more: Any) -> dict[str, Any]:
    """A line; one without a width only bounds what is filled."""
    hover = {} if "hoverinfo" in more or width else {"hoverinfo": "skip"}
    return {
        "type": "scatter",
        "mode": "lines",
        "x": x,
        "y": y,
        "line": {"color": color, "width": width},
        **hover,
        **more,
    }


def points(
    x: list[Any], y: list[Any], texts: list[str], *, size: float, color: str, symbol: str = "circle"
) -> dict[str, Any]:
    """Points with a text each, shown when pointed at."""
    return {
        "type": "scatter",
        "mode": "markers",
        "x": x,
        "y": y,
        "hovertext": [plain(text) for text in texts],
        "hoverinfo": "text",
        "marker": {"symbol": symbol, "size": size, "color": color},
    }


def vertical(x: float) -> dict[str, Any]:
    """A dashed line from bottom to top."""
    return {
        "type": "line",
        "x0": x,
        "x1": x,
        "y0": 0,
        "y1": 1,
        "yref": "paper",
        "line": {"color": INK, "width": 1.5, "dash": "dash"},
    }
