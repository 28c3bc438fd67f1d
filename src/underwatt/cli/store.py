"""``underwatt store``: what was measured, and taking it from machine to machine."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from underwatt.cli.format import KNOB_HEADINGS, plain_table
from underwatt.cli.profile import STORE_HELP
from underwatt.errors import InputError
from underwatt.records import KNOBS, to_json
from underwatt.store.exchange import (
    plan_of,
    read_file,
    write_convergence,
    write_profile,
    write_profile_with_convergence,
)
from underwatt.store.store import Store, default_store_path

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any, TextIO

_out = Console()
_store_app = typer.Typer(no_args_is_help=True, help="Look at, export and import what was measured.")
app = typer.Typer()
app.add_typer(_store_app, name="store")
_STORE = typer.Option(None, "--store", help=STORE_HELP, show_default=False)


@_store_app.command("ls")
def list_profiles(
    store: Path | None = _STORE, as_json: bool = typer.Option(False, "--json", help="For programs.")
) -> None:
    """List the profiles, convergence runs and plans."""
    with Store(store or default_store_path(), create=False) as kept:
        summaries, convergence, plans = kept.summaries(), kept.convergence(), kept.plans()
    if as_json:
        runs = [{"workload": to_json(workload), "runs": len(found)} for workload, found in convergence]
        shown = {"profiles": to_json(summaries), "convergence": runs, "plans": to_json(plans)}
        typer.echo(json.dumps(shown, indent=2))
        return
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for column in ("profile", "workload", "device", "measured", "usable", "since"):
        table.add_column(column)
    for item in summaries:
        table.add_row(
            str(item.id),
            item.workload.name,
            item.device.name,
            str(item.measured),
            str(item.usable),
            item.created_at[:19],
        )
    _out.print(table if summaries else "No profiles yet.")
    for workload, found in convergence:
        _out.print(f"convergence: {workload.name}, {len(found)} runs [dim]{workload.id}[/]")
    for kept_plan in plans:
        _out.print(_plan_line(kept_plan.id, kept_plan.record), soft_wrap=True)


@_store_app.command("show")
def show_profile(
    profile: int = typer.Argument(..., help="Number of the profile, from `underwatt store ls`."),
    store: Path | None = _STORE,
    as_json: bool = typer.Option(False, "--json", help="For programs."),
) -> None:
    """Show every measurement of a profile."""
    with Store(store or default_store_path(), create=False) as kept:
        found = kept.profile(profile)
    if as_json:
        typer.echo(json.dumps(to_json(found), indent=2))
        return
    _out.print(f"[bold]{found.workload.name}[/] on [bold]{found.device.name}[/]")
    knobs = [name for name in KNOBS if any(getattr(m.setting.mode, name) is not None for m in found.measurements)]
    table = plain_table("batch", *(KNOB_HEADINGS[name] for name in knobs), "step ms", "watts", "peak W", "status")
    for m in found.measurements:
        table.add_row(
            str(m.setting.batch_size),
            *(f"{value:g}" if (value := getattr(m.setting.mode, name)) is not None else "" for name in knobs),
            f"{m.step_s * 1e3:.2f}",
            f"{m.power_w:.2f}",
            f"{m.peak_w:.2f}",
            m.status.value,
        )
    _out.print(table)


@_store_app.command("export")
def export(
    what: str = typer.Argument(
        ..., help="Number of a profile, the id of a workload's convergence runs, or plan:NUMBER."
    ),
    file: Path | None = typer.Argument(None, help="Where to; standard output by default."),
    with_convergence: bool = typer.Option(
        False, "--with-convergence", help="A profile and its workload's convergence runs in one file (JSON)."
    ),
    force: bool = typer.Option(False, "--force", help="Write over a file that is there."),
    store: Path | None = _STORE,
) -> None:
    """Write a profile or convergence runs (CSV), both, or a plan (JSON), for `import` on another machine."""
    with Store(store or default_store_path(), create=False) as kept:
        said, write = _writer(kept, what, with_convergence=with_convergence)
    if file is None:
        write(sys.stdout)
        return
    try:
        with file.open("w" if force else "x", newline="", encoding="utf-8") as out:
            write(out)
    except FileExistsError as exc:
        raise InputError(f"{file} is there already.", hint="Name another file, or add --force.") from exc
    except OSError as exc:
        raise InputError(f"{file} cannot be written: {exc.strerror}.") from exc
    _out.print(f"{escape(said)} written to {escape(str(file))}.", soft_wrap=True)


@_store_app.command("import")
def import_file(
    file: Path = typer.Argument(..., help="An exported file, a plan, a PowerTrain table, or a Zeus trace."),
    device_name: str = typer.Option("", help="Device of a table that does not say; the file's name by default."),
    samples_per_epoch: float = typer.Option(1.0, min=1, help="For Zeus traces, which count epochs."),
    store: Path | None = _STORE,
) -> None:
    """Take in measurements, convergence runs or a plan: our own export, PowerTrain's tables, Zeus' traces."""
    found = read_file(file, device_name=device_name, samples_per_epoch=samples_per_epoch)
    for record in found.plans:
        plan_of(record, str(file))  # a plan that cannot be used is refused here, not where it is needed
    with Store(store or default_store_path()) as kept:
        taken, counts = kept.take_in(found.profiles, found.convergence)
        plans = [kept.keep_plan(record) for record in found.plans]
    for item, (number, new) in zip(found.profiles, taken, strict=True):
        _out.print(
            f"profile {number}: {item.workload.name} on {item.device.name}, "
            f"{len(item.measurements)} measurements, {new} of them new"
        )
    for (workload, runs), new in zip(found.convergence, counts, strict=True):
        _out.print(f"convergence: {workload.name}, {len(runs)} runs, {new} of them new")
    for record, (number, is_new) in zip(found.plans, plans, strict=True):
        _out.print(_plan_line(number, record) + ("" if is_new else ", known already"), soft_wrap=True)


def _writer(store: Store, what: str, *, with_convergence: bool) -> tuple[str, Callable[[TextIO], None]]:
    """What was named, in words, and how to write it."""
    runs = {workload.id: (workload, items) for workload, items in store.convergence()}
    if what.isdecimal():
        profile = store.profile(int(what))
        whose = f"{profile.workload.name} on {profile.device.name}"
        said = f"Profile {what} ({whose}, {len(profile.measurements)} measurements)"
        if not with_convergence:
            return said, partial(write_profile, profile)
        if profile.workload.id not in runs:
            raise InputError(
                f"There are no convergence runs of {profile.workload.name}.",
                hint="`underwatt converge JOB` makes some.",
            )
        found = runs[profile.workload.id][1]
        return f"{said} and {len(found)} runs", partial(write_profile_with_convergence, profile, found)
    if with_convergence:
        raise InputError("Only a profile is exported with its convergence runs.", hint="Name it by its number.")
    kind, _, number = what.partition(":")
    if kind == "plan" and number.isdecimal():
        text = json.dumps(dict(store.plan(int(number)).record), indent=2) + "\n"
        return f"Plan {number}", lambda file: print(text, end="", file=file)
    if what not in runs:
        raise InputError(f"There are no convergence runs {what!r}.", hint="`underwatt store ls` lists them.")
    workload, items = runs[what]
    return f"{len(items)} convergence runs of {workload.name}", partial(write_convergence, workload, items)


def _plan_line(number: int, record: Mapping[str, Any]) -> str:
    plan = plan_of(record, f"plan:{number}")
    whose = f"{record['workload']['name']} on {record['device']['name']}"
    return escape(f"plan:{number}: {whose}, {plan.budget}: {plan.setting}")
