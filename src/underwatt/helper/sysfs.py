"""Files of a Linux board under a root directory: the one place where system errors become Underwatt's."""

import errno
import os
import time
from enum import Enum
from glob import escape, glob
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from . import INSTALL
from .errors import ApplyError, DeviceError, NotPermittedError, SensorError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
_BUSY = (errno.EBUSY, errno.EAGAIN)
# A CPU limit is applied up to some 60 ms after its write, a core is switched and its files get their rights sooner.
PATIENCE_S = 0.1
_PAUSE_S, _FEWEST_TRIES = 0.003, 5
_PAGE = 4096  # what a kernel file holds at most; only text files under /etc are longer
_MAX_BYTES = 1 << 20  # a file that never ends must not eat the memory
_Result = TypeVar("_Result")
PERMIT_HINT = f"Install the helper, once, which sets it for you: {INSTALL}; or run with sudo."


class Presence(Enum):
    """Whether a file is there, as far as this user can tell."""

    PRESENT = "present"
    ABSENT = "absent"
    HIDDEN = "hidden"  # a folder above it may not be entered, as with debugfs without root


class Sysfs:
    """Reads and writes small kernel files by their path relative to ``root``.

    Text is kept byte for byte (latin-1), so that what was found can be written back exactly. A file is never
    created: a missing one is an error. Tests inject faults by overriding ``_pull`` and ``_push``.
    """

    def __init__(self, root: "str | Path" = "/") -> None:
        self.root = str(root)
        self._prefix = f"{self.root.rstrip('/')}/"

    def full(self, path: str) -> str:
        """Where a relative path is on this machine."""
        return self._prefix + path

    def read(self, path: str, *, patience_s: float = 0.0) -> str:
        """The text of a file as it stands; raises ``SensorError`` or ``NotPermittedError``.

        A file that is busy is asked again for ``patience_s``: some are for a moment, and that of a zone without
        power always.
        """
        try:
            return _patiently(lambda: self._pull(path), _BUSY, patience_s).decode("latin-1")
        except OSError as exc:
            raise _translated(exc, SensorError, f"cannot read {self.full(path)}") from exc

    def read_word(self, path: str, *, patience_s: float = 0.0) -> str:
        """The text of a file without the newline or NUL that ends it."""
        return self.read(path, patience_s=patience_s).strip("\0 \t\r\n")

    def read_int(self, path: str, *, patience_s: float = 0.0) -> int:
        """The whole number in a file; raises ``SensorError`` where there is none."""
        text = self.read(path, patience_s=patience_s)
        try:
            return int(text)
        except ValueError:
            hint = "Its driver may be unloading or broken; look into dmesg."
            raise SensorError(f"{self.full(path)} holds {text[:40]!r}, which is not a number.", hint=hint) from None

    def read_ints(self, path: str) -> "tuple[int, ...]":
        """The whole numbers in a file, ascending, each once."""
        text = self.read(path, patience_s=PATIENCE_S)
        try:
            return tuple(sorted({int(word) for word in text.split()}))
        except ValueError:
            hint = "Its driver may be unloading or broken; look into dmesg."
            raise SensorError(
                f"{self.full(path)} holds {text[:60]!r}, which is no list of numbers.", hint=hint
            ) from None

    def text_or_empty(self, path: str) -> str:
        """The text of a file, empty where it cannot be read."""
        try:
            return self.read(path)
        except DeviceError:
            return ""

    def int_or_none(self, path: str) -> "int | None":
        """The whole number in a file, ``None`` where it cannot be read."""
        try:
            return self.read_int(path)
        except DeviceError:
            return None

    def write(self, path: str, text: str, *, rights_late: bool = False) -> None:
        """Write to a file that exists; raises ``ApplyError`` or ``NotPermittedError``.

        A busy kernel is asked again for a moment; with ``rights_late`` so is one that forbids it, as the files of a
        core that was just switched on do until udev has seen to them.
        """
        again = (*_BUSY, errno.EPERM, errno.EACCES) if rights_late else _BUSY
        try:
            _patiently(lambda: self._push(path, text.encode("latin-1", "replace")), again, PATIENCE_S)
        except OSError as exc:
            raise _translated(exc, ApplyError, f"cannot write {text.strip()!r} to {self.full(path)}") from exc

    def glob(self, pattern: str) -> "tuple[str, ...]":
        """The relative paths that match, sorted; folders that may not be entered match nothing."""
        found = glob(escape(self._prefix) + pattern)
        return tuple(sorted(path[len(self._prefix) :] for path in found))

    def presence(self, path: str) -> "Presence":
        """Whether a file is there, is not, or cannot be known."""
        try:
            os.stat(self.full(path))
        except PermissionError:
            return Presence.HIDDEN
        except (OSError, ValueError):
            return Presence.ABSENT
        return Presence.PRESENT

    def exists(self, path: str) -> bool:
        """Whether a file is known to be there."""
        return self.presence(path) is Presence.PRESENT

    def settable(self, path: str) -> bool:
        """Whether this user may read and write the file, asked without writing it."""
        return os.access(self.full(path), os.R_OK | os.W_OK)

    def _pull(self, path: str) -> bytes:
        handle = os.open(self.full(path), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            data = chunk = os.read(handle, _PAGE)
            while len(chunk) == _PAGE and len(data) < _MAX_BYTES:
                chunk = os.read(handle, _PAGE)
                data += chunk
            return data
        finally:
            os.close(handle)

    def _push(self, path: str, data: bytes) -> None:
        handle = os.open(self.full(path), os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
        try:
            os.write(handle, data)  # one call: the kernel parses each write on its own
        finally:
            os.close(handle)


def _patiently(act: "Callable[[], _Result]", again_on: "tuple[int, ...]", patience_s: float) -> _Result:
    """Do it, and again while it fails with one of these errors and there is patience left.

    A busy machine may use it up between two tries, so that there are a few in any case.
    """
    end_s, tries = time.monotonic() + patience_s, 0
    while True:
        tries += 1
        is_last = patience_s <= 0 or (tries > _FEWEST_TRIES and time.monotonic() >= end_s)
        try:
            return act()
        except OSError as exc:
            if is_last or exc.errno not in again_on:
                raise
        time.sleep(_PAUSE_S)


def _translated(exc: OSError, otherwise: "type[DeviceError]", doing: str) -> DeviceError:
    reason = f"{os.strerror(exc.errno) if exc.errno else exc}"
    message = f"{doing[0].upper()}{doing[1:]}: {reason.lower()}."
    if exc.errno in _FORBIDDEN:
        return NotPermittedError(message, hint=PERMIT_HINT)
    if exc.errno in (errno.EINVAL, errno.EBUSY):
        return otherwise(message, hint="The kernel refused it; look into dmesg, and try again.")
    return otherwise(message, hint="Its driver may not be loaded, or went away; 'underwatt devices' shows what is.")


class Wanted(NamedTuple):
    """What a file shall read after a write."""

    text: str  # as it is written, with the newline that ends it
    tolerance: int = 0
    shown_by: str = ""  # another file tells it, too: this one may not give back what was written
    excuse: "Callable[[int, int], bool] | None" = None  # (found, wanted): as good, as where heat holds a clock down

    def fits(self, found: str) -> bool:
        """Whether a file that reads so has taken it."""
        if found.strip() == self.text.strip():
            return True
        try:
            value, wanted = int(found), int(self.text)
        except ValueError:
            return False
        return abs(value - wanted) <= self.tolerance or bool(self.excuse and self.excuse(value, wanted))


class Writes:
    """Writes to several files that are checked together at the end, so that waiting for them does not add up.

    Newer kernels apply a limit some time after its write and give the old value until then: what reads otherwise is
    read again for a while before it counts as refused.
    """

    def __init__(self, sysfs: "Sysfs") -> None:
        self.wanted: dict[str, Wanted] = {}  # every file that was or may have been written
        self.rights_late = False  # a core was switched on, and the rights to its files may come a moment later
        self._sysfs = sysfs
        self._open: set[str] = set()

    def put(self, path: str, wanted: "Wanted") -> None:
        """Write one file; that it took is checked by ``unsettled``."""
        self.wanted[path] = wanted
        self._sysfs.write(path, wanted.text, rights_late=self.rights_late)
        self._open.add(path)

    def put_range(self, files: "tuple[str, str]", low: "Wanted", high: "Wanted", *, always: bool = False) -> None:
        """Set the minimum and the maximum file in the order that never puts one above the other.

        Older kernels refuse a minimum above the maximum, so the maximum goes first unless it would fall below the
        minimum that stands now. Bounds that already stand are not written again, unless they may be about to change.
        """
        min_path, max_path = files
        try:
            max_first = int(high.text) >= self._sysfs.read_int(min_path, patience_s=PATIENCE_S)
        except (ValueError, SensorError):
            max_first = True
        steps: Sequence[tuple[str, Wanted]] = ((max_path, high), (min_path, low))
        for path, wanted in steps if max_first else reversed(steps):
            self.wanted[path] = wanted
            found = self._sysfs.read(path, patience_s=PATIENCE_S)
            if always or found != wanted.text:
                try:
                    self.put(path, wanted)
                except DeviceError:
                    if not wanted.fits(found):
                        raise

    def settle(self) -> None:
        """Wait until everything reads as written; raises the first ``ApplyError`` where something does not."""
        for error in self.unsettled().values():
            raise error

    def unsettled(self) -> "dict[str, DeviceError]":
        """What still reads otherwise after a while, as errors by path."""
        end_s = time.monotonic() + PATIENCE_S
        while True:
            last = time.monotonic() >= end_s
            looks = {path: self._look(path) for path in sorted(self._open)}
            wrong = {path: error for path, error in looks.items() if error}
            self._open &= wrong.keys()
            if last or not wrong:
                self._open.clear()
                return wrong
            time.sleep(_PAUSE_S)

    def _look(self, path: str) -> "DeviceError | None":
        wanted = self.wanted[path]
        found = ""
        for file in (path, wanted.shown_by):
            try:
                found = self._sysfs.read_word(file, patience_s=PATIENCE_S) if file else found
            except DeviceError as exc:
                return exc
            if wanted.fits(found):
                return None
        return ApplyError(
            f"{self._sysfs.full(path)} was asked for {wanted.text.strip()} and took {found or 'nothing'}.",
            hint="The kernel or firmware limits it; 'underwatt devices' lists the values that are allowed.",
        )
