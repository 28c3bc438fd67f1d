"""What a newcomer reads first."""

from __future__ import annotations

import pytest
from test_cli_devices import run

from underwatt.cli import HOMES

STEPS = ("devices", "profile", "converge", "plan", "run", "report")


def test_help_shows_an_example_in_the_order_of_the_steps(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    shown = capsys.readouterr().out
    example = shown[shown.index("In order") :]
    places = [example.index(f"underwatt {step}") for step in STEPS]
    assert places == sorted(places)
    assert "10W peak" in example
    assert all(len(line) <= 80 for line in example.splitlines())


@pytest.mark.parametrize("command", ["", *HOMES, "store export"])
def test_no_flag_is_shown_to_take_a_value(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*command.split(), "--help") == 0
    shown = capsys.readouterr().out
    assert "<bool>" not in shown


def test_sentences_in_the_list_of_commands_are_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    listed = " ".join(capsys.readouterr().out.split("Commands:")[1].split())
    assert "interrupt and run again to go on where it stopped." in listed
