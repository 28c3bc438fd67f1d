"""What the server sends, and what it takes in."""

from __future__ import annotations

import logging

import pytest

pytest.importorskip("flwr", reason="Flower is not installed; `make test-fleet` runs this in an environment of its own")

from flwr.app import ConfigRecord
from flwr.serverapp.strategy import FedAvg

from underwatt.drivers.virtual.simulated_board import VirtualClock
from underwatt.fleet import FleetStrategy
from underwatt.fleet.grid import SimulatedGrid, SimulatedNode
from underwatt.fleet.messages import KEY, Work
from underwatt.fleet.simulation import as_arrays, first_weights
from underwatt.fleet.site import Site

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
