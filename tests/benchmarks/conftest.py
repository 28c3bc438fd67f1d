"""Benchmarks are scripts in a folder of their own: tests import them from there."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))  # last: one is named as a standard module
