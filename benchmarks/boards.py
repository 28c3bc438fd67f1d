"""Does the Jetson driver set every board, and put it back, where files behave as a real kernel has them?

    python benchmarks/boards.py --json OUT [--tries 100] [--kills 50] [--only nano:4]

Each board of the matrix (``tests/helpers/board_matrix.py``) is mounted through FUSE with the manners of its release's
kernel: limits that arrive 5 to 60 ms after the write, counted enables, rights and nodes that come later, busy answers.
Random modes are applied and put back; a row counts the tries, those after which the kernel itself held what was asked
for, and those after which everything was as found, byte for byte. In the last row sessions are killed at random
moments: "applied" are those that had changed something by then, "restored" those after which the next session had put
all of it back. To examine an older driver with the same fixture, put its ``src`` into PYTHONPATH.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))

from board_matrix import SETTABLE, Cell
from kernel_mount import Mount, mounted, why_not
from killable import Killable

from _table import Column, add_output, as_table, told, write
from underwatt.device.session import Session
from underwatt.drivers.jetson.device import JetsonDevice
from underwatt.errors import UnderwattError
from underwatt.helper.journal import STATE_VARIABLE
from underwatt.records import PowerMode

COLUMNS = (Column("board"), Column("release"), Column("tried"), Column("applied"), Column("restored"))
CHILD = Path(__file__).resolve().parent.parent / "tests" / "helpers" / "session_child.py"
SETTLE_S = 0.08  # everything that was asked for has arrived by then
KILL_WITHIN_S = 1.2
AT_ONCE = 4  # boards; most of their time is spent waiting for the kernel


def any_mode(cell: Cell, chance: Random) -> PowerMode:
    """A mode that the board has, drawn from the facts and not from what the driver believes."""
    return PowerMode.of({name: float(chance.choice(values)) for name, values in cell.knobs.items()})


def holds(mount: Mount, cell: Cell, mode: PowerMode) -> bool:
    """Whether the kernel itself has what was asked for."""
    state = json.loads(mount.state())
    on = state["online"]
    khz, hz = round(1e3 * (mode.cpu_mhz or 0)), round(1e6 * (mode.gpu_mhz or 0))
    awake = [cores[0] for cores, _ in cell.tree.clusters if set(cores) & set(on)]
    wanted = {f"sys/devices/system/cpu/cpufreq/policy{core}": {"min": khz, "max": khz} for core in awake}
    wanted[cell.tree.gpu] = {"min": hz, "max": hz}
    clocks = all(state["clocks"][folder] == limits for folder, limits in wanted.items())
    memory = mode.mem_mhz is None or state["memory"]["held_hz"] == round(1e6 * mode.mem_mhz)
    return clocks and memory and len(on) == mode.cpu_cores


def is_as(mount: Mount, found: object) -> bool:
    """Whether the board is as found, at the latest when all that was asked for has arrived."""
    return mount.settled(0.0) == found or mount.settled(SETTLE_S) == found


def tried(cell: Cell, mount: Mount, tries: int) -> tuple[int, int]:
    """How often a mode was applied and how often put back."""
    chance = Random(cell.name)
    applied = restored = 0
    device = JetsonDevice(mount.root)  # opened before the GPU is first used, as a program that trains has it
    mount.tell("use_gpu")
    found = mount.settled()
    for _ in range(tries):
        mode = any_mode(cell, chance)
        with suppress(UnderwattError), Session(device) as session:
            session.apply(mode)
            applied += holds(mount, cell, mode)
        if is_as(mount, found):
            restored += 1
        else:
            mount.tell("boot")
            mount.tell("use_gpu")
            for journal in Path(os.environ[STATE_VARIABLE]).glob("*.json"):
                journal.unlink()
    return applied, restored


def killed(mount: Mount, kills: int, seed: int) -> tuple[int, int]:
    """How often a killed session left something changed, and how often the next one had all of it put back."""
    chance = Random(seed)
    changed = restored = 0
    mount.tell("boot")
    mount.tell("use_gpu")
    found = mount.settled()
    with Killable(CHILD) as sessions:
        for at in range(kills):
            process = sessions.start(f"{seed + at} {mount.root}")
            time.sleep(chance.random() * KILL_WITHIN_S)
            sessions.kill(process)
            changed += mount.settled(0.0) != found
            with suppress(UnderwattError), Session(JetsonDevice(mount.root)):
                pass
            restored += is_as(mount, found)
    return changed, restored


def one_cell(cell: Cell, tries: int, kills: int) -> dict[str, int]:
    """One board, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ[STATE_VARIABLE] = f"{folder}/state"
        seed = sorted(SETTABLE).index((cell.board, cell.release))
        with mounted(cell, Path(folder) / "board", seed=seed) as mount:
            applied, restored = tried(cell, mount, tries)
            left, put_back = killed(mount, kills, 100 * seed) if kills else (0, 0)
    return {"applied": applied, "restored": restored, "left": left, "put_back": put_back}


def in_a_process(cell: Cell, tries: int, kills: int) -> dict[str, int]:
    arguments = ["--cell", f"{cell.board}:{cell.release}", "--tries", str(tries), "--kills", str(kills)]
    done = subprocess.run([sys.executable, __file__, *arguments], check=True, stdout=subprocess.PIPE, text=True)
    counts: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return counts


def all_cells(cells: list[Cell], tries: int, kills: int) -> list[dict[str, object]]:
    shares = [kills // len(cells) + (at < kills % len(cells)) for at in range(len(cells))]
    rows: list[dict[str, object]] = []
    left = put_back = 0
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for cell, counts in zip(cells, pool.map(in_a_process, cells, [tries] * len(cells), shares), strict=True):
            left, put_back = left + counts.pop("left"), put_back + counts.pop("put_back")
            rows.append({"board": cell.board, "release": cell.release, "tried": tries, **counts})
            told(rows[-1], COLUMNS)
    kill_row = {"board": "kill -9", "release": "each in turn", "tried": kills, "applied": left, "restored": put_back}
    return [*rows, kill_row]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=100, help="modes to apply and put back on each board")
    parser.add_argument("--kills", type=int, default=50, help="sessions to kill, over all boards")
    parser.add_argument("--only", nargs="*", default=[], help="boards with their release, such as nano:4")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    add_output(parser)
    options = parser.parse_args(arguments)
    if reason := why_not():
        print(f"The boards cannot be mounted: {reason}.", file=sys.stderr)
        return 2
    if options.cell:
        board, release = options.cell.split(":")
        print(json.dumps(one_cell(SETTABLE[board, release], options.tries, options.kills)))
        return 0
    cells = [cell for key, cell in SETTABLE.items() if not options.only or ":".join(key) in options.only]
    rows = all_cells(cells, options.tries, options.kills)
    print("Modes applied and put back where files behave as a kernel's, JetPack by release:")
    print(as_table(rows, COLUMNS))
    write("boards", rows, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
