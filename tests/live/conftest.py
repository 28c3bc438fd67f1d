from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from live_run import FakeRun, Served


@pytest.fixture
def fake_run(tmp_path: Path) -> Iterator[FakeRun]:
    run = FakeRun(tmp_path / "run")
    run.start()
    yield run
    run.log.close()


@pytest.fixture
def served(fake_run: FakeRun) -> Iterator[Served]:
    with Served(fake_run.folder) as served:
        yield served


@pytest.fixture(scope="module")
def refusing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for all tests that change nothing."""
    run = FakeRun(tmp_path_factory.mktemp("refusing") / "run")
    run.start()
    with Served(run.folder) as served:
        yield served
    run.log.close()
