"""Flower's strategy and apps, real learning, virtual boards: in the environment of ``make test-fleet``."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed; `make test-fleet` runs this in an environment of its own")
pytest.importorskip("sklearn", reason="the digits come with scikit-learn")

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.serverapp.strategy import FedAdam, FedXgbBagging

from underwatt.budget import Budget, Schedule
from underwatt.errors import InputError
from underwatt.fleet import FleetStrategy, round as fleet_round
from underwatt.fleet.messages import KEY, Work, read_profile
from underwatt.fleet.simulation import BoardPlan, FleetPlan, SimulatedFleet, Task
from underwatt.fleet.site import Site
from underwatt.fleet.strategy import BoardState

logging.getLogger("flwr").setLevel(logging.ERROR)


@pytest.fixture(scope="module")
def task() -> Task:
    return Task.digits(600, 300, filters=(48, 96))


def _plan(*boards: tuple[str, str], **more: object) -> FleetPlan:
    return FleetPlan(
        boards=tuple(BoardPlan(kind=kind, budget=Budget.of(watts)) for kind, watts in boards),
        **{"limit_s": 40.0, "target": 2.0, **more},  # type: ignore[arg-type]
    )


BOARDS = (("nano", "3W"), ("tx2", "8W"), ("orin-nano", "6W"))


def test_unlike_boards_learn_together_within_their_watts_and_hardly_wait(task: Task) -> None:
    plan = _plan(*BOARDS)
    record = SimulatedFleet(plan, task).run()
    assert record.scores[-1][1] > 0.75 > record.scores[0][1]
    assert record.idle_share < 0.06
    for board, watts in zip(plan.boards, record.watts, strict=True):
        assert board.budget.course is not None
        assert watts.over_share(board.budget.course, record.ended_s) < 0.005
        assert watts.energy_j(record.ended_s) > 0.6 * board.budget.course.power_w(0) * record.ended_s
    last = record.rounds[-1]
    steps = {node: report.samples for node, report in last.reports.items()}
    assert max(steps.values()) > 1.3 * min(steps.values())  # each does what it can
    assert all(report.front_batch for report in last.reports.values())


def test_a_board_that_is_lost_ends_no_round_for_long_and_the_others_go_on(task: Task) -> None:
    plan = _plan(*BOARDS)
    boards = (plan.boards[0], replace(plan.boards[1], lost_s=15.0), plan.boards[2])
    record = SimulatedFleet(replace(plan, boards=boards), task).run()
    lacking = [one for one in record.rounds if one.lacking]
    assert {node for one in lacking for node in one.lacking} == {2}
    usual_s = np.median([one.ended_s - one.begun_s for one in record.rounds])
    assert max(one.ended_s - one.begun_s for one in lacking) < usual_s + 4.0
    assert set(record.rounds[-1].reports) == {1, 3}


def test_a_schedule_goes_on_from_round_to_round(task: Task) -> None:
    falls = Budget(schedule=Schedule.of([(0.0, 9.0), (15.0, 6.0)]))
    boards = (BoardPlan(kind="tx2", budget=falls), BoardPlan(kind="tx2", budget=Budget.of("9W")))
    record = SimulatedFleet(replace(_plan(*BOARDS), boards=boards), task).run()
    means_w = []
    for watts in record.watts:
        at_s, power_w = map(np.array, watts.power_w(record.ended_s))
        means_w.append(power_w[(at_s > 20) & (at_s < 38)].mean())
    assert means_w[0] < 6.05
    assert means_w[0] < means_w[1] - 0.5


def test_a_site_shares_its_watts_also_while_messages_are_lost(task: Task) -> None:
    plan = _plan(("nano", "7W"), ("tx2", "15W"), ("tx2-nx", "14W"), loss=0.1)
    floors = {1: 1.6, 2: 3.2, 3: 2.9}
    site = Site(Budget(schedule=Schedule.of([(0.0, 20.0), (20.0, 16.0)])), floors, delivery_s=2.0)
    record = SimulatedFleet(plan, task).run(site=site)
    grid = np.arange(1.0, record.ended_s)
    total_j = sum(np.interp(grid, watts.at_s, watts.joules) for watts in record.watts)
    for begin, energy_j in zip(grid[:-5], total_j[5:] - total_j[:-5], strict=True):
        allowed_j = 5 * (20.0 if begin + 5 <= 20.0 else 16.0 if begin >= 20.0 else 20.0)
        assert energy_j <= 1.01 * allowed_j
    assert record.scores[-1][1] > 0.5


def test_a_board_of_the_same_kind_starts_from_what_another_has_measured(task: Task) -> None:
    fleet = SimulatedFleet(_plan(("nano", "3W"), ("tx2", "8W"), limit_s=60.0), task)
    strategy = FleetStrategy()
    measured = fleet.run().rounds[-1].reports
    for node, report in measured.items():
        strategy._profiles[report.kind] = {node: report.profile}
    late = SimulatedFleet(_plan(("nano", "3W"), seed=7), task)
    message = Message(
        RecordDict({KEY: ConfigRecord(Work(references=strategy._references(9, BoardState())).as_record())}), 1, "train"
    )
    context = Context(0, 1, {}, RecordDict(), {})
    local = fleet_round(context, message, device=late.devices[0], budget="3W", cost=task.cost)
    nano = {one.setting for one in read_profile(measured[1].profile).measurements}
    assert {one.setting for one in local._borrow(())} == nano  # and not the other board's
    assert len(nano) >= 3
    assert strategy._references(1, BoardState(report=measured[1])) == ()  # it has its own
    assert strategy._references(9, BoardState(report=measured[1])) == (measured[1].profile,)
    assert strategy._references(9, BoardState(report=measured[1], searched=True)) == ()
    with local:
        for size in local.sizes(data=100):
            local.step(0.1 * size)
            if local._clock.now_s() > local._begun_s + 8.0:
                break
    assert local.report is not None
    idle_s = 2.0  # what waiting draws is measured first
    assert local.report.samples / (local.report.train_s - idle_s) > 0.85 * measured[1].samples / measured[1].train_s
    assert local.report.over <= 0.02


def test_short_rounds_measure_settings_and_lose_none_of_it_at_their_ends(task: Task) -> None:
    device = SimulatedFleet(_plan(("nano", "3.25W")), task).devices[0]
    context = Context(0, 1, {}, RecordDict(), {})
    measured = []
    for train_s in (4.5, 2.5, 2.5, 2.5):
        work = Work(train_s=train_s)
        message = Message(RecordDict({KEY: ConfigRecord(work.as_record())}), 1, "train")
        with fleet_round(context, message, device=device, budget="3.25W", cost=task.cost) as local:
            for size in local.sizes(data=400):
                local.step(0.1 * size)
        measured.append(len(read_profile(local.report.profile).measurements))
        device.clock.advance(1.0)
    assert measured[0] >= 1  # although the first round has 2.5 s for it
    assert measured == sorted(measured)
    assert measured[-1] >= 4


def test_a_round_too_short_for_anything_is_a_step(task: Task) -> None:
    device = SimulatedFleet(_plan(("nano", "3.25W")), task).devices[0]
    message = Message(RecordDict({KEY: ConfigRecord(Work(train_s=0.5).as_record())}), 1, "train")
    context = Context(0, 1, {}, RecordDict(), {})
    with fleet_round(context, message, device=device, budget="3.25W", cost=task.cost) as local:
        for size in local.sizes(data=400):
            local.step(0.1 * size)
    assert KEY in local.records()
    assert local.report is not None
    assert local.report.steps == 1


def test_a_lease_too_small_for_any_step_ends_a_round_and_no_training(task: Task) -> None:
    work = ("flops_per_sample", "bytes_per_sample", "bytes_per_step", "kernels_per_step", "load_bytes_per_sample")
    cost = replace(task.cost, **{name: 60 * getattr(task.cost, name) for name in work})  # steps of seconds
    device = SimulatedFleet(_plan(("nano", "7W")), task).devices[0]
    context = Context(0, 1, {}, RecordDict(), {})
    reports = []
    for lease_w in (6.0, 1.7):
        given = Work(train_s=40.0, lease_w=lease_w, lease_s=50.0, floor_w=1.6)
        message = Message(RecordDict({KEY: ConfigRecord(given.as_record())}), 1, "train")
        with fleet_round(context, message, device=device, budget="7W", cost=cost) as local:
            for size in local.sizes(data=400):
                local.step(0.1 * size)
        reports.append(local.report)
        device.clock.advance(1.0)
    assert reports[0].steps > 4
    assert reports[1].steps <= 4  # of the one setting that is measured first
    assert not reports[1].spent


def test_boards_of_one_kind_share_what_they_measure_while_they_search(task: Task) -> None:
    alone = SimulatedFleet(_plan(("nano", "3.2W"), ("tx2", "8W"), limit_s=14.0), task).run()
    together = SimulatedFleet(_plan(("nano", "3.2W"), ("nano", "3.6W"), ("nano", "4W"), limit_s=14.0), task).run()
    known = [len({*record.rounds[1].reports[1].front_s}) for record in (alone, together)]
    assert known[1] > known[0]


def test_only_strategies_that_combine_updates_can_be_led() -> None:
    assert isinstance(FleetStrategy(FedAdam()).inner, FedAdam)
    with pytest.raises(InputError, match="FedXgbBagging"):
        FleetStrategy(FedXgbBagging())


def test_plans_are_read_from_tables() -> None:
    plan = FleetPlan.read(
        {
            "skew": 0.5,
            "network": {"latency_s": 0.2, "loss": 0.1},
            "boards": [{"kind": "nano", "budget": "4W", "count": 2}, {"kind": "tx2", "budget": "9W", "lost_s": 60}],
        }
    )
    assert [one.kind for one in plan.boards] == ["nano", "nano", "tx2"]
    assert (plan.skew, plan.loss, plan.boards[0].latency_s, plan.boards[2].lost_s) == (0.5, 0.1, 0.2, 60)
    with pytest.raises(InputError, match="watts"):
        FleetPlan.read({"boards": [{"kind": "nano", "budget": "4W", "watts": 3}]})
    with pytest.raises(InputError, match="no boards"):
        FleetPlan.read({"skew": 0.5})


def test_data_are_dealt_by_skew(task: Task) -> None:
    classes = task.train[1]

    def most_of_one_class(skew: float | None) -> float:
        shares = task.shares(5, skew, 1)
        assert sorted(np.concatenate(shares).tolist()) == list(range(len(classes)))
        return float(np.mean([np.bincount(classes[rows]).max() / len(rows) for rows in shares]))

    assert most_of_one_class(None) < most_of_one_class(0.5) < most_of_one_class(0.1)


def test_messages_are_plain_enough_for_flower(task: Task) -> None:
    fleet = SimulatedFleet(_plan(*BOARDS, limit_s=8.0), task)
    record = fleet.run()
    report = record.rounds[0].reports[1]
    assert type(report).read(dict(ConfigRecord(report.as_record()))) == report
    assert KEY == "underwatt"
    assert math.isfinite(report.power_w)
