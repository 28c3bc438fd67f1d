from __future__ import annotations

import sys

import pytest

from underwatt.errors import JobError
from underwatt.jobs.job import load_job

GOOD = """
import torch
from underwatt.jobs.job import Job
from helper import SIZE

def tiny():
    return Job(torch.nn.Linear(SIZE, 2), (torch.zeros(8, SIZE), torch.zeros(8, dtype=torch.long)), target=0.9)

def _hidden(): ...
def needs(argument): ...
def other(): return 3
def raises(): return {}["layers"]
def leaves(): raise SystemExit(2)
def no_target(): return Job(torch.nn.Linear(1, 1), [1])
def no_data(): return Job(torch.nn.Linear(1, 1), [], target=1)
def zero(): return Job(torch.nn.Linear(1, 1), [1], target=1, batch_sizes=(0,))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "helper.py").write_text("SIZE = 4")
    (tmp_path / "good_job_file.py").write_text(GOOD)
    yield tmp_path
    for name in ("helper", "good_job_file"):
        sys.modules.pop(name, None)


def refused(address: object) -> JobError:
    with pytest.raises(JobError) as caught:
        load_job(str(address))
    assert "\n" not in caught.value.message
    assert caught.value.message.endswith(".")
    assert caught.value.hint
    return caught.value


def test_a_file_with_its_neighbours(folder):
    job = load_job(f"{folder}/good_job_file.py:tiny")
    assert job.name == "tiny"
    assert len(job.data[0]) == 8


def test_a_module(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert load_job("good_job_file:tiny").name == "tiny"


@pytest.mark.parametrize("address", ["", ":", "file.py", "file.py:", ":tiny"])
def test_what_names_no_job(address):
    assert "does not name a job" in refused(address).message


def test_missing_file_and_module(folder):
    assert "no file" in refused(folder / "absent.py:tiny").message
    assert "no module 'absent_module.sub'" in refused("absent_module.sub:tiny").message


def test_missing_factory_names_those_that_are_there(folder):
    error = refused(folder / "good_job_file.py:tinny")
    assert "no factory 'tinny'" in error.message
    assert error.hint.startswith("It has: tiny, other, raises")
    assert "_hidden" not in error.hint
    assert "needs" not in error.hint
    assert "Job" not in error.hint


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import no_such_package", "No module named 'no_such_package' (bad_job.py, line 1)"),
        ("x = 1\n\ny = x / 0", "ZeroDivisionError: division by zero (bad_job.py, line 3)"),
        ("def f(:\n  pass", "(bad_job.py, line 1)"),
        ("import sys\nsys.exit(3)", "ends Python while it is imported"),
    ],
)
def test_a_file_that_does_not_import_shows_its_own_last_line(folder, source, said):
    (folder / "bad_job.py").write_text(source)
    assert said in refused(folder / "bad_job.py:tiny").message


def test_a_module_that_does_not_import(folder, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "bad_module.py").write_text("import no_such_package")
    assert "bad_module does not import: ModuleNotFoundError" in refused("bad_module:tiny").message


def test_factories_that_fail(folder):
    file = folder / "good_job_file.py"
    assert "returned int, not a Job" in refused(f"{file}:other").message
    assert "raises() in" in (message := refused(f"{file}:raises").message)
    assert "KeyError: 'layers' (good_job_file.py, line 12)" in message
    assert "SystemExit: 2" in refused(f"{file}:leaves").message
    assert "no target" in refused(f"{file}:no_target").message
    assert "data is empty" in refused(f"{file}:no_data").message
    assert "at least 1" in refused(f"{file}:zero").message
