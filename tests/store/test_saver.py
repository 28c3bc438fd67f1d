from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from underwatt.errors import StoreError
from underwatt.records import DeviceInfo, Measurement, PowerMode, Setting, WorkloadInfo
from underwatt.store import store as store_module
from underwatt.store.store import Saver, Store

DEVICE, WORKLOAD = DeviceInfo("made up", "board", "id", "made-up:board"), WorkloadInfo("job", "0123")


def some(count: int) -> list[Measurement]:
    return [Measurement(Setting(PowerMode(gpu_mhz=100.0 + i), 8), step_s=0.1, power_w=5.0) for i in range(count)]


def test_everything_is_stored_in_order_when_it_is_closed(tmp_path: Any) -> None:
    with Store(tmp_path / "store.db") as store:
        saving = Saver(store, DEVICE, WORKLOAD)
        for measurement in some(20):
            saving.add(measurement)
        assert saving.close() == 0
        assert [m.setting for m in store.measurements(store.profile_id(DEVICE, WORKLOAD))] == [
            m.setting for m in some(20)
        ]


class Failing:
    """A store that cannot be written for a while, and takes its time to say so."""

    def __init__(self) -> None:
        self.broken, self.kept, self.tries = True, [], 0  # type: ignore[var-annotated]
        self.tried = threading.Event()

    def profile_id(self, *_: object) -> int:
        return 1

    def add(self, _: int, measurements: list[Measurement]) -> None:
        self.tries += 1
        time.sleep(0.05)
        self.tried.set()
        if self.broken:
            raise StoreError("The store is full.", hint="Make room.")
        self.kept += measurements


def test_a_store_that_fails_is_said_once_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "RETRY_S", 0.02)
    store = Failing()
    saving = Saver(store, DEVICE, WORKLOAD)  # type: ignore[arg-type]
    begun_s = time.monotonic()
    for measurement in some(3):
        saving.add(measurement)
    assert time.monotonic() - begun_s < 0.04, "whoever adds must not wait"
    while store.tries < 3:
        time.sleep(0.01)
    assert saving.take_news() == ("warning", "The store is full. Make room. Measurements are kept and tried again.")
    assert saving.take_news() is None
    store.broken = False
    assert saving.close() == 0
    assert saving.take_news() == ("info", "Measurements can be stored again.")
    assert store.kept == some(3)


def test_what_could_not_be_stored_is_counted() -> None:
    saving = Saver(Failing(), DEVICE, WORKLOAD)  # type: ignore[arg-type]
    for measurement in some(2):
        saving.add(measurement)
    assert saving.close() == 2
    assert saving.take_news() is not None


def test_without_a_measurement_there_is_no_thread() -> None:
    saving = Saver(Failing(), DEVICE, WORKLOAD)  # type: ignore[arg-type]
    assert saving.close() == 0
    assert not [thread for thread in threading.enumerate() if thread.name == "underwatt-saver"]
