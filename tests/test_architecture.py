"""The rules that hold for the whole package: direction of imports, exported names, cost of importing."""

from __future__ import annotations

import ast
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

import underwatt

SOURCE = Path(underwatt.__file__).parent
# Data flows one way: a folder imports only from its own row and from those before it. The core comes first.
ORDER = (
    ("helper",),  # must run alone: imports nothing of ours, so that everything may import it
    ("errors", "records", "_imports", "_files", "csv_tables"),
    ("events",),
    ("budget",),
    ("device",),
    ("measure",),
    ("predict",),
    ("convergence",),
    ("planning",),
    ("control",),
    # Around the core: nothing above imports any of these.
    ("drivers",),
    ("rivals",),
    ("store",),
    ("runlog",),
    ("jobs",),
    ("studies",),
    ("adapters",),
    ("fleet",),
    ("reports",),
    ("live",),
    ("api", "testing"),
    ("demo", "cli", "__main__", "__init__"),
)
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}
CORE = ("device", "measure", "predict", "convergence", "planning", "control")  # not even for types
PURE = ("predict", "convergence", "planning")  # never import device: they run on a server as well
MODULES = sorted(SOURCE.rglob("*.py"))


def _home(module: str) -> str:
    """``underwatt.helper.knobs`` lives in ``device``."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def _imported(path: Path, *, with_types: bool = False) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    type_only = (
        set()
        if with_types
        else {
            id(node)
            for branch in ast.walk(tree)
            if isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.dump(branch.test)
            for node in ast.walk(branch)
        }
    )
    names: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in type_only:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            if node.module == "underwatt":
                names |= {f"underwatt.{alias.name}" for alias in node.names if (SOURCE / alias.name).exists()}
    return {name for name in names if name == "underwatt" or name.startswith("underwatt.")}


def test_the_map_for_contributors_names_every_folder() -> None:
    text = (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    names = {
        path.name + "/" * path.is_dir()
        for path in SOURCE.iterdir()
        if path.name[:2] != "__" and path.name != "py.typed"
    }
    assert not [name for name in sorted(names) if f"`{name}`" not in text]


def test_the_map_names_no_module_that_is_not_there() -> None:
    text = (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = re.findall(r"`([\w/]+\.py)`", text[text.index("### The core") : text.index("### Beside the package")])
    assert len(named) > 40
    assert not [name for name in named if not any(SOURCE.rglob(name))]


def test_every_folder_has_a_place_in_the_order() -> None:
    tops = {path.relative_to(SOURCE).parts[0].removesuffix(".py") for path in MODULES}
    assert tops <= set(RANK)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_one_way(path: Path) -> None:
    home = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    for name in _imported(path, with_types=home in CORE):
        target = _home(name)
        if target == "__init__" and home != "__init__":
            target = "errors"  # only the version is taken from the package itself
        assert RANK[target] <= RANK[home], f"{home} imports {name}"
        assert not (home in PURE and target == "device"), f"{home} must not know devices, but imports {name}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_module_is_over_500_lines(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 500


def test_the_order_test_sees_a_wrong_import(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text("from underwatt.planning.choose import x\nimport underwatt.device.base\n")
    assert _imported(wrong) == {"underwatt.planning.choose", "underwatt.device.base"}


def test_exported_names_exist_and_nothing_else_is_public() -> None:
    assert dir(underwatt) == underwatt.__all__ == sorted(underwatt.__all__)
    for name in underwatt.__all__:
        assert getattr(underwatt, name) is not None
    with pytest.raises(AttributeError):
        _ = underwatt.no_such_name


def test_exported_names_are_callable_after_every_module_was_imported() -> None:
    program = (
        "import contextlib, importlib, pkgutil, underwatt\n"
        "for module in pkgutil.walk_packages(underwatt.__path__, 'underwatt.'):\n"
        "    with contextlib.suppress(ImportError, SystemExit, underwatt.UnderwattError):\n"
        "        '__main__' in module.name or importlib.import_module(module.name)\n"
        "print(*(name for name in underwatt.__all__ if name[0] != '_' and not callable(getattr(underwatt, name))))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == ""


def test_import_is_light() -> None:
    program = (
        "import sys, time; t = time.perf_counter(); import underwatt; "
        "print(time.perf_counter() - t, *(m for m in ('torch', 'sklearn', 'numpy', 'scipy') if m in sys.modules))"
    )

    def once() -> list[str]:
        return subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        ).stdout.split()

    runs = [once() for _ in range(5)]
    assert all(len(run) == 1 for run in runs), f"heavy packages were imported: {runs}"
    assert statistics.median(float(run[0]) for run in runs) < 0.150
