"""One source for several boards: a site's watts, divided so that the round is shortest, as leases that expire.

A board draws its floor at most unless it holds a lease, and falls back to it when the lease expires. The site counts a
lease as drawn from when it is granted until the board's reply, or until the latest moment at which it can still be in
force: granted, delivered as late as messages may be, and held for its whole length. So the sum of what boards may draw
never exceeds the site's watts, whatever is lost on the way. A board whose reply was lost keeps its lease's watts in the
next round: they are counted already.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from underwatt.budget import Budget
from underwatt.errors import BudgetError, InputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from underwatt.fleet.rounds import Floats, Fronts

    # How watts are divided: so that all boards together get furthest; or, for comparison, equally, and what one cannot
    # use goes to others (filled) or is lost (equal).
    Rule: TypeAlias = Literal["furthest", "filled", "equal"]

BISECTIONS = 32
LEAST_W, MOST_FURTHER = 1e-3, 3.0  # above waiting, to divide by; and what is believed where a board shows hardly more
LEFT_OUT = 10.0  # what it costs to leave a board without watts, against the most that one brings
MARGIN = 1.03  # on what a setting draws, so that the board finds that it fits
# Nothing above a lease can be measured, so a board that began with little would be held to it. Of so much more than it
# has shown it is hoped to make much, as the square of its watts above waiting: more than most do, so that each is tried
# soon. One that had so much more (``SATED``) and found no use for it is not offered it again.
BEYOND, HOPE, SATED = np.array([1.15, 1.3, 1.5]), 2.0, 1.06
# What a board's update brings grows with its passes to some power: as updates were seen to grow with work, within
# bounds; where that was not seen, about as where rounds end (rounds.AIM).
GROWTH, LEAST_GROWTH, MOST_GROWTH = 0.5, 0.35, 0.7


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
    ``rule`` says how watts are divided; the others are there for comparison.
    """

    def __init__(
        self,
        budget: str | float | Budget,
        floor_w: Mapping[int, float] | float,
        *,
        delivery_s: float = 5.0,
        rule: Rule = "furthest",
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
        self._floor_w, self._delivery_s, self._rule = floor_w, delivery_s, rule
        self._leases: dict[int, Lease] = {}
        self._tried_w: dict[int, float] = {}  # the most with which a board found nothing else to be measured
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

    def returned(self, node: int, *, searched: bool = False) -> None:
        """A board has replied: it draws no more than its floor now, and may have nothing left to measure below that."""
        lease = self._leases.pop(node, None)
        if lease is not None and searched:
            self._tried_w[node] = max(lease.power_w, self._tried_w.get(node, 0.0))

    def drawn_w(self, now_s: float, nodes: Sequence[int]) -> dict[int, float]:
        """What each board may draw now at most."""
        held = {node: lease for node, lease in self._leases.items() if now_s < lease.until_s}
        self._leases = held
        self._members.update(nodes)
        return {node: held[node].power_w if node in held else self.floor_w(node) for node in self._members}

    def left(self, node: int) -> None:
        """A board is switched off for good: not even its floor is kept for it."""
        self._members.discard(node)
        self._tried_w.pop(node, None)

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
        growth: float | None = None,
    ) -> tuple[Floats, dict[int, dict[str, float]]]:
        """Watts for each board for the next ``length_s``, and what to tell it; ``growth`` is that of updates with work.

        A board that holds a lease gets no more than that again; none where the source gives too little by then.
        """
        lease_s = length_s + self._delivery_s
        drawn = self.drawn_w(now_s, nodes)
        free = np.array([node not in self._leases for node in nodes])
        floors = np.array([self.floor_w(node) for node in nodes])
        until_s = now_s + self._delivery_s + lease_s
        least_w = self.least_w(now_s, until_s)
        spare_w = least_w - math.fsum(drawn.values())
        most = np.maximum(limit_w, floors)
        if self._rule == "equal":
            granted = floors + np.minimum(self._level(least_w, floors), most - floors)
        else:
            whole = np.where(free, most, floors)
            tried = np.array([self._tried_w.get(node, 0.0) for node in nodes])
            power = GROWTH if growth is None else min(max(growth, LEAST_GROWTH), MOST_GROWTH)
            granted = divide(
                fronts, floors, whole, data, free, max(spare_w, 0.0), noise_batch, tried, power, rule=self._rule
            )
            if spare_w >= 0:
                held = np.array([drawn[node] for node in nodes])
                granted = np.where(free, granted, np.minimum(held, most))
        said = {}
        for node, watts, is_free, floor_w in zip(nodes, granted.tolist(), free.tolist(), floors.tolist(), strict=True):
            if is_free:
                self._leases[node] = Lease(watts, until_s)
            elif watts > floor_w:
                self._leases[node] = Lease(self._leases[node].power_w, until_s)
            said[node] = {"lease_w": watts, "lease_s": lease_s, "floor_w": floor_w}
        return granted, said

    def _level(self, least_w: float, floors: Floats) -> Floats:
        """The same watts for every member but where its floor is higher, above the floors of those asked.

        They depend on the source alone, not on what others hold, so they are safe whatever was granted before.
        """
        all_w = np.array([self.floor_w(node) for node in self._members])
        low_w, high_w = 0.0, max(least_w, 0.0)
        for _ in range(BISECTIONS):
            middle_w = (low_w + high_w) / 2
            low_w, high_w = (middle_w, high_w) if np.maximum(all_w, middle_w).sum() <= least_w else (low_w, middle_w)
        return np.maximum(low_w - floors, 0.0)


def divide(
    fronts: Fronts,
    floor_w: Floats,
    most_w: Floats,
    data: Floats,
    free: Floats,
    spare_w: float,
    noise_batch: float,
    tried_w: Floats | float = 0.0,
    growth: float = GROWTH,
    *,
    rule: Rule = "furthest",
) -> Floats:
    """Watts for each board: above their floors they sum up to ``spare_w`` at most, and none is above its own limit.

    Boards that are known get what brings all of them together furthest, where what one brings grows with its passes
    over its data to the power of ``growth``: more for those that do much with a watt, but ever less for the next one.
    Those of which nothing is known share equally, and so is divided what the others cannot use.
    """
    known = np.isfinite(fronts.power_w).any(axis=1) & (free > 0)
    unknown = (free > 0) & ~known
    count = max(int((free > 0).sum()), 1)
    granted = floor_w.astype(float).copy()
    if rule != "furthest" or not known.any():
        return np.asarray(granted + _equally(np.where(free > 0, most_w - floor_w, 0.0), spare_w))
    shared_w = spare_w * unknown.sum() / count
    granted += _equally(np.where(unknown, most_w - floor_w, 0.0), shared_w)
    left_w = spare_w - float((granted - floor_w)[unknown].sum())
    found = _furthest(fronts, floor_w, most_w, data, known, left_w, noise_batch, tried_w, growth)
    granted = np.where(known, found, granted)
    rest_w = spare_w - float((granted - floor_w).sum())
    return np.asarray(granted + _equally(np.where(free > 0, most_w - granted, 0.0), max(rest_w, 0.0)))


def _furthest(
    fronts: Fronts,
    floor_w: Floats,
    most_w: Floats,
    data: Floats,
    known: NDArray[np.bool_],
    spare_w: float,
    noise_batch: float,
    tried_w: Floats | float,
    growth: float,
) -> Floats:
    """Watts of which the next one brings the same on every board, as measured or hoped, ``spare_w`` above floors."""
    points_w = MARGIN * np.nan_to_num(fronts.power_w, nan=0.0)
    shown_w = points_w.max(axis=1)[:, None]
    beyond_w = np.where(np.broadcast_to(tried_w, len(fronts))[:, None] > SATED * shown_w, 0.0, BEYOND * shown_w)
    levels_w = np.clip(np.column_stack([floor_w, points_w, beyond_w]), floor_w[:, None], most_w[:, None])
    levels_w = np.where(known[:, None], levels_w, floor_w[:, None])
    extra_w = levels_w - floor_w[:, None]
    rates = np.stack([fronts.rate_at(levels_w[:, k], noise_batch) for k in range(levels_w.shape[1])], axis=1)
    idle_w = fronts.idle_w[:, None]
    further = (levels_w - idle_w) / np.maximum(shown_w - idle_w, LEAST_W)
    rates *= np.clip(further, 1.0, MOST_FURTHER) ** HOPE
    brought = data[:, None] ** (1 - growth) * rates**growth
    # Without a board its data are missing, and shares that come and go have it search anew.
    brought = np.where(rates > 0, brought, -LEFT_OUT * brought.max())
    rows = np.arange(len(fronts))

    def chosen(price: float) -> Floats:
        return np.asarray(extra_w[rows, (brought - price * extra_w).argmax(axis=1)])

    low, high = 1e-9, 1e9
    for _ in range(2 * BISECTIONS):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if float(chosen(middle).sum()) <= spare_w else (middle, high)
    found = chosen(high)
    return floor_w + (found if float(found.sum()) <= spare_w else 0.0)


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
