"""What a newcomer reads first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from test_cli_devices import run

from underwatt.cli import COMMANDS, app

STEPS = ("devices", "profile", "converge", "plan", "run", "report")


def test_help_shows_an_example_in_the_order_of_the_steps(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    shown = capsys.readouterr().out
    example = shown[shown.index("In order") :]
    places = [example.index(f"underwatt {step}") for step in STEPS]
    assert places == sorted(places)
    assert "10W peak" in example
    assert all(len(line) <= 80 for line in example.splitlines())


@pytest.mark.parametrize("command", ["", *COMMANDS, "store export"])
def test_no_flag_is_shown_to_take_a_value(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*command.split(), "--help") == 0
    shown = capsys.readouterr().out
    assert "<bool>" not in shown


def test_the_list_of_commands_says_what_each_command_says_itself() -> None:
    group = typer.main.get_group(app)
    context = typer.Context(group)
    assert {name: group.get_command(context, name).help for name in COMMANDS} == {  # type: ignore[union-attr]
        name: text for name, (_, text) in COMMANDS.items()
    }


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["plan", "--help"], ["restore"], ["devices"]])
def test_help_and_simple_commands_import_nothing_heavy(arguments: list[str]) -> None:
    program = (
        "import sys; from underwatt.cli import main\n"
        f"try: main({arguments!r})\n"
        "except SystemExit: pass\n"
        "heavy = ('numpy', 'scipy', 'torch', 'sqlalchemy', 'sqlite3', 'sklearn', 'plotly')\n"
        "print('imported:', *(name for name in heavy if name in sys.modules))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == "imported:"


def test_sentences_in_the_list_of_commands_are_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    listed = " ".join(capsys.readouterr().out.split("Commands:")[1].split())
    assert "interrupt and run again to go on where it stopped." in listed


def test_a_terminal_that_knows_no_check_mark_gets_the_rest() -> None:
    plain = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "latin-1"}
    command = [sys.executable, "-m", "underwatt", "devices", "-d", "virtual:nano"]
    shown = subprocess.run(command, env=os.environ | plain, capture_output=True, check=False)
    assert shown.returncode == 0, shown.stderr
    assert b" ?   gpu_mhz" in shown.stdout


LONG = "a" * 300  # as Linux answers for a folder that is closed to a user, which root never meets


@pytest.mark.parametrize(
    "words",
    [
        ("report", "--run", LONG),
        ("watch", "--run", LONG),
        ("budget", "2W", "--run", LONG),
        ("store", "ls", "--store", LONG),
        ("devices", "-d", f"jetson:{LONG}"),
        ("run", f"{LONG}.py:f", "-d", "virtual:nano", "--budget", "3W"),
    ],
)
def test_a_path_that_cannot_be_looked_at_is_an_error_with_a_remedy(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(*words) in (1, 2)
    assert "→" in capsys.readouterr().err
