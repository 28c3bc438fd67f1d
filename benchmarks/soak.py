"""A week of training on a virtual board: what it does to memory and disk, and whether its log tells the truth.

    python benchmarks/soak.py --json OUT [--days N]

Simulated: the board, its sensor and its time; steps cost what ResNet18's do, and nothing is computed. Real: the pilot
with its meter, controller and log, processes that are killed (SIGKILL, at three moments) and others that go on after
them, as `underwatt run --resume` does.

The budget follows the time of day. The room is warmer by day, and six times a day another process draws up to 0.6 W
and takes a tenth of the speed for 20 minutes. Every reading and every event is kept apart from the log, as it is
written there, and judged at the end in one piece.

memory_growth_mb  the most that a process ever held, over what it held one simulated hour after it began; of the worst
log_mb_a_day      all files of the log, with the single readings of the last hour, over the days
same_verdict      whether the log's verdict, energy and number of readings equal those from every reading, to the digit
said_held         the verdict that the run gave at its end, of all its parts
resume_mb         the most that a process held that read the whole log and made ready to go on with it
resume_s          how long that took
energy_over_pct   joules drawn above the budget, of all joules: true power and budget as means over 5 s, or over five
                  steps where those take longer
time_over_pct     share of such means that are more than 2% above the budget
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _table import Column, add_output, as_table, write
from underwatt.budget import parse_budget
from underwatt.control.live_budget import LiveBudget
from underwatt.control.pilot import Pilot
from underwatt.device.registry import open_device
from underwatt.events import Event, from_line
from underwatt.jobs.runs import LOG_NAME, SoFar, taken_so_far
from underwatt.measure.meter import Trace
from underwatt.records import WorkloadCost, WorkloadInfo
from underwatt.runlog.line_files import recent_files, recent_folder
from underwatt.runlog.log import RunLog, read_log
from underwatt.runlog.run_record import RunRecord

if TYPE_CHECKING:
    from collections.abc import Sequence

BOARD = "nano"
BATCH_SIZES = (64, 128)  # 1.5 s a step and more
BUDGET = "07:00-12:00=5W,12:00-18:00=6W,18:00-22:00=4W,else=3.2W"
# ResNet18 at 32x32, as ``underwatt.jobs.cost`` counts it.
COST = WorkloadCost(3.329e9, 4.30e7, 1.073e9, 177, 1.23e4, 1.1174e7, 1.788e8, 4.70e6)
WORKLOAD = WorkloadInfo("resnet18", "soak")
DAY_S, HOUR_S = 86_400.0, 3600.0
KILLED = (0.043, 0.117, 0.214)  # at these shares of the time: the last process lives longest
WEATHER_S = 30.0
BUSY_S, BUSY_EVERY_S, BUSY_W, SLOWER = 1200.0, 4 * HOUR_S, 0.6, 1.1
NOTHING: Any = SimpleNamespace(elapsed_s=0.0, energy_j=0.0)  # there is no checkpoint, and the log knows all
FEWEST_WINDOW_S, WINDOW_STEPS, TOLERANCE = 5.0, 5, 0.02


class WatchedLog(RunLog):
    """A log that also keeps everything apart, as it is written: readings in one file, events in another."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / LOG_NAME)
        self._apart = (folder / "readings.bin").open("ab"), (folder / "events.jsonl").open("ab")

    def flush(self) -> None:
        """Write to both; what a kill takes from the one, it takes from the other."""
        readings, events = self._apart
        readings.write(array("d", [number for reading in self._readings for number in reading]).tobytes())
        events.write(b"".join(line for event, line in self._events if event.kind != "progress"))
        for file in self._apart:
            file.flush()
        super().flush()


def weather(at_s: float) -> tuple[float, float, float]:
    """Watts of another process, how much it slows the training, and the room's temperature."""
    room_c = 24.0 + 8.0 * math.sin(2 * math.pi * (at_s / DAY_S - 0.3))
    number, since_s = divmod(at_s, BUSY_EVERY_S)
    begins_s = (0.15 + 0.6 * (0.618 * number % 1)) * BUSY_EVERY_S  # never twice at the same time of day
    busy = begins_s <= since_s < begins_s + BUSY_S
    return (BUSY_W * (0.4 + 0.6 * (0.414 * number % 1)), SLOWER, room_c) if busy else (0.0, 1.0, room_c)


def memory_mb(name: str = "VmRSS") -> float:
    """What this process holds now, or (``VmHWM``) held at most."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return next(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith(name))


def train(folder: Path, seed: int, until_s: float, kill_s: float) -> None:
    """One process of the run: begins it, or goes on with it, until it is over or killed."""
    log_path = folder / LOG_NAME
    taken = taken_so_far(log_path, NOTHING) if log_path.exists() else SoFar()
    elapsed_s = taken.elapsed_s
    device: Any = open_device(f"virtual:{BOARD}?seed={seed}")
    live = LiveBudget(parse_budget(BUDGET), time_of_day_s=0.0)
    begun_s = -math.inf
    truth, held = array("d"), array("d")

    def each_second() -> None:
        at_s = device.clock.now_s() - begun_s
        if at_s >= kill_s:
            save(truth, held)
            os.kill(os.getpid(), signal.SIGKILL)
        truth.extend((at_s, device.board.energy_j, live.power_w(at_s)))
        if math.floor(at_s) % int(WEATHER_S) == 0:
            extra_w, slower, room_c = weather(at_s)
            device.board.disturb(extra_w=extra_w, slow_factor=slower, ambient_c=room_c)
            held.extend((at_s - elapsed_s, memory_mb()))
        if len(truth) > 9000:
            save(truth, held)

    def save(*kept: array[float]) -> None:
        for name, values in zip((f"truth-{seed}.bin", f"memory-{seed}.bin"), kept, strict=True):
            with (folder / name).open("ab") as file:
                values.tofile(file)
            del values[:]

    log = WatchedLog(folder)
    pilot = Pilot(device, WORKLOAD, BATCH_SIZES, live, cost=COST, log=log, elapsed_s=elapsed_s)
    pilot.continues(samples=0, steps=0, share=0.0, energy_j=taken.energy_j, verdict=taken.verdict)
    with log, pilot:
        begun_s = device.clock.now_s() - pilot.elapsed_s
        timer = device.clock.every(1.0, each_second)
        while pilot.elapsed_s < until_s:
            batch_size = pilot.batch_size
            pilot.simulate(batch_size)
            pilot.stepped(batch_size)
        timer.cancel()
        save(truth, held)
        log.flush()


def resume(folder: Path) -> None:
    """What going on with the run takes before its first step, as JSON."""
    before_mb, began_s = memory_mb(), time.process_time()
    taken_so_far(folder / LOG_NAME, NOTHING)
    with RunLog(folder / LOG_NAME):
        pass
    took_s = time.process_time() - began_s
    print(json.dumps({"resume_mb": memory_mb("VmHWM"), "before_mb": before_mb, "resume_s": took_s}))


def run_part(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, __file__, *arguments], check=False, text=True, stdout=subprocess.PIPE, env=dict(os.environ)
    )


def every_reading(folder: Path) -> RunRecord:
    """The run by all that was kept apart."""
    at_s, power_w = np.round(np.fromfile(folder / "readings.bin").reshape(-1, 2).T, 4)
    lines = (folder / "events.jsonl").read_bytes().splitlines()
    events = [event for line in lines if isinstance(event := from_line(line), Event)]
    return RunRecord(tuple(events), Trace(at_s, power_w, None, missed=0))


def figures_of(record: RunRecord) -> list[Any]:
    """What must be the same, whichever way it was come by."""
    return [record.tally, record.tally.verdict, record.energy_j(), record.energy_over_j()]


def over_budget(parts: Sequence[Any], steps_s: float) -> tuple[float, float]:
    """Shares of the joules and of the time above the budget, by true power."""
    window = round(max(FEWEST_WINDOW_S, WINDOW_STEPS * steps_s))
    over_j = total_j = over_count = count = 0.0
    for at_s, energy_j, budget_w in parts:
        if len(at_s) <= window:
            continue
        seconds = at_s[window:] - at_s[:-window]
        drawn_w = (energy_j[window:] - energy_j[:-window]) / seconds
        allowed = np.concatenate([[0.0], np.cumsum(budget_w[:-1] * np.diff(at_s))])
        allowed_w = (allowed[window:] - allowed[:-window]) / seconds
        over_w = drawn_w - allowed_w
        over_j += float(np.maximum(over_w, 0.0).sum())
        total_j += float(drawn_w.sum())
        over_count += float(np.sum(over_w > TOLERANCE * allowed_w))
        count += len(over_w)
    return over_j / total_j, over_count / count


def growth_mb(held: Sequence[Any]) -> float:
    """The most that any process held later than an hour after it began, over what it held then."""
    found = [0.0]
    for since_s, mb in held:
        later = since_s >= HOUR_S
        if later.any():
            found.append(float(mb[later].max() - mb[later][0]))
    return max(found)


def soak(folder: Path, days: float) -> dict[str, Any]:
    began_s = time.perf_counter()
    until_s = days * DAY_S
    for part, kill_s in enumerate([*(share * until_s for share in KILLED), math.inf]):
        ended = run_part("--train", str(folder), "--part", str(part), "--until", str(until_s), "--kill", str(kill_s))
        expected = -signal.SIGKILL if math.isfinite(kill_s) else 0
        if ended.returncode != expected:
            raise SystemExit(f"part {part} ended with {ended.returncode}, not {expected}")
        print(
            f"part {part + 1} of {len(KILLED) + 1}: {time.perf_counter() - began_s:.0f} s", file=sys.stderr, flush=True
        )
    took_s = time.perf_counter() - began_s
    parts = range(len(KILLED) + 1)
    truth = [np.fromfile(folder / f"truth-{part}.bin").reshape(-1, 3).T for part in parts]
    held = [np.fromfile(folder / f"memory-{part}.bin").reshape(-1, 2).T for part in parts]
    log = folder / LOG_NAME
    size = sum(path.stat().st_size for path in (log, *recent_files(recent_folder(log))))
    resumed = json.loads(run_part("--resume", str(folder)).stdout)
    record, apart = read_log(log), every_reading(folder)
    end = record.end
    assert end is not None
    steps_s = (1 - KILLED[-1]) * until_s / max(end.steps, 1)  # of the last process, with the pauses between them
    energy_over, time_over = over_budget(truth, steps_s)
    return {
        "days": days,
        "simulated": True,
        "readings": apart.tally.readings,
        "kills": len(KILLED),
        "memory_growth_mb": growth_mb(held),
        "memory_mb": max(float(mb.max()) for _, mb in held),
        "log_mb_a_day": size / 1e6 / days,
        "same_verdict": figures_of(record) == figures_of(apart),
        "log_over_s": record.tally.verdict.over_s,
        "readings_over_s": apart.tally.verdict.over_s,
        "said_held": end.verdict.held if end.verdict else None,
        "said_bounded_s": end.verdict.bounded_s if end.verdict else None,
        "resume_mb": resumed["resume_mb"],
        "resume_s": resumed["resume_s"],
        "energy_over_pct": 100 * energy_over,
        "time_over_pct": 100 * time_over,
        "took_s": took_s,
    }


COLUMNS = (
    Column("days", form="g"),
    Column("memory_growth_mb", "memory growth MB", ".1f"),
    Column("memory_mb", "memory MB", ".0f"),
    Column("log_mb_a_day", "log MB/day", ".2f"),
    Column("same_verdict", "same verdict"),
    Column("log_over_s", "over s (log)", ".1f"),
    Column("readings_over_s", "over s (readings)", ".1f"),
    Column("said_held", "said held"),
    Column("resume_mb", "resume MB", ".0f"),
    Column("resume_s", "resume s", ".1f"),
    Column("energy_over_pct", "energy over %", ".2f"),
    Column("time_over_pct", "time over %", ".2f"),
    Column("took_s", "took s", ".0f"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_output(parser)
    parser.add_argument("--days", type=float, default=7.0, help="simulated days of the run")
    for hidden, kind in (("--train", Path), ("--resume", Path), ("--part", int), ("--until", float), ("--kill", float)):
        parser.add_argument(hidden, type=kind, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        return train(arguments.train, arguments.part, arguments.until, arguments.kill)
    if arguments.resume:
        return resume(arguments.resume)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["UNDERWATT_STATE"] = str(Path(folder) / "state")
        row = soak(Path(folder), arguments.days)
    print(as_table([row], COLUMNS))
    write("soak", [row], arguments)
    return None


if __name__ == "__main__":
    main()
