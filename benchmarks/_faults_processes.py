"""Faults of other processes: commands that are run under a budget, and trainings of a study."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import small_job

from _faults_world import Child, Faults, Found, Try, board_of_files, caught, ended_as, files, wait_until, words_of
from underwatt.budget import Budget
from underwatt.cli import main as command_line
from underwatt.control.live_budget import LiveBudget
from underwatt.device.session import restore
from underwatt.drivers.jetson.device import JetsonDevice
from underwatt.errors import StepError, UnderwattError
from underwatt.jobs.command import CommandWorkload, Limits
from underwatt.jobs.command_run import run_command
from underwatt.jobs.runs import Run, RunOptions
from underwatt.store.store import Store

faults = Faults()


def run_script(at: Try, script: str, root: Path, limits: Limits) -> None:
    """Run a shell script under a budget, on the files of a board."""
    workload = CommandWorkload(["sh", "-c", script, "job", "{batch_size}"], limits=limits)
    with Store(at.folder / "store.db") as store:
        live = LiveBudget(Budget(power_w=12.0))
        run_command(Run(RunOptions(), JetsonDevice(root), live, at.folder / "run", store, (8, 16)), workload)


ENDS = {
    "fails": ("echo no more data >&2; exit 3", "no more data"),
    "is killed": ("kill -SEGV $$", "killed by signal 11"),
    "hangs": ("sleep 100", "then none for"),
    "says nothing it can": ("echo nonsense > $UNDERWATT_BEATS; sleep 100", ""),
}


@faults("a command that dies or hangs")
def dying_command(at: Try) -> Found:
    how = at.chance.choice(sorted(ENDS))
    end, words = ENDS[how]
    beats = at.chance.randrange(1, 40)
    script = (
        f'echo $$ > {at.folder}/pid; i=0; while [ $i -lt {beats} ]; do echo step > "$UNDERWATT_BEATS"; '
        f"sleep 0.01; i=$((i+1)); done; {end}"
    )
    _, root = board_of_files(at)
    before = files(root)
    with caught(UnderwattError) as errors:
        run_script(at, script, root, Limits(3.0, 0.4, 0.3))
    process = int((at.folder / "pid").read_text())
    gone = not Path(f"/proc/{process}").exists()
    said = len(errors) == 1 and isinstance(errors[0], StepError) and words in str(errors[0]) and gone
    said = said and ended_as(at.folder / "run", "failed")
    return Found(files(root) == before, said, words=f"{how}: {words_of(errors)}")


@faults("kill -9 leaves no command behind")
def orphans(at: Try) -> Found:
    _, root = board_of_files(at)
    before = files(root)
    note = at.folder / "pids"
    script = f'sleep 100 & echo $$ $! > {note}; while :; do echo step > "$UNDERWATT_BEATS"; sleep 0.01; done'

    child = Child(lambda: run_script(at, script, root, Limits(10.0, 1.0, 0.3)))
    wait_until(lambda: note.exists() and len(note.read_text().split()) == 2)
    time.sleep(at.chance.random() * 0.5)
    child.send(signal.SIGKILL)
    child.wait()
    processes = [Path(f"/proc/{number}") for number in note.read_text().split()]
    until_s = time.monotonic() + 10
    while any(map(_lives, processes)) and time.monotonic() < until_s:
        time.sleep(0.02)
    outcomes = [error for _, error in restore()]
    return Found(files(root) == before, outcomes in ([], [None]), lost=any(map(_lives, processes)))


def _lives(process: Path) -> bool:
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def converged(at: Try, job: str, *more: str) -> Child:
    """``underwatt converge`` in a process of its own."""
    store = str(at.folder / "store.db")
    words = ("converge", f"{small_job.__file__}:{job}", "-b", "16,64", "--seeds", "2", "--store", store, *more)
    return Child(lambda: command_line(list(words)))


def trained_in(at: Try) -> int:
    path = at.folder / "store.db"
    if not path.exists():
        return 0
    with Store(path) as store:  # one that was being made when the process ended is made now
        return sum(count for _, count in store.convergence_counts())


@faults("Ctrl-C in converge")
def interrupted_study(at: Try) -> Found:
    workers = at.chance.choice("12")  # in this process, or in others
    child = converged(at, "light_job", "--workers", workers)
    time.sleep(0.05 + at.chance.random() * (0.7 if workers == "1" else 3.0))
    alive = child.send(signal.SIGINT)
    code, words = child.wait()
    kept = trained_in(at)
    said = "Traceback" not in words and (code == 130 or not alive or kept == 4)
    again, more = converged(at, "light_job", "--workers", "1").wait()
    return Found(again == 0, said, lost=trained_in(at) != 4, words=f"{code} {kept} {words}{more}")


@faults("converge with loader workers")
def study_with_workers(at: Try) -> Found:
    sizes = at.chance.choice(("16", "64"))
    child = converged(at, "loading_job", "-b", sizes, "--seeds", "2", "--passes", "2", "--workers", "2")
    code, words = child.wait(within_s=50.0)
    return Found(code in (0, 2), "Traceback" not in words and code in (0, 2), lost=trained_in(at) < 1, words=words)


@faults("a training of converge that dies")
def dying_study(at: Try) -> Found:
    os.environ["TEST_DIE_AT" if at.chance.random() < 0.5 else "TEST_FAIL_AT"] = "64"
    try:
        code, words = converged(at, "light_job", "--workers", "2").wait(within_s=50.0)
    finally:
        os.environ.pop("TEST_DIE_AT", None), os.environ.pop("TEST_FAIL_AT", None)
    said = code != 0 and "Traceback" not in words and "64" in words
    return Found(True, said, lost=trained_in(at) != 2, words=f"{code} {words}")
