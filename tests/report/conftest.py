"""A real browser for tests of pages: Chromium from the distribution, no network beyond what a test allows."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import report_world as world

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

    from underwatt.report.figures import Report
    from underwatt.run.log_read import RunRecord

QUIET = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)
NAMES = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="session")
def record(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    """A run of the made-up story."""
    return world.write_run(tmp_path_factory.mktemp("run") / "log.jsonl")


@pytest.fixture(scope="session")
def whole(record: RunRecord) -> Report:
    """A report that has everything."""
    return world.report(record=record)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """The browser; tests that need one are skipped, saying so, where there is none.

    For one module only: its event loop runs in this thread, where no other can while it does, whatever the order.
    """
    program = next((path for name in NAMES if (path := shutil.which(name))), None)
    if program is None:
        pytest.skip("no Chromium is installed (the distribution's package is called chromium)")
    sync_api = pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed")
    with sync_api.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=program, args=list(QUIET))
        yield browser
        browser.close()


@pytest.fixture
def chromium_page(chromium: Browser) -> Iterator[Page]:
    """A fresh page; what it said on its console is in ``page.said``, what it asked for in ``page.asked``."""
    context = chromium.new_context(viewport={"width": 1200, "height": 900})
    page = context.new_page()
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: said.append(f"error: {error}"))
    page.on("request", lambda request: asked.append(request.url))
    page.said, page.asked = said, asked  # type: ignore[attr-defined]
    yield page
    context.close()
