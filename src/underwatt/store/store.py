"""Where measurements are kept: SQLite in WAL mode, through SQLAlchemy Core, safe for several processes at once.

A file that is truncated, not ours, or written by a newer version is an error and is left untouched. Looking at a
store takes no write lock: only a new one is written to when it is opened.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from underwatt.errors import StoreError
from underwatt.records import DeviceInfo, Profile, Status, WorkloadInfo, to_json
from underwatt.store.rows import (
    CONVERGENCE,
    MEASUREMENTS,
    PROFILES,
    SCHEMA,
    as_row,
    brief,
    check_header,
    fill,
    find_profile_id,
    insert_convergence,
    insert_measurements,
    is_made,
    look_only,
    make_engine,
    not_among,
    select_convergence,
    select_measurements,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from typing import Any

    from underwatt.records import ConvergenceRun, Measurement


# Plans in a store: kept whole, as the JSON of their file, because only planning knows what is in them.

PLANS = sa.Table(
    "plans",
    SCHEMA,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("record", sa.JSON, nullable=False),
    sa.Column("created_at", sa.String, nullable=False),
)


@dataclass(frozen=True, slots=True)
class KeptPlan:
    """A plan as its file holds it, and whose it is."""

    id: int
    record: Mapping[str, Any]
    created_at: str

    @property
    def device(self) -> DeviceInfo:
        """The device it is for."""
        return DeviceInfo(**self.record["device"])

    @property
    def workload(self) -> WorkloadInfo:
        """The job it is for."""
        return WorkloadInfo(**self.record["workload"])


def insert_plan(connection: sa.Connection, record: Mapping[str, Any]) -> tuple[int, bool]:
    """Keep a plan: its number, and whether it is new."""
    # Stores from before there were plans lack the table; nothing else about them is different.
    PLANS.create(connection, checkfirst=True)
    for kept in select_plans(connection):
        if kept.record == record:
            return kept.id, False
    now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    insert = sa.insert(PLANS).values(record=dict(record), created_at=now).returning(PLANS.c.id)
    return int(connection.execute(insert).scalar_one()), True


def select_plans(connection: sa.Connection) -> tuple[KeptPlan, ...]:
    """Every plan, oldest first."""
    if not sa.inspect(connection).has_table(PLANS.name):
        return ()
    rows = connection.execute(sa.select(PLANS).order_by(PLANS.c.id)).mappings()
    return tuple(KeptPlan(row["id"], row["record"], row["created_at"]) for row in rows)


STORE_VARIABLE = "UNDERWATT_STORE"
DEFAULT_NAME = "underwatt.db"


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
    """Profiles, convergence runs and plans in one file. Make one per process; close it, or use it in a ``with``."""

    def __init__(self, path: Path | str, *, create: bool = True) -> None:
        self.path = Path(path)
        exists = self.path.exists()
        if not exists and not create:
            raise StoreError(
                f"There is no store at {self.path}.",
                hint=f"`underwatt profile` makes one; another is named with --store or {STORE_VARIABLE}.",
            )
        made = False
        if exists and (self.path.stat().st_size > 0 or not create):
            check_header(self.path)
            with self._translated(), brief(look_only(self.path)) as connection:
                made = is_made(connection, self.path)
            if not made and not create:
                raise StoreError(f"{self.path} is an empty database.", hint="`underwatt profile` fills it.")
        with self._translated():
            if not made:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            # In a folder that we may not write to, SQLite reads a store only where it is told that nobody writes.
            may_write = os.access(self.path.parent, os.W_OK)
            url = sa.URL.create("sqlite", database=str(self.path)) if may_write else look_only(self.path)
            if not made:
                fill(url, self.path, SCHEMA)
            self._engine = make_engine(url)

    def close(self) -> None:
        """Let go of the file."""
        self._engine.dispose()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def profile_id(self, device: DeviceInfo, workload: WorkloadInfo) -> int:
        """The number of the profile of a workload on a device, made where there is none."""
        with self._writing() as connection:
            return find_profile_id(connection, device, workload)

    def add(self, profile_id: int, measurements: Sequence[Measurement]) -> None:
        """Append measurements; on disk when this returns."""
        if not measurements:
            return
        with self._writing() as connection:
            insert_measurements(connection, profile_id, measurements)

    def measurements(self, profile_id: int) -> tuple[Measurement, ...]:
        """All measurements of a profile, oldest first."""
        with self._translated(), self._engine.connect() as connection:
            return select_measurements(connection, profile_id)

    def profile(self, profile_id: int) -> Profile:
        """A whole profile."""
        with self._translated(), self._engine.connect() as connection:
            row = connection.execute(sa.select(PROFILES).where(PROFILES.c.id == profile_id)).mappings().first()
        if row is None:
            raise StoreError(
                f"The store {self.path} has no profile {profile_id}.", hint="`underwatt store ls` lists them."
            )
        return Profile(DeviceInfo(**row["device"]), WorkloadInfo(**row["workload"]), self.measurements(profile_id))

    def summaries(self) -> tuple[ProfileSummary, ...]:
        """What the store holds, oldest first."""
        usable = sa.func.coalesce(
            sa.func.sum(sa.cast(MEASUREMENTS.c.status.in_([Status.OK.value, Status.THROTTLED.value]), sa.Integer)), 0
        )
        query = (
            sa.select(PROFILES, sa.func.count(MEASUREMENTS.c.id).label("measured"), usable.label("usable"))
            .join(MEASUREMENTS, isouter=True)
            .group_by(PROFILES.c.id)
            .order_by(PROFILES.c.id)
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
        with self._writing() as connection:
            insert_convergence(connection, workload, runs)

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
                number = find_profile_id(connection, profile.device, profile.workload)
                fresh = not_among(profile.measurements, select_measurements(connection, number), as_row)
                insert_measurements(connection, number, fresh)
                taken.append((number, len(fresh)))
            counts: list[int] = []
            for workload, runs in convergence:
                known = select_convergence(connection, CONVERGENCE.c.workload_id == workload.id)
                fresh_runs = not_among(runs, [run for _, run in known], to_json)
                insert_convergence(connection, workload, fresh_runs)
                counts.append(len(fresh_runs))
        return taken, counts

    def convergence(self) -> tuple[tuple[WorkloadInfo, tuple[ConvergenceRun, ...]], ...]:
        """Every workload's convergence runs, oldest first."""
        with self._translated(), self._engine.connect() as connection:
            found = select_convergence(connection)
        infos: dict[str, WorkloadInfo] = {}
        runs: dict[str, list[ConvergenceRun]] = {}
        for workload, run in found:
            infos.setdefault(workload.id, workload)
            runs.setdefault(workload.id, []).append(run)
        return tuple((infos[key], tuple(runs[key])) for key in infos)

    def keep_plan(self, record: Mapping[str, Any]) -> tuple[int, bool]:
        """Keep a plan as its file holds it: its number, and whether it is new."""
        with self._writing() as connection:
            return insert_plan(connection, record)

    def plans(self) -> tuple[KeptPlan, ...]:
        """Every plan that was kept, oldest first."""
        with self._translated(), self._engine.connect() as connection:
            return select_plans(connection)

    def plan(self, plan_id: int) -> KeptPlan:
        """One plan by its number."""
        for kept in self.plans():
            if kept.id == plan_id:
                return kept
        raise StoreError(f"The store {self.path} has no plan {plan_id}.", hint="`underwatt store ls` lists them.")

    @contextmanager
    def _writing(self) -> Iterator[sa.Connection]:
        """One transaction that holds the write lock from its start, so that what it read stays true."""
        with self._translated(), self._engine.begin() as connection:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
            yield connection

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
