from __future__ import annotations

import http.client
import json
import math
import socket
import time
from pathlib import Path

import pytest
from live_run import FakeRun, Served, eventually
from prometheus_client.parser import text_string_to_metric_families

from underwatt.errors import InputError
from underwatt.events import Noted, Scored
from underwatt.live import server
from underwatt.live.server import metrics_text

PATHS = ("/", "/assets/app.js", "/state", "/metrics", "/nothing")


def raw(served: Served, text: bytes, receive_buffer: int = 4096) -> socket.socket:
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.connect(("127.0.0.1", served.server.port))
    client.sendall(text)
    return client


def state_request(served: Served) -> bytes:
    return (
        f"GET /state HTTP/1.1\r\nHost: 127.0.0.1:{served.server.port}\r\n"
        f"Authorization: Bearer {served.server.token}\r\n\r\n"
    ).encode()


def test_only_loopback_listens_and_a_taken_port_is_said(served: Served, tmp_path: Path) -> None:
    assert served.server._socket.getsockname()[0] == "127.0.0.1"
    with pytest.raises(InputError, match="cannot be used"):
        server.LiveServer(tmp_path, served.server.port)


def test_an_answer_carries_only_what_changed_and_the_first_one_everything(served: Served, fake_run: FakeRun) -> None:
    fake_run.setting()
    for _ in range(20):
        fake_run.second(9.0)
    eventually(lambda: served.server.feed.reader.view.facts.get("steps") == 200)
    states = served.states()
    first = next(found for found in states if found["facts"].get("steps") == 200)
    assert first["everything"]
    assert len(first["recent"]) == 20
    assert [entry["kind"] for entry in first["entries"]] == ["start", "budget", "setting"]
    fake_run.second(9.0)
    update = next(found for found in states if found["facts"]["steps"] == 210)
    assert not update["everything"]
    assert len(update["recent"]) <= 2
    assert len(update["whole"]) <= 2
    assert update["entries"] == []
    again = served.state()
    assert again is not None
    assert again["everything"]
    assert len(again["recent"]) == 21


def test_whoever_asks_at_the_same_update_gets_the_same_bytes(served: Served, fake_run: FakeRun) -> None:
    for _ in range(3):
        fake_run.second(9.0)
    feed = served.server.feed
    eventually(lambda: feed.reader.view.facts.get("steps") == 30)
    since = feed.number
    assert feed.changes(since) is None
    assert served.state(since) is None
    feed.update()
    assert feed.changes(since) is feed.changes(since)
    everything = json.loads(feed.changes(0) or b"")
    for unknown in (since + 1000, -1):  # of a server before this one, or nonsense
        assert json.loads(feed.changes(unknown) or b"") == everything
    for _ in range(40):
        feed.update()
    assert json.loads(feed.changes(since) or b"")["everything"], "it is too far behind"


@pytest.mark.parametrize("since", ["", "x", "-1", "1e3", "9" * 5000, "%00"])
def test_a_number_that_makes_no_sense_gets_everything(refusing: Served, since: str) -> None:
    status, _, text = refusing.ask(f"/state?since={since}", headers=refusing.bearer)
    assert (status, json.loads(text)["everything"]) == (200, True)


def test_nothing_that_is_sent_is_nan(served: Served, fake_run: FakeRun) -> None:
    fake_run.log.write(Scored(at_s=0.0, samples=1, value=0.5, target=math.inf))
    fake_run.log.flush()
    found = next(found for found in served.states() if "score" in found["facts"])
    assert found["facts"]["target"] is None


def test_a_budget_lands_in_the_inbox_and_is_asked_for_until_it_holds(served: Served, fake_run: FakeRun) -> None:
    states = served.states()
    next(states)
    status, _, text = served.post(b'{"budget": "7W"}')
    assert (status, json.loads(text)) == (202, {"asked": "7W"})
    message = json.loads((fake_run.folder / "budget.json").read_text())
    assert (message["budget"], message["from"]) == ("7W", "page")
    asked = next(found["facts"]["asked"] for found in states if found["facts"]["asked"])
    assert asked["budget"] == "7W"
    fake_run.budget(7.0)
    fake_run.log.flush()
    held = next(found["facts"] for found in states if found["facts"]["budget_w"] == 7.0)
    assert held["asked"] is None


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


def test_clients_that_never_read_or_never_ask_keep_nobody_waiting(served: Served, fake_run: FakeRun) -> None:
    for number in range(60):
        fake_run.log.write(Noted(at_s=number, level="info", text="x" * 20_000))
    fake_run.log.flush()
    silent = [raw(served, b""), raw(served, b"GET / HTTP/1.1\r\nHo")]
    deaf = [raw(served, state_request(served)) for _ in range(20)]
    fake_run.log.write(Noted(at_s=99, level="info", text="the last"))
    fake_run.log.flush()
    texts = (entry["text"] for found in served.states() for entry in found["entries"])
    assert any(text == "the last" for text in texts)
    for client in silent + deaf:
        client.close()


def test_many_viewers_are_served(served: Served, fake_run: FakeRun) -> None:
    clients = [raw(served, state_request(served), 1 << 16) for _ in range(100)]
    for client in clients:
        client.settimeout(10)
        text = b""
        while b"with a budget of" not in text:
            text += client.recv(65536)
        client.close()


def test_the_server_ends_with_viewers_connected(fake_run: FakeRun) -> None:
    with Served(fake_run.folder) as served:
        clients = [raw(served, state_request(served)) for _ in range(5)]
        clients += [raw(served, b"GET / HTTP/1.1\r\nHo")]
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


def samples(text: str) -> dict[str, float]:
    return {
        sample.name + "".join(f"{{{value}}}" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_every_figure_of_the_run_is_there_for_prometheus(served: Served, fake_run: FakeRun) -> None:
    for _ in range(3):
        fake_run.second(11.0)
    eventually(lambda: served.server.feed.reader.view.facts.get("steps") == 30)
    status, headers, text = served.ask("/metrics", headers=served.bearer)
    assert status == 200
    assert headers["content-type"].startswith("text/plain; version=")
    found = samples(text)
    assert 10.7 < found["underwatt_power_watts"] < 11.3
    assert found["underwatt_budget_watts"] == 10.0
    assert found["underwatt_energy_joules_total"] > 30
    assert found["underwatt_samples_total"] == 960
    assert found["underwatt_steps_total"] == 30
    assert found["underwatt_step_seconds"] == 0.1
    assert found["underwatt_over_budget_seconds_total"] == 2.0
    assert found["underwatt_state{holding}"] == 1.0
    assert found["underwatt_state{searching}"] == 0.0
    assert found["underwatt_phase{running}"] == 1.0
    assert "underwatt_run_info{Jetson Nano (virtual)}{digits}{true}{digits}" in found
    assert "underwatt_score" not in found, "unknown is left out, not zero"
    assert served.ask(f"/metrics?token={served.server.token}")[0] == 200


def test_names_from_the_log_cannot_break_the_format() -> None:
    name = 'a"b\\c\nd{}'
    facts = {"phase": "running", "job": name, "device": name, "workload": name, "simulated": False}
    families = list(text_string_to_metric_families(metrics_text(facts).decode()))
    labels = next(family.samples[0].labels for family in families if family.name == "underwatt_run_info")
    assert labels["job"] == name


@pytest.mark.parametrize("path", PATHS)
def test_nothing_is_shown_without_the_token(refusing: Served, path: str) -> None:
    good = refusing.server.token
    for headers in (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": f"Basic {good}"},
        {"Authorization": f"Bearer {good}x"},
        {"Cookie": f"underwatt_{refusing.server.port}=wrong"},
        {"Cookie": f"underwatt_1={good}"},
        {"Cookie": ';;="\x01'},
    ):
        status, answered, text = refusing.ask(path, headers=headers)
        assert status == 401, headers
        assert answered["www-authenticate"] == "Bearer"
        assert "underwatt watch" in text
        assert good not in text
        assert "set-cookie" not in answered
    assert refusing.ask(f"{path}?token={good[:-1]}")[0] == 401
    assert refusing.ask(f"{path}?token=wrong&token={good}")[0] == 401
    assert refusing.ask(f"{path}?{'a=1&' * 50}token={good}")[0] == 401


def test_the_token_in_the_address_becomes_a_cookie_of_this_page_only(served: Served) -> None:
    status, headers, text = served.ask(f"/?token={served.server.token}")
    assert status == 200
    assert served.server.token not in text
    cookie = headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert "Path=/" in cookie
    assert str(served.server.port) in cookie.partition("=")[0]
    status, headers, _ = served.ask("/", headers={"Cookie": f"theme=dark; {cookie.partition(';')[0]}"})
    assert status == 200
    assert "set-cookie" not in headers


def test_every_answer_is_guarded_by_headers(refusing: Served) -> None:
    for path, sent in (
        ("/", refusing.bearer),
        ("/assets/page.css", refusing.bearer),
        ("/", {}),
        ("/x", refusing.bearer),
    ):
        headers = refusing.ask(path, headers=sent)[1]
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["cache-control"] == "no-store"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["x-content-type-options"] == "nosniff"
        assert "server" not in headers


@pytest.mark.parametrize("name", ["evil.example", "127.0.0.1", "127.0.0.1:1", "localhost.evil.example:{port}", ""])
def test_another_host_name_is_refused_even_with_the_token(refusing: Served, name: str) -> None:
    host = name.format(port=refusing.server.port)
    status, _, text = refusing.ask("/", headers=refusing.bearer | {"Host": host})
    assert status == 403
    assert f"ssh -L {refusing.server.port}:127.0.0.1:{refusing.server.port}" in text


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "LocalHost", "[::1]"])
def test_this_machines_own_names_are_served(refusing: Served, name: str) -> None:
    assert refusing.ask("/", headers=refusing.bearer | {"Host": f"{name}:{refusing.server.port}"})[0] == 200


def test_two_host_headers_are_refused(refusing: Served) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", refusing.server.port, timeout=10)
    connection.putrequest("GET", "/", skip_host=True)
    connection.putheader("Host", f"127.0.0.1:{refusing.server.port}")
    connection.putheader("Host", "evil.example")
    connection.endheaders()
    assert connection.getresponse().status in (400, 403)
    connection.close()


def test_other_origins_are_refused_for_reading_and_for_changing(served: Served, fake_run: FakeRun) -> None:
    for origin in ("http://evil.example", "null", "http://127.0.0.1:1", f"https://127.0.0.1:{served.server.port}"):
        assert served.post(b'{"budget": "7W"}', Origin=origin)[0] == 403
        assert served.ask("/state", headers=served.bearer | {"Origin": origin})[0] == 403
    assert not (fake_run.folder / "budget.json").exists()


def test_a_cookie_changes_nothing_without_the_origin_that_browsers_send(served: Served, fake_run: FakeRun) -> None:
    cookie = f"underwatt_{served.server.port}={served.server.token}"
    sent = {"Cookie": cookie, "Content-Type": "application/json"}
    assert served.ask("/budget", "POST", sent, b'{"budget": "7W"}')[0] == 403
    assert served.ask(f"/budget?token={served.server.token}", "POST", {}, b'{"budget": "7W"}')[0] == 401
    assert not (fake_run.folder / "budget.json").exists()
    sent["Origin"] = f"http://127.0.0.1:{served.server.port}"
    assert served.ask("/budget", "POST", sent, b'{"budget": "7W"}')[0] == 202
    assert (fake_run.folder / "budget.json").exists()
