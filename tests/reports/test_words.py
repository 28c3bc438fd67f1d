from __future__ import annotations

import pytest

from underwatt.events import BudgetChanged
from underwatt.reports.words import (
    allowed,
    bound,
    counted,
    duration,
    energy,
    energy_unit,
    figures,
    listed,
    mean_power,
    time_unit,
    times,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.012345, "0.0123"),
        (9.998, "10.0"),
        (12.34, "12.3"),
        (123.4, "123"),
        (28_559.0, "28,559"),
        (float("nan"), "–"),
    ],
)
def test_figures(value: float, text: str) -> None:
    assert figures(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (0.0123, "12.3 ms"), (59.9, "59.9 s"), (599.9, "10.0 min"), (7200, "2.00 h"), (864_000, "10.0 days")],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_never_is_said_in_words() -> None:
    assert duration(float("inf")) == "never"


@pytest.mark.parametrize(
    ("joules", "text"),
    [(0.0051, "5.10 mJ"), (12.5, "12.5 J"), (3150, "0.875 Wh"), (4.716e3, "1.31 Wh"), (7.2e6, "2.00 kWh")],
)
def test_energy(joules: float, text: str) -> None:
    assert energy(joules) == text


def test_units_fit_their_axis() -> None:
    assert time_unit(86_400) == (3600.0, "h")
    assert time_unit(600) == (60.0, "min")
    assert time_unit(0.01) == (1e-3, "ms")
    assert energy_unit(5e4) == (3600.0, "Wh")


def test_a_budget_reads_as_it_was_given() -> None:
    assert bound(6.0) == "6 W"
    assert times(1.3149) == "1.31×"


def test_counts_and_lists_read_as_sentences() -> None:
    assert [counted(n, "reading") for n in (0, 1, 2000)] == ["0 readings", "1 reading", "2,000 readings"]
    assert [listed(items) for items in (["a"], ["a", "b"], ["a", "b", "c"])] == ["a", "a and b", "a, b and c"]


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (BudgetChanged(power_w=3.0), "3 W mean"),
        (BudgetChanged(power_w=2.5, watts="peak"), "2.5 W peak"),
        (BudgetChanged(power_w=3.0, window_s=60.0), "3 W mean over 60 s"),
        (BudgetChanged(power_w=None), "no bound on watts"),
    ],
)
def test_a_budget_says_what_its_watts_bound(step: BudgetChanged, said: str) -> None:
    assert allowed(step) == said


def test_the_mean_of_a_short_run_is_said_to_be_worth_little() -> None:
    assert mean_power(60.0, 20.0) == "3.00 W on average"
    assert mean_power(6.0, 2.0) == "3.00 W on average (too short for watts and joules: the sensor lags)"
    assert "0 W" in mean_power(0.0, 0.0)
