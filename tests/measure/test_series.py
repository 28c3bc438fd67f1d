from __future__ import annotations

import random
import signal
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, strategies as st
from killable import Killable
from profile_child import settings as child_settings
from profile_helpers import COST, INFO, simulated, virtual

from underwatt.device.session import Session
from underwatt.device.space import Knob, ModeSpace
from underwatt.errors import InputError, OutOfMemoryError, StepError
from underwatt.jobs.workloads import SimulatedRun, SimulatedWorkload
from underwatt.measure.series import (
    GUESS_S,
    ProfileOutcome,
    expected_s,
    grid_modes,
    modes_from_file,
    ordered_settings,
    run_profile,
    smallest_too_large,
    thinned,
    to_measure,
)
from underwatt.records import Measurement, PowerMode, Setting, Status
from underwatt.store.store import Store

if TYPE_CHECKING:
    from pathlib import Path

SPACE = ModeSpace([Knob("gpu_mhz", tuple(float(n) for n in range(100, 140))), Knob("cpu_cores", (1.0, 2.0))])


def test_grid_is_the_published_table() -> None:
    modes = grid_modes(SPACE)
    assert len(modes) == 40  # every clock: a table with gaps would make the published method look worse
    assert {mode.cpu_cores for mode in modes} == {2}
    assert (modes[0].gpu_mhz, modes[-1].gpu_mhz) == (100, 139)


def test_grid_uses_the_knob_there_is() -> None:
    limits = ModeSpace([Knob("power_limit_w", (100.0, 200.0))])
    assert grid_modes(limits) == [PowerMode(power_limit_w=100), PowerMode(power_limit_w=200)]
    assert grid_modes(ModeSpace([Knob("cpu_cores", (1.0, 2.0))])) == [PowerMode(cpu_cores=2)]
    watts = tuple(float(n) for n in range(100, 301))
    assert len(grid_modes(ModeSpace([Knob("power_limit_w", watts, continuous=True)]))) == 12


@given(st.lists(st.integers(0, 1000), min_size=2, unique=True).map(sorted), st.integers(2, 20))
def test_thinned_keeps_the_ends_and_the_order(values: list[float], most: int) -> None:
    kept = thinned(values, most)
    assert len(kept) == min(most, len(values)) == len(set(kept))
    assert (kept[0], kept[-1]) == (values[0], values[-1])
    assert kept == sorted(kept)


def test_modes_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "modes.csv"
    path.write_text("gpu_mhz,cpu_cores,comment\n100,1,slow\n139,,fast\n")
    assert modes_from_file(path, SPACE) == [PowerMode(cpu_cores=1, gpu_mhz=100), PowerMode(gpu_mhz=139)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpu_mhz\n99\n", "line 2.*nearest is 100"),
        ("gpu_mhz\nfast\n", "line 2"),
        ("clock\n1\n", "names no modes"),
        ("", "names no modes"),
    ],
)
def test_a_bad_file_names_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "modes.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        modes_from_file(path, SPACE)
    with pytest.raises(InputError, match="cannot be read"):
        modes_from_file(tmp_path / "missing.csv", SPACE)


modes = st.lists(st.builds(PowerMode, gpu_mhz=st.sampled_from([100.0, 200.0, 300.0]), cpu_cores=st.integers(1, 3)))
sizes = st.lists(st.sampled_from([4, 8, 16, 32]), min_size=1)


@given(modes, sizes)
def test_every_pair_once_small_batches_and_gentle_modes_first(listed: list[PowerMode], batches: list[int]) -> None:
    settings = ordered_settings(listed, batches)
    assert len(settings) == len(set(settings)) == len(set(listed)) * len(set(batches))
    assert [s.batch_size for s in settings] == sorted(s.batch_size for s in settings)
    for size in set(batches):
        clocks = [s.mode for s in settings if s.batch_size == size]
        assert clocks == sorted(clocks, key=lambda mode: (mode.gpu_mhz * mode.cpu_cores, *mode.knobs().values()))  # type: ignore[operator]


def test_what_is_left_skips_the_done_and_the_too_large_and_tries_the_failed_and_disturbed_again() -> None:
    settings = ordered_settings([PowerMode(gpu_mhz=1), PowerMode(gpu_mhz=2), PowerMode(gpu_mhz=3)], [4, 8, 16])
    done = [
        Measurement(settings[0], 1.0, 1.0),
        Measurement(settings[2], 1.0, 1.0, status=Status.DISTURBED),
        Measurement(settings[1], status=Status.FAILED),
        Measurement(Setting(PowerMode(gpu_mhz=1), 8), status=Status.OUT_OF_MEMORY),
    ]
    assert to_measure(settings, done) == settings[1:3]
    assert smallest_too_large(done) == 8
    assert smallest_too_large([]) == float("inf")


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
    with Killable(CHILD) as profiles:
        for _ in range(20):
            process = profiles.start(str(path))
            time.sleep(chance.random() * 0.06)
            kills += profiles.kill(process) == -signal.SIGKILL
        profiles.start(str(path))
        assert profiles.wait() == 0
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
