"""``underwatt run``: train a job to its target under a budget, and put everything back."""

from __future__ import annotations

import contextlib
import json
import math
import re
import sys
import time
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.text import Text

from underwatt.budget import Budget, parse_budget, read_schedule
from underwatt.cli.devices import DEVICE_HELP
from underwatt.cli.format import duration
from underwatt.cli.plan import stored_curve
from underwatt.cli.predict import REFERENCE_HELP, load_references
from underwatt.cli.profile import STORE_HELP, measured_line, parse_batch_sizes
from underwatt.control.live import LiveBudget
from underwatt.convergence.curve import targets_of
from underwatt.device.registry import open_device
from underwatt.errors import InputError
from underwatt.events import BudgetChanged, Measured, Noted, Scored, SettingChanged
from underwatt.jobs.command import CommandRate
from underwatt.jobs.runs import LOG_NAME, Run, run_command, run_job
from underwatt.jobs.workloads import JOB_HELP, choose_workload
from underwatt.records import to_json
from underwatt.reports.words import allowed
from underwatt.runlog.log import read_log
from underwatt.store.store import Store, default_store_path
from underwatt.studies.study import newest_rates

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from typing_extensions import Self

    from underwatt.control.pilot import Pilot
    from underwatt.convergence.curve import ConvergenceCurve
    from underwatt.device.base import Device
    from underwatt.events import Event
    from underwatt.jobs.training_loop import Trained
    from underwatt.records import WorkloadInfo


# A run as it is seen on a terminal: one line that moves, and what is worth keeping above it.

PERIOD_S = 0.25
LINE_PERIOD_S = 30.0  # where there is no terminal, and each line stays
COLOURS = {"searching": "cyan", "holding": "green", "correcting": "yellow", "restoring": "dim"}


class Display:
    """Watts against the budget, progress, joules and time left: one line that moves, or lines now and then."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, transient=True, auto_refresh=False)
        self._period_s = PERIOD_S if console.is_terminal else LINE_PERIOD_S
        self._next = time.monotonic() + self._period_s
        self._score: tuple[float, float] | None = None

    def __enter__(self) -> Self:
        with _whoever_looks():
            self._live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        with _whoever_looks():
            self._live.__exit__(*error)

    def listen(self, event: Event) -> None:
        """Something happened."""
        if isinstance(event, Measured):
            self.say(measured_line(event.measurement))
        elif isinstance(event, SettingChanged) and event.state != "searching":
            text = f"{escape(str(event.setting))} [dim]{escape(event.why)}[/]"
            self.say(f"[{COLOURS[event.state]}]{event.state}[/] {text}")
        elif isinstance(event, BudgetChanged) and event.why != "start":
            self.say(f"[bold]budget {allowed(event)}[/] [dim]{event.why}[/]")
        elif isinstance(event, Noted) and event.level == "warning":
            self.say(f"[bold yellow]Warning: {escape(event.text)}[/]")
        elif isinstance(event, Noted):
            self.say(f"[dim]{escape(event.text)}[/]")
        elif isinstance(event, Scored) and event.target is not None:
            self._score = event.value, event.target

    def watch(self, pilot: Pilot) -> None:
        """A step has ended."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + self._period_s
        line = self._line(pilot)
        with _whoever_looks():
            if self._console.is_terminal:
                self._live.update(line, refresh=True)
            else:
                self._console.print(line, soft_wrap=True)

    def say(self, text: str) -> None:
        """Leave a line above the one that moves."""
        with _whoever_looks():
            self._console.print(text, soft_wrap=True)

    def _line(self, pilot: Pilot) -> Text:
        controller = pilot.controller
        power_w, budget_w = pilot.power_w, controller.budget_w
        line = Text.assemble(
            (controller.phase.value, COLOURS[controller.phase.value]),
            "  ",
            (
                f"{power_w:.2f} W" if math.isfinite(power_w) else "? W",
                "bold red" if power_w > 1.02 * budget_w else "bold",
            ),
            f" of {budget_w:g} W" if math.isfinite(budget_w) else "",
            f"  batch {pilot.batch_size}  {pilot.samples:,} samples  ",
            f"{pilot.energy_j / 3600:.3g} Wh  {duration(pilot.elapsed_s)}",
        )
        if self._score is not None:
            line.append(f"  score {self._score[0]:.3g} of {self._score[1]:.3g}")
        left_s = pilot.time_left_s
        if math.isfinite(left_s):
            line.append(f"  about {duration(left_s)} left", "dim")
        return line


def _whoever_looks() -> AbstractContextManager[None]:
    """Nobody may be looking any more: a terminal that was closed ends no training."""
    return contextlib.suppress(OSError)


app = typer.Typer()
_out = Console()
_log = Console(stderr=True)
RUNS = Path("runs")
_STAMP = re.compile(r"-\d{8}-\d{6}(-\d+)?$")


@app.callback()
def _group() -> None:
    """Keep this a group, though it has one command."""


@app.command("run")
def run(
    job: list[str] = typer.Argument(..., metavar="JOB", help=JOB_HELP, show_default=False),
    budget: str = typer.Option("", "--budget", help="10W, 10W peak, or a schedule: 08:00-18:00=15W,else=7W."),
    schedule: Path | None = typer.Option(None, "--schedule", help="CSV with at_s,power_w or time,power_w."),
    energy: str = typer.Option("", "--energy", help="Energy for the whole training, such as 50Wh; it stops there."),
    device: str = typer.Option("", "--device", "-d", help=DEVICE_HELP),
    no_modes: bool = typer.Option(False, "--no-modes", help="Set nothing on the device: batch size and pauses only."),
    batch_sizes: str = typer.Option("", "--batch-sizes", "-b", help="Such as 8,16,32; the job's own by default."),
    out: Path | None = typer.Option(None, "--out", help="The run's folder; a new one in runs/ by default."),
    resume: bool = typer.Option(False, "--resume", help="Go on with the run in --out, or the job's newest one."),
    evaluate_every: int = typer.Option(0, min=0, help="Test the model every so many samples; as in converge if 0."),
    limit: float = typer.Option(0, min=0, help="Give up after so many samples; never if 0."),
    target: float | None = typer.Option(None, help="The score to train to; the job's own by default."),
    reference: list[str] = typer.Option([], "--reference", "-r", help=REFERENCE_HELP),
    lr: float | None = typer.Option(None, help="For a command: what {lr} stands for ..."),
    lr_batch_size: int | None = typer.Option(
        None, min=1, help="... at this batch size (128 by default); scaled by its square root elsewhere."
    ),
    store: Path | None = typer.Option(None, "--store", help=STORE_HELP, show_default=False),
    as_json: bool = typer.Option(False, "--json", help="For programs: how it ended."),
) -> None:
    """Train under a budget: measure what is missing by training steps, hold the budget, restore; Ctrl-C is safe."""
    here = open_device(device)
    live = LiveBudget.from_now(_budget(budget, schedule, energy))
    with Store(store or default_store_path()) as kept:
        display = Display(_log)
        if len(job) == 1 and ":" in job[0]:
            _refuse("A job knows its own learning rate", {"--lr": lr, "--lr-batch-size": lr_batch_size})
            wanted = _Wanted(
                parse_batch_sizes(batch_sizes),
                out,
                resume,
                evaluate_every,
                limit or math.inf,
                target,
                tuple(reference),
                not no_modes,
            )
            with redirect_stdout(sys.stderr):  # what a job prints is not our answer
                trained, folder = _run_job(job[0], here, live, kept, display, wanted)
            _say_end(folder, to_json(trained), as_json)
            return
        if resume:
            raise InputError("A command cannot be resumed from here.", hint="It must keep its own checkpoints.")
        _refuse(
            "A command tests itself and runs to its own end",
            {"--evaluate-every": evaluate_every, "--limit": limit, "--target": target},
        )
        if lr is None or not any("{lr}" in word for word in job):
            _refuse("There is no {lr} in the command", {"--lr": lr})
            _refuse("No --lr is given", {"--lr-batch-size": lr_batch_size})
        rate = CommandRate(lr) if lr_batch_size is None else CommandRate(lr, lr_batch_size)
        workload, _ = choose_workload(job, here, rate=rate)
        sizes = parse_batch_sizes(batch_sizes)
        if not sizes:
            raise InputError("A command does not say which batch sizes to try.", hint="Add for example -b 8,16,32,64.")
        folder = out or _new_folder(workload.info.name)
        _refuse_to_mix(folder)
        profile = kept.profile(kept.profile_id(here.info, workload.info))
        with display:
            wanted_run = Run(
                here,
                live,
                folder,
                kept,
                sizes,
                references=load_references(kept, reference, profile),
                set_modes=not no_modes,
                listener=display.listen,
                watch=display.watch,
            )
            steps = run_command(wanted_run, workload)
    _say_end(folder, {"steps": steps, "folder": str(folder)}, as_json)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What the options say of a job's run."""

    batch_sizes: tuple[int, ...]
    folder: Path | None
    resume: bool
    evaluate_every: int
    limit_samples: float
    target: float | None
    references: tuple[str, ...]
    set_modes: bool


def _run_job(
    spec: str, here: Device, live: LiveBudget, kept: Store, display: Display, wanted: _Wanted
) -> tuple[Trained, Path]:
    from underwatt.jobs import checkpoint
    from underwatt.jobs.identity import job_info
    from underwatt.jobs.job import Effort
    from underwatt.jobs.load import load_job
    from underwatt.studies.proxy_training import usual_effort

    loaded = load_job(spec)
    if wanted.target is not None:
        loaded = replace(loaded, target=wanted.target)
    info = job_info(loaded)
    folder = wanted.folder or (_newest_folder(info.name) if wanted.resume else _new_folder(info.name))
    if not wanted.resume:
        _refuse_to_mix(folder)
    every = wanted.evaluate_every or usual_effort(loaded).evaluate_every_samples
    profile = kept.profile(kept.profile_id(here.info, info))
    run = Run(
        here,
        live,
        folder,
        kept,
        wanted.batch_sizes or tuple(loaded.batch_sizes),
        convergence=_curve(kept, info, loaded.target),
        references=load_references(kept, list(wanted.references), profile),
        set_modes=wanted.set_modes,
        listener=display.listen,
        watch=display.watch,
    )
    simulated = " Time and watts are simulated; the training is real." if here.info.simulated else ""
    what = f"{info.name} on {here.info.name}, budget {live}, target {loaded.target:g}."
    _log.print(
        f"{escape(what)}{simulated} [dim]Folder: {escape(str(folder))}[/]",
        soft_wrap=True,
    )
    with display:
        try:
            return run_job(run, loaded, Effort(every, wanted.limit_samples), resume=wanted.resume), folder
        except (KeyboardInterrupt, SystemExit):
            if checkpoint.exists(folder):
                hint = f"Stopped; the device is as it was. Go on with: underwatt run … --out {folder} --resume"
                display.say(escape(hint))
            raise


def _curve(kept: Store, info: WorkloadInfo, target: float) -> ConvergenceCurve | None:
    """Samples to this target; runs that were made for another one say nothing of it."""
    runs = newest_rates(next((runs for found, runs in kept.convergence() if found.id == info.id), ()))
    made_for = targets_of(runs)
    if made_for and target not in made_for:
        text = f"The convergence runs are for {', '.join(f'{one:g}' for one in made_for)}, the job wants {target:g}"
        _log.print(f"[yellow]{text}: going by samples a second.[/] Run `underwatt converge`.", soft_wrap=True)
        return None
    return stored_curve(kept, info, target=target if made_for else None)


def _refuse(why: str, options: dict[str, object]) -> None:
    """Refuse options that would do nothing."""
    given = [name for name, value in options.items() if value not in (None, 0)]
    if given:
        raise InputError(f"{why}, so {' and '.join(given)} would do nothing.", hint="Leave it out.")


def _budget(budget: str, schedule: Path | None, energy: str) -> Budget:
    joules = parse_budget(energy).energy_j if energy else None
    if energy and joules is None:
        raise InputError(f"--energy {energy} has the wrong unit.", hint="Such as --energy 50Wh.")
    if budget and schedule:
        raise InputError("--budget and --schedule both say the watts.", hint="Give one of the two.")
    if schedule is not None:
        return Budget(schedule=read_schedule(schedule), energy_j=joules)
    if not (budget or energy):
        raise InputError("No budget was given.", hint="Such as --budget 10W.")
    return parse_budget(*(part for part in (budget, energy) if part))


def _new_folder(name: str) -> Path:
    stem = f"{_plain(name)}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = (stem, *(f"{stem}-{number}" for number in range(2, 100)))
    return next((folder for one in names if not (folder := RUNS / one).exists()), RUNS / stem)


def _newest_folder(name: str) -> Path:
    found = [path for path in RUNS.glob("*/checkpoint.pt") if _STAMP.sub("", path.parent.name) == _plain(name)]
    if not found:
        raise InputError(f"There is no run of {name} to go on with.", hint="Name its folder with --out.")
    return max(found, key=lambda path: path.stat().st_mtime).parent


def _plain(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in name)


def _refuse_to_mix(folder: Path) -> None:
    if (folder / LOG_NAME).exists():
        raise InputError(f"There is a run in {folder} already.", hint="Add --resume, or name another folder.")


def _say_end(folder: Path, answer: object, as_json: bool) -> None:
    """How it went, in the words and with the figures of the report."""
    if as_json:
        typer.echo(json.dumps(answer))
        return
    from underwatt.reports.run_figures import happened

    record = read_log(folder / LOG_NAME)
    back = " The device is as it was." if record.end is not None and record.end.restored else ""
    _out.print(f"{escape(happened(record))}{back} [dim]Folder: {escape(str(folder))}[/]", soft_wrap=True)
