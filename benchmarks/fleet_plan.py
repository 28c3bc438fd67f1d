"""How long the server takes to plan a round, by the number of boards.

    python benchmarks/fleet_plan.py --json OUT [--boards 100,1000,10000]

Each board reports a front of 20 points; a round is planned for its own watts, and once more with a site's watts divided
among all of them. The messages themselves, which Flower makes one by one, are not in it. The median of five.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _table import Column, add_output, as_table, write
from underwatt.fleet.rounds import FIRST_TIMES, FrontPoint, Fronts, plan_round, round_length_s
from underwatt.fleet.site import Site

if TYPE_CHECKING:
    from collections.abc import Callable

POINTS, REPEATS, FLOOR_W = 20, 5, 3.0
COLUMNS = (
    Column("boards"),
    Column("fronts_s", "read fronts s", ".4f"),
    Column("plan_s", "plan s", ".4f"),
    Column("site_s", "divide a site s", ".4f"),
    Column("total_s", "total s", ".4f"),
    Column("per_board_us", "µs a board", ".1f"),
)


def _median_s(call: Callable[[], Any]) -> float:
    found = []
    for _ in range(REPEATS):
        begun_s = time.perf_counter()
        call()
        found.append(time.perf_counter() - begun_s)
    return statistics.median(found)


def row(count: int) -> dict[str, Any]:
    """One number of boards."""
    chance = np.random.default_rng(0)
    fronts = [
        [FrontPoint(8 << int(k % 5), 4.0 + k, s, 1.05 * s) for k, s in enumerate(chance.uniform(1e-3, 1e-2, POINTS))]
        for _ in range(count)
    ]
    idle_w, limit_w = np.full(count, 2.0), chance.uniform(4, 20, count)
    overhead_s, nodes = chance.uniform(0.5, 2.0, count), list(range(count))
    read = Fronts.of(fronts, idle_w)

    def divide() -> None:
        site = Site(8.0 * count, FLOOR_W)
        site.grant(0.0, nodes, read, limit_w, np.full(count, 500.0), 10.0, 256.0)

    found = {
        "fronts_s": _median_s(lambda: Fronts.of(fronts, idle_w)),
        "plan_s": _median_s(
            lambda: plan_round(
                read, limit_w, overhead_s, round_length_s(FIRST_TIMES, overhead_s, np.full(count, 0.1), searching=False)
            )
        ),
        "site_s": _median_s(divide),
    }
    total_s = sum(found.values())
    return {"boards": count, **found, "total_s": total_s, "per_board_us": 1e6 * total_s / count}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--boards", default="100,1000,10000")
    add_output(parser)
    options = parser.parse_args()
    rows = [row(int(count)) for count in options.boards.split(",")]
    print(as_table(rows, COLUMNS))
    write("fleet_plan", rows, options)


if __name__ == "__main__":
    main()
