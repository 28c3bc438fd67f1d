from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent.parent
APP = REPOSITORY / "examples" / "fleet" / "quickstart"


def test_the_diff_of_the_quick_start_is_at_most_ten_lines_and_is_what_the_example_has() -> None:
    text = (REPOSITORY / "docs" / "fleet.md").read_text(encoding="utf-8")
    diff = next(block for block in re.findall(r"```text\n(.*?)```", text, re.DOTALL) if "client_app.py" in block)
    changed, name = [], ""
    for line in diff.splitlines():
        if line[:1] in ("+", "-"):
            changed.append(line)
            lines = (APP / name).read_text(encoding="utf-8").splitlines()
            assert (line[1:] in lines) is (line[0] == "+"), f"{name}: {line}"
        elif line.strip():
            name = line.strip()
    assert 0 < len(changed) <= 10
    ours = [
        line
        for file in APP.glob("*.py")
        for line in file.read_text(encoding="utf-8").splitlines()
        if "underwatt" in line
    ]
    assert sorted(ours) == sorted(line[1:] for line in changed if line[0] == "+")
