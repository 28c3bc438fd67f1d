from __future__ import annotations

import time

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from underwatt.planning.choice import front


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=30))
def test_holds_exactly_the_rows_that_nothing_beats(points: list[tuple[int, int]]) -> None:
    times, powers = np.array(points, float).T
    rows = front(times, powers)
    energies = times * powers

    def beaten(a: int, b: int) -> bool:
        no_worse = times[b] <= times[a] and powers[b] <= powers[a] and energies[b] <= energies[a]
        return bool(no_worse and (times[b] < times[a] or powers[b] < powers[a]))

    best = {(times[a], powers[a]) for a in range(len(points)) if not any(beaten(a, b) for b in range(len(points)))}
    assert [(times[row], powers[row]) for row in rows] == sorted(best)


def test_rows_without_a_time_are_left_out() -> None:
    assert front([np.inf, 2.0, np.nan], [1.0, 5.0, 0.5]).tolist() == [1]
    assert front([], []).tolist() == []


def test_a_hundred_thousand_rows_are_quick() -> None:
    rng = np.random.default_rng(0)
    times, powers = rng.lognormal(size=(2, 175_392))
    started = time.perf_counter()
    rows = front(times, powers)
    assert time.perf_counter() - started < 1.0
    assert np.all(np.diff(times[rows]) > 0)
    assert np.all(np.diff(powers[rows]) < 0)
