from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from underwatt.measure.series import ordered_settings, smallest_too_large, to_measure
from underwatt.records import Measurement, PowerMode, Setting, Status

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


def test_what_is_left_skips_the_done_and_the_too_large_and_tries_the_failed_again() -> None:
    settings = ordered_settings([PowerMode(gpu_mhz=1), PowerMode(gpu_mhz=2)], [4, 8, 16])
    done = [
        Measurement(settings[0], 1.0, 1.0),
        Measurement(settings[1], status=Status.FAILED),
        Measurement(Setting(PowerMode(gpu_mhz=1), 8), status=Status.OUT_OF_MEMORY),
    ]
    assert to_measure(settings, done) == [settings[1]]
    assert smallest_too_large(done) == 8
    assert smallest_too_large([]) == float("inf")
