"""``underwatt store``: what was measured, and taking it from machine to machine."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table
from typer import Argument, Option, Typer

import underwatt
from underwatt.cli import common
from underwatt.errors import InputError
from underwatt.records import KNOBS

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

_store_app = Typer(no_args_is_help=True, help="Look at, export, import and delete what was measured.")
app = Typer()
app.add_typer(_store_app, name="store")


@_store_app.command("ls")
def list_profiles(store: Path | None = common.STORE, as_json: bool = common.AS_JSON) -> None:
    """List the profiles, convergence runs and plans."""
    with underwatt.Store(store, create=False) as kept:
        summaries, convergence, plans = kept.summaries(), kept.convergence_counts(), kept.plans()
    if as_json:
        runs = [{"workload": workload, "runs": count} for workload, count in convergence]
        common.say_json({"profiles": summaries, "convergence": runs, "plans": plans})
        return
    headings = ("profile", "workload", "device", "measured", "usable", "since")
    table = Table(*headings, box=None, header_style="dim", padding=(0, 2, 0, 0))
    for item in summaries:
        counts = str(item.measured), str(item.usable)
        names = escape(item.workload.name), escape(item.device.name)
        table.add_row(str(item.id), *names, *counts, item.created_at[:19])
    common.OUT.print(table if summaries else "No profiles yet.")
    for workload, count in convergence:
        common.say(f"convergence: {escape(workload.name)}, {count} runs [dim]{escape(workload.id)}[/]")
    for kept_plan in plans:
        common.say(_plan_line(kept_plan.id, kept_plan.record))


@_store_app.command("show")
def show_profile(
    profile: int = Argument(..., help="Number of the profile, from `underwatt store ls`."),
    store: Path | None = common.STORE,
    as_json: bool = common.AS_JSON,
) -> None:
    """Show every measurement of a profile."""
    with underwatt.Store(store, create=False) as kept:
        found = kept.profile(profile)
    if as_json:
        common.say_json(found)
        return
    common.say(f"[bold]{escape(found.workload.name)}[/] on [bold]{escape(found.device.name)}[/]")
    knobs = [name for name in KNOBS if any(getattr(m.setting.mode, name) is not None for m in found.measurements)]
    headings = [common.KNOB_HEADINGS[name] for name in knobs]
    table = common.plain_table("batch", *headings, "step ms", "watts", "peak W", "status")
    for m in found.measurements:
        table.add_row(
            str(m.setting.batch_size),
            *(f"{value:g}" if (value := getattr(m.setting.mode, name)) is not None else "" for name in knobs),
            f"{m.step_s * 1e3:.2f}",
            f"{m.power_w:.2f}",
            f"{m.peak_w:.2f}",
            m.status.value,
        )
    common.OUT.print(table)


@_store_app.command("rm")
def delete(
    what: list[str] = Argument(..., help="Numbers of profiles, ids of convergence runs, plan:NUMBER."),
    store: Path | None = common.STORE,
) -> None:
    """Delete profiles, convergence runs or plans; what was exported before can be imported again."""
    with underwatt.Store(store, create=False) as kept:
        for one in what:
            common.say(f"Deleted: {kept.delete(one)}.")


@_store_app.command("export")
def export(
    what: str = Argument(..., help="Number of a profile, the id of a workload's convergence runs, or plan:NUMBER."),
    file: Path | None = Argument(None, help="Where to; standard output by default."),
    with_convergence: bool = Option(
        False, "--with-convergence", help="A profile and its workload's convergence runs in one file (JSON)."
    ),
    force: bool = Option(False, "--force", help="Write over a file that is there."),
    store: Path | None = common.STORE,
) -> None:
    """Write a profile or convergence runs (CSV), both, or a plan (JSON), for `import` on another machine."""
    if file is None:
        underwatt.export(what, sys.stdout, with_convergence=with_convergence, store=store)
        return
    if file.exists() and not force:
        raise InputError(f"{file} is there already.", hint="Name another file, or add --force.")
    text = io.StringIO(newline="")  # nothing is written where there is nothing to export
    said = underwatt.export(what, text, with_convergence=with_convergence, store=store)
    try:
        with file.open("w", newline="", encoding="utf-8") as out:
            out.write(text.getvalue())
    except OSError as exc:
        raise InputError(f"{file} cannot be written: {exc.strerror}.") from exc
    common.say(f"{escape(said)} written to {escape(str(file))}.")


@_store_app.command("import")
def import_file(
    file: Path = Argument(..., help="An exported file, a plan, a PowerTrain table, or a Zeus trace."),
    device_name: str = Option("", help="Device of a table that does not say; the file's name by default."),
    samples_per_epoch: float = Option(1.0, min=1, help="For Zeus traces, which count epochs."),
    store: Path | None = common.STORE,
) -> None:
    """Take in measurements, convergence runs or a plan: our own export, PowerTrain's tables, Zeus' traces."""
    found = underwatt.import_file(file, device_name=device_name, samples_per_epoch=samples_per_epoch, store=store)
    for item, number, new in found.profiles:
        whose = escape(f"{item.workload.name} on {item.device.name}")
        common.say(f"profile {number}: {whose}, {len(item.measurements)} measurements, {new} of them new")
    for workload, runs, new in found.convergence:
        common.say(f"convergence: {escape(workload.name)}, {len(runs)} runs, {new} of them new")
    for record, number, is_new in found.plans:
        common.say(_plan_line(number, record) + ("" if is_new else ", known already"))


def _plan_line(number: int, record: Mapping[str, Any]) -> str:
    from underwatt.store.exchange import plan_of

    plan = plan_of(record, f"plan:{number}")
    whose = f"{record['workload']['name']} on {record['device']['name']}"
    return escape(f"plan:{number}: {whose}, {plan.budget}: {plan.setting}")
