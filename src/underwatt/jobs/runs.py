"""A whole run: what is known is looked up, the rest is measured while training, and the device is put back."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shlex
import time
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from underwatt.budget import whole_budget
from underwatt.control.pilot import Pilot
from underwatt.device.base import SimulatesLoad
from underwatt.errors import InputError, UnderwattError
from underwatt.events import BudgetChanged, Ended, Judgement, Noted, Progressed, Scored
from underwatt.measure.series import smallest_too_large
from underwatt.records import Status
from underwatt.runlog.inbox import Inbox, claimed_folder, register_run
from underwatt.runlog.log import RunLog, read_log
from underwatt.store.store import Saver

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from underwatt.budget import Budget, Schedule
    from underwatt.control.live_budget import LiveBudget
    from underwatt.convergence.curve import SamplesToTarget
    from underwatt.device.base import Device
    from underwatt.events import Event
    from underwatt.jobs.checkpoint import Progress
    from underwatt.jobs.command_run import Kept
    from underwatt.jobs.job import Job
    from underwatt.records import Measurement, Profile, WorkloadInfo
    from underwatt.runlog.run_record import RunRecord, Verdict
    from underwatt.store.store import Store


RUNS = Path("runs")
LOG_NAME = "log.jsonl"
TEST_SHARE = 0.05
LONGEST_NAME = 60
_STAMP = re.compile(r"-\d{8}-\d{6}(-\d+)?$")


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a job is run under a budget; all but the budget may be left out.

    The budget is ``budget``, watts or text such as ``"10W"``, ``"10W peak"`` or ``"08:00-18:00=15W,else=7W"``, or
    ``schedule``, a CSV file of watts over time; ``energy``, such as ``"50Wh"``, at which the training stops; and
    ``deadline``, such as ``"2h"``: the thriftiest way that makes it is taken, and the fastest where none does.
    """

    budget: str | float | Budget | Schedule = ""
    schedule: Path | str | None = None
    energy: str = ""
    deadline: str = ""
    device: str | Device = ""  # an address; the likeliest device here where it is empty
    set_modes: bool = True  # else batch size and pauses alone hold the budget
    batch_sizes: str | Sequence[int] = ()  # the job's own where it is empty
    folder: Path | str | None = None  # for log and checkpoints; a new one in runs/ where it is none
    resume: bool = False  # go on with the run in the folder, or the job's newest one
    evaluate_every: int = 0  # test the model every so many samples; as often as ``test_share`` allows where it is 0
    test_share: float | None = None  # of the time may be spent on testing, pauses included; 5% where it is none
    limit_samples: float = 0  # give up after so many; never where it is 0
    target: float | None = None  # the score to train to; the job's own where it is none
    references: Sequence[str | Profile] = ()  # profiles of other jobs or devices, or their names
    lr: float | None = None  # of a command: what {lr} stands for ...
    lr_batch_size: int | None = None  # ... at this batch size
    store: Path | str | Store | None = None  # where measurements are kept; the usual one where it is none

    def whole_budget(self) -> Budget:
        """What is allowed, as one record."""
        return whole_budget(self.budget, schedule=self.schedule, energy=self.energy, deadline=self.deadline)

    def share_of_tests(self) -> float:
        """The most of the time that testing may take; whoever says how often gets it so."""
        if self.evaluate_every:
            return 1.0
        share = TEST_SHARE if self.test_share is None else self.test_share
        if not 0 < share <= 1:
            raise InputError(f"Testing cannot take {share:g} of the time.", hint="Give a share such as 0.05.")
        return share

    def folder_for(self, name: str) -> Path:
        """Where a run of the job of this name keeps its log; runs are never mixed."""
        folder = Path(self.folder or (_newest_folder(name) if self.resume else _new_folder(name)))
        self.check_folder(folder)
        return folder

    def check_folder(self, folder: Path) -> None:
        """Refuse a folder that holds another run."""
        size = 0
        try:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                size = (folder / LOG_NAME).stat().st_size
        except OSError as exc:  # it may belong to somebody else, or have a name that no disk takes
            text = f"The folder {folder} cannot be used ({exc.strerror})."
            raise InputError(text, hint="Name another one with --out.") from exc
        if size and not self.resume:  # an empty log is of a run that never began
            raise InputError(f"There is a run in {folder} already.", hint="Add --resume, or name another folder.")


_FLAGS = {"set_modes": "no-modes", "limit_samples": "limit", "references": "reference"}


def again(options: RunOptions, words: Sequence[str], folder: Path) -> str:
    """The command line that goes on with a run, as it can be pasted."""
    line = ["underwatt", "run"]
    for one in fields(options):
        value, flag = getattr(options, one.name), f"--{_FLAGS.get(one.name, one.name).replace('_', '-')}"
        if one.name in ("folder", "resume") or value in (one.default, ""):
            continue
        if one.name == "device":
            value = getattr(getattr(value, "info", None), "address", value)
        if value is False:
            line.append(flag)
        elif one.name == "references":
            line += [word for name in value if isinstance(name, str) for word in (flag, name)]
        elif one.name == "batch_sizes" and not isinstance(value, str):
            line += [flag, ",".join(map(str, value))]
        elif isinstance(value, (int, float)):
            line += [flag, f"{value:.12g}{'W' * (one.name == 'budget')}"]
        else:
            line += [flag, str(getattr(value, "path", value))]
    line += ["--out", str(folder), "--resume"]
    return shlex.join([*line, *words] if len(words) == 1 else [*line, "--", *words])


def stopped(folder: Path, line: str) -> str:
    """What there is to say of a run that was stopped: how it kept its budget so far, and the line that goes on."""
    said = [f"Go on with: {line}"] if line else []
    with contextlib.suppress(UnderwattError):  # of a full disk, say
        log = read_log(folder / LOG_NAME)
        said.insert(0, "Stopped; the device is as it was." if log.end is not None and log.end.restored else "Stopped.")
        if (verdict := log.verdict()).judgement is not Judgement.UNBOUNDED:
            said.insert(0, str(verdict))
    return " ".join(said)


def threads_note() -> str | None:
    """What helps a training on the CPU where others keep its cores busy: several threads then wait for each other."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load < cores or "OMP_NUM_THREADS" in os.environ:
        return None
    busy = f"This machine is busy ({load:.1f} processes for {cores} cores)"
    return f"{busy}: with OMP_NUM_THREADS=1 in its environment a training on the CPU may be several times faster."


def _new_folder(name: str) -> Path:
    stem = f"{_plain(name)}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = (stem, *(f"{stem}-{number}" for number in range(2, 100)))
    return next((folder for one in names if not (folder := RUNS / one).exists()), RUNS / stem)


def _newest_folder(name: str) -> Path:
    kept = (path for pattern in ("checkpoint*.pt", "command.json") for path in RUNS.glob(f"*/{pattern}"))
    found = [path for path in kept if _STAMP.sub("", path.parent.name) == _plain(name)]
    if not found:
        raise InputError(f"There is no run of {name} to go on with.", hint="Name its folder with --out.")
    return max(found, key=lambda path: path.stat().st_mtime).parent


def _plain(name: str) -> str:
    """A name as a folder can have it: that of a command may be long, and begin with anything."""
    return re.sub(r"[^\w]+", "-", name).strip("-")[:LONGEST_NAME] or "run"


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a run ended, and what it took.

    ``outcome`` is ``reached``, ``limit``, ``plateau``, ``energy spent``, ``diverged`` where loss or weights were not
    finite, or ``finished`` for what came to its own end: a command, or a job without a target.
    """

    outcome: str
    score: float | None  # the last one; none where the model was not tested
    samples: int
    steps: int
    elapsed_s: float
    energy_j: float
    folder: Path | None = None
    best_score: float | None = None  # of the model in ``model``
    not_kept: str = ""  # why there is no model: neither the best nor the last could be written

    @property
    def model(self) -> Path | None:
        """The weights that scored best, for ``model.load_state_dict(torch.load(result.model))``; none of a command.

        What a command keeps in the folder, under whatever name, is its own.
        """
        return None if self.best_score is None else self._file("model.pt")

    @property
    def last_model(self) -> Path | None:
        """The weights as they were at the end."""
        return self._file("last.pt")

    def _file(self, name: str) -> Path | None:
        path = None if self.folder is None else self.folder / name
        return path if path is not None and path.is_file() else None

    @property
    def scores(self) -> tuple[Scored, ...]:
        """Every test of the model, the earlier parts of a run that was resumed included."""
        return self.record().of(Scored)

    def record(self) -> RunRecord:
        """All that its log holds."""
        if self.folder is None:
            raise InputError("This training kept no log.", hint="Give it a folder.")
        return read_log(self.folder / LOG_NAME)

    @property
    def verdict(self) -> Verdict:
        """How the budget was kept, by the readings in the log."""
        return self.record().verdict()

    @property
    def late_s(self) -> float | None:
        """By how much it ended after its deadline, negative before it; none without one, or where it ended undone."""
        return self.record().late_s


@dataclass(frozen=True)
class Run:
    """A run about to begin: what its options named, opened and looked up, and who wants to be told."""

    options: RunOptions
    device: Device
    live: LiveBudget
    folder: Path
    store: Store
    batch_sizes: Sequence[int]
    convergence: SamplesToTarget | None = None
    references: Sequence[Profile] = ()
    listener: Callable[[Event], None] | None = None
    watch: Callable[[Pilot], None] = field(default=lambda _pilot: None)

    def claim_folder(self, stack: contextlib.ExitStack) -> None:
        """Have the run's folder for this run alone; another one may have begun there since its name was chosen."""
        if self.options.resume and not self.folder.is_dir():
            return  # there is no checkpoint, which is said where it is looked for
        stack.enter_context(claimed_folder(self.folder))
        self.options.check_folder(self.folder)

    def known(self, workload: WorkloadInfo) -> Sequence[Measurement]:
        """What was measured of a workload on this device before."""
        return self.store.measurements(self.store.profile_id(self.device.info, workload), telling=True)

    def pilot(
        self,
        stack: contextlib.ExitStack,
        workload: WorkloadInfo,
        known: Sequence[Measurement] | None = None,
        **more: Any,
    ) -> Pilot:
        """A pilot with a log and an inbox in the run's folder."""
        log, inbox = stack.enter_context(RunLog(self.folder / LOG_NAME)), Inbox(self.folder)
        warning = stack.enter_context(register_run(self.folder, workload.name, self.device.info.name))
        if warning and self.listener:
            self.listener(Noted(level="warning", text=warning))
        return Pilot(
            self.device,
            workload,
            self.batch_sizes,
            self.live,
            convergence=self.convergence,
            known=self.known(workload) if known is None else known,
            references=self.references,
            set_modes=self.options.set_modes,
            saver=Saver(self.store, self.device.info, workload),
            log=log,
            inbox=inbox,
            listener=self.listener,
            **more,
        )


def run_job(run: Run, job: Job) -> RunResult:
    """Train a PyTorch job to its target, in this process, or go on where the folder's run stopped."""
    from underwatt.jobs import checkpoint
    from underwatt.jobs.cost import count_cost
    from underwatt.jobs.data import fillable, train_and_test
    from underwatt.jobs.faults import call_job
    from underwatt.jobs.identity import job_info
    from underwatt.jobs.job import Effort
    from underwatt.jobs.training import Training
    from underwatt.jobs.training_loop import train_under_budget

    workload = job_info(job)
    lengths = [len(part) for part in train_and_test(job)]
    sizes, left_out = fillable(run.batch_sizes, lengths[0])
    every = run.options.evaluate_every or max(lengths[0] // 5, lengths[1], *sizes)  # more often would show little new
    cost = count_cost(job) if isinstance(run.device, SimulatesLoad) else None
    state = progress = None
    taken, found = SoFar(), ""
    with contextlib.ExitStack() as stack:
        run.claim_folder(stack)
        if run.options.resume:
            if not checkpoint.exists(run.folder) and (run.folder / LOG_NAME).is_file():
                taken, found = _taken_in_vain(run.folder, workload)
            else:
                state, progress, found = checkpoint.load(run.folder, workload.id)
                if progress.done:
                    raise InputError(f"The run in {run.folder} has ended: {progress.done}.", hint=checkpoint.AFRESH)
                taken = taken_so_far(run.folder / LOG_NAME, progress)
            run.live.resumes(taken.elapsed_s)
        training = call_job(sizes[0], lambda: Training(job, sizes[0]))
        stack.callback(training.close)
        if state is not None:
            training.restore(state)
        known = run.known(workload)
        if math.isfinite(too_large := smallest_too_large(known)) and training.divide(int(too_large)):
            known = [one for one in known if one.status is not Status.OUT_OF_MEMORY]
        pilot = replace(run, batch_sizes=sizes).pilot(stack, workload, known, cost=cost, elapsed_s=taken.elapsed_s)
        pilot.target = job.target if job.has_target else None
        share, pilot.score = (progress.share, progress.score) if progress else (0.0, None)
        samples, steps = training.samples, training.steps
        pilot.continues(samples=samples, steps=steps, share=share, energy_j=taken.energy_j, verdict=taken.verdict)
        with pilot:
            if progress is not None:
                pilot.note("info", going_on(training.samples, run.live, taken.elapsed_s, taken.posted))
            for text in filter(None, (found, taken.warning, left_out)):
                pilot.note("warning", text)
            effort = Effort(every, run.options.limit_samples or job.limit_samples)
            return train_under_budget(
                pilot,
                training,
                effort,
                run.folder,
                test_share=run.options.share_of_tests(),
                progress=progress,
                watch=lambda: run.watch(pilot),
            )


def _taken_in_vain(folder: Path, workload: WorkloadInfo) -> tuple[SoFar, str]:
    """Of a run that left a log and no checkpoint, as where it was killed at once: what it took, and what to say.

    Its time and joules count on. What would be overwritten, a log that cannot be read and weights, is put aside.
    """
    from underwatt.jobs import checkpoint

    log, said = folder / LOG_NAME, f"There is no checkpoint in {folder}: training begins anew."
    if not log.stat().st_size:
        return SoFar(), said
    try:
        record = read_log(log)
    except InputError as exc:
        log.replace(aside := log.with_name("log.damaged.jsonl"))
        return SoFar(), f"{said} {exc.message} It is kept as {aside.name}."
    if record.start.workload.id != workload.id:
        hint = "Undo the change, or start a run without --resume, in a folder of its own."
        raise InputError(f"The run in {folder} is of another job, or of this one before it was changed.", hint=hint)
    for path in (folder / checkpoint.BEST, folder / checkpoint.LAST):
        if path.is_file():
            if record.end is not None and record.end.outcome == "reached":
                raise InputError(f"The run in {folder} has ended: reached.", hint=checkpoint.AFRESH)
            path.replace(aside := path.with_name(f"{path.stem}.before{path.suffix}"))
            said += f" What it had trained is kept as {aside.name}."
    taken = taken_so_far(log)
    joules = f"{taken.energy_j:.3g} J that were taken before count on."
    return taken, f"{said} The {taken.elapsed_s:.3g} s and {joules}"


@dataclass(frozen=True, slots=True)
class SoFar:
    """What a run has taken before it is gone on with."""

    elapsed_s: float = 0.0
    energy_j: float = 0.0
    samples: int = 0
    steps: int = 0
    share: float = 0.0  # of the way to the target
    verdict: Verdict | None = None
    posted: BudgetChanged | None = None  # the budget that it was given on its way and kept to its end
    warning: str | None = None  # where its log is damaged


def taken_so_far(log: Path, progress: Progress | Kept | None = None) -> SoFar:
    """Also since the last checkpoint, if there is one: what was lost was drawn all the same."""
    elapsed_s, energy_j = (progress.elapsed_s, progress.energy_j) if progress else (0.0, 0.0)
    try:
        record = read_log(log)
    except InputError as exc:  # lost or damaged: the checkpoint is what matters
        warning = f"{exc.message} Time and energy count from the checkpoint; what was drawn after it does not."
        return SoFar(elapsed_s, energy_j, warning=warning)
    told = [event for event in record.events if isinstance(event, (Progressed, Ended))]
    counted = [event.energy_j for event in told if math.isfinite(event.energy_j)]
    shares = [event.share for event in record.of(Progressed) if event.share is not None]
    last_s = max([event.at_s for event in record.events] + record.power.at_s[-1:].tolist())
    budgets = record.of(BudgetChanged)
    posted = budgets[-1] if budgets and budgets[-1].why == "changed" else None
    # Later than all that was read before, and never 0 seconds, which would be taken for a run that begins.
    return SoFar(
        max(elapsed_s, last_s) + 1e-3,
        max([energy_j, *counted[-1:]]),
        max((event.samples for event in told), default=0),
        max((event.steps for event in told), default=0),
        max(shares, default=0.0),
        record.said,
        posted,
        record.warning,
    )


def going_on(samples: int, live: LiveBudget, elapsed_s: float, posted: BudgetChanged | None) -> str:
    """What is said of a run that is gone on with."""
    text = f"Going on at {samples:,} samples, with a budget of {live}."
    meant = (live.power_w(elapsed_s), live.budget.watts.value, live.budget.window_s)
    if posted is None or (posted.power_w, posted.watts, posted.window_s) == meant:
        return text
    return f"{text} The {posted.power_w:g} W that it had been given on its way hold no more."
