from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from underwatt.errors import StoreError
from underwatt.store.store import Store

if TYPE_CHECKING:
    from pathlib import Path

RECORD = {
    "underwatt": "plan",
    "device": {"backend": "virtual", "name": "Nano", "id": "n", "address": "virtual:nano"},
    "workload": {"name": "resnet18", "id": "abc"},
    "plan": {"reason": "because", "risk": 0.05},
}


def test_a_plan_is_kept_once_and_comes_back(tmp_path: Path) -> None:
    with Store(tmp_path / "store.db") as store:
        assert store.plans() == ()
        assert store.keep_plan(RECORD) == (1, True)
        assert store.keep_plan(RECORD) == (1, False)
        assert store.keep_plan({**RECORD, "per": "sample"}) == (2, True)
    with Store(tmp_path / "store.db", create=False) as store:
        first, second = store.plans()
        assert first.record == RECORD
        assert (first.device.name, second.workload.id) == ("Nano", "abc")
        assert store.plan(2) == second
        with pytest.raises(StoreError, match="no plan 9"):
            store.plan(9)
