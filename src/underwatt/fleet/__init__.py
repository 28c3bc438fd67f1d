"""Many unlike boards, each with its own watts, one model: Underwatt for Flower.

A board's side is ``mod`` and ``batches`` (or ``round``), the server's ``FleetStrategy``; ``SimulatedGrid`` runs both
without a network.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from underwatt.fleet.board import (
        BoardOptions as BoardOptions,
        Local as Local,
        batches as batches,
        mod as mod,
        round as round,  # noqa: A004 - as users write it
    )
    from underwatt.fleet.grid import SimulatedGrid as SimulatedGrid, SimulatedNode as SimulatedNode
    from underwatt.fleet.site import Site as Site
    from underwatt.fleet.strategy import FleetStrategy as FleetStrategy

_PLACES = {
    "BoardOptions": "board",
    "FleetStrategy": "strategy",
    "Local": "board",
    "SimulatedGrid": "grid",
    "SimulatedNode": "grid",
    "Site": "site",
    "batches": "board",
    "mod": "board",
    "round": "board",
}

__all__ = sorted(_PLACES)


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(import_module(f"underwatt.fleet.{_PLACES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
