from __future__ import annotations

import json
from pathlib import Path

import pytest

from underwatt.cli import main
from underwatt.drivers.virtual.board_specs import BOARDS
from underwatt.drivers.virtual.simulated_board import VirtualBoard
from underwatt.drivers.virtual.sysfs import SysfsBoard


@pytest.fixture
def board(tmp_path: Path) -> Path:
    SysfsBoard.create(VirtualBoard(BOARDS["nano"]), tmp_path / "board")
    return tmp_path / "board"


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    return int(stopped.value.code or 0)


def test_devices_lists_what_is_simulated_only_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("devices", "--json") == 0
    assert not [item for item in json.loads(capsys.readouterr().out) if item.get("simulated")]
    assert run("devices", "--all", "--json") == 0
    found = {item["address"]: item for item in json.loads(capsys.readouterr().out)}
    assert found["virtual:orin-agx"]["modes"] == 18_096
    assert found["virtual:xavier-agx"]["modes"] == 29_232
    assert found["virtual:nano"]["simulated"] is True
    assert found["virtual:nano"]["power_w"] > 0


def test_devices_table_shows_knobs_and_says_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("devices", "-d", "virtual:nano") == 0
    out = capsys.readouterr().out
    assert "gpu_mhz" in out
    assert "921.6" in out
    assert "simulated" in out
    assert "Watts are those of the module (POM_5V_IN), not of the wall." in " ".join(out.split())


def test_a_sysfs_board_is_shown_set_and_restored(board: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {path: path.read_bytes() for path in board.rglob("*") if path.is_file()}
    assert run("devices", "-d", f"jetson:{board}", "--json") == 0
    [record] = json.loads(capsys.readouterr().out)
    lowest = record["knobs"]["gpu_mhz"]["values"][0]
    assert run("set", "-d", f"jetson:{board}", "--gpu-mhz", str(lowest)) == 0
    assert {path: path.read_bytes() for path in files} != files
    assert run("restore") == 0
    assert {path: path.read_bytes() for path in files} == files
    assert "as it was found" in capsys.readouterr().out
    assert run("restore", "--json") == 0
    assert json.loads(capsys.readouterr().out) == []


def test_watch_is_live_and_ends(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("devices", "-d", "virtual:nano", "--watch", "--count", "2", "--json") == 0
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert second["at_s"] - first["at_s"] == pytest.approx(0.5)
    assert run("devices", "-d", "virtual:nano", "--watch", "--count", "1") == 0
    assert " W" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["set", "-d", "virtual:nano", "--gpu-mhz", "921.6"], 2, "inside one process"),
        (["set", "-d", "virtual:nano"], 2, "Name at least one knob"),
        (["set", "-d", "virtual:nano", "--gpu-mhz", "-5"], 2, "positive"),
        (["devices", "-d", "virtual:amiga"], 1, "amiga"),
        (["devices", "-d", "jetson:/no/such/folder"], 1, "no/such/folder"),
        (["no-such-command"], 2, "No such command"),
    ],
)
def test_bad_input_is_one_sentence_and_an_exit_code(
    arguments: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == code
    err = capsys.readouterr().err
    assert says in err
    assert "Traceback" not in err


def test_a_clock_off_the_table_names_the_nearest_and_writes_nothing(
    board: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {path: path.read_bytes() for path in board.rglob("*") if path.is_file()}
    assert run("set", "-d", f"jetson:{board}", "--gpu-mhz", "100") == 1
    assert "nearest is 76.8" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in files} == files


def test_a_failed_restore_exits_with_an_error(board: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("set", "-d", f"jetson:{board}", "--gpu-mhz", "76.8") == 0
    board.rename(board.with_name("gone"))
    assert run("restore") == 1
    assert "✗" in capsys.readouterr().out
    board.with_name("gone").rename(board)
    assert run("restore") == 0


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert "underwatt 0" in capsys.readouterr().out
    assert run("--help") == 0
    assert "restore" in capsys.readouterr().out


def test_a_board_whose_sensor_fails_is_still_shown(board: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for reading in board.glob("sys/bus/i2c/drivers/ina3221x/*/iio:device*/in_power0_input"):
        reading.write_text("garbage")
    assert run("devices", "-d", f"jetson:{board}", "--json") == 0
    [record] = json.loads(capsys.readouterr().out)
    assert record["power_w"] is None
    assert "garbage" in record["power_error"]
    assert run("devices", "-d", f"jetson:{board}") == 0
