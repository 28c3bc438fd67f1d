"""Sessions in processes of their own, to be killed: set one mode after the other on a sysfs-shaped board."""

from __future__ import annotations

import random

from killable import begun, serve

from underwatt.device.session import Session
from underwatt.drivers.jetson.device import JetsonDevice


def work(argument: str) -> None:
    seed, root = argument.split(maxsplit=1)
    chance = random.Random(int(seed))
    device = JetsonDevice(root)
    while True:
        with Session(device) as session:
            begun()
            for _ in range(chance.randrange(1, 6)):
                session.apply(device.space[chance.randrange(len(device.space))])


if __name__ == "__main__":
    serve(work)
