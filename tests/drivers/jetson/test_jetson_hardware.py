from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from underwatt.drivers.jetson.boards import Caps
from underwatt.drivers.jetson.device import build_space
from underwatt.drivers.jetson.knobs import Tables

TABLES = Tables(
    core_order=(0, 3, 1, 2),
    fixed_cores=1,
    first_cluster=(0, 3),
    cpu_khz=(100_000, 200_000, 300_000),
    gpu_hz=(100_000_000, 200_500_000),
    emc_hz=(204_000_000, 665_600_000),
)


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
