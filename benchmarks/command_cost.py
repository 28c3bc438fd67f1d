"""What an asked step costs a command: time of its CPU, and of the clock until the answer is there.

    python benchmarks/command_cost.py [--python PATH,…] [--steps N] [--json OUT] [--keep]

Real: the script in a process of its own with ``underwatt_beat.py``, the pipes, and the whole of ``underwatt run``'s
parent (pilot, meter, log). Made up: the device, which always reads about the same watts. Each step is
followed by 2 ms of sleep, as a script that waits for a GPU does.

asked_cpu_us     time of the script's own process in ``step`` and ``ask``, where the question is sent and answered
asked_wall_us    from before ``step`` to the answer: the round trip
calm_us          the same while nobody needs to ask, which the answer says for 0.2 s at a time
alone_us         the same without Underwatt
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _table import Column, add_output, as_table, told, write
from controller_cost import ConstantLoad
from underwatt.budget import Budget
from underwatt.control.live_budget import LiveBudget
from underwatt.jobs import emitter
from underwatt.jobs.command import CommandWorkload
from underwatt.jobs.command_run import run_command
from underwatt.jobs.runs import Run, RunOptions
from underwatt.records import PowerSample
from underwatt.store.store import Store

MOST_CPU_US, MOST_WALL_US = 30.0, 100.0
SCRIPT = """
import json, os, sys, time
import underwatt_beat as beat

def timed(steps, is_calm):
    wall, begun = [], []
    for _ in range(steps):
        time.sleep(0.002)
        if not is_calm:
            beat._calm_until_s = 0.0
        cpu_s, began_s = time.process_time(), time.perf_counter()
        beat.step(size=16)
        beat.ask(16)
        wall.append(time.perf_counter() - began_s)
        begun.append(time.process_time() - cpu_s)
    return wall, begun

beat.ask(16)
end_s = time.monotonic() + float(sys.argv[3])
while time.monotonic() < end_s:  # measured, then held
    timed(50, False)
found = [timed(int(sys.argv[2]), is_calm) for is_calm in (False, True)]
with open(sys.argv[1], "w") as file:
    json.dump(found, file)
"""


class NoisyLoad(ConstantLoad):
    """The same with some noise, without which its sensor would be taken to be stuck."""

    def read_power(self) -> PowerSample:
        """About 5 W."""
        return PowerSample(self.clock.now_s(), random.uniform(4.99, 5.01))


def measure(python: str, steps: int, folder: Path) -> dict[str, Any]:
    """A run of the script under a budget that asks for no pauses, and one without anybody who listens."""
    import subprocess

    (folder / "underwatt_beat.py").write_text(Path(emitter.__file__).read_text(encoding="utf-8"), encoding="utf-8")
    script, out = folder / "script.py", folder / "out.json"
    script.write_text(SCRIPT, encoding="utf-8")
    command = [python, str(script), str(out), str(steps)]
    device: Any = NoisyLoad()
    with Store(folder / "store.db") as store:
        run = Run(RunOptions(), device, LiveBudget(Budget(power_w=10.0)), folder / "run", store, (16,))
        run_command(run, CommandWorkload([*command, "15"]))
    (asked, asked_cpu), (calm, _) = json.loads(out.read_text(encoding="utf-8"))
    subprocess.run([*command, "0"], check=True)
    _, (alone, _) = json.loads(out.read_text(encoding="utf-8"))
    version = subprocess.check_output([python, "-V"], text=True).split()[1]
    return {
        "python": version,
        "steps": len(asked),
        "asked_cpu_us": 1e6 * statistics.median(asked_cpu),
        "asked_cpu_us_mean": 1e6 * statistics.mean(asked_cpu),
        "asked_wall_us": 1e6 * statistics.median(asked),
        "asked_wall_us_p90": 1e6 * statistics.quantiles(asked, n=10)[8],
        "asked_wall_us_best": 1e6 * min(asked),
        "calm_us": 1e6 * statistics.median(calm),
        "alone_us": 1e6 * statistics.median(alone),
    }


COLUMNS = (
    Column("python"),
    Column("steps"),
    Column("asked_cpu_us", "CPU µs", ".1f"),
    Column("asked_cpu_us_mean", "mean", ".1f"),
    Column("asked_wall_us", "round trip µs", ".1f"),
    Column("asked_wall_us_p90", "90%", ".0f"),
    Column("asked_wall_us_best", "best", ".1f"),
    Column("calm_us", "calm µs", ".1f"),
    Column("alone_us", "alone µs", ".1f"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_output(parser)
    parser.add_argument("--python", default=sys.executable, help="interpreters of the script, with commas between")
    parser.add_argument("--steps", type=int, default=3000)
    arguments = parser.parse_args()
    rows = []
    for python in arguments.python.split(","):
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(python, arguments.steps, Path(folder)))
        told(rows[-1], COLUMNS)
    print(as_table(rows, COLUMNS))
    kept = all(row["asked_cpu_us"] <= MOST_CPU_US and row["asked_wall_us"] <= MOST_WALL_US for row in rows)
    print(f"asked: {MOST_CPU_US:g} µs in the script, {MOST_WALL_US:g} µs round trip: {'kept' if kept else 'not kept'}")
    write("command_cost", rows, arguments)


if __name__ == "__main__":
    main()
