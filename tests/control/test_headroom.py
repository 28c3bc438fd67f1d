"""What a budget leaves: watts, pauses, and what waiting is reckoned to draw."""

from __future__ import annotations

from dataclasses import replace

import pytest
from run_world import SIZES, virtual

from underwatt.budget import Budget, Watts
from underwatt.control.headroom import MOST_IDLE_SHARE, READ_MARGIN, Headroom, LevelSearch
from underwatt.control.knowledge import Drift, Knowledge
from underwatt.control.live_budget import LiveBudget
from underwatt.control.state import ControlOptions
from underwatt.errors import BudgetError
from underwatt.planning.problem import Problem
from underwatt.predict.base import SettingArray
from underwatt.records import Measurement


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
