"""The page in a real Chromium: what a person sees and does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from live_run import FakeRun, Served

from underwatt.events import Noted
from underwatt.runlog.inbox import Inbox

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
WAIT_MS = 15_000


class Opened:
    """An open page that remembers what it said to the console and where it connected to."""

    def __init__(self, chromium: Browser, served: Served, scheme: str = "light", width: int = 1280) -> None:
        viewport = {"width": width, "height": 900}
        self._context = chromium.new_context(color_scheme=scheme, viewport=viewport)  # type: ignore[arg-type]
        self.page: Page = self._context.new_page()
        self.page.set_default_timeout(WAIT_MS)
        self.troubles: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.troubles.append(message.text))
        self.page.on("pageerror", lambda error: self.troubles.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(served.server.url)
        self.page.wait_for_selector("#entries li")

    def shows(self, selector: str, text: str) -> None:
        sync_api.expect(self.page.locator(selector)).to_contain_text(text, timeout=WAIT_MS)

    def close(self) -> None:
        self._context.close()


class Loop(threading.Thread):
    """A tiny run: takes a budget from the inbox and says in the log that it holds."""

    def __init__(self, run: FakeRun) -> None:
        super().__init__(daemon=True)
        self.run_log = run
        self.inbox = Inbox(run.folder)
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.wait(0.1):
            if (text := self.inbox.take()) is not None:
                self.run_log.budget(float(text.removesuffix("W")))
                self.run_log.setting(16, 307.2, "correcting", "the budget fell")
            self.run_log.second(0.95 * self.run_log.budget_w, "correcting" if self.run_log.budget_w < 10 else "holding")

    def stop(self) -> None:
        self.ended.set()
        self.join(5)


@pytest.fixture
def loop(fake_run: FakeRun) -> Iterator[Loop]:
    fake_run.setting()
    loop = Loop(fake_run)
    loop.start()
    yield loop
    loop.stop()


def test_the_page_follows_the_run_and_changes_its_budget(chromium: Browser, served: Served, loop: Loop) -> None:
    opened = Opened(chromium, served)
    page = opened.page
    opened.shows("#job", "digits")
    opened.shows("#device", "Jetson Nano (virtual)")
    opened.shows("#state", "holding")
    opened.shows("#power-w", "9.")
    opened.shows("#budget-w", "10 W")
    opened.shows("#knobs", "614.4 MHz")
    opened.shows("#left", "min")
    opened.shows("#energy", "J")
    opened.shows("#score", "–")
    assert page.locator("#simulated").is_visible()
    for curve in ("mean", "band", "budget"):
        assert len(page.locator(f"#chart .{curve}").first.get_attribute("d") or "") > 10
    assert "budget of 10.00 W" in (page.locator("#chart").get_attribute("aria-label") or "")
    assert served.server.token not in page.url

    page.fill("#budget", "7 apples")
    page.click("#budget-send")
    opened.shows("#budget-status", "The unit 'apples' in the budget '7 apples' is unknown.")
    assert page.locator("#budget").get_attribute("aria-invalid") == "true"
    refused = [text for text in opened.troubles if "400 (Bad Request)" in text]
    assert opened.troubles == refused, "the browser itself reports the refused request, and nothing else"

    page.fill("#budget", "7W")
    page.click("#budget-send")
    opened.shows("#budget-status", "In force: 7 W.")
    opened.shows("#budget-w", "7 W")
    opened.shows("#state", "correcting")
    opened.shows("#entries", "Budget changed: 7 W mean.")
    opened.shows("#power-w", "6.")
    page.click("#show-whole")
    page.hover("#chart")
    opened.shows("#readout", "W (")
    assert opened.troubles == refused
    base = f"http://127.0.0.1:{served.server.port}/"
    assert all(url.startswith(base) for url in opened.asked), opened.asked
    opened.close()


def test_a_budget_is_asked_for_until_the_run_takes_it(chromium: Browser, served: Served, fake_run: FakeRun) -> None:
    fake_run.second()
    opened = Opened(chromium, served)
    opened.page.fill("#budget", "7")
    opened.page.click("#budget-send")
    opened.shows("#budget-status", "Asked for 7W, waiting for the run.")
    opened.shows("#budget-w", "10 W")
    fake_run.budget(7.0)
    fake_run.second(6.5)
    opened.shows("#budget-status", "In force: 7 W.")
    assert opened.troubles == []
    opened.close()


def test_the_budget_can_be_changed_with_the_keyboard_alone(chromium: Browser, served: Served, loop: Loop) -> None:
    opened = Opened(chromium, served)
    page = opened.page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    page.keyboard.type("7W")
    page.keyboard.press("Enter")
    opened.shows("#budget-status", "In force: 7 W.")
    visited = []
    page.evaluate("document.activeElement.blur()")
    for _ in range(8):
        page.keyboard.press("Tab")
        visited.append(page.evaluate("document.activeElement.id"))
    assert {"budget-send", "entries"} <= set(visited)
    page.locator("#show-whole").focus()
    page.keyboard.press("Space")
    assert page.locator("#show-whole").get_attribute("aria-pressed") == "true"
    opened.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_accessible_by_axe_and_nothing_is_cut_off(
    chromium: Browser, served: Served, fake_run: FakeRun, scheme: str, width: int
) -> None:
    from axe_playwright_python.sync_playwright import Axe

    fake_run.setting(why="averyveryveryveryveryverylongwordwithoutanyspaceinitthatgoesonandonandonandon")
    for power_w in (9.0, 9.0, 12.0, 12.0):
        fake_run.second(power_w)
    fake_run.log.write(Noted(at_s=fake_run.at_s, level="warning", text="Hot."))
    fake_run.log.flush()
    opened = Opened(chromium, served, scheme, width)
    opened.shows("#entries", "Hot.")
    opened.page.fill("#budget", "x")
    opened.page.click("#budget-send")
    opened.shows("#budget-status", "no budget")
    opened.page.wait_for_timeout(500)  # transitions would be measured half way
    found = Axe().run(opened.page).response["violations"]
    serious = [(one["id"], [node["html"] for node in one["nodes"]]) for one in found if one["impact"] != "minor"]
    assert serious == []
    assert opened.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    opened.close()


@pytest.mark.parametrize(
    ("outcome", "restored", "words"),
    [
        ("reached", True, "The run reached its target. The device is as it was before."),
        ("failed", False, "The run failed. The disk is full. The device was not put back"),
    ],
)
def test_the_page_says_how_the_run_ended(
    chromium: Browser, served: Served, fake_run: FakeRun, outcome: str, restored: bool, words: str
) -> None:
    fake_run.second()
    opened = Opened(chromium, served)
    assert opened.page.locator("#banner").is_hidden()
    fake_run.end(outcome, restored, None if restored else "The disk is full.")
    opened.shows("#banner", words)
    opened.shows("#announce", words)
    opened.shows("#state", "ended")
    assert opened.page.locator("#budget-send").is_disabled()
    assert opened.troubles == []
    opened.close()


def test_text_from_the_log_never_becomes_markup(chromium: Browser, served: Served, fake_run: FakeRun) -> None:
    fake_run.log.write(Noted(at_s=0.0, level="info", text="<img src=x onerror=alert(1)><script>alert(2)</script>"))
    fake_run.log.flush()
    opened = Opened(chromium, served)
    opened.shows("#entries", "<img src=x onerror=alert(1)>")
    assert opened.page.locator("#entries img, #entries script").count() == 0
    assert opened.troubles == []
    opened.close()


def test_a_lost_connection_is_said_and_taken_up_again(chromium: Browser, fake_run: FakeRun) -> None:
    fake_run.second()
    with Served(fake_run.folder) as served:
        opened = Opened(chromium, served)
        opened.page.route("**/state*", lambda route: route.abort())
        opened.shows("#banner", "connection to the page’s server is lost")
        fake_run.log.write(Noted(at_s=5.0, level="info", text="meanwhile"))
        fake_run.log.flush()
        opened.page.unroute("**/state*")
        opened.shows("#entries", "meanwhile")
        assert opened.page.locator("#banner").is_hidden()
        opened.close()


def test_a_warning_is_a_banner_joules_are_said_once_and_a_budget_in_force_is_drawn(
    chromium: Browser, served: Served, fake_run: FakeRun
) -> None:
    fake_run.setting()
    fake_run.second()
    opened = Opened(chromium, served)
    opened.shows("#energy", "9.5")
    assert opened.page.locator("#energy-more").text_content() == ""
    opened.shows("#over-more", "sensor’s lag")
    before = opened.page.locator("#chart .budget").get_attribute("d")
    fake_run.log.write(Noted(at_s=fake_run.at_s, level="warning", text="1 W cannot be held, and training waits."))
    fake_run.budget(1.0)  # nothing was read since
    fake_run.log.flush()
    opened.shows("#banner", "1 W cannot be held, and training waits.")
    opened.shows("#announce", "1 W cannot be held, and training waits.")
    opened.shows("#budget-w", "1 W")
    after = opened.page.locator("#chart .budget").get_attribute("d")
    assert before is not None
    assert after is not None
    assert after.startswith(before)
    assert len(after) > len(before), "down to 1 W at the end"
    assert opened.troubles == []
    opened.close()
