from __future__ import annotations

import http.client

import pytest
from live_run import FakeRun, Served

PATHS = ("/", "/assets/app.js", "/state", "/metrics", "/nothing")


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
