from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
from test_cli_devices import run

from underwatt.cli.demo import RESNET18
from underwatt.workload.cost import count_cost
from underwatt.workload.load import load_job

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_the_demo_tells_its_story_and_what_is_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("demo", "--folder", str(tmp_path / "demo")) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert out.count("put back as it was: yes") == 2
    assert "simulated" in out
    assert "108,576 settings" in out
    assert (tmp_path / "demo" / "demo.db").exists()


def test_the_cost_in_the_demo_is_the_counted_one() -> None:
    counted = asdict(count_cost(load_job(f"{EXAMPLES / 'jobs.py'}:resnet18")))
    assert asdict(RESNET18) == pytest.approx(counted, rel=0.01)
