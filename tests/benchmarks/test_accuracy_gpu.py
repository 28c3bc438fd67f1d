from __future__ import annotations

import json
import math
import sys

import pytest
from train_world import blobs

import accuracy_gpu
from underwatt.records import ConvergenceRun

SIZES = (8, 32, 128)


def tiny(seed: int):
    return blobs(target=0.6, batch_sizes=SIZES, seed=seed, name="tiny")


def test_every_method_trains_and_what_is_there_is_not_made_again(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(accuracy_gpu, "JOBS", {"tiny": tiny})
    monkeypatch.setattr(accuracy_gpu, "SIZES", SIZES)
    out = tmp_path / "rows.json"
    call = ["accuracy_gpu.py", "--json", str(out), "--jobs", "tiny", "--budgets", "3", "--device", "virtual:nano"]
    monkeypatch.setattr(sys, "argv", [*call, "--minutes", "0"])
    accuracy_gpu.main()
    assert not out.exists(), "nothing is begun that would end too late"
    assert "10 trainings were left" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", call)
    accuracy_gpu.main()
    rows = json.loads(out.read_text())
    assert len(rows) == len({accuracy_gpu.key(row) for row in rows}) == 2 * (len(SIZES) + 2)
    assert all(row["energy_j"] > 0 and row["verdict"] for row in rows)
    before = out.read_text()
    accuracy_gpu.main()
    assert out.read_text() == before
    assert "tiny" in capsys.readouterr().out


def row(method: str, size: int, seed: int, time_s: float, **more):
    scores = [(time_s / 2, 0.4), (time_s, 0.8)]
    of = {"job": "a", "budget_w": 200.0, "energy_j": time_s, "samples": 100, "reached": True, "scores": scores}
    return {**of, "method": method, "batch_size": size, "seed": seed, "time_s": time_s, **more}


def test_methods_are_compared_with_the_best_fixed_size_of_all_seeds() -> None:
    rows = [row("fixed", size, seed, s) for size, s in ((64, 10.0), (128, 8.0), (256, 20.0)) for seed in (0, 1)]
    rows += [row("cold", 0, 0, 8.0), row("cold", 0, 1, 16.0), row("warm", 0, 0, 9.0), row("warm", 0, 1, 7.0)]
    (found,) = accuracy_gpu.compare(rows)
    assert (found["best_size"], found["best_s"]) == (128, 8.0)
    assert found["cold"] == pytest.approx(1.5)
    assert found["largest"] == pytest.approx(2.5)
    assert found["warm_sooner"] == pytest.approx(2.5)
    assert found["cold_score"] == pytest.approx(-0.2), "one of them has come half as far by then"
    rows[0] = row("fixed", 128, 0, 8.0, reached=False)
    assert accuracy_gpu.compare([*rows, row("cold", 0, 2, 8.0, reached=False)])[0]["cold"] == math.inf


def test_warm_knows_the_fixed_trainings_of_other_seeds_alone() -> None:
    rows = [row("fixed", size, seed, 10.0, job="tiny") for size in (64, 128) for seed in (0, 1)]
    rows += [row("cold", 0, 1, 8.0, job="tiny"), row("fixed", 64, 1, 10.0, job="tiny", budget_w=100.0)]
    known = accuracy_gpu.known_to(rows, tiny(0))
    assert [run.batch_size for run in known] == [64, 128, 64], "of any budget"
    assert all(isinstance(run, ConvergenceRun) and run.seed == 1 for run in known)
