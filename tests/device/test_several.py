"""Several devices as one: one mode, all their watts, and all of them put back."""

from __future__ import annotations

from typing import Any

import pytest
from profile_helpers import COST

from underwatt.device.registry import open_device
from underwatt.device.session import Session
from underwatt.device.several import Several, together
from underwatt.errors import ApplyError, InputError
from underwatt.records import PowerMode

BOTH = "virtual:nano?seed=1,virtual:nano?seed=2"
MODE = PowerMode(cpu_cores=4, cpu_mhz=1479.0, gpu_mhz=614.4, mem_mhz=1600.0)


def boards() -> Any:
    return open_device(BOTH)


def test_an_address_with_commas_opens_several_as_one() -> None:
    both = boards()
    assert isinstance(both, Several)
    assert both.info.address == BOTH
    assert both.info.name.startswith("2 × ")
    assert both.space.matrix().tolist() == both.devices[0].space.matrix().tolist()
    assert [item.name for item in both.capabilities()] == [item.name for item in both.devices[0].capabilities()]
    assert together([both.devices[0]]) is both.devices[0]
    with pytest.raises(InputError, match="unlike power modes"):
        open_device("virtual:nano,virtual:tx2-nx")


def test_watts_are_those_of_all_and_time_passes_for_all() -> None:
    both = boards()
    both.apply(MODE)
    for _ in range(100):
        both.run_step(COST, 16)
    times_s = [device.clock.now_s() for device in both.devices]
    assert times_s[0] == pytest.approx(times_s[1], abs=1e-6)
    one_w, other_w = (device.read_power().power_w for device in both.devices)
    assert both.read_power().power_w == pytest.approx(one_w + other_w)
    assert min(one_w, other_w) > 2.0
    both.clock.sleep(1.5)
    assert [device.clock.now_s() - at_s for device, at_s in zip(both.devices, times_s, strict=True)] == [
        pytest.approx(1.5),
        pytest.approx(1.5),
    ]
    assert both.read_state().running.gpu_mhz == 614.4
    assert len(both.read_state().temperatures_c) == 2


def test_all_are_put_back() -> None:
    both = boards()
    found = [dict(device.snapshot()) for device in both.devices]
    with Session(both) as session:
        session.apply(MODE)
        assert [dict(device.snapshot()) for device in both.devices] != found
    assert [dict(device.snapshot()) for device in both.devices] == found


def test_where_one_refuses_a_mode_none_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    both = boards()
    found = dict(both.snapshot())

    def refuse(_mode: PowerMode) -> None:
        raise ApplyError("refused")

    monkeypatch.setattr(both.devices[1], "apply", refuse)
    with pytest.raises(ApplyError):
        both.apply(MODE)
    assert dict(both.snapshot()) == found
