"""``underwatt fleet``: many boards, one model, each within its own watts."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

from rich.markup import escape
from typer import Argument, Option, Typer

from underwatt._imports import require
from underwatt.cli import common
from underwatt.errors import InputError
from underwatt.reports.words import duration, percent

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # Flower brings it

_fleet_app = Typer(no_args_is_help=True, help="Train one model on many boards, each within its own watts, on Flower.")
app = Typer()
app.add_typer(_fleet_app, name="fleet")
FILE = Argument(..., help="The fleet, as a TOML file: [[boards]] with kind, budget and count for each.")


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise InputError(f"{path} cannot be read: {exc}.", hint="docs/fleet.md shows such a file.") from exc
    return found


@_fleet_app.command("simulate")
def simulate(
    file: Path = FILE,
    page: Path = Option(Path("out") / "fleet.html", help="Where the page goes."),
    as_json: bool = common.AS_JSON,
) -> None:
    """Train a small network for real on simulated boards, in simulated time, and make a page of how it went."""
    require("flwr", extra="fleet")
    from underwatt.fleet.simulation import FleetPlan, SimulatedFleet, Task
    from underwatt.fleet.site import Site
    from underwatt.reports.fleet_page import render_fleet

    given = _read(file)
    site = given.pop("site", None)
    plan = FleetPlan.read(given)
    fleet = SimulatedFleet(plan, Task.digits())

    def tell(at_s: float, score: float) -> None:
        if not as_json:
            common.say(f"  {duration(at_s):>8}  {score:.1%} right")

    if not as_json:
        common.say(f"{len(plan.boards)} boards (simulated), real learning, target {plan.target:.0%}")
    record = fleet.run(site=Site(**site) if site else None, on_round=tell)
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(render_fleet(record), encoding="utf-8")
    reached_s = record.reached_s
    if as_json:
        boards = [
            {"kind": board.kind, "budget": str(board.budget), "energy_j": watts.energy_j(record.ended_s)}
            for board, watts in zip(plan.boards, record.watts, strict=True)
        ]
        common.say_json(
            {
                "reached_s": reached_s if math.isfinite(reached_s) else None,
                "scores": record.scores,
                "idle_share": record.idle_share,
                "boards": boards,
                "page": str(page),
                "simulated": True,
            }
        )
        return
    said = f"after {duration(reached_s)}" if math.isfinite(reached_s) else "not within the time given"
    common.say(f"Target reached: {said}. Boards waited {percent(record.idle_share)} of their time.")
    common.say(f"The page is {escape(str(page))}.")


@_fleet_app.command("up")
def up(
    file: Path = FILE,
    app: Path | None = Option(None, help="A Flower app to run; without one the fleet waits for `flwr run`."),
    folder: Path = Option(Path("out") / "fleet", help="Where certificates, keys and logs are kept."),
) -> None:
    """Start a SuperLink and a SuperNode for each board on this machine, with TLS and node authentication."""
    require("flwr", extra="fleet")
    from underwatt.fleet.simulation import FleetPlan
    from underwatt.fleet.up import NAME, FleetProcesses

    given = _read(file)
    given.pop("site", None)
    nodes = [
        {"device": f"virtual:{one.kind}?seed={at}", "budget": str(one.budget)}
        for at, one in enumerate(FleetPlan.read(given).boards)
    ]
    with FleetProcesses(folder, nodes) as fleet:
        common.say(f"A SuperLink and {len(nodes)} SuperNodes are up; their logs are in {escape(str(folder))}.")
        if app is not None:
            common.OUT.print(fleet.run(app), markup=False)
            return
        common.say(f"Run an app on them:  FLWR_HOME={escape(str(fleet.folder))} flwr run APP {NAME} --stream")
        common.say("Ctrl-C ends all of them.")
        for process in fleet.processes:
            process.wait()
