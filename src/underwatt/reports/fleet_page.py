"""One page about a fleet: boards' watts against their budgets, rounds with their idle ends, accuracy, joules.

Drawn as SVG, so that the file is small, needs no script, and asks no network.
"""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

from underwatt.reports.page import _asset
from underwatt.reports.words import counted, duration, energy, percent, watts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from underwatt.fleet.simulation import FleetRecord

WIDTH, LEFT, RIGHT = 860, 190, 70
ROW, PAD, BAR = 30, 6, 16
MOST_POINTS = 240  # of a line


def render_fleet(record: FleetRecord) -> str:
    """The page as one self-contained HTML file."""
    joules = sum(one.energy_j(record.ended_s) for one in record.watts)
    figures = (
        ("Target", f"{record.plan.target:.0%}", _reached(record)),
        ("Accuracy", f"{record.scores[-1][1]:.1%}", f"after {counted(len(record.rounds), 'round')}"),
        ("Idle", percent(record.idle_share), "of the boards' time"),
        ("Energy", energy(joules), f"in {duration(record.ended_s)}, all boards"),
        ("Over budget", f"{100 * _worst_over(record):.2g}%", "joules, the worst board"),
    )
    shown = "".join(
        f"<div><dt>{escape(name)}</dt><dd><strong>{escape(value)}</strong><span>{escape(more)}</span></dd></div>"
        for name, value, more in figures
    )
    sections = (
        ("Accuracy over time", "One point a round.", _accuracy(record)),
        ("Watts of each board", "What it truly drew, each second, against its budget (dashed).", _watts(record)),
        ("Rounds", "From message to reply of each board; what is left of a round, it waited.", _rounds(record)),
        ("Joules by board", "In all, and what a sample that it trained on cost.", _joules(record)),
    )
    body = "".join(
        f'<section aria-labelledby="s{at}"><h2 id="s{at}">{heading}</h2><figure><figcaption><p class="message">'
        f'{message}</p></figcaption><div class="plots">{drawing}</div></figure></section>\n'
        for at, (heading, message, drawing) in enumerate(sections)
    )
    skew = "images dealt at random" if record.plan.skew is None else f"images dealt by α = {record.plan.skew:g}"
    boards = counted(len(record.plan.boards), "board")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{boards} (simulated): Underwatt fleet</title>\n"
        f"<style>{_asset('report.css')}</style>\n</head>\n<body>\n"
        f'<header><p class="brand">Underwatt fleet</p><h1>{boards} <span>train one model</span></h1>\n'
        f'<p class="about"><span class="chip">simulated boards, real learning</span><span>{skew}</span></p>\n'
        f'<dl class="figures">{shown}</dl></header>\n<main>\n{body}</main>\n</body>\n</html>\n'
    )


def _reached(record: FleetRecord) -> str:
    reached_s = record.reached_s
    return "was not reached" if math.isinf(reached_s) else f"reached after {duration(reached_s)}"


def _worst_over(record: FleetRecord) -> float:
    return max(
        (
            watts.over_share(board.budget.course, min(record.ended_s, board.lost_s))
            for board, watts in zip(record.plan.boards, record.watts, strict=True)
            if board.budget.course is not None
        ),
        default=0.0,
    )


def _name(record: FleetRecord, at: int) -> str:
    return f"{at + 1} {record.plan.boards[at].kind}"


def _svg(height: float, says: str, parts: Iterable[str]) -> str:
    return (
        f'<svg class="plot" viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(says)}" '
        f'font-family="inherit" font-size="12" fill="var(--ink)">{"".join(parts)}</svg>'
    )


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(text)}</text>'


def _line(points: Sequence[tuple[float, float]], color: str, more: str = "") -> str:
    said = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{said}" fill="none" stroke="var(--{color})" stroke-width="1.6" {more}/>'


def _along(record: FleetRecord) -> Callable[[float], float]:
    return lambda at_s: LEFT + (WIDTH - LEFT - RIGHT) * at_s / max(record.ended_s, 1e-9)


def _time_axis(record: FleetRecord, y: float) -> list[str]:
    x = _along(record)
    return [
        _text(
            x(share * record.ended_s), y, duration(share * record.ended_s), 'text-anchor="middle" fill="var(--quiet)"'
        )
        for share in (0.0, 0.25, 0.5, 0.75, 1.0)
    ]


def _accuracy(record: FleetRecord) -> str:
    x, height = _along(record), 240.0

    def y(score: float) -> float:
        return height - 30 - (height - 50) * score

    target = record.plan.target
    parts = [_text(LEFT - 8, y(score) + 4, f"{score:.0%}", 'text-anchor="end"') for score in (0.0, 0.5, 1.0)]
    if target <= 1:
        parts.append(_line([(x(0), y(target)), (x(record.ended_s), y(target))], "quiet", 'stroke-dasharray="4 4"'))
        parts.append(_text(x(record.ended_s) + 6, y(target) + 4, f"{target:.0%}"))
    parts.append(_line([(x(at_s), y(score)) for at_s, score in record.scores], "accent"))
    return _svg(height, "Accuracy over time", [*parts, *_time_axis(record, height - 8)])


def _watts(record: FleetRecord) -> str:
    x, rows = _along(record), len(record.watts)
    tall = 2 * ROW
    parts = []
    for at, (board, drawn) in enumerate(zip(record.plan.boards, record.watts, strict=True)):
        bottom = (at + 1) * tall - PAD
        at_s, power_w = drawn.power_w(min(record.ended_s, board.lost_s))
        course = board.budget.course
        most_w = max([*power_w, course.highest_w if course else 0.0, 1e-9])

        def y(watts_: float, bottom: float = bottom, most_w: float = most_w) -> float:
            return bottom - (tall - 2 * PAD) * watts_ / most_w

        every = max(1, len(at_s) // MOST_POINTS)
        parts.append(_text(0, bottom - tall / 2 + 4, _name(record, at)))
        parts.append(_line([(x(t), y(w)) for t, w in zip(at_s[::every], power_w[::every], strict=True)], "accent"))
        if course is not None:
            steps = [
                (x(edge), y(level))
                for begin, end, level in course.pieces(0.0, min(record.ended_s, board.lost_s))
                for edge in (begin, end)
            ]
            parts.append(_line(steps, "over", 'stroke-dasharray="5 4"'))
            parts.append(
                _text(WIDTH - RIGHT + 6, y(course.power_w(record.ended_s)) + 4, watts(course.power_w(record.ended_s)))
            )
    return _svg(rows * tall + 24, "Watts of each board over time", [*parts, *_time_axis(record, rows * tall + 16)])


def _rounds(record: FleetRecord) -> str:
    x, rows, parts = _along(record), len(record.plan.boards), []
    for one in record.rounds:
        for at in range(rows):
            top, begun, ended = at * ROW + PAD, x(one.begun_s), x(one.ended_s)
            parts.append(
                f'<rect x="{begun:.1f}" y="{top}" width="{max(ended - begun - 1, 0.5):.1f}" height="{BAR}" '
                'fill="none" stroke="var(--line)"/>'
            )
            if at + 1 in one.arrived_s:
                busy = x(one.begun_s + one.arrived_s[at + 1]) - begun
                parts.append(
                    f'<rect x="{begun:.1f}" y="{top}" width="{max(busy - 1, 0.5):.1f}" height="{BAR}" '
                    f'fill="var(--accent)"><title>round {one.number}: {duration(one.arrived_s[at + 1])}</title></rect>'
                )
    names = [_text(0, at * ROW + PAD + 12, _name(record, at)) for at in range(rows)]
    return _svg(rows * ROW + 24, "Rounds of each board", [*names, *parts, *_time_axis(record, rows * ROW + 16)])


def _joules(record: FleetRecord) -> str:
    spent = [one.energy_j(record.ended_s) for one in record.watts]
    most = max([*spent, 1e-9])
    parts = []
    for at, joules in enumerate(spent):
        top, width = at * ROW + PAD, (WIDTH - LEFT - 2.6 * RIGHT) * joules / most
        samples = sum(one.reports[at + 1].samples for one in record.rounds if at + 1 in one.reports)
        each = f", {1e3 * joules / samples:.3g} mJ a sample" if samples else ""
        parts += [
            _text(0, top + 12, _name(record, at)),
            f'<rect x="{LEFT}" y="{top}" width="{width:.1f}" height="{BAR}" fill="var(--bar)"/>',
            _text(LEFT + width + 6, top + 12, f"{joules:,.0f} J{each}"),
        ]
    return _svg(len(spent) * ROW, "Joules by board", parts)
