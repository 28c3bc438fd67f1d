"""The service as it is installed, by each Python that a JetPack has, on a board whose files behave as a kernel's."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from board_matrix import CELLS, CPU
from helper_world import JETPACKS, NOBODY, Helper, python_of, serving
from kernel_boards import Boards, as_user
from kernel_mount import Mount, why_not

from underwatt.drivers.helper import Link
from underwatt.errors import DeviceBusyError, DeviceError, InputError, ModeError
from underwatt.helper.errors import LeaseError

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())
BOARDS = {"3.6": ("nano", "4"), "3.8": ("xavier-nx", "5"), "3.10": ("orin-nano", "6")}
MAX_CLOCK = f"{CPU}/cpu0/cpufreq/scaling_max_freq"


class World:
    """A board, its helper, and what both looked like at first."""

    def __init__(self, mount: Mount, helper: Helper, link: Link) -> None:
        self.mount, self.helper, self.link = mount, helper, link
        self.found = mount.settled()
        self.values = link.ask("describe")["values"]

    def hold(self, **more: Any) -> str:
        return str(self.link.ask("hold", **more)["lease"])

    def low(self) -> dict[str, float]:
        """A mode that is not what was found."""
        return {name: values[0] for name, values in self.values.items()}

    def set(self, lease: str, **mode: float) -> None:
        self.link.ask("apply", lease=lease, mode=mode or self.low())

    def wait_until_restored(self, limit_s: float = 10.0) -> None:
        """Wait until everything is as it was found; how soon it is on an idle machine, benchmarks/helper.py says."""
        begun_s = time.monotonic()
        while self.mount.settled(0.0) != self.found or self.helper.journals:
            assert time.monotonic() - begun_s < limit_s, self.helper.said()
            time.sleep(0.005)

    def is_found(self) -> bool:
        return self.mount.settled() == self.found


@pytest.fixture(scope="module")
def pool() -> Iterator[Boards]:
    with Boards() as boards:
        yield boards


@pytest.fixture(params=list(JETPACKS))
def version(request: pytest.FixtureRequest) -> str:
    if not python_of(request.param):
        pytest.skip(f"there is no Python {request.param} here, which {JETPACKS[request.param]} has")
    return str(request.param)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Where others may look, unlike pytest's own."""
    with tempfile.TemporaryDirectory(prefix="underwatt-helper-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
def world(pool: Boards, version: str, folder: Path) -> Iterator[World]:
    mount = pool.board(*BOARDS[version])
    with serving(folder, mount.root, python_of(version)) as helper:
        link = Link(str(helper.socket))
        yield World(mount, helper, link)
        link.close()


@pytest.fixture
def one(pool: Boards, folder: Path) -> Iterator[World]:
    """By this Python alone, where a JetPack's makes no difference."""
    mount = pool.board("nano", "4")
    with serving(folder, mount.root) as helper:
        link = Link(str(helper.socket))
        yield World(mount, helper, link)
        link.close()


# What it is for


def test_sets_and_puts_back(world: World) -> None:
    lease = world.hold()
    world.set(lease)
    assert world.mount.settled() != world.found
    assert world.link.ask("read", what="state")["running"]["cpu_cores"] == world.low()["cpu_cores"]
    assert world.link.ask("read", what="power")["power_w"] > 0
    world.link.ask("release", lease=lease)
    assert world.is_found()
    assert not world.helper.journals


def test_an_answer_fits_into_a_line(pool: Boards, tmp_path: Path) -> None:
    for name, release in (("agx-orin", "6"), ("agx-xavier", "5")):  # most knobs, most power modes
        assert (name, release) in CELLS
        with serving(tmp_path / name, pool.board(name, release).root) as helper:
            told = helper.ask("describe")
            assert told["values"]
            assert told["stock_modes"]
            assert len(json.dumps(told)) < 4096
            assert len(json.dumps(helper.ask("read", what="snapshot"))) < 4096


def test_what_was_found_is_on_disk_before_anything_is_changed(world: World) -> None:
    lease = world.hold()
    assert not world.helper.journals, "nothing was set yet"
    world.mount.tell("lag", "0.09")  # so that the helper is still at it
    world.link._socket.sendall(json.dumps({"do": "apply", "lease": lease, "mode": world.low()}).encode() + b"\n")  # type: ignore[union-attr]
    while world.mount.settled(0.0) == world.found:
        pass
    assert world.helper.journals
    world.helper.stop(signal.SIGKILL)
    body = json.loads(world.helper.journals[0].read_text())["body"]
    assert {path: text.encode() for path, text in body["snapshot"].items() if path in world.found[1]} == {
        path: text for path, text in world.found[1].items() if path in body["snapshot"]
    }
    world.mount.tell("lag", "0.01")
    world.helper.start()
    world.wait_until_restored()


# However a hold ends


WORKERS = """
import os, socket, sys, json, time
link = socket.socket(socket.AF_UNIX); link.connect(sys.argv[1])
def ask(**message):
    link.sendall(json.dumps(message).encode() + b"\\n")
    return json.loads(link.recv(1 << 16))
lease = ask(do="hold")["lease"]
assert ask(do="apply", lease=lease, mode=json.loads(sys.argv[2]))["ok"]
for _ in range(2):
    if os.fork() == 0:
        time.sleep(60)
print("set", flush=True)
time.sleep(60)
"""


def start_holder(world: World, *before: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", WORKERS, str(world.helper.socket), json.dumps(world.low())]
    holder = subprocess.Popen([*before, *words], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "set\n"
    assert world.mount.settled() != world.found
    return holder


def end_workers(holder: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(holder.pid, signal.SIGKILL)
    holder.wait()
    assert holder.stdout is not None
    holder.stdout.close()


def test_put_back_when_the_holder_is_killed_while_its_workers_keep_the_socket(world: World) -> None:
    holder = start_holder(world)
    try:
        holder.kill()
        world.wait_until_restored()
        world.hold()  # and the next one may
    finally:
        end_workers(holder)


def test_put_back_when_the_lease_runs_out(world: World) -> None:
    lease = world.hold(lease_s=1.0)
    world.set(lease)
    time.sleep(0.6)
    world.link.ask("hold", lease=lease)  # a sign of life
    time.sleep(0.6)
    assert not world.is_found()
    world.wait_until_restored()
    with pytest.raises(LeaseError):
        world.set(lease)
    assert world.is_found()


def test_put_back_when_it_is_told_to_end(world: World) -> None:
    world.set(world.hold())
    assert world.helper.stop(signal.SIGTERM) == 0
    assert world.is_found()
    assert not world.helper.journals


def test_put_back_when_it_starts_again_after_a_crash(world: World) -> None:
    world.set(world.hold())
    world.helper.stop(signal.SIGKILL)
    assert not world.is_found()
    world.helper.start()
    world.wait_until_restored()
    assert not world.helper.journals


def test_put_back_in_the_middle_of_a_hold_which_goes_on(one: World) -> None:
    lease = one.hold()
    one.set(lease)
    one.link.ask("release", lease=lease, hold=True)
    assert one.is_found()
    with pytest.raises(DeviceBusyError):
        one.helper.ask("hold")
    one.set(lease)
    assert not one.is_found()


def test_a_journal_of_before_a_reboot_is_forgotten(one: World) -> None:
    one.set(one.hold())
    one.helper.stop(signal.SIGKILL)
    (path,) = one.helper.journals
    entry = json.loads(path.read_text())
    from underwatt.helper.journal import _digest

    entry["body"]["boot"] = "another"
    entry["sha256"] = _digest(entry["body"])
    path.write_text(json.dumps(entry))
    now = one.mount.settled()
    one.helper.start()
    assert one.mount.settled() == now, "after a start of the machine nothing of what was set is left to be put back"
    assert not one.helper.journals


def test_a_damaged_journal_keeps_everybody_out_and_says_why(one: World) -> None:
    one.set(one.hold())
    one.helper.stop(signal.SIGKILL)
    (path,) = one.helper.journals
    path.write_text(path.read_text().replace('"1', '"2', 1))
    one.helper.start()
    assert "damaged" in one.helper.ask("describe")["trouble"]
    with pytest.raises(DeviceError, match="damaged"):
        one.helper.ask("hold")
    assert one.helper.ask("read", what="power")["power_w"] > 0


# Who may do what


def test_one_holds_and_the_rest_read(one: World) -> None:
    lease = one.hold()
    other = Link(str(one.helper.socket))
    with pytest.raises(DeviceBusyError, match=f"process {os.getpid()} of user root"):
        other.ask("hold")
    for stolen in (lease, "", None, 1, [lease]):
        with pytest.raises(LeaseError):
            other.ask("apply", lease=stolen, mode=one.low())
        with pytest.raises(LeaseError):
            other.ask("release", lease=stolen)
    assert other.ask("read", what="power")["power_w"] > 0
    assert other.ask("describe")["holder"] == f"process {os.getpid()} of user root"
    other.close()
    assert one.is_found()


def knock(path: str) -> dict[str, Any]:
    """What the service says to somebody who only connects and asks for the board."""
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(path)
        with suppress(BrokenPipeError):
            link.sendall(b'{"do":"hold"}\n')
        answer: dict[str, Any] = json.loads(link.recv(4096))
        return answer


def test_others_cannot_connect_and_are_refused_where_they_can(world: World) -> None:
    path = str(world.helper.socket)
    stranger, member = 4242, 4243
    with pytest.raises(PermissionError):
        as_user(lambda: knock(path), stranger, [stranger])
    assert as_user(lambda: knock(path), member, [NOBODY])["ok"]
    world.helper.socket.chmod(0o666)
    refused = as_user(lambda: knock(path), stranger, [stranger])
    assert (refused["ok"], refused["error"]) == (False, "Only root and the helper's group may speak to it.")
    assert as_user(lambda: knock(path), NOBODY, [NOBODY])["ok"]


@pytest.mark.parametrize(
    "mode",
    [
        {"cpu_mhz": 1.0},
        {"cpu_cores": 99},
        {"cpu_cores": 0},
        {"fan": 1},
        {"../../../etc/passwd": 1},
        {"sys/devices/system/cpu/cpu1/online": 0},
        {"nvpmodel": 1},
        {},
    ],
)
def test_only_what_the_board_lists_is_set(one: World, mode: dict[str, float]) -> None:
    lease = one.hold()
    with pytest.raises(ModeError):
        one.link.ask("apply", lease=lease, mode=mode)
    assert one.is_found()


@pytest.mark.parametrize("value", [True, "1", None, float("nan"), float("inf"), -1, [1], {"a": 1}, 10**400])
def test_a_value_is_a_number(one: World, value: Any) -> None:
    lease = one.hold()
    with pytest.raises(InputError, match="numbers by knob"):
        one.link.ask("apply", lease=lease, mode={"cpu_mhz": value})


def test_what_is_no_message_is_refused_with_a_reason(one: World) -> None:
    for line in (b"", b"{", b"[]", b"null", b'"hold"', b"\xff", b'{"do":"format"}', b'{"do":["hold"]}', b"[" * 4000):
        with socket.socket(socket.AF_UNIX) as link:
            link.connect(str(one.helper.socket))
            link.sendall(line + b"\n")
            assert json.loads(link.recv(4096))["kind"] == "InputError"
    with pytest.raises(InputError, match="knows no 'path'"):
        one.link.ask("read", what="power", path="/etc/shadow")
    with pytest.raises(InputError, match="what is power"):
        one.link.ask("read", what="/etc/shadow")
    with pytest.raises(InputError, match="lease_s"):
        one.link.ask("hold", lease_s="long")


def test_a_message_that_does_not_end_is_cut(one: World) -> None:
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(str(one.helper.socket))
        with suppress(BrokenPipeError, ConnectionResetError):
            for _ in range(20):
                link.sendall(b"x" * 1000)
        answer = b""
        with suppress(ConnectionResetError):
            while more := link.recv(4096):
                answer += more
        assert not answer or "at most 4096 bytes" in json.loads(answer)["error"]
    assert one.helper.ask("read", what="power")


def test_who_connects_too_often_loses_the_connection_that_was_silent_longest_but_not_the_hold(one: World) -> None:
    one.set(one.hold())
    links = []
    for _ in range(40):
        link = socket.socket(socket.AF_UNIX)
        link.connect(str(one.helper.socket))
        links.append(link)
    links[-1].sendall(b'{"do":"read","what":"power"}\n')
    assert json.loads(links[-1].recv(4096))["ok"]
    assert links[0].recv(10) == b""
    for link in links:
        link.close()
    assert not one.is_found(), "the holder kept what it holds"


def test_one_who_asks_without_end_leaves_time_for_others(one: World) -> None:
    flood = as_flood(str(one.helper.socket))
    try:
        time.sleep(1.5)
        took_s = []
        for _ in range(10):
            begun_s = time.monotonic()
            assert as_user(lambda: Link(str(one.helper.socket)).ask("read", what="power"), 4243, [NOBODY])["ok"]
            took_s.append(time.monotonic() - begun_s)
        assert sorted(took_s)[5] < 0.5
    finally:
        flood.kill()
        flood.wait()


def as_flood(path: str) -> subprocess.Popen[bytes]:
    program = (
        "import socket, sys\nlink = socket.socket(socket.AF_UNIX); link.connect(sys.argv[1])\n"
        'while True:\n    link.sendall(b\'{"do":"describe"}\\n\'); link.recv(8192)\n'
    )
    return subprocess.Popen([sys.executable, "-c", program, path])


# Root's own sessions


def test_root_and_the_helper_do_not_set_one_board_at_once(one: World, monkeypatch: pytest.MonkeyPatch) -> None:
    from underwatt.device.session import Session
    from underwatt.drivers.jetson.device import JetsonDevice

    monkeypatch.setenv("UNDERWATT_STATE", str(one.helper.state))  # as root, both keep theirs in one folder
    one.set(one.hold())
    with pytest.raises(DeviceBusyError, match="underwatt-helper for process"), Session(JetsonDevice(one.mount.root)):
        pass
    one.link.close()
    one.wait_until_restored()
    one.helper.ask("describe")  # answered when all of that is over, the lock let go, too
    with Session(JetsonDevice(one.mount.root)), pytest.raises(DeviceBusyError):
        one.helper.ask("hold")


def test_what_roots_killed_session_left_is_put_back_for_the_next_holder(one: World) -> None:
    program = (
        "import os, sys; from underwatt.device.session import Session; from underwatt.records import PowerMode\n"
        "from underwatt.drivers.jetson.device import JetsonDevice\n"
        "with Session(JetsonDevice(sys.argv[1])) as session:\n"
        "    session.apply(PowerMode(cpu_mhz=float(sys.argv[2])))\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    environment = {**os.environ, "UNDERWATT_STATE": str(one.helper.state)}
    words = [sys.executable, "-c", program, str(one.mount.root), str(one.low()["cpu_mhz"])]
    assert subprocess.run(words, env=environment, check=False).returncode == -signal.SIGKILL
    assert not one.is_found()
    assert one.link.ask("hold")["recovered"] is True
    assert one.is_found()


def test_its_folder_runs_alone(version: str, tmp_path: Path) -> None:
    from underwatt.helper.install import copy_to

    parent = copy_to(str(tmp_path / "lib"), str(tmp_path))
    words = [python_of(version), "-sEB", "-m", "underwatt_helper", "--root", str(tmp_path)]
    ended = subprocess.run(words, cwd=parent, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (2, f"underwatt-helper: there is no Jetson at {tmp_path}\n")
    for module in sorted((Path(parent) / "underwatt_helper").glob("*.py")):
        assert not re.search(r"^\s*(?:import|from) underwatt", module.read_text(), re.MULTILINE), module
