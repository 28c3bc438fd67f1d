"""What a device is to the rest of Underwatt: something that can be asked, read, set, and put back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from underwatt.device.space import ModeSpace
    from underwatt.device.timing import Clock
    from underwatt.records import Capability, DeviceInfo, DeviceState, PowerMode, PowerSample, WorkloadCost


class Device(Protocol):
    """A board or GPU. Constructing one touches nothing but files or counters that are read."""

    @property
    def info(self) -> DeviceInfo:
        """Who it is."""

    @property
    def clock(self) -> Clock:
        """The time it lives in."""

    @property
    def space(self) -> ModeSpace:
        """Every power mode it allows, known without trying any."""

    def capabilities(self) -> tuple[Capability, ...]:
        """Its knobs and sensors, which of them this user may use, and what would permit the others."""

    def read_power(self) -> PowerSample:
        """Total power now; raises ``SensorError`` rather than guess. Cheap enough for ten calls a second."""

    def read_state(self) -> DeviceState:
        """Clocks as they run, rails, temperatures, throttling."""

    def apply(self, mode: PowerMode) -> None:
        """Set the knobs that ``mode`` names and check that they took.

        Raises ``ModeError`` for a value that is not allowed, ``NotPermittedError`` where this user may not, and
        ``ApplyError`` where the device refused or rounded. A knob that is ``None`` is left alone.
        """

    def snapshot(self, mode: PowerMode | None = None) -> Mapping[str, str]:
        """All that ``apply(mode)`` could change, or any ``apply``, as text that survives in a journal."""

    def restore(self, snapshot: Mapping[str, str]) -> None:
        """Put back what ``snapshot`` found, in an order that the device accepts. May be repeated."""

    def close(self) -> None:
        """Let go of handles; changes no setting."""


@runtime_checkable
class SimulatesLoad(Protocol):
    """A device whose training steps are computed instead of run (virtual boards, replayed tables)."""

    def run_step(self, cost: WorkloadCost, batch_size: int) -> None:
        """Let one step pass in the device's own time; raises ``OutOfMemoryError`` where it would not fit."""


@runtime_checkable
class HasStockModes(Protocol):
    """A device whose vendor ships named power modes."""

    def stock_modes(self) -> Mapping[str, PowerMode]:
        """The vendor's modes by name, each with every knob at the most that it allows."""


@runtime_checkable
class HasRecordedPower(Protocol):
    """A device whose watts stand in a table: they are the same as long as its setting is, also while it waits."""

    recorded_power: bool


@runtime_checkable
class SeesForeignChanges(Protocol):
    """A device whose knobs others may move while a session holds them."""

    def foreign_changes(self) -> tuple[str, ...]:
        """What others have changed since it was set here, in sentences, each said once."""


@runtime_checkable
class KeepsItself(Protocol):
    """A device that another process locks, keeps a journal of and puts back, also when this one is killed."""

    def hold(self) -> bool:
        """Take it for this process; whether something that was killed had to be put back first."""

    def let_go(self) -> None:
        """Have everything put back, and let the next one in."""


@runtime_checkable
class HasKernelFiles(Protocol):
    """A device that is read and set by files, which a check may show to others."""

    def kernel_files(self) -> Mapping[str, str]:
        """The texts of these files by path; nothing in them tells one device from the next of its kind."""

    def held_by_others(self) -> tuple[str, ...]:
        """What others than a session hold of it now, such as clocks that a vendor's tool has pinned, in sentences."""


class Backend(Protocol):
    """A kind of device: found through the entry point group ``underwatt.devices``."""

    name: str

    def affinity(self) -> float:
        """How sure this backend is that it is at home here: 0 not at all, 1 certainly. Must be quick."""

    def find(self) -> tuple[str, ...]:
        """Addresses of the devices here, without the ``name:`` in front."""

    def open(self, where: str) -> Device:
        """Open the device at an address; ``""`` is the usual one."""


def permitted_space(device: Device) -> ModeSpace:
    """The modes that this user may set: knobs that are not permitted are left as they are."""
    return device.space.only(item.name for item in device.capabilities() if item.kind == "knob" and item.usable)


def foreign_changes(device: Device) -> tuple[str, ...]:
    """What others have changed of what was set on the device, each said once; nothing where it cannot tell."""
    return device.foreign_changes() if isinstance(device, SeesForeignChanges) else ()
