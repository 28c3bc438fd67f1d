"""A made-up story for reports: a virtual Nano measured at some settings, trainings, and a run with a budget change."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from underwatt.budget import Budget, parse_budget
from underwatt.drivers.virtual.board_specs import BOARDS
from underwatt.drivers.virtual.device import VirtualJetson
from underwatt.drivers.virtual.simulated_board import VirtualBoard
from underwatt.events import BudgetChanged, Ended, Measured, Noted, Progressed, Scored, SettingChanged, Started
from underwatt.predict.base import SettingArray
from underwatt.records import ConvergenceRun, Measurement, Profile, Setting, Status, WorkloadCost, WorkloadInfo
from underwatt.reports.build import build_report
from underwatt.reports.report_records import Report
from underwatt.runlog.log import RunLog, read_log
from underwatt.runlog.run_record import RunRecord

SOME_CPU_MHZ = (403.2, 921.6, 1479.0)
BATCH_SIZES = (4, 8, 16, 32, 64)
MEASURED = 14
NASTY = '<script>alert("job")</script> & "quotes"'
COST = WorkloadCost(
    flops_per_sample=3.3e9,
    bytes_per_sample=4.3e7,
    bytes_per_step=1.1e9,
    kernels_per_step=177,
    load_bytes_per_sample=1.2e4,
    parameters=1.1e7,
    state_bytes=1.8e8,
    activation_bytes_per_sample=4.7e6,
)


def device() -> VirtualJetson:
    return VirtualJetson(VirtualBoard(BOARDS["nano"]))


def candidates() -> SettingArray:
    """Every GPU clock and batch size at some of the other clocks: few enough for quick tests."""
    space = device().space
    modes = [mode for mode in space if mode.cpu_cores in (2, 4) and mode.mem_mhz in (800.0, 1600.0)]
    modes = [mode for mode in modes if mode.cpu_mhz in SOME_CPU_MHZ]
    matrix = np.array([list(mode.knobs().values()) for mode in modes])
    return SettingArray.product(tuple(knob.name for knob in space.knobs), matrix, BATCH_SIZES)


def measure(settings: Sequence[Setting], seed: int = 0) -> tuple[Measurement, ...]:
    board, rng = device().board, np.random.default_rng(seed)
    found = []
    for setting in settings:
        step_s = board.true_step_s(COST, setting.mode, setting.batch_size) * math.exp(0.01 * rng.normal())
        power_w = board.true_power_w(COST, setting.mode, setting.batch_size) * math.exp(0.005 * rng.normal())
        found.append(Measurement(setting, step_s=step_s, power_w=power_w, peak_w=1.1 * power_w, cost_s=8.0))
    return tuple(found)


def profile(count: int = MEASURED, name: str = NASTY) -> Profile:
    everything = candidates()
    rows = np.random.default_rng(1).choice(len(everything), count, replace=False)
    measured = measure([everything[int(row)] for row in rows])
    failed = Measurement(Setting(everything[0].mode, 128), status=Status.OUT_OF_MEMORY, note=f"too large {NASTY}")
    return Profile(device().info, WorkloadInfo(name, "made-up"), (*measured, failed))


def trainings() -> tuple[ConvergenceRun, ...]:
    rng = np.random.default_rng(2)
    return tuple(
        ConvergenceRun(
            size, 0.97, 2e4 * (1 + size / 60 + (4 / size) ** 2) * math.exp(0.06 * rng.normal()), seed, 1e-3 * size / 16
        )
        for size in (4, 8, 32, 64)
        for seed in range(3)
    )


def write_run(path: Path, *, seconds: int = 600, name: str = NASTY, excess_at_s: float | None = 100.0) -> RunRecord:
    """A run: a search, ten readings a second below 6 W, then below 5 W, one reading in excess, and the end."""
    here, everything = device(), candidates()
    first, best, later = everything[10], everything[len(everything) // 2], everything[len(everything) // 3]
    half = seconds / 2
    at_s = np.arange(1, seconds * 10 + 1) / 10
    power_w = np.where(at_s < half, 5.7, 4.8) + 0.08 * np.random.default_rng(3).normal(size=len(at_s)).clip(-2, 2)
    if excess_at_s is not None:
        power_w[int(excess_at_s * 10)] = 7.25
    with RunLog(path) as log:
        log.write(
            Started(
                at_s=0,
                started_at="2026-11-01T10:00:00+00:00",
                job=name,
                device=here.info,
                workload=WorkloadInfo(name, "made-up"),
                budget="6W",
                goal="soonest",
                target=0.97,
                batch_sizes=BATCH_SIZES,
                simulated=True,
                pid=1,
                version="0.1.0",
            )
        )
        log.write(BudgetChanged(at_s=0, power_w=6.0, why="start"))
        log.write(SettingChanged(at_s=0, setting=first, state="searching", why="to learn how time and power behave"))
        log.write(Measured(at_s=20, measurement=measure([first])[0]))
        log.write(SettingChanged(at_s=20, setting=best, state="holding", why="the plan"))
        log.write(BudgetChanged(at_s=half, power_w=5.0, why="changed"))
        log.write(SettingChanged(at_s=half, setting=later, state="holding", why="a new budget"))
        log.write(Noted(at_s=half, level="info", text=f"changed by {NASTY}"))
        log.flush()
        for share in range(1, 9):
            here = {"steps": 700 * share, "samples": 12_000 * share, "batch_size": 16, "state": "holding"}
            log.write(Progressed(at_s=share * seconds / 9, running=best.mode, temperature_c=30.0 + share, **here))
            log.write(Scored(at_s=share * seconds / 9, samples=12_000 * share, value=0.891 + share / 100, target=0.97))
        for start in range(0, len(at_s), 30_000):
            for at, power in zip(at_s[start : start + 30_000], power_w[start : start + 30_000], strict=True):
                log.power(float(at), float(power))
            log.flush()
        log.write(
            Ended(
                at_s=seconds,
                outcome="reached",
                restored=True,
                energy_j=float(power_w.sum() / 10),
                samples=123_456,
                steps=7716,
                score=0.971,
                error=None,
            )
        )
    return read_log(path)


def report(
    *,
    measured: Profile | None = None,
    budget: Budget | None = None,
    record: RunRecord | None = None,
    convergence: Sequence[ConvergenceRun] | None = None,
) -> Report:
    return build_report(
        measured or profile(),
        candidates(),
        made_at="1 November 2026",
        convergence=trainings() if convergence is None else convergence,
        budget=budget or parse_budget("6W"),
        record=record,
        stock_modes=device().stock_modes(),
    )
