"""Profiles in processes of their own, to be killed: many settings on a virtual board, each stored as it is measured."""

from __future__ import annotations

from pathlib import Path

from killable import begun, serve
from profile_helpers import simulated, virtual

from underwatt.device.session import Session
from underwatt.measure.series import ordered_settings, run_profile
from underwatt.store.store import Store


def settings() -> list:  # type: ignore[type-arg]
    space = virtual("nano").space
    return ordered_settings([space[index] for index in range(0, len(space), 400)], (4, 8, 16))


def work(path: str) -> None:
    device = virtual("nano")
    with Store(Path(path)) as store, Session(device) as session:
        begun()
        run_profile(session, simulated(device), settings(), store)


if __name__ == "__main__":
    serve(work)
