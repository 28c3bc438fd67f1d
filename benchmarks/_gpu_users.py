"""Trainings on a GPU as people start them, each with its judge beside it: a process that polls the card's counter.

``run`` is the command with a schedule, tests and checkpoints as they come, and a budget posted on the way.
``trainer`` is a Transformers ``Trainer`` with loader workers, evaluations and checkpoints, under a schedule, and a
budget posted on the way. ``long`` is the same with gradients added up until a step takes two seconds.

    python benchmarks/_gpu_users.py FOLDER SECONDS STEP_S FIRST_S WATTS WATTS     # the Trainer's own process
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from _gpu_judge import began_at_s, judge, period_s
from underwatt.events import BudgetChanged, Scored
from underwatt.runlog.inbox import INBOX_NAME
from underwatt.runlog.log import read_log

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).resolve().parent
LONG_STEP_S = 2.0
STARTS_S = 180.0  # a process that has not begun to train by then never will
ENDS_S = 60.0


@dataclass(frozen=True)
class Times:
    """Watts by a schedule and by a post, each for so long; the first level holds longer, for the search."""

    first_s: float
    level_s: float

    def posted_s(self) -> float:
        return self.first_s + self.level_s

    def ends_s(self) -> float:
        return self.first_s + 2 * self.level_s


def steps_of(folder: Path) -> Path:
    """Where a training writes when each of its steps began."""
    return folder.with_name(f"{folder.name}_steps.txt")


def python(*arguments: object) -> list[str]:
    return [sys.executable, *map(str, arguments)]


@contextlib.contextmanager
def judged(path: Path) -> Iterator[None]:
    """Poll the counter from another process for as long as this takes."""
    process = subprocess.Popen(python(HERE / "_gpu_judge.py", path))
    try:
        yield
    finally:
        process.terminate()
        process.wait(10)


def started(process: subprocess.Popen[bytes], folder: Path) -> float:
    """Wait until a run has begun; when it did, as near as this process can tell."""
    until_s = time.monotonic() + STARTS_S
    log = folder / "log.jsonl"
    while not log.exists() or b'"kind":"start"' not in log.read_bytes():
        if process.poll() is not None or time.monotonic() > until_s:
            raise SystemExit(f"{process.args} has not begun (exit code {process.poll()}).")
        time.sleep(0.05)
    return time.monotonic()


def follow(process: subprocess.Popen[bytes], folder: Path, times: Times, posted_w: float, *, interrupt: bool) -> float:
    """Post a budget at its time, and end the run at its own, or let it end; the moment of the post, in wall time."""
    began_s = started(process, folder)
    time.sleep(max(0.0, began_s + times.posted_s() - time.monotonic()))
    subprocess.run(python("-m", "underwatt", "budget", f"{posted_w:g}W", "--run", folder), check=True)
    posted_at_s = (folder / INBOX_NAME).stat().st_mtime  # the command itself took a second to begin
    time.sleep(max(0.0, began_s + times.ends_s() - time.monotonic()))
    if interrupt:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(STARTS_S if not interrupt else ENDS_S)
    finally:
        process.kill()
    return posted_at_s


def case(name: str, work: Path, watts: list[float], times: Times) -> list[dict[str, Any]]:
    """Train under two scheduled levels and a posted one, and judge each."""
    folder, counter = work / name, work / f"{name}_counter.csv"
    schedule_w, posted_w = watts[:2], watts[2]
    if name == "run":
        schedule = work / "schedule.csv"
        lines = [f"0,{schedule_w[0]:g}", f"{times.first_s:g},{schedule_w[1]:g}"]
        schedule.write_text("\n".join(["at_s,power_w", *lines, ""]), encoding="ascii")
        job = f"{HERE / 'gpu_jobs.py'}:vit"
        options = ("--device", "nvml:", "--no-modes", "--out", folder, "--store", work / "store.db")
        command = python("-m", "underwatt", "run", job, "--schedule", schedule, *options)
    else:
        long_s = LONG_STEP_S if name == "long" else 0.0
        given = (folder, times.ends_s(), long_s, times.first_s, *schedule_w)
        command = python(HERE / "_gpu_users.py", *given)
    with judged(counter):
        process = subprocess.Popen(command, env={**os.environ, "TOKENIZERS_PARALLELISM": "false"})
        posted_at_s = follow(process, folder, times, posted_w, interrupt=name == "run")
    record = read_log(folder / "log.jsonl")
    tests, end = record.of(Scored), record.end
    changed = [event.at_s for event in record.of(BudgetChanged) if event.why == "changed"]
    about = {
        "case": name,
        "verdict": record.verdict().judgement.value,
        "exit_code": process.returncode,
        "step_and_pause_s": period_s(record),
        "test_share_pct": 100 * sum(test.took_s or 0.0 for test in tests) / end.at_s if end and tests else None,
        "heard_after_s": changed[0] + began_at_s(record) - posted_at_s if changed else None,
        "checkpoints": sum(1 for _ in folder.rglob("*.pt")) + sum(1 for _ in folder.rglob("*.safetensors")),
    }
    begins_s = np.loadtxt(steps_of(folder), ndmin=1) - began_at_s(record) if name == "long" else None
    rows = [{**about, **row} for row in judge(record, counter, begins_s)]
    (work / f"{name}.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return rows


# The Trainer's own process


def train(folder: Path, seconds: float, long_step_s: float, first_s: float, schedule_w: list[float]) -> None:
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    import gpu_jobs
    from underwatt import Schedule, TransformersCallback

    class Ends(TrainerCallback):  # type: ignore[misc]
        """Ends the training when its time is over, and says when each step began."""

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.until_s = time.monotonic() + seconds
            self.steps = steps_of(folder).open("w", encoding="ascii", buffering=1)

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.steps.write(f"{time.time():.4f}\n")

        def on_train_end(self, *_: Any, **__: Any) -> None:
            self.steps.close()

        def on_step_end(self, _args: Any, _state: Any, control: Any, **__: Any) -> None:
            control.should_training_stop = time.monotonic() > self.until_s

    model = gpu_jobs.mixer()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    part_s = time_of_part(model.to(device), device)
    parts = max(1, round(long_step_s / part_s))
    often = max(5, round(10.0 / (3 * part_s * parts)))  # an evaluation about every ten seconds
    arguments = TrainingArguments(
        output_dir=str(folder / "checkpoints"),
        max_steps=10**7,
        per_device_train_batch_size=gpu_jobs.TRAINER_SIZE,
        per_device_eval_batch_size=gpu_jobs.TRAINER_SIZE,
        gradient_accumulation_steps=parts,
        learning_rate=3e-4,
        dataloader_num_workers=2 if gpu_jobs.SMALL else 4,
        eval_strategy="steps",
        eval_steps=often,
        save_strategy="steps",
        save_steps=3 * often,
        save_total_limit=2,
        logging_steps=often,
        disable_tqdm=True,
        report_to="none",
    )
    schedule = Schedule.of([(0.0, schedule_w[0]), (first_s, schedule_w[1])])
    budget = TransformersCallback(budget=schedule, device="nvml:", folder=folder, set_modes=False)
    Trainer(
        model,
        arguments,
        train_dataset=gpu_jobs.Pictures(gpu_jobs.TRAIN, 1),
        eval_dataset=gpu_jobs.Pictures(gpu_jobs.TEST, 2),
        callbacks=[budget, Ends()],
    ).train()


def time_of_part(model: Any, device: str) -> float:
    """Seconds of one pass forward and back."""
    import gpu_jobs

    images, labels = (part.to(device) for part in gpu_jobs.pictures(gpu_jobs.TRAINER_SIZE, 3))
    began_s = time.monotonic()
    for _ in range(8):
        loss = model(images, labels)["loss"]
        loss.backward()
        float(loss.detach())
        began_s = time.monotonic() if _ == 2 else began_s  # the first ones choose kernels
    return (time.monotonic() - began_s) / 5


if __name__ == "__main__":
    train(Path(sys.argv[1]), *map(float, sys.argv[2:5]), list(map(float, sys.argv[5:])))  # type: ignore[misc]
