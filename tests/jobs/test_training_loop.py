from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from run_world import virtual
from train_world import blobs, happening, log_in, same, state_in, train

from underwatt._files import write_atomically
from underwatt.budget import Budget
from underwatt.control.live_budget import LiveBudget
from underwatt.control.pilot import Pilot
from underwatt.errors import InputError, OutOfMemoryError, SensorError, StepError
from underwatt.events import Measured, Noted, Scored
from underwatt.jobs import checkpoint, training_loop
from underwatt.jobs.training import Training
from underwatt.records import Measurement, Status


class Countdown:
    """Does something in the middle of a certain step; counts the samples that were seen."""

    def __init__(self, step: int, action) -> None:
        self.left, self.action = step, action
        self.seen: list[int] = []

    def __call__(self, numbers: torch.Tensor) -> None:
        self.left -= 1
        if self.left == 0:
            self.action()
        self.seen += numbers.tolist()


def kill_me(number: int = signal.SIGINT):
    return lambda: os.kill(os.getpid(), number)


def test_a_training_reaches_its_target_and_stops(tmp_path: Path) -> None:
    device = virtual("nano")
    found = dict(device.snapshot())
    trained = train(tmp_path / "run", blobs(), device=device)
    assert trained.outcome == "reached"
    assert trained.score is not None
    assert trained.score >= 0.85
    assert trained.samples == 16 * trained.steps == state_in(tmp_path / "run")["samples"]
    assert dict(device.snapshot()) == found
    log = log_in(tmp_path / "run")
    assert log.end is not None
    assert (log.end.outcome, log.end.restored, log.end.samples) == ("reached", True, trained.samples)
    assert log.end.score == trained.score
    scores = log.of(Scored)
    assert [score.samples for score in scores[:-1]] == [208 * n for n in range(1, len(scores))]
    assert scores[-1].value == trained.score
    assert all(score.value < 0.85 for score in scores[:-1])


def test_the_limit_ends_it_and_a_higher_one_goes_on(tmp_path: Path) -> None:
    job = blobs(target=1.01)
    short = train(tmp_path / "parts", job, limit=480)
    assert (short.outcome, short.samples) == ("limit", 480)
    again = train(tmp_path / "parts", job, limit=480, resume=True)
    assert (again.outcome, again.samples) == ("limit", 480), "nothing more is trained"
    assert train(tmp_path / "parts", job, limit=1600, resume=True).samples == 1600
    train(tmp_path / "whole", job, limit=1600)
    assert same(state_in(tmp_path / "parts"), state_in(tmp_path / "whole"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_in_the_middle_of_a_step_loses_and_repeats_nothing(tmp_path: Path, number: signal.Signals) -> None:
    job = blobs(target=1.01)
    train(tmp_path / "whole", job, limit=1600)
    with pytest.raises((KeyboardInterrupt, SystemExit)), happening(Countdown(37, kill_me(number))):
        train(tmp_path / "parts", job, limit=1600)
    state = state_in(tmp_path / "parts")
    assert (state["steps"], state["samples"]) == (37, 592), "the step under way was finished, and no other begun"
    end = log_in(tmp_path / "parts").end
    assert end is not None
    assert (end.outcome, end.restored, end.steps) == ("interrupted", True, 37)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert train(tmp_path / "parts", job, limit=1600, resume=True).outcome == "limit"
    assert same(state_in(tmp_path / "parts"), state_in(tmp_path / "whole"))
    resumed = log_in(tmp_path / "parts")
    assert [score.samples for score in resumed.of(Scored)] == [
        score.samples for score in log_in(tmp_path / "whole").of(Scored)
    ]


def test_a_second_signal_does_not_wait_and_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    def twice() -> None:
        kill_me()()
        kill_me()()
        pytest.fail("the second one waited")

    with pytest.raises(KeyboardInterrupt), happening(Countdown(5, twice)):
        train(tmp_path / "run", blobs())
    assert state_in(tmp_path / "run")["steps"] == 0, "half a step is not saved"
    end = log_in(tmp_path / "run").end
    assert end is not None
    assert end.restored


def test_an_interrupted_test_of_the_model_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = blobs(target=1.01)
    train(tmp_path / "whole", job, limit=800)
    real = Training.evaluate

    def interrupted(self: Training, *how: Any) -> float:
        real(self, *how)
        raise KeyboardInterrupt

    monkeypatch.setattr(Training, "evaluate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "parts", job, limit=800)
    monkeypatch.setattr(Training, "evaluate", real)
    train(tmp_path / "parts", job, limit=800, resume=True)
    assert same(state_in(tmp_path / "parts"), state_in(tmp_path / "whole"))
    assert [score.value for score in log_in(tmp_path / "parts").of(Scored)] == [
        score.value for score in log_in(tmp_path / "whole").of(Scored)
    ]


def test_a_batch_beyond_memory_is_trained_in_parts_and_measured_as_such(tmp_path: Path) -> None:
    def memory(numbers: torch.Tensor) -> None:
        if len(numbers) > 8:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    def first(name: str) -> Measurement:
        return log_in(tmp_path / name / "run").of(Measured)[0].measurement

    job = blobs(target=1.01, batch_sizes=(32,))
    for name, limits in (("whole", ()), ("parts", (memory,))):
        (tmp_path / name).mkdir()  # a store for each, as what was measured once is not measured again
        with contextlib.ExitStack() as stack:
            for limit in limits:
                stack.enter_context(happening(limit))
            train(tmp_path / name / "run", job, limit=8_000, every=20_000)
    assert any("8 samples at a time" in note.text for note in log_in(tmp_path / "parts" / "run").of(Noted))
    assert state_in(tmp_path / "parts" / "run")["samples"] == 8_000
    assert first("parts").setting == first("whole").setting
    assert first("parts").step_s > 1.5 * first("whole").step_s, "the true time, that of all parts"


@pytest.mark.slow
def test_ctrl_c_reaches_worker_processes_too_and_still_nothing_is_lost(tmp_path: Path) -> None:
    def as_from_a_terminal() -> None:
        for child in torch.multiprocessing.active_children():
            assert child.pid is not None
            os.kill(child.pid, signal.SIGINT)
        kill_me()()

    job = blobs(target=1.01, num_workers=1)
    train(tmp_path / "whole", job, limit=800)
    with pytest.raises(KeyboardInterrupt), happening(Countdown(20, as_from_a_terminal)):
        train(tmp_path / "parts", job, limit=800)
    assert state_in(tmp_path / "parts")["steps"] == 20
    train(tmp_path / "parts", job, limit=800, resume=True)
    assert same(state_in(tmp_path / "parts"), state_in(tmp_path / "whole"))


def test_out_of_memory_does_the_samples_again_in_smaller_batches(tmp_path: Path) -> None:
    full = [False]
    large: list[int] = []
    trained_on: list[int] = []

    def memory(numbers: torch.Tensor) -> None:
        if full[0] and len(numbers) > 8:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        large.extend([1] * (len(numbers) > 8))
        trained_on.extend(numbers.tolist())

    def fill(pilot: Pilot) -> None:
        full[0] = full[0] or len(large) > 8
        if len(trained_on) > 600 + 32 * sum(large) and full[0] and pilot.batch_size == 8:
            after.append(pilot.samples)
        if len(after) > 100:
            raise KeyboardInterrupt

    after: list[int] = []
    job = blobs(target=1.01, batch_sizes=(8, 32), accumulate=False)
    with happening(memory), pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", job, limit=200_000, every=20_000, watch=fill)
    assert full[0], "a large batch was tried"
    assert state_in(tmp_path / "run")["samples"] == len(trained_on)
    passes = [trained_on[begin : begin + 256] for begin in range(0, len(trained_on), 256)]
    for one in passes[:-1]:
        assert len(set(one)) == 256, "each pass has every sample once"
    log = log_in(tmp_path / "run")
    assert any("32 does not fit" in note.text for note in log.of(Noted))
    assert any(m.measurement.status is Status.OUT_OF_MEMORY for m in log.of(Measured))


class Half(torch.optim.SGD):
    """Changes a part of the model, and then there is no memory for the rest."""

    left = 0

    def step(self, closure=None):
        Half.left -= 1
        if Half.left == 0:
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1.0)
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().step(closure)


def test_out_of_memory_in_the_optimizer_goes_back_to_the_last_checkpoint(tmp_path: Path) -> None:
    job = blobs(target=1.01, batch_sizes=(8, 32), optimizer=Half)
    Half.left = 12
    with pytest.raises(OutOfMemoryError, match="half changed") as caught:
        train(tmp_path / "run", job, limit=1600)
    assert "--resume" in caught.value.hint
    assert state_in(tmp_path / "run")["steps"] == 0, "what may be half changed is not kept"
    end = log_in(tmp_path / "run").end
    assert end is not None
    assert (end.outcome, end.restored) == ("failed", True)
    assert train(tmp_path / "run", job, limit=1600, resume=True).samples >= 1600


def test_a_job_is_offered_no_batch_that_its_data_cannot_fill(tmp_path: Path) -> None:
    trained = train(tmp_path / "run", blobs(target=1.01, batch_sizes=(16, 257)), limit=160)
    assert trained.samples == 160
    log = log_in(tmp_path / "run")
    assert log.start.batch_sizes == (16,)
    assert "The data set has 256 samples: batch size 257 is left out." in [note.text for note in log.of(Noted)]
    with pytest.raises(InputError, match="has 256 samples"):
        train(tmp_path / "none", blobs(batch_sizes=(257,)))
    assert not (tmp_path / "none").exists()


def test_a_state_that_could_not_be_loaded_again_is_said_when_it_is_saved(tmp_path: Path) -> None:
    class Odd(torch.optim.SGD):
        def state_dict(self):
            return {**super().state_dict(), "odd": Countdown(1, print)}

    assert train(tmp_path / "run", blobs(target=1.01, optimizer=Odd), limit=160).outcome == "limit"
    assert not checkpoint.exists(tmp_path / "run")
    notes = [note.text for note in log_in(tmp_path / "run").of(Noted) if note.level == "warning"]
    assert any("a Countdown in the training's state could not be loaded again" in text for text in notes)


def test_where_no_batch_size_fits_it_is_an_error(tmp_path: Path) -> None:
    def full(_: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    device = virtual("nano")
    found = dict(device.snapshot())
    with happening(full), pytest.raises(OutOfMemoryError, match="16"):
        train(tmp_path / "run", blobs(), device=device)
    assert dict(device.snapshot()) == found


def test_a_failed_step_ends_it_at_the_last_checkpoint(tmp_path: Path) -> None:
    def fail() -> None:
        raise ValueError("a layer is missing")

    device = virtual("nano")
    found = dict(device.snapshot())
    job = blobs(target=1.01)
    with (
        happening(Countdown(12, fail)),
        pytest.raises(StepError, match="batch size 16: ValueError: a layer is missing"),
    ):
        train(tmp_path / "run", job, device=device)
    assert dict(device.snapshot()) == found
    end = log_in(tmp_path / "run").end
    assert end is not None
    assert (end.outcome, end.restored, end.steps) == ("failed", True, 11)
    assert "a layer is missing" in end.error
    assert train(tmp_path / "run", job, limit=160, resume=True).samples == 160


def test_an_error_that_is_not_the_jobs_keeps_what_was_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stepped = Pilot.stepped

    def lost(self: Pilot, *given: object) -> None:
        stepped(self, *given)  # type: ignore[arg-type]
        if self.steps == 30:
            raise SensorError("The sensor is gone.")

    monkeypatch.setattr(Pilot, "stepped", lost)
    with pytest.raises(SensorError):
        train(tmp_path / "run", blobs(target=1.01))
    assert state_in(tmp_path / "run")["steps"] == 30


def test_the_joules_are_spent_and_more_of_them_go_on(tmp_path: Path) -> None:
    def given(joules: float) -> LiveBudget:
        return LiveBudget(Budget(power_w=3.0, energy_j=joules))

    job = blobs(target=1.01)
    spent = train(tmp_path / "run", job, live=given(6.0))
    assert spent.outcome == "energy spent"
    assert 6.0 <= spent.energy_j < 6.6, "it stops within a reading"
    again = train(tmp_path / "run", job, live=given(6.0), resume=True)
    assert (again.outcome, again.steps) == ("energy spent", spent.steps)
    more = train(tmp_path / "run", job, live=given(9.0), resume=True)
    assert more.outcome == "energy spent"
    assert 9.0 <= more.energy_j < 9.6
    assert more.samples > spent.samples
    log = log_in(tmp_path / "run")
    assert log.energy_j() == pytest.approx(more.energy_j, rel=0.1)


def test_a_full_disk_ends_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full here")
    (folder / "checkpoint.tmp").symlink_to("/dev/full")
    monkeypatch.setattr(training_loop, "CHECKPOINT_PERIOD_S", 0.0)
    trained = train(folder, blobs(target=1.01), limit=320)
    assert trained.outcome == "limit"
    [note] = [note.text for note in log_in(folder).of(Noted) if "checkpoint" in note.text]
    assert "No space left" in note
    assert checkpoint.exists(folder), "there was room again"
    assert state_in(folder)["samples"] == 320
    assert not (folder / "checkpoint.tmp").exists()


def no_room_for(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Have what PyTorch writes under these names fail as on a full disk."""

    def full(path: Path, content: Any, **more: Any) -> None:
        if path.name not in names:
            write_atomically(path, content, **more)
            return
        with Path("/dev/full").open("wb", buffering=0) as file:
            content(file)

    monkeypatch.setattr(checkpoint, "write_atomically", full)


def test_on_a_disk_too_full_for_a_checkpoint_the_model_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_room_for(monkeypatch, checkpoint.NAME, checkpoint.BEST)
    trained = train(tmp_path / "run", blobs())
    assert (trained.outcome, trained.not_kept, trained.model) == ("reached", "", None)
    assert trained.last_model is not None
    said = {note.text for note in log_in(tmp_path / "run").of(Noted) if "could be written" in note.text}
    assert said == {f"No {what} could be written (No space left on device)." for what in ("checkpoint", "best model")}


def test_where_no_model_could_be_kept_it_is_said_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_room_for(monkeypatch, checkpoint.NAME, checkpoint.BEST, checkpoint.LAST)
    trained = train(tmp_path / "run", blobs())
    assert (trained.outcome, trained.not_kept) == ("reached", "No space left on device")
    assert (trained.model, trained.last_model) == (None, None)


@pytest.mark.parametrize(("every", "limit"), [(200, 1600), (16, 400)])
def test_a_score_that_stalls_is_said_but_not_after_a_lucky_first_one(tmp_path: Path, every: int, limit: int) -> None:
    """After the best score there are some tests, and much of a pass over the data, before anything is said of it."""
    scores = iter([0.7])
    job = blobs(target=0.8, metric=lambda *_: next(scores, 0.5))
    train(tmp_path / "run", job, limit=limit, every=every)
    log = log_in(tmp_path / "run")
    tested = [score.samples for score in log.of(Scored)]
    said = [one for one in log.of(Noted) if one.level == "warning" and "out of reach" in one.text]
    assert len(said) == 1
    assert f"not been better than 0.7 since {tested[0]} samples" in said[0].text
    before = [one.samples for one in log.of(Scored) if one.at_s <= said[0].at_s]
    assert len(before) >= 6
    assert before[-1] >= max(5 * tested[0], tested[0] + 128)
    assert before[-2] < max(5 * tested[0], tested[0] + 128) or len(before) == 6, "as soon as that"


def test_nothing_stalls_while_scores_grow_or_where_there_is_no_target(tmp_path: Path) -> None:
    scores = iter(range(1000))
    train(tmp_path / "grows", blobs(target=0.8, metric=lambda *_: 0.001 * next(scores)), limit=1600, every=100)
    train(
        tmp_path / "none", blobs(target=float("nan"), limit_samples=1600, metric=lambda *_: 0.5), limit=1600, every=64
    )
    for name in ("grows", "none"):
        assert not [note for note in log_in(tmp_path / name).of(Noted) if "out of reach" in note.text]
