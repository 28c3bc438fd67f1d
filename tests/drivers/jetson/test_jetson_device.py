from __future__ import annotations

import errno
import shutil
from typing import TYPE_CHECKING

import jetson_trees as trees
import pytest
from hypothesis import given, strategies as st

from underwatt.device.space import ModeSpace
from underwatt.drivers.jetson import JetsonBackend
from underwatt.drivers.jetson.device import JetsonDevice
from underwatt.errors import ApplyError, ModeError, NoDeviceError, NotPermittedError
from underwatt.helper.board import allowed_values
from underwatt.helper.board_facts import Caps
from underwatt.helper.knobs import Tables
from underwatt.helper.sysfs import Presence, Sysfs
from underwatt.records import Capability, PowerMode

if TYPE_CHECKING:
    from pathlib import Path

ORIN = trees.ORIN_AGX_JP5
RATE, LOCK = ORIN.emc_files


def kernel_device(root: Path, tree: trees.Tree) -> tuple[JetsonDevice, trees.KernelSysfs]:
    sysfs = trees.KernelSysfs(trees.plant(root, tree))
    return JetsonDevice(sysfs=sysfs), sysfs


def values(device: JetsonDevice, name: str) -> tuple[float, ...]:
    knob = device.space.knob(name)
    assert knob is not None
    return knob.values


# Who it is


def test_identity_and_address(tmp_path: Path) -> None:
    device = JetsonDevice(trees.plant(tmp_path, ORIN))
    assert device.info.name == "Jetson AGX Orin"
    assert device.info.id == f"agx-orin-1420921055555@{tmp_path}"
    assert device.info.address == f"jetson:{tmp_path}"
    assert device.info.software == {"l4t": "R35.4.1"}
    assert not device.info.simulated
    again = JetsonBackend().open(device.info.address.partition(":")[2])
    assert again.info == device.info


def test_a_virtual_tree_is_called_simulated(tmp_path: Path) -> None:
    trees.plant(tmp_path, ORIN)
    path = tmp_path / "proc/device-tree/compatible"
    path.write_text(f"{path.read_text()}underwatt,virtual\0")
    info = JetsonDevice(tmp_path).info
    assert info.simulated
    assert "simulated" in info.name


def test_the_backend_is_at_home_on_a_jetson_only(tmp_path: Path) -> None:
    board, plain = trees.plant(tmp_path / "board", trees.NANO), tmp_path / "plain"
    plain.mkdir()
    assert (JetsonBackend(str(board)).affinity(), JetsonBackend(str(board)).find()) == (1.0, (str(board),))
    assert (JetsonBackend(str(plain)).affinity(), JetsonBackend(str(plain)).find()) == (0.0, ())
    assert JetsonBackend(str(board)).open("").info.name == "Jetson Nano"
    for nothing in (plain, tmp_path / "absent", board / "etc/nvpmodel.conf"):
        with pytest.raises(NoDeviceError, match="no Jetson at"):
            JetsonBackend().open(str(nothing))


# What it allows


def test_spaces_have_the_published_sizes(tmp_path: Path) -> None:
    orin = JetsonDevice(trees.plant(tmp_path / "orin", ORIN))
    assert len(orin.space) == 12 * 29 * 13 * 4 == 18_096
    assert values(orin, "gpu_mhz")[-1] == 1300.5
    nano = JetsonDevice(trees.plant(tmp_path / "nano", trees.NANO))
    assert values(nano, "gpu_mhz") == pytest.approx([76.8 * step for step in range(1, 13)])


@pytest.mark.parametrize("name", trees.ALL)
def test_asking_changes_nothing(tmp_path: Path, name: str) -> None:
    device, sysfs = kernel_device(tmp_path, trees.ALL[name])
    before = trees.dump(tmp_path)
    len(device.space), device.capabilities(), device.snapshot(), device.read_state(), device.info
    device.close()
    assert sysfs.writes == []
    assert trees.dump(tmp_path) == before


def test_the_active_mode_caps_the_space_and_a_switch_is_followed(tmp_path: Path) -> None:
    device = JetsonDevice(trees.plant(tmp_path, ORIN))
    assert values(device, "cpu_cores")[-1] == 12
    trees.put(tmp_path, "var/lib/nvpmodel/status", "pmode:0002")
    assert values(device, "cpu_cores")[-1] == 8
    assert values(device, "cpu_mhz")[-1] == 1728
    assert values(device, "gpu_mhz")[-1] == 624.75
    assert values(device, "mem_mhz")[-1] == 2133


@pytest.mark.parametrize("status", ["pmode:0099", "garbage", ""])
def test_custom_and_unknown_modes_do_not_crash(tmp_path: Path, status: str) -> None:
    trees.plant(tmp_path, ORIN)
    trees.put(tmp_path, "var/lib/nvpmodel/status", status)
    device = JetsonDevice(tmp_path)
    assert len(device.space) == 18_096
    device.apply(device.space.lowest)


def test_a_corrupt_configuration_costs_the_caps_not_the_device(tmp_path: Path) -> None:
    trees.plant(tmp_path, ORIN)
    trees.put(tmp_path, "etc/nvpmodel.conf", "< POWER_MODEL ID=x >")
    device = JetsonDevice(tmp_path)
    assert len(device.space) == 18_096
    entry = next(item for item in device.capabilities() if item.name == "nvpmodel")
    assert not entry.usable
    assert "Line 1" in entry.detail


def test_above_the_cap_says_how_to_lift_it(tmp_path: Path) -> None:
    trees.plant(tmp_path, ORIN)
    trees.put(tmp_path, "var/lib/nvpmodel/status", "pmode:0002")
    with pytest.raises(ModeError, match=r"nearest is 624.75.* mode 2.* caps it.*sudo nvpmodel -m 0"):
        JetsonDevice(tmp_path).apply(PowerMode(gpu_mhz=1300.5))


def test_a_mode_that_would_need_a_reboot_is_refused(tmp_path: Path) -> None:
    trees.plant(tmp_path, trees.ORIN_NANO)
    trees.put(tmp_path, "var/lib/nvpmodel/status", "pmode:0001")
    device, before = JetsonDevice(tmp_path), trees.dump(tmp_path)
    with pytest.raises(ModeError, match=r"TPC_PG_MASK, which needs a reboot.*never reboots a board"):
        device.apply(PowerMode(gpu_mhz=612))
    assert trees.dump(tmp_path) == before


def test_thor_is_read_only_and_says_why(tmp_path: Path) -> None:
    device = JetsonDevice(trees.plant(tmp_path, trees.THOR))
    assert device.space.knobs == ()
    assert device.snapshot() == {}
    assert device.read_power().power_w == pytest.approx(30)
    knobs = [item for item in device.capabilities() if item.kind == "knob"]
    assert len(knobs) == 4
    assert all(not item.usable and "read-only" in item.detail and item.remedy for item in knobs)
    with pytest.raises(ModeError, match="no knob gpu_mhz"):
        device.apply(PowerMode(gpu_mhz=315))


# What it does


@pytest.mark.parametrize("name", trees.SETTABLE)
def test_a_mode_takes_on_every_board(tmp_path: Path, name: str) -> None:
    tree = trees.SETTABLE[name]
    device, _ = kernel_device(tmp_path, tree)
    mode = device.space[len(device.space) // 2]
    device.apply(mode)
    sysfs = Sysfs(tmp_path)
    assert sysfs.read_int(f"{tree.gpu}/min_freq") == sysfs.read_int(f"{tree.gpu}/max_freq")
    assert sysfs.read_int(f"{tree.gpu}/max_freq") / 1e6 == pytest.approx(mode.gpu_mhz)
    policy = f"{trees.CPU}/cpu0/cpufreq"
    assert sysfs.read_int(f"{policy}/scaling_min_freq") == sysfs.read_int(f"{policy}/scaling_max_freq")
    assert sysfs.read_int(f"{policy}/scaling_max_freq") / 1e3 == pytest.approx(mode.cpu_mhz)
    assert sysfs.read_int(tree.emc_files[0]) / 1e6 == pytest.approx(mode.mem_mhz)
    assert sysfs.read_int(tree.emc_files[1]) == 1
    state = device.read_state()
    assert state.running.cpu_cores == mode.cpu_cores
    assert state.running.mem_mhz == pytest.approx(mode.mem_mhz)


def test_the_state_tells_clocks_rails_temperatures(tmp_path: Path) -> None:
    device = JetsonDevice(trees.plant(tmp_path, ORIN))
    state = device.read_state()
    assert state.running == PowerMode(cpu_cores=12, cpu_mhz=192.0, gpu_mhz=216.75, mem_mhz=3199.0)
    assert state.rails_w["VDD_GPU_SOC"] == pytest.approx(3.0)
    assert state.temperatures_c == {"CPU": 41.5, "gpu": 39.0}
    assert state.throttle_reasons == ()


def test_other_clusters_take_their_nearest_clock_within_their_cap(tmp_path: Path) -> None:
    device, sysfs = kernel_device(tmp_path / "tx2", trees.TX2_NX)
    device.apply(PowerMode(cpu_mhz=1420.8))
    assert sysfs.read_int(f"{trees.CPU}/cpu1/cpufreq/scaling_max_freq") == 960_000
    trees.plant(tmp_path / "orin", ORIN)
    trees.put(tmp_path / "orin", "var/lib/nvpmodel/status", "pmode:0002")
    sysfs = trees.KernelSysfs(tmp_path / "orin")
    JetsonDevice(sysfs=sysfs).apply(PowerMode(cpu_mhz=1728))
    assert sysfs.read_int(f"{trees.CPU}/cpu0/cpufreq/scaling_max_freq") == 1_728_000
    assert sysfs.read_int(f"{trees.CPU}/cpu4/cpufreq/scaling_max_freq") == 1_267_200


def test_cores_are_chosen_from_the_first_cluster_first(tmp_path: Path) -> None:
    device, sysfs = kernel_device(tmp_path, trees.TX2_NX)
    device.apply(PowerMode(cpu_cores=5))
    online = [core for core in trees.TX2_NX.cores if sysfs.read_word(f"{trees.CPU}/cpu{core}/online") == "1"]
    assert online == [0, 1, 3, 4, 5]


def test_core_0_offline_is_refused(tmp_path: Path) -> None:
    device, sysfs = kernel_device(tmp_path, ORIN)
    assert values(device, "cpu_cores")[0] == 1
    assert f"{trees.CPU}/cpu0/online" not in device.snapshot()
    device.apply(PowerMode(cpu_cores=1))
    assert (f"{trees.CPU}/cpu0/online", "0") not in sysfs.writes


# Bad input and faults


def test_a_clock_off_the_table_names_the_nearest_and_writes_nothing(tmp_path: Path) -> None:
    device, sysfs = kernel_device(tmp_path, ORIN)
    with pytest.raises(ModeError, match=r"gpu_mhz = 600 .* nearest is 624.75"):
        device.apply(PowerMode(cpu_cores=4, cpu_mhz=115.2, gpu_mhz=600, mem_mhz=204))
    assert sysfs.writes == []


def test_a_read_only_node_is_found_before_the_first_write(tmp_path: Path) -> None:
    device, sysfs = kernel_device(tmp_path, ORIN)
    sysfs.read_only.add(LOCK)
    with pytest.raises(NotPermittedError, match=r"may not set mem_mhz.*mrq_rate_locked.*sudo"):
        device.apply(device.space.lowest)
    assert sysfs.writes == []
    device.apply(device.space.lowest.with_knobs(mem_mhz=None))


def test_a_missing_node_is_an_error_before_the_first_write(tmp_path: Path) -> None:
    device, sysfs = kernel_device(tmp_path, ORIN)
    assert device.space.knob("gpu_mhz")
    (tmp_path / ORIN.gpu / "max_freq").unlink()
    with pytest.raises(ApplyError, match=r"Cannot set gpu_mhz: .*max_freq is missing"):
        device.apply(device.space.lowest)
    assert sysfs.writes == []


@pytest.mark.parametrize(
    "path",
    [
        f"{trees.CPU}/cpu9/online",
        f"{trees.CPU}/cpu4/cpufreq/scaling_max_freq",
        f"{ORIN.gpu}/min_freq",
        f"{ORIN.gpu}/max_freq",
        RATE,
        LOCK,
    ],
)
@pytest.mark.parametrize("number", [errno.EINVAL, errno.EBUSY, errno.EIO, errno.ENOENT])
def test_a_write_that_fails_midway_puts_back_what_was_changed(tmp_path: Path, path: str, number: int) -> None:
    device, sysfs = kernel_device(tmp_path, ORIN)
    before = trees.dump(tmp_path)
    sysfs.refuse[path] = number
    with pytest.raises(ApplyError, match=r"Cannot write .* What had been changed was put back") as caught:
        device.apply(PowerMode(cpu_cores=8, cpu_mhz=576, gpu_mhz=318.75, mem_mhz=204))
    assert path in str(caught.value)
    assert trees.dump(tmp_path) == before


def test_a_refusal_that_only_shows_when_writing_says_what_would_permit(tmp_path: Path) -> None:
    device, sysfs = kernel_device(tmp_path, ORIN)
    before = trees.dump(tmp_path)
    sysfs.refuse[LOCK] = errno.EPERM  # a locked-down kernel
    with pytest.raises(NotPermittedError, match=r"put back.*sudo"):
        device.apply(device.space.lowest)
    assert trees.dump(tmp_path) == before


def test_a_silently_rounded_write_is_an_error_and_is_put_back(tmp_path: Path) -> None:
    device, sysfs = kernel_device(tmp_path, ORIN)
    before = trees.dump(tmp_path)
    sysfs.round_to[f"{ORIN.gpu}/max_freq"] = 216_750_000
    with pytest.raises(ApplyError, match=r"max_freq was asked for 318750000 and took 216750000"):
        device.apply(PowerMode(gpu_mhz=318.75))
    sysfs.round_to.clear()
    device.restore({**device.snapshot(), f"{ORIN.gpu}/max_freq": "1300500000\n"})
    assert trees.dump(tmp_path) == before


def test_when_putting_back_fails_too_the_error_says_so(tmp_path: Path) -> None:
    device, sysfs = kernel_device(tmp_path, ORIN)
    sysfs.round_to[f"{ORIN.gpu}/max_freq"] = 216_750_000
    with pytest.raises(ApplyError, match=r"Putting back what was changed failed too: .*max_freq"):
        device.apply(PowerMode(gpu_mhz=318.75))


def test_a_gpu_that_sleeps_has_no_knob_and_says_how_to_wake_it(tmp_path: Path) -> None:
    trees.plant(tmp_path, trees.XAVIER_NX)
    shutil.rmtree(tmp_path / trees.XAVIER_NX.gpu)
    trees.put(tmp_path, "sys/devices/17000000.gv11b/railgate_enable", 1)
    device = JetsonDevice(tmp_path)
    assert device.space.knob("gpu_mhz") is None
    entry = next(item for item in device.capabilities() if item.name == "gpu_mhz")
    assert not entry.usable
    assert "railgate_enable" in entry.remedy


TABLES = Tables(
    core_order=(0, 3, 1, 2),
    fixed_cores=1,
    first_cluster=(0, 3),
    cpu_khz=(100_000, 200_000, 300_000),
    gpu_hz=(100_000_000, 200_500_000),
    emc_hz=(204_000_000, 665_600_000),
)


def build_space(tables: Tables, caps: Caps) -> ModeSpace:
    return ModeSpace.of_values(allowed_values(tables, caps))


def test_the_space_is_the_product_of_the_tables() -> None:
    space = build_space(TABLES, Caps())
    assert {knob.name: knob.values for knob in space.knobs} == {
        "cpu_cores": (1, 2, 3, 4),
        "cpu_mhz": (100, 200, 300),
        "gpu_mhz": (100, 200.5),
        "mem_mhz": (204, 665.6),
    }


def test_caps_shorten_the_tables() -> None:
    caps = Caps(gpu_hz=150_000_000, emc_hz=1, cpu_khz={0: 250_000, 1: 100_000}, cores_off=frozenset({3, 1}))
    space = build_space(TABLES, caps)
    assert TABLES.allowed_cores(caps) == (0, 2)
    assert {knob.name: knob.values for knob in space.knobs} == {
        "cpu_cores": (1, 2),
        "cpu_mhz": (100, 200),
        "gpu_mhz": (100,),
        "mem_mhz": (204,),
    }
    assert build_space(TABLES, Caps(all_cpu_khz=150_000)).highest.cpu_mhz == 100


def test_a_board_without_tables_has_no_knobs() -> None:
    assert build_space(Tables(), Caps(gpu_hz=5)).knobs == ()


_caps = st.one_of(st.none(), st.integers(1, 10**10))


@given(_caps, _caps, _caps, st.frozensets(st.integers(1, 5)))
def test_any_caps_leave_a_space(gpu: int | None, emc: int | None, cpu: int | None, off: frozenset[int]) -> None:
    space = build_space(TABLES, Caps(gpu_hz=gpu, emc_hz=emc, all_cpu_khz=cpu, cores_off=off))
    assert len(space.knobs) == 4
    assert space.highest in build_space(TABLES, Caps())


class Unprivileged(Sysfs):
    """A user without root: nothing may be written, debugfs may not even be entered."""

    def settable(self, path: str) -> bool:
        return False

    def presence(self, path: str) -> Presence:
        return Presence.HIDDEN if path.startswith("sys/kernel/debug/") else super().presence(path)

    def _pull(self, path: str) -> bytes:
        if path.startswith("sys/kernel/debug/"):
            raise PermissionError(13, "no")
        return super()._pull(path)


def listed(device: JetsonDevice) -> dict[str, Capability]:
    return {item.name: item for item in device.capabilities()}


def test_root_may_use_everything(tmp_path: Path) -> None:
    items = listed(JetsonDevice(trees.plant(tmp_path, trees.ORIN_AGX_JP5)))
    assert all(item.usable and not item.remedy for item in items.values())
    assert items["gpu_mhz"].detail == "114.75 to 1300.5 MHz, 13 values"
    assert items["cpu_cores"].detail == "1 to 12, 12 values"
    assert items["power"].detail == "total of VDD_GPU_SOC + VDD_CPU_CV + VIN_SYS_5V0"
    assert items["nvpmodel"].detail == "mode 0 (MAXN) is active"


@pytest.mark.parametrize("name", trees.SETTABLE)
def test_an_unprivileged_user_sees_every_knob_and_what_would_permit_it(tmp_path: Path, name: str) -> None:
    root = trees.plant(tmp_path, trees.SETTABLE[name])
    device = JetsonDevice(sysfs=Unprivileged(root))
    items = listed(device)
    for knob in ("cpu_cores", "cpu_mhz", "gpu_mhz", "mem_mhz"):
        assert device.space.knob(knob)
        assert not items[knob].usable
        assert "sudo" in items[knob].remedy
        assert "helper install" in items[knob].remedy
    before = trees.dump(root)
    for mode in (PowerMode(cpu_cores=1), device.space.lowest):
        with pytest.raises(NotPermittedError, match="may not set cpu_cores"):
            device.apply(mode)
    assert trees.dump(root) == before
    device.restore(device.snapshot())


def test_caps_are_named(tmp_path: Path) -> None:
    trees.plant(tmp_path, trees.ORIN_AGX_JP5)
    trees.put(tmp_path, "var/lib/nvpmodel/status", "pmode:0002")
    assert "within nvpmodel mode 2 30W" in listed(JetsonDevice(tmp_path))["gpu_mhz"].detail


def test_debugfs_that_is_not_mounted(tmp_path: Path) -> None:
    trees.plant(tmp_path, trees.ORIN_NANO)
    shutil.rmtree(tmp_path / "sys/kernel/debug")
    device = JetsonDevice(tmp_path)
    item = listed(device)["mem_mhz"]
    assert device.space.knob("mem_mhz") is None
    assert not item.usable
    assert "mount -t debugfs" in item.remedy


def test_memory_clocks_that_cannot_be_pinned(tmp_path: Path) -> None:
    trees.plant(tmp_path, trees.ORIN_NANO)
    shutil.rmtree(tmp_path / trees.BPMP)
    trees.put(tmp_path, "sys/kernel/debug/clk/clk_summary", "")
    item = listed(JetsonDevice(tmp_path))["mem_mhz"]
    assert not item.usable
    assert item.remedy


def test_an_unknown_board_without_root(tmp_path: Path) -> None:
    trees.plant(tmp_path, trees.ORIN_NANO)
    trees.put(tmp_path, "proc/device-tree/model", "New\0")
    trees.put(tmp_path, "proc/device-tree/compatible", "nvidia,tegra999\0")
    item = listed(JetsonDevice(sysfs=Unprivileged(tmp_path)))["mem_mhz"]
    assert not item.usable
    assert "sudo" in item.remedy


def test_a_container_without_sys(tmp_path: Path) -> None:
    trees.plant(tmp_path, trees.ORIN_NANO)
    shutil.rmtree(tmp_path / "sys")
    device = JetsonDevice(tmp_path)
    assert device.space.knobs == ()
    items = listed(device)
    assert not any(items[name].usable for name in ("cpu_cores", "gpu_mhz", "mem_mhz", "power", "temperature"))
    assert all(item.usable or item.remedy for item in items.values())
    assert device.read_state().running == PowerMode()


def test_a_fresh_board_is_in_the_default_mode_of_its_configuration(tmp_path: Path) -> None:
    trees.plant(tmp_path, trees.ORIN_AGX_JP5)
    (tmp_path / "var/lib/nvpmodel/status").unlink()
    conf = tmp_path / "etc/nvpmodel.conf"
    conf.write_text(conf.read_text().replace("DEFAULT=0", "DEFAULT=2"))
    device = JetsonDevice(tmp_path)
    assert device.space.highest.cpu_cores == 8
    assert listed(device)["nvpmodel"].detail.startswith("mode 2 (30W) is active; the largest is 0 (MAXN)")


def test_the_newer_cap_of_the_memory_clock_holds_too(tmp_path: Path) -> None:
    trees.plant(tmp_path, trees.ORIN_AGX_JP6)
    (tmp_path / "sys/kernel/nvpmodel_emc_cap/emc_iso_cap").unlink()
    trees.put(tmp_path, "sys/kernel/nvpmodel_clk_cap/emc", 2_133_000_000)
    device = JetsonDevice(tmp_path)
    assert device.space.highest.mem_mhz == 2133
    trees.put(tmp_path, "sys/kernel/nvpmodel_clk_cap/emc", 0)
    assert device.space.highest.mem_mhz == 3199
