"""A run's folder that a test writes as a run would, and the real server in front of it."""

from __future__ import annotations

import http.client
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from log_world import started

from underwatt.events import BudgetChanged, Ended, Measured, Progressed, SettingChanged
from underwatt.live.server import LiveServer
from underwatt.records import Measurement, PowerMode, Setting
from underwatt.runlog.log import RunLog


class FakeRun:
    """Writes the log of a run, with the writer that runs use."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = RunLog(folder / "log.jsonl")
        self.at_s = 0.0
        self.budget_w = 10.0
        self.energy_j = 0.0

    def start(self, *, pid: int | None = None, target: float | None = 0.95) -> None:
        self.log.write(
            started(budget=f"{self.budget_w:g} W mean", target=target, pid=os.getpid() if pid is None else pid)
        )
        self.log.write(BudgetChanged(at_s=0.0, power_w=self.budget_w, why="start"))
        self.log.flush()

    def setting(self, batch_size: int = 32, gpu_mhz: float = 614.4, state: str = "holding", why: str = "fast") -> None:
        mode = PowerMode(cpu_cores=4, cpu_mhz=1479.0, gpu_mhz=gpu_mhz, mem_mhz=1600.0)
        self.log.write(SettingChanged(at_s=self.at_s, setting=Setting(mode, batch_size), state=state, why=why))

    def measured(self, batch_size: int, power_w: float) -> None:
        found = Measurement(Setting(PowerMode(gpu_mhz=614.4), batch_size), step_s=0.1, power_w=power_w)
        self.log.write(Measured(at_s=self.at_s, measurement=found))

    def budget(self, power_w: float, why: str = "changed") -> None:
        self.budget_w = power_w
        self.log.write(BudgetChanged(at_s=self.at_s, power_w=power_w, why=why))

    def second(self, power_w: float = 9.5, state: str = "holding") -> None:
        """One second of training: ten readings and a line of progress."""
        for tenth in range(10):
            watts = power_w + 0.2 * math.sin(tenth + self.at_s)
            self.log.power(self.at_s + tenth / 10, watts)
            self.energy_j += watts / 10
        self.at_s += 1.0
        self.log.write(
            Progressed(
                at_s=self.at_s - 0.05,
                steps=int(10 * self.at_s),
                samples=int(320 * self.at_s),
                batch_size=32,
                loss=2.3 / (1 + self.at_s / 50),
                step_s=0.1,
                power_w=power_w,
                budget_w=self.budget_w,
                energy_j=self.energy_j,
                time_left_s=max(0.0, 600 - self.at_s),
                state=state,
                gap_share=0.0,
            )
        )
        self.log.flush()

    def end(self, outcome: str = "reached", restored: bool = True, error: str | None = None) -> None:
        self.log.write(
            Ended(
                at_s=self.at_s,
                outcome=outcome,
                restored=restored,
                energy_j=self.energy_j,
                samples=1,
                steps=1,
                score=0.96,
                error=error,
            )
        )
        self.log.flush()


class Served:
    """The real server in a thread, and a plain HTTP client."""

    def __init__(self, folder: Path) -> None:
        self.server = LiveServer(folder)
        self._thread = threading.Thread(target=self.server.run, daemon=True)

    def __enter__(self) -> Served:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.stop()
        self._thread.join(10)
        assert not self._thread.is_alive(), "the server did not end"

    @property
    def bearer(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.server.token}"}

    def ask(
        self, path: str, method: str = "GET", headers: dict[str, str] | None = None, body: bytes | None = None
    ) -> tuple[int, dict[str, str], str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=10)
        try:
            connection.request(method, path, body=body, headers=headers or {})
            answer = connection.getresponse()
            return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read().decode()
        finally:
            connection.close()

    def post(self, content: bytes, **headers: str) -> tuple[int, dict[str, str], str]:
        given = self.bearer | {"Content-Type": "application/json"} | headers
        return self.ask("/budget", "POST", {k.replace("_", "-"): v for k, v in given.items()}, content)

    def state(self, since: int = 0) -> dict[str, Any] | None:
        """What changed since an update; nothing where nothing did."""
        status, _, text = self.ask(f"/state?since={since}", headers=self.bearer)
        assert status in (200, 204)
        return json.loads(text) if status == 200 else None

    def states(self) -> Iterator[dict[str, Any]]:
        """What a page gets to know, as one that asks all the time."""
        number, until = 0, time.monotonic() + 20.0
        while time.monotonic() < until:
            if (found := self.state(number)) is not None:
                number = found["number"]
                yield found
            time.sleep(0.02)
        raise AssertionError("nothing new came in time")


def eventually(condition: Callable[[], bool], within_s: float = 10.0) -> None:
    until = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.02)
