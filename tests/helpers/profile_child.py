"""A profile in a process of its own, to be killed: many settings on a virtual board, each stored as it is measured."""

from __future__ import annotations

import sys
from pathlib import Path

from profile_helpers import simulated, virtual

from underwatt.device.session import Session
from underwatt.measure.series import ordered_settings, run_profile
from underwatt.store.store import Store


def settings() -> list:  # type: ignore[type-arg]
    space = virtual("nano").space
    return ordered_settings([space[index] for index in range(0, len(space), 400)], (4, 8, 16))


def main() -> None:
    device = virtual("nano")
    with Store(Path(sys.argv[1])) as store, Session(device) as session:
        print("begun", flush=True)
        run_profile(session, simulated(device), settings(), store)


if __name__ == "__main__":
    main()
