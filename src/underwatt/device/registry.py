"""Which devices are here: our own backends, and others' through the entry point group ``underwatt.devices``.

An entry point names an object that follows ``underwatt.device.base.Backend``. A backend that cannot be loaded or
probed is logged and skipped: one broken plug-in does not take the others with it.
"""

from __future__ import annotations

import logging
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, cast

from underwatt.device.several import together
from underwatt.errors import NoDeviceError, UnderwattError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from underwatt.device.base import Backend, Device

ENTRY_POINT_GROUP = "underwatt.devices"
OWN_BACKENDS = ("helper", "jetson", "nvml", "virtual", "replay", "check")

_log = logging.getLogger(__name__)


def backend_names() -> list[str]:
    """The names that an address may begin with; ours first."""
    return [*OWN_BACKENDS, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))]


def load_backend(name: str) -> Backend:
    """The backend of that name; only this one is imported."""
    if name in OWN_BACKENDS:
        return cast("Backend", import_module(f"underwatt.drivers.{name}").backend)
    for point in entry_points(group=ENTRY_POINT_GROUP, name=name):
        return cast("Backend", point.load())
    simulated = [f"virtual:{board}" for board in load_backend("virtual").find()]
    alike = get_close_matches(f"virtual:{name.lower()}", simulated, 1, 0.9) or get_close_matches(
        name, backend_names(), 1
    )
    meant = f"Did you mean {alike[0]}? " if alike else ""
    raise NoDeviceError(
        f"There is no device backend {name!r}.",
        hint=f"{meant}An address is backend[:where]; the backends are {', '.join(backend_names())}.",
    )


def find_addresses() -> list[str]:
    """Addresses of the devices that are really here, the likeliest backend first."""
    scored: list[tuple[float, str]] = []
    for name in backend_names():
        try:
            backend = load_backend(name)
            if (score := backend.affinity()) > 0:
                scored.extend((score, f"{name}:{where}") for where in backend.find())
        except Exception as exc:  # noqa: BLE001 - a stranger's plug-in, or hardware, may raise anything
            _log.warning("Device backend %r was skipped: it cannot be loaded or probed (%s).", name, exc)
    return [address for _, address in sorted(scored, key=lambda item: -item[0])]


def open_device(address: str | None = None) -> Device:
    """Open ``backend[:where]``, or the likeliest device here when no address is given; several, with commas, as one."""
    if not address:
        here = find_addresses()
        if not here:
            raise NoDeviceError(
                "No Jetson and no NVIDIA GPU was found here.",
                hint="Try a simulated one with --device virtual:nano; `underwatt devices --all` lists them.",
            )
        address = here[0]
    if "," in address:
        return together([open_device(part.strip()) for part in address.split(",")])
    name, _, where = address.partition(":")
    return load_backend(name).open(where)


def devices(
    addresses: Sequence[str] = (), *, simulated: bool = False
) -> tuple[list[Device], dict[str, UnderwattError]]:
    """The devices that are here, or those at some addresses, opened; and, by address, why one could not be.

    ``simulated`` adds the simulated boards.
    """
    wanted = list(addresses) or find_addresses()
    if simulated:
        wanted += [f"virtual:{board}" for board in load_backend("virtual").find()]
    opened: list[Device] = []
    failed: dict[str, UnderwattError] = {}
    for address in wanted:
        try:
            opened.append(open_device(address))
        except UnderwattError as exc:
            failed[address] = exc
    return opened, failed
