"""Time and joules to a target on a real NVIDIA GPU, by batch size and pauses alone: nothing is set on the card.

    python benchmarks/accuracy_gpu.py --json OUT [--jobs images,text] [--budgets 250,400] [--seeds 2] [--minutes 9]
                                      [--methods fixed,cold,warm] [--sizes 64,128] [--logs FOLDER]

cold      ``underwatt.run`` with an empty store
warm      the same with samples to target known, from the fixed trainings of the other seeds
fixed     each batch size by itself with pauses; ``largest`` and ``middle`` are two of them, and the best in hindsight
          is the one with the least mean time over the seeds

All are ``underwatt.run``, so that testing is paced and counted alike. Each row is written as it comes, and one that is
in OUT already is not made again: with ``--minutes`` it stops before a training would begin too late, and the next call
goes on. The end is told where all rows of a job and budget are there. Scores are compared at the moment at which the
best fixed batch size has reached the target on average.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import jobs
from _table import Column, add_output, as_table, told, write
from models.resnet import ResNet18
from models.transformer import CharTransformer
from underwatt import api
from underwatt.device.registry import open_device
from underwatt.events import Scored
from underwatt.jobs.identity import job_info
from underwatt.jobs.runs import RunOptions
from underwatt.records import ConvergenceRun
from underwatt.store.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from underwatt.device.base import Device
    from underwatt.jobs.job import Job

SIZES = (64, 128, 256, 512, 1024)
METHODS = ("fixed", "cold", "warm")
LIMIT_PASSES = 60


def images(seed: int) -> Job:
    """A wide residual network on the CIFAR-10 subset."""
    return replace(
        jobs.resnet18_cifar10(),
        model=lambda: ResNet18(width=96),
        target=0.62,
        batch_sizes=SIZES,
        seed=seed,
        name="images",
    )


def text(seed: int) -> Job:
    """A deeper character transformer on a novel."""
    return replace(
        jobs.char_transformer(),
        model=lambda: CharTransformer(len(jobs.ASCII), dim=384, layers=8, heads=6),
        target=0.52,
        batch_sizes=SIZES,
        seed=seed,
        name="text",
    )


JOBS: dict[str, Callable[[int], Job]] = {"images": images, "text": text}


def trained(
    job: Job, device: Device, budget_w: float, method: str, size: int, known: Sequence[Any], logs: Path | None = None
) -> dict[str, Any]:
    """One training; ``size`` is 0 where the batch size is chosen. Its log stays in ``logs``."""
    with tempfile.TemporaryDirectory() as folder, Store(Path(folder) / "store.db") as store:
        if known:
            store.add_convergence(job_info(job), list(known))
        ended = api.run(
            job,
            RunOptions(
                budget=budget_w,
                device=device,
                set_modes=False,
                batch_sizes=(size,) if size else (),
                store=store,
                folder=Path(folder) / "run",
                limit_samples=LIMIT_PASSES * len(job.data[0] if isinstance(job.data, tuple) else job.data),
            ),
            listener=lambda _event: None,
        )
        record = ended.record()
        if logs:
            logs.mkdir(parents=True, exist_ok=True)
            shutil.copy(
                Path(folder) / "run/log.jsonl", logs / f"{job.name}_{budget_w:g}_{job.seed}_{method}{size}.jsonl"
            )
    return {
        "job": job.name,
        "budget_w": budget_w,
        "seed": job.seed,
        "method": method,
        "batch_size": size,
        "time_s": ended.elapsed_s,
        "energy_j": ended.energy_j,
        "samples": ended.samples,
        "score": ended.score,
        "reached": ended.outcome == "reached",
        "verdict": record.verdict().judgement.value,
        "scores": [(event.at_s, event.value) for event in record.of(Scored)],
    }


def known_to(rows: Sequence[dict[str, Any]], job: Job) -> list[ConvergenceRun]:
    """What the fixed trainings of other seeds tell of samples to the target, whatever their budget was."""
    return [
        ConvergenceRun(
            row["batch_size"],
            job.target,
            row["samples"] if row["reached"] else math.nan,
            row["seed"],
            job.lr_at(row["batch_size"]),
        )
        for row in rows
        if (row["job"], row["method"]) == (job.name, "fixed") and row["seed"] != job.seed
    ]


def asked(
    names: Sequence[str], budgets_w: Sequence[float], seeds: int, methods: Sequence[str], sizes: Sequence[int]
) -> list[Any]:
    """What is to be trained: job, budget, seed, method and batch size (0: chosen); ``warm`` after what it knows."""
    return [
        (name, budget_w, seed, method, size)
        for name in names
        for budget_w in budgets_w
        for method in METHODS
        if method in methods
        for seed in range(seeds)
        for size in (sizes if method == "fixed" else (0,))
    ]


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["job"], row["budget_w"], row["seed"], row["method"], row["batch_size"]


def score_at(row: dict[str, Any], at_s: float) -> float:
    """The last score by a moment; of a training that ended before, its last one."""
    return max((value for moment_s, value in row["scores"] if moment_s <= at_s), default=math.nan)


def compare(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each job and budget: the best fixed batch size in hindsight, and the others as multiples of its mean time."""
    found = []
    for job, budget_w in sorted({(row["job"], row["budget_w"]) for row in rows}):
        here = [row for row in rows if (row["job"], row["budget_w"]) == (job, budget_w)]

        def mean(which: str, method: str, size: int = 0, here: Sequence[dict[str, Any]] = here) -> float:
            some = [row for row in here if (row["method"], row["batch_size"]) == (method, size)]
            return statistics.mean(row[which] if row["reached"] else math.inf for row in some) if some else math.nan

        sizes = sorted({row["batch_size"] for row in here if row["method"] == "fixed"})
        if not sizes:
            continue
        times_s = {size: mean("time_s", "fixed", size) for size in sizes}
        best = min(times_s, key=lambda size: times_s[size])
        middle = sizes[len(sizes) // 2]
        row = {"job": job, "budget_w": budget_w, "best_size": best, "best_s": times_s[best]}
        row |= {"largest": times_s[sizes[-1]] / times_s[best], "middle": times_s[middle] / times_s[best]}
        best_j, best_scores = mean("energy_j", "fixed", best), scores(here, "fixed", best, times_s[best])
        for method in ("cold", "warm"):
            row[method] = mean("time_s", method) / times_s[best]
            row[f"{method}_sooner"] = times_s[sizes[-1]] / mean("time_s", method)
            row[f"{method}_energy"] = mean("energy_j", method) / best_j
            row[f"{method}_score"] = scores(here, method, 0, times_s[best]) - best_scores
        found.append(row)
    return found


def scores(rows: Sequence[dict[str, Any]], method: str, size: int, at_s: float) -> float:
    """The mean score of a method's trainings by a moment."""
    some = [score_at(row, at_s) for row in rows if (row["method"], row["batch_size"]) == (method, size)]
    return statistics.mean(some) if some else math.nan


COLUMNS = (
    Column("job"),
    Column("budget_w", "budget W", ".0f"),
    Column("seed"),
    Column("method"),
    Column("batch_size", "batch"),
    Column("time_s", "time s", ".1f"),
    Column("energy_j", "J", ".0f"),
    Column("samples"),
    Column("reached"),
    Column("verdict"),
)
COMPARED = (
    Column("job"),
    Column("budget_w", "budget W", ".0f"),
    Column("best_size", "best fixed"),
    Column("best_s", "its s", ".1f"),
    *(Column(name, name, ".2f") for name in ("middle", "largest", "cold", "warm")),
    Column("cold_sooner", "cold sooner than largest", ".2f"),
    Column("warm_sooner", "warm sooner than largest", ".2f"),
    Column("cold_score", "cold score at equal time", "+.3f"),
    Column("warm_score", "warm score at equal time", "+.3f"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_output(parser, json_required=True)
    parser.add_argument("--jobs", default=",".join(JOBS))
    parser.add_argument("--budgets", default="250,400")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="of the fixed trainings")
    parser.add_argument("--logs", type=Path, help="logs of the trainings stay in this folder")
    parser.add_argument("--device", default="nvml:")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no training that would end later")
    arguments = parser.parse_args()
    rows = json.loads(arguments.json.read_text(encoding="utf-8")) if arguments.json.exists() else []
    made, begun_s = {key(row) for row in rows}, time.monotonic()
    budgets_w = [float(text) for text in arguments.budgets.split(",")]
    sizes = [int(text) for text in arguments.sizes.split(",")]
    wanted = asked(arguments.jobs.split(","), budgets_w, arguments.seeds, arguments.methods.split(","), sizes)
    left = [one for one in wanted if one not in made]
    longest_s = max((row["time_s"] for row in rows), default=0.0)
    for name, budget_w, seed, method, size in left:
        if time.monotonic() - begun_s + longest_s > 60 * arguments.minutes:
            print(f"{len(left)} trainings were left at the start of this call: call it again to go on")
            break
        job = JOBS[name](seed)
        known = known_to(rows, job) if method == "warm" else ()
        rows.append(trained(job, open_device(arguments.device), budget_w, method, size, known, arguments.logs))
        longest_s = max(longest_s, rows[-1]["time_s"])
        told(rows[-1], COLUMNS)
        write("accuracy_gpu", rows, arguments)
    print(as_table(compare(rows), COMPARED))


if __name__ == "__main__":
    main()
