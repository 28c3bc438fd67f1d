"""A session in a process of its own, to be killed: sets one mode after the other on a sysfs-shaped board."""

from __future__ import annotations

import random
import sys
from pathlib import Path

from underwatt.device.session import Session
from underwatt.drivers.jetson.device import JetsonDevice


def main() -> None:
    root, seed = Path(sys.argv[1]), int(sys.argv[2])
    chance = random.Random(seed)
    device = JetsonDevice(root)
    while True:
        with Session(device) as session:
            print("begun", flush=True)
            for _ in range(chance.randrange(1, 6)):
                session.apply(device.space[chance.randrange(len(device.space))])


if __name__ == "__main__":
    main()
