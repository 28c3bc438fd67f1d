"""The site: it builds without a warning, its links lead somewhere, and every exported name is in the reference."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import underwatt

for package in ("sphinx", "myst_parser", "furo"):
    pytest.importorskip(package, reason=f"the site is built with {package}: pip install '.[docs]'")

REPOSITORY = Path(__file__).resolve().parent.parent
PAGES = ["README", "CONTRIBUTING", "CHANGELOG", "benchmarks/README", "docs/api", "docs/first-training"]


def build(source: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "--nitpicky", "-c", str(source / "docs")]
    return subprocess.run([*command, str(source), str(out)], capture_output=True, text=True, timeout=240)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    ended = build(REPOSITORY, out)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return out


def test_pages_are_there_and_the_index_leads_to_the_first(site: Path) -> None:
    assert not [page for page in PAGES if not (site / f"{page}.html").is_file()]
    assert "url=README.html" in (site / "index.html").read_text(encoding="utf-8")


def test_every_exported_name_is_in_the_reference(site: Path) -> None:
    page = (site / "docs" / "api.html").read_text(encoding="utf-8")
    anchors = re.findall(r'id="underwatt\.(\w+)"', page)
    assert sorted(anchors) == [name for name in underwatt.__all__ if not name.startswith("_")]


def test_links_lead_to_files_and_headings_of_the_site(site: Path) -> None:
    texts = {page: page.read_text(encoding="utf-8") for page in site.rglob("*.html")}
    broken = []
    for page, text in texts.items():
        for link in re.findall(r'<a [^>]*href="([^"]+)"', text):
            target, _, heading = link.partition("#")
            if re.match(r"\w+:", link):
                continue
            there = Path(os.path.normpath(page.parent / target)) if target else page
            if not there.exists() or (heading and there in texts and f'id="{heading}"' not in texts[there]):
                broken.append(f"{page.relative_to(site)}: {link}")
    assert not broken


def test_a_broken_link_or_an_unknown_name_fails_the_build(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    (docs / "_templates").mkdir(parents=True)
    for name in ("conf.py", "_templates/index.html"):
        (docs / name).write_text((REPOSITORY / "docs" / name).read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "README.md").write_text("# Here\n\n[gone](docs/gone.md)\n", encoding="utf-8")
    (docs / "api.md").write_text("# Names\n\n<!-- reference: no_such_name -->\n", encoding="utf-8")
    ended = build(tmp_path, tmp_path / "out")
    assert ended.returncode != 0
    assert "no_such_name" in ended.stderr + ended.stdout
    (docs / "api.md").write_text("# Names\n\n<!-- reference: Job -->\n", encoding="utf-8")
    ended = build(tmp_path, tmp_path / "out")
    assert ended.returncode != 0
    assert "docs/gone.md" in ended.stderr
