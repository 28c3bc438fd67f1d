"""What a benchmark does with its rows: a table for people, a file for programs, a record that README is written from.

--json OUT       the rows, as they are
--keep [LABEL]   the same with command, commit, date and kind of machine, as results/NAME.json or NAME_LABEL.json;
                 ``write_results.py`` writes README's results from these
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Mapping, Sequence

FOLDER = Path(__file__).resolve().parent
RESULTS = FOLDER / "results"
# What a figure depends on; that results and README are being written makes no commit a different one.
CODE = ("src", "examples", "benchmarks", ":!benchmarks/results", ":!benchmarks/README.md")


@dataclass(frozen=True)
class Column:
    """One figure of a row: where it stands, what it is called, and how it is written."""

    key: str
    heading: str = ""
    form: str = ""  # a format specification, such as ".2f"

    @property
    def title(self) -> str:
        """What stands above it."""
        return self.heading or self.key

    def text(self, row: Mapping[str, Any]) -> str:
        """The figure of a row; a dash where there is none."""
        value = row.get(self.key)
        return "–" if value is None else format(value, self.form)


def as_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[Column]) -> str:
    """Rows under their headings, words to the left and numbers to the right."""
    cells = [[column.title for column in columns], *([column.text(row) for column in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    words = [any(isinstance(row.get(column.key), str) for row in rows) for column in columns]
    lines = (
        "  ".join(
            cell.ljust(width) if left else cell.rjust(width)
            for cell, width, left in zip(line, widths, words, strict=True)
        )
        for line in cells
    )
    return "\n".join(line.rstrip() for line in lines)


def as_line(row: Mapping[str, Any], columns: Sequence[Column]) -> str:
    """One row as a line of progress, while others are still to come."""
    return ", ".join(f"{column.title} {column.text(row)}" for column in columns)


def told(row: Mapping[str, Any], columns: Sequence[Column]) -> None:
    """Say a row on the way; what is printed at the end is the table."""
    print(as_line(row, columns), file=sys.stderr, flush=True)


def add_output(parser: ArgumentParser, *, json_required: bool = False) -> None:
    """The options of every benchmark that say where its rows go."""
    parser.add_argument("--json", type=Path, required=json_required, help="write the rows here")
    parser.add_argument(
        "--keep",
        nargs="?",
        const="",
        metavar="LABEL",
        help="keep the rows in benchmarks/results, with the commit; the label tells several records of a script apart",
    )


def write(benchmark: str, found: Any, options: Namespace) -> None:
    """Write what was found (a list of rows, or a record) to where the options say."""
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if options.keep is not None:
        name = f"{benchmark}_{options.keep}" if options.keep else benchmark
        RESULTS.mkdir(exist_ok=True)
        text = json.dumps(record(benchmark, found), indent=1) + "\n"
        (RESULTS / f"{name}.json").write_text(text, encoding="utf-8")
        print(f"kept in benchmarks/results/{name}.json", file=sys.stderr)


def record(benchmark: str, found: Any) -> dict[str, Any]:
    """What was found, and how it came about."""
    if isinstance(found, list):
        found = {"rows": found}
    elif "rows" not in found:
        found = {"rows": [found]}
    return {
        "benchmark": benchmark,
        "command": " ".join([f"benchmarks/{Path(sys.argv[0]).name}", *map(_without_folders, sys.argv[1:])]),
        "commit": commit(),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "machine": {
            "cpus": os.cpu_count(),
            "architecture": platform.machine(),
            "python": platform.python_version(),
        },
        **found,
    }


def commit() -> str:
    """The commit that is checked out, with a plus where the code differs from it."""

    def git(*arguments: str) -> str:
        ended = subprocess.run(["git", *arguments], cwd=FOLDER.parent, capture_output=True, text=True, check=False)
        return ended.stdout.strip()

    changed = git("status", "--porcelain", "--", *CODE)
    return (git("rev-parse", "--short=7", "HEAD") or "unknown") + ("+" if changed else "")


def _without_folders(word: str) -> str:
    """A word of the command; of a file only the name, as its folder is nobody else's."""
    return Path(word).name if os.sep in word else word
