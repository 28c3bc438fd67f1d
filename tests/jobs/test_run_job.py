from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer
from run_world import tuned, virtual
from train_world import blobs, log_in, train

from underwatt.budget import Budget, Watts, parse_budget
from underwatt.cli import run as cli_run
from underwatt.control.live_budget import LiveBudget
from underwatt.errors import BudgetError, InputError, StepError
from underwatt.events import BudgetChanged, Event, Measured, Noted, Resumed, SettingChanged, Started
from underwatt.jobs import checkpoint
from underwatt.jobs.runs import RunOptions, again, threads_note
from underwatt.runlog.inbox import claimed_folder, register_run


def test_a_run_proves_that_the_budget_was_held_and_keeps_what_it_measured(tmp_path: Path) -> None:
    device = virtual("nano")
    found = dict(device.snapshot())
    job = blobs(target=1.01, batch_sizes=(8, 16))
    train(tmp_path / "one", job, limit=10_000, every=10_000, device=device)
    assert dict(device.snapshot()) == found
    one = log_in(tmp_path / "one")
    assert one.energy_over_j(window_s=1.0) <= 0.005 * one.energy_j()
    assert one.time_over_s(lag_s=1.0) <= 0.01 * one.power.at_s[-1]
    train(tmp_path / "two", job, limit=2000, every=10_000)
    two = log_in(tmp_path / "two")
    assert len(one.of(Measured)) >= 2
    assert len(two.of(Measured)) < len(one.of(Measured)), "what is known is not measured again"
    [first, *_] = two.of(SettingChanged)
    known = [measured.measurement.setting for measured in one.of(Measured)]
    assert first.setting in known or first.state == "searching"


def test_a_resumed_run_counts_on(tmp_path: Path) -> None:
    job = blobs(target=1.01)
    first = train(tmp_path / "run", job, limit=4000)
    second = train(tmp_path / "run", job, limit=8000, resume=True)
    assert (second.steps, second.samples) == (500, 8000)
    assert second.elapsed_s > 1.5 * first.elapsed_s
    assert second.energy_j > 1.5 * first.energy_j
    log = log_in(tmp_path / "run")
    [resumed] = log.of(Resumed)
    assert resumed.pid == os.getpid()
    assert resumed.at_s >= first.elapsed_s
    assert second.verdict.bounded_s <= second.elapsed_s + 0.1  # the time before the stop is judged once
    times = [event.at_s for event in log.events]
    assert times == sorted(times)
    assert len(log.of(Started)) == 1
    assert log.energy_j() == pytest.approx(second.energy_j, rel=0.1)


def test_what_a_killed_run_drew_since_its_checkpoint_is_counted_too(tmp_path: Path) -> None:
    folder, job = tmp_path / "run", blobs(target=1.01)
    train(folder, job, limit=160)
    early = (folder / checkpoint.NAME).read_bytes()
    late = train(folder, job, limit=3200, resume=True)
    (folder / checkpoint.NAME).write_bytes(early)  # as if the later one had never come
    lines = (folder / "log.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "log.jsonl").write_bytes(b"".join(line for line in lines[:-2]) + b'{"kind":"progr')
    again = train(folder, job, limit=320, resume=True)
    assert again.samples == 320
    assert again.energy_j > 0.6 * late.energy_j  # all but the readings of the last line, a third here
    times = [event.at_s for event in log_in(folder).events]
    assert times == sorted(times)


@pytest.mark.parametrize("damage", [b"", b"garbage\n"])
def test_a_lost_log_is_no_reason_not_to_go_on(tmp_path: Path, damage: bytes) -> None:
    folder, job = tmp_path / "run", blobs(target=1.01)
    first = train(folder, job, limit=160)
    (folder / "log.jsonl").write_bytes(damage)
    again = train(folder, job, limit=320, resume=True)
    assert again.samples == 320
    assert again.energy_j >= first.energy_j


def test_what_cannot_go_on_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no checkpoint"):
        train(tmp_path / "none", blobs(), resume=True)
    train(tmp_path / "run", blobs())
    with pytest.raises(InputError, match="has ended: reached"):
        train(tmp_path / "run", blobs(), resume=True)
    train(tmp_path / "other", blobs(target=1.01), limit=16)
    with pytest.raises(InputError, match="another job"):
        train(tmp_path / "other", blobs(optimizer=torch.optim.SGD), resume=True)
    (tmp_path / "other" / checkpoint.NAME).write_bytes(b"garbage")
    train(tmp_path / "other", blobs(target=1.01), limit=64, resume=True)
    warned = [event.text for event in log_in(tmp_path / "other").of(Noted) if event.level == "warning"]
    assert any("Going on from the one before it" in text for text in warned)
    for name in (checkpoint.NAME, checkpoint.PREVIOUS):
        (tmp_path / "other" / name).write_bytes(b"garbage")
    with pytest.raises(InputError, match="cannot be read"):
        train(tmp_path / "other", blobs(target=1.01), resume=True)


def test_the_time_of_day_is_now_when_a_run_goes_on(tmp_path: Path) -> None:
    def at(hours: float) -> LiveBudget:
        return LiveBudget(parse_budget("08:00-18:00=6W,else=3W"), time_of_day_s=hours * 3600)

    job = blobs(target=1.01)
    train(tmp_path / "run", job, limit=800, live=at(17.999))
    train(tmp_path / "run", job, limit=1600, live=at(9.0), resume=True)
    budgets = [event.power_w for event in log_in(tmp_path / "run").of(BudgetChanged)]
    assert budgets == [6.0, 6.0]
    live = at(9.0)
    live.resumes(2 * 3600.0)
    assert [live.power_w(hours * 3600.0) for hours in (0.5, 1.5, 2.0, 10.9, 11.1, 25.1)] == [3, 6, 6, 6, 3, 6]
    live.change("09:30-10:00=4W,else=2W")
    assert (live.power_w(2.4 * 3600), live.power_w(2.6 * 3600)) == (2.0, 4.0)


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(InputError, match="cannot be made"):
        train(tmp_path / "run", blobs())


def test_a_run_that_never_began_is_not_in_the_way(tmp_path: Path) -> None:
    with pytest.raises(BudgetError, match="lowest clocks") as refused:
        train(tmp_path / "run", blobs(), live=LiveBudget(Budget(power_w=0.3)))
    assert "The smallest budget that pauses hold is above" in str(refused.value.hint)
    with pytest.raises(BudgetError, match="lowest clocks") as refused:
        train(tmp_path / "run", blobs(), live=LiveBudget(Budget(power_w=0.3, watts=Watts.PEAK)))
    assert "Peaks are not lowered by pauses" in str(refused.value.hint)
    assert train(tmp_path / "run", blobs(target=1.01), limit=160).samples == 160


def test_a_store_that_is_locked_on_the_way_ends_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("underwatt.store.schema.BUSY_TIMEOUT_S", 0.1)
    other = sqlite3.connect(tmp_path / "store.db", isolation_level=None)

    def lock(event: Event) -> None:
        if isinstance(event, Started):
            other.execute("BEGIN EXCLUSIVE")

    trained = train(tmp_path / "run", blobs(target=1.01), limit=8000, every=10_000, listener=lock)
    other.execute("ROLLBACK")
    other.close()
    assert trained.outcome == "limit"
    log = log_in(tmp_path / "run")
    assert log.of(Measured)
    assert any("locked" in note.text for note in log.of(Noted) if note.level == "warning")


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise where something computes for longer: what waits in simulated time may wait for ever.

    Time of this process, which does not pass while others have the machine.
    """

    def too_long(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGPROF, too_long)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@pytest.mark.slow
def test_a_budget_between_idling_at_high_and_at_low_clocks_is_held(tmp_path: Path) -> None:
    live = LiveBudget(Budget(power_w=2.2))  # a Nano draws 3.3 W idle as it was found, 1.9 W at its lowest clocks
    with at_most(60.0):
        trained = train(tmp_path / "run", blobs(target=1.01), limit=16_000, every=10_000, live=live)
    assert trained.outcome == "limit"


@pytest.mark.slow
def test_a_budget_that_nothing_keeps_is_an_error_that_names_the_smallest(tmp_path: Path) -> None:
    live = LiveBudget(Budget(power_w=0.5))
    with at_most(60.0), pytest.raises(BudgetError, match=r"\d W"):
        train(tmp_path / "run", blobs(target=1.01), limit=16_000, every=10_000, live=live)


def test_a_folder_is_for_one_run_at_a_time(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with claimed_folder(folder), register_run(folder, "the first", "Nano"):
        with pytest.raises(InputError, match=f"under way in .* \\(process {os.getpid()}, the first\\)"):
            train(folder, blobs())
        assert list(folder.iterdir()) == []
        with pytest.raises(InputError, match="under way"), tuned(virtual(), folder=folder):
            pass
    train(folder, blobs(target=1.01), limit=16)
    before = (folder / "log.jsonl").read_bytes()
    with claimed_folder(folder), pytest.raises(InputError, match="under way"):
        train(folder, blobs(target=1.01), limit=64, resume=True)
    assert (folder / "log.jsonl").read_bytes() == before
    with pytest.raises(InputError, match="already"):  # begun since the folder was chosen, and over
        train(folder, blobs())


class Dying(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Data whose loading kills the worker that does it, once a file is there."""

    def __init__(self, parts: tuple[torch.Tensor, ...], sign: Path) -> None:
        self.parts, self.sign = parts, sign

    def __len__(self) -> int:
        return len(self.parts[0])

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        if self.sign.exists() and torch.utils.data.get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return tuple(part[index] for part in self.parts)


def test_a_loader_worker_that_dies_ends_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    sign, plain = tmp_path / "die", blobs(target=1.01)
    job = replace(plain, data=Dying(plain.data, sign), num_workers=2)
    device = virtual("nano")
    found = dict(device.snapshot())
    with pytest.raises(StepError, match="worker process of the job's loader has died") as caught:
        train(tmp_path / "run", job, device=device, watch=lambda pilot: pilot.samples > 200 and sign.touch())
    assert "--resume" in caught.value.hint
    assert dict(device.snapshot()) == found
    end = log_in(tmp_path / "run").end
    assert end is not None
    assert (end.outcome, end.restored) == ("failed", True)
    sign.unlink()
    assert train(tmp_path / "run", job, resume=True, limit=1000).samples >= 1000


def test_the_line_that_goes_on_with_a_run_can_be_pasted(tmp_path: Path) -> None:
    options = RunOptions(budget="08:00-18:00=15W,else=7W", device="virtual:nano", batch_sizes=(8, 16), set_modes=False)
    line = shlex.split(again(options, ["my job.py:blobs"], tmp_path / "a run"))
    assert line[:2] == ["underwatt", "run"]
    given = common_options(line[2:])
    assert given["job"] == ["my job.py:blobs"]
    assert given["budget"] == options.budget
    assert (given["batch_sizes"], given["no_modes"], given["resume"]) == ("8,16", True, True)
    assert given["folder"] == tmp_path / "a run"
    words = ["python", "train.py", "--batch-size", "{batch_size}"]
    given = common_options(shlex.split(again(RunOptions(budget=3.5, limit_samples=1e6), words, tmp_path))[2:])
    assert (given["job"], given["budget"], given["limit_samples"]) == (words, "3.5W", 1e6)


def common_options(words: list[str]) -> dict[str, object]:
    """What the command line understands by them."""
    command = typer.main.get_command(cli_run.app).commands["run"]  # type: ignore[attr-defined]
    return command.make_context("run", words).params


def test_a_busy_machine_is_given_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (9.0, 9.0, 9.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert threads_note() is None, "conftest has set the threads"
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert "OMP_NUM_THREADS=1" in (threads_note() or "")
    monkeypatch.setattr(os, "getloadavg", lambda: (0.5, 0.5, 0.5))
    assert threads_note() is None


def without_checkpoint(folder: Path) -> None:
    for path in folder.glob("*.pt"):
        path.unlink()


@pytest.mark.parametrize("left", ["", '{"kind":"star', "\0" * 40])
def test_a_run_that_was_killed_before_it_began_begins_when_it_is_gone_on_with(tmp_path: Path, left: str) -> None:
    """What systemd does at the next start of a board, after a power cut in the first seconds."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "log.jsonl").write_text(left)
    assert train(folder, blobs(target=1.01), limit=160, resume=True).samples == 160
    log = log_in(folder)
    assert len(log.of(Started)) == 1
    assert any("no checkpoint" in note.text and "begins anew" in note.text for note in log.of(Noted))
    assert not left or (folder / "log.damaged.jsonl").read_text() == left


def test_a_run_without_a_checkpoint_begins_anew_and_what_it_took_counts(tmp_path: Path) -> None:
    folder, job = tmp_path / "run", blobs(target=1.01)
    first = train(folder, job, limit=1600)
    without_checkpoint(folder)
    again = train(folder, job, limit=160, resume=True)
    assert again.samples == 160
    assert again.elapsed_s > first.elapsed_s
    assert again.energy_j > first.energy_j
    log = log_in(folder)
    assert (len(log.of(Started)), len(log.of(Resumed))) == (1, 1)
    [note] = [note.text for note in log.of(Noted) if "begins anew" in note.text]
    assert "J that were taken before count on" in note
    assert train(folder, job, limit=320, resume=True).samples == 320, "now there is one"


def test_nothing_of_a_run_without_a_checkpoint_is_lost_or_mixed(tmp_path: Path) -> None:
    folder, job = tmp_path / "run", blobs(target=1.01)
    train(folder, job, limit=160)
    weights = (folder / "last.pt").read_bytes()
    for path in folder.glob("checkpoint*.pt"):
        path.unlink()
    with pytest.raises(InputError, match="another job"):
        train(folder, blobs(optimizer=torch.optim.SGD), resume=True)
    train(folder, job, limit=320, resume=True)
    assert (folder / "last.before.pt").read_bytes() == weights
    train(tmp_path / "reached", blobs())
    for path in (tmp_path / "reached").glob("checkpoint*.pt"):
        path.unlink()
    with pytest.raises(InputError, match="has ended: reached"):
        train(tmp_path / "reached", blobs(), resume=True)
