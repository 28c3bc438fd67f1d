"""What the page shows of a run: a fold over the lines of its log, without files, sockets or clocks."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from underwatt import events
from underwatt.budget import parse_budget
from underwatt.control.judge import OVER, TOLERANCE, WITHIN
from underwatt.errors import InputError
from underwatt.records import Status, to_json
from underwatt.reports.gather_run import OUTCOMES
from underwatt.reports.words import allowed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from underwatt.records import Measurement, Setting

    Row = list[float | None]

_BUDGETS = {"start": "Budget: {}.", "schedule": "Budget by the schedule: {}.", "changed": "Budget changed: {}."}


def words_of(event: events.Event) -> str | None:
    """A line of the page's log; ``None`` for what only charts and figures show."""
    match event:
        case events.Started():
            about = f" {about}" if (about := event.device.about_watts) else ""
            return f"{event.job} on {event.device.name} began, with a budget of {event.budget}.{about}"
        case events.Resumed():
            return "The run goes on from its checkpoint."
        case events.BudgetChanged():
            return _BUDGETS.get(event.why, "Budget: {}.").format(allowed(event))
        case events.SettingChanged():
            return f"{event.state.capitalize()}: {event.setting}{f' – {event.why}' if event.why else ''}"
        case events.Measured():
            return f"Measured {event.measurement.setting}: {_found(event.measurement)}"
        case events.Planned():
            return f"Chose {event.chosen}. {event.reason}".rstrip()
        case events.Scored():
            aim = "" if event.target is None else f" of {event.target:g}"
            return f"Score {event.value:.4g}{aim} after {event.samples:,} samples."
        case events.Noted():
            return event.text
        case events.Ended():
            put_back = "the device is as it was before" if event.restored else "the device was NOT put back"
            return f"{_ended(event)}; {put_back}.{f' {event.error}' if event.error else ''}"
    return None


def _level(event: events.Event) -> str:
    if isinstance(event, events.Noted):
        return event.level
    return "warning" if isinstance(event, events.Ended) and event.outcome == "failed" else "info"


def _found(measurement: Measurement) -> str:
    if not measurement.usable:
        return f"{measurement.status.value.replace('_', ' ')}{': ' if measurement.note else ''}{measurement.note}"
    slowed = ", slowed down by the device" if measurement.status is Status.THROTTLED else ""
    step_s = measurement.step_s
    took = f"{step_s:.3g} s" if step_s >= 1 else f"{1e3 * step_s:.3g} ms"
    return f"{took} a step, {measurement.power_w:.2f} W{slowed}"


def _ended(event: events.Ended) -> str:
    return f"The run {OUTCOMES.get(event.outcome, 'ended')}"


RECENT_S = 300
WHOLE_BINS = 720
_KEEP_BUDGETS = 1000


class Bin(NamedTuple):
    """Readings of one stretch of time: when it began, their lowest, mean and highest watts, and the watts allowed."""

    at_s: float
    low_w: float
    mean_w: float
    high_w: float
    budget_w: float  # inf is no limit
    readings: int

    def joined(self, other: Bin) -> Bin:
        """Two stretches as one that begins where this one does; of two budgets, what was allowed at most."""
        readings = self.readings + other.readings
        return Bin(
            self.at_s,
            min(self.low_w, other.low_w),
            (self.mean_w * self.readings + other.mean_w * other.readings) / readings,
            max(self.high_w, other.high_w),
            max(self.budget_w, other.budget_w),
            readings,
        )

    def row(self) -> Row:
        """As the page gets it: begin, lowest, mean, highest, budget; a milliwatt is more than a screen can show."""
        budget_w = round(self.budget_w, 3) if math.isfinite(self.budget_w) else None
        return [self.at_s, round(self.low_w, 3), round(self.mean_w, 3), round(self.high_w, 3), budget_w]


class FoldedPower:
    """Power over time in a size that does not grow: the last minutes by the second, all of it in ever wider bins."""

    def __init__(self) -> None:
        self.over_s = 0.0
        self.width_s = 1.0
        self._budget_at_s: list[float] = []
        self._budget_w: list[float] = []
        self._open: Bin | None = None
        self._kept_s = -math.inf  # up to here there were lasting figures, which single readings add nothing to
        self._recent: deque[Bin] = deque()
        self._whole: list[Bin] = []

    def add_budget(self, at_s: float, power_w: float | None) -> None:
        """From ``at_s`` on this many watts are allowed; ``None`` is no limit in watts."""
        place = bisect_right(self._budget_at_s, at_s)
        self._budget_at_s.insert(place, at_s)
        self._budget_w.insert(place, math.inf if power_w is None else power_w)
        if len(self._budget_w) > 2 * _KEEP_BUDGETS:  # readings come within seconds, so that old ones are not asked for
            del self._budget_at_s[:_KEEP_BUDGETS], self._budget_w[:_KEEP_BUDGETS]

    def add(self, at_s: Sequence[float], power_w: Sequence[float]) -> None:
        """Take in readings in the order in which they were made; NaN is one that failed."""
        if not all(map(math.isfinite, power_w)):
            made = [(at, watts) for at, watts in zip(at_s, power_w, strict=True) if math.isfinite(watts)]
            at_s, power_w = [at for at, _ in made], [watts for _, watts in made]
        begin = 0
        while begin < len(at_s):
            second = math.floor(at_s[begin])
            # A line of the log is about one second: most often the rest of it is one bin.
            end = len(at_s) if at_s[-1] < second + 1 else bisect_right(at_s, second + 1 - 1e-9, begin)
            end = max(end, begin + 1)
            if second > self._kept_s:
                self._take(self._bin(second, power_w[begin:end]))
            begin = end

    def add_seconds(self, line: events.Seconds) -> None:
        """Take in what a log keeps of a minute, as far as its readings were not taken in already."""
        rows = zip(line.low_w, line.mean_w, line.high_w, line.readings, strict=True)
        for second, (low_w, mean_w, high_w, readings) in enumerate(rows, math.floor(line.at_s)):
            if readings > 0 and math.isfinite(low_w + mean_w + high_w):
                self._kept_s = max(self._kept_s, second)
                if self._open is not None and self._open.at_s == second:
                    self._open = None
                self._take(Bin(float(second), low_w, mean_w, high_w, self._allowed_w(second), int(readings)))

    def latest(self) -> Bin | None:
        """The last whole second, or what there is of the first one."""
        return self._recent[-1] if self._recent else self._open

    def newest_s(self) -> tuple[float, float]:
        """Where the last row of ``recent`` and the last of ``whole`` begin."""
        recent_s = self._open.at_s if self._open else -math.inf
        return recent_s, self._whole[-1].at_s if self._whole else -math.inf

    def recent(self, since_s: float = -math.inf) -> list[Row]:
        """The last minutes, a row a second, from ``since_s`` on; the last row may still change."""
        rows = [one.row() for one in self._recent if one.at_s >= since_s]
        return rows + ([self._open.row()] if self._open else [])

    def whole(self, since_s: float = -math.inf) -> list[Row]:
        """The whole run, a row for each ``width_s``, from ``since_s`` on; the last row may still change."""
        rows: list[Row] = []
        for one in reversed(self._whole):
            if one.at_s < since_s:
                break
            rows.append(one.row())
        return rows[::-1]

    def _bin(self, at_s: int, power_w: Sequence[float]) -> Bin:
        mean_w = sum(power_w) / len(power_w)
        return Bin(float(at_s), min(power_w), mean_w, max(power_w), self._allowed_w(at_s), len(power_w))

    def _allowed_w(self, second: int) -> float:
        """Of two budgets that fall into one second, the larger was allowed."""
        return max(self._budget_at(second), self._budget_at(second + 1 - 1e-9))

    def _budget_at(self, at_s: float) -> float:
        place = bisect_right(self._budget_at_s, at_s)
        return self._budget_w[place - 1] if place else math.inf

    def _take(self, new: Bin) -> None:
        if self._open is None:
            self._open = new
        elif new.at_s == self._open.at_s:
            self._open = self._open.joined(new)
        elif new.at_s > self._open.at_s:  # a reading out of order has no place to go
            self._close(self._open)
            self._open = new

    def _close(self, second: Bin) -> None:
        self._recent.append(second)
        while self._recent[0].at_s <= second.at_s - RECENT_S:
            self._recent.popleft()
        if second.mean_w > (1 + TOLERANCE) * second.budget_w:
            self.over_s += 1.0
        self._append(second)

    def _append(self, one: Bin) -> None:
        begin_s = one.at_s // self.width_s * self.width_s
        if self._whole and self._whole[-1].at_s == begin_s:
            self._whole[-1] = self._whole[-1].joined(one)
            return
        self._whole.append(one._replace(at_s=begin_s))
        if len(self._whole) > WHOLE_BINS:
            self.width_s *= 2
            narrow, self._whole = self._whole, []
            for item in narrow:
                self._append(item)


class Thinned:
    """Rows in the order of time, of which every other one goes where there are too many; each row begins with it."""

    def __init__(self, most: int = 400) -> None:
        self.rows: list[Row] = []
        self.cuts = 0  # how often rows have gone: then a reader has to take all of them
        self._most, self._apart_s = most, 0.0

    def add(self, row: Row) -> None:
        """Take in a row, unless it is too near to the one before it to be seen."""
        last_s = self.rows[-1][0] if self.rows else None
        if last_s is not None and (row[0] or 0.0) < last_s + self._apart_s:
            return
        self.rows.append(row)
        if len(self.rows) > self._most:
            self.rows = self.rows[::2]
            self.cuts += 1
            self._apart_s = ((self.rows[-1][0] or 0.0) - (self.rows[0][0] or 0.0)) / self._most

    @property
    def mark(self) -> tuple[int, int]:
        """How far the rows go now."""
        return self.cuts, len(self.rows)

    def since(self, mark: tuple[int, int]) -> dict[str, Any]:
        """The rows after a mark, and whether they are all that there are."""
        whole = mark[0] != self.cuts
        return {"whole": whole or not mark[1], "rows": self.rows if whole else self.rows[mark[1] :]}


SPEED_S = 10.0  # over which samples a second are counted, pauses and tests included
ENTRIES = 200
STALE_S = 5.0  # watts that were read longer ago are not those of now: the sensor is lost
STATES = ("searching", "holding", "correcting", "restoring")
_CARRIED = ("steps", "samples", "loss", "step_s", "energy_j", "time_left_s", "gap_share", "batch_size", "share")
_LAST = ("loss", "step_s", "gap_share")  # of them, what an end does not say
_UNITS = {"cpu_cores": "", "cpu_mhz": "MHz", "gpu_mhz": "MHz", "mem_mhz": "MHz", "power_limit_w": "W"}
_KNOBS = {"cpu_cores": "CPU cores", "cpu_mhz": "CPU", "gpu_mhz": "GPU", "mem_mhz": "Memory", "power_limit_w": "Limit"}


class RunView:
    """The newest of everything, the log for people, and power over time."""

    def __init__(self) -> None:
        self.trace = FoldedPower()
        self.facts: dict[str, Any] = {"phase": "waiting", "at_s": 0.0, "measured": 0, "asked": None}
        self.entries: deque[dict[str, Any]] = deque(maxlen=ENTRIES)
        self.entry_count = 0
        self.scores = Thinned()  # when, score
        self.course = Thinned()  # when, samples a second, GPU clock or power limit, temperature
        self._told: deque[tuple[float, int]] = deque()  # when there were how many samples, of the last seconds
        self.unreadable = 0  # lines that make no sense

    def apply(self, event: events.Line | InputError) -> None:
        """Take in one line of the log; those that make no sense are counted, and the first is told."""
        if isinstance(event, InputError):
            self.unreadable += 1
            if self.unreadable == 1:
                self._enter(self.facts["at_s"], "damage", "warning", str(event))
        elif isinstance(event, events.Readings):
            self.trace.add(event.at_s, event.power_w)
            self._pass_time(max(event.at_s, default=0.0))
        elif isinstance(event, events.Seconds):
            self.trace.add_seconds(event)
            self._pass_time(event.until_s)
        else:
            self._pass_time(event.at_s)
            self._fold(event)
            if (text := words_of(event)) is not None:
                self._enter(event.at_s, event.kind, _level(event), text)

    def _enter(self, at_s: float, kind: str, level: str, text: str) -> None:
        self.entry_count += 1
        if kind == events.Scored.kind and self.entries and self.entries[-1]["kind"] == kind:
            self.entries.pop()  # the newest of them says it all, and a chart shows the others
        self.entries.append({"number": self.entry_count, "at_s": at_s, "kind": kind, "level": level, "text": text})

    def ask(self, budget: str) -> None:
        """Remember a budget that was asked for until the run says what holds."""
        asked = parse_budget(budget)
        if asked.schedule is not None or asked.power_w != self.facts.get("budget_w"):
            self.facts["asked"] = {"budget": budget, "at_s": self.facts["at_s"]}

    def shown(self) -> dict[str, Any]:
        """The facts with what the trace adds to them."""
        latest = self.trace.latest()
        fresh = latest is not None and self.facts["at_s"] - latest.at_s < STALE_S
        return {
            **self.facts,
            "power_w": latest.mean_w if latest and fresh else None,
            "over_s": self.trace.over_s,
            "unreadable": self.unreadable,
        }

    def lose(self) -> None:
        """The process of the run is gone, and it did not say how it ended."""
        if self.facts["phase"] == "running":
            self.facts["phase"] = "gone"

    def _pass_time(self, at_s: float) -> None:
        self.facts["at_s"] = max(self.facts["at_s"], at_s)

    def _fold(self, event: events.Event) -> None:
        facts = self.facts
        match event:
            case events.Started():
                self._start(event)
            case events.Resumed():
                facts |= {"phase": "running", "pid": event.pid, "end": None, "time_left_s": None, "warning": None}
            case events.BudgetChanged():
                self._change_budget(event)
            case events.SettingChanged():
                facts |= {"state": event.state, "why": event.why, "setting": _shown_setting(event.setting)}
                facts["batch_size"] = event.setting.batch_size
            case events.Measured():
                facts["measured"] += 1
            case events.Planned():
                facts["reason"] = event.reason
            case events.Progressed():
                self._follow_course(event)
                is_over = facts["phase"] == "ended"  # what was told in the last hour is read after the log
                facts |= {name: to_json(getattr(event, name)) for name in (_LAST if is_over else _CARRIED)}
                if not is_over:
                    facts |= {"phase": "running", "state": event.state, "verdict": _verdict(event)}
            case events.Scored():
                self.scores.add([event.at_s, to_json(event.value)])
                facts |= {"score": to_json(event.value), "target": event.target}
            case events.Noted():
                self._warn(event)
            case events.Ended():
                self._end(event)

    def _warn(self, event: events.Noted) -> None:
        warned = (self.facts.get("warning") or {"text": ""})["text"]
        if event.level == "warning":
            self.facts["warning"] = {"text": event.text, "at_s": event.at_s}
        elif event.text.startswith(WITHIN) and warned.startswith(OVER):
            self.facts["warning"] = None

    def _follow_course(self, event: events.Progressed) -> None:
        told = self._told
        if told and (event.samples < told[-1][1] or event.at_s <= told[-1][0]):  # it went on from a checkpoint
            told.clear()
        told.append((event.at_s, event.samples))
        while len(told) > 2 and told[1][0] <= event.at_s - SPEED_S:
            told.popleft()
        (from_s, before), (until_s, now) = told[0], told[-1]
        speed = (now - before) / (until_s - from_s) if until_s > from_s else None
        running = event.running
        clock = None if running is None else running.gpu_mhz or running.power_limit_w
        self.facts |= {"samples_s": speed, "temperature_c": event.temperature_c}
        self.facts["clock"] = None if running is None else "GPU clock, MHz" if running.gpu_mhz else "Power limit, W"
        self.course.add([event.at_s, speed, clock, event.temperature_c])

    def _start(self, event: events.Started) -> None:
        self.facts |= {
            "phase": "running",
            "job": event.job,
            "device": event.device.name,
            "simulated": event.simulated,
            "workload": event.workload.name,
            "started_at": event.started_at,
            "budget_text": event.budget,
            "goal": event.goal,
            "target": event.target,
            "pid": event.pid,
            "state": "searching",
        }

    def _change_budget(self, event: events.BudgetChanged) -> None:
        self.trace.add_budget(event.at_s, event.power_w)
        self.facts["budget_w"] = event.power_w
        self.facts["budget_means"] = _means(event)
        warning = self.facts.get("warning")
        if warning is not None and event.at_s > warning["at_s"]:
            self.facts["warning"] = None  # what was warned of may be over, and would be said again
        if event.why == "changed":
            self.facts["asked"] = None

    def _end(self, event: events.Ended) -> None:
        self.facts |= {"samples": event.samples, "steps": event.steps}
        for name in ("energy_j", "score"):
            if (value := to_json(getattr(event, name))) is not None:
                self.facts[name] = value
        if event.verdict is not None:
            self.facts["verdict"] = _verdict(event)
        end = {"outcome": event.outcome, "restored": event.restored, "error": event.error, "words": _ended(event)}
        self.facts |= {"phase": "ended", "state": None, "end": end, "time_left_s": None, "asked": None}


def _verdict(event: events.Progressed | events.Ended) -> dict[str, Any] | None:
    """What the run says of its own budget so far; nothing while no watts are bounded."""
    said = event.verdict
    if said is None or said.judgement is events.Judgement.UNBOUNDED:
        return None
    return {"held": said.held, "over_s": said.over_s, "words": str(said)}


def _shown_setting(setting: Setting) -> dict[str, Any]:
    knobs = [
        {"name": _KNOBS[name], "value": value, "unit": _UNITS[name]} for name, value in setting.mode.knobs().items()
    ]
    return {"batch_size": setting.batch_size, "knobs": knobs}


def _means(event: events.BudgetChanged) -> str:
    """What the watts of a budget bound, where it is not simply their mean."""
    if event.watts == "peak":
        return "for peaks"
    return f"as mean over {event.window_s:g} s" if event.window_s else ""
