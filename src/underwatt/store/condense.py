"""Which measurements of a large profile to plan with: thousands of rows are no wiser than the telling ones, and slower.

Of each setting the newest measurement counts. Of the settings, those that may be chosen come first: where no other of
the same batch size is both faster and thriftier, then where only few are. A part is left for all others, evenly spread,
so that a prediction knows the whole space. Whatever the budget, and however many samples each batch size takes, the
best measured setting is among them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

# A profile of no more rows is taken as it is, repeats included.
MOST_ROWS = 400
MOST_SETTINGS = 200
LEFT_FOR_OTHERS = 0.4


class Newest(NamedTuple):
    """The newest measurement of a setting, as far as it matters here; ``number`` is that of its row."""

    number: int
    batch_size: int
    step_s: float | None
    power_w: float | None
    usable: int


def telling(found: Sequence[Newest], most: int = MOST_SETTINGS) -> list[int]:
    """The numbers of the rows to take, in order."""
    usable = [row for row in found if row.usable]
    # One that ran out of memory or failed says the same of its batch size as the next.
    others = {(row.batch_size, row.step_s is None): row.number for row in found if not row.usable}
    chosen = _best(usable, most - math.floor(most * LEFT_FOR_OTHERS))
    rest = [row.number for row in usable if row.number not in chosen]
    room = most - len(chosen)
    if len(rest) > room:
        rest = [rest[at * len(rest) // room] for at in range(room)]
    return sorted({*chosen, *rest, *others.values()})


def _best(rows: Sequence[Newest], most: int) -> set[int]:
    """Front after front of time and watts, one batch size beside the other, until there are enough."""
    chosen: set[int] = set()
    sizes: dict[int, list[Newest]] = {}
    for row in rows:
        if row.step_s is not None and row.power_w is not None:
            sizes.setdefault(row.batch_size, []).append(row)
    left = [sorted(same, key=lambda row: (row.step_s, row.power_w)) for same in sizes.values()]
    while any(left) and len(chosen) < most:
        for at, same in enumerate(left):
            lowest_w, behind = math.inf, []
            for row in same:
                if row.power_w is not None and row.power_w < lowest_w:
                    lowest_w = row.power_w
                    chosen.add(row.number)
                else:
                    behind.append(row)
            left[at] = behind
    return chosen
