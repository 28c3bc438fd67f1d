"""Signals at every moment: the end of a session puts the device back before anything else happens."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from underwatt.device import session as session_module, signals as signals_module
from underwatt.device.session import Session
from underwatt.device.signals import SignalGates, interruptible, uninterrupted
from underwatt.drivers.jetson.device import JetsonDevice
from underwatt.drivers.virtual.board_specs import BOARDS
from underwatt.drivers.virtual.simulated_board import VirtualBoard
from underwatt.drivers.virtual.sysfs import SysfsBoard

PACKAGE = str(Path(session_module.__file__).parent)


@pytest.fixture
def device(tmp_path: Path) -> JetsonDevice:
    SysfsBoard.create(VirtualBoard(BOARDS["orin-nano"]), tmp_path / "board")
    return JetsonDevice(tmp_path / "board")


@pytest.fixture(autouse=True)
def _nothing_waits() -> Iterator[None]:
    yield
    assert not signals_module._waiting


class At:
    """Calls something at the n-th line of the package that runs in this thread: a moment that is reached each time."""

    def __init__(self, line: int, call: Callable[[], None]) -> None:
        self._left, self._call = line, call
        self.reached = False

    def __enter__(self) -> At:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event in ("line", "call"):
            self._left -= 1
            if self._left == 0:
                self.reached = True
                sys.settrace(None)
                self._call()
                sys.settrace(self._trace)
        return self._trace


def end(device: JetsonDevice, line: int) -> bool:
    """A first signal ends a session, a second one comes at the n-th line of its end; whether there is such a line."""
    at = At(line, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises((SystemExit, KeyboardInterrupt)), Session(device) as session:  # noqa: PT012
        session.apply(device.space.lowest)
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)
        finally:
            at.__enter__()
    at.__exit__()
    return at.reached


def test_a_second_signal_at_any_line_of_the_end_skips_no_restore(device: JetsonDevice) -> None:
    found = dict(device.snapshot())
    line = 1
    while end(device, line):
        assert dict(device.snapshot()) == found, f"a signal at line {line} of the end"
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        line += 1
    assert line > 20, "the end has more lines than that"


def test_many_signals_at_random_moments_leave_nothing_behind(device: JetsonDevice) -> None:
    found, chance = dict(device.snapshot()), random.Random(0)
    apply = device.restore

    def slow_restore(snapshot: Any) -> None:
        time.sleep(0.002)
        apply(snapshot)
        time.sleep(0.002)

    device.restore = slow_restore  # type: ignore[method-assign]
    ending = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}

    def train_in_child() -> None:
        """Never returns: a child that did would go on with the tests of its parent."""
        with contextlib.suppress(BaseException):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ending)
            with Session(device) as session:
                while True:
                    session.apply(device.space[chance.randrange(len(device.space))])
        while True:  # no signal ends it here
            with contextlib.suppress(BaseException):
                signal.pthread_sigmask(signal.SIG_BLOCK, ending)
                os._exit(int(dict(device.snapshot()) != found))

    for _ in range(30):
        signal.pthread_sigmask(signal.SIG_BLOCK, ending)
        child = os.fork()
        if child == 0:
            train_in_child()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ending)
        time.sleep(0.03)
        for _ in range(20):
            try:
                os.kill(child, chance.choice(sorted(ending)))
            except ProcessLookupError:
                break
            time.sleep(chance.random() * 0.002)
        _, status = os.waitpid(child, 0)
        # A signal that comes once everything is back, and nobody holds signals any more, may end it silently.
        assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
        assert dict(device.snapshot()) == found
        chance.random()


def test_a_child_that_leaves_the_block_restores_nothing_and_lets_nobody_in(device: JetsonDevice) -> None:
    with Session(device) as session:
        session.apply(device.space.lowest)
        during = dict(device.snapshot())
        child = os.fork()
        if child == 0:
            session.__exit__(None, None, None)
            os._exit(0)
        os.waitpid(child, 0)
        assert dict(device.snapshot()) == during


def test_a_child_ends_by_a_signal_as_if_nobody_had_handled_it(device: JetsonDevice) -> None:
    with Session(device):
        child = os.fork()
        if child == 0:
            time.sleep(10)
            os._exit(0)
        time.sleep(0.05)
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGTERM


def test_a_handler_that_was_put_in_place_meanwhile_waits_too_and_stays(device: JetsonDevice) -> None:
    class WorkerDiedError(RuntimeError):
        pass

    def died(*_: Any) -> None:
        raise WorkerDiedError

    restore = device.restore

    def restore_with_signal(snapshot: Any) -> None:
        os.kill(os.getpid(), signal.SIGCHLD)
        restore(snapshot)

    found, before = dict(device.snapshot()), signal.getsignal(signal.SIGCHLD)
    device.restore = restore_with_signal  # type: ignore[method-assign]
    try:
        with pytest.raises(WorkerDiedError), Session(device) as session:  # noqa: PT012
            session.apply(device.space.lowest)
            signal.signal(signal.SIGCHLD, died)  # as PyTorch does at the first loader with workers
        assert dict(device.snapshot()) == found
        assert signal.getsignal(signal.SIGCHLD) is died
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_what_may_hang_can_be_interrupted_inside_of_what_may_not() -> None:
    went_on: list[str] = []

    @interruptible
    def hangs() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)
        went_on.append("hangs")

    @uninterrupted
    def whole() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)
        went_on.append("whole")
        hangs()

    with pytest.raises((KeyboardInterrupt, SystemExit)), SignalGates():
        whole()
    assert went_on == ["whole"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_module_is_imported_whole_before_a_signal_ends_what_needs_it(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = "import os, time", f"os.kill(os.getpid(), {number})", "time.sleep(0.2)", "whole = True"
    (tmp_path / "half_imported.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    with SignalGates(), pytest.raises((SystemExit, KeyboardInterrupt)):  # noqa: PT012
        import half_imported

        assert half_imported.whole
        time.sleep(5)
    assert sys.modules.pop("half_imported").whole


def test_who_trains_while_a_module_is_imported_can_be_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals_module, "_MOST_TIMES", 2)
    lines = "import os, signal, time", "os.kill(os.getpid(), signal.SIGTERM)", "time.sleep(30)"
    (tmp_path / "trains_at_once.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    begun_s = time.monotonic()
    with SignalGates(), pytest.raises(SystemExit):
        import trains_at_once  # noqa: F401
    assert time.monotonic() - begun_s < 20


def test_a_process_is_forked_whole_before_a_signal_ends_its_parent(capfd: pytest.CaptureFixture[str]) -> None:
    left = [signal.SIGTERM]

    def now() -> None:  # where `logging` lets go of its lock
        if left:
            os.kill(os.getpid(), left.pop())
            time.sleep(0.1)

    os.register_at_fork(after_in_parent=now)
    child = multiprocessing.get_context("fork").Process(target=print)
    with SignalGates(), pytest.raises(SystemExit):  # noqa: PT012
        child.start()
        assert not left
        time.sleep(5)
    child.join()
    assert "SystemExit" not in capfd.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_in_a_process_that_was_forked_a_signal_ends_a_run_at_once(number: int) -> None:
    """All of its life is within the fork: signals were put off for seconds there, until nobody handled them."""

    def ends() -> None:
        try:
            with SignalGates():
                os.kill(os.getpid(), number)
                time.sleep(10)
        except (SystemExit, KeyboardInterrupt):
            os._exit(7)

    child = multiprocessing.get_context("fork").Process(target=ends)
    begun_s = time.monotonic()
    child.start()
    child.join()
    assert child.exitcode == 7
    assert time.monotonic() - begun_s < 5
