"""One source for 20 boards, a solar day in minutes: its watts divided as suits the boards, against equal shares.

    python benchmarks/fleet_site.py --json OUT [--seeds 3] [--boards 20] [--skew iid] [--loss 0.1] [--workers 2]
                                    [--times 10 --stop]

Boards, network and learning are those of ``fleet.py``; the site's watts rise and fall as the sun does, and a tenth of
the messages is lost, each way. ``sooner`` is the time to the target with equal shares over that with ours; ``over_pct``
the most by which the sum over the site was above its watts in any window of 5 s. With ``--times 10`` a step costs ten
times the work, and the day is as much longer; ``--stop`` ends each run at its target.

equal      each board the same watts, a twentieth of the site's, or its floor; what it cannot use is lost
filled     the same, but what a board cannot use goes to others: whoever divides knows what each can use
underwatt  as ``Site`` divides, from what the boards report
"""

from __future__ import annotations

import argparse
import logging
import math
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

import fleet
from _table import Column, add_output, as_table, told, write
from underwatt.budget import Budget, Schedule
from underwatt.drivers.virtual.device import open_virtual
from underwatt.fleet.simulation import SimulatedFleet, Task
from underwatt.fleet.site import Site

if TYPE_CHECKING:
    from underwatt.fleet.simulation import FleetRecord
    from underwatt.fleet.site import Rule

WINDOW_S = 5
DAY_S, STEPS = 240.0, 12
LEAST_SHARE, MOST_SHARE = 0.25, 0.6  # of the way from all floors to all that the boards could draw
DELIVERY_S = 3.0
RULES: dict[str, Rule] = {"equal": "equal", "filled": "filled", "underwatt": "furthest"}
COLUMNS = (
    Column("boards"),
    Column("seed"),
    Column("method"),
    Column("time_s", "time s", ".0f"),
    Column("reached"),
    Column("final", "", ".3f"),
    Column("over_pct", "over %", ".2f"),
    Column("drawn_share", "drawn", ".1%"),
)


def run(count: int, skew: str, loss: float, seed: int, method: str, times: float, *, stops: bool) -> dict[str, Any]:
    """One training of a site."""
    logging.disable(logging.WARNING)
    task = replace(fleet._tasks[0], cost=fleet.costing(fleet._tasks[0].cost, times))
    plan = replace(fleet.plan_of(count, skew, seed, task.cost, times), loss=loss)
    boards, floors, mosts = [], {}, []
    for at, one in enumerate(plan.boards):
        power_w, _ = fleet.table(one.kind, task.cost)[fleet.SIZE]
        most_w = float(power_w[0] + 0.8 * (power_w[-1] - power_w[0]))
        idle_w = open_virtual(one.kind).board.power_w
        floors[at + 1] = 1.1 * max(idle_w, 0.0) + 0.1
        mosts.append(most_w)
        boards.append(replace(one, budget=Budget(power_w=most_w)))
    plan = replace(plan, boards=tuple(boards))
    low_w = sum(floors.values())
    room_w = sum(mosts) - low_w

    def sun_w(share: float) -> float:
        return low_w + (LEAST_SHARE + (MOST_SHARE - LEAST_SHARE) * math.sin(math.pi * share)) * room_w

    course = Schedule.of([(times * DAY_S * k / STEPS, sun_w((k + 0.5) / STEPS)) for k in range(STEPS)])
    site = Site(Budget(schedule=course), floors, delivery_s=DELIVERY_S, rule=RULES[method])
    record = SimulatedFleet(plan, task).run(site=site, stop_at_target=stops)
    over, drawn = judged(record, course)
    reached_s = record.reached_s
    return {
        "boards": count,
        "seed": seed,
        "method": method,
        "time_s": round(min(reached_s, plan.limit_s), 1),
        "reached": math.isfinite(reached_s),
        "final": round(statistics.fmean(score for _, score in record.scores[-3:]), 4),
        "over_pct": round(100 * over, 3),
        "drawn_share": round(drawn, 4),
    }


def judged(record: FleetRecord, course: Schedule) -> tuple[float, float]:
    """The worst window's share above the site's watts, and which share of its joules was drawn in all."""
    grid = np.arange(0.0, math.floor(record.ended_s) + 1.0)
    ends = [min(record.ended_s, board.lost_s) for board in record.plan.boards]
    drawn_j = sum(
        np.interp(np.minimum(grid, end_s), one.at_s, one.joules) for one, end_s in zip(record.watts, ends, strict=True)
    )
    allowed_j = np.array([sum((e - b) * w for b, e, w in course.pieces(0.0, at_s)) if at_s else 0.0 for at_s in grid])
    windows = (drawn_j[WINDOW_S:] - drawn_j[:-WINDOW_S]) / (allowed_j[WINDOW_S:] - allowed_j[:-WINDOW_S])
    return max(0.0, float(windows.max()) - 1.0), float(drawn_j[-1] / allowed_j[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--boards", type=int, default=20)
    parser.add_argument("--skew", default="iid")
    parser.add_argument("--loss", type=float, default=0.1)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--methods", default=",".join(RULES))
    parser.add_argument("--times", type=float, default=1.0, help="how often a step's work is that of the network")
    parser.add_argument("--stop", action="store_true", help="end each run where the target is reached")
    parser.add_argument("--workers", type=int, default=2)
    add_output(parser)
    options = parser.parse_args()
    methods = options.methods.split(",")
    asked = [
        (options.boards, options.skew, options.loss, seed, method, options.times)
        for seed in range(options.first_seed, options.first_seed + options.seeds)
        for method in methods
    ]
    rows = []
    with ProcessPoolExecutor(options.workers, get_context("spawn"), fleet._begin, (Task.digits(),)) as pool:
        for done in as_completed([pool.submit(run, *one, stops=options.stop) for one in asked]):
            rows.append(done.result())
            told(rows[-1], COLUMNS)
    rows.sort(key=lambda row: (row["seed"], row["method"]))
    print(as_table(rows, COLUMNS))
    times = {method: [row["time_s"] for row in rows if row["method"] == method] for method in methods}
    sooner = {
        rival: statistics.geometric_mean(a / b for a, b in zip(times[rival], times["underwatt"], strict=True))
        for rival in methods
        if rival != "underwatt" and "underwatt" in methods
    }
    for rival, ratio in sooner.items():
        print(f"\n{ratio:.2f} times sooner than {rival} shares")
    write("fleet_site", {"rows": rows, "sooner": sooner}, options)


if __name__ == "__main__":
    main()
