"""``underwatt demo``: what exists so far, on virtual boards, told as it happens."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import typer
from rich.console import Console

from underwatt.device.registry import open_device
from underwatt.device.session import Session
from underwatt.device.virtual.device import VirtualJetson
from underwatt.predict import FewShot, SettingArray, cross_validate, first_settings
from underwatt.profile.order import in_order
from underwatt.profile.runner import run_profile
from underwatt.profile.store import Store
from underwatt.records import Measurement, WorkloadCost, WorkloadInfo
from underwatt.workload.simulated import SimulatedWorkload

SETTINGS = 12
BATCH_SIZES = (4, 8, 16, 32, 64, 128)
BOARDS = ("nano", "orin-agx")
CHECKED = 400

# ResNet18 at 32×32 with AdamW, as `underwatt.workload.cost` counts it: the demo itself needs no PyTorch.
RESNET18 = WorkloadCost(
    flops_per_sample=3.329e9,
    bytes_per_sample=4.30e7,
    bytes_per_step=1.073e9,
    kernels_per_step=177,
    load_bytes_per_sample=1.23e4,
    parameters=1.1174e7,
    state_bytes=1.788e8,
    activation_bytes_per_sample=4.70e6,
)

app = typer.Typer()
_out = Console()


@app.callback()
def _group() -> None:
    """Keep this a group, though it has one command."""


@app.command("demo")
def demo(
    folder: Path = typer.Option(Path("out") / "demo", help="Where the measurements are kept."),
) -> None:
    """Show what exists so far on virtual boards: measure a few settings, predict all others, check that, restore."""
    started = time.perf_counter()
    _out.print(
        "[bold]Underwatt, the story so far.[/] The boards are [yellow]simulated[/]; everything else is real code.\n"
    )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "demo.db"
    path.unlink(missing_ok=True)
    for board in BOARDS:
        with Store(path) as store:
            _one_board(board, store)
    _out.print(f"Kept in {path}; look around with: underwatt store ls --store {path}")
    _out.print(f"[dim]{time.perf_counter() - started:.0f} s on this machine.[/]")


def _one_board(board: str, store: Store) -> None:
    device = open_device(f"virtual:{board}")
    assert isinstance(device, VirtualJetson)
    space = device.space
    everything = SettingArray.product(tuple(knob.name for knob in space.knobs), space.matrix(), BATCH_SIZES)
    _out.print(
        f"[bold]{device.info.name}[/]: {len(space):,} power modes × {len(BATCH_SIZES)} batch sizes = "
        f"{len(everything):,} settings for ResNet18."
    )
    workload = SimulatedWorkload(WorkloadInfo("resnet18", "demo-resnet18"), RESNET18, device)
    found_mode = dict(device.snapshot())
    began_s = device.clock.now_s()
    chosen = in_order(everything[int(row)] for row in first_settings(everything, SETTINGS))
    with Session(device) as session:
        measured = run_profile(session, workload, chosen, store).measured
    minutes = (device.clock.now_s() - began_s) / 60
    _out.print(
        f"  Measured {len(measured)} of them in {minutes:.1f} simulated minutes; "
        f"put back as it was: {'yes' if dict(device.snapshot()) == found_mode else 'NO'}."
    )
    _out.print(f"  {cross_validate(measured).verdict}")
    _check(device, everything, measured)


def _check(device: VirtualJetson, everything: SettingArray, measured: tuple[Measurement, ...]) -> None:
    """Predictions for settings that were never measured, against the simulated board's own truth."""
    predicted = FewShot().fit(measured).predict(everything)
    rows = np.random.default_rng(0).choice(len(everything), CHECKED, replace=False)
    errors = []
    for row in rows:
        setting = everything[int(row)]
        true_s = device.board.true_step_s(RESNET18, setting.mode, setting.batch_size)
        true_w = device.board.true_power_w(RESNET18, setting.mode, setting.batch_size)
        errors.append((np.exp(predicted.log_step_s[row]) / true_s - 1, np.exp(predicted.log_power_w[row]) / true_w - 1))
    time_error, power_error = 100 * np.abs(errors).mean(axis=0)
    _out.print(
        f"  {CHECKED} random settings that were not measured, against the simulation's truth: time off by "
        f"{time_error:.1f}%, power by {power_error:.1f}% on average.\n"
    )
