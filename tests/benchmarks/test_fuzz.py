"""A small part of ``benchmarks/fuzz.py``: whatever is read from outside is read, or is an error of ours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "fuzz.py"


def test_damaged_files_of_every_kind_give_no_traceback(tmp_path: Path) -> None:
    command = [sys.executable, str(FILE), "--inputs", "6000", "--json", str(tmp_path / "rows.json")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert (tmp_path / "rows.json").exists()
