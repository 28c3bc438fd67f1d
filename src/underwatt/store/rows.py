"""The tables of a store, and how records become their rows and come back."""

from __future__ import annotations

import hashlib
import json
import math
import struct
import time
from collections import Counter
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, TypeVar

import sqlalchemy as sa

from underwatt.errors import StoreError
from underwatt.records import (
    COUNTS,
    FIGURES,
    KNOBS,
    ConvergenceRun,
    DeviceInfo,
    Measurement,
    PowerMode,
    Setting,
    Status,
    WorkloadInfo,
    to_json,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path


_Item = TypeVar("_Item")

SCHEMA = sa.MetaData()
PROFILES = sa.Table(
    "profiles",
    SCHEMA,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("device_id", sa.String, nullable=False),
    sa.Column("workload_id", sa.String, nullable=False),
    sa.Column("software_id", sa.String, nullable=False),  # another driver or framework is another speed
    sa.Column("device", sa.JSON, nullable=False),
    sa.Column("workload", sa.JSON, nullable=False),
    sa.Column("created_at", sa.String, nullable=False),
    sa.UniqueConstraint("device_id", "workload_id", "software_id"),
)
MEASUREMENTS = sa.Table(
    "measurements",
    SCHEMA,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("profile_id", sa.ForeignKey("profiles.id"), nullable=False, index=True),
    *(sa.Column(name, sa.Float) for name in KNOBS),
    sa.Column("batch_size", sa.Integer, nullable=False),
    *(sa.Column(name, sa.Float) for name in FIGURES),
    *(sa.Column(name, sa.Integer, nullable=False) for name in COUNTS),
    sa.Column("status", sa.String, nullable=False),
    sa.Column("note", sa.String, nullable=False),
    sa.Column("measured_at", sa.String, nullable=False),
)
CONVERGENCE = sa.Table(
    "convergence_runs",
    SCHEMA,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("workload_id", sa.String, nullable=False, index=True),
    sa.Column("workload", sa.JSON, nullable=False),
    sa.Column("batch_size", sa.Integer, nullable=False),
    sa.Column("target", sa.Float, nullable=False),
    sa.Column("samples", sa.Float),  # null: never reached
    sa.Column("seed", sa.Integer, nullable=False),
    sa.Column("learning_rate", sa.Float),
    sa.Column("given_up_samples", sa.Float),  # null: reached, or more samples would not have helped
    sa.Column("recorded_at", sa.String, nullable=False),
)


def find_profile_id(connection: sa.Connection, device: DeviceInfo, workload: WorkloadInfo) -> int:
    """The number of a profile, made where there is none; other software makes another profile."""
    software = json.dumps([to_json(dict(info.software)) for info in (device, workload)], sort_keys=True)
    identity = {
        "device_id": device.id,
        "workload_id": workload.id,
        "software_id": hashlib.sha256(software.encode()).hexdigest()[:16],
    }
    values = {**identity, "device": to_json(device), "workload": to_json(workload), "created_at": _now()}
    connection.execute(sa.insert(PROFILES).prefix_with("OR IGNORE").values(values))
    return int(connection.execute(sa.select(PROFILES.c.id).filter_by(**identity)).scalar_one())


def insert_measurements(connection: sa.Connection, profile_id: int, measurements: Sequence[Measurement]) -> None:
    """Append measurements to a profile."""
    if measurements:
        rows = [{"profile_id": profile_id, "measured_at": _now(), **as_row(m)} for m in measurements]
        connection.execute(sa.insert(MEASUREMENTS), rows)


def select_measurements(connection: sa.Connection, profile_id: int) -> tuple[Measurement, ...]:
    """All measurements of a profile, oldest first."""
    query = sa.select(MEASUREMENTS).where(MEASUREMENTS.c.profile_id == profile_id).order_by(MEASUREMENTS.c.id)
    return tuple(_as_measurement(row) for row in connection.execute(query).mappings())


def insert_convergence(connection: sa.Connection, workload: WorkloadInfo, runs: Sequence[ConvergenceRun]) -> None:
    """Append convergence runs of a workload."""
    if runs:
        if len(_convergence_columns(connection)) < len(CONVERGENCE.columns):
            connection.exec_driver_sql(f"ALTER TABLE {CONVERGENCE.name} ADD COLUMN given_up_samples FLOAT")
        common = {"workload_id": workload.id, "workload": to_json(workload), "recorded_at": _now()}
        connection.execute(sa.insert(CONVERGENCE), [{**common, **to_json(run)} for run in runs])


def select_convergence(
    connection: sa.Connection, *where: sa.ColumnElement[bool]
) -> list[tuple[WorkloadInfo, ConvergenceRun]]:
    """Convergence runs, each with its workload, oldest first."""
    query = sa.select(*_convergence_columns(connection)).where(*where).order_by(CONVERGENCE.c.id)
    rows = connection.execute(query).mappings()
    return [
        (
            WorkloadInfo(**row["workload"]),
            ConvergenceRun(
                row["batch_size"],
                row["target"],
                _number(row["samples"]),
                row["seed"],
                _number(row["learning_rate"]),
                _number(row.get("given_up_samples")),
            ),
        )
        for row in rows
    ]


def _convergence_columns(connection: sa.Connection) -> list[sa.Column[Any]]:
    """The columns that this store has: one from before runs said where they were given up lacks that one."""
    found = {column["name"] for column in sa.inspect(connection).get_columns(CONVERGENCE.name)}
    return [column for column in CONVERGENCE.columns if column.name in found]


def not_among(items: Sequence[_Item], known: Iterable[_Item], to_row: Callable[[_Item], dict[str, Any]]) -> list[_Item]:
    """The items that are not known; one that stands twice is known only where it is known twice."""

    def key(item: _Item) -> tuple[Any, ...]:
        return tuple(to_row(item).items())

    spare = Counter(key(item) for item in known)
    fresh = []
    for item in items:
        if spare[key(item)] > 0:
            spare[key(item)] -= 1
        else:
            fresh.append(item)
    return fresh


def as_row(measurement: Measurement) -> dict[str, Any]:
    """A measurement by the columns of its table."""
    mode = measurement.setting.mode
    return {
        **{name: getattr(mode, name) for name in KNOBS},
        "batch_size": measurement.setting.batch_size,
        **{name: _to_column(getattr(measurement, name)) for name in (*FIGURES, *COUNTS)},
        "status": measurement.status.value,
        "note": measurement.note,
    }


def _as_measurement(row: Any) -> Measurement:
    knobs = {name: row[name] for name in KNOBS if row[name] is not None}
    figures: dict[str, Any] = {name: _number(row[name]) for name in FIGURES}
    figures |= {name: row[name] for name in COUNTS}
    setting = Setting(PowerMode.of(knobs), row["batch_size"])
    return Measurement(setting, **figures, status=Status(row["status"]), note=row["note"])


def _to_column(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


# The file of a store: is it ours, is it whole, and how it is opened without changing it.

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
