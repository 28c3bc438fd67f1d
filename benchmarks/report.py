"""How large a report of a long run is, how long it takes to make, and how soon a browser shows all of it.

A synthetic run: a virtual (simulated) Orin AGX, 1,000 measured settings, and ten readings a second for 24 hours.

    python benchmarks/report.py --json out/report.json

Opening is timed in a Chromium that was started before, with a fresh profile and cache for each opening, by the page's
own clock: from asking for the file to the first text, to all that is on the screen (opened), and to the last figure far
below it (drawn).
"""

from __future__ import annotations

import argparse
import math
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _table import Column, add_output, as_table, write
from underwatt.budget import parse_budget
from underwatt.device.registry import open_device
from underwatt.events import BudgetChanged, SettingChanged, Started
from underwatt.predict.base import SettingArray
from underwatt.records import ConvergenceRun, Measurement, Profile, WorkloadCost, WorkloadInfo
from underwatt.reports.build import build_report
from underwatt.reports.page import render
from underwatt.runlog.log import RunLog, read_log

BATCH_SIZES = (4, 8, 16, 32, 64, 128)
COST = WorkloadCost(3.3e9, 4.3e7, 1.1e9, 177, 1.2e4, 1.1e7, 1.8e8, 4.7e6)
BUDGET_W = (25.0, 18.0)
WORKLOAD = WorkloadInfo("synthetic", "synthetic")
PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run")

SINCE_ASKED = "name => performance.getEntriesByName(name)[0].startTime"


def story(device: Any, settings: int) -> tuple[Profile, SettingArray, tuple[ConvergenceRun, ...]]:
    """Settings measured on the simulated board, all candidates, and trainings."""
    rng = np.random.default_rng(0)
    everything = SettingArray.product(
        tuple(knob.name for knob in device.space.knobs), device.space.matrix(), BATCH_SIZES
    )
    measured = []
    for row in rng.choice(len(everything), settings, replace=False):
        setting = everything[int(row)]
        step_s = device.board.true_step_s(COST, setting.mode, setting.batch_size) * math.exp(0.01 * rng.normal())
        power_w = device.board.true_power_w(COST, setting.mode, setting.batch_size) * math.exp(0.01 * rng.normal())
        measured.append(Measurement(setting, step_s=step_s, power_w=power_w, peak_w=1.1 * power_w, cost_s=8.0))
    trainings = tuple(
        ConvergenceRun(size, 0.9, 1e7 * (1 + size / 60 + (4 / size) ** 2) * math.exp(0.05 * rng.normal()), seed)
        for size in (4, 16, 64, 128)
        for seed in range(3)
    )
    return Profile(device.info, WORKLOAD, tuple(measured)), everything, trainings


def write_log(path: Path, device: Any, everything: SettingArray, readings: int) -> None:
    """A run with a budget change in the middle and some readings in excess."""
    rng = np.random.default_rng(1)
    at_s = np.arange(1, readings + 1) / 10
    later = at_s > at_s[-1] / 2
    power_w = np.where(later, 0.96 * BUDGET_W[1], 0.96 * BUDGET_W[0]) + 0.2 * rng.normal(size=readings)
    with RunLog(path) as log:
        log.write(
            Started(
                at_s=0.0,
                started_at="2026-01-01T00:00:00+00:00",
                job="synthetic",
                device=device.info,
                workload=WORKLOAD,
                budget=f"{BUDGET_W[0]:g}W",
                batch_sizes=tuple(BATCH_SIZES),
                target=0.9,
                simulated=True,
            )
        )
        for at, watts, why in ((0.0, BUDGET_W[0], "start"), (at_s[-1] / 2, BUDGET_W[1], "changed")):
            log.write(BudgetChanged(at_s=at, power_w=watts, why=why))
            chosen = everything[int(rng.integers(len(everything)))]
            log.write(SettingChanged(at_s=at, setting=chosen, state="holding", why=why))
        for first in range(0, readings, 10):
            for at, watts in zip(at_s[first : first + 10], power_w[first : first + 10], strict=True):
                log.power(float(at), float(watts))
            log.flush()


def open_times(path: Path, repeats: int) -> list[dict[str, float]]:
    """Seconds to the first text, to a complete screen and to the last figure, for each opening."""
    from playwright.sync_api import sync_playwright

    program = next((found for name in PROGRAMS if (found := shutil.which(name))), None)
    if program is None:
        return []
    times = []
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=program, args=list(ARGUMENTS))
        for _ in range(repeats):
            context = browser.new_context(viewport={"width": 1200, "height": 900})
            page = context.new_page()
            page.goto(path.resolve().as_uri(), wait_until="commit")
            page.wait_for_selector("html[data-drawn=true]", state="attached")
            marks = (("text_s", "first-contentful-paint"), ("opened_s", "shown"), ("drawn_s", "drawn"))
            times.append({name: page.evaluate(SINCE_ASKED, mark) / 1e3 for name, mark in marks})
            context.close()
        browser.close()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--settings", type=int, default=1000)
    parser.add_argument("--readings", type=int, default=864_000)
    parser.add_argument("--repeats", type=int, default=5)
    add_output(parser)
    parser.add_argument("--out", type=Path, default=None, help="keep the report here")
    chosen = parser.parse_args()
    device = open_device("virtual:orin-agx")
    profile, everything, trainings = story(device, chosen.settings)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.jsonl"
        write_log(log, device, everything, chosen.readings)
        began = time.perf_counter()
        record = read_log(log)
        read_s = time.perf_counter() - began
        began = time.perf_counter()
        report = build_report(
            profile,
            everything,
            made_at="benchmark",
            convergence=trainings,
            budget=parse_budget(f"{BUDGET_W[0]:g}W"),
            record=record,
        )
        build_s = time.perf_counter() - began
        began = time.perf_counter()
        html = render(report)
        render_s = time.perf_counter() - began
        path = chosen.out or Path(folder) / "report.html"
        path.write_text(html, encoding="utf-8")
        opened = open_times(path, chosen.repeats)
        size_mb = path.stat().st_size / 1e6
    found = {
        "settings": chosen.settings,
        "readings": chosen.readings,
        "simulated": True,
        "size_mb": size_mb,
        "read_log_s": read_s,
        "build_s": build_s,
        "render_s": render_s,
        "missing": [item.section for item in report.missing],
        "openings": opened,
        **{name: statistics.median(item[name] for item in opened) for name in (opened[0] if opened else ())},
    }
    shown = [{"what": name, "value": value} for name, value in found.items() if isinstance(value, int | float)]
    print(as_table(shown, (Column("what"), Column("value", form=".6g"))))
    if not opened:
        print("not opened: there is no Chromium here")
    write("report", found, chosen)


if __name__ == "__main__":
    main()
