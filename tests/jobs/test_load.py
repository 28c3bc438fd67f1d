from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import underwatt
from underwatt.jobs import load
from underwatt.jobs.load import LOAD_BATCH_SIZES, SCRIPT, load_for
from underwatt.measure.workload import Beat


def test_the_script_is_for_the_python_of_any_jetpack() -> None:
    nodes = list(ast.walk(ast.parse(SCRIPT.read_text(encoding="utf-8"), feature_version=(3, 6))))
    imports = {name.name for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom)) for name in node.names}
    assert "underwatt" not in {name.split(".")[0] for name in imports}
    # ``list[str]`` is an error before 3.9 where it is evaluated, as annotations of functions are; strings are not.
    subscripted = {ast.unparse(node.value) for node in nodes if isinstance(node, ast.Subscript)}
    assert subscripted.isdisjoint({"list", "dict", "tuple", "set"})


@pytest.mark.parametrize("name", ["python3.6", "python3.8"])  # of JetPack 4 and 5
def test_the_script_runs_where_the_python_of_a_jetpack_is(name: str) -> None:
    found = [shutil.which(name), *Path("~/.pyenv/versions").expanduser().glob(f"{name[6:]}.*/bin/python3")]
    pythons = [python for python in found if python and subprocess.run([python, "-c", ""], check=False).returncode == 0]
    if not pythons:
        pytest.skip(f"there is no {name} here")
    ended = subprocess.run([pythons[0], str(SCRIPT), "--probe"], capture_output=True, text=True, check=False)
    assert not ended.stderr


def test_a_simulated_board_simulates_its_load() -> None:
    device = underwatt.open_device("virtual:nano")
    found = load_for(device)
    assert found.on_gpu
    assert isinstance(found.workload.start(LOAD_BATCH_SIZES[0]).step(), Beat)
    assert device.clock.now_s() > 0


def test_a_real_device_without_a_gpu_is_loaded_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "_sees_gpu", lambda python, gpu: False)
    found = load_for(_board(tmp_path))
    assert not found.on_gpu
    run = found.workload.start(LOAD_BATCH_SIZES[0])
    try:
        beats = [run.step() for _ in range(3)]
    finally:
        run.stop()
    assert all(beat and beat.steps >= 1 for beat in beats)


def test_the_python_whose_pytorch_sees_the_gpu_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "python3"
    other.write_text("#!/bin/sh\nexit 0\n")
    other.chmod(0o755)
    monkeypatch.setattr(load.shutil, "which", lambda name: str(other) if name == "python3" else name)
    seen: list[str] = []

    def sees(python: str, gpu: list[str]) -> bool:
        seen.append(python)
        return python == str(other)

    monkeypatch.setattr(load, "_sees_gpu", sees)
    found = load_for(_board(tmp_path))
    assert found.on_gpu
    assert seen[0] == sys.executable
    assert found.workload.arguments(8)[0] == str(other)  # type: ignore[attr-defined]


def test_a_python_that_cannot_be_asked_sees_no_gpu(tmp_path: Path) -> None:
    assert not load._sees_gpu(str(tmp_path / "no-python"), [])
    assert not load._sees_gpu("/bin/false", [])


def _board(folder: Path) -> underwatt.device.base.Device:  # type: ignore[name-defined]
    from underwatt.drivers.virtual.sysfs import SysfsBoard

    SysfsBoard.create(underwatt.open_device("virtual:nano").board, folder / "board")  # type: ignore[attr-defined]
    return underwatt.open_device(f"jetson:{folder / 'board'}")
