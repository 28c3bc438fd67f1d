from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from underwatt.budget import Budget, Schedule
from underwatt.errors import InputError
from underwatt.fleet.rounds import FrontPoint, Fronts
from underwatt.fleet.site import MARGIN, Site, divide

FLOOR_W, IDLE_W = 3.0, 2.0
RULES = ("furthest", "filled", "equal")


def _fronts(count: int, seed: int = 0) -> Fronts:
    chance = Random(seed)
    fronts = []
    for _ in range(count):
        fast = chance.uniform(0.002, 0.02)
        fronts.append([FrontPoint(16, 4.0 + 2 * k, fast * 2 ** (3 - k), fast * 2 ** (3 - k) * 1.05) for k in range(4)])
    return Fronts.of(fronts, [IDLE_W] * count)


def _divided(count: int, spare_w: float, *, rule: str = "furthest", seed: int = 0) -> np.ndarray:
    floors = np.full(count, FLOOR_W)
    free, data = np.ones(count, dtype=bool), np.full(count, 100.0)
    return divide(_fronts(count, seed), floors, np.full(count, 12.0), data, free, spare_w, 256.0, rule=rule)


@settings(max_examples=40)
@given(st.integers(1, 20), st.floats(0, 300), st.sampled_from(RULES[:2]), st.integers(0, 5))
def test_shares_are_within_the_source_and_each_boards_limits(count: int, spare_w: float, rule: str, seed: int) -> None:
    granted = _divided(count, spare_w, rule=rule, seed=seed)
    assert (granted >= FLOOR_W - 1e-9).all()
    assert (granted <= 12.0 + 1e-9).all()
    assert (granted - FLOOR_W).sum() <= spare_w + 1e-6


def test_watts_go_to_where_the_next_one_brings_most_and_to_none_too_many() -> None:
    fronts, data = _fronts(8), 100.0
    passes = {rule: fronts.rate_at(_divided(8, 24.0, rule=rule), 256.0) / data for rule in RULES[:2]}
    assert np.sqrt(passes["furthest"]).sum() > 1.01 * np.sqrt(passes["filled"]).sum()
    assert passes["furthest"].min() > 0  # with ever less for the next watt, none is left without any
    alike = divide(
        Fronts.of([[FrontPoint(16, 8.0, 0.004, 0.004)]] * 4, [IDLE_W] * 4),
        np.full(4, FLOOR_W),
        np.full(4, 12.0),
        np.full(4, 100.0),
        np.ones(4, dtype=bool),
        8.0,
        256.0,
    )
    assert alike == pytest.approx(np.full(4, FLOOR_W + 2.0))


@dataclass
class _Board:
    lease_w: float = FLOOR_W
    until_s: float = -math.inf
    floor_w: float = FLOOR_W

    def drawn_w(self, now_s: float) -> float:
        return self.lease_w if now_s < self.until_s else self.floor_w


@settings(max_examples=20)
@given(st.integers(0, 10_000), st.floats(0.0, 0.5), st.sampled_from(RULES))
def test_the_sites_watts_hold_at_every_moment_whatever_is_lost_or_late(seed: int, loss: float, rule: str) -> None:
    chance, count, delivery_s = Random(seed), 6, 3.0
    course = Schedule.of([(0.0, 45.0), (40.0, 24.0), (80.0, 60.0)])
    site = Site(Budget(schedule=course), dict.fromkeys(range(count), FLOOR_W), delivery_s=delivery_s, rule=rule)
    boards, fronts, now_s = [_Board() for _ in range(count)], _fronts(count, seed), 0.0
    changes: list[tuple[float, int, float, float]] = []  # (when it hears, board, watts, until)
    for _ in range(12):
        nodes = [at for at in range(count) if chance.random() < 0.9]
        length_s = chance.uniform(2.0, 12.0)
        asked = fronts_of(fronts, nodes)
        _, said = site.grant(now_s, nodes, asked, np.full(len(nodes), 12.0), np.full(len(nodes), 50.0), length_s, 256.0)
        for node in nodes:
            if chance.random() >= loss:
                heard_s = now_s + chance.uniform(0.0, delivery_s)
                changes.append((heard_s, node, said[node]["lease_w"], heard_s + said[node]["lease_s"]))
                if chance.random() >= loss:  # it replies after a while, and draws no more than its floor then
                    changes.append((heard_s + 0.9 * length_s, node, -1.0, -math.inf))
        until_s = now_s + length_s + delivery_s
        while now_s < until_s:
            for change in sorted(one for one in changes if one[0] <= now_s):
                _, node, watts, ends_s = change
                changes.remove(change)
                if watts < 0:
                    boards[node].until_s = -math.inf
                    site.returned(node)
                else:
                    boards[node].lease_w, boards[node].until_s = watts, ends_s
            drawn_w = sum(board.drawn_w(now_s) for board in boards)
            assert drawn_w <= max(course.power_w(now_s), FLOOR_W * count) + 1e-6
            now_s += 1.0


def fronts_of(fronts: Fronts, nodes: list[int]) -> Fronts:
    return Fronts(*(getattr(fronts, name)[nodes] for name in Fronts.__slots__))


def test_watts_of_a_silent_board_are_given_to_others_when_its_lease_is_over() -> None:
    site = Site("30W", FLOOR_W, delivery_s=2.0)
    limits, data = np.full(2, 30.0), np.full(2, 50.0)
    first, _ = site.grant(0.0, [1, 2], _fronts(2), limits, data, 10.0, 256.0)
    assert first.sum() == pytest.approx(30.0)
    site.returned(1)
    while_held, _ = site.grant(10.0, [1], _fronts(1), limits[:1], data[:1], 10.0, 256.0)
    assert while_held[0] <= 30.0 - first[1] + 1e-9
    site.returned(1)
    later, _ = site.grant(40.0, [1], _fronts(1), limits[:1], data[:1], 10.0, 256.0)
    assert later[0] == pytest.approx(30.0 - FLOOR_W)  # its floor is kept for it
    site.returned(1)
    site.left(2)
    assert site.grant(80.0, [1], _fronts(1), limits[:1], data[:1], 10.0, 256.0)[0][0] == pytest.approx(30.0)


@pytest.mark.parametrize("floor_w", [0.0, -1.0, math.nan, math.inf, {1: 3.0, 2: 0.0}])
def test_a_floor_is_watts_above_zero(floor_w: float | dict[int, float]) -> None:
    with pytest.raises(InputError, match="floor"):
        Site("40W", floor_w)


def test_a_board_without_a_floor_is_an_error_with_a_remedy() -> None:
    site = Site("40W", {1: 3.0})
    assert site.floor_w(1) == 3.0
    with pytest.raises(InputError, match=r"board 7.*floor") as caught:
        site.floor_w(7)
    assert "7: " in caught.value.hint


def test_a_board_is_offered_more_than_it_has_shown_until_it_finds_no_use_for_it() -> None:
    """Nothing above a lease can be measured, so boards that began with little were held to it."""
    points = [[FrontPoint(16, 5.0, 0.002, 0.002)], [FrontPoint(16, 5.0, 0.02, 0.02)]]
    given = (np.full(2, FLOOR_W), np.full(2, 12.0), np.full(2, 100.0), np.ones(2, dtype=bool), 7.0, 256.0)
    fronts = Fronts.of(points, [IDLE_W] * 2)
    offered = divide(fronts, *given)
    assert offered[0] > 1.25 * 5.0 * MARGIN
    sated = divide(fronts, *given, np.array([6.0, 0.0]))
    assert sated[0] < offered[0]
    assert sated[1] > offered[1]


def test_a_site_remembers_the_watts_with_which_a_board_had_nothing_left_to_measure() -> None:
    offered = {}
    for searched in (False, True):
        site = Site("13W", FLOOR_W, delivery_s=2.0)
        fronts = Fronts.of([[FrontPoint(16, 5.0, 0.002, 0.002)], [FrontPoint(16, 5.0, 0.02, 0.02)]], [IDLE_W] * 2)
        for _ in range(2):
            granted, _ = site.grant(0.0, [1, 2], fronts, np.full(2, 30.0), np.full(2, 50.0), 10.0, 256.0)
            site.returned(1, searched=searched)
            site.returned(2)
        offered[searched] = granted[0]
    assert offered[True] < offered[False]


def test_the_more_updates_grow_with_work_the_more_goes_to_boards_that_do_much_with_a_watt() -> None:
    fast = [(4.0, 0.006), (6.0, 0.004), (8.0, 0.003), (10.0, 0.0024), (12.0, 0.002)]
    points = [[FrontPoint(16, watts, slow * one_s, slow * one_s) for watts, one_s in fast] for slow in (1, 3)]
    first_w = []
    for growth in (0.35, 0.7):
        site = Site("16W", FLOOR_W, delivery_s=2.0)
        fronts = Fronts.of(points, [IDLE_W] * 2)
        granted, _ = site.grant(0.0, [1, 2], fronts, np.full(2, 12.5), np.full(2, 100.0), 10.0, 256.0, growth)
        first_w.append(granted[0])
    assert first_w[1] > 1.1 * first_w[0]
