"""The scripts of docs/commands.md and examples/train_command.py, as commands and on their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from docs_blocks import blocks_of
from steady_fake import SteadyFake
from train_world import log_in

from underwatt.budget import Budget
from underwatt.control.live_budget import LiveBudget
from underwatt.events import Scored
from underwatt.jobs import emitter
from underwatt.jobs.command import CommandWorkload, Limits
from underwatt.jobs.command_run import run_command
from underwatt.jobs.runs import Run, RunOptions, RunResult
from underwatt.records import Measurement, PowerMode, Setting
from underwatt.store.store import Store

ROOT = Path(__file__).parents[2]
FILES = {block.value: block.text for block in blocks_of(ROOT / "docs" / "commands.md") if block.mark == "file"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "underwatt_beat.py").write_text(Path(emitter.__file__).read_text())
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def run(folder: Path, *words: str, sizes: tuple[int, ...] = (16,), **options: object) -> RunResult:
    device, workload = SteadyFake(), CommandWorkload(list(words), limits=Limits(60.0, 30.0, 1.0))
    with Store(folder / "store.db") as store:
        seen = [Measurement(Setting(PowerMode(), n), 0.02, 5.0, 5.0, step_s_ci95=1e-3, power_w_ci95=0.1) for n in sizes]
        store.add(store.profile_id(device.info, workload.info), seen)
        live = LiveBudget(Budget(power_w=6.0))
        return run_command(Run(RunOptions(**options), device, live, folder / "run", store, sizes), workload)


def test_the_shell_script(folder: Path) -> None:
    ended = run(folder, "sh", "train.sh")
    assert (ended.outcome, ended.steps, ended.samples) == ("finished", 100, 1600)


@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no C compiler here")
def test_the_c_program(folder: Path) -> None:
    subprocess.run(["gcc", "-Wall", "-Wextra", "-Werror", "-O1", "-o", "train", "train.c"], check=True)
    ended = run(folder, "./train")
    assert (ended.outcome, ended.steps, ended.samples) == ("finished", 100, 1600)


@pytest.mark.parametrize("words", [["sh", "train.sh"], [sys.executable, "train.py"]])
def test_on_their_own_they_train_as_before(folder: Path, words: list[str]) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("UNDERWATT_")}
    subprocess.run(words, check=True, env=environment, timeout=60)


def test_the_python_script(folder: Path) -> None:
    ended = run(folder, sys.executable, "train.py")
    assert (ended.outcome, ended.samples, ended.steps) == ("finished", 6000, 3 * 125)
    assert len(log_in(folder / "run").of(Scored)) == 3


def test_the_example_reaches_its_target_and_goes_on(folder: Path) -> None:
    words = (sys.executable, str(ROOT / "examples" / "train_command.py"))
    ended = run(folder, *words, limit_samples=5000)
    assert ended.outcome == "limit"
    assert ended.samples >= 4000
    ended = run(folder, *words, resume=True, target=0.8)
    assert ended.outcome == "reached"
    assert ended.score is not None
    assert ended.score >= 0.8
