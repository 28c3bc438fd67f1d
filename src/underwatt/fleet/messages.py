"""What travels between server and boards beside the model: scalars and lists, as a ``ConfigRecord`` takes them."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from underwatt._imports import require
from underwatt.budget import DAY_S, Schedule
from underwatt.errors import InputError
from underwatt.fleet.rounds import FrontPoint
from underwatt.records import Measurement, Profile, from_json, lasting, to_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from typing_extensions import Self

    from underwatt.records import DeviceInfo, WorkloadInfo

_log = logging.getLogger("underwatt.fleet")
KEY = "underwatt"  # of the records that hold these
CLOCKS_S = 0.1  # by which a board's two clocks may differ
MOST_POINTS = 32  # of a front that travels
MOST_MEASUREMENTS = 64  # of a profile
ALIKE = 0.05  # share by which boards of one kind may differ in watts and in time


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a board is asked to do in a round. Zero is: nothing said."""

    number: int = 0  # of the round
    train_s: float = 0.0  # so long it trains; without it, as long as its loop goes on
    batch_size: int = 0
    steps: int = 0  # that it is expected to do by then
    noise_batch: float = 0.0
    lease_w: float = 0.0  # its share of a site's watts, for so many seconds from when it hears of it
    lease_s: float = 0.0
    floor_w: float = 0.0  # what it may draw without a lease
    references: tuple[str, ...] = ()  # profiles that other boards have measured, as JSON

    def as_record(self) -> dict[str, Any]:
        """As a ``ConfigRecord`` takes it."""
        return _record(self)

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> Self:
        """From a ``ConfigRecord``; what it does not say is left open."""
        return from_json(cls, _plain(record))

    def leased(self, course: Schedule | None, since_s: float, floor_w: float) -> Schedule:
        """A course of watts from now on, but no more than the lease, heard of so long ago, and then than the floor."""
        lease_s = max(self.lease_s - since_s, 0.0)
        steps = []
        for begin_s, end_s, most_w in ((0.0, lease_s, self.lease_w), (lease_s, lease_s + DAY_S, floor_w)):
            pieces = course.pieces(begin_s, end_s) if course else [(begin_s, end_s, math.inf)]
            steps += [(from_s, min(level_w, most_w)) for from_s, to_s, level_w in pieces if to_s > from_s]
        return Schedule.of(steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a board says of its round: what it did, what that took, and what it can do."""

    steps: int
    samples: int
    data: int  # samples that it holds: its weight
    progress: float  # how far its optimizer went
    busy_s: float  # from when it got the message until it was done
    train_s: float  # of these, in which it trained
    energy_j: float
    power_w: float  # mean
    budget_w: float  # of its own, at the end; inf where none
    over: float = 0.0  # the most that a window was above the budget, as a share of it
    held: str = ""  # the verdict in a word
    batch_size: int = 0  # at the end
    searched: bool = False  # nothing is left to be measured for this budget
    spent: bool = False  # its joules or its time suffice for no other step, now or later
    idle_w: float = 0.0
    kind: str = ""  # of board and workload: boards of one kind can use each other's profiles
    front_batch: tuple[int, ...] = ()
    front_w: tuple[float, ...] = ()
    front_s: tuple[float, ...] = ()
    front_s_high: tuple[float, ...] = ()
    profile: str = ""  # as JSON, where the board shares it

    @classmethod
    def without_work(cls, busy_s: float, energy_j: float, *, spent: bool = True) -> Self:
        """Of a board that has nothing left to work with, or too few watts in this round."""
        return cls(
            steps=0,
            samples=0,
            data=0,
            progress=0.0,
            busy_s=busy_s,
            train_s=0.0,
            energy_j=energy_j,
            power_w=0.0,
            budget_w=math.inf,
            spent=spent,
        )

    @property
    def front(self) -> list[FrontPoint]:
        """Its points."""
        columns = (self.front_batch, self.front_w, self.front_s, self.front_s_high)
        return [FrontPoint(*values) for values in zip(*columns, strict=True)]

    def as_record(self) -> dict[str, Any]:
        """As a ``ConfigRecord`` takes it."""
        return _record(self)

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> Self:
        """From a ``ConfigRecord``; a board that reports nonsense is told so.

        Only its profile is for other boards alone: one that cannot be read is left out, and the rest counts.
        """
        report = from_json(cls, _plain(record))
        columns = (report.front_batch, report.front_w, report.front_s, report.front_s_high)
        if len({len(column) for column in columns}) != 1:
            raise InputError("The columns of a reported front differ in length.")
        numbers = (report.progress, report.busy_s, report.train_s, report.energy_j, report.idle_w)
        counts = (report.steps, report.samples, report.data)
        floats = (*numbers, *counts, *report.front_w, *report.front_s, *report.front_s_high)
        if any(not math.isfinite(value) or value < 0 for value in floats) or report.train_s > report.busy_s + CLOCKS_S:
            raise InputError("A board reported numbers that cannot be.")
        if not report.budget_w > 0 or any(size < 1 for size in report.front_batch):
            raise InputError("A board reported a budget or batch sizes that cannot be.")
        if any(not high >= low > 0 for low, high in zip(report.front_s, report.front_s_high, strict=True)):
            raise InputError("A board reported a front whose upper bound lies below it.")
        return report if not report.profile or read_references([report.profile]) else replace(report, profile="")


class NodeState:
    """What a node remembers between the rounds of a run: its measurements, what waiting draws, and what was drawn."""

    def __init__(self, records: Any) -> None:
        self._records = records

    @property
    def values(self) -> dict[str, Any]:
        """All of it."""
        return dict(self._records[KEY]) if KEY in self._records else {}

    def keep(self, **values: Any) -> None:
        """Beside what was kept before."""
        self._records[KEY] = require("flwr.app", extra="fleet").ConfigRecord({**self.values, **values})


def _record(value: Any) -> dict[str, Any]:
    found = {field.name.replace("_", "-"): getattr(value, field.name) for field in fields(value)}
    return {name: list(item) if isinstance(item, tuple) else item for name, item in found.items()}


def _plain(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name.replace("-", "_"): value for name, value in record.items()}


def front_of(measurements: Iterable[Measurement]) -> list[FrontPoint]:
    """Measured settings as points: for each batch size those that no other beats in time and watts.

    The modes behind them stay on the board.
    """
    points = []
    for one in measurements:
        if one.usable:
            size = one.setting.batch_size
            wide_s = one.step_s_ci95 if math.isfinite(one.step_s_ci95) else 0.02 * one.step_s
            points.append(FrontPoint(size, one.power_w, one.step_s / size, (one.step_s + wide_s) / size))
    kept: list[FrontPoint] = []
    for size in sorted({point.batch_size for point in points}):
        lowest_w = math.inf
        for point in sorted((p for p in points if p.batch_size == size), key=lambda p: (p.sample_s, p.power_w)):
            if point.power_w < lowest_w:
                lowest_w = point.power_w
                kept.append(point)
    return sorted(kept, key=lambda p: p.sample_s_high)[:MOST_POINTS]


def profile_text(profile: Profile) -> str:
    """A profile as text that travels; of many measurements the newest."""
    return json.dumps(to_json(replace(profile, measurements=profile.measurements[-MOST_MEASUREMENTS:])))


def read_profile(text: str) -> Profile:
    """A profile from such a text."""
    try:
        return from_json(Profile, json.loads(text))
    except (ValueError, RecursionError) as exc:
        raise InputError("A profile that came with a message cannot be read.") from exc


def read_references(texts: Iterable[str]) -> list[Profile]:
    """The profiles of other boards, but for what cannot be read or cannot be: nobody's round ends by it."""
    found = []
    for text in texts:
        try:
            profile = read_profile(text)
        except InputError as exc:
            _log.warning("The profile of another board is left out: %s", exc.message)
            continue
        found.append(replace(profile, measurements=tuple(filter(_can_be, profile.measurements))))
    return found


def _can_be(found: Measurement) -> bool:
    """Whether a measurement's time and watts are numbers that a device can have."""
    values = (found.setting.batch_size, found.step_s, found.power_w)
    return not found.usable or all(0 < value < math.inf for value in values)


def of_kin(references: Iterable[str], device: DeviceInfo, workload: WorkloadInfo) -> list[Measurement]:
    """What boards of this kind have measured of this workload: as good as one's own, but not as sure."""
    found = read_references(references)
    alike = [one for one in found if one.device.id == device.id and one.workload.id == workload.id]
    kin = {one.setting: one for profile in alike for one in lasting(profile.measurements)}
    return [_less_sure(one) if one.usable else one for one in kin.values()]


def _less_sure(found: Measurement) -> Measurement:
    power_w_ci95, step_s_ci95 = ALIKE * found.power_w, ALIKE * found.step_s
    return replace(
        found,
        power_w_ci95=max(found.power_w_ci95, power_w_ci95),
        step_s_ci95=max(found.step_s_ci95, step_s_ci95),
    )
