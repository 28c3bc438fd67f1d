"""``underwatt report``: the decision, why it was made, and how its training went, as one HTML file."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.markup import escape

from underwatt.budget import parse_budget
from underwatt.cli.predict import REFERENCE_HELP, load_references, newest_profile, offered_modes, profiled_device
from underwatt.cli.profile import STORE_HELP
from underwatt.device.base import HasStockModes
from underwatt.errors import InputError, PredictError
from underwatt.predict.base import SettingArray
from underwatt.records import to_json
from underwatt.reports.build import build_report
from underwatt.reports.page import render
from underwatt.reports.sources import budget_of, is_of, profile_of, with_run
from underwatt.runlog.log import read_log
from underwatt.store.store import Store, default_store_path
from underwatt.studies.study import newest_rates

if TYPE_CHECKING:
    from underwatt.records import ConvergenceRun, Profile
    from underwatt.runlog.record import RunRecord

RUNS = Path("runs")
LOG = "log.jsonl"

app = typer.Typer()
_log = Console(stderr=True)


@app.callback()
def _group() -> None:
    """Keep this a group, though it has one command."""


@app.command("report")
def report(
    out: Path = typer.Option(Path("report.html"), "--out", "-o", help="The HTML file to write."),
    profile: int = typer.Option(
        0, "--profile", "-p", help="Number of the profile; the run's or the newest by default."
    ),
    budget: str = typer.Option("", "--budget", help="Watts, such as 10W; the run's by default."),
    run: Path | None = typer.Option(
        None, "--run", help="Folder of a run; the newest under runs/ by default.", show_default=False
    ),
    target: float | None = typer.Option(None, help="Which target of the convergence runs; the run's, or the newest."),
    reference: list[str] = typer.Option([], "--reference", "-r", help=REFERENCE_HELP),
    store: Path | None = typer.Option(None, "--store", help=STORE_HELP, show_default=False),
    as_json: bool = typer.Option(False, "--json", help="Print the figures as data, for programs; writes no file."),
) -> None:
    """Make one self-contained HTML page: what was chosen, why, and how the training went."""
    wanted = parse_budget(budget).for_plan() if budget else None
    record = _record(run)
    path = store or default_store_path()
    runs: tuple[ConvergenceRun, ...] = ()
    references: list[Profile] = []
    if store is None and record is not None and not profile and not path.exists():
        measured = profile_of(record)
    else:
        with Store(path, create=False) as kept:
            measured, record = _measured(kept, profile, record, asked=run is not None)
            runs = _trainings(kept, measured)
            references = load_references(kept, reference, measured)
    here = profiled_device(measured)
    made = build_report(
        measured,
        _candidates(measured, record),
        made_at=datetime.now().astimezone().strftime("%d %B %Y, %H:%M").lstrip("0"),
        convergence=runs,
        target=target if target is not None or record is None else record.start.target,
        budget=wanted or (None if record is None else budget_of(record)),
        record=record,
        references=references,
        stock_modes=here.stock_modes() if isinstance(here, HasStockModes) else None,
    )
    if as_json:
        typer.echo(json.dumps(to_json(made), indent=2))
        return
    page = render(made)
    try:
        out.write_text(page, encoding="utf-8")
    except OSError as exc:
        raise InputError(f"The report cannot be written to {out}: {exc.strerror}.", hint="Name another --out.") from exc
    for item in made.missing:
        _log.print(
            f"[dim]Left out: {escape(item.section)}. {escape(item.why)} {escape(item.command)}[/]", soft_wrap=True
        )
    typer.echo(f"{out} ({out.stat().st_size / 1e6:.1f} MB)")


def _record(run: Path | None) -> RunRecord | None:
    if run is None:
        logs = sorted(RUNS.glob(f"*/{LOG}"), key=lambda path: path.stat().st_mtime)
        return read_log(logs[-1]) if logs else None
    return read_log(run / LOG if run.is_dir() or run.suffix != ".jsonl" else run)


def _measured(kept: Store, number: int, record: RunRecord | None, *, asked: bool) -> tuple[Profile, RunRecord | None]:
    """The profile to report on, and the run where it belongs to it."""
    if number:
        found = kept.profile(number)
        if record is None or is_of(record, found):
            return (found if record is None else with_run(found, record)), record
        if asked:
            raise InputError(
                f"The run trained {record.start.workload.name} on {record.start.device.name}, which is not "
                f"profile {number}.",
                hint="Leave --profile or --run out.",
            )
        return found, None
    if record is None:
        return kept.profile(newest_profile(kept)), None
    same = [item.id for item in kept.summaries() if is_of(record, item)]
    return (with_run(kept.profile(same[-1]), record) if same else profile_of(record)), record


def _trainings(kept: Store, measured: Profile) -> tuple[ConvergenceRun, ...]:
    found = next((runs for workload, runs in kept.convergence() if workload.id == measured.workload.id), ())
    return newest_rates(found)


def _candidates(measured: Profile, record: RunRecord | None) -> SettingArray | None:
    try:
        space = offered_modes(measured)
    except PredictError:
        return None
    sizes = {m.setting.batch_size for m in measured.usable()} | set(record.start.batch_sizes if record else ())
    return SettingArray.product(tuple(knob.name for knob in space.knobs), space.matrix(), sorted(sizes))
