"""Where measurements are kept: SQLite in WAL mode, safe for several threads and processes at once.

A file that is truncated, not ours, or written by a newer version is an error and is left untouched. Looking at a
store takes no write lock: only a new one, or one of an older version, is written to when it is opened.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import threading
from collections import Counter
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from underwatt.errors import InputError, StoreError
from underwatt.records import (
    ConvergenceRun,
    DeviceInfo,
    Measurement,
    Profile,
    Setting,
    Status,
    WorkloadInfo,
    columns,
    from_json,
    from_row,
    to_json,
    to_row,
)
from underwatt.store.schema import bring_up, check_header, connect, newest_version, version_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

STORE_VARIABLE = "UNDERWATT_STORE"
DEFAULT_NAME = "underwatt.db"
RETRY_S = 1.0  # how long the saver waits where it could not store
_USABLE = (Status.OK.value, Status.THROTTLED.value)
_MEASUREMENTS = "SELECT * FROM measurements WHERE profile_id = ? ORDER BY id"
_PERMISSIONS = f"Check its permissions, or name another file with --store or {STORE_VARIABLE}."
_DAMAGED = "Move it away and start a new one; it was not changed."
_HINTS = {  # by words of SQLite's messages
    "full": "Free some space; everything stored before is intact.",
    "locked": "Another process holds it; try again when it is done.",
    "readonly": _PERMISSIONS,
    "unable to open": _PERMISSIONS,
    "": _DAMAGED,  # for any other
}
_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class ProfileSummary:
    """One line of ``underwatt store ls``."""

    id: int
    device: DeviceInfo
    workload: WorkloadInfo
    measured: int
    usable: int
    created_at: str


@dataclass(frozen=True, slots=True)
class KeptPlan:
    """A plan as its file holds it, and whose it is."""

    id: int
    record: Mapping[str, Any]
    created_at: str

    @property
    def device(self) -> DeviceInfo:
        """The device it is for."""
        return from_json(DeviceInfo, self.record["device"])

    @property
    def workload(self) -> WorkloadInfo:
        """The job it is for."""
        return from_json(WorkloadInfo, self.record["workload"])


def default_store_path() -> Path:
    """``$UNDERWATT_STORE``, else ``underwatt.db`` in the current folder."""
    return Path(os.environ.get(STORE_VARIABLE) or DEFAULT_NAME)


class Store:
    """Profiles, convergence runs and plans in one file. Make one per process; close it, or use it in a ``with``."""

    def __init__(self, path: Path | str | None = None, *, create: bool = True) -> None:
        self.path = Path(path) if path else default_store_path()
        self._idle: list[sqlite3.Connection] = []
        exists = self.path.exists()
        if not exists and not create:
            raise StoreError(
                f"There is no store at {self.path}.",
                hint=f"`underwatt profile` makes one; another is named with --store or {STORE_VARIABLE}.",
            )
        version = 0
        if exists and (self.path.stat().st_size > 0 or not create):
            check_header(self.path)
            with self._translated(), closing(connect(self.path, look_only=True)) as connection:
                version = version_of(connection, self.path)
            if version == 0 and not create:
                raise StoreError(f"{self.path} is an empty database.", hint="`underwatt profile` fills it.")
        if version < newest_version():
            with self._translated():
                self.path.parent.mkdir(parents=True, exist_ok=True)
                bring_up(self.path)
        # In a folder that we may not write to, SQLite reads a store only where it is told that nobody writes.
        self._look_only = not os.access(self.path.parent, os.W_OK)

    def close(self) -> None:
        """Let go of the file."""
        while self._idle:
            self._idle.pop().close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def profile_id(self, device: DeviceInfo, workload: WorkloadInfo) -> int:
        """The number of the profile of a workload on a device, made where there is none."""
        with self._writing() as connection:
            return _find_profile_id(connection, device, workload)

    def add(self, profile_id: int, measurements: Sequence[Measurement]) -> None:
        """Append measurements; on disk when this returns."""
        if measurements:
            with self._writing() as connection:
                _insert_measurements(connection, profile_id, measurements)

    def measurements(self, profile_id: int, *, telling: bool = False) -> tuple[Measurement, ...]:
        """All measurements of a profile, oldest first; or those ``telling`` enough to plan with, where it is large."""
        with self._reading() as connection:
            return (_select_telling if telling else _select_measurements)(connection, profile_id)

    def profile(self, profile_id: int, *, telling: bool = False) -> Profile:
        """A whole profile; or with the measurements that are ``telling`` enough to plan with, where it is large."""
        with self._reading() as connection:
            for row in _select(connection, "SELECT * FROM profiles WHERE id = ?", profile_id):
                found = (_select_telling if telling else _select_measurements)(connection, profile_id)
                return Profile(*_owners(row), found)
        raise StoreError(f"The store {self.path} has no profile {profile_id}.", hint="`underwatt store ls` lists them.")

    def summaries(self) -> tuple[ProfileSummary, ...]:
        """What the store holds, oldest first."""
        # One pass over the rows as they lie on disk, many times faster than to look each up in an index.
        counting = "SELECT profile_id, status, count(*) AS rows FROM measurements NOT INDEXED GROUP BY 1, 2"
        measured: Counter[int] = Counter()
        usable: Counter[int] = Counter()
        with self._reading() as connection:
            for count in _select(connection, counting):
                measured[count["profile_id"]] += count["rows"]
                usable[count["profile_id"]] += count["rows"] * (count["status"] in _USABLE)
            return tuple(
                ProfileSummary(row["id"], *_owners(row), measured[row["id"]], usable[row["id"]], row["created_at"])
                for row in _select(connection, "SELECT * FROM profiles ORDER BY id")
            )

    def newest_profile_id(self) -> int | None:
        """The number of the newest profile that holds something to predict from."""
        query = (
            "SELECT id FROM profiles WHERE EXISTS"
            " (SELECT 1 FROM measurements WHERE profile_id = profiles.id AND status IN (?, ?)) ORDER BY id DESC LIMIT 1"
        )
        with self._connected() as connection:
            return next((int(row["id"]) for row in _select(connection, query, *_USABLE)), None)

    def add_convergence(self, workload: WorkloadInfo, runs: Sequence[ConvergenceRun]) -> None:
        """Append convergence runs of a workload."""
        if runs:
            with self._writing() as connection:
                _insert_convergence(connection, workload, runs)

    def take_in(
        self,
        profiles: Iterable[Profile],
        convergence: Iterable[tuple[WorkloadInfo, Sequence[ConvergenceRun]]] = (),
    ) -> tuple[list[tuple[int, int]], list[int]]:
        """Add what came from elsewhere, all of it or nothing; what the store holds already is not added again.

        Gives the number of each profile with how many of its measurements were new, and how many runs of each
        workload were.
        """
        with self._writing() as connection:
            taken: list[tuple[int, int]] = []
            for profile in profiles:
                number = _find_profile_id(connection, profile.device, profile.workload)
                fresh = _not_among(profile.measurements, _select(connection, _MEASUREMENTS, number))
                _insert_measurements(connection, number, fresh)
                taken.append((number, len(fresh)))
            counts: list[int] = []
            for workload, runs in convergence:
                known = _select(connection, "SELECT * FROM convergence_runs WHERE workload_id = ?", workload.id)
                fresh_runs = _not_among(runs, known)
                _insert_convergence(connection, workload, fresh_runs)
                counts.append(len(fresh_runs))
        return taken, counts

    def convergence_counts(self) -> tuple[tuple[WorkloadInfo, int], ...]:
        """Every workload that has convergence runs, and how many, oldest first."""
        query = "SELECT workload, count(*) AS runs FROM convergence_runs GROUP BY workload_id ORDER BY min(id)"
        with self._reading() as connection:
            rows = _select(connection, query)
            return tuple((from_json(WorkloadInfo, json.loads(row["workload"])), int(row["runs"])) for row in rows)

    def convergence(self, workload_id: str = "") -> tuple[tuple[WorkloadInfo, tuple[ConvergenceRun, ...]], ...]:
        """Every workload's convergence runs, oldest first; or those of one alone."""
        found: dict[str, tuple[str, list[ConvergenceRun]]] = {}
        with self._reading() as connection:
            which, values = ("WHERE workload_id = ?", (workload_id,)) if workload_id else ("", ())
            for row in _select(connection, f"SELECT * FROM convergence_runs {which} ORDER BY id", *values):  # noqa: S608
                _, runs = found.setdefault(row["workload_id"], (row["workload"], []))
                runs.append(from_row(ConvergenceRun, row))
            return tuple((from_json(WorkloadInfo, json.loads(text)), tuple(runs)) for text, runs in found.values())

    def keep_plan(self, record: Mapping[str, Any]) -> tuple[int, bool]:
        """Keep a plan as its file holds it: its number, and whether it is new."""
        with self._writing() as connection:
            for kept in _select_plans(connection):
                if kept.record == record:
                    return kept.id, False
            return _insert(connection, "plans", [{"record": json.dumps(dict(record)), "created_at": _now()}]), True

    def plans(self) -> tuple[KeptPlan, ...]:
        """Every plan that was kept, oldest first."""
        with self._reading() as connection:
            return _select_plans(connection)

    def delete(self, what: str) -> str:
        """Remove a profile by its number, a plan by ``plan:NUMBER``, or a workload's convergence runs by its id.

        Gives in words what is gone.
        """
        with self._writing() as connection:

            def gone(sql: str, key: str) -> int:
                return connection.execute(sql, (key,)).rowcount

            if what.isdecimal():
                made = gone("DELETE FROM measurements WHERE profile_id = ?", what)
                found = gone("DELETE FROM profiles WHERE id = ?", what)
                words = f"profile {what} with {made} measurements" if found else ""
            elif what.startswith("plan:"):
                words = what if gone("DELETE FROM plans WHERE id = ?", what.removeprefix("plan:")) else ""
            else:
                made = gone("DELETE FROM convergence_runs WHERE workload_id = ?", what)
                words = f"{made} convergence runs" if made else ""
        if not words:
            raise InputError(f"There is no {what!r} in this store.", hint="`underwatt store ls` lists what there is.")
        return words

    def plan(self, plan_id: int) -> KeptPlan:
        """One plan by its number."""
        for kept in self.plans():
            if kept.id == plan_id:
                return kept
        raise StoreError(f"The store {self.path} has no plan {plan_id}.", hint="`underwatt store ls` lists them.")

    @contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        """A connection that nobody else uses meanwhile; threads do not wait for each other's."""
        with self._translated():
            try:
                connection = self._idle.pop()
            except IndexError:
                connection = connect(self.path, look_only=self._look_only)
            try:
                yield connection
            finally:
                self._idle.append(connection)

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        """A connection for rows that become records; bits of them may have changed on disk."""
        with self._connected() as connection:
            try:
                yield connection
            except (ValueError, TypeError, KeyError, RecursionError, InputError) as exc:
                raise StoreError(f"The store {self.path} holds a damaged row ({exc}).", hint=_DAMAGED) from exc

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """One transaction that holds the write lock from its start, so that what it read stays true."""
        with self._connected() as connection, connection:  # the inner one commits, or rolls back
            connection.execute("BEGIN IMMEDIATE")
            yield connection

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """The one seam at which the database's errors become ours."""
        try:
            yield
        except sqlite3.Error as exc:
            hint = next(hint for words, hint in _HINTS.items() if words in str(exc))
            raise StoreError(f"The store {self.path} cannot be used: {exc}.", hint=hint) from exc
        except UnicodeDecodeError as exc:
            raise StoreError(f"The store {self.path} is damaged ({exc}).", hint=_DAMAGED) from exc
        except OverflowError as exc:
            hint = "Mend the file that it comes from: cores, batch sizes and seeds are far smaller."
            raise StoreError("A whole number is too large to be kept in a store.", hint=hint) from exc
        except OSError as exc:
            hint = f"Name another file with --store or {STORE_VARIABLE}."
            raise StoreError(f"The store {self.path} cannot be used: {exc.strerror}.", hint=hint) from exc


def _find_profile_id(connection: sqlite3.Connection, device: DeviceInfo, workload: WorkloadInfo) -> int:
    """The number of a profile, made where there is none; other software makes another profile."""
    software = json.dumps([to_json(dict(info.software)) for info in (device, workload)], sort_keys=True)
    identity = (device.id, workload.id, hashlib.sha256(software.encode()).hexdigest()[:16])
    query = "SELECT id, workload FROM profiles WHERE (device_id, workload_id, software_id) = (?, ?, ?)"
    says = json.dumps(to_json(workload))
    for found in _select(connection, query, *identity):
        if found["workload"] != says:  # its batch sizes, or its name, were changed since
            connection.execute("UPDATE profiles SET workload = ? WHERE id = ?", (says, found["id"]))
        return int(found["id"])
    row = dict(zip(("device_id", "workload_id", "software_id"), identity, strict=True))
    row |= {"device": json.dumps(to_json(device)), "workload": says, "created_at": _now()}
    return _insert(connection, "profiles", [row])


def _select(connection: sqlite3.Connection, query: str, *values: object) -> Iterator[dict[str, Any]]:
    """The rows that a query finds, by the names of their columns."""
    cursor = connection.execute(query, values)
    names = [column[0] for column in cursor.description]
    return (dict(zip(names, row, strict=True)) for row in cursor)


def _insert(connection: sqlite3.Connection, table: str, rows: Sequence[Mapping[str, Any]]) -> int:
    """Append rows to a table: the number of the last one."""
    cursor = connection.cursor()
    for row in rows:
        values = ", ".join("?" * len(row))
        cursor.execute(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({values})", list(row.values()))  # noqa: S608 - our own names
    return cursor.lastrowid or 0


def _insert_measurements(connection: sqlite3.Connection, profile_id: int, items: Sequence[Measurement]) -> None:
    common = {"profile_id": profile_id, "measured_at": _now()}
    _insert(connection, "measurements", [common | to_row(item) for item in items])


def _insert_convergence(connection: sqlite3.Connection, workload: WorkloadInfo, runs: Sequence[ConvergenceRun]) -> None:
    common = {"workload_id": workload.id, "workload": json.dumps(to_json(workload)), "recorded_at": _now()}
    _insert(connection, "convergence_runs", [common | to_row(run) for run in runs])


def _select_measurements(connection: sqlite3.Connection, profile_id: int) -> tuple[Measurement, ...]:
    return tuple(from_row(Measurement, row) for row in _select(connection, _MEASUREMENTS, profile_id))


def _select_telling(connection: sqlite3.Connection, profile_id: int) -> tuple[Measurement, ...]:
    """The measurements of a profile, of a large one those that tell most."""
    from underwatt.store.condense import MOST_ROWS, Newest, telling

    count = connection.execute("SELECT count(*) FROM measurements WHERE profile_id = ?", (profile_id,)).fetchone()[0]
    if count <= MOST_ROWS:
        return _select_measurements(connection, profile_id)
    setting = ", ".join(column.name for column in columns(Setting))
    query = (  # what is not grouped by is that of the row with the largest id
        f"SELECT max(id), batch_size, step_s, power_w, status IN (?, ?) AS usable FROM measurements"  # noqa: S608
        f" WHERE profile_id = ? GROUP BY {setting}, usable"
    )
    wanted = telling([Newest(*row) for row in connection.execute(query, (*_USABLE, profile_id))])
    numbers = ",".join(map(str, wanted))  # our own numbers, and more of them than a query takes values
    rows = _select(connection, f"SELECT * FROM measurements WHERE id IN ({numbers}) ORDER BY id")  # noqa: S608
    return tuple(from_row(Measurement, row) for row in rows)


def _select_plans(connection: sqlite3.Connection) -> tuple[KeptPlan, ...]:
    rows = _select(connection, "SELECT * FROM plans ORDER BY id")
    return tuple(KeptPlan(row["id"], json.loads(row["record"]), row["created_at"]) for row in rows)


def _owners(row: Mapping[str, Any]) -> tuple[DeviceInfo, WorkloadInfo]:
    return from_json(DeviceInfo, json.loads(row["device"])), from_json(WorkloadInfo, json.loads(row["workload"]))


def _not_among(items: Sequence[_Item], known: Iterable[Mapping[str, Any]]) -> list[_Item]:
    """The items that are in no known row; one that stands twice is known only where it is known twice."""
    if not items:
        return []
    key_of = itemgetter(*(column.name for column in columns(type(items[0]))))
    spare = Counter(map(key_of, known))
    fresh = []
    for item in items:
        key = key_of(to_row(item))
        if spare[key] > 0:
            spare[key] -= 1
        else:
            fresh.append(item)
    return fresh


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


class Saver:
    """Stores what it is given, from a thread of its own: a slow, locked or full disk holds up no training."""

    def __init__(self, store: Store, device: DeviceInfo, workload: WorkloadInfo) -> None:
        self._store, self._device, self._workload = store, device, workload
        self._waiting: list[Measurement] = []
        self._news: tuple[str, str] | None = None
        self._wake = threading.Condition()
        self._closing = False
        self._thread: threading.Thread | None = None

    def add(self, measurement: Measurement) -> None:
        """Store a measurement; returns at once."""
        with self._wake:
            self._waiting.append(measurement)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="underwatt-saver", daemon=True)
                self._thread.start()
            self._wake.notify()

    def take_news(self) -> tuple[str, str] | None:
        """Level and words, where storing has begun to fail, or works again, and nobody was told yet."""
        with self._wake:
            news, self._news = self._news, None
            return news

    def close(self) -> int:
        """Wait until all is stored, or cannot be; how many measurements could not."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()
        return len(self._waiting)

    def _work(self) -> None:
        failing = False
        while True:
            with self._wake:
                if failing and not self._closing:
                    self._wake.wait(RETRY_S)
                while not self._waiting and not self._closing:
                    self._wake.wait()
                now, closing = list(self._waiting), self._closing
            problem = None
            try:
                if now:
                    self._store.add(self._store.profile_id(self._device, self._workload), now)
            except StoreError as exc:
                problem = str(exc)
            with self._wake:
                if problem is None:
                    del self._waiting[: len(now)]
                    if failing:
                        self._news = "info", "Measurements can be stored again."
                elif not failing:  # once, however often it is tried again
                    self._news = "warning", f"{problem} Measurements are kept and tried again."
                failing = problem is not None
                if closing and (failing or not self._waiting):
                    return
