from __future__ import annotations

import json
import os
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from underwatt.device import session as folders_module
from underwatt.device.session import journal_folders, pending
from underwatt.errors import DeviceBusyError, JournalError
from underwatt.helper import journal as journal_module, lock as lock_module
from underwatt.helper.journal import Journal, state_dir
from underwatt.helper.lock import DeviceLock
from underwatt.records import DeviceInfo

INFO = DeviceInfo("jetson", "Nano", "jetson-Nano 1/2", "jetson:/")
SNAPSHOT = {"a/b": "1\n", "c": ""}


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal.of(INFO, "session", tmp_path)


@settings(max_examples=15, deadline=None)  # each one is an fsync
@given(snapshot=st.dictionaries(st.text(max_size=20), st.text(max_size=40), max_size=8))
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, snapshot: dict[str, str]) -> None:
    journal = Journal.of(INFO, "session", tmp_path_factory.mktemp("journal"))
    journal.write(INFO, snapshot)
    entry = journal.read()
    assert (entry.snapshot, entry.address, entry.process) == (snapshot, "jetson:/", os.getpid())
    journal.remove()
    assert not journal.exists()


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"format": 1}', '{"format": 1, "sha256": "0", "body": {}}'])
def test_a_corrupt_journal_is_an_error_and_stays(journal: Journal, damage: str) -> None:
    journal.path.write_text(damage)
    with pytest.raises(JournalError, match="damaged"):
        journal.read()
    assert journal.path.read_text() == damage


def test_one_flipped_value_is_noticed(journal: Journal) -> None:
    journal.write(INFO, SNAPSHOT)
    journal.path.write_text(journal.path.read_text().replace('"1\\n"', '"2\\n"'))
    with pytest.raises(JournalError, match="checksum"):
        journal.read()


def test_a_truncated_journal_is_noticed_at_every_length(journal: Journal) -> None:
    journal.write(INFO, SNAPSHOT)
    whole = journal.path.read_text()
    for length in range(0, len(whole) - 1, 7):
        journal.path.write_text(whole[:length])
        with pytest.raises(JournalError):
            journal.read()


def test_a_newer_format_is_not_guessed_at(journal: Journal) -> None:
    journal.write(INFO, SNAPSHOT)
    outer = json.loads(journal.path.read_text())
    journal.path.write_text(json.dumps({**outer, "format": 2}))
    with pytest.raises(JournalError, match="format 2"):
        journal.read()


def test_nothing_is_changed_when_the_journal_cannot_be_written(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with pytest.raises(JournalError, match="nothing was changed"):
        Journal.of(INFO, "session", blocked).write(INFO, SNAPSHOT)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_an_error_and_leaves_no_half_file(journal: Journal) -> None:
    journal.path.with_suffix(".tmp").symlink_to("/dev/full")
    with pytest.raises(JournalError, match="No space left"):
        journal.write(INFO, SNAPSHOT)
    assert not journal.exists()


def test_the_second_holder_is_told_who_the_first_is(tmp_path: Path) -> None:
    first, second = DeviceLock(INFO, tmp_path), DeviceLock(INFO, tmp_path)
    first.acquire()
    with pytest.raises(DeviceBusyError, match=f"process {os.getpid()}"):
        second.acquire()
    first.release()
    second.acquire()
    second.release()


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    lock = DeviceLock(INFO, tmp_path)
    lock.acquire()
    read, write = os.pipe()
    ready_read, ready_write = os.pipe()
    child = os.fork()
    if child == 0:  # a data loader's worker that outlives its parent
        os.close(write)
        os.write(ready_write, b"1")
        os.read(read, 1)
        os._exit(0)
    os.close(read)
    os.read(ready_read, 1)
    lock.release()
    other = DeviceLock(INFO, tmp_path)
    other.acquire()  # the child, still alive, holds nothing
    other.release()
    for end in (write, ready_read, ready_write):
        os.close(end)
    os.waitpid(child, 0)


def test_sessions_are_finished_before_what_was_set_under_them(tmp_path: Path) -> None:
    for purpose in ("set", "session"):
        Journal.of(INFO, purpose, tmp_path).write(INFO, SNAPSHOT)
    assert [journal.path.suffixes[-2] for journal in pending([tmp_path])] == [".session", ".set"]


def test_ids_that_differ_have_files_that_differ(tmp_path: Path) -> None:
    one, other = (DeviceInfo("jetson", "x", f"a{mark}b", "jetson:/") for mark in "/_")
    assert Journal.of(one, "set", tmp_path).path != Journal.of(other, "set", tmp_path).path


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder that all users may write to, and state folders as nobody has configured them."""
    monkeypatch.delenv("UNDERWATT_STATE")
    monkeypatch.setattr(lock_module, "_SHARED_NOTES", tmp_path / "shared")
    for module in (journal_module, folders_module):
        monkeypatch.setattr(module, "ROOTS_STATE", tmp_path / "root")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    (tmp_path / "shared").mkdir()
    return tmp_path / "shared"


def test_a_user_is_told_that_another_one_has_the_device(monkeypatch: pytest.MonkeyPatch, shared: Path) -> None:
    as_root = DeviceLock(INFO)
    as_root.acquire()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(lock_module, "_open_own", lambda path: os.open(path, os.O_RDWR | os.O_CREAT))
    with pytest.raises(DeviceBusyError, match=f"process {os.getpid()}.* of user root"):
        DeviceLock(INFO).acquire()
    as_root.release()
    assert list(shared.iterdir()) == [], "no note is left"
    user = DeviceLock(INFO)
    user.acquire()
    user.release()
    assert journal_folders() == (shared.parent / "home" / "underwatt", shared.parent / "root")


def test_a_note_that_no_living_process_of_its_owner_left_holds_nobody(shared: Path) -> None:
    started = lock_module.process_started(os.getpid())
    stem = f"underwatt-{journal_module.slug(INFO.id)}"
    init_started = lock_module.process_started(1)
    for number, text in enumerate(
        ["", "x", "1", "999999999 0 a", f"{os.getpid()} 0 reused number", "1 2 3 \xff", "0 0 x", "-1 0 x"]
    ):
        (shared / f"{stem}.{number}.note").write_text(text)
    forged = shared / f"{stem}.forged.note"
    forged.write_text(f"{os.getpid()} {started} not of its owner")
    os.chown(forged, 1000, 1000) if os.geteuid() == 0 else forged.unlink()
    (shared / f"{stem}.link.note").symlink_to("/dev/zero")
    os.mkfifo(shared / f"{stem}.pipe.note")
    lock = DeviceLock(INFO)
    lock.acquire()
    lock.release()
    assert init_started is None or not (shared / f"{stem}.3.note").exists(), "what a killed session left is removed"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of other users")
def test_a_folder_that_a_stranger_has_filled_costs_little_and_hides_nobody(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Notes lie where anybody may write: 100,000 empty ones had the helper killed for memory before it put back."""
    started, read = lock_module.process_started(os.getpid()), lock_module._read_note
    stem = f"underwatt-{journal_module.slug(INFO.id)}"
    for number in range(3000):
        path = shared / f"{stem}.{number:016x}.note"
        path.touch()
        os.chown(path, 4242, 4242)
        (shared / f"something-else-{number}").touch()
    looked: list[int] = []

    def counted(path: Path) -> tuple[int, str]:
        looked.append(path.lstat().st_uid)
        return read(path)

    monkeypatch.setattr(lock_module, "_read_note", counted)
    tracemalloc.start()
    lock = DeviceLock(INFO)
    lock.acquire()
    lock.release()
    assert 0 < len(looked) <= 200, "of each user only so many are looked at"
    looked.clear()
    lock = DeviceLock(INFO, heeds=lambda user: user == 0)
    lock.acquire()
    lock.release()
    assert looked == [], "and none of who is not heeded"
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 300_000, peak
    (shared / f"{stem}.root.note").write_text(f"{os.getpid()} {started} a session")
    with pytest.raises(DeviceBusyError, match="a session, of user root"):
        DeviceLock(INFO).acquire()


def test_however_many_notes_killed_sessions_of_ours_left_all_are_removed(shared: Path) -> None:
    stem = f"underwatt-{journal_module.slug(INFO.id)}"
    for number in range(500):
        (shared / f"{stem}.{number}.note").write_text("999999999 0 killed")
    lock = DeviceLock(INFO)
    lock.acquire()
    lock.release()
    assert list(shared.iterdir()) == []


@pytest.mark.parametrize("kind", ["link", "dangling", "pipe", "hard link"])
def test_a_lock_that_somebody_else_prepared_is_refused_and_left_alone(tmp_path: Path, kind: str) -> None:
    other = tmp_path / "valuable"
    other.write_text("kept")
    path = tmp_path / "locks" / f"underwatt-{journal_module.slug(INFO.id)}.lock"
    path.parent.mkdir()
    if kind == "link":
        path.symlink_to(other)
    elif kind == "dangling":
        path.symlink_to(tmp_path / "not there")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        os.link(other, path)
    with pytest.raises(JournalError, match="UNDERWATT_STATE"):
        DeviceLock(INFO, path.parent).acquire()
    assert other.read_text() == "kept"
    assert not (tmp_path / "not there").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of other users")
def test_another_users_lock_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / f"underwatt-{journal_module.slug(INFO.id)}.lock"
    path.write_text("mine")
    os.chown(path, 1000, 1000)
    with pytest.raises(JournalError, match="no file of yours"):
        DeviceLock(INFO, tmp_path).acquire()
    assert path.read_text() == "mine"


def as_nobody(call: Callable[[], object]) -> str:
    """What a call raises where an ordinary user makes it, or nothing."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            call()
        except BaseException as exc:  # noqa: BLE001
            os.write(write, f"{type(exc).__name__}: {exc}".encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as said:
        text = said.read()
    os.waitpid(child, 0)
    return text


@pytest.fixture
def roots(tmp_path: Path) -> Iterator[Path]:
    """A folder that only its owner may look into, on a path that everybody may."""
    with tempfile.TemporaryDirectory() as outer:
        Path(outer).chmod(0o755)
        folder = Path(outer) / "root"
        Journal.of(INFO, "session", folder).write(INFO, SNAPSHOT)
        yield folder
        folder.chmod(0o755)


def test_a_folder_that_cannot_be_looked_into_is_not_nothing_to_restore(roots: Path) -> None:
    roots.chmod(0o700 if os.geteuid() == 0 else 0)
    for call in (lambda: pending([roots]), Journal.of(INFO, "session", roots).exists):
        said = as_nobody(call)
        assert said.startswith("JournalError")
        assert "sudo underwatt restore" in said


def test_an_ordinary_user_is_told_what_to_do_about_roots_journal(roots: Path) -> None:
    journal = Journal.of(INFO, "session", roots)
    roots.chmod(0o555)
    said = as_nobody(journal.remove)
    assert said.startswith("JournalError")
    assert "sudo underwatt restore" in said
    journal.path.chmod(0o600 if os.geteuid() == 0 else 0)
    said = as_nobody(journal.read)
    assert said.startswith("JournalError")
    assert "damaged" not in said
    assert "sudo underwatt restore" in said
    journal.path.chmod(0o600)


@pytest.mark.parametrize(
    "body",
    [
        {"address": 1, "device_name": "x", "process": 1, "command": "", "snapshot": {}},
        {"address": "a", "device_name": "x", "process": 1, "command": "", "snapshot": {"a": 1}},
        {"address": "a", "device_name": "x", "process": 1, "command": "", "snapshot": ["a"]},
        {"address": "a", "device_name": "x", "process": "1", "command": "", "snapshot": {}},
    ],
)
def test_a_journal_that_holds_no_text_is_damaged(journal: Journal, body: dict[str, object]) -> None:
    outer = {"format": 1, "sha256": journal_module._digest(body), "body": body}
    journal.path.write_text(json.dumps(outer))
    with pytest.raises(JournalError, match="damaged"):
        journal.read()


def test_a_journal_of_brackets_is_damaged(journal: Journal) -> None:
    journal.path.write_text("[" * 100_000)
    with pytest.raises(JournalError, match="damaged"):
        journal.read()


def test_state_folder_is_configurable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("UNDERWATT_STATE", str(tmp_path))
    assert state_dir() == tmp_path
    monkeypatch.delenv("UNDERWATT_STATE")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert state_dir() == tmp_path / "underwatt"
