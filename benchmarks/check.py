"""How long is `underwatt check --set`, and does its file give the same plans as the board?

    python benchmarks/check.py --json OUT [--mounted orin-nano:6 nano:4] [--boards nano orin-agx]

Each virtual board, and each board of the matrix (``tests/helpers/board_matrix.py``) that is mounted through FUSE with
the manners of its release's kernel, is checked as its owner would, by the command. A row has the seconds it took, the
size of its file, the settings measured, whether the board was as before, and of how many budgets the plan from the
file, opened as a device, chooses the setting that the plan from the board itself chooses. On a mounted board the load
runs on this machine's CPU, and the board's watts follow it: what is timed is the check, not a board.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))

from board_matrix import SETTABLE
from kernel_mount import mounted, why_not

import underwatt
from _table import Column, add_output, as_table, told, write
from underwatt.drivers.check import read_check
from underwatt.drivers.virtual.board_specs import BOARDS
from underwatt.records import Profile
from underwatt.store.store import Store

COLUMNS = (
    Column("device"),
    Column("seconds", form=".1f"),
    Column("file_kb", "file, kB", ".1f"),
    Column("settings"),
    Column("as_before", "as before"),
    Column("plans"),
    Column("same_plans", "same plans"),
)
BUDGETS = 20  # between the least and the most that was measured


def checked(address: str, file: Path) -> float:
    """Check a device by the command; gives the seconds that took."""
    begin_s = time.monotonic()
    command = [sys.executable, "-m", "underwatt", "check", "--set", "-d", address, "-o", str(file)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.monotonic() - begin_s


def same_plans(address: str, file: Path, folder: Path) -> tuple[int, int]:
    """Of so many budgets, how many give the same setting from the board and from the file."""
    report, _ = read_check(file)
    with Store(folder / "board.db") as store:
        store.take_in([Profile(underwatt.open_device(address).info, report.load, report.measurements)], [])
    underwatt.import_file(file, store=folder / "file.db")
    watts = [m.power_w for m in report.measurements if m.usable]
    budgets = [f"{watt:.2f}W" for watt in np.linspace(min(watts), max(watts), BUDGETS)]
    return sum(choice(folder / "board.db", b) == choice(folder / "file.db", b) for b in budgets), len(budgets)


def choice(store: Path, budget: str) -> str:
    """The setting that is chosen, or why none is."""
    try:
        return str(underwatt.plan(budget, store=store, listener=lambda _: None).chosen.setting)
    except underwatt.UnderwattError as exc:
        return exc.message


def row(name: str, address: str, folder: Path) -> dict[str, object]:
    file = folder / "check.json"
    seconds = checked(address, file)
    for note in read_check(file)[0].notes:
        print(f"{name}: {note}", file=sys.stderr)
    same, plans = same_plans(address, file, folder)
    settings = sum(m.usable for m in read_check(file)[0].measurements)
    size = {"file_kb": file.stat().st_size / 1024, "settings": settings}
    return {"device": name, "seconds": seconds, **size, "as_before": "–", "plans": plans, "same_plans": same}


def mounted_row(name: str, folder: Path) -> dict[str, object]:
    board, release = name.split(":")
    with mounted(SETTABLE[board, release], folder / "board") as mount:
        mount.tell("use_gpu")
        mount.tell("loader", "load_script.py")
        before = mount.settled()
        found = row(f"{board}, JetPack {release}, mounted", f"jetson:{mount.root}", folder)
        return {**found, "as_before": "yes" if mount.settled() == before else "NO"}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--boards", nargs="*", default=list(BOARDS), help="virtual boards")
    parser.add_argument("--mounted", nargs="*", default=["nano:4", "orin-nano:6"], help="such as nano:4")
    add_output(parser)
    options = parser.parse_args(arguments)
    if options.mounted and (reason := why_not()):
        print(f"The boards cannot be mounted: {reason}.", file=sys.stderr)
        return 2
    rows = []
    for name in (*options.boards, *options.mounted):
        with tempfile.TemporaryDirectory() as scratch:
            os.environ["UNDERWATT_STATE"] = f"{scratch}/state"
            folder, address = Path(scratch), f"virtual:{name}"
            rows.append(mounted_row(name, folder) if ":" in name else row(address, address, folder))
        told(rows[-1], COLUMNS)
    print("`underwatt check --set`, and plans from its file:")
    print(as_table(rows, COLUMNS))
    write("check", rows, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
