"""Drawings of a plan, the time–power front and heat maps, and what all drawings are made of."""

from __future__ import annotations

import math
from functools import partial
from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from underwatt.reports.words import KNOB_NAMES, bound, duration, time_unit, watts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from underwatt.planning.choice import Expectation
    from underwatt.reports.report_records import Front, HeatMap, MeasuredPoint


# Colours are names of CSS variables: the page resolves them, light or dark.
INK, QUIET, LINE = "var(--ink)", "var(--quiet)", "var(--line)"
ACCENT, BAND, OVER, GROUND = "var(--accent)", "var(--band)", "var(--over)", "var(--ground)"
SCALE = [[0.0, "var(--scale-0)"], [0.5, "var(--scale-1)"], [1.0, "var(--scale-2)"]]

Drawing = dict[str, Any]
plain = partial(escape, quote=False)  # text for Plotly, which reads some HTML in labels
MOST_TICKS = 7


def quantity(name: str, unit: str, *, simulated: bool) -> str:
    """The title of an axis."""
    return f"{name} ({unit}{', simulated' if simulated else ''})"


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
    x: list[Any], y: list[Any], texts: list[str], *, size: float, color: str, symbol: str = "circle", **marker: Any
) -> dict[str, Any]:
    """Points with a text each, shown when pointed at."""
    return {
        "type": "scatter",
        "mode": "markers",
        "x": x,
        "y": y,
        "hovertext": [plain(text) for text in texts],
        "hoverinfo": "text",
        "marker": {"symbol": symbol, "size": size, "color": color, **marker},
    }


def dashed(*, x: float | None = None, y: float | None = None, color: str = INK) -> dict[str, Any]:
    """A dashed line through the whole drawing: upright at ``x``, or level at ``y``."""
    if x is not None:
        where = {"x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper"}
    else:
        where = {"x0": 0, "x1": 1, "xref": "paper", "y0": y, "y1": y}
    return {"type": "line", **where, "line": {"color": color, "width": 1.5, "dash": "dash"}}


# Pixels: of a usual drawing, a letter of its labels, and how far a label stands off its point.
WIDTH, HEIGHT = 720.0, 340.0
LETTER, LABEL_LINE = 6.4, 16.0
OFF, ABOVE = 12.0, 18.0
# What it costs to lie across a line, in square pixels of covered label.
ACROSS = 600.0

Box = tuple[float, float, float, float]


class Place(NamedTuple):
    """Shift of a label from its point, in pixels, and which end of the label stands there."""

    x_shift: float
    y_shift: float
    anchor: str  # "left", "right" or "center"


def place_labels(
    points: Sequence[tuple[float, float]],
    texts: Sequence[str],
    avoid: Sequence[tuple[float, float]] = (),
    *,
    uprights: Sequence[float] = (),
    close: int = 0,
) -> list[Place]:
    """A place for each text beside its point, and not on top of others.

    Points are shares of the drawing's width and height, the most important first.
    ``avoid`` are other things drawn and ``uprights`` lines from bottom to top, which labels should not cover. The
    first ``close`` texts stay right beside their points, whatever they cover.
    """
    centres = [(x * WIDTH, y * HEIGHT) for x, y in points]
    taken: list[Box] = [(x - 7, y - 7, x + 7, y + 7) for x, y in centres]
    taken += [(x * WIDTH - 3, y * HEIGHT - 3, x * WIDTH + 3, y * HEIGHT + 3) for x, y in avoid]
    lines = [x * WIDTH for x in uprights]
    placed = []
    for at, ((x, y), text) in enumerate(zip(centres, texts, strict=True)):
        tries = [item for item in _tries(x, y, text) if at >= close or 0.0 in (item[0].x_shift, item[0].y_shift)]
        found = min(tries, key=lambda item: _cost(item[1], taken, lines, item[0]))
        taken.append(found[1])
        placed.append(found[0])
    return placed


def _tries(x: float, y: float, text: str) -> list[tuple[Place, Box]]:
    length = LETTER * (len(text) + 0.5 * sum(text.count(wide) for wide in "mwMW"))
    places = [Place(0.0, up, "center") for up in (ABOVE, -ABOVE)]
    for up in (0.0, 16.0, -16.0, 32.0, -32.0, 48.0, -48.0, 66.0, -66.0):
        places += [Place(OFF, up, "left"), Place(-OFF, up, "right")]
    tries = []
    for place in places:
        left = x + place.x_shift - {"left": 0.0, "center": length / 2, "right": length}[place.anchor]
        middle = y + place.y_shift
        tries.append((place, (left, middle - LABEL_LINE / 2, left + length, middle + LABEL_LINE / 2)))
    return tries


def _cost(box: Box, taken: Sequence[Box], lines: Sequence[float], place: Place) -> float:
    outside = max(0.0, -box[0]) + max(0.0, box[2] - WIDTH) + max(0.0, -box[1]) + max(0.0, box[3] - HEIGHT)
    across = ACROSS * sum(box[0] - 2 < line < box[2] + 2 for line in lines)
    return sum(_overlap(box, other) for other in taken) + across + 40 * outside + 0.3 * abs(place.y_shift)


def _overlap(one: Box, other: Box) -> float:
    wide = min(one[2], other[2]) - max(one[0], other[0])
    high = min(one[3], other[3]) - max(one[1], other[1])
    return wide * high if wide > 0 and high > 0 else 0.0


# A label up to so many pixels above or below its point needs no line to it.
NEAR = 20
# Beyond this share of the width there is no room for the budget's name to the right of its line.
EDGE = 0.85
# More measured settings than this are drawn small and pale, or they would cover the rest.
MANY = 100


def draw_front(front: Front, simulated: bool) -> Drawing:
    """Time over power: the band, the front, what was measured, others, the choice, and the budget."""
    chosen, budget_w = front.chosen, front.budget_w
    times = [point.time_s.expected for point in front.front]
    unit_s, unit = time_unit(sorted([*times, chosen.time_s.expected])[len(times) // 2])
    along = sorted(front.front, key=lambda point: point.power_w.expected)
    same = [other for other in front.others if other.choice.setting == chosen.setting]
    others = [other for other in front.others if math.isfinite(other.choice.time_s) and other not in same]
    names = ", also ".join(["the choice", *(other.choice.name for other in same)])
    traces = [
        *_front_lines(along, unit_s),
        *_measured_points(front.measured, unit_s),
        points(
            [o.choice.power_w for o in others],
            [o.choice.time_s / unit_s for o in others],
            [f"{o.choice.name}: {o.choice.setting}" for o in others],
            symbol="diamond",
            size=10,
            color=INK,
        ),
        points(
            [chosen.power_w.expected],
            [chosen.time_s.expected / unit_s],
            [f"{names}: {chosen.setting}"],
            size=15,
            color=ACCENT,
        ),
    ]
    box = _extent(traces, budget_w)
    named = [("choice", "choice", chosen.power_w.expected, chosen.time_s.expected)]
    named += [(o.label, o.letter, o.choice.power_w, o.choice.time_s) for o in others]
    drawn = _along([(p.power_w.expected, p.time_s.expected) for p in along])
    drawn += [(p.power_w, p.time_s) for p in front.measured]
    labels = _front_labels(named, drawn, unit_s, box, budget_w)
    if budget_w is not None:
        text = f"budget {bound(budget_w)}{' for peaks' if front.bounds == 'peak' else ''}"
        left = (budget_w - box[0]) / (box[1] - box[0]) < EDGE
        beside: dict[str, Any] = {"xanchor": "left", "xshift": 4} if left else {"xanchor": "right", "xshift": -4}
        labels.append(label(text, budget_w, 1, yref="paper", yanchor="top", **beside))
    what = "Time to target" if front.per == "target" else "Time of a useful sample"
    return drawing(
        traces,
        height=440,
        xaxis=axis(quantity("Mean power", "W", simulated=simulated), range=list(box[:2])),
        yaxis=log_axis(quantity(what, unit, simulated=simulated), *box[2:]),
        annotations=labels,
        shapes=[] if budget_w is None else [dashed(x=budget_w)],
    )


def _front_lines(along: list[Expectation], unit_s: float) -> list[dict[str, Any]]:
    """The band and the front itself."""
    power_w = [point.power_w.expected for point in along]
    texts = [plain(f"{p.setting}: {duration(p.time_s.expected)}, {watts(p.power_w.expected)}") for p in along]
    return [
        line(power_w, [p.time_s.high / unit_s for p in along], width=0),
        line(power_w, [p.time_s.low / unit_s for p in along], width=0, fill="tonexty", fillcolor=BAND),
        line(power_w, [p.time_s.expected / unit_s for p in along], hovertext=texts, hoverinfo="text"),
    ]


def _measured_points(measured: Sequence[MeasuredPoint], unit_s: float) -> list[dict[str, Any]]:
    """Filled what keeps the budget, open what does not."""
    size, opacity = (4, 0.4) if len(measured) > MANY else (6, 1.0)
    traces = []
    for fits, symbol in ((True, "circle"), (False, "circle-open")):
        some = [point for point in measured if point.fits is fits]
        texts = [f"measured: {p.setting}: {duration(p.time_s)}, {watts(p.power_w)}" for p in some]
        x, y = [p.power_w for p in some], [p.time_s / unit_s for p in some]
        traces.append(points(x, y, texts, symbol=symbol, size=size, color=QUIET, opacity=opacity))
    return traces


def _along(line_points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Points on a line, also between those that it is drawn through: labels keep off all of it."""
    found = list(line_points)
    for (x0, y0), (x1, y1) in pairwise(line_points):
        found += [(x0 + part / 8 * (x1 - x0), y0 * (y1 / y0) ** (part / 8)) for part in range(1, 8)]
    return found


def _extent(traces: list[dict[str, Any]], budget_w: float | None) -> tuple[float, float, float, float]:
    x = [value for trace in traces[2:] for value in trace["x"]] + ([] if budget_w is None else [budget_w])
    y = [value for trace in traces[2:] for value in trace["y"]]
    wide = (max(x) - min(x)) or 1.0
    low = min([*traces[1]["y"], *y])  # the band belongs to the picture where it is lowest
    room = 0.17 if max(x) in (*traces[-2]["x"], *traces[-1]["x"]) else 0.06  # for a label beside the last point
    return min(x) - 0.04 * wide, max(x) + room * wide, low / 1.1, max(y) * 1.4


def _front_labels(
    named: list[tuple[str, str, float, float]],
    drawn: list[tuple[float, float]],
    unit_s: float,
    box: tuple[float, float, float, float],
    budget_w: float | None,
) -> list[dict[str, Any]]:
    left, right, low, high = box

    def share(x: float, y: float) -> tuple[float, float]:
        return (x - left) / (right - left), math.log(y / unit_s / low) / math.log(high / low)

    shares = [share(x, y) for _, _, x, y in named]
    texts = [name for name, _, _, _ in named]
    budget_at = [] if budget_w is None else [(budget_w - left) / (right - left)]
    places = place_labels(shares, texts, [share(x, y) for x, y in drawn], uprights=budget_at, close=1)
    return [
        label(
            name,
            x,
            math.log10(y / unit_s),
            short,
            xanchor=place.anchor,
            showarrow=True,
            arrowhead=0,
            arrowwidth=1,
            arrowcolor=QUIET if abs(place.y_shift) > NEAR else "rgba(0,0,0,0)",
            standoff=6,
            ax=place.x_shift,
            ay=-place.y_shift,
            font={"color": ACCENT if short == "choice" else INK, "size": 14 if short == "choice" else 12},
        )
        for (name, short, x, y), place in zip(named, places, strict=True)
    ]


def draw_map(heat: HeatMap, simulated: bool) -> Drawing:
    """A heat map; the region that keeps the budget is outlined, measured cells are dotted, the choice is ringed."""
    rows, columns = len(heat.knob_values), len(heat.batch_sizes)
    x, y = _outline(heat.keeps)
    dots = [(r, c) for r in range(rows) for c in range(columns) if heat.measured[r][c]]
    dots_x, dots_y = [c for _, c in dots], [r for r, _ in dots]
    edge = {"width": 1.5, "color": GROUND}
    row, column = heat.chosen
    traces = [
        _cells(heat),
        line(x, y, color=INK, width=2.5, hoverinfo="skip"),
        points(dots_x, dots_y, ["measured"] * len(dots), size=7, color=INK, line=edge),
        points([column], [row], ["the choice"], symbol="circle-open", size=17, color=OVER, line={"width": 3}),
    ]
    of_time = "Time to target" if heat.per == "target" else "Time of a useful sample"
    title = (of_time if heat.quantity == "time_s" else "Mean power") + (" (simulated)" if simulated else "")
    step = max(1, math.ceil(rows / 12))
    return drawing(
        traces,
        height=min(560, max(300, 130 + 24 * rows)),
        title={"text": title, "font": {"size": 14}, "x": 0, "xref": "paper", "y": 0.98},
        margin={"l": 72, "r": 8, "t": 44, "b": 48},
        xaxis=axis(
            "Batch size",
            range=[-0.5, columns - 0.5],
            tickvals=list(range(columns)),
            ticktext=[str(size) for size in heat.batch_sizes],
            showgrid=False,
        ),
        yaxis=axis(
            KNOB_NAMES[heat.knob],
            range=[-0.5, rows - 0.5],
            tickvals=list(range(0, rows, step)),
            ticktext=[f"{value:.4g}" for value in heat.knob_values[::step]],
            showgrid=False,
        ),
    )


def _cells(heat: HeatMap) -> dict[str, Any]:
    say = duration if heat.quantity == "time_s" else watts
    flat = sorted(value for row in heat.values for value in row if math.isfinite(value))
    ticks = [flat[round(share * (len(flat) - 1))] for share in (0.0, 0.25, 0.5, 0.75, 1.0)] if flat else []
    return {
        "type": "heatmap",
        "z": [[math.log10(value) if math.isfinite(value) else None for value in row] for row in heat.values],
        "colorscale": SCALE,
        "text": [
            [f"batch {size}, {knob:g}: {say(value)}" for size, value in zip(heat.batch_sizes, row, strict=True)]
            for knob, row in zip(heat.knob_values, heat.values, strict=True)
        ],
        "hovertemplate": "%{text}<extra></extra>",
        "xgap": 1,
        "ygap": 1 if len(heat.values) <= 40 else 0,
        "colorbar": {
            "thickness": 10,
            "outlinewidth": 0,
            "tickvals": [math.log10(value) for value in ticks],
            "ticktext": [say(value) for value in ticks],
        },
    }


def _outline(keeps: tuple[tuple[bool, ...], ...]) -> tuple[list[float | None], list[float | None]]:
    """The border of the cells that keep the budget, as line pieces."""
    x: list[float | None] = []
    y: list[float | None] = []

    def kept(row: int, column: int) -> bool:
        return 0 <= row < len(keeps) and 0 <= column < len(keeps[0]) and keeps[row][column]

    for row in range(len(keeps) + 1):
        for column in range(len(keeps[0]) + 1):
            if kept(row, column) != kept(row - 1, column):
                x += [column - 0.5, column + 0.5, None]
                y += [row - 0.5, row - 0.5, None]
            if kept(row, column) != kept(row, column - 1):
                x += [column - 0.5, column - 0.5, None]
                y += [row - 0.5, row + 0.5, None]
    return x, y
