"""``underwatt run``, ``budget``, ``watch`` and ``report``: train under a budget; change it; look on; look back."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import time
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.live import Live
from rich.markup import escape
from rich.text import Text
from typer import Argument, Exit, Option, Typer, echo

import underwatt
from underwatt.cli import common
from underwatt.events import BudgetChanged, Ended, Judgement, Measured, Noted, Scored, SettingChanged
from underwatt.jobs.workloads import JOB_HELP
from underwatt.records import to_json
from underwatt.reports.words import allowed, duration

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console
    from typing_extensions import Self

    from underwatt.control.pilot import Pilot
    from underwatt.events import Verdict
    from underwatt.runlog.run_record import RunRecord

RUN: Any = Option(None, "--run", help="Folder of the run; the one under way by default.", show_default=False)

app = Typer()

# A run as it is seen on a terminal: one line that moves, and what is worth keeping above it.

PERIOD_S = 0.25
LINE_PERIOD_S = 30.0  # where there is no terminal, and each line stays
COLOURS = {"searching": "cyan", "holding": "green", "correcting": "yellow", "restoring": "dim"}
CLOSED_TERMINAL = contextlib.suppress(OSError)  # nobody may be looking any more, which ends no training


@contextlib.contextmanager
def outliving_terminal() -> Iterator[None]:
    """Go on when the terminal closes, as where a connection breaks; who wants the run to end sends it SIGTERM."""
    terminals = [number for number in range(3) if os.isatty(number)]

    def forget(*_: object) -> None:
        # Nobody reads what is printed any more, by the job either, and each print would be an error.
        nowhere = os.open(os.devnull, os.O_RDWR)
        for number in terminals:
            os.dup2(nowhere, number)
        os.close(nowhere)

    before = signal.getsignal(signal.SIGHUP)
    if before is signal.SIG_DFL:  # what nohup has ignored stays so
        signal.signal(signal.SIGHUP, forget)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


class Display:
    """Watts against the budget, progress, joules and time left: one line that moves, or lines now and then."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, transient=True, auto_refresh=False)
        self._moves = console.is_terminal and not console.is_dumb_terminal  # on which nothing can move
        self._period_s = PERIOD_S if self._moves else LINE_PERIOD_S
        self._next = time.monotonic() + self._period_s
        self._score: tuple[float, float | None] | None = None
        self.end: Ended | None = None  # as the run told it

    def __enter__(self) -> Self:
        with CLOSED_TERMINAL:
            self._live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        with CLOSED_TERMINAL:
            self._live.__exit__(*error)

    def listen(self, event: object) -> None:
        """Something happened."""
        if isinstance(event, Measured):
            self.say(common.measured_line(event.measurement))
        elif isinstance(event, SettingChanged) and event.state != "searching":
            text = f"{escape(str(event.setting))} [dim]{escape(event.why)}[/]"
            self.say(f"[{COLOURS[event.state]}]{event.state}[/] {text}")
        elif isinstance(event, BudgetChanged) and event.why != "start":
            self.say(f"[bold]budget {allowed(event)}[/] [dim]{event.why}[/]")
        elif isinstance(event, Noted):
            begin = "[bold yellow]Warning: " if event.level == "warning" else "[dim]"
            self.say(f"{begin}{escape(event.text)}[/]")
        elif isinstance(event, Scored):
            self._score = event.value, event.target
        elif isinstance(event, Ended):
            self.end = event

    def watch(self, pilot: Pilot) -> None:
        """A step has ended."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + self._period_s
        line = self._line(pilot)
        with CLOSED_TERMINAL:
            if self._moves:
                self._live.update(line, refresh=True)
            else:
                self._console.print(line, soft_wrap=True)

    def say(self, text: str) -> None:
        """Leave a line above the one that moves."""
        with CLOSED_TERMINAL:
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
            f"{pilot.energy_j / 3600:.3g} Wh  {duration(pilot.elapsed_s, 2)}",
        )
        more = Text()
        if self._score is not None:
            score, target = self._score
            more.append(f"  score {score:.3g}" + (f" of {target:.3g}" if target is not None else ""))
        left_s = pilot.time_left_s
        if math.isfinite(left_s):
            more.append(f"  about {duration(left_s, 2)} left", "dim")
        if self._moves and line.cell_len + more.cell_len > self._console.width:
            line.append("\n")  # rather than in the middle of a figure
        return line.append_text(more)


# Of runs that came to an end, see docs/running.md; 1 and 2 are errors.
OUTCOME_CODES = {"limit": 3, "plateau": 3, "energy spent": 4, "diverged": 5}
NOT_HELD, NOT_KEPT = 6, 7


@app.command("run")
@outliving_terminal()
def run(
    job: list[str] = Argument(..., metavar="JOB", help=JOB_HELP, show_default=False),
    budget: str = Option("", help="10W, 10W peak, or a schedule: 08:00-18:00=15W,else=7W."),
    schedule: Path | None = Option(None, help="CSV with at_s,power_w or time,power_w."),
    energy: str = Option("", help="Energy for the whole training, such as 50Wh; it stops there."),
    deadline: str = Option("", help="Time for the whole training, such as 2h: the thriftiest way that makes it."),
    device: str = common.DEVICE,
    no_modes: bool = Option(False, "--no-modes", help="Set nothing on the device: batch size and pauses only."),
    batch_sizes: str = common.BATCH_SIZES,
    folder: Path | None = Option(None, "--out", help="The run's folder; a new one in runs/ by default."),
    resume: bool = Option(False, "--resume", help="Go on with the run in --out, or the job's newest one."),
    evaluate_every: int = Option(0, min=0, help="Test the model every so many samples; by --test-share if 0."),
    test_share: float | None = Option(None, help="Most of the time that testing may take, with its pauses: 0.05."),
    limit_samples: float = Option(0, "--limit", min=0, help="Give up after so many samples; never if 0."),
    target: float | None = Option(None, help="The score to train to; the job's own by default."),
    references: list[str] = common.REFERENCES,
    lr: float | None = common.LR,
    lr_batch_size: int | None = Option(
        None, min=1, help="... at this batch size (128 by default); scaled by its square root elsewhere."
    ),
    store: Path | None = common.STORE,
    as_json: bool = Option(False, "--json", help="For programs: how it ended."),
) -> None:
    """Train under a budget: measure what is missing by training steps, hold the budget, restore; Ctrl-C is safe."""
    given = common.options_of(locals(), "job", "no_modes", "as_json")
    options = underwatt.RunOptions(**given, set_modes=not no_modes)
    display = Display(common.LOG)
    with redirect_stdout(sys.stderr), display:  # what a job prints is not our answer
        ended = underwatt.run(job, options, listener=display.listen, watch=display.watch)
    log = _to_its_end(ended.record(), display)
    verdict = log.verdict()
    if as_json:
        record = to_json(ended)
        kept_in = {"folder": record.pop("folder"), "verdict": verdict.judgement.value, "late_s": log.late_s}
        common.say_json({**record, **kept_in}, None)
        raise Exit(exit_code(ended.outcome, verdict, ended.not_kept))
    # In the words and with the figures of the report.
    from underwatt.reports.gather_run import happened

    if verdict.judgement is not Judgement.UNBOUNDED:
        common.say(f"[bold {'red' if verdict.held is False else 'green'}]{escape(str(verdict))}[/]")
    back = " The device is as it was." if log.end is not None and log.end.restored else ""
    about = f" {escape(about)}" if (about := log.start.device.about_watts) else ""
    common.say(f"{escape(happened(log))}{back}[dim]{about} Folder: {escape(str(ended.folder))}[/]")
    if (model := ended.model or ended.last_model) is not None:
        which = f"The best model, with a score of {ended.best_score:.4g}, is" if ended.model else "The model is"
        last = f" The last one is {ended.last_model}." if ended.model and ended.last_model else ""
        common.say(f"{escape(f'{which} {model}.{last}')} To load it:")
        common.say(escape(f"model.load_state_dict(torch.load({str(model)!r}))"))
    if ended.not_kept:
        text = f"The model was not kept, neither the best nor the last: {ended.not_kept}."
        common.say(f"[bold red]{escape(text)}[/] Make room, and train again.")
    raise Exit(exit_code(ended.outcome, verdict, ended.not_kept))


def _to_its_end(log: RunRecord, display: Display) -> RunRecord:
    """What a log holds, with the end that the run told where it could not be written: the disk is full, say."""
    told = display.end
    if told is None or (log.end is not None and log.end.at_s > told.at_s - 0.01):
        return log
    display.say("[bold yellow]Warning: The log could not be written to its end; a report will lack what is missing.[/]")
    return replace(log, events=(*log.events, told))


def exit_code(outcome: str, verdict: Verdict, not_kept: str = "") -> int:
    """What a program is told of a run that came to an end: 0 where it reached its target, or its end, and was held."""
    if outcome == "diverged":
        return OUTCOME_CODES[outcome]
    if not_kept:
        return NOT_KEPT
    return NOT_HELD if verdict.held is False else OUTCOME_CODES.get(outcome, 0)


@app.command("budget")
def budget(
    watts: str = Argument(..., help="Watts such as 7W or 7W peak, or a schedule: 08:00-18:00=15W,else=7W."),
    run: Path | None = RUN,
    as_json: bool = common.AS_JSON,
) -> None:
    """Change the budget of the run under way."""
    folder = underwatt.change_budget(watts, run)
    if as_json:
        common.say_json({"folder": str(folder), "budget": watts}, None)
    else:
        meant = "" if "peak" in watts or "mean" in watts else ", peak or mean as before"
        said = (
            f"The run in {escape(str(folder))} is asked to keep [bold]{escape(watts)}[/]{meant}; it says if it cannot."
        )
        common.OUT.print(said, highlight=False, soft_wrap=True)


@app.command("watch")
def watch(
    run: Path | None = RUN,
    port: int = Option(0, min=0, max=65535, help="Port on this machine; a free one by default."),
    as_json: bool = Option(False, "--json", help="Print the address as JSON, for programs."),
) -> None:
    """Watch a run in the browser: watts against the budget, progress, log; change the budget there."""
    server = underwatt.watch(run, port)
    if as_json:
        address = {"url": server.url, "port": server.port, "token": server.token}
        common.say_json({**address, "run": str(server.folder)}, None)
    else:
        echo(server.url)
        common.LOG.print(
            "[dim]Whoever has this address can see the run and change its budget. From another machine, first: "
            f"ssh -L {server.port}:127.0.0.1:{server.port} HOST. Ctrl-C ends the page, not the run.[/]",
            highlight=False,
            soft_wrap=True,
        )
    with contextlib.suppress(OSError):
        os.nice(10)  # the training comes first
    server.run()


@app.command("report")
def report(
    out: Path = Option(Path("report.html"), "--out", "-o", help="The HTML file to write."),
    profile: int = Option(0, "--profile", "-p", help="Number of the profile; the run's or the newest by default."),
    budget: str = Option("", help="Watts, such as 10W; the run's by default."),
    run: Path | None = Option(None, help="Folder of a run; the newest under runs/ by default.", show_default=False),
    target: float | None = Option(None, help="Which target of the convergence runs; the run's, or the newest."),
    references: list[str] = common.REFERENCES,
    store: Path | None = common.STORE,
    as_json: bool = Option(False, "--json", help="Print the figures as data, for programs; writes no file."),
) -> None:
    """Make one self-contained HTML page: what was chosen, why, and how the training went."""
    about = common.options_of(locals(), "out", "as_json") | {"listener": common.say_note}
    if as_json:
        common.say_json(underwatt.report_figures(**about))
    else:
        path = underwatt.report(out, **about)
        echo(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")
