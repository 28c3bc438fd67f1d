"""Everything that is known to go wrong, at random moments: is the device as before, is it said, is anything lost?

    python benchmarks/faults.py [--tries 20] [--seed 0] [--only TEXT …] [--at-once 4] [--json OUT]

Boards are simulated, or made of files; signals, kills and processes are real. A row counts, of the times tried:

restored   the device (where only files are concerned: these) is as it was found, at the latest after the next session
           or ``underwatt restore`` where the process was killed
said       the user is told what happened and what to do: an error of ours, a warning in the log, or how it ended
lost       samples left out or seen twice, a checkpoint or a stored measurement gone, a file damaged

Each fault is tried in a process of its own, some at a time; a try that takes more than a minute counts as neither
restored nor said, and as lost. Ends with 1 where any fault was not restored, not said or lost something.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from multiprocessing.connection import wait
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent))

import _faults_device
import _faults_files
import _faults_helper
import _faults_loop
import _faults_processes
import _faults_training
from _faults_world import Fault, Found, Try
from _table import Column, add_output, as_table, told, write
from underwatt.helper.journal import STATE_VARIABLE

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

PARTS = (_faults_device, _faults_training, _faults_loop, _faults_files, _faults_processes, _faults_helper)
FAULTS = [fault for part in PARTS for fault in part.faults.all]
COLUMNS = tuple(Column(name) for name in ("fault", "tried", "restored", "said", "lost"))
LONGEST_S = 60.0  # that a try may take
SHOWN = 3  # tries of a fault that went wrong


def one_try(fault: Fault, seed: int, number: int, folder: Path) -> Found:
    """Try a fault once, in a folder and a state of its own; whatever is raised unexpectedly is a failure."""
    folder.mkdir()
    os.environ[STATE_VARIABLE] = str(folder / "state")
    try:
        return fault.call(Try(Random(f"{seed} {fault.name} {number}"), folder))
    except Exception:  # noqa: BLE001 - a traceback is the worst that can come of it
        return Found(restored=False, said=False, lost=True, words=traceback.format_exc())


def tried(fault: Fault, seed: int, tries: int, folder: Path, result: Connection) -> None:
    """Try a fault so many times, and send what came of each."""
    with Path(os.devnull).open("w", encoding="utf-8") as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
    for number in range(tries):
        result.send(one_try(fault, seed, number, folder / str(number)))
    result.close()


class Trying:
    """A fault that is being tried."""

    def __init__(self, fault: Fault, seed: int, tries: int, folder: Path) -> None:
        self.fault, self.tries = fault, tries
        self.found: list[Found] = []
        self.begun_s = self.heard_s = time.monotonic()
        folder.mkdir()
        context = multiprocessing.get_context("fork")
        self.result, sender = context.Pipe(duplex=False)
        self.process = context.Process(target=tried, args=(fault, seed, tries, folder, sender))
        self.process.start()
        sender.close()

    def advance(self) -> bool:
        """Take in what has come; whether there is more to come."""
        try:
            while self.result.poll():
                self.found.append(self.result.recv())
                self.heard_s = time.monotonic()
        except EOFError:
            self.process.join()
            self._fill(f"the process ended with {self.process.exitcode}")
            return False
        if time.monotonic() - self.heard_s > LONGEST_S:
            self.process.kill()
            self.process.join()
            self._fill(f"it took more than {LONGEST_S:g} s")
            return False
        return True

    def _fill(self, words: str) -> None:
        missing = self.tries - len(self.found)
        self.found += [Found(restored=False, said=False, lost=True, words=words)] * missing

    def row(self) -> dict[str, Any]:
        """How often what was found."""
        counts = {name: sum(getattr(one, name) for one in self.found) for name in ("lost", "restored", "said")}
        return {"fault": self.fault.name, "tried": len(self.found), **counts}

    def wrong(self) -> list[str]:
        """What was found where something went wrong."""
        return [str(one) for one in self.found if not (one.restored and one.said) or one.lost]


def all_tried(
    chosen: list[Fault], seed: int, tries: int, folder: Path, at_once: int = 4
) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows in the order of the faults, and what went wrong."""
    waiting, under_way, done = list(reversed(chosen)), [], {}
    wrong: list[str] = []
    while waiting or under_way:
        while waiting and len(under_way) < at_once:
            fault = waiting.pop()
            under_way.append(Trying(fault, seed, tries, folder / str(len(waiting))))
        wait([one.result for one in under_way], timeout=1.0)
        for one in [one for one in under_way if not one.advance()]:
            under_way.remove(one)
            done[one.fault.name] = row = one.row()
            told({**row, "s": time.monotonic() - one.begun_s}, (*COLUMNS, Column("s", form=".1f")))
            wrong += [f"{one.fault.name}: {words}" for words in one.wrong()[:SHOWN]]
    return [done[fault.name] for fault in chosen], wrong


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=20, help="of each fault")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=[], help="faults whose name holds one of these texts")
    parser.add_argument("--at-once", type=int, default=4, help="faults that are tried side by side")
    add_output(parser)
    given = parser.parse_args(arguments)
    chosen = [fault for fault in FAULTS if not given.only or any(text in fault.name for text in given.only)]
    if not chosen:
        parser.error(f"there is no such fault; there are: {json.dumps([fault.name for fault in FAULTS])}")
    with tempfile.TemporaryDirectory() as folder:
        rows, wrong = all_tried(chosen, given.seed, given.tries, Path(folder), given.at_once)
    print(as_table(rows, COLUMNS))
    for words in wrong:
        print(f"\n{words}")
    write("faults", rows, given)
    return int(any(row["restored"] < row["tried"] or row["said"] < row["tried"] or row["lost"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
