from __future__ import annotations

import numpy as np
import pytest

from underwatt.errors import InputError
from underwatt.predict.base import SettingArray
from underwatt.records import PowerMode, Setting

SETTINGS = [
    Setting(PowerMode(cpu_cores=4, gpu_mhz=500.0), 8),
    Setting(PowerMode(cpu_cores=2, gpu_mhz=900.0), 16),
]


def test_records_survive_the_round_trip() -> None:
    array = SettingArray.of(SETTINGS)
    assert array.knobs == ("cpu_cores", "gpu_mhz")
    assert [array[at] for at in range(len(array))] == SETTINGS
    assert isinstance(array[0].mode.cpu_cores, int)


def test_product_holds_every_mode_at_every_batch_size() -> None:
    modes = np.array([[200.0], [400.0], [800.0]])
    array = SettingArray.product(("gpu_mhz",), modes, [8, 16])
    assert len(array) == 6
    assert {(row[0], row[1]) for row in array.matrix().tolist()} == {
        (mhz, size) for mhz in (200.0, 400.0, 800.0) for size in (8.0, 16.0)
    }


def test_a_setting_that_leaves_a_knob_alone_does_not_mix() -> None:
    with pytest.raises(InputError, match="same knobs"):
        SettingArray.of([*SETTINGS, Setting(PowerMode(gpu_mhz=900.0), 16)])


@pytest.mark.parametrize(
    ("knobs", "values", "batch"),
    [
        (("gpu_mhz", "cpu_mhz"), [[1.0, 2.0]], [8.0]),
        (("volts",), [[1.0]], [8.0]),
        (("gpu_mhz",), [[1.0, 2.0]], [8.0]),
        (("gpu_mhz",), [[np.nan]], [8.0]),
        (("gpu_mhz",), [[1.0]], [0.0]),
    ],
)
def test_refuses_what_is_no_setting(knobs: tuple[str, ...], values: list[list[float]], batch: list[float]) -> None:
    with pytest.raises(InputError):
        SettingArray(knobs, np.array(values), np.array(batch))


def test_column_and_take() -> None:
    array = SettingArray.of(SETTINGS)
    assert array.column("mem_mhz") is None
    column = array.take(np.array([1])).column("gpu_mhz")
    assert column is not None
    assert column.tolist() == [900.0]
