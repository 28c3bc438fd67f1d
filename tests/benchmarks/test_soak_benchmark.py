"""A short soak: processes are killed and gone on with, and the log tells the same as every reading."""

from __future__ import annotations

import importlib
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

if TYPE_CHECKING:
    from types import ModuleType

FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "soak.py"


@pytest.fixture(scope="module")
def soak() -> ModuleType:
    return importlib.import_module("soak")


def test_half_an_hour_with_three_kills(tmp_path: Path) -> None:
    out = tmp_path / "soak.json"
    done = subprocess.run(
        [sys.executable, str(FILE), "--days", "0.02", "--json", str(out)], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    [row] = json.loads(out.read_text())
    assert row["same_verdict"]
    assert row["kills"] == 3
    assert row["readings"] == pytest.approx(0.02 * 864_000, rel=0.01)
    assert row["resume_mb"] < 200
    # What the run said covers all of its parts, but for the second that each kill took.
    assert row["said_bounded_s"] == pytest.approx(0.02 * 86_400, abs=12)


def test_energy_over_the_budget_is_judged_by_windows(soak: ModuleType) -> None:
    at_s = np.arange(101.0)
    within = (at_s, 5.0 * at_s, np.full(101, 5.0))
    assert soak.over_budget([within], steps_s=1.0) == (0.0, 0.0)
    above = (at_s, 5.5 * at_s, np.full(101, 5.0))
    energy, share = soak.over_budget([above, above], steps_s=1.0)
    assert (energy, share) == pytest.approx((0.5 / 5.5, 1.0))
    swinging = (at_s, np.cumsum(np.where(at_s % 2 == 0, 7.0, 3.0)), np.full(101, 5.0))
    assert soak.over_budget([swinging], steps_s=2.0)[0] < 1e-9, "what pauses make up for within five steps"


def test_memory_counts_from_an_hour_after_each_process_began(soak: ModuleType) -> None:
    hours = np.array([0.0, 1.0, 2.0, 3.0]) * 3600
    assert soak.growth_mb([(hours, np.array([50.0, 80.0, 82.0, 81.0])), (hours[:1], np.array([90.0]))]) == 2.0


def test_weather_is_the_same_whoever_asks_and_never_takes_anything_away(soak: ModuleType) -> None:
    found = [soak.weather(60.0 * minute) for minute in range(7 * 1440)]
    assert found == [soak.weather(60.0 * minute) for minute in range(7 * 1440)]
    busy = [extra_w for extra_w, _, _ in found if extra_w]
    assert len(busy) == pytest.approx(7 * 6 * 20, abs=45)
    assert min(busy) > 0.2
    assert all(math.isfinite(room_c) and slower >= 1 for _, slower, room_c in found)
