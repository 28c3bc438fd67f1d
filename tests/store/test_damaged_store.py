"""Stores whose rows have changed on disk: an error that says what to do, and no traceback."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from underwatt.errors import StoreError
from underwatt.records import (
    ConvergenceRun,
    DeviceInfo,
    Measurement,
    PowerMode,
    Profile,
    Setting,
    WorkloadInfo,
)
from underwatt.store.store import Store

DEVICE = DeviceInfo("virtual", "Nano", "virtual-nano", "virtual:nano", simulated=True)
WORKLOAD = WorkloadInfo("resnet18", "abc")
MEASURED = Measurement(Setting(PowerMode(gpu_mhz=300.0), 8), step_s=0.1, power_w=5.0)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    path = tmp_path / "store.db"
    with Store(path) as kept:
        kept.take_in([Profile(DEVICE, WORKLOAD, (MEASURED,))], [(WORKLOAD, [ConvergenceRun(8, 0.9, 100.0, 0)])])
        kept.keep_plan({"plan": 1})
    return path


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE profiles SET device = '{'",
        "UPDATE profiles SET workload = '{}'",
        "UPDATE profiles SET device = x'00ff'",
        "UPDATE profiles SET device = CAST(x'ff00fe' AS TEXT)",
        "UPDATE measurements SET status = 'o5'",
        "UPDATE measurements SET batch_size = 'many'",
        "UPDATE convergence_runs SET workload = 'x'",
        "UPDATE convergence_runs SET samples = 'x'",
        "UPDATE plans SET record = '['",
    ],
)
def test_a_row_whose_bits_have_changed_is_an_error_that_says_what_to_do(store: Path, damage: str) -> None:
    with closing(sqlite3.connect(store)) as connection, connection:
        connection.execute(damage)
    before = store.read_bytes()
    with Store(store, create=False) as kept, pytest.raises(StoreError, match=r"damaged|decode") as caught:  # noqa: PT012
        kept.summaries(), kept.profile(1), kept.measurements(1)
        kept.convergence_counts(), kept.convergence(), kept.plans()
    assert "Move it away" in caught.value.hint
    assert store.read_bytes() == before


def test_a_store_whose_own_words_are_damaged_is_an_error(store: Path) -> None:
    """SQLite quotes the damaged bytes in its message, which is then no text."""
    content = store.read_bytes()
    store.write_bytes(content.replace(b"CREATE TABLE measurements", b"CREATE \xff\xfe\xfd\xfc\xfb measurements"))
    with pytest.raises(StoreError) as caught, Store(store, create=False) as kept:
        kept.summaries()
    assert caught.value.hint
