"""A foreign command under a budget: its batch size is searched for, then it runs to its own end.

Nobody can pause a command from outside or change its batch size under way. So it is started anew for each batch size
that the search asks for, with all that it draws logged and counted, and at last for good.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from underwatt.errors import OutOfMemoryError, StepError
from underwatt.run.options import State

if TYPE_CHECKING:
    from collections.abc import Callable

    from underwatt.run.pilot import Pilot
    from underwatt.run.whole import Run
    from underwatt.workload.base import Workload

SEARCHED_S = 2.0  # a search that rests for so long, after a change of the budget say, is over
MOST_STARTS = 6  # at one batch size, of a command that is over before it is measured


def run_command(run: Run, workload: Workload) -> int:
    """Run a command to its own end, or until the joules are spent; gives the number of its steps."""
    with contextlib.ExitStack() as stack:
        pilot = run.pilot(stack, workload.info, can_pause=False)
        stack.enter_context(pilot)
        command = _Command(run, pilot, workload)
        if command.search():
            batch_size = pilot.batch_size
            pilot.offer((batch_size,))
            pilot.note("info", f"The search is over; the command runs at batch size {batch_size}.")
            command.run(batch_size, lambda: pilot.energy_left_j <= 0)
        if pilot.energy_left_j <= 0:
            pilot.ends("energy spent")
        return pilot.steps


class _Command:
    def __init__(self, run: Run, pilot: Pilot, workload: Workload) -> None:
        self._run, self._pilot, self._workload = run, pilot, workload
        self._searched_s = pilot.elapsed_s - SEARCHED_S  # since when nothing is searched for

    def search(self) -> bool:
        """Start the command at one batch size after the other; whether there are joules left then."""
        pilot = self._pilot
        starts, before = 0, 0
        while self._is_searching() and pilot.energy_left_j > 0:
            size = pilot.batch_size
            starts, before = (starts + 1 if size == before else 1), size
            if starts > MOST_STARTS:
                raise StepError(
                    f"The command has ended {MOST_STARTS} times at batch size {size} before it could be measured.",
                    hint="Give it more to do, or measure it beforehand with `underwatt profile`.",
                )
            try:
                self.run(size, lambda size=size: size != pilot.batch_size or not self._goes_on())  # type: ignore[misc]
            except OutOfMemoryError:
                pilot.out_of_memory(size)
        pilot.begins_anew()  # what was trained so far is thrown away
        return pilot.energy_left_j > 0

    def run(self, batch_size: int, is_over: Callable[[], bool]) -> None:
        """Start the command and follow its steps, until it or somebody else says that it is over."""
        pilot = self._pilot
        with contextlib.ExitStack() as stack:
            with pilot.elsewhere():  # what it does before its first step belongs to none
                steps = self._workload.start(batch_size)
                stack.callback(steps.stop)
                beat = steps.step()
            while beat is not None:
                pilot.heard(batch_size, beat.steps, beat.at_s)
                self._run.watch(pilot)
                if is_over():
                    return
                beat = steps.step()

    def _goes_on(self) -> bool:
        return self._is_searching() and self._pilot.energy_left_j > 0

    def _is_searching(self) -> bool:
        now_s = self._pilot.elapsed_s
        if self._pilot.controller.state is State.SEARCHING:
            self._searched_s = now_s
        return now_s < self._searched_s + SEARCHED_S
