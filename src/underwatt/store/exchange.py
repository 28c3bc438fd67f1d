"""Files that hold measurements, convergence runs or a plan: our own, and the public tables and traces of the field.

| form | told by its columns | becomes |
|---|---|---|
| profile | ``device_name`` and ``step_s`` | profiles, exactly as exported |
| convergence | ``workload_name`` and ``samples`` | convergence runs, exactly as exported |
| PowerTrain table | ``cores`` and ``time_ms`` | one profile, named after the file |
| Zeus power trace | ``power_limit`` and ``time_per_epoch`` | a profile for each dataset, network and optimizer |
| Zeus train trace | ``target_metric`` and ``target_epoch`` | convergence runs for each of the same |
| a profile with its convergence runs, a plan | JSON: ``"underwatt"`` says which | as exported |
| a check | the same | a profile of the settings that it measured, on the device ``check:FILE`` |

Zeus counts epochs, not samples: an epoch is taken as ``samples_per_epoch`` samples. Where that is not given an epoch
counts as one sample, which changes no comparison between settings of the same workload.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import resources
from typing import TYPE_CHECKING, Any

from underwatt.csv_tables import NATIVE_MARK, cells_reader, parsed, positive, read_measurements, read_rows
from underwatt.drivers.check import KIND as CHECK_KIND, checked_profile
from underwatt.errors import InputError
from underwatt.planning.choice import Plan
from underwatt.records import (
    ConvergenceRun,
    DeviceInfo,
    Measurement,
    PowerMode,
    Profile,
    Setting,
    WorkloadInfo,
    columns,
    from_json,
    to_json,
    to_row,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path
    from typing import TextIO

    from underwatt.csv_tables import Rows
    from underwatt.rivals.compare import Alternative

KIND = "underwatt"  # under this name a JSON file says what it holds: "profile", "plan" or "check"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # of a spreadsheet or an editor
_MOST_WHOLE = 2**63  # that a column of the store holds
_MEND = "Export it again where it comes from, or take out what is wrong."
_PLAN_AGAIN = "Plan again with `underwatt plan --out`."
_INFOS: dict[str, type] = {"device": DeviceInfo, "workload": WorkloadInfo}


@dataclass(slots=True)
class Exchanged:
    """What a file held."""

    profiles: list[Profile] = field(default_factory=list)
    convergence: list[tuple[WorkloadInfo, tuple[ConvergenceRun, ...]]] = field(default_factory=list)
    plans: list[Mapping[str, Any]] = field(default_factory=list)  # as their files hold them


def write_profile(profile: Profile, file: TextIO) -> None:
    """A profile as CSV, with who it is of on every line, so that one file is enough on another machine."""
    whose = _cells("device", profile.device) | _cells("workload", profile.workload)
    _write_rows(Measurement, whose, profile.measurements, file)


def write_convergence(workload: WorkloadInfo, runs: Iterable[ConvergenceRun], file: TextIO) -> None:
    """Convergence runs as CSV."""
    _write_rows(ConvergenceRun, _cells("workload", workload), runs, file)


def write_profile_with_convergence(profile: Profile, runs: Sequence[ConvergenceRun], file: TextIO) -> None:
    """A profile and the convergence runs of its workload in one file."""
    record = {KIND: "profile", **to_json(profile), "convergence": to_json(tuple(runs))}
    json.dump(record, file, indent=1)
    file.write("\n")


def plan_record(
    plan: Plan, device: DeviceInfo, workload: WorkloadInfo, *, others: Sequence[Alternative] = (), per_sample: bool
) -> dict[str, Any]:
    """A plan as JSON values, with whom it is for; ``per_sample`` says that times are of one sample, not to a target."""
    return {
        KIND: "plan",
        "device": to_json(device),
        "workload": to_json(workload),
        "per": "sample" if per_sample else "target",
        "plan": to_json(plan),
        "others": to_json(tuple(others)),
    }


def plan_of(record: Mapping[str, Any], whose: str = "This file") -> Plan:
    """The plan that ``plan_record`` wrote; ``InputError`` where it is not whole."""
    try:
        plan = from_json(Plan, record["plan"], "plan")
        for told in (plan.chosen, *plan.front):
            if math.isnan(told.time_s.expected + told.power_w.expected + told.energy_j.expected):
                raise InputError(f"What {told.setting} is expected to take is missing.")  # null, and so NaN
        return plan
    except (KeyError, InputError) as exc:
        raise InputError(f"{whose} holds no whole plan ({exc}).", hint=_PLAN_AGAIN) from exc


def read_file(path: Path, *, device_name: str = "", samples_per_epoch: float = 1.0) -> Exchanged:
    """Read any of the forms above; ``device_name`` names the device of a table that does not say."""
    found = _read_any(path, device_name, samples_per_epoch)
    # What cannot be is refused here, where its file is known, and not where somebody plans with it.
    for measurement in (m for profile in found.profiles for m in profile.usable()):
        values = (measurement.step_s, measurement.power_w)
        if not all(0 < value < math.inf for value in values):
            raise InputError(
                f"{path}: {measurement.setting} took {values[0]:g} s and {values[1]:g} W, which cannot be.",
                hint=_MEND,
            )
    for run in (run for _, runs in found.convergence for run in runs):
        if not 1 <= run.batch_size < _MOST_WHOLE or abs(run.seed) >= _MOST_WHOLE or run.samples <= 0:
            raise InputError(
                f"{path}: {run.samples:g} samples at batch size {run.batch_size!s:.20} cannot be.", hint=_MEND
            )
    return found


def _read_any(path: Path, device_name: str, samples_per_epoch: float) -> Exchanged:
    if _looks_like_json(path):
        return _read_json(path)
    names, rows = read_rows(path)
    name = device_name or path.stem
    if names >= NATIVE_MARK:
        groups = _grouped(path, rows, _owners("device", "workload"), cells_reader(Measurement))
        return Exchanged(profiles=[Profile(*group) for group in groups])
    if {"workload_name", "samples"} <= names:
        return Exchanged(convergence=_grouped(path, rows, _owners("workload"), cells_reader(ConvergenceRun)))
    if {"cores", "time_ms"} <= names:
        workload = WorkloadInfo(path.stem, _id(path.stem))
        return Exchanged(profiles=[Profile(_device(name), workload, read_measurements(path))])
    if {"power_limit", "time_per_epoch"} <= names:
        measurement = partial(_zeus_measurement, samples_per_epoch=samples_per_epoch)
        groups = _grouped(path, rows, lambda row: (_device(name), _zeus_workload(row)), measurement)
        return Exchanged(profiles=[Profile(*group) for group in groups])
    if {"target_metric", "target_epoch"} <= names:
        run = partial(_zeus_run, samples_per_epoch=samples_per_epoch)
        return Exchanged(convergence=_grouped(path, rows, lambda row: (_zeus_workload(row),), run))
    raise InputError(
        f"{path} is no table that Underwatt knows: its columns are {', '.join(sorted(names)) or 'none'}.",
        hint="`underwatt store import --help` lists the forms.",
    )


def builtin_reference(board: str) -> Profile:
    """ResNet-18 on a simulated board, for users who have measured nothing yet; it comes with the package.

    ``benchmarks/make_references.py`` makes it from the published constants of the virtual board. A predictor weighs it
    like any reference, so that real profiles, where there are some, win.
    """
    file = resources.files("underwatt.store") / "builtin" / f"simulated_{board}_resnet18.csv"
    with resources.as_file(file) as path:
        measurements = read_measurements(path)
    device = DeviceInfo("virtual", f"{board} (simulated)", f"simulated-{board}", f"virtual:{board}", simulated=True)
    return Profile(device, WorkloadInfo("ResNet-18 (simulated)", f"simulated-resnet18-{board}"), measurements)


def _looks_like_json(path: Path) -> bool:
    """Whether a file begins like a JSON object; one that cannot be read does not."""
    try:
        with path.open("rb") as file:
            return file.read(256).removeprefix(_BYTE_ORDER_MARK).lstrip(b" \t\r\n").startswith(b"{")
    except OSError:
        return False


def _read_json(path: Path) -> Exchanged:
    try:
        record = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as exc:
        raise InputError(f"{path} cannot be read as JSON ({exc}).", hint=_MEND) from exc
    kind = record.get(KIND) if isinstance(record, dict) else None
    if kind == "plan":
        try:
            from_json(DeviceInfo, record["device"]), from_json(WorkloadInfo, record["workload"])
        except (KeyError, InputError) as exc:
            raise InputError(f"{path} does not say for which device and job it is ({exc}).", hint=_PLAN_AGAIN) from exc
        return Exchanged(plans=[record])
    if kind == CHECK_KIND:
        return Exchanged(profiles=[checked_profile(path)])
    if kind == "profile":
        try:
            runs = from_json(tuple[ConvergenceRun, ...], record["convergence"], "convergence")
            profile = from_json(Profile, record)
        except (KeyError, InputError) as exc:
            raise InputError(f"{path} is a damaged profile ({exc}).", hint="Export it again.") from exc
        return Exchanged(profiles=[profile], convergence=[(profile.workload, runs)] if runs else [])
    raise InputError(
        f"{path} is no profile, no plan and no check of Underwatt's.",
        hint="`underwatt store export`, `underwatt plan --out` and `underwatt check` write such files.",
    )


def _grouped(
    path: Path,
    rows: Rows,
    key_of: Callable[[dict[str, str]], tuple[Any, ...]],
    item_of: Callable[[dict[str, str]], Any],
) -> list[Any]:
    """Rows gathered by what they belong to: that, and a tuple of their items."""
    groups: dict[str, tuple[tuple[Any, ...], list[Any]]] = {}
    for key, item in parsed(path, rows, lambda row: (key_of(row), item_of(row))):
        groups.setdefault(json.dumps(to_json(key)), (key, []))[1].append(item)
    if not groups:
        raise InputError(f"{path} has a header and no rows.", hint="Give a table with at least one row.")
    return [(*key, tuple(items)) for key, items in groups.values()]


def _cells(role: str, info: DeviceInfo | WorkloadInfo) -> dict[str, str]:
    """A name for people, an id, and the whole as JSON."""
    return {f"{role}_name": info.name, f"{role}_id": info.id, role: json.dumps(to_json(info))}


def _write_rows(kind: type, whose: dict[str, str], items: Iterable[Any], file: TextIO) -> None:
    writer = csv.DictWriter(file, [*whose, *(column.name for column in columns(kind))], lineterminator="\n")
    writer.writeheader()
    writer.writerows(whose | to_row(item) for item in items)


def _owners(*roles: str) -> Callable[[dict[str, str]], tuple[Any, ...]]:
    """What reads from a row what ``_cells`` wrote."""
    return lambda row: tuple(_info(role, row[role]) for role in roles)


@cache
def _info(role: str, text: str) -> Any:
    return from_json(_INFOS[role], json.loads(text))


def _zeus_workload(row: dict[str, str]) -> WorkloadInfo:
    name = f"{row['dataset']} {row['network']} {row['optimizer']}"
    return WorkloadInfo(name, _id(name))


def _zeus_measurement(row: dict[str, str], *, samples_per_epoch: float) -> Measurement:
    batch_size = int(row["batch_size"])
    step_s = positive(row, "time_per_epoch") * batch_size / samples_per_epoch
    mode = PowerMode(power_limit_w=positive(row, "power_limit"))
    return Measurement(Setting(mode, batch_size), step_s=step_s, power_w=positive(row, "average_power"))


def _zeus_run(row: dict[str, str], *, samples_per_epoch: float) -> ConvergenceRun:
    samples = float(row["target_epoch"] or "nan") * samples_per_epoch  # blank or nan: never reached
    learning_rate = float(row["learning_rate"] or "nan")
    return ConvergenceRun(int(row["batch_size"]), float(row["target_metric"]), samples, int(row["run"]), learning_rate)


def _device(name: str) -> DeviceInfo:
    return DeviceInfo(backend="replay", name=name, id=_id(name), address=f"replay:{name}")


def _id(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:16]
