from __future__ import annotations

import threading
import time
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import pytest
from real_time import RealTime
from run_world import NET, Hurt, virtual, watts

from underwatt.budget import Budget, Schedule, parse_budget
from underwatt.control import publisher
from underwatt.control.level_search import MOST_ANEW
from underwatt.control.live_budget import LiveBudget
from underwatt.control.pilot import Pilot
from underwatt.control.state import ControlOptions, Phase
from underwatt.convergence.curve import SampleTable
from underwatt.convergence.prior import usual_shape
from underwatt.drivers.jetson.device import JetsonDevice
from underwatt.drivers.virtual.board_specs import BOARDS
from underwatt.drivers.virtual.simulated_board import VirtualBoard
from underwatt.drivers.virtual.sysfs import SysfsBoard
from underwatt.errors import ApplyError, BudgetError, InputError, OutOfMemoryError, SensorError
from underwatt.events import Event, Measured, Noted, Progressed, Resumed, Scored, Started
from underwatt.measure.meter import measure_idle
from underwatt.records import DeviceState, Measurement, PowerMode, Setting, Status, WorkloadInfo
from underwatt.runlog.inbox import Inbox, post_budget
from underwatt.runlog.log import RunLog, read_log

WORKLOAD = WorkloadInfo("job", "0123")


def make(device: Any, folder: Path | None = None, **more: Any) -> Pilot:
    log = RunLog(folder / "log.jsonl") if folder else None
    return Pilot(device, WORKLOAD, (8, 16, 32), watts(9.0), cost=NET, log=log, **more)


def train(pilot: Pilot, seconds: float, loss: Any = None) -> None:
    until_s = pilot.elapsed_s + seconds
    while pilot.elapsed_s < until_s:
        size = pilot.batch_size
        pilot.simulate(size)
        pilot.stepped(size, loss)


def test_gradients_that_are_hardly_noisy_make_batches_smaller_and_the_search_short() -> None:
    events: list[Event] = []
    with make(virtual(), convergence=usual_shape(), listener=events.append) as pilot:
        assert pilot.learns
        train(pilot, 90)
        largest, measured = pilot.batch_size, len([one for one in events if isinstance(one, Measured)])
        for _ in range(30):
            pilot.saw_gradients(1.0, 3.0)
        train(pilot, 60)
        assert pilot.batch_size < largest
        assert len([one for one in events if isinstance(one, Measured)]) <= measured + MOST_ANEW + 2, (
            "with a check of the device"
        )
    said = [one.text for one in events if isinstance(one, Noted) and "gradients" in one.text]
    assert len(said) == 1
    with make(virtual(), convergence=SampleTable({8: 100, 16: 100, 32: 100})) as pilot:
        assert not pilot.learns, "trainings to the target say more"


def test_what_others_change_at_the_knobs_is_said_in_the_log(tmp_path: Path) -> None:
    device, changes = virtual(), [("gpu/max_freq was set to 1 and now reads 2",), ()]
    device.foreign_changes = lambda: changes.pop(0) if len(changes) > 1 else ()  # type: ignore[attr-defined]
    with make(device, tmp_path) as pilot:
        train(pilot, 8)
    warned = [note.text for note in read_log(tmp_path / "log.jsonl").of(Noted) if note.level == "warning"]
    assert warned.count("gpu/max_freq was set to 1 and now reads 2") == 1


def test_progress_is_told_about_once_a_second(tmp_path: Path) -> None:
    with make(virtual(), tmp_path) as pilot:
        train(pilot, 30, loss=0.25)
        pilot.scored(0.5, 0.9, 0.1)
        pilot.outcome = "reached"
        samples, steps = pilot.samples, pilot.steps
    log = read_log(tmp_path / "log.jsonl")
    progress = log.of(Progressed)
    assert 20 <= len(progress) <= 31
    assert progress[-1].loss == 0.25
    assert all(event.budget_w == 9.0 for event in progress)
    assert [event.energy_j for event in progress] == sorted(event.energy_j for event in progress)
    assert log.of(Scored)[0].value == 0.5
    assert log.end is not None
    assert (log.end.outcome, log.end.samples, log.end.steps) == ("reached", samples, steps)
    assert len(log.power) >= 290


@pytest.mark.parametrize(
    ("given", "posted"), [("5Wh", "7W"), ("5Wh", "00:00-23:00=7W,else=6W"), ("20W peak", "7W mean")]
)
def test_watts_posted_to_a_run_that_had_no_mean_to_hold_are_held_by_pauses(
    tmp_path: Path, given: str, posted: str
) -> None:
    """Nothing can be set, so pauses are all there is, and what they draw must be known before they are needed."""
    device = Hurt(virtual(), knobs=False)
    live, inbox = LiveBudget(parse_budget(given)), Inbox(tmp_path)
    with (
        RunLog(tmp_path / "log.jsonl") as log,
        Pilot(device, WORKLOAD, (8, 16, 32), live, cost=NET, log=log, inbox=inbox) as pilot,
    ):
        train(pilot, 10)
        post_budget(tmp_path, posted, "command")
        train(pilot, 20)
        begin_s, begin_j = pilot.elapsed_s, device.board.energy_j
        train(pilot, 30)
        mean_w = (device.board.energy_j - begin_j) / (pilot.elapsed_s - begin_s)
        assert pilot.controller.pausing
    assert 6.8 <= mean_w <= 7.0 * 1.005
    idle_w = read_log(tmp_path / "log.jsonl").start.idle_w
    assert idle_w is not None
    assert idle_w == pytest.approx(measure_idle(virtual()), rel=0.02)


def test_a_share_of_the_way_counts_samples_by_their_batch_size() -> None:
    table = SampleTable({8: 8_000, 16: 10_000, 32: 20_000})
    with make(virtual(), convergence=table) as pilot:
        expected = 0.0
        for _ in range(200):
            size = pilot.batch_size
            pilot.simulate(size)
            pilot.stepped(size)
            expected += size / {8: 8_000, 16: 10_000, 32: 20_000}[size]
        assert pilot.share == pytest.approx(expected)


def test_a_part_of_a_training_goes_on_counting(tmp_path: Path) -> None:
    with make(virtual(), tmp_path) as pilot:
        train(pilot, 5)
        elapsed_s, energy_j, samples, steps = pilot.elapsed_s, pilot.energy_j, pilot.samples, pilot.steps
    again = make(virtual(), tmp_path, elapsed_s=elapsed_s)
    again.continues(samples=samples, steps=steps, share=0.1, energy_j=energy_j)
    with again:
        assert again.elapsed_s == pytest.approx(elapsed_s, abs=0.1)
        train(again, 5)
        assert again.samples > samples
        assert again.energy_j > 1.5 * energy_j
    log = read_log(tmp_path / "log.jsonl")
    assert len(log.of(Started)) == len(log.of(Resumed)) == 1
    assert log.energy_j() == pytest.approx(again.energy_j, rel=0.05)


def test_what_cannot_be_put_back_is_said_in_the_log(tmp_path: Path) -> None:
    device = Hurt(virtual())

    def refuse(_: object) -> None:
        raise ApplyError("The bus is gone.")

    with pytest.raises(ApplyError, match="put back"), make(device, tmp_path) as pilot:  # noqa: PT012
        train(pilot, 5)
        device.restore = refuse  # type: ignore[method-assign]
    end = read_log(tmp_path / "log.jsonl").end
    assert end is not None
    assert (end.outcome, end.restored) == ("failed", False)


def test_where_no_batch_is_small_enough_it_is_said() -> None:
    with make(virtual()) as pilot:
        train(pilot, 3)
        with pytest.raises(OutOfMemoryError, match="does not fit"):  # noqa: PT012
            while True:
                pilot.out_of_memory(pilot.batch_size)


def test_before_it_is_under_way_there_is_nothing_to_ask() -> None:
    with pytest.raises(InputError, match="with statement"):
        make(virtual()).batch_size  # noqa: B018


def test_nothing_is_set_where_modes_are_to_be_left_alone() -> None:
    device = Hurt(virtual(), knobs=False)  # it fails where a knob is set
    with make(device, set_modes=False) as pilot:
        train(pilot, 10)
    assert not any(mode.knobs() for mode in device.applied)


def test_a_listener_hears_what_the_log_is_told() -> None:
    heard: list[str] = []
    with make(virtual(), listener=lambda event: heard.append(event.kind)) as pilot:
        train(pilot, 10)
        pilot.note("info", "hello")
    assert heard[0] == "start"
    assert heard[-1] == "end"
    assert {"budget", "setting", "measured", "note"} <= set(heard)


def test_a_simulated_second_that_takes_long_is_told_of_meanwhile(tmp_path: Path) -> None:
    with make(virtual(), tmp_path) as pilot:
        until_s = time.monotonic() + 3.0
        while time.monotonic() < until_s:
            size = pilot.batch_size
            pilot.simulate(size)
            time.sleep(0.25)  # the real training behind it
            pilot.stepped(size)
        simulated_s = pilot.elapsed_s
    log = read_log(tmp_path / "log.jsonl")
    assert simulated_s < 2.0
    assert len(log.of(Progressed)) >= 2


def test_a_reading_that_hangs_holds_up_no_restoring(tmp_path: Path) -> None:
    device, order = RealTime(), []
    restore = device.restore
    device.restore = lambda snapshot: (order.append(time.monotonic()), restore(snapshot))  # type: ignore[method-assign]
    before = dict(device.snapshot())
    with make(device, tmp_path) as pilot:
        train(pilot, 0.5)
        assert dict(device.snapshot()) != before
        device.hang = threading.Event()
        time.sleep(0.3)
        ended_s = time.monotonic()
    assert order[0] - ended_s < 0.3, "before anybody waits for the sensor"
    assert time.monotonic() - ended_s < 3
    assert dict(device.snapshot()) == before
    log = read_log(tmp_path / "log.jsonl")
    assert any("hangs" in note.text for note in log.of(Noted))
    assert log.end.restored
    device.hang.set()


def test_settings_that_failed_or_were_disturbed_before_are_tried_again() -> None:
    device = Hurt(virtual(), knobs=False)
    known = [
        Measurement(Setting(PowerMode(), size), step_s=0.1, power_w=5.0, peak_w=5.0, status=status)
        for size, status in ((8, Status.FAILED), (16, Status.DISTURBED), (32, Status.FAILED))
    ]
    found: list[Measurement] = []

    def listen(event: Event) -> None:
        if isinstance(event, Measured):
            found.append(event.measurement)

    with make(device, set_modes=False, known=known, listener=listen) as pilot:
        train(pilot, 60)
    assert {m.setting.batch_size for m in found if m.usable} == {8, 16, 32}


def test_a_device_that_answers_nothing_any_more_ends_the_run_and_is_put_back(tmp_path: Path) -> None:
    """The training thread asks now and then whether the device slows itself down: it must not hang there."""
    device = RealTime()
    before, begun_s = dict(device.snapshot()), time.monotonic()
    with pytest.raises(SensorError), make(device, tmp_path, options=ControlOptions(lost_s=0.5)) as pilot:  # noqa: PT012
        train(pilot, 1.0)
        device.hang = threading.Event()
        train(pilot, 20)
    assert time.monotonic() - begun_s < 30
    assert dict(device.snapshot()) == before
    assert device.hang is not None
    device.hang.set()


def test_steps_of_the_fast_path_count_once_on_the_way_to_the_target() -> None:
    table = SampleTable({8: 80_000, 16: 100_000, 32: 200_000})
    told: list[float] = []
    with make(virtual(), convergence=table) as pilot:
        trained = 0.0
        quiet = 0
        for _ in range(3000):
            size = pilot.batch_size
            pilot.controller.progressed = told.append  # type: ignore[method-assign]
            pilot.simulate(size)
            trained += size / {8: 80_000, 16: 100_000, 32: 200_000}[size]
            pilot.stepped(size)
            quiet = max(quiet, pilot._fast.steps)
            if told:
                assert told[-1] <= trained * (1 + 1e-9)
        assert quiet > 1, "no step took the fast path: nothing was tested"


def test_a_listener_that_raises_on_the_sampling_thread_ends_the_training_and_not_the_sampling(tmp_path: Path) -> None:
    SysfsBoard.create(VirtualBoard(BOARDS["orin-nano"]), tmp_path / "board")
    device = JetsonDevice(tmp_path / "board")
    found, threads = dict(device.snapshot()), set()

    def listen(event: object) -> None:
        threads.add(threading.current_thread())
        if isinstance(event, Progressed) and threading.current_thread() is not threading.main_thread():
            raise ValueError("a listener's own")

    log = RunLog(tmp_path / "log.jsonl")
    pilot = Pilot(device, WORKLOAD, (8, 16), watts(15.0), log=log, listener=listen)
    until_s = time.monotonic() + 20
    with pytest.raises(ValueError, match="a listener's own"), pilot:  # noqa: PT012
        while time.monotonic() < until_s:
            time.sleep(0.02)
            pilot.stepped(pilot.batch_size)
    assert len(threads) == 2
    assert dict(device.snapshot()) == found
    end = read_log(tmp_path / "log.jsonl").end
    assert end is not None
    assert (end.outcome, end.restored) == ("failed", True)


def test_a_device_that_once_does_not_say_its_state_is_asked_again(tmp_path: Path) -> None:
    """One failed look ended the watch over what others do at the knobs."""
    device, asked_s = virtual(), []

    def foreign_changes() -> tuple[str, ...]:
        asked_s.append(device.clock.now_s())
        if len(asked_s) < 3:
            raise SensorError("too busy")
        return ("gpu/max_freq was set to 1 and now reads 2",) if len(asked_s) == 3 else ()

    device.foreign_changes = foreign_changes  # type: ignore[attr-defined]
    with make(device, tmp_path) as pilot:
        train(pilot, 60)
    waits_s = [after - before for before, after in pairwise(asked_s)]
    assert waits_s[0] >= 10
    assert waits_s[1] >= 20
    assert waits_s[2] < 10, "as often as before where it says its state again"
    texts = [note.text for note in read_log(tmp_path / "log.jsonl").of(Noted)]
    assert texts.count("gpu/max_freq was set to 1 and now reads 2") == 1


def test_a_device_that_hangs_when_asked_for_what_others_did_holds_up_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """The training waited for it without a limit, up to minutes."""
    monkeypatch.setattr(publisher, "STATE_S", 0.1, raising=False)
    device, answer, asked_s = virtual(), threading.Event(), []

    def foreign_changes() -> tuple[str, ...]:
        asked_s.append(device.clock.now_s())
        answer.wait(2)
        return ("gpu/max_freq was set to 1 and now reads 2",)

    device.foreign_changes = foreign_changes  # type: ignore[attr-defined]
    said: list[Event] = []
    with make(device, listener=said.append) as pilot:
        train(pilot, 60)
        waits_s = [after - before for before, after in pairwise(asked_s)]
        assert all(after > 1.5 * before for before, after in pairwise([5.0, *waits_s]))
        answer.set()
        train(pilot, 5)
    assert any("now reads 2" in one.text for one in said if isinstance(one, Noted)), "what is said late is heard"


@pytest.mark.parametrize("logs", [True, False])
def test_a_device_that_never_says_its_state_is_asked_ever_more_rarely_and_that_is_said_once(
    tmp_path: Path, logs: bool
) -> None:
    device, asked_s = virtual(), []

    def read_state() -> DeviceState:
        asked_s.append(device.clock.now_s())
        raise SensorError("The thermal zones are gone.")

    device.read_state = read_state  # type: ignore[method-assign]
    said: list[Event] = []
    with make(device, tmp_path if logs else None, listener=said.append) as pilot:
        train(pilot, 90)
    waits_s = [after - before for before, after in pairwise(asked_s)]
    assert all(after > 1.5 * before for before, after in pairwise([2.5, *waits_s]))
    texts = [note.text for note in said if isinstance(note, Noted) and note.level == "warning"]
    assert len([text for text in texts if text.startswith("The thermal zones are gone. Whether it slows")]) == 1


def test_what_goes_wrong_with_a_reading_ends_the_training_and_not_the_readings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended the thread that reads power, and ten seconds later the run, whose sensor was blamed."""
    SysfsBoard.create(VirtualBoard(BOARDS["orin-nano"]), tmp_path / "board")
    device = JetsonDevice(tmp_path / "board")
    main, said = threading.current_thread(), Pilot._say_progress

    def fails_elsewhere(pilot: Pilot) -> None:
        if threading.current_thread() is not main:
            raise RuntimeError("dictionary changed size during iteration")
        said(pilot)

    monkeypatch.setattr(Pilot, "_say_progress", fails_elsewhere)
    pilot = Pilot(device, WORKLOAD, (8, 16), watts(15.0), log=RunLog(tmp_path / "log.jsonl"))
    until_s = time.monotonic() + 20
    with pytest.raises(RuntimeError, match="changed size"), pilot:  # noqa: PT012
        while time.monotonic() < until_s:
            time.sleep(0.02)
            pilot.stepped(pilot.batch_size)


@pytest.mark.parametrize("jitter_w", [0.0, 0.01])
def test_joules_that_go_while_nothing_holds_the_budget_are_not_waited_for(jitter_w: float) -> None:
    """The last checkpoint waited for ten minutes, drawing on, for watts that waiting was above."""
    device, jitter = Hurt(virtual()), cycle((0.0, jitter_w, 2 * jitter_w))
    device.surge_w = lambda: next(jitter)
    live = LiveBudget(Budget(schedule=Schedule.of([(0.0, 9.0), (40.0, 0.5)]), energy_j=390.0))
    with Pilot(device, WORKLOAD, (8, 16, 32), live, cost=NET) as pilot:
        while pilot.energy_left_j > 0:
            size = pilot.batch_size
            pilot.simulate(size)
            pilot.stepped(size)
        for work in (pilot.moving_state, pilot.testing, pilot.testing):
            begin_s = pilot.elapsed_s
            with work():
                device.run_step(NET, 8)
                worked_s = pilot.elapsed_s - begin_s
            assert pilot.elapsed_s - begin_s - worked_s < 10


def test_without_joules_what_waiting_can_pay_for_is_still_paid() -> None:
    device = Hurt(virtual(), knobs=False)
    with Pilot(device, WORKLOAD, (8, 16, 32), watts(7.0, energy_j=400.0), cost=NET) as pilot:
        while pilot.energy_left_j > 0:
            size = pilot.batch_size
            pilot.simulate(size)
            pilot.stepped(size)
        begin_s, begin_j = pilot.elapsed_s, device.board.energy_j
        with pilot.testing():
            while pilot.elapsed_s < begin_s + 10:
                device.run_step(NET.of_test(), 32)
        mean_w = (device.board.energy_j - begin_j) / (pilot.elapsed_s - begin_s)
    assert 0.92 * 7.0 < mean_w < 1.02 * 7.0


def test_what_is_saved_within_a_test_is_a_part_of_it() -> None:
    """The inner one turned the pacer back to steps, and the rest of the test was paid back by nobody: 8% too much."""
    device = virtual("orin-nano")
    with Pilot(device, WORKLOAD, (8, 16, 32), watts(5.0), cost=NET, set_modes=False) as pilot:
        train(pilot, 60.0)
        begin_s, begin_j = pilot.elapsed_s, device.board.energy_j
        for _ in range(4):
            with pilot.testing():
                until_s = pilot.elapsed_s + 10.0
                while pilot.elapsed_s < until_s:
                    device.run_step(NET, 32)
                with pilot.moving_state():
                    pass
            train(pilot, 20.0)
        mean_w = (device.board.energy_j - begin_j) / (pilot.elapsed_s - begin_s)
    assert 0.97 * 5.0 < mean_w < 1.01 * 5.0


@pytest.mark.parametrize("knobs", [True, False])
@pytest.mark.parametrize("known", [True, False])
def test_a_run_that_starts_at_watts_that_nothing_holds_waits_for_others(knobs: bool, known: bool) -> None:
    """As one does that is under way when they come; a unit that is started at night would have ended with an error."""
    told: list[Event] = []
    measured: list[Measurement] = []
    if known:
        with Pilot(
            Hurt(virtual(), knobs=knobs), WORKLOAD, (8, 16), watts(9.0), cost=NET, listener=told.append
        ) as pilot:
            train(pilot, 60)
        measured = [event.measurement for event in told if isinstance(event, Measured)]
        told.clear()
    live = LiveBudget(Budget(schedule=Schedule.of([(0.0, 0.5), (60.0, 9.0)])))
    given: dict[str, Any] = {"cost": NET, "listener": told.append, "known": measured}
    with Pilot(Hurt(virtual(), knobs=knobs), WORKLOAD, (8, 16), live, **given) as pilot:
        assert 60 <= pilot.elapsed_s < 61
        assert pilot.samples == 0
        assert any("cannot be held, and training waits" in event.text for event in told if isinstance(event, Noted))
        train(pilot, 120)
        assert pilot.controller.phase is Phase.HOLDING
        assert pilot.power_w < 1.02 * 9.0
        assert "cannot be held" in pilot.controller.verdict.why


def test_only_watts_that_are_still_to_come_count() -> None:
    budget = Budget(schedule=Schedule.of([(0.0, 9.0), (10.0, 0.5), (20.0, 0.4)]))
    with (
        pytest.raises(BudgetError, match=r"0\.5 W is less"),
        Pilot(virtual(), WORKLOAD, (8,), LiveBudget(budget), cost=NET, elapsed_s=12.0),
    ):
        pass


def test_joules_that_go_while_a_start_waits_end_it() -> None:
    live = LiveBudget(Budget(schedule=Schedule.of([(0.0, 0.5), (6000.0, 9.0)]), energy_j=100.0))
    with Pilot(virtual(), WORKLOAD, (8,), live, cost=NET) as pilot:
        assert pilot.energy_left_j <= 0
        assert pilot.elapsed_s < 600
