"""Putting the service in place, and taking it away: a list of steps that can be read before anything is done."""

import shutil
from pathlib import Path

PACKAGE = "underwatt_helper"


def copy_to(parent: Path) -> Path:
    """Copy this folder, alone, to where root's Python finds it; nobody else may write there."""
    target = parent / PACKAGE
    shutil.rmtree(str(target), ignore_errors=True)
    target.mkdir(parents=True)
    for file in sorted(Path(__file__).resolve().parent.glob("*.py")):
        copy = target / file.name
        copy.write_bytes(file.read_bytes())
        copy.chmod(0o644)
    return parent
