"""Several devices as one: one mode, all their watts, and all of them put back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jetson_trees as trees
import pytest
from profile_helpers import COST

from underwatt.device.registry import open_device
from underwatt.device.session import Session
from underwatt.device.several import Several, together
from underwatt.drivers.jetson.device import JetsonDevice
from underwatt.errors import ApplyError, DeviceBusyError, InputError
from underwatt.helper.journal import slug
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


def two_trees(folder: Path) -> tuple[Any, list[Path]]:
    roots = [folder / "one", folder / "other"]
    for at, root in enumerate(roots):
        trees.plant(root, trees.NANO)
        trees.put(root, "proc/device-tree/serial-number", f"{at}" * 60)
    return together([JetsonDevice(root) for root in roots]), roots


def test_a_training_on_several_keeps_another_from_each_of_them(tmp_path: Path) -> None:
    both, roots = two_trees(tmp_path)
    with Session(both, tmp_path / "state"):
        for root in roots:
            with pytest.raises(DeviceBusyError), Session(JetsonDevice(root), tmp_path / "state"):
                pass
    with Session(JetsonDevice(roots[1]), tmp_path / "state"):
        with pytest.raises(DeviceBusyError), Session(both, tmp_path / "state"):
            pass
        with Session(JetsonDevice(roots[0]), tmp_path / "state"):
            pass


def test_where_several_were_left_changed_each_is_put_back_by_whoever_uses_it_next(tmp_path: Path) -> None:
    both, roots = two_trees(tmp_path)
    found = dict(both.snapshot())
    killed = Session(both, tmp_path / "state")
    killed._begin()
    killed.apply(PowerMode(gpu_mhz=307.2))
    assert dict(both.snapshot()) != found
    killed._found = [{}, {}]  # as where it is killed
    killed._let_go()
    for root in roots:
        with Session(JetsonDevice(root), tmp_path / "state") as session:
            assert session.recovered
    assert dict(together([JetsonDevice(root) for root in roots]).snapshot()) == found


def test_eight_devices_have_a_journal_whose_name_is_no_longer_than_names_may_be(tmp_path: Path) -> None:
    ids = [f"nvml-GPU-8a6b5c1d-0000-1111-2222-33334444555{at}" for at in range(8)]
    names = {slug("+".join(ids[:many])) for many in range(1, 9)}
    assert len(names) == 8
    for name in names:
        (tmp_path / f"underwatt-{name}.0123456789abcdef.session.json.tmp").touch()
