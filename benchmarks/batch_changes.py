"""Final accuracy with batch-size changes against training at a fixed batch size, same number of samples.

    python benchmarks/batch_changes.py --json OUT [--seeds N]

All real: two small jobs trained on the CPU (``examples/jobs.py``). Fixed: 32, in the middle of what changes. Changing:
after a random 5 to 20 steps each, another of the job's batch sizes from a quarter to four times that, through
``Training.set_batch_size``, smaller ones more often (by one over the square root), so that both trainings make about as
many steps of the same samples: what is compared is changing, not the number of steps. In both the learning rate follows
the job's rule, and both are scored once, at the end. A Welch t-test says how likely a difference like this is by chance
of the seeds.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from scipy.stats import ttest_ind

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import jobs
from underwatt.jobs.training import Training

if TYPE_CHECKING:
    from underwatt.jobs.job import Job

SEEDS = 5
SAMPLES = {"digits_small": 30_000, "char_transformer_small": 64_000}
SHORTEST, LONGEST = 5, 20  # steps at one batch size
FIXED, TIMES = 32, 4  # the changing batch sizes are from a part of the fixed one to a multiple of it
ALIKE_P = 0.05


def train(job: Job, samples: int, seed: int, *, changing: bool) -> tuple[float, int, int]:
    """Score after so many samples, steps it took, and how often the batch size changed."""
    sizes = [size for size in job.batch_sizes if FIXED / TIMES <= size <= FIXED * TIMES]
    chance = random.Random(1000 + seed)
    training = Training(job, FIXED, seed=seed)
    left, changes = 0, 0
    while training.samples < samples:
        if changing and left == 0:
            left = chance.randint(SHORTEST, LONGEST)
            training.set_batch_size(chance.choices(sizes, [size**-0.5 for size in sizes])[0])
        before = training.batch_size
        training.step()
        changes += training.batch_size != before
        left -= 1
    score = training.evaluate()
    training.close()
    return score, training.steps, changes


def compare(name: str, seeds: int) -> dict[str, Any]:
    job = getattr(jobs, name)()
    scores: dict[bool, list[float]] = {False: [], True: []}
    steps: dict[bool, list[int]] = {False: [], True: []}
    changes = []
    for seed in range(seeds):
        for changing in (False, True):
            score, count, changed = train(job, SAMPLES[name], seed, changing=changing)
            scores[changing].append(score)
            steps[changing].append(count)
        changes.append(changed)
    test = ttest_ind(scores[True], scores[False], equal_var=False)
    low, high = test.confidence_interval(0.95)
    return {
        "job": name,
        "samples": SAMPLES[name],
        "seeds": seeds,
        "fixed_batch_size": FIXED,
        "fixed": scores[False],
        "changing": scores[True],
        "fixed_mean": statistics.mean(scores[False]),
        "fixed_sd": statistics.stdev(scores[False]),
        "changing_mean": statistics.mean(scores[True]),
        "changing_sd": statistics.stdev(scores[True]),
        "difference": statistics.mean(scores[True]) - statistics.mean(scores[False]),
        "difference_low": float(low),
        "difference_high": float(high),
        "welch_p": float(test.pvalue),
        "mean_changes": statistics.mean(changes),
        "fixed_steps": statistics.mean(steps[False]),
        "changing_steps": statistics.mean(steps[True]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the rows")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--jobs", default=",".join(SAMPLES))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in arguments.jobs.split(","):
        begun_s = time.perf_counter()
        row = compare(name, arguments.seeds)
        rows.append(row)
        verdict = "no difference beyond seed noise" if row["welch_p"] >= ALIKE_P else "a difference beyond seed noise"
        print(
            f"{name}: fixed at {row['fixed_batch_size']} {row['fixed_mean']:.4f} ± {row['fixed_sd']:.4f}, "
            f"{row['mean_changes']:.0f} changes {row['changing_mean']:.4f} ± {row['changing_sd']:.4f}, "
            f"difference {row['difference']:+.4f} "
            f"(95%: {row['difference_low']:+.4f} to {row['difference_high']:+.4f}), "
            f"Welch p = {row['welch_p']:.2f}: {verdict}; "
            f"steps {row['fixed_steps']:.0f} and {row['changing_steps']:.0f} ({time.perf_counter() - begun_s:.0f} s)"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
