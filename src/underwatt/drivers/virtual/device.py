"""A virtual board as a device like any other."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlencode

from underwatt.drivers.virtual.board_specs import BOARDS
from underwatt.drivers.virtual.simulated_board import VirtualBoard
from underwatt.errors import InputError, JournalError, NoDeviceError
from underwatt.records import Capability, DeviceInfo, DeviceState, PowerMode, PowerSample

if TYPE_CHECKING:
    from collections.abc import Mapping

    from underwatt.records import WorkloadCost

MODE_CHANGE_S = 0.005  # estimated: clocks change within milliseconds, the sensor follows within seconds


class VirtualJetson:
    """A simulated board, driven through the same protocol as a real one."""

    def __init__(self, board: VirtualBoard) -> None:
        self.board = board
        options = {"seed": str(board.seed)} if board.seed else {}
        if not board.cpuidle:
            options["cpuidle"] = "off"
        name = board.spec.name
        self.clock, self.space = board.clock, board.space
        self.info = DeviceInfo(
            backend="virtual",
            name=f"{board.spec.title} (simulated)",
            id=f"virtual-{name}" if board.cpuidle else f"virtual-{name}-awake",  # other watts: another board
            address=f"virtual:{name}?{urlencode(options)}" if options else f"virtual:{name}",
            simulated=True,
            in_process=True,
            power_of=f"module ({' + '.join(rail.name for rail in board.spec.rails if rail.in_total)})",
        )

    def stock_modes(self) -> dict[str, PowerMode]:
        """The vendor's named modes of this board."""
        return dict(self.board.spec.stock_modes)

    def capabilities(self) -> tuple[Capability, ...]:
        """All knobs and sensors; nothing needs a permission here."""
        knobs = (
            Capability(knob.name, "knob", True, f"{len(knob.values)} values, {knob.values[0]:g} to {knob.values[-1]:g}")
            for knob in self.space.knobs
        )
        rails = ", ".join(rail.name for rail in self.board.spec.rails)
        return (
            *knobs,
            Capability("power", "sensor", True, f"simulated INA3221: {rails}"),
            Capability("temperature", "sensor", True, "simulated"),
        )

    def read_power(self) -> PowerSample:
        """Total power as the simulated sensor last published it."""
        watts = self.board.sensor.watts()
        total_w = sum(watts[rail.name] for rail in self.board.spec.rails if rail.in_total)
        return PowerSample(self.clock.now_s(), total_w)

    def read_state(self) -> DeviceState:
        """Clocks as they run, rails as published, temperature, throttling."""
        board = self.board
        return DeviceState(
            running=board.running,
            rails_w=board.sensor.watts(),
            temperatures_c={"board": board.temperature_c},
            throttle_reasons=("temperature",) if board.throttled else (),
        )

    def apply(self, mode: PowerMode) -> None:
        """Set the knobs that ``mode`` names."""
        self.board.set_mode(mode)
        if mode.knobs():
            self.clock.advance(MODE_CHANGE_S)

    def snapshot(self, mode: PowerMode | None = None) -> Mapping[str, str]:  # noqa: ARG002 - always all of it
        """The mode asked for, one entry a knob."""
        return {name: repr(value) for name, value in self.board.mode.knobs().items()}

    def restore(self, snapshot: Mapping[str, str]) -> None:
        """Set every knob back to what ``snapshot`` found."""
        try:
            mode = PowerMode.of({name: float(text) for name, text in snapshot.items()})
        except (ValueError, TypeError, InputError) as exc:
            raise JournalError(f"This is no snapshot of a virtual board: {dict(snapshot)}.") from exc
        self.apply(mode)

    def run_step(self, cost: WorkloadCost, batch_size: int) -> None:
        """Let one training step pass in simulated time."""
        self.board.run_step(cost, batch_size)

    def close(self) -> None:
        """Nothing to let go of."""


def open_virtual(where: str) -> VirtualJetson:
    """A new board from an address such as ``nano``, ``nano?seed=3`` or ``orin-agx?cpuidle=off``."""
    name, _, query = where.partition("?")
    if name not in BOARDS:
        raise NoDeviceError(f"There is no virtual board {name!r}.", hint=f"There are: {', '.join(BOARDS)}.")
    options = dict(parse_qsl(query, keep_blank_values=True))
    seed, cpuidle = options.pop("seed", "0"), options.pop("cpuidle", "on")
    if options or not seed.isdecimal() or cpuidle not in ("on", "off"):
        raise InputError(
            f"A virtual board cannot be opened as {where!r}.",
            hint=f"Write {name}, {name}?seed=3, or {name}?cpuidle=off for a board on which jetson_clocks was run.",
        )
    return VirtualJetson(VirtualBoard(BOARDS[name], seed=int(seed), cpuidle=cpuidle == "on"))
