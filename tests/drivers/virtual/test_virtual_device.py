from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from virtual_costs import SMALL

from underwatt.device.base import SimulatesLoad
from underwatt.drivers.virtual import backend
from underwatt.drivers.virtual.board_specs import BOARDS
from underwatt.errors import InputError, JournalError, NoDeviceError
from underwatt.testing.devices import DeviceConformance

if TYPE_CHECKING:
    from underwatt.drivers.virtual.device import VirtualJetson
    from underwatt.records import PowerMode


class TestVirtualConformance(DeviceConformance):
    @pytest.fixture(params=[*BOARDS, "orin-agx?cpuidle=off"])
    def device(self, request: pytest.FixtureRequest) -> VirtualJetson:
        return backend.open(request.param)


def test_backend_lists_boards_and_is_never_chosen_by_itself() -> None:
    assert backend.find() == tuple(BOARDS)
    assert {"nano", "tx2", "tx2-nx", "xavier-agx", "orin-nano", "orin-nano-super"} < set(backend.find())
    assert backend.affinity() == 0
    assert backend.open("").info.address == "virtual:nano"


@pytest.mark.parametrize(
    ("name", "power_of"),
    [("tx2-nx", "module (VDD_IN)"), ("orin-agx", "module (VDD_GPU_SOC + VDD_CPU_CV + VIN_SYS_5V0)")],
)
def test_says_what_its_watts_are_of(name: str, power_of: str) -> None:
    assert backend.open(name).info.power_of == power_of


def test_says_that_it_is_simulated() -> None:
    device = backend.open("nano?seed=3")
    assert device.info.simulated
    assert device.info.in_process
    assert device.info.address == "virtual:nano?seed=3"
    assert "simulated" in device.info.name
    assert device.board.seed == 3
    assert isinstance(device, SimulatesLoad)


def test_a_board_after_jetson_clocks_is_another_one() -> None:
    asleep, awake = backend.open("orin-agx"), backend.open("orin-agx?cpuidle=off&seed=2")
    assert awake.info.address == "virtual:orin-agx?seed=2&cpuidle=off"
    assert backend.open(awake.info.address.removeprefix("virtual:")).info == awake.info
    assert asleep.info.id != awake.info.id  # what was measured on one says nothing of the other
    for device in (asleep, awake):
        device.apply(device.space.highest)
    assert awake.board.power_w > asleep.board.power_w + 1.5


def test_wrong_addresses_say_what_is_right() -> None:
    with pytest.raises(NoDeviceError, match="no virtual board 'pi'") as caught:
        backend.open("pi")
    assert "orin-agx" in caught.value.hint
    for where in ("nano?seed=x", "nano?sed=1", "nano?seed=-1", "nano?cpuidle=no"):
        with pytest.raises(InputError, match="cannot be opened"):
            backend.open(where)


def test_a_mode_change_shows_after_the_sensor_settles() -> None:
    device = backend.open("orin-agx")

    def watts_after(mode: PowerMode) -> float:
        device.apply(mode)
        end_s = device.clock.now_s() + 4
        while device.clock.now_s() < end_s:
            device.run_step(SMALL, 32)
        return device.read_power().power_w

    low_w, high_w = watts_after(device.space.lowest), watts_after(device.space.highest)
    assert high_w > 2 * low_w
    device.apply(device.space.lowest)
    assert device.read_power().power_w > 1.5 * low_w  # the sensor has not noticed yet


def test_state_shows_rails_clocks_and_throttling() -> None:
    device = backend.open("nano")
    device.apply(device.space.highest)
    state = device.read_state()
    assert state.running == device.space.highest
    assert set(state.rails_w) == {"POM_5V_IN", "POM_5V_GPU", "POM_5V_CPU"}
    assert state.throttle_reasons == ()
    device.board.disturb(ambient_c=110)
    device.clock.sleep(1200)
    state = device.read_state()
    assert state.throttle_reasons == ("temperature",)
    assert state.running.gpu_mhz == 76.8


def test_a_snapshot_of_something_else_is_refused() -> None:
    device = backend.open("nano")
    for wrong in ({"gpu_mhz": "fast"}, {"wings": "2"}):
        with pytest.raises(JournalError, match="no snapshot"):
            device.restore(wrong)


def test_importing_the_backend_is_light() -> None:
    program = "import sys, underwatt.drivers.virtual; print('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
