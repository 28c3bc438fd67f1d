"""Drawings are valid Plotly figures, with labels where they can be read."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from underwatt.reports.draw_plan import (
    HEIGHT,
    LABEL_LINE,
    LETTER,
    WIDTH,
    draw_front,
    draw_map,
    label,
    log_axis,
    place_labels,
)
from underwatt.reports.page import Section, others_table, sections_of, trace_table
from underwatt.reports.report_records import HeatMap, Report

CSS = Path(__file__).parents[2] / "src" / "underwatt" / "reports" / "assets" / "report.css"


@pytest.fixture(scope="module")
def sections(whole: Report) -> tuple[Section, ...]:
    return sections_of(whole)


def test_plotly_accepts_every_drawing(sections: tuple[Section, ...]) -> None:
    graph_objects = pytest.importorskip("plotly.graph_objects")
    for section in sections:
        for plot in section.plots:
            graph_objects.Figure(plot.drawing)  # raises where a name or a value is not Plotly's


def test_every_colour_is_one_of_the_page(sections: tuple[Section, ...]) -> None:
    known = set(re.findall(r"(--[a-z0-9-]+):", CSS.read_text(encoding="utf-8")))
    used = {name for s in sections for p in s.plots for name in re.findall(r"var\((--[a-z0-9-]+)\)", str(p.drawing))}
    assert used
    assert used <= known


def test_every_figure_says_its_message_and_has_its_numbers(sections: tuple[Section, ...]) -> None:
    ids = [plot.id for section in sections for plot in section.plots]
    assert len(ids) == len(set(ids)) == 14
    for section in sections:
        assert all(len(plot.says) > 30 for plot in section.plots)
        if section.plots:
            assert "<table" in section.data + section.shown


def test_simulated_is_written_on_the_axes(sections: tuple[Section, ...]) -> None:
    front = next(section for section in sections if section.id == "front")
    assert "simulated" in front.plots[0].drawing["layout"]["xaxis"]["title"]["text"]


def test_labels_do_not_lie_on_each_other_where_there_is_room() -> None:
    points = [(0.5, 0.5), (0.51, 0.5), (0.52, 0.5), (0.5, 0.52)]
    texts = ["the choice", "largest batch", "middle batch", "vendor's mode"]
    boxes = []
    for (x, y), text, place in zip(points, texts, place_labels(points, texts), strict=True):
        start = x * WIDTH + place.x_shift - (LETTER * len(text) if place.anchor == "right" else 0)
        middle = y * HEIGHT + place.y_shift
        boxes.append((start, middle - LABEL_LINE / 2, start + LETTER * len(text), middle + LABEL_LINE / 2))
    for at, one in enumerate(boxes):
        for other in boxes[at + 1 :]:
            wide, high = (min(one[i + 2], other[i + 2]) - max(one[i], other[i]) for i in (0, 1))
            assert wide <= 0 or high <= 0


def test_labels_keep_off_the_line_of_the_budget_and_the_first_stays_at_its_point() -> None:
    crowd = [(0.5 + 0.01 * x, 0.5 + 0.02 * y) for x in range(-4, 5) for y in range(-4, 5)]
    texts = ["choice", "maximum mode"]
    points = [(0.5, 0.5), (0.62, 0.5)]
    close, far = place_labels(points, texts, crowd, uprights=[0.6], close=1)
    assert 0.0 in (close.x_shift, close.y_shift)
    assert far.anchor == "left"  # to the right of the line, which is left of the point
    [left] = place_labels([(0.58, 0.5)], ["maximum mode"], uprights=[0.6])
    assert left.anchor == "right"


def test_no_label_is_markup_also_on_a_narrow_screen() -> None:
    made = label("<b>long</b>", 0, 0, "<i>short</i>")
    assert "<" not in made["text"] + made["name"]


def test_a_label_at_the_edge_stays_inside() -> None:
    [place] = place_labels([(0.99, 0.5)], ["a rather long name"])
    assert place.anchor == "right"


def test_the_outline_surrounds_the_cells_that_keep_the_budget() -> None:
    heat = HeatMap(
        quantity="power_w",
        per="target",
        knob="gpu_mhz",
        knob_values=(100.0, 200.0),
        batch_sizes=(8, 16),
        values=((1.0, 2.0), (3.0, float("nan"))),
        keeps=((True, True), (False, False)),
        measured=((True, False), (False, False)),
        chosen=(0, 1),
        paused=0,
        others_at="",
        message="",
    )
    drawn = draw_map(heat, simulated=False)
    outline = drawn["data"][1]
    assert {value for value in outline["y"] if value is not None} == {-0.5, 0.5}
    assert drawn["data"][0]["z"][1][1] is None
    assert drawn["data"][0]["text"][0] == ["batch 8, 100: 1.00 W", "batch 16, 100: 2.00 W"]  # not its row and column


@pytest.mark.parametrize(("low", "high"), [(0.9, 210), (2.1, 2.9), (1e-3, 1e6), (7.1, 7.9)])
def test_log_axes_have_few_ticks(low: float, high: float) -> None:
    assert len(log_axis("", low, high)["tickvals"]) <= 10


def test_a_table_that_leaves_rows_out_says_so(whole: Report) -> None:
    trace = whole.trace
    assert trace is not None
    assert "are shown" not in trace_table(replace(trace, mean_at_s=(), low_w=(), mean_w=(), high_w=()))
    busy = replace(trace, changes=trace.changes * 200)
    assert f"What the run did (100 of {len(busy.changes):,} are shown)" in trace_table(busy)


def test_the_choice_has_a_short_label_whoever_else_would_choose_it(whole: Report) -> None:
    front = whole.front
    assert front is not None
    first, *others = front.others
    same = replace(first, choice=replace(first.choice, setting=front.chosen.setting))
    drawn = draw_front(replace(front, others=(same, *others)), simulated=True)
    texts = [label["text"] for label in drawn["layout"]["annotations"]]
    assert texts[0] == "choice"
    assert not any("also" in text for text in texts)
    hover = [text for trace in drawn["data"] for text in trace.get("hovertext", ())]
    assert f"the choice, also {first.choice.name}: {front.chosen.setting}" in hover


def test_bars_have_words_that_fit_a_phone(sections: tuple[Section, ...]) -> None:
    plots = {plot.id: plot.drawing for section in sections for plot in section.plots}
    briefs = [
        item["name"] for at in ("plot-spent", "plot-energy-by-setting") for item in plots[at]["layout"]["annotations"]
    ]
    assert len(briefs) > 4
    assert all(LETTER * len(brief) < 350 for brief in briefs), briefs


def test_whether_others_keep_the_budget_is_not_at_the_far_end_of_the_table(whole: Report) -> None:
    assert whole.front is not None
    headings = re.findall(r'<th scope="col">([^<]*)', others_table(1.0, whole.front.others))
    assert headings[:2] == ["rule", "keeps the budget"]
