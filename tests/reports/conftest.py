"""A made-up run, and the report that has everything."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import report_world as world

if TYPE_CHECKING:
    from underwatt.reports.report_records import Report
    from underwatt.runlog.run_record import RunRecord


@pytest.fixture(scope="session")
def record(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    """A run of the made-up story."""
    return world.write_run(tmp_path_factory.mktemp("run") / "log.jsonl")


@pytest.fixture(scope="session")
def whole(record: RunRecord) -> Report:
    """A report that has everything."""
    return world.report(record=record)
