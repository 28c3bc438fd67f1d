"""What is found on this machine where nothing is named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import report_world as world

from underwatt.api import lookup
from underwatt.errors import InputError


def write_run(name: str, age_s: float, text: str | None = None) -> Path:
    path = Path("runs") / name / "log.jsonl"
    if text is None:
        world.write_run(path, seconds=20, excess_at_s=None)
    else:
        path.parent.mkdir(parents=True)
        path.write_text(text)
    now_s = path.stat().st_mtime
    os.utime(path, (now_s - age_s, now_s - age_s))
    return path


def test_the_newest_run_is_found_and_one_that_was_refused_before_it_began_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert lookup.find_run(None) is None
    write_run("refused", 0, "")
    assert lookup.find_run(None) is None
    write_run("old", 60)
    found = lookup.find_run(None)
    assert found is not None
    assert found.events


def test_where_the_newest_run_cannot_be_read_no_older_one_is_shown_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run("old", 60)
    path = write_run("torn", 0, "nothing of a run\n")
    with pytest.raises(InputError, match=str(path)):
        lookup.find_run(None)
