"""What `underwatt check` found, as a record, as a file, and as a device: ``check:FILE``.

The file is how a board that we do not have reaches us. Opened as a device it shows the knobs with their tables and who
may set them, and answers at the settings that were measured; its kernel files can be planted as a tree for the Jetson
driver. A file that somebody sent is read with care: whatever is wrong with it is an ``InputError`` with a remedy.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from underwatt._files import open_plain, write_atomically
from underwatt.device.space import Knob, ModeSpace
from underwatt.drivers.replay import RecordedDevice
from underwatt.errors import InputError, SensorError, StepError
from underwatt.records import (
    Capability,
    DeviceInfo,
    DeviceState,
    Measurement,
    PowerMode,
    PowerSample,
    Profile,
    WorkloadInfo,
    from_json,
    to_json,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from underwatt.records import WorkloadCost

KIND, FORMAT = "check", 1
MAX_BYTES = 4 << 20
_AGAIN = "Make it again with `underwatt check`, or have it sent again as a file, not as pasted text."


class Level(str, Enum):
    """How a check ended."""

    READY = "ready"
    LIMITED = "works, but"
    UNUSABLE = "not usable"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a person should know first: a sentence, and what to do about each thing that is not as it could be."""

    level: Level
    text: str
    remedies: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CheckedKnob:
    """A knob as it was found: its table, empty where the device does not show one, and whether this user may set it."""

    name: str
    values: tuple[float, ...]
    continuous: bool
    usable: bool
    detail: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class SensorFigures:
    """The power sensor as measured; what could not be seen is NaN."""

    read_s: float = math.nan  # what one reading takes
    period_s: float = math.nan  # how often a new value comes
    lag_s: float = math.nan  # the time constant with which it follows a change: what it averages over
    step_w: float = math.nan  # the change by which that was seen


@dataclass(frozen=True, slots=True)
class KnobMove:
    """A knob was set under load: to what, at what it then ran, how long setting took, and the watts it settled at."""

    asked: float
    ran: float = math.nan
    set_s: float = math.nan
    power_w: float = math.nan


@dataclass(frozen=True, slots=True)
class KnobTrial:
    """A knob was moved to its ends and put back."""

    knob: str
    moves: tuple[KnobMove, ...] = ()
    put_back: bool = True
    put_back_s: float = math.nan
    note: str = ""  # what went wrong, if anything


@dataclass(frozen=True, slots=True)
class CheckReport:
    """All that a check found, without anything that tells whose board it was."""

    name: str
    backend: str
    simulated: bool
    power_of: str
    software: Mapping[str, str]
    knobs: tuple[CheckedKnob, ...]
    sensors: tuple[Capability, ...]
    stock_modes: Mapping[str, PowerMode]
    held: tuple[str, ...]
    rails_w: Mapping[str, float]
    temperatures_c: Mapping[str, float]
    idle_w: float
    load: WorkloadInfo
    load_w: float
    load_on_gpu: bool
    sensor: SensorFigures
    verdict: Verdict
    set_tried: bool = False
    trials: tuple[KnobTrial, ...] = ()
    measurements: tuple[Measurement, ...] = ()
    notes: tuple[str, ...] = ()
    took_s: float = math.nan  # of the device's time
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def space(self) -> ModeSpace:
        """Every mode that the knobs allow, whether this user may set it or not."""
        return ModeSpace([Knob(k.name, _exact(k), k.continuous) for k in self.knobs if k.values])

    def to_text(self) -> str:
        """As the file holds it."""
        return json.dumps({"underwatt": KIND, "format": FORMAT, **to_json(self)}, separators=(",", ":")) + "\n"

    def save(self, path: Path | str) -> None:
        """Write the file that can be sent, opened as a device and kept."""
        try:
            write_atomically(Path(path), self.to_text())
        except OSError as exc:
            raise InputError(
                f"The check cannot be written to {path}: {exc.strerror}.", hint="Name another file: --output FILE."
            ) from exc


def _exact(knob: CheckedKnob) -> tuple[float, ...]:
    return tuple(int(value) for value in knob.values) if knob.name == "cpu_cores" else knob.values


def read_check(path: Path | str) -> tuple[CheckReport, str]:
    """What the file of a check holds, and a digest of it; raises ``InputError`` for one that is not whole."""
    try:
        with open_plain(path) as file:
            content = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as exc:
        raise InputError(f"{path} cannot be read ({exc}).", hint="Name the file that `underwatt check` wrote.") from exc
    if len(content) > MAX_BYTES:
        raise InputError(f"{path} is larger than any check.", hint=_AGAIN)
    try:
        record = json.loads(content.decode("utf-8-sig"), parse_constant=_refuse)
    except (ValueError, RecursionError) as exc:
        raise InputError(f"{path} is no check, or a damaged one ({exc!s:.80}).", hint=_AGAIN) from exc
    return report_of(record, str(path)), hashlib.sha256(content).hexdigest()[:16]


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no number")


def report_of(record: Any, whose: str) -> CheckReport:
    """A report from the values of its file."""
    if not isinstance(record, dict) or record.get("underwatt") != KIND:
        raise InputError(f"{whose} is not the file of a check.", hint="Name the file that `underwatt check` wrote.")
    if record.get("format") != FORMAT:
        raise InputError(
            f"{whose} has format {record.get('format')!r:.20}, this version reads {FORMAT}.",
            hint="Use the version of Underwatt that wrote it, or a newer one.",
        )
    try:
        report = from_json(CheckReport, record, "check")
        _refuse_nonsense(report)
    except (InputError, RecursionError) as exc:
        raise InputError(f"{whose} is a damaged check ({exc!s:.200}).", hint=_AGAIN) from exc
    return report


def _refuse_nonsense(report: CheckReport) -> None:
    """What has the right types and still cannot be."""
    for knob in report.knobs:
        if not all(0 < value < math.inf for value in knob.values):
            raise InputError(f"{knob.name} cannot have the values {knob.values!r:.60}.")
        if knob.name == "cpu_cores" and any(value != int(value) for value in knob.values):
            raise InputError("Cores are whole.")
    space = report.space
    for measurement in report.measurements:
        if measurement.usable and not all(0 < v < math.inf for v in (measurement.step_s, measurement.power_w)):
            raise InputError(f"{measurement.setting} cannot take {measurement.step_s} s and {measurement.power_w} W.")
        if measurement.setting.mode not in space:
            raise InputError(f"{measurement.setting} is none of the settings of its knobs.")
    if report.idle_w <= 0 or math.isinf(report.idle_w):
        raise InputError(f"No device draws {report.idle_w:g} W at rest.")


class CheckedDevice(RecordedDevice):
    """The device that was checked: knobs and rights as they were found, and the settings that were measured."""

    def __init__(self, report: CheckReport, info: DeviceInfo) -> None:
        super().__init__(info, report.measurements, report.space)
        self.report = report
        self._worked = False

    def capabilities(self) -> tuple[Capability, ...]:
        """As the check found them."""
        knobs = (Capability(k.name, "knob", k.usable, k.detail, k.remedy) for k in self.report.knobs)
        return (*knobs, *self.report.sensors)

    def stock_modes(self) -> dict[str, PowerMode]:
        """The vendor's modes, as the check found them."""
        return dict(self.report.stock_modes)

    def read_power(self) -> PowerSample:
        """What was measured of the setting that runs; before the first step, what the device drew at rest."""
        if self._worked:
            return super().read_power()
        if math.isnan(self.report.idle_w):
            raise SensorError(f"The power of {self.info.name} could not be read.", hint=self.report.verdict.text)
        return PowerSample(self.clock.now_s(), self.report.idle_w)

    def read_state(self) -> DeviceState:
        """The mode that is set; rails and temperatures as they were at rest."""
        return DeviceState(self._mode, self.report.rails_w, self.report.temperatures_c)

    def apply(self, mode: PowerMode) -> None:
        """Go to any mode of its tables; it rests there until a step is run."""
        super().apply(mode)
        self._worked = False

    def run_step(self, cost: WorkloadCost, batch_size: int) -> None:
        """Let the measured time of a step pass; raises ``InputError`` where this setting was not measured.

        Not a ``StepError``, which would only say that of the next setting too, for as many as are wanted.
        """
        if not self.report.measurements:
            hint = "`underwatt check --set` on the device measures some."
            raise InputError(f"No setting of {self.info.name} was measured.", hint=hint)
        try:
            super().run_step(cost, batch_size)
        except StepError as exc:
            file = self.info.address.partition(":")[2]
            raise InputError(
                f"The check {file} knows {len(self.report.measurements)} settings of its own load, and no other job.",
                hint=f"Plan with these: `underwatt store import {file}`, then `underwatt plan`.",
            ) from exc
        self._worked = True


def checked_profile(path: Path | str) -> Profile:
    """The settings that a check measured, as a profile of the device that its file is."""
    report, info = _opened(path)
    if not any(m.usable for m in report.measurements):
        raise InputError(f"{path} holds no measured setting.", hint="`underwatt check --set` measures some.")
    return Profile(info, report.load, report.measurements)


def _opened(path: Path | str) -> tuple[CheckReport, DeviceInfo]:
    report, digest = read_check(path)
    info = DeviceInfo(
        backend=KIND,
        name=f"{report.name} (from a check)",
        id=f"check-{digest}",
        address=f"check:{Path(path).absolute()}",
        simulated=True,
        in_process=True,
        software=dict(report.software),
        power_of=report.power_of,
    )
    return report, info


class CheckBackend:
    """Opens the file of a check by its path."""

    name = KIND

    def affinity(self) -> float:
        """Never chosen by itself."""
        return 0.0

    def find(self) -> tuple[str, ...]:
        """A file is named, not found."""
        return ()

    def open(self, where: str) -> CheckedDevice:
        """Open the file that ``underwatt check`` wrote."""
        if not where:
            raise InputError("Which check?", hint="Name its file: --device check:FILE.")
        return CheckedDevice(*_opened(where))


backend = CheckBackend()
