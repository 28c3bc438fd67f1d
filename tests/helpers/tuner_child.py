"""A tuned loop in a process of its own, to be killed: sleeps on a sysfs-shaped board."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from underwatt.adapters.tuner import tune
from underwatt.drivers.jetson.device import JetsonDevice


def main() -> None:
    root, folder = Path(sys.argv[1]), Path(sys.argv[2])
    with tune(device=JetsonDevice(root), budget_w=15, batch_sizes=(8, 16), folder=folder, name="child") as tuner:
        print("training", flush=True)
        while True:
            tuner.starts(tuner.batch_size)
            time.sleep(0.005)
            tuner.step()


if __name__ == "__main__":
    main()
