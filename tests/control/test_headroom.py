"""What a budget leaves: watts, pauses, and what waiting is reckoned to draw."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from run_world import SIZES, virtual

from underwatt.budget import Budget, Watts
from underwatt.control.headroom import FELL_BEHIND, MOST_ANEW, MOST_IDLE_SHARE, READ_MARGIN, Headroom, LevelSearch
from underwatt.control.knowledge import Drift, Knowledge
from underwatt.control.live_budget import LiveBudget
from underwatt.control.state import ControlOptions
from underwatt.convergence.prior import usual_shape
from underwatt.errors import BudgetError
from underwatt.planning.problem import Problem
from underwatt.predict.base import SettingArray
from underwatt.records import Measurement

if TYPE_CHECKING:
    from underwatt.records import Setting


def made(
    *, knobs: bool = True, idle_w: float | None = 3.0, power_w: float = 8.0
) -> tuple[Headroom, LiveBudget, Knowledge]:
    space = virtual().space if knobs else virtual().space.only(())
    candidates = SettingArray.product(tuple(knob.name for knob in space.knobs), space.matrix(), SIZES)
    live = LiveBudget(Budget(power_w=power_w))
    problem = Problem.of(candidates, live.budget, idle_w=idle_w)
    knowledge = Knowledge(problem)
    room = Headroom(problem, live, knowledge, READ_MARGIN, may_pause=True, budget_w=power_w)
    return room, live, knowledge


def test_what_another_process_draws_it_draws_in_pauses_too() -> None:
    room, _, knowledge = made()
    before_w = room.idle_w
    knowledge.drift = Drift(extra_w=0.8)
    assert room.idle_w == pytest.approx(before_w + 0.8)
    knowledge.drift = Drift(extra_w=100.0)
    assert room.idle_w == pytest.approx(MOST_IDLE_SHARE * 8.0), "one wrong reading must not stop a training"
    knowledge.drift = Drift(extra_w=-1.0)
    assert room.idle_w == pytest.approx(before_w)


def test_what_pauses_were_seen_to_draw_counts_for_that_mode_and_those_near_it() -> None:
    room, _, knowledge = made()
    low, high = room.base.candidates[0], room.base.candidates[len(room.base) - 1]
    knowledge.add(Measurement(low, step_s=0.2, power_w=5.0, peak_w=5.0))
    knowledge.add(Measurement(high, step_s=0.1, power_w=9.0, peak_w=9.0))
    assert room.idle_at(low) == room.idle_w
    knowledge.saw_idle(high, 7.8)
    assert room.idle_at(high) == pytest.approx(7.8)
    assert 4.0 < room.idle_at(low) < 7.8


def test_without_clocks_waiting_draws_what_it_was_found_to_draw() -> None:
    room, _, knowledge = made(knobs=False)
    knowledge.drift = Drift(extra_w=0.8)
    assert room.idle_w == 3.0
    assert room.can_wait(8.0)
    assert not room.can_wait(3.0)
    with pytest.raises(BudgetError, match="while it waits"):
        room.check(3.0)


def test_a_change_of_what_watts_mean_is_followed() -> None:
    room, live, _ = made(knobs=False)
    assert room.can_pause
    live.change("8W peak")
    assert not room.can_pause
    live.change("7W")  # says nothing about their meaning
    assert not room.can_pause


def test_a_peak_that_was_seen_is_remembered_without_drift() -> None:
    room, _, knowledge = made()
    setting = room.problem().candidates[0]
    knowledge.add(Measurement(setting, step_s=0.1, power_w=5.0, peak_w=5.5))
    knowledge.drift = Drift(extra_w=0.5)
    knowledge.saw_peak(setting, 7.0)
    known = knowledge.of(setting)
    assert known is not None
    assert known.peak_w == pytest.approx(6.5)


def test_where_pauses_may_hold_what_nothing_keeps_one_try_is_enough() -> None:
    for watts, tries in ((Watts.MEAN, True), (Watts.PEAK, False)):
        room, live, _ = made(power_w=8.0)
        live.change(f"8W {watts.value}")
        search = LevelSearch(room, ControlOptions())
        search.tried_in_vain(room)
        assert not search.is_done(room), "nothing is known yet"
        search.ends(replace(room, budget_w=12.0))
        search.tried_in_vain(room)
        assert search.is_done(room) is tries, "peak watts are held by no pause"


def measured(setting: Setting, power_w: float | None = None) -> Measurement:
    """A board whose speed and watts grow with the GPU clock and the batch size; steps are too long for pauses."""
    clock, size = (setting.mode.gpu_mhz or 0.0) / 1000, setting.batch_size
    drawn_w = 4.0 + 3.0 * clock * (1 + size / 64) if power_w is None else power_w
    return Measurement(setting, step_s=(1.0 + 0.1 * size) / clock, power_w=drawn_w, peak_w=drawn_w)


def searched(search: LevelSearch, room: Headroom, knowledge: Knowledge) -> int:
    """Measure all that a search asks for; how much that was."""
    count = 0
    while (ask := search.ask(room, 0.0, 3600.0)) is not None:
        found = measured(ask.setting)
        knowledge.add(found)
        search.tell(found)
        count += 1
    search.ends(room)
    return count


def test_where_what_was_found_draws_too_much_once_it_is_warm_a_search_goes_on() -> None:
    room, _, knowledge = made()
    search = LevelSearch(room, ControlOptions())
    assert searched(search, room, knowledge) > 3
    assert search.is_done(room)
    best = knowledge.best(room.problem())
    assert best is not None
    while (now := knowledge.best(room.problem())) is not None and now.time_s < (1 + 2 * FELL_BEHIND) * best.time_s:
        knowledge.add(measured(now.measurement.setting, power_w=8.4))
    assert not search.is_done(room), "the next best is far behind"
    assert search.ask(room, 0.0, 3600.0) is not None
    searched(search, room, knowledge)
    assert search.is_done(room), "and that is that"


def test_where_batch_sizes_are_weighed_otherwise_little_is_measured_though_the_board_has_warmed() -> None:
    room, _, knowledge = made()
    room = replace(room, base=room.base.weighed(usual_shape()))
    search = LevelSearch(room, ControlOptions(most_a_level=8, least_gain=1e-6))
    assert searched(search, room, knowledge) >= 8
    knowledge.drift = Drift(extra_w=0.05)
    room = replace(room, base=room.base.weighed(usual_shape().given(8.0, 0.5)))
    assert 1 <= searched(search, room, knowledge) <= 2 * MOST_ANEW


def test_a_search_is_worth_what_it_gains_in_what_is_left_of_the_training() -> None:
    """A training of a minute searched for as long as one of an hour."""
    room, _, knowledge = made(power_w=8.0)
    low, high = room.base.candidates[0], room.base.candidates[len(room.base) - 1]
    search = LevelSearch(room, ControlOptions())
    for setting, step_s in ((low, 0.2), (high, 0.1)):
        found = Measurement(setting, step_s=step_s, power_w=5.0, peak_w=5.0)
        knowledge.add(found)
        search.tell(found)
    assert search.ask(room, 0.0, 3600.0) is not None
    assert search._search.least_gain == ControlOptions().least_gain
    search.ask(room, 0.0, 3.0)
    assert search._search.least_gain > 0.1, "though the watts are the same"


def test_what_a_sample_takes_counts_pauses() -> None:
    room, _, knowledge = made(power_w=8.0)
    low, high = room.base.candidates[0], room.base.candidates[len(room.base) - 1]
    assert room.sample_s(None) == math.inf
    knowledge.add(Measurement(low, step_s=0.2, power_w=5.0, peak_w=5.0))
    assert room.sample_s(low) == pytest.approx(0.2 / low.batch_size)
    assert room.sample_s(high) == room.sample_s(low), "by the best of what is known"
    knowledge.add(Measurement(high, step_s=0.01, power_w=12.0, peak_w=12.0))
    assert room.sample_s(high) > 1.2 * 0.01 / high.batch_size


def test_where_what_a_search_had_found_is_lost_there_is_another_one() -> None:
    """Pauses seemed to draw so much that nothing but the slowest setting was left: it was kept for 40 minutes."""
    room, _, knowledge = made(power_w=8.0)
    slow, fast = room.base.candidates[0], room.base.candidates[len(room.base) - 1]
    knowledge.add(Measurement(slow, step_s=0.4, power_w=5.0, peak_w=5.0))
    knowledge.add(Measurement(fast, step_s=0.1, power_w=7.9, peak_w=7.9))
    search = LevelSearch(room, ControlOptions())
    search.ends(room)
    assert search.is_done(room)
    assert search.is_done(replace(room, budget_w=8.1)), "as good as these"
    knowledge.add(Measurement(fast, step_s=0.1, power_w=16.0, peak_w=16.0))
    assert not search.is_done(room)
    search.ends(room)
    assert search.is_done(room), "there was nothing better, and it is not asked for for ever"


def test_what_pauses_drew_beside_another_process_is_not_what_they_draw() -> None:
    room, _, knowledge = made()
    setting = room.base.candidates[0]
    knowledge.add(Measurement(setting, step_s=0.2, power_w=5.0, peak_w=5.0))
    knowledge.drift = Drift(extra_w=0.8)
    knowledge.saw_idle(setting, 3.8)
    assert room.idle_at(setting) == pytest.approx(3.8)
    knowledge.drift = Drift()
    assert room.idle_at(setting) == pytest.approx(3.0)


def test_what_pauses_drew_just_before_a_leap_was_seen_may_have_been_seen_after_it() -> None:
    room, _, knowledge = made()
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
    room, _, knowledge = made()
    first = room.lowest()
    knowledge.refuse(first.mode)
    second = room.lowest()
    assert second.mode != first.mode
    assert second.batch_size == first.batch_size
    knowledge.refuse(second.mode)
    assert room.lowest().mode not in (first.mode, second.mode)
