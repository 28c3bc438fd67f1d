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
import random
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from scipy.stats import ttest_ind

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import jobs
from _table import Column, add_output, as_table, told, write
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


COLUMNS = (
    Column("job"),
    Column("fixed_batch_size", "fixed at"),
    Column("fixed_mean", "accuracy", ".4f"),
    Column("fixed_sd", "sd", ".4f"),
    Column("fixed_steps", "steps", ".0f"),
    Column("mean_changes", "changes", ".0f"),
    Column("changing_mean", "accuracy", ".4f"),
    Column("changing_sd", "sd", ".4f"),
    Column("changing_steps", "steps", ".0f"),
    Column("difference", form="+.4f"),
    Column("difference_low", "95% from", "+.4f"),
    Column("difference_high", "to", "+.4f"),
    Column("welch_p", "Welch p", ".2f"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_output(parser)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--jobs", default=",".join(SAMPLES))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in arguments.jobs.split(","):
        rows.append(compare(name, arguments.seeds))
        told(rows[-1], COLUMNS)
    print(as_table(rows, COLUMNS))
    for row in rows:
        verdict = "no difference" if row["welch_p"] >= ALIKE_P else "a difference"
        print(f"{row['job']}: {verdict} beyond seed noise")
    write("batch_changes", rows, arguments)


if __name__ == "__main__":
    main()
