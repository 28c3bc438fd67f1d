"""The judge of held budgets: it sees by the truth what was held, what could be, and whether the verdict is right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import _hold_judge
import hold
from _hold_judge import Drawn, faults, is_held, judge, longest, shares_over, summary

TICK_S = 0.1


def drawn(power_w: Any, step_s: float = 0.5) -> Drawn:
    at_s = TICK_S * np.arange(len(power_w) + 1)
    return Drawn(at_s, np.concatenate([[0.0], np.cumsum(power_w) * TICK_S]), np.arange(step_s, at_s[-1], step_s))


def over_for(seconds: float, by: float = 1.5, of_s: float = 1000.0) -> Any:
    """10 W, and so many times that for a while in the middle."""
    power_w = np.full(round(of_s / TICK_S), 10.0)
    power_w[round(500 / TICK_S) : round((500 + seconds) / TICK_S)] *= by
    return power_w


def figures(power_w: Any, budget_w: Any = 10.0, *, peak: bool = False, came_s: tuple[float, ...] = ()) -> Any:
    return judge(drawn(power_w), np.broadcast_to(budget_w, len(power_w)), came_s, lag_s=2.0, peak=peak)


def test_a_run_that_draws_what_is_allowed_is_held() -> None:
    found = figures(np.full(1000, 10.0), 10.0)
    assert found["was_held"]
    assert found["energy_over_pct"] == pytest.approx(0.0, abs=1e-9)
    assert found["time_over_pct"] == found["longest_over_s"] == 0.0
    assert found["worst_over_pct"] == pytest.approx(0.0, abs=1e-9)
    assert found["readings_over"] is None


@pytest.mark.parametrize(("seconds", "held"), [(4.0, True), (7.0, False)])
def test_more_than_two_percent_over_for_more_than_one_percent_of_the_run_is_not_held(
    seconds: float, held: bool
) -> None:
    found = figures(over_for(seconds))
    assert found["was_held"] is held
    # A mean over five seconds tells of what was drawn for five seconds after it.
    assert found["time_over_pct"] == pytest.approx((seconds + 4.8) / 10, abs=0.1)
    assert found["worst_over_pct"] == pytest.approx(50 * min(1.0, seconds / 5))
    assert found["longest_over_s"] == pytest.approx(seconds + 0.9, abs=0.2)


def test_what_is_over_by_less_than_the_tolerance_is_held_for_any_time() -> None:
    assert figures(np.full(1000, 10.19))["was_held"]
    assert not figures(np.full(1000, 10.21))["was_held"]


def test_the_lag_after_a_load_came_is_excused_for_the_time_over_and_for_nothing_else() -> None:
    plain, excused = figures(over_for(1.5)), figures(over_for(1.5), came_s=(500.0,))
    assert excused["time_over_1s_pct"] < plain["time_over_1s_pct"]
    assert all(plain[key] == excused[key] for key in plain if key != "time_over_1s_pct")


def test_where_five_steps_take_longer_they_are_the_window() -> None:
    # Steps of 3 s at 15 W, each followed by a pause of 3 s at 5 W: 10 W over any five of them.
    power_w = np.tile(np.repeat([15.0, 5.0], 30), 100)
    ends_s = 3.0 + 6.0 * np.arange(100)
    budget_w = np.full(len(power_w), 10.0)
    assert not is_held(shares_over(drawn(power_w), budget_w, peak=False), peak=False)
    slow = Drawn(drawn(power_w).at_s, drawn(power_w).energy_j, ends_s)
    share = shares_over(slow, budget_w, peak=False)
    assert share[-1000:].max() <= 0.001


def test_a_wait_without_steps_is_judged_all_the_same() -> None:
    power_w = np.concatenate([np.full(1000, 10.0), np.full(3000, 10.5)])
    waits = Drawn(drawn(power_w).at_s, drawn(power_w).energy_j, np.arange(0.5, 100.0, 0.5))
    assert not is_held(shares_over(waits, np.full(len(power_w), 10.0), peak=False), peak=False)


def test_peak_watts_bound_every_reading() -> None:
    power_w = np.full(10_000, 9.0)
    power_w[[100, 200]] = 10.1, 12.0
    found = figures(power_w, peak=True)
    assert found["readings_over"] == 2
    assert found["readings_over_pct"] == pytest.approx(0.02)
    assert found["worst_over_pct"] == pytest.approx(20.0)
    assert not found["was_held"]
    assert figures(np.full(100, 9.99), peak=True)["was_held"]


def test_the_longest_time_over_is_the_longest_without_a_break() -> None:
    assert longest(np.array([False, True, True, False, True, True, True])) == 3
    assert longest(np.zeros(5, dtype=bool)) == 0


def row(**other: Any) -> dict[str, Any]:
    plain = {"can_hold": True, "was_held": True, "said_held": True, "error": None, "readings_over": None}
    figures = {"energy_over_pct": 0.1, "time_over_pct": 0.5, "longest_over_s": 1.0, "worst_over_pct": 3.0}
    more = {"case": "nano live 0", "board": "nano", "kind": "live", "seed": 0, "time_over_oracle": 1.05}
    return plain | figures | more | other


@pytest.mark.parametrize(
    ("other", "missed"),
    [
        ({}, []),
        ({"said_held": False}, ["verdict"]),
        ({"said_held": None}, ["verdict"]),
        ({"was_held": False}, ["verdict", "held"]),
        ({"was_held": False, "said_held": False}, ["held"]),
        ({"can_hold": False, "was_held": False, "said_held": False, "energy_over_pct": 9.0, "time_over_pct": 9.0}, []),
        ({"can_hold": False, "was_held": False}, ["verdict"]),
        ({"can_hold": False, "error": "too little", "said_held": None}, []),
        ({"error": "too little"}, ["no error", "verdict"]),
        ({"energy_over_pct": 0.6, "time_over_pct": 1.1}, ["energy over", "time over"]),
        ({"readings_over": 1}, ["readings over"]),
    ],
)
def test_a_row_says_what_it_misses(other: dict[str, Any], missed: list[str]) -> None:
    assert faults(row(**other)) == missed


def test_the_summary_counts_and_takes_the_worst_of_what_can_be_held() -> None:
    impossible = {"can_hold": False, "was_held": False, "said_held": False, "energy_over_pct": 9.0}
    rows = [row(), row(was_held=False, time_over_oracle=1.2), row(**impossible, time_over_oracle=None)]
    live, board = summary(rows)
    assert (live["case"], board["case"], live["runs"]) == ("live", "all", 3)
    assert (live["right"], live["held"]) == ("2 of 3", "1 of 2")
    assert live["energy_over_pct"] == 0.1
    assert live["time_over_oracle"] == pytest.approx((1.05 * 1.2) ** 0.5)
    text = _hold_judge.report(rows)
    assert "missed: 2" in text
    assert "nano: 1.122× the oracle's time" in text


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [("--cases", "live,nothing", "search-disturbed"), ("--boards", "toaster", "orin-nano"), ("--seeds", "a", "0-5")],
)
def test_an_unknown_case_is_an_error_that_lists_those_there_are(
    option: str, value: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        hold.main([option, value])
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_every_case_can_be_held_but_the_one_below_what_waiting_draws(tmp_path: Path) -> None:
    at_s = np.arange(0.0, hold.HORIZON_S, hold.TICK_S)
    for board in hold.BOARDS:
        for kind in ("live", "live-below"):
            assert hold.Run(hold.make_case(board, kind, 0), tmp_path)._can_hold(at_s) is (kind == "live")


def test_a_run_posts_its_budgets_and_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hold, "HORIZON_S", 50.0)
    found = hold.one("nano", "live-below", 0)
    assert found["can_hold"] is False
    assert found["was_held"] is False
    assert found["time_over_oracle"] is None
    assert found["took_s"] > 25.0
    assert all(column.key in found | {"faults": ""} for column in hold.COLUMNS)
