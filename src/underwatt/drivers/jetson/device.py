"""A Jetson as a device: what ``helper/`` finds, reads and sets, as Underwatt's records."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from underwatt.device.space import Knob, ModeSpace
from underwatt.device.timing import Clock, SystemClock
from underwatt.drivers.jetson.kernel_files import collect, held_by_others
from underwatt.helper.board import JetsonBoard
from underwatt.helper.sysfs import Sysfs
from underwatt.records import Capability, DeviceInfo, DeviceState, PowerMode, PowerSample

if TYPE_CHECKING:
    from collections.abc import Mapping

    from underwatt.helper.board import Identity


def info_of(who: Identity, backend: str, address: str) -> DeviceInfo:
    """A board as Underwatt knows devices; it is the same one, however it is reached."""
    return DeviceInfo(
        backend=backend,
        name=who.name,
        id=who.id,
        address=address,
        simulated=who.simulated,
        software={"l4t": who.release} if who.release else {},
        power_of=who.power_of,
    )


class JetsonDevice:
    """Any Jetson, by the files under ``root``: ``/`` on the board itself, a directory in tests and simulations."""

    def __init__(self, root: str | Path = "/", clock: Clock | None = None, sysfs: Sysfs | None = None) -> None:
        self.clock: Clock = clock or SystemClock()
        self._board = JetsonBoard(sysfs or Sysfs(Path(root).absolute()), self.clock.now_s)
        self.info = info_of(self._board.identity, "jetson", self._board.identity.address)
        self._space = ModeSpace([])
        self._space_of: Mapping[str, tuple[float, ...]] = {}

    @property
    def space(self) -> ModeSpace:
        """The knobs of this board, within the caps of its active nvpmodel mode; follows a mode switch."""
        values = self._board.values()
        if values is not self._space_of:
            self._space = ModeSpace([Knob(name, entries) for name, entries in values.items()])
            self._space_of = values
        return self._space

    def stock_modes(self) -> dict[str, PowerMode]:
        """The modes of nvpmodel.conf, each with every knob at its cap."""
        return {name: PowerMode.of(mode) for name, mode in self._board.stock_modes().items()}

    def capabilities(self) -> tuple[Capability, ...]:
        """Its knobs and sensors, which of them this user may use, and what would permit the others."""
        return tuple(Capability(*ability) for ability in self._board.abilities())

    def read_power(self) -> PowerSample:
        """Total power now; raises ``SensorError`` rather than guess."""
        power_w = self._board.power_w()
        return PowerSample(self.clock.now_s(), power_w)

    def read_state(self) -> DeviceState:
        """Clocks as they run, rails, temperatures, throttling; what cannot be read is left out."""
        state = self._board.state()
        return DeviceState(PowerMode.of(state.running), state.rails_w, state.temperatures_c, state.throttle_reasons)

    def apply(self, mode: PowerMode) -> None:
        """Set the knobs that ``mode`` names and check that they took; what fails midway is put back first."""
        self._board.apply(mode.knobs())

    def snapshot(self, mode: PowerMode | None = None) -> Mapping[str, str]:  # noqa: ARG002 - always all of it
        """The text of every file that ``apply`` could change, and the active nvpmodel mode."""
        return self._board.as_found(self._board.snapshot())

    def restore(self, snapshot: Mapping[str, str]) -> None:
        """Put back what ``snapshot`` found; may be repeated."""
        self._board.restore(snapshot)

    def foreign_changes(self) -> tuple[str, ...]:
        """What others have changed since it was set here, each said once; cheap enough for every few seconds."""
        return self._board.foreign_changes()

    def kernel_files(self) -> dict[str, str]:
        """The files that tell what this board can do, and nothing of whose it is."""
        return collect(self._board.sysfs, self._board.conf)

    def held_by_others(self) -> tuple[str, ...]:
        """Clocks that are pinned, idle states that are off, the fan, and services that may change them."""
        return held_by_others(self._board.sysfs, self.kernel_files())

    def close(self) -> None:
        """Nothing is held open."""
