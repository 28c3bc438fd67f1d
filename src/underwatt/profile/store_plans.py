"""Plans in a store: kept whole, as the JSON of their file, because only planning knows what is in them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from underwatt.profile.store_rows import SCHEMA
from underwatt.records import DeviceInfo, WorkloadInfo

if TYPE_CHECKING:
    from collections.abc import Mapping

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
