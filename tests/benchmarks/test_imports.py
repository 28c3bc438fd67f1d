"""Every benchmark can be started: what it takes from the library is there."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from underwatt.errors import MissingExtraError

FOLDER = Path(__file__).resolve().parent.parent.parent / "benchmarks"


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.py")))
def test_what_it_needs_is_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    try:
        importlib.import_module(name)
    except MissingExtraError as exc:
        if "flwr" not in exc.message:  # which has an environment of its own
            raise
        pytest.skip(exc.message)
