from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, strategies as st

from underwatt.device.space import Knob, ModeSpace
from underwatt.errors import InputError, ModeError
from underwatt.records import PowerMode

values = st.lists(st.integers(1, 3000), min_size=1, max_size=6, unique=True).map(
    lambda items: tuple(float(item) for item in sorted(items))
)
spaces = st.builds(
    lambda cores, gpu, mem: ModeSpace([Knob("mem_mhz", mem), Knob("cpu_cores", cores), Knob("gpu_mhz", gpu)]),
    values,
    values,
    values,
)


@given(spaces)
def test_iteration_indexing_and_matrix_agree(space: ModeSpace) -> None:
    modes = list(space)
    assert len(modes) == len(space) == len(set(modes))
    assert [space[index] for index in range(len(space))] == modes
    assert space[-1] == modes[-1] == space.highest
    assert np.array_equal(space.matrix(), [list(mode.knobs().values()) for mode in modes])
    with pytest.raises(IndexError):
        space[len(space)]


@given(spaces, st.floats(1, 4000))
def test_check_accepts_what_it_holds_and_names_the_nearest(space: ModeSpace, wanted_mhz: float) -> None:
    knob = space.knob("gpu_mhz")
    assert knob is not None
    nearest = min(knob.values, key=lambda value: abs(value - wanted_mhz))
    if abs(nearest - wanted_mhz) < 0.05:
        assert space.check(PowerMode(gpu_mhz=wanted_mhz)).gpu_mhz == nearest
    elif abs(nearest - wanted_mhz) > 0.07:
        with pytest.raises(ModeError, match="nearest is"):
            space.check(PowerMode(gpu_mhz=wanted_mhz))
    assert abs(knob.nearest(wanted_mhz) - wanted_mhz) == abs(nearest - wanted_mhz)


def test_the_largest_board_is_known_without_writing_it_out() -> None:
    space = ModeSpace(
        [
            Knob("cpu_cores", tuple(float(n) for n in range(1, 9))),
            Knob("cpu_mhz", tuple(115.2 + 76.8 * n for n in range(29))),
            Knob("gpu_mhz", tuple(114.75 + 90.1 * n for n in range(14))),
            Knob("mem_mhz", tuple(204.0 + 240 * n for n in range(9))),
        ]
    )
    started = time.perf_counter()
    assert len(space) == 29_232
    assert space.matrix().shape == (29_232, 4)
    assert time.perf_counter() - started < 0.5
    assert space.highest in space


def test_of_modes_keeps_a_list_that_is_not_a_product() -> None:
    modes = [PowerMode(gpu_mhz=g, mem_mhz=m) for g, m in ((100, 1), (200, 1), (200, 2))]
    space = ModeSpace.of_modes(modes)
    assert list(space) == modes
    assert PowerMode(gpu_mhz=100, mem_mhz=1) in space
    with pytest.raises(ModeError, match="does not hold the mode GPU 100 MHz, memory 2 MHz"):
        space.check(PowerMode(gpu_mhz=100, mem_mhz=2))
    whole = ModeSpace.of_modes([*modes, PowerMode(gpu_mhz=100, mem_mhz=2)])
    assert len(whole) == 4


def test_continuous_knob_takes_what_lies_between() -> None:
    space = ModeSpace([Knob("power_limit_w", (100.0, 150.0, 200.0), continuous=True)])
    assert space.check(PowerMode(power_limit_w=133.3)).power_limit_w == 133.3
    with pytest.raises(ModeError, match="nearest is 200"):
        space.check(PowerMode(power_limit_w=201))


def test_only_some_knobs() -> None:
    space = ModeSpace([Knob("gpu_mhz", (1.0, 2.0)), Knob("mem_mhz", (1.0, 2.0))]).only(["mem_mhz"])
    assert list(space) == [PowerMode(mem_mhz=1.0), PowerMode(mem_mhz=2.0)]


@pytest.mark.parametrize(
    ("name", "steps"), [("gpu_mhz", ()), ("gpu_mhz", (2.0, 1.0)), ("gpu_mhz", (1.0, 1.0)), ("fan", (1.0,))]
)
def test_nonsense_knobs_are_refused(name: str, steps: tuple[float, ...]) -> None:
    with pytest.raises(InputError):
        Knob(name, steps)


def test_one_knob_twice_is_refused() -> None:
    with pytest.raises(InputError):
        ModeSpace([Knob("gpu_mhz", (1.0,)), Knob("gpu_mhz", (2.0,))])


def test_no_knobs_is_one_mode_that_asks_for_nothing() -> None:
    space = ModeSpace([])
    assert list(space) == [PowerMode()]
    assert space.matrix().shape == (1, 0)


def test_some_knobs_of_a_list_are_the_list_seen_through_them() -> None:
    modes = [PowerMode(2, c, g) for c, g in ((1, 100), (1, 200), (2, 200), (3, 300))]
    space = ModeSpace.of_modes(modes)
    assert list(space.only(("cpu_mhz", "gpu_mhz"))) == [
        PowerMode(None, c, g) for c, g in ((1, 100), (1, 200), (2, 200), (3, 300))
    ]
    assert list(space.only(("cpu_cores", "cpu_mhz", "gpu_mhz"))) == modes
    assert list(space.only(("gpu_mhz",))) == [PowerMode(gpu_mhz=g) for g in (100, 200, 300)]
    assert list(space.only(())) == [PowerMode()]
