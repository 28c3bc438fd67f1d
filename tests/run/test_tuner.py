"""The in-loop form on virtual boards: what it promises when all goes well, and when things break."""

from __future__ import annotations

import json
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
from run_world import HUGE, NET, SIZES, Hurt, Numbers, train, tuned, virtual

from underwatt.device.session import restore_all
from underwatt.device.virtual.board import VirtualBoard
from underwatt.device.virtual.boards import BOARDS
from underwatt.device.virtual.sysfs_tree import SysfsBoard
from underwatt.errors import ApplyError, BudgetError, InputError, OutOfMemoryError, SensorError
from underwatt.profile.store import Store
from underwatt.run.inbox import post_budget, running_runs
from underwatt.run.log import read_log
from underwatt.run.options import ControlOptions

CHILD = Path(__file__).with_name("tuner_child.py")


def log_of(folder: Path) -> Any:
    return read_log(folder / "log.jsonl")


def notes(folder: Path, level: str = "warning") -> list[str]:
    return [event["text"] for event in log_of(folder).of("note") if event["level"] == level]


def found_mode(device: Any) -> dict[str, str]:
    return dict(device.snapshot())


# All goes well


def test_every_sample_of_a_pass_is_trained_once_while_settings_change(tmp_path: Path) -> None:
    device = virtual()
    before = found_mode(device)
    with tuned(device, folder=tmp_path, budget_w=8.0) as tuner:
        seen, sizes = [], set()
        for batch in tuner.loader(Numbers(4001), shuffle=True):
            sizes.add(len(batch))
            seen += batch.tolist()
            tuner.step(loss=torch.tensor(0.5))
        assert tuner.samples == 4001
        assert found_mode(device) != before
    assert sorted(seen) == list(range(4001))
    assert len(sizes) > 2, "the batch size never changed: nothing was tried"
    assert found_mode(device) == before
    log = log_of(tmp_path)
    assert log.end["outcome"] == "finished"
    assert log.end["restored"]
    assert (log.end["samples"], log.end["steps"]) == (4001, len(device.board._phases) and log.end["steps"])
    assert log.of("progress")[-1]["loss"] == 0.5
    assert log.start["batch_sizes"] == list(SIZES)
    assert log.energy_j() == pytest.approx(log.end["energy_j"], rel=0.02)


def test_worker_processes_prepare_batches_and_none_is_lost() -> None:
    with tuned(virtual(), budget_w=8.0) as tuner:
        seen: list[int] = []
        for batch in tuner.loader(Numbers(700), shuffle=True, num_workers=1):
            seen += batch.tolist()
            tuner.step()
    assert sorted(seen) == list(range(700))


def test_the_last_batch_may_be_dropped() -> None:
    with tuned(virtual(), batch_sizes=(64,)) as tuner:
        sizes = []
        for batch in tuner.loader(Numbers(150), drop_last=True):
            sizes.append(len(batch))
            tuner.step()
    assert sizes == [64, 64]


def test_a_step_that_was_not_reported_is_said() -> None:
    with tuned(virtual()) as tuner, pytest.raises(InputError, match=r"tuner\.step"):
        for _ in tuner.loader(Numbers(300)):
            pass


def test_leaving_a_pass_early_is_no_mistake() -> None:
    with tuned(virtual()) as tuner:
        for _ in range(3):
            for _batch in tuner.loader(Numbers(300)):
                tuner.step()
                break
        assert tuner.samples > 0


@pytest.mark.parametrize(
    ("dataset", "more"),
    [(iter([1, 2]), {}), (Numbers(5), {"batch_size": 4}), (Numbers(5), {"sampler": [1]})],
)
def test_a_loader_that_cannot_be_made_says_why(dataset: Any, more: dict[str, Any]) -> None:
    with tuned(virtual()) as tuner, pytest.raises(InputError):
        next(iter(tuner.loader(dataset, **more)))


@pytest.mark.parametrize("budget", [{}, {"budget_w": 9.0, "budget": "9W"}, {"budget": "9 cats"}])
def test_a_tuner_without_one_budget_says_so(budget: dict[str, Any]) -> None:
    from underwatt.run.tuner import tune

    with pytest.raises(InputError):
        tune(device=virtual(), cost=NET, batch_sizes=SIZES, **budget)


def test_a_simulated_device_asks_for_the_cost() -> None:
    with pytest.raises(InputError, match="simulated"), tuned(virtual(), cost=None):  # type: ignore[arg-type]
        pass


def test_testing_belongs_to_no_step(tmp_path: Path) -> None:
    device = virtual()
    with tuned(device, folder=tmp_path) as tuner:
        train(tuner, 40)
        step_s = device.board.true_step_s(NET, tuner.setting.mode, tuner.batch_size)
        for _ in range(5):
            train(tuner, 4)
            with tuner.testing():
                device.clock.sleep(5.0)
    for event in log_of(tmp_path).of("progress")[-20:]:
        assert event["step_s"] is None or event["step_s"] < 1.5 * step_s


def test_a_scheduler_within_the_step_goes_its_own_way() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.64)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    with tuned(virtual(), optimizer=optimizer) as tuner:
        for count, _ in enumerate(tuner.loader(Numbers(400)), start=1):
            optimizer.step()
            scheduler.step()
            tuner.step()
            assert optimizer.param_groups[0]["lr"] == pytest.approx(0.64 / (1 + count))


def test_the_learning_rate_follows_and_comes_back() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.64)
    with tuned(virtual(), optimizer=optimizer) as tuner:
        for batch in tuner.loader(Numbers(1500)):
            before = parameter.item()
            parameter.grad = torch.ones(1)
            optimizer.step()
            assert before - parameter.item() == pytest.approx(0.01 * len(batch), rel=1e-3)
            tuner.step()
            assert optimizer.param_groups[0]["lr"] == 0.64
    parameter.grad = torch.ones(1)
    before = parameter.item()
    optimizer.step()
    assert before - parameter.item() == pytest.approx(0.64, rel=1e-3)


def test_what_was_measured_is_known_the_next_time(tmp_path: Path) -> None:
    for count in range(2):
        with tuned(
            virtual(), folder=tmp_path / str(count), store=tmp_path / "store.db", options=ControlOptions(most_a_level=6)
        ) as tuner:
            train(tuner, 30)
    first, second = (
        [json.dumps(event["measurement"]["setting"]) for event in log_of(tmp_path / str(count)).of("measured")]
        for count in range(2)
    )
    assert len(first) >= 5
    assert len(second) <= len(first)
    assert not set(first) & set(second), "what is known was measured again"
    with Store(tmp_path / "store.db", create=False) as store:
        assert store.summaries()[0].measured == len(first) + len(second)


def test_stored_measurements_of_other_knobs_are_left_aside(tmp_path: Path) -> None:
    """A store filled by a user who may set clocks is of little use to one who may not, and no reason to fail."""
    with tuned(virtual(), store=tmp_path / "store.db") as tuner:
        train(tuner, 20)
    with tuned(Hurt(virtual(), knobs=False), store=tmp_path / "store.db") as tuner:
        train(tuner, 5)
        assert tuner.samples > 0


def test_a_run_is_listed_while_it_lasts(tmp_path: Path) -> None:
    with tuned(virtual(), folder=tmp_path):
        assert [run.folder for run in running_runs()] == [tmp_path]
    assert running_runs() == ()


# Things break


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
    assert end["restored"]
    if isinstance(error, RuntimeError):
        assert (end["outcome"], end["error"]) == ("failed", "the job is broken")
    else:
        assert end["outcome"] == "interrupted"
    assert running_runs() == ()


def test_a_budget_that_cannot_be_held_leaves_nothing_behind(tmp_path: Path) -> None:
    device = Hurt(virtual(), knobs=False)
    tuner = tuned(device, folder=tmp_path, store=tmp_path / "store.db", budget_w=0.5)
    with pytest.raises(BudgetError, match="while it waits"), tuner:
        pass
    assert running_runs() == ()
    end = log_of(tmp_path).end
    assert end["outcome"] == "failed"
    assert "while it waits" in end["error"]


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
    assert log_of(tmp_path).end["outcome"] == "finished"


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
    assert (end["outcome"], end["restored"]) == ("failed", True)
    assert "could not be read" in end["error"]


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
    assert log_of(tmp_path).end["outcome"] == "failed"


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
    with tuned(virtual(), folder=tmp_path) as tuner:
        sizes: set[int] = set()
        while tuner.elapsed_s < 20:
            for batch in tuner.loader(Numbers(20), drop_last=drop_last):
                sizes.add(len(batch))
                tuner.step()
        assert sizes <= ({8, 16} if drop_last else {4, 8, 16})
        energy_j = tuner.energy_j
        for batch in tuner.loader(Numbers(2000)):
            sizes.add(len(batch))
            tuner.step()
        assert sizes & {32, 64}, "a larger data set is offered them again"
        assert tuner.energy_j > energy_j > 50
    assert "The data set has 20 samples: batch size 32, 64 is left out." in notes(tmp_path)
    log = log_of(tmp_path)
    measured = [event["measurement"]["setting"]["batch_size"] for event in log.of("measured") if event["at_s"] < 20]
    assert {8, 16} >= set(measured) != set(), "it was never measured"
    assert log.energy_j() == pytest.approx(log.end["energy_j"], rel=0.05)


@pytest.mark.parametrize("samples", [0, 5])
def test_a_data_set_that_fills_no_batch_is_an_error(samples: int) -> None:
    with tuned(virtual()) as tuner, pytest.raises(InputError, match=f"has {samples} samples"):
        next(tuner.loader(Numbers(samples), drop_last=True))


def test_a_locked_store_does_not_hold_up_the_training(tmp_path: Path) -> None:
    store = tmp_path / "store.db"
    with tuned(virtual(), folder=tmp_path, store=store) as tuner:
        train(tuner, 1)
        other = sqlite3.connect(store)
        other.execute("BEGIN IMMEDIATE")
        begun_s = time.monotonic()
        train(tuner, 30)
        assert time.monotonic() - begun_s < 10, "the training waited for the store"
        other.rollback()
        other.close()
        train(tuner, 15)
    measured = len(log_of(tmp_path).of("measured"))
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
            patch.setattr("underwatt.run.log.os.write", full)
            train(tuner, 5)
        train(tuner, 5)
    [said] = [text for text in notes(tmp_path) if "cannot be written" in text]
    assert "No space left" in said
    assert "The log can be written again." in notes(tmp_path, "info")


def test_a_full_store_ends_no_training(tmp_path: Path) -> None:
    import sqlalchemy as sa

    begun_s = time.monotonic()
    with tuned(virtual(), folder=tmp_path, store=tmp_path / "store.db") as tuner:
        saver = tuner._pilot._saver
        assert saver is not None
        kept = saver._store
        with kept._engine.connect() as connection:
            pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()

        def limit(connection: sqlite3.Connection, _: object) -> None:
            connection.execute(f"PRAGMA max_page_count = {pages}")

        sa.event.listen(kept._engine, "connect", limit)
        kept._engine.dispose()
        train(tuner, 30)
        sa.event.remove(kept._engine, "connect", limit)
        kept._engine.dispose()
        train(tuner, 15)
    assert time.monotonic() - begun_s < 20
    with Store(tmp_path / "store.db", create=False) as store:
        assert store.summaries()[0].measured == len(log_of(tmp_path).of("measured"))


def test_a_message_that_makes_no_sense_ends_no_training(tmp_path: Path) -> None:
    with tuned(virtual(), folder=tmp_path) as tuner:
        train(tuner, 10)
        (tmp_path / "budget.json").write_text('{"id": 1, "budget": "a lot"}')
        train(tuner, 5)
        post_budget(tmp_path, "7W", "command")
        train(tuner, 5)
    assert [event["power_w"] for event in log_of(tmp_path).of("budget")] == [9.0, 7.0]
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
    assert [error for _, error in restore_all()] == [None]
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
    assert (end["outcome"], end["restored"]) == ("interrupted", True)


def test_the_log_is_plain_json(tmp_path: Path) -> None:
    with tuned(virtual(), folder=tmp_path) as tuner:
        train(tuner, 5)
    for line in (tmp_path / "log.jsonl").read_text().splitlines():
        assert json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))["kind"]
