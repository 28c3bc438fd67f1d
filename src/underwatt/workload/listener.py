"""The ear of an external job: one thread that stamps beats as they arrive and keeps the end of its output."""

from __future__ import annotations

import math
import os
import queue
import selectors
import threading
import time
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

from underwatt.workload.base import Beat
from underwatt.workload.protocol import LineSplitter, MetricLine, OomLine, StepLine, parse_line

if TYPE_CHECKING:
    from pathlib import Path

CHUNK_BYTES = 65536
OUTPUT_KEPT_BYTES = 16384
HOPELESS_LINES = 100


@dataclass(frozen=True, slots=True)
class Garbage:
    """Lines that are not of the protocol: how many so far, and the first of them."""

    lines: int = 0
    example: str = ""

    @property
    def hopeless(self) -> bool:
        """Whether so many came that waiting for a beat makes no sense."""
        return self.lines >= HOPELESS_LINES


@dataclass(frozen=True, slots=True)
class Exited:
    """The job and all it started are gone."""


Event = Beat | OomLine | Garbage | Exited


class Listener:
    """Reads a job's beats and output in a thread of its own, so that the job never waits for Underwatt."""

    def __init__(self, fifo: Path) -> None:
        # Opened for both: opening does not wait for a writer, and no writer's leaving is the end.
        self._beats = os.open(fifo, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._splitter = LineSplitter()
        self._last_s = time.monotonic()
        self._garbage = Garbage()
        self._metrics: list[float] = []
        self._output = b""
        self._give_up_s = math.inf
        self._thread: threading.Thread | None = None
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def start(self, output: IO[bytes]) -> None:
        """Listen until the output ends, which is when the last process that could write to it is gone."""
        self._thread = threading.Thread(target=self._listen, args=(output,), name="underwatt-beats", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Let go of the pipe, once all that was said has been heard or after a short while."""
        self._give_up_s = time.monotonic() + 0.5
        if self._thread is not None:
            self._thread.join()

    @property
    def metrics(self) -> tuple[float, ...]:
        """The scores reported so far."""
        return tuple(self._metrics)

    @property
    def output_tail(self) -> str:
        """The end of what the job has printed."""
        return self._output.decode("utf-8", "replace")

    def _listen(self, output: IO[bytes]) -> None:
        with selectors.DefaultSelector() as selector, output:
            selector.register(self._beats, selectors.EVENT_READ)
            selector.register(output, selectors.EVENT_READ)
            over = False
            while not over:
                ready = [key.fd for key, _ in selector.select(timeout=0.2)]
                if self._beats in ready:
                    self._read_beats()
                if output.fileno() in ready:
                    chunk = os.read(output.fileno(), CHUNK_BYTES)
                    self._output = (self._output + chunk)[-OUTPUT_KEPT_BYTES:]
                    over = not chunk
                over = over or time.monotonic() > self._give_up_s
        self._read_beats()
        os.close(self._beats)
        self.events.put(Exited())

    def _read_beats(self) -> None:
        try:
            chunk = os.read(self._beats, CHUNK_BYTES)
        except BlockingIOError:
            return
        now_s = time.monotonic()
        unstamped = 0
        garbage = self._garbage.lines
        for raw in self._splitter.feed(chunk):
            line = parse_line(raw)
            if isinstance(line, StepLine) and line.at_s is None:
                unstamped += line.steps  # all of one chunk arrived at one time: one beat
            elif isinstance(line, StepLine) and line.at_s is not None:
                self._beat(line.at_s, line.steps, now_s)
            elif isinstance(line, MetricLine):
                self._metrics.append(line.value)
            elif isinstance(line, OomLine):
                self.events.put(line)
            else:
                example = self._garbage.example or raw[:60].decode("utf-8", "replace")
                self._garbage = Garbage(self._garbage.lines + 1, example)
        if unstamped:
            self._beat(now_s, unstamped, now_s)
        if self._garbage.lines > garbage and garbage < HOPELESS_LINES:
            self.events.put(self._garbage)

    def _beat(self, at_s: float, steps: int, now_s: float) -> None:
        # A sender's time is believed only where it can be true: not before the last beat, not in the future.
        # In a container with a clock of its own it never is, and the time of arrival is as good.
        self._last_s = at_s if self._last_s <= at_s <= now_s else now_s
        self.events.put(Beat(self._last_s, steps))
