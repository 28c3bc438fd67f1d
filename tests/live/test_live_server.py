from __future__ import annotations

import json
import socket
import threading
import time
from pathlib import Path

import pytest
from live_run import FakeRun, Served, eventually

from underwatt.errors import InputError
from underwatt.events import Noted
from underwatt.live import feed, server
from underwatt.live.feed import VIEWERS


def connections(served: Served) -> int:
    return len(served.server._server.server_state.connections)


def raw(served: Served, text: bytes, receive_buffer: int = 4096) -> socket.socket:
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.connect(("127.0.0.1", served.server.port))
    client.sendall(text)
    return client


def events_request(served: Served) -> bytes:
    return (
        f"GET /events HTTP/1.1\r\nHost: 127.0.0.1:{served.server.port}\r\n"
        f"Authorization: Bearer {served.server.token}\r\n\r\n"
    ).encode()


def test_only_loopback_listens_and_a_taken_port_is_said(served: Served, tmp_path: Path) -> None:
    assert served.server._socket.getsockname()[0] == "127.0.0.1"
    with pytest.raises(InputError, match="cannot be used"):
        server.LiveServer(tmp_path, served.server.port)


def test_updates_carry_only_what_changed_and_a_new_connection_everything(served: Served, fake_run: FakeRun) -> None:
    fake_run.setting()
    for _ in range(20):
        fake_run.second(9.0)
    eventually(lambda: served.server.feed.reader.view.facts.get("steps") == 200)
    stream = served.events()
    kind, first = next(stream)
    assert kind == "snapshot"
    assert len(first["recent"]) == 20
    assert [entry["kind"] for entry in first["entries"]] == ["start", "budget", "setting"]
    fake_run.second(9.0)
    kind, update = next(stream)
    while update["facts"]["steps"] < 210:
        kind, update = next(stream)
    assert kind == "update"
    assert len(update["recent"]) <= 2
    assert len(update["whole"]["rows"]) <= 2
    assert update["entries"] == []
    stream.close()
    again = next(served.events(served.bearer | {"Last-Event-ID": "1"}))
    assert len(again[1]["recent"]) == 21


def test_a_budget_lands_in_the_inbox_and_is_asked_for_until_it_holds(served: Served, fake_run: FakeRun) -> None:
    stream = served.events()
    next(stream)
    status, _, text = served.post(b'{"budget": "7W"}')
    assert (status, json.loads(text)) == (202, {"asked": "7W"})
    message = json.loads((fake_run.folder / "budget.json").read_text())
    assert (message["budget"], message["from"]) == ("7W", "page")
    asked = next(content["facts"]["asked"] for _, content in stream if content["facts"]["asked"])
    assert asked["budget"] == "7W"
    fake_run.budget(7.0)
    fake_run.log.flush()
    held = next(content["facts"] for _, content in stream if content["facts"]["budget_w"] == 7.0)
    assert held["asked"] is None
    stream.close()


@pytest.mark.parametrize(
    ("content", "status", "words"),
    [
        (b'{"budget": "7 apples"}', 400, "unit 'apples'"),
        (b'{"budget": "-3W"}', 400, "above zero"),
        (b'{"budget": "50Wh"}', 400, "only the watts"),
        (b'{"budget": "08:00-18:00=x"}', 400, ""),
        (b'{"budget": ""}', 400, "no budget"),
        (b'{"budget": 7}', 400, "holds no budget"),
        (b'{"power": "7W"}', 400, "holds no budget"),
        (b'["7W"]', 400, "holds no budget"),
        (b"7W", 400, "holds no budget"),
        (b"\xff\xfe", 400, "holds no budget"),
        (b"[" * 900, 400, "holds no budget"),
        (b"", 400, "holds no budget"),
        (b'{"budget": "' + b"7" * 2000 + b'W"}', 413, "too long"),
    ],
)
def test_a_budget_that_makes_no_sense_is_refused_in_words(
    refusing: Served, content: bytes, status: int, words: str
) -> None:
    answered, _, text = refusing.post(content)
    assert answered == status
    answer = json.loads(text)
    assert words in answer["error"]
    assert answer["error"].endswith(".")
    assert not (refusing.server.folder / "budget.json").exists()


def test_only_json_is_taken_and_only_by_post(refusing: Served) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        assert refusing.post(b'{"budget": "7W"}', Content_Type=kind)[0] == 415
    assert refusing.ask("/budget", headers=refusing.bearer)[0] == 405
    assert refusing.ask("/", "DELETE", refusing.bearer)[0] == 405
    assert refusing.ask("/assets/..%2f..%2fserver.py", headers=refusing.bearer)[0] == 404
    assert refusing.ask("/assets/__init__.py", headers=refusing.bearer)[0] == 404


def test_a_body_without_a_length_is_cut_short(refusing: Served) -> None:
    head = (
        f"POST /budget HTTP/1.1\r\nHost: 127.0.0.1:{refusing.server.port}\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {refusing.server.token}\r\nTransfer-Encoding: chunked\r\n\r\n"
    ).encode()
    with raw(refusing, head + b"800\r\n" + b"x" * 2048 + b"\r\n") as client:
        client.settimeout(5)
        assert b" 413 " in client.recv(200)


def test_a_run_that_ended_takes_no_budget(served: Served, fake_run: FakeRun) -> None:
    fake_run.end()
    eventually(lambda: served.server.feed.reader.view.facts["phase"] == "ended")
    status, _, text = served.post(b'{"budget": "7W"}')
    assert status == 409
    assert "has ended" in text


def test_clients_that_never_read_or_never_ask_are_cut_off(fake_run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "STUCK_S", 0.5)
    monkeypatch.setattr(feed, "UPDATE_S", 0.01)
    with Served(fake_run.folder) as served:
        silent = [raw(served, b""), raw(served, b"GET / HTTP/1.1\r\nHo")]
        deaf = [raw(served, events_request(served)) for _ in range(3)]
        seen: list[str] = []

        def read() -> None:
            for _, content in served.events():
                seen.extend(entry["text"][:8] for entry in content["entries"])
                if "the last" in seen:
                    return

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        eventually(lambda: len(served.server.feed.hub) == 4)
        for number in range(60):
            fake_run.log.write(Noted(at_s=number, level="info", text=f"{number} " + "x" * 20_000))
            fake_run.log.flush()
            time.sleep(0.02)
        eventually(lambda: len(served.server.feed.hub) == 1)
        eventually(lambda: connections(served) == 1)
        fake_run.log.write(Noted(at_s=99, level="info", text="the last"))
        fake_run.log.flush()
        reader.join(10)
        assert not reader.is_alive(), "who reads is still served"
        assert served.ask("/", headers=served.bearer)[0] == 200
        for client in silent + deaf:
            client.close()


def test_who_keeps_sending_has_to_read_and_to_end_its_requests(
    fake_run: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "STUCK_S", 0.6)
    monkeypatch.setattr(feed, "UPDATE_S", 0.01)
    with Served(fake_run.folder) as served:
        deaf = raw(served, events_request(served))
        eventually(lambda: len(served.server.feed.hub) == 1)
        for number in range(60):
            fake_run.log.write(Noted(at_s=number, level="info", text="x" * 20_000))
            fake_run.log.flush()
            time.sleep(0.01)
        eventually(lambda: len(served.server.feed.hub) == 0)
        deaf.sendall(b"G")  # it sends, and still reads nothing
        slow = raw(served, events_request(served).replace(b"/events", b"/nothing"), 1 << 16)
        slow.settimeout(5)
        assert b" 404 " in slow.recv(4096)
        slow.sendall(b"GET / HTTP/1.1\r\nHo")  # a second request that is never whole
        eventually(lambda: connections(served) == 0)
        deaf.close()
        slow.close()


def test_many_viewers_and_no_more_than_that(served: Served, fake_run: FakeRun) -> None:
    clients = [raw(served, events_request(served), 1 << 16) for _ in range(VIEWERS)]
    eventually(lambda: len(served.server.feed.hub) == VIEWERS)
    status, headers, _ = served.ask("/events", headers=served.bearer)
    assert (status, headers["retry-after"]) == (503, "10")
    fake_run.log.write(Noted(at_s=1.0, level="info", text="to everybody"))
    fake_run.log.flush()
    for client in clients:
        client.settimeout(10)
        text = b""
        while b"to everybody" not in text:
            text += client.recv(65536)
        client.close()
    eventually(lambda: len(served.server.feed.hub) == 0)


def test_the_server_ends_with_viewers_connected(fake_run: FakeRun) -> None:
    served = Served(fake_run.folder)
    with served:
        clients = [raw(served, events_request(served)) for _ in range(5)]
        eventually(lambda: len(served.server.feed.hub) == 5)
        began = time.monotonic()
    assert time.monotonic() - began < 4
    for client in clients:
        client.close()


def test_garbage_is_no_reason_to_stop(refusing: Served) -> None:
    for text in (b"\x00\x01\x02\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"A" * 100_000):
        with raw(refusing, b"") as client:
            client.settimeout(5)
            try:
                client.sendall(text)
                client.recv(1000)
            except OSError:
                pass
    assert refusing.ask("/", headers=refusing.bearer)[0] == 200
