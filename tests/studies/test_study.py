from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from underwatt.errors import InputError
from underwatt.jobs.job import Effort, Job, load_job
from underwatt.records import ConvergenceRun
from underwatt.studies.study import (
    HOPELESS_FACTOR,
    RunSpec,
    StudyProgress,
    StudySettings,
    data_note,
    default_workers,
    hopeless_samples,
    newest_rates,
    runs_to_make,
    spread_batch_sizes,
    study,
    time_left_s,
)

FILE = Path(__file__).parents[1] / "helpers" / "small_job.py"
ADDRESS = f"{FILE}:job"
EFFORT = Effort(limit_samples=20_000, evaluate_every_samples=64)


@pytest.fixture
def job() -> Job:
    return load_job(ADDRESS)


def settings(workers: int, sizes: tuple[int, ...] = (4, 64), seeds: tuple[int, ...] = (0,)) -> StudySettings:
    return StudySettings(sizes, seeds, EFFORT, workers=workers)


def test_a_study_makes_every_run_and_hands_each_over_at_once(job: Job) -> None:
    handed: list[ConvergenceRun] = []
    seen: list[StudyProgress] = []
    result = study(job, ADDRESS, settings(1, seeds=(0, 1)), on_run=handed.append, on_progress=seen.append)
    assert [(r.batch_size, r.seed) for r in result.runs] == [(4, 0), (64, 0), (4, 1), (64, 1)]
    assert tuple(handed) == result.runs
    assert all(run.reached for run in handed)
    assert not result.failures
    finished = [p for p in seen if p.ended]
    assert [p.made for p in finished] == [1, 2, 3, 4]
    assert finished[-1].left_s == 0
    assert any(p.score > 0 for p in seen if not p.ended)
    assert seen[0].left_s is None


def test_a_study_goes_on_where_it_was_stopped(job: Job) -> None:
    class StopError(Exception):
        pass

    handed: list[ConvergenceRun] = []

    def stop_after_one(run: ConvergenceRun) -> None:
        handed.append(run)
        raise StopError

    with pytest.raises(StopError):
        study(job, ADDRESS, settings(1), on_run=stop_after_one)
    rest = study(job, ADDRESS, settings(1), done=handed)
    assert {run.batch_size for run in (*handed, *rest.runs)} == {4, 64}
    assert len(rest.runs) == 1
    assert study(job, ADDRESS, settings(1), done=(*handed, *rest.runs)).runs == ()


def test_a_run_that_fails_is_reported_and_the_others_are_made(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_FAIL_AT", "64")
    result = study(job, ADDRESS, settings(1))
    assert [run.batch_size for run in result.runs] == [4]
    ((spec, error),) = result.failures
    assert spec.batch_size == 64
    assert "planted" in str(error)


def test_worker_processes_give_the_same_runs_and_those_that_die_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"{FILE}:light_job"
    job = load_job(address)
    here = study(job, address, settings(1, sizes=(4,), seeds=(0, 1)))
    monkeypatch.setenv("TEST_FAIL_AT", "16")
    monkeypatch.setenv("TEST_DIE_AT", "64")
    there = study(job, address, settings(2, sizes=(4, 16, 64), seeds=(0, 1)))
    assert set(map(repr, there.runs)) == set(map(repr, here.runs))  # text, in which NaN is like NaN
    assert all(run.reached for run in here.runs)
    assert len(there.failures) == 4
    for spec, error in there.failures:
        assert spec.batch_size in (16, 64)
        if spec.batch_size == 16:
            assert "planted" in str(error)
        else:
            assert "exit code 7" in str(error)
            assert "last words" in str(error)


def test_a_known_best_run_ends_hopeless_ones_early(job: Job) -> None:
    job = replace(job, target=2.0)  # an accuracy that is never met
    known = [ConvergenceRun(16, 2.0, 10.0, 0, job.lr_at(16))]
    ends: list[str] = []
    result = study(
        job,
        ADDRESS,
        settings(1, sizes=(4, 16)),
        done=known,
        on_progress=lambda p: ends.append(p.ended) if p.ended else None,
    )
    assert ends == ["hopeless"]
    assert not result.runs[0].reached


def test_a_run_given_up_at_its_limit_is_made_again_with_a_higher_one(job: Job) -> None:
    job = replace(job, lr=4e-3)
    short = StudySettings((4, 64), (0,), Effort(64, 64), workers=1)
    first = study(job, ADDRESS, short).runs
    assert not any(run.reached for run in first)
    assert study(job, ADDRESS, short, done=first).runs == (), "nothing is trained twice"
    longer = study(job, ADDRESS, settings(1), done=first).runs
    assert {run.batch_size for run in longer} == {4, 64}
    assert all(run.reached for run in longer)
    assert study(job, ADDRESS, settings(1), done=(*first, *longer)).runs == ()


def test_hopeless_runs_stay_given_up_and_older_rates_are_no_measure_for_them(job: Job) -> None:
    job = replace(job, target=2.0)
    known = [ConvergenceRun(16, 2.0, 10.0, 0, job.lr_at(16))]
    hopeless = study(job, ADDRESS, settings(1, sizes=(4, 16)), done=known).runs
    assert study(job, ADDRESS, settings(1, sizes=(4, 16)), done=(*known, *hopeless)).runs == ()
    old_rate = ConvergenceRun(4, 0.9, 1.0, 0, 123.0)
    job = replace(job, target=0.9)
    newer = ConvergenceRun(4, 0.9, 500.0, 1, job.lr_at(4))
    result = study(job, ADDRESS, settings(1, sizes=(64,)), done=[old_rate, newer])
    assert result.runs[0].reached, "one sample at another learning rate makes nothing hopeless"


STUDY_FOREVER = """
import sys
from underwatt.studies.study import StudySettings, study
from underwatt.jobs.job import Effort
from underwatt.jobs.job import load_job
address = sys.argv[1]
def show(progress):
    print("scored", flush=True)
study(load_job(address), address, StudySettings((4, 64), (0,), Effort(64, 10**9), workers=2), on_progress=show)
"""


def _workers_of(parent: int) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) == parent and fields[0] != "Z":
                found.append(int(folder.name))
        except OSError:
            continue
    return found


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc to see processes")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_no_worker_outlives_the_study(how: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", STUDY_FOREVER, f"{FILE}:slow_job"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    with process.stdout:
        while process.stdout.readline().strip() != "scored":
            assert process.poll() is None
        workers = _workers_of(process.pid)
        assert len(workers) == 2
        process.send_signal(how)
        assert process.wait(timeout=20) != 0
    deadline_s = time.monotonic() + 10
    while any(_alive(pid) for pid in workers) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not any(_alive(pid) for pid in workers)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_workers_suit_the_machine_and_the_work(job: Job) -> None:
    cores = len(os.sched_getaffinity(0))
    assert default_workers(job, 1) == (1, ())
    assert default_workers(job, 1000) == (cores, ())


def test_nonsense_settings_are_refused() -> None:
    with pytest.raises(InputError):
        settings(0)


def test_it_is_said_where_the_data_is_not_a_proxy(job: Job) -> None:
    assert data_note(job) == ""
    assert "its own data" in data_note(replace(job, proxy_data=None, proxy_test_data=None))
    assert "means nothing" in data_note(replace(job, synthetic=True))


SIZES = (4, 8, 16, 32, 64, 128)


def lr_at(size: int) -> float:
    return 1e-3 * math.sqrt(size)


@pytest.mark.parametrize(
    ("points", "chosen"), [(1, (32,)), (2, (4, 128)), (3, (4, 16, 128)), (4, (4, 16, 32, 128)), (9, SIZES)]
)
def test_chosen_batch_sizes_are_spread_with_both_ends(points: int, chosen: tuple[int, ...]) -> None:
    assert spread_batch_sizes(SIZES, points) == chosen


def test_no_batch_size_is_refused() -> None:
    with pytest.raises(InputError):
        spread_batch_sizes(SIZES, 0)
    with pytest.raises(InputError):
        runs_to_make((), (0,), (), 0.9, lr_at)


def test_all_batch_sizes_of_one_seed_come_before_the_next_from_the_middle_out() -> None:
    specs = runs_to_make((4, 16, 64), (0, 1), (), 0.9, lr_at)
    assert specs == tuple(RunSpec(size, seed) for seed in (0, 1) for size in (16, 4, 64))


def test_made_runs_are_skipped_only_where_they_are_the_same_run() -> None:
    done = [
        ConvergenceRun(4, 0.9, 100.0, 0, lr_at(4)),
        ConvergenceRun(16, 0.8, 100.0, 0, lr_at(16)),  # another target
        ConvergenceRun(64, 0.9, 100.0, 0, 0.5),  # another learning rate
        ConvergenceRun(128, 0.9, math.nan, 0, lr_at(128)),
    ]
    left = {spec.batch_size for spec in runs_to_make((4, 16, 64, 128), (0,), done, 0.9, lr_at)}
    assert left == {16, 64}


def test_a_run_that_was_given_up_is_made_again_only_where_it_may_take_more_samples() -> None:
    done = [
        ConvergenceRun(4, 0.9, math.nan, 0, lr_at(4), given_up_samples=1000.0),
        ConvergenceRun(16, 0.9, math.nan, 0, lr_at(16)),  # diverged: more samples do not help
        ConvergenceRun(64, 0.9, 500.0, 0, lr_at(64)),
    ]

    def made_again(may_take_samples: float) -> list[int]:
        specs = runs_to_make((4, 16, 64), (0,), done, 0.9, lr_at, may_take_samples=may_take_samples)
        return [spec.batch_size for spec in specs]

    assert made_again(1000.0) == []
    assert made_again(2000.0) == [4]
    done.append(ConvergenceRun(4, 0.9, 1700.0, 0, lr_at(4)))
    assert made_again(2000.0) == []


def test_of_a_run_made_twice_the_newer_counts() -> None:
    given_up = ConvergenceRun(8, 0.9, math.nan, 0, 1e-3, given_up_samples=900.0)
    other_rate = ConvergenceRun(8, 0.9, 4000.0, 0, 2e-3)
    again = ConvergenceRun(8, 0.9, 3000.0, 0, 1e-3)
    assert newest_rates([given_up, again]) == (again,)
    assert newest_rates([again, given_up]) == (given_up,)
    assert newest_rates([given_up, other_rate, again]) == (again,)


def test_a_run_is_hopeless_at_a_multiple_of_the_best_of_the_same_target() -> None:
    runs = [ConvergenceRun(8, 0.9, 500.0), ConvergenceRun(16, 0.9, math.nan), ConvergenceRun(8, 0.5, 10.0)]
    assert hopeless_samples(runs, 0.9) == HOPELESS_FACTOR * 500.0
    assert hopeless_samples(runs, 0.99) == math.inf


def test_time_left_knows_that_small_batches_take_longer() -> None:
    waiting = [RunSpec(4, 1), RunSpec(64, 1)]
    took = [(RunSpec(4, 0), 90.0), (RunSpec(64, 0), 10.0)]
    assert time_left_s(waiting, [], [], 1) is None
    assert time_left_s(waiting, [], took, 1) == 100.0
    assert time_left_s(waiting, [20.0], took, 2) == (100.0 + 30.0) / 2


def test_runs_at_an_older_learning_rate_are_left_out() -> None:
    old = ConvergenceRun(8, 0.9, 5000, 0, 1e-3)
    kept = (
        ConvergenceRun(16, 0.9, 4000, 0, 1e-3),
        ConvergenceRun(8, 0.5, 900, 0, 1e-3),
        ConvergenceRun(8, 0.9, 3000, 0, 2e-3),
        ConvergenceRun(8, 0.9, 3100, 1, 2e-3),
    )
    assert newest_rates([old, *kept]) == kept


def test_runs_whose_rate_nobody_recorded_belong_together() -> None:
    runs = [ConvergenceRun(8, 0.9, 5000, seed) for seed in range(3)]
    assert all(math.isnan(run.learning_rate) for run in runs)
    assert len(newest_rates(runs)) == 3
    assert newest_rates([]) == ()


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_job_whose_loader_has_workers_is_studied_in_processes_of_its_own() -> None:
    address = f"{FILE}:loading_job"
    few = StudySettings((64,), (0, 1), Effort(limit_samples=600, evaluate_every_samples=300), workers=2)
    result = study(load_job(address), address, few)
    assert len(result.runs) == 2
    assert not result.failures
