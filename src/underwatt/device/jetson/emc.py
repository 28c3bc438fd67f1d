"""The memory clock (EMC) of a Jetson, pinned through debugfs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from underwatt.device.jetson.sysfs import Presence
from underwatt.device.space import SAME_VALUE_TOLERANCE
from underwatt.errors import DeviceError

if TYPE_CHECKING:
    from underwatt.device.jetson.boards import Board
    from underwatt.device.jetson.sysfs import Sysfs

HZ_PER_MHZ = 1_000_000
DEBUGFS = "sys/kernel/debug"
CAP_FILE = "sys/kernel/nvpmodel_emc_cap/emc_iso_cap"
_TOLERANCE_HZ = int(SAME_VALUE_TOLERANCE * HZ_PER_MHZ)
_SAME_CLOCK = 0.005  # a bound this close to a table entry is that entry, spelled exactly


@dataclass(frozen=True, slots=True)
class EmcNode:
    """Where one generation keeps the memory clock: ``lock`` at 1 holds ``rate``."""

    rate: str
    lock: str
    low: str
    high: str
    running: str


BPMP = EmcNode(
    rate=f"{DEBUGFS}/bpmp/debug/clk/emc/rate",
    lock=f"{DEBUGFS}/bpmp/debug/clk/emc/mrq_rate_locked",
    low=f"{DEBUGFS}/bpmp/debug/clk/emc/min_rate",
    high=f"{DEBUGFS}/bpmp/debug/clk/emc/max_rate",
    running=f"{DEBUGFS}/bpmp/debug/clk/emc/rate",
)
OVERRIDE = EmcNode(
    rate=f"{DEBUGFS}/clk/override.emc/clk_update_rate",
    lock=f"{DEBUGFS}/clk/override.emc/clk_state",
    low=f"{DEBUGFS}/tegra_bwmgr/emc_min_rate",
    high=f"{DEBUGFS}/tegra_bwmgr/emc_max_rate",
    running=f"{DEBUGFS}/clk/override.emc/clk_rate",
)


@dataclass(frozen=True, slots=True)
class Emc:
    """A memory clock that can be pinned by those who may enter debugfs."""

    sysfs: Sysfs
    node: EmcNode
    known_mhz: tuple[float, ...]

    @property
    def files(self) -> tuple[str, str]:
        """What pinning the clock changes."""
        return self.node.rate, self.node.lock

    def table_hz(self, *, capped: bool = True) -> tuple[int, ...]:
        """The known clocks within the board's bounds and, where wanted, the cap that stands, ascending."""
        low, high = (_int_or_none(self.sysfs, path) for path in (self.node.low, self.node.high))
        cap = _int_or_none(self.sysfs, CAP_FILE) or None if capped else None
        return within_bounds(self.known_mhz, low, high, cap)

    def pin(self, hz: int) -> None:
        """Hold the clock at one value: locked first, or the firmware would move it again."""
        self.sysfs.write_checked(self.node.lock, "1\n")
        self.sysfs.write_checked(self.node.rate, f"{hz}\n", tolerance=_TOLERANCE_HZ)

    def running_mhz(self) -> float | None:
        """The clock now, or ``None`` where this user may not know."""
        hz = _int_or_none(self.sysfs, self.node.running) or _int_or_none(self.sysfs, self.node.rate)
        return hz / HZ_PER_MHZ if hz else None


def find_emc(sysfs: Sysfs, board: Board) -> Emc | None:
    """The memory clock of this board; kept where debugfs merely hides it, ``None`` where it is not there."""
    node = OVERRIDE if board.emc_override else BPMP
    return None if sysfs.presence(node.rate) is Presence.ABSENT else Emc(sysfs, node, board.emc_mhz)


def within_bounds(known_mhz: tuple[float, ...], low: int | None, high: int | None, cap: int | None) -> tuple[int, ...]:
    """The known clocks between the bounds, the upper bound always among them, no entry above the cap.

    Of a board whose clocks are not known, the two bounds.
    """
    table = {round(mhz * HZ_PER_MHZ) for mhz in known_mhz}
    if high:
        table = {hz for hz in table if hz < high * (1 - _SAME_CLOCK)} | {high}
    if low:
        table = {hz for hz in table if hz >= low} | ({low} if not known_mhz else set())
    return tuple(sorted(hz for hz in table if not cap or hz <= cap)) or tuple(sorted(table))[:1]


def _int_or_none(sysfs: Sysfs, path: str) -> int | None:
    try:
        return sysfs.read_int(path)
    except DeviceError:
        return None
