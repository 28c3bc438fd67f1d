"""What a budget leaves: watts, pauses, and what waiting is reckoned to draw."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from run_world import made_room

from underwatt.control.headroom import MOST_IDLE_SHARE
from underwatt.control.knowledge import Drift
from underwatt.errors import BudgetError
from underwatt.records import Measurement


def test_what_another_process_draws_it_draws_in_pauses_too() -> None:
    room, _, knowledge = made_room()
    before_w = room.idle_w
    knowledge.drift = Drift(extra_w=0.8)
    assert room.idle_w == pytest.approx(before_w + 0.8)
    knowledge.drift = Drift(extra_w=100.0)
    assert room.idle_w == pytest.approx(MOST_IDLE_SHARE * 8.0), "one wrong reading must not stop a training"
    knowledge.drift = Drift(extra_w=-1.0)
    assert room.idle_w == pytest.approx(before_w)


def test_what_pauses_were_seen_to_draw_counts_for_that_mode_and_those_near_it() -> None:
    room, _, knowledge = made_room()
    low, high = room.base.candidates[0], room.base.candidates[len(room.base) - 1]
    knowledge.add(Measurement(low, step_s=0.2, power_w=5.0, peak_w=5.0))
    knowledge.add(Measurement(high, step_s=0.1, power_w=9.0, peak_w=9.0))
    assert room.idle_at(low) == room.idle_w
    knowledge.saw_idle(high, 7.8)
    assert room.idle_at(high) == pytest.approx(7.8)
    assert 4.0 < room.idle_at(low) < 7.8


def test_without_clocks_waiting_draws_what_it_was_found_to_draw() -> None:
    room, _, knowledge = made_room(knobs=False)
    knowledge.drift = Drift(extra_w=0.8)
    assert room.idle_w == 3.0
    assert room.can_wait(8.0)
    assert not room.can_wait(3.0)
    with pytest.raises(BudgetError, match="while it waits"):
        room.check(3.0)


def test_a_change_of_what_watts_mean_is_followed() -> None:
    room, live, _ = made_room(knobs=False)
    assert room.can_pause
    live.change("8W peak")
    assert not room.can_pause
    live.change("7W")  # says nothing about their meaning
    assert not room.can_pause


def test_a_peak_that_was_seen_is_remembered_without_drift() -> None:
    room, _, knowledge = made_room()
    setting = room.problem().candidates[0]
    knowledge.add(Measurement(setting, step_s=0.1, power_w=5.0, peak_w=5.5))
    knowledge.drift = Drift(extra_w=0.5)
    knowledge.saw_peak(setting, 7.0)
    known = knowledge.of(setting)
    assert known is not None
    assert known.peak_w == pytest.approx(6.5)


def test_what_a_sample_takes_counts_pauses() -> None:
    room, _, knowledge = made_room(power_w=8.0)
    low, high = room.base.candidates[0], room.base.candidates[len(room.base) - 1]
    assert room.sample_s(None) == math.inf
    knowledge.add(Measurement(low, step_s=0.2, power_w=5.0, peak_w=5.0))
    assert room.sample_s(low) == pytest.approx(0.2 / low.batch_size)
    assert room.sample_s(high) == room.sample_s(low), "by the best of what is known"
    knowledge.add(Measurement(high, step_s=0.01, power_w=12.0, peak_w=12.0))
    assert room.sample_s(high) > 1.2 * 0.01 / high.batch_size


def test_what_pauses_drew_beside_another_process_is_not_what_they_draw() -> None:
    room, _, knowledge = made_room()
    setting = room.base.candidates[0]
    knowledge.add(Measurement(setting, step_s=0.2, power_w=5.0, peak_w=5.0))
    knowledge.drift = Drift(extra_w=0.8)
    knowledge.saw_idle(setting, 3.8)
    assert room.idle_at(setting) == pytest.approx(3.8)
    knowledge.drift = Drift()
    assert room.idle_at(setting) == pytest.approx(3.0)


def test_what_pauses_drew_just_before_a_leap_was_seen_may_have_been_seen_after_it() -> None:
    room, _, knowledge = made_room()
    setting, other = room.base.candidates[0], room.base.candidates[len(room.base) - 1]
    for known in (setting, other):
        knowledge.add(Measurement(known, step_s=0.2, power_w=5.0, peak_w=5.0, power_w_ci95=0.05))
    knowledge.saw_idle(other, 3.1)
    knowledge.observe(other, 5.0, 0.2, 4.0)
    knowledge.saw_idle(setting, 4.8)
    assert knowledge.observe(setting, 6.0, 0.2, 4.0), "another process came"
    knowledge.drift = Drift()
    assert room.idle_at(setting) == pytest.approx(3.1), "as at the other, which was seen before"


def test_waiting_is_lowest_at_what_the_device_takes() -> None:
    room, _, knowledge = made_room()
    first = room.lowest()
    knowledge.refuse(first.mode)
    second = room.lowest()
    assert second.mode != first.mode
    assert second.batch_size == first.batch_size
    knowledge.refuse(second.mode)
    assert room.lowest().mode not in (first.mode, second.mode)


def test_a_budget_that_is_refused_is_told_what_pauses_would_hold() -> None:
    """The least that was measured without pauses was named: 6.6 W, where 2.3 W could be held."""
    room, live, knowledge = made_room(power_w=2.2)
    setting = room.base.candidates[0]
    knowledge.saw_waiting(setting.mode, 2.1)
    knowledge.add(Measurement(setting, step_s=0.01, power_w=6.4, peak_w=6.4))
    error = room.why_nothing_fits(live.budget)
    assert error is not None
    assert error.hint
    assert "2.4 W" in error.hint
    knowledge.add(Measurement(setting, step_s=5.0, power_w=6.4, peak_w=6.4))
    error = room.why_nothing_fits(live.budget)
    assert error is not None
    assert error.hint
    assert "6.6 W" in error.hint, "steps are too long for pauses"


def test_readings_of_settings_are_not_paused_once_peaks_are_bounded() -> None:
    """A setting under measurement was left late: it was still taken to be measured with pauses."""
    room, live, _ = made_room(power_w=3.0)
    paused = replace(room, measures_paused=True)
    assert not paused.pauses_blur
    live.change("4W peak")
    assert paused.pauses_blur
