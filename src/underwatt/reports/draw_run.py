"""Drawings of a run, power and energy, and of what a plan rests on: convergence, and predicted against measured."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from underwatt.reports.draw_plan import (
    ACCENT,
    BAND,
    INK,
    LINE,
    OVER,
    QUIET,
    axis,
    dashed,
    drawing,
    label,
    line,
    log_axis,
    points,
    quantity,
)
from underwatt.reports.words import (
    KNOB_NAMES,
    bound,
    counted,
    duration,
    energy,
    energy_unit,
    figures,
    time_unit,
    watts,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from underwatt.records import Setting
    from underwatt.reports.draw_plan import Drawing
    from underwatt.reports.report_records import (
        Along,
        Checked,
        Convergence,
        EnergyBySetting,
        EnergyOverTime,
        EnergySpent,
        PowerTrace,
    )


MOST_BARS = 10
LONGEST_BRIEF = 30  # letters of a name on a phone


def draw_trace(trace: PowerTrace) -> Drawing:
    """Power over time: readings, the mean of stretches, the budget as a step line, readings above it."""
    unit_s, unit = time_unit(trace.at_s[-1])
    traces: list[dict[str, Any]] = [
        _over_time(trace.at_s, trace.power_w, unit_s, color="var(--faint)", width=1),
        _over_time(trace.mean_at_s, trace.mean_w, unit_s),
    ]
    labels = []
    if trace.budget_w:
        at_s, budget_w = [*trace.budget_at_s, trace.at_s[-1]], [*trace.budget_w, trace.budget_w[-1]]
        steps = _over_time(at_s, budget_w, unit_s, color=INK, width=1.5)
        steps["line"] |= {"dash": "dash", "shape": "hv"}
        traces.append(steps)
        last_w = None
        for step_s, step_w in zip(trace.budget_at_s, trace.budget_w, strict=True):
            if step_w != last_w:
                text = f"budget {bound(step_w)}"
                labels.append(label(text, step_s / unit_s, step_w, bound(step_w), xanchor="left", yanchor="bottom"))
            last_w = step_w
    over_x, texts = (
        [at / unit_s for at in trace.over_at_s],
        [f"{watts(w)}, above the budget" for w in trace.over_power_w],
    )
    traces.append(points(over_x, list(trace.over_power_w), texts, size=4, color=OVER))
    return drawing(
        traces,
        height=360,
        xaxis=axis(quantity("Time", unit, simulated=trace.simulated)),
        yaxis=axis(quantity("Power", "W", simulated=trace.simulated), rangemode="tozero"),
        annotations=labels,
    )


def draw_along(found: Along) -> dict[str, tuple[str, Drawing]]:
    """Score, speed, clock and temperature over time, by name: what each says, and its drawing."""
    curves = {
        "score": ("Score on held-out data", found.score_at_s, found.scores),
        "speed": ("Samples a second", found.at_s, found.samples_a_second),
        "clock": (KNOB_NAMES.get(found.clock, ""), found.clock_at_s, found.clock_values),
        "temperature": ("Temperature (°C)", found.temperature_at_s, found.temperature_c),
    }
    unit_s, unit = time_unit(found.end_s)
    drawn = {}
    for name, (says, at_s, values) in curves.items():
        if not values:
            continue
        curve = _over_time(at_s, values, unit_s)
        curve |= {"mode": "lines+markers"} if name == "score" else {}
        curve["line"] |= {"shape": "hv"} if name == "clock" else {}
        aims = [] if found.target is None or name != "score" else [found.target]
        drawn[name] = (
            says,
            drawing(
                [curve],
                height=210,
                xaxis=axis(quantity("Time", unit, simulated=found.simulated), range=[0, found.end_s / unit_s]),
                yaxis=axis(says, **({} if name in ("score", "temperature") else {"rangemode": "tozero"})),
                shapes=[dashed(y=aim, color=QUIET) for aim in aims],
                annotations=[
                    label(f"target {aim:g}", 0, aim, xref="paper", xanchor="left", yanchor="bottom", xshift=4)
                    for aim in aims
                ],
            ),
        )
    return drawn


def draw_energy(found: EnergyOverTime) -> Drawing:
    """Energy over time."""
    unit_s, unit = time_unit(found.at_s[-1])
    unit_j, unit_name = energy_unit(max(found.energy_j[-1], found.expected_j or 0.0))
    expected = f"expected to the target with {found.expected_under} all along"
    labels, shapes = [], []
    for name, value in ((expected, found.expected_j), ("budget", found.budget_j)):
        if value is not None:
            shapes.append(dashed(y=value / unit_j, color=QUIET))
            text = f"{name}: {energy(value)}"
            labels.append(label(text, 0, value / unit_j, xref="paper", xanchor="left", yanchor="bottom", xshift=4))
    return drawing(
        [_over_time(found.at_s, [value / unit_j for value in found.energy_j], unit_s)],
        height=320,
        xaxis=axis(quantity("Time", unit, simulated=found.simulated)),
        yaxis=axis(quantity("Energy", unit_name, simulated=found.simulated), rangemode="tozero"),
        annotations=labels,
        shapes=shapes,
    )


def draw_spent(found: EnergySpent) -> Drawing:
    """Energy of a run by setting: the largest parts, and all others together."""
    shown = found.shares if len(found.shares) <= MOST_BARS else found.shares[: MOST_BARS - 1]
    bars = []
    for share in shown:
        text = f"{energy(share.energy_j)}, {duration(share.time_s)}"
        bars.append((f"{share.setting}  ·  {text}", f"{short(share.setting)} · {text}", share.energy_j))
    if rest := found.shares[len(shown) :]:
        joules, seconds = sum(share.energy_j for share in rest), sum(share.time_s for share in rest)
        text = f"{counted(len(rest), 'other setting')} · {energy(joules)}, {duration(seconds)}"
        bars.append((text, text, joules))
    return _bars(bars)


def draw_energy_by_setting(found: EnergyBySetting) -> Drawing:
    """Expected energy of the choice and of what others would choose."""
    spent_j = found.chosen.energy_j.expected
    bars = [(f"the choice: {found.chosen.setting}  ·  {energy(spent_j)}", f"the choice · {energy(spent_j)}", spent_j)]
    for other in found.others:
        over = other.choice.fits == "over"
        joules = energy(other.choice.energy_j)
        text = f"{joules} in {duration(other.choice.time_s)}{', over the budget' if over else ''}"
        name = other.label
        if len(name) > LONGEST_BRIEF:
            name = f"{name[: LONGEST_BRIEF - 1].rstrip()}…"
        brief = f"{other.letter}: {name} · {joules}{', over' if over else ''}"
        bars.append((f"{other.letter}: {other.choice.name}  ·  {text}", brief, other.choice.energy_j))
    return _bars(bars)


def short(setting: Setting) -> str:
    """A setting for a narrow screen: batch size and the knob that matters most."""
    mode = setting.mode
    if mode.gpu_mhz is not None:
        return f"batch {setting.batch_size}, GPU {mode.gpu_mhz:g}"
    return f"batch {setting.batch_size}" + (f", {mode.power_limit_w:g} W" if mode.power_limit_w else "")


def _bars(bars: list[tuple[str, str, float]]) -> Drawing:
    """Bars from the left, each with its words above itself, for a wide screen and for a phone."""
    largest = max(value for _, _, value in bars) or 1.0
    count = len(bars)
    above: dict[str, Any] = {"xanchor": "left", "yanchor": "bottom", "yshift": 7, "font": {"color": INK, "size": 12}}
    return drawing(
        [
            {
                "type": "bar",
                "orientation": "h",
                "x": [value / largest for _, _, value in bars],
                "y": list(range(count - 1, -1, -1)),
                "width": 0.28,
                "marker": {"color": [ACCENT if at == 0 else "var(--bar)" for at in range(count)]},
                "hoverinfo": "skip",
            }
        ],
        height=40 + 46 * count,
        margin={"l": 4, "r": 4, "t": 12, "b": 4},
        xaxis={"visible": False, "fixedrange": True, "range": [0, 1.02]},
        yaxis={"visible": False, "fixedrange": True, "range": [-0.45, count - 0.3]},
        annotations=[label(text, 0, count - 1 - at, brief, **above) for at, (text, brief, _) in enumerate(bars)],
    )


def _over_time(
    at_s: Sequence[float], values: Sequence[float], unit_s: float, *, color: str = ACCENT, width: float = 2
) -> dict[str, Any]:
    x = [round(at / unit_s, 6) for at in at_s]
    return line(x, list(values), color=color, width=width, hovertemplate="%{y:.4g}<extra></extra>")


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
        shapes.append(dashed(x=found.chosen_batch_size))
        at = math.log10(found.chosen_batch_size)
        labels.append(
            label(f"choice: {found.chosen_batch_size}", at, 1, yref="paper", xanchor="left", xshift=4, yanchor="top")
        )
    ticks = sorted({run.batch_size for run in found.runs} | {sizes[0], sizes[-1]})
    values = [*found.low, *found.high, *(run.samples for run in reached)]
    return drawing(
        traces,
        height=360,
        xaxis=axis("Batch size", type="log", tickvals=ticks, ticktext=[str(size) for size in ticks]),
        yaxis=log_axis(f"Samples to reach {found.target:g}", min(values) / 1.05, max(values) * 1.1),
        shapes=shapes,
        annotations=labels,
    )


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
    text = f"off by {checked.mean_error:.1f}% on average"
    return drawing(
        [line([low, high], [low, high], color=LINE, width=1.5, hoverinfo="skip"), dots],
        height=340,
        xaxis=log_axis(quantity(f"{name} measured", unit, simulated=simulated), low, high),
        yaxis=log_axis(f"{name} predicted ({unit})", low, high),
        annotations=[label(text, 0, 1, xref="paper", yref="paper", xanchor="left", xshift=6)],
    )
