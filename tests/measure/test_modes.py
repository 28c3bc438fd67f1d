from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from underwatt.device.space import Knob, ModeSpace
from underwatt.errors import InputError
from underwatt.measure.series import grid_modes, modes_from_file, thinned
from underwatt.records import PowerMode

if TYPE_CHECKING:
    from pathlib import Path

SPACE = ModeSpace([Knob("gpu_mhz", tuple(float(n) for n in range(100, 140))), Knob("cpu_cores", (1.0, 2.0))])


def test_grid_is_the_published_table() -> None:
    modes = grid_modes(SPACE)
    assert len(modes) == 12
    assert {mode.cpu_cores for mode in modes} == {2}
    assert (modes[0].gpu_mhz, modes[-1].gpu_mhz) == (100, 139)


def test_grid_uses_the_knob_there_is() -> None:
    limits = ModeSpace([Knob("power_limit_w", (100.0, 200.0))])
    assert grid_modes(limits) == [PowerMode(power_limit_w=100), PowerMode(power_limit_w=200)]
    assert grid_modes(ModeSpace([Knob("cpu_cores", (1.0, 2.0))])) == [PowerMode(cpu_cores=2)]


@given(st.lists(st.integers(0, 1000), min_size=2, unique=True).map(sorted), st.integers(2, 20))
def test_thinned_keeps_the_ends_and_the_order(values: list[float], most: int) -> None:
    kept = thinned(values, most)
    assert len(kept) == min(most, len(values)) == len(set(kept))
    assert (kept[0], kept[-1]) == (values[0], values[-1])
    assert kept == sorted(kept)


def test_modes_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "modes.csv"
    path.write_text("gpu_mhz,cpu_cores,comment\n100,1,slow\n139,,fast\n")
    assert modes_from_file(path, SPACE) == [PowerMode(cpu_cores=1, gpu_mhz=100), PowerMode(gpu_mhz=139)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpu_mhz\n99\n", "line 2.*nearest is 100"),
        ("gpu_mhz\nfast\n", "line 2"),
        ("clock\n1\n", "names no modes"),
        ("", "names no modes"),
    ],
)
def test_a_bad_file_names_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "modes.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        modes_from_file(path, SPACE)
    with pytest.raises(InputError, match="cannot be read"):
        modes_from_file(tmp_path / "missing.csv", SPACE)
