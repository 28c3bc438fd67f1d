from __future__ import annotations

import logging
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from underwatt.device import registry
from underwatt.device.registry import ENTRY_POINT_GROUP, backend_names, find_addresses, load_backend, open_device
from underwatt.errors import NoDeviceError


class Board:
    """A stranger's backend."""

    name = "board"

    def __init__(self, score: float = 0.99) -> None:
        self._score = score

    def affinity(self) -> float:
        if self._score < 0:
            raise RuntimeError("the bus is gone")
        return self._score

    def find(self) -> tuple[str, ...]:
        return ("a", "b")

    def open(self, where: str) -> Any:
        return ("opened", where)


good, broken = Board(), Board(-1)


def plug_in(monkeypatch: pytest.MonkeyPatch, *points: EntryPoint) -> None:
    def entry_points(*, group: str, name: str | None = None) -> list[EntryPoint]:
        assert group == ENTRY_POINT_GROUP
        return [point for point in points if name in (None, point.name)]

    monkeypatch.setattr(registry, "entry_points", entry_points)


def test_our_backends_load() -> None:
    for name in ("jetson", "nvml", "virtual", "replay"):
        assert load_backend(name).name == name


def test_a_plugged_in_board_is_found_and_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(monkeypatch, EntryPoint("board", "test_registry:good", ENTRY_POINT_GROUP))
    assert "board" in backend_names()
    assert find_addresses()[:2] == ["board:a", "board:b"]
    assert open_device("board:b") == ("opened", "b")
    assert open_device() == ("opened", "a")


@pytest.mark.parametrize("value", ["test_registry:broken", "test_registry:missing", "no_such_module:x"])
def test_a_broken_plug_in_is_logged_and_skipped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, value: str
) -> None:
    plug_in(
        monkeypatch,
        EntryPoint("bad", value, ENTRY_POINT_GROUP),
        EntryPoint("board", "test_registry:good", ENTRY_POINT_GROUP),
    )
    with caplog.at_level(logging.WARNING):
        assert "board:a" in find_addresses()
    assert "'bad' was skipped" in caplog.text


def test_simulated_devices_are_never_chosen_by_themselves() -> None:
    assert not [address for address in find_addresses() if address.startswith(("virtual", "replay"))]


def test_nothing_here_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "find_addresses", list)
    with pytest.raises(NoDeviceError, match="virtual:nano"):
        open_device()


def test_an_unknown_backend_lists_the_known() -> None:
    with pytest.raises(NoDeviceError, match=r"'amiga'.*jetson, nvml"):
        open_device("amiga:500")


@pytest.mark.parametrize(
    ("typed", "meant"), [("nano", "virtual:nano"), ("Orin-AGX", "virtual:orin-agx"), ("jetsn", "jetson")]
)
def test_a_mistyped_device_is_asked_about(typed: str, meant: str) -> None:
    with pytest.raises(NoDeviceError) as refused:
        open_device(typed)
    assert str(refused.value.hint).startswith(f"Did you mean {meant}? ")
