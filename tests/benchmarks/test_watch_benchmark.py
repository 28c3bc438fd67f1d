"""The statistics of the benchmark of the live page decide, and are not moved by bursts of other programs."""

from __future__ import annotations

import importlib
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

if TYPE_CHECKING:
    from types import ModuleType


@pytest.fixture(scope="module")
def watch() -> ModuleType:
    return importlib.import_module("watch")


def blocks(watch: ModuleType, added: float, noise: float, seed: int = 0) -> list[dict[str, Any]]:
    """Blocks of a machine that drifts to half its speed, with bursts in a tenth of them."""
    rng = np.random.default_rng(seed)
    rows = []
    for at, on in enumerate(watch.ORDER * (watch.PAIRS // 2)):
        burst = 1.5 if rng.random() < 0.1 else 1.0
        drift = 1 + at / (2 * watch.PAIRS)
        step_s = 0.01 * (1 + added * on) * drift * burst * math.exp(noise * rng.normal())
        row = {"on": on, "began": 2.0 * at, "ended": 2.0 * (at + 1), "step_s": step_s, "own_s": 0.01}
        rows.append(row | {"server_s": 0.01 * on, "viewers_s": 0.0})
    return rows


@pytest.mark.parametrize(("added", "claim"), [(0.005, "shown"), (0.05, "refuted")])
def test_a_quiet_machine_decides_in_spite_of_drift_and_bursts(watch: ModuleType, added: float, claim: str) -> None:
    found = watch.summary(blocks(watch, added, noise=0.01))
    low, high = found["added_pct_95"]
    assert found["claim"] == claim
    assert low < 100 * added < high
    assert found["added_own_work_pct"] == pytest.approx(0)
    assert found["server_core_pct"] == pytest.approx(0.5)


def test_a_noisy_machine_is_said_to_decide_nothing(watch: ModuleType) -> None:
    assert watch.summary(blocks(watch, 0.005, noise=0.25))["claim"] == "not decided"


def test_the_interval_holds_the_truth_about_as_often_as_it_says(watch: ModuleType) -> None:
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(300):
        middle, low, high = watch.paired(rng.standard_t(3, size=watch.PAIRS).tolist())
        assert low <= middle <= high
        held += low <= 0 <= high
    assert 0.91 < held / 300 < 0.985


def test_it_takes_less_than_four_minutes(watch: ModuleType) -> None:
    assert 2 * watch.PAIRS * (watch.BLOCK_S + watch.SETTLE_S) + 15 < 240
