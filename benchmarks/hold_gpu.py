"""Holding mean watts on a real NVIDIA GPU by batch size and pauses alone: nothing is set on the card.

    python benchmarks/hold_gpu.py --json OUT [--cases run,trainer,long] [--budgets 250,350,300] [--first-s 90]
                                  [--level-s 50] [--work FOLDER]
    python benchmarks/hold_gpu.py --json OUT --cases steps [--jobs resnet18,char_transformer] [--budgets 250,350,450]

``run``, ``trainer`` and ``long`` are trainings as people start them (``_gpu_users.py``), of networks that nothing was
tuned with (``gpu_jobs.py``), under two scheduled levels and a posted one, judged by a process that polls the card's
counter (``_gpu_judge.py``): asked are means within 0.5% of the budget, and no window of 5 s, or of five steps with
their pauses, more than 1% above what the budgets allowed in it, from the first second of the training on. A mean is
that of a level less its first 3 s, and less the search in the first level.

``steps`` is a loop around the pilot that never tests. Each job is trained once under the budgets, one after the
other: ``underwatt`` measures the batch sizes while it trains under the first, and knows them under the others;
``naive`` pauses at the largest batch size. The card's own counter of joules judges: the last minute of each budget (a
quarter of a minute for ``naive``), and every window of 5 s in it. The first budget holds longer, for the measuring;
its windows from the very first second are judged too. Samples a second are those of the same time. What could have
been set on the card is read before and after, and must be the same.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import _gpu_users
import jobs
from _table import Column, add_output, as_table, told, write
from underwatt.budget import Budget, Schedule
from underwatt.control.live_budget import LiveBudget
from underwatt.control.pilot import Pilot
from underwatt.device.registry import open_device
from underwatt.jobs.identity import job_info
from underwatt.jobs.training import Completion, Training

if TYPE_CHECKING:
    from collections.abc import Sequence

    from underwatt.events import Event

USERS = ("run", "trainer", "long")
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


USER_COLUMNS = (
    Column("case"),
    Column("why"),
    Column("budget_w", "budget W", ".0f"),
    Column("seconds", "for s", ".0f"),
    Column("mean_over_pct", "mean over %", "+.2f"),
    Column("window_s", "window s", ".1f"),
    Column("worst_over_pct", "worst %", "+.2f"),
    Column("worst_at_s", "at s", ".1f"),
    Column("tests"),
    Column("test_share_pct", "tests %", ".1f"),
    Column("checkpoints"),
    Column("heard_after_s", "heard after s", ".2f"),
    Column("late"),
    Column("verdict"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_output(parser, json_required=True)
    parser.add_argument("--cases", default="run,trainer,long")
    parser.add_argument("--budgets", default="250,350,300", help="watts; of trainings by schedule, schedule and post")
    parser.add_argument("--first-s", type=float, default=90.0, help="of the first level, with the search")
    parser.add_argument("--level-s", type=float, default=50.0, help="of the others")
    parser.add_argument("--work", type=Path, help="logs and the counter's moves stay here")
    parser.add_argument("--jobs", default="resnet18,char_transformer", help="of the case steps")
    parser.add_argument("--methods", default="underwatt,naive", help="of the case steps")
    arguments = parser.parse_args()
    if unknown := set(arguments.cases.split(",")) - {*USERS, "steps"}:
        parser.error(f"There is no case {', '.join(sorted(unknown))}.")
    budgets_w = [float(watts) for watts in arguments.budgets.split(",")]
    device = open_device("nvml:")
    found, rows = dict(device.snapshot()), []

    def record(untouched: bool | None) -> dict[str, Any]:
        made = {"device": device.info.name, "software": dict(device.info.software), "untouched": untouched}
        return {**made, "rows": rows}

    def keep(row: dict[str, Any], columns: Sequence[Column]) -> None:
        rows.append(row)
        told(row, columns)
        arguments.json.write_text(json.dumps(record(None), indent=1), encoding="utf-8")

    for case in arguments.cases.split(","):
        if case == "steps":
            for name, method in product(arguments.jobs.split(","), arguments.methods.split(",")):
                for row in train(name, method, budgets_w):
                    keep(row, COLUMNS)
            continue
        work = arguments.work or Path(tempfile.mkdtemp(prefix="hold_gpu"))
        work.mkdir(parents=True, exist_ok=True)
        for row in _gpu_users.case(case, work, budgets_w, _gpu_users.Times(arguments.first_s, arguments.level_s)):
            keep(row, USER_COLUMNS)
    untouched = dict(device.snapshot()) == found
    for columns, kind in ((COLUMNS, "method"), (USER_COLUMNS, "case")):
        if chosen := [row for row in rows if kind in row]:
            print(as_table(chosen, columns))
    print("untouched:", untouched)
    write("hold_gpu", record(untouched), arguments)


if __name__ == "__main__":
    main()
