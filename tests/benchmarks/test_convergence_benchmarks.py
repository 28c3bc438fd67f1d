"""The benchmarks around convergence, in small: the recorder on made-up data, the curve on a made-up trace."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
if not (BENCHMARKS / "record_convergence.py").is_file():
    pytest.skip("the benchmarks are not part of this installation", allow_module_level=True)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Ten classes that differ in colour, and texts of a few repeated words."""
    rng = np.random.default_rng(0)
    arrays = {}
    for split, count in (("train", 400), ("test", 100)):
        classes = np.arange(count) % 10
        images = (
            rng.integers(0, 60, (count, 3, 32, 32))
            + (classes[:, None, None, None] * np.array([20, 7, 13])[:, None, None]) % 190
        )
        arrays |= {f"{split}_images": images.astype(np.uint8), f"{split}_classes": classes.astype(np.int64)}
    np.savez(tmp_path / "images.npz", names=np.array([f"class{i}" for i in range(10)]), **arrays)
    (tmp_path / "text").mkdir()
    for name in ("wikitext2_valid", "wikitext2_test", "tinyshakespeare", "austen_sense", "austen_persuasion"):
        (tmp_path / "text" / f"{name}.txt").write_text("to be or not to be, that is the question; " * 60)
    return tmp_path


PROGRAM = """
import argparse, sys
sys.path.insert(0, sys.argv[1])
import record_convergence as rc
options = argparse.Namespace(data=sys.argv[2], json=sys.argv[3], limit_s=float(sys.argv[4]), lanes=4, smoke=False)
sizes = rc.Sizes(batch_sizes=(4, 32), seeds=1, evaluate_every=64, pretraining_samples=64, calibration_samples=192,
                 least_limit=192, limit_factor=1.0, evaluation_samples=20)
models = tuple(m for m in rc.SMOKE_MODELS if m.name in ("resnet18", "char_transformer"))
rc.Recorder(options, sizes, models).main()
"""


def record(data: Path, limit_s: float) -> dict[str, object]:
    out = data / "out.json"
    command = [sys.executable, "-c", PROGRAM, str(BENCHMARKS), str(data), str(out), str(limit_s)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    record: dict[str, object] = json.loads(out.read_text())
    return record


@pytest.mark.slow
def test_real_trainings_are_recorded_with_how_they_were_made(data: Path) -> None:
    found = record(data, 300.0)
    runs = found["runs"]
    assert isinstance(runs, list)
    assert len(runs) == 2 * 2 * 2
    assert found["failed"] == found["unfinished"] == []
    assert found["complete_seeds"] == [0]
    assert {(r["model"], r["role"], r["batch_size"]) for r in runs} == {
        (model, role, size)
        for model in ("resnet18", "char_transformer")
        for role in ("proxy", "target")
        for size in (4, 32)
    }
    for run in runs:
        assert run["lr"] == pytest.approx(
            (1e-3 if "char" in run["model"] else 5e-4) * math.sqrt(run["batch_size"] / 128)
        )
        assert run["ended"] in ("reached", "limit")
        assert (run["samples"] is not None) == (run["ended"] == "reached")
        assert run["samples"] is None or 0 < run["samples"] <= run["samples_limit"]
    assert "no class is shared" in found["data_roles"]["image"]  # type: ignore[index]


@pytest.mark.slow
def test_what_does_not_fit_into_the_time_is_said_to_be_unfinished_not_unreached(data: Path) -> None:
    found = record(data, 0.0)
    assert found["runs"] == []
    assert found["unfinished"]


TRACE = "dataset,network,batch_size,optimizer,learning_rate,run,target_metric,target_epoch\n"


def test_the_curve_is_compared_on_any_trace(tmp_path: Path) -> None:
    rows = []
    for target, hardness in ((0.5, 20.0), (0.6, 60.0)):
        for size in (8, 16, 32, 64, 128, 256):
            epochs = hardness * (1 + size / 100 + (8 / size) ** 2)
            rows += [f"made,up,{size},sgd,0.1,{run},{target},{epochs * (1 + 0.05 * run):.3f}" for run in (0, 1)]
    rows += [f"made,up,512,sgd,0.1,{run},{target}," for run in (0, 1) for target in (0.5, 0.6)]
    trace = tmp_path / "trace.csv"
    trace.write_text(TRACE + "\n".join(rows) + "\n")
    out = tmp_path / "out.json"
    program = [sys.executable, str(BENCHMARKS / "convergence_curve.py"), "--train", str(trace), "--json", str(out)]
    subprocess.run(program, check=True, capture_output=True, text=True)
    found = json.loads(out.read_text())
    spread = {
        s["method"]: s for s in found["summary"] if (s["workload"], s["points"], s["choice"]) == ("all", 4, "spread")
    }
    assert spread["curve"]["factor_90"] < spread["noise law"]["factor_90"]
    (easy,) = found["easy"]
    assert (easy["easy"], easy["hard"], easy["regret"]) == (0.5, 0.6, 1.0)
    assert easy["factor_90"] < 1.05
