"""The time–power front, drawn with direct labels."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from underwatt.report.draw_base import (
    ACCENT,
    BAND,
    INK,
    QUIET,
    axis,
    drawing,
    label,
    line,
    log_axis,
    plain,
    points,
    vertical,
)
from underwatt.report.draw_labels import place_labels
from underwatt.report.words import bound, duration, time_unit, watts

if TYPE_CHECKING:
    from underwatt.report.draw_base import Drawing
    from underwatt.report.figures import Front

# A label up to so many pixels above or below its point needs no line to it.
NEAR = 20
# Beyond this share of the width there is no room for the budget's name to the right of its line.
EDGE = 0.85
# More measured settings than this are drawn small and pale, or they would cover the rest.
MANY = 100


def draw_front(front: Front, simulated: bool) -> Drawing:
    """Time over power: the band, the front, what was measured, others, the choice, and the budget."""
    times = [point.time_s.expected for point in front.front]
    unit_s, unit = time_unit(sorted([*times, front.chosen.time_s.expected])[len(times) // 2])
    along = sorted(front.front, key=lambda point: point.power_w.expected)
    watts_of = [point.power_w.expected for point in along]
    traces: list[dict[str, Any]] = [
        line(watts_of, [p.time_s.high / unit_s for p in along], width=0),
        line(watts_of, [p.time_s.low / unit_s for p in along], width=0, fill="tonexty", fillcolor=BAND),
        line(
            watts_of,
            [p.time_s.expected / unit_s for p in along],
            hovertext=[
                plain(f"{p.setting}: {duration(p.time_s.expected)}, {watts(p.power_w.expected)}") for p in along
            ],
            hoverinfo="text",
        ),
    ]
    many = len(front.measured) > MANY
    for fits, symbol in ((True, "circle"), (False, "circle-open")):
        some = [point for point in front.measured if point.fits is fits]
        traces.append(
            points(
                [p.power_w for p in some],
                [p.time_s / unit_s for p in some],
                [f"measured: {p.setting}: {duration(p.time_s)}, {watts(p.power_w)}" for p in some],
                symbol=symbol,
                size=4 if many else 6,
                color=QUIET,
            )
        )
        traces[-1]["marker"]["opacity"] = 0.4 if many else 1.0
    chosen = front.chosen
    same = [other for other in front.others if other.choice.setting == chosen.setting]
    others = [other for other in front.others if math.isfinite(other.choice.time_s) and other not in same]
    traces.append(
        points(
            [o.choice.power_w for o in others],
            [o.choice.time_s / unit_s for o in others],
            [f"{o.choice.name}: {o.choice.setting}" for o in others],
            symbol="diamond",
            size=10,
            color=INK,
        )
    )
    traces.append(
        points(
            [chosen.power_w.expected],
            [chosen.time_s.expected / unit_s],
            [f"{', also '.join(['the choice', *(other.choice.name for other in same)])}: {chosen.setting}"],
            symbol="circle",
            size=15,
            color=ACCENT,
        )
    )
    box = _extent(traces, front.budget_w)
    named = [("choice", "choice", chosen.power_w.expected, chosen.time_s.expected)]
    named += [(o.label, o.letter, o.choice.power_w, o.choice.time_s) for o in others]
    drawn = _along([(p.power_w.expected, p.time_s.expected) for p in along]) + [
        (p.power_w, p.time_s) for p in front.measured
    ]
    labels = _front_labels(named, drawn, unit_s, box, front.budget_w)
    shapes = []
    if front.budget_w is not None:
        shapes.append(vertical(front.budget_w))
        left = (front.budget_w - box[0]) / (box[1] - box[0]) < EDGE
        labels.append(
            label(
                f"budget {bound(front.budget_w)}{' for peaks' if front.bounds == 'peak' else ''}",
                front.budget_w,
                1,
                yref="paper",
                xanchor="left" if left else "right",
                yanchor="top",
                xshift=4 if left else -4,
            )
        )
    what = "Time to target" if front.per == "target" else "Time of one sample"
    told = ", simulated" if simulated else ""
    return drawing(
        traces,
        height=440,
        xaxis=axis(f"Mean power (W{told})", range=list(box[:2])),
        yaxis=log_axis(f"{what} ({unit}{told})", *box[2:]),
        annotations=labels,
        shapes=shapes,
    )


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
