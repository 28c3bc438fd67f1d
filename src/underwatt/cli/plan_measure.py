"""``underwatt plan --measure``: the measuring, told as it happens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from underwatt.cli.format import duration
from underwatt.cli.profile import measured_line
from underwatt.device.session import Session
from underwatt.run.as_you_go import comparable, measure_as_you_go

if TYPE_CHECKING:
    from collections.abc import Sequence

    from underwatt.device.base import Device
    from underwatt.plan import Problem, SearchResult
    from underwatt.profile.store import Store
    from underwatt.records import Measurement, Profile
    from underwatt.workload.base import Workload

_log = Console(stderr=True)


def search_on(
    device: Device, workload: Workload, problem: Problem, store: Store, references: Sequence[Profile]
) -> SearchResult:
    """Measure what is worth measuring, saying why; each answer is stored at once."""
    known = comparable(store.measurements(store.profile_id(device.info, workload.info)), problem)
    _log.print(
        f"{escape(f'{workload.info.name} on {device.info.name}')}: measuring as I go among {len(problem):,} settings"
        + (f", {len(known)} known" if known else "")
        + f". [dim]Store: {escape(str(store.path))}[/]",
        soft_wrap=True,
    )

    def watch(found: Measurement, why: str) -> None:
        _log.print(f"{measured_line(found)} [dim]{escape(why)}[/]", soft_wrap=True)

    with Session(device) as session:
        if session.recovered:
            _log.print("A killed session had left this device changed; it was put back first.")
        try:
            found = measure_as_you_go(session, workload, problem, store, references=references, watch=watch)
        except KeyboardInterrupt:
            _log.print("Interrupted; what was measured is kept. Run the same command again to go on.")
            raise
    spent_s = sum(m.cost_s for m in found.measurements if m.cost_s > 0)
    _log.print(
        f"{len(found.measurements)} settings measured in {duration(spent_s)} of the device's time; "
        f"ended: {found.stopped}.",
        soft_wrap=True,
    )
    return found
