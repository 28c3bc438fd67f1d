"""Measurements go to the store from a thread of their own: a slow, locked or full disk holds up no training."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from underwatt.errors import StoreError

if TYPE_CHECKING:
    from underwatt.records import DeviceInfo, Measurement, WorkloadInfo
    from underwatt.store.store import Store

RETRY_S = 1.0


class Saver:
    """Stores what it is given, sooner or later."""

    def __init__(self, store: Store, device: DeviceInfo, workload: WorkloadInfo) -> None:
        self._store, self._device, self._workload = store, device, workload
        self._waiting: list[Measurement] = []
        self._news: tuple[str, str] | None = None
        self._wake = threading.Condition()
        self._closing = False
        self._thread: threading.Thread | None = None

    def add(self, measurement: Measurement) -> None:
        """Store a measurement; returns at once."""
        with self._wake:
            self._waiting.append(measurement)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="underwatt-saver", daemon=True)
                self._thread.start()
            self._wake.notify()

    def take_news(self) -> tuple[str, str] | None:
        """Level and words, where storing has begun to fail, or works again, and nobody was told yet."""
        with self._wake:
            news, self._news = self._news, None
            return news

    def close(self) -> int:
        """Wait until all is stored, or cannot be; how many measurements could not."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()
        return len(self._waiting)

    def _work(self) -> None:
        failing = False
        while True:
            with self._wake:
                if failing and not self._closing:
                    self._wake.wait(RETRY_S)
                while not self._waiting and not self._closing:
                    self._wake.wait()
                now, closing = list(self._waiting), self._closing
            problem = self._store_all(now)
            with self._wake:
                if problem is None:
                    del self._waiting[: len(now)]
                    if failing:
                        self._news = "info", "Measurements can be stored again."
                elif not failing:  # once, however often it is tried again
                    self._news = "warning", f"{problem} Measurements are kept and tried again."
                failing = problem is not None
                if closing and (failing or not self._waiting):
                    return

    def _store_all(self, measurements: list[Measurement]) -> str | None:
        """Store some measurements; what went wrong, where something did."""
        if not measurements:
            return None
        try:
            self._store.add(self._store.profile_id(self._device, self._workload), measurements)
        except StoreError as exc:
            return str(exc)
        return None
