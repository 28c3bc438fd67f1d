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
from .errors import DeviceError, InputError, UnderwattError
from .keeper import Process, say
from .sensors import ThermalZones

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .keeper import Keeper

MOST_CLIENTS, MOST_OF_A_USER = 64, 16
SHARE, HOLDERS_SHARE, BURST_S = 0.25, 0.75, 1.0  # of the time for all who do not hold the board, and for who does
HALF_A_LINE_S, SILENT_S = 10.0, 600.0
_PAUSE_S = 0.02
_PEER_GROUPS, _MOST_BYTES = getattr(socket, "SO_PEERGROUPS", 59), 1024  # Python's getsockopt takes no more: 256 groups


class Peer(NamedTuple):
    """Who is at the other end, as the kernel says."""

    pid: int
    user: int
    groups: "frozenset[int]"


def peer_of(client: socket.socket) -> Peer:
    """Ask the kernel who connected; the groups that came with it, too, which a container may have given it."""
    pid, user, group = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    try:
        packed = client.getsockopt(socket.SOL_SOCKET, _PEER_GROUPS, _MOST_BYTES)
        groups: Iterable[int] = struct.unpack(f"{len(packed) // 4}I", packed)
    except OSError as exc:
        if exc.errno not in (errno.ENOPROTOOPT, errno.ERANGE):  # kernels before 4.13; more groups than that
            raise
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
        self.heard_s = self.answered_s = time.monotonic()
        self.listens, self.closed = False, False
        self.thermal: ThermalZones | None = None  # over-current events since this client last asked


class Purse:
    """The time of the only thread that some clients may take together: a share of it, and a while at once."""

    def __init__(self, share: float) -> None:
        self._share, self._left_s, self._since_s = share, BURST_S, time.monotonic()

    def is_open(self) -> bool:
        """Whether some is left."""
        now_s = time.monotonic()
        self._left_s = min(BURST_S, self._left_s + (now_s - self._since_s) * self._share)
        self._since_s = now_s
        return self._left_s > 0

    def pay(self, since_s: float) -> None:
        """Some was taken, from a moment until now."""
        self.is_open()
        self._left_s = max(-BURST_S, self._left_s - (self._since_s - since_s))


class Service:
    """Answers until it is told to end, and puts the board back then."""

    def __init__(self, keeper: "Keeper", listener: socket.socket, group: int) -> None:
        self.keeper = keeper
        self._listener, self._group = listener, group
        self._selector = selectors.DefaultSelector()
        self._clients: list[Client] = []
        self._holders, self._others = Purse(HOLDERS_SHARE), Purse(SHARE)
        self._ended = self._accepts = False

    def run(self) -> int:
        """Serve; returns an exit code: 0 where everything is as it was found."""
        self._listener.setblocking(False)
        alarm, wake = socket.socketpair()
        for end in (alarm, wake):
            end.setblocking(False)
        signal.set_wakeup_fd(wake.fileno())
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._end)
        self._selector.register(alarm, selectors.EVENT_READ, lambda: alarm.recv(64))
        self._quietly(self.keeper.finish_killed)
        while not self._ended:
            self.turn()
        self._quietly(lambda: self.keeper.end("is told that the helper ends"))
        return 1 if self.keeper.trouble else 0

    def turn(self) -> None:
        """Hear who speaks, answer one line, and see what time has brought."""
        self._accept_or_not(self._others.is_open())
        waiting = [client for client in self._clients if b"\n" in client.waiting]
        able = [client for client in waiting if self._purse_of(client).is_open()]
        if able:
            # The holder first, then who was answered longest ago: nobody can keep the others from being heard.
            self._answer_line(min(able, key=lambda client: (not self._holds(client), client.answered_s)))
        busy = bool(able) or any(b"\n" in client.waiting for client in self._clients)
        for key, _ in self._selector.select(self._wait_s(0.0 if able else _PAUSE_S if busy else None)):
            key.data()
        self._quietly(self.keeper.tick)
        now_s = time.monotonic()
        for client in list(self._clients):
            left_s = (HALF_A_LINE_S if client.waiting else SILENT_S) - (now_s - client.heard_s)
            if left_s < 0 and client.listens and not self._holds(client):
                self._close(client)

    def _end(self, *_: object) -> None:
        self._ended = True

    def _quietly(self, act: "Callable[[], object]") -> None:
        """Do what nobody waits for an answer to; what goes wrong is for the log."""
        try:
            act()
        except DeviceError as exc:
            say(str(exc))

    def _wait_s(self, at_most_s: "float | None") -> "float | None":
        waits = [at_most_s, self.keeper.wait_s, None if self._accepts else _PAUSE_S]
        waits.append(HALF_A_LINE_S if self._clients else None)
        return min((wait for wait in waits if wait is not None), default=None)

    # Connections

    def _accept_or_not(self, accepts: bool) -> None:
        if accepts and not self._accepts:
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        elif self._accepts and not accepts:
            self._selector.unregister(self._listener)
        self._accepts = accepts

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
        if client.peer.user == 0 or self._group in client.peer.groups:
            self._make_room(client.peer.user)
            self._clients.append(client)
            self._listen(client, True)
            if client.process.file is not None:
                self._selector.register(client.process.file, selectors.EVENT_READ, lambda: self._close(client))
        else:
            say(f"user {client.peer.user} is not in the group and was refused")
            self._answer(client, refusal(InputError("Only root and the helper's group may speak to it.")))
            self._close(client)
        self._others.pay(begun_s)

    def _make_room(self, user: int) -> None:
        """Where a user, or all, have too many connections, the one goes that has been silent for longest."""
        others = [client for client in self._clients if not self._holds(client)]
        of_user = [client for client in others if client.peer.user == user]
        crowd = of_user if len(of_user) >= MOST_OF_A_USER else others if len(others) >= MOST_CLIENTS else []
        if crowd:
            self._close(min(crowd, key=lambda client: client.heard_s))

    def _holds(self, client: Client) -> bool:
        return self.keeper.hold is not None and self.keeper.hold.owner is client

    def _purse_of(self, client: Client) -> Purse:
        return self._holders if self._holds(client) else self._others

    def _listen(self, client: Client, listens: bool) -> None:
        if listens and not client.listens:
            self._selector.register(client.link, selectors.EVENT_READ, lambda: self._hear(client))
        elif client.listens and not listens:
            self._selector.unregister(client.link)
        client.listens = listens

    def _close(self, client: Client) -> None:
        """End a connection, and with it a hold; also because its process has ended, while its children keep it open."""
        if client.closed:
            return
        client.closed = True
        if client in self._clients:
            self._clients.remove(client)
            self._listen(client, False)
            if client.process.file is not None:
                self._selector.unregister(client.process.file)
        if self._holds(client):
            self._quietly(lambda: self.keeper.end("is gone"))
        client.process.forget()
        client.link.close()

    def _hear(self, client: Client) -> None:
        """Take what a client has sent; no more of it before it has its answer."""
        if client.closed or not client.listens:
            return
        try:
            heard = client.link.recv(LONGEST)
        except BlockingIOError:
            return
        except OSError:
            heard = b""
        if not client.waiting:
            client.heard_s = time.monotonic()
        client.waiting += heard
        if not heard:
            self._close(client)
        elif b"\n" in client.waiting[: LONGEST + 1]:
            self._listen(client, False)
        elif len(client.waiting) > LONGEST:
            self._answer(client, refusal(InputError(f"A message is at most {LONGEST} bytes long.")))
            self._close(client)

    def _answer_line(self, client: Client) -> None:
        purse, client.answered_s = self._purse_of(client), time.monotonic()
        line, _, client.waiting = client.waiting.partition(b"\n")
        self._answer(client, self._reply(client, line))
        client.heard_s = time.monotonic()
        purse.pay(client.answered_s)
        if not client.closed:
            self._listen(client, b"\n" not in client.waiting)

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
