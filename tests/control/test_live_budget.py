from __future__ import annotations

import math
from datetime import datetime, timedelta, timezone
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, strategies as st

from underwatt.budget import Budget, Schedule, Watts, parse_budget
from underwatt.control.live_budget import POLL_S, LiveBudget
from underwatt.errors import InputError
from underwatt.runlog.inbox import Inbox, post_budget

LEVELS = st.lists(st.tuples(st.floats(0.1, 500.0), st.floats(1.0, 300.0)), min_size=1, max_size=8)


def schedule_of(levels: list[tuple[float, float]]) -> Schedule:
    at_s, steps = 0.0, []
    for seconds, power_w in levels:
        steps.append((at_s, power_w))
        at_s += seconds
    return Schedule.of(steps)


@given(LEVELS, st.floats(0.0, 2000.0), st.floats(0.0, 500.0))
def test_the_lowest_of_an_interval_is_the_lowest_of_its_moments(
    levels: list[tuple[float, float]], begin_s: float, seconds: float
) -> None:
    live = LiveBudget(Budget(schedule=schedule_of(levels)))
    end_s = begin_s + seconds
    moments = [begin_s] + [at_s for at_s in live.schedule.begins_s if begin_s <= at_s < end_s]  # type: ignore[union-attr]
    assert live.lowest_w(begin_s, end_s) == min(live.power_w(at_s) for at_s in moments)
    assert live.next_change_s(begin_s) > begin_s


@given(st.floats(0, 86_399), st.floats(0, 200_000))
def test_a_daily_schedule_counts_from_the_time_of_day_at_the_start(start_s: float, elapsed_s: float) -> None:
    live = LiveBudget(parse_budget("08:00-18:00=15W,else=7W"), time_of_day_s=start_s)
    clock_s = (start_s + elapsed_s) % 86_400
    if min(abs(clock_s - edge) for edge in (0, 8 * 3600, 18 * 3600, 86_400)) > 1e-3:
        assert live.power_w(elapsed_s) == (15.0 if 8 * 3600 <= clock_s < 18 * 3600 else 7.0)


def test_without_watts_nothing_is_bounded_until_somebody_says_so() -> None:
    live = LiveBudget(parse_budget("50Wh"))
    assert live.schedule is None
    assert (live.power_w(0), live.lowest_w(0, 1e9), live.next_change_s(0)) == (math.inf,) * 3
    live.change("7W")
    assert live.lowest_w(0, 1e9) == 7.0
    assert live.budget.energy_j == 180_000.0


def test_watts_that_are_changed_bring_their_meaning() -> None:
    live = LiveBudget(parse_budget("10W mean over 60s", "2h"))
    live.change("8W peak")
    assert live.budget.watts is Watts.PEAK
    assert live.budget.window_s is None
    assert live.budget.deadline_s == 7200.0
    live.change("06:00-07:00=5W,else=6W")
    assert live.lowest_w(0, 86_400) == 5.0
    with pytest.raises(InputError, match="bounds no power"):
        live.change("3h")


def test_it_says_what_was_given() -> None:
    for text, said in (
        ("10W", "10W"),
        ("10W peak", "10 W peak"),
        ("50Wh", "50 Wh"),
        ("08:00-18:00=15W,else=7W", "08:00-18:00=15W,18:00-08:00=7W"),
    ):
        assert str(LiveBudget(parse_budget(text))) == said
        assert str(LiveBudget.from_now(parse_budget(text), simulated=True)) == said


def test_the_inbox_is_looked_at_a_few_times_a_second(tmp_path: Path) -> None:
    live = LiveBudget(Budget(power_w=10.0))
    assert not live.poll(0.0)
    live.inbox = Inbox(tmp_path)
    assert not live.poll(0.0)
    post_budget(tmp_path, "7W", "command")
    assert not live.poll(POLL_S / 2), "looked too soon"
    assert live.poll(POLL_S)
    assert live.power_w(POLL_S) == 7.0
    assert not live.poll(2 * POLL_S)


class Wall:
    """A wall clock in a time zone, over a machine's own seconds; somebody may set it, or the machine may sleep."""

    def __init__(self, begins: str, zone: str = "Europe/Berlin") -> None:
        self.zone = ZoneInfo(zone)
        self.begun = datetime.fromisoformat(begins).replace(tzinfo=self.zone).astimezone(timezone.utc)
        self.elapsed_s = self.ahead_s = 0.0  # of the machine; by which the clock was put forward

    def __call__(self) -> float:
        now = (self.begun + timedelta(seconds=self.elapsed_s + self.ahead_s)).astimezone(self.zone)
        return 3600.0 * now.hour + 60.0 * now.minute + now.second + now.microsecond / 1e6


def watts_at(live: LiveBudget, wall: Wall, elapsed_s: float) -> float:
    """What holds after so many seconds, where it was polled on the way."""
    wall.elapsed_s = elapsed_s
    assert not live.poll(elapsed_s), "nobody asked for anything"
    return live.power_w(elapsed_s)


@pytest.mark.parametrize(
    ("begins", "hours"),
    [("2026-03-28T20:00", 11.0), ("2026-10-24T20:00", 13.0), ("2026-06-01T20:00", 12.0)],  # to 08:00 on the wall
)
def test_eight_in_the_morning_is_eight_in_summer_and_in_winter(begins: str, hours: float) -> None:
    wall = Wall(begins)
    live = LiveBudget(parse_budget("08:00-18:00=15W,else=7W"), wall_clock=wall)
    assert watts_at(live, wall, 0.0) == 7.0
    assert watts_at(live, wall, 3600 * hours - 60) == 7.0
    assert live.next_change_s(3600 * hours - 60) == pytest.approx(3600 * hours, abs=2)
    assert watts_at(live, wall, 3600 * hours + 60) == 15.0


@given(st.floats(-40_000, 40_000), st.floats(0, 100_000))
def test_a_clock_that_is_set_late_or_goes_on_while_the_machine_sleeps_is_followed(ahead_s: float, at_s: float) -> None:
    wall = Wall("2026-06-01T07:00")
    live = LiveBudget(parse_budget("08:00-18:00=15W,else=7W"), wall_clock=wall)
    wall.ahead_s = ahead_s
    found_w, clock_s = watts_at(live, wall, at_s), wall()
    if min(abs(clock_s - edge) for edge in (0, 8 * 3600, 18 * 3600, 86_400)) > 2:
        assert found_w == (15.0 if 8 * 3600 <= clock_s < 18 * 3600 else 7.0)


def test_a_schedule_that_is_posted_after_the_clock_was_set_holds_by_that_clock(tmp_path: Path) -> None:
    wall = Wall("2026-06-01T07:00")
    live = LiveBudget(Budget(power_w=10.0), inbox=Inbox(tmp_path), wall_clock=wall)
    wall.ahead_s = 2 * 3600.0
    post_budget(tmp_path, "08:00-18:00=15W,else=7W", "command")
    assert live.poll(1.0)
    assert live.power_w(1.0) == 15.0


def test_seconds_since_the_start_are_no_matter_of_the_wall() -> None:
    wall = Wall("2026-06-01T07:00")
    live = LiveBudget(Budget(schedule=Schedule.of([(0.0, 9.0), (100.0, 5.0)])), wall_clock=wall)
    wall.ahead_s = 7200.0
    assert [watts_at(live, wall, at_s) for at_s in (50.0, 150.0)] == [9.0, 5.0]
