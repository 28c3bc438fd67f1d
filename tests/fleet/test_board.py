"""A board's side of rounds, on virtual boards: what it may spend over all of them."""

from __future__ import annotations

import logging
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed; `make test-fleet` runs this in an environment of its own")

from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg

from underwatt.budget import Budget, Schedule
from underwatt.drivers.virtual.device import VirtualJetson, open_virtual
from underwatt.errors import BudgetError
from underwatt.fleet import FleetStrategy, mod, round as fleet_round
from underwatt.fleet.board import Local, _under_way
from underwatt.fleet.grid import SimulatedGrid, SimulatedNode
from underwatt.fleet.messages import KEY, Report, Work, read_profile
from underwatt.fleet.simulation import as_arrays, first_weights
from underwatt.jobs.load import RESNET18

logging.getLogger("flwr").setLevel(logging.ERROR)


class _Board:
    """A node with its board, for messages one by one."""

    def __init__(self, budget: str | Budget, kind: str = "nano", seed: int = 1) -> None:
        self.device: VirtualJetson = open_virtual(f"{kind}?seed={seed}")
        self.context = Context(0, 1, {}, RecordDict(), {})
        self.options = {"device": self.device, "budget": budget, "cost": RESNET18}
        SimulatedGrid([], lambda message, _context: message)  # messages want an identity

    def message(self, work: Work | None, kind: str = "train") -> Message:
        content = {} if work is None else {KEY: ConfigRecord(work.as_record())}
        return Message(RecordDict(content), 1, kind)

    def round(self, work: Work | None) -> Local:
        return fleet_round(self.context, self.message(work), **self.options)

    def train(self, work: Work | None) -> Report:
        with self.round(work) as local:
            for _ in local.sizes(data=400):
                local.step(0.1)
        assert local.report is not None
        return Report.read(dict(local.records()[KEY]))

    def evaluate(self, work: Work | None, call: Any = lambda: None) -> None:
        mod(**self.options)(self.message(work, "evaluate"), self.context, lambda *_: call())


@pytest.mark.parametrize("watts", ["5W, ", "4W peak, ", ""])
def test_joules_are_for_all_rounds_and_a_board_without_any_says_so(watts: str) -> None:
    board = _Board(f"{watts}60J")
    reports, drawn_j = [], 0.0
    while not (reports and reports[-1].spent):
        begun_j = board.device.board.energy_j
        reports.append(board.train(Work(train_s=6.0)))
        drawn_j += board.device.board.energy_j - begun_j
        board.device.clock.advance(1.0)
        assert len(reports) < 20
    assert len(reports) > 3
    step_j = max(report.energy_j / report.steps for report in reports if report.steps)
    assert 60 - 1.5 * step_j < drawn_j < 60 + step_j
    assert sum(report.energy_j for report in reports) == pytest.approx(drawn_j, rel=0.08)  # the sensor lags
    again = board.train(Work(train_s=6.0))
    assert (again.spent, again.steps, again.progress) == (True, 0, 0.0)


def test_a_round_ends_where_its_joules_do() -> None:
    report = _Board("5W, 30J").train(Work(train_s=600.0))
    assert report.spent
    assert 20 < report.energy_j < 36


def test_joules_for_the_way_to_a_first_step_are_counted_before_it() -> None:
    report = _Board("5W, 2J").train(Work(train_s=6.0))
    assert (report.spent, report.steps) == (True, 0)


def test_a_deadline_is_one_for_all_rounds() -> None:
    board = _Board("5W, 15s")
    reports = [board.train(Work(train_s=6.0)) for _ in range(5)]
    assert [bool(report.steps) for report in reports] == [True, True, True, True, False]
    assert [report.spent for report in reports] == [False, False, False, True, True]
    step_s = max(report.train_s / report.steps for report in reports if report.steps)
    assert 15 <= sum(report.busy_s for report in reports) < 15 + step_s  # a round's first step is made


def test_evaluations_take_from_the_joules_and_there_are_none_without() -> None:
    board = _Board("5W, 30J")
    for _ in range(3):
        board.evaluate(Work(), lambda: board.device.clock.advance(5.0))
    assert board.context.state[KEY]["energy-j"] > 15
    board.train(Work(train_s=600.0))
    with pytest.raises(BudgetError, match="joules"):
        board.evaluate(Work())


def test_a_board_without_joules_does_not_call_the_app() -> None:
    board, called = _Board("5W, 2J"), []
    board.train(Work(train_s=6.0))
    app = mod(**board.options)
    reply = app(board.message(Work(train_s=6.0)), board.context, lambda *_: called.append(1))
    assert Report.read(dict(reply.content[KEY])).spent
    with pytest.raises(BudgetError, match="joules"):  # an error is what strategies of Flower's own leave out
        app(board.message(None), board.context, lambda *_: called.append(1))
    assert not called


def _fleet(*budgets: str) -> SimulatedGrid:
    devices = [open_virtual(f"nano?seed={at}") for at in range(len(budgets))]

    def app(message: Message, context: Context) -> Message:
        at = context.node_id - 1
        with fleet_round(context, message, device=devices[at], budget=budgets[at], cost=RESNET18) as local:
            for _ in local.sizes(data=400):
                local.step(0.1)
        metrics = MetricRecord({"num-examples": 400})
        content = {"arrays": message.content["arrays"], "metrics": metrics, **local.records()}
        return Message(RecordDict(content), reply_to=message)

    nodes = [SimulatedNode(at + 1, device.clock, latency_s=0.1) for at, device in enumerate(devices)]
    return SimulatedGrid(nodes, app)


def test_the_server_asks_no_board_without_joules_and_ends_where_none_has_any() -> None:
    grid = _fleet("5W, 30J", "5W, 60J")
    strategy = FleetStrategy(FedAvg(fraction_evaluate=0.0), clock=grid)
    strategy.start(grid, as_arrays(first_weights(0)), num_rounds=1000)
    asked = [sum(one.node_id == node for one in grid.exchanges) for node in (1, 2)]
    assert 1 < asked[0] < asked[1] < 30
    assert strategy.boards[1].spent
    assert strategy.boards[2].spent
    assert all(not one.lacking for one in strategy.rounds)


def _tested_w(board: _Board, work: Work | None, *, batches: int = 20, batch_size: int = 8) -> tuple[float, float]:
    """Mean watts of an evaluation, from the test's begin to the reply; and what the board may draw in it."""
    allowed_w, begun = [], []

    def test() -> None:
        local = _under_way.get()
        assert local is not None
        assert local._pilot is not None
        allowed_w.append(local._pilot.controller.budget_w)
        begun.append((board.device.clock.now_s(), board.device.board.energy_j))
        for _ in range(batches):
            board.device.run_step(RESNET18, batch_size)

    board.evaluate(work, test)
    (begun_s, begun_j), ended_s = begun[0], board.device.clock.now_s()
    return (board.device.board.energy_j - begun_j) / (ended_s - begun_s), allowed_w[0]


def test_without_a_lease_a_board_draws_its_floor_also_in_evaluations() -> None:
    board = _Board("8W", kind="tx2")
    assert _tested_w(board, Work())[1] == 8.0  # nobody has said anything of a site
    drawn_w, allowed_w = _tested_w(board, Work(floor_w=4.0))
    assert allowed_w == 4.0
    assert 3.8 < drawn_w < 4.1
    board.train(Work(train_s=6.0, lease_w=7.0, lease_s=20.0, floor_w=3.5))
    for silent in (None, Work()):  # as it was said before
        drawn_w, allowed_w = _tested_w(board, silent)
        assert allowed_w == 3.5
        assert 3.3 < drawn_w < 3.6
    with board.round(Work(train_s=1.0)) as local:
        assert local._live_budget().power_w(0.0) == 3.5
    assert _tested_w(_Board("3W", kind="nano"), Work(floor_w=4.0))[1] == 3.0  # its own limit holds too


def test_a_lease_ends_at_the_floor_and_a_lower_budget_of_its_own_holds_after_it_too() -> None:
    falls = Budget(schedule=Schedule.of([(0.0, 9.0), (15.0, 3.0)]))
    with _Board(falls, kind="tx2").round(Work(lease_w=7.0, lease_s=10.0, floor_w=3.5)) as local:
        live = local._live_budget()
    assert [live.power_w(at_s) for at_s in (0.0, 9.9, 10.0, 14.9, 15.0, 1000.0)] == [7.0, 7.0, 3.5, 3.5, 3.0, 3.0]


def test_what_a_test_draws_above_the_boards_own_budget_is_paid_back_before_the_reply() -> None:
    assert 3.8 < _tested_w(_Board("4W", kind="tx2"), None)[0] < 4.1


@pytest.mark.parametrize("batches", [1, 2, 5, 10, 40])
@pytest.mark.parametrize(("kind", "floor_w"), [("orin-nano", 4.0), ("orin-nano", 4.5), ("tx2", 3.5), ("tx2", 4.0)])
def test_a_brief_test_is_paid_back_too_before_the_reply(kind: str, floor_w: float, batches: int) -> None:
    """A sensor that lags has not shown it at its end: nothing was waited for, and means were up to 66% above."""
    board, begun, tested_s = _Board("15W", kind=kind), [], []

    def test() -> None:
        begun.append((board.device.clock.now_s(), board.device.board.energy_j))
        for _ in range(batches):
            board.device.run_step(RESNET18.of_test(), 32)
        tested_s.append(board.device.clock.now_s() - begun[0][0])

    board.evaluate(Work(floor_w=floor_w), test)
    seconds, drawn_j = board.device.clock.now_s() - begun[0][0], board.device.board.energy_j - begun[0][1]
    assert drawn_j < 1.01 * floor_w * seconds
    # Not for longer than that takes, and than a sensor lags in any case.
    assert drawn_j > 0.97 * floor_w * seconds - 1.0 or seconds - tested_s[0] < 2.6


@pytest.mark.parametrize("extra_w", [1.85, 2.2, 4.0])
@pytest.mark.parametrize("rounds", [0, 2])
def test_where_waiting_pays_nothing_back_any_more_the_reply_is_sent(rounds: int, extra_w: float) -> None:
    """Another process came after the test; where waiting was seen to draw too much, there was no reply any more."""
    board, marks = _Board("15W", kind="tx2"), []
    clock = board.device.clock
    for _ in range(rounds):
        board.train(Work(train_s=8.0))

    def is_late(_: float) -> None:
        assert not marks or clock.now_s() < marks[0] + 300, "no reply comes"

    clock.on_move(is_late)

    def test() -> None:
        for _ in range(20):
            board.device.run_step(RESNET18.of_test(), 32)
        board.device.board.disturb(extra_w=extra_w)
        marks.append(clock.now_s())

    board.evaluate(Work(floor_w=4.0), test)
    assert 5 < clock.now_s() - marks[0] < 40


@pytest.mark.parametrize("batches", [5, 40])
def test_a_test_within_the_watts_is_waited_for_no_longer_than_a_sensor_lags(batches: int) -> None:
    board, marks = _Board("30W", kind="tx2"), []

    def test() -> None:
        for _ in range(batches):
            board.device.run_step(RESNET18.of_test(), 32)
        marks.append(board.device.clock.now_s())

    board.evaluate(None, test)
    assert board.device.clock.now_s() - marks[0] < (2.6 if batches == 5 else 0.1)


def test_a_test_that_tells_of_its_batches_waits_between_them() -> None:
    board, marks = _Board("4W", kind="tx2"), []
    with board.round(None) as local, local.evaluating() as tested:
        for _ in range(20):
            tested(32)
            marks.append((board.device.clock.now_s(), board.device.board.energy_j))
    (begin_s, begin_j), (end_s, end_j) = marks[9], marks[-1]
    assert end_j - begin_j < 1.05 * 4.0 * (end_s - begin_s)


def test_an_unreadable_profile_of_another_board_ends_no_round() -> None:
    shared = _Board("5W", seed=2).train(Work(train_s=40.0)).profile
    board = _Board("5W")
    assert board.train(Work(train_s=6.0, references=("no JSON", '{"device": 3}', shared))).steps
    with board.round(Work(references=("no JSON", shared))) as local:
        assert len(local._borrow(())) == len(read_profile(shared).measurements) > 0
