"""``underwatt devices``, ``set`` and ``restore``: what is here, set it, put it back."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

import underwatt
from underwatt.cli.format import AS_JSON, DEVICE_HELP, OUT
from underwatt.errors import DeviceError, InputError, UnderwattError
from underwatt.records import DeviceState, PowerMode, to_json

if TYPE_CHECKING:
    from collections.abc import Iterator

    from underwatt.device.base import Device

WATCH_PERIOD_S = 0.5

app = typer.Typer()


@app.command("devices")
def show_devices(
    device: str = typer.Option("", "--device", "-d", help="Only this device, also a simulated one."),
    everything: bool = typer.Option(False, "--all", help="Also list the simulated boards."),
    as_json: bool = AS_JSON,
    watch: bool = typer.Option(False, "--watch", help="Live readings until Ctrl-C (one JSON line each with --json)."),
    count: int = typer.Option(0, "--count", min=0, help="With --watch: stop after this many readings."),
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
        report = [_as_record(item) for item in opened]
        report += [
            {"address": address, "error": error.message, "hint": error.hint} for address, error in failed.items()
        ]
        typer.echo(json.dumps(report, indent=2))
    else:
        _print_devices(opened, failed)


@app.command("set")
def set_mode(
    device: str = typer.Option("", "--device", "-d", help=DEVICE_HELP),
    cpu_cores: int | None = typer.Option(None, help="Cores online."),
    cpu_mhz: float | None = typer.Option(None, help="CPU clock."),
    gpu_mhz: float | None = typer.Option(None, help="GPU clock."),
    mem_mhz: float | None = typer.Option(None, help="Memory clock."),
    power_limit_w: float | None = typer.Option(None, help="GPU power limit."),
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
    OUT.print(f"{escape(target.info.name)}: {mode}. [dim]`underwatt restore` puts back what was there before.[/]")


@app.command("restore")
def restore(
    as_json: bool = AS_JSON,
    discard: bool = typer.Option(False, "--discard", help="Remove damaged journals that cannot be restored from."),
) -> None:
    """Put back whatever a killed session or `underwatt set` left changed."""
    outcomes = underwatt.restore(discard=discard)
    if as_json:
        rows = [{"device": name, "restored": not error, "error": str(error or "")} for name, error in outcomes]
        typer.echo(json.dumps(rows, indent=2))
    elif not outcomes:
        OUT.print("Nothing to restore.")
    else:
        for name, error in outcomes:
            said = f"[red]✗[/] {name}: {error}" if error else f"[green]✓[/] {name}: as it was found"
            OUT.print(said, soft_wrap=True)
    if any(error for _, error in outcomes):
        raise typer.Exit(1)


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
        "capabilities": to_json(device.capabilities()),
        **_reading(device),
    }


def _print_devices(opened: list[Device], failed: dict[str, UnderwattError]) -> None:
    if not opened and not failed:
        OUT.print("No Jetson and no NVIDIA GPU was found here.")
        OUT.print("[dim]Try a simulated board: underwatt devices --all[/]")
    for device in opened:
        OUT.print(_table(device))
    for address, error in failed.items():
        OUT.print(f"[red]✗[/] {escape(f'{address}: {error}')}", soft_wrap=True)


def _table(device: Device) -> Group:
    """One device as a person likes to read it."""
    info = device.info
    title = Text(info.name, style="bold")
    title.append(f"  {info.address}", style="dim")
    if info.simulated:
        title.append("  simulated", style="yellow")
    table = Table(show_header=True, header_style="dim", box=None, padding=(0, 2, 0, 1))
    for column in ("", "", "now", "range or detail"):
        table.add_column(column, no_wrap=column == "now", overflow="fold")
    reading = _reading(device)
    running = reading["state"]["running"]
    remedies: dict[str, list[str]] = {}
    for item in device.capabilities():
        mark = Text("✓", style="green") if item.usable else Text("✗", style="red")
        now = running.get(item.name)
        if item.name == "power":
            now = reading["power_w"]
        table.add_row(mark, item.name, "" if now is None else f"{now:g}", item.detail)
        if item.remedy:
            remedies.setdefault(item.remedy, []).append(item.name)
    parts: list[Any] = [title, table]
    if device.space.knobs:
        parts.append(Text(f"  {len(device.space):,} power modes", style="dim"))
    parts += [Text(f"  To permit {', '.join(names)}: {text}", style="yellow") for text, names in remedies.items()]
    parts.append(Text())
    return Group(*parts)


def _watch(device: Device, *, as_json: bool, count: int) -> None:
    """Readings twice a second, in the device's own time."""

    def readings() -> Iterator[dict[str, Any]]:
        made = 0
        while not count or made < count:
            yield {"at_s": round(device.clock.now_s(), 3), **_reading(device)}
            made += 1
            device.clock.sleep(WATCH_PERIOD_S)
            if device.info.in_process:
                time.sleep(WATCH_PERIOD_S)  # its own time takes none of ours

    try:
        if as_json:
            for reading in readings():
                typer.echo(json.dumps(reading))
            return
        from rich.live import Live

        with Live(console=OUT, refresh_per_second=4) as live:
            for reading in readings():
                live.update(_live_view(device, reading))
    except KeyboardInterrupt:
        return  # the way to end a live view


def _live_view(device: Device, reading: dict[str, Any]) -> Group:
    power = reading["power_w"]
    head = Text(device.info.name, style="bold")
    head.append("  simulated" if device.info.simulated else "", style="yellow")
    body = Table(show_header=False, box=None, padding=(0, 2))
    body.add_row(
        "power", f"[bold]{power:.2f} W[/]" if power is not None else f"[red]{escape(reading['power_error'])}[/]"
    )
    state = reading["state"]
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
