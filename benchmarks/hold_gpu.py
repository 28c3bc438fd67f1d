"""Holding mean watts on a real NVIDIA GPU by batch size and pauses alone: nothing is set on the card.

    python benchmarks/hold_gpu.py --json OUT [--jobs resnet18,char_transformer] [--budgets 250,350,450] [--methods …]

Each job is trained once under the budgets, one after the other: ``underwatt`` measures the batch sizes while it trains
under the first, and knows them under the others; ``naive`` pauses at the largest batch size. The card's own counter of
joules judges: the last minute of each budget (a quarter of a minute for ``naive``), and every window of 5 s in it. The
first budget holds longer, for the measuring; its windows from the very first second are judged too. Samples a second
are those of the same time. What could have been set on the card is read before and after, and must be the same.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import jobs
from _table import Column, add_output, as_table, told, write
from underwatt.budget import Budget, Schedule
from underwatt.control.live_budget import LiveBudget
from underwatt.control.pilot import Pilot
from underwatt.device.registry import open_device
from underwatt.jobs.identity import job_info
from underwatt.jobs.training import Completion, Training

if TYPE_CHECKING:
    from underwatt.events import Event

SIZES = {"resnet18": (64, 128, 256, 512, 1024), "char_transformer": (32, 64, 128, 256, 512)}
WINDOW_S = 5.0
JUDGED_S = {"underwatt": 60.0, "naive": 15.0}
SETTLES_S, SEARCH_S = 3.0, 32.0
LATE_S = 0.15  # after the reading before


def train(name: str, method: str, budgets_w: list[float]) -> list[dict[str, Any]]:
    sizes = SIZES[name] if method == "underwatt" else SIZES[name][-1:]
    device = open_device("nvml:")
    job = getattr(jobs, name)()
    training = Training(job, sizes[0])
    completion = Completion(on_gpu=True)
    for size in sizes:  # memory is given and kernels are chosen once, as in any training that has gone on for a while
        training.set_batch_size(size)
        for _ in range(3):
            training.step()
    completion.wait(pausing=True)
    level_s = JUDGED_S[method] + SETTLES_S
    search_s = SEARCH_S if method == "underwatt" else 0.0
    begins_s = [0.0] + [search_s + level_s * (at + 1) for at in range(len(budgets_w) - 1)]
    live = LiveBudget(Budget(schedule=Schedule.of(zip(begins_s, budgets_w, strict=True))))
    beats: list[tuple[float, int, float]] = []
    events: list[str] = []

    def listen(event: Event) -> None:
        if event.kind in ("setting", "measured", "note", "budget"):
            events.append(f"{device.clock.now_s() - begun_s:.1f} {event}"[:400])

    begun_s = device.clock.now_s()
    pilot = Pilot(device, job_info(job), sizes, live, set_modes=False, listener=listen)
    with pilot:
        begun_s = device.clock.now_s() - pilot.elapsed_s  # by which the schedule goes
        while (now_s := device.clock.now_s() - begun_s) < search_s + level_s * len(budgets_w):
            training.set_batch_size(pilot.batch_size)
            training.step()
            completion.wait(pausing=pilot.controller.pausing)
            pilot.stepped(training.batch_size)
            beats.append((now_s, training.batch_size, pilot.controller.pause_share))
        readings = pilot.meter.readings_after(begun_s)
    training.close()
    at_s = np.array([reading.at_s - begun_s for reading in readings])
    counter_j = np.array([reading.energy_j for reading in readings], dtype=float)
    rows = []
    for level, (begin_s, budget_w) in enumerate(zip(begins_s, budgets_w, strict=True)):
        end_s = search_s + level_s * (level + 1)
        judged = (at_s >= end_s - JUDGED_S[method]) & (at_s <= end_s)
        first = (at_s >= begin_s) & (at_s <= end_s)
        part_s, part_j = at_s[judged], counter_j[judged]
        mean_w = (part_j[-1] - part_j[0]) / (part_s[-1] - part_s[0])
        trained = [size for moment_s, size, _ in beats if part_s[0] <= moment_s <= part_s[-1]]
        rows.append(
            {
                "method": method,
                "job": name,
                "budget_w": budget_w,
                "mean_w": mean_w,
                "mean_over_pct": 100 * (mean_w / budget_w - 1),
                "worst_5s_over_pct": worst(part_s, part_j, budget_w),
                "worst_5s_over_pct_late_too": worst(part_s, part_j, budget_w, np.inf),
                "late_readings": int((np.diff(part_s) > LATE_S).sum()),
                "readings": len(part_s),
                "worst_5s_over_pct_since_change": worst(at_s[first], counter_j[first], budget_w),
                "samples_per_s": sum(trained) / (part_s[-1] - part_s[0]),
                "batch_sizes": {size: trained.count(size) for size in sorted(set(trained))},
            }
        )
    rows[0]["events"] = events
    rows[0]["trace"] = {"at_s": at_s.round(3).tolist(), "joules": (counter_j - counter_j[0]).round(1).tolist()}
    return rows


def worst(at_s: Any, counter_j: Any, budget_w: float, late_s: float = LATE_S) -> float:
    """The highest mean of any window, in percent above the budget.

    The card's counter moves ten times a second and is read when it does. A reading that came late, because the machine
    was busy, may tell of a moment up to a tenth of a second ago: it begins and ends no window.
    """
    timely = np.diff(at_s, prepend=at_s[0]) <= late_s
    at_s, counter_j = at_s[timely], counter_j[timely]
    ends_j = np.interp(at_s + WINDOW_S, at_s, counter_j)
    whole = at_s + WINDOW_S <= at_s[-1]
    return 100 * float(((ends_j - counter_j)[whole] / WINDOW_S).max() / budget_w - 1)


COLUMNS = (
    Column("method"),
    Column("job"),
    Column("budget_w", "budget W", ".0f"),
    Column("mean_w", "mean W", ".1f"),
    Column("mean_over_pct", "mean over %", "+.2f"),
    Column("worst_5s_over_pct", "worst 5 s %", "+.2f"),
    Column("worst_5s_over_pct_since_change", "since change %", "+.2f"),
    Column("late_readings", "late"),
    Column("readings"),
    Column("samples_per_s", "samples/s", ".0f"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_output(parser, json_required=True)
    parser.add_argument("--jobs", default="resnet18,char_transformer")
    parser.add_argument("--budgets", default="250,350,450")
    parser.add_argument("--methods", default="underwatt,naive")
    arguments = parser.parse_args()
    device = open_device("nvml:")
    found = dict(device.snapshot())
    rows: list[dict[str, Any]] = []

    def record(untouched: bool | None) -> dict[str, Any]:
        made = {"device": device.info.name, "software": dict(device.info.software), "untouched": untouched}
        return {**made, "rows": rows}

    for name in arguments.jobs.split(","):
        for method in arguments.methods.split(","):
            began = time.monotonic()
            for row in train(name, method, [float(watts) for watts in arguments.budgets.split(",")]):
                rows.append(row)
                told(row, COLUMNS)
            arguments.json.write_text(json.dumps(record(None), indent=1), encoding="utf-8")
            print(f"{time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    untouched = dict(device.snapshot()) == found
    print(as_table(rows, COLUMNS))
    print("untouched:", untouched)
    write("hold_gpu", record(untouched), arguments)


if __name__ == "__main__":
    main()
