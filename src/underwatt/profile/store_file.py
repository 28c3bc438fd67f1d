"""The file of a store: is it ours, is it whole, and how it is opened without changing it."""

from __future__ import annotations

import struct
import time
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from underwatt.errors import StoreError

if TYPE_CHECKING:
    from pathlib import Path

SCHEMA_VERSION = 1
APPLICATION_ID = 0x55575454  # "UWTT", in the header of every store
_BUSY_TIMEOUT_S = 30
_MAGIC = b"SQLite format 3\x00"
_KEPT = "It was left untouched; name another file with --store."


def make_engine(url: sa.URL, *, pool: type[sa.Pool] | None = None) -> sa.Engine:
    """Connections to a store, each of them set up as we need it."""
    engine = sa.create_engine(url, connect_args={"timeout": _BUSY_TIMEOUT_S}, poolclass=pool)
    sa.event.listen(engine, "connect", _prepare_connection)
    return engine


def brief(url: sa.URL) -> sa.Connection:
    """A connection that is gone when it is closed."""
    return make_engine(url, pool=sa.NullPool).connect()


def fill(url: sa.URL, path: Path, schema: sa.MetaData) -> None:
    """Make a store of a new or empty database; several processes may do so at once."""
    until_s = time.monotonic() + _BUSY_TIMEOUT_S
    while not _switched_to_log(url):
        if time.monotonic() > until_s:
            raise StoreError(f"The store {path} is held by another process.", hint="Try again when it is done.")
        time.sleep(0.01)
    with brief(url) as connection:
        connection.exec_driver_sql("BEGIN IMMEDIATE")
        if not is_made(connection, path):
            connection.exec_driver_sql(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.exec_driver_sql(f"PRAGMA user_version = {SCHEMA_VERSION}")
            schema.create_all(connection)
        connection.commit()


def _switched_to_log(url: sa.URL) -> bool:
    """Switch a database to a write-ahead log; SQLite does not wait for its turn to do this, so it is asked again."""
    try:
        with brief(url) as connection:
            connection.exec_driver_sql("PRAGMA journal_mode = WAL")
    except sa.exc.OperationalError as exc:
        if "locked" in str(exc.orig):
            return False
        raise
    return True


def look_only(path: Path) -> sa.URL:
    """The address of a database that must not change; without a log beside it not even files are made there."""
    query = {"uri": "true", "mode": "ro"} | ({} if _has_log(path) else {"immutable": "1"})
    return sa.URL.create("sqlite", database=path.absolute().as_uri(), query=query)


def _has_log(path: Path) -> bool:
    return path.with_name(path.name + "-wal").exists()


def _prepare_connection(connection: Any, _record: object) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA synchronous = FULL")  # a power cut is a normal event for our users
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()


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


def is_made(connection: sa.Connection, path: Path) -> bool:
    """Whether a database is a store, rather than empty; anything else is refused.

    SQLite is asked, and not the file, because the answer may still be in the log beside it.
    """
    application, version = (
        connection.exec_driver_sql(f"PRAGMA {name}").scalar_one() for name in ("application_id", "user_version")
    )
    holds_tables = bool(connection.exec_driver_sql("SELECT count(*) FROM sqlite_master").scalar_one())
    if application != APPLICATION_ID and (application or version or holds_tables):
        raise StoreError(f"{path} is a database of another program.", hint=_KEPT)
    if version > SCHEMA_VERSION:
        raise StoreError(
            f"The store {path} was written by a newer Underwatt (version {version}, this one reads {SCHEMA_VERSION}).",
            hint="Update Underwatt with: pip install -U underwatt",
        )
    return holds_tables
