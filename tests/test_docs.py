"""README and docs are true: every block runs as it stands or says why not, and what they name exists."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import typer
from docs_blocks import (
    GAP,
    RUN_LANGUAGES,
    Block,
    anchors_of,
    blocks_of,
    commands_of,
    continues,
    links_of,
    marks_without_a_block,
    messages_in,
    prose_of,
)

import underwatt
from underwatt.cli import COMMANDS, app

REPOSITORY = Path(__file__).resolve().parent.parent
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
LINKED = [*PAGES, REPOSITORY / "CONTRIBUTING.md", REPOSITORY / "CHANGELOG.md", REPOSITORY / "benchmarks" / "README.md"]
RUNNABLE = [page for page in PAGES if any(b.language in RUN_LANGUAGES and b.mark != "not run" for b in blocks_of(page))]
LIMIT_S = 300  # of a busy machine; an idle one needs 15 s for the longest block

by_name = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def run_block(block: Block, folder: Path) -> None:
    """Execute a block as a reader would; fails where it does not end as the page says."""
    if block.mark == "file":
        (folder / block.value).write_text(block.text, encoding="utf-8")
        return
    if block.language not in RUN_LANGUAGES or block.mark == "not run":
        return
    command = ["bash", "-eu", "-o", "pipefail", "-c", block.text]
    if block.language == "python":
        script = folder / "block.py"
        script.write_text(block.text, encoding="utf-8")
        command = [sys.executable, str(script)]
    ended = subprocess.run(
        command, cwd=folder, env=reader_environment(folder), capture_output=True, text=True, timeout=LIMIT_S
    )
    said = ended.stdout + ended.stderr
    if block.mark == "fails":
        assert ended.returncode != 0, f"{block} was to fail:\n{block.text}"
        assert block.value in " ".join(said.split()), f"{block} does not say {block.value!r}:\n{said[-2000:]}"
    else:
        assert ended.returncode == 0, f"{block} failed with {ended.returncode}:\n{block.text}\n{said[-2000:]}"


def reader_environment(folder: Path) -> dict[str, str]:
    """A newcomer's machine: our command on the path, nothing of this machine's own state."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("UNDERWATT", "COV", "PYTEST"))}
    return kept | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(folder),
        "UNDERWATT_STATE": str(folder / ".state"),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "120",
    }


def chains() -> dict[str, list[Path]]:
    """Pages with blocks to run: each that stands alone, with those that continue it in what it has left."""
    found = {page.name: [page] for page in RUNNABLE if not continues(page)}
    for page in RUNNABLE:
        if continues(page):
            found[continues(page)].append(page)
    return found


# One test for a chain, so that however tests are spread over processes, its first page is run once.
@pytest.mark.slow
@pytest.mark.timeout(900)  # of a busy machine; an idle one needs less than a minute
@pytest.mark.parametrize("chain", chains().values(), ids=chains())
def test_blocks_run_in_order(chain: list[Path], tmp_path: Path) -> None:
    first = tmp_path / chain[0].stem
    first.mkdir()
    for page in chain:
        folder = tmp_path / page.stem
        if page is not chain[0]:
            shutil.copytree(first, folder)
        for block in blocks_of(page):
            run_block(block, folder)
        if page.name == "README.md":
            check_quick_start(folder)


def check_quick_start(folder: Path) -> None:
    """The first thing that anyone tries is long enough to be held and judged, and its report shows why it chose so."""
    record = underwatt.read_run(next((folder / "runs").iterdir()))
    assert record.said is not None
    assert record.said.held
    assert record.said.judged_s > 10
    figures = underwatt.report_figures(run=next((folder / "runs").iterdir()), store=folder / "underwatt.db")
    assert figures.decision is not None
    assert figures.front is not None


@by_name
def test_every_block_says_what_it_is_and_every_mark_why(page: Path) -> None:
    assert not [block.problem for block in blocks_of(page) if block.problem]
    assert not marks_without_a_block(page)
    hidden = re.findall(r"^ {4,}(?:\$ )?(?:sudo |pip |underwatt |make |git ).*$", prose_of(page), re.MULTILINE)
    assert not hidden, f"{page.name}: commands belong into a block: {hidden}"


@by_name
def test_files_that_marks_and_text_name_exist(page: Path) -> None:
    named = re.findall(r"\b(?:tests|benchmarks|examples|docs)/[\w/.-]+\.\w+", page.read_text(encoding="utf-8"))
    missing = [name for name in named if not (REPOSITORY / name).exists()]
    assert not missing, f"{page.name} names files that are not here: {missing}"


@by_name
def test_commands_and_options_exist(page: Path) -> None:
    for text in commands_of(page):
        words = text.split(" -- ")[0].split()[1:]
        if not words or words[0].startswith("-") or words[0] == GAP:
            continue
        assert words[0] in COMMANDS, f"{page.name} names a command that does not exist: {text}"
        known = options_of(*words[:2] if words[0] in ("store", "fleet") and len(words) > 1 else words[:1])
        asked = {re.split(r"[=\]…]", word.lstrip("["))[0] for word in words if word.lstrip("[").startswith("-")}
        assert asked <= known, f"{page.name}: {text!r} has options that do not exist: {asked - known}"


@cache
def options_of(name: str, subcommand: str = "") -> frozenset[str]:
    """What a command may be given."""
    group = typer.main.get_command(app)
    command = group.get_command(None, name)  # type: ignore[attr-defined]
    if subcommand and not subcommand.startswith("-"):
        command = command.commands[subcommand]
    return frozenset({"-h", "--help", *(name for option in command.params for name in option.opts)})


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_lead_somewhere(page: Path) -> None:
    for target, heading in links_of(page):
        there = (page.parent / target) if target else page
        assert there.exists(), f"{page.name} links to {target}"
        if heading:
            assert heading in anchors_of(there), f"{page.name} links to {target}#{heading}"


def test_every_page_can_be_reached_from_the_readme() -> None:
    linked = {(REPOSITORY / target).resolve() for target, _ in links_of(PAGES[0])}
    assert {page.resolve() for page in PAGES[1:]} <= linked


def test_every_message_in_troubleshooting_is_one_that_underwatt_says() -> None:
    page = REPOSITORY / "docs" / "troubleshooting.md"
    quoted = re.findall(r"^### (.+)$", prose_of(page), re.MULTILINE)
    assert len(quoted) > 10
    said = [_plain(text) for text in messages_in(REPOSITORY / "src")]
    unknown = [text for text in quoted if not any(_plain(text) in message for message in said)]
    assert not unknown, f"nothing in src says: {unknown}"


def _plain(text: str) -> str:
    """A text in which quotes and what is put in do not matter."""
    return re.sub(rf"[`'\"]|\s+(?={GAP})|(?<={GAP})\s+", "", text)


PAGE = """<!-- continues: other.md -->
# A page

<!-- file: job.py -->
```python
x = 1
```

<!-- not run: needs a real board to be there -->
```bash
underwatt devices --json
```

```bash
echo one; exit 3
```
"""


@pytest.fixture
def page(tmp_path: Path) -> Path:
    (tmp_path / "page.md").write_text(PAGE, encoding="utf-8")
    return tmp_path / "page.md"


def test_a_page_is_read_with_its_marks(page: Path) -> None:
    blocks = blocks_of(page)
    assert [(b.language, b.mark, b.value) for b in blocks] == [
        ("python", "file", "job.py"),
        ("bash", "not run", "needs a real board to be there"),
        ("bash", "", ""),
    ]
    assert continues(page) == "other.md"
    assert commands_of(page) == ["underwatt devices --json"]
    assert not any(block.problem for block in blocks)


def test_a_block_that_fails_fails_the_test_unless_it_was_to(page: Path, tmp_path: Path) -> None:
    write, skip, run = blocks_of(page)
    run_block(write, tmp_path)
    assert (tmp_path / "job.py").read_text(encoding="utf-8") == "x = 1\n"
    run_block(skip, tmp_path)
    with pytest.raises(AssertionError, match="failed with 3"):
        run_block(run, tmp_path)
    run_block(Block("p", 1, "bash", run.text, "fails", "one"), tmp_path)
    with pytest.raises(AssertionError, match="does not say"):
        run_block(Block("p", 1, "bash", run.text, "fails", "two"), tmp_path)
    with pytest.raises(AssertionError, match="was to fail"):
        run_block(Block("p", 1, "bash", "true", "fails", "one"), tmp_path)


@pytest.mark.parametrize(
    ("language", "mark", "value"),
    [("", "", ""), ("sh", "", ""), ("bash", "not run", ""), ("bash", "not run", "just so"), ("text", "fails", "x")],
)
def test_a_careless_block_is_a_problem(language: str, mark: str, value: str) -> None:
    assert Block("p", 1, language, "x\n", mark, value).problem


def test_a_mark_above_nothing_is_found(tmp_path: Path) -> None:
    (tmp_path / "p.md").write_text("<!-- not run: needs a board -->\n\n```bash\ntrue\n```\n", encoding="utf-8")
    assert marks_without_a_block(tmp_path / "p.md")
