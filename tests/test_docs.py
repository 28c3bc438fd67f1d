"""The Python in README and docs runs as it stands; the commands they name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from underwatt.cli import HOMES

REPOSITORY = Path(__file__).resolve().parent.parent
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
BLOCKS = [
    (page.name, number, block)
    for page in PAGES
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL))
]


@pytest.mark.parametrize(("page", "number", "block"), BLOCKS, ids=[f"{page}-{n}" for page, n, _ in BLOCKS])
def test_python_blocks_run(page: str, number: int, block: str) -> None:
    names: dict[str, object] = {}
    exec(compile(block, f"{page} block {number}", "exec"), names)
    if "factory" in names:
        names["factory"]()  # type: ignore[operator]
    assert names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist(page: Path) -> None:
    named = set(re.findall(r"underwatt ([a-z]+)", page.read_text(encoding="utf-8")))
    ours = {
        word for word in named if re.search(rf"(`|^)underwatt {word}", page.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert ours <= set(HOMES), f"{page.name} names commands that do not exist: {ours - set(HOMES)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
