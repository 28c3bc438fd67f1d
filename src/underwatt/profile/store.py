"""Where measurements are kept: SQLite in WAL mode, through SQLAlchemy Core, safe for several processes at once.

A file that is truncated, not ours, or written by a newer version is an error and is left untouched: its header is
read as plain bytes before SQLite is allowed to open it.
"""

from __future__ import annotations

import math
import os
import struct
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    Profile,
    Setting,
    Status,
    WorkloadInfo,
    to_json,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SCHEMA_VERSION = 1
APPLICATION_ID = 0x55575454  # "UWTT", in the header of every store
STORE_VARIABLE = "UNDERWATT_STORE"
DEFAULT_NAME = "underwatt.db"
_BUSY_TIMEOUT_S = 30
_MAGIC = b"SQLite format 3\x00"

_schema = sa.MetaData()
_profiles = sa.Table(
    "profiles",
    _schema,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("device_id", sa.String, nullable=False),
    sa.Column("workload_id", sa.String, nullable=False),
    sa.Column("device", sa.JSON, nullable=False),
    sa.Column("workload", sa.JSON, nullable=False),
    sa.Column("created_at", sa.String, nullable=False),
    sa.UniqueConstraint("device_id", "workload_id"),
)
_measurements = sa.Table(
    "measurements",
    _schema,
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
_convergence = sa.Table(
    "convergence_runs",
    _schema,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("workload_id", sa.String, nullable=False, index=True),
    sa.Column("workload", sa.JSON, nullable=False),
    sa.Column("batch_size", sa.Integer, nullable=False),
    sa.Column("target", sa.Float, nullable=False),
    sa.Column("samples", sa.Float),  # null: never reached
    sa.Column("seed", sa.Integer, nullable=False),
    sa.Column("learning_rate", sa.Float),
    sa.Column("recorded_at", sa.String, nullable=False),
)


@dataclass(frozen=True, slots=True)
class ProfileSummary:
    """One line of ``underwatt store ls``."""

    id: int
    device: DeviceInfo
    workload: WorkloadInfo
    measured: int
    usable: int
    created_at: str


def default_store_path() -> Path:
    """``$UNDERWATT_STORE``, else ``underwatt.db`` in the current folder."""
    return Path(os.environ.get(STORE_VARIABLE) or DEFAULT_NAME)


class Store:
    """Profiles and convergence runs in one file. Make one per process; close it, or use it in a ``with``."""

    def __init__(self, path: Path | str, *, create: bool = True) -> None:
        self.path = Path(path)
        if self.path.exists() and (self.path.stat().st_size > 0 or not create):
            _check_header(self.path)
        elif not create:
            raise StoreError(
                f"There is no store at {self.path}.",
                hint=f"`underwatt profile` makes one; another is named with --store or {STORE_VARIABLE}.",
            )
        with self._translated():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._engine = sa.create_engine(f"sqlite:///{self.path}", connect_args={"timeout": _BUSY_TIMEOUT_S})
            sa.event.listen(self._engine, "connect", _prepare_connection)
            with self._engine.begin() as connection:
                # Several processes may come first at once: each statement is harmless to repeat.
                connection.execute(sa.text("BEGIN IMMEDIATE"))
                connection.execute(sa.text(f"PRAGMA application_id = {APPLICATION_ID}"))
                connection.execute(sa.text(f"PRAGMA user_version = {SCHEMA_VERSION}"))
                _schema.create_all(connection)

    def close(self) -> None:
        """Let go of the file."""
        self._engine.dispose()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def profile_id(self, device: DeviceInfo, workload: WorkloadInfo) -> int:
        """The number of the profile of a workload on a device, made where there is none."""
        wanted = (_profiles.c.device_id == device.id) & (_profiles.c.workload_id == workload.id)
        values = {
            "device_id": device.id,
            "workload_id": workload.id,
            "device": to_json(device),
            "workload": to_json(workload),
            "created_at": _now(),
        }
        with self._translated(), self._engine.begin() as connection:
            connection.execute(sa.insert(_profiles).prefix_with("OR IGNORE").values(values))
            return int(connection.execute(sa.select(_profiles.c.id).where(wanted)).scalar_one())

    def add(self, profile_id: int, measurements: Sequence[Measurement]) -> None:
        """Append measurements; on disk when this returns."""
        if not measurements:
            return
        rows = [{"profile_id": profile_id, "measured_at": _now(), **_as_row(m)} for m in measurements]
        with self._translated(), self._engine.begin() as connection:
            connection.execute(sa.insert(_measurements), rows)

    def measurements(self, profile_id: int) -> tuple[Measurement, ...]:
        """All measurements of a profile, oldest first."""
        query = sa.select(_measurements).where(_measurements.c.profile_id == profile_id).order_by(_measurements.c.id)
        with self._translated(), self._engine.connect() as connection:
            return tuple(_as_measurement(row) for row in connection.execute(query).mappings())

    def profile(self, profile_id: int) -> Profile:
        """A whole profile."""
        with self._translated(), self._engine.connect() as connection:
            row = connection.execute(sa.select(_profiles).where(_profiles.c.id == profile_id)).mappings().first()
        if row is None:
            raise StoreError(
                f"The store {self.path} has no profile {profile_id}.", hint="`underwatt store ls` lists them."
            )
        return Profile(DeviceInfo(**row["device"]), WorkloadInfo(**row["workload"]), self.measurements(profile_id))

    def summaries(self) -> tuple[ProfileSummary, ...]:
        """What the store holds, oldest first."""
        usable = sa.func.coalesce(
            sa.func.sum(sa.cast(_measurements.c.status.in_([Status.OK.value, Status.THROTTLED.value]), sa.Integer)), 0
        )
        query = (
            sa.select(_profiles, sa.func.count(_measurements.c.id).label("measured"), usable.label("usable"))
            .join(_measurements, isouter=True)
            .group_by(_profiles.c.id)
            .order_by(_profiles.c.id)
        )
        with self._translated(), self._engine.connect() as connection:
            rows = connection.execute(query).mappings().all()
        return tuple(
            ProfileSummary(
                row["id"],
                DeviceInfo(**row["device"]),
                WorkloadInfo(**row["workload"]),
                row["measured"],
                row["usable"],
                row["created_at"],
            )
            for row in rows
        )

    def add_convergence(self, workload: WorkloadInfo, runs: Sequence[ConvergenceRun]) -> None:
        """Append convergence runs of a workload."""
        if not runs:
            return
        rows = [
            {
                "workload_id": workload.id,
                "workload": to_json(workload),
                "recorded_at": _now(),
                **{key: _to_column(value) for key, value in to_json(run).items()},
            }
            for run in runs
        ]
        with self._translated(), self._engine.begin() as connection:
            connection.execute(sa.insert(_convergence), rows)

    def convergence(self) -> tuple[tuple[WorkloadInfo, tuple[ConvergenceRun, ...]], ...]:
        """Every workload's convergence runs, oldest first."""
        with self._translated(), self._engine.connect() as connection:
            rows = connection.execute(sa.select(_convergence).order_by(_convergence.c.id)).mappings().all()
        infos: dict[str, WorkloadInfo] = {}
        runs: dict[str, list[ConvergenceRun]] = {}
        for row in rows:
            infos.setdefault(row["workload_id"], WorkloadInfo(**row["workload"]))
            runs.setdefault(row["workload_id"], []).append(
                ConvergenceRun(
                    row["batch_size"],
                    row["target"],
                    _number(row["samples"]),
                    row["seed"],
                    _number(row["learning_rate"]),
                )
            )
        return tuple((infos[key], tuple(runs[key])) for key in infos)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """The one seam at which the database's errors become ours."""
        try:
            yield
        except sa.exc.DBAPIError as exc:
            reason = str(exc.orig)
            if "full" in reason:
                hint = "Free some space; everything stored before is intact."
            elif "locked" in reason:
                hint = "Another process holds it; try again when it is done."
            elif "readonly" in reason or "unable to open" in reason:
                hint = f"Check its permissions, or name another file with --store or {STORE_VARIABLE}."
            else:
                hint = "Move it away and start a new one; it was not changed."
            raise StoreError(f"The store {self.path} cannot be used: {reason}.", hint=hint) from exc
        except OSError as exc:
            raise StoreError(
                f"The store {self.path} cannot be used: {exc.strerror}.",
                hint=f"Name another file with --store or {STORE_VARIABLE}.",
            ) from exc


def _prepare_connection(connection: Any, _record: object) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA synchronous = FULL")  # a power cut is a normal event for our users
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()


def _check_header(path: Path) -> None:
    """Refuse a file that is not a whole store of a version we know, without opening it."""
    keep = "It was left untouched; name another file with --store."
    try:
        with path.open("rb") as file:
            header = file.read(100)
        size = path.stat().st_size
    except OSError as exc:
        raise StoreError(f"The store {path} cannot be read: {exc.strerror}.", hint="Check its permissions.") from exc
    if not header.startswith(_MAGIC[: len(header)]):
        raise StoreError(f"{path} is not an Underwatt store.", hint=keep)
    if len(header) < 100:
        raise StoreError(f"The store {path} is truncated.", hint=keep)
    page_size, pages, version, application = (
        struct.unpack_from(kind, header, at)[0] for kind, at in ((">H", 16), (">I", 28), (">I", 60), (">I", 68))
    )
    wal_waits = path.with_name(path.name + "-wal").exists()
    if application != APPLICATION_ID and not (application == 0 and wal_waits):
        raise StoreError(f"{path} is a database of another program.", hint=keep)
    if version > SCHEMA_VERSION:
        raise StoreError(
            f"The store {path} was written by a newer Underwatt (version {version}, this one reads {SCHEMA_VERSION}).",
            hint="Update Underwatt with: pip install -U underwatt",
        )
    if size < pages * (65536 if page_size == 1 else page_size) and not wal_waits:
        raise StoreError(f"The store {path} is truncated.", hint=keep)


def _as_row(measurement: Measurement) -> dict[str, Any]:
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
