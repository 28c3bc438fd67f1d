"""Flower's own processes on this machine: TLS, node authentication, a node that dies."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed; `make test-fleet` runs this in an environment of its own")

from underwatt.fleet.up import FleetProcesses, node_key

APP = Path(__file__).parent.parent.parent / "examples" / "fleet"
NODES = [
    {"device": f"virtual:{kind}", "budget": budget}
    for kind, budget in (("nano", "5W"), ("tx2", "9W"), ("orin-nano", "7W"))
]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_three_nodes_train_three_rounds_and_two_finish_when_one_is_killed(tmp_path: Path) -> None:
    said: list[str] = []
    with FleetProcesses(tmp_path, NODES) as fleet:
        server = threading.Thread(target=lambda: said.append(fleet.run(APP, timeout_s=800.0)))
        server.start()
        log = tmp_path / "node-1.log"
        until_s = time.monotonic() + 700.0
        while server.is_alive() and time.monotonic() < until_s:  # the first round is over, the second has begun
            if log.read_text(errors="replace").count("Receiving: train message") >= 2:
                break
            time.sleep(0.2)
        os.killpg(fleet.processes[1].pid, signal.SIGKILL)
        server.join(timeout=800.0)
        assert not server.is_alive()
    assert len(said) == 1, "the app failed"
    words = re.sub(r"\x1b\[[0-9;]*m", "", said[0])
    assert "Saving final model" in words
    received = [int(count) for count in re.findall(r"aggregate_train: Received (\d) results", words)]
    assert len(received) == 3, words
    assert received[0] == 3
    assert min(received) >= 2
    assert received[-1] == 2


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_node_whose_key_is_not_registered_is_not_let_in(tmp_path: Path) -> None:
    with FleetProcesses(tmp_path, []) as fleet:
        public = node_key(tmp_path / "node-0")
        assert oct((tmp_path / "node-0").stat().st_mode)[-3:] == "600"
        stranger = fleet.start_node(0, NODES[0])
        assert stranger.wait(60.0) != 0
        fleet.flwr("supernode", "register", str(public), "up")
        known = fleet.start_node(0, NODES[0])
        until_s = time.monotonic() + 60.0
        while "online" not in fleet.flwr("supernode", "list", "up") and time.monotonic() < until_s:
            time.sleep(0.5)
        assert known.poll() is None
        assert "online" in fleet.flwr("supernode", "list", "up")
