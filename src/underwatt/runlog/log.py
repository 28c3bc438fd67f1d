"""A run's log: one JSON object a line, appended about once a second.

What happened is there for good, and of the power readings what each second was and how the budget was kept, worked out
from every one of them: some 3 MB a day. Single readings and progress by the second are in files beside it, of which
those older than an hour go. Writing never ends a training.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import math
import os
import threading
from array import array
from collections import deque
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from underwatt._files import open_plain
from underwatt.errors import InputError
from underwatt.events import (
    BudgetChanged,
    Ended,
    Event,
    Progressed,
    Readings,
    Resumed,
    Seconds,
    SettingChanged,
    Started,
    to_line,
)
from underwatt.measure.meter import Trace
from underwatt.measure.steady import SENSOR_LAG_S
from underwatt.runlog.line_files import (
    LONGEST_LINE,
    RECENT_S,
    LineFile,
    RecentLines,
    parsed,
    read_lines,
    recent_files,
    recent_folder,
)
from underwatt.runlog.run_record import Points, RunRecord, Settled
from underwatt.runlog.tally import TICKS, Tallied, Tallier, Tally, tally_all, ticks

if TYPE_CHECKING:
    from typing_extensions import Self

    from underwatt.events import Line

KEEP_READINGS = 36_000  # an hour at ten a second, for as long as nobody flushes
KEEP_EVENTS = 10_000
MINUTE_S = 60.0  # so long is a line of seconds, and so far apart is progress that lasts
SETTLE_AFTER_S = SENSOR_LAG_S + 1.0  # readings are added up once all events that bear on them were told
LONGEST_KEPT_S = 86_400.0  # for which single readings are kept, where a budget's window asks for it
_LONGEST_GAP_S = 10  # without readings, within a line of seconds
_TAIL_BYTES = 1_000_000  # what may follow the last line of a run
_REPEATED = (Started, BudgetChanged, SettingChanged)  # what a reader needs to know again where the file was lost


class RunLog:
    """Appends to a run's log; any thread may call any method."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.error: str | None = None  # why nothing can be written at the moment
        self._told = False  # whether somebody knows of that
        self._readings: deque[tuple[float, float]] = deque(maxlen=KEEP_READINGS)
        self._events: deque[tuple[Event, bytes]] = deque(maxlen=KEEP_EVENTS)
        self._latest: dict[str, bytes] = {}
        self._flushing = threading.Lock()
        self._process = os.getpid()
        self._log, self._recent = LineFile(self.path), RecentLines(self.path)
        self._tallier, self._tally = Tallier(), Tally()
        self._newest_s = self._progress_s = -math.inf
        self._settle_s = math.inf  # when the next seconds are due
        try:
            if self._log.open():
                self._go_on()
            else:
                self._recent.clear()
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
        self._events.append((event, line))

    def power(self, at_s: float, power_w: float) -> None:
        """Note a reading; costs one append."""
        self._readings.append((at_s, power_w))

    def flush(self) -> None:
        """Append what was noted; where that fails ``error`` says why, and the next flush tries again."""
        with self._flushing:
            self._take_in()
            if self._newest_s >= self._settle_s:
                self._settle(math.floor(self._newest_s - SETTLE_AFTER_S))
            self._write()

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
        """Write what is left and let go of the files; a forked child has nothing to write."""
        if os.getpid() != self._process:
            return
        with self._flushing:
            self._take_in()
            self._settle()
            self._write()
            self._log.let_go()
            self._recent.let_go()

    def _take_in(self) -> None:
        """What was noted is added up, and goes to where it is to be written."""
        events, readings = _drain(self._events), _drain(self._readings)
        for event, line in events:
            if isinstance(event, (Started, Resumed)):  # what was read before it belongs to what it ends
                before = [reading for reading in readings if reading[0] < event.at_s]
                readings = [reading for reading in readings if not reading[0] < event.at_s]
                self._read(before)
                self._settle()
            self._tallier.take(event)
            self._newest_s = max(self._newest_s, event.at_s)
            if isinstance(event, Progressed) and event.at_s < self._progress_s + MINUTE_S:
                self._recent.add(line)
            else:
                self._log.add(line)
                self._progress_s = event.at_s if isinstance(event, Progressed) else self._progress_s
        self._read(readings)

    def _read(self, readings: list[tuple[float, float]]) -> None:
        if not readings:
            return
        noted = Readings(*zip(*readings, strict=True))
        line = to_line(noted)
        self._recent.add(line)
        written = json.loads(line)  # whoever adds up the file must see the same numbers
        at_s, power_w = _finite(written["at_s"], written["power_w"])
        self._tallier.read(ticks(at_s), ticks(power_w))
        self._newest_s = max(self._newest_s, *written["at_s"])
        if math.isinf(self._settle_s):
            self._settle_s = math.floor(self._newest_s) + MINUTE_S + SETTLE_AFTER_S

    def _settle(self, before_s: float | None = None) -> None:
        tallied = self._tallier.settle(None if before_s is None else int(ticks(before_s)))
        self._tally += tallied.tally
        for line in _seconds(tallied):
            self._log.add(to_line(line))
        self._settle_s = math.inf if before_s is None else before_s + MINUTE_S + SETTLE_AFTER_S

    def _write(self) -> None:
        keep_s = RECENT_S + min(self._tallier.window_s, LONGEST_KEPT_S)
        try:
            try:
                self._log.write(self._head)
            finally:
                self._recent.write(self._newest_s, keep_s)
            self.error = None
        except OSError as exc:
            self.error = f"The log {self.path} cannot be written ({exc.strerror or exc})."

    def _head(self, text: bytes) -> bytes:
        """What a log that begins anew must say first, so that it can be read by itself."""
        if self._latest.get("start", b"\n") in text:
            return b""
        at_s = json.loads(text.partition(b"\n")[0])["at_s"]
        lost = to_line(Resumed(at_s=at_s, pid=os.getpid(), why="the log was removed; it goes on here"))
        return b"".join([*(line for line in self._latest.values() if line not in text), lost])

    def _go_on(self) -> None:
        """Take up a log where a run left it, with the readings that it could not add up any more."""
        found = _Files(self.path, rows=False)
        power = found.power()
        self._tallier, ended = tally_all(found.events, power.at_s, power.power_w, until=found.until)
        self._tally = sum((part.tally for part in ended), found.tally)
        for event in found.events:
            if isinstance(event, Started):
                self._latest[event.kind] = to_line(event)
            if isinstance(event, Progressed):
                self._progress_s = max(self._progress_s, event.at_s)
            self._newest_s = max(self._newest_s, event.at_s)
        for part in ended:
            for line in _seconds(part):
                self._log.add(to_line(line))


def _seconds(tallied: Tallied) -> list[Seconds]:
    """Tallied readings as lines of the log: a line for each stretch without a long gap, the sums in the last one."""
    if not len(tallied.at):
        return []
    second = tallied.at // TICKS
    gaps = np.flatnonzero(np.diff(second) > _LONGEST_GAP_S) + 1
    edges = [0, *gaps.tolist(), len(second)]
    lines = []
    for begin, end in pairwise(edges):
        tally = tallied.tally if end == len(second) else Tally()
        lines.append(_line(second[begin:end], tallied.power[begin:end] / TICKS, int(tallied.at[end - 1]), tally))
    return lines


def _line(second: Any, power_w: Any, until: int, tally: Tally) -> Seconds:
    places, begins, counts = np.unique(second - second[0], return_index=True, return_counts=True)
    columns = np.full((3, int(places[-1]) + 1), np.nan)
    columns[0, places] = np.add.reduceat(power_w, begins) / counts
    columns[1, places] = np.minimum.reduceat(power_w, begins)
    columns[2, places] = np.maximum.reduceat(power_w, begins)
    readings = np.zeros(columns.shape[1], dtype=int)
    readings[places] = counts
    mean_w, low_w, high_w = (tuple(np.round(column, 3).tolist()) for column in columns)
    return Seconds(
        at_s=int(second[0]),
        mean_w=mean_w,
        low_w=low_w,
        high_w=high_w,
        readings=tuple(readings.tolist()),
        until_s=until / TICKS,
        span_s=tally.span / TICKS,
        bounded_s=tally.bounded / TICKS,
        judged_s=tally.judged / TICKS,
        over_s=tally.over / TICKS,
        energy_j=tally.energy_j,
        energy_over_j=tally.energy_over_j,
        readings_over=tally.readings_over,
        peaks=tally.peaks,
        first_over_s=None if tally.first_over is None else tally.first_over / TICKS,
        worst_over=tally.worst_over,
    )


def _tally(line: Seconds) -> Tally:
    """The sums of a line, whole again."""
    return Tally(
        bounded=round(line.bounded_s * TICKS),
        judged=round(line.judged_s * TICKS),
        over=round(line.over_s * TICKS),
        span=round(line.span_s * TICKS),
        energy=round(line.energy_j * TICKS**2),
        energy_over=round(line.energy_over_j * TICKS**2),
        readings=round(sum(line.readings)),
        readings_over=round(line.readings_over),
        peaks=round(line.peaks),
        first_over=None if line.first_over_s is None else round(line.first_over_s * TICKS),
        worst_over=line.worst_over,
    )


class _Files:
    """What the files of a log hold; a week has half a million seconds, so that these are kept as plain numbers."""

    def __init__(self, log: Path, *, rows: bool) -> None:
        self.events: list[Event] = []
        self.damage: list[str] = []
        self.tally = Tally()
        self.until: int | None = None
        self._seconds = {name: array("d") for name in ("at_s", "low_w", "mean_w", "high_w", "readings")}
        self._at_s, self._power_w = array("d"), array("d")
        for item in read_lines(log):
            self._take(item, rows)
        recent: list[Event] = []
        self.events, lasting = recent, self.events
        for path in recent_files(recent_folder(log)):
            try:
                for item in read_lines(path):
                    self._take(item, rows)
            except OSError as exc:
                self.damage.append(f"{path} cannot be read ({exc.strerror}).")
        self.events = list(heapq.merge(lasting, recent, key=lambda event: event.at_s))

    def _take(self, item: Line | InputError, rows: bool) -> None:
        match item:
            case Readings():
                self._at_s.extend(item.at_s)
                self._power_w.extend(item.power_w)
            case Seconds():
                self.tally += _tally(item)
                self.until = max(round(item.until_s * TICKS), self.until or 0)
                if rows:
                    begins_s = (item.at_s + number + 0.5 for number in range(len(item.mean_w)))
                    for column, values in zip(
                        self._seconds.values(),
                        (begins_s, item.low_w, item.mean_w, item.high_w, item.readings),
                        strict=True,
                    ):
                        column.extend(values)
            case InputError():
                self.damage.append(item.message)
            case Event():
                self.events.append(item)

    def power(self) -> Trace:
        """The readings that are kept singly, in the order of their times."""
        times, watts = np.frombuffer(self._at_s), np.frombuffer(self._power_w)
        order = np.argsort(times, kind="stable")
        order = order[np.isfinite(watts[order])]
        return Trace(times[order], watts[order], None, missed=int(len(times) - len(order)))

    def settled(self, power: Trace) -> Settled | None:
        """What the log keeps of readings that are gone; nothing where all are there."""
        if self.until is None or np.searchsorted(ticks(power.at_s), self.until, "right") == self.tally.readings:
            return None
        at_s, low_w, mean_w, high_w, readings = (np.frombuffer(column) for column in self._seconds.values())
        read = readings > 0
        columns = (column[read] for column in (at_s, low_w, mean_w, high_w, readings, mean_w))
        return Settled(self.tally, self.until, Points(*columns))


def read_log(path: Path | str) -> RunRecord:
    """Everything that a run's log holds, also while the run is under way; a torn last line is skipped.

    Lines that cannot be read are left out, and ``damage`` tells of them.
    """
    path = Path(path)
    try:
        found = _Files(path, rows=True)
    except OSError as exc:
        raise InputError(
            f"The log {path} cannot be read ({exc.strerror}).", hint="Name the log.jsonl of a run's folder."
        ) from exc
    if not found.events or not isinstance(found.events[0], Started):
        raise InputError(f"{path} does not begin as a run's log does.", hint="Name the log.jsonl of a run's folder.")
    power = found.power()
    return RunRecord(tuple(found.events), power, found.settled(power), tuple(found.damage))


def has_ended(path: Path | str) -> bool:
    """Whether a run has said that it is over; looks at the end of its log only, which may be long."""
    with contextlib.suppress(OSError), open_plain(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
        for line in reversed(file.read(_TAIL_BYTES).splitlines()):
            event = parsed(line, "")  # the first and the last line may be torn
            if isinstance(event, (Started, Resumed, Ended)):
                return isinstance(event, Ended)
    return False


def follow(path: Path | str, from_byte: int = 0, at_most_bytes: int = -1) -> tuple[list[Line | InputError], int]:
    """What a file of a log gained since ``from_byte`` in whole lines, and where to go on; for a reader beside the run.

    A line that makes no sense is given as an error among the others. A file that is not there yet has gained nothing;
    one that was begun anew is read from its beginning. A long one may be read in parts of ``at_most_bytes``, which must
    have room for its longest line; what is longer than any line is skipped.
    """
    try:
        with open_plain(path) as file:
            if os.fstat(file.fileno()).st_size < from_byte:
                from_byte = 0
            file.seek(from_byte)
            text = file.read(at_most_bytes)
    except FileNotFoundError:
        return [], 0
    except OSError as exc:
        raise InputError(f"The log {path} cannot be read ({exc.strerror}).", hint="See whose file it is.") from exc
    whole = text[: text.rfind(b"\n") + 1]
    if not whole and len(text) >= LONGEST_LINE:
        whole = text
    found = (parsed(line, f"{path}, a line after byte {from_byte},") for line in whole.splitlines())
    return [item for item in found if item is not None], from_byte + len(whole)


def _finite(at_s: Any, power_w: Any) -> tuple[Any, Any]:
    at_s, power_w = np.array(at_s, dtype=float), np.array(power_w, dtype=float)
    made = np.isfinite(power_w)
    return at_s[made], power_w[made]


def _drain(queue: deque[Any]) -> list[Any]:
    """Take what is there now; others may append meanwhile."""
    return [queue.popleft() for _ in range(len(queue))]
