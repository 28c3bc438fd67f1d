"""Scripts as people write them run with and without us, and are at most four lines longer with us."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from underwatt.jobs import emitter

EXAMPLES = Path(__file__).parents[2] / "examples"
SOURCE = Path(__file__).parents[2] / "src"
SCRIPTS = ("train_loop.py", "train_lightning.py", "train_transformers.py", "train_job.py", "train_command.py")
SHORT = {
    "train_lightning.py": ["--epochs", "2"],
    "train_transformers.py": ["--steps", "20"],
    "train_command.py": ["--epochs", "2"],
}


def without_us(text: str) -> list[str]:
    """The script as it was: what is marked as added is gone, and what that stands for is back."""
    kept = [line for line in text.splitlines() if not line.endswith("# +")]
    return [re.sub(r"^(\s*)# - ", r"\1", line) for line in kept]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_at_most_four_lines_longer_with_us(name: str) -> None:
    text = (EXAMPLES / name).read_text(encoding="utf-8")
    before = without_us(text)
    with_us = [line for line in text.splitlines() if not re.match(r"\s*# - ", line)]
    before_lines = [line for line in before if line.strip() != "if True:"]  # stands where our block begins
    assert len(with_us) <= len(before_lines) + 4
    assert any(line.endswith("# +") for line in with_us)
    code = "\n".join(before).split('"""', 2)[2]
    assert "underwatt" not in code.lower().replace("underwatt_device", "").replace("underwatt.errors", "")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("ours", [True, False], ids=["with", "without"])
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs_with_and_without_us(name: str, ours: bool, tmp_path: Path) -> None:
    for package in {"train_lightning.py": ["lightning"], "train_transformers.py": ["transformers"]}.get(name, []):
        pytest.importorskip(package, reason=f"{package} is not installed")
    text = (EXAMPLES / name).read_text(encoding="utf-8")
    script = tmp_path / name
    script.write_text(text if ours else "\n".join(without_us(text)), encoding="utf-8")
    (tmp_path / "underwatt_beat.py").write_text(Path(emitter.__file__).read_text(encoding="utf-8"), encoding="utf-8")
    words = [sys.executable, str(script), *SHORT.get(name, [])]
    paths = os.pathsep.join(map(str, (SOURCE, EXAMPLES)))
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
