"""``check``: what an owner of a board runs first. Looks, and where it may, moves each knob and puts it back.

Nothing is set without ``set_knobs``. What is found becomes one record (``drivers.check.CheckReport``) that can be sent
to others: who owns the board, and which one it is, is left out, and a verdict says it in a sentence.
"""

from __future__ import annotations

import getpass
import math
import os
import platform
import re
import socket
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import underwatt
from underwatt.api import lookup
from underwatt.api.lookup import log_notes
from underwatt.device.base import HasKernelFiles, HasStockModes, permitted_space
from underwatt.drivers.check import CheckedKnob, CheckReport, KnobMove, KnobTrial, Level, SensorFigures, Verdict
from underwatt.drivers.jetson.device import mode_name
from underwatt.errors import ApplyError, DeviceBusyError, DeviceError, InputError, JournalError, WorkloadError
from underwatt.jobs.load import LOAD_BATCH_SIZES, load_for
from underwatt.measure.measurement import MeasureOptions
from underwatt.measure.meter import Meter, measure_idle, read_state
from underwatt.measure.sensor import followed, new_value_period_s, reading_time_s
from underwatt.measure.series import expected_s, in_order, run_profile
from underwatt.measure.steady import Settling, mean_while_settling
from underwatt.records import Capability, DeviceState, PowerMode, Setting, Status, WorkloadInfo
from underwatt.reports.words import counted, listed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from underwatt.api.lookup import Listener
    from underwatt.device.base import Device
    from underwatt.device.session import Session
    from underwatt.device.space import Knob
    from underwatt.device.timing import Clock
    from underwatt.measure.meter import Trace
    from underwatt.measure.workload import StepRun, Workload
    from underwatt.records import DeviceInfo, Measurement

SETTINGS = 12
OPTIONS = MeasureOptions(precision=0.05, limit_s=3.0)
OPTIONS_SIMULATED = MeasureOptions(limit_s=120.0)  # whose time costs nothing
FINE_S = 0.02  # between readings, where the sensor itself is looked at
LOAD_S, FALL_S, HOLD_S = 2.0, 2.5, 1.5  # under load; after its end; at each end of a knob
LATEST_S = 1.0


@dataclass(frozen=True, slots=True)
class CheckProgress:
    """What a check does next, and where it stands; ``last`` was just measured, if any."""

    what: str
    done: int
    total: int
    left_s: float = math.nan
    last: Measurement | KnobTrial | None = None


def check(
    device: str | Device = "",
    *,
    set_knobs: bool = False,
    output: Path | str | None = None,
    listener: Listener = log_notes,
) -> CheckReport:
    """Find out whether a device is ready, and what it can do: rails, sensor, knobs, rights, watts at rest.

    With ``set_knobs`` each knob is moved and put back under a short load, and a dozen settings are measured; else
    nothing is changed. ``output`` is where to write the file that can be sent, and opened as a device
    (``"check:FILE"``). The listener gets ``CheckProgress``.
    """
    report = _Check(lookup.as_device(device), listener, set_knobs=set_knobs).run()
    if output is not None:
        report.save(output)
    return report


@dataclass(eq=False)
class _Check:
    """A check under way: what was found so far."""

    device: Device
    tell: Listener
    set_knobs: bool
    idle_w: float = math.nan
    load_w: float = math.nan
    sensor: SensorFigures = field(default_factory=SensorFigures)
    trials: list[KnobTrial] = field(default_factory=list)
    measurements: tuple[Measurement, ...] = ()
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._clock: Clock = self.device.clock
        self._begun_s = self._clock.now_s()
        self._load_info, self._on_gpu = WorkloadInfo("none", "none"), False
        self._state = DeviceState(PowerMode())
        self._done, self._total = 0, 3

    def run(self) -> CheckReport:
        """Rest, load, knobs, settings; a sensor that cannot be read ends it early, with that as the verdict."""
        self._progress("reading power at rest")
        try:
            self.idle_w = measure_idle(self.device)
            self.sensor = SensorFigures(read_s=reading_time_s(self.device))
            self._state = read_state(self.device)  # now, at rest
        except DeviceError as exc:
            self.notes.append(str(exc))
            return self._report()
        self._progress("looking for a load that this device can run", done=True)
        load = load_for(self.device)
        self._load_info, self._on_gpu = load.workload.info, load.on_gpu
        self._progress(f"watching power under load ({self._load_info.name})", done=True)
        self._noting_trouble(lambda: self._watch_load(load.workload.start(LOAD_BATCH_SIZES[-1])))
        if self.set_knobs:
            self._noting_trouble(lambda: self._set_everything(load.workload))
        return self._report()

    def _noting_trouble(self, part: Callable[[], None]) -> None:
        """Do a part of the check; what goes wrong there is a finding, unless somebody else has the device."""
        try:
            part()
        except (DeviceBusyError, JournalError):
            raise
        except (DeviceError, WorkloadError, InputError) as exc:
            self.notes.append(str(exc))

    def _progress(self, what: str, *, done: bool = False, left_s: float = math.nan, last: Any = None) -> None:
        self._done += done
        self.tell(CheckProgress(what, self._done, self._total, left_s, last))

    def _watch_load(self, run: StepRun) -> None:
        """Power under load, and how the sensor follows when the load ends."""
        try:
            with Meter(self.device, period_s=FINE_S) as meter:
                _work(run, self._clock, LOAD_S)
                self.load_w = float(meter.trace(self._clock.now_s() - LATEST_S).power_w.mean())
                run.stop()
                ended_s = self._clock.now_s()
                self._clock.sleep(FALL_S)
                self._learn_of_sensor(self.load_w, ended_s, meter.trace(ended_s), meter.trace())
        finally:
            run.stop()

    def _learn_of_sensor(self, before_w: float, changed_s: float, after: Trace, whole: Trace) -> None:
        """The clearest change of power tells most of how the sensor follows."""
        lag_s, step_w = followed(before_w, changed_s, after)
        if not abs(self.sensor.step_w) >= abs(step_w):
            self.sensor = replace(self.sensor, lag_s=lag_s, step_w=step_w)
        period_s = new_value_period_s(whole)
        if not self.sensor.period_s <= period_s:
            self.sensor = replace(self.sensor, period_s=period_s)

    def _set_everything(self, workload: Workload) -> None:
        knobs = permitted_space(self.device).knobs
        self._total += len(knobs) + SETTINGS
        with lookup.session(self.device, self.tell) as session:
            run = workload.start(LOAD_BATCH_SIZES[-1])
            try:
                for knob in knobs:
                    self._progress(f"moving {knob.name} and putting it back")
                    self.trials.append(self._try_knob(session, knob, run))
                    self._progress(f"moving {knob.name} and putting it back", done=True, last=self.trials[-1])
            finally:
                run.stop()
            self._measure(session, workload)

    def _try_knob(self, session: Session, knob: Knob, run: StepRun) -> KnobTrial:
        """Move a knob to both of its ends under load, then put it back; each is timed."""
        moves: list[KnobMove] = []
        note = ""
        try:
            with Meter(self.device, period_s=FINE_S) as meter:
                _work(run, self._clock, LATEST_S)
                for value in dict.fromkeys((knob.values[0], knob.values[-1])):
                    before_w = float(meter.trace(self._clock.now_s() - LATEST_S).power_w.mean())
                    begin_s = self._clock.now_s()
                    session.apply(PowerMode.of({knob.name: value}))
                    changed_s = self._clock.now_s()
                    _work(run, self._clock, HOLD_S)
                    trace = meter.trace(changed_s)
                    self._learn_of_sensor(before_w, changed_s, trace, trace)
                    ran = read_state(self.device).running.knobs().get(knob.name, math.nan)
                    settled, _ = mean_while_settling(*trace.mean_watts(), Settling())
                    moves.append(KnobMove(value, ran, changed_s - begin_s, settled.mean))
        except DeviceError as exc:
            note = str(exc)
        begin_s = self._clock.now_s()
        try:
            session.restore()
        except ApplyError as exc:
            return KnobTrial(knob.name, tuple(moves), put_back=False, note=str(exc))
        return KnobTrial(knob.name, tuple(moves), put_back_s=self._clock.now_s() - begin_s, note=note)

    def _measure(self, session: Session, workload: Workload) -> None:
        """A dozen settings that tell most about all others, as ``profile`` would take them."""
        space = permitted_space(self.device)
        if space.knobs:
            settings = lookup.spread_settings(space, LOAD_BATCH_SIZES, SETTINGS)
        else:
            settings = in_order(Setting(PowerMode(), size) for size in LOAD_BATCH_SIZES)
        self._total += len(settings) - SETTINGS
        kept = _Kept()
        self._progress("measuring settings", left_s=expected_s(len(settings), ()))

        def watch(found: Measurement, done: int, total: int) -> None:
            left_s = expected_s(total - done, kept.found)
            self._progress("measuring settings", done=True, left_s=left_s, last=found)

        try:
            options = OPTIONS_SIMULATED if self.device.info.in_process else OPTIONS
            run_profile(session, workload, settings, kept, options=options, watch=watch)
        finally:
            self.measurements = tuple(kept.found)

    def _report(self) -> CheckReport:
        device, info = self.device, self.device.info
        tables = {knob.name: knob for knob in device.space.knobs}
        anonymous = Anonymous.of(info, device.stock_modes() if isinstance(device, HasStockModes) else {})
        knobs, sensors = [], []
        for found in map(anonymous.capability, device.capabilities()):
            if found.kind != "knob":
                sensors.append(found)
                continue
            table = tables.get(found.name)
            values, continuous = (tuple(map(float, table.values)), table.continuous) if table else ((), False)
            knobs.append(CheckedKnob(found.name, values, continuous, found.usable, found.detail, found.remedy))
        with_files = device if isinstance(device, HasKernelFiles) else None
        report = CheckReport(
            name=anonymous.name(info.name),
            backend=info.backend,
            simulated=info.simulated,
            power_of=info.power_of,
            software=software_of(info),
            knobs=tuple(knobs),
            sensors=tuple(sensors),
            stock_modes=anonymous.stock_modes,
            held=tuple(map(anonymous.text, with_files.held_by_others())) if with_files else (),
            rails_w=anonymous.by_name(self._state.rails_w),
            temperatures_c=anonymous.by_name(self._state.temperatures_c),
            idle_w=self.idle_w,
            load=self._load_info,
            load_w=self.load_w,
            load_on_gpu=self._on_gpu,
            sensor=self.sensor,
            verdict=Verdict(Level.UNUSABLE, ""),
            set_tried=self.set_knobs,
            trials=tuple(replace(trial, note=anonymous.text(trial.note)) for trial in self.trials),
            measurements=tuple(replace(m, note=anonymous.text(m.note)) for m in self.measurements),
            notes=tuple(map(anonymous.text, self.notes)),
            took_s=self._clock.now_s() - self._begun_s,
            files=with_files.kernel_files() if with_files else {},
        )
        return replace(report, verdict=judge(report))


def _work(run: StepRun, clock: Clock, seconds: float) -> None:
    """Let the load run for a while; ends early with a load that has come to its end."""
    if run.step() is None:
        return
    end_s = clock.now_s() + seconds
    while clock.now_s() < end_s and run.step() is not None:
        pass


class _Kept:
    """Measurements in memory: a check leaves nothing but its file."""

    def __init__(self) -> None:
        self.found: list[Measurement] = []

    def profile_id(self, device: DeviceInfo, workload: WorkloadInfo) -> int:
        del device, workload
        return 0

    def measurements(self, profile_id: int) -> tuple[Measurement, ...]:
        del profile_id
        return tuple(self.found)

    def add(self, profile_id: int, measurements: Sequence[Measurement]) -> None:
        del profile_id
        self.found += measurements


# What of it may leave the house, and what it comes to: pure functions over its record.

# Of a path only what lies in these places says something of the board; any other says something of its owner.
_OPEN_PLACES = r"(?:sys|proc/device-tree|dev|etc/nvpmodel\.conf|run/underwatt|bin)\b"
_PATH = re.compile(rf"(?<![\w./%])/(?!{_OPEN_PLACES})[\w.~+@-]+(?:/[\w.~+@:-]*)*")
_MAC = re.compile(r"\b[0-9a-fA-F]{2}(?:[:-][0-9a-fA-F]{2}){5}\b")
_AS_ASKED = 0.03  # a clock that runs this close to what was asked is that clock
_SHOWS = 0.05


@dataclass(frozen=True)
class Anonymous:
    """Free text without the names of people, hosts and folders, and modes without names that somebody made up."""

    root: str
    numbers: tuple[str, ...]  # that tell a single device: of its serial number or its UUID
    words: tuple[str, ...]
    modes: Mapping[str, str]  # what a made-up name becomes
    stock_modes: Mapping[str, PowerMode]

    @classmethod
    def of(cls, info: DeviceInfo, stock_modes: Mapping[str, PowerMode]) -> Anonymous:
        """For a device: where it lies, and what its modes are called."""
        named = {name: name if mode_name(name) == name else f"CUSTOM_{at}" for at, name in enumerate(stock_modes)}
        root = info.address.partition(":")[2] if info.backend == "jetson" else ""
        modes = {name: plain for name, plain in named.items() if name != plain}
        whole = info.id.removesuffix(f"@{root}")
        numbers = tuple(part for part in re.findall(r"\w{8,}", whole) if re.search(r"\d", part))
        named_modes = {named[name]: mode for name, mode in stock_modes.items()}
        return cls(root.rstrip("/"), numbers, _names_here(), modes, named_modes)

    def name(self, name: str) -> str:
        """What the device itself calls something, such as a rail or a zone."""
        for number in self.numbers:
            name = name.replace(number, "(number)")
        return _MAC.sub("(address)", name)

    def by_name(self, values: Mapping[str, float]) -> dict[str, float]:
        """Values by such names."""
        return {self.name(name): value for name, value in values.items()}

    def text(self, text: str) -> str:
        """A sentence as others may read it."""
        text = self.name(text.replace(self.root, "") if self.root else text)
        for name, plain in self.modes.items():
            text = re.sub(rf"\b{re.escape(name)}(?!\w)", plain, text)
        text = _PATH.sub("(path)", text)
        for word in self.words:
            text = re.sub(rf"(?<!\w){re.escape(word)}(?!\w)", "(name)", text)
        return text

    def capability(self, found: Capability) -> Capability:
        """A knob or sensor as others may read of it."""
        return replace(found, detail=self.text(found.detail), remedy=self.text(found.remedy))


def _names_here() -> tuple[str, ...]:
    """Names of this machine and of who uses it, as far as they are told."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = ""
    names = (socket.gethostname(), socket.gethostname().partition(".")[0], user, os.environ.get("SUDO_USER", ""))
    return tuple(dict.fromkeys(name for name in names if len(name) > 1 and name != "root"))


def software_of(info: DeviceInfo) -> dict[str, str]:
    """Versions: of the board's own software, and of what looks at it; of the kernel, nothing that its builder added."""
    kernel = re.match(r"[\d.]+", platform.release())
    is_here = info.address in ("jetson:/", "helper:") or info.backend == "nvml"
    here = {"kernel": kernel[0]} if kernel and is_here else {}
    return {**info.software, **here, "python": platform.python_version(), "underwatt": underwatt.__version__}


def judge(report: CheckReport) -> Verdict:
    """What it all comes to, in words for its owner."""
    power = next((sensor for sensor in report.sensors if sensor.name == "power"), None)
    broken: list[tuple[str, str]] = []
    if not report.idle_w > 0:
        why = report.notes[-1] if report.notes else "its sensor does not answer"
        broken.append((f"its power cannot be read ({why.rstrip('.')})", power.remedy if power else ""))
    for trial in report.trials:
        if not trial.put_back:
            text = f"{trial.knob} could not be put back ({trial.note.rstrip('.')})"
            broken.append((text, "Run `underwatt restore`, or restart the board; then tell us, with this file."))
    if broken:
        return _verdict(Level.UNUSABLE, "Not usable", broken)
    limits = [*_rights(report), *_behaviour(report)]
    done = _done(report)
    if limits:
        return _verdict(Level.LIMITED, "Works, but", limits, f" {done}")
    return Verdict(Level.READY, f"Ready: {done[0].lower()}{done[1:]}")


def _verdict(level: Level, word: str, found: list[tuple[str, str]], more: str = "") -> Verdict:
    texts = list(dict.fromkeys(text for text, _ in found))
    remedies = tuple(dict.fromkeys(remedy for _, remedy in found if remedy))
    return Verdict(level, f"{word}: {'; '.join(texts)}.{more}", remedies)


def _rights(report: CheckReport) -> Iterator[tuple[str, str]]:
    barred = [knob for knob in report.knobs if knob.values and not knob.usable]
    if barred:
        yield f"you may not set {listed([knob.name for knob in barred])}", ""
        for knob in barred:
            yield f"you may not set {listed([knob.name for knob in barred])}", knob.remedy
    for knob in report.knobs:
        if not knob.values:
            yield f"{knob.name} cannot be set here ({knob.detail.rstrip('.')})", knob.remedy
    if not report.knobs:
        yield "it has no knobs, so that only batch sizes and pauses can be chosen", ""


def _behaviour(report: CheckReport) -> Iterator[tuple[str, str]]:
    for trial in report.trials:
        if trial.note:
            yield f"{trial.knob} could not be moved ({trial.note.rstrip('.')})", ""
        for move in trial.moves:
            if abs(move.ran / move.asked - 1) > _AS_ASKED:
                hint = "Something else sets it too (see what others hold), or heat does; stop it and check again."
                yield f"{trial.knob} was set to {move.asked:g} and ran at {move.ran:g}", hint
    for note in report.notes:
        yield note.rstrip("."), ""
    if not report.load_on_gpu and any(knob.name == "gpu_mhz" for knob in report.knobs):
        hint = "Install a PyTorch that can use the GPU (docs/jetson.md says which on a Jetson), and check again."
        yield "the GPU was not tried under load, as no Python here has a PyTorch that can use it", hint
    elif abs(report.load_w / report.idle_w - 1) < _SHOWS:
        yield "a load did not show in the watts", "Check that the sensor is that of the device the load runs on."
    failed = [m for m in report.measurements if not m.usable]
    if failed:
        yield f"{counted(len(failed), 'setting')} of {len(report.measurements)} could not be measured", ""
    slowed = [m for m in report.measurements if m.status is Status.THROTTLED]
    if slowed:
        hint = "Better cooling or a stronger supply would help; the plans take it as it is."
        yield f"it slowed itself down at {counted(len(slowed), 'setting')} ({slowed[0].note})", hint


def _done(report: CheckReport) -> str:
    usable = [m for m in report.measurements if m.usable]
    settable = listed([knob.name for knob in report.knobs if knob.usable and knob.values])
    if not report.set_tried:
        if settable:
            return f"Power is read and {settable} may be set. `underwatt check --set` tries it."
        if any(knob.values for knob in report.knobs):
            return "Power is read. `underwatt check --set`, run with the right to set, tries the knobs."
        return "Power is read. `underwatt check --set` measures some settings."
    moved = f"{settable} were set under load and put back" if settable else "Nothing could be set"
    measured = (
        f"; {counted(len(usable), 'setting')} measured, {min(m.power_w for m in usable):.1f} to "
        f"{max(m.power_w for m in usable):.1f} W"
        if usable
        else ""
    )
    return f"{moved}{measured}."
