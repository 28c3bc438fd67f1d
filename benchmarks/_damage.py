"""Damage of files: what ``fuzz.py`` and ``faults.py`` do to valid ones before they are read."""

from __future__ import annotations

import csv
import io
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

TOKENS = (
    "", "0", "-1", "-0.0", "1e999", "-1e999", "NaN", "Infinity", "nan", "inf", "null", "true", "[]", "{}", '""', '"',
    "'", ",", "\n", "\r", "\0", "\ufeff", "\ud7ff", "é", "²", "٣", "[red]", "[/]", "[/nope]", "%s", "{}", "1_0", "0x1",
    "9" * 400, "1" + "0" * 30, "[" * 5000, '{"a":' * 2000, "a" * 5000, "W", "10W peak", "50Wh",
    "08:00-18:00=15W,else=7W",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 0.5, 2**63, 10**400, float("nan"), float("inf"), "", "x", "nan", "[/]", "[red]x", "1",
    [], {}, [None], [[]], {"x": 1}, "ok", ["a"], "\0", "\ud800", [1, 2], "10W",
)  # fmt: skip


def damaged(data: bytes, chance: random.Random) -> bytes:
    """The data with one to three kinds of damage."""
    for _ in range(chance.choice((1, 1, 2, 3))):
        kinds = [_flip, _cut, _double, _token, _noise]
        kinds += [_json_value] * 4 if data.lstrip()[:1] in (b"{", b"[") else [_cell] * 4
        data = chance.choice(kinds)(data, chance)
    return data


def _flip(data: bytes, chance: random.Random) -> bytes:
    if not data:
        return data
    found = bytearray(data)
    for _ in range(chance.choice((1, 1, 8))):
        found[chance.randrange(len(found))] ^= 1 << chance.randrange(8)
    return bytes(found)


def _span(data: bytes, chance: random.Random) -> tuple[int, int]:
    begin = chance.randrange(len(data) + 1)
    return begin, min(len(data), begin + chance.choice((1, 4, 30, 400, len(data))))


def _cut(data: bytes, chance: random.Random) -> bytes:
    begin, end = _span(data, chance)
    return data[:begin] + data[end:]


def _double(data: bytes, chance: random.Random) -> bytes:
    begin, end = _span(data, chance)
    at = chance.randrange(len(data) + 1)
    return data[:at] + data[begin:end] + data[at:]


def _token(data: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(data) + 1)
    return data[:at] + chance.choice(TOKENS).encode("utf-8", "surrogatepass") + data[at + chance.choice((0, 1, 4)) :]


def _noise(data: bytes, chance: random.Random) -> bytes:
    begin, end = _span(data, chance)
    return data[:begin] + chance.randbytes(min(end - begin, 40)) + data[end:]


def _json_value(data: bytes, chance: random.Random) -> bytes:
    """A value somewhere in a JSON object, or in a line of one, replaced or removed."""
    lines = data.split(b"\n")
    at = chance.randrange(len(lines))
    whole = chance.random() < 0.5
    try:
        found = json.loads(data if whole else lines[at])
        places = list(_places(found))
        if not places:
            return data
        holder, key = chance.choice(places)
        if isinstance(holder, dict) and chance.random() < 0.2:
            del holder[key]
        else:
            holder[key] = chance.choice(VALUES)
        text = json.dumps(found, ensure_ascii=chance.random() < 0.5).encode("utf-8", "surrogatepass")
    except (ValueError, RecursionError):
        return _token(data, chance)
    if whole:
        return text
    lines[at] = text
    return b"\n".join(lines)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(pairs):
        yield value, key
        yield from _places(inner)


def _cell(data: bytes, chance: random.Random) -> bytes:
    """A cell of a table replaced, or a row made longer or shorter."""
    try:
        rows = list(csv.reader(io.StringIO(data.decode())))
    except (ValueError, csv.Error):
        return _token(data, chance)
    if not any(rows):
        return data
    row = chance.choice([row for row in rows if row])
    how = chance.random()
    if how < 0.1:
        row.pop()
    elif how < 0.2:
        row.append(chance.choice(TOKENS))
    else:
        row[chance.randrange(len(row))] = chance.choice((*TOKENS, *(str(value) for value in VALUES)))
    text = io.StringIO()
    try:
        csv.writer(text, lineterminator="\n").writerows(rows)
    except csv.Error:
        return data
    return text.getvalue().encode("utf-8", "surrogatepass")
