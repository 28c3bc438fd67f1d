from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_cli_devices import run

from underwatt.drivers.check import read_check


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_person_reads_a_verdict_and_where_the_file_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", "-d", "virtual:orin-nano", "--set") == 0
    shown = capsys.readouterr()
    out = " ".join(shown.out.split())
    assert "at rest of the module (VDD_IN)" in out
    assert "lag of 0.6" in out
    assert "gpu_mhz: asked 306, ran 306" in out
    assert "Ready: cpu_cores, cpu_mhz, gpu_mhz and mem_mhz were set under load and put back" in out
    [file] = tmp_path.glob("*.json")
    assert f"Written to {file.name}" in out
    assert read_check(file)[0].measurements
    assert "moving gpu_mhz" in shown.err
    assert run("devices", "-d", f"check:{file}") == 0
    assert "from a check" in capsys.readouterr().out


def test_a_program_reads_what_the_file_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", "-d", "virtual:nano", "--json", "-o", "mine.json") == 0
    out = capsys.readouterr().out
    assert json.loads(out)["underwatt"] == "check"
    assert (tmp_path / "mine.json").read_text() == out


def test_it_is_planned_with_after_an_import(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", "-d", "virtual:nano", "--set", "-o", "nano.json") == 0
    assert run("store", "import", "nano.json") == 0
    assert run("plan", "--budget", "5W") == 0
    assert "from a check" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["-d", "virtual:no-such-board"], 1, "no virtual board"),
        (["-d", "check:nowhere.json"], 2, "cannot be read"),
        (["-d", "virtual:nano", "-o", "no/such/folder.json"], 2, "cannot be written"),
        (["--help"], 0, ""),
    ],
)
def test_what_goes_wrong_is_said_with_its_exit_code(
    arguments: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("check", *arguments) == code
    shown = capsys.readouterr()
    assert says in " ".join(shown.err.split())
    if not code:
        assert "130 interrupted" in " ".join(shown.out.split())


def test_a_check_of_a_check_says_what_was_found_then(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", "-d", "virtual:nano", "-o", "nano.json") == 0
    capsys.readouterr()
    assert run("check", "-d", "check:nano.json") == 0
    assert "No setting of" in " ".join(capsys.readouterr().out.split())
