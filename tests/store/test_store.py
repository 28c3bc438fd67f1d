from __future__ import annotations

import math
import multiprocessing
import os
import shutil
import sqlite3
import tempfile
from dataclasses import replace
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from underwatt.errors import InputError, StoreError
from underwatt.records import (
    ConvergenceRun,
    DeviceInfo,
    Measurement,
    PowerMode,
    Profile,
    Setting,
    Status,
    WorkloadInfo,
    columns,
)
from underwatt.store import schema
from underwatt.store.store import Store, default_store_path

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


def _possible(found: Measurement) -> Measurement:
    """As it is, unless it says to have been measured without a time and watts."""
    has_values = 0 < found.step_s < math.inf and 0 < found.power_w < math.inf
    return found if has_values or not found.usable else replace(found, status=Status.FAILED)


possible = measurements.map(_possible)  # what a file may hold; a store keeps whatever it is given


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


def _make_together(folder: Path, barrier: Barrier) -> None:
    for turn in range(10):
        barrier.wait()
        make(folder / f"{turn}.db", 1)


def test_several_processes_make_a_store_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(4, timeout=60)
    makers = [context.Process(target=_make_together, args=(tmp_path, barrier)) for _ in range(4)]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join()
    assert [maker.exitcode for maker in makers] == [0] * 4
    for path in tmp_path.glob("*.db"):
        with Store(path, create=False) as store:
            assert [summary.measured for summary in store.summaries()] == [4]


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
    connection.execute(f"PRAGMA user_version = {schema.newest_version() + 1}")
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
        store.summaries()
        [connection] = store._idle
        [pages] = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count = {pages}")
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


def test_other_software_is_another_profile(path: Path) -> None:
    with Store(path) as store:
        first = store.profile_id(DEVICE, WORKLOAD)
        newer_driver = store.profile_id(replace(DEVICE, software={"driver": "2"}), WORKLOAD)
        newer_torch = store.profile_id(DEVICE, replace(WORKLOAD, software={"torch": "3"}))
        assert len({first, newer_driver, newer_torch}) == 3
        assert store.profile(newer_driver).device.software == {"driver": "2"}
        assert store.profile_id(replace(DEVICE, name="renamed"), WORKLOAD) == first


def _wal_files(path: Path) -> dict[str, bytes]:
    return {name: (path.parent / name).read_bytes() for name in (path.name, f"{path.name}-wal")}


@pytest.mark.parametrize("statement", ["CREATE TABLE notes (text)", "PRAGMA user_version = 7"])
@pytest.mark.parametrize("crashed", [False, True])
def test_another_programs_database_in_its_log_is_refused_and_untouched(
    path: Path, statement: str, crashed: bool
) -> None:
    writer = sqlite3.connect(path)
    writer.execute("PRAGMA journal_mode = WAL")
    writer.execute(statement)
    writer.commit()
    if crashed:  # what a killed process leaves
        left = path.parent / "left"
        left.mkdir()
        for name in _wal_files(path):
            shutil.copy(path.parent / name, left / name)
        path = left / path.name
    before = _wal_files(path)
    for create in (True, False):
        with pytest.raises(StoreError, match="another program"):
            Store(path, create=create)
    assert _wal_files(path) == before
    writer.close()


def test_a_newer_version_that_is_only_in_the_log_is_refused_and_untouched(path: Path) -> None:
    make(path)
    writer = sqlite3.connect(path)
    writer.execute(f"PRAGMA user_version = {schema.newest_version() + 1}")
    writer.commit()
    before = _wal_files(path)
    with pytest.raises(StoreError, match="newer Underwatt"):
        Store(path)
    assert _wal_files(path) == before
    assert writer.execute("PRAGMA user_version").fetchone() == (schema.newest_version() + 1,)
    writer.close()


def test_a_store_left_by_a_killed_process_is_whole(path: Path) -> None:
    writer = Store(path)
    number = writer.profile_id(DEVICE, WORKLOAD)
    writer.add(number, [Measurement(Setting(PowerMode(gpu_mhz=1.0), 8), 0.1, 5.0)])
    left = path.parent / "left"
    left.mkdir()
    for name in _wal_files(path):
        shutil.copy(path.parent / name, left / name)
    writer.close()
    with Store(left / path.name, create=False) as store:
        assert len(store.measurements(number)) == 1


def test_looking_does_not_wait_for_a_writer(path: Path) -> None:
    number = make(path)
    writer = sqlite3.connect(path, isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")  # a second write lock would have to wait until the busy timeout
    for create in (True, False):
        with Store(path, create=create) as store:
            assert store.summaries()[0].id == number
    writer.close()


def test_looking_changes_nothing(path: Path) -> None:
    make(path)
    content = path.read_bytes()
    with Store(path, create=False) as store:
        store.summaries()
    assert path.read_bytes() == content
    assert [item.name for item in path.parent.iterdir()] == [path.name]


def _look_where_nothing_may_be_written(folder: Path) -> None:
    path = folder / "store.db"
    number = make(path)
    path.chmod(0o444)
    folder.chmod(0o555)
    if os.getuid() == 0:  # root may write everywhere
        os.setuid(65534)
    with Store(path, create=False) as store:
        assert store.summaries()[0].measured == 3
        with pytest.raises(StoreError, match="readonly"):
            store.add(number, [Measurement(Setting(PowerMode(), 1), 0.1, 5.0)])
    with pytest.raises(StoreError, match="--store"):
        Store(folder / "new.db")


def test_a_read_only_folder_can_be_looked_at() -> None:
    folder = Path(tempfile.mkdtemp())  # the folders of pytest itself are closed to other users
    process = multiprocessing.get_context("spawn").Process(target=_look_where_nothing_may_be_written, args=(folder,))
    process.start()
    process.join()
    folder.chmod(0o755)
    shutil.rmtree(folder)
    assert process.exitcode == 0


def test_an_empty_database_becomes_a_store_but_is_not_read_as_one(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode = WAL")  # as far as a process came that was killed while making a store
    connection.close()
    with pytest.raises(StoreError, match="empty"):
        Store(path, create=False)
    assert make(path) == 1


@pytest.mark.parametrize("name", ["what?.db", "a#b.db", "50%20.db", "sp ace.db"])
def test_any_file_name_will_do(tmp_path: Path, name: str) -> None:
    make(tmp_path / name)
    assert [item.name for item in tmp_path.iterdir()] == [name]
    with Store(tmp_path / name, create=False) as store:
        assert store.summaries()[0].measured == 3


def test_taking_in_the_same_twice_adds_nothing_but_keeps_true_repeats(path: Path) -> None:
    once = Measurement(Setting(PowerMode(cpu_cores=2, gpu_mhz=1300), 8), 0.1, 5.0)
    failed = Measurement(Setting(PowerMode(cpu_cores=2, gpu_mhz=1300), 64), status=Status.FAILED)
    profile = Profile(DEVICE, WORKLOAD, (once, failed, failed))
    runs = (ConvergenceRun(8, 0.9, float("nan")), ConvergenceRun(8, 0.9, 100.0, 1))
    with Store(path) as store:
        assert store.take_in([profile], [(WORKLOAD, runs)]) == ([(1, 3)], [2])
        assert store.take_in([profile], [(WORKLOAD, runs)]) == ([(1, 0)], [0])
        more = replace(profile, measurements=(*profile.measurements, replace(once, step_s=0.2)))
        assert store.take_in([more], [(WORKLOAD, (*runs, ConvergenceRun(16, 0.9, 100.0, 1)))]) == ([(1, 1)], [1])
        assert len(store.measurements(1)) == 4
        store.add(1, [once])  # profiling may measure the same again
        assert len(store.measurements(1)) == 5


def test_taking_in_is_all_or_nothing(path: Path) -> None:
    def profiles() -> object:
        yield Profile(DEVICE, WORKLOAD, (Measurement(Setting(PowerMode(), 8), 0.1, 5.0),))
        raise RuntimeError("pulled plug")

    with Store(path) as store:
        with pytest.raises(RuntimeError):
            store.take_in(profiles())  # type: ignore[arg-type]
        assert store.summaries() == ()


def test_a_number_that_no_store_holds_is_refused_whole(path: Path) -> None:
    sound = Measurement(Setting(PowerMode(cpu_cores=2), 8), 0.1, 5.0)
    with Store(path) as store:
        for setting in (Setting(PowerMode(cpu_cores=41 * 10**30), 16), Setting(PowerMode(), 2**63)):
            with pytest.raises(StoreError, match=r"too large.*Mend the file"):
                store.take_in([Profile(DEVICE, WORKLOAD, (sound, replace(sound, setting=setting)))])
        assert store.summaries() == ()


def test_a_new_field_of_a_record_is_a_column_of_a_new_store(path: Path) -> None:
    make(path)
    connection = sqlite3.connect(path)
    for table, record in (("measurements", Measurement), ("convergence_runs", ConvergenceRun)):
        found = {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}
        assert found >= {column.name for column in columns(record)}
    connection.close()


def _add_note(connection: sqlite3.Connection) -> None:
    connection.execute("ALTER TABLE plans ADD COLUMN note TEXT NOT NULL DEFAULT 'from before'")


def _notes(path: Path) -> list[tuple[str]]:
    connection = sqlite3.connect(path)
    found = connection.execute("SELECT note FROM plans").fetchall()
    connection.close()
    return found


def test_an_older_store_is_brought_up_when_it_is_opened(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    number = make(path)
    with Store(path) as store:
        store.keep_plan({"a": 1})
    monkeypatch.setattr(schema, "MIGRATIONS", [(2, _add_note)])
    for _ in range(2):  # the second time there is nothing to do
        with Store(path, create=False) as store:
            assert len(store.measurements(number)) == 3
            assert _notes(path) == [("from before",)]
    monkeypatch.setattr(schema, "MIGRATIONS", [])
    with pytest.raises(StoreError, match=r"newer Underwatt \(version 2, this one reads 1\). Update Underwatt"):
        Store(path)


def test_migrations_are_made_in_order_and_only_those_that_are_missing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(path)
    made: list[int] = []
    monkeypatch.setattr(schema, "MIGRATIONS", [(2, lambda _: made.append(2))])
    Store(path).close()
    monkeypatch.setattr(schema, "MIGRATIONS", [(n, lambda _, n=n: made.append(n)) for n in (2, 3, 4)])
    Store(path).close()
    assert made == [2, 3, 4]
    make(path.with_name("new.db"))
    assert made == [2, 3, 4], "a new store has the newest tables from its start"


def test_a_migration_that_fails_leaves_the_store_as_it_was(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    number = make(path)

    def fail(connection: sqlite3.Connection) -> None:
        _add_note(connection)
        connection.execute("no SQL")

    monkeypatch.setattr(schema, "MIGRATIONS", [(2, fail)])
    with pytest.raises(StoreError, match="syntax error"):
        Store(path)
    monkeypatch.setattr(schema, "MIGRATIONS", [])
    with Store(path) as store:
        assert len(store.measurements(number)) == 3


def _open(path: Path, barrier: Barrier) -> None:
    schema.MIGRATIONS.append((2, _add_note))
    barrier.wait()
    Store(path).close()


def test_several_processes_bring_a_store_up_at_once(path: Path) -> None:
    make(path)
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(3, timeout=60)
    openers = [context.Process(target=_open, args=(path, barrier)) for _ in range(3)]
    for opener in openers:
        opener.start()
    for opener in openers:
        opener.join()
    assert [opener.exitcode for opener in openers] == [0] * 3
    assert _notes(path) == []


def test_threads_do_not_wait_for_each_other(path: Path) -> None:
    number = make(path)
    with Store(path) as store, store._writing():  # as the saver's thread, waiting for a slow disk
        assert len(store.measurements(number)) == 3


def test_what_is_stored_can_be_deleted(path: Path) -> None:
    with Store(path) as store:
        first = store.profile_id(DEVICE, WORKLOAD)
        other = store.profile_id(DEVICE, replace(WORKLOAD, id="other"))
        for number in (first, other):
            store.add(number, [Measurement(Setting(PowerMode(), 8), step_s=0.1, power_w=5.0)])
        store.add_convergence(WORKLOAD, [ConvergenceRun(8, 0.9, 1000.0, 0)])
        assert store.delete(str(first)) == f"profile {first} with 1 measurements"
        assert [item.id for item in store.summaries()] == [other]
        assert store.measurements(first) == ()
        assert store.delete(WORKLOAD.id) == "1 convergence runs"
        assert store.convergence_counts() == ()
        for gone in (str(first), WORKLOAD.id, "plan:7"):
            with pytest.raises(InputError, match="There is no"):
                store.delete(gone)
