from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import timeit
from pathlib import Path

import pytest

from underwatt.errors import InputError
from underwatt.helper.journal import state_dir
from underwatt.runlog.inbox import Inbox, post_budget, register_run, run_folder, running_runs


def test_a_posted_budget_is_taken_once(tmp_path: Path) -> None:
    inbox = Inbox(tmp_path)
    assert inbox.take() is None
    post_budget(tmp_path, "7W", "command")
    assert json.loads((tmp_path / "budget.json").read_text())["from"] == "command"
    assert inbox.take() == "7W"
    assert inbox.take() is None
    post_budget(tmp_path, "7W", "page")  # the same watts are a new message
    assert inbox.take() == "7W"


def test_only_the_newest_counts_and_nothing_else_is_left(tmp_path: Path) -> None:
    inbox = Inbox(tmp_path)
    for text in ("9W", "10W peak", "08:00-18:00=15W,else=7W"):
        post_budget(tmp_path, text, "page")
    assert inbox.take() == "08:00-18:00=15W,else=7W"
    assert [path.name for path in tmp_path.glob("budget*")] == ["budget.json"]


def test_what_lay_there_before_the_run_is_old(tmp_path: Path) -> None:
    post_budget(tmp_path, "7W", "command")
    inbox = Inbox(tmp_path)
    assert inbox.take() is None
    os.utime(tmp_path / "budget.json")  # touched, not posted
    assert inbox.take() is None
    (tmp_path / "budget.json").unlink()
    assert inbox.take() is None


@pytest.mark.parametrize("text", ["7", "", "2h", "50Wh", "-7W", "08:00-18:00=15W"])
def test_nonsense_is_refused_before_it_is_posted(tmp_path: Path, text: str) -> None:
    with pytest.raises(InputError):
        post_budget(tmp_path, text, "page")
    assert not (tmp_path / "budget.json").exists()


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no folder"):
        post_budget(tmp_path / "gone", "7W", "page")
    assert Inbox(tmp_path / "gone").take() is None


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "7", '{"id": 1}', '{"id": 1, "budget": 7}', '{"id": 1, "budget": "much"}']
)
def test_a_message_by_hand_that_makes_no_sense_is_told_and_skipped(tmp_path: Path, content: str) -> None:
    inbox = Inbox(tmp_path)
    (tmp_path / "budget.json").write_text(content)
    assert inbox.take() is None
    assert "makes no sense" in (inbox.error or "")
    level, text = inbox.take_news() or ("", "")
    assert (level, "makes no sense" in text) == ("warning", True)
    assert inbox.take_news() is None, "it is said once"
    post_budget(tmp_path, "7W", "command")
    assert inbox.take() == "7W"
    assert inbox.error is None


def hostile(path: Path, kind: str) -> None:
    """What somebody may put in the place of a small file."""
    if kind == "brackets":
        path.write_text("[" * 100_000)
    elif kind == "few brackets":  # short enough to be read
        path.write_text("[" * 60_000)
    elif kind == "endless":
        path.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        (path.parent / "secret").write_text('{"id": 1, "budget": "7W"}')
        path.symlink_to(path.parent / "secret")
    elif kind == "long":
        path.write_text('{"id": 1, "budget": "7W"}' + " " * 200_000)
    elif kind == "digits":
        path.write_text('{"id": ' + "9" * 10_000 + ', "budget": "7W"}')
    else:
        path.mkdir()


HOSTILE = ("brackets", "few brackets", "endless", "pipe", "link", "long", "digits", "folder")


@pytest.mark.parametrize("kind", HOSTILE)
def test_no_file_ends_or_blocks_a_training(tmp_path: Path, kind: str) -> None:
    """In a process of its own, which can be ended where it hangs."""
    hostile(tmp_path / "budget.json", kind)
    program = f"""
from underwatt.runlog.inbox import Inbox
inbox = Inbox({str(tmp_path)!r})  # as it lies there when a run begins
assert inbox.error is None
inbox._seen = None  # and as it comes while the run goes on
assert inbox.take() is None, inbox.take()
level, text = inbox.take_news()
assert level == "warning" and "makes no sense" in text and "post one with" in text, text
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.parametrize("kind", HOSTILE)
def test_no_entry_of_a_run_ends_or_blocks_who_looks_for_runs(tmp_path: Path, kind: str) -> None:
    (state_dir() / "runs").mkdir(parents=True)
    hostile(state_dir() / "runs" / "1.json", kind)
    program = "from underwatt.runlog.inbox import running_runs; assert running_runs() == ()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr.decode()


def test_a_reader_never_sees_half_a_message(tmp_path: Path) -> None:
    inbox = Inbox(tmp_path)
    senders = [
        threading.Thread(target=lambda: [post_budget(tmp_path, f"{watts}W", "page") for watts in range(5, 55)])
        for _ in range(3)
    ]
    for sender in senders:
        sender.start()
    taken = []
    while any(sender.is_alive() for sender in senders):
        taken.append(inbox.take())
        assert inbox.error is None
    for sender in senders:
        sender.join()
    taken.append(inbox.take())
    assert [text for text in taken if text][-1] == json.loads((tmp_path / "budget.json").read_text())["budget"]


def test_looking_is_cheap(tmp_path: Path) -> None:
    post_budget(tmp_path, "7W", "command")
    inbox = Inbox(tmp_path)
    assert min(timeit.repeat(inbox.take, number=1000, repeat=5)) / 1000 < 50e-6


def test_a_run_is_listed_while_it_lasts(tmp_path: Path) -> None:
    assert running_runs() == ()
    with register_run(tmp_path, "digits", "Nano") as warning:
        assert warning is None
        [run] = running_runs()
        assert (run.folder, run.pid, run.job, run.device) == (str(tmp_path), os.getpid(), "digits", "Nano")
        with register_run(tmp_path / "second", "digits", "Orin"):
            assert len(running_runs()) == 2
        assert len(running_runs()) == 1
    assert running_runs() == ()
    with pytest.raises(ZeroDivisionError), register_run(tmp_path, "digits", "Nano"):
        raise ZeroDivisionError
    assert running_runs() == ()


def test_a_killed_run_is_forgotten(tmp_path: Path) -> None:
    program = (
        "import os, signal; from underwatt.runlog.inbox import register_run; "
        f"run = register_run({str(tmp_path)!r}, 'digits', 'Nano'); run.__enter__(); "
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", program], check=False)
    assert len(list((state_dir() / "runs").iterdir())) == 1
    assert running_runs() == ()
    assert list((state_dir() / "runs").iterdir()) == []


def test_another_process_with_the_same_number_is_not_the_run(tmp_path: Path) -> None:
    with register_run(tmp_path, "digits", "Nano"):
        (path,) = (state_dir() / "runs").iterdir()
        entry = json.loads(path.read_text())
        path.write_text(json.dumps({**entry, "process_started": "1"}))  # as after a reboot
        assert running_runs() == ()
        path.write_text("not an entry")
        assert running_runs() == ()


def test_a_state_folder_that_cannot_be_written_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("UNDERWATT_STATE", str(tmp_path / "file"))
    with register_run(tmp_path, "digits", "Nano") as warning:
        assert "cannot be listed" in (warning or "")
        assert running_runs() == ()


def test_the_folder_that_is_meant(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="under way"):
        run_folder(None)
    with pytest.raises(InputError, match="no run"):
        run_folder(tmp_path)
    (tmp_path / "log.jsonl").touch()
    assert run_folder(tmp_path) == tmp_path
    with register_run(tmp_path / "b", "digits", "Nano"):
        assert run_folder(None) == tmp_path / "b"
