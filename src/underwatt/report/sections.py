"""The order of a report: which figures stand together, under which heading, with which words."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from underwatt.report.draw_checks import draw_checked, draw_convergence
from underwatt.report.draw_front import draw_front
from underwatt.report.draw_map import draw_map
from underwatt.report.draw_run import draw_energy, draw_energy_by_setting, draw_spent, draw_trace
from underwatt.report.tables import (
    choices_table,
    convergence_table,
    energy_table,
    front_table,
    map_table,
    measurements_table,
    others_table,
    parity_table,
    trace_table,
)

if TYPE_CHECKING:
    from underwatt.report.draw_base import Drawing
    from underwatt.report.figures import Convergence, EnergyBySetting, Front, HeatMap, Parity, PowerTrace, Report

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


def sections_of(report: Report) -> tuple[Section, ...]:
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
        table = measurements_table(report.measurements)
        found.append(Section("measurements", "Measurements", report.measurements.message, shown=table))
    if report.assumptions:
        items = "".join(f"<li>{escape(text)}</li>" for text in report.assumptions)
        found.append(Section("assumed", "What was assumed", "", shown=f"<ul>{items}</ul>"))
    return tuple(section for section in found if section is not None)


def _front(front: Front, simulated: bool) -> Section:
    return Section(
        "front",
        "Time and power",
        front.message,
        (Plot("plot-front", front.message, draw_front(front, simulated)),),
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
            Plot("plot-time-map", time_map.message, draw_map(time_map, simulated)),
            Plot("plot-power-map", power_map.message, draw_map(power_map, simulated)),
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
        (Plot("plot-convergence", found.message, draw_convergence(found)),),
        key="Dots are trainings, the line is the fitted curve, its band holds the truth nine times in ten.",
        data=convergence_table(found),
    )


def _parity(parity: Parity, simulated: bool) -> Section:
    settings = [str(setting) for setting in parity.settings]
    plots = tuple(
        Plot(
            f"plot-parity-{name}",
            f"{what} of held-back settings was predicted within {checked.mean_error:.1f}% on average.",
            draw_checked(checked, settings, simulated),
        )
        for name, what, checked in (("time", "Step time", parity.step_s), ("power", "Power", parity.power_w))
    )
    some = (
        f" {len(set(settings))} of {parity.measured:,} settings are checked."
        if len(set(settings)) < parity.measured
        else ""
    )
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
    thinned = len(trace.at_s) < trace.readings
    key = "Grey are the readings, the strong line their mean, the dashes the budget; dots lie above it."
    if thinned:
        key += (
            f" {len(trace.at_s):,} of {trace.readings:,} readings are drawn: of each stretch the lowest, the highest "
            "and the one furthest above the budget."
        )
    plot = Plot("plot-trace", trace.message, draw_trace(trace))
    return Section("trace", "Power against the budget", trace.message, (plot,), key=key, data=trace_table(trace))


def _energy(report: Report) -> Section | None:
    over_time, spent = report.energy_over_time, report.energy_spent
    if over_time is None:
        return None
    plots = [Plot("plot-energy", over_time.message, draw_energy(over_time))]
    message = over_time.message
    if spent is not None:
        plots.append(Plot("plot-spent", spent.message, draw_spent(spent)))
        message = f"{message} {spent.message}"
    return Section("energy", "Energy of the run", message, tuple(plots), data=energy_table(over_time, spent))


def _energy_by_setting(found: EnergyBySetting) -> Section:
    return Section(
        "energy-by-setting",
        "Energy by setting",
        found.message,
        (Plot("plot-energy-by-setting", found.message, draw_energy_by_setting(found)),),
        data=choices_table(found),
    )
