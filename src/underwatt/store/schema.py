"""The file of a store: its tables, its version and how an older one is brought up, and how it is opened unchanged.

The columns of a measurement and of a convergence run are those of their records. To add one, add the field to the
record in ``records.py``, and the migration that adds the column to ``MIGRATIONS``.
"""

from __future__ import annotations

import sqlite3
import struct
import time
from contextlib import closing
from dataclasses import MISSING
from typing import TYPE_CHECKING, Any

from underwatt.errors import StoreError
from underwatt.records import ConvergenceRun, Measurement, columns

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

APPLICATION_ID = 0x55575454  # "UWTT", in the header of every store
BUSY_TIMEOUT_S = 30.0
# What brings a store from the version before to each version, in order; the first release has version 1.
MIGRATIONS: list[tuple[int, Callable[[sqlite3.Connection], object]]] = []

_MAGIC = b"SQLite format 3\x00"
_KEPT = "It was left untouched; name another file with --store."
_TYPES = {int: "INTEGER", float: "REAL"}


def _columns_sql(record: type) -> str:
    """The columns of a record; only a number that was not measured, and a knob that is not there, is null."""
    return ", ".join(
        f"{column.name} {_TYPES.get(column.kind, 'TEXT')}{' NOT NULL' if column.null is MISSING else ''}"
        for column in columns(record)
    )


_TABLES = (
    # Another driver or framework is another speed: with other software a profile is another one.
    """CREATE TABLE profiles (
        id INTEGER PRIMARY KEY, device_id TEXT NOT NULL, workload_id TEXT NOT NULL, software_id TEXT NOT NULL,
        device TEXT NOT NULL, workload TEXT NOT NULL, created_at TEXT NOT NULL,
        UNIQUE (device_id, workload_id, software_id))""",
    f"""CREATE TABLE measurements (
        id INTEGER PRIMARY KEY, profile_id INTEGER NOT NULL REFERENCES profiles (id),
        {_columns_sql(Measurement)}, measured_at TEXT NOT NULL)""",
    "CREATE INDEX measurements_by_profile ON measurements (profile_id)",
    f"""CREATE TABLE convergence_runs (
        id INTEGER PRIMARY KEY, workload_id TEXT NOT NULL, workload TEXT NOT NULL,
        {_columns_sql(ConvergenceRun)}, recorded_at TEXT NOT NULL)""",
    "CREATE INDEX convergence_runs_by_workload ON convergence_runs (workload_id)",
    # Plans are kept whole, as the JSON of their file: only planning knows what is in them.
    "CREATE TABLE plans (id INTEGER PRIMARY KEY, record TEXT NOT NULL, created_at TEXT NOT NULL)",
)


def newest_version() -> int:
    """The version of the stores that this Underwatt writes."""
    return MIGRATIONS[-1][0] if MIGRATIONS else 1


def connect(path: Path, *, look_only: bool = False) -> sqlite3.Connection:
    """A connection that begins no transactions by itself.

    One that only looks cannot change the database; without a log beside it not even files are made there.
    """
    database = str(path)
    if look_only:
        database = f"{path.absolute().as_uri()}?mode=ro{'' if _has_log(path) else '&immutable=1'}"
    connection = sqlite3.connect(
        database, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False, uri=look_only
    )
    connection.execute("PRAGMA synchronous = FULL")  # a power cut is a normal event for our users
    connection.execute("PRAGMA foreign_keys = ON")
    return connection


def bring_up(path: Path) -> None:
    """Make a store of a new or empty database, or bring an older one up; several processes may do so at once."""
    until_s = time.monotonic() + BUSY_TIMEOUT_S
    while not _switched_to_log(path):
        if time.monotonic() > until_s:
            raise StoreError(f"The store {path} is held by another process.", hint="Try again when it is done.")
        time.sleep(0.01)
    with closing(connect(path)) as connection, connection:  # the inner one commits, or rolls back
        connection.execute("BEGIN IMMEDIATE")
        version = version_of(connection, path)
        if version == 0:
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            for statement in _TABLES:
                connection.execute(statement)
        else:
            for number, migrate in MIGRATIONS:
                if number > version:
                    migrate(connection)
        connection.execute(f"PRAGMA user_version = {newest_version()}")


def _switched_to_log(path: Path) -> bool:
    """Switch a database to a write-ahead log; SQLite does not wait for its turn to do this, so it is asked again."""
    try:
        with closing(connect(path)) as connection:
            connection.execute("PRAGMA journal_mode = WAL")
    except sqlite3.OperationalError as exc:
        if "locked" in str(exc):
            return False
        raise
    return True


def version_of(connection: sqlite3.Connection, path: Path) -> int:
    """The version of a store, 0 where a database is empty; anything else is refused.

    SQLite is asked, and not the file, because the answer may still be in the log beside it.
    """

    def ask(query: str) -> Any:
        return connection.execute(query).fetchone()[0]

    application, version = ask("PRAGMA application_id"), ask("PRAGMA user_version")
    holds_tables = ask("SELECT count(*) FROM sqlite_master") > 0
    if application != APPLICATION_ID and (application or version or holds_tables):
        raise StoreError(f"{path} is a database of another program.", hint=_KEPT)
    if version > newest_version():
        raise StoreError(
            f"The store {path} was written by a newer Underwatt "
            f"(version {version}, this one reads {newest_version()}).",
            hint="Update Underwatt with: pip install -U underwatt",
        )
    return int(version) if holds_tables else 0


def check_header(path: Path) -> None:
    """Refuse a file that is not a whole store, without letting SQLite open it."""
    try:
        with path.open("rb") as file:
            header = file.read(100)
        size = path.stat().st_size
    except OSError as exc:
        raise StoreError(f"The store {path} cannot be read: {exc.strerror}.", hint="Check its permissions.") from exc
    if not header.startswith(_MAGIC[: len(header)]):
        raise StoreError(f"{path} is not an Underwatt store.", hint=_KEPT)
    if len(header) < 100:
        raise StoreError(f"The store {path} is truncated.", hint=_KEPT)
    page_size, pages, application = (
        struct.unpack_from(kind, header, at)[0] for kind, at in ((">H", 16), (">I", 28), (">I", 68))
    )
    if application not in (0, APPLICATION_ID):  # 0: ours may still wait in the log beside the file
        raise StoreError(f"{path} is a database of another program.", hint=_KEPT)
    if size < pages * (65536 if page_size == 1 else page_size) and not _has_log(path):
        raise StoreError(f"The store {path} is truncated.", hint=_KEPT)


def _has_log(path: Path) -> bool:
    return path.with_name(path.name + "-wal").exists()
