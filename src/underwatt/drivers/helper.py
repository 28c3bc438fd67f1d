"""A Jetson through its helper, a service that runs as root: for users and containers that may not set its knobs.

The device is the Jetson's own, with the board at the other end of a socket. The helper keeps the lock and the journal,
checks what is asked for, and puts everything back when this process ends, in whatever way.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import os
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

from underwatt.device.space import ModeSpace
from underwatt.device.timing import SystemClock
from underwatt.drivers.jetson import backend as jetson_backend, through_helper
from underwatt.drivers.jetson.device import JetsonDevice, info_of
from underwatt.errors import (
    ApplyError,
    DeviceBusyError,
    DeviceError,
    InputError,
    JournalError,
    ModeError,
    NoDeviceError,
    NotPermittedError,
    SensorError,
    UnderwattError,
)
from underwatt.helper import INSTALL, LONGEST, NAME, PROTOCOL, SOCKET
from underwatt.helper.board import Ability, Identity, State, remedy
from underwatt.helper.board_facts import CONF_FILE, NvpConf, parse_conf
from underwatt.helper.errors import LeaseError
from underwatt.helper.sysfs import Sysfs

if TYPE_CHECKING:
    from collections.abc import Mapping

LEASE_S, RENEW_S = 60.0, 10.0
ANSWER_S = 20.0  # what is asked may be to set the board, for somebody else first
# For whether there is anybody at all: systemd takes connections also for a helper that is dead. So long is also waited
# for one that was silent, until it answers again: a training that it cannot serve must end soon.
FIRST_S = 3.0
VALUES_S = 1.0  # for so long what knobs may be set to is taken to be the same; the helper itself looks each time
_KINDS: dict[str, type[DeviceError | InputError]] = {
    kind.__name__: kind
    for kind in (
        *(ApplyError, DeviceBusyError, InputError, JournalError, LeaseError, ModeError),
        *(NotPermittedError, SensorError),
    )
}
_SILENT = (TimeoutError, BlockingIOError)  # the latter where more wait for it than it takes
_STARTED_AGAIN = "it was started again, or did not answer"
_log = logging.getLogger(__name__)


class SilentError(DeviceError):
    """A helper is there, and does not answer."""


class Link:
    """Messages and answers, one at a time, from any thread; a forked child gets a connection of its own."""

    def __init__(self, path: str, first_s: float = ANSWER_S) -> None:
        self.path = path
        self.has_answered = False
        self._first_s = first_s  # how long the first answer is waited for
        self._begin()

    def _begin(self) -> None:
        self._turn = threading.Lock()
        self._socket: socket.socket | None = None
        self._process = os.getpid()
        self._numbers = itertools.cycle(range(1, 1_000_000))
        self._is_silent = False  # since the last question
        self._silent_s = -math.inf  # when it was last found to be

    def ask(self, do: str, **more: Any) -> dict[str, Any]:
        """The answer to a message; raises ``ConnectionError`` where it got lost, and what the helper refuses."""
        if os.getpid() != self._process:
            self._begin()  # the parent's connection stays the parent's
        asked_s = time.monotonic()
        with self._turn:
            if self._silent_s > asked_s:  # another question has just waited in vain: in turn they would take minutes
                raise ConnectionError("timed out") from TimeoutError("timed out")
            number = next(self._numbers)
            line = json.dumps({"do": do, "id": number, **more}).encode() + b"\n"
            try:
                if self._socket is None:
                    self._socket = self._connected()
                self._socket.settimeout(self._patience_s)
                self._socket.sendall(line)
                answer = self._answer(self._socket, number)
                self.has_answered, self._is_silent = True, False
            except (OSError, ValueError) as exc:
                self._drop()
                if isinstance(exc, _SILENT):
                    self._is_silent, self._silent_s = True, time.monotonic()
                raise ConnectionError(str(exc)) from exc
        if answer.get("ok"):
            return answer
        kind = _KINDS.get(answer.get("kind", ""), DeviceError)
        raise kind(str(answer.get("error", "The helper refused.")), hint=str(answer.get("hint", "")))

    @property
    def _patience_s(self) -> float:
        if self._is_silent:
            return min(self._first_s, FIRST_S)
        return ANSWER_S if self.has_answered else self._first_s

    def _connected(self) -> socket.socket:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            made.settimeout(self._patience_s)
            made.connect(self.path)
        except OSError:
            made.close()
            raise
        self._heard = b""
        return made

    def _answer(self, made: socket.socket, number: int) -> dict[str, Any]:
        """The answer of that number: one to a question that a signal broke off may come before it."""
        while True:
            line, end, rest = self._heard.partition(b"\n")
            if end:
                self._heard = rest
                answer = json.loads(line)
                if answer["id"] in (number, None):  # none: the helper did not even read the question
                    return dict(answer)
            elif len(line) > LONGEST or not (more := made.recv(LONGEST)):
                raise ConnectionError("it ended the connection")
            else:
                self._heard += more

    def close(self) -> None:
        """End the connection."""
        with self._turn:
            self._drop()

    def __del__(self) -> None:
        self._drop()  # who opens a device by its address may just forget it

    def _drop(self) -> None:
        if self._socket is not None:
            if os.getpid() == self._process:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)  # also where a loader's worker has it open
            self._socket.close()
            self._socket = None


class RemoteBoard:
    """What ``JetsonBoard`` is, asked of the helper.

    Where the helper has put everything back although this process still holds the board (it was started again, or this
    process was stopped for longer than the lease), the board is taken and set again, and that is said.
    """

    def __init__(self, path: str) -> None:
        self.link = Link(path, FIRST_S)
        self._begin()
        told = self._ask("describe")
        if told.get("protocol") != PROTOCOL:
            self.link.close()
            hint = f"Install this one's: {INSTALL}."
            raise DeviceError(f"The helper at {path} is of another version of Underwatt.", hint=hint)
        self.identity = Identity(**told["identity"])
        self.sysfs = Sysfs(told["root"])  # for what a check shows of it; a container may hide it
        self.conf = _conf(self.sysfs)
        self._values = _tuples(told["values"])
        self._values_s = time.monotonic()

    def _begin(self) -> None:
        self._turn = threading.RLock()
        self._process = os.getpid()
        self._lease = ""
        self._keeps = False  # a session holds it, also while nothing is set
        self._mode: dict[str, float] = {}  # what is set, to be set again
        self._said: list[str] = []
        self._let_go = threading.Event()
        self._was_silent = False  # since the hold was last looked after

    def _ask(self, do: str, **more: Any) -> dict[str, Any]:
        """Ask what may be asked twice: a helper that has started again answers as well."""
        try:
            answer = self.link.ask(do, **more)
        except ConnectionError as exc:
            self._unless_silent(exc)
            self._look_after(_STARTED_AGAIN)
        else:
            if self._was_silent:  # what was set may be so no more
                self._look_after()
            return answer
        try:
            return self.link.ask(do, **more)
        except ConnectionError as exc:
            raise _silent(self.link.path, exc) from exc

    def _unless_silent(self, exc: ConnectionError) -> None:
        """Nothing where the connection was lost; raises where nobody answers: once more would only take as long."""
        if isinstance(exc.__cause__, _SILENT):
            self._was_silent = True
            raise _silent(self.link.path, exc) from exc

    def values(self) -> Mapping[str, tuple[float, ...]]:
        """What each knob may be set to."""
        if time.monotonic() - self._values_s > VALUES_S:
            values = _tuples(self._ask("read", what="values")["values"])
            self._values = self._values if values == self._values else values
            self._values_s = time.monotonic()
        return self._values

    def stock_modes(self) -> dict[str, dict[str, float]]:
        """The vendor's modes."""
        return dict(self._ask("describe")["stock_modes"])

    def abilities(self) -> tuple[Ability, ...]:
        """Knobs and sensors, as root may use them."""
        return tuple(Ability(*one) for one in self._ask("describe")["abilities"])

    def power_w(self) -> float:
        """Total power now."""
        return float(self._ask("read", what="power")["power_w"])

    def state(self) -> State:
        """What runs now."""
        told = self._ask("read", what="state")
        return State(told["running"], told["rails_w"], told["temperatures_c"], tuple(told["throttle_reasons"]))

    def snapshot(self) -> dict[str, str]:
        """What setting could change, as it reads."""
        return dict(self._ask("read", what="snapshot")["snapshot"])

    def foreign_changes(self) -> tuple[str, ...]:
        """What others have changed, the helper itself included."""
        changes = self._ask("read", what="changes")["changes"]
        said, self._said = self._said, []
        return (*said, *changes)

    def hold(self, *, keeps: bool = False) -> bool:
        """Take the board for this process; whether something that was killed had to be put back first."""
        if os.getpid() != self._process:
            self._begin()  # what the parent holds is the parent's
        with self._turn:
            recovered = False
            if not self._lease:
                recovered = self._take()
                self._let_go = threading.Event()
                threading.Thread(target=self._renew, args=(self._let_go,), name="underwatt-lease", daemon=True).start()
            self._keeps = self._keeps or keeps
        return recovered

    def _take(self) -> bool:
        try:
            told = self.link.ask("hold", lease_s=LEASE_S)
        except ConnectionError as lost:  # a helper that has started again
            self._unless_silent(lost)
            try:
                told = self.link.ask("hold", lease_s=LEASE_S)
            except ConnectionError as exc:
                raise _silent(self.link.path, exc) from exc
        self._lease = told["lease"]
        return bool(told["recovered"])

    def apply(self, mode: Mapping[str, float]) -> None:
        """Set knobs."""
        if not mode:
            return
        if not self._is_ours():
            self.hold()
        with self._turn:
            try:
                self.link.ask("apply", lease=self._lease, mode=dict(mode))
            except LeaseError:
                self._set_again({**self._mode, **mode}, f"this process gave no sign of life for {LEASE_S:g} s")
            except ConnectionError as exc:
                self._unless_silent(exc)
                self._set_again({**self._mode, **mode}, _STARTED_AGAIN)
            self._mode.update(mode)

    def _set_again(self, mode: Mapping[str, float], why: str) -> None:
        """Take the board once more, as the hold was lost, and set it."""
        self._take()
        if mode:
            try:
                self.link.ask("apply", lease=self._lease, mode=dict(mode))
            except ConnectionError as exc:
                raise _silent(self.link.path, exc) from exc
            self._said.append(f"The helper had put everything back: {why}. It was set again.")

    def _look_after(self, why: str = "") -> None:
        """Show that this process lives; where the hold was lost all the same, take it and set it again."""
        if not self._is_ours():
            return
        with self._turn:
            if not self._lease:
                return  # let go meanwhile
            was_silent, self._was_silent = self._was_silent, False
            try:
                self.link.ask("hold", lease=self._lease)
                return
            except LeaseError:
                why = why or (_STARTED_AGAIN if was_silent else f"this process gave no sign of life for {LEASE_S:g} s")
            except ConnectionError as exc:
                if isinstance(exc.__cause__, _SILENT):
                    self._was_silent = True
                    return  # looked after when it answers again
                why = _STARTED_AGAIN
            try:
                self._set_again(self._mode, why)
            except DeviceError as exc:
                said = f"The helper has put everything back: {why}. It cannot be set again: {exc.message}"
                self._said += [said] if said not in self._said[-1:] else []

    def _renew(self, let_go: threading.Event) -> None:
        while not let_go.wait(RENEW_S):
            with contextlib.suppress(DeviceError, ConnectionError):
                self._look_after()

    def restore(self, _snapshot: Mapping[str, str]) -> None:
        """Have the helper put back what it found when the hold began: a snapshot of ours is not taken for it."""
        if self._is_ours():
            self._release(hold=self._keeps)

    def let_go(self) -> None:
        """Put back, and let the next one in."""
        if self._is_ours():
            self._release(hold=False)

    def _release(self, *, hold: bool) -> None:
        with self._turn:
            lease, self._mode = self._lease, {}
            if not hold:
                self._lease, self._keeps = "", False
                self._let_go.set()
            try:
                self.link.ask("release", lease=lease, hold=hold)
            except (LeaseError, ConnectionError) as exc:  # the end of a hold or of its connection puts back as well
                if isinstance(exc.__cause__, _SILENT):
                    hint = f"It puts the board back when it goes on or starts again: sudo systemctl restart {NAME}."
                    raise SilentError(f"The helper at {self.link.path} does not answer.", hint=hint) from exc
                trouble = self._ask("describe")["trouble"]
                if trouble:
                    raise ApplyError(trouble) from None

    def close(self) -> None:
        """End the connection; what is set is put back."""
        if self._is_ours():
            with self._turn:
                self._lease, self._keeps = "", False
                self._let_go.set()
        self.link.close()

    def _is_ours(self) -> bool:
        return bool(self._lease) and os.getpid() == self._process


class HelperDevice(JetsonDevice):
    """A Jetson whose helper listens at a path."""

    def __init__(self, path: str = SOCKET) -> None:
        self.clock = SystemClock()
        self._board: RemoteBoard = RemoteBoard(path)  # type: ignore[assignment]
        self.info = info_of(self._board.identity, "helper", "helper:" if path == SOCKET else f"helper:{path}")
        self._space, self._space_of = ModeSpace([]), {}

    def hold(self) -> bool:
        """Take it for this process; whether something that was killed had to be put back first."""
        return self._board.hold(keeps=True)

    def let_go(self) -> None:
        """Have everything put back, and let the next one in."""
        self._board.let_go()

    def close(self) -> None:
        """End the connection; what is set is put back."""
        self._board.close()


class HelperBackend:
    """Finds the helper where this user may not set the knobs of the board, and may speak to it."""

    name = "helper"

    def affinity(self) -> float:
        """Certain where there is a helper to speak to and nothing could be set without it."""
        return 1.0 if through_helper() else 0.0

    def find(self) -> tuple[str, ...]:
        """The helper of this machine."""
        return ("",) if self.affinity() else ()

    def open(self, where: str) -> JetsonDevice:
        """Speak to the helper that listens at a path; where this machine's is dead, only read the board itself."""
        path = where or SOCKET
        try:
            return HelperDevice(path)
        except SilentError as exc:
            if path != SOCKET or not through_helper():
                raise
            return _to_read(exc)


def _to_read(silent: SilentError) -> JetsonDevice:
    """The board without its helper, for a user who may not set it; what became of the helper is said."""
    try:
        device = jetson_backend.open("")
    except DeviceError:  # in a container that does not show it, say
        raise silent from None
    _log.warning("%s The board is only read, as this user may not set it. %s", silent.message, silent.hint)
    return device


def helper_status(path: str = SOCKET, *, within_s: float = FIRST_S) -> dict[str, Any]:
    """Whether a helper answers, and if not, why; who holds its board; and why that is not as it was found, if so."""
    link = Link(path, within_s)
    try:
        told = link.ask("describe")
    except ConnectionError as exc:
        return {"answers": False, "says": str(_silent(path, exc)), "holder": "", "trouble": ""}
    except UnderwattError as exc:
        return {"answers": False, "says": str(exc), "holder": "", "trouble": ""}
    finally:
        link.close()
    held = f"held by {told['holder']}" if told["holder"] else "held by nobody"
    says = f"It answers, for {told['identity']['name']}, which is {held}."
    return {"answers": True, "says": says, "holder": told["holder"], "trouble": told["trouble"]}


def _silent(path: str, exc: Exception) -> DeviceError:
    cause = exc.__cause__
    if isinstance(cause, PermissionError):
        return NotPermittedError(f"This user may not speak to the helper at {path}.", hint=remedy())
    if isinstance(cause, FileNotFoundError):
        return NoDeviceError(f"There is no helper at {path}.", hint=remedy())
    return SilentError(f"The helper at {path} does not answer ({exc}).", hint=f"See: sudo journalctl -u {NAME}.")


def _tuples(values: Mapping[str, list[float]]) -> dict[str, tuple[float, ...]]:
    return {name: tuple(entries) for name, entries in values.items()}


def _conf(sysfs: Sysfs) -> NvpConf:
    try:
        return parse_conf(sysfs.text_or_empty(CONF_FILE))
    except InputError:
        return NvpConf()


backend = HelperBackend()
