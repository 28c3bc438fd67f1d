"""``underwatt predict`` and ``plan``: settings that were not measured, and the one to train with."""

from __future__ import annotations

import math
import sys
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from typer import Argument, Option, Typer

import underwatt
from underwatt.cli import common
from underwatt.errors import InputError
from underwatt.jobs.workloads import JOB_HELP
from underwatt.records import to_json
from underwatt.reports.words import duration, energy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from underwatt.api.plan import DevicePlan, ExpectedSetting, Forecast
    from underwatt.rivals.compare import Alternative

PREDICTOR: Any = Option(
    "underwatt", "--predictor", metavar="NAME", help="Who predicts: underwatt, powertrain, or another package's own."
)
MOST_STRETCHES = 8  # of a course: what a person reads
VERDICTS = {"yes": "", "risky": "[yellow]over?[/]", "over": "[red]over[/]"}

app = Typer()


@app.command("predict")
def predict(
    profile: int = Argument(0, help="Number of the profile, from `underwatt store ls`; the newest by default."),
    modes: str = Option(
        "", "--modes", "-m", help="grid, a number of modes, or a CSV file; the best of all modes by default."
    ),
    batch_sizes: str = Option("", "--batch-sizes", "-b", help="Such as 8,16,32; the measured ones by default."),
    references: list[str] = common.REFERENCES,
    predictor: str = PREDICTOR,
    validate: bool = Option(False, "--validate", help="Hold measured settings back, predict them, and compare."),
    store: Path | None = common.STORE,
    as_json: bool = common.AS_JSON,
) -> None:
    """Predict step time and power of settings from those that were measured."""
    options = common.options_of(locals(), "validate", "as_json")
    if validate:
        measured, checked = underwatt.check_forecast(profile, references=references, predictor=predictor, store=store)
        if as_json:
            common.say_json(checked)
        else:
            title = f"{measured.workload.name} on {measured.device.name}"
            common.OUT.print(f"[bold]{escape(title)}[/]: {checked.verdict}")
            common.OUT.print(f"[dim]Worst: {checked.worst}, time off by {checked.worst_error:.0f}%.[/]")
        return
    found = underwatt.forecast(**options, listener=common.say_note)
    if as_json:
        whose = to_json(found.measured.device) | {"workload": found.measured.workload.name}
        common.say_json({"profile": whose, "predictions": [_forecast_record(one) for one in found.settings]})
    else:
        _show_forecast(found, everything=bool(modes))


def _forecast_record(one: ExpectedSetting) -> dict[str, Any]:
    figures: dict[str, Any] = {**to_json(one.setting.mode), "batch_size": one.setting.batch_size}
    for name, value in (("step_s", one.step_s), ("power_w", one.power_w)):
        figures |= {name: value.expected, f"{name}_low90": value.low, f"{name}_high90": value.high}
    return figures | {"samples_per_s": one.samples_per_s}


def _show_forecast(found: Forecast, *, everything: bool) -> None:
    measured = found.measured
    what = f"{found.predicted:,} settings predicted" + ("" if everything else ", the best at each power shown")
    title = escape(f"{measured.workload.name} on {measured.device.name}")
    common.say(f"[bold]{title}[/], from {len(measured.usable())} measured: {what}.")
    knobs = list(measured.usable()[0].setting.mode.knobs())
    headings = [common.KNOB_HEADINGS[name] for name in knobs]
    table = common.plain_table("batch", *headings, "samples/s", "step ms", "", "watts", "")
    for one in found.settings:
        mode = one.setting.mode.knobs()
        table.add_row(
            str(one.setting.batch_size),
            *(f"{mode[name]:g}" for name in knobs),
            f"{one.samples_per_s:.1f}",
            f"{one.step_s.expected * 1e3:.4g}",
            common.within((one.step_s.high - one.step_s.low) / 2, one.step_s.expected),
            f"{one.power_w.expected:.4g}",
            common.within((one.power_w.high - one.power_w.low) / 2, one.power_w.expected),
        )
    common.OUT.print(table)
    common.OUT.print("[dim]± is half a 90% interval. `underwatt predict --validate` says whether to trust this.[/]")


@app.command("plan")
def plan(
    job: list[str] = Argument(None, metavar="[JOB]", help=f"With --measure: {JOB_HELP}.", show_default=False),
    budget: str = Option("", help="10W, 10W peak, 10W mean over 60s, or a schedule: 08:00-18:00=15W,else=7W."),
    schedule: Path | None = Option(None, help="CSV with at_s,power_w or time,power_w."),
    start: str = Option("", help="With a schedule: the time of day at which the training starts; now by default."),
    energy: str = Option("", help="Energy for the whole training, such as 50Wh."),
    deadline: str = Option("", help="Time for the whole training, such as 2h."),
    least_energy: bool = Option(False, "--least-energy", help="Spend the least energy, instead of the least time."),
    risk: float = Option(0.05, help="Accepted chance that an unmeasured choice exceeds the budget."),
    measure: bool = Option(
        False, "--measure", help="Measure JOB as you go, what is worth it; the choice was then measured to fit."
    ),
    device: str = Option("", "--device", "-d", help=f"With --measure. {common.DEVICE_HELP}"),
    lr: float | None = Option(None, help="With --measure of a command: what {lr} stands for ..."),
    lr_batch_size: int = common.LR_BATCH_SIZE,
    profile: int = Option(0, "--profile", "-p", help="Number of the profile; the newest by default."),
    convergence: str = Option("", help="Id of a workload's convergence runs; the profile's own by default."),
    target: float | None = Option(None, help="Which target of the convergence runs; the newest by default."),
    batch_sizes: str = Option(
        "", "--batch-sizes", "-b", help="Such as 8,16,32; the measured ones, or the job's own, by default."
    ),
    references: list[str] = common.REFERENCES,
    predictor: str = PREDICTOR,
    powertrain: bool = Option(
        False, "--powertrain", help="Also show what PowerTrain would choose; takes seconds, and needs PyTorch."
    ),
    store: Path | None = common.STORE,
    out: Path | None = Option(None, help="Also write the plan to this file, to take it elsewhere."),
    keep: bool = Option(False, "--keep", help="Also keep the plan in the store."),
    as_json: bool = common.AS_JSON,
) -> None:
    """Choose batch size and power mode together: soonest to the target within the budget."""
    options = common.options_of(locals(), "measure", "least_energy", "out", "keep", "as_json")
    options |= {"goal": "least energy" if least_energy else "soonest", "job": (job or []) if measure else None}
    if measure and profile:
        raise InputError("--profile names what was measured, and --measure measures.", hint="Give one of the two.")
    if not measure and (job or device):
        raise InputError("A job or a device is named only to be measured.", hint="Add --measure.")
    # What a job prints is not our answer.
    saying = common.interruptible("what was measured is") if measure else nullcontext()
    with redirect_stdout(sys.stderr), saying:
        made = underwatt.plan(**options, listener=_say_search)
    if out is not None:
        made.save(out)
    if keep:
        with underwatt.Store(store) as kept:
            number, _ = kept.keep_plan(made.record)
        common.LOG.print(f"[dim]Kept as plan:{number}.[/]")
    if as_json:
        common.say_json(made.record)
    else:
        _show_plan(made, risk)


def _say_search(event: object) -> None:
    from underwatt.api.plan import SearchStep

    common.say_note(event)
    if isinstance(event, SearchStep):
        common.LOG.print(f"{common.measured_line(event.measurement)} [dim]{escape(event.why)}[/]", soft_wrap=True)


def _show_plan(plan: DevicePlan, risk: float) -> None:
    """The choice, why, and what others would take; without convergence, times are those of a useful sample."""
    from underwatt.rivals.compare import as_alternative, cannot_keep, joined

    best, per_sample, others = plan.chosen, plan.per_sample, plan.others
    time, low, high = (_took(s, per_sample) for s in (best.time_s.expected, best.time_s.low, best.time_s.high))
    energy, least, most = (f"{j / 3600:.3g}" for j in (best.energy_j.expected, best.energy_j.low, best.energy_j.high))
    scheduled = plan.course is not None
    about = f". [dim]{escape(plan.about_watts)}[/]" if plan.about_watts else ""
    said = plan.record["schedule"] if scheduled else plan.budget
    common.say(f"[bold]{escape(plan.title)}[/], budget {said}{about}")
    if scheduled:
        common.say(f"At its highest level, {plan.budget}, if that lasted:")
    common.say(f"[green bold]{best.setting}[/]")
    common.say(
        f"  {time} ({low} to {high}){' ms a useful sample' if per_sample else ''}, "
        f"{best.power_w.expected:.2f} W ({best.power_w.low:.2f} to {best.power_w.high:.2f}), "
        + ("" if per_sample else f"{energy} Wh ({least} to {most}), ")
        + ("measured" if best.measured else "predicted")
    )
    common.say(f"  {escape(plan.reason)}")
    if plan.unsure is not None:
        mean, high = (f"{100 * (ratio - 1):.0f}%" for ratio in (plan.unsure.expected, plan.unsure.high))
        common.say(
            f"  [yellow]Not knowing how this training learns costs {mean} of the time on average, and nine times in "
            f"ten less than {high}; `underwatt converge JOB` would make it sure.[/]"
        )
    common.say("")
    if plan.course is not None:
        _show_course(plan)
    near = (("faster neighbour", plan.faster), ("thriftier neighbour", plan.thriftier))
    neighbours = [as_alternative(name, expected, plan.budget, risk) for name, expected in near if expected is not None]
    rows = joined([*neighbours, *others])
    common.OUT.print(_plan_table(plan, rows))
    if lacking := cannot_keep(others):
        common.say(lacking)
    common.OUT.print("[dim]* measured, the others predicted. Vendor's and maximum mode: with the middle batch size.[/]")
    if any(row.fits == "risky" for row in rows):
        over = "over? may exceed the budget: what is expected keeps it, the end of its interval does not."
        common.OUT.print(f"[dim]{over}[/]")
    if any(other.known == "truth" for other in others):
        common.say(
            "[dim]The oracle knows what only a simulation or a recorded table can tell; nothing else does. It is "
            "judged by that truth, all else by what was measured: a lucky reading may look faster.[/]"
        )
    if not best.measured:
        common.OUT.print("[dim]The choice was predicted, not measured: profile it before you rely on the budget.[/]")


def _show_course(plan: DevicePlan) -> None:
    """What is done at each level of a schedule, when which of them holds, and when the target is reached."""
    course, per_sample = plan.course, plan.per_sample
    assert course is not None
    table = common.plain_table("level", "watts", "ms/sample" if per_sample else "alone", "setting")
    table.columns[-1].justify, table.columns[-1].no_wrap = "left", False
    for level in reversed(course.levels):
        chosen = level.chosen
        if chosen is None:
            table.add_row(f"{level.power_w:g} W", "", "", "[yellow]nothing keeps it: training waits[/]")
            continue
        known = "*" if chosen.measured else " "
        time = _took(chosen.time_s.expected, per_sample)
        table.add_row(f"{level.power_w:g} W", f"{chosen.power_w.expected:.2f}{known}", time, str(chosen.setting))
    common.OUT.print(table)
    for stretch in course.stretches[:MOST_STRETCHES]:
        when = f"{duration(stretch.begin_s, 3)} to {duration(stretch.end_s, 3)}"
        common.say(f"  {when}: {stretch.power_w:g} W, {stretch.setting or 'waiting'}")
    if len(course.stretches) > MOST_STRETCHES:
        common.say(f"  [dim]… and {len(course.stretches) - MOST_STRETCHES} more (--json has all of them).[/]")
    if course.finish_s is not None and course.energy_j is not None:
        begins = f", begun at {course.starts_at}" if course.starts_at else ""
        common.say(
            f"[green bold]The target is expected after {duration(course.finish_s)}[/]{begins}, "
            f"with {energy(course.energy_j)}.\n"
        )


def _plan_table(plan: DevicePlan, others: Sequence[Alternative]) -> Table:
    best, per_sample = plan.chosen, plan.per_sample
    knobs = list(best.setting.mode.knobs())
    headings = [common.KNOB_HEADINGS[name] for name in knobs]
    table = common.plain_table("", "ms/sample" if per_sample else "time", "", "watts", "", "batch", *headings)
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
    if per_sample and math.isfinite(seconds):
        return f"{1e3 * seconds:.3g}"
    return duration(seconds, 2)
