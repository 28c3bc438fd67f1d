"""What benchmarks/trainers_gpu.py makes of its trainings; they themselves need a GPU."""

from __future__ import annotations

import pytest

from trainers_gpu import gains, made_up_text, rows_of, to_target


def row(method: str, curve: list[list[float]]) -> dict[str, object]:
    return {"method": method, "budget_w": 250.0, "curve": curve, "tokens_per_s": curve[-1][1] / curve[-1][0]}


def test_the_target_is_what_the_default_had_met_after_three_quarters() -> None:
    default = row("default", [[10, 1e3, 3.0], [20, 2e3, 2.0], [30, 3e3, 2.1], [40, 4e3, 1.5]])
    ours = row("underwatt", [[10, 5e3, 2.5], [15, 9e3, 1.9], [40, 30e3, 1.2]])
    rows = [default, ours]
    to_target(rows, None)
    assert (default["target"], default["time_s"], ours["time_s"]) == (2.0, 20, 15)
    assert ours["tokens_per_s_to_target"] == 600
    assert gains(rows) == ["250 W: 7.50 times the tokens a second, 1.33 times as soon at the target"]
    to_target(rows, 1.0)
    assert ours["time_s"] is None
    assert "nan times as soon" in gains(rows)[0]


def test_a_training_that_failed_leaves_the_others_their_rows() -> None:
    rows = [row("underwatt", [[10, 5e3, 2.5]]), {"method": "default", "budget_w": 250.0, "error": "it did"}]
    to_target(rows, None)
    assert "target" in rows[0]
    assert gains(rows) == ["250 W: nan times the tokens a second, nan times as soon at the target"]


def test_the_text_is_the_same_each_time_and_its_end_is_held_out() -> None:
    text = made_up_text(80_000)
    assert text == made_up_text(80_000)
    learnt, held_out = rows_of(text)
    assert bytes(held_out[len(held_out) - 1]["input_ids"].tolist()).decode() in text[-2 * len(held_out[0]["labels"]) :]
    assert len(set(text)) < 40
    assert len(text) == pytest.approx(80_000)
    assert len(learnt) > 0
