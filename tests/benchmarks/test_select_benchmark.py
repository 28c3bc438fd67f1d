from __future__ import annotations

import importlib
import json
import subprocess
import sys
from argparse import ArgumentTypeError
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from underwatt.records import Measurement, PowerMode, Setting

if TYPE_CHECKING:
    from types import ModuleType

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
KEYS = {"method", "budget_w", "repeat", "measured", "time_penalty_pct", "over_w"}


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    return importlib.import_module("select_modes")


def _measured(slower: float) -> list[Measurement]:
    modes = [
        PowerMode(cpu_cores=cores, cpu_mhz=cpu, gpu_mhz=gpu, mem_mhz=2000.0)
        for cores in (2, 4)
        for cpu in (500.0, 1000.0, 2000.0)
        for gpu in (200.0, 350.0, 500.0, 650.0, 800.0, 950.0, 1100.0, 1250.0, 1300.0, 1350.0)
    ]
    return [
        Measurement(
            Setting(mode, 16),
            step_s=slower * (8 / mode.gpu_mhz + 6 / mode.cpu_mhz / mode.cpu_cores),
            power_w=5 + 12 * (mode.gpu_mhz / 1300) ** 2 + mode.cpu_cores * mode.cpu_mhz / 2000,
        )
        for mode in modes
    ]


def _table(path: Path, slower: float) -> Path:
    lines = ["cores,cpu_mhz,gpu_mhz,mem_mhz,time_ms,power_w"]
    for m in _measured(slower):
        mode = m.setting.mode
        lines.append(f"{mode.cpu_cores},{mode.cpu_mhz},{mode.gpu_mhz},2000,{1e3 * m.step_s},{m.power_w}")
    path.write_text("\n".join(lines) + "\n")
    return path


def test_the_command_writes_a_row_for_each_budget_and_repeat(tmp_path: Path) -> None:
    reference, target = _table(tmp_path / "a.csv", 1.0), _table(tmp_path / "b.csv", 2.0)
    out = tmp_path / "new" / "out.json"
    command = [sys.executable, str(FOLDER / "select.py"), "--reference", str(reference), "--target", str(target)]
    options = ["--budgets", "5:15:5", "--repeats", "2", "--methods", "underwatt,random50,maxn", "--json", str(out)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "skipped 5 W" in done.stderr
    rows = json.loads(out.read_text())
    assert all(set(row) == KEYS for row in rows)
    assert len(rows) == 3 * 2 * 2
    for row in rows:
        if row["method"] == "underwatt":
            assert row["over_w"] == 0
            assert 0 <= row["time_penalty_pct"] < 10
            assert 3 <= row["measured"] <= 18
        if row["method"] == "maxn":
            assert row["over_w"] > 0
            assert row["time_penalty_pct"] < 0
    assert "underwatt" in done.stdout


def test_the_file_does_not_hide_the_standard_module_of_its_name() -> None:
    program = f"import sys; sys.path.insert(0, {str(FOLDER)!r}); import select, selectors; print(select.select)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "built-in function select" in done.stdout, done.stderr


def test_powertrain_takes_its_predictions_at_their_word(benchmark: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="PowerTrain needs PyTorch")
    profiles = [
        benchmark.read_profile(_table(tmp_path / f"{name}.csv", slower)) for name, slower in (("a", 1), ("b", 2))
    ]
    rows = benchmark.run(benchmark.Bench(profiles[:1], profiles[1]), [10.0, 14.0], ["powertrain"], 1)
    assert [row.measured for row in rows] == [50, 50]


def test_not_finding_a_mode_cannot_look_good(benchmark: ModuleType, tmp_path: Path) -> None:
    target = benchmark.read_profile(_table(tmp_path / "b.csv", 1.0))
    lucky = target.measurements[-1]
    broken = Measurement(lucky.setting, step_s=lucky.step_s, power_w=1.0)
    table = type(target)(target.device, target.workload, (*target.measurements[:-1], broken))
    rows = benchmark.run(benchmark.Bench([], table), [2.0, 15.0], ["underwatt"], 1)
    assert rows[0].time_penalty_pct == float("inf")
    assert rows[0].measured == len(table.measurements)
    assert np.isfinite(rows[1].time_penalty_pct)
    line = benchmark.summary(rows).splitlines()[1].split()
    mean, worst, nothing = line[2], line[5], line[8]
    assert (mean, worst, nothing) == ("inf", "inf", "1")


def test_random_modes_that_do_not_fit_are_shown_as_over(benchmark: ModuleType, tmp_path: Path) -> None:
    table = benchmark.read_profile(_table(tmp_path / "b.csv", 1.0))
    powers = [m.power_w for m in table.measurements]
    lowest = powers.index(min(powers))
    rows = benchmark.run(benchmark.Bench([], table), [powers[lowest]], ["random50"], 12)
    missed = [lowest not in np.random.default_rng(repeat).permutation(len(powers))[:50] for repeat in range(12)]
    assert [row.over_w > 0 for row in rows] == missed
    assert any(missed)


def test_budgets_include_the_last(benchmark: ModuleType) -> None:
    assert benchmark.parse_budgets("17:50:1") == [float(watts) for watts in range(17, 51)]
    assert benchmark.parse_budgets("7:8:0.5") == [7.0, 7.5, 8.0]
    for bad in ("17", "50:17:1", "a:b:c", "0:5:1", "5:6:0"):
        with pytest.raises(ArgumentTypeError):
            benchmark.parse_budgets(bad)


@pytest.mark.parametrize("extra", [["--methods", "magic"], ["--budgets", "ten"], ["--repeats", "0"]])
def test_bad_options_are_refused(benchmark: ModuleType, tmp_path: Path, extra: list[str]) -> None:
    with pytest.raises(SystemExit):
        benchmark.main(["--target", str(_table(tmp_path / "b.csv", 1.0)), *extra])


def _some_rows(table: Path, rows: int) -> Path:
    """The header and the first rows of a table."""
    table.write_text("\n".join(table.read_text().splitlines()[: rows + 1]) + "\n")
    return table


def test_a_mode_that_stands_twice_is_one_mode_with_its_mean(benchmark: ModuleType, tmp_path: Path) -> None:
    table = _table(tmp_path / "b.csv", 1.0)
    header, *lines = table.read_text().splitlines()
    hungrier = [",".join([*line.split(",")[:-1], str(float(line.split(",")[-1]) + 1.0)]) for line in lines]
    table.write_text("\n".join([header, *lines, *hungrier]) + "\n")
    bench = benchmark.Bench([], benchmark.read_profile(table))
    assert len(bench.truth.drawn_w) == len(lines)
    assert bench.truth.drawn_w.tolist() == pytest.approx([m.power_w + 0.5 for m in _measured(1.0)])
    rows = benchmark.run(bench, [10.0, 14.0], ["underwatt", "random50"], 1)
    assert all(row.over_w == 0 for row in rows)


def test_powertrain_is_charged_for_the_modes_there_are(benchmark: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="PowerTrain needs PyTorch")
    target = benchmark.read_profile(_some_rows(_table(tmp_path / "b.csv", 1.0), 40))
    rows = benchmark.run(benchmark.Bench([], target), [14.0], ["powertrain", "random50"], 1)
    assert [row.measured for row in rows] == [40, 40]


@pytest.mark.parametrize(("reference_rows", "target_rows"), [(1, 60), (60, 2)])
def test_tables_that_are_too_small_for_a_method_leave_the_others(
    benchmark: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], reference_rows: int, target_rows: int
) -> None:
    reference = _some_rows(_table(tmp_path / "a.csv", 1.0), reference_rows)
    target = _some_rows(_table(tmp_path / "b.csv", 2.0), target_rows)
    out = tmp_path / "out.json"
    arguments = ["--reference", reference, "--target", target, "--budgets", "14:14:1", "--repeats", "1", "--json", out]
    code = benchmark.main([*map(str, arguments), "--methods", "underwatt,powertrain,random50,maxn"])
    shown = capsys.readouterr()
    done = {row["method"] for row in json.loads(out.read_text())}
    assert done >= {"random50", "maxn"}
    left_out = {"underwatt", "powertrain"} - done
    assert left_out
    assert code == 1
    assert all(f"{method} is left out: " in shown.err for method in left_out)


def test_budgets_that_no_row_keeps_are_said_and_fail(
    benchmark: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, out = _table(tmp_path / "b.csv", 1.0), tmp_path / "out.json"
    arguments = ["--target", str(target), "--budgets", "1:2:1", "--methods", "maxn", "--json", str(out)]
    assert benchmark.main(arguments) == 1
    assert "the smallest power in b.csv is" in capsys.readouterr().err
    assert json.loads(out.read_text()) == []


def test_a_method_that_never_keeps_the_budget_has_no_penalty_instead_of_an_infinite_one(benchmark: ModuleType) -> None:
    line = benchmark.summary([benchmark.Row("maxn", 10.0, 0, 0, -5.0, 3.0)]).splitlines()[1]
    assert "inf" not in line
    assert line.split()[2:6] == ["nan"] * 4
