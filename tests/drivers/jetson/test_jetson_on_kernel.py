"""The production driver where files behave as a kernel's: through a mount, from outside, board by board."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from board_matrix import BPMP, CELLS, CPU, OVERRIDE, SETTABLE
from kernel_boards import Boards, as_nobody
from kernel_mount import Mount, mounted_over, why_not

from underwatt.device.base import foreign_changes
from underwatt.device.session import Session
from underwatt.drivers.jetson.device import JetsonDevice
from underwatt.drivers.virtual.board_specs import BOARDS
from underwatt.drivers.virtual.simulated_board import VirtualBoard
from underwatt.drivers.virtual.sysfs import SysfsBoard
from underwatt.errors import NotPermittedError
from underwatt.records import PowerMode

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())
POLICY = f"{CPU}/cpu0/cpufreq"


@pytest.fixture(scope="module")
def pool() -> Iterator[Boards]:
    with Boards() as boards:
        yield boards


@pytest.fixture
def board(pool: Boards) -> Callable[..., Mount]:
    return pool.board


def number(mount: Mount, path: str) -> int:
    return int((mount.root / path).read_text())


def memory(mount: Mount) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(mount.state())["memory"]
    return found


# What is written late, counted, rounded or cannot be read


def test_a_limit_that_arrives_late_is_no_refusal(board: Callable[..., Mount]) -> None:
    mount = board("agx-orin", "5")
    found = mount.settled()
    device = JetsonDevice(mount.root)
    device_found = device.snapshot()
    device.apply(PowerMode(cpu_mhz=576.0))
    assert number(mount, f"{POLICY}/scaling_max_freq") == number(mount, f"{POLICY}/scaling_min_freq") == 576_000
    device.restore(device_found)
    assert mount.settled(0.0) == found


def test_waiting_for_many_limits_takes_no_longer_than_for_one(board: Callable[..., Mount]) -> None:
    mount = board("agx-xavier", "5")
    device = JetsonDevice(mount.root)
    found = device.snapshot()
    mount.tell("lag", "0.09")  # two clusters are on, each with two limits
    started_s = time.monotonic()
    device.apply(PowerMode(cpu_mhz=576.0))
    device.restore(found)
    assert time.monotonic() - started_s < 2 * 2 * 2 * 0.09


def test_what_a_killed_process_asked_for_last_is_put_back_when_it_arrives(board: Callable[..., Mount]) -> None:
    mount = board("orin-nano", "6")
    found = mount.settled()
    snapshot = JetsonDevice(mount.root).snapshot()
    mount.tell("lag", "0.06")
    (mount.root / f"{POLICY}/scaling_max_freq").write_text("115200\n")
    assert number(mount, f"{POLICY}/scaling_max_freq") == 1_510_400, "not there yet"
    JetsonDevice(mount.root).restore(snapshot)
    assert mount.settled() == found


def test_nanos_memory_is_enabled_once_however_often_it_is_set(board: Callable[..., Mount]) -> None:
    mount = board("nano", "4")
    device = JetsonDevice(mount.root)
    found = device.snapshot()
    for mem_mhz in (204.0, 665.6, 1600.0):
        device.apply(PowerMode(mem_mhz=mem_mhz))
        assert memory(mount) == {"enables": 1, "held_hz": mem_mhz * 1e6, "locked": False, "unbalanced": 0}
        assert device.read_state().running.mem_mhz == mem_mhz
    for _ in range(2):
        device.restore(found)
        assert memory(mount) == {"enables": 0, "held_hz": 0, "locked": False, "unbalanced": 0}


def test_a_memory_clock_that_another_holds_is_given_back_to_it(board: Callable[..., Mount]) -> None:
    mount = board("nano", "4")
    (mount.root / OVERRIDE / "clk_state").write_text("1\n")
    (mount.root / OVERRIDE / "clk_update_rate").write_text("800000000\n")
    before = memory(mount)
    assert before == {"enables": 1, "held_hz": 800_000_000, "locked": False, "unbalanced": 0}
    device = JetsonDevice(mount.root)
    found = device.snapshot()
    device.apply(PowerMode(mem_mhz=204.0))
    assert memory(mount)["held_hz"] == 204_000_000
    JetsonDevice(mount.root).restore(found)
    assert memory(mount) == before


@pytest.mark.parametrize(
    ("cell", "cpu_mhz", "gpu_mhz"),
    [
        (("nano", "4"), 921.6, 614.4),
        (("tx2", "4"), 2035.2, 1134.75),
        (("xavier-nx", "4"), 1420.8, 1109.25),
        (("orin-nano", "6"), 1510.4, 624.75),
    ],
)
def test_caps_mean_the_nearest_clock(
    board: Callable[..., Mount], cell: tuple[str, str], cpu_mhz: float, gpu_mhz: float
) -> None:
    mount = board(*cell)
    highest = JetsonDevice(mount.root).space.highest
    assert (highest.cpu_mhz, highest.gpu_mhz) == (cpu_mhz, gpu_mhz)
    shown = number(mount, f"{POLICY}/scaling_max_freq") / 1e3, number(mount, f"{CELLS[cell].tree.gpu}/max_freq") / 1e6
    assert (highest.cpu_mhz, highest.gpu_mhz) == shown, "what nvpmodel set is what it allows"


# What comes later, and what is busy


def test_a_gpu_that_is_first_used_later_is_found_then(pool: Boards) -> None:
    mount = pool.board("orin-nx", "6", awake=False)
    device = JetsonDevice(mount.root)
    assert device.space.knob("gpu_mhz") is None
    assert "railgate" in next(item.remedy for item in device.capabilities() if item.name == "gpu_mhz")
    found = mount.settled()
    mount.tell("use_gpu")
    with Session(device) as session:
        session.apply(PowerMode(gpu_mhz=408.0))
        assert number(mount, "sys/class/devfreq/17000000.gpu/max_freq") == 408_000_000
    assert mount.settled()[0] == found[0]


def test_a_gpu_that_is_asleep_again_has_nothing_to_put_back(pool: Boards) -> None:
    mount = pool.board("orin-nx", "6")
    snapshot = JetsonDevice(mount.root).snapshot()
    mount.tell("boot")
    JetsonDevice(mount.root).restore(snapshot)


@pytest.mark.parametrize("cell", [("tx2-nx", "4"), ("agx-orin", "6")])
def test_rights_that_come_a_moment_after_the_core_are_waited_for(
    board: Callable[..., Mount], cell: tuple[str, str]
) -> None:
    mount = board(*cell)
    cores = CELLS[cell].tree.clusters[1][0]
    for core in cores:
        (mount.root / f"{CPU}/cpu{core}/online").write_text("0\n")
    found = mount.settled()
    device = JetsonDevice(mount.root)
    snapshot = device.snapshot()
    for _ in range(3):
        device.apply(PowerMode(cpu_cores=device.space.highest.cpu_cores, cpu_mhz=device.space.lowest.cpu_mhz))
        device.restore(snapshot)
        if cell[1] == "4":  # its files are away while it is off, and so is what they held
            assert json.loads(mount.settled()[0])["online"] == json.loads(found[0])["online"]
        else:
            assert mount.settled() == found


def test_a_busy_kernel_is_asked_again(board: Callable[..., Mount]) -> None:
    mount = board("orin-nano-super", "6.2")
    mount.tell("faults", "0.3")
    device = JetsonDevice(mount.root)
    found, snapshot = mount.settled(), device.snapshot()
    for mode in (device.space.lowest, device.space.highest, device.space[77]):
        device.apply(mode)
        device.restore(snapshot)
        assert mount.settled(0.0) == found
    assert all(device.read_power().power_w > 0 for _ in range(50))


def test_limits_of_a_cluster_that_is_off_are_left_alone(board: Callable[..., Mount]) -> None:
    mount = board("agx-orin", "6")  # in its 30 W mode: the third cluster is off, and its files refuse to be written
    device = JetsonDevice(mount.root)
    before = (mount.root / f"{CPU}/cpu8/cpufreq/scaling_max_freq").read_text()
    device.apply(PowerMode(cpu_cores=3, cpu_mhz=576.0))
    assert (mount.root / f"{CPU}/cpu8/cpufreq/scaling_max_freq").read_text() == before


# Heat


@pytest.mark.parametrize(("part", "mode"), [("cpu", PowerMode(cpu_mhz=576.0)), ("gpu", PowerMode(gpu_mhz=318.75))])
def test_a_limit_that_heat_has_lowered_is_not_put_back_lowered(
    board: Callable[..., Mount], part: str, mode: PowerMode
) -> None:
    mount = board("agx-orin", "5")
    found = mount.settled()
    mount.tell("heat", f"{part} 9")
    assert mount.settled() != found
    device = JetsonDevice(mount.root)
    snapshot = device.snapshot()
    device.apply(mode)
    mount.tell("heat", f"{part} 0")
    device.restore(snapshot)
    assert mount.settled() == found


def test_a_limit_lower_than_heats_own_is_the_users_and_kept(board: Callable[..., Mount]) -> None:
    mount = board("agx-orin", "5")
    (mount.root / f"{POLICY}/scaling_max_freq").write_text("576000\n")
    found = mount.settled()
    mount.tell("heat", "cpu 9")
    device = JetsonDevice(mount.root)
    snapshot = device.snapshot()
    device.apply(PowerMode(cpu_mhz=192.0))
    mount.tell("heat", "cpu 0")
    device.restore(snapshot)
    assert mount.settled() == found


def test_setting_and_putting_back_while_it_is_hot_is_no_error(board: Callable[..., Mount]) -> None:
    mount = board("agx-orin", "5")
    found = mount.settled()
    device = JetsonDevice(mount.root)
    snapshot = device.snapshot()
    mount.tell("heat", "cpu 20")
    device.apply(PowerMode(cpu_mhz=1728.0))
    assert "thermal" in device.read_state().throttle_reasons[0]
    assert foreign_changes(device) == ()
    device.restore(snapshot)
    mount.tell("heat", "cpu 0")
    assert mount.settled() == found


# Others at the same knobs


def test_what_others_change_is_said_once_and_then_put_back(board: Callable[..., Mount]) -> None:
    mount = board("agx-orin", "6")
    found = mount.settled()
    with Session(JetsonDevice(mount.root)) as session:
        device = session.device
        assert foreign_changes(device) == ()
        session.apply(PowerMode(cpu_cores=2, cpu_mhz=576.0, gpu_mhz=306.0, mem_mhz=665.6))
        assert foreign_changes(device) == ()
        mount.tell("nvpmodel", "2")  # its service, run again: cores and limits as in the mode, whose number stays
        said = foreign_changes(device)
        assert any("17000000.gpu/max_freq was set to 306000000 and now reads 612000000" in change for change in said)
        assert any("cpu5/online was set to 0 and now reads 1" in change for change in said)
        assert not any("/emc/" in change for change in said)
        assert foreign_changes(device) == ()
        session.apply(PowerMode(gpu_mhz=408.0))
        assert foreign_changes(device) == ()
    assert mount.settled() == found
    assert foreign_changes(device) == ()


def test_a_change_that_was_overwritten_before_anyone_asked_is_still_said(board: Callable[..., Mount]) -> None:
    mount = board("orin-nano", "5")
    device = JetsonDevice(mount.root)
    device.apply(PowerMode(gpu_mhz=306.0))
    (mount.root / "sys/class/devfreq/17000000.ga10b/max_freq").write_text("612000000\n")
    device.apply(PowerMode(gpu_mhz=408.0))
    assert number(mount, "sys/class/devfreq/17000000.ga10b/max_freq") == 408_000_000
    assert ["612000000" in change for change in foreign_changes(device)] == [True]


def test_a_memory_clock_that_another_takes_is_seen(board: Callable[..., Mount]) -> None:
    mount = board("nano", "4")
    device = JetsonDevice(mount.root)
    device.apply(PowerMode(mem_mhz=204.0))
    assert foreign_changes(device) == ()
    (mount.root / OVERRIDE / "clk_update_rate").write_text("1600000000\n")
    assert ["1600000000" in change for change in foreign_changes(device)] == [True]


# Who may, and what the release does not tell


def test_anyone_reads_the_power_of_a_board_whose_rail_names_are_sealed(board: Callable[..., Mount]) -> None:
    for name, total in (
        ("nano", "POM_5V_IN"),
        ("tx2", "VDD_IN"),
        ("agx-xavier", "GPU + CPU + SOC + CV + VDDRQ + SYS5V"),
    ):
        mount = board(name, "4")
        seen = as_nobody(lambda root=mount.root: JetsonDevice(root).capabilities())
        power = next(item for item in seen if item.name == "power")
        assert (power.usable, power.detail) == (True, f"total of {total}")
        assert as_nobody(lambda root=mount.root: JetsonDevice(root).read_power()).power_w > 0


def test_nobody_sets_nothing_and_is_told_what_would_permit_it(board: Callable[..., Mount]) -> None:
    mount = board("orin-nano", "6")
    found = mount.settled()
    with pytest.raises(NotPermittedError):
        as_nobody(lambda: JetsonDevice(mount.root).apply(PowerMode(gpu_mhz=306.0)))
    assert mount.settled() == found


@pytest.mark.parametrize("cell", [key for key in SETTABLE if key[1] == "7"])
def test_memory_is_left_alone_where_nobody_has_tried_it(board: Callable[..., Mount], cell: tuple[str, str]) -> None:
    mount = board(*cell)
    assert (mount.root / BPMP / "rate").exists(), "the files alone do not tell"
    device = JetsonDevice(mount.root)
    assert device.space.knob("mem_mhz") is None
    assert "Nobody has tried" in next(item.detail for item in device.capabilities() if item.name == "mem_mhz")


@pytest.mark.parametrize(
    ("cell", "largest"), [(("orin-nano-super", "6.2"), 2), (("xavier-nx", "5"), 2), (("nano", "4"), 0)]
)
def test_the_largest_mode_is_named_by_its_caps(
    board: Callable[..., Mount], cell: tuple[str, str], largest: int
) -> None:
    mount = board(*cell)
    told = next(item.detail for item in JetsonDevice(mount.root).capabilities() if item.name == "nvpmodel")
    assert told.endswith(f"sudo nvpmodel -m {largest}") or told.startswith(f"mode {largest} ")


# Killed, and put back from outside


@pytest.mark.parametrize("cell", [("nano", "4"), ("agx-orin", "6")])
def test_the_command_line_puts_back_what_a_killed_session_left(
    board: Callable[..., Mount], cell: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount = board(*cell)
    found = mount.settled()
    monkeypatch.setenv("UNDERWATT_STATE", str(tmp_path / "state"))
    child = os.fork()
    if child == 0:
        with Session(device := JetsonDevice(mount.root)) as session:
            session.apply(device.space.lowest)
            os.kill(os.getpid(), 9)
    os.waitpid(child, 0)
    assert mount.settled() != found
    done = subprocess.run([sys.executable, "-m", "underwatt", "restore"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert mount.settled(0.0) == found


def test_any_tree_can_be_given_a_kernels_manners(tmp_path: Path) -> None:
    SysfsBoard.create(VirtualBoard(BOARDS["orin-nano"]), tmp_path / "tree")
    with mounted_over(tmp_path / "tree", "6", tmp_path / "board") as mount:
        mount.tell("use_gpu")
        found = mount.settled()
        device = JetsonDevice(mount.root)
        assert device.info.simulated
        snapshot = device.snapshot()
        device.apply(device.space.lowest)
        device.restore(snapshot)
        assert mount.settled(0.0) == found
