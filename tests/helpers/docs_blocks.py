"""Reads our Markdown pages: their code blocks with the marks above them, links, and commands named in the text.

A mark is an HTML comment on the line above a block, which a reader of the page does not see:

    <!-- not run: REASON -->      the block is not executed
    <!-- file: NAME -->           the block is the content of a file, and is written there
    <!-- fails: MESSAGE -->       the block is executed, must fail, and must say this

A page that begins with ``<!-- continues: PAGE -->`` starts in the folder that the other page leaves.
"""

from __future__ import annotations

import ast
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

RUN_LANGUAGES = ("bash", "python")
PLAIN_LANGUAGES = ("csv", "json", "text", "toml")  # data and output: nothing to execute
GAP = "…"

_MARK = re.compile(r"<!--\s*(not run|file|fails)\s*:?\s*(.*?)\s*-->")
_CONTINUES = re.compile(r"<!--\s*continues:\s*(\S+)\s*-->")
_FENCE = re.compile(r"^(\s*)(```+)(\w*)\s*$")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    text: str
    mark: str = ""  # "not run", "file", "fails", or none
    value: str = ""  # what the mark says

    def __str__(self) -> str:
        return f"{self.page}, line {self.line}"

    @property
    def problem(self) -> str:
        """What is wrong with how the block is written, if anything."""
        if self.language not in (*RUN_LANGUAGES, *PLAIN_LANGUAGES):
            return f"{self}: a block must say what it is: {', '.join((*RUN_LANGUAGES, *PLAIN_LANGUAGES))}."
        if self.mark and len(self.value) < (10 if self.mark == "not run" else 1):
            return f"{self}: the mark {self.mark!r} does not say why or what."
        if self.mark in ("not run", "fails") and self.language not in RUN_LANGUAGES:
            return f"{self}: a block of {self.language} is never run, so it needs no mark."
        return ""


def blocks_of(page: Path) -> list[Block]:
    """Every fenced block of a page, in order."""
    lines = page.read_text(encoding="utf-8").splitlines()
    found: list[Block] = []
    number = 0
    while number < len(lines):
        opening = _FENCE.match(lines[number])
        if opening is None:
            number += 1
            continue
        end = number + 1
        while lines[end].strip() != opening[2]:
            end += 1
        mark = _MARK.search(lines[number - 1]) if number else None
        text = textwrap.dedent("\n".join(lines[number + 1 : end]) + "\n")
        found.append(
            Block(page.name, number + 1, opening[3], text, mark[1] if mark else "", mark[2].strip() if mark else "")
        )
        number = end + 1
    return found


def marks_without_a_block(page: Path) -> list[str]:
    """Marks that stand above something else than a block: they would promise nothing."""
    lines = page.read_text(encoding="utf-8").splitlines()
    return [
        f"{page.name}, line {number}: {line.strip()}"
        for number, line in enumerate(lines, 1)
        if _MARK.search(line) and (number == len(lines) or not _FENCE.match(lines[number]))
    ]


def continues(page: Path) -> str:
    """The page in whose folder this one goes on, if any."""
    found = _CONTINUES.match(page.read_text(encoding="utf-8"))
    return found[1] if found else ""


def prose_of(page: Path) -> str:
    """A page without its fenced blocks."""
    lines, inside = [], False
    for line in page.read_text(encoding="utf-8").splitlines():
        if _FENCE.match(line) and not inside:
            inside = True
        elif inside and line.strip().startswith("```"):
            inside = False
        elif not inside:
            lines.append(line)
    return "\n".join(lines)


def links_of(page: Path) -> list[tuple[str, str]]:
    """Files that a page links to or shows, each with the heading that is meant; pages elsewhere are left out."""
    found = re.findall(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"", prose_of(page))
    targets = [link or other for link, other in found]
    return [(t.partition("#")[0], t.partition("#")[2]) for t in targets if not re.match(r"\w+:", t)]


def anchors_of(page: Path) -> set[str]:
    """The headings of a page as links name them."""
    headings = re.findall(r"^#+ (.+)$", prose_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands_of(page: Path) -> list[str]:
    """Every ``underwatt …`` that a page names, in its text or its blocks."""
    spans = re.findall(r"`(underwatt [^`]+)`", re.sub(r"\s+", " ", prose_of(page)))
    for block in blocks_of(page):
        if block.language == "bash":
            whole = block.text.replace("\\\n", " ")
            spans += [
                line.split(" #")[0].strip()
                for line in re.findall(r"(?:^|sudo |&& |\| )(underwatt [^\n|&;]*)", whole, re.MULTILINE)
            ]
    return spans


def messages_in(source: Path) -> list[str]:
    """Every text in a Python tree, with ``…`` where a value is put in."""
    found = []
    for path in sorted(source.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else GAP for part in node.values)
                found.append("".join(str(part) for part in parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found
