"""``underwatt plan``: the setting that reaches the target soonest within the budget, why, and what others take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import typer
from rich.console import Console
from rich.markup import escape

from underwatt.cli.format import KNOB_HEADINGS, duration, plain_table
from underwatt.cli.predict import REFERENCE_HELP, load_references, newest_profile, offered_modes, profiled_device
from underwatt.cli.profile import STORE_HELP, parse_batch_sizes
from underwatt.converge.curve import fit_convergence, targets_of
from underwatt.converge.runs import newest_rates
from underwatt.device.base import HasStockModes
from underwatt.errors import InputError
from underwatt.plan import Goal, Problem, choose_setting, parse_budget
from underwatt.plan.baselines import Table, default_batch, fastest_throughput, largest_batch, maximum_mode, stock_mode
from underwatt.plan.problem import Outlook
from underwatt.predict import FewShot, SettingArray, fits_memory
from underwatt.profile.store import Store, default_store_path
from underwatt.records import to_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from underwatt.converge.curve import ConvergenceCurve
    from underwatt.plan import Budget, Plan
    from underwatt.records import PowerMode, Profile

app = typer.Typer()
_out = Console()
_log = Console(stderr=True)


@app.callback()
def _group() -> None:
    """Keep this a group, though it has one command."""


@app.command("plan")
def plan(
    budget: str = typer.Option("", "--budget", help="Watts: 10W, 10W peak, or 10W mean over 60s."),
    energy: str = typer.Option("", "--energy", help="Energy for the whole training, such as 50Wh."),
    deadline: str = typer.Option("", "--deadline", help="Time for the whole training, such as 2h."),
    least_energy: bool = typer.Option(
        False, "--least-energy", help="Spend the least energy, instead of the least time."
    ),
    risk: float = typer.Option(0.05, help="Accepted chance that an unmeasured choice exceeds the budget."),
    profile: int = typer.Option(0, "--profile", "-p", help="Number of the profile; the newest by default."),
    convergence: str = typer.Option("", help="Id of a workload's convergence runs; the profile's own by default."),
    target: float | None = typer.Option(None, help="Which target of the convergence runs; the newest by default."),
    batch_sizes: str = typer.Option("", "--batch-sizes", "-b", help="Such as 8,16,32; the measured ones by default."),
    reference: list[str] = typer.Option([], "--reference", "-r", help=REFERENCE_HELP),
    store: Path | None = typer.Option(None, "--store", help=STORE_HELP, show_default=False),
    out: Path | None = typer.Option(None, "--out", help="Also write the plan to this file, to take it elsewhere."),
    as_json: bool = typer.Option(False, "--json", help="For programs."),
) -> None:
    """Choose batch size and power mode together: soonest to the target within the budget."""
    bounds = _budget(budget, energy, deadline)
    with Store(store or default_store_path(), create=False) as kept:
        measured = kept.profile(profile or newest_profile(kept))
        references = load_references(kept, reference, measured)
        curve = _curve(kept, measured, convergence, target)
    if curve is None and (bounds.energy_j or bounds.deadline_s or least_energy):
        raise InputError(
            "Energy and time of a whole training need to be known by how many samples it takes.",
            hint="`underwatt converge JOB` finds that out, at an easier target where none was reached.",
        )
    space = offered_modes(measured)
    sizes = parse_batch_sizes(batch_sizes) or tuple(sorted({m.setting.batch_size for m in measured.usable()}))
    candidates = SettingArray.product(tuple(knob.name for knob in space.knobs), space.matrix(), sizes)
    candidates = candidates.take(np.flatnonzero(fits_memory(candidates, measured.measurements)))
    problem = Problem.of(candidates, bounds, curve, Goal.LEAST_ENERGY if least_energy else Goal.SOONEST)
    prediction = FewShot().fit(measured.usable(), references).predict(candidates)
    chosen = choose_setting(problem, prediction, measurements=measured.measurements, risk=risk)
    others = _others(problem, Outlook.of(problem, prediction, measured.usable()), _stock(measured), risk)
    record = {"per": "target" if curve else "sample", "plan": to_json(chosen), "others": others}
    if out is not None:
        _write(out, record | {"device": to_json(measured.device), "workload": to_json(measured.workload)})
    if as_json:
        typer.echo(json.dumps(record, indent=2))
    else:
        _print(measured, chosen, others, per_sample=curve is None)


def _budget(budget: str, energy: str, deadline: str) -> Budget:
    wanted = {"--budget": (budget, "power_w"), "--energy": (energy, "energy_j"), "--deadline": (deadline, "deadline_s")}
    for option, (text, bound) in wanted.items():
        if text and getattr(parse_budget(text), bound) is None:
            raise InputError(
                f"{option} {text} has the wrong unit.", hint="Such as --budget 10W --energy 50Wh --deadline 2h."
            )
    if not (budget or energy or deadline):
        raise InputError("No budget was given.", hint="Such as --budget 10W.")
    return parse_budget(*(part for part in (budget, energy, deadline) if part))


def _curve(store: Store, measured: Profile, convergence: str, target: float | None) -> ConvergenceCurve | None:
    wanted = convergence or measured.workload.id
    runs = newest_rates(next((runs for workload, runs in store.convergence() if workload.id == wanted), ()))
    if convergence and not runs:
        raise InputError(f"There are no convergence runs {convergence!r}.", hint="`underwatt store ls` lists them.")
    if target is not None and target not in targets_of(runs):
        raise InputError(f"No run was made for target {target:g}.", hint=f"There are: {targets_of(runs)}.")
    if not runs:
        _warn("No convergence runs of this workload are stored")
        return None
    aim = runs[-1].target if target is None else target
    if not any(run.reached and run.target == aim for run in runs):
        _warn(f"No training reached the target {aim:g}")
        return None
    _log.print(f"[dim]Samples to target {aim:g}, from {sum(run.target == aim for run in runs)} trainings.[/]")
    return fit_convergence(runs, aim)


def _warn(what: str) -> None:
    _log.print(
        f"[yellow]{what}, so every batch size is taken to need the same number of samples.[/] "
        "`underwatt converge JOB` makes some."
    )


def _stock(measured: Profile) -> Mapping[str, PowerMode]:
    here = profiled_device(measured)
    return here.stock_modes() if isinstance(here, HasStockModes) else {}


def _others(problem: Problem, outlook: Outlook, stock: Mapping[str, PowerMode], risk: float) -> list[dict[str, Any]]:
    """What simpler rules would choose, by the same predictions."""
    table = Table.predicted(problem, outlook)
    watts = problem.budget.power_w or float(np.inf)
    named: list[tuple[str, int | None]] = [
        ("largest batch, clock", largest_batch(table, watts)),
        ("middle batch, clock", default_batch(table, watts)),
        ("most samples/s", fastest_throughput(table, watts)),
        ("highest clocks", maximum_mode(table)),
    ]
    if (best := stock_mode(table, watts, stock)) is not None:
        named.insert(2, (f"vendor's {best[0]}", best[1]))
    chance = outlook.chance_to_fit(problem.budget)
    return [
        {
            "name": name,
            "setting": to_json(problem.candidates[row]),
            "time_s": float(table.time_s[row]),
            "power_w": float(table.drawn_w[row]),
            "fits": "over" if table.drawn_w[row] > watts else "yes" if chance[row] >= 1 - risk else "risky",
        }
        for name, row in named
        if row is not None
    ]


def _write(path: Path, record: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(record, indent=2), encoding="utf-8")
    except OSError as exc:
        raise InputError(f"The plan cannot be written to {path}: {exc.strerror}.") from exc


def _print(measured: Profile, chosen: Plan, others: list[dict[str, Any]], *, per_sample: bool) -> None:
    best = chosen.chosen
    unit = " ms a sample" if per_sample else ""

    def took(seconds: float) -> str:
        return f"{1e3 * seconds:.3g}" if per_sample else duration(seconds)

    _out.print(f"[bold]{escape(f'{measured.workload.name} on {measured.device.name}')}[/], budget {chosen.budget}")
    _out.print(f"[green bold]{best.setting}[/]", soft_wrap=True)
    _out.print(
        f"  {took(best.time_s.expected)} ({took(best.time_s.low)} to {took(best.time_s.high)}){unit}, "
        f"{best.power_w.expected:.2f} W ({best.power_w.low:.2f} to {best.power_w.high:.2f}), "
        + ("" if per_sample else f"{best.energy_j.expected / 3600:.3g} Wh, ")
        + ("measured" if best.measured else "predicted"),
        soft_wrap=True,
    )
    _out.print(f"  {escape(chosen.reason)}\n", soft_wrap=True)
    knobs = list(best.setting.mode.knobs())
    time_heading = "ms/sample" if per_sample else "time"
    table = plain_table("", time_heading, "", "watts", "", "batch", *(KNOB_HEADINGS[name] for name in knobs))
    near = (("faster neighbour", chosen.faster), ("thriftier neighbour", chosen.thriftier))
    rows: list[tuple[str, Any, float, float, str]] = [
        (name, to_json(n.setting), n.time_s.expected, n.power_w.expected, "yes") for name, n in near if n
    ]
    rows += [(o["name"], o["setting"], o["time_s"], o["power_w"], o["fits"]) for o in others]
    for name, setting, time_s, power_w, fits in rows:
        table.add_row(
            name,
            took(time_s),
            f"{time_s / best.time_s.expected:.2f}×",
            f"{power_w:.2f}",
            "" if fits == "yes" else f"[red]{fits}[/]",
            str(setting["batch_size"]),
            *(f"{setting['mode'][knob]:g}" for knob in knobs),
        )
    _out.print(table)
    _out.print("[dim]The vendor's modes and the highest clocks are taken with the middle batch size.[/]")
    if not best.measured:
        _out.print("[dim]The choice was predicted, not measured: profile it before you rely on the budget.[/]")
