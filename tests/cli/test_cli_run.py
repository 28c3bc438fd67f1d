from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from test_cli_devices import run

from underwatt.cli.run import NOT_KEPT, OUTCOME_CODES, Display
from underwatt.control.state import Phase
from underwatt.drivers.virtual.board_specs import BOARDS
from underwatt.drivers.virtual.simulated_board import VirtualBoard
from underwatt.drivers.virtual.sysfs import SysfsBoard
from underwatt.errors import InputError
from underwatt.events import BudgetChanged, Ended, Measured, Noted, Progressed, Resumed, Scored, SettingChanged, Started
from underwatt.jobs.identity import job_info
from underwatt.jobs.job import load_job
from underwatt.records import ConvergenceRun, Measurement, PowerMode, Setting
from underwatt.reports.gather_run import happened
from underwatt.runlog.log import RunLog, read_log
from underwatt.store.store import Store

JOB = """
import torch
from underwatt import Job

def data():
    chance = torch.Generator().manual_seed(1)
    targets = torch.randint(4, (320,), generator=chance)
    return torch.randn(320, 8, generator=chance) + 2 * torch.nn.functional.one_hot(targets, 8), targets

def model():
    return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(32, 4))

def blobs():
    return Job(model, data(), target=0.85, batch_sizes=(8, 16), lr=1e-3)

def endless():
    return Job(model, data(), target=1.01, batch_sizes=(8, 16))

def one_size():
    return Job(model, data(), target=1.01, batch_sizes=(16,))

def wide():
    return Job(lambda: torch.nn.Linear(8, 4), data(), target=1.01, batch_sizes=(8,))

def failing():
    def forward(net, batch):
        if batch[0].device.type != "meta":
            raise ValueError("a [layer] is missing")
        return net(batch[0]), batch[1]
    return Job(model, data(), target=0.85, batch_sizes=(8,), forward=forward)

def broken():
    raise ValueError("no such data")

def forking():
    import os, sys
    seen = []
    def forward(net, batch):
        seen.append(batch)
        if len(seen) == 30:
            if (child := os.fork()) == 0:
                sys.exit(3)
            os.waitpid(child, 0)
        return net(batch[0]), batch[1]
    return Job(model, data(), target=1.01, batch_sizes=(8,), lr=1e-3, forward=forward)

def scheduled():
    once = lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=400)
    return Job(model, data(), target=1.01, batch_sizes=(8,), lr_batch_size=16, scheduler=once)

class Faulty(torch.optim.lr_scheduler.ReduceLROnPlateau):
    def step(self, *_):
        raise ValueError("no plateau")

def plateau():
    return Job(model, data(), target=1.01, batch_sizes=(8,), scheduler=Faulty)

def unscheduled():
    return Job(model, data(), target=1.01, batch_sizes=(8,), scheduler=torch.optim.lr_scheduler.StepLR)

def talking():
    print("a job that talks")
    def forward(net, batch):
        print("a step")
        return net(batch[0]), batch[1]
    return Job(model, data(), target=0.85, batch_sizes=(8,), lr=1e-3, forward=forward)
"""
NANO = ("-d", "virtual:nano")
LIMIT = OUTCOME_CODES["limit"]


COMMAND = ["--", "python", "train.py", "{batch_size}"]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("UNDERWATT_STORE", raising=False)
    (tmp_path / "job.py").write_text(JOB)


def start(*arguments: str) -> subprocess.Popen[str]:
    """The command line in a process of its own."""
    command = [sys.executable, "-m", "underwatt", "run", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)


def wait_for(log: Path, found: Callable[[list[Any]], bool], within_s: float = 60.0) -> None:
    """Wait until a log says something."""
    deadline_s = time.monotonic() + within_s
    while time.monotonic() < deadline_s:
        with contextlib.suppress(InputError):  # it is not there yet
            if found(list(read_log(log).events)):
                return
        time.sleep(0.05)
    pytest.fail("it never came to it")


def steps(at_least: int) -> Callable[[list[Any]], bool]:
    return lambda events: any(getattr(event, "steps", 0) >= at_least for event in events)


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def test_a_job_is_trained_to_its_target_and_again_with_what_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["run", "job.py:blobs", *NANO, "--budget", "3W"]
    assert run(*command, "--json") == 0
    shown = capsys.readouterr()
    first = json.loads(shown.out)
    assert first["outcome"] == "reached"
    assert first["score"] >= 0.85
    assert "simulated" in shown.err
    [folder] = Path("runs").iterdir()
    assert re.fullmatch(r"blobs-\d{8}-\d{6}", folder.name)
    log = read_log(folder / "log.jsonl")
    assert log.start.budget == "3W"
    assert log.start.target == 0.85
    assert log.end is not None
    assert (log.end.outcome, log.end.restored) == ("reached", True)
    assert log.energy_over_j(window_s=1.0) <= 0.005 * log.energy_j()
    assert log.time_over_s(lag_s=1.0) <= 0.01 * log.power.at_s[-1]
    assert run(*command) == 0
    shown = capsys.readouterr()
    out = " ".join(shown.out.split())
    [newest] = [one for one in Path("runs").iterdir() if one != folder]
    record = read_log(newest / "log.jsonl")
    assert out.startswith(str(record.verdict()))
    assert happened(record) in out
    assert "reached its target with a score of" in out
    assert "W on average" in out
    assert "The device is as it was." in out
    assert "Watts are those of the module (POM_5V_IN)" in " ".join(out.split())
    assert len(list(Path("runs").iterdir())) == 2
    assert run("store", "show", "1", "--json") == 0
    stored = json.loads(capsys.readouterr().out)["measurements"]
    assert len(stored) >= len(log.of(Measured)) >= 1


def test_a_schedule_that_is_over_too_soon_ends_a_run_with_its_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("run", "job.py:scheduled", *NANO, "--budget", "3W", "--out", "here") == 1
    err = " ".join(capsys.readouterr().err.split())
    assert str(read_log("here/log.jsonl").verdict()) in err
    assert "Stopped; the device is as it was." in err
    assert "Tried to step 401 times" in err
    assert "Give it more steps." in err


@pytest.mark.parametrize(("job", "said"), [("plateau", "no plateau"), ("unscheduled", "'step_size'")])
def test_a_fault_of_a_scheduler_is_one_of_the_job(job: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("run", f"job.py:{job}", *NANO, "--budget", "3W") == 1
    err = " ".join(capsys.readouterr().err.split())
    assert "The job failed in a step at batch size" in err
    assert said in err
    assert "Traceback" not in err


def test_limit_energy_and_going_on_by_the_newest_folder(capsys: pytest.CaptureFixture[str]) -> None:
    def ended(*more: str) -> dict[str, Any]:
        code = run("run", "job.py:endless", *NANO, "--json", *more)
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert code == OUTCOME_CODES[found["outcome"]]
        return found

    limited = ended("--budget", "3W", "--limit", "800")
    assert (limited["outcome"], limited["samples"]) == ("limit", 800)
    spent = ended("--energy", "0.001Wh")
    assert spent["outcome"] == "energy spent"
    assert 3.6 <= spent["energy_j"] < 4.6
    more = ended("--energy", "0.002Wh", "--resume")
    assert more["outcome"] == "energy spent"
    assert 7.2 <= more["energy_j"] < 8.2
    assert more["samples"] > spent["samples"]
    assert len(list(Path("runs").iterdir())) == 2
    log = read_log(max(Path("runs").iterdir()) / "log.jsonl")
    assert len(log.of(Resumed)) == 1
    assert log.of(BudgetChanged)[0].power_w is None


def test_what_a_job_prints_is_not_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("run", "job.py:talking", *NANO, "--budget", "3W", "--limit", "80", "--json") == LIMIT
    shown = capsys.readouterr()
    assert json.loads(shown.out)["samples"] == 80
    assert "a job that talks" in shown.err
    assert "a step" in shown.err


@pytest.mark.parametrize(("deadline", "said"), [("0.1s", "cannot be made"), ("1h", "can be made")])
def test_a_deadline_is_said_to_be_made_or_not(capsys: pytest.CaptureFixture[str], deadline: str, said: str) -> None:
    with Store("underwatt.db") as store:
        runs = [ConvergenceRun(size, 1.01, 4e5, seed, 1e-3) for size in (8, 16) for seed in (0, 1)]
        store.add_convergence(job_info(load_job("job.py:endless")), runs)
    common = ["run", "job.py:endless", *NANO, "--budget", "3W", "--limit", "12000"]
    assert run(*common, "--out", "first") == LIMIT
    assert run(*common, "--deadline", deadline, "--out", "second") == LIMIT
    notes = [note for note in read_log("second/log.jsonl").of(Noted) if "deadline" in note.text]
    assert said in notes[0].text
    assert notes[0].at_s < 1.0, "what was measured before says it at once"
    assert said in " ".join(capsys.readouterr().err.split())


def test_convergence_runs_for_another_target_are_not_used(capsys: pytest.CaptureFixture[str]) -> None:
    with Store("underwatt.db") as store:
        runs = [ConvergenceRun(size, 0.85, 500.0 + size, 0, 1e-3) for size in (8, 16)]
        store.add_convergence(job_info(load_job("job.py:blobs")), runs)
    common = ["run", "job.py:blobs", *NANO, "--budget", "3W", "--limit", "8000"]
    assert run(*common, "--out", "same") == LIMIT
    assert "Samples to target 0.85" in capsys.readouterr().err
    assert all(line.share is not None for line in read_log("same/log.jsonl").of(Progressed))
    assert run(*common, "--target", "1.01", "--out", "other") == LIMIT
    err = " ".join(capsys.readouterr().err.split())
    assert "The convergence runs are for 0.85, the job wants 1.01." in err
    assert "Batch sizes are weighed by what trainings to 0.85 needed" in err
    assert "underwatt converge" in err
    assert "Samples to target" not in err
    record = read_log("other/log.jsonl")
    assert record.start.target == 1.01
    assert record.end is not None
    assert record.end.outcome == "limit"
    assert all(line.time_left_s is None and line.share is None for line in record.of(Progressed))
    assert run("report", "--run", "other", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["title"]["target"] == 1.01
    assert report["convergence"] is None


def test_a_run_that_goes_on_says_where_and_what_it_gives_up(capsys: pytest.CaptureFixture[str]) -> None:
    common = ["run", "job.py:one_size", *NANO, "--out", "here"]
    assert run(*common, "--budget", "3W", "--limit", "800") == LIMIT
    log = Path("here/log.jsonl")
    at_s = read_log(log).events[-1].at_s
    with RunLog(log) as file:  # as if it had been given another budget on its way
        file.write(BudgetChanged(at_s=at_s, power_w=2.5, why="changed"))
    capsys.readouterr()
    assert run(*common, "--budget", "3W", "--limit", "1600", "--resume") == LIMIT
    err = " ".join(capsys.readouterr().err.split())
    assert (
        "Going on at 800 samples, with a budget of 3W. The 2.5 W that it had been given on its way hold no more." in err
    )
    assert run(*common, "--budget", "3W", "--limit", "2400", "--resume") == LIMIT
    err = " ".join(capsys.readouterr().err.split())
    assert "Going on at 1,600 samples, with a budget of 3W." in err
    assert "hold no more" not in err


def test_the_log_says_what_the_watts_of_a_budget_bound() -> None:
    common = ["run", "job.py:one_size", *NANO, "--limit", "80"]
    for text, watts, window_s in (("4W", "mean", None), ("4W peak", "peak", None), ("4W mean over 60s", "mean", 60.0)):
        assert run(*common, "--budget", text, "--out", watts + str(window_s)) == LIMIT
        [step] = read_log(Path(watts + str(window_s)) / "log.jsonl").of(BudgetChanged)
        assert (step.power_w, step.watts, step.window_s) == (4.0, watts, window_s)


def test_a_schedule_is_followed(capsys: pytest.CaptureFixture[str]) -> None:
    Path("solar.csv").write_text("at_s,power_w\n0,4\n2,3\n")
    common = ["run", "job.py:one_size", *NANO, "--limit", "8000"]
    assert run(*common, "--schedule", "solar.csv", "--out", "by-file") == LIMIT
    log = read_log("by-file/log.jsonl")
    assert [(round(event.at_s), event.power_w) for event in log.of(BudgetChanged)] == [(0, 4.0), (2, 3.0)]
    assert run(*common, "--limit", "80", "--budget", "08:00-18:00=5W,else=3W", "--out", "by-day") == LIMIT
    [budget] = read_log("by-day/log.jsonl").of(BudgetChanged)
    assert budget.power_w == (5.0 if 8 <= time.localtime().tm_hour < 18 else 3.0)
    capsys.readouterr()


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["job.py:blobs"], 2, "No budget was given"),
        (["job.py:blobs", "--budget", "lots"], 2, "lots"),
        (["job.py:blobs", "--budget", "0W"], 2, "0"),
        (["job.py:blobs", "--budget", "-3W"], 2, "-3"),
        (["job.py:blobs", "--budget", "08:00-18:00=5W"], 2, "else"),
        (["job.py:blobs", "--budget", "3W", "--schedule", "x.csv"], 2, "both"),
        (["job.py:blobs", "--schedule", "x.csv"], 2, "x.csv"),
        (["job.py:blobs", "--energy", "3W"], 2, "wrong unit"),
        (["job.py:blobs", "--deadline", "3W"], 2, "wrong unit"),
        (["job.py:blobs", "--budget", "3W, 1h", "--deadline", "2h"], 2, "deadline twice"),
        (["job.py:blobs", "--budget", "3W", "-b", "none"], 2, "at least 1"),
        (["job.py:blobs", "--budget", "3W", "-d", "virtual:none"], 1, "none"),
        (["job.py:missing", "--budget", "3W"], 1, "missing"),
        (["job.py:broken", "--budget", "3W"], 1, "no such data"),
        (["nowhere.py:blobs", "--budget", "3W"], 1, "nowhere.py"),
        (["job.py", "--budget", "3W"], 2, "Name it: job.py:factory"),
        (["job.py:blobs", "--budget", "3W", "--resume"], 2, "no run of blobs"),
        (["job.py:blobs", "--budget", "3W", "--resume", "--out", "none"], 2, "There is no checkpoint in"),
        (["job.py:blobs", "--budget", "3W", "--out", "job.py"], 2, "cannot be made"),
        (["job.py:blobs", "--budget", "3W", "--store", "job.py"], 1, "not an Underwatt store"),
        (["--budget", "3W", "-b", "8", "--", "python", "train.py", "{batch_size}"], 2, "cannot run on"),
        (["job.py:blobs", "--budget", "3W", "--lr", "0.1"], 2, "--lr would do nothing"),
        (["job.py:blobs", "--budget", "3W", "--lr-batch-size", "8"], 2, "--lr-batch-size would do nothing"),
        (["--budget", "3W", "--evaluate-every", "9", *COMMAND], 2, "--evaluate-every would do nothing"),
        (["--budget", "3W", "--lr", "0.1", *COMMAND], 2, "no {lr} in the command, so --lr would do nothing"),
        (["--budget", "3W", "--lr-batch-size", "8", *COMMAND], 2, "--lr-batch-size would do nothing"),
    ],
)
def test_bad_input_is_one_sentence_and_nothing_is_lost(
    arguments: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("run", *NANO, *arguments) == code
    err = " ".join(capsys.readouterr().err.split())
    assert says in err
    assert "Traceback" not in err
    assert Path("job.py").read_text() == JOB
    assert not Path("runs").exists()


def test_runs_are_not_mixed(capsys: pytest.CaptureFixture[str]) -> None:
    common = [*NANO, "--budget", "3W", "--out", "here"]
    assert run("run", "job.py:one_size", *common, "--limit", "16") == LIMIT
    before = files(Path("here"))
    assert run("run", "job.py:one_size", *common) == 2
    assert "There is a run in here already" in capsys.readouterr().err
    assert run("run", "job.py:wide", *common, "--resume") == 2
    assert "of another job" in capsys.readouterr().err
    assert files(Path("here")) == before
    assert run("run", "job.py:blobs", *NANO, "--budget", "3W", "--out", "done") == 0
    assert run("run", "job.py:blobs", *NANO, "--budget", "3W", "--out", "done", "--resume") == 2
    assert "has ended: reached" in capsys.readouterr().err


def test_a_job_that_fails_ends_with_1_and_puts_back(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("run", "job.py:failing", *NANO, "--budget", "3W", "--out", "here") == 1
    err = capsys.readouterr().err
    assert "ValueError: a [layer] is missing" in err
    assert "Traceback" not in err
    end = read_log("here/log.jsonl").end
    assert end is not None
    assert (end.outcome, end.restored) == ("failed", True)


def test_a_store_that_another_process_holds_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("underwatt.store.schema.BUSY_TIMEOUT_S", 0.2)
    common = ["run", "job.py:one_size", *NANO, "--budget", "3W", "--limit", "16"]
    assert run(*common) == LIMIT
    with sqlite3.connect("underwatt.db") as other:
        other.execute("BEGIN EXCLUSIVE")
        assert run(*common) == 1
        other.rollback()
    other.close()
    assert "locked" in capsys.readouterr().err
    assert len(list(Path("runs").iterdir())) == 1


def test_a_log_that_lost_its_end_to_a_full_disk_changes_no_verdict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = RunLog.write
    lost = lambda log, event: None if isinstance(event, Ended) else real(log, event)  # noqa: E731
    monkeypatch.setattr(RunLog, "write", lost)
    assert run("run", "job.py:one_size", *NANO, "--budget", "3W", "--limit", "800") == LIMIT
    shown = capsys.readouterr()
    assert "could not be written to its end" in shown.err
    assert "ended at its limit" in shown.out
    assert "The device is as it was." in shown.out


def test_a_child_that_a_job_forks_and_ends_does_not_say_that_the_run_was_stopped() -> None:
    with start("job.py:forking", *NANO, "--budget", "3W", "--limit", "1600") as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode == LIMIT
    assert "Stopped" not in err


def stop(process: subprocess.Popen[str], number: int) -> str:
    """Send a signal; what the process then said."""
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert out == ""
    assert "Traceback" not in err
    assert re.search(r"he budget was (NOT )?held.* Stopped; the device is as it was\.", " ".join(err.split()))
    assert re.search(r"Go on with: underwatt run .*--out here --resume \S+", " ".join(err.split()))
    return err


@pytest.mark.slow
def test_signals_stop_it_resume_goes_on_and_a_new_budget_is_followed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "here" / "log.jsonl"
    arguments = ["job.py:one_size", *NANO, "--budget", "3W", "--out", "here"]
    with start(*arguments) as process:
        wait_for(log, steps(200))
        assert run("budget", "4W") == 0
        wait_for(log, lambda events: any(getattr(event, "why", "") == "changed" for event in events))
        stop(process, signal.SIGINT)
    assert process.returncode == 130
    record = read_log(log)
    assert [event.power_w for event in record.of(BudgetChanged)] == [3.0, 4.0]
    first = record.end
    assert first is not None
    assert (first.outcome, first.restored) == ("interrupted", True)
    assert run("budget", "4W") == 2, "no run is under way"
    with start(*arguments, "--resume") as process:
        wait_for(log, steps(int(first.steps) + 200))
        stop(process, signal.SIGTERM)
    assert process.returncode == 128 + signal.SIGTERM
    second = read_log(log).end
    assert second is not None
    assert (second.outcome, second.restored) == ("interrupted", True)
    capsys.readouterr()
    limit = int(second.samples) + 1600
    assert run("run", *arguments, "--resume", "--limit", str(limit), "--json") == LIMIT
    trained = json.loads(capsys.readouterr().out)
    assert (trained["outcome"], trained["samples"], trained["steps"]) == ("limit", limit, second.steps + 100)
    assert trained["energy_j"] > second.energy_j > first.energy_j
    record = read_log(log)
    [one, other] = record.of(Resumed)
    assert first.at_s <= one.at_s < second.at_s <= other.at_s < trained["elapsed_s"]
    assert len(record.of(Started)) == 1


@pytest.mark.slow
def test_kill_9_then_restore_then_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # The files of a board that nobody moves: its power stays as it is, and time is this machine's.
    root = tmp_path / "board"
    SysfsBoard.create(VirtualBoard(BOARDS["orin-nano"]), root)
    before = files(root)
    log = tmp_path / "here" / "log.jsonl"
    arguments = ["job.py:one_size", "-d", f"jetson:{root}", "--budget", "12W", "--out", "here"]
    with start(*arguments) as process:
        wait_for(log, steps(300))
        process.kill()
        process.communicate(timeout=20)
    assert files(root) != before, "a mode was set"
    assert read_log(log).end is None
    assert run("restore") == 0
    assert files(root) == before
    capsys.readouterr()
    assert run("run", *arguments, "--resume", "--limit", "1600", "--json") == LIMIT
    assert json.loads(capsys.readouterr().out)["samples"] == 1600
    assert files(root) == before
    record = read_log(log)
    assert len(record.of(Resumed)) == 1
    times = [event.at_s for event in record.events]
    assert times == sorted(times)


class Watched:
    """What a display looks at."""

    batch_size, samples, energy_j, elapsed_s = 16, 12_000, 3600.0, 90.0

    def __init__(self, power_w: float = 3.5, budget_w: float = 3.0, left_s: float = 125.0) -> None:
        self.power_w, self.time_left_s = power_w, left_s
        self.controller = self
        self.phase, self.budget_w = Phase.HOLDING, budget_w


def show(console: Console, *pilots: Watched) -> None:
    display = Display(console)
    setting = Setting(PowerMode(gpu_mhz=460.8), 16)
    with display:
        display.listen(Measured(measurement=Measurement(setting, step_s=0.01, power_w=3.0, steps=5)))
        display.listen(SettingChanged(setting=setting, state="holding", why="the [best] measured"))
        display.listen(BudgetChanged(power_w=4.0, watts="peak", why="changed"))
        display.listen(BudgetChanged(power_w=None, why="changed"))
        display.listen(Noted(level="warning", text="a [note]"))
        display.listen(Scored(samples=100, value=0.5, target=0.9))
        for pilot in pilots:
            display._next = 0.0
            display.watch(pilot)  # type: ignore[arg-type]


@pytest.mark.parametrize("terminal", [True, False])
def test_the_display_with_and_without_a_terminal(terminal: bool) -> None:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=200)
    show(console, Watched(), Watched(float("nan"), float("inf"), float("inf")))
    assert isinstance(console.file, io.StringIO)
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", console.file.getvalue())
    for text in (
        "the [best] measured",
        "budget 4 W peak changed",
        "budget no bound on watts changed",
        "Warning: a [note]",
        "3.50 W of 3 W  batch 16  12,000 samples",
    ):
        assert text in shown
    assert "1 Wh" in shown
    assert "score 0.5 of 0.9" in shown
    assert "left" in shown
    assert "? W  batch 16" in shown
    assert "nan" not in shown
    assert "inf" not in shown
    assert ("\x1b" in console.file.getvalue()) is terminal


def test_a_narrow_terminal_breaks_no_figure_from_its_name() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    show(console, Watched())
    assert isinstance(console.file, io.StringIO)
    assert "score 0.5 of 0.9  about 2.1 min left" in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", console.file.getvalue())


def test_a_terminal_on_which_nothing_moves_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    console = Console(file=io.StringIO(), force_terminal=True, width=200)
    show(console, Watched())
    assert isinstance(console.file, io.StringIO)
    assert "3.50 W of 3 W  batch 16  12,000 samples" in console.file.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_that_was_closed_ends_no_training(terminal: bool) -> None:
    class Closed(io.StringIO):
        def write(self, _: str) -> int:
            raise OSError(5, "Input/output error")

    show(Console(file=Closed(), force_terminal=terminal), Watched())


def test_a_model_that_the_disk_did_not_take_is_said_and_is_no_success(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **_more: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("underwatt.jobs.checkpoint.write_atomically", full)
    assert run("run", "job.py:blobs", *NANO, "--budget", "3W", "--out", "run") == NOT_KEPT
    assert "The model was not kept, neither the best nor the last: No space left on device." in capsys.readouterr().out
    assert run("run", "job.py:blobs", *NANO, "--budget", "3W", "--out", "other", "--json") == NOT_KEPT
    assert json.loads(capsys.readouterr().out)["not_kept"] == "No space left on device"
