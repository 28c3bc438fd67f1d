"""One source for several boards: a site's watts, divided so that the round is shortest, as leases that expire.

A board draws its floor at most unless it holds a lease, and falls back to it when the lease expires. The site counts a
lease as drawn from when it is granted until the board's reply, or until the latest moment at which it can still be in
force: granted, delivered as late as messages may be, and held for its whole length. So the sum of what boards may draw
never exceeds the site's watts, whatever is lost on the way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from underwatt.budget import Budget
from underwatt.errors import BudgetError, InputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from underwatt.fleet.rounds import Floats, Fronts

BISECTIONS = 32


@dataclass(frozen=True, slots=True)
class Lease:
    """Watts that a board may draw at most until a moment, as the site counts it."""

    power_w: float
    until_s: float


class Site:
    """The watts of one source and who may draw them; moments are those of the server's clock.

    ``budget`` may be a schedule, whose seconds are those of the server's clock. ``floor_w`` is what a board draws at
    most without a lease, for all, or by node: then those are there from the start.
    ``delivery_s`` is the longest that a message may be on its way.
    ``equal=True`` divides equally instead, for comparison.
    """

    def __init__(
        self,
        budget: str | float | Budget,
        floor_w: Mapping[int, float] | float,
        *,
        delivery_s: float = 5.0,
        equal: bool = False,
    ) -> None:
        self._course = Budget.of(budget).course
        if self._course is None:
            raise BudgetError("A site needs watts.", hint="Such as 100W, or a schedule.")
        for one_w in (floor_w,) if isinstance(floor_w, (int, float)) else floor_w.values():
            if not 0 < one_w < math.inf:
                raise InputError(
                    f"The floor of a site's boards must be watts above zero, not {one_w:g}.",
                    hint="Give at least what a board draws while it waits.",
                )
        self._floor_w, self._delivery_s, self._equal = floor_w, delivery_s, equal
        self._leases: dict[int, Lease] = {}
        # All that were ever seen or named: one that is silent may still draw its floor.
        self._members: set[int] = set() if isinstance(floor_w, (int, float)) else set(floor_w)

    def floor_w(self, node: int) -> float:
        """What a board draws at most without a lease; raises ``InputError`` for one whose floor nobody has said."""
        if isinstance(self._floor_w, (int, float)):
            return self._floor_w
        if node not in self._floor_w:
            raise InputError(
                f"This site knows no floor of board {node}.",
                hint=f"Give floor_w={{…, {node}: watts}}, or one number for all boards.",
            )
        return self._floor_w[node]

    def returned(self, node: int) -> None:
        """A board has replied: it draws no more than its floor now."""
        self._leases.pop(node, None)

    def drawn_w(self, now_s: float, nodes: Sequence[int]) -> dict[int, float]:
        """What each board may draw now at most."""
        held = {node: lease for node, lease in self._leases.items() if now_s < lease.until_s}
        self._leases = held
        self._members.update(nodes)
        return {node: held[node].power_w if node in held else self.floor_w(node) for node in self._members}

    def left(self, node: int) -> None:
        """A board is switched off for good: not even its floor is kept for it."""
        self._members.discard(node)

    def least_w(self, begin_s: float, end_s: float) -> float:
        """The least that the source gives at any moment of an interval."""
        assert self._course is not None
        return min((level_w for _, _, level_w in self._course.pieces(begin_s, end_s)), default=0.0)

    def grant(
        self,
        now_s: float,
        nodes: Sequence[int],
        fronts: Fronts,
        limit_w: Floats,
        data: Floats,
        length_s: float,
        noise_batch: float,
    ) -> tuple[Floats, dict[int, dict[str, float]]]:
        """Watts for each board for the next ``length_s``, and what to tell it. Boards that hold a lease keep out."""
        lease_s = length_s + self._delivery_s
        drawn = self.drawn_w(now_s, nodes)
        free = np.array([node not in self._leases for node in nodes])
        floors = np.array([self.floor_w(node) for node in nodes])
        until_s = now_s + self._delivery_s + lease_s
        spare_w = max(self.least_w(now_s, until_s) - math.fsum(drawn.values()), 0.0)
        most = np.maximum(np.where(free, limit_w, floors), floors)
        granted = divide(fronts, floors, most, data, free, spare_w, noise_batch, equal=self._equal)
        said = {}
        for node, watts, is_free in zip(nodes, granted.tolist(), free.tolist(), strict=True):
            if is_free:
                self._leases[node] = Lease(watts, until_s)
            said[node] = {"lease_w": watts, "lease_s": lease_s, "floor_w": self.floor_w(node)}
        return granted, said


def divide(
    fronts: Fronts,
    floor_w: Floats,
    most_w: Floats,
    data: Floats,
    free: Floats,
    spare_w: float,
    noise_batch: float,
    *,
    equal: bool = False,
) -> Floats:
    """Watts for each board: above their floors they sum up to ``spare_w`` at most, and none is above its own limit.

    Boards that are known get what has them pass over their data in the same time, the shortest for which the watts
    suffice; one that cannot go faster gets what it can use. Those of which nothing is known share equally.
    """
    known = np.isfinite(fronts.power_w).any(axis=1) & (free > 0)
    unknown = (free > 0) & ~known
    count = max(int((free > 0).sum()), 1)
    granted = floor_w.astype(float).copy()
    if equal or not known.any():
        return np.asarray(granted + _equally(np.where(free > 0, most_w - floor_w, 0.0), spare_w))
    shared_w = spare_w * unknown.sum() / count
    granted += _equally(np.where(unknown, most_w - floor_w, 0.0), shared_w)
    left_w = spare_w - float((granted - floor_w)[unknown].sum())
    top = fronts.rate_at(most_w, noise_batch)

    def wanted(pass_s: float) -> Floats:
        rate = np.minimum(data / pass_s, top)
        watts = np.clip(fronts.watts_for(rate, noise_batch), floor_w, most_w)
        return np.where(known, np.where(np.isfinite(watts), watts, most_w), floor_w)

    low_s, high_s = 1e-6, 1e9
    for _ in range(BISECTIONS):
        middle_s = math.sqrt(low_s * high_s)
        if float((wanted(middle_s) - floor_w).sum()) <= left_w:
            high_s = middle_s
        else:
            low_s = middle_s
    found = wanted(high_s)
    if float((found - floor_w).sum()) > left_w:  # nothing suffices: floors alone
        found = floor_w
    granted = np.where(known, found, granted)
    rest_w = spare_w - float((granted - floor_w).sum())
    return np.asarray(granted + _equally(np.where(free > 0, most_w - granted, 0.0), max(rest_w, 0.0)))


def _equally(room_w: Floats, spare_w: float) -> Floats:
    """Fill rooms equally with so many watts; what one cannot take goes to the others."""
    room_w = np.maximum(room_w, 0.0)
    order = np.sort(room_w)
    count = len(order)
    if not count or spare_w <= 0:
        return np.zeros_like(room_w)
    filled = np.concatenate([[0.0], np.cumsum(np.where(np.isfinite(order), order, 0.0))])[:-1]
    levels = (spare_w - filled) / (count - np.arange(count))
    at = np.flatnonzero(levels <= order)
    level = levels[at[0]] if len(at) else np.inf
    return np.asarray(np.minimum(room_w, level))
