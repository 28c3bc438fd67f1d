"""Which setting is measured next for the watts in force, with the pauses that it needs or without."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, strategies as st
from run_world import made_room

from underwatt.budget import Watts
from underwatt.control.knowledge import Drift, Knowledge
from underwatt.control.level_search import FELL_BEHIND, MOST_ANEW, MOST_TWICE, LevelSearch
from underwatt.control.state import ControlOptions
from underwatt.convergence.prior import usual_shape
from underwatt.planning.problem import LEAST_BUSY, busy_share
from underwatt.records import Measurement, Status

if TYPE_CHECKING:
    from collections.abc import Callable

    from underwatt.control.headroom import Headroom
    from underwatt.records import Setting


def test_where_pauses_may_hold_what_nothing_keeps_one_try_is_enough() -> None:
    for watts, tries in ((Watts.MEAN, True), (Watts.PEAK, False)):
        room, live, _ = made_room(power_w=8.0)
        live.change(f"8W {watts.value}")
        search = LevelSearch(room, ControlOptions())
        assert not search.tried_in_vain(room, 0.0)
        assert not search.is_done(room), "nothing is known yet"
        search.ends(replace(room, budget_w=12.0))
        assert search.tried_in_vain(room, 0.0) is tries
        assert search.is_done(room) is tries, "peak watts are held by no pause"


def test_little_more_than_waiting_is_measured_with_pauses_from_the_first_setting_on() -> None:
    """Settings at full pace drew twice such a budget, try after try; then the first of them was kept, at a third."""
    for power_w, paused in ((3.6, True), (8.0, False)):
        room, _, _ = made_room(power_w=power_w)
        search = LevelSearch(room, ControlOptions())
        assert search.ask(room, 0.0, 3600.0) is not None
        assert search.is_paused is paused
    room, live, _ = made_room(power_w=3.6)
    live.change("3.6W peak")
    search = LevelSearch(room, ControlOptions())
    assert search.ask(room, 0.0, 3600.0) is not None
    assert not search.is_paused, "pauses do not lower peaks"


@pytest.mark.parametrize(("tried_w", "paused"), [(9.0, True), (5.0, False)])
def test_a_try_far_above_the_budget_is_the_last_without_pauses(tried_w: float, paused: bool) -> None:
    room, _, knowledge = made_room(power_w=4.5)
    search = LevelSearch(room, ControlOptions())
    ask = search.ask(room, 0.0, 3600.0)
    assert ask is not None
    found = Measurement(ask.setting, step_s=0.01, power_w=tried_w, peak_w=tried_w)
    knowledge.add(found)
    search.tell(found)
    search.tried_in_vain(room, 0.0)
    assert search.ask(room, 0.0, 3600.0) is not None
    assert search.is_paused is paused


def test_with_pauses_what_is_asked_for_can_pause_and_the_best_is_found() -> None:
    """What waiting draws differs by the clocks: what is found is the best by what it drew at each of them."""
    room, _, knowledge = made_room(power_w=3.6)
    search = LevelSearch(room, ControlOptions())

    def truth(setting: Setting) -> tuple[Measurement, float]:
        clock, memory = (setting.mode.gpu_mhz or 0.0) / 1000, (setting.mode.mem_mhz or 0.0) / 1000
        power_w = 4.0 + 6.0 * clock**2 + 2.0 * memory
        step_s = 0.01 * (0.2 + setting.batch_size / 64) / clock
        return Measurement(setting, step_s=step_s, power_w=power_w, peak_w=power_w), 2.0 + 0.8 * memory

    while (ask := search.ask(room, 0.0, 3600.0)) is not None:
        assert search.is_paused
        found, waits_w = truth(ask.setting)
        knowledge.saw_waiting(ask.setting.mode, waits_w)
        knowledge.add(found)
        search.tell(found)
    best = knowledge.best(room.problem())
    assert best is not None
    assert best.fits

    def sample_s(setting: Setting) -> float:
        found, waits_w = truth(setting)
        return found.step_s / setting.batch_size / float(busy_share(found.power_w, waits_w, room.left_w))

    least_s = min(sample_s(room.base.candidates[at]) for at in range(0, len(room.base), 7))
    assert sample_s(best.measurement.setting) <= 1.1 * least_s


def paused(
    search: LevelSearch, room: Headroom, knowledge: Knowledge, waits_w: Callable[[Setting], float]
) -> list[Setting]:
    """All that a search with pauses asks for, measured where waiting there leaves something."""
    asked: list[Setting] = []
    while (ask := search.ask(room, 0.0, 3600.0)) is not None:
        asked.append(ask.setting)
        knowledge.saw_waiting(ask.setting.mode, waits_w(ask.setting))
        if search.is_out(room, ask.setting):
            continue
        clock = (ask.setting.mode.gpu_mhz or 0.0) / 1000
        found = Measurement(ask.setting, step_s=0.01 / clock, power_w=5.0 + 4.0 * clock, peak_w=9.0)
        knowledge.add(found)
        search.tell(found)
    return asked


def test_modes_at_which_waiting_leaves_nothing_are_hardly_tried() -> None:
    """One after the other was waited at, each above the budget by itself."""
    room, _, knowledge = made_room(power_w=3.6)

    def waits_w(setting: Setting) -> float:
        return 2.9 + 0.8 * (setting.mode.mem_mhz or 0.0) / 1600

    asked = paused(LevelSearch(room, ControlOptions()), room, knowledge, waits_w)
    too_high = [setting for setting in asked if waits_w(setting) > 0.95 * room.held_w]
    assert len(asked) - len(too_high) >= 5
    assert len(too_high) <= 5


def test_the_best_that_was_measured_with_pauses_is_measured_again() -> None:
    room, _, knowledge = made_room(power_w=3.6)
    asked = paused(LevelSearch(room, ControlOptions()), room, knowledge, lambda _: 2.5)
    best = knowledge.best(room.problem())
    assert best is not None
    assert asked.count(best.measurement.setting) == 2
    assert len(asked) - len(set(asked)) <= MOST_TWICE


def test_where_the_first_mode_waits_for_too_much_lower_ones_are_tried() -> None:
    """One mode at which waiting drew too much had all others left out, the lowest too."""
    room, _, knowledge = made_room(power_w=3.6)

    def waits_w(setting: Setting) -> float:
        return 2.0 + 4.0 * (setting.mode.mem_mhz or 0.0) / 1600

    asked = paused(LevelSearch(room, ControlOptions()), room, knowledge, waits_w)
    assert waits_w(asked[0]) > 3.6
    assert sum(waits_w(setting) <= 0.95 * room.held_w for setting in asked) >= 5


def test_what_ran_out_of_memory_is_known_to_a_search_with_pauses() -> None:
    """Its tries were spent on batch sizes that had run out of memory, and it ended without one."""
    room, _, knowledge = made_room(power_w=3.6)
    search = LevelSearch(room, ControlOptions())
    ask = search.ask(room, 0.0, 3600.0)
    assert ask is not None
    failed = Measurement(replace(ask.setting, batch_size=16), status=Status.OUT_OF_MEMORY)
    knowledge.add(failed)
    search.tell(failed)
    asked = paused(search, room, knowledge, lambda _: 2.5)
    assert len(asked) >= 5
    assert search.is_paused
    assert all(setting.batch_size < 16 for setting in asked)


@given(
    waits_w=st.floats(1.0, 3.5), more_w=st.floats(0.1, 20.0), assumed_w=st.floats(1.0, 3.5), left_w=st.floats(3.6, 6.0)
)
def test_whatever_waiting_is_taken_to_draw_steps_have_the_share_that_they_have(
    waits_w: float, more_w: float, assumed_w: float, left_w: float
) -> None:
    room, _, knowledge = made_room(power_w=left_w, idle_w=assumed_w)
    setting = room.base.candidates[0]
    found = Measurement(setting, step_s=0.01, power_w=left_w + more_w, peak_w=left_w + more_w)
    knowledge.saw_waiting(setting.mode, waits_w)
    knowledge.add(found)
    problem = replace(room.problem(), idle_w=assumed_w)
    told = LevelSearch(room, ControlOptions())._paced(found, problem)
    assert problem.budget.power_w is not None
    assert busy_share(told.power_w, assumed_w, problem.budget.power_w) == pytest.approx(
        max(float(busy_share(found.power_w, waits_w, problem.budget.power_w)), LEAST_BUSY / 2)
    )


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
    room, _, knowledge = made_room()
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
    room, _, knowledge = made_room()
    room = replace(room, base=room.base.weighed(usual_shape()))
    search = LevelSearch(room, ControlOptions(most_a_level=8, least_gain=1e-6))
    assert searched(search, room, knowledge) >= 8
    knowledge.drift = Drift(extra_w=0.05)
    room = replace(room, base=room.base.weighed(usual_shape().given(8.0, 0.5)))
    assert 1 <= searched(search, room, knowledge) <= 2 * MOST_ANEW


def test_a_search_is_worth_what_it_gains_in_what_is_left_of_the_training() -> None:
    """A training of a minute searched for as long as one of an hour."""
    room, _, knowledge = made_room(power_w=8.0)
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


def test_where_what_a_search_had_found_is_lost_there_is_another_one() -> None:
    """Pauses seemed to draw so much that nothing but the slowest setting was left: it was kept for 40 minutes."""
    room, _, knowledge = made_room(power_w=8.0)
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
