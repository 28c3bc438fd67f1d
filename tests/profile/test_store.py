from __future__ import annotations

import multiprocessing
import sqlite3
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from underwatt.errors import StoreError
from underwatt.profile.store import SCHEMA_VERSION, Store, default_store_path
from underwatt.records import ConvergenceRun, DeviceInfo, Measurement, PowerMode, Setting, Status, WorkloadInfo

DEVICE = DeviceInfo("virtual", "Nano", "virtual-nano", "virtual:nano", simulated=True, software={"driver": "1"})
WORKLOAD = WorkloadInfo("resnet18", "abc", {"torch": "2"})

numbers = st.floats(1e-6, 1e6) | st.just(float("nan"))
measurements = st.builds(
    Measurement,
    st.builds(
        Setting,
        st.builds(PowerMode, cpu_cores=st.none() | st.integers(1, 12), gpu_mhz=st.none() | st.floats(1, 3000)),
        st.integers(1, 1024),
    ),
    step_s=numbers,
    power_w=numbers,
    power_w_ci95=numbers,
    steps=st.integers(0, 1000),
    status=st.sampled_from(Status),
    note=st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=30),
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.db"


def make(path: Path, count: int = 3) -> int:
    with Store(path) as store:
        number = store.profile_id(DEVICE, WORKLOAD)
        store.add(number, [Measurement(Setting(PowerMode(gpu_mhz=100.0 + n), 8), 0.1, 5.0) for n in range(count)])
    return number


@settings(max_examples=20, deadline=None)
@given(st.lists(measurements, max_size=5))
def test_what_is_stored_comes_back(tmp_path_factory: pytest.TempPathFactory, items: list[Measurement]) -> None:
    with Store(tmp_path_factory.mktemp("store") / "store.db") as store:
        number = store.profile_id(DEVICE, WORKLOAD)
        store.add(number, items)
        profile = store.profile(number)
    assert (profile.device, profile.workload) == (DEVICE, WORKLOAD)
    assert repr(profile.measurements) == repr(tuple(items))  # NaN is not equal to itself, its text is


def test_the_same_device_and_workload_share_a_profile(path: Path) -> None:
    with Store(path) as store:
        first = store.profile_id(DEVICE, WORKLOAD)
        assert store.profile_id(DEVICE, WORKLOAD) == first
        assert store.profile_id(DEVICE, WorkloadInfo("other", "def")) != first


def test_summaries_count_what_is_usable(path: Path) -> None:
    number = make(path)
    with Store(path) as store:
        store.add(number, [Measurement(Setting(PowerMode(), 64), status=Status.OUT_OF_MEMORY)])
        store.profile_id(DEVICE, WorkloadInfo("empty", "def"))
        first, second = store.summaries()
    assert (first.measured, first.usable, first.device) == (4, 3, DEVICE)
    assert (second.measured, second.usable) == (0, 0)


def test_convergence_runs_come_back(path: Path) -> None:
    runs = (ConvergenceRun(8, 0.9, 12000.0, 1, 1e-3), ConvergenceRun(128, 0.9, float("nan")))
    with Store(path) as store:
        store.add_convergence(WORKLOAD, runs)
        [(workload, found)] = store.convergence()
    assert workload == WORKLOAD
    assert repr(found) == repr(runs)
    assert [run.reached for run in found] == [True, False]


def _write(path: Path, process: int) -> None:
    with Store(path) as store:
        number = store.profile_id(DEVICE, WORKLOAD)
        for n in range(20):
            store.add(number, [Measurement(Setting(PowerMode(gpu_mhz=1.0 + process), 1 + n), 0.1, 5.0)])


def test_several_processes_write_at_once(path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write, args=(path, process)) for process in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0] * 4
    with Store(path) as store:
        [summary] = store.summaries()
        assert summary.measured == 80
        assert len({m.setting for m in store.measurements(summary.id)}) == 80


@pytest.mark.parametrize("content", [b"hello, this is text" * 20, b"\x89PNG", b"SQLite format 3\x00" + b"\x01" * 200])
def test_a_foreign_file_is_refused_and_untouched(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(StoreError, match=r"not an Underwatt store|another program|newer"):
        Store(path)
    assert path.read_bytes() == content
    assert [item.name for item in path.parent.iterdir()] == [path.name]


def test_a_database_of_another_program_is_refused_and_untouched(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE notes (text)")
    connection.close()
    content = path.read_bytes()
    with pytest.raises(StoreError, match="another program"):
        Store(path)
    assert path.read_bytes() == content


def test_a_newer_store_is_refused_and_untouched(path: Path) -> None:
    make(path)
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    connection.commit()
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    content = path.read_bytes()
    with pytest.raises(StoreError, match="newer Underwatt"):
        Store(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize("keep", [10, 60, 100, 5000])
def test_a_truncated_store_is_refused_and_untouched(path: Path, keep: int) -> None:
    make(path, 200)
    content = path.read_bytes()[:keep]
    path.write_bytes(content)
    with pytest.raises(StoreError, match="truncated"):
        Store(path)
    assert path.read_bytes() == content


def test_an_empty_file_becomes_a_store_but_is_not_read_as_one(path: Path) -> None:
    path.touch()
    with pytest.raises(StoreError, match="truncated"):
        Store(path, create=False)
    assert make(path) == 1


def test_a_missing_store_is_not_made_by_looking(path: Path) -> None:
    with pytest.raises(StoreError, match="no store at"):
        Store(path, create=False)
    assert not path.exists()


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="--store"):
        Store(tmp_path / "file" / "store.db")


def test_a_full_disk_is_an_error_and_what_was_stored_stays(path: Path) -> None:
    number = make(path)
    with Store(path) as store:
        with store._engine.connect() as connection:
            pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()

        def limit(connection: sqlite3.Connection, _: object) -> None:
            connection.execute(f"PRAGMA max_page_count = {pages}")

        import sqlalchemy as sa

        sa.event.listen(store._engine, "connect", limit)
        store._engine.dispose()
        many = [Measurement(Setting(PowerMode(gpu_mhz=1), 1), note="x" * 200) for _ in range(200)]
        with pytest.raises(StoreError, match="full"):
            store.add(number, many)
    with Store(path) as store:
        assert len(store.measurements(number)) == 3


def test_an_unknown_profile_is_named(path: Path) -> None:
    with Store(path) as store, pytest.raises(StoreError, match="no profile 7"):
        store.profile(7)


def test_the_store_is_found_by_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNDERWATT_STORE", "elsewhere.db")
    assert default_store_path() == Path("elsewhere.db")
    monkeypatch.delenv("UNDERWATT_STORE")
    assert default_store_path() == Path("underwatt.db")
