"""The line protocol by which a training job in any language reports its steps.

The environment variable ``UNDERWATT_BEATS`` holds the path of a named pipe. A job writes lines of text to it:

    step                      a step is complete now
    step 5120.250417          a step was complete at this time of CLOCK_MONOTONIC, in seconds
    step 5120.250417 10       ten steps were, the last of them at this time
    step - 10                 ten steps are complete now
    metric 0.913              the model scores this on held-out data
    oom                       this batch size does not fit in memory

The pipe may be opened once or for each line (``echo step > "$UNDERWATT_BEATS"``), by any number of processes. A line
that is none of these is counted and otherwise ignored. The job's end needs no line: its exit code says how it went.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

BEATS_VARIABLE = "UNDERWATT_BEATS"
LONGEST_LINE = 200
MOST_STEPS = 10**9


@dataclass(frozen=True, slots=True)
class StepLine:
    """Steps are complete, at a time where the sender named one."""

    at_s: float | None = None
    steps: int = 1


@dataclass(frozen=True, slots=True)
class MetricLine:
    """The model scores this on held-out data."""

    value: float


@dataclass(frozen=True, slots=True)
class OomLine:
    """The batch size does not fit in memory."""


Line = StepLine | MetricLine | OomLine


def parse_line(raw: bytes) -> Line | None:
    """What a line says, or ``None`` for one that is not of this protocol."""
    try:
        words = raw.decode("ascii").split()
    except UnicodeDecodeError:
        return None
    try:
        match words:
            case ["step"]:
                return StepLine()
            case ["step", at]:
                return StepLine(_time(at))
            case ["step", at, count]:
                return StepLine(_time(at), _count(count))
            case ["metric", value]:
                return MetricLine(_finite(value))
            case ["oom"]:
                return OomLine()
    except ValueError:
        return None
    return None


def _time(word: str) -> float | None:
    return None if word == "-" else _finite(word)


def _finite(word: str) -> float:
    value = float(word)
    if not math.isfinite(value):
        raise ValueError(word)
    return value


def _count(word: str) -> int:
    count = int(word)
    if not 1 <= count <= MOST_STEPS:
        raise ValueError(word)
    return count


class LineSplitter:
    """Lines out of a stream of chunks; what never ends in a newline is cut at the longest line."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        """The lines that this chunk completes, empty ones left out."""
        *lines, rest = (self._rest + chunk).split(b"\n")
        if len(rest) > LONGEST_LINE:
            lines.append(rest[:LONGEST_LINE])
            rest = b""
        self._rest = rest
        return [line for line in lines if line.strip()]
