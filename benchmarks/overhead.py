"""What measuring costs while training goes on: our beat, Zeus' window, and our sampling thread, in one run.

    python benchmarks/overhead.py --json OUT [--zeus-python PYTHON]

Zeus runs in an environment of its own, made under ``out/zeus-env`` where no ``--zeus-python`` names one. On a machine
without a GPU its monitor has nothing to read, so that its window is as cheap there as it can be. The sampling thread
reads the GPU through NVML where there is one, else the production Jetson driver on a sysfs-shaped virtual board.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _table import Column, add_output, as_table, write
from underwatt.device.registry import find_addresses, open_device
from underwatt.drivers.jetson.device import JetsonDevice
from underwatt.drivers.virtual.board_specs import BOARDS
from underwatt.drivers.virtual.simulated_board import VirtualBoard
from underwatt.drivers.virtual.sysfs import SysfsBoard
from underwatt.measure.meter import Meter

if TYPE_CHECKING:
    from underwatt.device.base import Device

BEATS = 200_000
WINDOWS = 2_000
ROUNDS = 5
SAMPLING_S = 10.0
ZEUS_ENVIRONMENT = Path(__file__).resolve().parent.parent / "out" / "zeus-env"
ZEUS_PROGRAM = f"""
import time
from zeus.monitor import ZeusMonitor
try:
    monitor = ZeusMonitor(approx_instant_energy=False)
except Exception:
    monitor = ZeusMonitor(gpu_indices=[])
def windows(count):
    started = time.perf_counter()
    for _ in range(count):
        monitor.begin_window("step", sync_execution=False)
        monitor.end_window("step", sync_execution=False)
    return (time.perf_counter() - started) / count * 1e6
windows(20)
print("RESULT", windows({WINDOWS}), len(monitor.gpu_indices))
"""


def some_device(folder: Path) -> Device:
    here = find_addresses()
    if here:
        return open_device(here[0])
    SysfsBoard.create(VirtualBoard(BOARDS["xavier-agx"]), folder)
    return JetsonDevice(folder)


def beat_us(device: Device) -> float:
    with Meter(device) as meter:
        started = time.perf_counter()
        for _ in range(BEATS):
            meter.beat()
        return (time.perf_counter() - started) / BEATS * 1e6


def sampler_core_pct(device: Device) -> float:
    with Meter(device):
        before = time.process_time()
        time.sleep(SAMPLING_S)
        return 100 * (time.process_time() - before) / SAMPLING_S


def zeus_python() -> Path:
    python = ZEUS_ENVIRONMENT / "bin" / "python"
    if not python.exists():
        print("Installing Zeus into an environment of its own ...", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(ZEUS_ENVIRONMENT)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", "zeus"], check=True)
    return python


def zeus_window_us(python: Path) -> tuple[float, int]:
    out = subprocess.run([str(python), "-c", ZEUS_PROGRAM], capture_output=True, text=True, check=True).stdout
    words = next(line.split() for line in out.splitlines() if line.startswith("RESULT"))
    return float(words[1]), int(words[2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_output(parser)
    parser.add_argument("--zeus-python", type=Path, help="a Python that has Zeus installed")
    arguments = parser.parse_args()
    python = arguments.zeus_python or zeus_python()
    with tempfile.TemporaryDirectory() as folder:
        device = some_device(Path(folder))
        beats_us, windows_us = [], []
        for _ in range(ROUNDS):  # side by side, and the quietest moment of each counts: the machine may be busy
            beats_us.append(beat_us(device))
            window_us, gpus = zeus_window_us(python)
            windows_us.append(window_us)
        core_pct = sampler_core_pct(device)
    rows = [
        {"name": "beat_us", "value": min(beats_us)},
        {"name": "zeus_window_us", "value": min(windows_us)},
        {"name": "sampler_core_pct", "value": core_pct},
    ]
    print(f"sampled: {device.info.name}; Zeus monitored {gpus} GPU(s)")
    print(as_table(rows, (Column("name"), Column("value", form=".3f"))))
    print(f"our beat costs 1/{rows[1]['value'] / rows[0]['value']:.0f} of Zeus' window")
    write("overhead", rows, arguments)


if __name__ == "__main__":
    main()
