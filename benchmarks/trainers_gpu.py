"""A Transformers ``Trainer`` with loader workers and mixed precision on a real NVIDIA GPU: with and without us.

    python benchmarks/trainers_gpu.py --json OUT [--budgets 250,350] [--methods default,underwatt] [--seconds 62]
                                      [--target LOSS] [--text FILE] [--work FOLDER]

A small GPT learns a text letter by letter, in bfloat16, fed by four worker processes; nothing is set on the card. The
text is made up (words, and which follows which), or a file's. Each training lasts so many seconds from its first step.

default     the batch size that a ``Trainer`` has by itself, kept: the callback only pauses
underwatt   the callback is offered batch sizes, of which it knows nothing

A process that polls the card's counter judges both (``_gpu_judge.py``): asked are means within 0.5% of the budget and
no window of 5 s more than 1% above it. A mean is less the first 3 s, and less the search. The target is the least loss
of the held-out text that ``default`` had met after three quarters of its time, unless one is given: known only
afterwards, and the same for both. Tokens a second are those until then, and of the whole training; both count the
search, pauses and tests. ``UNDERWATT_SMALL=1`` makes all small enough for a CPU, to try this without a GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _gpu_judge import began_at_s, judge
from _gpu_users import STARTS_S, judged, python
from _table import Column, add_output, as_table, told, write
from underwatt.device.registry import open_device
from underwatt.events import Progressed, SettingChanged
from underwatt.runlog.log import read_log

SMALL = bool(os.environ.get("UNDERWATT_SMALL"))
LENGTH, WIDTH, DEPTH, HEADS = (32, 32, 2, 2) if SMALL else (256, 512, 8, 8)
SIZES = (4, 8, 16) if SMALL else (8, 16, 32, 64, 128, 256)
WORKERS = 4
LETTERS, TEST_ROWS = (100_000, 64) if SMALL else (6_000_000, 256)
LR, WARM_UP = 3e-4, 100  # at the default batch size; steps of it
TEST_EVERY_S = 4.0
WORDS, FOLLOWING = 1500, 12
TARGET_AFTER = 0.75  # of what ``default`` took


def made_up_text(letters: int, seed: int = 0) -> str:
    """Words of made-up syllables, frequent and rare ones, each followed by one of a few: learnt bit by bit."""
    rng = np.random.default_rng(seed)
    syllables = [a + b + c for a in "bdfgklmnprstvz" for b in "aeiou" for c in ("", "n", "r", "s")]
    words = ["".join(rng.choice(syllables, rng.integers(1, 4))) for _ in range(WORDS)]
    share = 1.0 / np.arange(1, WORDS + 1)
    following = rng.choice(WORDS, (WORDS, FOLLOWING), p=share / share.sum())
    steps = np.minimum(rng.geometric(0.3, letters // 4) - 1, FOLLOWING - 1)  # a word is longer than four letters
    at, text = 0, []
    for step in steps.tolist():
        text.append(words[at])
        at = following[at, step]
    return " ".join(text)[:letters]


class Rows(Dataset[dict[str, Any]]):
    """Parts of a text, each of which tells its next letters."""

    def __init__(self, parts: Any) -> None:
        self.parts = parts

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, at: int) -> dict[str, Any]:
        return {"input_ids": self.parts[at], "labels": self.parts[at]}


def rows_of(text: str) -> tuple[Rows, Rows]:
    """What is trained on and what is held out: the end of the text."""
    codes = torch.tensor(list(text.encode("ascii", "replace")))
    parts = codes[: len(codes) // LENGTH * LENGTH].view(-1, LENGTH)
    return Rows(parts[:-TEST_ROWS]), Rows(parts[-TEST_ROWS:])


# The Trainer's own process


def train(folder: Path, method: str, budget_w: float, seconds: float, text: str) -> None:
    import transformers

    from underwatt import TransformersCallback

    class Watch(transformers.TrainerCallback):  # type: ignore[misc]
        """Has the model tested every so many seconds, notes what came of it, and ends the training."""

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.next_s = time.monotonic() + TEST_EVERY_S
            self.until_s = time.monotonic() + seconds

        def on_step_end(self, _args: Any, _state: Any, control: Any, **__: Any) -> None:
            now_s = time.monotonic()
            control.should_training_stop = now_s > self.until_s
            control.should_evaluate = now_s > self.next_s or control.should_training_stop

        def on_evaluate(self, *_: Any, metrics: Any = None, **__: Any) -> None:
            self.next_s = time.monotonic() + TEST_EVERY_S
            with (folder / "losses.csv").open("a", encoding="ascii") as file:
                file.write(f"{time.time():.3f},{metrics['eval_loss']:.5f}\n")

    is_cuda = torch.cuda.is_available()
    torch.manual_seed(0)
    shape = {"n_positions": LENGTH, "n_embd": WIDTH, "n_layer": DEPTH, "n_head": HEADS}
    ends = {"vocab_size": 128, "bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(**shape, **ends, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "checkpoints"),
        max_steps=10**7,
        learning_rate=LR,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=WARM_UP,
        bf16=True,
        use_cpu=not is_cuda,
        dataloader_num_workers=WORKERS,
        dataloader_persistent_workers=True,
        dataloader_pin_memory=is_cuda,
        per_device_eval_batch_size=min(64, TEST_ROWS),
        prediction_loss_only=True,
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        report_to="none",
    )
    offered = SIZES if method == "underwatt" else ()
    budget = TransformersCallback(
        budget_w=budget_w, batch_sizes=offered, device="nvml:", folder=folder / "run", set_modes=False
    )
    learnt, held_out = rows_of(text)
    transformers.Trainer(
        transformers.GPT2LMHeadModel(config),
        arguments,
        train_dataset=learnt,
        eval_dataset=held_out,
        callbacks=[Watch(), budget],
    ).train()


# The judge's side

JUDGED = ("seconds", "mean_over_pct", "window_s", "worst_over_pct", "worst_at_s", "late")


def trained(work: Path, method: str, budget_w: float, seconds: float, text: Path | None) -> dict[str, Any]:
    """One training in a process of its own, judged by another one."""
    folder = work / f"{method}_{budget_w:g}"
    folder.mkdir(parents=True, exist_ok=True)
    row: dict[str, Any] = {"method": method, "budget_w": budget_w}
    given = [folder, method, budget_w, seconds, *([text] if text else [])]
    with judged(folder / "counter.csv"), (folder / "output.txt").open("wb") as output:
        command = python(Path(__file__).resolve(), "--train", *given)
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            process.wait(seconds + STARTS_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            process.kill()
            process.wait()
    try:
        return {**row, **told_by(folder), "exit_code": process.returncode}
    except Exception as exc:  # noqa: BLE001 - the other trainings are worth having
        end = (folder / "output.txt").read_text(encoding="utf-8", errors="replace")[-1500:]
        return {**row, "error": f"{type(exc).__name__}: {exc}", "exit_code": process.returncode, "output": end}


def told_by(folder: Path) -> dict[str, Any]:
    record = read_log(folder / "run" / "log.jsonl")
    level = judge(record, folder / "counter.csv")[0]
    told_at = record.of(Progressed)
    at_s, samples = ([getattr(event, name) for event in told_at] for name in ("at_s", "samples"))
    tested_s, losses = np.loadtxt(folder / "losses.csv", delimiter=",", ndmin=2).T
    tested_s = tested_s - began_at_s(record)
    tokens = np.interp(tested_s, [0.0, *at_s], [0.0, *samples]) * LENGTH
    settings = record.of(SettingChanged)
    end_s = record.end.at_s if record.end else at_s[-1]
    return {
        **{
            name: level[name]
            for name in ("seconds", "mean_over_pct", "window_s", "worst_over_pct", "worst_at_s", "late")
        },
        "verdict": record.verdict().judgement.value,
        "searched_s": min((event.at_s for event in settings if event.state == "holding"), default=None),
        "batch_size": settings[-1].setting.batch_size if settings else None,
        "tokens_per_s": (record.end.samples if record.end else samples[-1]) * LENGTH / end_s,
        "curve": [[round(x, 3) for x in point] for point in zip(tested_s, tokens, losses, strict=True)],
    }


def to_target(rows: list[dict[str, Any]], given: float | None) -> None:
    """When each training of a budget first met the target, and at how many tokens a second it came there."""
    for budget_w in dict.fromkeys(row["budget_w"] for row in rows):
        here = {row["method"]: row for row in rows if row["budget_w"] == budget_w and row.get("curve")}
        target = given
        if target is None and "default" in here:
            curve = here["default"]["curve"]
            target = min((loss for at_s, _, loss in curve if at_s <= TARGET_AFTER * curve[-1][0]), default=curve[0][2])
        for row in here.values():
            met = next(((at_s, tokens) for at_s, tokens, loss in row["curve"] if target and loss <= target), None)
            row["target"] = target
            row["time_s"], row["tokens_to_target"] = met or (None, None)
            row["tokens_per_s_to_target"] = met[1] / met[0] if met else None
            row["final"] = row["curve"][-1][2]


COLUMNS = (
    Column("method"),
    Column("budget_w", "budget W", ".0f"),
    Column("seconds", "for s", ".0f"),
    Column("mean_over_pct", "mean over %", "+.2f"),
    Column("worst_over_pct", "worst 5 s %", "+.2f"),
    Column("worst_at_s", "at s", ".1f"),
    Column("late"),
    Column("verdict"),
    Column("searched_s", "search s", ".1f"),
    Column("batch_size", "batch"),
    Column("tokens_per_s", "tokens/s", ",.0f"),
    Column("time_s", "to target s", ".1f"),
    Column("tokens_per_s_to_target", "tokens/s to it", ",.0f"),
    Column("target", "", ".3f"),
    Column("final", "", ".3f"),
    Column("error"),
)


def gains(rows: list[dict[str, Any]]) -> list[str]:
    lines = []
    for budget_w in dict.fromkeys(row["budget_w"] for row in rows):
        of = {row["method"]: row for row in rows if row["budget_w"] == budget_w}
        pairs = [(of.get("underwatt", {}).get(key), of.get("default", {}).get(key)) for key in KEYS]
        more, less = (ours / theirs if ours and theirs else math.nan for ours, theirs in pairs)
        lines.append(
            f"{budget_w:g} W: {more:.2f} times the tokens a second, {1 / less:.2f} times as soon at the target"
        )
    return lines


KEYS = ("tokens_per_s", "time_s")


def main() -> None:
    if sys.argv[1:2] == ["--train"]:
        folder, method, budget_w, seconds, *text = sys.argv[2:]
        learnt = Path(text[0]).read_text(encoding="utf-8") if text else made_up_text(LETTERS)
        return train(Path(folder), method, float(budget_w), float(seconds), learnt)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_output(parser, json_required=True)
    parser.add_argument("--budgets", default="250,350")
    parser.add_argument("--methods", default="default,underwatt")
    parser.add_argument("--seconds", type=float, default=62.0, help="of each training")
    parser.add_argument("--target", type=float, help="a loss of the held-out text")
    parser.add_argument("--text", type=Path, help="a file to learn, instead of a made-up text")
    parser.add_argument("--work", type=Path, help="logs and the counter's moves stay here")
    arguments = parser.parse_args()
    device = open_device("nvml:")
    found, rows = dict(device.snapshot()), []

    def record(untouched: bool | None) -> dict[str, Any]:
        made = {"device": device.info.name, "software": dict(device.info.software), "untouched": untouched}
        return {**made, "rows": rows}

    work = arguments.work or Path(tempfile.mkdtemp(prefix="trainers_gpu"))
    budgets_w = [float(watts) for watts in arguments.budgets.split(",")]
    for budget_w, method in product(budgets_w, arguments.methods.split(",")):
        rows.append(trained(work, method, budget_w, arguments.seconds, arguments.text))
        to_target(rows, arguments.target)
        told(rows[-1], COLUMNS)
        arguments.json.write_text(json.dumps(record(None), indent=1), encoding="utf-8")
    untouched = dict(device.snapshot()) == found
    print(as_table(rows, COLUMNS), *gains(rows), f"untouched: {untouched}", sep="\n")
    write("trainers_gpu", record(untouched), arguments)
    return None


if __name__ == "__main__":
    main()
