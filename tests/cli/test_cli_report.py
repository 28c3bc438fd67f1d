from __future__ import annotations

import json
from pathlib import Path

import pytest
import report_world as world
from test_cli_devices import run

from underwatt.store.store import Store

pytest.importorskip("plotly", reason="the package plotly is not installed")


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a store that holds a profile and its trainings."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("UNDERWATT_STORE", raising=False)
    fill(tmp_path / "underwatt.db", "resnet18")
    return tmp_path


def fill(path: Path, name: str) -> None:
    profile = world.profile(10, name=name)
    with Store(path) as store:
        store.add(store.profile_id(profile.device, profile.workload), profile.measurements)
        store.add_convergence(profile.workload, world.trainings())


def test_a_page_is_written_and_its_size_said(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("report", "--out", "page.html", "--budget", "6W") == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("page.html (")
    assert "underwatt run JOB" in " ".join(shown.err.split())  # what would fill the part that is left out
    page = (stored / "page.html").read_text(encoding="utf-8")
    assert "Train at batch" in page
    assert len(page) < 8e6


def test_the_newest_run_gives_the_budget_and_its_trace(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world.write_run(stored / "runs" / "old" / "log.jsonl", seconds=60, excess_at_s=None)
    world.write_run(stored / "runs" / "new" / "log.jsonl", seconds=120)
    assert run("report", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["front"]["budget_w"] == 6
    assert shown["trace"]["readings"] == 1200
    assert len(shown["measurements"]["rows"]) == 12  # ten and a failed one in the store, one in the run
    assert shown["missing"] == []
    assert not (stored / "report.html").exists()
    assert run("report", "--json", "--run", "runs/old", "--budget", "4W") == 0
    other = json.loads(capsys.readouterr().out)
    assert other["trace"]["readings"] == 600
    assert other["front"]["budget_w"] == 4


def test_a_run_alone_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("UNDERWATT_STORE", raising=False)
    world.write_run(tmp_path / "runs" / "job" / "log.jsonl", seconds=120)
    assert run("report") == 0
    assert (tmp_path / "report.html").stat().st_size > 1e6
    assert "underwatt profile JOB" in " ".join(capsys.readouterr().err.split())


def test_a_run_of_another_job_is_not_mixed_in(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = stored / "runs" / "job" / "log.jsonl"
    world.write_run(log, seconds=120)
    log.write_text(log.read_text().replace('"made-up"', '"another"'))
    assert run("report", "--json", "--profile", "1", "--budget", "6W") == 0
    assert json.loads(capsys.readouterr().out)["trace"] is None
    assert run("report", "--profile", "1", "--run", "runs/job") == 2
    assert "not profile 1" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--budget", "6 bananas"], 2, "unit"),
        (["--run", "no/such/run"], 2, "cannot be read"),
        (["--profile", "9"], 1, "no profile 9"),
        (["--store", "none.db"], 1, "no store"),
        (["--out", "no/such/folder/page.html"], 2, "cannot be written"),
    ],
)
def test_nonsense_is_one_sentence(
    stored: Path, arguments: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("report", *arguments) == code
    err = " ".join(capsys.readouterr().err.split())
    assert says in err
    assert "Traceback" not in err
