"""How the demo looks on a terminal: plans, trainings as they go, and what they took."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.markup import escape

from underwatt.cli.format import duration, plain_table
from underwatt.events import BudgetChanged, Ended, Measured, Noted, Planned, Scored, SettingChanged

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rich.console import Console

    from underwatt.budget import Schedule
    from underwatt.demo.board import Result
    from underwatt.demo.rivals import Choice
    from underwatt.events import Event
    from underwatt.planning.search import SearchResult
    from underwatt.records import Measurement

WINDOW_S = 1.0


@dataclass(frozen=True, slots=True)
class Story:
    """Three ways to train under the same budget."""

    schedule: Schedule
    baseline: Result | None  # none where it cannot keep the budget
    ours: Result
    oracle: Result


def say_plan(out: Console, budget_w: float, plan: SearchResult, baseline: Choice | None) -> None:
    """The choice for a budget, beside the baseline's."""
    best = plan.best
    beside = "cannot keep it" if baseline is None else f"takes {baseline.setting}"
    out.print(
        f"[bold]Plan[/] for {budget_w:g} W, with {len(plan.measurements)} more settings measured: "
        f"[green]{best.measurement.setting}[/]; {best.measurement.power_w:.2f} W measured, "
        f"about {duration(best.time_s)} to the target. [dim]The baseline {beside}.[/]"
    )


def say_training(out: Console, schedule: Schedule, plans: Mapping[float, SearchResult]) -> Callable[[Event], None]:
    """Announce a training; gives what tells of it while it goes on, beside the plans that were made for its watts."""
    first_w, then_w = schedule.levels_w
    out.print(
        f"\n[bold]Train[/] under {first_w:g} W, and under {then_w:g} W from {schedule.begins_s[1]:g} s on; "
        "the settings measured so far are known."
    )
    measured: list[Measurement] = []
    held_w: list[float] = []

    def tell(event: Event) -> None:
        text = ""
        if isinstance(event, BudgetChanged) and event.power_w is not None:
            text = f"[bold]{event.power_w:g} W[/]"
            held_w.append(event.power_w)
        elif isinstance(event, Measured):
            measured.append(event.measurement)
        elif isinstance(event, Planned):
            text = searched(len(measured), event, plans.get(held_w[-1]))
            measured.clear()
        elif isinstance(event, SettingChanged) and event.state != "searching":
            text = f"{event.state} {event.setting} [dim]({escape(event.why)})[/]"
        elif isinstance(event, Scored) and event.target is not None and event.value >= event.target:
            text = f"[green]accuracy {event.value:.1%}[/] after {event.samples:,} samples"
        elif isinstance(event, Ended):
            text = "board put back" if event.restored else "[red]board NOT put back[/]"
        elif isinstance(event, Noted):
            text = f"[{'yellow' if event.level == 'warning' else 'dim'}]{escape(event.text)}[/]"
        if text:
            out.print(f"  {event.at_s:6.1f} s  {text}")

    return tell


def searched(measured: int, found: Planned, planned: SearchResult | None) -> str:
    """What the search of the training itself found, beside the plan for the same watts."""
    if planned is None:
        return ""
    chosen, before = found.chosen, planned.best.measurement.setting
    same = chosen == before
    if same and not measured:
        return ""
    text = f"searching: {measured} setting{'' if measured == 1 else 's'} measured by training steps; "
    if not measured:
        text = "what was measured for the other budget counts too: "
    if same:
        return f"{text}the plan's is still the best"
    sooner = 1 - found.expected.time_s / planned.best.time_s
    if sooner > 0:
        return f"{text}{chosen} is {sooner:.1%} sooner than the plan's {before}"
    room = "the room that a training keeps below its budget"
    return f"{text}{chosen} is the best that fits with {room}, {-sooner:.1%} later than the plan's {before}"


def say_results(out: Console, stories: Sequence[Story]) -> None:
    """One table of everything, and whether the budgets were held."""
    table = plain_table("budget", "", "time", "", "watts", "joules", "samples", "accuracy", "over", "")
    for at in (0, 1):
        table.columns[at].justify = "left"
    for story in stories:
        watts = " → ".join(f"{level_w:g}" for level_w in story.schedule.levels_w) + " W"
        if story.baseline is None:
            table.add_row(watts, "baseline", "cannot keep it")
        else:
            table.add_row(watts, "baseline", *_figures(story.baseline, story.baseline))
        table.add_row("", "Underwatt", *_figures(story.ours, story.baseline), style="bold")
        table.add_row("", "oracle", *_figures(story.oracle, story.baseline))
    out.print()
    out.print(table)
    held = all(_over(story.ours)[1] == 0 for story in stories)
    restored = all(row.restored for story in stories for row in (story.ours, story.baseline) if row is not None)
    computing_s = " and ".join(f"{story.ours.computing_s:.1f}" for story in stories)
    out.print(
        f"Budget held: {'[green]yes[/]' if held else '[yellow]not at every moment, see over[/]'}. "
        f"Board put back as it was: {'[green]yes[/]' if restored else '[red]NO[/]'}. "
        f"[dim]Search, control and simulation computed for {computing_s} s here, for which simulated time stands "
        "still.[/]"
    )


def _figures(row: Result, baseline: Result | None) -> tuple[str, ...]:
    accuracy = over = over_for = ""
    if row.score is not None:
        accuracy = f"{row.score:.1%}{'' if row.reached else ', target not reached'}"
    if row.record is not None:
        share, seconds = _over(row)
        over, over_for = f"{share:.2%}", f"{seconds:.1f} s"
    faster = "" if baseline is None else f"{baseline.time_s / row.time_s:.2f}×"
    spent = f"{row.power_w:.2f}", f"{row.energy_j:,.0f}", f"{row.samples:,.0f}"
    return f"{row.time_s:,.1f} s", faster, *spent, accuracy, over, over_for


def _over(row: Result) -> tuple[float, float]:
    """The share of the joules that were above the budget, and for how many seconds it was clearly exceeded."""
    assert row.record is not None, "trained"
    return row.record.energy_over_j(window_s=WINDOW_S) / row.energy_j, row.record.time_over_s(window_s=WINDOW_S)
