"""A foreign command under a budget: as a partner where it asks what to do, else started anew for each batch size.

One that asks is trained as a job is: the pilot searches, holds, pauses and follows whatever budget is posted, and the
command's own process waits and changes its batch size. One that does not can be neither paused nor resized from
outside. So it is started for each batch size that the search asks for, with all that it draws logged and counted, and
at last for good.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections import deque
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from underwatt._files import write_atomically
from underwatt.control.actuator import TEST
from underwatt.control.state import Phase
from underwatt.errors import InputError, OutOfMemoryError, StepError
from underwatt.jobs.command import Said, Sign
from underwatt.jobs.faults import does_not_fit
from underwatt.jobs.runs import LOG_NAME, RunResult, going_on, taken_so_far
from underwatt.measure.workload import Beat

if TYPE_CHECKING:
    from pathlib import Path

    from underwatt.control.pilot import Pilot
    from underwatt.jobs.command import CommandRun, CommandWorkload
    from underwatt.jobs.runs import Run

KEPT_NAME = "command.json"
SEARCHED_S = 2.0  # a search that rests for so long, after a change of the budget say, is over
MOST_STARTS = 6  # at one batch size, of a command that is over before it is measured
SHORTEST_S = 3.0  # steps that are over sooner than this are not measured before they end, however often they begin
CALM_S = 0.2  # the longest that nobody needs to ask: as often as the controller looks
LATE_S = 0.5  # how much longer than told a wait may take before something else is thought to go on
SOON_S = 0.1  # within this after its first step, a command that asks has asked
UNASKED_S = 10.0  # without a question for so long, steps are looked at all the same
DURABLE_S = 2.0  # a disk is waited for no oftener: a command may save after each step
ENDS_S = 60.0  # what a command that was told to end may take for that
STOPPED = ("energy spent", "reached", "limit", "diverged")


@dataclass(frozen=True, slots=True)
class Kept:
    """Where a command that keeps checkpoints was when it wrote the last one."""

    command: str  # its words; a script may be mended before it is gone on with
    position: int = 0  # as the command counts its samples
    samples: int = 0
    steps: int = 0
    share: float = 0.0
    elapsed_s: float = 0.0
    energy_j: float = 0.0
    score: float | None = None
    done: str = ""  # how it ended, where it has come to its end

    def save(self, folder: Path, *, durable: bool) -> None:
        """Put it in the place of the last one."""
        text = json.dumps(asdict(self))
        write_atomically(folder / KEPT_NAME, lambda file: file.write(text.encode()), durable=durable)

    @classmethod
    def load(cls, folder: Path, command: str) -> Kept:
        """Of the run in a folder, which must be this command's and not over."""
        try:
            found = cls(**json.loads((folder / KEPT_NAME).read_text(encoding="utf-8")))
        except OSError:
            raise InputError(
                f"There is no run of a command in {folder} that can be gone on with.",
                hint="Only one that asks (docs/commands.md) can be; start it without --resume, in a folder of its own.",
            ) from None
        except (ValueError, TypeError) as exc:
            raise InputError(f"{folder / KEPT_NAME} is damaged ({exc}).", hint="Start anew in another folder.") from exc
        if found.command != command:
            raise InputError(
                f"The run in {folder} is of another command: {found.command}.",
                hint="Start this one without --resume, in a folder of its own.",
            )
        if found.done:
            raise InputError(f"The run in {folder} has ended: {found.done}.", hint="Start it anew in another folder.")
        return found


def run_command(run: Run, workload: CommandWorkload) -> RunResult:
    """Run a command to its own end, to its target, or until samples or joules are spent."""
    with contextlib.ExitStack() as stack:
        run.claim_folder(stack)
        kept = Kept(workload.info.name)
        if run.options.resume:
            kept = Kept.load(run.folder, workload.info.name)
        taken = taken_so_far(run.folder / LOG_NAME, kept) if run.options.resume else None
        if taken is not None:
            run.live.resumes(taken.elapsed_s)
        begun_s = taken.elapsed_s if taken else 0.0
        pilot = run.pilot(stack, workload.info, elapsed_s=begun_s)
        pilot.target = run.options.target
        if taken is not None:
            pilot.continues(
                samples=kept.samples,
                steps=kept.steps,
                share=kept.share,
                energy_j=taken.energy_j,
                verdict=taken.verdict,
            )
            pilot.score = kept.score
        with pilot:
            if taken is not None:
                pilot.note("info", going_on(kept.samples, run.live, begun_s, taken.posted))
                if taken.warning:
                    pilot.note("warning", taken.warning)
            _Command(run, pilot, workload, kept).train()
            took = pilot.elapsed_s, pilot.energy_j
            return RunResult(pilot.outcome, pilot.score, pilot.samples, pilot.steps, *took, run.folder)


class _Over(Exception):  # noqa: N818 - no error: the command has ended while it was waited for
    pass


class _Alone(Exception):  # noqa: N818 - no error: it reports steps and does not ask, so nothing waits for it
    pass


class _Command:
    def __init__(self, run: Run, pilot: Pilot, workload: CommandWorkload, kept: Kept) -> None:
        self._run, self._pilot, self._workload, self._kept = run, pilot, workload, kept
        self._searched_s = pilot.elapsed_s - SEARCHED_S  # since when nothing is searched for
        self._is_reached = self._is_final = False

    def train(self) -> None:
        """Whichever way it goes; the pilot knows how it ended. One that asks is started once."""
        pilot, starts, before = self._pilot, 0, 0
        while not self._is_final and pilot.energy_left_j > 0:
            size = pilot.batch_size
            starts, before = (starts + 1 if size == before else 1), size
            if not pilot.can_pause and not self._goes_on():
                self._search_is_over(size)
            self._first_s = began_s = pilot.elapsed_s
            try:
                if not self._run_alone(size):
                    return
            except OutOfMemoryError:
                pilot.out_of_memory(size)
                continue
            steps_s = pilot.elapsed_s - max(self._first_s, began_s)
            if self._is_final or pilot.batch_size != size or not self._goes_on():
                continue
            if starts >= MOST_STARTS or steps_s < SHORTEST_S:
                raise StepError(
                    f"The command's steps were over after {steps_s:.2g} s, before they could be measured.",
                    hint="Give it more to do, have it ask (docs/commands.md), or use `underwatt profile` beforehand.",
                )
        if pilot.energy_left_j <= 0:
            pilot.outcome = "energy spent"
            if not self._is_final:
                pilot.begins_anew()

    def _search_is_over(self, batch_size: int) -> None:
        """From here on it counts; what was trained so far is thrown away."""
        pilot = self._pilot
        self._is_final, self._is_reached, pilot.score = True, False, None
        pilot.begins_anew()
        pilot.offer((batch_size,))
        pilot.note("info", f"The search is over; the command runs at batch size {batch_size}.")

    def _goes_on(self) -> bool:
        """Whether there is something to search for, and joules to do it."""
        now_s = self._pilot.elapsed_s
        if self._pilot.controller.phase is Phase.SEARCHING:
            self._searched_s = now_s
        return now_s < self._searched_s + SEARCHED_S and self._pilot.energy_left_j > 0

    def _run_alone(self, batch_size: int) -> bool:
        """Start it and follow its steps until it or somebody else says that it is over; ``False`` where it asked."""
        pilot = self._pilot
        with contextlib.ExitStack() as stack:
            steps, heard = self._begin(batch_size, stack)
            while (said := heard.popleft() if heard else steps.hear()) is not Sign.EXITED:
                if said is Sign.ASK:
                    stack.pop_all()
                    _Partner(self._run, pilot, steps, self._kept).train(self._workload)
                    return False
                if isinstance(said, Beat):
                    pilot.heard(said.batch_size or batch_size, said.steps, said.at_s)
                    pilot.look(said.batch_size or batch_size)
                    self._run.watch(pilot)
                elif isinstance(said, Said):
                    self._hear(said, batch_size)
                    if not self._is_final:
                        continue
                final = self._is_final
                if pilot.energy_left_j <= 0 or (not final and (pilot.batch_size != batch_size or not self._goes_on())):
                    return True
                if final and (self._is_reached or pilot.samples >= (self._run.options.limit_samples or math.inf)):
                    pilot.outcome = "reached" if self._is_reached else "limit"
                    return True
        return True

    def _begin(self, batch_size: int, stack: contextlib.ExitStack) -> tuple[CommandRun, deque[Beat | Said | Sign]]:
        """Start it; what it says first. One that does not ask cannot be paused, which is chosen by from then on."""
        pilot, heard = self._pilot, deque[Beat | Said | Sign]()
        with contextlib.suppress(_Alone), pilot.elsewhere("starting"):  # what it does before its first step is none
            steps = started(self._run, self._workload, batch_size, self._kept, stack)
            while not heard or isinstance(heard[-1], Said):
                heard.append(steps.hear())  # type: ignore[arg-type]
            if isinstance(heard[-1], Beat) and (soon := steps.hear(time.monotonic() + SOON_S)) is not None:
                heard.append(soon)
            if heard[-1] is not Sign.ASK:
                raise _Alone
        self._first_s = pilot.elapsed_s
        if pilot.can_pause and heard[-1] is not Sign.ASK:
            pilot.can_pause = False
            pilot.offer(pilot.batch_sizes)
            if pilot.energy_left_j > 0 and not self._goes_on() and pilot.batch_size == batch_size:
                self._search_is_over(batch_size)
        return steps, heard

    def _hear(self, said: Said, batch_size: int) -> None:
        pilot = self._pilot
        if said.word == "oom":
            raise does_not_fit(batch_size)
        if said.word == "metric" and said.value is not None:
            pilot.scored(said.value, pilot.target)
            self._is_reached |= pilot.target is not None and said.value >= pilot.target


def started(
    run: Run, workload: CommandWorkload, batch_size: int, kept: Kept, stack: contextlib.ExitStack
) -> CommandRun:
    """The command, told where to keep its checkpoint and how far the last one was."""
    told = {"UNDERWATT_FOLDER": os.fspath(run.folder.absolute()), "UNDERWATT_SAMPLES": str(kept.position)}
    steps = workload.start(batch_size, **told)
    stack.callback(steps.stop)
    return steps


class _Partner:
    """A command that asks: its steps are the pilot's as those of a job are, and it waits where the pilot wants it."""

    def __init__(self, run: Run, pilot: Pilot, steps: CommandRun, kept: Kept) -> None:
        self._run, self._pilot, self._steps, self._kept = run, pilot, steps, kept
        self._is_asked, self._asked_s = True, time.monotonic()
        self._later: deque[Beat | Said | Sign] = deque()  # heard while something else was waited for
        self._unseen_size, self._synced_s = 0, -math.inf  # of steps that were not looked at yet
        self._loss: float | None = None
        self._away = contextlib.ExitStack()
        self._is_warned = self._is_reached = False

    def train(self, workload: CommandWorkload) -> None:
        """To its end; a process that dies for lack of memory begins again from its checkpoint, with smaller batches."""
        pilot = self._pilot
        if not pilot.can_pause:
            pilot.can_pause = True
            pilot.offer(pilot.batch_sizes)
        self._keep(self._kept)
        while True:
            try:
                with contextlib.ExitStack() as stack:
                    stack.callback(self._steps.stop)
                    return self._follow()
            except OutOfMemoryError:
                size = pilot.out_of_memory(self._steps.batch_size)
            kept = self._kept
            pilot.note("warning", f"The command goes on from its checkpoint, of {kept.position:,} samples, at {size}.")
            pilot.begins_anew(kept.samples, kept.steps, kept.share)
            with pilot.elsewhere("starting"), contextlib.ExitStack() as stack:
                self._is_asked = False
                self._steps = started(self._run, workload, size, kept, stack)
                self._later = deque([self._steps.hear()])  # type: ignore[list-item]
                stack.pop_all()

    def _follow(self) -> None:
        self._pilot.controller.sleep = self._wait
        try:
            while (said := self._next()) is not Sign.EXITED:
                self._take(said)
                if outcome := self._outcome():
                    self._end(outcome)
                    break
        except _Over:
            while self._later:
                self._take_late(self._later.popleft())
        finally:
            self._away.__exit__(_Over, _Over(), None)  # as after an error: nobody is there who could wait
            self._pilot.controller.sleep = self._pilot.device.clock.sleep
        if self._pilot.outcome not in STOPPED and (outcome := self._outcome()):
            self._pilot.outcome = outcome
        done = self._pilot.outcome
        self._keep(replace(self._kept, done=done if done in ("finished", "reached") else ""))

    def _next(self) -> Beat | Said | Sign:
        while self._is_asked and not self._later:
            if self._unseen_size:
                self._look()
            elif self._steps.is_away:
                self._pilot.controller.other_goes_on()
            if self._outcome():
                return Sign.ASK
            if self._is_asked and not self._later:
                self._answer()
        said = self._later.popleft() if self._later else self._steps.hear()
        assert said is not None, "without a limit there is something, or an error"
        return said

    def _take(self, said: Beat | Said | Sign) -> None:
        """One thing that the command says."""
        if isinstance(said, Beat):
            is_second = self._unseen_size > 0
            self._count(said)
            if is_second and time.monotonic() > self._asked_s + UNASKED_S:
                self._look_unasked()
        elif said is Sign.ASK:
            self._is_asked, self._asked_s = True, time.monotonic()
        elif isinstance(said, Said):
            self._hear(said)

    def _take_late(self, said: Beat | Said | Sign) -> None:
        """One thing that was said before the end, and heard after it."""
        if isinstance(said, Beat):
            self._count(said)
        elif isinstance(said, Said) and said.word in ("saved", "metric", "back"):
            self._hear(said)

    def _count(self, beat: Beat) -> None:
        self._unseen_size = beat.batch_size or self._steps.batch_size
        self._pilot.heard(self._unseen_size, beat.steps, beat.at_s, self._loss)

    def _hear(self, said: Said) -> None:
        pilot, value = self._pilot, said.value
        if said.word == "metric" and value is not None:
            pilot.scored(value, pilot.target)
            self._is_reached |= pilot.target is not None and value >= pilot.target
        elif said.word == "loss":
            self._loss = value
        elif said.word == "saved":
            position = pilot.samples if value is None else int(value)
            so_far = position, pilot.samples, pilot.steps, pilot.share
            self._keep(Kept(self._kept.command, *so_far))
        elif said.word == "oom":
            pilot.out_of_memory(int(value or self._steps.batch_size))
        elif said.word == "away" and not self._steps.is_away:
            self._steps.is_away = True
            self._away.enter_context(pilot.elsewhere(TEST))
        elif said.word == "back" and self._steps.is_away:
            self._away.close()
            self._steps.is_away = False

    def _look(self) -> None:
        """Have the pilot decide after the steps that it was told of, and wait where the budget asks for it."""
        size, self._unseen_size = self._unseen_size, 0
        self._pilot.look(size)
        self._run.watch(self._pilot)

    def _look_unasked(self) -> None:
        if not self._is_warned:
            self._is_warned = True
            text = "The command reports steps but has stopped asking: batch size and pauses do not reach it."
            self._pilot.note("warning", text)
        self._asked_s = time.monotonic()
        self._look()

    def _wait(self, seconds: float) -> None:
        """Have the command wait, which is over when it asks again; where it is not asking, it cannot be told."""
        until_s = time.monotonic() + seconds
        if self._is_asked:
            self._answer(seconds)
            until_s += LATE_S
        while not self._is_asked and (said := self._steps.hear(until_s)) is not None:
            if said is Sign.EXITED:
                raise _Over
            if said is Sign.ASK:
                self._is_asked, self._asked_s = True, time.monotonic()
            else:
                self._later.append(said)

    def _answer(self, wait_s: float = 0.0) -> None:
        pilot, calm_s = self._pilot, 0.0
        fast = pilot.controller.fast_path
        if not wait_s and fast.batch_size == pilot.batch_size:
            calm_s = min(max(0.0, min(fast.until_s, fast.calm_until_s) - pilot.device.clock.now_s()), CALM_S)
        self._is_asked = False
        self._steps.answer(pilot.batch_size, wait_s, calm_s)

    def _outcome(self) -> str:
        """How the training ends here, or nothing."""
        pilot = self._pilot
        if pilot.losses.diverged:
            return "diverged"
        if self._is_reached:
            return "reached"
        if pilot.samples >= (self._run.options.limit_samples or math.inf):
            return "limit"
        return "energy spent" if pilot.energy_left_j <= 0 else ""

    def _end(self, outcome: str) -> None:
        """Tell the command to end, and give it time to save what it has."""
        self._pilot.outcome = outcome
        until_s = time.monotonic() + ENDS_S
        with self._pilot.elsewhere("ending"), contextlib.suppress(StepError, OutOfMemoryError, _Over):
            while True:
                if self._is_asked:
                    self._steps.answer(0)
                    self._is_asked = False
                said = self._later.popleft() if self._later else self._steps.hear(until_s)
                if said is None or said is Sign.EXITED:
                    return
                self._is_asked = said is Sign.ASK
                self._take_late(said)

    def _keep(self, kept: Kept) -> None:
        pilot = self._pilot
        self._kept = replace(kept, elapsed_s=pilot.elapsed_s, energy_j=pilot.energy_j, score=pilot.score)
        try:
            durable = time.monotonic() > self._synced_s + DURABLE_S
            self._kept.save(self._run.folder, durable=durable)
            self._synced_s = time.monotonic() if durable else self._synced_s
        except OSError as exc:
            pilot.note("warning", f"Where the command's checkpoint is could not be noted ({exc.strerror or exc}).")
