"""Talking to a run under way: a new budget is left in its folder, and the run looks there many times a second."""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from underwatt._files import FileLock, open_plain, write_atomically
from underwatt.budget import parse_watts
from underwatt.device.session import journal_folders
from underwatt.errors import InputError
from underwatt.helper.journal import state_dir
from underwatt.helper.lock import process_started
from underwatt.records import from_json, to_json
from underwatt.runlog.log import has_ended

if TYPE_CHECKING:
    from collections.abc import Iterator

INBOX_NAME = "budget.json"
MOST_BYTES = 65_536  # of a message, or of an entry that says what is under way
_Signature = tuple[int, int, int]


def post_budget(folder: Path | str, text: str, sender: str) -> None:
    """Leave a new budget for the run in a folder; ``sender`` is ``command`` or ``page``. Refuses a run that is over."""
    parse_watts(text)  # refuses what a run cannot be given
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"There is no folder {folder}.", hint="Name the folder of a run.")
    if has_ended(folder / "log.jsonl"):
        raise InputError(
            f"The run in {folder} has ended.", hint="Name a run that is under way, or go on with --resume."
        )
    # The clock makes ids that differ without reading the last one, so that two senders need not agree.
    message = {"id": time.time_ns(), "budget": text, "from": sender}
    try:
        write_atomically(folder / INBOX_NAME, json.dumps(message), shared=True)
    except OSError as exc:
        raise InputError(
            f"The budget cannot be left in {folder} ({exc.strerror}).",
            hint="Post it as the user who runs the training.",
        ) from exc


def change_budget(budget: str, run: Path | str | None = None) -> Path:
    """Give the run in a folder, by default the one under way, another budget from now on; gives its folder.

    ``budget`` is watts such as ``"7W"`` or ``"7W peak"``, or a schedule such as ``"08:00-18:00=15W,else=7W"``.
    """
    parse_watts(budget)  # what makes no sense is refused before a run is looked for
    folder = run_folder(run)
    post_budget(folder, budget, "command")
    return folder


class Inbox:
    """The receiving end; what lies in the folder already is an old message."""

    def __init__(self, folder: Path | str) -> None:
        self._path = os.fspath(Path(folder) / INBOX_NAME)
        self.error: str | None = None  # why the newest message was not taken
        self._told: str | None = None
        self._seen = self._signature()
        self._id = self._read()[0] if self._seen else None
        self.error = None  # an old message is nobody's concern

    def take(self) -> str | None:
        """The newest budget that was not taken yet; costs one look at the file's date."""
        signature = self._signature()
        if signature == self._seen:
            return None
        self._seen = signature
        number, text = self._read() if signature else (None, None)
        if text is None or number == self._id:
            return None
        self._id = number
        return text

    def has_news(self) -> bool:
        """Whether the file has changed since it was last looked into."""
        return self._signature() != self._seen

    def take_news(self) -> tuple[str, str] | None:
        """Level and words, where a message was not taken, and nobody was told yet."""
        if self.error == self._told:
            return None
        self._told = self.error
        return ("warning", f"{self.error} The budget stays.") if self.error else None

    def _signature(self) -> _Signature | None:
        try:
            found = os.lstat(self._path)  # a Path would cost more than the call
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size

    def _read(self) -> tuple[object, str | None]:
        """Id and text of the message; no text, and ``error``, where it makes no sense."""
        self.error = None
        try:
            message = _read_json(self._path)
            if not (isinstance(message, dict) and "id" in message and isinstance(message.get("budget"), str)):
                raise InputError("it has no id and budget")
            parse_watts(message["budget"])
        except (OSError, ValueError, InputError) as exc:
            why = str(exc).rstrip(".")
            self.error = f"The message in {self._path} makes no sense ({why}); post one with `underwatt budget`."
            return None, None
        return message["id"], message["budget"]


def _read_json(path: Path | str) -> Any:
    """A small file that anybody may have left: no link, pipe or device is read, nothing long and nothing too deep."""
    with open_plain(path, follow_links=False) as file:
        text = file.read(MOST_BYTES + 1)
    if len(text) > MOST_BYTES:
        raise ValueError(f"it is longer than {MOST_BYTES} bytes")
    try:
        return json.loads(text)
    except RecursionError as exc:
        raise ValueError("it has too many brackets") from exc


@dataclass(frozen=True, slots=True)
class RunningRun:
    """A run under way on this machine."""

    folder: str
    pid: int
    job: str
    device: str
    process_started: str | None


@contextlib.contextmanager
def claimed_folder(folder: Path | str) -> Iterator[None]:
    """Have a folder for one run at a time, made where it is absent; the next one is told who has it."""
    lock, folder = FileLock(), Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_free = lock.take(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    except OSError as exc:
        raise InputError(
            f"The folder {folder} cannot be made ({exc.strerror}).", hint="Name another one with --out."
        ) from exc
    if not is_free:
        holders = [run for run in running_runs() if Path(run.folder) == folder.absolute()]
        whose = f"process {holders[0].pid}, {holders[0].job}" if holders else "another process"
        raise InputError(
            f"A run is under way in {folder} ({whose}).", hint="Wait for it to end, stop it, or name another folder."
        )
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def register_run(folder: Path | str, job: str, device: str) -> Iterator[str | None]:
    """List a run as under way; gives a warning where that cannot be done, which is no reason not to train."""
    pid = os.getpid()
    entry = RunningRun(str(Path(folder).absolute()), pid, job, device, process_started(pid))
    place = state_dir() / "runs"
    path, warning = place / f"{pid}.json", None
    for number in count(2):  # a process may train on several devices
        if _alive(path) is None:
            break
        path = place / f"{pid}-{number}.json"
    try:
        place.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(to_json(entry)), shared=True)
    except OSError as exc:
        warning = f"This run cannot be listed in {place} ({exc.strerror}): name its folder to change its budget."
    try:
        yield warning
    finally:
        if os.getpid() == pid:  # a forked child is not the run
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def running_runs() -> tuple[RunningRun, ...]:
    """The runs under way on this machine; entries of processes that died are removed."""
    found = []
    for place in journal_folders():
        for path in sorted((place / "runs").glob("*.json")):
            run = _alive(path)
            if run is not None:
                found.append(run)
            else:
                with contextlib.suppress(OSError):  # root's entries are root's to remove
                    path.unlink(missing_ok=True)
    return tuple(found)


def run_folder(named: Path | str | None) -> Path:
    """The folder of the run that is meant: the named one, else that of the only run under way."""
    if named is not None:
        named = Path(named)
        if not (named / "log.jsonl").is_file():
            raise InputError(f"There is no run in {named}.", hint="Name the folder that holds its log.jsonl.")
        return named.absolute()
    found = running_runs()
    if not found:
        raise InputError("No run is under way.", hint="Start one with `underwatt run`, or name a folder with --run.")
    if len(found) > 1:
        listed = ", ".join(f"{one.folder} ({one.job})" for one in found)
        raise InputError(f"{len(found)} runs are under way.", hint=f"Choose one with --run: {listed}.")
    return Path(found[0].folder)


def _alive(path: Path) -> RunningRun | None:
    try:
        run = from_json(RunningRun, _read_json(path))
    except (OSError, ValueError, InputError):
        return None
    return run if is_alive(run.pid) and process_started(run.pid) == run.process_started else None


def is_alive(pid: int) -> bool:
    """Whether there is such a process."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True  # somebody else's
    except (OSError, OverflowError):
        return False
    return True
