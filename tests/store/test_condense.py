"""Large profiles: the measurements that tell most, and the same answers as before where a profile is small."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from underwatt.records import DeviceInfo, Measurement, PowerMode, Setting, Status, WorkloadInfo
from underwatt.store import condense
from underwatt.store.condense import Newest, telling
from underwatt.store.store import Store

DEVICE, WORKLOAD = DeviceInfo("jetson", "Nano", "nano-1", "jetson:/"), WorkloadInfo("net", "0123")
ROWS = st.lists(
    st.tuples(st.sampled_from([8, 32]), st.floats(0.01, 1), st.floats(1, 10)), min_size=1, max_size=200
).map(lambda found: [Newest(number, *row, 1) for number, row in enumerate(found)])


@given(rows=ROWS, budget_w=st.floats(1, 10))
def test_the_best_of_each_batch_size_is_among_them_whatever_the_budget(rows: list[Newest], budget_w: float) -> None:
    kept = [rows[number] for number in telling(rows, most=400)]
    for size in (8, 32):
        within = [row.step_s for row in rows if row.batch_size == size and row.power_w <= budget_w]
        found = [row.step_s for row in kept if row.batch_size == size and row.power_w <= budget_w]
        assert min(found, default=None) == min(within, default=None)


def test_there_are_not_many_more_than_asked_for_and_they_cover_the_rest() -> None:
    chance = random.Random(0)
    rows = [Newest(n, 8, chance.uniform(0.01, 1), chance.uniform(1, 10), 1) for n in range(5000)]
    rows += [Newest(n, 64, None, None, 0) for n in range(5000, 5050)]
    kept = telling(rows, most=100)
    assert len(kept) <= 120
    assert sum(number < 2500 for number in kept) > 20
    assert any(number >= 5000 for number in kept), "that a batch size does not fit is known"


def measured(chance: random.Random, power_w: float) -> Measurement:
    mode = PowerMode(gpu_mhz=float(chance.randrange(1, 40)))
    return Measurement(Setting(mode, chance.choice((8, 16))), step_s=chance.uniform(0.1, 1), power_w=power_w)


def test_a_small_profile_is_taken_as_it_is_and_of_a_large_one_each_settings_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(0)
    with Store(tmp_path / "store.db") as store:
        number = store.profile_id(DEVICE, WORKLOAD)
        rows = [measured(chance, 1.0 + at / 100) for at in range(300)]
        store.add(number, [*rows, Measurement(Setting(PowerMode(gpu_mhz=1.0), 64), status=Status.OUT_OF_MEMORY)])
        assert store.measurements(number, telling=True) == store.measurements(number)
        assert store.profile(number, telling=True) == store.profile(number)
        monkeypatch.setattr(condense, "MOST_ROWS", 50)
        few = store.measurements(number, telling=True)
    newest = {m.setting: m for m in rows}
    assert {m.setting: m for m in few if m.usable} == newest
    assert [m.status for m in few if not m.usable] == [Status.OUT_OF_MEMORY]


def test_counts_are_those_of_the_rows(tmp_path: Path) -> None:
    chance = random.Random(1)
    with Store(tmp_path / "store.db") as store:
        assert store.newest_profile_id() is None
        first, second, third = (store.profile_id(DEVICE, WorkloadInfo(name, name)) for name in "abc")
        store.add(first, [measured(chance, 2.0) for _ in range(7)])
        store.add(second, [measured(chance, 2.0), Measurement(Setting(PowerMode(), 8), status=Status.FAILED)])
        store.add(third, [Measurement(Setting(PowerMode(), 8), status=Status.FAILED)])
        found = [(item.id, item.measured, item.usable) for item in store.summaries()]
        assert found == [(first, 7, 7), (second, 2, 1), (third, 1, 0)]
        assert store.newest_profile_id() == second
