"""A helper that is installed and dead: systemd takes connections for it, and nobody ever answers."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import underwatt
from underwatt.cli import helper as commands, main
from underwatt.drivers import helper as driver, jetson
from underwatt.drivers.virtual.board_specs import BOARDS
from underwatt.drivers.virtual.simulated_board import VirtualBoard
from underwatt.drivers.virtual.sysfs import SysfsBoard
from underwatt.errors import DeviceError
from underwatt.helper import PROTOCOL
from underwatt.helper.board import Identity

SOON_S = 5.0  # of a busy machine; 3 s are waited


@pytest.fixture
def dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The socket of a helper that is started for ever: it listens, and is this machine's."""
    path = str(tmp_path / "helper.sock")
    monkeypatch.setattr(driver, "SOCKET", path)
    monkeypatch.setattr(driver, "through_helper", lambda: True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(16)
        yield path


@pytest.fixture
def board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The board that this machine is."""
    SysfsBoard.create(VirtualBoard(BOARDS["nano"]), tmp_path / "board")
    backend = jetson.JetsonBackend(str(tmp_path / "board"))
    for module, name in ((jetson, "backend"), (driver, "jetson_backend")):
        monkeypatch.setattr(module, name, backend, raising=False)
    return tmp_path / "board"


@pytest.mark.usefixtures("board")
def test_the_board_is_read_all_the_same_and_that_is_said(dead: str, caplog: pytest.LogCaptureFixture) -> None:
    began_s = time.monotonic()
    with caplog.at_level(logging.WARNING):
        device = underwatt.open_device("helper:")
    assert time.monotonic() - began_s < SOON_S
    assert device.read_power().power_w > 0
    assert "only read" in caplog.text
    assert f"The helper at {dead} does not answer" in caplog.text
    assert "journalctl -u underwatt-helper" in caplog.text


@pytest.mark.usefixtures("dead")
def test_where_there_is_nothing_to_read_it_is_an_error_and_soon() -> None:
    began_s = time.monotonic()
    with pytest.raises(DeviceError, match="does not answer") as told:
        underwatt.open_device("helper:")
    assert "journalctl" in told.value.hint
    assert time.monotonic() - began_s < SOON_S


@pytest.mark.usefixtures("board")
def test_one_that_was_asked_for_by_its_path_is_not_replaced(dead: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "SOCKET", f"{dead}.other")
    monkeypatch.setattr(driver, "FIRST_S", 0.1)
    with pytest.raises(DeviceError, match="does not answer"):
        underwatt.open_device(f"helper:{dead}")


@pytest.mark.usefixtures("board")
def test_root_who_could_set_the_board_is_not_told_that_it_is_only_read(
    dead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "through_helper", lambda: False)
    monkeypatch.setattr(driver, "FIRST_S", 0.1)
    with pytest.raises(DeviceError, match=f"The helper at {dead} does not answer"):
        underwatt.open_device("helper:")


def test_one_that_has_answered_is_waited_for_longer(tmp_path: Path) -> None:
    path = str(tmp_path / "slow.sock")

    def answer(listener: socket.socket) -> None:
        made, _ = listener.accept()
        with made, made.makefile("rwb") as stream:
            for number, wait_s in ((1, 0.0), (2, 1.0)):
                stream.readline()
                time.sleep(wait_s)
                stream.write(b'{"id": %d, "ok": true}\n' % number)
                stream.flush()

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        threading.Thread(target=answer, args=(listener,), daemon=True).start()
        link = driver.Link(path, 0.5)
        assert link.ask("describe")["ok"]
        assert link.ask("apply")["id"] == 2, "it took longer than the first answer may"
        link.close()


class Silenced:
    """A helper that answers what is asked until it is told to be silent."""

    def __init__(self, path: str) -> None:
        self.silent = threading.Event()
        self.asked: list[str] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen(64)
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            made, _ = self._listener.accept()
            threading.Thread(target=self._answer, args=(made,), daemon=True).start()

    def _answer(self, made: socket.socket) -> None:
        with made, made.makefile("rwb") as stream, contextlib.suppress(OSError):
            for line in stream:
                question = json.loads(line)
                self.asked.append(question["do"])
                if self.silent.is_set():
                    continue
                told = {"ok": True, "id": question["id"], "lease": "a", "recovered": False, "power_w": 5.0}
                told |= {"protocol": PROTOCOL, "root": "/nowhere", "values": {}, "changes": [], "trouble": ""}
                told |= {"identity": dict.fromkeys(Identity._fields, "")}
                stream.write(json.dumps(told).encode() + b"\n")
                stream.flush()


@pytest.fixture
def silenced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Silenced:
    monkeypatch.setattr(driver, "ANSWER_S", 1.0)
    monkeypatch.setattr(driver, "FIRST_S", 0.3)
    return Silenced(str(tmp_path / "silenced.sock"))


def test_one_that_falls_silent_is_asked_once_and_waited_for_less_from_then_on(
    silenced: Silenced, tmp_path: Path
) -> None:
    """It was asked up to five times over, 20 s each, while others waited for their turn."""
    board = driver.RemoteBoard(str(tmp_path / "silenced.sock"))
    board.hold(keeps=True)
    silenced.silent.set()
    silenced.asked.clear()
    for limit_s in (1.4, 0.6):
        began_s = time.monotonic()
        with pytest.raises(driver.SilentError):
            board.power_w()
        assert time.monotonic() - began_s < limit_s
    assert silenced.asked == ["read", "read"]
    for let_go in (lambda: board.apply({"gpu_mhz": 1.0}), lambda: board.restore({}), board.let_go):
        began_s = time.monotonic()
        with pytest.raises(driver.SilentError):
            let_go()
        assert time.monotonic() - began_s < 0.6
    board.close()


def test_those_who_wait_while_it_is_found_silent_do_not_wait_one_after_the_other(
    silenced: Silenced, tmp_path: Path
) -> None:
    board = driver.RemoteBoard(str(tmp_path / "silenced.sock"))
    silenced.silent.set()
    took_s: list[float] = []

    def ask() -> None:
        began_s = time.monotonic()
        with pytest.raises(driver.SilentError):
            board.power_w()
        took_s.append(time.monotonic() - began_s)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(took_s) == 8
    assert max(took_s) < 1.6
    board.close()


def test_one_that_answers_again_is_looked_after_and_waited_for_as_before(silenced: Silenced, tmp_path: Path) -> None:
    board = driver.RemoteBoard(str(tmp_path / "silenced.sock"))
    board.hold()
    silenced.silent.set()
    with pytest.raises(driver.SilentError):
        board.power_w()
    silenced.silent.clear()
    silenced.asked.clear()
    assert board.power_w() == 5.0
    assert silenced.asked == ["read", "hold"], "what was set may be so no more"
    board.power_w()
    assert silenced.asked == ["read", "hold", "read"]
    silenced.silent.set()
    began_s = time.monotonic()
    with pytest.raises(driver.SilentError):
        board.power_w()
    assert time.monotonic() - began_s > 0.9
    board.close()


def test_its_status_is_said_soon(dead: str) -> None:
    began_s = time.monotonic()
    found = driver.helper_status(dead)
    assert time.monotonic() - began_s < SOON_S
    assert not found["answers"]
    assert "journalctl -u underwatt-helper" in found["says"]


@pytest.mark.parametrize("answers", [True, False])
def test_install_asks_it_once_and_says_where_to_look(
    answers: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run/systemd/system").mkdir(parents=True)
    found = {"answers": answers, "says": "The helper at X does not answer.", "holder": "", "trouble": ""}
    monkeypatch.setattr(commands, "install_steps", lambda *_: [])
    monkeypatch.setattr(commands, "helper_status", lambda **_: found)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(SystemExit) as ended:
        main(["helper", "install", "--yes", "--root", str(tmp_path)])
    said = " ".join(capsys.readouterr().out.split())
    if answers:
        assert not ended.value.code
        assert "is installed, and answers" in said
    else:
        assert ended.value.code == 1
        assert "does not work: The helper at X does not answer." in said
        assert "sudo journalctl -u underwatt-helper" in said
