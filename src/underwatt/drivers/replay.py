"""A recorded table as a device: each setting answers with what was once measured.

The table is a profile that `underwatt store export` wrote, or one in the form of the PowerTrain authors. For trying
planners against real measurements without the board. The device is always under load: its power is the recorded mean
of the mode it is in, at the batch size of the last step.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from underwatt.csv_tables import read_measurements
from underwatt.device.space import ModeSpace
from underwatt.errors import InputError, ModeError, OutOfMemoryError, SensorError, StepError
from underwatt.records import Capability, DeviceInfo, DeviceState, PowerMode, PowerSample, Setting, Status

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from underwatt.records import Measurement, WorkloadCost


class RecordedDevice:
    """Measurements that can be asked again; modes of its space that were not measured can be set, and not run."""

    recorded_power = True

    def __init__(self, info: DeviceInfo, measurements: Sequence[Measurement], space: ModeSpace) -> None:
        from underwatt.drivers.virtual.simulated_board import (
            VirtualClock,  # here, so that looking for devices stays light
        )

        # Of a setting that was measured again the last answer counts, but none counts less than a failure.
        self._by_setting = {m.setting: m for m in sorted(measurements, key=lambda m: m.usable)}
        self.clock = VirtualClock()
        self.info = info
        self.space = space
        first = next((m.setting for m in measurements if m.usable), Setting(space.highest, 1))
        self._mode, self._batch_size = first.mode, first.batch_size

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The batch sizes that stand in the table."""
        return tuple(sorted({setting.batch_size for setting in self._by_setting}))

    def capabilities(self) -> tuple[Capability, ...]:
        """Every knob of the table, and its power."""
        knobs = tuple(Capability(k.name, "knob", True, f"{len(k.values)} recorded values") for k in self.space.knobs)
        return (*knobs, Capability("power", "sensor", True, "recorded mean"))

    def _here(self) -> Measurement:
        setting = Setting(self._mode, self._batch_size)
        if setting not in self._by_setting:
            raise ModeError(f"The table does not hold {setting}.", hint=f"Batch sizes: {self.batch_sizes}.")
        return self._by_setting[setting]

    def read_power(self) -> PowerSample:
        """The recorded mean power of this mode."""
        measured = self._here()
        if not measured.usable:
            raise SensorError(f"No power was recorded for {measured.setting}.", hint="It did not run to its end.")
        return PowerSample(self.clock.now_s(), measured.power_w)

    def read_state(self) -> DeviceState:
        """The mode that is set."""
        return DeviceState(running=self._mode)

    def apply(self, mode: PowerMode) -> None:
        """Go to a recorded mode."""
        self._mode = self.space.check(self._mode.with_knobs(**self.space.check(mode).knobs()))

    def snapshot(self, mode: PowerMode | None = None) -> dict[str, str]:  # noqa: ARG002 - always all of it
        """The mode that is set."""
        return {name: repr(value) for name, value in self._mode.knobs().items()}

    def restore(self, snapshot: Mapping[str, str]) -> None:
        """Go back to a mode."""
        self.apply(PowerMode.of({name: float(value) for name, value in snapshot.items()}))

    def run_step(self, cost: WorkloadCost, batch_size: int) -> None:  # noqa: ARG002
        """Let the recorded step time pass; the recorded workload is the one that runs, whatever ``cost`` says."""
        setting = Setting(self._mode, batch_size)
        if setting not in self._by_setting:
            raise StepError(f"The table does not hold {setting}.", hint="Only recorded settings can be asked.")
        self._batch_size = batch_size
        measured = self._by_setting[setting]
        if measured.status is Status.OUT_OF_MEMORY:
            raise OutOfMemoryError(f"Batch size {batch_size} was recorded as out of memory.")
        if measured.status is Status.FAILED:
            raise StepError(f"{measured.setting} was recorded as failed.", hint=measured.note)
        self.clock.advance(measured.step_s)

    def close(self) -> None:
        """Nothing to let go of."""


class ReplayDevice(RecordedDevice):
    """A table of measurements."""

    def __init__(self, measurements: Sequence[Measurement], *, name: str, address: str) -> None:
        if not any(m.usable for m in measurements):
            hint = "Give a table in which a setting was measured to its end."
            raise InputError(f"{name} holds no usable measurement to replay.", hint=hint)
        info = DeviceInfo(
            backend="replay", name=f"{name} (replayed)", id=address, address=address, simulated=True, in_process=True
        )
        super().__init__(info, measurements, ModeSpace.of_modes(m.setting.mode for m in measurements))


class ReplayBackend:
    """Opens a table of measurements by its path."""

    name = "replay"

    def affinity(self) -> float:
        """Never chosen by itself."""
        return 0.0

    def find(self) -> tuple[str, ...]:
        """A table is named, not found."""
        return ()

    def open(self, where: str) -> ReplayDevice:
        """Open an exported profile, or a table with the columns of ``tables.read_measurements``."""
        if not where:
            raise InputError("Replay needs a table.", hint="Name it: --device replay:TABLE.csv")
        return ReplayDevice(read_measurements(where), name=Path(where).stem, address=f"replay:{where}")


backend = ReplayBackend()
