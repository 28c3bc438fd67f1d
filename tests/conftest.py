"""What every test shares: the folder of real measurements, where there is one, and a state folder of its own."""

from __future__ import annotations

import os
from pathlib import Path

# Tests run one worker a core: more threads in each would only fight over the cores. Set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import settings

# How long an example takes says more about the machine than about the code.
settings.register_profile("underwatt", deadline=None)
settings.load_profile("underwatt")

REPOSITORY = Path(__file__).resolve().parent.parent


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
