"""What the NVML driver and the meter say on a real NVIDIA GPU; clocks, limits and modes stay untouched.

    python benchmarks/gpu_record.py --json OUT [--window-s 8] [--repeats 2]

Two questions. Does every read work, and what does it cost? And is the energy right: ResNet18 and the character
transformer are trained at six batch sizes, twice, and for each the integral of the sampled power is set beside the
card's own energy counter, and the first run beside the second. Needs PyTorch with CUDA, nvidia-ml-py, and the texts
(UNDERWATT_DATA). The records in ``results/`` were made by this script.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _table import Column, add_output, as_table, write
from underwatt.device.session import Session
from underwatt.drivers.nvml import NvmlDevice
from underwatt.jobs.job import load_job
from underwatt.jobs.workloads import TorchRun, TorchWorkload
from underwatt.measure.measurement import MeasureOptions, measure
from underwatt.measure.meter import Meter
from underwatt.measure.steady import Settling
from underwatt.records import PowerMode, Setting, to_json

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
JOBS = ("resnet18", "char_transformer")
BATCH_SIZES = (4, 16, 64, 128, 256, 1024)


def reads(device: NvmlDevice) -> dict[str, Any]:
    """Every read once, and the cost of the one that is made ten times a second."""
    costs_us = []
    for _ in range(200):
        started = time.perf_counter()
        device.read_power()
        costs_us.append((time.perf_counter() - started) * 1e6)
    return {
        "info": to_json(device.info),
        "capabilities": to_json(device.capabilities()),
        "modes": len(device.space),
        "knobs": {knob.name: [knob.values[0], knob.values[-1], len(knob.values)] for knob in device.space.knobs},
        "state": to_json(device.read_state()),
        "snapshot": dict(device.snapshot()),
        "sample": to_json(device.read_power()),
        "read_power_us_median": statistics.median(costs_us),
        "read_power_us_p95": sorted(costs_us)[189],
    }


def energy_row(device: NvmlDevice, run: TorchRun, window_s: float) -> dict[str, float]:
    """Train for a while and integrate: by samples, by the counter."""
    with Meter(device) as meter:
        end_s = device.clock.now_s() + window_s
        while device.clock.now_s() < end_s:
            run.step()
            meter.beat()
    trace = meter.trace()
    assert trace.counter_j is not None, "this card has no energy counter to compare with"
    return {
        "integrated_j": trace.integrated_j,
        "counter_j": trace.energy_j,
        "energy_error_pct": 100 * (trace.integrated_j / trace.energy_j - 1),
        "samples": len(trace),
        "missed_samples": trace.missed,
        "steps": len(meter.step_times()),
    }


COLUMNS = (
    Column("job"),
    Column("batch_size", "batch"),
    Column("repeat"),
    Column("step_s", "step s", ".5f"),
    Column("power_w", "power W", ".1f"),
    Column("cost_s", "measured for s", ".1f"),
    Column("energy_error_pct", "integral / counter %", "+.2f"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_output(parser, json_required=True)
    parser.add_argument("--window-s", type=float, default=8.0)
    parser.add_argument("--limit-s", type=float, default=15.0, help="longest time to measure one setting")
    parser.add_argument("--repeats", type=int, default=2)
    arguments = parser.parse_args()
    device = NvmlDevice("0")
    record: dict[str, Any] = {
        "made_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(),
        "untouched": "no clock, limit or mode was set",
        "reads": reads(device),
        "rows": [],
    }
    options = MeasureOptions(limit_s=arguments.limit_s)
    as_it_is = PowerMode()
    with Session(device) as session:
        for repeat in range(arguments.repeats):
            for name in JOBS:
                workload = TorchWorkload(load_job(f"{EXAMPLES / 'jobs.py'}:{name}"))
                settling = Settling()
                for batch_size in BATCH_SIZES:
                    run = workload.start(batch_size)
                    measured = measure(session, run, Setting(as_it_is, batch_size), options, settling)
                    row = {"job": name, "batch_size": batch_size, "repeat": repeat, "measured": to_json(measured)}
                    row |= energy_row(device, run, arguments.window_s)
                    run.stop()
                    record["rows"].append(row)
                    print(
                        f"{name:16} b={batch_size:<5} {measured.step_s * 1e3:8.2f} ms {measured.power_w:7.1f} W "
                        f"in {measured.cost_s:4.1f} s; integral against counter {row['energy_error_pct']:+.2f}%",
                        file=sys.stderr,
                        flush=True,
                    )
                    arguments.json.write_text(json.dumps(record, indent=1))
    after = dict(device.snapshot())
    record["limit_unchanged"] = after == record["reads"]["snapshot"]
    record["summary"] = summary(record["rows"])
    print(as_table([row | row["measured"] for row in record["rows"]], COLUMNS))
    costs = {name: value for name, value in record["reads"].items() if name.startswith("read_power_us")}
    shown = [{"what": name, "value": value} for name, value in (costs | record["summary"]).items()]
    print(as_table(shown, (Column("what"), Column("value", form=".4g"))))
    print("limit unchanged:", record["limit_unchanged"])
    write("gpu_record", record, arguments)
    sys.exit(0 if record["limit_unchanged"] else 1)


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    spreads: dict[str, list[float]] = {"step_s": [], "power_w": []}
    for job in JOBS:
        for batch_size in BATCH_SIZES:
            pair = [r["measured"] for r in rows if r["job"] == job and r["batch_size"] == batch_size]
            for name, values in spreads.items():
                figures = [m[name] for m in pair]
                values.append(100 * (max(figures) - min(figures)) / statistics.mean(figures))
    errors = [abs(row["energy_error_pct"]) for row in rows]
    return {
        "energy_error_pct_median": statistics.median(errors),
        "energy_error_pct_worst": max(errors),
        "step_spread_pct_median": statistics.median(spreads["step_s"]),
        "step_spread_pct_worst": max(spreads["step_s"]),
        "power_spread_pct_median": statistics.median(spreads["power_w"]),
        "power_spread_pct_worst": max(spreads["power_w"]),
        "measuring_s_median": statistics.median(row["measured"]["cost_s"] for row in rows),
    }


if __name__ == "__main__":
    main()
