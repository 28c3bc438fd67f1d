"""What the server sends, and what it takes in."""

from __future__ import annotations

import logging

import pytest

pytest.importorskip("flwr", reason="Flower is not installed; `make test-fleet` runs this in an environment of its own")

from flwr.app import ConfigRecord
from flwr.serverapp.strategy import FedAvg

from underwatt.drivers.virtual.simulated_board import VirtualClock
from underwatt.errors import InputError
from underwatt.fleet import FleetStrategy
from underwatt.fleet.grid import SimulatedGrid, SimulatedNode
from underwatt.fleet.messages import KEY, Work
from underwatt.fleet.simulation import as_arrays, first_weights
from underwatt.fleet.site import Site
from underwatt.fleet.strategy import RoundRecord

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
