"""``underwatt predict``: time and power of settings that were not measured, and whether to trust that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import typer
from rich.console import Console
from rich.markup import escape

from underwatt.cli.format import KNOB_HEADINGS, plain_table, within
from underwatt.cli.profile import STORE_HELP, chosen_modes, parse_batch_sizes
from underwatt.device.base import permitted_space
from underwatt.device.registry import open_device
from underwatt.device.space import ModeSpace
from underwatt.errors import InputError, UnderwattError
from underwatt.planning.choice import front
from underwatt.predict.base import Z90, SettingArray, observe
from underwatt.predict.design import fits_memory
from underwatt.predict.fewshot import FewShot
from underwatt.records import Setting, to_json
from underwatt.rivals.validate import cross_validate
from underwatt.store.exchange import read_file
from underwatt.store.references import builtin_reference
from underwatt.store.store import Store, default_store_path

if TYPE_CHECKING:
    from underwatt.device.base import Device
    from underwatt.records import Prediction, Profile

MOST_SHOWN = 25
REFERENCE_HELP = (
    "A profile of another workload or device: its number, a CSV file, or builtin:BOARD (simulated). Repeatable."
)

app = typer.Typer()
_out = Console()
_log = Console(stderr=True)


@app.callback()
def _group() -> None:
    """Keep this a group, though it has one command."""


@app.command("predict")
def predict(
    profile: int = typer.Argument(0, help="Number of the profile, from `underwatt store ls`; the newest by default."),
    modes: str = typer.Option(
        "", "--modes", "-m", help="grid, a number of modes, or a CSV file; the best of all modes by default."
    ),
    batch_sizes: str = typer.Option("", "--batch-sizes", "-b", help="Such as 8,16,32; the measured ones by default."),
    reference: list[str] = typer.Option([], "--reference", "-r", help=REFERENCE_HELP),
    validate: bool = typer.Option(False, "--validate", help="Hold measured settings back, predict them, and compare."),
    store: Path | None = typer.Option(None, "--store", help=STORE_HELP, show_default=False),
    as_json: bool = typer.Option(False, "--json", help="For programs."),
) -> None:
    """Predict step time and power of settings from those that were measured."""
    with Store(store or default_store_path(), create=False) as kept:
        measured = kept.profile(profile or newest_profile(kept))
        references = load_references(kept, reference, measured)
    if validate:
        report = cross_validate(measured.usable(), references)
        if as_json:
            typer.echo(json.dumps(to_json(report), indent=2))
        else:
            _out.print(f"[bold]{escape(_title(measured))}[/]: {report.verdict}")
            _out.print(f"[dim]Worst: {report.worst}, time off by {report.worst_error:.0f}%.[/]")
        return
    fitted = FewShot().fit(measured.usable(), references)
    space = offered_modes(measured)
    sizes = parse_batch_sizes(batch_sizes) or tuple(sorted({m.setting.batch_size for m in measured.usable()}))
    if modes:
        settings = SettingArray.of([Setting(m, b) for m in chosen_modes(modes, space) for b in sizes])
    else:
        settings = SettingArray.product(tuple(knob.name for knob in space.knobs), space.matrix(), sizes)
    fitting = fits_memory(settings, measured.measurements)
    if not fitting.all():
        _log.print("[yellow]Batch sizes that ran out of memory, and larger ones, are left out.[/]")
        settings = settings.take(np.flatnonzero(fitting))
    if not len(settings):
        raise InputError("Every batch size asked for runs out of memory.", hint="Ask for smaller ones.")
    found = fitted.predict(settings)
    rows = np.arange(len(settings)) if modes else _front(settings, found)
    shown = [_row(settings[int(row)], found, int(row)) for row in rows]
    if as_json:
        record = {"profile": to_json(measured.device) | {"workload": measured.workload.name}, "predictions": shown}
        typer.echo(json.dumps(record, indent=2))
        return
    _print(measured, shown, len(settings), everything=bool(modes))


def newest_profile(store: Store) -> int:
    """The number of the newest profile that holds measurements."""
    summaries = [item for item in store.summaries() if item.usable]
    if not summaries:
        raise InputError("The store holds no measurements to predict from.", hint="`underwatt profile JOB` makes some.")
    return summaries[-1].id


def load_references(store: Store, texts: list[str], measured: Profile) -> list[Profile]:
    """The profiles that ``--reference`` names; a profile is no reference for itself."""
    found = [reference for text in texts for reference in _reference(store, text)]
    for reference in found:
        if (reference.device.id, reference.workload.id) == (measured.device.id, measured.workload.id):
            raise InputError(
                "A profile cannot be its own reference: it would predict what it already holds.",
                hint="Name a profile of another workload or device.",
            )
    return found


def _reference(store: Store, text: str) -> list[Profile]:
    if text.isdecimal():
        return [store.profile(int(text))]
    if text.startswith("builtin:"):
        return [builtin_reference(text.removeprefix("builtin:"))]
    found = read_file(Path(text)).profiles
    if not found:
        raise InputError(f"{text} holds no profile to refer to.")
    return found


def profiled_device(measured: Profile) -> Device | None:
    """The device that was profiled, where it is this machine's; another board at the same address is not."""
    try:
        here = open_device(measured.device.address)
    except UnderwattError:
        return None
    return here if here.info.id == measured.device.id else None


def offered_modes(measured: Profile) -> ModeSpace:
    """The modes of the device, where it is here; else the combinations of the values that were measured."""
    observe(measured.measurements)  # says what is wrong where nothing can be predicted from them
    columns = [m.setting.mode.knobs() for m in measured.usable()]
    here = profiled_device(measured)
    if here is not None:
        return permitted_space(here).only(columns[0])
    _log.print(f"{escape(measured.device.name)} is not here: combinations of the measured clocks only.")
    return ModeSpace.of_values({name: {knobs[name] for knobs in columns} for name in columns[0]})


def _front(settings: SettingArray, found: Prediction) -> np.ndarray[Any, np.dtype[np.intp]]:
    """The settings that nothing beats in both samples per second and watts, thinned to what a person reads."""
    rows = front(found.log_step_s - np.log(settings.batch_size), found.log_power_w)[::-1]
    return np.asarray(rows[np.unique(np.linspace(0, len(rows) - 1, MOST_SHOWN).round().astype(int))])


def _row(setting: Setting, found: Prediction, row: int) -> dict[str, Any]:
    figures: dict[str, Any] = {**to_json(setting.mode), "batch_size": setting.batch_size}
    for name, mean, std in (
        ("step_s", found.log_step_s[row], found.log_step_s_std[row]),
        ("power_w", found.log_power_w[row], found.log_power_w_std[row]),
    ):
        figures[name] = float(np.exp(mean))
        figures[f"{name}_low90"] = float(np.exp(mean - Z90 * std))
        figures[f"{name}_high90"] = float(np.exp(mean + Z90 * std))
    figures["samples_per_s"] = setting.batch_size / figures["step_s"]
    return figures


def _title(measured: Profile) -> str:
    return f"{measured.workload.name} on {measured.device.name}"


def _print(measured: Profile, shown: list[dict[str, Any]], count: int, *, everything: bool) -> None:
    knobs = list(measured.usable()[0].setting.mode.knobs())
    what = f"{count:,} settings predicted" + ("" if everything else ", the best at each power shown")
    _out.print(f"[bold]{escape(_title(measured))}[/], from {len(measured.usable())} measured: {what}.", soft_wrap=True)
    table = plain_table("batch", *(KNOB_HEADINGS[name] for name in knobs), "samples/s", "step ms", "", "watts", "")
    for row in shown:
        table.add_row(
            str(row["batch_size"]),
            *(f"{row[name]:g}" for name in knobs),
            f"{row['samples_per_s']:.1f}",
            *(
                text
                for name, scale in (("step_s", 1e3), ("power_w", 1.0))
                for text in (
                    f"{row[name] * scale:.4g}",
                    within((row[f"{name}_high90"] - row[f"{name}_low90"]) / 2, row[name]),
                )
            ),
        )
    _out.print(table)
    _out.print("[dim]± is half a 90% interval. `underwatt predict --validate` says whether to trust this.[/]")
