from __future__ import annotations

import json
import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from underwatt.errors import DeviceBusyError, InputError, UnderwattError
from underwatt.records import KNOBS, Measurement, PowerMode, Setting, Status, WorkloadCost, to_json

knob_values = st.dictionaries(st.sampled_from(KNOBS), st.integers(1, 3000).map(float))


@given(knob_values)
def test_mode_from_knobs_and_back(values: dict[str, float]) -> None:
    mode = PowerMode.of(values)
    assert mode.knobs() == values
    assert list(mode.knobs()) == [name for name in KNOBS if name in values]


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf])
def test_nonsense_values_are_refused(value: float) -> None:
    with pytest.raises(InputError, match="gpu_mhz"):
        PowerMode(gpu_mhz=value)


def test_unknown_knob_is_named() -> None:
    with pytest.raises(InputError, match="fan"):
        PowerMode.of({"fan": 3})


def test_batch_size_zero_is_refused() -> None:
    with pytest.raises(InputError, match="Batch size"):
        Setting(PowerMode(), 0)


def test_people_read_modes() -> None:
    assert str(Setting(PowerMode(cpu_cores=4, gpu_mhz=921.6), 32)) == "batch 32, 4 cores, GPU 921.6 MHz"
    assert str(PowerMode()) == "as it is"


def test_json_has_no_nan_and_knows_enums() -> None:
    record = to_json(Measurement(Setting(PowerMode(gpu_mhz=1.0), 2), status=Status.OUT_OF_MEMORY))
    text = json.dumps(record, allow_nan=False)
    assert json.loads(text)["status"] == "out_of_memory"
    assert json.loads(text)["step_s"] is None


def test_only_measured_ones_are_usable() -> None:
    setting = Setting(PowerMode(), 1)
    assert Measurement(setting, step_s=1.0, power_w=1.0).usable
    assert Measurement(setting, status=Status.THROTTLED).usable
    assert not Measurement(setting, status=Status.FAILED).usable


def test_memory_grows_with_batch_size() -> None:
    cost = WorkloadCost(1, 1, 1, 1, 1, 1, state_bytes=100, activation_bytes_per_sample=10)
    assert cost.memory_bytes(3) == 130


def test_errors_keep_their_hint_across_processes() -> None:
    error = pickle.loads(pickle.dumps(DeviceBusyError("It is taken.", hint="Wait.")))
    assert isinstance(error, UnderwattError)
    assert (error.message, error.hint, str(error)) == ("It is taken.", "Wait.", "It is taken. Wait.")
