from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import foreign_predictor
import numpy as np
import pytest

from underwatt.errors import InputError, PredictError
from underwatt.predict.base import SettingArray, load_predictor, observe, predictor_names, prepared
from underwatt.predict.fewshot import FewShot
from underwatt.records import Measurement, PowerMode, Setting
from underwatt.testing.predictors import PredictorConformance, made_up_measurements, made_up_profile

if TYPE_CHECKING:
    from pathlib import Path

    from underwatt.predict.base import Predictor

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


def test_repeats_that_agree_are_both_kept() -> None:
    seen = made_up_measurements()
    again = replace(seen[0], step_s=1.1 * seen[0].step_s)
    assert len(observe([*seen, again])) == len(seen) + 1


def test_names_the_setting_that_disagrees() -> None:
    seen = made_up_measurements()
    with pytest.raises(PredictError) as caught:
        observe([*seen, replace(seen[3], power_w=5 * seen[3].power_w)])
    assert str(seen[3].setting) in str(caught.value)
    assert caught.value.hint


def test_settings_of_different_knobs_do_not_mix() -> None:
    seen = made_up_measurements()
    with pytest.raises(PredictError, match="same knobs"):
        observe([*seen, replace(seen[0], setting=Setting(PowerMode(), 8))])


def test_says_whose_measurements_are_wrong() -> None:
    with pytest.raises(PredictError, match="the reference X"):
        observe([], whose="the reference X")


def test_merged_has_one_row_a_setting_with_the_mean_of_its_repeats() -> None:
    settings = [Setting(PowerMode(gpu_mhz=float(mhz)), 8) for mhz in (300, 100, 300, 200)]
    readings = [
        Measurement(setting, step_s, 5.0) for setting, step_s in zip(settings, (1.0, 3.0, 1.21, 2.0), strict=True)
    ]
    merged = observe(readings).merged()
    assert merged.settings.values.ravel().tolist() == [300, 100, 200]
    assert np.exp(merged.log_step_s) == pytest.approx([1.1, 3.0, 2.0])


def test_our_own_are_found_by_name() -> None:
    assert predictor_names()[0] == "underwatt"
    assert [load_predictor(name).name for name in ("underwatt", "lookup")] == ["underwatt", "lookup"]
    assert isinstance(load_predictor(), FewShot)


def test_an_unknown_name_says_which_there_are() -> None:
    with pytest.raises(PredictError) as caught:
        load_predictor("oracle")
    assert "underwatt, powertrain, lookup" in str(caught.value.hint)


class TestFromAnotherPackage(PredictorConformance):
    """Installed beside Underwatt, chosen by name, and as good as our own to those who ask it."""

    @pytest.fixture(autouse=True)
    def _installed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        foreign_predictor.install(tmp_path, monkeypatch)

    def make(self) -> Predictor:
        return load_predictor(foreign_predictor.NAME)

    def test_is_found_by_its_entry_point(self) -> None:
        assert foreign_predictor.NAME in predictor_names()
        assert self.make().name == foreign_predictor.NAME

    def test_one_that_cannot_be_loaded_says_why(self) -> None:
        with pytest.raises(PredictError, match=r"foreign_nearest:broken: no licence"):
            load_predictor("broken")

    def test_is_prepared_by_keeping_the_references(self) -> None:
        seen = made_up_measurements()
        asked = SettingArray.of([m.setting for m in seen])
        fit = prepared(self.make(), asked, [made_up_profile(seen)])
        np.testing.assert_array_equal(fit(seen).predict(asked).log_step_s, np.log([m.step_s for m in seen]))
