"""The tests every device backend must pass: subclass in a test file and say how to make the device.

    class TestMyBoard(DeviceConformance):
        @pytest.fixture
        def device(self):
            return MyBoard(...)

Only for tests: needs pytest. Every test leaves the device as it was found, so the suite may also run on real
hardware that is yours to set; ``settable = False`` leaves out the tests that change something.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

import pytest

from underwatt.errors import ModeError
from underwatt.records import KNOBS, PowerMode, to_json

if TYPE_CHECKING:
    from collections.abc import Iterator

    from underwatt.device.base import Device


class DeviceConformance:
    """One set of expectations for all devices."""

    settable = True

    @pytest.fixture
    def device(self) -> Device:
        """The device under test."""
        raise AssertionError("A conformance test must define the fixture `device`.")

    @pytest.fixture
    def settable_device(self, device: Device) -> Iterator[Device]:
        """The device, put back afterwards."""
        if not self.settable or not device.space.knobs:
            pytest.skip("this device is not set by tests")
        found = device.snapshot()
        yield device
        device.restore(found)

    def test_says_who_it_is(self, device: Device) -> None:
        """Name, identity and address are there and stay the same."""
        info = device.info
        assert info.name
        assert info.id
        assert info.address.startswith(f"{info.backend}:")
        assert device.info == info
        json.dumps(to_json(info))

    def test_space_is_a_sequence_of_allowed_modes(self, device: Device) -> None:
        """Length, indexing, iteration, membership and the matrix agree."""
        space = device.space
        count = len(space)
        assert count >= 1
        for index in {0, count // 3, count // 2, count - 1}:
            mode = space[index]
            assert mode in space
            assert list(mode.knobs().values()) == pytest.approx(list(space.matrix()[index]))
        assert next(iter(space)) == space[0] == space.lowest
        assert space[-1] == space.highest

    def test_capabilities_cover_every_knob_and_power(self, device: Device) -> None:
        """Each knob is listed, each one that may not be used says what would permit it."""
        listed = {item.name: item for item in device.capabilities()}
        assert "power" in listed
        for knob in device.space.knobs:
            item = listed[knob.name]
            assert item.kind == "knob"
            assert item.usable or item.remedy

    def test_power_is_positive_and_time_goes_on(self, device: Device) -> None:
        """Two readings in a row: plausible watts, later time, counter not falling."""
        first = device.read_power()
        device.clock.sleep(0.02)
        second = device.read_power()
        assert 0 < first.power_w < 5000
        assert second.at_s > first.at_s
        if first.energy_j is not None:
            assert second.energy_j is not None
            assert second.energy_j >= first.energy_j

    def test_state_holds_known_knobs_only(self, device: Device) -> None:
        """Running clocks and temperatures are numbers."""
        state = device.read_state()
        assert set(state.running.knobs()) <= set(KNOBS)
        assert all(math.isfinite(value) for value in (*state.rails_w.values(), *state.temperatures_c.values()))

    def test_clock_calls_repeatedly_until_cancelled(self, device: Device) -> None:
        """The sampling timer ticks in the device's own time and stops."""
        ticks: list[float] = []
        begun_s = device.clock.now_s()
        timer = device.clock.every(0.01, lambda: ticks.append(device.clock.now_s()))
        while len(ticks) < 3 and device.clock.now_s() < begun_s + 5:  # a busy machine takes its time
            device.clock.sleep(0.05)
        timer.cancel()
        seen = len(ticks)
        device.clock.sleep(0.05)
        assert 3 <= seen <= (device.clock.now_s() - begun_s) / 0.01 + 2
        assert len(ticks) == seen
        assert ticks == sorted(ticks)

    @pytest.mark.parametrize("end", ["lowest", "highest"])
    def test_apply_takes_and_restore_puts_back(self, settable_device: Device, end: str) -> None:
        """A mode shows in the snapshot; restoring, even twice, brings back every value."""
        device = settable_device
        found = dict(device.snapshot())
        device.apply(getattr(device.space, end))
        changed = dict(device.snapshot())
        device.apply(getattr(device.space, end))
        assert dict(device.snapshot()) == changed
        for _ in range(2):
            device.restore(found)
            assert dict(device.snapshot()) == found

    def test_modes_differ_in_what_they_set(self, settable_device: Device) -> None:
        """A device that accepts a mode and does nothing would pass everything else."""
        device = settable_device
        if len(device.space) == 1:
            pytest.skip("this device has one mode")
        seen = []
        for mode in (device.space.lowest, device.space.highest):
            device.apply(mode)
            seen.append((dict(device.snapshot()), device.read_state().running))
        assert seen[0] != seen[1]

    def test_one_knob_alone_leaves_the_others(self, settable_device: Device) -> None:
        """Moving one knob from one end to the other and back changes nothing else."""
        device = settable_device
        device.apply(device.space.lowest)
        before = dict(device.snapshot())
        for knob in device.space.knobs:
            other = device.space.lowest.with_knobs(**{knob.name: knob.values[-1]})
            if other in device.space:
                device.apply(PowerMode.of({knob.name: knob.values[-1]}))
                device.apply(PowerMode.of({knob.name: knob.values[0]}))
                assert dict(device.snapshot()) == before

    def test_empty_mode_changes_nothing(self, settable_device: Device) -> None:
        """A mode without values is a mode that asks for nothing."""
        before = dict(settable_device.snapshot())
        settable_device.apply(PowerMode())
        assert dict(settable_device.snapshot()) == before

    def test_value_off_the_table_names_the_nearest(self, settable_device: Device) -> None:
        """A value that is not allowed is refused before anything is written."""
        device = settable_device
        before = dict(device.snapshot())
        for knob in device.space.knobs:
            wrong = knob.values[-1] * 3 + 1
            with pytest.raises(ModeError, match=f"nearest is {knob.values[-1]:g}"):
                device.apply(device.space.lowest.with_knobs(**{knob.name: wrong}))
            assert dict(device.snapshot()) == before

    def test_unknown_knob_is_refused(self, settable_device: Device) -> None:
        """A knob the device does not have is an error, not ignored."""
        missing = [name for name in KNOBS if settable_device.space.knob(name) is None]
        if not missing:
            pytest.skip("this device has every knob there is")
        with pytest.raises(ModeError, match="no knob"):
            settable_device.apply(PowerMode.of({missing[0]: 1}))

    def test_snapshot_survives_a_journal(self, device: Device) -> None:
        """A snapshot is text to text, so JSON brings it back unchanged."""
        snapshot = dict(device.snapshot())
        assert json.loads(json.dumps(snapshot)) == snapshot
