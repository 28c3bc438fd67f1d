from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from typing import Any

import jetson_trees as trees
import pytest
from hypothesis import given, settings, strategies as st

from underwatt.device.session import Session, restore, set_mode
from underwatt.drivers.jetson.device import JetsonDevice
from underwatt.errors import ApplyError, NotPermittedError
from underwatt.helper.keeper import Keeper, Process
from underwatt.helper.snapshot import first_found
from underwatt.records import PowerMode

ORIN = trees.ORIN_AGX_JP5
RATE, LOCK = ORIN.emc_files
# Planting and removing a board is a few hundred system calls: in memory, where there is such a folder.
SCRATCH = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def draw_start(data: st.DataObject, root: Path, tree: trees.Tree) -> None:
    """Bring a board into any state a user may have left it in."""
    trees.plant(root, tree)
    for core in tree.cores[1:]:
        trees.put(root, f"{trees.CPU}/cpu{core}/online", int(data.draw(st.booleans(), label=f"cpu{core} online")))
    for cores, table in tree.clusters:
        low, high = sorted(data.draw(st.tuples(st.sampled_from(table), st.sampled_from(table)), label="cpu range"))
        policy = f"{trees.CPU}/cpufreq/policy{cores[0]}"
        trees.put(root, f"{policy}/scaling_min_freq", low)
        trees.put(root, f"{policy}/scaling_max_freq", high)
    low, high = sorted(data.draw(st.tuples(*[st.sampled_from(tree.gpu_hz)] * 2), label="gpu range"))
    trees.put(root, f"{tree.gpu}/min_freq", low)
    trees.put(root, f"{tree.gpu}/max_freq", high)
    trees.put(root, tree.emc_files[0], data.draw(st.sampled_from(tree.emc_bounds), label="emc"))
    trees.put(root, tree.emc_files[1], int(data.draw(st.booleans(), label="emc locked")))


def draw_mode(data: st.DataObject, device: JetsonDevice) -> PowerMode:
    """Any allowed mode, with any of its knobs left alone."""
    mode = device.space[data.draw(st.integers(0, len(device.space) - 1), label="mode")]
    alone: Any = {name: None for name in mode.knobs() if data.draw(st.booleans(), label=f"{name} left alone")}
    return mode.with_knobs(**alone)


def board_files(root: Path, tree: trees.Tree, *, manners: bool) -> trees.KernelSysfs:
    sysfs = trees.KernelSysfs(root, manners=manners)
    for core in tree.cores if manners else ():
        sysfs.show_clocks(core, on=sysfs.read_word(f"{trees.CPU}/cpu{core}/online") == "1")
    return sysfs


boards = st.sampled_from(sorted(trees.SETTABLE))


@settings(max_examples=40, deadline=None)
@given(st.data(), boards, st.booleans())
def test_from_any_state_through_any_modes_and_back(data: st.DataObject, board: str, kernel: bool) -> None:
    tree = trees.SETTABLE[board]
    with tempfile.TemporaryDirectory(dir=SCRATCH) as folder:
        root = Path(folder)
        draw_start(data, root, tree)
        sysfs = board_files(root, tree, manners=kernel)
        before = trees.dump(root)
        device = JetsonDevice(sysfs=sysfs)
        found = dict(device.snapshot())
        for _ in range(data.draw(st.integers(1, 3), label="modes")):
            device.apply(draw_mode(data, device))
        device.restore(found)
        assert trees.dump(root) == before
        device.restore(found)
        assert trees.dump(root) == before


@settings(max_examples=40, deadline=None)
@given(st.data(), boards, st.booleans())
def test_a_kill_at_any_write_of_setting_or_restoring(data: st.DataObject, board: str, kernel: bool) -> None:
    tree = trees.SETTABLE[board]
    with tempfile.TemporaryDirectory(dir=SCRATCH) as folder:
        root = Path(folder)
        draw_start(data, root, tree)
        sysfs = board_files(root, tree, manners=kernel)
        before = trees.dump(root)
        device = JetsonDevice(sysfs=sysfs)
        found = dict(device.snapshot())
        sysfs.power_cut_at = data.draw(st.integers(0, 40), label="killed at write")
        try:
            device.apply(device.space[data.draw(st.integers(0, len(device.space) - 1), label="mode")])
            device.restore(found)
        except trees.PowerCutError:
            pass
        sysfs.power_cut_at = None
        JetsonDevice(sysfs=sysfs).restore(found)
        assert trees.dump(root) == before


@pytest.fixture
def board(tmp_path: Path) -> tuple[JetsonDevice, trees.KernelSysfs]:
    sysfs = trees.KernelSysfs(trees.plant(tmp_path, ORIN))
    return JetsonDevice(sysfs=sysfs), sysfs


Board = tuple[JetsonDevice, trees.KernelSysfs]


def test_a_snapshot_holds_exactly_what_setting_could_change(board: Board) -> None:
    device, _ = board
    paths = {f"{trees.CPU}/cpu{core}/online" for core in range(1, 12)}
    paths |= {f"{trees.CPU}/cpu{core}/cpufreq/scaling_{end}_freq" for core in (0, 4, 8) for end in ("min", "max")}
    paths |= {f"{ORIN.gpu}/min_freq", f"{ORIN.gpu}/max_freq", RATE, LOCK, "nvpmodel"}
    assert set(device.snapshot()) == paths
    assert device.snapshot()["nvpmodel"] == "0"
    assert device.snapshot()[LOCK] == "0\n"


def test_restoring_what_stands_writes_nothing(board: Board) -> None:
    device, sysfs = board
    device.restore(device.snapshot())
    assert sysfs.writes == []


def test_cores_come_before_clocks_and_memory_is_unlocked_after_its_rate(board: Board) -> None:
    device, sysfs = board
    found = device.snapshot()
    device.apply(device.space.lowest)
    sysfs.writes.clear()
    device.restore(found)
    order = [path for path, _ in sysfs.writes]
    last_core = max(at for at, path in enumerate(order) if path.endswith("/online"))
    first_clock = min(at for at, path in enumerate(order) if path.endswith("_freq"))
    assert last_core < first_clock
    assert order.index(RATE) < order.index(LOCK)


def test_a_rate_that_the_firmware_owns_is_left_to_it(board: Board) -> None:
    device, sysfs = board
    found = device.snapshot()
    Path(sysfs.full(RATE)).write_text("665600000\n")  # the firmware moved it
    device.restore(found)
    assert sysfs.writes == []


def test_every_file_that_refuses_is_named_and_the_others_are_put_back(board: Board) -> None:
    device, sysfs = board
    found = device.snapshot()
    device.apply(device.space.lowest)
    sysfs.refuse = {f"{ORIN.gpu}/max_freq": errno.EIO, f"{trees.CPU}/cpu7/online": errno.EBUSY}
    with pytest.raises(ApplyError, match=r"Not as it was found: .*ga10b/max_freq.*cpu7/online"):
        device.restore(found)
    assert sysfs.read_word(LOCK) == "0"
    assert sysfs.read_word(f"{trees.CPU}/cpu6/online") == "1"
    sysfs.refuse.clear()
    device.restore(found)
    assert dict(device.snapshot()) == dict(found)


def test_without_the_rights_it_says_so(board: Board) -> None:
    device, sysfs = board
    found = device.snapshot()
    device.apply(PowerMode(gpu_mhz=114.75))
    sysfs.refuse = {f"{ORIN.gpu}/max_freq": errno.EACCES}
    with pytest.raises(ApplyError, match="sudo underwatt restore") as caught:
        device.restore(found)
    assert not isinstance(caught.value, NotPermittedError)


def test_a_file_that_is_gone_is_named(board: Board) -> None:
    device, sysfs = board
    found = device.snapshot()
    for name in ("min_freq", "max_freq"):
        Path(sysfs.full(f"{ORIN.gpu}/{name}")).unlink()
    with pytest.raises(ApplyError, match=r"min_freq .*no such file"):
        device.restore(found)


def test_a_write_that_is_rounded_while_restoring_is_named(board: Board) -> None:
    device, sysfs = board
    found = device.snapshot()
    device.apply(PowerMode(gpu_mhz=114.75))
    sysfs.round_to[f"{ORIN.gpu}/max_freq"] = 318_750_000
    with pytest.raises(ApplyError, match=r"asked for 1300500000 and took 318750000"):
        device.restore(found)


def test_a_switched_nvpmodel_mode_is_told_after_everything_is_put_back(board: Board) -> None:
    device, sysfs = board
    found = device.snapshot()
    device.apply(PowerMode(gpu_mhz=114.75))
    trees.put(Path(sysfs.root), "var/lib/nvpmodel/status", "pmode:0002")
    with pytest.raises(ApplyError, match=r"mode was 0 and is now 2.*sudo nvpmodel -m 0"):
        device.restore(found)
    assert sysfs.read_word(f"{ORIN.gpu}/max_freq") == "1300500000"


@pytest.mark.parametrize(
    "path",
    [
        "etc/passwd",
        "../../etc/shadow",
        "sys/devices/../../etc/min_freq",
        "/etc/min_freq",
        f"{trees.CPU}/cpu0/online",
        "sys/kernel/debug/other/rate",
    ],
)
def test_a_tampered_snapshot_writes_only_what_this_driver_sets(board: Board, path: str) -> None:
    device, sysfs = board
    target = Path(sysfs.root) / path.lstrip("/").replace("../", "")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("1\n")
    snapshot = {path: "0\n", path.replace("min_freq", "max_freq"): "0\n"}
    with pytest.raises(ApplyError, match="not a file that this driver sets"):
        device.restore(snapshot)
    assert sysfs.writes == []
    assert target.read_text() == "1\n"


@pytest.mark.parametrize("text", ["", "garbage\n", "-1\n"])
def test_a_damaged_snapshot_is_refused_not_a_crash(board: Board, text: str) -> None:
    device, sysfs = board
    sysfs.refuse = {f"{ORIN.gpu}/{end}_freq": errno.EINVAL for end in ("min", "max")}
    with pytest.raises(ApplyError, match="Not as it was found"):
        device.restore({f"{ORIN.gpu}/min_freq": text, f"{ORIN.gpu}/max_freq": text})


def test_a_cluster_that_slept_when_the_snapshot_was_taken_is_not_left_pinned(board: Board) -> None:
    device, sysfs = board
    device.apply(PowerMode(cpu_cores=8))
    found = device.snapshot()
    assert f"{trees.CPU}/cpu8/cpufreq/scaling_min_freq" not in found
    device.apply(PowerMode(cpu_cores=12, cpu_mhz=115.2))
    device.restore(found)
    assert dict(device.snapshot()) == dict(found)
    policy = Path(sysfs.root) / trees.CPU / "cpufreq/policy8"
    assert (policy / "scaling_max_freq").read_text() == "2201600\n"


@pytest.mark.parametrize("through", ["session", "helper"])
def test_a_cluster_that_slept_at_first_is_not_left_pinned_by_a_second_mode(through: str, tmp_path: Path) -> None:
    root, tree = tmp_path / "root", trees.TX2_NX
    trees.plant(root, tree)
    for core in (1, 2):
        trees.put(root, f"{trees.CPU}/cpu{core}/online", 0)
    device = JetsonDevice(root, sysfs=board_files(root, tree, manners=True))
    found, clocks = dict(device.snapshot()), device._board.values()["cpu_mhz"]
    modes = [PowerMode(cpu_cores=6, cpu_mhz=mhz) for mhz in clocks[2:5]]
    if through == "session":
        with Session(device, tmp_path / "state") as session:
            for mode in modes:
                session.apply(mode)
    else:
        keeper = Keeper(device._board)
        hold, _ = keeper.begin("me", Process(os.getpid()), os.geteuid(), 60.0)
        for mode in modes:
            keeper.apply(hold, mode.knobs())
        keeper.end("lets go")
    policy = root / trees.CPU / "cpufreq/policy1"
    assert (policy / "scaling_max_freq").read_text() == "1958400\n"
    assert dict(device.snapshot()) == found


THROUGH = pytest.mark.parametrize("through", ["session", "helper", "set"])


def with_cores_off(root: Path, *cores: int) -> trees.KernelSysfs:
    trees.plant(root, ORIN)
    for core in cores:
        trees.put(root, f"{trees.CPU}/cpu{core}/online", 0)
    return board_files(root, ORIN, manners=True)


def set_and_put_back(through: str, sysfs: trees.KernelSysfs, modes: list[PowerMode]) -> None:
    """Set one mode after the other and put everything back; what sets it for good is a new process each time."""
    if through == "session":
        with Session(JetsonDevice(sysfs=sysfs)) as session:
            for mode in modes:
                session.apply(mode)
    elif through == "helper":
        keeper = Keeper(JetsonDevice(sysfs=sysfs)._board)
        hold, _ = keeper.begin("me", Process(os.getpid()), os.geteuid(), 60.0)
        for mode in modes:
            keeper.apply(hold, mode.knobs())
        keeper.end("lets go")
    else:
        for mode in modes:
            set_mode(JetsonDevice(sysfs=sysfs), mode)
        assert [error for _, error in restore(open_address=lambda _: JetsonDevice(sysfs=sysfs))] == [None]


@THROUGH
def test_what_was_set_of_a_cluster_that_slept_is_not_taken_for_found_by_a_later_process(
    through: str, tmp_path: Path
) -> None:
    sysfs = with_cores_off(root := tmp_path / "root", 8, 9, 10, 11)
    before = trees.dump(root)
    modes = [PowerMode(cpu_cores=12, cpu_mhz=115.2), PowerMode(gpu_mhz=114.75), PowerMode(cpu_mhz=192.0)]
    set_and_put_back(through, sysfs, modes)
    assert trees.dump(root) == before
    policy = root / trees.CPU / "cpufreq/policy8"
    assert [(policy / f"scaling_{end}_freq").read_text() for end in ("min", "max")] == ["115200\n", "2201600\n"]


@THROUGH
@pytest.mark.parametrize("mhz", [115.2, None])
def test_a_cluster_that_shows_by_another_core_meanwhile_is_put_back_by_the_one_that_showed_it(
    through: str, mhz: float | None, tmp_path: Path
) -> None:
    """Its clocks are in the folders of the cores that are on: of core 9 at first, then of core 8, which ends off."""
    sysfs = with_cores_off(root := tmp_path / "root", 8)
    trees.put(root, f"{trees.CPU}/cpufreq/policy8/scaling_max_freq", 1_190_400)
    before = trees.dump(root)
    modes = [PowerMode(cpu_cores=12, cpu_mhz=mhz), PowerMode(gpu_mhz=114.75), PowerMode(cpu_cores=8)]
    set_and_put_back(through, sysfs, modes)
    assert trees.dump(root) == before


def test_what_shows_later_for_another_reason_is_found_then() -> None:
    online, clock = f"{trees.CPU}/cpu4/online", f"{trees.CPU}/cpu4/cpufreq/scaling_max_freq"
    gpu = f"{ORIN.gpu}/max_freq"
    now = {online: "1\n", clock: "5\n", gpu: "7\n", "nvpmodel": "2"}
    assert first_found({}, now) == now
    assert first_found({online: "1\n", "nvpmodel": "0"}, now) == {**now, "nvpmodel": "0"}
    assert first_found({online: "0\n"}, now) == {online: "0\n", gpu: "7\n", "nvpmodel": "2"}
    assert first_found({online: "0\n", clock: "3\n"}, now)[clock] == "3\n", "some show the clocks of cores that are off"


def test_a_board_as_hot_as_can_be_is_not_taken_for_pinned_at_its_highest_clock(board: Board) -> None:
    device, sysfs = board
    root = Path(sysfs.root)
    trees.put(root, "sys/class/thermal/cooling_device1/type", "devfreq-17000000.gpu")
    trees.put(root, "sys/class/thermal/cooling_device1/cur_state", len(ORIN.gpu_hz) - 1)
    trees.put(root, f"{ORIN.gpu}/max_freq", ORIN.gpu_hz[0])
    found = device.snapshot()
    assert int(found[f"{ORIN.gpu}/min_freq"]) == ORIN.gpu_hz[0]
    assert int(found[f"{ORIN.gpu}/max_freq"]) > ORIN.gpu_hz[0], "what heat has lowered is not put back lowered"
