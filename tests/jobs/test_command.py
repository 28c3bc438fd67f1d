from __future__ import annotations

import itertools
import math
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from underwatt.errors import JobError, OutOfMemoryError, StepError
from underwatt.jobs.command import (
    LONGEST_LINE,
    CommandRate,
    CommandWorkload,
    Limits,
    Said,
    Sign,
    StepLine,
    parse_line,
    split_lines,
)

QUICK = Limits(first_beat_s=10.0, beat_s=10.0, grace_s=1.0)
BEAT = 'echo step > "$UNDERWATT_BEATS"'


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _gone(pids, within_s=5.0) -> bool:
    deadline_s = time.monotonic() + within_s
    while any(map(_alive, pids)) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return not any(map(_alive, pids))


def _pids(path: Path, count: int) -> list[int]:
    deadline_s = time.monotonic() + 10
    while time.monotonic() < deadline_s:
        if path.exists() and len(pids := path.read_text().split()) >= count:
            return [int(pid) for pid in pids]
        time.sleep(0.02)
    raise AssertionError("the job did not start")


def shell(script: str, limits: Limits = QUICK):
    return CommandWorkload(["sh", "-c", script, "job", "{batch_size}"], limits=limits).start(8)


def python(script: str, limits: Limits = QUICK):
    command = [sys.executable, "-c", textwrap.dedent(script), "{batch_size}"]
    return CommandWorkload(command, limits=limits).start(8)


@pytest.fixture
def scratch(tmp_path, monkeypatch):
    """A folder for temporary files that is this test's alone."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return folder


class TestArguments:
    def test_placeholders_are_filled_and_other_braces_stay(self):
        work = CommandWorkload(
            ["train", "--b={batch_size}", "--lr", "{lr}", "{x}", '{"a": {}}'], rate=CommandRate(1e-3, 128)
        )
        assert work.arguments(32) == ["train", "--b=32", "--lr", "0.0005", "{x}", '{"a": {}}']

    def test_a_command_without_a_place_for_the_batch_size_must_ask(self):
        with pytest.raises(JobError, match="neither asks for a batch size nor has a place") as caught:
            CommandWorkload(["sh", "-c", f"{BEAT}; sleep 100"], limits=QUICK).start(8).step()
        assert "{batch_size}" in caught.value.hint

    def test_a_place_for_the_rate_without_a_rate_is_refused(self):
        with pytest.raises(JobError, match="no learning rate"):
            CommandWorkload(["train", "{batch_size}", "{lr}"])

    def test_a_program_that_is_not_there_is_named(self):
        with pytest.raises(JobError, match="no program 'no-such-program'"):
            CommandWorkload(["no-such-program", "{batch_size}"]).start(1)

    def test_identity_follows_the_script(self, tmp_path):
        script = tmp_path / "train.py"
        script.write_text("1")
        command = ["python", str(script), "{batch_size}"]
        first = CommandWorkload(command).info
        assert CommandWorkload(command).info == first
        script.write_text("2")
        assert CommandWorkload(command).info.id != first.id


class TestBeats:
    def test_a_shell_loop_beats_and_ends(self, scratch):
        run = shell(f"for i in 1 2 3; do sleep 0.2; {BEAT}; done; echo metric $1 > $UNDERWATT_BEATS")
        steps, times_s = 0, []
        while (beat := run.step()) is not None:
            steps += beat.steps
            times_s.append(beat.at_s)
        assert steps == 3
        assert times_s == sorted(times_s)
        assert times_s[-1] - times_s[0] >= 0.15
        assert times_s[-1] <= time.monotonic()
        assert run.metrics == (8.0,)
        assert run.step() is None
        run.stop()
        assert not list(scratch.iterdir())

    def test_the_senders_own_times_are_kept_where_they_can_be_true(self):
        run = python(
            """
            import os, time
            now = time.monotonic()
            text = f"step {now + 0.001:.6f}\\nstep {now + 0.002:.6f} 3\\nstep 12.5\\nstep {now + 1e6}\\n"
            time.sleep(0.1)
            with open(os.environ["UNDERWATT_BEATS"], "w") as pipe:
                pipe.write(text)
            """
        )
        first, second, past, future = (run.step() for _ in range(4))
        run.stop()
        assert second.at_s - first.at_s == pytest.approx(0.001, abs=2e-6)
        assert second.steps == 3
        assert second.at_s + 0.05 < past.at_s <= future.at_s <= time.monotonic()

    def test_python_with_the_emitter(self):
        run = python(
            """
            import time
            from underwatt.jobs import emitter
            while True:
                time.sleep(0.002)
                emitter.step()
            """
        )
        beats = [run.step() for _ in range(200)]
        run.stop()
        gaps_s = [b.at_s - a.at_s for a, b in itertools.pairwise(beats)]
        assert min(gaps_s) >= 0.0019
        assert sorted(gaps_s)[100] < 0.01

    def test_garbage_on_stdout_is_no_matter(self):
        run = shell(f"yes 'step oom metric' | head -c 3000000; {BEAT}; head -c 100000 /dev/urandom; {BEAT}")
        steps = 0
        while (beat := run.step()) is not None:
            steps += beat.steps
        assert steps == 2

    def test_garbage_between_beats_is_ignored(self):
        run = shell(f"echo hello > $UNDERWATT_BEATS; {BEAT}; sleep 0.1")
        assert run.step().steps == 1
        assert run.step() is None


class TestFaults:
    def test_a_command_that_dies_says_so_with_its_last_words(self):
        run = python(
            """
            from underwatt.jobs import emitter
            emitter.step(); emitter.step()
            raise ValueError("no such layer")
            """
        )
        run.step(), run.step()
        with pytest.raises(StepError, match=r"exit code 1 after 2 steps: ValueError: no such layer\.") as caught:
            run.step()
        assert "Traceback" in caught.value.hint
        with pytest.raises(StepError, match="exit code 1"):
            run.step()

    def test_a_command_killed_by_a_signal(self):
        run = shell(f"{BEAT}; kill -SEGV $$")
        run.step()
        with pytest.raises(StepError, match="killed by signal 11 after 1 steps"):
            run.step()

    def test_a_command_that_hangs_is_ended(self, tmp_path):
        run = shell(f"echo $$ > {tmp_path}/pid; {BEAT}; sleep 100", Limits(10.0, 0.3, 0.5))
        run.step()
        with pytest.raises(StepError, match=r"reported 1 steps and then none for 0\.3 s"):
            run.step()
        assert _gone(_pids(tmp_path / "pid", 1), within_s=0)

    @pytest.mark.parametrize(("away_s", "comes_back"), [(30.0, True), (0.3, False)])
    def test_a_test_of_the_model_may_take_longer_than_a_step(self, away_s, comes_back):
        run = shell(f"{BEAT}; sleep 1; echo back > $UNDERWATT_BEATS", Limits(10.0, 0.3, 0.5, away_s))
        run.step()
        run.is_away = True  # as where it has said so
        if comes_back:
            assert run.hear() == Said("back")
        else:
            with pytest.raises(StepError, match=r"none for 0\.3 s"):
                run.hear()
        run.stop()

    def test_a_command_that_never_beats_is_ended(self):
        run = shell("echo loading; sleep 100", Limits(1.5, 10.0, 0.5))
        with pytest.raises(StepError, match=r"1\.5 s without reporting a step") as caught:
            run.step()
        assert "loading" in caught.value.hint
        assert "UNDERWATT_BEATS" in caught.value.hint

    def test_a_command_that_ends_without_a_beat(self):
        with pytest.raises(StepError, match="ended without reporting a step"):
            shell("true").step()

    @pytest.mark.parametrize("script", ["yes 'loss: 0.3' > $UNDERWATT_BEATS", "echo 'loss: 0.3' > $UNDERWATT_BEATS"])
    def test_nothing_but_garbage_beats_is_said_clearly(self, script):
        with pytest.raises(StepError, match=r"lines that are not beats, such as 'loss: 0\.3'"):
            shell(script).step()

    def test_a_flood_of_beats_takes_no_memory(self):
        run = shell("yes step > $UNDERWATT_BEATS")
        assert run.step().steps >= 1
        time.sleep(0.3)
        run.stop()
        assert run._listener.events.qsize() < 100_000

    @pytest.mark.parametrize(
        "script",
        [
            "echo oom > $UNDERWATT_BEATS; sleep 100",
            "echo 'torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB' >&2; exit 1",
        ],
    )
    def test_out_of_memory_is_told_apart(self, script):
        with pytest.raises(OutOfMemoryError, match="Batch size 8"):
            shell(script).step()


class TestNoOrphans:
    # A child, a child that ignores SIGTERM, and one that left the session and its parent.
    TREE = """
        import os, signal, subprocess, sys, time
        note = open(sys.argv[2], "a")
        sleeper = [sys.executable, "-c", "import time; time.sleep(100)"]
        stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(100)"
        pids = [os.getpid(), subprocess.Popen(sleeper).pid, subprocess.Popen([sys.executable, "-c", stubborn]).pid]
        away = subprocess.Popen(["sh", "-c", "setsid sleep 100 & echo $!"], stdout=subprocess.PIPE)
        pids.append(away.stdout.readline())
        note.write(" ".join(str(int(pid)) for pid in pids)); note.close()
        from underwatt.jobs import emitter
        while True:
            emitter.step(); time.sleep(0.05)
    """

    def _command(self, note: Path) -> list[str]:
        return [sys.executable, "-c", textwrap.dedent(self.TREE), "{batch_size}", str(note)]

    def test_stop_ends_the_whole_tree(self, tmp_path):
        run = CommandWorkload(self._command(tmp_path / "pids"), limits=QUICK).start(1)
        run.step()
        pids = _pids(tmp_path / "pids", 4)
        assert all(map(_alive, pids))
        run.stop()
        assert _gone(pids, within_s=0)
        run.stop()

    def test_what_a_finished_command_left_behind_is_ended(self, tmp_path):
        run = shell(f"sleep 100 & echo $! > {tmp_path}/pid; {BEAT}")
        run.step()
        assert run.step() is None
        assert _gone(_pids(tmp_path / "pid", 1), within_s=0)

    @pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Popen says it was forgotten
    def test_a_forgotten_run_is_ended(self, tmp_path):
        run = CommandWorkload(self._command(tmp_path / "pids"), limits=QUICK).start(1)
        pids = _pids(tmp_path / "pids", 4)
        del run
        assert _gone(pids)

    @pytest.mark.parametrize("victim", ["underwatt", "guard"])
    def test_kill_9_leaves_no_orphan(self, tmp_path, scratch, victim):
        driver = """
            import sys
            from underwatt.jobs.command import CommandWorkload, Limits
            run = CommandWorkload(sys.argv[2:], limits=Limits(10, 1, 0.5)).start(1)
            run.step()
            print(run._guard.pid, flush=True)
            while run.step(): pass
        """
        command = [sys.executable, "-c", textwrap.dedent(driver), "-", *self._command(tmp_path / "pids")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            guard = int(process.stdout.readline())
            pids = _pids(tmp_path / "pids", 4)
            assert all(map(_alive, pids))
            os.kill(process.pid if victim == "underwatt" else guard, signal.SIGKILL)
            process.wait(timeout=20)
        if victim == "underwatt":
            assert _gone([guard, *pids])
            assert not list(scratch.iterdir())
        else:
            assert _gone(pids[:3])  # one that left the session can only be found by the guard
            if _alive(pids[3]):
                os.kill(pids[3], signal.SIGKILL)


@pytest.mark.parametrize(
    ("raw", "line"),
    [
        (b"step", StepLine()),
        (b"  step \r", StepLine()),
        (b"step 5120.25", StepLine(5120.25)),
        (b"step 5120.25 10", StepLine(5120.25, 10)),
        (b"step - 10", StepLine(None, 10)),
        (b"step 5120.25 10 32", StepLine(5120.25, 10, 32)),
        (b"step - 1 32", StepLine(None, 1, 32)),
        (b"ask", Sign.ASK),
        (b"metric 0.913", Said("metric", 0.913)),
        (b"loss 2.31", Said("loss", 2.31)),
        (b"oom", Said("oom")),
        (b"oom 64", Said("oom", 64)),
        (b"saved", Said("saved")),
        (b"saved 0", Said("saved", 0)),
        (b"away", Said("away")),
        (b"back", Said("back")),
    ],
)
def test_each_documented_line_is_understood(raw, line):
    assert parse_line(raw) == line


@pytest.mark.parametrize(
    "raw",
    b"|Step|steps|step nan|step inf 1|step 1 0|step 1 -3|step 1 1.5|step 1 2 0|step 1 2 3 4|metric|metric nan"
    b"|oom now|oom 0|ask 3|saved -1|step 1 9999999999999999|\xff\xfe step|loss: 0.3".split(b"|"),
)
def test_anything_else_is_not(raw):
    assert parse_line(raw) is None


@given(st.binary(max_size=300))
def test_no_bytes_break_the_parser(raw):
    line = parse_line(raw)
    if isinstance(line, StepLine):
        assert line.steps >= 1
        assert line.at_s is None or math.isfinite(line.at_s)


@given(st.lists(st.binary(min_size=1, max_size=20).filter(lambda b: b"\n" not in b and b.strip())), st.data())
def test_lines_come_out_whole_however_they_are_cut(lines, data):
    stream = b"".join(line + b"\n" for line in lines)
    rest, found = b"", []
    while stream:
        cut = data.draw(st.integers(1, len(stream)))
        whole, rest = split_lines(rest + stream[:cut])
        found += whole
        stream = stream[cut:]
    assert found == lines


def test_a_line_that_never_ends_takes_no_memory():
    rest = b""
    for _ in range(100):
        lines, rest = split_lines(rest + b"x" * 65536)
        assert all(len(line) <= LONGEST_LINE for line in [*lines, rest])
