"""A command that asks what to do, in real time on a fake device that draws more while a step is under way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from steady_fake import SteadyFake
from train_world import log_in

from underwatt.budget import Budget
from underwatt.control.live_budget import LiveBudget
from underwatt.control.pilot import Pilot
from underwatt.errors import InputError, OutOfMemoryError, StepError
from underwatt.events import Measured, Noted, Scored
from underwatt.jobs import emitter
from underwatt.jobs.command import CommandWorkload, Limits
from underwatt.jobs.command_run import run_command
from underwatt.jobs.runs import Run, RunOptions, RunResult
from underwatt.records import Measurement, PowerMode, PowerSample, Setting, Status
from underwatt.runlog.inbox import post_budget
from underwatt.store.store import Store

PYENV = Path.home() / ".pyenv/versions"
IDLE_W, BUSY_W = 3.0, 7.0


def old_pythons() -> list[object]:
    """This Python, and older ones where this machine has them."""
    found: list[object] = [pytest.param(sys.executable, id="this")]
    for version in ("3.6", "3.8"):
        paths = sorted(PYENV.glob(f"{version}.*/bin/python")) + sorted(Path("/usr/bin").glob(f"python{version}"))
        marks = () if paths else pytest.mark.skip(reason=f"there is no Python {version} here")
        found.append(pytest.param(str(paths[-1]) if paths else "", id=version, marks=marks))
    return found


class BusyFake(SteadyFake):
    """Draws more while the command says, by a file, that it is in a step."""

    def __init__(self, flag: Path) -> None:
        super().__init__()
        self._flag = flag

    def read_power(self) -> PowerSample:
        self._power_w = BUSY_W if self._flag.exists() else IDLE_W
        return super().read_power()


# A step takes 10 ms and a third of a millisecond for each sample.
SCRIPT = """
import os, sys, time
import underwatt_beat as beat
flag, note = sys.argv[1], open(sys.argv[2], "a")
def train(size):
    open(flag, "w").close()
    time.sleep(0.01 + size / 3000.0)
    os.remove(flag)
    note.write("%d\\n" % size); note.flush()
"""
ASKING = """
size = beat.ask(8)
while size:
    train(size)
    beat.step(size=size)
    size = beat.ask(size)
beat.saved(12)
"""


class World:
    """A folder with a script, our file beside it, and a place for the run."""

    def __init__(self, folder: Path, script: str, python: str = sys.executable) -> None:
        self.folder, self.run_folder, self.note = folder, folder / "run", folder / "note"
        (folder / "underwatt_beat.py").write_text(Path(emitter.__file__).read_text())
        (folder / "train.py").write_text(SCRIPT + textwrap.dedent(script))
        self._command = [python, str(folder / "train.py"), str(folder / "flag"), str(self.note)]
        self._device = BusyFake(folder / "flag")

    def run(
        self,
        power_w: float = 5.0,
        sizes: tuple[int, ...] = (8, 32),
        watch: Callable[[Pilot], None] = lambda _: None,
        **options: object,
    ) -> RunResult:
        workload = CommandWorkload(self._command, limits=Limits(20.0, 10.0, 1.0))
        budget = Budget(power_w=power_w, energy_j=options.pop("energy_j", None))
        known = options.pop("known", False)
        with Store(self.folder / "store.db") as store:
            if known:
                seen = [
                    Measurement(
                        Setting(PowerMode(), n), 0.01 + n / 3000, BUSY_W, BUSY_W, step_s_ci95=1e-4, power_w_ci95=0.1
                    )
                    for n in sizes
                ]
                store.add(store.profile_id(self._device.info, workload.info), seen)
            given = RunOptions(**options)
            made = Run(given, self._device, LiveBudget(budget), self.run_folder, store, sizes, watch=watch)
            return run_command(made, workload)

    @property
    def sizes(self) -> list[int]:
        return [int(size) for size in self.note.read_text().split()]

    @property
    def notes(self) -> str:
        return "\n".join(event.text for event in log_in(self.run_folder).of(Noted))


def until(seconds: float) -> Callable[[Pilot], None]:
    """Stop a run after so long, as Ctrl-C does."""

    def watch(pilot: Pilot) -> None:
        if pilot.elapsed_s > seconds:
            raise KeyboardInterrupt

    return watch


@pytest.mark.parametrize("python", old_pythons())
def test_batch_size_and_pauses_follow_the_budget(tmp_path: Path, python: str) -> None:
    world = World(tmp_path, ASKING, python)
    measured: set[int] = set()

    def watch(pilot: Pilot) -> None:
        if len(log_in(world.run_folder).of(Measured)) == 2 and pilot.steps % 20 == 0:
            measured.add(pilot.samples)
        if measured and pilot.samples > min(measured) + 2000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        world.run(watch=watch)
    sizes = world.sizes
    assert set(sizes) == {8, 32}, "started once, and resized on the way"
    assert sizes[-1] == 32, "the faster one by far"
    power = log_in(world.run_folder).power
    assert np.mean(power.power_w[power.at_s > power.at_s[-1] - 2]) < 6.0, "by pauses"


def test_it_is_given_time_to_end(tmp_path: Path) -> None:
    world = World(tmp_path, ASKING)
    ended = world.run(6.0, (8,), known=True, limit_samples=100)
    assert ended.outcome == "limit"
    assert ended.samples == sum(world.sizes) >= 100
    kept = json.loads((world.run_folder / "command.json").read_text())
    assert kept["position"] == 12, "what it saved at the end"
    assert not kept["done"], "with more samples it can go on"


def test_the_mean_of_a_paused_command_is_the_budget(tmp_path: Path) -> None:
    world = World(tmp_path, ASKING)
    posted: list[float] = []

    def watch(pilot: Pilot) -> None:
        if pilot.elapsed_s > 7 and not posted:
            posted.append(pilot.elapsed_s)
            post_budget(world.run_folder, "3.8W", "command")
        until(13.0)(pilot)

    with pytest.raises(KeyboardInterrupt):
        world.run(4.5, (32,), watch, known=True)
    power = log_in(world.run_folder).power
    for begin_s, end_s, watts in ((1.0, posted[0], 4.5), (posted[0] + 1, 13.0, 3.8)):
        piece = (power.at_s > begin_s) & (power.at_s < end_s)
        assert np.mean(power.power_w[piece]) == pytest.approx(watts, rel=0.1)


def test_out_of_memory_is_told_the_next_size(tmp_path: Path) -> None:
    world = World(
        tmp_path,
        """
        size = beat.ask(8)
        for _ in range(400):
            if size > 16:
                size = beat.oom(size)
                assert 0 < size <= 16, size
            train(size)
            beat.step(size=size)
            size = beat.ask(size)
        """,
    )
    assert world.run(6.0, (8, 64)).outcome == "finished"
    assert set(world.sizes) == {8}
    found = {e.measurement.setting.batch_size: e.measurement.status for e in log_in(world.run_folder).of(Measured)}
    assert found == {8: Status.OK, 64: Status.OUT_OF_MEMORY}


def test_a_process_that_dies_for_memory_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    world = World(
        tmp_path,
        """
        note.write("0%d\\n" % (1000 + beat.samples)); note.flush()
        size, done = beat.ask(8), beat.samples
        while size and done < 3000:
            if size > 16:
                sys.exit("RuntimeError: CUDA out of memory. Tried to allocate 2 GiB")
            train(size)
            done += size
            beat.step(size=size)
            beat.saved(done)
            size = beat.ask(size)
        """,
    )
    ended = world.run(6.0, (8, 64))
    assert ended.outcome == "finished"
    starts, sizes = [n - 1000 for n in world.sizes if n >= 1000], [n for n in world.sizes if n < 1000]
    assert len(starts) == 2
    assert starts[0] == 0 < starts[1], "told what it had saved"
    assert sum(sizes) == ended.samples
    assert "goes on from its checkpoint" in world.notes


def test_where_no_batch_size_fits_the_run_ends(tmp_path: Path) -> None:
    world = World(tmp_path, "beat.ask(8)\nbeat.oom(8)\ntime.sleep(9)")
    with pytest.raises(OutOfMemoryError):
        world.run(6.0, (8,))


def stop_at_700(pilot: Pilot) -> None:
    if pilot.samples > 700:
        raise KeyboardInterrupt


def test_killed_and_resumed(tmp_path: Path) -> None:
    world = World(
        tmp_path,
        """
        done, size = beat.samples, beat.ask(8)
        note.write("0%d\\n" % (10000 + done)); note.flush()
        while size and done < 2000:
            train(size)
            done += size
            beat.step(size=size)
            if done % 256 == 0:
                beat.saved()
            size = beat.ask(size)
        """,
    )
    with pytest.raises(KeyboardInterrupt):
        world.run(6.0, (8,), stop_at_700, known=True)
    with pytest.raises(InputError, match="There is a run in"):
        world.run(6.0, (8,), known=True)
    first = sum(n for n in world.sizes if n < 10000)
    ended = world.run(6.0, (8,), known=True, resume=True)
    starts = [n - 10000 for n in world.sizes if n >= 10000]
    assert starts[0] == 0
    assert 0 < starts[1] <= first
    assert starts[1] % 256 == 0
    assert ended.samples == pytest.approx(2000, abs=8)
    with pytest.raises(InputError, match="has ended: finished"):
        world.run(6.0, (8,), known=True, resume=True)


def test_scores_losses_and_tests_are_a_jobs(tmp_path: Path) -> None:
    world = World(
        tmp_path,
        """
        size, score = beat.ask(8), 0.0
        while size:
            for _ in range(40):
                train(size)
                beat.step(size=size)
                size = beat.ask(size) or sys.exit(0)
            score += 0.25
            beat.away(); time.sleep(0.1); beat.metric(score); beat.back()
            beat.loss(1 - score)
        """,
    )
    ended = world.run(6.0, (8,), known=True, target=0.7)
    assert (ended.outcome, ended.score) == ("reached", 0.75)
    log = log_in(world.run_folder)
    assert [(event.value, event.target) for event in log.of(Scored)] == [(0.25, 0.7), (0.5, 0.7), (0.75, 0.7)]


def test_the_joules_end_it(tmp_path: Path) -> None:
    world = World(tmp_path, ASKING)
    ended = world.run(6.0, (8,), known=True, energy_j=25.0)
    assert ended.outcome == "energy spent"
    assert ended.samples == sum(world.sizes)


def test_a_loss_that_is_no_number_ends_it(tmp_path: Path) -> None:
    script = ASKING.replace("    train(size)", '    train(size); beat.loss(float("nan"))')
    assert World(tmp_path, script).run(6.0, (8,), known=True).outcome == "diverged"


@pytest.mark.parametrize(
    "script",
    [
        "beat.ask(8); train(8); beat.step(size=8); sys.exit('no more data')",
        "beat.ask(8); os.kill(os.getpid(), 9)",
        "beat.ask(8); open(os.environ['UNDERWATT_BEATS'], 'wb').write(b'x' * 300000); sys.exit('enough')",
    ],
    ids=["fails", "killed", "a huge line"],
)
def test_one_that_dies_is_told_of(tmp_path: Path, script: str) -> None:
    with pytest.raises(StepError, match=r"no more data|signal 9|enough"):
        World(tmp_path, script).run(6.0, (8,))


def test_one_that_floods_or_reads_no_answers_takes_no_memory(tmp_path: Path) -> None:
    flood = """
        with open(os.environ["UNDERWATT_BEATS"], "w") as pipe:
            for _ in range(30000):
                pipe.write("ask\\nloss 1\\nmetric 2\\n?\\nstep - 1 8\\n")
    """
    world = World(tmp_path, flood)
    ended = world.run(20.0, (8,), known=True)
    assert (ended.outcome, ended.steps) == ("finished", 30000)


def test_one_that_stops_asking_is_watched_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("underwatt.jobs.command_run.UNASKED_S", 0.5)
    script = "size = beat.ask(8)\nfor _ in range(300):\n    train(8)\n    beat.step(size=8)"
    world = World(tmp_path, script)
    assert world.run(4.5, (8,), known=True).steps == 300
    assert "has stopped asking" in world.notes


def test_its_forked_workers_are_no_matter(tmp_path: Path) -> None:
    script = """
        pid = os.fork()
        if pid == 0:
            time.sleep(0.5)
            os._exit(0)
        size = beat.ask(8)
        for _ in range(50):
            train(size)
            beat.step(size=size)
            size = beat.ask(size)
        os.waitpid(pid, 0)
    """
    assert World(tmp_path, script).run(20.0, (8,), known=True).steps == 50


def test_underwatt_killed_leaves_no_command(tmp_path: Path) -> None:
    world = World(tmp_path, ASKING)
    driver = f"""
        import sys
        sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1] / "helpers")]!r}
        from pathlib import Path
        import test_partner
        world = test_partner.World(Path(sys.argv[1]), test_partner.ASKING)
        world.run(6.0, (8,), known=True)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(driver), str(tmp_path)]) as process:
        deadline_s = time.monotonic() + 90
        while not world.note.exists() or len(world.sizes) < 20:
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    time.sleep(2.0)
    trained = len(world.sizes)
    time.sleep(0.3)
    assert len(world.sizes) == trained
    (tmp_path / "flag").unlink(missing_ok=True)
    ended = world.run(6.0, (8,), known=True, resume=True, limit_samples=100)
    assert ended.outcome == "limit"
