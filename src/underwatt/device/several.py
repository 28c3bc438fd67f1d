"""Several devices of one kind as one, for a training that they do together: one mode for all, and all their watts.

``open_device("nvml:0,nvml:1")`` opens them. Their steps are those of the slowest: the others wait for it.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING

from underwatt.device.base import SeesForeignChanges, SimulatesLoad
from underwatt.errors import InputError
from underwatt.helper.lock import DeviceLock
from underwatt.records import DeviceState, PowerMode, PowerSample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from underwatt.device.base import Device
    from underwatt.device.timing import Clock, Timer
    from underwatt.records import Capability, WorkloadCost

_MARK = " of "  # between a device's number and the name of what was found there


def together(devices: Sequence[Device]) -> Device:
    """The devices as one; a single one is itself."""
    first = devices[0]
    if len(devices) == 1:
        return first
    if any(other.space.matrix().tolist() != first.space.matrix().tolist() for other in devices[1:]):
        raise InputError("These devices have unlike power modes.", hint="Name devices of one kind.")
    return SeveralSimulated(devices) if all(isinstance(one, SimulatesLoad) for one in devices) else Several(devices)


def parts_of(device: Device) -> tuple[Device, ...]:
    """The devices that one is made of: each has a lock and a journal of its own, as it has where it is used alone."""
    return device.devices if isinstance(device, Several) else (device,)


@contextlib.contextmanager
def locked(device: Device, folder: Path | None) -> Iterator[None]:
    """Hold the locks of all parts of a device."""
    with contextlib.ExitStack() as stack:
        for part in parts_of(device):
            lock = DeviceLock(part.info, folder)
            lock.acquire()
            stack.callback(lock.release)
        yield


class Several:
    """A device that is several."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self.devices, first = tuple(devices), devices[0]
        infos = [device.info for device in devices]
        self.info = replace(
            first.info,
            name=f"{len(devices)} × {first.info.name}",
            id="+".join(info.id for info in infos),
            address=",".join(info.address for info in infos),
        )
        self.clock: Clock = first.clock
        self.space = first.space

    def capabilities(self) -> tuple[Capability, ...]:
        """What all of them have and allow."""
        by_name = [{(item.kind, item.name): item for item in device.capabilities()} for device in self.devices]
        shared = [[items.get(key) for items in by_name] for key in by_name[0]]
        return tuple(
            next((item for item in same if item and not item.usable), same[0])  # type: ignore[misc]
            for same in shared
            if all(same)
        )

    def read_power(self) -> PowerSample:
        """Their watts together; where one cannot be read, none can."""
        samples = [device.read_power() for device in self.devices]
        joules = [sample.energy_j for sample in samples if sample.energy_j is not None]
        counted_j = sum(joules) if len(joules) == len(samples) else None
        return PowerSample(samples[0].at_s, sum(sample.power_w for sample in samples), counted_j)

    def read_state(self) -> DeviceState:
        """The lowest clocks that run, and what each of them says of itself."""
        states = [device.read_state() for device in self.devices]
        knobs = [state.running.knobs() for state in states]
        lowest = {name: min(one[name] for one in knobs if name in one) for name in knobs[0]}
        heat = {f"{name} {at}": warm_c for at, one in enumerate(states) for name, warm_c in one.temperatures_c.items()}
        rails = {f"{name} {at}": power_w for at, one in enumerate(states) for name, power_w in one.rails_w.items()}
        reasons = dict.fromkeys(reason for state in states for reason in state.throttle_reasons)
        return DeviceState(PowerMode.of(lowest), rails, heat, tuple(reasons))

    def apply(self, mode: PowerMode) -> None:
        """Set all of them; where one refuses, those before it are put back."""
        done: list[tuple[Device, Mapping[str, str]]] = []
        try:
            for device in self.devices:
                done.append((device, device.snapshot(mode)))
                device.apply(mode)
        except BaseException:
            for device, found in done[:-1]:
                device.restore(found)
            raise

    def snapshot(self, mode: PowerMode | None = None) -> dict[str, str]:
        """What is found at each of them."""
        found = [device.snapshot(mode) for device in self.devices]
        return {f"{number}{_MARK}{name}": value for number, one in enumerate(found) for name, value in one.items()}

    def restore(self, snapshot: Mapping[str, str]) -> None:
        """Put all of them back, also where one of them cannot be."""
        failure: Exception | None = None
        for number, device in enumerate(self.devices):
            begin = f"{number}{_MARK}"
            own = {name.removeprefix(begin): value for name, value in snapshot.items() if name.startswith(begin)}
            try:
                device.restore(own)
            except Exception as exc:  # noqa: BLE001 - it is raised when the others are back
                failure = failure or exc
        if failure is not None:
            raise failure

    def foreign_changes(self) -> tuple[str, ...]:
        """What others have changed at any of them."""
        seen = [device for device in self.devices if isinstance(device, SeesForeignChanges)]
        return tuple(text for device in seen for text in device.foreign_changes())

    def close(self) -> None:
        """Let go of all of them."""
        for device in self.devices:
            device.close()


class SeveralSimulated(Several):
    """Simulated ones, each with its own time, which are kept together: who is ahead has waited."""

    def __init__(self, devices: Sequence[Device]) -> None:
        super().__init__(devices)
        self.clock = _Together([device.clock for device in devices])

    def run_step(self, cost: WorkloadCost, batch_size: int) -> None:
        """A step of this batch size on each of them."""
        for device in (*self.devices[1:], self.devices[0]):  # the first one's time is that of whoever looks
            assert isinstance(device, SimulatesLoad)
            device.run_step(cost, batch_size)
        self.clock.sleep(0.0)

    def apply(self, mode: PowerMode) -> None:
        """Set all of them, which takes its time."""
        super().apply(mode)
        self.clock.sleep(0.0)


class _Together:
    def __init__(self, clocks: Sequence[Clock]) -> None:
        self._clocks = clocks
        self._offsets_s = [clock.now_s() - clocks[0].now_s() for clock in clocks]
        self.now_s = clocks[0].now_s

    def sleep(self, seconds: float) -> None:
        clocks = list(zip(self._clocks, self._offsets_s, strict=True))
        until_s = max(clock.now_s() - offset_s for clock, offset_s in clocks) + max(0.0, seconds)
        for clock, offset_s in reversed(clocks):
            clock.sleep(max(0.0, until_s + offset_s - clock.now_s()))

    def every(self, period_s: float, call: Callable[[], None]) -> Timer:
        return self._clocks[0].every(period_s, call)
