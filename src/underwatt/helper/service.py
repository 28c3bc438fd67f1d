"""The socket: who may speak, how much, and what each message means. Clients name knobs and values, never paths.

A message is a line of JSON, at most 4 KiB, such as ``{"do": "read", "what": "power"}``; so is each answer. Only this
thread does anything: while a mode is set, others wait.
"""

import errno
import grp
import json
import os
import pwd
import selectors
import signal
import socket
import stat
import struct
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from . import LONGEST, PROTOCOL
from .errors import DeviceBusyError, DeviceError, InputError, UnderwattError
from .keeper import Process, say
from .sensors import ThermalZones

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .keeper import Keeper

MOST_CLIENTS, MOST_OF_A_USER = 64, 16
SHARE, BURST_S = 0.5, 1.0  # of the helper's time a user may take so much, and for so long all of it
HALF_A_LINE_S, SILENT_S = 10.0, 600.0
_PAUSE_S = 0.02
_PEER_GROUPS = getattr(socket, "SO_PEERGROUPS", 59)


class Peer(NamedTuple):
    """Who is at the other end, as the kernel says."""

    pid: int
    user: int
    groups: "frozenset[int]"


def peer_of(client: socket.socket) -> Peer:
    """Ask the kernel who connected; the groups that came with it, too, which a container may have given it."""
    pid, user, group = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    try:
        packed = client.getsockopt(socket.SOL_SOCKET, _PEER_GROUPS, 4096)
        groups: Iterable[int] = struct.unpack(f"{len(packed) // 4}I", packed)
    except OSError:  # kernels before 4.13
        groups = _groups_in_proc(pid)
    return Peer(pid, user, frozenset((group, *groups)))


def _groups_in_proc(pid: int) -> "list[int]":
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            line = next((line for line in file if line.startswith("Groups:")), "")
    except OSError:
        return []
    return [int(word) for word in line.split()[1:]]


def is_member(user: int, group: int) -> bool:
    """Whether a user of this machine is root or in a group."""
    try:
        known = pwd.getpwuid(user)
        return user == 0 or known.pw_gid == group or known.pw_name in grp.getgrgid(group).gr_mem
    except KeyError:
        return user == 0


class Client:
    """One connection: who is at its other end, and what has come in of a line."""

    def __init__(self, link: socket.socket, peer: Peer) -> None:
        self.link, self.peer = link, peer
        self.process = Process(peer.pid)
        self.waiting = b""
        self.heard_s = time.monotonic()
        self.paused = self.closed = False
        self.thermal: ThermalZones | None = None  # over-current events since this client last asked


class Service:
    """Answers until it is told to end, and puts the board back then."""

    def __init__(self, keeper: "Keeper", listener: socket.socket, group: int, share: float = SHARE) -> None:
        self.keeper = keeper
        self._listener, self._group, self._share = listener, group, share
        self._selector = selectors.DefaultSelector()
        self._clients: list[Client] = []
        self._purses: dict[int, tuple[float, float]] = {}  # by user: seconds of this thread that are left, since when
        self._ended = False

    def run(self) -> int:
        """Serve; returns an exit code: 0 where everything is as it was found."""
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        alarm, wake = socket.socketpair()
        for end in (alarm, wake):
            end.setblocking(False)
        signal.set_wakeup_fd(wake.fileno())
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._end)
        self._selector.register(alarm, selectors.EVENT_READ, lambda: alarm.recv(64))
        self._quietly(self.keeper.finish_killed)
        while not self._ended:
            for key, _ in self._selector.select(self._wait_s()):
                key.data()
            self._quietly(self.keeper.tick)
            self._look_after_clients()
        self._quietly(lambda: self.keeper.end("is told that the helper ends"))
        return 1 if self.keeper.trouble else 0

    def _end(self, *_: object) -> None:
        self._ended = True

    def _quietly(self, act: "Callable[[], object]") -> None:
        """Do what nobody waits for an answer to; what goes wrong is for the log."""
        try:
            act()
        except DeviceError as exc:
            say(str(exc))

    def _wait_s(self) -> "float | None":
        waits = [self.keeper.wait_s, _PAUSE_S if any(client.paused for client in self._clients) else None]
        waits.append(HALF_A_LINE_S if self._clients else None)
        return min((wait for wait in waits if wait is not None), default=None)

    # Connections

    def _accept(self) -> None:
        begun_s = time.monotonic()
        try:
            link, _ = self._listener.accept()
        except OSError:
            return
        link.setblocking(False)
        try:
            client = Client(link, peer_of(link))
        except OSError:
            link.close()
            return
        user = client.peer.user
        if user != 0 and self._group not in client.peer.groups:
            say(f"user {user} is not in the group and was refused")
            self._answer(client, refusal(InputError("Only root and the helper's group may speak to it.")))
            self._close(client)
        elif not (self._may_ask(user) and self._has_room(user)):
            self._answer(client, refusal(DeviceBusyError("The helper has too much to do already.")))
            self._close(client)
        else:
            self._clients.append(client)
            self._selector.register(link, selectors.EVENT_READ, lambda: self._hear(client))
            if client.process.file is not None:
                self._selector.register(client.process.file, selectors.EVENT_READ, lambda: self._close(client))
            self._pay(user, time.monotonic() - begun_s)

    def _has_room(self, user: int) -> bool:
        """Whether one more of a user can be heard; the one of them that has been silent for longest may have to go."""
        others = [client for client in self._clients if client.peer.user == user and not self._holds(client)]
        if len(others) >= MOST_OF_A_USER:
            self._close(min(others, key=lambda client: client.heard_s))
        return len(self._clients) < MOST_CLIENTS

    def _holds(self, client: Client) -> bool:
        return self.keeper.hold is not None and self.keeper.hold.owner is client

    def _close(self, client: Client) -> None:
        """End a connection, and with it a hold; also because its process has ended, while its children keep it open."""
        if client.closed:
            return
        client.closed = True
        if client in self._clients:
            self._clients.remove(client)
            if client.process.file is not None:
                self._selector.unregister(client.process.file)
            if not client.paused:
                self._selector.unregister(client.link)
        if self._holds(client):
            self._quietly(lambda: self.keeper.end("is gone"))
        client.process.forget()
        client.link.close()

    def _look_after_clients(self) -> None:
        now_s = time.monotonic()
        for client in list(self._clients):
            if client.paused:
                self._answer_lines(client)
            elif now_s - client.heard_s > (HALF_A_LINE_S if client.waiting else SILENT_S) and not self._holds(client):
                self._close(client)

    def _hear(self, client: Client) -> None:
        if client.closed or client.paused:
            return
        try:
            heard = client.link.recv(LONGEST)
        except BlockingIOError:
            return
        except OSError:
            heard = b""
        if not heard:
            self._close(client)
            return
        if not client.waiting:
            client.heard_s = time.monotonic()
        client.waiting += heard
        self._answer_lines(client)

    def _answer_lines(self, client: Client) -> None:
        """Answer the lines that are there, as long as the user has not asked for too much; then they wait."""
        while b"\n" in client.waiting[: LONGEST + 1] and not client.closed:
            if not self._may_ask(client.peer.user):
                self._pause(client, True)
                return
            line, _, client.waiting = client.waiting.partition(b"\n")
            client.heard_s = time.monotonic()
            self._answer(client, self._reply(client, line))
            self._pay(client.peer.user, time.monotonic() - client.heard_s)
        if not client.closed and len(client.waiting) > LONGEST:
            self._answer(client, refusal(InputError(f"A message is at most {LONGEST} bytes long.")))
            self._close(client)
        elif not client.closed:
            self._pause(client, False)

    def _pause(self, client: Client, pause: bool) -> None:
        if client.paused != pause:
            client.paused = pause
            if pause:
                self._selector.unregister(client.link)
            else:
                self._selector.register(client.link, selectors.EVENT_READ, lambda: self._hear(client))

    def _may_ask(self, user: int) -> bool:
        left_s, since_s = self._purses.get(user, (BURST_S, 0.0))
        now_s = time.monotonic()
        left_s = min(BURST_S, left_s + (now_s - since_s) * self._share)
        if left_s >= BURST_S:
            self._purses.pop(user, None)  # nothing to remember of it
        else:
            self._purses[user] = left_s, now_s
        return left_s > 0

    def _pay(self, user: int, busy_s: float) -> None:
        left_s, since_s = self._purses.get(user, (BURST_S, time.monotonic()))
        self._purses[user] = left_s - busy_s, since_s

    def _answer(self, client: Client, answer: "dict[str, Any]") -> None:
        """Send a line; who does not read its answers is not waited for."""
        data = json.dumps(answer).encode() + b"\n"
        if len(data) > LONGEST:
            data = json.dumps(refusal(DeviceError("The answer would be too long."), answer.get("id"))).encode() + b"\n"
        try:
            if client.link.send(data) == len(data):
                return
        except OSError:
            pass
        self._close(client)

    # Messages

    def _reply(self, client: Client, line: bytes) -> "dict[str, Any]":
        number = None
        try:
            message = parse(line)
            number = message.get("id")
            return {"id": number, "ok": True, **_MESSAGES[message["do"]][0](self, client, message)}
        except UnderwattError as exc:
            return refusal(exc, number)
        except Exception as exc:  # noqa: BLE001 - one client's message must not end the service for all
            say(f"an error of the helper's own: {exc!r}")
            return refusal(DeviceError("The helper failed; its log says how."), number)

    def _describe(self, _client: Client, _message: "dict[str, Any]") -> "dict[str, Any]":
        keeper, board = self.keeper, self.keeper.board
        return {
            "protocol": PROTOCOL,
            "identity": board.identity._asdict(),
            "root": board.sysfs.root,
            "values": board.values(),
            "abilities": board.abilities(),
            "stock_modes": board.stock_modes(),
            "holder": str(keeper.hold) if keeper.hold else "",
            "trouble": keeper.trouble,
        }

    def _hold(self, client: Client, message: "dict[str, Any]") -> "dict[str, Any]":
        if "lease" in message:
            return {"lease_s": self.keeper.held_by(client, message["lease"]).lease_s}
        lease_s = message.get("lease_s", 60.0)
        if not is_number(lease_s):
            raise InputError("lease_s is a number of seconds.")
        if client.process.has_ended():
            hint = "It must see the processes of its clients: run it outside of containers."
            raise InputError("The helper cannot see your process.", hint=hint)
        hold, recovered = self.keeper.begin(client, client.process, client.peer.user, lease_s)
        return {"lease": hold.lease, "lease_s": hold.lease_s, "recovered": recovered}

    def _apply(self, client: Client, message: "dict[str, Any]") -> "dict[str, Any]":
        mode = message.get("mode")
        if not isinstance(mode, dict) or not all(map(is_number, mode.values())):
            raise InputError("mode is an object of numbers by knob.")
        self.keeper.apply(self.keeper.held_by(client, message.get("lease")), mode)
        return {}

    def _read(self, client: Client, message: "dict[str, Any]") -> "dict[str, Any]":
        what, keeper = message.get("what"), self.keeper
        if what == "power":
            return {"power_w": keeper.board.power_w()}
        if what == "state":
            client.thermal = client.thermal or ThermalZones(keeper.board.sysfs)
            return dict(keeper.board.state(client.thermal)._asdict())
        if what == "values":
            return {"values": keeper.board.values()}
        if what == "snapshot":
            return {"snapshot": keeper.board.snapshot()}
        if what == "changes":
            return {"changes": keeper.board.foreign_changes() if self._holds(client) else []}
        raise InputError("what is power, state, values, snapshot or changes.")

    def _release(self, client: Client, message: "dict[str, Any]") -> "dict[str, Any]":
        hold = self.keeper.held_by(client, message.get("lease"))
        if message.get("hold") is True:
            self.keeper.put_back(hold)
        else:
            self.keeper.end("lets go")
        return {}


def is_number(value: Any) -> bool:
    """Whether it is a number that a knob could have; in Python true and false are numbers, too."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1e6


# What a message may ask for, by whom it is done, and what else may stand in it.
_MESSAGES = {
    "describe": (Service._describe, ()),
    "hold": (Service._hold, ("lease_s", "lease")),
    "apply": (Service._apply, ("lease", "mode")),
    "read": (Service._read, ("what",)),
    "release": (Service._release, ("lease", "hold")),
}


def parse(line: bytes) -> "dict[str, Any]":
    """A message, or an ``InputError`` that says what is wrong with it."""
    try:
        message = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        raise InputError("A message is one line of JSON.") from None
    if not isinstance(message, dict) or not isinstance(message.get("do"), str) or message["do"] not in _MESSAGES:
        raise InputError(f"A message is an object whose 'do' is one of {', '.join(_MESSAGES)}.")
    unknown = set(message) - {"do", "id", *_MESSAGES[message["do"]][1]}
    if unknown:
        raise InputError(f"{message['do']} knows no {min(unknown)[:40]!r}.")
    if not is_number(message.get("id", 0)):
        raise InputError("id is a number, which comes back with the answer.")
    return message


def refusal(error: UnderwattError, number: Any = None) -> "dict[str, Any]":
    """An error as an answer; what it quotes of the message may be long."""
    return {
        "id": number,
        "ok": False,
        "kind": type(error).__name__,
        "error": error.message[:1000],
        "hint": error.hint[:500],
    }


# Where the socket comes from


def listener_from_systemd() -> "socket.socket | None":
    """The socket that systemd made and holds for us, also while we start again."""
    if os.environ.get("LISTEN_PID") != str(os.getpid()) or os.environ.get("LISTEN_FDS") != "1":
        return None
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, fileno=3)


def listen(path: str, group: int) -> socket.socket:
    """A socket of our own, for root and the group; one that nobody answers at is left over and is replaced."""
    folder = os.path.dirname(os.path.abspath(path))
    os.makedirs(folder, mode=0o755, exist_ok=True)
    found = os.stat(folder)
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:  # else others could put something else in its place
        raise PermissionError(errno.EPERM, f"others may write to {folder}")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as knock:
        if knock.connect_ex(path) == errno.ECONNREFUSED and stat.S_ISSOCK(os.lstat(path).st_mode):
            os.unlink(path)
    before = os.umask(0o177)
    try:
        listener.bind(path)
    finally:
        os.umask(before)
    os.chown(path, -1, group)
    os.chmod(path, 0o660)
    listener.listen(16)
    return listener
