from __future__ import annotations

import io
import math
import re
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from test_cli_devices import run

from underwatt.budget import Schedule
from underwatt.cli.demo import Story, say_results, searched
from underwatt.demo import trainings
from underwatt.demo.trainings import Bench, Choice, Joules, Rivals, budgets_w, digits, passed
from underwatt.device.registry import open_device
from underwatt.drivers.virtual.device import VirtualJetson
from underwatt.events import BudgetChanged, Expected, Planned, Scored
from underwatt.jobs.cost import count_cost
from underwatt.jobs.job import load_job
from underwatt.jobs.load import RESNET18
from underwatt.planning.problem import Projection
from underwatt.planning.search import SearchResult
from underwatt.records import Measurement, PowerMode, Setting, Status
from underwatt.runlog.log import read_log

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.slow
def test_the_demo_tells_its_story_and_what_is_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainings, "PAPER_LR", 4e-3)  # the target is then reached soon
    threads = torch.get_num_threads()
    assert run("demo", "--folder", str(tmp_path), "--board", "nano") == 0
    printed = capsys.readouterr().out
    out = " ".join(printed.split())
    assert torch.get_num_threads() == threads
    assert "the board is simulated, and so is the cost of a step: that of ResNet18" in out
    assert out.count("Plan for") == 2
    assert out.count("board put back") == 2
    assert "by the curve fitted to them" in out
    assert "Board put back as it was: yes" in out
    rows = re.findall(r" (\w+) +[\d,.]+ s +[\d.]+× +[\d.]+ +[\d,]+ +[\d,]+ *([\d.]*)", printed)
    assert [name for name, _ in rows] == 2 * ["baseline", "Underwatt", "oracle"]
    assert all(float(accuracy) >= 100 * trainings.TARGET for name, accuracy in rows if name != "oracle")
    assert (tmp_path / "nano.html").stat().st_size > 10_000
    for name in ("tight-first", "roomy-first"):
        record = read_log(tmp_path / f"nano-{name}" / "log.jsonl")
        assert record.end is not None
        assert record.end.outcome == "reached"
        assert len(record.of(BudgetChanged)) == 2
        assert record.of(Scored)[-1].value >= trainings.TARGET
        assert record.energy_over_j(window_s=1.0) < 0.05 * record.energy_j()


def test_a_board_that_does_not_exist_is_refused_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("demo", "--folder", str(tmp_path / "demo"), "--board", "mano") == 1
    assert "There is no virtual board 'mano'" in capsys.readouterr().err
    assert not (tmp_path / "demo").exists()


def test_without_scikit_learn_the_demo_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    assert run("demo", "--folder", str(tmp_path / "demo")) == 1
    assert "pip install 'underwatt[demo]'" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "demo").exists()


def test_the_cost_in_the_demo_is_the_counted_one() -> None:
    counted = asdict(count_cost(load_job(f"{EXAMPLES / 'jobs.py'}:resnet18")))
    assert asdict(RESNET18) == pytest.approx(counted, rel=0.01)


def test_no_image_is_in_two_parts_of_the_data() -> None:
    job = digits()
    parts = [job.data, job.test_data, job.proxy_data, job.proxy_test_data]
    images = torch.cat([images for images, _ in parts])
    assert len(images) == 1797
    assert len(torch.unique(images, dim=0)) == len(images)


def test_a_baseline_that_cannot_keep_the_budget_is_no_row_of_figures() -> None:
    bench = Bench("orin-nano", digits(), None, None, None, Path())  # type: ignore[arg-type]
    rivals = Rivals(bench, dict.fromkeys(trainings.BATCH_SIZES, 1e4))
    tight_w = 7.0  # below what the highest CPU and memory clocks draw at the lowest GPU clock
    assert rivals.baseline(tight_w) is None
    assert rivals.best(tight_w).power_w <= tight_w
    schedule = Schedule.of([(0.0, tight_w), (30.0, 10.0)])
    assert rivals.train_baseline(schedule) is None
    ours = replace(passed(schedule, rivals.best), score=0.9, record=Joules(bench.device()).under(schedule))
    out = Console(file=io.StringIO(), width=200)
    say_results(out, [Story(schedule, None, ours, ours)])
    said = out.file.getvalue()  # type: ignore[attr-defined]
    assert "cannot keep it" in said
    assert "0.0 s" in said, "the legend promises seconds"
    assert "×" not in said


def test_budgets_lie_within_what_was_measured() -> None:
    setting = Setting(PowerMode(gpu_mhz=100), 8)
    measured = [Measurement(setting, 1.0, watts) for watts in (3.0, 11.0, 5.0)]
    assert budgets_w([*measured, Measurement(setting, status=Status.OUT_OF_MEMORY)]) == (5.0, 9.0)


def test_a_passed_schedule_counts_each_level_for_as_long_as_it_holds() -> None:
    setting = Setting(PowerMode(), 8)
    choices = {10.0: Choice(setting, 100.0, 9.0, 800.0), 20.0: Choice(setting, 50.0, 18.0, 400.0)}
    took = passed(Schedule.of([(0.0, 10.0), (40.0, 20.0)]), choices.__getitem__)
    assert took.time_s == pytest.approx(40 + 0.6 * 50)
    assert took.energy_j == pytest.approx(40 * 9 + 30 * 18)
    assert took.samples == pytest.approx(0.4 * 100 * 8 + 0.6 * 50 * 8)  # at a step a second
    assert took.score is None
    early = passed(Schedule.of([(0.0, 20.0), (60.0, 10.0)]), choices.__getitem__)
    assert (early.time_s, early.power_w) == (50.0, 18.0)


def test_true_joules_are_judged_by_the_budget_without_the_lag_of_a_sensor() -> None:
    device = open_device("virtual:nano")
    assert isinstance(device, VirtualJetson)
    high = device.stock_modes()["MAXN"]
    low = high.with_knobs(gpu_mhz=device.space.knobs[2].values[0])
    device.apply(high)
    joules = Joules(device)

    def run_until(at_s: float) -> None:
        while joules.since()[0] < at_s:
            device.run_step(RESNET18, 8)

    run_until(10.0)
    changed_s = joules.since()[0]
    device.apply(low)
    run_until(20.0)
    low_w = device.board.true_power_w(RESNET18, low, 8)
    tight = Schedule.of([(0.0, 10.0), (math.ceil(10 * changed_s) / 10, 1.1 * low_w)])
    record = joules.under(tight)
    assert record.time_over_s() == 0
    assert record.energy_j() == pytest.approx(joules.since()[1], rel=0.02)
    too_tight = Schedule.of([(0.0, 10.0), (math.ceil(10 * changed_s) / 10, 0.9 * low_w)])
    assert joules.under(too_tight).time_over_s() > 8


def test_what_the_search_of_a_training_finds_is_told_beside_the_plan() -> None:
    planned, better = Setting(PowerMode(gpu_mhz=300.0), 8), Setting(PowerMode(gpu_mhz=400.0), 16)
    plan = SearchResult(Projection(Measurement(planned, 1.0, 3.0), 100.0, 300.0, fits=True), (), "")
    found = Planned(chosen=better, expected=Expected(90.0, 3.0, 270.0))
    assert searched(5, found, plan) == (
        f"searching: 5 settings measured by training steps; {better} is 10.0% sooner than the plan's {planned}"
    )
    assert "1 setting measured" in searched(1, replace(found, chosen=planned), plan)
    assert "the plan's is still the best" in searched(1, replace(found, chosen=planned), plan)
    assert "keeps below its budget, 10.0% later than" in searched(
        1, replace(found, expected=Expected(110.0, 3.0, 330.0)), plan
    )
    assert searched(0, found, plan).startswith("what was measured for the other budget counts too")
    assert searched(0, replace(found, chosen=planned), plan) == ""
