"""What the controller costs a PyTorch loop: time in ``tuner.step()``, holding, in a real training loop on the CPU.

    python benchmarks/controller_cost.py --json OUT [--seconds S]

Real: the loop (a small network trained on the CPU), the tuner, the sampling thread, the clock, the log. Made up: the
device (``ConstantLoad``: it always reads the same watts and has no knob), because a virtual board has no real time.
A step of the loop takes about 20 ms: short training, then sleep, as a loop that waits for a GPU does.

step_us        time in ``tuner.starts`` and ``tuner.step``: median and mean over all steps while holding
floor_us       the same where both do nothing, in rounds in between: what reading the clock costs after 20 ms of sleep,
               which is not the tuner's; it is taken off for ``cost_us``
loop_pct       the same loop's longer time with the tuner than without, as a share of the time without; rounds with and
               without follow each other, and their medians are compared
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _table import Column, add_output, as_table, told, write
from underwatt.adapters.tuner import tune
from underwatt.device.space import ModeSpace
from underwatt.device.timing import SystemClock
from underwatt.records import Capability, DeviceInfo, DeviceState, PowerMode, PowerSample

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

STEP_S = 0.020
BATCH_SIZE = 16
ROUND_S = 3.0
MOST_US, MOST_PCT = 20.0, 0.1


class ConstantLoad:
    """A made-up device on the real clock: constant watts, no knobs. It is no hardware, and measures nothing."""

    def __init__(self) -> None:
        self.clock = SystemClock()
        self.space = ModeSpace(())
        self.info = DeviceInfo("made up", "constant load (made up)", "constant-load", "made-up:constant-load")

    def capabilities(self) -> tuple[Capability, ...]:
        """A power sensor, and nothing to set."""
        return (Capability("power", "sensor", True, "made up: always 5 W"),)

    def read_power(self) -> PowerSample:
        """Always 5 W."""
        return PowerSample(self.clock.now_s(), 5.0)

    def read_state(self) -> DeviceState:
        """Nothing runs, nothing is hot."""
        return DeviceState(running=PowerMode())

    def apply(self, mode: PowerMode) -> None:
        """There is nothing to set."""

    def snapshot(self, mode: PowerMode | None = None) -> Mapping[str, str]:  # noqa: ARG002 - the protocol's
        """There is nothing to keep."""
        return {}

    def restore(self, snapshot: Mapping[str, str]) -> None:
        """There is nothing to put back."""

    def close(self) -> None:
        """There is nothing to let go of."""


def make_step() -> Callable[[], Any]:
    """One training step of a small network, padded by sleep to about ``STEP_S``."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs, targets = torch.randn(BATCH_SIZE, 64), torch.randint(10, (BATCH_SIZE,))

    def step() -> Any:
        begun_s = time.perf_counter()
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        time.sleep(max(0.0, STEP_S - (time.perf_counter() - begun_s)))
        return loss.detach()

    return step


def plain_round(step: Callable[[], Any], seconds: float) -> list[float]:
    """Whole steps without a tuner."""
    until_s, took_s = time.perf_counter() + seconds, []
    while (begun_s := time.perf_counter()) < until_s:
        step()
        took_s.append(time.perf_counter() - begun_s)
    return took_s


def tuned_round(step: Callable[[], Any], tuner: Any, seconds: float, *, with_loss: bool) -> tuple[list[float], ...]:
    """Whole steps with a tuner, and the part of them in ``tuner.starts`` and ``tuner.step``."""
    until_s, took_s, ours_s = time.perf_counter() + seconds, [], []
    while (begun_s := time.perf_counter()) < until_s:
        tuner.starts(BATCH_SIZE)
        started_s = time.perf_counter()
        loss = step()
        trained_s = time.perf_counter()
        tuner.step(loss if with_loss else None)
        ended_s = time.perf_counter()
        took_s.append(ended_s - begun_s)
        ours_s.append(ended_s - trained_s + started_s - begun_s)
    return took_s, ours_s


class Nothing:
    """A tuner that does nothing."""

    def starts(self, batch_size: int) -> None:
        """Nothing."""

    def step(self, loss: Any = None) -> None:
        """Nothing."""


def measure(seconds: float, folder: Path | None) -> dict[str, Any]:
    step = make_step()
    plain_round(step, 0.5)
    device: Any = ConstantLoad()
    plain_s: list[list[float]] = []
    tuned_s: list[list[float]] = []
    ours_s: list[float] = []
    floor_s: list[float] = []
    with contextlib.ExitStack() as stack:
        tuner = stack.enter_context(tune(device=device, budget_w=10, batch_sizes=(BATCH_SIZE,), folder=folder))
        while tuner.state != "holding":
            tuned_round(step, tuner, 0.2, with_loss=folder is not None)
        for _ in range(max(1, round(seconds / (2 * ROUND_S)))):
            took, ours = tuned_round(step, tuner, ROUND_S, with_loss=folder is not None)
            tuned_s.append(took)
            ours_s += ours
            with tuner.testing():  # the tuner's thread goes on sampling, as it would beside any loop
                plain_s.append(plain_round(step, ROUND_S))
                floor_s += tuned_round(step, Nothing(), ROUND_S / 3, with_loss=False)[1]
            tuned_round(step, tuner, 0.2, with_loss=folder is not None)  # looks back over the test, not counted
        state = tuner.state
    plain, tuned = (statistics.median(map(statistics.mean, rounds)) for rounds in (plain_s, tuned_s))
    return {
        "case": "with a log folder" if folder else "without a log folder",
        "state": state,
        "steps": len(ours_s),
        "step_us_median": 1e6 * statistics.median(ours_s),
        "step_us_mean": 1e6 * statistics.mean(ours_s),
        "step_us_p99": 1e6 * statistics.quantiles(ours_s, n=100)[98],
        "floor_us_median": 1e6 * statistics.median(floor_s),
        "floor_us_mean": 1e6 * statistics.mean(floor_s),
        "cost_us_median": 1e6 * (statistics.median(ours_s) - statistics.median(floor_s)),
        "cost_us_mean": 1e6 * (statistics.mean(ours_s) - statistics.mean(floor_s)),
        "mean_pct_of_20ms": 100 * (statistics.mean(ours_s) - statistics.mean(floor_s)) / STEP_S,
        "loop_pct": 100 * (tuned / plain - 1),
    }


COLUMNS = (
    Column("case"),
    Column("state"),
    Column("steps"),
    Column("step_us_median", "step µs", ".1f"),
    Column("step_us_mean", "mean", ".1f"),
    Column("step_us_p99", "99%", ".0f"),
    Column("floor_us_median", "floor µs", ".1f"),
    Column("floor_us_mean", "mean", ".1f"),
    Column("cost_us_median", "cost µs", ".1f"),
    Column("cost_us_mean", "mean", ".1f"),
    Column("mean_pct_of_20ms", "% of 20 ms", ".3f"),
    Column("loop_pct", "whole loop %", "+.2f"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_output(parser)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each case")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for place in (None, Path(folder) / "run"):
            rows.append(measure(arguments.seconds, place))
            told(rows[-1], COLUMNS)
    print(as_table(rows, COLUMNS))
    kept = all(r["cost_us_median"] <= MOST_US and r["mean_pct_of_20ms"] <= MOST_PCT for r in rows)
    asked = f"at most {MOST_US:g} µs a step (median) and {MOST_PCT:g}% of 20 ms (mean)"
    print(f"asked: {asked}: {'kept' if kept else 'not kept'}")
    write("controller_cost", rows, arguments)


if __name__ == "__main__":
    main()
