from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from underwatt.convergence.curve import fit_convergence, samples_to_target, targets_of
from underwatt.errors import InputError
from underwatt.records import ConvergenceRun
from underwatt.store.exchange import read_file

SIZES = (4, 8, 16, 32, 64, 128, 256, 512, 1024)


def law(size: float, least: float = 10_000, noise: float = 300, small: float = 6, power: float = 2) -> float:
    return least * (1 + size / noise + (small / size) ** power)


def runs_at(sizes: tuple[int, ...], spread: float = 0.05, seeds: int = 3, **constants: float) -> list[ConvergenceRun]:
    rng = random.Random(0)
    return [
        ConvergenceRun(size, 0.9, law(size, **constants) * math.exp(rng.gauss(0, spread)), seed)
        for size in sizes
        for seed in range(seeds)
    ]


def test_a_curve_with_a_rise_at_both_ends_is_found_from_four_batch_sizes() -> None:
    curve = fit_convergence(runs_at((4, 16, 128, 1024)))
    mean, std = curve.predict(SIZES)
    error = np.abs(mean - np.log([law(size) for size in SIZES]))
    assert np.exp(error.max()) < 1.25
    assert np.all(error < 3 * std + 0.05)
    assert SIZES[int(np.argmin(mean))] in (16, 32, 64)


def test_the_prediction_respects_what_was_measured() -> None:
    # One point well off any smooth curve: where it was measured, with little spread, it counts.
    runs = [*runs_at((8, 64, 512), spread=0.0, seeds=5)]
    runs += [ConvergenceRun(128, 0.9, 2 * law(128), seed) for seed in range(5)]
    mean, _ = fit_convergence(runs).predict([128])
    assert math.exp(mean[0]) == pytest.approx(2 * law(128), rel=0.25)
    mean, std = fit_convergence(runs_at((8, 64, 512), spread=0.0, seeds=5)).predict([64])
    assert math.exp(mean[0]) == pytest.approx(law(64), rel=0.03)
    assert std[0] < 0.1


def test_uncertainty_grows_away_from_the_runs_and_shrinks_with_more_of_them() -> None:
    few = fit_convergence(runs_at((16, 64), seeds=1))
    many = fit_convergence(runs_at((4, 16, 64, 256, 1024), seeds=5))
    _, std = few.predict([64, 256, 1024])
    assert std[0] < std[1] < std[2]
    assert np.all(many.predict(SIZES)[1] < few.predict(SIZES)[1])


def test_one_batch_size_alone_gives_a_curve_that_knows_little() -> None:
    mean, std = fit_convergence([ConvergenceRun(32, 0.9, 5000.0)]).predict([32, 1024])
    assert math.exp(mean[0]) == pytest.approx(5000, rel=0.05)
    assert std[1] > 0.5


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    rng = random.Random(1)
    inside = total = 0
    for _ in range(60):
        constants = {"noise": 2 ** rng.uniform(5, 11), "small": 2 ** rng.uniform(-3, 4), "power": rng.uniform(0.8, 2.5)}
        seeds = [
            ConvergenceRun(size, 0.9, law(size, **constants) * math.exp(rng.gauss(0, 0.1)), seed)
            for size in (4, 32, 256)
            for seed in range(2)
        ]
        low, high = fit_convergence(seeds).interval([8, 16, 64, 128, 512])
        truth = [law(size, **constants) for size in (8, 16, 64, 128, 512)]
        inside += sum(a <= t <= b for a, t, b in zip(low, truth, high, strict=True))
        total += 5
    assert 0.85 <= inside / total <= 1.0


def test_a_batch_size_where_every_run_failed_and_those_beyond_it_are_never_reached() -> None:
    runs = [*runs_at((8, 32, 128)), ConvergenceRun(512, 0.9, math.nan), ConvergenceRun(512, 0.9, math.nan, 1)]
    curve = fit_convergence(runs)
    mean, _ = curve.predict([128, 256, 512, 1024])
    assert np.isfinite(mean).tolist() == [True, True, False, False]
    # A failure is also a sign: just below it, more samples are needed than without it.
    assert mean[1] > fit_convergence(runs_at((8, 32, 128))).predict([256])[0][0]


def test_a_batch_size_where_some_runs_failed_costs_their_repetition() -> None:
    sure = fit_convergence([ConvergenceRun(32, 0.9, 1000.0, seed) for seed in range(4)])
    half = fit_convergence([ConvergenceRun(32, 0.9, 1000.0 if seed % 2 else math.nan, seed) for seed in range(4)])
    assert half.predict([32])[0][0] - sure.predict([32])[0][0] == pytest.approx(math.log(2), rel=0.05)
    assert half.predict([32])[1][0] > sure.predict([32])[1][0]


def test_several_targets_must_be_told_apart() -> None:
    runs = [ConvergenceRun(8, 0.5, 100.0), ConvergenceRun(8, 0.7, 300.0)]
    assert targets_of(runs) == (0.5, 0.7)
    with pytest.raises(InputError, match="several targets"):
        fit_convergence(runs)
    assert math.exp(fit_convergence(runs, 0.7).predict([8])[0][0]) == pytest.approx(300, rel=0.02)
    with pytest.raises(InputError, match="No run was made"):
        fit_convergence(runs, 0.9)


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ([], "no convergence runs"),
        ([ConvergenceRun(8, 0.5, math.nan)], "No run reached"),
        ([ConvergenceRun(8, 0.5, 0.0)], "makes no sense"),
        ([ConvergenceRun(0, 0.5, 10.0)], "makes no sense"),
    ],
)
def test_nonsense_is_refused(runs: list[ConvergenceRun], message: str) -> None:
    with pytest.raises(InputError, match=message):
        fit_convergence(runs)


def test_batch_sizes_below_one_are_refused() -> None:
    with pytest.raises(InputError, match="at least 1"):
        fit_convergence([ConvergenceRun(8, 0.5, 10.0)]).predict([0])


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 10_000), st.one_of(st.just(math.nan), st.floats(1e-3, 1e12)), st.integers(0, 5)),
        min_size=1,
        max_size=12,
    )
)
def test_any_runs_give_finite_or_openly_infinite_predictions(rows: list[tuple[int, float, int]]) -> None:
    runs = [ConvergenceRun(size, 1.0, samples, seed) for size, samples, seed in rows]
    if not any(run.reached for run in runs):
        return
    mean, std = fit_convergence(runs).predict([1, 7, 64, 100_000])
    assert not np.isnan(mean).any()
    assert np.all(mean > -np.inf)
    assert np.all(np.isfinite(std))
    assert np.all(std > 0)


def test_real_traces_are_predicted_better_than_by_straight_lines(data_dir) -> None:  # type: ignore[no-untyped-def]
    errors: dict[str, list[float]] = {"curve": [], "lines": []}
    covered = []
    for _, runs in read_file(data_dir / "zeus" / "summary_train.csv").convergence:
        for target in targets_of(runs):
            some = [run for run in runs if run.target == target]
            if not any(run.reached for run in some):
                continue
            truth = {o.batch_size: o for o in fit_convergence(some, resolution_samples=1.0).observed}
            sizes = sorted(truth)
            picked = [sizes[0], sizes[len(sizes) // 2], sizes[-1]]
            known = [run for run in some if run.batch_size in picked]
            curve = fit_convergence(known, resolution_samples=1.0)
            asked = [size for size in sizes if truth[size].reached and size not in picked]
            mean, std = curve.predict(asked)
            seen = [o for o in curve.observed if o.reached]
            lines = np.interp(np.log(asked), np.log([o.batch_size for o in seen]), [o.log_samples for o in seen])
            actual = np.array([truth[size].log_samples for size in asked])
            errors["curve"] += np.abs(mean - actual).tolist()
            errors["lines"] += np.abs(lines - actual).tolist()
            unsure = np.hypot(std, [truth[size].log_samples_std for size in asked])
            covered += (np.abs(mean - actual) < 1.645 * unsure).tolist()
    assert np.median(errors["curve"]) < np.median(errors["lines"])
    assert np.quantile(errors["curve"], 0.9) < np.quantile(errors["lines"], 0.9)
    assert np.mean(covered) > 0.85


def test_a_table_says_what_it_was_told_and_nothing_more() -> None:
    found = samples_to_target({8: 1000, 16: 1500.0})
    assert found is not None
    mean, std = found.predict([8, 16, 32])
    assert np.exp(mean[:2]) == pytest.approx([1000, 1500])
    assert mean[2] == math.inf
    assert not std.any()


@pytest.mark.parametrize("count", [0, -1, math.nan, math.inf])
def test_nonsense_in_a_table_is_refused(count: float) -> None:
    with pytest.raises(InputError, match="make no sense"):
        samples_to_target({8: count})


def test_curves_pass_through_and_runs_become_one() -> None:
    assert samples_to_target(None) is None
    runs = [ConvergenceRun(size, 0.9, 1000.0 * (1 + size / 32), seed) for size in (8, 16, 32, 64) for seed in range(2)]
    curve = samples_to_target(runs)
    assert curve is not None
    assert samples_to_target(curve) is curve
    mean, _ = curve.predict([16])
    assert math.exp(mean[0]) == pytest.approx(1500, rel=0.1)
