"""How well the physics model's few constants explain every measured power mode of real boards.

    python benchmarks/physics.py --data DIR --json OUT

Fits each ``*_train_*.csv`` in DIR (columns cores, cpu_mhz, gpu_mhz, mem_mhz, time_ms, power_w; batch_size optional) and
reports the mean absolute percentage error left on the same table, beside that of the neural network that PowerTrain
trained on every mode of its tables.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _table import Column, add_output, as_table, write
from physics_fit import Fit, fit
from underwatt.drivers.virtual.physics import Clocks, Floats

PUBLISHED = ("8–9", "4")  # PowerTrain's network, trained on every mode
COLUMNS = ("cores", "cpu_mhz", "gpu_mhz", "mem_mhz", "time_ms", "power_w")


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


SHOWN = (
    Column("table"),
    Column("constants"),
    Column("time_mape", "time %", ".2f"),
    Column("power_mape", "power %", ".2f"),
)


def show(rows: list[dict[str, object]]) -> None:
    print("Physics model against measured modes, mean absolute error:")
    print(as_table(rows, SHOWN))
    time_pct, power_pct = PUBLISHED
    print(f"PowerTrain's network, trained on every mode, as published: time {time_pct}%, power {power_pct}%")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with the csv files")
    add_output(parser)
    options = parser.parse_args(arguments)
    paths = sorted(options.data.rglob("*_train_*.csv"))
    if not paths:
        print(f"No *_train_*.csv under {options.data}", file=sys.stderr)
        return 2
    rows = [row(path) for path in paths]
    show(rows)
    write("physics", rows, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
