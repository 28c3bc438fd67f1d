"""The journal: what to put back, on disk before anything is changed.

One small file a device and purpose, written whole (temporary file, fsync, rename, fsync of the folder), with a
checksum, so that after a ``kill -9`` or a power cut it is either all there or not there.
"""

import contextlib
import hashlib
import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .errors import JournalError

if TYPE_CHECKING:
    from collections.abc import Mapping

    Info = Any  # who a device is: its ``id``, ``name`` and ``address``

FORMAT = 1
STATE_VARIABLE = "UNDERWATT_STATE"
ROOTS_STATE = Path("/var/lib/underwatt")
_LONGEST_SLUG = 120  # a file name has at most 255 bytes, and several devices have an id that is longer
_ROOTS_WORK = "Run `sudo underwatt restore`."


def state_dir() -> Path:
    """Where journals are written: ``$UNDERWATT_STATE``, else a folder that outlives a reboot."""
    configured = os.environ.get(STATE_VARIABLE)
    if configured:
        return Path(configured)
    if os.geteuid() == 0:
        return ROOTS_STATE
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "underwatt"


class JournalEntry(NamedTuple):
    """What one session found: enough to open the device again and put it back."""

    address: str
    device_name: str
    process: int
    command: str
    snapshot: "Mapping[str, str]"
    boot: str = ""  # since which start of the machine it holds

    @property
    def due(self) -> "Mapping[str, str]":
        """What is to be put back: nothing, where the machine started anew since, which brought its own values."""
        is_machines = self.address == "jetson:/" or self.address.startswith("nvml:")  # of others nobody knows
        return {} if is_machines and self.is_of_before_a_reboot else self.snapshot

    @property
    def is_of_before_a_reboot(self) -> bool:
        """Whether the machine has started anew since."""
        return self.boot not in ("", boot_id())


class Journal:
    """The journal file of one device for one purpose (``session`` or ``set``)."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def of(cls, info: "Info", purpose: str, folder: Path) -> "Journal":
        """The journal of a device."""
        return cls(folder / f"{slug(info.id)}.{purpose}.json")

    def exists(self) -> bool:
        """Whether there is something to put back."""
        try:
            self.path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as exc:
            raise unreadable(self.path.parent, exc) from exc
        return True

    @property
    def since_ns(self) -> int:
        """When it was first written: what was found then is older than what later journals hold."""
        try:
            return self.path.lstat().st_mtime_ns
        except OSError:
            return 0

    def write(self, info: "Info", snapshot: "Mapping[str, str]") -> None:
        """Keep a snapshot; once this returns it survives anything. One that is written anew stays as old as it was."""
        body = JournalEntry(info.address, info.name, os.getpid(), command_line(), dict(snapshot), boot_id())._asdict()
        text = json.dumps({"format": FORMAT, "sha256": _digest(body), "body": body}, indent=1)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _write_whole(self.path, text, self.since_ns)
        except OSError as exc:
            raise JournalError(
                f"The restore journal cannot be written to {self.path.parent} ({exc.strerror}), "
                "so nothing was changed on the device.",
                hint=f"Free some space there, or name another folder in {STATE_VARIABLE}.",
            ) from exc

    def read(self) -> "JournalEntry":
        """What to put back; a damaged file is an error and stays where it is."""
        try:
            outer = json.loads(self.path.read_text(encoding="utf-8"))
            if outer["format"] != FORMAT:
                raise JournalError(
                    f"The journal {self.path} has format {outer['format']}, this version reads {FORMAT}.",
                    hint="Run `underwatt restore` with the version that wrote it.",
                )
            body = outer["body"]
            if outer["sha256"] != _digest(body):
                raise ValueError("its checksum does not match")
            return _entry(body)
        except PermissionError as exc:
            raise JournalError(f"The journal {self.path} is another user's.", hint=_ROOTS_WORK) from exc
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
            raise JournalError(
                f"The journal {self.path} is damaged ({exc}) and was left untouched.",
                hint="A reboot brings the board's own settings back; then `underwatt restore --discard` removes it.",
            ) from exc

    def remove(self) -> None:
        """Forget: everything was put back."""
        try:
            with contextlib.suppress(FileNotFoundError):
                self.path.unlink()
            sync_folder(self.path.parent)
        except OSError as exc:
            raise JournalError(
                f"The journal {self.path} cannot be removed ({exc.strerror}).", hint=_ROOTS_WORK
            ) from exc


def unreadable(folder: Path, error: OSError) -> JournalError:
    """That a folder may hold journals that this user cannot see."""
    return JournalError(
        f"Whether there is something to put back cannot be seen: {folder} cannot be looked into ({error.strerror}).",
        hint=f"{_ROOTS_WORK} `sudo chmod 755 {folder}` lets every user look.",
    )


def _entry(body: "Mapping[str, object]") -> "JournalEntry":
    """What a journal holds, of the types that it was written with."""
    entry = JournalEntry(**body)  # type: ignore[arg-type]
    snapshot = entry.snapshot
    texts = [entry.address, entry.device_name, entry.command, entry.boot, *snapshot.keys(), *snapshot.values()]
    if not (isinstance(entry.process, int) and all(isinstance(text, str) for text in texts)):
        raise ValueError("it holds something else than text")
    return entry


def slug(device_id: str) -> str:
    """A file name for a device; the digest keeps ids apart that differ in characters a name cannot have, or late."""
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "_", device_id)[:_LONGEST_SLUG]
    return plain if plain == device_id else f"{plain}-{hashlib.sha256(device_id.encode()).hexdigest()[:8]}"


def boot_id() -> str:
    """Which start of the machine this is, or nothing where it is not told."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def command_line() -> str:
    """What this process was started as."""
    return " ".join(sys.argv)[:200]


def _digest(body: object) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _write_whole(path: Path, text: str, since_ns: int) -> None:
    """Put a file in its place so that readers see the old one or the new one, and a power cut neither half."""
    draft = path.with_suffix(".tmp")
    with draft.open("wb") as file:
        file.write(text.encode())
        file.flush()
        if since_ns:
            os.utime(file.fileno(), ns=(since_ns, since_ns))
        os.fsync(file.fileno())
    draft.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: "Path") -> None:
    """Wait until it is on disk which files a folder holds."""
    file = os.open(str(folder), os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
