"""The board through its helper: the same device, found by itself, put back by another process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helper_world import NOBODY, Helper, sandboxed, serving
from kernel_boards import Boards, as_user
from kernel_mount import Mount, why_not

import underwatt
from underwatt.device.base import foreign_changes, permitted_space
from underwatt.device.session import Session, set_mode
from underwatt.drivers import helper as driver, jetson
from underwatt.drivers.helper import HelperDevice, helper_status
from underwatt.drivers.jetson.device import JetsonDevice
from underwatt.errors import DeviceBusyError, DeviceError, InputError, ModeError, NoDeviceError, NotPermittedError
from underwatt.events import SettingChanged
from underwatt.helper import board as board_module
from underwatt.records import PowerMode
from underwatt.runlog.log import read_log
from underwatt.testing.devices import DeviceConformance

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())
SOURCE = Path(driver.__file__).parents[2]


@pytest.fixture(scope="module")
def pool() -> Iterator[Boards]:
    with Boards() as boards:
        yield boards


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="underwatt-helper-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
def mount(pool: Boards) -> Mount:
    return pool.board("xavier-nx", "5")


@pytest.fixture
def helper(mount: Mount, folder: Path) -> Iterator[Helper]:
    with serving(folder, mount.root) as running:
        yield running


@pytest.fixture
def device(helper: Helper) -> Iterator[HelperDevice]:
    opened = HelperDevice(str(helper.socket))
    yield opened
    opened.close()


def eventually(mount: Mount, wanted: Any, limit_s: float = 5.0) -> None:
    end_s = time.monotonic() + limit_s
    while mount.settled() != wanted:
        assert time.monotonic() < end_s


class TestHelperIsADevice(DeviceConformance):
    @pytest.fixture
    def device(self, helper: Helper) -> Iterator[HelperDevice]:
        opened = HelperDevice(str(helper.socket))
        yield opened
        opened.close()


def test_is_the_same_board_as_root_sees(device: HelperDevice, mount: Mount) -> None:
    direct = JetsonDevice(mount.root)
    assert (device.info.id, device.info.name) == (direct.info.id, direct.info.name)
    assert list(device.space.matrix()[3]) == list(direct.space.matrix()[3])
    assert permitted_space(device).lowest == permitted_space(direct).lowest
    assert device.stock_modes() == direct.stock_modes()
    assert device.read_state().running == direct.read_state().running
    assert device.kernel_files().keys() == direct.kernel_files().keys()


def test_a_session_sets_and_puts_back(device: HelperDevice, mount: Mount, helper: Helper) -> None:
    found = mount.settled()
    with Session(device) as session:
        assert not session.recovered
        session.apply(device.space.lowest)
        assert mount.settled() != found
        session.restore()
        assert mount.settled() == found
        with pytest.raises(DeviceBusyError):
            helper.ask("hold")
        session.apply(device.space.lowest)
        with pytest.raises(ModeError, match="not allowed"):
            session.apply(PowerMode(cpu_mhz=1.0))
    assert mount.settled() == found
    helper.ask("hold")


def test_who_is_put_back_though_he_holds_is_set_again_and_told(
    device: HelperDevice, mount: Mount, helper: Helper
) -> None:
    found, low = mount.settled(), device.space.lowest
    with Session(device) as session:
        session.apply(low.__class__(cpu_mhz=low.cpu_mhz))
        session.apply(low.__class__(gpu_mhz=low.gpu_mhz))
        wanted = mount.settled()
        helper.stop(signal.SIGKILL)
        helper.start()
        device.read_power()  # whatever is asked next notices
        assert mount.settled() == wanted, "both, although the last call set one of them"
        (said,) = foreign_changes(device)
        assert "put everything back" in said
        assert "set again" in said
        helper.stop(signal.SIGKILL)
        helper.start()
        session.apply(low)
        assert device.read_state().running.cpu_cores == low.cpu_cores
    assert mount.settled() == found


def test_who_was_stopped_for_longer_than_his_lease_is_set_again(
    device: HelperDevice, mount: Mount, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "LEASE_S", 1.0)
    monkeypatch.setattr(driver, "RENEW_S", 1.6)
    found, low = mount.settled(), device.space.lowest
    with Session(device) as session:
        session.apply(low)
        wanted = mount.settled()
        eventually(mount, found)
        eventually(mount, wanted)
        assert any("no sign of life" in text for text in foreign_changes(device))
    assert mount.settled() == found


def test_another_took_the_board_meanwhile(device: HelperDevice, mount: Mount, helper: Helper) -> None:
    with Session(device) as session:
        session.apply(device.space.lowest)
        helper.stop(signal.SIGKILL)
        helper.start()
        other = HelperDevice(str(helper.socket))
        with Session(other):
            device.read_power()
            assert any("cannot be set again" in text for text in foreign_changes(device))
            with pytest.raises(DeviceBusyError):
                session.apply(device.space.lowest)
        other.close()


def test_an_answer_to_a_question_that_was_broken_off_is_not_taken_for_another(device: HelperDevice) -> None:
    link = device._board.link
    link.ask("describe")
    link._socket.sendall(b'{"do":"describe","id":77777}\n')  # type: ignore[union-attr] # and a signal came
    assert 0 < device.read_power().power_w < 100
    assert device.read_state().running.cpu_mhz


def test_a_forked_worker_neither_holds_nor_lets_go(device: HelperDevice, mount: Mount) -> None:
    with Session(device) as session:
        session.apply(device.space.lowest)
        wanted = mount.settled()

        def in_child() -> float:
            watts = device.read_power().power_w
            session.restore()
            device.let_go()
            return watts

        assert as_user(in_child, 0, [0]) > 0
        assert mount.settled() == wanted
        assert device.read_power().power_w > 0


def test_closing_it_puts_back_and_stays_so(device: HelperDevice, mount: Mount) -> None:
    found = mount.settled()
    device.apply(device.space.lowest)
    assert mount.settled() != found
    device.close()
    eventually(mount, found, 1.0)


def test_nothing_can_be_left_set(device: HelperDevice) -> None:
    with pytest.raises(InputError, match="nothing can be left set"):
        set_mode(device, device.space.lowest)


def test_what_is_not_there_or_not_allowed_is_said_with_what_to_do(helper: Helper, folder: Path) -> None:
    with pytest.raises(NoDeviceError, match="There is no helper") as none:
        HelperDevice(str(folder / "nothing.sock"))
    assert "helper install" in none.value.hint
    path = str(helper.socket)
    refused = as_user(lambda: helper_status(path), 4242, [4242])
    assert not refused["answers"]
    assert "may not speak" in refused["says"]
    with pytest.raises(NotPermittedError):
        as_user(lambda: HelperDevice(path), 4242, [4242])
    assert helper_status(path)["answers"]
    helper.stop(signal.SIGKILL)
    with pytest.raises(DeviceError, match="does not answer"):
        HelperDevice(path)


def test_another_version_says_to_install_again(helper: Helper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "PROTOCOL", 2)
    with pytest.raises(DeviceError, match="another version") as told:
        HelperDevice(str(helper.socket))
    assert "helper install" in told.value.hint


def test_found_by_itself_where_the_knobs_are_not_this_users(
    helper: Helper, mount: Mount, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Rooted(jetson.Sysfs):
        def __init__(self, _root: str) -> None:
            super().__init__(mount.root)

    monkeypatch.setattr(jetson, "Sysfs", Rooted)
    monkeypatch.setattr(jetson, "SOCKET", str(helper.socket))

    def found() -> tuple[bool, tuple[str, ...]]:
        return driver.backend.affinity() > 0, jetson.backend.find()

    assert found() == (False, ("/",)), "root sets them itself"
    assert as_user(found, 4242, [NOBODY]) == (True, ())
    assert as_user(found, 4242, [4242]) == (False, ("/",)), "not in the group: the board, to read"


def test_without_a_helper_the_one_command_that_installs_it_is_named(
    mount: Mount, monkeypatch: pytest.MonkeyPatch, helper: Helper
) -> None:
    def remedies() -> set[str]:
        return {one.remedy for one in JetsonDevice(mount.root).capabilities() if one.kind == "knob" and one.remedy}

    (said,) = as_user(remedies, 4242, [4242])
    assert 'sudo "$(command -v underwatt)" helper install' in said
    monkeypatch.setattr(board_module, "SOCKET", str(helper.socket))
    (said,) = as_user(remedies, 4242, [4242])
    assert "usermod -aG underwatt" in said
    (said,) = as_user(remedies, 4242, [NOBODY])
    assert "--device helper:" in said, "a member who looks at the board itself, or whose helper is dead"
    assert "helper install" not in said


def in_sandbox(helper: Helper, root: Path, home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    home.mkdir(exist_ok=True)
    os.chown(home, NOBODY, NOBODY)
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "HOME": str(home)}
    environment.pop("UNDERWATT_STATE", None)
    command = sandboxed(helper, root, sys.executable, "-m", "underwatt", *words)
    return subprocess.run(command, env=environment, cwd=home, capture_output=True, text=True, check=False, timeout=240)


def test_a_container_without_any_right_sees_the_board_as_root_does(helper: Helper, mount: Mount, folder: Path) -> None:
    shown = in_sandbox(helper, mount.root, folder / "home", "devices", "--json")
    (record,) = json.loads(shown.stdout)
    assert record["address"] == "helper:"
    assert {one["name"] for one in record["capabilities"] if one["usable"]} >= {"cpu_cores", "gpu_mhz", "mem_mhz"}
    assert record["power_w"] > 0
    refused = in_sandbox(helper, mount.root, folder / "home", "set", "--cpu-cores", "2")
    assert refused.returncode == 2
    assert "nothing can be left set" in refused.stderr


JOB = """
import torch
from underwatt.jobs.job import Job

def job():
    points = torch.randn(400, 8)
    return Job(lambda: torch.nn.Linear(8, 2), (points, (points[:, 0] > 0).long()), target=0.9, lr=0.05,
               batch_sizes=(16, 64), device="cpu", num_workers=0)
"""


@pytest.mark.slow
def test_a_container_without_any_right_runs_under_a_budget(helper: Helper, mount: Mount, folder: Path) -> None:
    found = mount.settled()
    home = folder / "home"
    home.mkdir()
    (home / "train.py").write_text(JOB)
    ended = in_sandbox(
        helper, mount.root, home, "run", "train.py:job", "--budget", "6W", "--limit", "4000", "--out", "run"
    )
    assert ended.returncode in (0, 3, 6), ended.stderr
    log = read_log(home / "run" / "log.jsonl")
    modes = {change.setting.mode for change in log.of(SettingChanged) if change.setting}
    assert any(mode.cpu_mhz and mode.gpu_mhz and mode.mem_mhz for mode in modes)
    assert log.end is not None
    assert log.end.restored
    assert mount.settled() == found
    assert "holds the board" in helper.said()


def test_tune_trains_through_it(helper: Helper, mount: Mount) -> None:
    found = mount.settled()
    began_s = time.monotonic()
    changed = False
    address = f"helper:{helper.socket}"
    with underwatt.tune(budget_w=6, batch_sizes=(4, 8), device=address) as tuner:
        for _ in tuner.loader([float(number) for number in range(100_000)]):
            time.sleep(0.002)
            tuner.step()
            changed = changed or mount.settled(0.0) != found
            if changed or time.monotonic() - began_s > 30:
                break
    assert changed
    assert mount.settled() == found


@pytest.mark.parametrize("ends_by", ["itself", "Ctrl-C"])
def test_a_helper_that_hangs_ends_a_training_soon(
    helper: Helper, mount: Mount, monkeypatch: pytest.MonkeyPatch, ends_by: str
) -> None:
    """It froze for over six minutes, as every question was asked again and waited for in turn."""
    monkeypatch.setattr(driver, "ANSWER_S", 4.0)
    monkeypatch.setattr(driver, "FIRST_S", 1.0)
    found, address = mount.settled(), f"helper:{helper.socket}"
    stopped_s = 0.0
    assert helper.process is not None
    try:
        with pytest.raises((DeviceError, KeyboardInterrupt)) as ended:  # noqa: PT012, SIM117
            with underwatt.tune(budget_w=6, batch_sizes=(4, 8), device=address) as tuner:
                for _ in tuner.loader([float(number) for number in range(10_000_000)]):
                    time.sleep(0.01)
                    tuner.step()
                    if tuner.steps >= 200 and not stopped_s:
                        helper.process.send_signal(signal.SIGSTOP)
                        stopped_s = time.monotonic()
                        if ends_by == "Ctrl-C":
                            threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGINT)).start()
        assert time.monotonic() - stopped_s < (35 if ends_by == "itself" else 20)
        assert isinstance(ended.value, DeviceError), "the board could not be put back yet"
        assert "does not answer" in str(ended.value)
        assert "puts the board back when it goes on" in ended.value.hint
    finally:
        helper.process.send_signal(signal.SIGCONT)
    eventually(mount, found)


@pytest.mark.slow
def test_check_looks_through_it(helper: Helper, mount: Mount) -> None:
    found = mount.settled()
    report = underwatt.check(f"helper:{helper.socket}", listener=lambda _event: None)
    assert report.idle_w > 0
    assert {knob.name for knob in report.knobs} == {"cpu_cores", "cpu_mhz", "gpu_mhz", "mem_mhz"}
    assert mount.settled() == found
