"""Virtual Jetsons: the physics of real boards in simulated time, as a device or as a sysfs-shaped directory."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from underwatt.drivers.virtual.device import VirtualJetson


class VirtualBackend:
    """Opens ``virtual:nano``, ``virtual:orin-agx?seed=3`` and the like; never chosen unless named."""

    name = "virtual"

    def affinity(self) -> float:
        """Always 0: a simulated board must never stand in for a real one by itself."""
        return 0.0

    def find(self) -> tuple[str, ...]:
        """The names of the boards that can be simulated."""
        from underwatt.drivers.virtual.board_specs import BOARDS

        return tuple(BOARDS)

    def open(self, where: str) -> VirtualJetson:
        """A new virtual board; ``where`` is its name.

        ``?seed=N`` gives it another course of noise, ``?cpuidle=off`` leaves it as ``jetson_clocks`` does.
        """
        from underwatt.drivers.virtual.device import open_virtual

        return open_virtual(where or "nano")


backend = VirtualBackend()
