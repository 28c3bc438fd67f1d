from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from underwatt.budget import Watts
from underwatt.errors import BudgetError
from underwatt.records import ConvergenceRun, WorkloadCost

if TYPE_CHECKING:
    from types import ModuleType

KEYS = {"board", "network", "budget_w", "watts", "method", "time_s", "speedup", "over_oracle", "energy_ratio", "over_w"}
COST = WorkloadCost(
    flops_per_sample=1e9,
    bytes_per_sample=2e7,
    bytes_per_step=2e8,
    kernels_per_step=300,
    load_bytes_per_sample=1e4,
    parameters=1e7,
    state_bytes=1.6e8,
    activation_bytes_per_sample=4e6,
)
RUNS = [ConvergenceRun(size, 0.9, 1e4 * (1 + size / 40), seed) for size in (4, 8, 16, 32, 64, 128) for seed in (0, 1)]


@pytest.fixture(scope="module")
def edge() -> ModuleType:
    pytest.importorskip("torch", reason="the networks' costs are counted with PyTorch")
    return importlib.import_module("edge")


def test_a_case_in_which_nothing_is_found_is_a_failure_that_shows(
    edge: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edge, "BUDGETS_PER_CASE", 2)
    search, calls = edge.Search.run, []

    def fails_once(self, ask):  # type: ignore[no-untyped-def]
        calls.append(self.problem.budget)
        if len(calls) == 1:
            raise BudgetError("nothing")
        return search(self, ask)

    monkeypatch.setattr(edge.Search, "run", fails_once)
    world = edge.make_world("nano", "small", COST, RUNS)
    rows = [row for case in edge.cases_of(world, RUNS, Watts.MEAN) for row in edge.rows_of(case, ["underwatt"])]
    failed, found = rows
    assert set(failed) == set(found) == KEYS
    assert [failed[name] for name in ("time_s", "speedup", "over_oracle", "energy_ratio", "over_w")] == [None] * 5
    assert found["over_oracle"] >= 1
    json.dumps(rows, allow_nan=False)
    [line] = edge.summary(rows)
    assert (line["nothing"], line["geomean"], line["over_oracle"]) == (1, 0.0, float("inf"))


@pytest.mark.parametrize("watts", [Watts.MEAN, Watts.PEAK])
def test_every_method_is_a_row_and_keeps_the_budget(
    edge: ModuleType, monkeypatch: pytest.MonkeyPatch, watts: Watts
) -> None:
    monkeypatch.setattr(edge, "BUDGETS_PER_CASE", 1)
    world = edge.make_world("nano", "small", COST, RUNS)
    [case] = edge.cases_of(world, RUNS, watts)
    rows = {row["method"]: row for row in edge.rows_of(case, list(edge.METHODS))}
    assert list(rows) == list(edge.METHODS)
    assert rows["baseline"]["speedup"] == 1
    assert rows["oracle"]["over_oracle"] == 1
    for row in rows.values():
        assert row["watts"] == watts.value
        assert row["over_w"] <= 0.02 * row["budget_w"]
        assert row["over_oracle"] > 0.97  # what trains by steps may be lucky in its minute
    assert rows["cold"]["speedup"] > 1


def test_cold_knows_nothing_of_its_own_network(edge: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(edge, "usual_shape", lambda without: asked.append(without))
    monkeypatch.setattr(edge, "run_by_training", lambda case, shape: None)
    world = edge.make_world("nano", "resnet18", COST, RUNS)
    edge.cold(edge.cases_of(world, RUNS, Watts.MEAN)[0])
    assert asked == ["resnet18"]


def test_a_record_that_lacks_a_batch_size_is_one_sentence(
    edge: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "record.json"
    runs = [
        {"model": model, "role": role, "batch_size": size, "target": 0.9, "samples": 1e4, "seed": 0, "lr": 1e-3}
        for model in ("resnet18", "mobilenetv2", "efficientvit", "char_transformer")
        for role in ("proxy", "target")
        for size in (4, 8, 16, 32, 64)
    ]
    record.write_text(json.dumps({"complete_seeds": [0], "runs": runs}))
    assert edge.main(["--convergence", str(record)]) == 2
    assert "no complete runs at batch size 128" in capsys.readouterr().err
    assert edge.main(["--convergence", str(tmp_path / "missing.json")]) == 2
    assert "missing.json" in capsys.readouterr().err


def test_budgets_that_the_baseline_cannot_keep_are_said_and_fail(
    edge: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(edge, "run", lambda *_: [])
    assert edge.main([]) == 1
    assert "nothing to compare" in capsys.readouterr().err
