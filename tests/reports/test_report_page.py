"""The report in a real browser: offline, light and dark, on a phone, by keyboard, and for assistive technology."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import report_world as world

from underwatt.events import Verdict
from underwatt.records import Profile
from underwatt.reports.build import build_report
from underwatt.reports.gather_run import trace_figure
from underwatt.reports.page import render
from underwatt.reports.report_records import Report
from underwatt.runlog.run_record import RunRecord

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytest.importorskip("plotly", reason="the package plotly is not installed")
PLOTS = 14


@pytest.fixture(scope="module")
def html(whole: Report) -> str:
    return render(whole)


@pytest.fixture(scope="module")
def path(html: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("report") / "report.html"
    file.write_text(html, encoding="utf-8")
    return file


def visit(page: Page, path: Path) -> Any:
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-drawn=true]", state="attached")
    return page


def test_what_users_wrote_is_text_and_nothing_else(html: str) -> None:
    assert "<script>alert" not in html
    assert "&lt;script&gt;alert(&quot;job&quot;)&lt;/script&gt;" in html
    assert len(re.findall(r"<script[ >]", html.split("<style>")[0] + html.split("</style>")[1].split("/**")[0])) == 2


def test_the_verdict_stands_before_all_else(whole: Report) -> None:
    page = render(replace(whole, verdict=Verdict(400.0, 400.0, over_s=20.0, worst_over=0.09, since_s=27.0)))
    at = page.index('<p class="verdict not-held">The budget was NOT held: above it for 20.0 s')
    assert at < page.index('<p class="decision">')
    assert '<p class="verdict">The budget was held' in render(whole)
    assert 'class="verdict' not in render(replace(whole, verdict=Verdict()))


def test_a_profile_of_two_settings_still_gives_a_page() -> None:
    bare = Profile(world.device().info, world.profile().workload, world.profile(2).measurements)
    page = render(build_report(bare, None, made_at="now"))
    assert "underwatt converge JOB" in page
    assert bare.device.about_watts in page
    assert 'class="sortable"' in page
    assert json.loads(page.split('id="drawings">')[1].split("</script>")[0]) == {}


def test_a_run_that_failed_is_told_without_a_plan(record: RunRecord) -> None:
    assert record.end is not None
    end = replace(record.end, outcome="failed", error="<b>no memory</b>", restored=False)
    failed = replace(record, events=(*record.events[:-1], end))
    page = render(build_report(world.profile(2), None, made_at="now", record=failed))
    assert "failed with a score of 0.971" in page
    assert "&lt;b&gt;no memory&lt;/b&gt;. The device was not put back" in page


def test_every_figure_is_drawn_without_error_or_network(chromium_page: Page, path: Path) -> None:
    page = visit(chromium_page, path)
    plots = page.locator(".plot")
    assert plots.count() == PLOTS
    for at in range(PLOTS):
        plot = plots.nth(at)
        assert plot.get_attribute("role") == "img"
        assert len(plot.get_attribute("aria-label") or "") > 30
        assert plot.locator("path, image").count() > 3, plot.get_attribute("id")
        assert plot.bounding_box()["height"] > 100
    assert page.said == []
    assert [url for url in page.asked if not url.startswith(("file:", "data:"))] == []
    assert "simulated" in page.title()
    assert page.locator(".chip").inner_text() == "simulated device"


def test_scripts_that_are_not_ours_do_not_run(chromium_page: Page, path: Path, tmp_path: Path) -> None:
    worse = tmp_path / "worse.html"
    worse.write_text(
        path.read_text(encoding="utf-8").replace("</main>", "<script>document.title='owned'</script></main>")
    )
    page = visit(chromium_page, worse)
    assert page.title() != "owned"
    page.evaluate("fetch('https://example.org/').catch(() => {})")
    page.wait_for_timeout(200)
    assert not [url for url in page.asked if url.startswith("http")]


def test_figures_follow_light_and_dark(chromium_page: Page, path: Path) -> None:
    page = chromium_page
    seen = {}
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        if scheme == "light":
            visit(page, path)
        else:
            page.wait_for_selector("html[data-drawn=false]", state="attached")
            page.wait_for_selector("html[data-drawn=true]", state="attached")
        seen[scheme] = (
            page.evaluate("getComputedStyle(document.body).backgroundColor"),
            page.evaluate("document.querySelector('#plot-front .xtick text').style.fill"),
        )
    assert seen["light"][0] != seen["dark"][0]
    assert seen["light"][1] != seen["dark"][1]


def test_a_phone_needs_no_sideways_scrolling(chromium_page: Page, path: Path) -> None:
    page = chromium_page
    page.set_viewport_size({"width": 375, "height": 812})
    visit(page, path)
    assert page.evaluate("document.documentElement.scrollWidth") <= 375
    assert (
        page.evaluate("Math.max(...[...document.querySelectorAll('.plot')].map(p => p.getBoundingClientRect().right))")
        <= 375
    )
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth") <= 375


def column(page: Page, at: int) -> list[float]:
    cells = page.locator(f"table.sortable tbody td:nth-child({at})").all_inner_texts()
    return [float(cell.replace(",", "")) for cell in cells if cell != "–"]


def test_tables_sort_and_open_by_keyboard(chromium_page: Page, path: Path) -> None:
    page = visit(chromium_page, path)
    page.locator("table.sortable thead button").nth(1).focus()
    page.keyboard.press("Enter")
    heads = page.locator("table.sortable thead th")
    assert heads.nth(1).get_attribute("aria-sort") == "ascending"
    assert column(page, 2) == sorted(column(page, 2))
    assert page.locator("table.sortable tbody tr").last.locator("td").nth(1).inner_text() == "–"  # never measured: last
    page.keyboard.press("Enter")
    assert heads.nth(1).get_attribute("aria-sort") == "descending"
    assert column(page, 2) == sorted(column(page, 2), reverse=True)
    page.keyboard.press("Tab")
    page.keyboard.press("Space")
    assert heads.nth(1).get_attribute("aria-sort") == "none"
    assert heads.nth(2).get_attribute("aria-sort") == "ascending"
    page.locator("summary").first.focus()
    page.keyboard.press("Enter")
    numbers = page.locator("details").first
    assert numbers.get_attribute("open") is not None
    assert numbers.locator("tbody tr").count() > 3


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(chromium_page: Page, path: Path, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    page = chromium_page
    page.emulate_media(color_scheme=scheme)
    visit(page, path)
    if scheme == "light":
        page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    found = axe.Axe().run(page).response["violations"]
    bad = [(item["id"], item["nodes"][0]["html"][:200]) for item in found if item["impact"] in ("serious", "critical")]
    assert bad == []


@pytest.mark.slow
def test_a_day_of_readings_and_a_thousand_settings(
    chromium_page: Page, whole: Report, record: RunRecord, tmp_path: Path
) -> None:
    at_s = np.arange(1, 864_001) / 10
    power_w = 5.7 + 0.1 * np.random.default_rng(0).normal(size=len(at_s))
    power_w[777_777] = 9.99
    long = replace(record, power=replace(record.power, at_s=at_s, power_w=power_w))
    assert whole.measurements is not None
    rows = (whole.measurements.rows * 100)[:1000]
    trace = trace_figure(long)
    assert trace is not None
    assert max(trace.over_power_w) == 9.99
    html = render(replace(whole, trace=trace, measurements=replace(whole.measurements, rows=rows)))
    assert len(html.encode()) < 8e6
    (tmp_path / "long.html").write_text(html, encoding="utf-8")
    opened_s = []
    for _ in range(2):
        visit(chromium_page, tmp_path / "long.html")
        opened_s.append(chromium_page.evaluate("performance.getEntriesByName('shown')[0].startTime") / 1e3)
    assert min(opened_s) < 3
    chromium_page.locator("table.sortable thead button").nth(3).press("Enter")
    assert column(chromium_page, 4) == sorted(column(chromium_page, 4))
    assert len(column(chromium_page, 1)) == 1000
