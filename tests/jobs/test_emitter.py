from __future__ import annotations

import ast
import importlib
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from underwatt.jobs import emitter
from underwatt.jobs.command import Said, Sign, StepLine, parse_line

SOURCE = Path(emitter.__file__).read_text()


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """The emitter, imported while a pipe is there; and the reading end."""
    fifo = tmp_path / "beats"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)
    monkeypatch.setenv("UNDERWATT_BEATS", str(fifo))
    yield importlib.reload(emitter), reader
    if emitter._fd >= 0:
        os.close(emitter._fd)
    emitter._waiting.clear()
    os.close(reader)
    monkeypatch.delenv("UNDERWATT_BEATS")
    importlib.reload(emitter)


def _lines(reader: int) -> list[object]:
    return [parse_line(line) for line in os.read(reader, 1 << 20).splitlines()]


def test_is_one_file_for_python_3_6_without_dependencies():
    assert len(SOURCE.splitlines()) < 340
    tree = ast.parse(SOURCE, feature_version=(3, 6))
    imports = {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
    assert imports == {"atexit", "os", "pathlib", "select", "sys", "time", "typing"}
    others = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names} - imports
    assert others == {"torch.utils.data"}, "asked for by the loader alone"
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]


def test_prints_itself_to_be_copied(tmp_path):
    copy = subprocess.check_output([sys.executable, "-m", "underwatt.jobs.emitter"], text=True)
    assert copy == SOURCE
    (tmp_path / "underwatt_beat.py").write_text(copy)
    subprocess.run([sys.executable, "-I", "-c", "import underwatt_beat"], cwd=tmp_path, check=False)
    code = "import underwatt_beat as b; b.step(); b.metric(1); assert b.oom(8) == 0; assert b.ask(8) == 8; b.saved()"
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=False).returncode == 0


def test_steps_travel_together_each_with_its_own_time(fresh):
    beats, reader = fresh
    before_s = time.monotonic()
    beats.step()  # the first goes at once
    for _ in range(5):
        beats.step()
    beats.metric(0.5)  # takes along what waits
    lines = _lines(reader)
    times_s = [line.at_s for line in lines[:-1]]
    assert len(times_s) == 6
    assert times_s == sorted(times_s)
    assert before_s - 1e-5 <= times_s[0]
    assert times_s[-1] <= time.monotonic() + 1e-5
    assert lines[-1] == Said("metric", 0.5)


def test_a_full_pipe_loses_no_count_and_does_not_wait(fresh):
    beats, reader = fresh
    started_s = time.monotonic()
    for _ in range(20_000):  # several times what a pipe holds
        beats.step()
    assert time.monotonic() - started_s < 5.0
    assert len(beats._waiting) <= beats.MOST_WAITING
    received = sum(line.steps for line in _lines(reader))
    beats._send()
    received += sum(line.steps for line in _lines(reader))
    assert received == 20_000


def test_a_listener_that_leaves_breaks_nothing(fresh, tmp_path):
    beats, reader = fresh
    fifo = tmp_path / "beats"
    os.close(os.open(fifo, os.O_RDWR))
    beats.step()
    spare = os.open(os.devnull, os.O_RDONLY)
    os.dup2(spare, reader)  # the reading end is gone, the number stays valid for the fixture
    os.close(spare)
    assert [beats.step() for _ in range(300)] == [None] * 300, "training goes on"
    beats.oom()


def test_a_forked_process_sends_nothing_of_its_parents(fresh):
    beats, reader = fresh
    beats.step()
    beats.step()
    pid = os.fork()
    if pid == 0:
        beats._send()
        os._exit(0)
    os.waitpid(pid, 0)
    assert len(_lines(reader)) == 1
    beats._send()
    assert len(_lines(reader)) == 1


@pytest.mark.parametrize("call", ["beats.step(3)", "beats.oom()"])
def test_a_trainer_that_is_forked_off_reports_its_own(fresh, call):
    beats, reader = fresh
    beats.step()
    beats.step()  # waits, and stays the parent's
    os.read(reader, 1 << 20)
    pid = os.fork()
    if pid == 0:
        os.close(beats._fd)  # as a daemon does
        eval(call)
        beats._send()
        os._exit(0)
    os.waitpid(pid, 0)
    (line,) = _lines(reader)
    assert getattr(line, "steps", 3) == 3
    beats._send()
    assert len(_lines(reader)) == 1


def test_a_beat_costs_little(fresh):
    beats, reader = fresh

    def per_call_us(call):
        best = 1.0
        for _ in range(20):
            started_s = time.perf_counter()
            for _ in range(90):
                call()
            best = min(best, (time.perf_counter() - started_s) / 90)
            beats._send()
            os.read(reader, 1 << 20)
        return best * 1e6

    assert per_call_us(beats.step) < 5.0


@pytest.fixture
def asked(fresh, tmp_path, monkeypatch):
    """The emitter with a pipe for answers: what it reads, what it writes, and the pipe to answer into."""
    beats, reader = fresh
    fifo = tmp_path / "answers"
    os.mkfifo(fifo)
    monkeypatch.setenv("UNDERWATT_ANSWERS", str(fifo))
    answers = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)
    yield beats, reader, answers
    os.close(answers)


def test_an_asked_step_goes_out_whole_and_is_answered(asked):
    beats, reader, answers = asked
    os.write(answers, b"32 0.000000 0.000\n")
    beats.step(size=8)
    assert beats.ask(8) == 32
    step, ask = _lines(reader)
    assert isinstance(step, StepLine)
    assert (step.steps, step.batch_size, ask) == (1, 8, Sign.ASK)


def test_it_waits_as_long_as_it_is_told_and_asks_again(asked):
    beats, reader, answers = asked
    os.write(answers, b"32 0.100000 0.000\n")

    def answer_later():
        time.sleep(0.2)
        os.write(answers, b"16 0 0\n")

    thread = threading.Thread(target=answer_later)
    started_s = time.monotonic()
    thread.start()
    assert beats.ask(8) == 16
    thread.join()
    assert 0.2 <= time.monotonic() - started_s < 1.0
    assert _lines(reader) == [Sign.ASK, Sign.ASK]


def test_while_all_is_calm_it_asks_nobody(asked):
    beats, reader, answers = asked
    os.write(answers, b"32 0 30\n")
    assert [beats.ask(8) for _ in range(5)] == [32] * 5
    assert _lines(reader) == [Sign.ASK]


def test_a_listener_that_does_not_answer_is_waited_for_once(asked, monkeypatch):
    beats, _, answers = asked
    monkeypatch.setattr(beats, "ANSWER_S", 0.2)
    started_s = time.monotonic()
    assert beats.ask(8) == 8
    assert 0.15 <= time.monotonic() - started_s < 1.0
    started_s = time.monotonic()
    assert [beats.ask(8) for _ in range(100)] == [8] * 100
    assert time.monotonic() - started_s < 0.15
    os.write(answers, b"8 0 0\n" * 100 + b"64 0 0\n8 0 0\n")
    assert beats.ask(8) == 8, "answers are matched with questions, and the last one counts"
    monkeypatch.setattr(beats, "ANSWER_S", 10.0)
    os.write(answers, b"32 0 0\n")
    assert beats.ask(8) == 32, "and it waits again"


@pytest.mark.parametrize("answer", [b"x\n", b"\n", b"8\n", b"\xff 1 2\n", b"8 nan 0\n"])
def test_an_answer_that_makes_no_sense_raises_nothing(asked, monkeypatch, answer):
    beats, _, answers = asked
    monkeypatch.setattr(beats, "ANSWER_S", 0.2)
    os.write(answers, answer)
    assert beats.ask(16) in (8, 16)


def test_a_listener_that_is_gone_is_not_waited_for(asked):
    beats, _, answers = asked
    os.write(answers, b"32 0 0\n")
    assert beats.ask(8) == 32
    spare = os.open(os.devnull, os.O_RDONLY)
    os.dup2(spare, answers)
    os.close(spare)
    started_s = time.monotonic()
    assert beats.ask(8) == 32
    assert time.monotonic() - started_s < 1.0


def test_zero_is_the_end_and_oom_gives_the_next_size(asked):
    beats, reader, answers = asked
    os.write(answers, b"64 0 30\n")
    assert beats.ask(8) == 64
    os.write(answers, b"32 0 0\n")
    assert beats.oom(64) == 32
    assert _lines(reader) == [Sign.ASK, Said("oom", 64), Sign.ASK]
    os.write(answers, b"32 0 0\n")
    assert beats.oom(32) == 0, "there is none smaller"
    assert beats.oom(ValueError("wrong shape")) == 0
    os.write(answers, b"0 5 0\n")
    assert beats.ask(8) == 0


class Parent:
    """Answers each question with the next of some batch sizes, the last one for ever, and keeps what was said."""

    def __init__(self, reader: int, answers: int, sizes: Sequence[int]) -> None:
        self.said: list[object] = []
        self._reader, self._answers, self._sizes, self._stops = reader, answers, list(sizes), threading.Event()
        self._thread = threading.Thread(target=self._answer, daemon=True)
        self._thread.start()

    def _answer(self) -> None:
        while (waits := select.select([self._reader], [], [], 0.02)[0]) or not self._stops.is_set():
            for line in _lines(self._reader) if waits else ():
                self.said.append(line)
                if isinstance(line, Said) and line.word == "oom":
                    self._sizes = [16]
                if line is Sign.ASK:
                    size = self._sizes.pop(0) if len(self._sizes) > 1 else self._sizes[0]
                    os.write(self._answers, f"{size} 0 0\n".encode())

    def close(self) -> None:
        self._stops.set()
        self._thread.join()


@pytest.fixture
def trainer(asked):
    """A function that makes a loader over some numbers, whose questions are answered; and what it says."""
    beats, reader, answers = asked
    parents = []

    def make(sizes, samples=100, **more):
        torch = pytest.importorskip("torch")
        parents.append(Parent(reader, answers, sizes))
        return beats.loader([(torch.tensor([float(n)]), n) for n in range(samples)], batch_size=8, **more), parents[-1]

    yield beats, make
    for parent in parents:
        parent.close()


def test_the_loader_follows_the_batch_size(trainer):
    beats, make = trainer
    loader, parent = make([8, 16, 32, 64, 0])
    assert len(loader) == 13
    assert [len(batch) for batch, _ in loader] == [8, 16, 32, 44]
    assert [len(batch) for batch, _ in loader] == [], "told to end"
    assert loader.stopped
    beats.saved()
    parent.close()
    assert [line.batch_size for line in parent.said if isinstance(line, StepLine)] == [8, 16, 32, 44]
    assert parent.said[0] == Said("back")
    assert Said("away") in parent.said
    assert parent.said[-1] == Said("saved", 100)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_loader_hands_out_each_sample_once_also_when_memory_runs_out(trainer, workers):
    beats, make = trainer
    loader, _ = make([8, 64], shuffle=True, num_workers=workers)
    trained, failed = [], 0
    for _, numbers in loader:
        try:
            if len(numbers) > 16:
                raise RuntimeError("CUDA out of memory.")
        except RuntimeError as error:
            failed += 1
            if not beats.oom(error):
                raise
        else:
            trained += numbers.tolist()
    assert failed
    assert sorted(trained) == list(range(100))
    assert loader.position == 100


def test_the_loader_goes_on_where_it_was(trainer, monkeypatch):
    beats, make = trainer
    loader, parent = make([8, 16], shuffle=True)
    whole = [number for _, numbers in loader for number in numbers.tolist()]
    parent.close()
    monkeypatch.setattr(beats, "samples", 40)
    loader, _ = make([8, 32], shuffle=True)
    assert loader.epoch == 0
    assert [number for _, numbers in loader for number in numbers.tolist()] == whole[40:]
    assert loader.epoch == 1
    assert [number for _, numbers in loader for number in numbers.tolist()] != whole, "another order each time"


@pytest.mark.parametrize("scheduler_first", [True, False])
def test_the_loaders_rates_follow_the_batch_size_and_schedulers_see_their_own(trainer, scheduler_first):
    torch = pytest.importorskip("torch")
    _, make = trainer
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def schedule():
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda steps: 1.0 if steps < 4 else 0.5)

    scheduler = schedule() if scheduler_first else None
    make([8], optimizer=optimizer)[1].close()  # another one, which is not under way
    loader, parent = make([8, 16, 32, 32, 8], samples=110, optimizer=optimizer)
    scheduler = scheduler or schedule()
    steps = []
    for batch, _ in loader:
        before, weight.grad = weight.item(), torch.ones(1)
        optimizer.step()
        steps.append((len(batch), round(before - weight.item(), 4)))
        assert optimizer.param_groups[0]["lr"] == scheduler.get_last_lr()[0]
        scheduler.step()
    assert steps == [(8, 0.1), (16, 0.2), (32, 0.4), (32, 0.4), (8, 0.05), (8, 0.05), (6, 0.05)]
    parent.close()
    adam = torch.optim.Adam([weight], lr=0.1)
    loader, _ = make([32], optimizer=adam)
    for _ in loader:
        before, weight.grad = weight.item(), torch.ones(1)
        adam.step()
        assert before - weight.item() == pytest.approx(0.2, rel=1e-3), "by the square root"


@pytest.mark.parametrize("count", [60, 150])
def test_a_sampler_that_draws_is_asked_once_for_each_pass(trainer, count):
    torch = pytest.importorskip("torch")
    beats, make = trainer
    drawn = []

    class Drawing(torch.utils.data.RandomSampler):
        def __iter__(self):
            drawn.append(list(super().__iter__()))
            return iter(drawn[-1])

    sampler = Drawing(range(100), replacement=True, num_samples=count)
    loader, _ = make([8, 64, 16], sampler=sampler)
    assert len(loader) == -(-count // 8)
    trained = []
    for _, numbers in loader:
        if len(numbers) > 16:
            assert beats.oom()
        else:
            trained += numbers.tolist()
    assert [trained] == drawn
    assert (loader.position, loader.epoch) == (count, 1)


def test_the_loader_drops_what_is_left_only_where_it_is_to(trainer):
    beats, make = trainer
    loader, _ = make([32], drop_last=True)
    assert [len(batch) for batch, _ in loader] == [32, 32, 32]
    assert loader.epoch == 1
    with pytest.raises(TypeError, match="length"):
        beats.loader(iter([1]))


def test_a_step_that_is_told_beside_the_loader_is_not_counted_twice(trainer):
    """A script that reported its steps itself, and was given the loader."""
    beats, make = trainer
    loader, parent = make([8, 16, 32])
    for number, (batch, _) in enumerate(loader):
        if len(batch) == 32 and number == 2:
            assert beats.oom()
            continue
        beats.step()
        beats.step(count=2, size=4)
    for _ in loader:
        beats.step()
        break
    beats.step(size=5)
    beats._send()
    parent.close()
    told = [(line.steps, line.batch_size) for line in parent.said if isinstance(line, StepLine)]
    assert told == [(1, 8), (1, 16), *[(1, 16)] * 4, (1, 12), (1, 16), (1, 5)]


@pytest.mark.parametrize("is_left", [False, True])
def test_a_loader_within_the_loop_of_another_is_a_test_and_changes_nothing_of_it(trainer, monkeypatch, is_left):
    """The rates of the first one followed no more, its steps were told twice, and nothing said that they went on."""
    torch = pytest.importorskip("torch")
    beats, make = trainer
    monkeypatch.setattr(beats, "samples", 8)
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    loader, parent = make([16], optimizer=optimizer)
    test = beats.loader([(torch.zeros(1), n) for n in range(20)], batch_size=8)
    moved, tested = [], []
    for number, (batch, _) in enumerate(loader):
        before, weight.grad = weight.item(), torch.ones(1)
        optimizer.step()
        moved.append((len(batch), round(before - weight.item(), 4)))
        if number in (2, 4):
            for _, numbers in test:
                tested += numbers.tolist()
                if is_left and number == 4:
                    break
    parent.close()
    assert moved == [(16, 0.2)] * 5 + [(12, 0.2)]
    assert tested == [*range(20), *range(8 if is_left else 20)]
    told = [(line.steps, line.batch_size) for line in parent.said if isinstance(line, StepLine)]
    assert told == [(1, 16)] * 5 + [(1, 12)]
    ways = [line.word for line in parent.said if isinstance(line, Said)]
    assert ways == ["back", "away", "back", "away", "back", "away"]
    assert (loader.position, loader.epoch) == (100, 1)
