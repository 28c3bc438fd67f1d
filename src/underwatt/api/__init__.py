"""What Python users call, and all that the commands call: profile, converge, run and report; the rest is in ``decide``.

Each function takes keyword options with defaults, and gives a record. A ``listener`` is told of what happens on the
way, as records, so that ``listener=print`` shows it; without one, notes go to the logger ``underwatt``. A ``job`` is a
``Job``, an address such as ``"train.py:job"``, or the words of a command with ``{batch_size}`` in it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from underwatt.api import lookup
from underwatt.api.lookup import log_notes
from underwatt.budget import Budget
from underwatt.control.live_budget import LiveBudget
from underwatt.convergence.curve import fit_convergence
from underwatt.convergence.prior import RelativeCurve
from underwatt.device.base import HasStockModes, permitted_space
from underwatt.errors import InputError, PredictError, StepError, UnderwattError
from underwatt.events import Noted
from underwatt.jobs.command import Limits
from underwatt.jobs.command_run import KEPT_NAME, run_command
from underwatt.jobs.identity import job_info
from underwatt.jobs.job import Job, load_job
from underwatt.jobs.runs import Run, RunOptions, RunResult, again, run_job, stopped, threads_note
from underwatt.measure.measurement import MeasureOptions
from underwatt.measure.series import expected_s, ordered_settings, run_profile, to_measure
from underwatt.records import Profile
from underwatt.studies.study import (
    RunSpec,
    StudyProgress,
    StudySettings,
    data_note,
    newest_rates,
    other_trainings,
    spread_batch_sizes,
    stored_runs,
    study,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from underwatt.api.lookup import AnyJob, AnyStore, Listener
    from underwatt.control.pilot import Pilot
    from underwatt.convergence.curve import ConvergenceCurve
    from underwatt.convergence.prior import Evidence
    from underwatt.device.base import Device
    from underwatt.jobs.job import Effort
    from underwatt.measure.series import ProfileOutcome
    from underwatt.predict.base import SettingArray
    from underwatt.records import ConvergenceRun, DeviceInfo, Measurement, PowerMode, WorkloadInfo
    from underwatt.reports.report_records import Report
    from underwatt.runlog.run_record import RunRecord
    from underwatt.store.store import Store
    from underwatt.studies.proxy_training import NoiseScale


# profile: step time and power of some settings.


@dataclass(frozen=True, slots=True)
class ProfileProgress:
    """Where profiling stands: ``done`` of ``to_measure``, of so many settings; ``last`` was just measured, if any."""

    workload: WorkloadInfo
    device: DeviceInfo
    settings: int
    to_measure: int
    done: int
    left_s: float
    last: Measurement | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredProfile(Profile):
    """A profile with its number in the store, and what of it was measured now."""

    number: int
    now: ProfileOutcome


def profile(
    job: AnyJob,
    *,
    device: str | Device = "",
    batch_sizes: str | Sequence[int] = (),
    settings: int = 12,
    modes: str | Sequence[PowerMode] = "",
    precision: float = 0.01,
    limit_s: float = 60.0,
    lr: float | None = None,
    lr_batch_size: int = 128,
    first_beat_s: float = 300.0,
    beat_s: float = 120.0,
    store: AnyStore = None,
    listener: Listener = log_notes,
) -> MeasuredProfile:
    """Measure step time and power of a job at so many ``settings``, spread over modes and batch sizes.

    With ``modes`` (``"grid"``, a number as text, a CSV file, or modes) every batch size is measured at each of them
    instead. Every answer is stored at once, and what the store holds is not measured again: stopped and called again,
    it goes on. ``precision`` and ``limit_s`` say when a setting was measured well enough. For a command, ``lr`` at
    ``lr_batch_size`` fills ``{lr}``, and one that reports no step within ``first_beat_s``, or ``beat_s`` later on, has
    failed. The listener gets ``ProfileProgress``.
    """
    here = lookup.as_device(device)
    limits = Limits(first_beat_s=first_beat_s, beat_s=beat_s)
    workload, suggested = lookup.job_workload(job, here, lr, lr_batch_size, limits)
    sizes = lookup.some_batch_sizes(batch_sizes, suggested)
    space = permitted_space(here)
    if modes:
        wanted = ordered_settings(lookup.chosen_modes(modes, space), sizes)
    else:
        wanted = lookup.spread_settings(space, sizes, settings)
    options = MeasureOptions(precision=precision, limit_s=limit_s)
    with lookup.opened(store) as kept:
        number = kept.profile_id(here.info, workload.info)
        seen = list(kept.measurements(number))
        left = len(to_measure(wanted, seen))
        state = ProfileProgress(workload.info, here.info, len(wanted), left, 0, expected_s(left, seen))
        listener(state)

        def watch(found: Measurement, done: int, total: int) -> None:
            seen.append(found)
            listener(replace(state, done=done, left_s=expected_s(total - done, seen), last=found))

        with lookup.session(here, listener) as session:
            outcome = run_profile(session, workload, wanted, kept, options=options, watch=watch)
        return MeasuredProfile(here.info, workload.info, kept.measurements(number), number=number, now=outcome)


# converge: samples to the target by batch size.


@dataclass(frozen=True)
class ConvergeResult:
    """What a convergence study found; ``runs`` are those that count, made before or now."""

    target: float
    batch_sizes: tuple[int, ...]  # those that may be chosen
    runs: tuple[ConvergenceRun, ...]
    failures: tuple[tuple[RunSpec, UnderwattError], ...] = ()
    noise_scale: NoiseScale | None = None

    @cached_property
    def curve(self) -> ConvergenceCurve:
        """Samples to the target by batch size; raises ``InputError`` where no run reached it."""
        return fit_convergence(self.runs, self.target)

    def table(self) -> list[dict[str, float]]:
        """Samples with 90% intervals at each batch size, and how many trainings there were."""
        sizes = sorted({*self.batch_sizes, *(run.batch_size for run in self.runs)})
        mean, _ = self.curve.predict(sizes)
        low, high = self.curve.interval(sizes)
        return [
            {
                "batch_size": size,
                "trained": sum(run.batch_size == size and run.target == self.target for run in self.runs),
                "samples": float(np.exp(middle)),
                "samples_low90": float(bottom),
                "samples_high90": float(top),
            }
            for size, middle, bottom, top in zip(sizes, mean, low, high, strict=True)
        ]


def converge(
    job: Job | str,
    *,
    batch_sizes: str | Sequence[int] = (),
    points: int = 4,
    seeds: int = 3,
    passes: float = 30,
    target: float | None = None,
    noise_scale: bool = False,
    workers: int = 0,
    store: AnyStore = None,
    listener: Listener = log_notes,
) -> ConvergeResult:
    """Train on proxy data until the target, at ``points`` of the job's batch sizes, ``seeds`` times each.

    A run is given up after so many ``passes`` over the data. Runs are stored as they are made, and not made again.
    ``target`` is a score to train to in place of the job's own. Without it, where the first run does not reach the
    job's, all are made for one that it did reach, which is said: only how batch sizes compare counts.
    ``noise_scale`` also measures the gradient noise scale, by one more training. ``workers`` trainings go on at once,
    one a core or GPU by default; a ``Job`` without an address is trained in this process, one after the other. The
    listener gets ``StudyProgress``.
    """
    from underwatt.jobs.data import fillable, train_and_test
    from underwatt.jobs.training import device_of
    from underwatt.studies.proxy_training import noise_scale_on_the_way, usual_effort

    address, loaded = (job, load_job(job)) if isinstance(job, str) else ("", job)
    if not loaded.has_target:
        raise InputError("The job has no target to train to.", hint="Give it one: Job(…, target=0.9).")
    info = job_info(loaded)
    if note := data_note(loaded):
        listener(Noted(level="warning", text=note))
    if (busy := threads_note()) and device_of(loaded).type == "cpu":
        listener(Noted(level="info", text=busy))
    asked = lookup.as_batch_sizes(batch_sizes)
    sizes, left_out = fillable(asked or loaded.batch_sizes, len(train_and_test(loaded, proxy=True)[0]))
    if left_out:
        listener(Noted(level="warning", text=left_out))
    sizes = sizes if asked else spread_batch_sizes(sizes, points)
    effort = usual_effort(loaded, passes)
    with lookup.opened(store) as kept:
        done = list(next((runs for _, runs in kept.convergence(info.id)), ()))

        def keep(run: ConvergenceRun) -> None:
            kept.add_convergence(info, [run])
            done.append(run)

        if target is None:
            target = _reachable_target(loaded, sorted(sizes)[(len(sizes) - 1) // 2], effort, done, keep, listener)
        effort = replace(effort, target=target)
        settings = StudySettings(sizes, tuple(range(seeds)), effort, (workers or None) if address else 1)
        made = study(loaded, address, settings, done=tuple(done), on_run=keep, on_progress=listener)
    runs = newest_rates(done)
    aimed = replace(loaded, target=target)
    scale = noise_scale_on_the_way(aimed, runs) if noise_scale else None
    return ConvergeResult(target, tuple(loaded.batch_sizes), runs, made.failures, scale)


def _reachable_target(
    job: Job,
    batch_size: int,
    effort: Effort,
    done: Sequence[ConvergenceRun],
    keep: Callable[[ConvergenceRun], None],
    listener: Listener,
) -> float:
    """The job's target; or where its first run does not get there, one that it does reach."""
    from underwatt.studies.proxy_training import train_to_target, within_reach

    runs = newest_rates(done)
    own = [run for run in runs if run.target == job.target]
    if any(run.reached for run in own):
        return job.target
    if any(run.given_up_samples >= effort.limit_samples for run in own):
        others = [run.target for run in runs if run.target != job.target and run.reached]
        if others:
            return others[-1]
    spec = RunSpec(batch_size, 0)

    def scored(samples: int, score: float) -> None:
        listener(StudyProgress(0, 1, 1, None, spec, samples, score))

    try:
        end = train_to_target(job, batch_size, spec.seed, effort, on_score=scored)
    except UnderwattError:  # which the study comes upon too, and reports
        return job.target
    keep(end.run)
    listener(StudyProgress(1, 1, 0, None, spec, end.run.samples, ended=end.ended))
    if end.ended != "limit" or (found := within_reach(job, end)) is None:
        return job.target
    target, run = found
    keep(run)
    text = f"The first training, at {spec}, does not reach {job.target:g} in {end.trained_samples:,} samples."
    listener(Noted(level="warning", text=f"{text} Batch sizes are compared at {target:g}, which it did reach."))
    return target


# run: a training under a budget.


def run(
    job: AnyJob,
    options: RunOptions | None = None,
    *,
    listener: Listener = log_notes,
    watch: Callable[[Pilot], None] = lambda _pilot: None,
    **more: Any,
) -> RunResult:
    """Train a job to its target, or a command to its own end, under a budget; then everything is put back.

    What is not known yet is measured by training steps. ``more`` are the options of ``RunOptions``, such as
    ``budget="10W"``, ``device="virtual:nano"`` or ``resume=True``. The listener gets the events of the run, as its log
    holds them; ``watch`` is called after each step.
    """
    options = replace(options or RunOptions(), **more)
    device = lookup.as_device(options.device)
    live = LiveBudget.from_now(options.whole_budget(), simulated=device.info.simulated)
    words = [job] if isinstance(job, str) else job
    is_job = isinstance(words, Job) or (len(words) == 1 and ":" in words[0])
    _refuse_idle(options, words, is_job=is_job)
    with lookup.opened(options.store) as kept:
        if is_job:
            from underwatt.jobs.training import device_of

            loaded = words if isinstance(words, Job) else load_job(words[0])
            if options.target is not None:
                loaded = replace(loaded, target=options.target)
            info = job_info(loaded)
            sizes = lookup.as_batch_sizes(options.batch_sizes) or loaded.batch_sizes
            if loaded.has_target:
                curve = lookup.curve_to(kept, info, loaded.target, listener)
            else:
                found = lookup.stored_curve(kept, info, listener)
                curve = found if isinstance(found, RelativeCurve) else found.relative()
        else:
            assert not isinstance(words, Job)
            workload = lookup.command_workload(words, device, options.lr, options.lr_batch_size)
            info, sizes = workload.info, lookup.some_batch_sizes(options.batch_sizes)
            target = options.target
            curve = (
                lookup.stored_curve(kept, info, listener)
                if target is None
                else lookup.curve_to(kept, info, target, listener)
            )
        folder = options.folder_for(info.name)
        references = lookup.load_references(
            kept, options.references, kept.profile(kept.profile_id(device.info, info), telling=True)
        )
        where, process = folder.absolute(), os.getpid()  # a job may go elsewhere, and may fork
        made = Run(options, device, live, where, kept, sizes, curve, references, listener, watch)
        aim = (f", target {loaded.target:g}" if loaded.has_target else ", without a target") if is_job else ""
        what = f"{info.name} on {device.info.name}, budget {live}{aim}."
        simulated = " Time and watts are simulated; the training is real." if device.info.simulated else ""
        listener(Noted(level="info", text=f"{what}{simulated} Folder: {folder}"))
        try:
            if is_job and (note := threads_note()) and device_of(loaded).type == "cpu":
                listener(Noted(level="info", text=note))
            ended = run_job(made, loaded) if is_job else run_command(made, workload)
        except (KeyboardInterrupt, SystemExit, StepError) as exc:
            line = "" if isinstance(exc, StepError) else _line_of(options, words, folder, where)
            if os.getpid() == process and (said := stopped(where, line)):
                listener(Noted(level="info", text=said))
            raise
        return replace(ended, folder=folder) if folder.absolute() == where else ended


def _line_of(options: RunOptions, words: Job | Sequence[str], folder: Path, where: Path) -> str:
    """What goes on with a run that was stopped; empty where nothing can."""
    if not any(where.glob("checkpoint*.pt")) and not (where / KEPT_NAME).exists():
        return ""
    if isinstance(words, Job):
        return f"run(job, folder={str(folder)!r}, resume=True, …)"
    return again(options, words, folder)


def _refuse_idle(options: RunOptions, words: Any, *, is_job: bool) -> None:
    """Refuse options that would do nothing."""
    rate: dict[str, Any] = {"--lr": options.lr, "--lr-batch-size": options.lr_batch_size}
    options.share_of_tests()  # where it makes no sense, that is said at once
    if is_job:
        idle = {"A job knows its own learning rate": rate}
        if options.evaluate_every:
            idle["--evaluate-every says when to test"] = {"--test-share": options.test_share}
    else:
        tests: dict[str, Any] = {"--evaluate-every": options.evaluate_every}
        tests["--test-share"] = options.test_share is not None
        idle = {"A command tests itself": tests}
        if options.lr is None:
            idle["No --lr is given"] = rate
        elif not any("{lr}" in word for word in words):
            idle["There is no {lr} in the command"] = {"--lr": options.lr}
    for why, given in idle.items():
        if named := [name for name, value in given.items() if value]:
            raise InputError(f"{why}, so {' and '.join(named)} would do nothing.", hint="Leave it out.")


def read_run(run: Path | str | None = None) -> RunRecord:
    """The record of a run: its events, its power readings, and how the budget was kept.

    ``run`` is its folder or its log; the newest one in runs/ by default.
    """
    found = lookup.find_run(run)
    if found is None:
        raise InputError("There is no run in runs/.", hint="Name the folder of a run.")
    return found


# report: one page.


def report(out: Path | str = "report.html", *, listener: Listener = log_notes, **about: Any) -> Path:
    """Write one self-contained HTML page: what was chosen, why, and how the training went; gives its path.

    ``about`` are the options of ``report_figures``; by default it is about the newest run.
    """
    from underwatt.reports.page import render

    made = report_figures(listener=listener, **about)
    page, path = render(made), Path(out)
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as exc:
        raise InputError(f"The report cannot be written to {out}: {exc.strerror}.", hint="Name another --out.") from exc
    for item in made.missing:
        listener(Noted(level="info", text=f"Left out: {item.section}. {item.why} {item.command}"))
    return path


def report_figures(
    *,
    profile: int = 0,
    budget: str | Budget = "",
    run: Path | str | None = None,
    target: float | None = None,
    references: Sequence[str | Profile] = (),
    store: AnyStore = None,
    listener: Listener = log_notes,
) -> Report:
    """All figures of a report as a record, without drawing them.

    They are of the ``run`` in a folder, the newest in runs/ by default, and the ``profile`` of its job, or the newest.
    ``budget`` and ``target`` are the run's by default, else the newest target of the convergence runs.
    """
    from underwatt.reports.build import build_report
    from underwatt.reports.gather_run import budget_of, profile_of
    from underwatt.store.store import default_store_path

    wanted = Budget.of(budget).constant() if budget else None
    record = lookup.find_run(run)
    runs: tuple[ConvergenceRun, ...] = ()
    others: list[Profile] = []
    learned: Sequence[Evidence] = ()
    if store is None and record is not None and not profile and not default_store_path().exists():
        measured = profile_of(record)
    else:
        with lookup.opened(store, create=False) as kept:
            measured, record = _reported(kept, profile, record, asked=run is not None)
            runs = stored_runs(kept, measured.workload.id)
            learned = other_trainings(kept, measured.workload.id)
            others = lookup.load_references(kept, references, measured)
    here = lookup.profiled_device(measured)
    return build_report(
        measured,
        _candidates(measured, record, listener),
        made_at=datetime.now().astimezone().strftime("%d %B %Y, %H:%M").lstrip("0"),
        convergence=runs,
        target=target if target is not None or record is None else record.start.target,
        budget=wanted or (None if record is None else budget_of(record)),
        record=record,
        references=others,
        stock_modes=here.stock_modes() if isinstance(here, HasStockModes) else None,
        others=learned,
    )


def _reported(kept: Store, number: int, record: RunRecord | None, *, asked: bool) -> tuple[Profile, RunRecord | None]:
    """The profile to report on, and the run where it belongs to it."""
    from underwatt.reports.gather_run import is_of, profile_of, with_run

    if record is None:
        return lookup.stored_profile(kept, number), None
    if not number:
        same = [item.id for item in kept.summaries() if is_of(record, item)]
        return (with_run(kept.profile(same[-1], telling=True), record) if same else profile_of(record)), record
    found = kept.profile(number, telling=True)
    if is_of(record, found):
        return with_run(found, record), record
    if asked:
        trained = f"{record.start.workload.name} on {record.start.device.name}"
        hint = "Leave --profile or --run out."
        raise InputError(f"The run trained {trained}, which is not profile {number}.", hint=hint)
    return found, None


def _candidates(measured: Profile, record: RunRecord | None, listener: Listener) -> SettingArray | None:
    try:
        space = lookup.offered_modes(measured, listener)
    except PredictError:
        return None
    sizes = {m.setting.batch_size for m in measured.usable()} | set(measured.workload.batch_sizes)
    sizes |= set(record.start.batch_sizes if record else ())
    return lookup.every_setting(space, sorted(sizes))
