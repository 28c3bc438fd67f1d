from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from underwatt.testing.predictors import made_up_measurements

if TYPE_CHECKING:
    from types import ModuleType

KEYS = {
    "method",
    "samples",
    "repeat",
    "time_mape",
    "power_mape",
    "time_cover90",
    "power_cover90",
    "fit_s",
    "predict_s",
}


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    return importlib.import_module("predict")


def _table(path: Path, slower: float) -> Path:
    lines = ["cores,cpu_mhz,gpu_mhz,mem_mhz,batch_size,time_ms,power_w"]
    for m in made_up_measurements(slower=slower):
        mode = m.setting.mode
        lines += [f"4,{mode.cpu_mhz},{mode.gpu_mhz},2000,{m.setting.batch_size},{1e3 * m.step_s},{m.power_w}"]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_writes_a_row_for_each_repeat(
    benchmark: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reference, target = _table(tmp_path / "a.csv", 1.0), _table(tmp_path / "b.csv", 2.0)
    out = tmp_path / "new" / "out.json"
    methods = ["underwatt", "underwatt-noref", "lookup-nearest", "linear"]
    arguments = ["--reference", reference, "--target", target, "--samples", "6,9", "--repeats", 2]
    code = benchmark.main([str(a) for a in [*arguments, "--methods", ",".join(methods), "--json", out]])
    assert code == 0
    rows = json.loads(out.read_text())
    assert len(rows) == len(methods) * 2 * 2
    assert all(set(row) == KEYS for row in rows)
    best = [row["time_mape"] for row in rows if row["method"] == "underwatt" and row["samples"] == 9]
    worst = [row["time_mape"] for row in rows if row["method"] == "lookup-nearest" and row["samples"] == 9]
    assert max(best) < min(worst)
    printed = capsys.readouterr().out
    assert all(method in printed for method in methods)


def test_powertrain_runs_too(benchmark: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="PowerTrain needs PyTorch")
    reference, target = _table(tmp_path / "a.csv", 1.0), _table(tmp_path / "b.csv", 2.0)
    rows = benchmark.run([benchmark.read_profile(reference)], benchmark.read_profile(target), ["powertrain"], [9], 1)
    assert rows[0].time_mape > 0


def test_design_never_sees_what_it_is_scored_on(benchmark: ModuleType, tmp_path: Path) -> None:
    first = benchmark.read_profile(_table(tmp_path / "a.csv", 1.0))
    second = benchmark.read_profile(_table(tmp_path / "b.csv", 5.0))
    chosen = [
        benchmark.Underwatt(()).choose(benchmark.observe(p.measurements).settings, 6, 0).tolist()
        for p in (first, second)
    ]
    assert chosen[0] == chosen[1]


@pytest.mark.parametrize(
    "extra", [["--methods", "magic"], ["--samples", "ten"], ["--samples", "2"], ["--repeats", "0"]]
)
def test_bad_options_are_refused(benchmark: ModuleType, tmp_path: Path, extra: list[str]) -> None:
    target = _table(tmp_path / "a.csv", 1.0)
    with pytest.raises(SystemExit):
        benchmark.main(["--target", str(target), *extra])


def test_a_table_that_is_too_small_is_an_error(
    benchmark: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = _table(tmp_path / "a.csv", 1.0)
    assert benchmark.main(["--target", str(target), "--samples", "24", "--methods", "linear"]) == 2
    assert "nothing would be left" in capsys.readouterr().err
