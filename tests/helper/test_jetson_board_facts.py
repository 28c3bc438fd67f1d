from __future__ import annotations

from typing import TYPE_CHECKING

import jetson_trees as trees
import pytest
from hypothesis import given, strategies as st

from underwatt.errors import InputError
from underwatt.helper.board_facts import (
    CONF_FILE,
    Caps,
    NvpConf,
    active_id,
    detect_board,
    is_jetson,
    l4t_release,
    parse_conf,
    serial_number,
)
from underwatt.helper.sysfs import Sysfs

if TYPE_CHECKING:
    from pathlib import Path

KEYS = {"xavier-agx": "agx-xavier", "orin-agx-jp5": "agx-orin", "orin-agx-jp6": "agx-orin"}


@pytest.mark.parametrize("name", trees.ALL)
def test_each_board_is_told_from_the_others(tmp_path: Path, name: str) -> None:
    sysfs = Sysfs(trees.plant(tmp_path, trees.ALL[name]))
    assert is_jetson(sysfs)
    assert detect_board(sysfs).key == KEYS.get(name, name)


@pytest.mark.parametrize(
    ("model", "compatible", "key"),
    [
        ("", "nvidia,p3737-0000+p3701-0005\0nvidia,tegra234\0", "agx-orin"),
        ("", "nvidia,p3768-0000+p3767-0000\0nvidia,tegra234\0", "orin-nx"),
        ("", "nvidia,p3768-0000+p3767-0003\0nvidia,tegra234\0", "orin-nano"),
        ("NVIDIA Jetson Orin NX Engineering Reference\0", "nvidia,tegra234\0", "orin-nx"),
        ("quill\0", "nvidia,p2597-0000+p3310-1000\0nvidia,tegra186\0", "tx2"),
        ("", "nvidia,jetson-xavier-nx\0nvidia,tegra194\0", "xavier-nx"),
        ("NVIDIA Jetson AGX Xavier Industrial\0", "nvidia,tegra194\0", "agx-xavier"),
        ("A board of tomorrow\0", "nvidia,tegra999\0", "unknown"),
        ("", "", "unknown"),
    ],
)
def test_variants(tmp_path: Path, model: str, compatible: str, key: str) -> None:
    trees.put(tmp_path, "proc/device-tree/model", model)
    trees.put(tmp_path, "proc/device-tree/compatible", compatible)
    assert detect_board(Sysfs(tmp_path)).key == key


def test_release_and_serial(tmp_path: Path) -> None:
    sysfs = Sysfs(trees.plant(tmp_path, trees.ORIN_AGX_JP5))
    assert l4t_release(sysfs) == "R35.4.1"
    assert serial_number(sysfs) == "1420921055555"


def test_a_plain_machine_is_no_jetson(tmp_path: Path) -> None:
    assert not is_jetson(Sysfs(tmp_path))
    assert l4t_release(Sysfs(tmp_path)) == serial_number(Sysfs(tmp_path)) == ""


def test_modes_and_caps() -> None:
    conf = parse_conf(trees.ORIN_AGX_JP5.conf)
    assert {mode.id: mode.name for mode in conf.modes.values()} == {0: "MAXN", 2: "30W"}
    assert conf.caps(0) == Caps()
    assert conf.caps(2) == Caps(
        gpu_hz=624_750_000,
        emc_hz=2_133_000_000,
        cpu_khz={0: 1_728_000, 4: 1_267_200},
        cores_off=frozenset({8, 9, 10, 11}),
    )


def test_custom_and_absent_modes_cap_nothing() -> None:
    conf = parse_conf(trees.ORIN_AGX_JP5.conf)
    assert conf.caps(77) == conf.caps(None) == NvpConf().caps(0) == Caps()


def test_no_cap_is_spelled_in_many_ways() -> None:
    for text in ("-1", "0", "2147483647", "4294967295", "MAX", ""):
        values = f"GPU MAX_FREQ {text or 'x'}\nEMC MAX_FREQ {text or 'x'}\nCPU_A57 MAX_FREQ {text or 'x'}"
        assert parse_conf(f"< POWER_MODEL ID=0 NAME=A >\n{values}\n").caps(0) == Caps()


def test_a_cap_that_names_no_core_holds_for_all() -> None:
    conf = parse_conf("< POWER_MODEL ID=3 >\nCPU_A MAX_FREQ 900000\nCPU_B MAX_FREQ 800000\nCPU_ONLINE CORE_0 0\n")
    assert conf.caps(3) == Caps(all_cpu_khz=800_000)


def test_comments_spaces_and_unknown_sections_are_skipped() -> None:
    text = "#x\n\n  <POWER_MODEL ID=1 NAME=A>  # y\n GPU  MAX_FREQ   5 more\n< FAN_CONFIG DEFAULT=quiet >\nodd\n"
    assert parse_conf(text).modes[1].values == {("GPU", "MAX_FREQ"): "5"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("< POWER_MODEL NAME=A >", "Line 1 .* needs ID=number"),
        ("\n< POWER_MODEL ID=one >", "Line 2 .* 'one'"),
        ("< POWER_MODEL ID=1", "not a section header"),
        ("< POWER_MODEL ID=1 >\nGPU MAX_FREQ", "Line 2 .* not 'PARAM ARG VALUE'"),
        ("< POWER_MODEL ID=1 >\n< POWER_MODEL ID=1 >", "defines mode 1 again"),
    ],
)
def test_what_makes_no_sense_is_named_by_line(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_conf(text)


_WORDS = """< > < PARAM < POWER_MODEL < PM_CONFIG ID=1 ID= NAME=A DEFAULT=2 CPU_ONLINE CORE_1 CORE_x GPU MAX_FREQ -1
99999999999999999999 TPC_PG_MASK 0x 0xf # = ²"""
_words = st.sampled_from([*_WORDS.split(), "< POWER_MODEL ID=1 >", "< PARAM NAME=GPU >", " ", "\n"])


@given(st.one_of(st.text(), st.lists(_words).map(" ".join), st.lists(_words).map("".join)))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    try:
        conf = parse_conf(text)
    except InputError:
        return
    for mode_id in conf.modes:
        conf.caps(mode_id)
        for other in conf.modes:
            assert set(conf.reboot_reasons(mode_id, other)) == set(conf.reboot_reasons(other, mode_id))


def test_a_switch_that_needs_a_reboot_is_known() -> None:
    conf = parse_conf(trees.ORIN_NANO.conf)
    assert conf.reboot_reasons(0, 1) == ("TPC_PG_MASK",)
    assert conf.reboot_reasons(0, 2) == (), "0xf0 and 240 are the same mask"
    assert conf.reboot_reasons(None, 1) == conf.reboot_reasons(0, 9) == ()


@pytest.mark.parametrize(
    ("text", "expected"),
    [("pmode:0002", 2), ("pmode:0000 fmode:quiet\n", 0), ("fmode:x\npmode: 12\n", 12), ("garbage", None), ("", None)],
)
def test_the_active_mode_is_read_without_the_program(tmp_path: Path, text: str, expected: int | None) -> None:
    path = tmp_path / "var/lib/nvpmodel/status"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert active_id(Sysfs(tmp_path)) == expected


def test_a_board_without_nvpmodel(tmp_path: Path) -> None:
    assert active_id(Sysfs(tmp_path)) is None
    assert parse_conf(Sysfs(tmp_path).text_or_empty(CONF_FILE)) == NvpConf()
