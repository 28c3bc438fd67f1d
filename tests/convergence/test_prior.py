"""The shape that other trainings let expect: it widens with ignorance, narrows with evidence, and knows only ratios."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from underwatt.budget import Budget
from underwatt.convergence import prior
from underwatt.convergence.curve import fit_convergence
from underwatt.convergence.prior import KNOWN, Evidence, RelativeCurve, ShapePrior, shape_prior, usual_shape
from underwatt.errors import InputError
from underwatt.planning.problem import Problem
from underwatt.predict.base import SettingArray
from underwatt.records import ConvergenceRun, PowerMode, Setting

SIZES = (4, 8, 16, 32, 64, 128, 256, 1024)


def runs_at(sizes: tuple[int, ...], noise: float, scale: float = 1000.0) -> list[ConvergenceRun]:
    return [ConvergenceRun(size, 0.9, scale * (1 + size / noise), seed) for size in sizes for seed in range(3)]


def test_a_large_batch_needs_more_samples_and_so_does_a_tiny_one() -> None:
    mean, std = usual_shape().predict((1, 16, 64, 1024))
    assert mean[1] < mean[2] < mean[3]
    assert mean[0] > mean[1]
    assert std[3] > std[2]


@given(st.lists(st.integers(1, 100_000), min_size=1, max_size=8))
def test_the_best_of_all_batch_sizes_counts_as_one(sizes: list[int]) -> None:
    mean, std = usual_shape().predict(sizes)
    assert np.all(mean > -0.01)  # as near to the best as powers of two come
    assert np.all(std >= 0)
    assert np.all(np.isfinite(mean))


def test_what_is_asked_for_beside_it_changes_no_answer() -> None:
    shape = usual_shape()
    assert shape.predict([64])[0][0] == pytest.approx(shape.predict(SIZES)[0][SIZES.index(64)])


def test_one_more_training_moves_the_next_towards_itself_and_its_absence_widens() -> None:
    alike = [Evidence(f"mine {number}", 4.0, 0.3, -3.0, 1.0) for number in range(8)]
    assert shape_prior(alike).noise < shape_prior().noise - 1
    assert shape_prior(alike[:1]).noise > shape_prior(alike).noise
    without = shape_prior(without="librispeech")
    assert without.noise_std > shape_prior().noise_std
    assert f"{len(KNOWN) - 1} other trainings" in usual_shape(without="librispeech").said()


def test_evidence_is_what_the_runs_say_and_not_what_was_thought_before() -> None:
    told = fit_convergence(runs_at((4, 16, 64, 256, 1024), noise=64.0)).evidence("one")
    assert told.noise == pytest.approx(6.0, abs=0.5)
    assert told.noise_std < 1
    silent = fit_convergence([ConvergenceRun(32, 0.9, 1000.0)]).evidence("none")
    assert silent.noise_std > 5


def test_few_runs_refine_the_prior_and_many_overrule_it() -> None:
    odd = ShapePrior(4.0, 0.5, -3.0, 1.0)
    few, many = runs_at((32,), 4096.0), runs_at((4, 16, 64, 256, 1024), 4096.0)
    ratios = [
        float(np.diff(fit_convergence(runs, prior=prior).predict((32, 512))[0])[0])
        for runs, prior in ((few, odd), (few, shape_prior()), (many, odd), (many, shape_prior()))
    ]
    assert ratios[0] > ratios[1] > ratios[3]
    assert ratios[2] == pytest.approx(ratios[3], abs=0.3)


def test_a_noise_scale_that_was_seen_narrows_it_and_leaves_the_curve_as_it_was() -> None:
    shape = usual_shape()
    before = shape.noise_samples()
    seen = shape.given(40.0, 0.5, "this training")
    assert seen.noise_samples() == pytest.approx(40.0, rel=0.35)
    assert seen.noise_samples(0.95) / seen.noise_samples(0.05) < shape.noise_samples(0.95) / shape.noise_samples(0.05)
    assert shape.noise_samples() == before
    assert "this training" in seen.said()
    for wrong in (0.0, -1.0, math.nan):
        with pytest.raises(InputError, match="makes no sense"):
            shape.given(wrong, 0.5)


@pytest.mark.parametrize("spread", [0.1, 0.5, 2.0])
def test_far_evidence_never_leaves_nothing(spread: float) -> None:
    for seen in (1e-3, 1.0, 1e12):
        mean, std = usual_shape().given(seen, spread).predict(SIZES)
        assert np.all(np.isfinite(mean) & np.isfinite(std))


def test_not_knowing_costs_nothing_where_one_batch_size_is_far_ahead_and_something_where_none_is() -> None:
    shape = usual_shape()
    assert shape.regret({32: 1.0, 256: 0.001}, 256) == (0.0, 0.0)
    mean, high = shape.regret({32: 1.0, 128: 0.8, 512: 0.6}, 128)
    assert 0 < mean < high
    assert shape.given(300.0, 0.1).regret({32: 1.0, 128: 0.8, 512: 0.6}, 128)[1] < high
    with pytest.raises(InputError, match="no time of a sample"):
        shape.regret({32: 1.0}, 64)


def test_a_problem_weighed_by_it_promises_no_time_to_target_and_no_scale_moves_its_choice() -> None:
    settings = SettingArray.of([Setting(PowerMode(gpu_mhz=500.0), size) for size in (16, 64, 1024)])
    problem = Problem.of(settings, Budget(power_w=5.0), usual_shape())
    assert not problem.to_target
    assert problem.shape is not None
    assert not problem.log_samples_std.any()
    assert problem.log_samples[2] > problem.log_samples[1]
    known = fit_convergence(runs_at((4, 64, 1024), 64.0)).relative()
    assert isinstance(known, RelativeCurve)
    assert "trainings to 0.9" in known.said()


def test_a_training_says_nothing_about_its_own_prior(monkeypatch: pytest.MonkeyPatch) -> None:
    """What benchmarks leave out must be out: whatever its own runs say, the shape of the others stays as it is."""
    for one in KNOWN:
        sizes = (4, 32, 256, 2048)
        before = usual_shape(without=one.workload).predict(sizes)
        lied = replace(one, noise=1.0, noise_std=0.1, small=7.0, small_std=0.1)
        monkeypatch.setattr(prior, "KNOWN", tuple(lied if known is one else known for known in KNOWN))
        after = usual_shape(without=one.workload).predict(sizes)
        assert np.array_equal(before, after)
        assert not np.allclose(usual_shape().predict(sizes)[0], before[0])
        monkeypatch.undo()
