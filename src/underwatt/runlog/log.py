"""A run's log: one JSON object a line, appended about once a second, with every power reading.

Writing never ends a training. Events and readings are buffered; ``flush`` appends them, and what cannot be written is
kept and tried again. A line cut short by ``kill -9`` is the last one: readers skip it, and a resumed run removes it.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from underwatt.errors import InputError
from underwatt.events import BudgetChanged, Ended, Event, Readings, Resumed, SettingChanged, Started, from_line, to_line
from underwatt.measure.meter import Trace
from underwatt.runlog.run_record import RunRecord

if TYPE_CHECKING:
    from collections.abc import Iterator

    from typing_extensions import Self

KEEP_READINGS = 36_000  # an hour at ten a second, for as long as nothing can be written
KEEP_LINES = 10_000
_TAIL_BYTES = 1_000_000  # what may follow the last line of a run: readings that were kept for an hour
_REPEATED = (Started, BudgetChanged, SettingChanged)  # what a reader needs to know again where the file was lost


class RunLog:
    """Appends to a run's log; any thread may call any method."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.error: str | None = None  # why nothing can be written at the moment
        self._told = False  # whether somebody knows of that
        self._readings: deque[tuple[float, float]] = deque(maxlen=KEEP_READINGS)
        self._lines: deque[bytes] = deque(maxlen=KEEP_LINES)
        self._latest: dict[str, bytes] = {}
        self._flushing = threading.Lock()
        self._process = os.getpid()
        self._file: int | None = None
        try:
            self._open()
        except OSError as exc:
            raise InputError(
                f"The log {self.path} cannot be written ({exc.strerror}).",
                hint="Name a folder that you may write to.",
            ) from exc

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, event: Event) -> None:
        """Note an event."""
        line = to_line(event)
        if isinstance(event, _REPEATED):
            self._latest[event.kind] = line
        self._lines.append(line)

    def power(self, at_s: float, power_w: float) -> None:
        """Note a reading; costs one append."""
        self._readings.append((at_s, power_w))

    def flush(self) -> None:
        """Append what was noted; where that fails ``error`` says why, and the next flush tries again."""
        with self._flushing:
            readings = _drain(self._readings)
            lines = _drain(self._lines)
            if not readings and not lines:
                return
            try:
                read = [to_line(Readings(*zip(*readings, strict=True)))] if readings else []
                self._append(b"".join([*lines, *read]))
                self.error = None
            except OSError as exc:
                self.error = f"The log {self.path} cannot be written ({exc.strerror or exc})."
                _put_back(self._readings, readings)
                _put_back(self._lines, lines)

    def take_news(self) -> tuple[str, str] | None:
        """Level and words, where writing has begun to fail, or works again, and nobody was told yet."""
        error = self.error
        if (error is not None) is self._told:
            return None
        self._told = error is not None
        if error is None:
            return "info", "The log can be written again."
        return "warning", f"{error} What belongs there is kept and tried again."

    def close(self) -> None:
        """Write what is left and let go of the file; a forked child has nothing to write."""
        if os.getpid() != self._process:
            return
        self.flush()
        with self._flushing:
            self._let_go()

    def _append(self, text: bytes) -> None:
        if self._file is not None and os.fstat(self._file).st_nlink == 0:  # the file was removed under us
            self._let_go()
        if self._file is None and self._open() == 0:
            text = self._head(text) + text
        assert self._file is not None
        try:
            written = 0
            while written < len(text):
                written += os.write(self._file, text[written:])
        except OSError:
            self._let_go()  # a full disk may have taken half a line: opening cuts it off
            raise

    def _let_go(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _head(self, text: bytes) -> bytes:
        """What a log that begins anew must say first, so that it can be read by itself."""
        if self._latest.get("start", b"\n") in text:
            return b""
        begin_s = json.loads(text.partition(b"\n")[0])["at_s"]
        at_s = begin_s[0] if isinstance(begin_s, list) else begin_s
        lost = to_line(Resumed(at_s=at_s, pid=os.getpid(), why="the log was removed; it goes on here"))
        return b"".join([*(line for line in self._latest.values() if line not in text), lost])

    def _open(self) -> int:
        """Open for appending, without the torn last line that a killed run leaves; gives the length."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            length = _whole_lines(file)
            if length < os.fstat(file).st_size:
                os.ftruncate(file, length)
            if length and "start" not in self._latest:
                with os.fdopen(os.dup(file), "rb") as reader:
                    reader.seek(0)
                    self._latest["start"] = reader.readline()
        except OSError:
            os.close(file)
            raise
        self._file = file
        return length


def read_log(path: Path | str) -> RunRecord:
    """Everything that a run's log holds, also while the run is under way; a torn last line is skipped."""
    path = Path(path)
    try:
        text = path.read_bytes()
    except OSError as exc:
        raise InputError(
            f"The log {path} cannot be read ({exc.strerror}).", hint="Name the log.jsonl of a run's folder."
        ) from exc
    events: list[Event] = []
    at_s: list[float] = []
    power_w: list[float] = []
    for item in _parse(text[: text.rfind(b"\n") + 1], path):
        if isinstance(item, Readings):
            at_s += item.at_s
            power_w += item.power_w
        elif isinstance(item, InputError):
            raise item
        else:
            events.append(item)
    if not events or not isinstance(events[0], Started):
        raise InputError(f"{path} does not begin as a run's log does.", hint="Name the log.jsonl of a run's folder.")
    times, watts = np.array(at_s, dtype=float), np.array(power_w, dtype=float)
    order = np.argsort(times, kind="stable")
    order = order[np.isfinite(watts[order])]
    return RunRecord(tuple(events), Trace(times[order], watts[order], None, missed=int(len(times) - len(order))))


def has_ended(path: Path | str) -> bool:
    """Whether a run has said that it is over; looks at the end of its log only, which may be long."""
    with contextlib.suppress(OSError), Path(path).open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
        for line in reversed(file.read().splitlines()):
            with contextlib.suppress(ValueError, InputError):  # the first and the last line may be torn
                if isinstance(event := from_line(line), (Started, Resumed, Ended)):
                    return isinstance(event, Ended)
    return False


def follow(
    path: Path | str, from_byte: int = 0, at_most_bytes: int = -1
) -> tuple[list[Event | Readings | InputError], int]:
    """What a log gained since ``from_byte`` in whole lines, and where to go on; for a reader of a run under way.

    A line that makes no sense is given as an error among the others. A log that is not there yet has gained nothing;
    one that was begun anew is read from its beginning. A long one may be read in parts of ``at_most_bytes``, which must
    have room for its longest line.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size < from_byte:
                from_byte = 0
            file.seek(from_byte)
            text = file.read(at_most_bytes)
    except FileNotFoundError:
        return [], 0
    except OSError as exc:
        raise InputError(f"The log {path} cannot be read ({exc.strerror}).") from exc
    whole = text[: text.rfind(b"\n") + 1]
    return list(_parse(whole, path)), from_byte + len(whole)


def _parse(text: bytes, path: Path) -> Iterator[Event | Readings | InputError]:
    """What each line holds, or why that makes no sense; a kind that is not known is left out."""
    for number, line in enumerate(text.splitlines(), 1):
        found: Event | Readings | InputError | None
        try:
            found = from_line(line)
        except ValueError as exc:
            raise InputError(f"{path}, line {number} is damaged.", hint="It is no line of a run's log.") from exc
        except InputError as exc:
            found = InputError(f"{path}, line {number} makes no sense: {exc.message}")
        if found is not None:
            yield found


def _drain(queue: deque[Any]) -> list[Any]:
    """Take what is there now; others may append meanwhile."""
    return [queue.popleft() for _ in range(len(queue))]


def _put_back(queue: deque[Any], items: list[Any]) -> None:
    """Back to the front; the oldest are dropped where there is no room."""
    assert queue.maxlen is not None
    room = queue.maxlen - len(queue)
    queue.extendleft(reversed(items[max(0, len(items) - room) :]))


def _whole_lines(file: int) -> int:
    """Length of a file up to the end of its last whole line."""
    end = os.fstat(file).st_size
    while end > 0:
        begin = max(0, end - 65_536)
        at = os.pread(file, end - begin, begin).rfind(b"\n")
        if at >= 0:
            return begin + at + 1
        end = begin
    return 0
