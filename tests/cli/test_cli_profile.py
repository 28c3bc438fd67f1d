from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.text import Text
from test_cli_devices import run

import underwatt.api
from underwatt.cli.common import measured_line
from underwatt.records import (
    ConvergenceRun,
    DeviceInfo,
    Measurement,
    PowerMode,
    Setting,
    Status,
    WorkloadInfo,
)
from underwatt.store.store import Store

JOB = """
import torch
from underwatt import Job

def tiny():
    data = torch.randn(64, 3, 8, 8), torch.randint(4, (64,))
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 4))
    return Job(model, data, target=0.9, batch_sizes=(4, 8, 16))

def broken():
    raise ValueError("no such data")
"""


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("UNDERWATT_STORE", raising=False)
    (tmp_path / "job.py").write_text(JOB)


def test_a_profile_is_measured_kept_and_gone_on_with(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["profile", "job.py:tiny", "-d", "virtual:orin-agx", "-n", "5"]
    assert run(*command, "--json") == 0
    first = json.loads(capsys.readouterr().out)
    assert (first["measured_now"], len(first["measurements"])) == (5, 5)
    assert run(*command) == 0
    shown = capsys.readouterr()
    assert "0 settings measured now, 5 usable" in shown.out
    assert "(simulated)" in shown.err
    assert Path("underwatt.db").exists()


def test_modes_by_grid_number_and_file(capsys: pytest.CaptureFixture[str]) -> None:
    base = ["profile", "job.py:tiny", "-d", "virtual:nano", "-b", "4", "--json"]
    assert run(*base, "--modes", "grid") == 0
    assert len({m["setting"]["mode"]["gpu_mhz"] for m in json.loads(capsys.readouterr().out)["measurements"]}) == 12
    assert run(*base, "--modes", "3", "--store", "b.db") == 0
    assert json.loads(capsys.readouterr().out)["measured_now"] == 3
    Path("modes.csv").write_text("gpu_mhz\n76.8\n")
    assert run(*base, "--modes", "modes.csv", "--store", "c.db") == 0
    [only] = json.loads(capsys.readouterr().out)["measurements"]
    assert only["setting"]["mode"]["gpu_mhz"] == 76.8


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["nowhere.py:tiny"], 1, "nowhere.py"),
        (["job.py:missing"], 1, "tiny"),
        (["job.py:broken"], 1, "no such data"),
        (["job.py:tiny", "-b", "0"], 2, "at least 1"),
        (["job.py:tiny", "-b", "four"], 2, "at least 1"),
        (["job.py:tiny", "--modes", "fast"], 2, "neither 'grid'"),
        (["job.py:tiny", "--precision", "0"], 2, "precision"),
        (["--", "python", "train.py"], 2, "cannot run on"),
        (["job.py"], 2, "Name it: job.py:factory"),
        (["job.py:tiny", "--store", "job.py"], 1, "not an Underwatt store"),
    ],
)
def test_bad_input_is_one_sentence_and_nothing_is_lost(
    arguments: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("profile", "-d", "virtual:nano", *arguments) == code
    err = " ".join(capsys.readouterr().err.split())
    assert says in err
    assert "Traceback" not in err
    assert Path("job.py").read_text() == JOB


def test_a_note_in_square_brackets_is_shown_and_breaks_nothing() -> None:
    note = "died [/opt/pytorch/c10/cuda/CUDAException.cpp:42] in [red]"
    failed = Measurement(Setting(PowerMode(gpu_mhz=1), 4), status=Status.FAILED, note=note)
    assert note in Text.from_markup(measured_line(failed)).plain


def test_an_interrupt_keeps_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = underwatt.api.run_profile

    def interrupted(*arguments: object, watch: object, **more: object) -> object:
        def watch_once(found: object, done: int, total: int) -> None:
            raise KeyboardInterrupt

        return whole(*arguments, watch=watch_once, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(underwatt.api, "run_profile", interrupted)
    command = ["profile", "job.py:tiny", "-d", "virtual:nano", "-n", "4"]
    assert run(*command) == 130
    assert "Run the same command again" in capsys.readouterr().err
    monkeypatch.setattr(underwatt.api, "run_profile", whole)
    assert run(*command, "--json") == 0
    assert json.loads(capsys.readouterr().out)["measured_now"] == 3


def test_the_store_lists_shows_exports_and_imports(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("profile", "job.py:tiny", "-d", "virtual:nano", "-n", "3") == 0
    assert run("store", "export", "1", "out.csv") == 0
    assert run("store", "import", "out.csv", "--store", "other.db") == 0
    capsys.readouterr()
    assert run("store", "show", "1", "--json") == 0
    here = json.loads(capsys.readouterr().out)
    assert run("store", "show", "1", "--store", "other.db", "--json") == 0
    assert json.loads(capsys.readouterr().out) == here
    assert run("store", "ls") == 0
    assert "tiny" in capsys.readouterr().out
    assert run("store", "show", "1") == 0
    assert "GPU" in capsys.readouterr().out
    assert run("store", "export", "1") == 0
    assert capsys.readouterr().out.startswith("device_name,")


def test_importing_twice_adds_nothing_and_an_export_is_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("profile", "job.py:tiny", "-d", "virtual:nano", "-n", "3") == 0
    assert run("store", "export", "1", "out.csv") == 0
    assert run("store", "import", "out.csv") == 0
    assert "0 of them new" in " ".join(capsys.readouterr().out.split())
    assert run("store", "ls", "--json") == 0
    [entry] = json.loads(capsys.readouterr().out)["profiles"]
    assert entry["measured"] == 3
    assert run("devices", "-d", "replay:out.csv") == 0
    assert "replay" in capsys.readouterr().out


def test_convergence_travels_as_one_file(capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.csv").write_text(
        "dataset,network,batch_size,optimizer,learning_rate,run,target_metric,target_epoch\nc,s,8,adam,1e-1,1,0.5,7\n"
    )
    assert run("store", "import", "train.csv") == 0
    assert run("store", "ls", "--json") == 0
    out = capsys.readouterr().out
    [entry] = json.loads(out[out.index("{") :])["convergence"]
    assert run("store", "export", entry["workload"]["id"], "runs.csv") == 0
    assert run("store", "import", "runs.csv", "--store", "b.db") == 0
    assert "1 runs" in capsys.readouterr().out
    assert run("store", "export", "nothing") == 2


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["ls"], 1, "no store at"),
        (["show", "7"], 1, "no store at"),
        (["import", "missing.csv"], 2, "cannot be read"),
        (["import", "job.py"], 2, "no table that Underwatt knows"),
    ],
)
def test_bad_store_input(arguments: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("store", *arguments) == code
    assert says in " ".join(capsys.readouterr().err.split())


def test_predict_shows_the_front_with_intervals_and_validates(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("profile", "job.py:tiny", "-d", "virtual:nano", "-n", "10") == 0
    capsys.readouterr()
    assert run("predict", "--json") == 0
    rows = json.loads(capsys.readouterr().out)["predictions"]
    assert len(rows) >= 5
    assert all(row["power_w_low90"] < row["power_w"] < row["power_w_high90"] for row in rows)
    assert [row["power_w"] for row in rows] == sorted(row["power_w"] for row in rows)
    assert [row["samples_per_s"] for row in rows] == sorted(row["samples_per_s"] for row in rows)
    assert run("predict", "--modes", "grid", "-b", "8") == 0
    assert "12 settings predicted" in capsys.readouterr().out
    assert run("predict", "--validate") == 0
    assert "on average" in " ".join(capsys.readouterr().out.split())


def test_predict_with_references_and_without_the_device(capsys: pytest.CaptureFixture[str]) -> None:
    table = "cores,cpu_mhz,gpu_mhz,mem_mhz,time_ms,power_w\n" + "".join(
        f"{c},{f},{g},2000,{1e5 / g + 1e4 / f},{5 + g / 100}\n" for c in (2, 4) for f in (500, 900) for g in (300, 600)
    )
    Path("table.csv").write_text(table)
    assert run("store", "import", "table.csv") == 0
    Path("table.csv").rename("reference.csv")
    capsys.readouterr()
    assert run("predict", "-r", "reference.csv", "--json") == 0
    shown = capsys.readouterr()
    assert "is not here" in shown.err
    assert json.loads(shown.out)["predictions"]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [([], 1, "no store at"), (["7"], 1, "no store at"), (["--validate"], 1, "no store at")],
)
def test_predict_without_measurements(
    arguments: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("predict", *arguments) == code
    assert says in " ".join(capsys.readouterr().err.split())


def test_predict_from_too_little_says_how_much_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("profile", "job.py:tiny", "-d", "virtual:nano", "-n", "2") == 0
    assert run("predict") == 1
    assert "Measure" in capsys.readouterr().err
    assert run("predict", "9") == 1
    assert run("predict", "-r", "job.py") == 2


def test_names_with_brackets_in_them_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    device, workload = DeviceInfo("jetson", "[/nope]Nano", "n", "jetson:/"), WorkloadInfo("[red]net[/]", "[/id]")
    with Store("store.db") as store:
        number = store.profile_id(device, workload)
        store.add(number, [Measurement(Setting(PowerMode(), 8), step_s=0.1, power_w=2.0)])
        store.add_convergence(workload, [ConvergenceRun(8, 0.9, 100.0)])
    for command in (["ls"], ["show", "1"]):
        assert run("store", *command, "--store", "store.db") == 0
        assert "[red]net[/]" in capsys.readouterr().out
