"""What looking at gradients costs a training, on the CPU or an NVIDIA GPU, on the real clock.

    python benchmarks/gradient_cost.py --json OUT [--jobs digits_small,resnet18_small] [--batch 32] [--seconds 20]

look_pct   time in ``GradientWatch.look`` of all the time, after the first ``WARM`` steps; on a GPU with what it
           takes there
loop_pct   the loop's longer time with looking than without, rounds with and without in turn, their medians compared
pairs      how many pairs of gradients were compared, in so many steps
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import jobs
from _table import Column, add_output, as_table, told, write
from underwatt.jobs.gradient_watch import GradientWatch
from underwatt.jobs.training import Completion, Training

WARM, ROUND_STEPS = 30, 25
COLUMNS = (
    Column("job"),
    Column("batch_size", "batch"),
    Column("device"),
    Column("step_ms", "step ms", ".2f"),
    Column("look_pct", "looking, % of time", ".2f"),
    Column("loop_pct", "longer loop, %", "+.2f"),
    Column("pairs"),
    Column("steps"),
)


def cost(name: str, batch_size: int, seconds: float) -> dict[str, Any]:
    training = Training(getattr(jobs, name)(), batch_size)
    watch, completion = GradientWatch(training), Completion(on_gpu=training.device.type == "cuda")
    spent_s, pairs, steps = 0.0, 0, 0
    rounds: dict[bool, list[float]] = {True: [], False: []}
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s or len(rounds[False]) < 3:
        for looks in (True, False):
            begun_s = time.perf_counter()
            for _ in range(ROUND_STEPS):
                training.step()
                completion.wait(pausing=False)
                if looks:
                    look_s, steps = time.perf_counter(), steps + 1
                    pairs += watch.look() is not None
                    spent_s += (time.perf_counter() - look_s) * (steps > WARM)
            rounds[looks].append(time.perf_counter() - begun_s)
    training.close()
    with_s, without_s = (statistics.median(rounds[looks][1:]) for looks in (True, False))
    on_gpu_s = watch.gpu_s * pairs
    return {
        "job": name,
        "batch_size": batch_size,
        "device": training.device.type,
        "step_ms": 1000 * without_s / ROUND_STEPS,
        "look_pct": 100 * (spent_s + on_gpu_s) / (sum(rounds[True]) * (steps - WARM) / steps),
        "loop_pct": 100 * (with_s / without_s - 1),
        "pairs": pairs,
        "steps": steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_output(parser)
    parser.add_argument("--jobs", default="digits_small,resnet18_small,char_transformer_small")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=20.0)
    arguments = parser.parse_args()
    rows = []
    for name in arguments.jobs.split(","):
        rows.append(cost(name, arguments.batch, arguments.seconds))
        told(rows[-1], COLUMNS)
    print(as_table(rows, COLUMNS))
    write("gradient_cost", rows, arguments)


if __name__ == "__main__":
    main()
