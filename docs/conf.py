"""How the site is built: ``make docs`` reads README, the guides and the docstrings, and writes out/docs.

The repository itself is the source folder, so that a link that works where the project is hosted works on the site too.
What a Markdown page cannot say there without showing it to readers of the plain page is added here while it is read:
the table of contents at the end of README, and the reference in ``docs/api.md``, where a comment such as
``<!-- reference: plan run -->`` stands for the documentation of these names, and ``<!-- reference: others -->`` for
all exported names that no such comment names, under a heading of their own.
"""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING

from pygments.lexers.special import TextLexer

import underwatt

if TYPE_CHECKING:
    from sphinx.application import Sphinx

REFERENCE = re.compile(r"^<!-- reference: (.+?) -->$", re.MULTILINE)

project = "Underwatt"
author = "The Underwatt developers"
project_copyright = author
version = release = underwatt.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = "README"
include_patterns = ["README.md", "docs/*.md", "benchmarks/README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"]
exclude_patterns = [".*", "build", "dist", "out", "src", "tests"]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
# Annotations name types of other projects, and of ours that are not exported: they have no page to link to.
nitpick_ignore_regex = [("py:class", ".*")]
python_maximum_signature_line_length = 100

html_theme = "furo"
html_title = f"Underwatt {version}"
html_additional_pages = {"index": "index.html"}
templates_path = ["_templates"]

CONTENTS = """

:::{toctree}
:hidden:
:caption: Guides

docs/first-training
docs/python
docs/running
docs/commands
docs/jetson
docs/how-it-chooses
docs/planning
docs/devices
docs/helper
docs/fleet
docs/measuring
docs/troubleshooting
:::

:::{toctree}
:hidden:
:caption: Reference

docs/api
docs/papers
benchmarks/README
CHANGELOG
:::

:::{toctree}
:hidden:
:caption: Taking part

CONTRIBUTING
docs/adding-a-board
SECURITY
:::
"""


def reference(text: str) -> str:
    """A page with its comments replaced by the documentation of the names that they list."""
    exported = [name for name in underwatt.__all__ if not name.startswith("_")]
    listed = [name for names in REFERENCE.findall(text) for name in names.split() if names != "others"]
    if strangers := sorted(set(listed) - set(exported)):
        raise ValueError(f"docs/api.md names what underwatt does not export: {', '.join(strangers)}")

    def documented(comment: re.Match[str]) -> str:
        others = comment[1] == "others"
        names = [name for name in exported if name not in listed] if others else comment[1].split()
        heading = ["## Other names\n"] if others and names else []
        return "\n".join([*heading, *map(directive, names)])

    return REFERENCE.sub(documented, text)


def directive(name: str) -> str:
    """What documents an exported name; docstrings are reStructuredText."""
    thing = getattr(underwatt, name)
    kind = "autofunction"
    if inspect.isclass(thing):
        kind = "autoexception" if issubclass(thing, BaseException) else "autoclass"
    members = "   :members:\n" if inspect.isclass(thing) else ""
    return f"```{{eval-rst}}\n.. {kind}:: underwatt.{name}\n{members}```\n"


def _read(_app: Sphinx, page: str, source: list[str]) -> None:
    if page == root_doc:
        source[0] += CONTENTS
    elif page == "docs/api":
        source[0] = reference(source[0])


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _read)
    app.add_lexer("csv", TextLexer)  # Pygments has none; without one, a block of CSV would be a warning
