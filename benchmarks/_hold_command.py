"""Cases ``command`` and ``command-job`` of ``hold.py``: real processes, real time, a Nano's files as a kernel has them.

The board is the mount of ``tests/helpers/kernel_mount.py`` (JetPack 4). Its watts are simulated: they follow the clocks
and cores that are set on it, and whether a step is under way, which the script itself says through the mount for as
long as a step lasts. A step computes nothing: it sleeps as long as such a step would take at the GPU's clock as it is
read when it begins. What is real: ``underwatt run`` as a user starts it, the script under Python 3.6 or 3.8 with
``underwatt_beat.py``, their pipes, clocks set and put back through the files, ``underwatt budget``, ``kill -9``, and
``--resume``.

command       the script runs as a command. Batch sizes above 64 do not fit. Underwatt is killed in the middle of the
              second level and the run is resumed; what is judged leaves out the time in between
command-job   the same steps in a process with ``underwatt.tune``, not killed: what a job does there

Watts are judged as in the other cases, by what the mount says was drawn.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))

from _hold_judge import Drawn, judge
from underwatt.runlog.inbox import post_budget
from underwatt.runlog.log import read_log

if TYPE_CHECKING:
    from kernel_mount import Mount

    Row = dict[str, Any]

CASES = ("command", "command-job")
LEVELS_W = (3.6, 2.9, 3.3)  # steps draw 2.3 to 4.6 W on this board, waiting 2.1 to 2.8 W
LEVEL_S, SETTLED_S = 40.0, 30.0  # for each level; since the start of what is killed in the middle of the second
SIZES, FITS = (8, 16, 32, 64, 128), 64
TICK_S, IDLE_LOAD, BUSY_LOAD = 0.1, 0.05, 0.9
SAMPLES = 4096  # of the made up data set
PYTHONS = ("3.6", "3.8")

STEP = (
    """
import sys, time
root, note = sys.argv[1], open(sys.argv[2], "a")

def put(load):
    with open(root + "/.kernel/load", "w") as file:
        file.write(str(load))

def mhz():
    with open(root + "/sys/class/devfreq/57000000.gpu/max_freq") as file:
        return float(file.read()) / 1e6

def train(size):
    if size > FITS:
        raise RuntimeError("CUDA out of memory.")
    put(BUSY)
    time.sleep(0.015 + size * (0.0003 + 0.9 / mhz() / 2))
    put(IDLE)

put(IDLE)
""".replace("FITS", str(FITS))
    .replace("BUSY", str(BUSY_LOAD))
    .replace("IDLE", str(IDLE_LOAD))
)
COMMAND = (
    STEP
    + """
import underwatt_beat as beat
done = beat.samples
size = beat.ask(16)
while size:
    try:
        train(size)
    except RuntimeError as error:
        size = beat.oom(size)
        if not size:
            raise
        continue
    beat.step(size=size)
    note.write("%d %d\\n" % (done, size)); note.flush()
    done += size
    beat.saved(done)
    size = beat.ask(size)
"""
)
JOB = (
    STEP
    + """
import underwatt
with underwatt.tune(device="jetson:" + root, budget_w=float(sys.argv[3]), batch_sizes=SIZES, name="steps",
                    folder=sys.argv[4]) as tuner:
    while True:
        size = tuner.batch_size
        try:
            with tuner.training():
                tuner.starts(size)
                train(size)
                tuner.step()
        except Exception as error:
            if "memory" not in str(error):
                raise
            tuner._pilot.out_of_memory(size)
            continue
        note.write("0 %d\\n" % size); note.flush()
""".replace("SIZES", str(SIZES))
)


def why_not() -> str:
    """Why these cases cannot be had here, or nothing."""
    import kernel_mount

    return kernel_mount.why_not() or ("" if old_python() else f"there is no Python {' or '.join(PYTHONS)} here")


def old_python() -> str:
    """The oldest of the Pythons of the boards that this machine has."""
    for version in PYTHONS:
        found = [*(Path.home() / ".pyenv/versions").glob(f"{version}.*/bin/python"), Path(f"/usr/bin/python{version}")]
        if here := [path for path in found if path.exists()]:
            return str(here[0])
    return ""


def run_case(kind: str, seed: int) -> Row:
    """One case; ``seed`` is that of the sensor's noise and the kernel's moods."""
    from board_matrix import CELLS
    from kernel_mount import mounted

    with tempfile.TemporaryDirectory(prefix="hold-") as name:
        folder = Path(name)
        os.environ["UNDERWATT_STATE"] = str(folder / "state")
        with mounted(CELLS["nano", "4"], folder / "board", seed=seed, faults=0.0) as mount:
            mount.tell("use_gpu")
            mount.tell("load", str(IDLE_LOAD))
            found = mount.settled()
            case = _Case(kind, folder, mount)
            case.go()
            row = {"case": f"nano {kind} {seed}", "board": "nano", "kind": kind, "seed": seed, **case.figures()}
            row["restored"] = mount.settled() == found
        return row


class _Case:
    def __init__(self, kind: str, folder: Path, mount: Mount) -> None:
        from underwatt.drivers.jetson.device import JetsonDevice
        from underwatt.jobs import emitter

        self._kind, self._folder, self._mount, self._run = kind, folder, mount, folder / "run"
        self._note, self._script = folder / "note", folder / "train.py"
        self._script.write_text(COMMAND if kind == "command" else JOB, encoding="utf-8")
        (folder / "underwatt_beat.py").write_text(Path(emitter.__file__).read_text(encoding="utf-8"), encoding="utf-8")
        # What stands in the sensor's file, in watts; by two looks at once, and so to its noise.
        device = JetsonDevice(mount.root)
        begun_s, begun = time.monotonic(), mount.drawn()
        read_w = np.mean([device.read_power().power_w for _ in range(20)])
        self._unit_w = float(read_w / ((mount.drawn() - begun) / (time.monotonic() - begun_s)))
        device.close()
        self._parts: list[list[tuple[float, float, float]]] = []  # (time, joules, watts allowed) of each process
        self.resumed_at, self.error = -1, ""

    def go(self) -> None:
        """All three levels, one after the other."""
        process = self._start(LEVELS_W[0])
        self._watch(process, LEVEL_S, LEVELS_W[0])
        post_budget(self._run, f"{LEVELS_W[1]:g}W", "command")
        if self._kind == "command":
            self._watch(process, LEVEL_S / 2, LEVELS_W[1])
            process.send_signal(signal.SIGKILL)
            process.wait()
            time.sleep(1.0)
            self._mount.tell("load", str(IDLE_LOAD))  # of a script that was killed in the middle of a step
            self.resumed_at = len(self._trained())
            process = self._start(LEVELS_W[1], "--resume")
            self._watch(process, LEVEL_S / 2, LEVELS_W[1])
        else:
            self._watch(process, LEVEL_S, LEVELS_W[1])
        post_budget(self._run, f"{LEVELS_W[2]:g}W", "command")
        self._watch(process, LEVEL_S, LEVELS_W[2])
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=30)

    def _start(self, watts: float, *more: str) -> subprocess.Popen[bytes]:
        note = str(self._note)
        if self._kind == "command":
            options = [
                "--device",
                f"jetson:{self._mount.root}",
                "--budget",
                f"{watts:g}W",
                "--out",
                str(self._run),
                *more,
            ]
            sizes = ["-b", ",".join(map(str, SIZES)), "--store", str(self._folder / "store.db")]
            script = ["--", old_python(), str(self._script), str(self._mount.root), note]
            words = ["-m", "underwatt", "run", *options, *sizes, *script]
        else:
            words = [str(self._script), str(self._mount.root), note, str(watts), str(self._run)]
        log = (self._folder / "out").open("ab")
        before = len(self._trained())
        process = subprocess.Popen([sys.executable, *words], stdout=log, stderr=log)
        while len(self._trained()) == before and process.poll() is None:
            time.sleep(0.02)
        self._parts.append([])
        return process

    def _watch(self, process: subprocess.Popen[bytes], seconds: float, watts: float) -> None:
        end_s = time.monotonic() + seconds
        while (now_s := time.monotonic()) < end_s:
            if process.poll() is not None:
                self.error = self.error or (self._folder / "out").read_text(encoding="utf-8", errors="replace")[-400:]
                return
            self._parts[-1].append((now_s, self._unit_w * self._mount.drawn(), watts))
            time.sleep(max(0.0, now_s + TICK_S - time.monotonic()))

    def _trained(self) -> list[tuple[int, int]]:
        lines = self._note.read_text(encoding="utf-8").split("\n")[:-1] if self._note.exists() else []
        return [(int(place), int(size)) for place, size in map(str.split, lines)]

    def figures(self) -> Row:
        """As in the other cases, over all parts; and what only a command has to show."""
        rows, spans = [], []
        for part in self._parts:
            if len(part) > 2 / TICK_S:
                rows.append(_judged(np.array(part)))
                spans.append(part[-1][0] - part[0][0])
        total = {key: float(np.average([row[key] for row in rows], weights=spans)) for key in _MEANS}
        total |= {key: max(row[key] for row in rows) for key in _WORST}
        said = read_log(self._run / "log.jsonl")
        trained = self._trained()
        kinds = [event.kind for event in said.events]
        return total | {
            "was_held": total["time_over_pct"] <= 1.0,
            "said_held": said.verdict().held,
            "can_hold": True,
            "time_over_oracle": None,
            "readings_over": None,
            "took_s": sum(spans),
            "samples_per_s": sum(size for _, size in trained) / sum(spans),
            "measured": kinds.count("measured"),
            "changes": kinds.count("setting"),
            "sizes": sorted({size for _, size in trained}),
            "resumed": self._resumed(trained),
            "error": self.error or None,
        }

    def _resumed(self, trained: list[tuple[int, int]]) -> str | None:
        """How the place in the data went on after the kill: no sample is missing, and few were trained on twice."""
        if self.resumed_at < 1 or len(trained) <= self.resumed_at:
            return None
        before, after = trained[self.resumed_at - 1], trained[self.resumed_at]
        return f"{sum(before) - after[0]:+d} samples again"


_MEANS = ("energy_over_pct", "time_over_pct", "energy_over_1s_pct", "time_over_1s_pct")
_WORST = ("longest_over_s", "worst_over_pct")


def _judged(part: Any) -> Row:
    at_s, energy_j, watts = part.T
    ticks_s = np.arange(at_s[0], at_s[-1], TICK_S)
    drawn = Drawn(ticks_s - ticks_s[0], np.interp(ticks_s, at_s, energy_j), np.empty(0))
    budget_w = watts[np.searchsorted(at_s, drawn.middle_s + ticks_s[0], "right") - 1]
    return judge(drawn, budget_w, (), 0.0, peak=False)


if __name__ == "__main__":
    print(json.dumps([run_case(kind, 0) for kind in sys.argv[1:] or CASES], indent=1))
