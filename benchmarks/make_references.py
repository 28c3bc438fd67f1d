"""Makes what is built in: simulated tables of a common workload on every virtual board, and PowerTrain's networks.

    python benchmarks/make_references.py [--out src/underwatt/store/builtin]
    python benchmarks/make_references.py --network orin_agx_train_resnet18.csv

Each table holds the true (noiseless) figures of some hundred settings of one board, and says ``simulated`` in its name.
Run it again when the boards' constants change. ``--network`` makes the other: PowerTrain's two networks, trained on the
table of its authors' reference, which `underwatt plan --powertrain` starts from. Only their weights are kept.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _repeats import read_profile
from underwatt.drivers.virtual.board_specs import BOARDS
from underwatt.drivers.virtual.simulated_board import VirtualBoard
from underwatt.errors import OutOfMemoryError
from underwatt.jobs.load import RESNET18
from underwatt.rivals.predictors import REFERENCE, PowerTrain, save_networks

if TYPE_CHECKING:
    from underwatt.records import PowerMode

OUT = Path(__file__).resolve().parent.parent / "src" / "underwatt" / "store" / "builtin"
MODES = 75
BATCH_SIZES = (4, 16, 64, 128)


def lines(name: str, modes: int = MODES) -> list[str]:
    """The table of one board: its lowest and highest mode, and random ones between."""
    board = VirtualBoard(BOARDS[name])
    space = board.space
    chosen = np.random.default_rng(0).permutation(len(space))[: modes - 2]
    rows = ["cores,cpu_mhz,gpu_mhz,mem_mhz,batch_size,time_ms,power_w"]
    for mode in (space.lowest, *(space[int(at)] for at in sorted(chosen)), space.highest):
        rows += [line for size in BATCH_SIZES if (line := _line(board, mode, size))]
    return rows


def _line(board: VirtualBoard, mode: PowerMode, batch_size: int) -> str | None:
    try:
        board.check_memory(RESNET18, batch_size)
    except OutOfMemoryError:
        return None
    time_ms = 1e3 * board.true_step_s(RESNET18, mode, batch_size)
    power_w = board.true_power_w(RESNET18, mode, batch_size)
    knobs = f"{mode.cpu_cores},{mode.cpu_mhz:g},{mode.gpu_mhz:g},{mode.mem_mhz:g}"
    return f"{knobs},{batch_size},{time_ms:.4f},{power_w:.4f}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--network", type=Path, help="a table to train PowerTrain's reference networks on instead")
    options = parser.parse_args(arguments)
    if options.network:
        save_networks(PowerTrain().pretrain(read_profile(options.network)))
        print(REFERENCE)
        return 0
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    for name in BOARDS:
        path = out / f"simulated_{name}_resnet18.csv"
        path.write_text("\n".join(lines(name)) + "\n", encoding="utf-8")
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
