"""The strategy inside samples among boards that can do something, and among no others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class _Only:
    """A grid on which these boards alone are seen; all else is the grid's."""

    def __init__(self, grid: Any, nodes: Sequence[int]) -> None:
        self._grid, self._nodes = grid, nodes

    def get_node_ids(self) -> list[int]:
        """The boards that are seen."""
        return list(self._nodes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)


def sampled(
    inner: Any, kind: str, able: Callable[[Sequence[int]], list[int]], number: int, arrays: Any, config: Any, grid: Any
) -> list[Any]:
    """The messages of a round that a strategy would send, for ``train`` or ``evaluate``; ``able`` filters boards.

    Boards that can do nothing are out of its sight before it samples: where they are most of a fleet, it would ask them
    alone in most rounds, and nobody would do anything. They still count where it waits for some to connect.
    """
    configure = getattr(inner, f"configure_{kind}")
    least = {name: getattr(inner, name) for name in ("min_available_nodes", f"min_{kind}_nodes")}
    nodes = list(grid.get_node_ids())
    if len(nodes) < max(least.values()) or len(able(nodes)) == len(nodes):
        messages = list(configure(number, arrays, config, grid))  # it waits for those that are to come
        asked = [message.metadata.dst_node_id for message in messages]
        if len(able(asked)) == len(asked):
            return messages
        nodes = list(grid.get_node_ids())
    if not (left := able(nodes)):
        return []
    try:
        for name, count in least.items():
            setattr(inner, name, min(count, len(left)))  # else it would wait for ever
        return list(configure(number, arrays, config, _Only(grid, left)))
    finally:
        for name, count in least.items():
            setattr(inner, name, count)
