"""Files of a Linux board under a root directory: the one place where system errors become Underwatt's."""

from __future__ import annotations

import errno
import os
from enum import Enum
from glob import glob
from typing import TYPE_CHECKING

from underwatt.errors import ApplyError, DeviceError, NotPermittedError, SensorError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
_PAGE = 4096  # what a kernel file holds at most; only text files under /etc are longer
_MAX_BYTES = 1 << 20  # a file that never ends must not eat the memory
PERMIT_HINT = (
    "Run with sudo, or give your group write access to it with a udev rule; in a container, mount /sys writable."
)


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

    def __init__(self, root: str | Path = "/") -> None:
        self.root = str(root)
        self._prefix = f"{self.root.rstrip('/')}/"

    def full(self, path: str) -> str:
        """Where a relative path is on this machine."""
        return self._prefix + path

    def read(self, path: str) -> str:
        """The text of a file as it stands; raises ``SensorError`` or ``NotPermittedError``."""
        try:
            return self._pull(path).decode("latin-1")
        except OSError as exc:
            raise _translated(exc, SensorError, f"cannot read {self.full(path)}") from exc

    def read_word(self, path: str) -> str:
        """The text of a file without the newline or NUL that ends it."""
        return self.read(path).strip("\0 \t\r\n")

    def read_int(self, path: str) -> int:
        """The whole number in a file; raises ``SensorError`` where there is none."""
        text = self.read(path)
        try:
            return int(text)
        except ValueError:
            hint = "Its driver may be unloading or broken; look into dmesg."
            raise SensorError(f"{self.full(path)} holds {text[:40]!r}, which is not a number.", hint=hint) from None

    def read_ints(self, path: str) -> tuple[int, ...]:
        """The whole numbers in a file, ascending, each once."""
        text = self.read(path)
        try:
            return tuple(sorted({int(word) for word in text.split()}))
        except ValueError:
            raise SensorError(f"{self.full(path)} holds {text[:60]!r}, which is not a list of numbers.") from None

    def text_or_empty(self, path: str) -> str:
        """The text of a file, empty where it cannot be read."""
        try:
            return self.read(path)
        except DeviceError:
            return ""

    def int_or_none(self, path: str) -> int | None:
        """The whole number in a file, ``None`` where it cannot be read."""
        try:
            return self.read_int(path)
        except DeviceError:
            return None

    def write(self, path: str, text: str) -> None:
        """Write to a file that exists; raises ``ApplyError`` or ``NotPermittedError``."""
        try:
            self._push(path, text.encode("latin-1", "replace"))
        except OSError as exc:
            raise _translated(exc, ApplyError, f"cannot write {text.strip()!r} to {self.full(path)}") from exc

    def write_checked(self, path: str, text: str, *, tolerance: int = 0) -> None:
        """Write, read back, and raise ``ApplyError`` where the kernel took another value than asked."""
        self.write(path, text)
        found = self.read_word(path)
        if not _same(found, text.strip(), tolerance):
            raise ApplyError(
                f"{self.full(path)} was asked for {text.strip()} and took {found or 'nothing'}.",
                hint="The kernel or firmware limits it; 'underwatt devices' lists the values that are allowed.",
            )

    def glob(self, pattern: str) -> tuple[str, ...]:
        """The relative paths that match, sorted; folders that may not be entered match nothing."""
        return tuple(sorted(glob(pattern, root_dir=self.root)))  # noqa: PTH207 - gives relative paths

    def presence(self, path: str) -> Presence:
        """Whether a file is there, is not, or cannot be known."""
        try:
            os.stat(self.full(path))  # noqa: PTH116 - Path.stat would do; the rest of this class uses os
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


def _translated(exc: OSError, otherwise: type[DeviceError], doing: str) -> DeviceError:
    reason = f"{os.strerror(exc.errno) if exc.errno else exc}"
    message = f"{doing[0].upper()}{doing[1:]}: {reason.lower()}."
    if exc.errno in _FORBIDDEN:
        return NotPermittedError(message, hint=PERMIT_HINT)
    if exc.errno in (errno.EINVAL, errno.EBUSY):
        return otherwise(message, hint="The kernel refused it; look into dmesg, and try again.")
    return otherwise(message, hint="Its driver may not be loaded, or went away; 'underwatt devices' shows what is.")


def _same(found: str, asked: str, tolerance: int) -> bool:
    if found == asked:
        return True
    try:
        return abs(int(found) - int(asked)) <= tolerance
    except ValueError:
        return False


def write_range(sysfs: Sysfs, files: tuple[str, str], low: str, high: str) -> None:
    """Set the minimum and the maximum file in the order that never puts one above the other.

    Kernels refuse a minimum above the maximum, so the maximum goes first unless it would fall below the minimum
    that stands now. Bounds that already stand are not written again.
    """
    min_path, max_path = files
    try:
        max_first = int(high) >= sysfs.read_int(min_path)
    except (ValueError, SensorError):
        max_first = True
    steps: Sequence[tuple[str, str]] = ((max_path, high), (min_path, low))
    for path, text in steps if max_first else reversed(steps):
        if sysfs.read(path) != text:
            sysfs.write_checked(path, text)
