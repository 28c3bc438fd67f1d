from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from underwatt.budget import Budget, Schedule, Watts, parse_budget, parse_watts
from underwatt.errors import InputError
from underwatt.records import Measurement, PowerMode, Setting, Status, from_json, to_json

OFFICE = "08:00-18:00=15W,else=7W"
SETTING = Setting(PowerMode(gpu_mhz=600.0), 8)


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("10W", Budget(power_w=10.0)),
        ("7.5 W", Budget(power_w=7.5)),
        ("3 watts", Budget(power_w=3.0)),
        ("3 Watt peak", Budget(power_w=3.0, watts=Watts.PEAK)),
        (" 10 w ", Budget(power_w=10.0)),
        ("1.5kW", Budget(power_w=1500.0)),
        ("7500mW", Budget(power_w=7.5)),
        ("1e1W", Budget(power_w=10.0)),
        ("10W peak", Budget(power_w=10.0, watts=Watts.PEAK)),
        ("10W mean over 1min", Budget(power_w=10.0, window_s=60.0)),
        ("50Wh", Budget(energy_j=180_000.0)),
        ("2kWh", Budget(energy_j=7.2e6)),
        ("3MJ", Budget(energy_j=3e6)),
        ("2h", Budget(deadline_s=7200.0)),
        ("90 min", Budget(deadline_s=5400.0)),
    ],
)
def test_reads_what_people_write(text: str, budget: Budget) -> None:
    assert parse_budget(text) == budget


def test_several_bounds_together() -> None:
    all_three = Budget(power_w=10.0, energy_j=180_000.0, deadline_s=7200.0)
    assert parse_budget("10W", "50Wh", "2h") == parse_budget("10W, 50Wh,2h") == all_three
    assert parse_budget(f"{OFFICE}, 50Wh") == parse_budget(OFFICE, "50Wh")


@pytest.mark.parametrize(
    "text",
    ["", "W", "ten watts", "10", "-5W", "0W", "10X", "10V", "10MW", "3mj", "nanW", "infW", "1e999W", "10W often",
     "10W peak over 60s", "10W mean over 5W", "10W mean over", "2h peak", "10WW", "10 W 20 W"],
)  # fmt: skip
def test_nonsense_is_refused_with_the_text_in_the_message(text: str) -> None:
    with pytest.raises(InputError) as error:
        parse_budget(text)
    assert text in error.value.message or not text


def test_a_bound_given_twice_is_refused() -> None:
    with pytest.raises(InputError, match="power twice"):
        parse_budget("10W", "12W")
    with pytest.raises(InputError, match="power twice"):
        parse_budget("10W", OFFICE)
    with pytest.raises(InputError, match="deadline twice"):
        parse_budget("10W, 2h, 3h")
    with pytest.raises(InputError, match="empty"):
        parse_budget()


@given(st.text(max_size=20))
def test_any_text_is_a_budget_or_an_input_error(text: str) -> None:
    try:
        budget = parse_budget(text)
    except InputError:
        return
    bounds = [bound for bound in (budget.power_w, budget.energy_j, budget.deadline_s) if bound is not None]
    assert bounds
    assert all(0 < bound < math.inf for bound in bounds)


@given(st.floats(1e-3, 1e6), st.sampled_from(["W", "kW", "mW"]), st.sampled_from(["", " "]))
def test_numbers_survive(number: float, unit: str, space: str) -> None:
    factor = {"W": 1.0, "kW": 1e3, "mW": 1e-3}[unit]
    assert parse_budget(f"{number!r}{space}{unit}").power_w == pytest.approx(number * factor)


@pytest.mark.parametrize("bad", [-1.0, 0.0, math.nan, math.inf])
def test_a_budget_cannot_hold_nonsense(bad: float) -> None:
    for name in ("power_w", "energy_j", "deadline_s"):
        with pytest.raises(InputError):
            Budget(**{name: bad})
    with pytest.raises(InputError):
        Budget()
    with pytest.raises(InputError):
        Budget(power_w=10.0, watts=Watts.PEAK, window_s=5.0)


def test_peak_and_mean_watts_bound_different_things() -> None:
    measured = Measurement(SETTING, step_s=0.1, power_w=9.0, peak_w=11.0)
    assert parse_budget("10W").allows(measured)
    assert not parse_budget("10W peak").allows(measured)
    assert not parse_budget("10W").allows(Measurement(SETTING, status=Status.OUT_OF_MEMORY))


def test_no_peak_is_below_the_mean_whatever_pauses_a_sensor_showed() -> None:
    between_pauses = Measurement(SETTING, step_s=0.1, power_w=3.5, peak_w=2.2)
    assert not parse_budget("2.5W peak").allows(between_pauses)
    assert parse_budget("3.6W peak").allows(between_pauses)


def test_a_peak_that_was_not_recorded_is_an_error_and_not_a_zero() -> None:
    with pytest.raises(InputError, match="peak power"):
        parse_budget("10W peak").allows(Measurement(SETTING, step_s=0.1, power_w=9.0))


AMOUNTS = st.none() | st.floats(1e-6, 1e12) | st.integers(1, 10**6).map(float)


@st.composite
def budgets(draw: st.DrawFn) -> Budget:
    bounds = {name: draw(AMOUNTS) for name in ("power_w", "energy_j", "deadline_s")}
    bounds["power_w"] = bounds["power_w"] or (None if bounds["energy_j"] or bounds["deadline_s"] else 10.0)
    watts = draw(st.sampled_from(Watts)) if bounds["power_w"] else Watts.MEAN
    window_s = draw(AMOUNTS) if bounds["power_w"] and watts is Watts.MEAN else None
    return Budget(**bounds, watts=watts, window_s=window_s)


@given(budgets())
def test_what_it_says_reads_back_as_itself(budget: Budget) -> None:
    assert parse_budget(str(budget)) == budget


def test_a_budget_of_a_schedule_allows_at_most_the_highest_of_its_watts() -> None:
    budget = parse_budget(OFFICE, "2h")
    assert budget.schedule is not None
    assert budget.power_w == 15.0
    assert budget.constant() == Budget(power_w=15.0, deadline_s=7200.0)
    assert budget.constant(9.0) == Budget(power_w=9.0, deadline_s=7200.0)
    assert replace(budget, deadline_s=None) == parse_budget(OFFICE)
    with pytest.raises(InputError, match="Both power and a schedule"):
        replace(budget, power_w=7.0)
    peak = replace(budget, watts=Watts.PEAK, deadline_s=None)
    assert str(peak) == "08:00-18:00=15W,18:00-08:00=7W peak"


def test_a_schedule_that_never_changes_is_a_constant_budget() -> None:
    assert Budget(schedule=Schedule.constant(15.0)) == parse_budget("else=15W") == Budget(power_w=15.0)
    assert Budget(power_w=15.0).course == Schedule.constant(15.0)
    assert Budget(energy_j=1.0).course is None


def test_whatever_says_a_budget() -> None:
    budget = parse_budget(OFFICE)
    assert budget.schedule is not None
    assert Budget.of(budget) == Budget.of(OFFICE) == Budget.of(budget.schedule) == budget
    assert Budget.of(10) == Budget.of("10W") == Budget(power_w=10.0)


def test_other_watts_keep_their_meaning_unless_they_say_it() -> None:
    budget = parse_budget("10W mean over 60s", "2h")
    assert replace(budget, **parse_watts("7W")) == parse_budget("7W mean over 60s", "2h")
    assert replace(budget, **parse_watts("7W mean")) == parse_budget("7W", "2h")
    scheduled = replace(budget, **parse_watts(OFFICE))
    assert scheduled == Budget(schedule=parse_budget(OFFICE).schedule, window_s=60.0, deadline_s=7200.0)
    assert replace(scheduled, **parse_watts("7W peak")) == parse_budget("7W peak", "2h")
    with pytest.raises(InputError, match="bounds no power"):
        parse_watts("3h")
    with pytest.raises(InputError, match="bounds more than power"):
        parse_watts("7W, 3h")


def test_a_plan_file_says_nothing_of_schedules() -> None:
    plain = to_json(parse_budget("10W peak"))
    assert plain == {"power_w": 10.0, "watts": "peak", "window_s": None, "energy_j": None, "deadline_s": None}
    scheduled = parse_budget(OFFICE, "2h")
    assert from_json(Budget, to_json(scheduled)) == scheduled


def test_says_itself() -> None:
    assert str(parse_budget("10W peak", "2h")) == "10 W peak, 2 h"
    assert str(parse_budget("10W mean over 60s", "50Wh")) == "10 W mean over 60 s, 50 Wh"


@pytest.mark.parametrize(
    ("bound", "said"),
    [
        ("1.4s", "1.4 s"),
        ("90s", "1.5 min"),
        ("90min", "1.5 h"),
        ("48h", "48 h"),
        ("1J", "1 J"),
        ("0.5Wh", "1800 J"),
        ("1Wh", "1 Wh"),
        ("2kWh", "2 kWh"),
        ("3MJ", "3 MJ"),
        ("12345J", "12345 J"),
        ("100s", "100 s"),
        ("0.1234567Wh", "444.44412 J"),
        ("0.001J", "0.001 J"),
    ],
)
def test_says_itself_in_a_unit_that_suits(bound: str, said: str) -> None:
    assert str(parse_budget(bound)) == said


def test_a_number_without_a_unit_is_asked_about() -> None:
    with pytest.raises(InputError) as error:
        parse_budget("3")
    assert "Did you mean 3W?" in error.value.hint


def test_a_measurement_keeps_the_budget_with_its_interval() -> None:
    setting = Setting(PowerMode(gpu_mhz=100.0), 8)
    budget = parse_budget("10W")
    assert budget.allows(Measurement(setting, 0.1, 9.9))
    assert budget.allows(Measurement(setting, 0.1, 9.9, power_w_ci95=0.1))
    assert not budget.allows(Measurement(setting, 0.1, 9.9, power_w_ci95=0.2))
    assert not budget.allows(Measurement(setting, status=Status.OUT_OF_MEMORY))
