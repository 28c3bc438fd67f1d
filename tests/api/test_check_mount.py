"""A check of boards whose files behave as a kernel's: against a golden one, private, interrupted."""

from __future__ import annotations

import getpass
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from board_matrix import CELLS, plant
from check_world import LOAD, hurry, in_use
from jetson_trees import put
from kernel_boards import Boards
from kernel_mount import mounted_over, why_not
from test_check import choices

import underwatt
from underwatt.drivers.check import CheckReport, Level, read_check
from underwatt.drivers.jetson.device import JetsonDevice
from underwatt.records import Profile
from underwatt.store.store import Store

needs_mount = pytest.mark.skipif(bool(why_not()), reason=why_not())
GOLDEN = Path(__file__).parents[1] / "golden" / "check-orin-nano-jp6.json"
SERIAL, MACHINE, MAC = "1421021098765", "0123456789abcdef0123456789abcdef", "48:b0:2d:12:34:56"


@pytest.fixture(scope="module")
def pool() -> Iterator[Boards]:
    with Boards() as boards:
        yield boards


def facts(report: CheckReport) -> dict[str, Any]:
    """What is the same each time that a board is checked."""
    record = json.loads(report.to_text())
    record["software"] = {"l4t": record["software"]["l4t"]}
    record["files"] = {path: text for path, text in record["files"].items() if not path.endswith(("_input", "_cnt"))}
    record["moved"] = [
        (t["knob"], [(m["asked"], m["ran"]) for m in t["moves"]], t["put_back"]) for t in record["trials"]
    ]
    kept = ("name", "backend", "power_of", "software", "knobs", "sensors", "stock_modes", "held", "files", "moved")
    return {name: record[name] for name in kept}


@needs_mount
@pytest.mark.slow
def test_a_check_through_the_mount_finds_what_the_golden_one_found(
    pool: Boards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurry(monkeypatch)
    mount = in_use(pool.board("orin-nano", "6"))
    before = mount.settled()
    found = underwatt.check(f"jetson:{mount.root}", set_knobs=True, output=tmp_path / "check.json")
    assert mount.settled() == before
    assert found.verdict.level is Level.LIMITED
    assert "the GPU was not tried under load" in found.verdict.text
    assert found.load_w > 1.3 * found.idle_w
    assert found.sensor.lag_s < 0.3, "this one has none; a busy machine reads it late"
    assert facts(found) == facts(read_check(GOLDEN)[0])
    device = underwatt.open_device(f"jetson:{mount.root}")
    with Store(tmp_path / "board.db") as store:
        store.take_in([Profile(device.info, found.load, found.measurements)], [])
    underwatt.import_file(tmp_path / "check.json", store=tmp_path / "file.db")
    assert choices(tmp_path / "board.db") == choices(tmp_path / "file.db")


def test_the_files_of_a_check_are_a_tree_for_the_driver(tmp_path: Path) -> None:
    golden, _ = read_check(GOLDEN)
    for path, text in golden.files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(text.encode("latin-1"))
    device = JetsonDevice(tmp_path)
    checked = underwatt.open_device(f"check:{GOLDEN}")
    assert device.info.name == golden.name
    assert device.info.software["l4t"] == golden.software["l4t"]
    assert [(k.name, k.values) for k in device.space.knobs] == [(k.name, k.values) for k in checked.space.knobs]
    assert device.stock_modes() == golden.stock_modes
    assert set(device.read_state().rails_w) == set(golden.rails_w)


@needs_mount
@pytest.mark.slow
def test_nothing_in_the_file_tells_whose_board_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)
    cell = CELLS["orin-nano", "6"]
    tree = plant(tmp_path / "tree", cell)
    put(tree, "proc/device-tree/serial-number", f"{SERIAL}\0")
    put(tree, "etc/hostname", "alices-robot")
    put(tree, "etc/machine-id", MACHINE)
    put(tree, "sys/class/net/eth0/address", MAC)
    put(tree, "sys/class/thermal/thermal_zone7/type", f"tag-{SERIAL}")
    put(tree, "sys/class/thermal/thermal_zone7/temp", 30000)
    put(tree, "sys/class/hwmon/hwmon7/name", f"usb-{MAC.upper()}")
    conf = (tree / "etc/nvpmodel.conf").read_text()
    (tree / "etc/nvpmodel.conf").write_text(conf.replace("NAME=15W", "NAME=ALICES_MODE"))
    monkeypatch.setattr(socket, "gethostname", lambda: "alices-robot.example.org")
    monkeypatch.setattr(getpass, "getuser", lambda: "alice")
    monkeypatch.setenv("SUDO_USER", "alice")
    folder = tmp_path / "home" / "alice" / "board"
    with mounted_over(tree, "6", folder) as mount:
        in_use(mount)
        found = underwatt.check(f"jetson:{folder}", set_knobs=True, output=tmp_path / "check.json")
    text = (tmp_path / "check.json").read_text()
    for secret in (SERIAL, MACHINE, MAC, "alice", "robot", "example.org", str(tmp_path), tmp_path.name, sys.executable):
        assert secret.lower() not in text.lower(), secret
    assert found.trials
    assert "CUSTOM" in text
    assert found.files["proc/device-tree/model"].startswith("NVIDIA Jetson Orin Nano")


def start(root: Path, output: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "underwatt", "check", "--set", "-d", f"jetson:{root}", "-o", str(output)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def loads_of(process: int) -> list[int]:
    """Loads that the process has started, directly or not."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            stat, words = (path / "stat").read_text(), (path / "cmdline").read_text()
        except OSError:
            continue
        parents[int(path.name)] = (int(stat.rpartition(")")[2].split()[1]), words)

    def is_below(pid: int) -> bool:
        return pid == process or (pid in parents and pid > 1 and is_below(parents[pid][0]))

    return [pid for pid, (_, words) in parents.items() if LOAD in words and is_below(pid)]


@needs_mount
@pytest.mark.slow
def test_an_interrupted_check_puts_everything_back_and_leaves_no_load(pool: Boards, tmp_path: Path) -> None:
    mount = in_use(pool.board("nano", "4"))
    before = mount.settled()
    running = start(mount.root, tmp_path / "check.json")
    try:
        end_s = time.monotonic() + 60
        while mount.state() == before[0]:
            assert time.monotonic() < end_s, "nothing was set"
            time.sleep(0.01)
        loads = loads_of(running.pid)
        running.send_signal(signal.SIGINT)
        _, said = running.communicate(timeout=30)
    finally:
        running.kill()
    assert running.returncode == 130
    assert "as it was found" in said
    assert mount.settled() == before
    assert loads
    assert not [pid for pid in loads if os.path.exists(f"/proc/{pid}")]  # noqa: PTH110 - a process, not a file
    assert not (tmp_path / "check.json").exists()
