"""Holds, leases and what is put back, in this process: what takes long, or needs a world of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helper_world import JETPACKS, python_of

from underwatt.drivers.virtual.board_specs import BOARDS
from underwatt.drivers.virtual.simulated_board import VirtualBoard
from underwatt.drivers.virtual.sysfs import SysfsBoard
from underwatt.errors import ApplyError, DeviceBusyError
from underwatt.helper import keeper as module, lock as lock_module, service as service_module
from underwatt.helper.board import JetsonBoard
from underwatt.helper.install import copy_to
from underwatt.helper.keeper import AGAIN_S, Keeper, Process
from underwatt.helper.service import Client, Peer, Purse, Service
from underwatt.helper.sysfs import Sysfs

STATUS = "var/lib/nvpmodel/status"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    SysfsBoard.create(VirtualBoard(BOARDS["orin-nano"]), tmp_path / "board")
    return tmp_path / "board"


@pytest.fixture
def process() -> Iterator[Process]:
    """This one."""
    made = Process(os.getpid())
    yield made
    made.forget()


def lowest(keeper: Keeper) -> dict[str, float]:
    return {name: values[0] for name, values in keeper.board.values().items()}


@pytest.mark.parametrize("told", [True, False])
def test_the_end_of_a_process_is_seen_with_and_without_a_pidfd_also_while_nobody_has_waited_for_it(told: bool) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    watched = Process(child.pid, told=told)
    assert (watched.file is not None) is (told and hasattr(os, "pidfd_open"))
    assert not watched.has_ended()
    child.kill()
    time.sleep(0.1)
    assert watched.has_ended(), "a zombie has ended"
    child.communicate()
    assert watched.has_ended()
    watched.forget()
    assert Process(child.pid, told=told).has_ended(), "nor is one that was never there alive"


def test_another_process_of_the_same_number_is_not_the_holder(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Process(os.getpid(), told=False)
    assert not watched.has_ended()
    monkeypatch.setattr(module, "process_started", lambda _pid: "12345")
    assert watched.has_ended()


def test_what_cannot_be_put_back_is_told_and_tried_again_a_few_times(root: Path, process: Process) -> None:
    now_s = 0.0
    keeper = Keeper(JetsonBoard(Sysfs(root)), now_s=lambda: now_s)
    hold, _ = keeper.begin("me", process, 0, 60.0)
    keeper.apply(hold, lowest(keeper))
    before = (root / STATUS).read_text()
    (root / STATUS).write_text("pmode:0001\n" if "0001" not in before else "pmode:0000\n")
    with pytest.raises(ApplyError, match="nvpmodel mode was"):
        keeper.end("lets go")
    assert "nvpmodel" in keeper.trouble
    for wait_s in AGAIN_S[1:]:
        assert keeper.wait_s is not None
        now_s += keeper.wait_s
        with pytest.raises(ApplyError):
            keeper.tick()
        assert keeper.wait_s == pytest.approx(wait_s)
    now_s += 1000
    with pytest.raises(ApplyError):
        keeper.tick()
    assert keeper.wait_s is None, "nobody writes the limits of another mode for ever"
    with pytest.raises(ApplyError):
        keeper.begin("me", process, 0, 60.0)
    (root / STATUS).write_text(before)
    _, recovered = keeper.begin("me", process, 0, 60.0)
    assert recovered
    assert not keeper.trouble


def test_what_is_found_is_read_once_for_each_setting(
    root: Path, process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = Keeper(JetsonBoard(Sysfs(root)))
    snapshot, taken = keeper.board.snapshot, []

    def counted() -> dict[str, str]:
        taken.append(snapshot())
        return taken[-1]

    monkeypatch.setattr(keeper.board, "snapshot", counted)
    hold, _ = keeper.begin(object(), process, os.geteuid(), 60.0)
    keeper.apply(hold, lowest(keeper))
    assert hold.found == taken[0]
    keeper.apply(hold, lowest(keeper))
    assert len(taken) == 2
    keeper.end("ends")


def test_a_note_of_somebodys_cannot_keep_the_helper_from_putting_back(
    root: Path, tmp_path: Path, process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UNDERWATT_STATE", raising=False)
    monkeypatch.setattr(lock_module, "_SHARED_NOTES", tmp_path)
    monkeypatch.setattr(lock_module, "state_dir", lambda: tmp_path / "state")
    monkeypatch.setattr(module, "state_dir", lambda: tmp_path / "state")
    killed = Keeper(JetsonBoard(Sysfs(root)))
    hold, _ = killed.begin("me", process, 0, 60.0)
    killed.apply(hold, lowest(killed))
    killed._lock.release()  # as the kernel does when it is killed

    keeper = Keeper(JetsonBoard(Sysfs(root)))
    sleeper = subprocess.Popen(["sleep", "60"], **({"user": 4242} if os.geteuid() == 0 else {}))  # type: ignore[call-overload]
    try:
        note = tmp_path / f"{keeper._lock._stem}.0.note"
        note.write_text(f"{sleeper.pid} {lock_module.process_started(sleeper.pid)} mine\n")
        if os.geteuid() == 0:
            os.chown(note, 4242, 4242)
            keeper.finish_killed()
            assert not list((tmp_path / "state").glob("*.json"))
        with pytest.raises(DeviceBusyError, match="mine"):
            keeper.begin("me", process, 0, 60.0)
    finally:
        sleeper.kill()
        sleeper.wait()


class Caller:
    """A client of a service in this process."""

    def __init__(self, service: Service) -> None:
        self.service = service
        link, self.end = socket.socketpair()
        link.setblocking(False)
        self.end.settimeout(5)
        self.client = Client(link, Peer(os.getpid(), os.geteuid(), frozenset()))
        service._clients.append(self.client)
        service._listen(self.client, True)
        assert self.client.process.file is not None
        service._selector.register(self.client.process.file, 1, lambda: service._close(self.client))

    def turn(self, data: bytes = b"") -> None:
        if data:
            self.end.sendall(data)
        for _ in range(3):
            self.service.turn()


@pytest.fixture
def service(root: Path, tmp_path: Path) -> Iterator[Service]:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "socket"))
    listener.listen()
    listener.setblocking(False)
    made = Service(Keeper(JetsonBoard(Sysfs(root))), listener, os.getegid())
    made._wait_s = lambda *_: 0.0  # type: ignore[method-assign]
    yield made
    for client in list(made._clients):
        made._close(client)
    made._selector.close()
    listener.close()


def test_half_a_line_and_silence_are_given_up_but_not_a_holders(service: Service) -> None:
    half, silent, holder = Caller(service), Caller(service), Caller(service)
    half.turn(b'{"do":')
    holder.turn(b'{"do":"hold","lease_s":600}\n')
    holder.end.recv(4096)
    for caller, past_s in ((half, 11.0), (silent, 601.0), (holder, 601.0)):
        caller.client.heard_s -= past_s
    service.turn()
    assert (half.client.closed, silent.client.closed, holder.client.closed) == (True, True, False)
    for caller in (half, silent, holder):
        caller.end.close()


def test_the_holder_is_answered_first_then_who_has_waited_longest(service: Service) -> None:
    first, second, holder = Caller(service), Caller(service), Caller(service)
    holder.turn(b'{"do":"hold"}\n')
    holder.end.recv(4096)
    read = b'{"do":"read","what":"power"}\n'
    for caller in (first, second, holder):
        caller.end.sendall(3 * read)
    service.turn()  # hears
    answered = []
    while len(answered) < 9:
        before = {caller.client: caller.client.waiting.count(b"\n") for caller in (first, second, holder)}
        service.turn()
        answered += [client for client, count in before.items() if client.waiting.count(b"\n") < count]
    assert answered[:3] == [holder.client] * 3
    assert answered[3:] in ([first.client, second.client] * 3, [second.client, first.client] * 3)
    for caller in (first, second, holder):
        caller.end.close()


def test_time_is_given_by_share(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(service_module.time, "monotonic", lambda: now_s)
    purse = Purse(0.25)
    assert purse.is_open()
    now_s += 50.0
    purse.pay(100.0)
    assert not purse.is_open()
    now_s += 3.9
    assert not purse.is_open(), "a debt is never more than a moment"
    now_s += 0.2
    assert purse.is_open()


PEER = """
import errno, os, socket, sys
from underwatt_helper import service
if os.geteuid() == 0:
    os.setgroups([int(word) for word in sys.argv[2:]])
one, other = socket.socketpair()
refused = {"kernel": None, "old": errno.ENOPROTOOPT, "crowd": errno.ERANGE, "broken": errno.ENOTCONN}[sys.argv[1]]

class Link:
    def getsockopt(self, level, option, size):
        if option == service._PEER_GROUPS and refused:
            raise OSError(refused, os.strerror(refused))
        return one.getsockopt(level, option, size)

from_proc = service._groups_in_proc
if sys.argv[1] == "kernel":
    service._groups_in_proc = None  # whoever calls it fails
try:
    peer = service.peer_of(Link())
except OSError as exc:
    sys.exit(str(exc.errno == errno.ENOTCONN))
assert (peer.pid, peer.user) == (os.getpid(), os.geteuid())
assert peer.groups == {os.getegid(), *os.getgroups()}, peer
assert sys.argv[1] == "kernel" or set(os.getgroups()) == set(from_proc(os.getpid()))
"""


@pytest.mark.parametrize("kernel", ["kernel", "old", "crowd", "broken"])
@pytest.mark.parametrize("version", list(JETPACKS))
def test_groups_are_asked_of_the_connection_and_of_proc_only_where_the_kernel_cannot_tell_them(
    version: str, kernel: str, tmp_path: Path
) -> None:
    """The number of a process may be another's by the time that /proc is read."""
    if not python_of(version):
        pytest.skip(f"there is no Python {version} here, which {JETPACKS[version]} has")
    parent = copy_to(str(tmp_path / "lib"), str(tmp_path))
    words = [python_of(version), "-sEB", "-c", PEER, kernel, *map(str, range(5000, 5256))]
    ended = subprocess.run(words, cwd=parent, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == ((1, "True\n") if kernel == "broken" else (0, "")), ended.stderr
