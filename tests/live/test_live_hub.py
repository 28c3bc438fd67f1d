from __future__ import annotations

import asyncio
import json
import math

from underwatt.live.feed import BEHIND, Hub, message


def test_a_message_is_one_event_and_never_nan() -> None:
    text = message("update", 7, {"words": "two\nlines – and ünïcode", "x": math.nan}).decode()
    assert text.startswith("event: update\nid: 7\ndata: ")
    assert text.endswith("\n\n")
    assert text.count("\n") == 4
    assert json.loads(text.split("data: ")[1]) == {"words": "two\nlines – and ünïcode", "x": None}


def test_who_falls_behind_is_dropped_and_nobody_waits() -> None:
    async def story() -> None:
        hub = Hub()
        slow, quick = hub.join(), hub.join()
        assert slow is not None
        assert quick is not None
        for number in range(BEHIND + 1):
            hub.send(str(number).encode())
            assert await quick.next() == str(number).encode()
        assert len(hub) == 1
        assert slow.gone
        assert await slow.next() is None
        hub.close()
        assert await quick.next() is None
        assert hub.join() is None

    asyncio.run(story())


def test_there_are_only_so_many_viewers() -> None:
    async def story() -> None:
        hub = Hub(most=2)
        first = hub.join()
        assert first is not None
        assert hub.join() is not None
        assert hub.join() is None
        hub.leave(first)
        assert hub.join() is not None

    asyncio.run(story())
