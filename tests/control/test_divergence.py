from __future__ import annotations

import math

from hypothesis import given, strategies as st

from underwatt.control.divergence import MOST_IN_A_ROW, Losses

LOSSES = st.lists(st.sampled_from([0.5, math.nan, math.inf, -math.inf]), max_size=40)


def seen(losses: list[float]) -> Losses:
    found = Losses()
    for step, loss in enumerate(losses):
        found = found.after(loss, step)
    return found


@given(LOSSES)
def test_only_losses_in_a_row_that_are_not_finite_are_a_divergence(losses: list[float]) -> None:
    last = losses[-MOST_IN_A_ROW:]
    assert seen(losses).diverged is (len(last) == MOST_IN_A_ROW and not any(map(math.isfinite, last)))
    assert seen(losses).in_doubt is bool(losses and not math.isfinite(losses[-1]))


def test_a_loss_that_is_looked_at_again_counts_once_and_none_counts_nothing() -> None:
    found = Losses()
    for _ in range(20):
        found = found.after(math.nan, 7).after(None, 8)
    assert found == Losses(1, 7)
