from __future__ import annotations

import random
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from profile_child import settings as child_settings
from profile_helpers import COST, INFO, simulated, virtual

from underwatt.device.session import Session
from underwatt.errors import OutOfMemoryError, StepError
from underwatt.jobs.workloads import SimulatedRun, SimulatedWorkload
from underwatt.measure.series import GUESS_S, ProfileOutcome, expected_s, ordered_settings, run_profile
from underwatt.records import Measurement, PowerMode, Setting, Status
from underwatt.store.store import Store

CHILD = Path(__file__).parents[1] / "helpers" / "profile_child.py"


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with Store(tmp_path / "store.db") as kept:
        yield kept


def profile(store: Store, workload: Any, device: Any, settings: list[Setting], **more: Any) -> ProfileOutcome:
    with Session(device) as session:
        return run_profile(session, workload, settings, store, **more)


def test_every_setting_is_measured_stored_and_reported_once(store: Store) -> None:
    device = virtual()
    settings = ordered_settings([device.space.lowest, device.space.highest], (4, 8))
    seen: list[tuple[int, int]] = []
    outcome = profile(
        store, simulated(device), device, settings, watch=lambda _, done, total: seen.append((done, total))
    )
    assert [m.setting for m in outcome.measured] == settings
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    [summary] = store.summaries()
    assert store.measurements(summary.id) == outcome.measured
    again = profile(store, simulated(device), device, settings)
    assert again.measured == ()


def test_out_of_memory_skips_all_larger_batches_and_the_rest_goes_on(store: Store) -> None:
    device = virtual()
    large = replace(COST, activation_bytes_per_sample=1e8)
    settings = ordered_settings([device.space.lowest, device.space.highest], (4, 64, 128))
    outcome = profile(store, simulated(device, large), device, settings)
    assert [(m.setting.batch_size, m.status) for m in outcome.measured] == [
        (4, Status.OK),
        (4, Status.OK),
        (64, Status.OUT_OF_MEMORY),
    ]
    assert sorted(s.batch_size for s in outcome.too_large) == [64, 128, 128], "every setting is accounted for"
    assert profile(store, simulated(device, large), device, settings).measured == ()


class Flaky(SimulatedWorkload):
    """Counts its starts; fails, or ends by itself, as told."""

    def __init__(self, device: Any, *, ends_after: int = 10**9, dead_at: int = 0) -> None:
        super().__init__(INFO, COST, device)
        self.device, self.ends_after, self.dead_at = device, ends_after, dead_at
        self.starts: list[int] = []

    def start(self, batch_size: int) -> SimulatedRun:
        self.starts.append(batch_size)
        if batch_size == self.dead_at:
            raise StepError("It will not start.")
        run = super().start(batch_size)
        step, left = run.step, iter(range(self.ends_after))
        run.step = lambda: step() if next(left, None) is not None else None  # type: ignore[method-assign]
        return run


def test_a_job_is_started_once_for_each_batch_size(store: Store) -> None:
    device = virtual()
    workload = Flaky(device)
    settings = ordered_settings([device.space[n] for n in (0, 100, 200, 300)], (4, 8))
    profile(store, workload, device, settings)
    assert workload.starts == [4, 8]


def test_a_job_that_comes_to_its_end_is_started_again(store: Store) -> None:
    device = virtual()
    workload = Flaky(device, ends_after=60)
    settings = ordered_settings([device.space[-n] for n in range(1, 7)], (4,))
    outcome = profile(store, workload, device, settings)
    assert outcome.failed == ()
    assert len(outcome.measured) == 6
    assert len(workload.starts) > 1


def test_a_failing_setting_is_reported_and_tried_again_next_time(store: Store) -> None:
    device = virtual()
    settings = ordered_settings([device.space.highest], (4, 8))
    outcome = profile(store, Flaky(device, dead_at=8), device, settings)
    assert [m.setting.batch_size for m in outcome.failed] == [8]
    assert "will not start" in outcome.failed[0].note
    again = profile(store, Flaky(device), device, settings)
    assert [m.setting.batch_size for m in again.measured] == [8]


def test_out_of_memory_at_the_start_of_a_job_is_recorded(store: Store) -> None:
    device = virtual()

    class TooLarge(Flaky):
        def start(self, batch_size: int) -> SimulatedRun:
            if batch_size >= 8:
                raise OutOfMemoryError("The model does not fit.")
            return super().start(batch_size)

    outcome = profile(store, TooLarge(device), device, ordered_settings([device.space.highest], (4, 8, 16)))
    assert [m.status for m in outcome.measured] == [Status.OK, Status.OUT_OF_MEMORY]


def test_expected_time_comes_from_what_was_measured() -> None:
    assert expected_s(3, []) == 3 * GUESS_S
    known = [Measurement(Setting(PowerMode(), 1), 0.1, 5.0, cost_s=cost) for cost in (2.0, 4.0)]
    assert expected_s(3, known) == 9


@pytest.mark.slow
def test_killed_at_20_random_moments_and_resumed_equals_never_killed(tmp_path: Path) -> None:
    chance = random.Random(0)
    kills = 0
    path = tmp_path / "killed.db"
    for attempt in range(21):
        with subprocess.Popen([sys.executable, str(CHILD), str(path)], stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"begun\n"
            if attempt < 20:
                time.sleep(chance.random() * 0.06)
                kills += child.poll() is None
                child.kill()
    with Store(path) as store:
        [summary] = store.summaries()
        killed = store.measurements(summary.id)
    device = virtual("nano")
    with Store(tmp_path / "whole.db") as store:
        whole = profile(store, simulated(device), device, child_settings()).measured
    assert kills >= 10, "the kills came too late to prove anything"
    assert max(Counter(m.setting for m in killed).values()) == 1
    assert {m.setting for m in killed} == {m.setting for m in whole}
    by_setting = {m.setting: m for m in whole}
    for m in killed:
        other = by_setting[m.setting]
        assert m.step_s == pytest.approx(other.step_s, rel=0.03)
        assert m.power_w == pytest.approx(other.power_w, rel=0.05)  # the board is warmer in an unbroken run
