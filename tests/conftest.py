"""What every test shares: the real measurements, where they are here, a state folder of its own, and a browser."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

# Tests run one worker a core: more threads in each would only fight over the cores. Set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

# How long an example takes says more about the machine than about the code.
settings.register_profile("underwatt", deadline=None)
settings.load_profile("underwatt")

# Chromium from the distribution, with no network beyond what a test allows.
CHROMIUM_ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)
CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome")
REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True, scope="session")
def _imports_are_no_garbage() -> None:
    """Leave what the imports made, a million objects, out of every collection: each would take a tenth of a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test touches the journals of this machine."""
    monkeypatch.setenv("UNDERWATT_STATE", str(tmp_path / "state"))


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of real measurements; tests that need it are skipped, saying so, where it is absent."""
    folder = Path(os.environ.get("UNDERWATT_DATA") or REPOSITORY.parent / "shared" / "data")
    if not (folder / "powertrain").is_dir():
        pytest.skip("the real measurements are not here (set UNDERWATT_DATA to their folder)")
    return folder


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """The browser; tests that need one are skipped, saying so, where there is none.

    For one module only: its event loop runs in this thread, where no other can while it does, whatever the order.
    """
    program = next((path for name in CHROMIUM_NAMES if (path := shutil.which(name))), None)
    if program is None:
        pytest.skip("no Chromium is installed (the distribution's package is called chromium)")
    sync_api = pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed")
    with sync_api.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=program, args=list(CHROMIUM_ARGUMENTS))
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
