from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_cli_devices import run

JOB = """
import torch
from underwatt import Job

def blobs():
    generator = torch.Generator().manual_seed(0)
    classes = torch.arange(400) % 4
    points = torch.nn.functional.one_hot(classes, 4) * 3.0 + torch.randn(400, 4, generator=generator)
    data = points, classes
    sizes = dict(lr=0.02, lr_batch_size=16, batch_sizes=(4, 8, 16))
    return Job(torch.nn.Linear(4, 4), data, target=0.9, proxy_data=data, **sizes)

def talkative():
    print("a job may print when it is made")
    job = blobs()
    def model():
        print("... and for each model")
        return torch.nn.Linear(4, 4)
    return Job(model, job.data, target=0.9, proxy_data=job.data, lr=0.02, lr_batch_size=16, batch_sizes=(4, 8, 16))

def slow():
    job = blobs()
    return Job(torch.nn.Linear(4, 4), job.data, target=0.9, proxy_data=job.data, lr=2e-2, batch_sizes=(8,))

def hopeless():
    return Job(torch.nn.Linear(4, 4), (torch.randn(64, 4), torch.arange(64) % 4), target=1.0, lr=1e-9, batch_sizes=(8,))
"""


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("UNDERWATT_STORE", raising=False)
    (tmp_path / "job.py").write_text(JOB)


def test_trainings_are_kept_gone_on_with_and_become_a_curve(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["converge", "job.py:blobs", "--points", "2", "--seeds", "2", "--workers", "1"]
    assert run(*command, "--json") == 0
    first = json.loads(capsys.readouterr().out)
    assert [row["batch_size"] for row in first["curve"]] == [4, 8, 16]
    assert [row["trained"] for row in first["curve"]] == [2, 0, 2]
    assert all(row["samples_low90"] < row["samples"] < row["samples_high90"] for row in first["curve"])
    assert len(first["runs"]) == 4
    assert run(*command, "--json") == 0
    assert len(json.loads(capsys.readouterr().out)["runs"]) == 4, "nothing is trained twice"
    assert run(*command) == 0
    assert "samples to target" in capsys.readouterr().out
    assert run("store", "ls") == 0
    assert "4 runs" in capsys.readouterr().out


def test_batch_sizes_that_the_data_cannot_fill_are_left_out_and_each_training_is_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["converge", "job.py:blobs", "-b", "8,16,512", "--seeds", "2", "--workers", "1", "--json"]
    assert run(*command) == 0
    shown = capsys.readouterr()
    err = " ".join(shown.err.split())
    assert "The data set has 320 samples: batch size 512 is left out." in err
    assert {one["batch_size"] for one in json.loads(shown.out)["runs"]} == {8, 16}
    assert all(f"batch size {size}, seed {seed}:" in err for size in (8, 16) for seed in (0, 1))


def test_a_target_that_is_never_reached_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("converge", "job.py:hopeless", "--seeds", "1", "--passes", "2", "--workers", "1") == 2
    err = capsys.readouterr().err
    assert "No run reached the target" in err
    assert "no proxy data" in err


def test_what_a_job_prints_is_not_part_of_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["converge", "job.py:talkative", "--points", "1", "--seeds", "1", "--workers", "1", "--noise-scale"]
    assert run(*command, "--json") == 0
    shown = capsys.readouterr()
    answer = json.loads(shown.out)
    assert "a job may print" in shown.err
    assert "for each model" in shown.err
    scale = answer["noise_scale"]
    assert scale["batch_size"] == 8
    assert scale["samples_low90"] < scale["samples"] < scale["samples_high90"]
    assert run(*command) == 0
    assert "A second opinion" in " ".join(capsys.readouterr().out.split())


SLOW = ["converge", "job.py:slow", "--seeds", "2", "--workers", "1", "--json"]


def test_where_the_first_run_does_not_get_there_all_are_made_for_what_it_reached(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(*SLOW, "--passes", "1") == 0
    shown = capsys.readouterr()
    assert "does not reach 0.9" in " ".join(shown.err.split())
    nearer = json.loads(shown.out)
    assert nearer["target"] < 0.9
    assert all(row["samples"] for row in nearer["curve"])
    assert run(*SLOW, "--passes", "1") == 0
    again = capsys.readouterr()
    assert "batch size 8" not in again.err, "with no more passes nothing is trained again"
    assert json.loads(again.out)["target"] == nearer["target"]
    assert run(*SLOW, "--passes", "30") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["target"] == 0.9
    reached = [one for one in found["runs"] if one["target"] == 0.9]
    assert len(reached) == 2, "runs that were given up no longer count"
    assert all(one["samples"] for one in reached)


def test_a_target_may_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*SLOW, "--passes", "30", "--target", "0.5") == 0
    found = json.loads(capsys.readouterr().out)
    assert {one["target"] for one in found["runs"]} == {found["target"]} == {0.5}
    assert run(*SLOW, "--passes", "1", "--target", "0.95") == 2
    assert "let runs take more samples" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(("job", "code"), [("job.py:missing", 1), ("nowhere.py:x", 1)])
def test_a_wrong_job_is_one_sentence(job: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("converge", job) == code
    assert "Traceback" not in capsys.readouterr().err
