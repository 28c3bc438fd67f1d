"""How true, how honest and how quick is a measurement? On virtual boards, where the truth is known (simulated).

    python benchmarks/measure.py --cases 200 --json OUT

Random (board, job, mode, batch size) cases, one after the other on the same five boards as in a profile: a board stays
as warm as the last case left it, and how quickly its sensor settles is learned on the way. Each is measured by
``underwatt.measure.measurement`` through nothing but the simulated sensor and the ends of the steps. Truth: the board's
own physics at the temperature it had meanwhile. Beside it, the time that PowerTrain's fixed procedure takes: 2.5 s of
settling and 40 mini-batches.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _table import Column, add_output, as_table, write
from underwatt.device.registry import open_device
from underwatt.device.session import Session
from underwatt.errors import OutOfMemoryError
from underwatt.jobs.workloads import SimulatedWorkload
from underwatt.measure.measurement import measure
from underwatt.measure.steady import Settling
from underwatt.records import Setting, Status, WorkloadCost, WorkloadInfo

if TYPE_CHECKING:
    from underwatt.drivers.virtual.device import VirtualJetson

BOARDS = ("nano", "tx2-nx", "xavier-agx", "orin-nano", "orin-agx")
BATCH_SIZES = (4, 8, 16, 32, 64, 128)
POWERTRAIN_SETTLING_S = 2.5
POWERTRAIN_STEPS = 40


def random_cost(rng: random.Random) -> WorkloadCost:
    """A job between a small transformer and a large convolutional network."""

    def between(low: float, high: float) -> float:
        return low * (high / low) ** rng.random()

    parameters = between(1e6, 4e7)
    return WorkloadCost(
        flops_per_sample=between(3e7, 6e9),
        bytes_per_sample=between(1e6, 1e8),
        bytes_per_step=between(4, 12) * 4 * parameters,
        kernels_per_step=between(200, 2000),
        load_bytes_per_sample=between(1e3, 6e5),
        parameters=parameters,
        state_bytes=16 * parameters,
        activation_bytes_per_sample=between(2e5, 2e7),
    )


def one_case(rng: random.Random, device: VirtualJetson, settling: Settling) -> dict[str, object]:
    while True:
        setting = Setting(device.space[rng.randrange(len(device.space))], rng.choice(BATCH_SIZES))
        cost = random_cost(rng)
        try:
            device.board.check_memory(cost, setting.batch_size)
        except OutOfMemoryError:
            continue
        break
    workload = SimulatedWorkload(WorkloadInfo("random", "random"), cost, device)
    temperatures_c: list[tuple[float, float]] = []
    observer = device.clock.every(
        0.1, lambda: temperatures_c.append((device.clock.now_s(), device.board.temperature_c))
    )
    with Session(device) as session:
        found = measure(session, workload.start(setting.batch_size), setting, settling=settling)
    observer.cancel()
    from_s = device.clock.now_s() - found.window_s
    temperature_c = statistics.mean(degrees_c for at_s, degrees_c in temperatures_c if at_s >= from_s)
    step_s = device.board.true_step_s(cost, setting.mode, setting.batch_size)
    power_w = device.board.true_power_w(cost, setting.mode, setting.batch_size, temperature_c=temperature_c)
    return {
        "board": device.info.address,
        "setting": str(setting),
        "status": found.status.value,
        "true_step_s": step_s,
        "true_power_w": power_w,
        "step_error": found.step_s / step_s - 1,
        "power_error": found.power_w / power_w - 1,
        "step_covered": abs(found.step_s - step_s) <= found.step_s_ci95,
        "power_covered": abs(found.power_w - power_w) <= found.power_w_ci95,
        "steps": found.steps,
        "cost_s": found.cost_s,
        "powertrain_s": POWERTRAIN_SETTLING_S + POWERTRAIN_STEPS * step_s,
    }


def summarise(rows: list[dict[str, object]]) -> dict[str, float]:
    usable = [row for row in rows if row["status"] == Status.OK.value]

    def share(test: str, limit: float | None = None) -> float:
        values = [row[test] for row in usable]
        return statistics.mean(float(v) if limit is None else abs(float(v)) <= limit for v in values)

    return {
        "cases": len(rows),
        "unthrottled": len(usable),
        "step_within_1pct": share("step_error", 0.01),
        "power_within_1.5pct": share("power_error", 0.015),
        "step_cover95": share("step_covered"),
        "power_cover95": share("power_covered"),
        "median_cost_s": statistics.median(row["cost_s"] for row in usable),
        "median_powertrain_s": statistics.median(row["powertrain_s"] for row in usable),
        "median_cost_ratio": statistics.median(row["cost_s"] / row["powertrain_s"] for row in usable),
    }


COLUMNS = (Column("what"), Column("value", form=".4g"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    add_output(parser)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    started = time.perf_counter()
    devices = [open_device(f"virtual:{board}?seed={arguments.seed}") for board in BOARDS]
    known = {device.info.id: Settling() for device in devices}
    rows = []
    for _ in range(arguments.cases):
        device = rng.choice(devices)
        rows.append(one_case(rng, device, known[device.info.id]))
    summary = summarise(rows)
    print(f"simulated boards, {arguments.cases} cases in {time.perf_counter() - started:.1f} s")
    print(as_table([{"what": name, "value": value} for name, value in summary.items()], COLUMNS))
    write("measure", {"simulated": True, "summary": summary, "rows": rows}, arguments)


if __name__ == "__main__":
    main()
