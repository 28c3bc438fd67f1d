"""How well the physics of the virtual boards explains what real boards were measured to do.

    python benchmarks/physics.py --data DIR --json OUT

Four kinds of rows:

- ``table``: each ``*_train_*.csv`` in DIR (columns cores, cpu_mhz, gpu_mhz, mem_mhz, time_ms, power_w; batch_size
  optional) is fitted, and the mean absolute percentage error left on the same table reported, beside that of the
  neural network that PowerTrain trained on every mode of its tables. cpuidle is off, as it was there.
- ``idle``: what a virtual board draws at rest, and in the pauses of a training, beside what owners of the real one
  have published (at rest).
- ``load``: the most that a training draws there (VGG19 and ResNet-18, 1 to 128 at a time), and the most that any of
  some hundred made-up loads does, from nothing but computing to nothing but moving bytes, beside the most that anybody
  has published; of AGX Orin that is the most in the tables above, with cpuidle off.
- ``workload``: VGG19 on a virtual TX2 at each of its 13 GPU clocks, beside the first and the last as measured on a real
  one. Nothing is fitted to these: the board's constants come from data sheets, the network's costs are counted.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))

from virtual_costs import IMAGENET, SMALL

from _table import Column, add_output, as_table, write
from physics_fit import Fit, fit
from underwatt.drivers.virtual.board_specs import BOARDS
from underwatt.drivers.virtual.device import open_virtual
from underwatt.drivers.virtual.physics import Clocks, Floats, idle_power, step_power, step_times
from underwatt.records import PowerMode, WorkloadCost

PUBLISHED = ("8–9", "4")  # PowerTrain's network, trained on every mode
COLUMNS = ("cores", "cpu_mhz", "gpu_mhz", "mem_mhz", "time_ms", "power_w")


@dataclass(frozen=True)
class PublishedIdle:
    """Watts at rest that owners of a board have published (forums, reviews, papers), from the least to the most."""

    board: str
    mode: str
    low_w: float
    high_w: float
    cpuidle: bool = True


IDLE = (
    PublishedIdle("nano", "MAXN", 1.0, 1.75),
    PublishedIdle("tx2", "MAXP_CORE_ARM", 2.1, 3.1),
    PublishedIdle("xavier-agx", "MODE_15W", 3.1, 3.5),
    PublishedIdle("orin-nano", "15W", 3.7, 5.0),
    PublishedIdle("orin-nano-super", "15W", 3.7, 5.0),
    PublishedIdle("orin-agx", "MAXN", 6.8, 6.8),
    PublishedIdle("orin-agx", "MAXN", 10.4, 10.4, cpuidle=False),  # clocks at maximum: jetson_clocks
    PublishedIdle("orin-agx-jp6", "MAXN", 6.8, 6.8),
)
# The largest watts of the whole module that anybody has published, with the mode in which they were seen.
LARGEST_W = (("tx2", "MAXN", 16.08), ("orin-nano", "15W", 11.8), ("orin-nano-super", "MAXN_SUPER", 21.7))
LOADS = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0)  # times the FLOPs, the bytes moved and the bytes loaded of VGG19
BATCH_SIZES = (1, 8, 32, 128)
# A real TX2: frames a second and watts of VDD_IN at its lowest and its highest GPU clock. These frames are inference:
# training one costs three times the FLOPs, 1,780 for each cycle that one frame takes at the lowest clock, and the GPU's
# peak is 512.
VGG19_ON_TX2 = {114.75: (1.73, 9.03), 1300.5: (14.89, 16.08)}
# All of VGG19's convolutions are 3 × 3, which cuDNN computes by Winograd's algorithm with fewer multiplications than
# are counted. Lavin and Gray (CVPR 2016, table 5: this network, FP32, a GPU of the generation before) reach 1.0 of the
# peak with one image at a time, in FLOPs of the direct algorithm, and 1.35 with 64.
WINOGRAD_SHARE = 1.0


def read_table(path: Path) -> tuple[Clocks, Floats, Floats, Floats]:
    data = np.atleast_1d(np.genfromtxt(path, delimiter=",", names=True))
    missing = [name for name in COLUMNS if name not in (data.dtype.names or ())]
    if missing:
        raise SystemExit(f"{path}: no column {', '.join(missing)}")
    # Without the column every row has the same batch size, and which one it was changes no error.
    batch = data["batch_size"] if "batch_size" in data.dtype.names else np.ones(len(data))
    clocks = Clocks(data["cores"], data["cpu_mhz"], data["gpu_mhz"], data["mem_mhz"])
    return clocks, batch, data["time_ms"] / 1e3, data["power_w"]


def row(path: Path) -> dict[str, object]:
    found: Fit = fit(*read_table(path))
    return {
        "table": path.stem,
        "constants": found.constants,
        "time_mape": round(found.time_mape, 3),
        "power_mape": round(found.power_mape, 3),
    }


def clocks_of(mode: PowerMode) -> Clocks:
    knobs = mode.knobs()
    return Clocks(*(np.asarray(float(knobs[name])) for name in ("cpu_cores", "cpu_mhz", "gpu_mhz", "mem_mhz")))


def off_pct(found: float, published: float) -> float:
    return round(100 * (found / published - 1), 1)


def idle_row(published: PublishedIdle) -> dict[str, object]:
    spec = BOARDS[published.board]
    mode = clocks_of(spec.stock_mode(published.mode))
    idle_w = float(idle_power(spec.physics.power, mode, cpuidle=published.cpuidle).total_w)
    return {
        "idle": published.board,
        "mode": published.mode,
        "cpuidle": "on" if published.cpuidle else "off",
        "idle_w": round(idle_w, 2),
        "pause_w": round(pause_w(published), 2),
        "published_low_w": published.low_w,
        "published_high_w": published.high_w,
        "off_pct": off_pct(idle_w, (published.low_w + published.high_w) / 2),
    }


def pause_w(published: PublishedIdle) -> float:
    """What the board draws a tenth of a second after some steps of a training, as warm as these have made it."""
    device = open_virtual(f"{published.board}?cpuidle={'on' if published.cpuidle else 'off'}")
    device.apply(device.stock_modes()[published.mode])
    for _ in range(50):
        device.run_step(vgg19_inference(3.0), 8)
    device.clock.sleep(0.1)
    return device.board.power_w


def load_row(board: str, mode_name: str, published_w: float, *, cpuidle: bool = True) -> dict[str, object]:
    """The heaviest of real trainings, and of loads that compute, move and load as no network need do."""
    spec, vgg19 = BOARDS[board], vgg19_inference(3.0)
    mode = clocks_of(spec.stock_mode(mode_name))

    def most_w(*costs: WorkloadCost) -> float:
        steps = [(spec.physics.step_constants(cost), batch_size) for cost, batch_size in product(costs, BATCH_SIZES)]
        times = [step_times(constants, mode, float(batch_size)) for constants, batch_size in steps]
        return max(float(step_power(spec.physics.power, mode, one, cpuidle=cpuidle).total_w) for one in times)

    made_up = [
        replace(
            vgg19,
            flops_per_sample=flops * vgg19.flops_per_sample,
            bytes_per_sample=moved * vgg19.bytes_per_sample,
            load_bytes_per_sample=loaded * vgg19.load_bytes_per_sample,
        )
        for flops, moved, loaded in product(LOADS, LOADS, LOADS)
        if flops or moved
    ]
    training_w = most_w(vgg19, IMAGENET, SMALL)
    return {
        "load": board,
        "mode": mode_name,
        "cpuidle": "on" if cpuidle else "off",
        "training_w": round(training_w, 2),
        "any_w": round(most_w(*made_up), 2),
        "published_w": published_w,
        "off_pct": off_pct(training_w, published_w),
    }


def vgg19_inference(flops_share: float) -> WorkloadCost:
    """Counted for one frame of 224 × 224: convolutions with ReLU, pooling, three dense layers; FP32.

    ``flops_share`` of the counted FLOPs are computed.
    """
    side, channels, flops, moved, weights, kernels = 224, 3, 0.0, 0.0, 0.0, 0
    for width, layers in ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4)):
        for _ in range(layers):
            flops += 2 * 9 * channels * width * side**2
            weights += 9 * channels * width + width
            moved += channels * side**2 + 3 * width * side**2  # read, write; ReLU reads and writes again
            channels, kernels = width, kernels + 2
        moved += 1.25 * width * side**2
        side, kernels = side // 2, kernels + 1
    inputs = channels * side**2
    for width in (4096, 4096, 1000):
        flops += 2 * inputs * width
        weights += inputs * width + width
        inputs, kernels = width, kernels + 2
    return WorkloadCost(
        flops_per_sample=flops_share * flops,
        bytes_per_sample=4 * moved,
        bytes_per_step=4 * weights,
        kernels_per_step=kernels,
        load_bytes_per_sample=4 * 3 * 224**2,
        parameters=weights,
        state_bytes=4 * weights,
        activation_bytes_per_sample=4 * 2 * 64 * 224**2,
    )


def tx2_rows() -> list[dict[str, object]]:
    """One frame after another in the largest mode, at each GPU clock."""
    spec, rows = BOARDS["tx2"], []
    peak_flops_per_cycle = 2 * 256  # data sheet: 256 lanes
    cost = vgg19_inference(spec.physics.flops_per_gpu_cycle / (WINOGRAD_SHARE * peak_flops_per_cycle))
    for gpu_mhz in spec.gpu_mhz:
        mode = clocks_of(spec.space.highest.with_knobs(gpu_mhz=gpu_mhz))
        times = step_times(spec.physics.step_constants(cost), mode, 1.0)
        frames, power_w = float(1 / times.step_s), float(step_power(spec.physics.power, mode, times).total_w)
        found: dict[str, object] = {
            "workload": "VGG19 inference on tx2",
            "gpu_mhz": gpu_mhz,
            "frames_per_s": round(frames, 2),
            "power_w": round(power_w, 2),
        }
        if gpu_mhz in VGG19_ON_TX2:
            real_frames, real_w = VGG19_ON_TX2[gpu_mhz]
            found |= {"published_frames_per_s": real_frames, "frames_off_pct": off_pct(frames, real_frames)}
            found |= {"published_w": real_w, "power_off_pct": off_pct(power_w, real_w)}
        rows.append(found)
    return rows


SHOWN = {
    "table": (
        Column("table"),
        Column("constants"),
        Column("time_mape", "time %", ".2f"),
        Column("power_mape", "power %", ".2f"),
    ),
    "idle": (
        Column("idle", "board"),
        Column("mode"),
        Column("cpuidle"),
        Column("idle_w", "virtual W", ".2f"),
        Column("pause_w", "pause W", ".2f"),
        Column("published_low_w", "published W", ".2f"),
        Column("published_high_w", "to W", ".2f"),
        Column("off_pct", "off %", "+.0f"),
    ),
    "load": (
        Column("load", "board"),
        Column("mode"),
        Column("cpuidle"),
        Column("training_w", "training W", ".2f"),
        Column("any_w", "any load W", ".2f"),
        Column("published_w", "published W", ".2f"),
        Column("off_pct", "off %", "+.0f"),
    ),
    "workload": (
        Column("workload"),
        Column("gpu_mhz", "GPU MHz"),
        Column("frames_per_s", "frames/s", ".2f"),
        Column("published_frames_per_s", "published", ".2f"),
        Column("frames_off_pct", "off %", "+.0f"),
        Column("power_w", "W", ".2f"),
        Column("published_w", "published W", ".2f"),
        Column("power_off_pct", "off %", "+.0f"),
    ),
}
HEADINGS = {
    "table": "Physics model fitted to measured modes, mean absolute error:",
    "idle": "At rest, virtual boards beside what owners of real ones published (off: from the middle):",
    "load": "The most drawn at work, virtual boards beside the most that anybody has published (off: of trainings):",
    "workload": "A virtual TX2 from data sheets alone, beside a real one:",
}


def show(rows: list[dict[str, object]]) -> None:
    for kind, heading in HEADINGS.items():
        print(heading)
        print(as_table([row for row in rows if kind in row], SHOWN[kind]))
        if kind == "table":
            time_pct, power_pct = PUBLISHED
            print(f"PowerTrain's network, trained on every mode, as published: time {time_pct}%, power {power_pct}%")
        print()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with the csv files")
    add_output(parser)
    options = parser.parse_args(arguments)
    paths = sorted(options.data.rglob("*_train_*.csv"))
    if not paths:
        print(f"No *_train_*.csv under {options.data}", file=sys.stderr)
        return 2
    loads = [load_row(*one) for one in LARGEST_W]
    if tables := [path for path in paths if path.stem.startswith("orin_agx")]:
        most_w = max(float(read_table(path)[3].max()) for path in tables)
        loads.append(load_row("orin-agx", "MAXN", round(most_w, 2), cpuidle=False))
    rows = [*(row(path) for path in paths), *(idle_row(published) for published in IDLE), *loads, *tx2_rows()]
    show(rows)
    write("physics", rows, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
