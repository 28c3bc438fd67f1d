"""How long decisions take, and how much memory: on synthetic measurements of a virtual board (simulated).

    python benchmarks/speed.py --json OUT

predict: fit on 50 measurements and predict AGX Orin's 18,096 modes × 6 batch sizes, with and without a reference.
fit: fitting alone, by the number of measurements. plan: choose among AGX Xavier's 29,232 modes × 6 batch sizes from 50
measurements; replan: the same with one measurement more, among the candidates that have a prospect, as in a search. The
quickest of three rounds counts: the machine may be busy.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _table import Column, add_output, as_table, write
from underwatt.budget import parse_budget
from underwatt.device.registry import open_device
from underwatt.drivers.virtual.device import VirtualJetson
from underwatt.planning.choice import choose_setting
from underwatt.planning.problem import Outlook, Problem
from underwatt.planning.search import shortlist
from underwatt.predict.base import SettingArray, prepared
from underwatt.predict.fewshot import FewShot
from underwatt.records import Measurement, WorkloadCost
from underwatt.store.exchange import builtin_reference

if TYPE_CHECKING:
    from collections.abc import Callable

    from underwatt.planning.choice import Plan
    from underwatt.predict.base import Fit

BATCH_SIZES = (4, 8, 16, 32, 64, 128)
MEASURED = 50
ROUNDS = 3
COST = WorkloadCost(
    flops_per_sample=6e8,
    bytes_per_sample=2e7,
    bytes_per_step=2e8,
    kernels_per_step=400,
    load_bytes_per_sample=5e4,
    parameters=4e6,
    state_bytes=6.4e7,
    activation_bytes_per_sample=4e6,
)


def measured(device: VirtualJetson, settings: SettingArray, count: int, seed: int = 0) -> list[Measurement]:
    rng = np.random.default_rng(seed)
    found = []
    for row in rng.choice(len(settings), count, replace=False):
        setting = settings[int(row)]
        step_s = device.board.true_step_s(COST, setting.mode, setting.batch_size) * rng.normal(1, 0.01)
        power_w = device.board.true_power_w(COST, setting.mode, setting.batch_size) * rng.normal(1, 0.01)
        found.append(Measurement(setting, step_s, power_w))
    return found


def board(name: str) -> tuple[VirtualJetson, SettingArray]:
    device = open_device(f"virtual:{name}")
    assert isinstance(device, VirtualJetson)
    knobs = tuple(knob.name for knob in device.space.knobs)
    return device, SettingArray.product(knobs, device.space.matrix(), BATCH_SIZES)


def quickest_s(call: Callable[[], object]) -> float:
    times_s = []
    for _ in range(ROUNDS):
        started_s = time.perf_counter()
        call()
        times_s.append(time.perf_counter() - started_s)
    return min(times_s)


def plan(problem: Problem, fit: Fit, known: list[Measurement]) -> Plan:
    return choose_setting(problem, fit(known).predict(problem.candidates), measurements=known)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_output(parser)
    arguments = parser.parse_args()
    found: dict[str, float] = {}
    device, settings = board("orin-agx")
    sample = measured(device, settings, MEASURED)
    reference = [builtin_reference("xavier-agx")]
    found[f"predict_{len(settings)}_s"] = quickest_s(lambda: FewShot().fit(sample).predict(settings))
    found[f"predict_{len(settings)}_reference_s"] = quickest_s(
        lambda: FewShot().fit(sample, reference).predict(settings)
    )
    for count in (50, 100, 250, 500):
        more = measured(device, settings, count)
        found[f"fit_{count}_s"] = quickest_s(lambda more=more: FewShot().fit(more))
    device, settings = board("xavier-agx")
    sample = measured(device, settings, MEASURED + 1)
    for name, references in (("", []), ("_reference", [builtin_reference("orin-agx")])):
        problem = Problem.of(settings, parse_budget("15W"))
        found[f"plan_{len(settings)}{name}_s"] = quickest_s(
            lambda p=problem, r=references: plan(p, prepared(FewShot(), settings, r), sample[:MEASURED])
        )
        fit = prepared(FewShot(), settings, references)
        before = sample[:MEASURED]
        promising = problem.take(shortlist(problem, Outlook.of(problem, fit(before).predict(settings), before)))
        found[f"replan{name}_s"] = quickest_s(lambda p=promising, fit=fit: plan(p, fit, sample))
    found["peak_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    rows = [{"name": name, "value": value} for name, value in found.items()]
    print(as_table(rows, (Column("name"), Column("value", form=".3f"))))
    write("speed", rows, arguments)


if __name__ == "__main__":
    main()
