"""``underwatt report``: the decision, why it was made, and how its training went, as one HTML file."""

from __future__ import annotations

from pathlib import Path

from typer import Option, Typer, echo

import underwatt
from underwatt.cli import common

app = Typer()


@app.command("report")
def report(
    out: Path = Option(Path("report.html"), "--out", "-o", help="The HTML file to write."),
    profile: int = Option(0, "--profile", "-p", help="Number of the profile; the run's or the newest by default."),
    budget: str = Option("", help="Watts, such as 10W; the run's by default."),
    run: Path | None = Option(None, help="Folder of a run; the newest under runs/ by default.", show_default=False),
    target: float | None = Option(None, help="Which target of the convergence runs; the run's, or the newest."),
    references: list[str] = common.REFERENCES,
    store: Path | None = common.STORE,
    as_json: bool = Option(False, "--json", help="Print the figures as data, for programs; writes no file."),
) -> None:
    """Make one self-contained HTML page: what was chosen, why, and how the training went."""
    about = common.options_of(locals(), "out", "as_json") | {"listener": common.say_note}
    if as_json:
        common.say_json(underwatt.report_figures(**about))
    else:
        path = underwatt.report(out, **about)
        echo(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")
