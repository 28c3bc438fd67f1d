from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from underwatt.jobs.command import LONGEST_LINE, LineSplitter, MetricLine, OomLine, StepLine, parse_line


@pytest.mark.parametrize(
    ("raw", "line"),
    [
        (b"step", StepLine()),
        (b"  step \r", StepLine()),
        (b"step 5120.25", StepLine(5120.25)),
        (b"step 5120.25 10", StepLine(5120.25, 10)),
        (b"step - 10", StepLine(None, 10)),
        (b"metric 0.913", MetricLine(0.913)),
        (b"oom", OomLine()),
    ],
)
def test_each_documented_line_is_understood(raw, line):
    assert parse_line(raw) == line


@pytest.mark.parametrize(
    "raw",
    b"|Step|steps|step nan|step inf 1|step 1 0|step 1 -3|step 1 1.5|step 1 2 3|metric|metric nan|oom now"
    b"|step 1 99999999999999|\xff\xfe step|loss: 0.3".split(b"|"),
)
def test_anything_else_is_not(raw):
    assert parse_line(raw) is None


@given(st.binary(max_size=300))
def test_no_bytes_break_the_parser(raw):
    line = parse_line(raw)
    if isinstance(line, StepLine):
        assert line.steps >= 1
        assert line.at_s is None or math.isfinite(line.at_s)


@given(st.lists(st.binary(min_size=1, max_size=20).filter(lambda b: b"\n" not in b and b.strip())), st.data())
def test_lines_come_out_whole_however_they_are_cut(lines, data):
    stream = b"".join(line + b"\n" for line in lines)
    splitter, found = LineSplitter(), []
    while stream:
        cut = data.draw(st.integers(1, len(stream)))
        found += splitter.feed(stream[:cut])
        stream = stream[cut:]
    assert found == lines


def test_a_line_that_never_ends_takes_no_memory():
    splitter = LineSplitter()
    lines = [line for _ in range(100) for line in splitter.feed(b"x" * 65536)]
    assert all(len(line) <= LONGEST_LINE for line in lines)
    assert len(splitter._rest) <= LONGEST_LINE
