from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from underwatt.errors import JobError
from underwatt.jobs.job import scaled_lr


def test_the_rules():
    assert scaled_lr(5e-4, 128, 32, "sqrt") == pytest.approx(2.5e-4)
    assert scaled_lr(0.1, 256, 64, "linear") == pytest.approx(0.025)
    assert scaled_lr(0.1, 256, 64, "none") == 0.1
    assert scaled_lr(0.1, 256, 64, lambda lr, base, size: lr * base / size) == pytest.approx(0.4)


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.sampled_from(["sqrt", "linear", "none"]))
def test_the_base_batch_size_keeps_its_rate_and_there_and_back_is_the_same(base, size, rule):
    assert scaled_lr(0.01, base, base, rule) == pytest.approx(0.01)
    assert scaled_lr(scaled_lr(0.01, base, size, rule), size, base, rule) == pytest.approx(0.01)


def test_nonsense_is_refused():
    with pytest.raises(JobError, match="no learning-rate rule 'cube'"):
        scaled_lr(0.1, 1, 1, "cube")
    with pytest.raises(JobError, match="comes out as 0"):
        scaled_lr(0.1, 1, 1, lambda *_: 0.0)
