from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from virtual_costs import SMALL

from underwatt.drivers.jetson.device import JetsonDevice
from underwatt.drivers.virtual.board_specs import BOARDS
from underwatt.drivers.virtual.simulated_board import VirtualBoard
from underwatt.drivers.virtual.sysfs import SysfsBoard
from underwatt.errors import InputError
from underwatt.records import PowerMode
from underwatt.testing.devices import DeviceConformance

if TYPE_CHECKING:
    from pathlib import Path

    from underwatt.drivers.virtual.board_specs import BoardSpec

EVERY_BOARD = pytest.mark.parametrize("name", list(BOARDS))
BPMP_RATE = "sys/kernel/debug/bpmp/debug/clk/emc/rate"
BPMP_LOCK = "sys/kernel/debug/bpmp/debug/clk/emc/mrq_rate_locked"
NANO_GPU = "sys/class/devfreq/57000000.gpu"
NANO_POWER = "sys/bus/i2c/drivers/ina3221x/6-0040/iio:device0/in_power0_input"


def make(name: str, root: Path, stock_mode: str | None = None) -> SysfsBoard:
    return SysfsBoard.create(VirtualBoard(BOARDS[name]), root, stock_mode=stock_mode)


def widest(spec: BoardSpec) -> str:
    """The stock mode that caps nothing: not always the first."""
    return next(name for name, mode in spec.stock_modes.items() if mode == spec.space.highest)


def read(tree: SysfsBoard, path: str) -> int:
    return int((tree.directory / path).read_text())


def write(tree: SysfsBoard, path: str, value: int) -> None:
    (tree.directory / path).write_text(f"{value}\n")


def train(tree: SysfsBoard, seconds: float, batch: int = 16) -> None:
    end_s = tree.board.clock.now_s() + seconds
    while tree.board.clock.now_s() < end_s:
        tree.run_step(SMALL, batch)


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_write_a_clock_file_load_the_board_and_power_files_move(tmp_path: Path) -> None:
    tree = make("nano", tmp_path)
    train(tree, 5)
    fast_mw = read(tree, NANO_POWER)
    write(tree, f"{NANO_GPU}/min_freq", 76_800_000)
    write(tree, f"{NANO_GPU}/max_freq", 230_400_000)
    train(tree, 5)
    assert read(tree, f"{NANO_GPU}/cur_freq") == 230_400_000
    assert read(tree, NANO_POWER) < 0.75 * fast_mw
    assert tree.board.mode.gpu_mhz == 230.4


@EVERY_BOARD
def test_every_knob_reaches_the_board(name: str, tmp_path: Path) -> None:
    tree = make(name, tmp_path, widest(BOARDS[name]))
    spec = tree.board.spec
    assert tree.board.mode == spec.stock_mode(widest(spec))
    for core in range(2, spec.cpu_cores):
        write(tree, f"sys/devices/system/cpu/cpu{core}/online", 0)
    for core in range(spec.cpu_cores):
        write(tree, f"sys/devices/system/cpu/cpu{core}/cpufreq/scaling_max_freq", round(spec.cpu_mhz[3] * 1e3))
    rate, lock = (
        (BPMP_RATE, BPMP_LOCK)
        if spec.sysfs.emc == "bpmp"
        else ("sys/kernel/debug/clk/override.emc/clk_update_rate", "sys/kernel/debug/clk/override.emc/clk_state")
    )
    write(tree, lock, 1)
    write(tree, rate, round(spec.mem_mhz[1] * 1e6))
    node = next((tmp_path / "sys/class/devfreq").iterdir())
    (node / "max_freq").write_text(f"{round(spec.gpu_mhz[2] * 1e6)}\n")
    tree.sync()
    assert tree.board.mode == PowerMode(2, spec.cpu_mhz[3], spec.gpu_mhz[2], spec.mem_mhz[1])


def test_values_off_the_table_are_rounded_in_the_file(tmp_path: Path) -> None:
    tree = make("orin-agx", tmp_path, "MAXN")
    node = "sys/class/devfreq/17000000.ga10b"
    write(tree, f"{node}/max_freq", 700_000_000)
    write(tree, f"{node}/min_freq", 200_000_000)
    write(tree, BPMP_LOCK, 1)
    write(tree, BPMP_RATE, 700_000_000)
    write(tree, "sys/devices/system/cpu/cpu0/cpufreq/scaling_max_freq", 99)
    write(tree, "sys/devices/system/cpu/cpu0/online", 0)
    tree.board.clock.sleep(0.1)
    assert read(tree, f"{node}/max_freq") == 624_750_000
    assert read(tree, f"{node}/min_freq") == 216_750_000
    assert read(tree, BPMP_RATE) == 2_133_000_000
    assert read(tree, "sys/devices/system/cpu/cpu1/cpufreq/scaling_max_freq") == 115_200
    assert read(tree, "sys/devices/system/cpu/cpu0/online") == 1


def test_an_unlocked_memory_clock_is_the_firmwares(tmp_path: Path) -> None:
    tree = make("orin-agx", tmp_path, "MAXN")
    write(tree, BPMP_LOCK, 1)
    write(tree, BPMP_RATE, 204_000_000)
    tree.sync()
    assert tree.board.mode.mem_mhz == 204
    write(tree, BPMP_LOCK, 0)
    tree.sync()
    assert tree.board.mode.mem_mhz == 3199
    assert read(tree, BPMP_RATE) == 3_199_000_000
    write(tree, "sys/kernel/nvpmodel_emc_cap/emc_iso_cap", 2_133_000_000)
    tree.sync()
    assert read(tree, BPMP_RATE) == 2_133_000_000


def test_jetson_clocks_keeps_idle_cores_awake(tmp_path: Path) -> None:
    tree = make("orin-agx", tmp_path, "MAXN")
    switches = sorted(tmp_path.glob("sys/devices/system/cpu/cpu*/cpuidle/state1/disable"))
    assert [path.read_text() for path in switches] == ["0\n"] * 12
    tree.board.clock.sleep(1.0)
    asleep_w = tree.board.power_w
    for path in switches:  # what jetson_clocks does
        path.write_text("1\n")
    tree.board.clock.sleep(1.0)
    assert tree.board.power_w > 1.2 * asleep_w
    awake = SysfsBoard.create(VirtualBoard(BOARDS["nano"], cpuidle=False), tmp_path / "other")
    awake.board.clock.sleep(1.0)
    assert not awake.board.cpuidle


def test_nonsense_in_a_knob_file_changes_nothing(tmp_path: Path) -> None:
    tree = make("nano", tmp_path)
    before = tree.board.mode
    for text in ("", "fast\n"):
        (tmp_path / NANO_GPU / "max_freq").write_text(text)
        tree.sync()
        assert tree.board.mode == before


def test_a_sensor_that_was_taken_away_stays_away(tmp_path: Path) -> None:
    tree = make("nano", tmp_path)
    (tmp_path / NANO_POWER).unlink()
    train(tree, 3)
    assert not (tmp_path / NANO_POWER).exists()


def test_heat_shows_in_zones_and_cooling_devices(tmp_path: Path) -> None:
    tree = make("nano", tmp_path)
    tree.board.disturb(ambient_c=110)
    tree.board.clock.sleep(1200)
    assert read(tree, "sys/class/thermal/thermal_zone1/temp") > 97_000
    assert read(tree, "sys/class/thermal/cooling_device0/cur_state") == 11
    assert read(tree, f"{NANO_GPU}/cur_freq") == 76_800_000
    assert read(tree, f"{NANO_GPU}/max_freq") == 921_600_000


def test_files_are_written_only_when_they_change(tmp_path: Path) -> None:
    tree = make("nano", tmp_path)
    train(tree, 1)
    tree.sync()
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    tree.sync()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == stamps


def test_two_boards_do_not_share_a_directory(tmp_path: Path) -> None:
    make("nano", tmp_path)
    with pytest.raises(InputError, match="already"):
        make("orin-agx", tmp_path)


def test_another_process_can_set_it(tmp_path: Path) -> None:
    tree = make("nano", tmp_path)
    program = f"open({str(tmp_path / NANO_GPU / 'max_freq')!r}, 'w').write('460800000')"
    subprocess.run([sys.executable, "-c", program], check=True)
    tree.board.clock.sleep(0.1)
    assert tree.board.mode.gpu_mhz == 460.8


class TestProductionDriverOnVirtualBoard(DeviceConformance):
    @pytest.fixture(params=list(BOARDS))
    def device(self, request: pytest.FixtureRequest, tmp_path: Path) -> JetsonDevice:
        name = request.param
        tree = make(name, tmp_path / "board", widest(BOARDS[name]))
        return JetsonDevice(tmp_path / "board", clock=tree.board.clock)


@EVERY_BOARD
def test_the_production_driver_sees_the_board_as_it_is(name: str, tmp_path: Path) -> None:
    tree = make(name, tmp_path, widest(BOARDS[name]))
    board = tree.board
    driver = JetsonDevice(tmp_path, clock=board.clock)
    assert len(driver.space) == len(board.space)
    assert driver.space.highest == board.space.highest
    found, files = driver.snapshot(), contents(tmp_path)
    middle = PowerMode.of({knob.name: knob.values[len(knob.values) // 2] for knob in board.space.knobs})
    powers = []
    for mode in (board.space.lowest, middle, board.space.highest):
        driver.apply(mode)
        train(tree, 6)
        assert board.mode == mode
        assert driver.read_state().running == mode
        powers.append(driver.read_power().power_w)
        expected_w = board.true_power_w(SMALL, board.mode, 16, temperature_c=board.temperature_c)
        assert powers[-1] == pytest.approx(expected_w, rel=0.1)
    assert powers[0] < powers[1] < powers[2]
    driver.restore(found)
    tree.sync()
    changed = {path for path, text in contents(tmp_path).items() if files[path] != text}
    assert all("/ina3221" in path or path.endswith("/temp") for path in changed), changed
