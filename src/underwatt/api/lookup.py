"""What is known of a device and a job: looked up in the store and on this machine, before anything is measured."""

from __future__ import annotations

import contextlib
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeAlias

from underwatt.convergence.curve import fit_convergence, targets_of
from underwatt.convergence.prior import shape_prior, usual_shape
from underwatt.device.base import permitted_space
from underwatt.device.registry import open_device
from underwatt.device.session import Session
from underwatt.device.space import ModeSpace
from underwatt.errors import InputError, UnderwattError
from underwatt.events import Noted
from underwatt.jobs.command import DEFAULT_LIMITS, CommandRate, CommandWorkload, Limits
from underwatt.jobs.job import as_batch_sizes as as_batch_sizes
from underwatt.jobs.runs import LOG_NAME, RUNS
from underwatt.jobs.workloads import choose_workload
from underwatt.measure.series import grid_modes, in_order, modes_from_file
from underwatt.predict.base import SettingArray, observe
from underwatt.predict.design import first_settings
from underwatt.runlog.log import read_log
from underwatt.store import exchange
from underwatt.store.store import Store
from underwatt.studies.study import other_trainings, stored_runs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from underwatt.convergence.curve import ConvergenceCurve
    from underwatt.convergence.prior import RelativeCurve
    from underwatt.device.base import Device
    from underwatt.jobs.job import Job
    from underwatt.measure.workload import Workload
    from underwatt.records import ConvergenceRun, PowerMode, Profile, Setting, WorkloadInfo
    from underwatt.runlog.run_record import RunRecord

    AnyJob: TypeAlias = Job | str | Sequence[str]  # a job, its address, or the words of a command
    AnyStore: TypeAlias = Path | str | Store | None  # a store, or the file it is in; the usual one where it is none
    Listener: TypeAlias = Callable[[object], None]  # told of what happens, as records

_log = logging.getLogger("underwatt")


def log_notes(event: object) -> None:
    """The listener of those who brought none: notes go to the logger ``underwatt``."""
    if isinstance(event, Noted):
        _log.log(logging.WARNING if event.level == "warning" else logging.INFO, "%s", event.text)


def opened(store: AnyStore, *, create: bool = True) -> AbstractContextManager[Store]:
    """The store, opened where only its file is named; the usual one by default."""
    return contextlib.nullcontext(store) if isinstance(store, Store) else Store(store, create=create)


@contextlib.contextmanager
def session(device: Device, tell: Listener) -> Iterator[Session]:
    """A session on the device; says where it first had to put back what a killed one left."""
    with Session(device) as begun:
        if begun.recovered:
            text = "A killed session had left this device changed; it was put back first."
            tell(Noted(level="info", text=text))
        yield begun


def job_workload(
    job: AnyJob, device: Device, lr: float | None, lr_batch_size: int | None, limits: Limits = DEFAULT_LIMITS
) -> tuple[Workload, tuple[int, ...]]:
    """The job as a device runs it, and its batch sizes; a command has none."""
    rate = CommandRate(lr) if lr_batch_size is None else CommandRate(lr, lr_batch_size)
    return choose_workload([job] if isinstance(job, str) else job, device, rate=rate, limits=limits)


def command_workload(
    words: Sequence[str], device: Device, lr: float | None, lr_batch_size: int | None
) -> CommandWorkload:
    """The command that words name."""
    workload, _ = job_workload(words, device, lr, lr_batch_size)
    assert isinstance(workload, CommandWorkload), "the words of a job are an address"
    return workload


def some_batch_sizes(given: str | Sequence[int], suggested: Sequence[int] = ()) -> tuple[int, ...]:
    """The batch sizes that are given, else those that a job suggests; ``InputError`` where there are none."""
    sizes = as_batch_sizes(given) or tuple(suggested)
    if not sizes:
        raise InputError("A command does not say which batch sizes to try.", hint="Add for example -b 8,16,32,64.")
    return sizes


# Profiles, references and runs.


def stored_profile(store: Store, number: int = 0) -> Profile:
    """The profile of this number, or the newest that holds measurements."""
    found = number or store.newest_profile_id()
    if not found:
        raise InputError("The store holds no measurements to predict from.", hint="`underwatt profile JOB` makes some.")
    return store.profile(found, telling=True)


def load_references(store: Store, named: Sequence[str | Profile], measured: Profile) -> list[Profile]:
    """Profiles, or those that are named: by a number, a file, or ``builtin:BOARD``; none is a reference for itself."""
    found = [reference for one in named for reference in (_named(store, one) if isinstance(one, str) else [one])]
    for reference in found:
        if (reference.device.id, reference.workload.id) == (measured.device.id, measured.workload.id):
            raise InputError(
                "A profile cannot be its own reference: it would predict what it already holds.",
                hint="Name a profile of another workload or device.",
            )
    return found


def _named(store: Store, text: str) -> list[Profile]:
    if text.isdecimal():
        return [store.profile(int(text), telling=True)]
    if text.startswith("builtin:"):
        return [exchange.builtin_reference(text.removeprefix("builtin:"))]
    found = exchange.read_file(Path(text)).profiles
    if not found:
        raise InputError(f"{text} holds no profile to refer to.")
    return found


def find_run(run: Path | str | None) -> RunRecord | None:
    """The record of a run by its folder or its log; by default the newest one in runs/, if any."""
    if run is None:
        found = [(path.stat(), path) for path in RUNS.glob(f"*/{LOG_NAME}")]
        begun = {path: stat.st_mtime for stat, path in found if stat.st_size}  # not those refused before they began
        return read_log(max(begun, key=lambda path: begun[path])) if begun else None
    path = Path(run)
    return read_log(path / LOG_NAME if path.is_dir() or path.suffix != ".jsonl" else path)


# Convergence.


def stored_curve(
    store: Store, workload: WorkloadInfo, tell: Listener, *, wanted_id: str = "", target: float | None = None
) -> ConvergenceCurve | RelativeCurve:
    """Samples to target from the stored runs of a workload; where none reached it, what other trainings let expect."""
    runs = stored_runs(store, wanted_id or workload.id)
    if wanted_id and not runs:
        raise InputError(f"There are no convergence runs {wanted_id!r}.", hint="`underwatt store ls` lists them.")
    if target is not None and target not in (made := targets_of(runs)):
        named = ", ".join(f"{one:g}" for one in made)
        hint = f"There are: {named}." if named else "`underwatt converge JOB` makes runs."
        raise InputError(f"No run was made for target {target:g}.", hint=hint)
    aim = target if target is not None or not runs else runs[-1].target
    others = other_trainings(store, wanted_id or workload.id)
    if not any(run.reached and run.target == aim for run in runs):
        shape = usual_shape(others)
        why = f"No training reached the target {aim:g}" if runs else "No convergence runs of this workload are stored"
        tell(Noted(level="warning", text=f"{why}. {weighed_by(shape, workload)}"))
        return shape
    count = sum(run.target == aim for run in runs)
    tell(Noted(level="info", text=f"Samples to target {aim:g}, from {count} trainings."))
    return fit_convergence(runs, aim, prior=shape_prior(others))


def curve_to(store: Store, workload: WorkloadInfo, target: float, tell: Listener) -> ConvergenceCurve | RelativeCurve:
    """Samples to this very target; of runs that were made for others, only how batch sizes compare in the nearest."""
    runs = stored_runs(store, workload.id)
    made_for = targets_of(runs)
    reached = sorted({run.target for run in runs if run.reached}, key=lambda one: abs(one - target))
    if target in made_for or not reached:
        return stored_curve(store, workload, tell, target=target if target in made_for else None)
    shape = fit_convergence(runs, reached[0], prior=shape_prior(other_trainings(store, workload.id))).relative()
    text = f"The convergence runs are for {', '.join(f'{one:g}' for one in made_for)}, the job wants {target:g}."
    tell(Noted(level="warning", text=f"{text} {weighed_by(shape, workload)}"))
    return shape


def weighed_by(shape: RelativeCurve, workload: WorkloadInfo) -> str:
    """What batch sizes are weighed by while it is not known how this training learns, in a sentence or two."""
    sure = " `underwatt converge JOB` would make it sure." if workload.batch_sizes else ""  # a command has none
    return f"Batch sizes are weighed by {shape.said()}.{sure}"


# Devices and their settings.


def as_device(device: str | Device) -> Device:
    """The device, opened where only its address is given."""
    return open_device(device) if isinstance(device, str) else device


def profiled_device(measured: Profile) -> Device | None:
    """The device that was profiled, where it is this machine's; another board at the same address is not."""
    try:
        here = open_device(measured.device.address)
    except UnderwattError:
        return None
    return here if here.info.id == measured.device.id else None


def offered_modes(measured: Profile, tell: Listener) -> ModeSpace:
    """The modes of the device, where it is here; else the combinations of the values that were measured."""
    observe(measured.measurements)  # says what is wrong where nothing can be predicted from them
    columns = [m.setting.mode.knobs() for m in measured.usable()]
    here = profiled_device(measured)
    if here is not None:
        return permitted_space(here).only(columns[0])
    tell(Noted(level="info", text=f"{measured.device.name} is not here: combinations of the measured clocks only."))
    return ModeSpace.of_values({name: {knobs[name] for knobs in columns} for name in columns[0]})


def every_setting(space: ModeSpace, batch_sizes: Sequence[int]) -> SettingArray:
    """Every power mode at every batch size."""
    return SettingArray.product(tuple(knob.name for knob in space.knobs), space.matrix(), batch_sizes)


def spread_settings(space: ModeSpace, batch_sizes: Sequence[int], count: int) -> list[Setting]:
    """The settings that tell most about all others; the same ones each time, so that a profile can be gone on with."""
    candidates = every_setting(space, batch_sizes)
    rows = range(len(candidates)) if count >= len(candidates) else first_settings(candidates, count)
    return in_order(candidates[int(row)] for row in rows)


def chosen_modes(named: str | Sequence[PowerMode], space: ModeSpace) -> list[PowerMode]:
    """Modes, or those that are named: ``grid``, a number of modes, or a CSV file."""
    if not isinstance(named, str):
        return list(named)
    if named == "grid":
        return grid_modes(space)
    if named.isdecimal() and int(named) > 0:
        return [setting.mode for setting in spread_settings(space, (1,), int(named))]
    if Path(named).exists():
        return modes_from_file(Path(named), space)
    raise InputError(f"--modes {named} is neither 'grid', nor a number, nor a file.")


# What is known, carried from machine to machine.


@dataclass(frozen=True, slots=True)
class Imported:
    """What a file held: each with its number in the store, and how much of it was new there."""

    profiles: tuple[tuple[Profile, int, int], ...]  # number, and how many measurements were new
    convergence: tuple[tuple[WorkloadInfo, Sequence[ConvergenceRun], int], ...]  # how many runs were new
    plans: tuple[tuple[Mapping[str, Any], int, bool], ...]  # the plan's record, its number, and whether it was new


def import_file(
    file: Path | str, *, device_name: str = "", samples_per_epoch: float = 1.0, store: AnyStore = None
) -> Imported:
    """Take in measurements, convergence runs or a plan: our own export, PowerTrain's tables, Zeus' traces.

    ``device_name`` is the device of a table that does not say; Zeus' traces count epochs of ``samples_per_epoch``.
    """
    found = exchange.read_file(Path(file), device_name=device_name, samples_per_epoch=samples_per_epoch)
    for record in found.plans:
        exchange.plan_of(record, str(file))  # a plan that cannot be used is refused here, not where it is needed
    with opened(store) as kept:
        taken, counts = kept.take_in(found.profiles, found.convergence)
        plans = [kept.keep_plan(record) for record in found.plans]
    return Imported(
        tuple((item, *numbers) for item, numbers in zip(found.profiles, taken, strict=True)),
        tuple((workload, runs, new) for (workload, runs), new in zip(found.convergence, counts, strict=True)),
        tuple((record, *kept_as) for record, kept_as in zip(found.plans, plans, strict=True)),
    )


def export(what: str, file: TextIO, *, with_convergence: bool = False, store: AnyStore = None) -> str:
    """Write a profile or convergence runs (CSV), both, or a plan (JSON); says what was written.

    ``what`` is the number of a profile, the id of a workload's convergence runs, or ``plan:NUMBER``.
    """
    if with_convergence and not what.isdecimal():
        raise InputError("Only a profile is exported with its convergence runs.", hint="Name it by its number.")
    with opened(store, create=False) as kept:
        kind, _, number = what.partition(":")
        if kind == "plan" and number.isdecimal():
            file.write(json.dumps(dict(kept.plan(int(number)).record), indent=2) + "\n")
            return f"Plan {number}"
        profile = kept.profile(int(what)) if what.isdecimal() else None
        wanted = what if profile is None else profile.workload.id
        workload, runs = next(iter(kept.convergence(wanted)), (None, ()))
    if profile is None:
        if workload is None:
            raise InputError(f"There are no convergence runs {what!r}.", hint="`underwatt store ls` lists them.")
        exchange.write_convergence(workload, runs, file)
        return f"{len(runs)} convergence runs of {workload.name}"
    name = profile.workload.name
    said = f"Profile {what} ({name} on {profile.device.name}, {len(profile.measurements)} measurements)"
    if not with_convergence:
        exchange.write_profile(profile, file)
        return said
    if not runs:
        raise InputError(f"There are no convergence runs of {name}.", hint="`underwatt converge JOB` makes some.")
    exchange.write_profile_with_convergence(profile, runs, file)
    return f"{said} and {len(runs)} runs"
