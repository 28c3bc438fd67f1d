"""``underwatt devices``, ``set`` and ``restore``: what is here, set it, put it back."""

from __future__ import annotations

import contextlib
import itertools
import time
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from typer import Exit, Option, Typer

import underwatt
from underwatt.cli import common
from underwatt.errors import DeviceError, InputError
from underwatt.records import DeviceState, PowerMode, to_json

if TYPE_CHECKING:
    from underwatt.device.base import Device

WATCH_PERIOD_S = 0.5

app = Typer()


@app.command("devices")
def show_devices(
    device: str = Option("", "--device", "-d", help="Only this device, also a simulated one."),
    everything: bool = Option(False, "--all", help="Also list the simulated boards."),
    as_json: bool = common.AS_JSON,
    watch: bool = Option(False, "--watch", help="Live readings until Ctrl-C (one JSON line each with --json)."),
    count: int = Option(0, min=0, help="With --watch: stop after this many readings."),
) -> None:
    """Show what is here, what can be read and set, and what would permit the rest."""
    opened, failed = underwatt.devices([device] if device else (), simulated=everything)
    if failed and (device or (watch and not opened)):
        raise next(iter(failed.values()))
    if watch and not opened:
        underwatt.open_device()  # raises the error that says what to do
    if watch:
        _watch(opened[0], as_json=as_json, count=count)
    elif as_json:
        errors = [{"address": at, "error": error.message, "hint": error.hint} for at, error in failed.items()]
        common.say_json([*map(_as_record, opened), *errors])
    else:
        for item in opened:
            common.OUT.print(_table(item))
        for address, error in failed.items():
            common.say(f"[red]✗[/] {escape(f'{address}: {error}')}")
        if not opened and not failed:
            common.OUT.print("No Jetson and no NVIDIA GPU was found here.")
            common.OUT.print("[dim]Try a simulated board: underwatt devices --all[/]")


@app.command("set")
def set_mode(
    device: str = common.DEVICE,
    cpu_cores: int | None = Option(None, help="Cores online."),
    cpu_mhz: float | None = Option(None, help="CPU clock."),
    gpu_mhz: float | None = Option(None, help="GPU clock."),
    mem_mhz: float | None = Option(None, help="Memory clock."),
    power_limit_w: float | None = Option(None, help="GPU power limit."),
) -> None:
    """Set a power mode and leave it so; `underwatt restore` brings back what was there before."""
    mode = PowerMode(cpu_cores, cpu_mhz, gpu_mhz, mem_mhz, power_limit_w)
    if not mode.knobs():
        raise InputError("Nothing to set.", hint="Name at least one knob, such as --gpu-mhz 600.")
    target = underwatt.open_device(device)
    if target.info.in_process:
        raise InputError(
            f"{target.info.name} is simulated inside one process, so there is nothing to leave set.",
            hint="Use it with a command that trains or measures.",
        )
    underwatt.set_mode(target, mode)
    back = "[dim]`underwatt restore` puts back what was there before.[/]"
    common.OUT.print(f"{escape(target.info.name)}: {mode}. {back}")


@app.command("restore")
def restore(
    as_json: bool = common.AS_JSON,
    discard: bool = Option(False, "--discard", help="Remove damaged journals that cannot be restored from."),
) -> None:
    """Put back whatever a killed session or `underwatt set` left changed."""
    outcomes = underwatt.restore(discard=discard)
    if as_json:
        common.say_json(
            [{"device": name, "restored": not error, "error": str(error or "")} for name, error in outcomes]
        )
    elif not outcomes:
        common.OUT.print("Nothing to restore.")
    else:
        for name, error in outcomes:
            said = f"{name}: {error or 'as it was found'}"
            common.say(f"{'[red]✗[/]' if error else '[green]✓[/]'} {escape(said)}")
    if any(error for _, error in outcomes):
        raise Exit(1)


def _reading(device: Device) -> dict[str, Any]:
    """Power and state now; a sensor that fails is said, never shown as zero."""
    record: dict[str, Any] = {}
    try:
        sample = device.read_power()
        record.update(power_w=sample.power_w, energy_j=sample.energy_j)
    except DeviceError as exc:
        record.update(power_w=None, power_error=str(exc))
    try:
        record["state"] = to_json(device.read_state())
    except DeviceError as exc:
        record["state"] = to_json(DeviceState(PowerMode())) | {"error": str(exc)}
    return record


def _as_record(device: Device) -> dict[str, Any]:
    knobs = {knob.name: {"values": list(knob.values), "continuous": knob.continuous} for knob in device.space.knobs}
    return {
        **to_json(device.info),
        "modes": len(device.space) if device.space.knobs else 0,
        "knobs": knobs,
        "capabilities": device.capabilities(),
        **_reading(device),
    }


def _table(device: Device) -> Group:
    """One device as a person likes to read it."""
    info = device.info
    simulated = ("  simulated" if info.simulated else "", "yellow")
    title = Text.assemble((info.name, "bold"), (f"  {info.address}", "dim"), simulated)
    table = Table(show_header=True, header_style="dim", box=None, padding=(0, 2, 0, 1))
    for column in ("", "", "now", "range or detail"):
        table.add_column(column, no_wrap=column == "now", overflow="fold")
    reading = _reading(device)
    running = reading["state"]["running"]
    remedies: dict[str, list[str]] = {}
    for item in device.capabilities():
        mark = Text("✓", style="green") if item.usable else Text("✗", style="red")
        now = reading["power_w"] if item.name == "power" else running.get(item.name)
        table.add_row(mark, item.name, "" if now is None else f"{now:g}", item.detail)
        if item.remedy:
            remedies.setdefault(item.remedy, []).append(item.name)
    parts: list[Any] = [title, table, *([Text(f"  {info.about_watts}", style="dim")] if info.about_watts else [])]
    if device.space.knobs:
        parts.append(Text(f"  {len(device.space):,} power modes", style="dim"))
    parts += [Text(f"  To permit {', '.join(names)}: {text}", style="yellow") for text, names in remedies.items()]
    parts.append(Text())
    return Group(*parts)


def _watch(device: Device, *, as_json: bool, count: int) -> None:
    """Readings twice a second, in the device's own time, until Ctrl-C."""
    from rich.live import Live

    live = Live(console=common.OUT, refresh_per_second=4)
    with contextlib.suppress(KeyboardInterrupt), contextlib.nullcontext() if as_json else live:
        for _ in range(count) if count else itertools.count():
            reading = {"at_s": round(device.clock.now_s(), 3), **_reading(device)}
            if as_json:
                common.say_json(reading, None)
            else:
                live.update(_live_view(device, reading))
            device.clock.sleep(WATCH_PERIOD_S)
            if device.info.in_process:
                time.sleep(WATCH_PERIOD_S)  # its own time takes none of ours


def _live_view(device: Device, reading: dict[str, Any]) -> Group:
    head = Text.assemble((device.info.name, "bold"), ("  simulated" if device.info.simulated else "", "yellow"))
    body = Table(show_header=False, box=None, padding=(0, 2))
    state, power_w = reading["state"], reading["power_w"]
    of = f" [dim]of the {escape(device.info.power_of)}[/]" if device.info.power_of else ""
    body.add_row(
        "power", f"[red]{escape(reading['power_error'])}[/]" if power_w is None else f"[bold]{power_w:.2f} W[/]{of}"
    )
    for rail, watts in state["rails_w"].items():
        body.add_row(f"  {rail}", f"{watts:.2f} W")
    for knob, value in state["running"].items():
        if value is not None:
            body.add_row(knob, f"{value:g}")
    for zone, degrees in state["temperatures_c"].items():
        body.add_row(zone, f"{degrees:.1f} °C")
    if state["throttle_reasons"]:
        body.add_row("slowed down", f"[red]{', '.join(state['throttle_reasons'])}[/]")
    return Group(head, body)
