from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_cli_devices import run

JOB = """
import torch
from underwatt import Job

def tiny():
    data = torch.randn(64, 3, 16, 16), torch.randint(4, (64,))
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 32, 3), torch.nn.Flatten(), torch.nn.Linear(32 * 14 * 14, 4))
    return Job(model, data, target=0.9, batch_sizes=(4, 8, 16, 32))
"""


@pytest.fixture
def profiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """A profile on a virtual Nano, and the id of its workload."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("UNDERWATT_STORE", raising=False)
    (tmp_path / "job.py").write_text(JOB)
    assert run("profile", "job.py:tiny", "-d", "virtual:nano", "-n", "12") == 0
    capsys.readouterr()
    assert run("store", "ls", "--json") == 0
    return str(json.loads(capsys.readouterr().out)["profiles"][0]["workload"]["id"])


def converge_to(workload_id: str, samples: dict[int, int], tmp_path: Path) -> None:
    header = "workload_name,workload_id,workload,batch_size,target,samples,seed,learning_rate\n"
    identity = json.dumps({"name": "tiny", "id": workload_id, "software": {}}).replace('"', '""')
    rows = "".join(f'tiny,{workload_id},"{identity}",{b},0.9,{n},0,\n' for b, n in samples.items())
    (tmp_path / "runs.csv").write_text(header + rows)
    assert run("store", "import", "runs.csv") == 0


def test_convergence_moves_the_choice_of_batch_size(
    profiled: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("plan", "--budget", "4W", "--json") == 0
    shown = capsys.readouterr()
    throughput = json.loads(shown.out)
    assert throughput["per"] == "sample"
    assert "same number of samples" in " ".join(shown.err.split())
    assert throughput["plan"]["chosen"]["setting"]["batch_size"] == 32
    converge_to(profiled, {4: 1000, 8: 1100, 16: 20_000, 32: 50_000}, tmp_path)
    capsys.readouterr()
    assert run("plan", "--budget", "4W", "--json", "--out", "plan.json") == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["per"] == "target"
    assert planned["plan"]["chosen"]["setting"]["batch_size"] in (4, 8)
    assert planned["plan"]["chosen"]["power_w"]["expected"] <= 4
    assert {other["name"] for other in planned["others"]} >= {"largest batch, clock", "highest clocks"}
    assert run("plan", "--energy", "50Wh", "--deadline", "2h", "--least-energy") == 0
    assert run("plan", "--energy", "0.001J") == 1
    assert "smallest feasible energy" in capsys.readouterr().err
    assert run("plan", "--budget", "4W", "--target", "0.5") == 2
    kept = json.loads((tmp_path / "plan.json").read_text())
    assert kept["plan"] == planned["plan"]
    assert kept["device"]["simulated"] is True


def test_a_person_sees_the_choice_and_what_others_take(profiled: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", "--budget", "4W") == 0
    out = " ".join(capsys.readouterr().out.split())
    for text in ("budget 4 W", "soonest", "vendor's", "largest batch", "thriftier neighbour", "predicted"):
        assert text in out
    assert run("plan", "--energy", "50Wh") == 2
    assert "underwatt converge" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--budget", "0.5W"], 1, "smallest feasible power"),
        (["--budget", "-4W"], 2, "above zero"),
        (["--budget", "4 bananas"], 2, "unit"),
        ([], 2, "No budget"),
        (["--deadline", "20W"], 2, "wrong unit"),
        (["--energy", "2h"], 2, "wrong unit"),
        (["--budget", "4W", "--risk", "2"], 2, "risk"),
        (["--budget", "4W", "--convergence", "nothing"], 2, "no convergence runs"),
        (["--budget", "4W", "--profile", "9"], 1, "no profile 9"),
        (["--budget", "4W", "--out", "no/such/folder/plan.json"], 2, "cannot be written"),
    ],
)
def test_nonsense_is_one_sentence(
    profiled: str, arguments: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("plan", *arguments) == code
    err = " ".join(capsys.readouterr().err.split())
    assert says in err
    assert "Traceback" not in err


def test_nothing_measured_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("plan", "--budget", "4W") == 1
    assert "underwatt profile" in capsys.readouterr().err


def test_another_board_at_the_same_address_is_not_the_profiled_one(
    profiled: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("store", "export", "1", "out.csv") == 0
    text = (tmp_path / "out.csv").read_text().replace("virtual:nano", "virtual:orin-agx")
    (tmp_path / "moved.csv").write_text(text)
    assert run("store", "import", "moved.csv", "--store", "moved.db") == 0
    capsys.readouterr()
    assert run("plan", "--budget", "4W", "--store", "moved.db", "--json") == 0
    shown = capsys.readouterr()
    assert "is not here" in shown.err
    assert json.loads(shown.out)["plan"]["chosen"]["setting"]["mode"]["gpu_mhz"] <= 921.6


def test_trainings_that_never_got_there_do_not_break_planning(
    profiled: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    converge_to(profiled, {4: "", 8: ""}, tmp_path)  # type: ignore[dict-item]
    capsys.readouterr()
    assert run("plan", "--budget", "4W") == 0
    assert "No training reached the target 0.9" in " ".join(capsys.readouterr().err.split())
