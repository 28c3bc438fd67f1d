"""What the server sends, and what it takes in."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

pytest.importorskip("flwr", reason="Flower is not installed; `make test-fleet` runs this in an environment of its own")

from flwr.app import ConfigRecord
from flwr.serverapp.strategy import FedAvg

from underwatt.drivers.virtual.simulated_board import VirtualClock
from underwatt.errors import InputError
from underwatt.fleet import FleetStrategy
from underwatt.fleet.grid import SimulatedGrid, SimulatedNode
from underwatt.fleet.messages import KEY, Report, Work
from underwatt.fleet.simulation import as_arrays, first_weights
from underwatt.fleet.site import Site
from underwatt.fleet.strategy import BoardState, RoundRecord

logging.getLogger("flwr").setLevel(logging.ERROR)


def _grid(*nodes: int) -> SimulatedGrid:
    return SimulatedGrid([SimulatedNode(node, VirtualClock()) for node in nodes], lambda message, _context: message)


def _asked(strategy: FleetStrategy, grid: SimulatedGrid, kind: str) -> dict[int, Work]:
    configure = getattr(strategy, f"configure_{kind}")
    messages = configure(1, as_arrays(first_weights(0)), ConfigRecord(), grid)
    return {one.metadata.dst_node_id: Work.read(dict(one.content[KEY])) for one in messages}


def test_evaluations_are_at_the_floors_so_that_a_sites_watts_hold_in_them() -> None:
    grid, nodes = _grid(*range(1, 11)), range(1, 11)
    site = Site("40W", floor_w=3.0)
    strategy = FleetStrategy(FedAvg(), site=site, clock=grid)
    asked = _asked(strategy, grid, "evaluate")
    assert {node: (work.floor_w, work.lease_s) for node, work in asked.items()} == dict.fromkeys(nodes, (3.0, 0.0))
    assert site.drawn_w(0.0, ()) == dict.fromkeys(nodes, 3.0)  # and the site counts with them


def test_without_a_site_evaluations_are_as_the_strategy_inside_asks_for_them() -> None:
    grid = _grid(1, 2)
    messages = FleetStrategy(FedAvg(), clock=grid).configure_evaluate(
        1, as_arrays(first_weights(0)), ConfigRecord(), grid
    )
    assert all(KEY not in one.content for one in messages)


def test_a_board_that_joins_and_has_no_floor_is_left_out_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    strategy = FleetStrategy(FedAvg(), site=Site("40W", floor_w={1: 3.0, 2: 3.0}), clock=_grid())
    for kind in ("train", "evaluate", "train"):
        assert set(_asked(strategy, _grid(1, 2), kind)) == {1, 2}
        assert set(_asked(strategy, _grid(1, 2, 3), kind)) == {1, 2}
    said = [record.getMessage() for record in caplog.records if record.name == "underwatt.fleet"]
    assert len([one for one in said if "board 3" in one]) == 1
    assert strategy.boards.keys() == {1, 2}


def test_a_site_that_knows_no_floor_of_any_board_is_an_error_before_anything_was_trained() -> None:
    strategy = FleetStrategy(FedAvg(), site=Site("40W", floor_w={1: 3.0, 2: 3.0}), clock=_grid())
    with pytest.raises(InputError, match="floor"):
        _asked(strategy, _grid(3, 4), "train")
    strategy.rounds.append(RoundRecord(1, 0.0, 1.0, 1.0))
    assert _asked(strategy, _grid(3, 4), "train") == {}


def _spend(strategy: FleetStrategy, *nodes: int) -> None:
    for node in nodes:
        strategy.boards[node] = BoardState(report=Report.without_work(1.0, 1.0))


@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_where_few_boards_can_do_something_they_are_the_ones_that_are_sampled(kind: str) -> None:
    """Boards without joules were sampled and then left out, so that most rounds asked nobody."""
    inner = FedAvg(fraction_train=0.2, fraction_evaluate=0.2, min_available_nodes=3)
    strategy, grid = FleetStrategy(inner, clock=_grid()), _grid(*range(1, 11))
    _spend(strategy, *range(1, 10))
    configure = getattr(strategy, f"configure_{kind}")
    for number in range(1, 21):
        messages = configure(number, as_arrays(first_weights(0)), ConfigRecord(), grid)
        assert [one.metadata.dst_node_id for one in messages] == [10]
    _spend(strategy, 10)
    assert not configure(21, as_arrays(first_weights(0)), ConfigRecord(), grid)
    assert (inner.min_available_nodes, inner.min_train_nodes, inner.min_evaluate_nodes) == (3, 2, 2)


def test_boards_without_a_floor_are_not_sampled_either() -> None:
    floors = {1: 3.0, 2: 3.0}
    strategy = FleetStrategy(FedAvg(fraction_train=0.2), site=Site("40W", floor_w=floors), clock=_grid())
    for _ in range(20):
        assert set(_asked(strategy, _grid(*range(1, 11)), "train")) == {1, 2}


def test_boards_that_are_to_connect_are_waited_for_and_those_that_can_do_something_sampled_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grid, there = _grid(*range(1, 7)), [[], [1], [1, 2, 3, 4, 5, 6]]
    monkeypatch.setattr(grid, "get_node_ids", lambda: there.pop(0) if len(there) > 1 else there[0])
    monkeypatch.setattr("flwr.serverapp.strategy.strategy_utils.sleep", lambda _seconds: None)
    site = Site("40W", floor_w={5: 3.0, 6: 3.0})
    strategy = FleetStrategy(FedAvg(fraction_train=0.3, min_available_nodes=4), site=site, clock=_grid())
    assert set(_asked(strategy, grid, "train")) == {5, 6}


def test_training_ends_where_all_are_spent_but_one_that_is_left_out() -> None:
    grid, rounds = _grid(1, 2, 3), []
    strategy = FleetStrategy(FedAvg(fraction_evaluate=0.0), site=Site("40W", floor_w={1: 3.0, 2: 3.0}), clock=grid)
    _spend(strategy, 1, 2)
    arrays = as_arrays(first_weights(0))
    strategy.start(grid, arrays, num_rounds=3, evaluate_fn=lambda number, _arrays: rounds.append(number))
    assert rounds == [0]


def test_a_board_whose_share_is_its_floor_is_not_asked_unless_it_was_silent_or_all_are() -> None:
    leases = {node: {"lease_w": watts, "floor_w": 2.0} for node, watts in ((1, 5.0), (2, 2.0), (3, 2.0))}
    report = replace(Report.without_work(1.0, 1.0, spent=False), front_batch=(8,), front_w=(4.0,))
    states = [BoardState(report=report), BoardState(report=report), BoardState(report=report, missed=1)]
    assert FleetStrategy._without_watts([1, 2, 3], states, leases) == {2}
    assert states[1].report is not None
    assert states[1].report.front_batch == ()  # next time it gets a share as a new one would
    assert states[0].report == report
    assert FleetStrategy._without_watts([2], [BoardState(report=report)], leases) == set()
