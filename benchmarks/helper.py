"""Is the helper right: what it sets, what it puts back, whom it refuses, and what it costs?

    python benchmarks/helper.py --json OUT [--parts run kills hostile cost lines] [--tries 100] [--messages 200000]

The service is installed as ``underwatt helper install`` copies it and run by the Pythons of JetPack 4, 5 and 6, on
boards that are mounted through FUSE with the manners of their kernels. A row has what was asked and what was found:

- run: ``underwatt run`` by an ordinary user in a sandbox like a container's, without capabilities, with /sys read-only.
- kills: a holder with live loader workers is killed at random moments, the helper is, both are.
- hostile: fuzzed messages, and clients that mean no good, beside a holder that must notice nothing; strace looks on.
- cost: setting and reading through the helper and directly, in turn; memory; processor time while nothing happens.
- lines: of the service, and of the knob code that it shares with the Jetson driver.
"""

from __future__ import annotations

import argparse
import ast
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))

from board_matrix import CELLS, plant
from helper_world import JETPACKS, NOBODY, Helper, python_of, sandboxed, serving
from kernel_mount import Mount, mounted, why_not
from killable import Killable

from _helper_hostile import hostile
from _table import Column, add_output, as_table, told, write
from underwatt.device.session import Session
from underwatt.drivers.helper import HelperDevice
from underwatt.drivers.jetson.device import JetsonDevice
from underwatt.events import SettingChanged
from underwatt.helper.journal import STATE_VARIABLE
from underwatt.runlog.log import read_log

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from underwatt.device.base import Device

COLUMNS = (Column("what"), Column("python"), Column("board"), Column("found"), Column("asked"))
REPOSITORY = Path(__file__).resolve().parent.parent
HOLDER = REPOSITORY / "tests" / "helpers" / "holder_child.py"
BOARDS = {"3.6": ("nano", "4"), "3.8": ("xavier-nx", "5"), "3.10": ("orin-nano", "6")}
SERVICE = ("service.py", "keeper.py", "journal.py", "__main__.py")
SHARED = ("lock.py", "errors.py", "sysfs.py", "board_facts.py", "knobs.py", "snapshot.py", "sensors.py", "board.py")
KILL_WITHIN_S = 1.0
PATIENCE_S = 30.0
JOB = """
import torch
from underwatt.jobs.job import Job

def job():
    points = torch.randn(400, 8)
    return Job(lambda: torch.nn.Linear(8, 2), (points, (points[:, 0] > 0).long()), target=0.9, lr=0.05,
               batch_sizes=(16, 64), device="cpu", num_workers=0)
"""


class World:
    """A board and its helper, run by one Python."""

    def __init__(self, stack: ExitStack, version: str) -> None:
        self.version, self.cell = version, CELLS[BOARDS[version]]
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="underwatt-helper-")))
        folder.chmod(0o755)
        self.folder = folder
        self.mount: Mount = stack.enter_context(mounted(self.cell, folder / "board", faults=0.02))
        self.mount.tell("use_gpu")
        self.helper: Helper = stack.enter_context(serving(folder / "helper", self.mount.root, python_of(version)))
        self.found = self.mount.settled()

    def row(self, what: str, found: str, asked: str, **more: Any) -> dict[str, Any]:
        """A row, said at once."""
        made = {"what": what, "python": self.version, "board": self.cell.name, "found": found, "asked": asked, **more}
        told(made, COLUMNS)
        return made

    def restored_s(self, since_s: float) -> float:
        """When everything was as it was found and the journal was gone; infinity where it was not."""
        while self.mount.settled(0.0) != self.found or self.helper.journals:
            if time.monotonic() - since_s > PATIENCE_S:
                return float("inf")
            time.sleep(0.01)  # looking keeps the mount busy, too
        return time.monotonic() - since_s


def worlds() -> Iterator[World]:
    """Each Python that is here."""
    for version in JETPACKS:
        if python_of(version):
            with ExitStack() as stack:
                yield World(stack, version)
        else:
            print(f"Python {version} is not here: left out", file=sys.stderr)


def run_in_sandbox(world: World) -> dict[str, Any]:
    """An ordinary user's ``underwatt run``: which modes the kernel had meanwhile, and what is left of them."""
    home = world.folder / "home"
    home.mkdir(exist_ok=True)
    (home / "train.py").write_text(JOB)
    os.chown(home, NOBODY, NOBODY)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src"), "HOME": str(home)}
    environment.pop(STATE_VARIABLE, None)
    words = ["run", "train.py:job", "--budget", "6W", "--limit", "40000", "--out", "run"]
    command = sandboxed(world.helper, world.mount.root, sys.executable, "-m", "underwatt", *words)
    seen: set[str] = set()
    with (world.folder / "run.log").open("wb") as log:
        running = subprocess.Popen(command, env=environment, cwd=home, stdout=log, stderr=log)
        while running.poll() is None:
            seen.add(world.mount.state())
            time.sleep(0.1)
    run = read_log(home / "run" / "log.jsonl")
    applied = len({change.setting.mode for change in run.of(SettingChanged) if change.setting})
    restored = world.mount.settled() == world.found and run.end is not None and run.end.restored
    who = "user 65534, no capability, /sys read-only"
    found = f"exit {running.returncode}, {applied} modes applied, {'all' if restored else 'NOT'} restored ({who})"
    return world.row("underwatt run in a sandbox", found, "applied, all restored", states_seen=len(seen))


def kills(world: World, which: str, tries: int, children: Killable) -> dict[str, Any]:
    """Kill the holder, the helper or both at random moments; how often, and how soon, all was as it was found."""
    chance = Random(hash((which, world.version)) & 0xFFFF)
    took_s: list[float] = []
    changed = 0
    for seed in range(tries):
        kind = "plain" if which == "helper" else "session"
        process = children.start(f"{kind} {seed} {world.helper.socket}")
        time.sleep(chance.uniform(0.0, KILL_WITHIN_S))
        changed += world.mount.settled(0.0) != world.found
        killed_s = time.monotonic()
        if which != "holder":
            assert world.helper.process is not None
            world.helper.process.kill()
        if which != "helper":
            with suppress(ProcessLookupError):
                os.kill(process, 9)
            killed_s = time.monotonic()
        if which != "holder":
            assert world.helper.process is not None
            world.helper.process.wait()
            world.helper.start()
            killed_s = time.monotonic()  # from when it answers
        took_s.append(world.restored_s(killed_s))
        children.wait()
    within = sum(time_s <= (1.0 if which == "holder" else PATIENCE_S) for time_s in took_s)
    limit = " within 1 s" if which == "holder" else ""
    found = f"{within} of {tries} restored{limit}, worst {max(took_s):.2f} s, median {statistics.median(took_s):.2f} s"
    told_as = {"holder": "kill -9 of the holder with loader workers", "helper": "kill -9 of the helper, and a restart"}
    what = told_as.get(which, "kill -9 of both at once")
    return world.row(what, f"{found}; {changed} had changed something", f"all{limit}", took_s=took_s, changed=changed)


def cost(world: World) -> list[dict[str, Any]]:
    """What the way through the helper adds, on the mount and on a tree of plain files, in turn with the direct way."""
    plain = plant(world.folder / "plain", world.cell)
    rows = []
    with serving(world.folder / "plain-helper", plain, python_of(world.version)) as helper:
        rows += _compared(world, "plain files", plain, helper, 300)
    rows += _compared(world, "mount", world.mount.root, world.helper, 60)
    peak_kb = _status(world.helper, "VmHWM")
    rows.append(world.row("memory, highest", f"{peak_kb / 1024:.1f} MB", "20 MB or less", peak_kb=peak_kb))
    for holds in (False, True):
        device = HelperDevice(str(world.helper.socket))
        if holds:
            device.apply(device.space.lowest)
        time.sleep(0.5)
        share = _busy_share(world.helper, 30.0)
        device.close()
        what = "processor time at rest, a client that " + ("holds" if holds else "is silent")
        rows.append(world.row(what, f"{100 * share:.4f}%", "under 0.1%", share=share))
    return rows


def _compared(world: World, where: str, root: Path, helper: Helper, tries: int) -> list[dict[str, Any]]:
    direct, remote = JetsonDevice(root), HelperDevice(str(helper.socket))
    modes = [direct.space.lowest, direct.space.highest]

    def medians(act: Callable[[Device, int], None], prepared: bool) -> tuple[float, float]:
        took: dict[str, list[float]] = {"direct": [], "remote": []}
        for turn in range(tries):
            for name, device in (("direct", direct), ("remote", remote)):
                with ExitStack() as stack:
                    session = stack.enter_context(Session(device)) if prepared else device
                    if prepared:
                        act(session, 1)  # type: ignore[arg-type] # the journal is written once a session
                    begun_s = time.perf_counter()
                    act(session, turn)  # type: ignore[arg-type]
                    took[name].append(time.perf_counter() - begun_s)
        return 1e3 * statistics.median(took["direct"]), 1e3 * statistics.median(took["remote"])

    rows = []
    for what, act, prepared, asked in (
        ("apply", lambda device, turn: device.apply(modes[turn % 2]), True, "1 ms more or less"),
        ("reading of power", lambda device, _turn: device.read_power(), False, "0.2 ms more or less"),
    ):
        direct_ms, remote_ms = medians(act, prepared)
        found = f"{remote_ms - direct_ms:+.3f} ms ({direct_ms:.3f} direct, {remote_ms:.3f} through the helper)"
        rows.append(world.row(f"{what}, {where}", found, asked, direct_ms=direct_ms, remote_ms=remote_ms))
    remote.close()
    return rows


def _status(helper: Helper, name: str) -> int:
    assert helper.process is not None
    text = Path(f"/proc/{helper.process.pid}/status").read_text()
    return int(text.split(f"{name}:")[1].split()[0])


def _busy_share(helper: Helper, for_s: float) -> float:
    assert helper.process is not None
    path = Path(f"/proc/{helper.process.pid}/schedstat")
    before_ns, begun_s = int(path.read_text().split()[0]), time.monotonic()
    time.sleep(for_s)
    return 1e-9 * (int(path.read_text().split()[0]) - before_ns) / (time.monotonic() - begun_s)


def lines() -> list[dict[str, Any]]:
    """Lines of the folder: all of them, and those that are neither blank nor comments or docstrings."""
    folder = REPOSITORY / "src" / "underwatt" / "helper"
    rows = []
    for what, names, asked in (
        ("lines of the service", SERVICE, "under 700"),
        ("lines shared with the driver", SHARED, ""),
        ("lines of the installation", ("install.py", "__init__.py"), ""),
    ):
        texts = {name: (folder / name).read_text() for name in names}
        counts = {name: len(text.splitlines()) for name, text in texts.items()}
        code = sum(len(_code_lines(text)) for text in texts.values())
        told_as = ", ".join(f"{name} {count}" for name, count in counts.items())
        found = f"{sum(counts.values())}, {code} of them code ({told_as})"
        row = {"what": what, "python": "", "board": "", "found": found, "asked": asked}
        rows.append({**row, "lines": counts, "code": code})
        told(row, COLUMNS)
    return rows


def _code_lines(text: str) -> set[int]:
    said: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            said |= set(range(node.lineno, (node.end_lineno or 0) + 1))
    numbered = enumerate(text.splitlines(), 1)
    return {number for number, line in numbered if line.strip() and line.strip()[0] != "#"} - said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=["run", "kills", "hostile", "cost", "lines"])
    parser.add_argument("--pythons", nargs="+", default=list(JETPACKS), help="of those that are here")
    parser.add_argument("--tries", type=int, default=100, help="kills of the holder and of the helper; of both: half")
    parser.add_argument("--messages", type=int, default=200_000)
    add_output(parser)
    options = parser.parse_args()
    if why_not():
        sys.exit(f"This needs a mount: {why_not()}.")
    for version in set(JETPACKS) - set(options.pythons):
        del JETPACKS[version]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        os.environ[STATE_VARIABLE] = scratch
        if {"run", "kills", "cost"} & set(options.parts):
            for world in worlds():
                if "run" in options.parts:
                    rows.append(run_in_sandbox(world))
                if "kills" in options.parts:
                    with Killable(HOLDER) as children:
                        for which, tries in (("holder", 1), ("helper", 1), ("both", 2)):
                            rows.append(kills(world, which, max(1, options.tries // tries), children))
                if "cost" in options.parts:
                    rows += cost(world)
        if "hostile" in options.parts:
            for world in worlds():
                rows += [world.row(*row) for row in hostile(world, options.messages)]
                break
    if "lines" in options.parts:
        rows += lines()
    print(as_table(rows, COLUMNS))
    write("helper", rows, options)


if __name__ == "__main__":
    main()
