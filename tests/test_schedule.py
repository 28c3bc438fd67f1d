from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from underwatt.budget import DAY_S, Budget, Schedule, parse_budget, read_schedule
from underwatt.errors import InputError

HOUR_S = 3600.0


def parse_schedule(text: str) -> Schedule:
    """The watts of a budget over time."""
    course = parse_budget(text).course
    assert course is not None
    return course


OFFICE = parse_schedule("08:00-18:00=15W,else=7W")

watts = st.floats(0.1, 1e4)
moments = st.floats(-1e6, 1e7)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    period_s = draw(st.sampled_from([None, DAY_S, 10.0, 0.3]))
    times = st.integers(0, round(1000 * (period_s or 1e5)) - 1).map(lambda ms: ms / 1000)
    begins_s = sorted(draw(st.lists(times, min_size=1, max_size=8, unique=True)))
    if period_s is None:
        begins_s[0] = 0.0
    return Schedule.of([(begin_s, draw(watts)) for begin_s in begins_s], period_s)


@st.composite
def daily_texts(draw: st.DrawFn) -> tuple[str, list[tuple[int, int, float]], float]:
    """Ranges of whole seconds that do not overlap, as text; the last may cross midnight."""
    edges = sorted(draw(st.sets(st.integers(0, 86_399), min_size=2, max_size=8)))
    shift = draw(st.booleans())
    pairs = list(zip(edges[::2], edges[1::2], strict=False))
    if shift and len(edges) % 2 == 0:
        pairs = [*zip(edges[1:-1:2], edges[2::2], strict=True), (edges[-1], edges[0])]
    ranges = [(begin, end, draw(watts)) for begin, end in pairs]
    rest_w = draw(watts)

    def clock(second: int) -> str:
        return f"{second // 3600:02d}:{second // 60 % 60:02d}:{second % 60:02d}"

    parts = [f"{clock(begin)}-{clock(end)}={level_w!r}W" for begin, end, level_w in ranges]
    return ",".join(draw(st.permutations([*parts, f"else={rest_w!r}W"]))), ranges, rest_w


@given(schedules(), moments, st.floats(0, 50))
def test_pieces_tile_an_interval_and_agree_with_the_power(schedule: Schedule, begin_s: float, long_s: float) -> None:
    end_s = begin_s + long_s
    pieces = schedule.pieces(begin_s, end_s)
    assert [begin for begin, _, _ in pieces] == [begin_s, *(end for _, end, _ in pieces[:-1])][: len(pieces)]
    assert not pieces or pieces[-1][1] == end_s
    for at, (begin, end, level_w) in enumerate(pieces):
        assert begin < end
        for moment in (begin, (begin + end) / 2, math.nextafter(end, -math.inf)):
            assert begin > moment or schedule.power_w(moment) == level_w
        assert at == 0 or level_w != pieces[at - 1][2]


@given(schedules(), moments)
def test_the_next_change_is_the_first_moment_with_other_watts(schedule: Schedule, at_s: float) -> None:
    change_s = schedule.next_change_s(at_s)
    assert change_s > at_s
    if math.isinf(change_s):
        assert schedule.power_w(at_s) == schedule.power_w(1e12)
    else:
        assert schedule.power_w(change_s) != schedule.power_w(at_s)
        assert schedule.power_w(math.nextafter(change_s, -math.inf)) == schedule.power_w(at_s)


@given(daily_texts(), st.integers(0, 86_399))
def test_a_time_of_day_has_the_watts_of_its_range(
    written: tuple[str, list[tuple[int, int, float]], float], second: int
) -> None:
    text, ranges, rest_w = written
    schedule = parse_schedule(text)
    expected_w = rest_w
    for begin, end, level_w in ranges:
        inside = begin <= second < end if begin < end else second >= begin or second < end
        expected_w = level_w if inside else expected_w
    assert schedule.power_w(second) == expected_w
    assert schedule.power_w(second + 3 * DAY_S) == expected_w
    assert parse_schedule(str(schedule)) == schedule
    assert parse_budget(str(Budget(schedule=schedule, energy_j=5.0))) == Budget(schedule=schedule, energy_j=5.0)


@given(daily_texts(), st.integers(0, 86_399), st.integers(0, 200_000))
def test_a_run_that_starts_at_a_time_of_day(
    written: tuple[str, list[tuple[int, int, float]], float], start: int, later: int
) -> None:
    schedule = parse_schedule(written[0])
    assert schedule.starting_at(start).power_w(later) == schedule.power_w(start + later)


@given(schedules(), st.floats(0, 1))
def test_starting_at_keeps_the_levels(schedule: Schedule, part: float) -> None:
    period_s = schedule.period_s or 1.0
    shifted = schedule.starting_at(min(part * period_s, math.nextafter(period_s, 0)))
    assert shifted.highest_w <= schedule.highest_w
    assert (shifted == schedule) or schedule.period_s is not None


def test_reads_what_people_write() -> None:
    assert parse_schedule("15W") == Schedule.constant(15) == parse_schedule("else=15W")
    assert parse_schedule(" 00:00-24:00 = 1.5 kW ") == Schedule.constant(1500)
    assert (OFFICE.lowest_w, OFFICE.highest_w) == (7, 15)
    assert OFFICE.pieces(0, DAY_S) == [
        (0, 8 * HOUR_S, 7), (8 * HOUR_S, 18 * HOUR_S, 15), (18 * HOUR_S, DAY_S, 7),
    ]  # fmt: skip
    assert str(OFFICE) == "08:00-18:00=15W,18:00-08:00=7W"
    night = parse_schedule("22:00-06:00=5W,06:00-22:00=9W")
    assert [night.power_w(hour * HOUR_S) for hour in (0, 6, 21.99, 22)] == [5, 9, 9, 5]
    assert night.pieces(21 * HOUR_S, 31 * HOUR_S) == [
        (21 * HOUR_S, 22 * HOUR_S, 9), (22 * HOUR_S, 30 * HOUR_S, 5), (30 * HOUR_S, 31 * HOUR_S, 9),
    ]  # fmt: skip
    assert OFFICE.starting_at(7 * HOUR_S).next_change_s(0) == HOUR_S
    assert parse_schedule("08:00:30.5-9:00=3W,else=2W").power_w(8 * HOUR_S + 30.5) == 3


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no budget"),
        ("15", "no budget"),
        ("else=15W peak", "watts"),
        ("-5W", "above zero"),
        ("nanW", "no budget"),
        ("08:00-18:00=15W", "18:00 to 24:00|00:00 to 08:00"),
        ("08:00-18:00=15W,17:00-19:00=5W,else=7W", "overlap"),
        ("22:00-06:00=15W,05:00-07:00=5W,else=7W", "overlap"),
        ("08:00-18:00=15W,08:00-18:00=15W,else=7W", "overlap"),
        ("08:00-08:00=15W,else=7W", "empty"),
        ("08:00-18:00=15W,else=7W,else=8W", "two parts"),
        ("08:00-18:00=15W,7W", "makes no sense"),
        ("08:00-25:00=15W,else=7W", "no range"),
        ("24:00-08:00=15W,else=7W", "no range"),
        ("08:60-18:00=15W,else=7W", "no range"),
        ("08:00=15W,else=7W", "no range"),
        ("day=15W,else=7W", "no range"),
        ("08:00-18:00=2h,else=7W", "watts"),
        ("08:00-18:00=0W,else=7W", "above zero"),
        ("=,=", "no budget"),
    ],
)
def test_nonsense_is_refused(text: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        parse_schedule(text)


@given(st.text(alphabet="0123456789:-=,Welsk. ", max_size=30) | st.text(max_size=20))
def test_any_text_is_a_schedule_or_an_input_error(text: str) -> None:
    try:
        schedule = parse_budget(text).course
    except InputError:
        return
    assert schedule is None or 0 < schedule.lowest_w <= schedule.highest_w < math.inf


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "watts.csv"


def test_a_file_of_elapsed_seconds(file: Path) -> None:
    file.write_text("at_s,power_w\n0,15\n600,7\n600.5,7\n1200,12\n")
    schedule = read_schedule(file)
    assert schedule == Schedule((0.0, 600.0, 1200.0), (15.0, 7.0, 12.0))
    assert schedule.starting_at(HOUR_S) == schedule
    assert schedule.power_w(1e9) == 12
    assert schedule.next_change_s(1200) == math.inf


def test_a_file_of_times_of_day(file: Path) -> None:
    file.write_text("﻿power_w,time\n15,08:00\n7,18:00:00\n", encoding="utf-8")
    assert read_schedule(str(file)) == OFFICE


@pytest.mark.parametrize(
    ("text", "says", "hint"),
    [
        ("at_s,power_w\n0,15\n60,-7\n", "line 3.*-7", "line 3"),
        ("at_s,power_w\n0,nan\n", "line 2", "line 2"),
        ("at_s,power_w\n0,0\n", "line 2", "idle"),
        ("at_s,power_w\n0,15\n60\n", "line 3", "line 3"),
        ("at_s,power_w\n0,15\nsoon,7\n", "line 3.*soon", "line 3"),
        ("at_s,power_w\n0,15\n60,7\n50,8\n", "line 4.*before", "line 4"),
        ("at_s,power_w\n0,15\n60,7\n60,8\n", "line 4.*same", "line 4"),
        ("at_s,power_w\n5,15\n", "begins at 5 s", "0 s"),
        ("at_s,power_w\ninf,15\n", "line 2", "line 2"),
        ("time,power_w\n08:00,15\n24:00,7\n", "line 3.*24:00", "line 3"),
        ("time,power_w\n18:00,15\n08:00,7\n", "line 3.*before", "line 3"),
        ("time,power_w\n8 o'clock,15\n", "line 2", "08:00"),
        ("at_s,power_w\n", "empty", "one line"),
        ("", "columns", "at_s,power_w"),
        ("at_s,watts\n0,15\n", "columns", "at_s,power_w"),
        ("power_w\n15\n", "columns", "time,power_w"),
        ("at_s,time,power_w\n0,08:00,15\n", "columns", "time,power_w"),
    ],
)
def test_a_wrong_file_is_named_with_its_line(file: Path, text: str, says: str, hint: str) -> None:
    file.write_text(text)
    with pytest.raises(InputError, match=says) as error:
        read_schedule(file)
    assert hint in error.value.hint
    assert str(file) in error.value.message


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_schedule(tmp_path / "no.csv")


@pytest.mark.parametrize(
    ("begins_s", "levels_w", "period_s"),
    [
        ((), (), None),
        ((0.0,), (1.0, 2.0), None),
        ((1.0,), (1.0,), None),
        ((-1.0, 5.0), (1.0, 2.0), DAY_S),
        ((0.0, 5.0, 5.0), (1.0, 2.0, 3.0), None),
        ((0.0, DAY_S), (1.0, 2.0), DAY_S),
        ((0.0, math.nan), (1.0, 2.0), None),
        ((0.0,), (math.inf,), None),
        ((0.0,), (-1.0,), None),
    ],
)
def test_a_schedule_cannot_hold_nonsense(
    begins_s: tuple[float, ...], levels_w: tuple[float, ...], period_s: float | None
) -> None:
    with pytest.raises(InputError):
        Schedule(begins_s, levels_w, period_s)


def test_an_interval_or_a_time_of_day_that_makes_no_sense() -> None:
    assert OFFICE.pieces(5.0, 5.0) == []
    with pytest.raises(InputError, match="finite"):
        OFFICE.pieces(0.0, math.inf)
    with pytest.raises(InputError, match="time of day"):
        OFFICE.starting_at(DAY_S)


def test_a_separator_of_old_teletypes_at_the_end_of_a_line_is_no_traceback(tmp_path: Path) -> None:
    path = tmp_path / "schedule.csv"
    path.write_text("at_s,power_w\n0,10\n60,7.5\x1d")
    assert read_schedule(path).power_w(61.0) == 7.5
