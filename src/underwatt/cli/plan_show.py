"""How a plan looks on a terminal: the choice, why, and what others would take."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from underwatt.cli.format import KNOB_HEADINGS, duration, plain_table
from underwatt.plan.compare import as_alternative, cannot_keep, joined, too_few_for_published

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from underwatt.plan import Plan
    from underwatt.plan.compare import Alternative

VERDICTS = {"yes": "", "risky": "[yellow]over?[/]", "over": "[red]over[/]"}

_out = Console()


def show_plan(title: str, plan: Plan, others: Sequence[Alternative], *, risk: float, per_sample: bool) -> None:
    """Print a plan and what it is compared with; without convergence, times are milliseconds of one sample."""
    best = plan.chosen
    time, low, high = (_took(s, per_sample) for s in (best.time_s.expected, best.time_s.low, best.time_s.high))
    energy, least, most = (f"{j / 3600:.3g}" for j in (best.energy_j.expected, best.energy_j.low, best.energy_j.high))
    _out.print(f"[bold]{escape(title)}[/], budget {plan.budget}", soft_wrap=True)
    _out.print(f"[green bold]{best.setting}[/]", soft_wrap=True)
    _out.print(
        f"  {time} ({low} to {high}){' ms a sample' if per_sample else ''}, "
        f"{best.power_w.expected:.2f} W ({best.power_w.low:.2f} to {best.power_w.high:.2f}), "
        + ("" if per_sample else f"{energy} Wh ({least} to {most}), ")
        + ("measured" if best.measured else "predicted"),
        soft_wrap=True,
    )
    _out.print(f"  {escape(plan.reason)}\n", soft_wrap=True)
    near = (("faster neighbour", plan.faster), ("thriftier neighbour", plan.thriftier))
    neighbours = [as_alternative(name, expected, plan.budget, risk) for name, expected in near if expected is not None]
    rows = joined([*neighbours, *others])
    _out.print(_table(plan, rows, per_sample=per_sample))
    for lacking in filter(None, (cannot_keep(others), too_few_for_published(others))):
        _out.print(lacking, soft_wrap=True)
    _out.print("[dim]* measured, the others predicted. Vendor's and maximum mode: with the middle batch size.[/]")
    if any(row.fits == "risky" for row in rows):
        _out.print("[dim]over? may exceed the budget: what is expected keeps it, the end of its interval does not.[/]")
    if any(other.known == "truth" for other in others):
        _out.print(
            "[dim]The oracle knows what only a simulation or a recorded table can tell; nothing else does. It is "
            "judged by that truth, all else by what was measured: a lucky reading may look faster.[/]",
            soft_wrap=True,
        )
    if not best.measured:
        _out.print("[dim]The choice was predicted, not measured: profile it before you rely on the budget.[/]")


def _table(plan: Plan, others: Sequence[Alternative], *, per_sample: bool) -> Table:
    best = plan.chosen
    knobs = list(best.setting.mode.knobs())
    time_heading = "ms/sample" if per_sample else "time"
    table = plain_table("", time_heading, "", "watts", "", "batch", *(KNOB_HEADINGS[name] for name in knobs))
    table.columns[0].no_wrap, table.columns[0].justify = False, "left"
    for other in others:
        mode = other.setting.mode.knobs()
        ratio = other.time_s / best.time_s.expected
        table.add_row(
            escape(other.name),
            _took(other.time_s, per_sample),
            f"{ratio:.2f}×" if math.isfinite(ratio) else "",
            f"{other.power_w:.2f}{'*' if other.known == 'measured' else ' '}",
            VERDICTS[other.fits],
            str(other.setting.batch_size),
            *(f"{mode[knob]:g}" for knob in knobs),
        )
    return table


def _took(seconds: float, per_sample: bool) -> str:
    if not math.isfinite(seconds):
        return "never"
    return f"{1e3 * seconds:.3g}" if per_sample else duration(seconds)
