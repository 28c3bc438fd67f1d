"""``check``: what an owner of a board runs first. Looks, and where it may, moves each knob and puts it back.

Nothing is set without ``set_knobs``. What is found becomes one record (``drivers.check.CheckReport``) that can be sent
to others: who owns the board, and which one it is, is left out (``check_report``), and a verdict says it in a sentence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from underwatt.api import lookup
from underwatt.api.check_report import Anonymous, judge, software_of
from underwatt.api.lookup import log_notes
from underwatt.device.base import HasKernelFiles, HasStockModes, permitted_space
from underwatt.drivers.check import CheckedKnob, CheckReport, KnobMove, KnobTrial, Level, SensorFigures, Verdict
from underwatt.errors import ApplyError, DeviceBusyError, DeviceError, JournalError, WorkloadError
from underwatt.jobs.load import LOAD_BATCH_SIZES, load_for
from underwatt.measure.measurement import MeasureOptions
from underwatt.measure.meter import Meter, measure_idle, read_state
from underwatt.measure.sensor import followed, new_value_period_s, reading_time_s
from underwatt.measure.series import expected_s, in_order, run_profile
from underwatt.measure.steady import Settling, mean_while_settling
from underwatt.records import DeviceState, PowerMode, Setting, WorkloadInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
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
        except (DeviceError, WorkloadError) as exc:
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
