"""Holders of a helper's board in processes of their own, to be killed: each sets one mode after the other.

A line is ``KIND SEED SOCKET``: ``session`` has live loader workers and keeps the board however the helper fares;
``plain`` speaks to the helper and ends when it loses it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from killable import begun, serve

from underwatt.device.session import Session
from underwatt.drivers.helper import HelperDevice, Link
from underwatt.records import PowerMode


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(4)


def work(argument: str) -> None:
    kind, seed, path = argument.split(maxsplit=2)
    chance = random.Random(int(seed))
    {"session": session, "plain": plain}[kind](chance, path)


def any_mode(chance: random.Random, values: Any) -> dict[str, float]:
    return {name: chance.choice(entries) for name, entries in values.items()}


def session(chance: random.Random, path: str) -> None:
    device = HelperDevice(path)
    batches = iter(torch.utils.data.DataLoader(Samples(), batch_size=4, num_workers=2))
    with Session(device) as held:
        keep_setting(lambda mode: held.apply(PowerMode.of(mode)), chance, device._board.values(), batches)


def plain(chance: random.Random, path: str) -> None:
    link = Link(path)
    values = link.ask("describe")["values"]
    lease = link.ask("hold")["lease"]
    keep_setting(lambda mode: link.ask("apply", lease=lease, mode=mode), chance, values, iter(int, 1))


def keep_setting(apply: Callable[[dict[str, float]], Any], chance: random.Random, values: Any, batches: Any) -> None:
    next(batches)  # its workers are there
    begun()
    while True:
        try:
            apply(any_mode(chance, values))
        except ConnectionError:
            return
        next(batches)


if __name__ == "__main__":
    serve(work)
