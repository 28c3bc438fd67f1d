"""A whole run: what is known is looked up, the rest is measured while training, and the device is put back."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from underwatt.device.base import SimulatesLoad
from underwatt.errors import InputError
from underwatt.run.inbox import Inbox, register_run
from underwatt.run.log import RunLog, read_log
from underwatt.run.pilot import Pilot

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from underwatt.device.base import Device
    from underwatt.plan.problem import SamplesToTarget
    from underwatt.profile.store import Store
    from underwatt.records import Measurement, Profile, WorkloadCost, WorkloadInfo
    from underwatt.run.checkpoint import Progress
    from underwatt.run.live import LiveBudget
    from underwatt.run.train import Effort, Trained
    from underwatt.workload.job import Job

LOG_NAME = "log.jsonl"


@dataclass(frozen=True)
class Run:
    """What a run is given: a device, a budget, a folder and a store, and who wants to be told."""

    device: Device
    live: LiveBudget
    folder: Path
    store: Store
    batch_sizes: Sequence[int]
    convergence: SamplesToTarget | None = None
    references: Sequence[Profile] = ()
    set_modes: bool = True  # else batch size and pauses alone hold the budget
    listener: Callable[[str, dict[str, Any]], None] | None = None
    watch: Callable[[Pilot], None] = field(default=lambda _pilot: None)

    def known(self, workload: WorkloadInfo) -> tuple[Measurement, ...]:
        """What was measured before of this workload on this device, with the knobs that may be set now."""
        from underwatt.device.base import permitted_space

        knobs = tuple(knob.name for knob in permitted_space(self.device).knobs) if self.set_modes else ()
        measured = self.store.measurements(self.store.profile_id(self.device.info, workload))
        return tuple(m for m in measured if tuple(m.setting.mode.knobs()) == knobs)

    def pilot(self, stack: contextlib.ExitStack, workload: WorkloadInfo, **more: Any) -> Pilot:
        """A pilot with a log and an inbox in the run's folder."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise InputError(
                f"The folder {self.folder} cannot be made ({exc.strerror}).", hint="Name another one with --out."
            ) from exc
        log = stack.enter_context(RunLog(self.folder / LOG_NAME))
        warning = stack.enter_context(register_run(self.folder, workload.name, self.device.info.name))
        if warning and self.listener:
            self.listener("note", {"level": "warning", "text": warning})
        arguments: dict[str, Any] = {
            "convergence": self.convergence,
            "known": self.known(workload),
            "references": self.references,
            "set_modes": self.set_modes,
            "batch_sizes": self.batch_sizes,
            **more,
        }
        sizes = arguments.pop("batch_sizes")
        return Pilot(
            self.device,
            workload,
            sizes,
            self.live,
            store=self.store,
            log=log,
            inbox=Inbox(self.folder),
            listener=self.listener,
            **arguments,
        )


def run_job(run: Run, job: Job, effort: Effort, *, resume: bool = False) -> Trained:
    """Train a PyTorch job to its target, in this process; ``resume`` goes on where the folder's run stopped."""
    from underwatt.run import checkpoint
    from underwatt.run.batches import fillable, left_out
    from underwatt.run.train import train_under_budget
    from underwatt.workload.data import train_and_test
    from underwatt.workload.identity import job_info
    from underwatt.workload.training import Training

    workload = job_info(job)
    length = len(train_and_test(job)[0])
    sizes = fillable(run.batch_sizes, length)
    cost = _cost(run.device, job)
    state = progress = None
    elapsed_s = energy_j = 0.0
    dropped: dict[str, Any] | None = None
    if resume:
        state, progress = checkpoint.load(run.folder, workload.id)
        if progress.done:
            raise InputError(
                f"The run in {run.folder} has ended: {progress.done}.",
                hint="Start a run without --resume, in a folder of its own.",
            )
        elapsed_s, energy_j = _spent(run.folder / LOG_NAME, progress)
        dropped = _posted(run.folder / LOG_NAME)
        run.live.resumes(elapsed_s)
    with contextlib.ExitStack() as stack:
        training = Training(job, sizes[0])
        stack.callback(training.close)
        if state is not None:
            training.restore(state)
        pilot = run.pilot(stack, workload, batch_sizes=sizes, cost=cost, elapsed_s=elapsed_s)
        pilot.target = job.target
        if progress is not None:
            pilot.continues(samples=training.samples, steps=training.steps, share=progress.share, energy_j=energy_j)
            pilot.score = progress.score
        stack.enter_context(pilot)
        if progress is not None:
            pilot.note("info", _going_on(training.samples, run.live, elapsed_s, dropped))
        if text := left_out(run.batch_sizes, length):
            pilot.note("warning", text)
        return train_under_budget(
            pilot, training, effort, run.folder, progress=progress, watch=lambda: run.watch(pilot)
        )


def _spent(log: Path, progress: Progress) -> tuple[float, float]:
    """Seconds and joules that a run has taken, also since its last checkpoint: what was lost was drawn all the same."""
    try:
        record = read_log(log)
    except InputError:  # lost or damaged: the checkpoint is what matters
        return progress.elapsed_s, progress.energy_j
    counted = [event["energy_j"] for event in record.events if event.get("energy_j") is not None]
    last_s = max([event["at_s"] for event in record.events] + record.power.at_s[-1:].tolist())
    # Never 0, which would be taken for a run that begins.
    return max(progress.elapsed_s, last_s, 1e-3), max(progress.energy_j, counted[-1] if counted else 0.0)


def _posted(log: Path) -> dict[str, Any] | None:
    """The budget that a run was given on its way and kept to its end."""
    try:
        budgets = read_log(log).of("budget")
    except InputError:
        return None
    return budgets[-1] if budgets and budgets[-1]["why"] == "changed" else None


def _going_on(samples: int, live: LiveBudget, elapsed_s: float, dropped: dict[str, Any] | None) -> str:
    text = f"Going on at {samples:,} samples, with a budget of {live}."
    meant = {"power_w": live.power_w(elapsed_s), "watts": live.budget.watts.value, "window_s": live.budget.window_s}
    if dropped is None or all(dropped.get(name) == value for name, value in meant.items()):
        return text
    return f"{text} The {dropped['power_w']:g} W that it had been given on its way hold no more."


def _cost(device: Device, job: Job) -> WorkloadCost | None:
    if not isinstance(device, SimulatesLoad):
        return None
    from underwatt.workload.cost import count_cost

    return count_cost(job)
