from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from underwatt.budget import Watts
from underwatt.records import WorkloadCost

if TYPE_CHECKING:
    from types import ModuleType

SIZES = (4, 8, 16, 32, 64, 128)
COST = WorkloadCost(1e9, 2e7, 2e8, 300, 1e4, 1e7, 1.6e8, 4e6)


@pytest.fixture(scope="module")
def papers() -> ModuleType:
    pytest.importorskip("torch", reason="the networks' costs are counted with PyTorch")
    return importlib.import_module("papers")


def record(seeds: int = 3) -> dict[str, Any]:
    """Trainings of one network; those of the proxy need half the samples, and each seed some more or less."""
    runs = []
    for role, scale in (("proxy", 0.5), ("target", 1.0)):
        for size in SIZES:
            for seed in range(seeds):
                samples = scale * 1e4 * (1 + size / 40) * (1 + 0.1 * seed)
                curve = [[samples / 2, 0.4], [samples, 0.8]]
                run = {"model": "small", "role": role, "batch_size": size, "seed": seed, "lr": 1e-3, "target": 0.8}
                runs.append(run | {"samples": samples, "curve": curve})
    return {"complete_seeds": list(range(seeds)), "runs": runs, "lr_at_128": {"small": 1e-3}}


def test_every_claim_stands_beside_what_is_found_with_an_interval_over_the_seeds(
    papers: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    edge = importlib.import_module("edge")
    monkeypatch.setattr(edge, "BOARDS", ("nano",))
    monkeypatch.setattr(edge, "costs", lambda: {"small": COST})
    rows = papers.at(record(), None, resamples=20)
    found = {row["claim"]: row for row in rows}
    json.dumps(rows, allow_nan=False)
    most = found["peak watts: joint over the baseline, at most"]
    assert most["published"] == "up to 2.3–2.4"
    assert 1 <= most["low"] <= most["ours"] <= most["high"]
    every = found["peak watts: all knobs over the baseline, at most"]
    assert every["ours"] >= most["ours"]
    # The proxy tells the target's ratios exactly, so the choice is the target's own.
    assert found["peak watts: joint by the proxy over joint by the target itself"]["ours"] == pytest.approx(1.0)
    assert found["small: rank correlation of proxy and target"]["ours"] == pytest.approx(1.0)
    assert found["peak watts: score of joint above the baseline's after equal time"]["ours"] >= 0
    said = capsys.readouterr().out
    assert "Why 2.4×" in said
    assert f"small {(1 + 128 / 40) / (1 + 4 / 40):.2f}×" in said


def test_a_choice_is_made_by_what_is_believed_and_judged_by_what_is_true(papers: ModuleType) -> None:
    offered = {"joint": {8: (1.0, 5.0), 64: (0.5, 6.0), 128: (0.4, 6.0)}}
    offer = papers.Offer("nano", "small", Watts.PEAK, 7.0, offered)
    true = {8: 100.0, 64: 150.0, 128: 300.0}
    best = papers.choose(offer, "joint", true, true)
    assert (best.size, best.time_s, best.energy_j) == (64, 75.0, 450.0)
    fooled = papers.choose(offer, "joint", {8: 10.0, 64: 1e3, 128: math.inf}, true)
    assert (fooled.size, fooled.time_s) == (8, 100.0)
    assert papers.choose(offer, "joint", dict.fromkeys(true, math.inf), true) is None


def test_proxies_of_text_are_compared(papers: ModuleType) -> None:
    runs = []
    for role, order in (("target", 1), ("same author", 1), ("Shakespeare", 1), ("WikiText", -1)):
        for rank, size in enumerate(SIZES[::order]):
            runs += [
                {"model": papers.TEXT_NETWORK, "role": role, "batch_size": size, "seed": seed}
                | {"samples": 1000.0 + 100 * rank, "curve": [[1, 0.1]]}
                for seed in (0, 1)
            ]
    rows = papers.text_claims(papers.Trainings({"complete_seeds": [0, 1], "runs": runs}))
    by = {row["claim"]: row["ours"] for row in rows}
    assert by["text, same author: rank correlation with the target"] == pytest.approx(1.0)
    assert by["text, WikiText: rank correlation with the target"] == pytest.approx(-1.0)
    assert by["text, target: samples at 128 over the best"] == pytest.approx(1.5)
    assert by["text, WikiText: the target's samples at its best batch over the best"] == pytest.approx(1.5)


def test_powertrains_claims_on_tables_of_our_own(
    papers: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real tables take minutes; these have their knobs, and a power that ends at 20 W."""
    module = importlib.import_module("_papers_powertrain")
    (tmp_path / "powertrain").mkdir()
    rng = np.random.default_rng(0)
    for name, slower in ((module.MOBILE, 1.0), (module.RESNET, 2.0), (module.NANO, 3.0)):
        lines = ["cores,cpu_mhz,gpu_mhz,mem_mhz,time_ms,power_w"]
        for cores in (2, 6, 12):
            for cpu in (422.4, 1267.2, 2201.6):
                for gpu in (318.75, 828.75, 1300.5):
                    time_ms = slower * (3e4 / gpu + 2e4 / cpu / cores) * rng.normal(1, 0.01)
                    lines.append(f"{cores},{cpu},{gpu},{665.6 if cores == 2 else 3199},{time_ms},{8 + gpu / 108.4}")
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(module, "PUBLISHED_ERRORS", {"one": {10: (27.5, 13.4)}, "nano": {10: (7.9, 6.0)}})
    monkeypatch.setattr(module, "BUDGETS_W", range(12, 30, 4))
    rows = module.powertrain_claims(tmp_path, draws=2, repeats=1)
    found = {row["claim"]: row for row in rows}
    json.dumps(rows, allow_nan=False)
    for method in ("PowerTrain transferred", "PowerTrain from scratch", "Underwatt", "Underwatt without reference"):
        row = found[f"error of time, one, 10 modes, {method}"]
        assert 0 < row["low"] <= row["ours"] <= row["high"]
        assert row["low"] <= row["mean"] <= row["high"]
    assert found["error of time, one, 10 modes, PowerTrain transferred"]["published"] == "27.5"
    assert "error of time, nano, 10 modes, PowerTrain, squared errors" in found
    assert found["Underwatt: over budget"]["ours"] == 0
    assert found["the vendor's modes: modes measured"]["ours"] == 0
    assert found["a transfer, the reference's networks kept, median"]["ours"] < 30


def test_budgets_that_bind_nothing_are_left_out(papers: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("_papers_powertrain")
    asked: list[list[float]] = []

    class Bench:
        truth = type("Truth", (), {"drawn_w": np.array([10.0, 20.5])})

        def __init__(self, *_: object) -> None:
            pass

    def run(_bench: object, budgets: list[float], methods: list[str], _repeats: int) -> list[Any]:
        asked.append(budgets)
        return [type("Row", (), {"time_penalty_pct": 1.0, "over_w": 0.0, "measured": 3, "method": methods[0]})]

    monkeypatch.setattr(module, "Bench", Bench)
    monkeypatch.setattr(module, "run", run)
    module.choices(None, None, 1)
    assert all(budgets == [17.0, 18.0, 19.0, 20.0] for budgets in asked)
