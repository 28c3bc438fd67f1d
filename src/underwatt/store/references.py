"""References that come with the package: simulated boards, for users who have measured nothing yet.

They are made by ``benchmarks/make_references.py`` from the published constants of the virtual boards. A predictor
weighs them like any reference, so that real profiles, where there are some, win.
"""

from __future__ import annotations

from importlib import resources

from underwatt.records import DeviceInfo, Profile, WorkloadInfo
from underwatt.tables import read_powertrain_table


def builtin_names() -> tuple[str, ...]:
    """The boards that have a built-in reference."""
    files = resources.files("underwatt.store") / "builtin"
    return tuple(sorted(f.name.split("_")[1] for f in files.iterdir() if f.name.startswith("simulated_")))


def builtin_reference(board: str) -> Profile:
    """ResNet-18 on a simulated board; ``builtin_names`` lists the boards."""
    file = resources.files("underwatt.store") / "builtin" / f"simulated_{board}_resnet18.csv"
    with resources.as_file(file) as path:
        measurements = read_powertrain_table(path)
    device = DeviceInfo("virtual", f"{board} (simulated)", f"simulated-{board}", f"virtual:{board}", simulated=True)
    return Profile(device, WorkloadInfo("ResNet-18 (simulated)", f"simulated-resnet18-{board}"), measurements)


def builtin_references() -> tuple[Profile, ...]:
    """Every built-in reference."""
    return tuple(builtin_reference(board) for board in builtin_names())
