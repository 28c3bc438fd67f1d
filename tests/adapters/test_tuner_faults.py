"""The in-loop form on virtual boards when things break: what it promises then."""

from __future__ import annotations

import gc
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from run_world import HUGE, NET, Hurt, Numbers, found_mode, log_of, notes, train, tuned, virtual

from underwatt.adapters.tuner import tune
from underwatt.control.controller import Controller
from underwatt.control.state import ControlOptions
from underwatt.device.session import restore
from underwatt.drivers.jetson.device import JetsonDevice
from underwatt.drivers.virtual.board_specs import BOARDS
from underwatt.drivers.virtual.simulated_board import VirtualBoard
from underwatt.drivers.virtual.sysfs import SysfsBoard
from underwatt.errors import ApplyError, BudgetError, InputError, OutOfMemoryError, SensorError
from underwatt.events import BudgetChanged, Measured
from underwatt.jobs.rates import RateFollower
from underwatt.measure.meter import Meter
from underwatt.runlog.inbox import post_budget, running_runs
from underwatt.store.schema import connect
from underwatt.store.store import Store

CHILD = Path(__file__).parents[1] / "helpers" / "tuner_child.py"


@pytest.mark.parametrize("error", [RuntimeError("the job is broken"), KeyboardInterrupt(), SystemExit(3)])
def test_a_loop_that_raises_leaves_nothing_behind(tmp_path: Path, error: BaseException) -> None:
    device = virtual()
    before = found_mode(device)
    with pytest.raises(type(error)), tuned(device, folder=tmp_path) as tuner:  # noqa: PT012
        train(tuner, 10)
        assert found_mode(device) != before
        raise error
    assert found_mode(device) == before
    end = log_of(tmp_path).end
    assert end.restored
    if isinstance(error, RuntimeError):
        assert (end.outcome, end.error) == ("failed", "the job is broken")
    else:
        assert end.outcome == "interrupted"
    assert running_runs() == ()


def test_a_budget_that_cannot_be_held_leaves_nothing_behind(tmp_path: Path) -> None:
    device = Hurt(virtual(), knobs=False)
    tuner = tuned(device, folder=tmp_path, store=tmp_path / "store.db", name="numbers", budget_w=0.5)
    with pytest.raises(BudgetError, match="while it waits"), tuner:
        pass
    assert running_runs() == ()
    end = log_of(tmp_path).end
    assert end.outcome == "failed"
    assert "while it waits" in end.error


def test_a_sensor_lost_for_a_while_is_said_and_waited_for(tmp_path: Path) -> None:
    device = Hurt(virtual())
    with tuned(device, folder=tmp_path) as tuner:
        train(tuner, 30)
        assert tuner.state == "holding"
        safe = tuner.setting
        silent_s = device.clock.now_s()
        device.silent = lambda: device.clock.now_s() - silent_s < 5.0
        train(tuner, 4.5, each=lambda: None)
        assert tuner.setting == safe
        train(tuner, 20)
        assert tuner.state == "holding"
    assert len([text for text in notes(tmp_path) if "last safe setting" in text]) == 1
    assert "Power can be read again." in notes(tmp_path, "info")
    assert log_of(tmp_path).end.outcome == "finished"


def test_a_sensor_that_stays_lost_ends_the_run_and_the_device_is_put_back(tmp_path: Path) -> None:
    device = Hurt(virtual())
    before = found_mode(device)
    with pytest.raises(SensorError, match="could not be read for 10 s"), tuned(device, folder=tmp_path) as tuner:  # noqa: PT012
        train(tuner, 30)
        lost_s = device.clock.now_s()
        device.silent = lambda: True
        train(tuner, 100)
    assert 10 <= device.clock.now_s() - lost_s < 14
    assert found_mode(device) == before
    end = log_of(tmp_path).end
    assert (end.outcome, end.restored) == ("failed", True)
    assert "could not be read" in end.error


def test_a_clock_that_is_refused_is_not_asked_for_again(tmp_path: Path) -> None:
    device = Hurt(virtual())
    before = found_mode(device)
    device.refuses = lambda mode: (mode.gpu_mhz or 0) > 900 and mode != device.applied[0]
    with tuned(device, folder=tmp_path, budget_w=12.0, options=ControlOptions()) as tuner:
        train(tuner, 30)
        assert tuner.state == "holding"
        assert not device.refuses(tuner.setting.mode)
    refused = [mode for mode in device.applied if device.refuses(mode)]
    assert refused, "no refused clock was asked for: nothing was tested"
    assert len(refused) == len(set(refused))
    assert any("cannot be set" in text for text in notes(tmp_path))
    assert found_mode(device) == before


def test_clocks_that_are_all_refused_end_the_run_and_the_device_is_put_back(tmp_path: Path) -> None:
    device = Hurt(virtual())
    before = found_mode(device)
    with pytest.raises(ApplyError), tuned(device, folder=tmp_path) as tuner:  # noqa: PT012
        train(tuner, 2)
        device.refuses = lambda _: True
        train(tuner, 100)
    assert found_mode(device) == before
    assert log_of(tmp_path).end.outcome == "failed"


def test_a_first_clock_that_is_refused_is_no_end(tmp_path: Path) -> None:
    device = Hurt(virtual())
    device.refuses = lambda mode: len(device.applied) < 3 or mode in device.applied[:2]
    with tuned(device, folder=tmp_path) as tuner:
        train(tuner, 20)
        assert tuner.samples > 0
    assert len([text for text in notes(tmp_path) if "cannot be set" in text]) == 2


@pytest.mark.parametrize("seed", range(3))
def test_batches_that_do_not_fit_into_memory_lose_no_sample(tmp_path: Path, seed: int) -> None:
    device = virtual("nano", seed)
    with tuned(device, folder=tmp_path, cost=HUGE, budget_w=6.0, options=ControlOptions()) as tuner:
        seen: list[int] = []
        for batch in tuner.loader(Numbers(1000), shuffle=True):
            seen += batch.tolist()
            tuner.step()
        assert sorted(seen) == list(range(1000))
        assert tuner.batch_size < 32
    warned = [text for text in notes(tmp_path) if "does not fit" in text]
    assert warned, "no large batch was tried: nothing was tested"
    assert len(warned) == len(set(warned)) <= 2


def test_a_job_that_never_fits_ends_with_an_error() -> None:
    giant = replace(NET, activation_bytes_per_sample=1e12)
    with pytest.raises(OutOfMemoryError), tuned(virtual(), cost=giant) as tuner:
        train(tuner, 5)


def out_of_memory_above(size: int, batch: torch.Tensor) -> None:
    """What a real GPU does where a batch is too large."""
    if len(batch) > size:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loop_that_runs_out_of_memory_gets_the_batch_again_in_smaller_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, workers: int
) -> None:
    with tuned(virtual("nano"), folder=tmp_path, budget_w=6.0, options=ControlOptions()) as tuner:
        seen: list[int] = []
        for batch in tuner.loader(Numbers(3001), shuffle=True, num_workers=workers):
            with tuner.training():
                out_of_memory_above(16, batch)
                seen += batch.tolist()
                tuner.step()
        assert sorted(seen) == list(range(3001))
        assert tuner.samples == 3001
        assert tuner.batch_size <= 16
    warned = [text for text in notes(tmp_path) if "does not fit" in text]
    assert warned, "no large batch was tried: nothing was tested"
    assert len(warned) == len(set(warned)) <= 2
    assert warned[0] in caplog.messages, "it is said also where nobody reads the log"


def test_memory_that_runs_out_where_there_is_no_smaller_batch_is_an_error() -> None:
    with pytest.raises(OutOfMemoryError, match="64"), tuned(virtual(), batch_sizes=(64,)) as tuner:  # noqa: PT012
        for batch in tuner.loader(Numbers(300)):
            with tuner.training():
                out_of_memory_above(16, batch)


def test_a_model_that_may_be_half_changed_is_not_trained_on() -> None:
    class Half(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    optimizer = Half([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(OutOfMemoryError, match="half changed"), tuned(virtual()) as tuner:  # noqa: PT012
        for _ in tuner.loader(Numbers(300)):
            with tuner.training():
                optimizer.step()


def test_other_errors_of_a_loop_pass_as_they_are() -> None:
    with pytest.raises(RuntimeError, match="shapes differ"), tuned(virtual()) as tuner:  # noqa: PT012
        for _ in tuner.loader(Numbers(300)):
            with tuner.training():
                raise RuntimeError("shapes differ")
    with pytest.raises(InputError, match="was not called"), tuned(virtual()) as tuner:  # noqa: PT012
        for _ in tuner.loader(Numbers(300)):
            with tuner.training():
                pass


@pytest.mark.parametrize("drop_last", [False, True])
def test_batch_sizes_that_a_data_set_cannot_fill_are_left_out(tmp_path: Path, drop_last: bool) -> None:
    with tuned(virtual(), folder=tmp_path, budget_w=12.0, options=ControlOptions()) as tuner:
        sizes: set[int] = set()
        while tuner.elapsed_s < 20:
            for batch in tuner.loader(Numbers(20), drop_last=drop_last):
                sizes.add(len(batch))
                tuner.step()
        assert sizes <= ({8, 16} if drop_last else {4, 8, 16})
        energy_j = tuner.energy_j
        for batch in tuner.loader(Numbers(12_000)):
            sizes.add(len(batch))
            tuner.step()
        assert sizes & {32, 64}, "a larger data set is offered them again"
        assert tuner.energy_j > energy_j > 50
    assert "The data set has 20 samples: batch size 32, 64 is left out." in notes(tmp_path)
    log = log_of(tmp_path)
    measured = [event.measurement.setting.batch_size for event in log.of(Measured) if event.at_s < 20]
    assert {8, 16} >= set(measured) != set(), "it was never measured"
    assert log.energy_j() == pytest.approx(log.end.energy_j, rel=0.05)


@pytest.mark.parametrize("samples", [0, 5])
def test_a_data_set_that_fills_no_batch_is_an_error(samples: int) -> None:
    with tuned(virtual()) as tuner, pytest.raises(InputError, match=f"has {samples} samples"):
        iter(tuner.loader(Numbers(samples), drop_last=True))


def test_a_locked_store_does_not_hold_up_the_training(tmp_path: Path) -> None:
    store = tmp_path / "store.db"
    with tuned(virtual(), folder=tmp_path, store=store, name="numbers") as tuner:
        train(tuner, 1)
        other = sqlite3.connect(store)
        other.execute("BEGIN IMMEDIATE")
        begun_s = time.monotonic()
        train(tuner, 30)
        assert time.monotonic() - begun_s < 10, "the training waited for the store"
        other.rollback()
        other.close()
        train(tuner, 15)
    measured = len(log_of(tmp_path).of(Measured))
    assert measured >= 2
    with Store(store, create=False) as kept:
        assert kept.summaries()[0].measured == measured


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_ends_no_training_and_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "log.jsonl").symlink_to("/dev/full")
    device = virtual()
    before = found_mode(device)
    with tuned(device, folder=tmp_path) as tuner:
        train(tuner, 20)
        assert tuner.samples > 0
        assert [text for text in caplog.messages if "cannot be written" in text]
    assert found_mode(device) == before
    assert len([text for text in caplog.messages if "cannot be written" in text]) == 1


def test_a_log_that_could_not_be_written_for_a_while_tells_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with tuned(virtual(), folder=tmp_path) as tuner:
        train(tuner, 3)
        with monkeypatch.context() as patch:
            patch.setattr("underwatt.runlog.log.os.write", full)
            train(tuner, 5)
        train(tuner, 5)
    [said] = [text for text in notes(tmp_path) if "cannot be written" in text]
    assert "No space left" in said
    assert "The log can be written again." in notes(tmp_path, "info")


def test_a_full_store_ends_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun_s = time.monotonic()
    with tuned(virtual(), folder=tmp_path, store=tmp_path / "store.db", name="numbers") as tuner:
        saver = tuner._pilot._publisher._keeper
        assert saver is not None
        kept = saver._store
        with kept._connected() as connection:
            [pages] = connection.execute("PRAGMA page_count").fetchone()

        def limited(path: Path, **options: bool) -> sqlite3.Connection:
            connection = connect(path, **options)
            connection.execute(f"PRAGMA max_page_count = {pages}")
            return connection

        with monkeypatch.context() as patch:
            patch.setattr("underwatt.store.store.connect", limited)
            kept.close()
            train(tuner, 30)
        kept.close()
        train(tuner, 15)
    assert time.monotonic() - begun_s < 20
    with Store(tmp_path / "store.db", create=False) as store:
        assert store.summaries()[0].measured == len(log_of(tmp_path).of(Measured))


def test_a_message_that_makes_no_sense_ends_no_training(tmp_path: Path) -> None:
    with tuned(virtual(), folder=tmp_path) as tuner:
        train(tuner, 10)
        (tmp_path / "budget.json").write_text('{"id": 1, "budget": "a lot"}')
        train(tuner, 5)
        post_budget(tmp_path, "7W", "command")
        train(tuner, 5)
    assert [event.power_w for event in log_of(tmp_path).of(BudgetChanged)] == [9.0, 7.0]
    [said] = [text for text in notes(tmp_path) if "makes no sense" in text]
    assert "a lot" in said


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def test_after_kill_9_everything_can_be_put_back(tmp_path: Path) -> None:
    root, folder = tmp_path / "board", tmp_path / "run"
    SysfsBoard.create(VirtualBoard(BOARDS["orin-nano"]), root)
    before = files(root)
    with subprocess.Popen([sys.executable, str(CHILD), str(root), str(folder)], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"training\n"
        time.sleep(1.0)
        child.send_signal(signal.SIGKILL)
    assert files(root) != before, "killed before it changed anything"
    assert log_of(folder).end is None
    assert running_runs() == ()
    assert [error for _, error in restore()] == [None]
    assert files(root) == before


def test_sigterm_ends_a_run_properly(tmp_path: Path) -> None:
    root, folder = tmp_path / "board", tmp_path / "run"
    SysfsBoard.create(VirtualBoard(BOARDS["orin-nano"]), root)
    before = files(root)
    with subprocess.Popen([sys.executable, str(CHILD), str(root), str(folder)], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"training\n"
        child.terminate()
    assert child.returncode == 128 + signal.SIGTERM
    assert files(root) == before
    end = log_of(folder).end
    assert (end.outcome, end.restored) == ("interrupted", True)


def test_the_log_is_plain_json(tmp_path: Path) -> None:
    with tuned(virtual(), folder=tmp_path) as tuner:
        train(tuner, 5)
    for line in (tmp_path / "log.jsonl").read_text().splitlines():
        assert json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))["kind"]


def test_a_learning_rate_that_cannot_be_closed_does_not_stand_before_the_restore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: object) -> None:
        raise RuntimeError("the optimizer is gone")

    monkeypatch.setattr(RateFollower, "close", broken)
    device = virtual()
    before = found_mode(device)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(RuntimeError, match="is gone"), tuned(device, folder=tmp_path, optimizer=optimizer) as tuner:  # noqa: PT012
        train(tuner, 10)
        assert found_mode(device) != before
    assert found_mode(device) == before
    assert log_of(tmp_path).end.restored


def test_nothing_that_fails_at_the_end_stands_before_the_restore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("planted")

    device = virtual()
    before = found_mode(device)
    with pytest.raises(RuntimeError, match="planted"), tuned(device, folder=tmp_path) as tuner:  # noqa: PT012
        train(tuner, 10)
        monkeypatch.setattr(Controller, "restoring", broken)
        monkeypatch.setattr(Meter, "__exit__", broken)
    assert found_mode(device) == before


def test_a_forked_child_that_leaves_the_block_restores_nothing_and_writes_nothing(tmp_path: Path) -> None:
    SysfsBoard.create(VirtualBoard(BOARDS["orin-nano"]), tmp_path / "board")
    device = JetsonDevice(tmp_path / "board")
    log = tmp_path / "log.jsonl"
    kept = {"folder": tmp_path, "store": tmp_path / "store.db", "name": "net"}
    with tune(device=device, budget_w=15, batch_sizes=(8, 16), **kept) as tuner:
        for _ in range(20):
            tuner.starts(tuner.batch_size)
            time.sleep(0.01)
            tuner.step()
        during = dict(device.snapshot())
        child = os.fork()
        if child == 0:
            try:
                tuner.__exit__(None, None, None)
                gc.collect()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert dict(device.snapshot()) == during
        assert b'"end"' not in log.read_bytes()
        assert len(running_runs()) == 1
    assert len([line for line in log.read_bytes().splitlines() if json.loads(line)["kind"] == "end"]) == 1


@pytest.mark.parametrize("held", [True, False], ids=["held", "not held"])
def test_a_training_ends_with_a_word_on_its_budget(
    held: bool, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    device = Hurt(virtual())
    with tuned(device) as tuner:
        train(tuner, 30)
        if not held:
            until_s = device.clock.now_s() + 15.0  # more than any setting or pause makes up for
            device.surge_w = lambda: 12.0 if device.clock.now_s() < until_s else 0.0
        train(tuner, 30)
    assert tuner.verdict.held is held
    said = capsys.readouterr().err + "\n".join(caplog.messages)
    assert str(tuner.verdict) in said
