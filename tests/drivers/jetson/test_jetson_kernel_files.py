from __future__ import annotations

from pathlib import Path

import pytest
from board_matrix import CELLS, plant
from jetson_trees import CPU, put

from underwatt.drivers.jetson.device import JetsonDevice, conf_text, mode_name
from underwatt.helper.board_facts import parse_conf


@pytest.fixture(params=[("nano", "4"), ("agx-xavier", "5"), ("orin-nano-super", "6.2"), ("thor", "7")], ids="-".join)
def tree(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return plant(tmp_path / "tree", CELLS[request.param])


def again(files: dict[str, str], folder: Path) -> JetsonDevice:
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(text.encode("latin-1"))
    return JetsonDevice(folder)


def test_the_driver_finds_the_same_board_in_the_files(tree: Path, tmp_path: Path) -> None:
    board = JetsonDevice(tree)
    copy = again(board.kernel_files(), tmp_path / "copy")
    assert copy.info.name == board.info.name
    assert copy.info.software == board.info.software
    assert [(k.name, k.values) for k in copy.space.knobs] == [(k.name, k.values) for k in board.space.knobs]
    assert copy.stock_modes() == board.stock_modes()
    assert copy.read_state().rails_w == board.read_state().rails_w
    assert copy.read_power().power_w == board.read_power().power_w


def test_the_vendors_texts_are_written_again(tree: Path) -> None:
    files = JetsonDevice(tree).kernel_files()
    assert "GCID" not in files.get("etc/nv_tegra_release", "")
    assert "#" not in files.get("etc/nvpmodel.conf", "")


def test_power_modes_keep_their_caps_and_lose_names_and_lines_of_their_owners() -> None:
    conf = parse_conf(
        "< PARAM TYPE=FILE NAME=GPU >\nMAX_FREQ /sys/devices/gpu/max_freq\n"
        "< PARAM TYPE=FILE NAME=ALICE >\nSECRET /home/alice/key\n"
        "< POWER_MODEL ID=0 NAME=MAXN >\nGPU MAX_FREQ -1\nTPC_POWER_GATING TPC_PG_MASK 0x1\n"
        "< POWER_MODEL ID=7 NAME=ALICES_MODE >\nGPU MAX_FREQ 640000000\nALICE SECRET 42\n< PM_CONFIG DEFAULT=0 >\n"
    )
    text = conf_text(conf)
    assert "alice" not in text.lower()
    found = parse_conf(text)
    assert {i: mode.name for i, mode in found.modes.items()} == {0: "MAXN", 7: "CUSTOM"}
    assert found.caps(7) == conf.caps(7)
    assert found.default_id == 0
    assert found.reboot_reasons(0, 7) == conf.reboot_reasons(0, 7)


@pytest.mark.parametrize("cell", CELLS.values(), ids=lambda cell: cell.name)
def test_the_names_of_the_vendors_modes_stay(cell: object) -> None:
    assert all(mode_name(mode.name) == mode.name for mode in cell.modes)  # type: ignore[attr-defined]


def test_what_jetson_clocks_holds_is_said(tmp_path: Path) -> None:
    root = plant(tmp_path / "tree", CELLS["orin-nano", "6"])
    assert JetsonDevice(root).held_by_others() == ()
    gpu = next((root / "sys/class/devfreq").glob("*.gpu"))
    (gpu / "min_freq").write_text((gpu / "max_freq").read_text())
    for core in range(6):
        put(root, f"{CPU}/cpu{core}/cpuidle/state1/disable", 1)
    put(root, "sys/kernel/debug/bpmp/debug/clk/emc/mrq_rate_locked", 1)
    put(root, "sys/class/hwmon/hwmon8/pwm1", 128)
    put(root, "proc/812/comm", "jtop")
    said = " ".join(JetsonDevice(root).held_by_others())
    for word in ("GPU clock is pinned", "Idle states", "memory clock is locked", "fan runs at 50%", "jetson-stats"):
        assert word in said
