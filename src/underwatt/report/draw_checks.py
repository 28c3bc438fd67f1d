"""Drawings of what a plan rests on: convergence, and predicted against measured."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from underwatt.report.draw_base import (
    ACCENT,
    BAND,
    LINE,
    QUIET,
    axis,
    drawing,
    label,
    line,
    log_axis,
    points,
    vertical,
)
from underwatt.report.words import figures, time_unit

if TYPE_CHECKING:
    from underwatt.report.draw_base import Drawing
    from underwatt.report.figures import Checked, Convergence


def draw_convergence(found: Convergence) -> Drawing:
    """Samples to the target over batch size."""
    sizes = list(found.batch_sizes)
    reached = [run for run in found.runs if run.reached]
    traces = [
        line(sizes, list(found.high), width=0),
        line(sizes, list(found.low), width=0, fill="tonexty", fillcolor=BAND),
        line(sizes, list(found.samples)),
        points(
            [run.batch_size for run in reached],
            [run.samples for run in reached],
            [f"batch {run.batch_size}, seed {run.seed}: {figures(run.samples)} samples" for run in reached],
            size=7,
            color=QUIET,
        ),
    ]
    shapes, labels = [], []
    if found.chosen_batch_size is not None:
        shapes.append(vertical(found.chosen_batch_size))
        at = math.log10(found.chosen_batch_size)
        labels.append(
            label(f"choice: {found.chosen_batch_size}", at, 1, yref="paper", xanchor="left", xshift=4, yanchor="top")
        )
    ticks = sorted({run.batch_size for run in found.runs} | {sizes[0], sizes[-1]})
    return drawing(
        traces,
        height=360,
        xaxis=axis("Batch size", type="log", tickvals=ticks, ticktext=[str(size) for size in ticks]),
        yaxis=log_axis(f"Samples to reach {found.target:g}", *_samples_range(found)),
        shapes=shapes,
        annotations=labels,
    )


def _samples_range(found: Convergence) -> tuple[float, float]:
    values = [*found.low, *found.high, *(run.samples for run in found.runs if run.reached)]
    return min(values) / 1.05, max(values) * 1.1


def draw_checked(checked: Checked, settings: list[str], simulated: bool) -> Drawing:
    """Predicted over measured, with 90% intervals; on the line where they agree."""
    is_time = checked.quantity == "step_s"
    unit_s, unit = time_unit(sorted(checked.measured)[len(checked.measured) // 2]) if is_time else (1.0, "W")
    measured, predicted = ([value / unit_s for value in some] for some in (checked.measured, checked.predicted))
    low, high = min(*measured, *predicted) / 1.1, max(*measured, *predicted) * 1.1
    dots = points(measured, predicted, settings, size=7, color=ACCENT)
    dots["error_y"] = {
        "type": "data",
        "symmetric": False,
        "array": [(top - mid) / unit_s for top, mid in zip(checked.high, checked.predicted, strict=True)],
        "arrayminus": [(mid - end) / unit_s for mid, end in zip(checked.predicted, checked.low, strict=True)],
        "color": QUIET,
        "thickness": 1,
        "width": 0,
    }
    name = "Step time" if is_time else "Mean power"
    told = ", simulated" if simulated else ""
    return drawing(
        [line([low, high], [low, high], color=LINE, width=1.5, hoverinfo="skip"), dots],
        height=340,
        xaxis=log_axis(f"{name} measured ({unit}{told})", low, high),
        yaxis=log_axis(f"{name} predicted ({unit})", low, high),
        annotations=[
            label(
                f"off by {checked.mean_error:.1f}% on average",
                0,
                1,
                xref="paper",
                yref="paper",
                xanchor="left",
                xshift=6,
            )
        ],
    )
