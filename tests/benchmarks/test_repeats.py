from __future__ import annotations

from dataclasses import replace

import planning_world as world
import pytest

from _repeats import without_repeats
from underwatt.records import Measurement, Status


def test_repeats_of_a_table_become_their_mean_in_the_order_of_the_first() -> None:
    one, other = world.truth(world.at(500.0, 200.0, 4)), world.truth(world.at(500.0, 300.0, 4))
    failed = Measurement(one.setting, status=Status.FAILED)
    merged = without_repeats([one, other, replace(one, power_w=3 * one.power_w, step_s=2 * one.step_s), failed])
    assert [m.setting for m in merged] == [one.setting, other.setting]
    assert merged[0].power_w == pytest.approx(2 * one.power_w)
    assert merged[0].step_s == pytest.approx(1.5 * one.step_s)
    assert merged[1] == other
