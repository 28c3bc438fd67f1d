"""Heat maps over batch size and clock."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from underwatt.report.draw_base import (
    GROUND,
    INK,
    OVER,
    SCALE,
    axis,
    drawing,
    line,
    points,
)
from underwatt.report.words import KNOB_NAMES, duration, watts

if TYPE_CHECKING:
    from underwatt.report.draw_base import Drawing
    from underwatt.report.figures import HeatMap


def draw_map(heat: HeatMap, simulated: bool) -> Drawing:
    """A heat map; the region that keeps the budget is outlined, measured cells are dotted, the choice is ringed."""
    rows, columns = len(heat.knob_values), len(heat.batch_sizes)
    flat = sorted(value for line in heat.values for value in line if math.isfinite(value))
    is_time = heat.quantity == "time_s"
    say = duration if is_time else watts
    ticks = [flat[round(share * (len(flat) - 1))] for share in (0.0, 0.25, 0.5, 0.75, 1.0)] if flat else []
    traces: list[dict[str, Any]] = [
        {
            "type": "heatmap",
            "z": [[math.log10(v) if math.isfinite(v) else None for v in line] for line in heat.values],
            "colorscale": SCALE,
            "text": [
                [f"batch {size}, {heat.knob_values[row]:g}: {say(value)}" for size, value in cells]
                for row, cells in enumerate(zip(heat.batch_sizes, line, strict=True) for line in heat.values)
            ],
            "hovertemplate": "%{text}<extra></extra>",
            "xgap": 1,
            "ygap": 1 if rows <= 40 else 0,
            "colorbar": {
                "thickness": 10,
                "outlinewidth": 0,
                "tickvals": [math.log10(value) for value in ticks],
                "ticktext": [say(value) for value in ticks],
            },
        }
    ]
    x, y = _outline(heat.keeps)
    traces.append(line(x, y, color=INK, width=2.5, hoverinfo="skip"))
    dots = [(r, c) for r in range(rows) for c in range(columns) if heat.measured[r][c]]
    traces.append(points([c for _, c in dots], [r for r, _ in dots], ["measured"] * len(dots), size=7, color=INK))
    traces[-1]["marker"]["line"] = {"width": 1.5, "color": GROUND}
    row, column = heat.chosen
    traces.append(points([column], [row], ["the choice"], symbol="circle-open", size=17, color=OVER))
    traces[-1]["marker"]["line"] = {"width": 3}
    step = max(1, math.ceil(rows / 12))
    title = ("Time to target" if heat.per == "target" else "Time of one sample") if is_time else "Mean power"
    return drawing(
        traces,
        height=min(560, max(300, 130 + 24 * rows)),
        title={
            "text": title + (" (simulated)" if simulated else ""),
            "font": {"size": 14},
            "x": 0,
            "xref": "paper",
            "y": 0.98,
        },
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
