"""Installing the helper and removing it, under a root of the test's own; nothing of this machine is touched."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from helper_world import python_of

from underwatt.cli import main
from underwatt.errors import InputError, NotPermittedError
from underwatt.helper import board, install as module
from underwatt.helper.install import install_steps, is_current, uninstall_steps

UNITS = ("underwatt-helper.socket", "underwatt-helper.service")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A system with a Python and systemd."""
    for folder in ("usr/bin", "opt", "etc/systemd/system", "run/systemd/system"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "usr/bin/python3").symlink_to(sys.executable)
    return tmp_path


def done(root: Path, user: str = "") -> list[tuple[str, ...]]:
    ran: list[tuple[str, ...]] = []
    for step in install_steps(str(root), user, lambda words: ran.append(tuple(words))):
        step.act()
    return ran


def test_installs_its_own_folder_two_units_and_a_group_and_says_so_first(root: Path) -> None:
    steps = install_steps(str(root), "ann", lambda words: pytest.fail("nothing is done before it is asked for"))
    said = "\n".join(step.says for step in steps)
    for word in ("opt/underwatt", *UNITS, "groupadd", "usermod -aG underwatt ann", "systemctl enable"):
        assert word in said
    assert not (root / "opt/underwatt").exists()
    assert done(root, "ann") == [
        ("groupadd", "--system", "--force", "underwatt"),
        ("usermod", "-aG", "underwatt", "ann"),
        ("systemctl", "daemon-reload"),
        ("systemctl", "enable", *UNITS),
        ("systemctl", "restart", *UNITS),
    ]
    copied = root / "opt/underwatt/underwatt_helper"
    here = Path(module.__file__).parent
    assert {path.name for path in copied.iterdir()} == {path.name for path in here.glob("*.py")} - {"install.py"}
    for path in (copied.parent, copied, *copied.iterdir(), *(root / "etc/systemd/system" / unit for unit in UNITS)):
        assert path.stat().st_uid == os.geteuid()
        assert not path.stat().st_mode & 0o022, f"others may write {path}"
    assert is_current(str(root))


def test_what_is_installed_runs_alone(root: Path) -> None:
    done(root)
    words = [python_of("3.10") or sys.executable, "-sEB", "-m", "underwatt_helper", "--root", str(root)]
    ended = subprocess.run(words, cwd=root / "opt/underwatt", capture_output=True, text=True, check=False)
    assert "there is no Jetson" in ended.stderr


def test_a_second_time_replaces_the_first(root: Path) -> None:
    done(root)
    old = root / "opt/underwatt/underwatt_helper/gone.py"
    old.write_text("")
    service = root / "opt/underwatt/underwatt_helper/service.py"
    service.write_text("old")
    assert is_current(str(root)) is False
    done(root)
    assert is_current(str(root))
    assert not old.exists()


def test_uninstalls_all_that_it_installed(root: Path) -> None:
    before = sorted(root.rglob("*"))
    done(root)
    ran: list[Sequence[str]] = []
    steps = uninstall_steps(str(root), ran.append)
    assert "puts the board back" in steps[0].says
    for step in steps:
        step.act()
    assert sorted(root.rglob("*")) == before
    assert ran == [
        ("systemctl", "disable", "--now", *reversed(UNITS)),
        ("systemctl", "daemon-reload"),
        ("groupdel", "underwatt"),
    ]
    assert is_current(str(root)) is None
    assert len(uninstall_steps(str(root))) == 2, "once more: nothing is left to stop"


def test_without_systemd_there_are_no_units(root: Path) -> None:
    shutil.rmtree(root / "run/systemd")
    assert done(root) == [("groupadd", "--system", "--force", "underwatt")]
    assert not list((root / "etc/systemd/system").iterdir())


def test_nothing_that_root_runs_is_put_where_others_may_change_it(root: Path) -> None:
    (root / "opt").chmod(0o777)
    with pytest.raises(NotPermittedError, match="Others may change"):
        done(root)
    (root / "opt").rmdir()
    (root / "elsewhere").mkdir()
    (root / "opt").symlink_to(root / "elsewhere")
    with pytest.raises(NotPermittedError):
        done(root)


def test_without_a_python_or_with_a_command_that_fails_it_says_what_to_do(root: Path) -> None:
    (root / "usr/bin/python3").unlink()
    with pytest.raises(InputError, match="no /usr/bin/python3"):
        install_steps(str(root))
    with pytest.raises(InputError, match="`false` failed"):
        module._runner(None)("fails", "false").act()


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not here")
def test_systemd_finds_nothing_wrong_with_the_units_and_the_service_well_shut_in(root: Path) -> None:
    done(root)
    units = [str(root / "etc/systemd/system" / unit) for unit in UNITS]
    found = subprocess.run(["systemd-analyze", "verify", *units], capture_output=True, text=True, check=False)
    ours = [line for line in found.stderr.splitlines() if "underwatt" in line and "is not executable" not in line]
    assert not ours
    words = ["systemd-analyze", "security", "--offline=yes", "--threshold=25", units[1]]
    judged = subprocess.run(words, capture_output=True, text=True, check=False)
    assert judged.returncode == 0, judged.stdout[-400:]


# The commands


def test_dry_run_does_nothing(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main_returns(["helper", "install", "--dry-run", "--user", "ann", "--root", str(root)])
    said = capsys.readouterr().out
    assert "1. copy its own folder" in said
    assert "let ann use it" in said
    assert not (root / "opt/underwatt").exists()


def test_asks_before_it_does_anything(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main_returns(["helper", "install", "--root", str(root)]) == 1
    assert "Nothing was done" in capsys.readouterr().out
    assert not (root / "opt/underwatt").exists()


def test_uninstall_of_what_is_not_there_by_command(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main_returns(["helper", "uninstall", "--dry-run", "--root", str(root)])
    assert "remove the group underwatt" in capsys.readouterr().out


def test_only_root_may(root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main_returns(["helper", "install", "--yes", "--root", str(root)]) == 1
    assert 'sudo "$(command -v underwatt)" helper install' in capsys.readouterr().err


def test_status_says_that_there_is_none_and_how_to_get_one(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main_returns(["helper", "status", "--root", str(root)]) == 1
    said = capsys.readouterr().out
    assert "There is no helper" in said
    assert "helper install" in said
    assert main_returns(["helper", "status", "--json", "--root", str(root)]) == 1
    assert '"installed": false' in capsys.readouterr().out


def test_one_that_is_installed_and_does_not_run_is_not_to_be_installed_first(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(board, "FOLDER", str(root))
    assert main_returns(["helper", "status"]) == 1
    said = capsys.readouterr().out
    assert "systemctl restart underwatt-helper.socket" in said
    assert "Install the helper" not in said


def main_returns(words: list[str]) -> int:
    with pytest.raises(SystemExit) as ended:
        main(words)
    return int(ended.value.code or 0)
