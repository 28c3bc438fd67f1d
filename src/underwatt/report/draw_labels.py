"""Where labels go: beside their points, and not on top of each other."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

# Pixels: of a usual drawing, a letter of its labels, and how far a label stands off its point.
WIDTH, HEIGHT = 720.0, 340.0
LETTER, LINE = 6.4, 16.0
OFF, ABOVE = 12.0, 18.0
# What it costs to lie across a line, in square pixels of covered label.
ACROSS = 600.0

Box = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True)
class Place:
    """Shift of a label from its point, in pixels, and which end of the label stands there."""

    x_shift: float
    y_shift: float
    anchor: str  # "left", "right" or "center"


def place_labels(
    points: Sequence[tuple[float, float]],
    texts: Sequence[str],
    avoid: Sequence[tuple[float, float]] = (),
    *,
    uprights: Sequence[float] = (),
    close: int = 0,
) -> list[Place]:
    """A place for each text; points are shares of the drawing's width and height, the most important first.

    ``avoid`` are other things drawn and ``uprights`` lines from bottom to top, which labels should not cover. The
    first ``close`` texts stay right beside their points, whatever they cover.
    """
    centres = [(x * WIDTH, y * HEIGHT) for x, y in points]
    taken: list[Box] = [(x - 7, y - 7, x + 7, y + 7) for x, y in centres]
    taken += [(x * WIDTH - 3, y * HEIGHT - 3, x * WIDTH + 3, y * HEIGHT + 3) for x, y in avoid]
    lines = [x * WIDTH for x in uprights]
    placed = []
    for at, ((x, y), text) in enumerate(zip(centres, texts, strict=True)):
        tries = [item for item in _tries(x, y, text) if at >= close or 0.0 in (item[0].x_shift, item[0].y_shift)]
        found = min(tries, key=lambda item: _cost(item[1], taken, lines, item[0]))
        taken.append(found[1])
        placed.append(found[0])
    return placed


def _tries(x: float, y: float, text: str) -> list[tuple[Place, Box]]:
    length = LETTER * (len(text) + 0.5 * sum(text.count(wide) for wide in "mwMW"))
    tries = [
        (Place(0.0, up, "center"), (x - length / 2, y + up - LINE / 2, x + length / 2, y + up + LINE / 2))
        for up in (ABOVE, -ABOVE)
    ]
    for up, anchor in product((0.0, 16.0, -16.0, 32.0, -32.0, 48.0, -48.0, 66.0, -66.0), ("left", "right")):
        shift = OFF if anchor == "left" else -OFF
        left = x + shift if anchor == "left" else x + shift - length
        tries.append((Place(shift, up, anchor), (left, y + up - LINE / 2, left + length, y + up + LINE / 2)))
    return tries


def _cost(box: Box, taken: Sequence[Box], lines: Sequence[float], place: Place) -> float:
    outside = max(0.0, -box[0]) + max(0.0, box[2] - WIDTH) + max(0.0, -box[1]) + max(0.0, box[3] - HEIGHT)
    across = ACROSS * sum(box[0] - 2 < line < box[2] + 2 for line in lines)
    return sum(_overlap(box, other) for other in taken) + across + 40 * outside + 0.3 * abs(place.y_shift)


def _overlap(one: Box, other: Box) -> float:
    wide = min(one[2], other[2]) - max(one[0], other[0])
    high = min(one[3], other[3]) - max(one[1], other[1])
    return wide * high if wide > 0 and high > 0 else 0.0
