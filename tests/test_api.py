"""The README's story told in Python alone, as a notebook would; and what the library says on the way."""

from __future__ import annotations

import json
import logging
import os
import re
import threading
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import underwatt
from underwatt import Budget, Job, Plan, Profile, RunOptions, RunResult, Schedule, Store
from underwatt.api import ProfileProgress
from underwatt.drivers.virtual.board_specs import BOARDS
from underwatt.drivers.virtual.simulated_board import VirtualBoard
from underwatt.drivers.virtual.sysfs import SysfsBoard
from underwatt.errors import InputError
from underwatt.events import Event, Measured, Noted, Scored, Started
from underwatt.records import to_json
from underwatt.runlog.inbox import Inbox, register_run

NANO = "virtual:nano"


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("UNDERWATT_STORE", raising=False)


@pytest.fixture
def job() -> Job:
    chance = torch.Generator().manual_seed(0)
    classes = torch.arange(400) % 4
    points = torch.nn.functional.one_hot(classes, 4) * 3.0 + torch.randn(400, 4, generator=chance)
    more = {"lr": 0.02, "lr_batch_size": 16, "batch_sizes": (4, 8, 16), "name": "blobs"}
    return Job(torch.nn.Linear(4, 4), (points, classes), target=0.9, proxy_data=(points, classes), **more)


def test_the_whole_story_in_python(job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[object] = []
    profile = underwatt.profile(job, device=NANO, settings=6, listener=seen.append)
    assert isinstance(profile, Profile)
    assert len(profile.usable()) == len(profile.now.measured) == 6
    states = [event for event in seen if isinstance(event, ProfileProgress)]
    assert [(state.done, state.to_measure) for state in states] == [(done, 6) for done in range(7)]
    assert not underwatt.profile(job, device=NANO, settings=6).now.measured, "it goes on where it stopped"

    found = underwatt.converge(job, points=2, seeds=1)
    assert [run.batch_size for run in found.runs] == [4, 16]
    assert all(row["samples"] > 0 for row in found.table())
    assert found.curve.target == 0.9

    best = underwatt.forecast(listener=seen.append).settings
    assert [one.power_w.expected for one in best] == sorted(one.power_w.expected for one in best)
    assert all(one.step_s.low < one.step_s.expected < one.step_s.high for one in best)
    _, worth = underwatt.check_forecast()
    assert worth.verdict

    planned = underwatt.plan("4W")
    assert isinstance(planned, Plan)
    assert planned.setting.batch_size in job.batch_sizes
    assert not planned.per_sample
    assert planned.chosen.power_w.expected <= 4
    assert len(planned.others) > 3
    searched = underwatt.plan(Budget(power_w=4.0), job=job, device=NANO, listener=seen.append)
    assert searched.chosen.measured

    ended = underwatt.run(job, budget="4W", device=NANO, limit_samples=4000, listener=seen.append)
    assert isinstance(ended, RunResult)
    assert ended.outcome == "reached"
    assert ended.score is not None
    assert ended.score >= 0.9
    assert ended.folder is not None
    assert ended.verdict.over_s <= 0.05 * ended.elapsed_s
    assert any(isinstance(event, Started) for event in seen)
    record = underwatt.read_run()
    assert len(record.of(Scored)) == len(underwatt.read_run(ended.folder).of(Scored)) >= 1

    pytest.importorskip("plotly", reason="the package plotly is not installed")
    page = underwatt.report(tmp_path / "page.html", listener=seen.append)
    assert "<html" in page.read_text(encoding="utf-8")[:200]
    assert underwatt.report_figures(budget="3W").title.target == 0.9
    assert capsys.readouterr().out == "", "a library does not print"


def test_a_job_that_changes_the_folder_loses_nothing(job: Job, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()

    def forward(net: Any, batch: Any) -> Any:
        os.chdir(tmp_path / "elsewhere")
        return net(batch[0]), batch[1]

    ended = underwatt.run(replace(job, forward=forward), budget="4W", device=NANO, limit_samples=800, folder="here")
    assert ended.folder == tmp_path / "here"
    assert ended.model == tmp_path / "here" / "model.pt"
    assert ended.record().end is not None
    assert not any((tmp_path / "elsewhere").iterdir())


def test_a_folder_that_no_disk_takes_is_an_error(job: Job) -> None:
    with pytest.raises(InputError, match="cannot be used"):
        underwatt.run(job, budget="4W", device=NANO, folder="a" * 300)


def test_a_run_takes_its_options_whole_and_goes_on(job: Job) -> None:
    endless = replace(job, target=1.01)
    options = RunOptions(budget=Schedule.constant(5.0), device=NANO, folder="here", limit_samples=800)
    first = underwatt.run(endless, options)
    assert (first.outcome, first.samples, first.folder) == ("limit", 800, Path("here"))
    second = underwatt.run(endless, options, resume=True, limit_samples=1600, set_modes=False)
    assert (second.outcome, second.samples) == ("limit", 1600)
    assert second.energy_j > first.energy_j
    with pytest.raises(InputError, match="There is a run in here already"):
        underwatt.run(endless, options)
    with pytest.raises(InputError, match="--lr would do nothing"):
        underwatt.run(endless, options, lr=0.1)
    with pytest.raises(TypeError, match="buget"):
        underwatt.run(job, buget="3W")


def test_a_store_can_be_shared_and_what_is_known_carried(job: Job, tmp_path: Path) -> None:
    with Store(tmp_path / "mine.db") as store:
        profile = underwatt.profile(job, device=underwatt.open_device(NANO), batch_sizes=(8,), modes="3", store=store)
        assert [summary.usable for summary in store.summaries()] == [3]
        # All batch sizes of the job are offered, unless those are named that were measured.
        known = underwatt.plan("5W", store=store, references=["builtin:orin-agx"], batch_sizes=(8,))
        assert known.setting.batch_size == 8
        with (tmp_path / "out.csv").open("w", newline="") as file:
            assert "3 measurements" in underwatt.export(str(profile.number), file, store=store)
    found = underwatt.import_file(tmp_path / "out.csv", store=tmp_path / "other.db")
    assert [(number, new) for _, number, new in found.profiles] == [(1, 3)]
    assert Store().path == Path("underwatt.db"), "the usual one"
    kept = underwatt.plan("5W", store=tmp_path / "other.db")
    kept.save(tmp_path / "plan.json")
    assert len(underwatt.import_file(tmp_path / "plan.json", store=tmp_path / "third.db").plans) == 1


def test_devices_are_listed_set_and_restored(tmp_path: Path) -> None:
    opened, failed = underwatt.devices([NANO, "virtual:none"])
    assert [device.info.address for device in opened] == [NANO]
    assert list(failed) == ["virtual:none"]
    assert len(underwatt.devices(simulated=True)[0]) >= 3
    root = tmp_path / "board"
    SysfsBoard.create(VirtualBoard(BOARDS["nano"]), root)
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    device = underwatt.open_device(f"jetson:{root}")
    underwatt.set_mode(device, device.space.lowest)
    assert {path: path.read_bytes() for path in before} != before
    [(_, error)] = underwatt.restore()
    assert error is None
    assert {path: path.read_bytes() for path in before} == before


def test_the_budget_of_a_run_under_way_is_changed_and_a_run_watched(job: Job, tmp_path: Path) -> None:
    ended = underwatt.run(job, budget="3W", device=NANO, limit_samples=80)
    assert ended.folder is not None
    with pytest.raises(InputError, match="has ended"):
        underwatt.change_budget("7W", ended.folder)
    with pytest.raises(InputError, match="No run is under way"):
        underwatt.change_budget("7W")
    folder = tmp_path / "under-way"
    folder.mkdir()
    with register_run(folder, "blobs", "nano"):
        inbox = Inbox(folder)
        assert underwatt.change_budget("7W peak") == folder
        assert inbox.take() == "7W peak"
    pytest.importorskip("uvicorn", reason="the package uvicorn is not installed")
    server = underwatt.watch(ended.folder)
    threading.Timer(0.2, server.stop).start()
    server.run()
    assert server.url.startswith("http://127.0.0.1:")


def test_without_a_listener_notes_go_to_the_logger(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    underwatt.profile(job, device=NANO, settings=4)
    with caplog.at_level(logging.WARNING, "underwatt"):
        underwatt.plan("5W")
    assert "Batch sizes are weighed by what 7 other trainings needed" in caplog.text


def test_events_of_a_run_are_records(job: Job) -> None:
    seen: list[Event] = []
    options = RunOptions(budget="3W", device=NANO, target=1.01, limit_samples=8000)
    underwatt.run(job, options, listener=seen.append)  # type: ignore[arg-type]
    assert isinstance(seen[0], Noted)
    assert {type(event) for event in seen} >= {Noted, Started, Measured}


def test_a_wrong_question_is_one_sentence(job: Job) -> None:
    with pytest.raises(InputError, match="only to be measured"):
        underwatt.plan("4W", device=NANO)
    with pytest.raises(InputError, match="a job is measured"):
        underwatt.plan("4W", job=job, profile=1, device=NANO)
    with pytest.raises(InputError, match="at least 1"):
        underwatt.profile(job, device=NANO, batch_sizes=(0, 8))
    with pytest.raises(InputError, match=r"no goal 'x'\. The goals are soonest, least energy\."):
        underwatt.plan("4W", goal="x")
    with pytest.raises(InputError, match="no run in runs/"):
        underwatt.read_run()


def test_a_checkout_that_was_never_installed_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    assert re.match(r"\d+\.\d+", underwatt.__version__)
    monkeypatch.setattr(metadata, "version", missing)
    assert underwatt.__version__ == "0+unknown"


def test_a_budget_in_numbers_or_as_a_record_is_taken_whole(job: Job) -> None:
    underwatt.profile(job, device=NANO, settings=6)
    assert underwatt.plan(4).setting == underwatt.plan(np.float64(4.0)).setting == underwatt.plan("4W").setting
    with pytest.raises(InputError, match="gives the energy twice"):
        underwatt.plan(Budget(power_w=4.0, energy_j=100.0), energy="50Wh")
    with pytest.raises(InputError, match="whole numbers"):
        underwatt.plan("4W", batch_sizes=[8.5])  # type: ignore[list-item]


def test_a_result_is_plain_json(job: Job) -> None:
    ended = underwatt.run(job, budget=np.float64(9.5), device=NANO, limit_samples=64, folder="here")
    assert json.loads(json.dumps(to_json(ended)))["folder"] == "here"
    assert ended.record().start.budget == "9.5W"
