from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from underwatt.records import ConvergenceRun

if TYPE_CHECKING:
    from types import ModuleType

KEYS = {"method", "dataset", "cap_w", "measured", "time_over_oracle", "over_w"}
METHODS = ["underwatt", "cold", "largest-batch", "default-batch", "fastest-epoch", "table"]
SIZES = (8, 16, 32, 64, 128, 256)
LIMITS_W = (100, 125, 150, 175, 200, 225, 250)


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    return importlib.import_module("joint")


def _power(path: Path, *datasets: str) -> Path:
    lines = ["dataset,network,batch_size,optimizer,power_limit,time_per_epoch,average_power"]
    for dataset in datasets:
        for size in SIZES:
            for limit_w in LIMITS_W:
                drawn_w = min(limit_w, 90 + 28 * math.log2(size / 4))
                epoch_s = (20 + 400 / size) * (250 / drawn_w) ** 0.4
                lines.append(f"{dataset},net,{size},adam,{limit_w},{epoch_s},{drawn_w}")
    path.write_text("\n".join(lines) + "\n")
    return path


def _train(path: Path, dataset: str, *, rising: bool = True) -> Path:
    lines = ["dataset,network,batch_size,optimizer,learning_rate,run,target_metric,target_epoch"]
    for step, scale in enumerate((2, 4, 8, 16)):
        target = 0.5 + 0.1 * step if rising else 60 - 5 * step
        for size in SIZES:
            epochs = round(scale * (1 + size / 100 + (4 / size) ** 2))
            lines += [f"{dataset},net,{size},adam,0.1,{run},{target},{epochs}" for run in range(2)]
    never = 0.9 if rising else 40
    lines += [f"{dataset},net,{size},adam,0.1,{run},{never},nan" for size in SIZES for run in range(2)]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_writes_a_row_for_each_method_and_cap(
    benchmark: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "out.json"
    train, power = _train(tmp_path / "t.csv", "birds"), _power(tmp_path / "p.csv", "birds", "fish")
    assert benchmark.main(["--train", str(train), "--power", str(power), "--json", str(out)]) == 0
    rows = json.loads(out.read_text())
    assert all(set(row) == KEYS for row in rows)
    assert [row["method"] for row in rows[:6]] == METHODS
    assert {row["dataset"] for row in rows} == {"birds"}
    caps = sorted({row["cap_w"] for row in rows})
    assert caps == pytest.approx([100.0, 125.0, 150.0, 175.0, 200.0])
    assert len(rows) == len(METHODS) * len(caps)
    assert all(row["time_over_oracle"] >= 1 - 1e-9 for row in rows)
    assert all(row["over_w"] == 0 for row in rows)
    ours = [row for row in rows if row["method"] == "underwatt"]
    largest = [row for row in rows if row["method"] == "largest-batch"]
    cold = [row for row in rows if row["method"] == "cold"]
    assert max(row["time_over_oracle"] for row in cold) < max(row["time_over_oracle"] for row in largest)
    assert max(row["time_over_oracle"] for row in ours) < max(row["time_over_oracle"] for row in largest)
    assert all(row["measured"] < len(SIZES) * len(LIMITS_W) / 2 for row in ours)
    printed = capsys.readouterr()
    assert "fish" in printed.err
    assert "judged on 0.8" in printed.out


@pytest.mark.parametrize("rising", [True, False])
def test_harder_is_what_takes_more_epochs_whether_the_metric_rises_or_falls(
    benchmark: ModuleType, tmp_path: Path, rising: bool
) -> None:
    train = _train(tmp_path / "t.csv", "birds", rising=rising)
    case = benchmark.read_cases(train, _power(tmp_path / "p.csv", "birds"))[0]
    assert (case.proxy, case.hard) == ((0.7, 0.8) if rising else (50, 45))


def test_a_target_that_runs_often_miss_is_not_the_judge(benchmark: ModuleType) -> None:
    def runs(target: float, epochs: list[float]) -> list[ConvergenceRun]:
        return [ConvergenceRun(8, target, value, seed) for seed, value in enumerate(epochs)]

    made = [*runs(0.5, [2, 2, 2]), *runs(0.6, [5, 5, 6]), *runs(0.7, [9, math.nan, math.nan])]
    assert benchmark.proxy_and_hard(made) == (0.5, 0.6)
    assert benchmark.proxy_and_hard(runs(0.5, [2, 2])) is None
    assert benchmark.proxy_and_hard([]) is None


def test_batch_sizes_that_learn_nothing_do_not_make_every_target_too_hard(
    benchmark: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train, power = _train(tmp_path / "t.csv", "birds"), _power(tmp_path / "p.csv", "birds")
    header, *lines = train.read_text().splitlines()

    def learns(line: str) -> bool:
        size, target = int(line.split(",")[2]), float(line.split(",")[6])
        return size in (16, 32) or (size == 64 and target == 0.5)

    kept = [line if learns(line) else ",".join([*line.split(",")[:-1], "nan"]) for line in lines]
    train.write_text("\n".join([header, *kept]) + "\n")
    [case] = benchmark.read_cases(train, power)
    assert (case.proxy, case.hard) == (pytest.approx(0.7), pytest.approx(0.8))
    assert set(case.hard_epochs) == {16, 32}
    rows = benchmark.run([case], METHODS)
    assert all(math.isfinite(row.time_over_oracle) for row in rows if row.method == "underwatt")
    assert "left out" not in capsys.readouterr().err


def test_a_walk_counts_what_it_tried_in_vain(benchmark: ModuleType, tmp_path: Path) -> None:
    train, power = _train(tmp_path / "t.csv", "birds"), _power(tmp_path / "p.csv", "birds")
    header, *lines = power.read_text().splitlines()
    # The two largest batch sizes draw more than any cap, whatever their limit.
    hungry = [",".join([*line.split(",")[:-1], "249"]) if int(line.split(",")[2]) >= 128 else line for line in lines]
    power.write_text("\n".join([header, *hungry]) + "\n")
    [case] = benchmark.read_cases(train, power)
    chosen, measured = benchmark.METHODS["largest-batch"](case, 175.0)
    assert chosen.setting.batch_size == 64
    at_and_above = sum(limit_w >= chosen.setting.mode.power_limit_w for limit_w in LIMITS_W)
    assert measured == 2 * len(LIMITS_W) + at_and_above
    chosen, measured = benchmark.METHODS["default-batch"](case, 175.0)
    assert chosen.setting.batch_size == 32
    assert measured == sum(limit_w >= chosen.setting.mode.power_limit_w for limit_w in LIMITS_W)


def test_settings_that_stand_twice_are_one_setting_with_their_mean(benchmark: ModuleType, tmp_path: Path) -> None:
    train, power = _train(tmp_path / "t.csv", "birds"), _power(tmp_path / "p.csv", "birds")
    once = benchmark.read_cases(train, power)[0]
    power.write_text(power.read_text() + "\n".join(power.read_text().splitlines()[1:]) + "\n")
    twice = benchmark.read_cases(train, power)[0]
    assert [(m.setting, m.power_w) for m in twice.measurements] == [(m.setting, m.power_w) for m in once.measurements]


def test_a_summary_of_nothing_found_is_no_warning(benchmark: ModuleType) -> None:
    line = benchmark.summary([benchmark.Row("underwatt", "birds", 100.0, 9, math.inf, 0.0)]).splitlines()[1]
    assert line.split()[1:5] == ["1", "1", "inf", "inf"]


def test_caps_that_nothing_keeps_are_said_and_fail(
    benchmark: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train, power = _train(tmp_path / "t.csv", "birds"), _power(tmp_path / "p.csv", "birds")
    header, *lines = power.read_text().splitlines()
    power.write_text("\n".join([header, *(",".join([*line.split(",")[:-1], "249"]) for line in lines)]) + "\n")
    assert benchmark.main(["--train", str(train), "--power", str(power)]) == 1
    assert "nothing to compare" in capsys.readouterr().err


def test_methods_never_see_the_hard_target(benchmark: ModuleType, tmp_path: Path) -> None:
    train, power = _train(tmp_path / "t.csv", "birds"), _power(tmp_path / "p.csv", "birds")
    case = benchmark.read_cases(train, power)[0]
    other = type(case)(
        case.dataset, case.measurements, case.proxy_runs, {size: 99.0 / size for size in SIZES}, case.proxy, case.hard
    )
    for method in METHODS:
        assert benchmark.METHODS[method](case, 175.0) == benchmark.METHODS[method](other, 175.0)


def test_two_networks_of_one_dataset_keep_their_names_apart(benchmark: ModuleType, tmp_path: Path) -> None:
    train, power = _train(tmp_path / "t.csv", "birds"), _power(tmp_path / "p.csv", "birds")
    for path in (train, power):
        text = path.read_text()
        path.write_text(text + "\n".join(text.splitlines()[1:]).replace(",net,", ",net2,") + "\n")
    assert [case.dataset for case in benchmark.read_cases(train, power)] == ["birds net adam", "birds net2 adam"]


def test_files_that_do_not_match_are_an_error(
    benchmark: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train, power = _train(tmp_path / "t.csv", "birds"), _power(tmp_path / "p.csv", "fish")
    assert benchmark.main(["--train", str(train), "--power", str(power)]) == 2
    assert benchmark.main(["--train", str(power), "--power", str(train)]) == 2
    assert "no workload in common" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        benchmark.main(["--train", str(train), "--power", str(power), "--methods", "magic"])


def test_halves_share_no_batch_size_and_cold_knows_no_run(benchmark: ModuleType, tmp_path: Path) -> None:
    case = benchmark.read_cases(_train(tmp_path / "t.csv", "birds"), _power(tmp_path / "p.csv", "birds"))[0]
    lower, upper = (
        {m.setting.batch_size for m in benchmark.half(case, which).measurements} for which in ("lower", "upper")
    )
    assert lower | upper == set(SIZES)
    assert max(lower) < min(upper)
    blind = type(case)(case.dataset, case.measurements, (), case.hard_epochs, case.proxy, case.hard)
    assert benchmark.METHODS["cold"](case, 175.0) == benchmark.METHODS["cold"](blind, 175.0)


@pytest.mark.slow
def test_real_traces_meet_the_targets(benchmark: ModuleType, data_dir: Path) -> None:
    zeus = data_dir / "zeus"
    rows = benchmark.run(
        benchmark.read_cases(zeus / "summary_train.csv", zeus / "summary_power_v100.csv"), ["underwatt", "cold"]
    )
    ratios = [row.time_over_oracle for row in rows]
    assert math.exp(sum(map(math.log, ratios)) / len(ratios)) <= 1.06
    assert max(ratios) <= 1.3
    assert all(row.over_w == 0 for row in rows)
    assert sum(row.measured for row in rows) / len(rows) <= 12
