from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from underwatt.control.options import CALM_S, Quiet


@given(st.floats(0, 1e6), st.floats(0, 1e3), st.floats(0, 1e3))
def test_a_reading_vouches_for_a_moment_if_it_is_low_and_nobody_asks_for_anything(
    at_s: float, power_w: float, calm_w: float
) -> None:
    quiet = Quiet(calm_w=calm_w)
    quiet.heard(at_s, power_w, has_news=False)
    assert quiet.calm_until_s == (at_s + CALM_S if power_w <= calm_w else -math.inf)
    quiet.heard(at_s, power_w, has_news=True)
    assert quiet.calm_until_s == -math.inf
    quiet.heard(at_s, math.nan, has_news=False)
    assert quiet.calm_until_s == -math.inf
