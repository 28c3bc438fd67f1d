"""A foreign command under a budget, in real time on a fake device that always draws the same."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
from log_world import started
from steady_fake import SteadyFake
from train_world import log_in

from underwatt.budget import Budget, Schedule, parse_budget
from underwatt.control.live_budget import LiveBudget
from underwatt.control.pilot import Pilot
from underwatt.errors import BudgetError, StepError
from underwatt.events import BudgetChanged, Ended, Measured, Noted, Planned, Progressed, SettingChanged, Verdict
from underwatt.jobs.command import CommandWorkload, Limits
from underwatt.jobs.command_run import run_command
from underwatt.jobs.runs import Run, RunOptions, RunResult, stopped
from underwatt.records import Measurement, PowerMode, Setting
from underwatt.runlog.inbox import post_budget, running_runs
from underwatt.runlog.log import RunLog
from underwatt.store.store import Store


def command(script: str, *more: str) -> CommandWorkload:
    body = f"import sys, time\nfrom underwatt.jobs import emitter\nsize = int(sys.argv[1])\n{script}"
    return CommandWorkload([sys.executable, "-c", body, "{batch_size}", *more], limits=Limits(20.0, 10.0, 1.0))


def run_it(
    tmp_path: Path,
    workload: CommandWorkload,
    live: LiveBudget,
    sizes: tuple[int, ...] = (8, 16),
    *,
    known: bool = False,
    watch: Callable[[Pilot], None] = lambda _: None,
) -> int:
    device = SteadyFake()
    with Store(tmp_path / "store.db") as store:
        if known:  # a step takes 10 ms at 5 W
            seen = [
                Measurement(
                    Setting(PowerMode(), n), 0.01, 5.0, peak_w=5.0, step_s_ci95=1e-4, power_w_ci95=0.05, steps=9
                )
                for n in sizes
            ]
            store.add(store.profile_id(device.info, workload.info), seen)
        run = Run(RunOptions(), device, live, tmp_path / "run", store, sizes, watch=watch)
        return run_command(run, workload).steps


@pytest.mark.slow
def test_a_command_runs_to_its_own_end_at_the_best_batch_size(tmp_path: Path) -> None:
    # Each start notes its batch size and could go on for 9 s, which a busy machine may need to measure it; a step takes
    # 10 ms whatever the batch, so that the larger one is faster.
    note = tmp_path / "starts"
    script = """
with open(sys.argv[2], "a") as note: print(size, file=note)
for _ in range(900):
    time.sleep(0.01)
    emitter.step()
"""
    steps = run_it(tmp_path, command(script, str(note)), LiveBudget(Budget(power_w=6.0)))
    assert steps == 900
    starts = note.read_text().split()
    assert set(starts) == {"8", "16"}
    assert starts[-1] == "16"
    log = log_in(tmp_path / "run")
    assert log.end is not None
    assert (log.end.outcome, log.end.steps, log.end.samples) == ("finished", 900, 14400)
    assert log.energy_j() == pytest.approx(5.0 * log.power.at_s[-1], rel=0.05)
    measured = [event.measurement.setting.batch_size for event in log.of(Measured)]
    assert sorted(measured) == [8, 16], "the search is in the log"
    [over] = [note for note in log.of(Noted) if "search is over" in note.text]
    assert log.end.energy_j == pytest.approx(log.energy_j(), rel=0.1), "and its joules are counted"
    assert log.end.energy_j > 0.9 * 5.0 * (over.at_s + 900 * 0.01)


FAILING = """
for number in range(10_000):
    time.sleep(0.01)
    emitter.step()
    if number == int(sys.argv[2]): raise ValueError("no more data")
"""


def test_the_joules_of_the_search_count_too(tmp_path: Path) -> None:
    live = LiveBudget(Budget(power_w=6.0, energy_j=2.0))
    assert run_it(tmp_path, command(FAILING, "100000"), live) == 0
    log = log_in(tmp_path / "run")
    assert log.end is not None
    assert (log.end.outcome, log.end.steps) == ("energy spent", 0)
    assert log.end.energy_j >= 2.0
    assert running_runs() == ()


def test_what_is_known_is_not_searched_for_and_the_joules_end_the_command(tmp_path: Path) -> None:
    live = LiveBudget(Budget(power_w=6.0, energy_j=4.0))
    assert 1 <= run_it(tmp_path, command(FAILING, "100000"), live, known=True) < 100
    log = log_in(tmp_path / "run")
    assert log.end is not None
    assert log.end.outcome == "energy spent"
    assert log.of(Measured) == ()


def test_a_command_that_fails(tmp_path: Path) -> None:
    with pytest.raises(StepError, match="no more data"):
        run_it(tmp_path, command(FAILING, "30"), LiveBudget(Budget(power_w=6.0)), known=True)
    end = log_in(tmp_path / "run").end
    assert end is not None
    assert (end.outcome, end.restored) == ("failed", True)


def test_a_command_that_is_over_before_it_can_be_measured_is_not_started_for_ever(tmp_path: Path) -> None:
    with pytest.raises(StepError, match="before they could be measured"):
        run_it(tmp_path, command("emitter.step()"), LiveBudget(Budget(power_w=6.0)), (8,))


def test_the_watts_of_this_hour_are_searched_under(tmp_path: Path) -> None:
    live = LiveBudget(Budget(schedule=Schedule.of([(0.0, 4.0), (3.0, 20.0)])))
    with pytest.raises(StepError, match="no more data"):
        run_it(tmp_path, command(FAILING, "30"), live, (8,), known=True)
    log = log_in(tmp_path / "run")
    assert any("4 W cannot be held, and training waits" in note.text for note in log.of(Noted))
    assert next(event.at_s for event in log.of(SettingChanged) if event.state == "holding") >= 3.0


def test_watts_of_which_none_can_ever_be_held_are_an_error(tmp_path: Path) -> None:
    live = LiveBudget(parse_budget("00:00-01:00=4W,else=4.5W"), time_of_day_s=60.0)
    with pytest.raises(BudgetError, match=r"4\.5 W is less than the device draws"):
        run_it(tmp_path, command(FAILING, "100000"), live, (8,))
    end = log_in(tmp_path / "run").end
    assert end is not None
    assert end.outcome == "failed"


def test_a_budget_posted_during_the_search_is_taken(tmp_path: Path) -> None:
    posted: list[float] = []
    live = LiveBudget(Budget(power_w=6.0))

    def post(pilot: Pilot) -> None:
        if not posted:
            posted.append(pilot.elapsed_s)
            post_budget(tmp_path / "run", "7W", "command")
        if live.power_w(pilot.elapsed_s) == 7.0 or pilot.elapsed_s > posted[0] + 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_it(tmp_path, command(FAILING, "100000"), live, watch=post)
    log = log_in(tmp_path / "run")
    assert [power_w for power_w, _ in groupby(event.power_w for event in log.of(BudgetChanged))] == [6.0, 7.0]
    assert not log.of(Planned), "the search was still going on"
    assert len(log.power) > 0


def test_steps_that_are_reported_together_have_their_own_times(tmp_path: Path) -> None:
    script = "for _ in range(25):\n    time.sleep(0.1)\n    emitter.step(10)"
    assert run_it(tmp_path, command(script), LiveBudget(Budget(power_w=6.0)), (8,), known=True) == 250
    times_s = [event.step_s for event in log_in(tmp_path / "run").of(Progressed) if math.isfinite(event.step_s)]
    assert times_s
    assert np.median(times_s) == pytest.approx(0.01, rel=0.3)


@pytest.mark.parametrize("name", ["/usr/bin/python3 train.py --batch-size {batch_size}", "x" * 400, "--", "…/é.py:f"])
def test_the_folder_of_a_run_has_a_name_that_any_disk_and_shell_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = RunOptions(budget="5W").folder_for(name)
    folder.mkdir(parents=True)
    assert not folder.name.startswith("-")
    assert "--" not in folder.name
    (folder / "checkpoint.pt").touch()
    assert RunOptions(budget="5W", resume=True).folder_for(name) == folder


def test_what_a_command_keeps_in_its_folder_is_not_our_best_model(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"its own")  # as docs/commands.md has it
    ended = RunResult("finished", 0.9, 100, 10, 1.0, 5.0, tmp_path)
    assert ended.model is None


def test_a_stopped_run_that_cannot_be_gone_on_with_says_its_verdict_all_the_same(tmp_path: Path) -> None:
    assert stopped(tmp_path, "") == ""  # it never began
    verdict = Verdict(bounded_s=60.0, judged_s=60.0)
    ended = Ended(
        at_s=60.0,
        outcome="interrupted",
        restored=True,
        energy_j=9.0,
        samples=8,
        steps=1,
        score=None,
        error=None,
        verdict=verdict,
    )
    with RunLog(tmp_path / "log.jsonl") as log:
        log.write(started())
        log.write(BudgetChanged(at_s=0.0, power_w=10.0, why="start"))
        log.write(ended)
    assert stopped(tmp_path, "") == f"{verdict} Stopped; the device is as it was."
