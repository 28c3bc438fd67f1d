from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed; `make test-fleet` runs this in an environment of its own")
pytest.importorskip("sklearn", reason="the digits come with scikit-learn")

from underwatt.cli import main
from underwatt.fleet.simulation import Task

FLEET = """
target = 0.6
limit_s = 25
skew = 0.5
[network]
latency_s = 0.3
[[boards]]
kind = "nano"
budget = "3W"
[[boards]]
kind = "tx2"
budget = "8W"
lost_s = 15
"""


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    task = Task.digits(400, 200, filters=(48, 96))
    monkeypatch.setattr(Task, "digits", lambda: task)


def test_a_fleet_is_simulated_and_shown(
    tmp_path: Path, small: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fleet.toml").write_text(FLEET, encoding="utf-8")
    with pytest.raises(SystemExit) as ended:
        main(["fleet", "simulate", "fleet.toml", "--page", "page.html", "--json"])
    assert not ended.value.code
    found = json.loads(capsys.readouterr().out)
    assert found["simulated"] is True
    assert [board["kind"] for board in found["boards"]] == ["nano", "tx2"]
    assert all(board["energy_j"] > 0 for board in found["boards"])
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "simulated boards" in page
    assert "http" not in re.sub(r"http-equiv", "", page)
    assert page.count("<svg") == 4
    rounds = len(found["scores"]) - 1
    assert page.count("<title>round") >= rounds  # each reply is a bar
    assert "stroke-dasharray" in page  # the budgets
    assert "1 nano" in page
    assert "mJ a sample" in page


def test_a_file_that_makes_no_sense_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(FLEET.replace("latency_s", "delay_s"), encoding="utf-8")
    with pytest.raises(SystemExit) as ended:
        main(["fleet", "simulate", str(file)])
    assert ended.value.code == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "delay_s" in said
    assert "docs/fleet.md" in said
