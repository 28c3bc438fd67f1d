"""Everything that is read from outside, damaged: each must be read, or be an error that says what to do.

    python benchmarks/fuzz.py [--inputs 200000] [--seed 0] [--only log,plan] [--json OUT]

Valid files of every kind are made, and each input is one of them with some damage: bits flipped, parts cut out, doubled
or moved, numbers, brackets and markup put in, values of a JSON object or cells of a table replaced by others. Whatever
leaves the reader but an ``UnderwattError`` with a remedy counts as a traceback, and so do warnings and what takes more
than ten seconds. Ends with 1 where there is any.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import signal
import socket
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from contextlib import closing, contextmanager, redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch

import underwatt
from _damage import damaged
from _table import Column, add_output, as_table, write
from underwatt.budget import parse_budget, parse_watts, read_schedule
from underwatt.cli import store as store_commands
from underwatt.device.registry import open_device
from underwatt.device.session import restore
from underwatt.drivers.check import checked_profile
from underwatt.drivers.virtual.board_specs import BOARDS
from underwatt.drivers.virtual.simulated_board import VirtualBoard
from underwatt.drivers.virtual.sysfs import SysfsBoard
from underwatt.errors import InputError, NoDeviceError, UnderwattError
from underwatt.events import BudgetChanged, Ended, Noted, Progressed, Readings, SettingChanged, Started, to_line
from underwatt.helper.board import JetsonBoard
from underwatt.helper.journal import Journal
from underwatt.helper.keeper import Keeper
from underwatt.helper.lock import DeviceLock
from underwatt.helper.service import Client, Peer, Service
from underwatt.helper.sysfs import Sysfs
from underwatt.jobs import checkpoint
from underwatt.jobs.command import parse_line, split_lines
from underwatt.jobs.training import Training
from underwatt.measure.series import modes_from_file
from underwatt.records import (
    ConvergenceRun,
    DeviceInfo,
    Measurement,
    PowerMode,
    Profile,
    Setting,
    Status,
    WorkloadInfo,
)
from underwatt.runlog.inbox import Inbox, running_runs
from underwatt.runlog.log import follow, has_ended, read_log
from underwatt.store import exchange
from underwatt.store.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from underwatt.device.base import Device

INPUTS = 200_000
CHECK = Path(__file__).resolve().parent.parent / "tests" / "golden" / "check-orin-nano-jp6.json"
HANG_S = 10.0
KEPT_EACH, PLANNED_EACH = 5, 40  # of the files that are taken in, so many go on into a store, and into a plan
DEVICE = DeviceInfo("jetson", "Nano", "nano-1", "jetson:/", software={"l4t": "36.3"})
WORKLOAD = WorkloadInfo("net", "0123456789abcdef", {"torch": "2.13"})


@dataclass
class Target:
    """One kind of file: valid ones, their name on disk, and what reads them."""

    name: str
    valid: list[bytes]
    read: Callable[[bytes], None]
    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, bytes] = field(default_factory=dict)

    def feed(self, data: bytes) -> None:
        """Read one input and note what came of it."""
        try:
            with _at_most(HANG_S):
                self.read(data)
            self.counts["read"] += 1
        except UnderwattError as exc:
            if exc.message.strip() and exc.hint.strip():
                self.counts["refused"] += 1
            else:
                self._note(f"an error without a remedy: {exc}", data)
        except Exception as exc:  # noqa: BLE001 - this is what is looked for
            where = traceback.extract_tb(exc.__traceback__)[-1]
            ours = [frame for frame in traceback.extract_tb(exc.__traceback__) if "underwatt" in frame.filename]
            at = (ours or [where])[-1]
            self._note(f"{type(exc).__name__} in {Path(at.filename).name}, line {at.lineno}", data)

    def _note(self, what: str, data: bytes) -> None:
        self.counts["tracebacks"] += 1
        self.examples.setdefault(what, data)


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    def hangs(*_: object) -> None:
        raise TimeoutError(f"it took more than {seconds:g} s")

    signal.signal(signal.SIGALRM, hangs)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


# What is read, and how.


def _measurements() -> tuple[Measurement, ...]:
    modes = [PowerMode(4, cpu, gpu, 1600.0) for cpu in (800.0, 1400.0) for gpu in (300.0, 600.0, 900.0)]
    found = [
        Measurement(Setting(mode, size), size * 30 / (mode.gpu_mhz or 1), 2 + (mode.gpu_mhz or 1) / 300, 5.0, 10.0, 5.0)
        for mode in modes
        for size in (8, 32)
    ]
    return (*found, Measurement(Setting(modes[0], 64), status=Status.OUT_OF_MEMORY, note="no room"))


def _text(write_to: Callable[[io.StringIO], object]) -> bytes:
    text = io.StringIO(newline="")
    write_to(text)
    return text.getvalue().encode()


def _log() -> bytes:
    setting = Setting(PowerMode(gpu_mhz=600.0), 8)
    events = [
        Started(at_s=0.0, started_at="2026-01-01T00:00:00+00:00", job="net", device=DEVICE, workload=WORKLOAD,
                budget="10W", batch_sizes=(8, 16), target=0.9, simulated=True, idle_w=1.5, pid=1, version="0.1.0"),
        BudgetChanged(at_s=0.0, power_w=10.0, why="start"),
        SettingChanged(at_s=0.1, setting=setting, state="searching", why="first"),
        Readings((0.1, 0.2, 0.3), (9.0, 9.5, 11.0)),
        Progressed(at_s=1.0, steps=3, samples=24, batch_size=8, state="holding", energy_j=9.0, budget_w=10.0),
        Noted(at_s=1.5, level="warning", text="[red]hot[/]"),
        BudgetChanged(at_s=2.0, power_w=5.0, why="changed"),
        Readings((2.1, 2.2), (6.0, 4.5)),
        Ended(at_s=3.0, outcome="reached", restored=True, energy_j=20.0, samples=48, steps=6, score=0.91),
    ]  # fmt: skip
    return b"".join(map(to_line, events))


def _profile() -> Profile:
    return Profile(DEVICE, WORKLOAD, _measurements())


def _runs() -> list[ConvergenceRun]:
    return [ConvergenceRun(size, 0.9, 1000.0 + 5 * size, seed, 0.01) for size in (8, 32) for seed in (0, 1)]


def imports() -> list[bytes]:
    """A valid file of every kind that can be taken in."""
    profile, runs = _profile(), _runs()
    return [
        _text(lambda file: exchange.write_profile(profile, file)),
        _text(lambda file: exchange.write_convergence(WORKLOAD, runs, file)),
        _text(lambda file: exchange.write_profile_with_convergence(profile, runs, file)),
        b"cores,cpu_mhz,gpu_mhz,mem_mhz,time_ms,power_w,batch_size\n4,1400,900,1600,50.5,6.5,16\n2,700,300,1600,90,3,16\n",
        b"dataset,network,optimizer,batch_size,power_limit,time_per_epoch,average_power\nc,r,sgd,64,100,30.5,95\n",
        b"dataset,network,optimizer,batch_size,learning_rate,run,target_metric,target_epoch\nc,r,sgd,64,0.1,0,0.9,12\n",
    ]


def targets(folder: Path) -> list[Target]:
    """Every kind of file, its readers working in a folder."""
    store = Store(folder / "store.db")
    store.take_in([_profile()], [(WORKLOAD, _runs())])
    plan = underwatt.plan("4W", store=store, listener=lambda _event: None)
    reader = _Reader(folder, store)
    return [
        Target("log", [_log()], reader.log),
        Target("budget file", [b'{"id": 1, "budget": "7W", "from": "command"}'], reader.inbox),
        Target("plan", [json.dumps(plan.record, indent=2).encode()], reader.imported),
        Target("import", imports(), reader.imported),
        Target("schedule", [b"at,watts\n0,10\n1h,7\n08:00,5\n", b"at_s,power_w\n0,10\n60,7.5\n"], reader.schedule),
        Target(
            "budget", [b"10W", b"10W peak", b"10W mean over 60s", b"50Wh", b"08:00-18:00=15W,else=7W"], reader.budget
        ),
        Target("journal", [reader.journal_text()], reader.journal),
        Target("note of a session", [f"{os.getpid()} 1 underwatt run".encode()], reader.note),
        Target("list of runs", [reader.run_entry()], reader.runs),
        Target("checkpoint", [reader.checkpoint_bytes()], reader.checkpoint),
        Target("store", [reader.store_bytes()], reader.stored),
        Target("list of modes", [b"cpu_cores,gpu_mhz\n2,76.8\n4,921.6\n", b"gpu_mhz\n921.6\n"], reader.modes),
        Target("recorded table", [imports()[0], imports()[3]], reader.recorded),
        Target("check", [CHECK.read_bytes()], reader.checked),
        Target("message to the helper", reader.messages(), reader.message),
        Target("beats of a command", [b"step\nstep 12.5 3\nmetric 0.91\noom\nstep 13\n"], reader.beats),
    ]


class _Reader:
    def __init__(self, folder: Path, store: Store) -> None:
        self._folder, self._store = folder, store
        self._state = folder / "state"
        os.environ["UNDERWATT_STATE"] = str(self._state)
        (self._state / "runs").mkdir(parents=True)
        self._taken = 0
        self._space = open_device("virtual:nano").space
        SysfsBoard.create(VirtualBoard(BOARDS["orin-nano"]), folder / "board")
        with socket.socket() as listener:
            self._helper = Service(Keeper(JetsonBoard(Sysfs(folder / "board"))), listener, 0)

    def _put(self, name: str, data: bytes) -> Path:
        path = self._folder / name
        path.write_bytes(data)
        return path

    def log(self, data: bytes) -> None:
        path = self._put("log.jsonl", data)
        has_ended(path)
        at, before = 0, -1
        while at > before:  # as somebody who watches
            before, (_, at) = at, follow(path, at, 1 << 20)
        record = read_log(path)
        record.energy_j(), record.energy_over_j(), record.time_over_s(), record.verdict()

    def inbox(self, data: bytes) -> None:
        (self._folder / "budget.json").unlink(missing_ok=True)
        inbox = Inbox(self._folder)
        self._put("budget.json", data)
        if (text := inbox.take()) is not None:
            parse_watts(text)
        inbox.take_news()

    def imported(self, data: bytes) -> None:
        path = self._put("import.json", data)
        found = exchange.read_file(path)
        for record in found.plans:
            exchange.plan_of(record, str(path))
            store_commands._plan_line(1, record)
        self._taken += 1
        if self._taken % KEPT_EACH == 0:  # what is taken in must be of use later
            self._use(found, plans=self._taken % PLANNED_EACH == 0)

    def _use(self, found: exchange.Exchanged, *, plans: bool) -> None:
        path = self._folder / "other.db"
        for name in (path, path.with_name("other.db-wal"), path.with_name("other.db-shm")):
            name.unlink(missing_ok=True)
        with Store(path) as kept:
            taken, _ = kept.take_in(found.profiles, found.convergence)
            for record in found.plans:
                kept.keep_plan(record)
            kept.summaries(), kept.convergence(), kept.plans()
            for number, _ in taken:
                exchange.write_profile(kept.profile(number), io.StringIO())
            if taken and plans:
                underwatt.plan("4W", store=kept, listener=lambda _event: None)

    def recorded(self, data: bytes) -> None:
        self._look_at(open_device(f"replay:{self._put('table.csv', data)}"))

    def checked(self, data: bytes) -> None:
        path = self._put("check.json", data)
        self._look_at(open_device(f"check:{path}"))
        checked_profile(path)

    def _look_at(self, device: Device) -> None:
        """As `devices`, `set` and a profile do."""
        device.capabilities(), device.space.matrix(), device.read_state()
        found = device.snapshot()
        for mode in (device.space.lowest, device.space.highest):
            device.apply(mode)
        device.restore(found)
        device.read_power()

    def schedule(self, data: bytes) -> None:
        course = read_schedule(self._put("schedule.csv", data))
        course.power_w(0.0), course.next_change_s(1.0), str(course)

    def budget(self, data: bytes) -> None:
        budget = parse_budget(data.decode("utf-8", "replace"))
        str(budget), budget.constant()

    def journal_text(self) -> bytes:
        journal = Journal.of(DEVICE, "session", self._state)
        journal.write(DEVICE, {"sys/a": "1\n", "sys/b": "x"})
        return journal.path.read_bytes()

    def journal(self, data: bytes) -> None:
        Journal.of(DEVICE, "session", self._state).path.write_bytes(data)

        def gone(_: str) -> Any:
            raise NoDeviceError("It is not here.")

        for _, error in restore(self._state, open_address=gone):
            str(error)
        Journal.of(DEVICE, "session", self._state).read()

    def note(self, data: bytes) -> None:
        lock = DeviceLock(DEVICE, self._state)
        lock._notes = self._state
        (self._state / f"{lock._stem}.0.note").write_bytes(data)
        lock.acquire()
        lock.release()

    def run_entry(self) -> bytes:
        return json.dumps(
            {"folder": "/x", "pid": os.getpid(), "job": "net", "device": "Nano", "process_started": None}
        ).encode()

    def runs(self, data: bytes) -> None:
        (self._state / "runs" / "1.json").write_bytes(data)
        running_runs()

    def checkpoint_bytes(self) -> bytes:
        inputs, labels = torch.zeros(8, 2), torch.zeros(8, dtype=torch.long)
        training = Training(underwatt.Job(torch.nn.Linear(2, 2), (inputs, labels), target=0.9, device="cpu"), 4)
        training.step()
        checkpoint.save(self._folder, training, checkpoint.Progress("who", 1.0, 2.0, 0.1, 4, None))
        return (self._folder / checkpoint.NAME).read_bytes()

    def store_bytes(self) -> bytes:
        path = self._folder / "kept.db"
        with Store(path) as kept:
            kept.take_in([_profile()], [(WORKLOAD, _runs())])
        return path.read_bytes()

    def stored(self, data: bytes) -> None:
        for name in ("read.db-wal", "read.db-shm"):
            (self._folder / name).unlink(missing_ok=True)
        with Store(self._put("read.db", data), create=False) as kept:
            for one in kept.summaries():
                kept.profile(one.id)
            kept.convergence_counts(), kept.convergence(), kept.plans()

    def modes(self, data: bytes) -> None:
        modes_from_file(self._put("modes.csv", data), self._space)

    def beats(self, data: bytes) -> None:
        for line in split_lines(data)[0]:
            parse_line(line)

    def messages(self) -> list[bytes]:
        """Each kind that the helper knows; the lease of whoever holds the board is put in where it says so."""
        return [
            b'{"do": "describe"}',
            b'{"do": "hold", "lease_s": 60}',
            b'{"do": "hold", "lease": "LEASE"}',
            *[b'{"do": "apply", "lease": "LEASE", "mode": {"gpu_mhz": 408, "cpu_cores": 4, "cpu_mhz": 960}}'] * 6,
            *(
                b'{"do": "read", "what": "%s"}' % what
                for what in (b"power", b"state", b"values", b"snapshot", b"changes")
            ),
            b'{"do": "release", "lease": "LEASE", "hold": true}',
        ]

    def message(self, data: bytes) -> None:
        """As the service takes it from a client that may speak to it, on a board of files."""
        with redirect_stderr(io.StringIO()) as log, closing(_Caller(self._helper)) as caller:
            lease = caller.ask(b'{"do": "hold"}').get("lease", "")
            answer = caller.ask(data.replace(b"LEASE", str(lease).encode()).partition(b"\n")[0])
        if "error of the helper's own" in log.getvalue():
            raise RuntimeError(log.getvalue())
        if not answer["ok"]:
            raise InputError(answer["error"], hint=answer["hint"] or answer["error"])

    def checkpoint(self, data: bytes) -> None:
        self._put(checkpoint.NAME, data)
        checkpoint.load(self._folder, "who")


class _Caller:
    """A client of the service, in this process."""

    def __init__(self, service: Service) -> None:
        self._service = service
        link, self._end = socket.socketpair()
        self._end.settimeout(HANG_S)
        self._client = Client(link, Peer(os.getpid(), os.geteuid(), frozenset()))
        self._client.process.forget()  # this process does not end
        service._clients.append(self._client)

    def ask(self, line: bytes) -> dict[str, Any]:
        self._client.waiting += line + b"\n"
        self._service._answer_line(self._client)
        return dict(json.loads(self._end.recv(1 << 20)))

    def close(self) -> None:
        self._service._close(self._client)
        self._end.close()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--inputs", type=int, default=INPUTS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="names of kinds, with commas between them")
    add_output(parser)
    given = parser.parse_args(arguments)
    chance = random.Random(given.seed)
    warnings.simplefilter("error")
    with tempfile.TemporaryDirectory() as folder:
        kinds = targets(Path(folder))
        only = {name.strip() for name in given.only.split(",") if name.strip()}
        if unknown := only - {kind.name for kind in kinds}:
            parser.error(f"there is no kind {', '.join(sorted(unknown))}")
        chosen = [kind for kind in kinds if not only or kind.name in only]
        for at in range(given.inputs):
            kind = chosen[at % len(chosen)]
            kind.feed(damaged(chance.choice(kind.valid), chance))
    kept = ("read", "refused", "tracebacks")
    rows = [
        {"kind": kind.name, "inputs": kind.counts.total(), **{name: kind.counts[name] for name in kept}}
        for kind in chosen
    ]
    print(as_table(rows, [Column("kind"), *(Column(name, form=",") for name in ("inputs", *kept))]))
    for kind in chosen:
        for what, data in kind.examples.items():
            print(f"{kind.name}: {what}; such as {data[:300]!r}")
    write("fuzz", rows, given)
    return int(any(kind.counts["tracebacks"] for kind in chosen))


if __name__ == "__main__":
    sys.exit(main())
