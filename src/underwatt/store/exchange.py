"""Files that hold measurements, convergence runs or a plan: our own, and the public tables and traces of the field.

| form | told by its columns | becomes |
|---|---|---|
| profile | ``device_name`` and ``step_s`` | profiles, exactly as exported |
| convergence | ``workload_name`` and ``samples`` | convergence runs, exactly as exported |
| PowerTrain table | ``cores`` and ``time_ms`` | one profile, named after the file |
| Zeus power trace | ``power_limit`` and ``time_per_epoch`` | a profile for each dataset, network and optimizer |
| Zeus train trace | ``target_metric`` and ``target_epoch`` | convergence runs for each of the same |
| a profile with its convergence runs, a plan | JSON | as exported (``exchange_json``) |

Zeus counts epochs, not samples: an epoch is taken as ``samples_per_epoch`` samples. Where that is not given an epoch
counts as one sample, which changes no comparison between settings of the same workload.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from underwatt.errors import InputError
from underwatt.records import (
    COUNTS,
    FIGURES,
    KNOBS,
    ConvergenceRun,
    DeviceInfo,
    Measurement,
    PowerMode,
    Profile,
    Setting,
    Status,
    WorkloadInfo,
    to_json,
)
from underwatt.tables import NATIVE_MARK, native_measurement, number_or_nan, parsed, read_powertrain_table, read_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path
    from typing import TextIO

    from underwatt.tables import Rows


# What does not fit one table, as JSON: a profile together with its convergence runs, and a plan.
#
# A file says what it is under ``"underwatt"``: ``"profile"`` or ``"plan"``. The content of a plan is the business of
# ``underwatt.store.plans``; here it only has to say for which device and job it is.

KIND = "underwatt"
_SPACE = b" \t\r\n"
_MARK = b"\xef\xbb\xbf"  # a spreadsheet's or editor's byte order mark


def looks_like_json(path: Path) -> bool:
    """Whether a file begins like a JSON object; one that cannot be read does not."""
    try:
        with path.open("rb") as file:
            return file.read(256).removeprefix(_MARK).lstrip(_SPACE).startswith(b"{")
    except OSError:
        return False


def read_json(path: Path) -> Mapping[str, Any]:
    """A file of one of our kinds, whole."""
    try:
        record = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as exc:
        raise InputError(f"{path} cannot be read as JSON ({exc}).") from exc
    if not isinstance(record, dict) or record.get(KIND) not in ("profile", "plan"):
        raise InputError(
            f"{path} is no profile and no plan of Underwatt's.",
            hint="`underwatt store export` and `underwatt plan --out` write such files.",
        )
    return record


def write_profile_with_convergence(profile: Profile, runs: Sequence[ConvergenceRun], file: TextIO) -> None:
    """A profile and the convergence runs of its workload in one file."""
    record = {KIND: "profile", **to_json(profile), "convergence": to_json(tuple(runs))}
    json.dump(record, file, indent=1)
    file.write("\n")


def profile_of(record: Mapping[str, Any], path: Path) -> tuple[Profile, tuple[ConvergenceRun, ...]]:
    """What ``write_profile_with_convergence`` wrote."""
    try:
        device, workload = owners_of(record, path)
        measurements = tuple(_measurement(item) for item in record["measurements"])
        runs = tuple(_run(item) for item in record["convergence"])
    except (KeyError, TypeError, ValueError, AttributeError, InputError) as exc:
        raise InputError(f"{path} is a damaged profile ({exc}).", hint="Export it again.") from exc
    return Profile(device, workload, measurements), runs


def owners_of(record: Mapping[str, Any], path: Path) -> tuple[DeviceInfo, WorkloadInfo]:
    """The device and the job that a file is about."""
    try:
        return DeviceInfo(**record["device"]), WorkloadInfo(**record["workload"])
    except (KeyError, TypeError) as exc:
        raise InputError(f"{path} does not say for which device and job it is ({exc}).") from exc


def _measurement(item: Mapping[str, Any]) -> Measurement:
    figures: dict[str, Any] = {name: _number(item[name]) for name in FIGURES}
    figures |= {name: int(item[name]) for name in COUNTS}
    mode = {name: value for name, value in item["setting"]["mode"].items() if value is not None}
    setting = Setting(PowerMode.of(mode), int(item["setting"]["batch_size"]))
    return Measurement(setting, **figures, status=Status(item["status"]), note=str(item["note"]))


def _run(item: Mapping[str, Any]) -> ConvergenceRun:
    return ConvergenceRun(
        int(item["batch_size"]),
        float(item["target"]),
        _number(item["samples"]),
        int(item["seed"]),
        _number(item["learning_rate"]),
        _number(item.get("given_up_samples")),
    )


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


_IDENTITY = ("device_name", "device_id", "device", "workload_name", "workload_id", "workload")
PROFILE_COLUMNS = (*_IDENTITY, *KNOBS, "batch_size", *FIGURES, *COUNTS, "status", "note")
CONVERGENCE_COLUMNS = (
    "workload_name", "workload_id", "workload", "batch_size", "target", "samples", "seed", "learning_rate",
    "given_up_samples",
)  # fmt: skip


@dataclass(slots=True)
class Exchanged:
    """What a file held."""

    profiles: list[Profile] = field(default_factory=list)
    convergence: list[tuple[WorkloadInfo, tuple[ConvergenceRun, ...]]] = field(default_factory=list)
    plans: list[Mapping[str, Any]] = field(default_factory=list)  # as their files hold them


def write_profile(profile: Profile, file: TextIO) -> None:
    """A profile as CSV, with who it is of on every line, so that one file is enough on another machine."""
    writer = csv.DictWriter(file, PROFILE_COLUMNS, lineterminator="\n")
    writer.writeheader()
    identity = {
        "device_name": profile.device.name,
        "device_id": profile.device.id,
        "device": json.dumps(to_json(profile.device)),
        **_workload_columns(profile.workload),
    }
    for m in profile.measurements:
        writer.writerow(
            {
                **identity,
                **m.setting.mode.knobs(),
                "batch_size": m.setting.batch_size,
                **{name: _cell(getattr(m, name)) for name in (*FIGURES, *COUNTS)},
                "status": m.status.value,
                "note": m.note,
            }
        )


def write_convergence(workload: WorkloadInfo, runs: Iterable[ConvergenceRun], file: TextIO) -> None:
    """Convergence runs as CSV."""
    writer = csv.DictWriter(file, CONVERGENCE_COLUMNS, lineterminator="\n")
    writer.writeheader()
    for run in runs:
        figures = {name: _cell(value) for name, value in to_json(run).items()}
        writer.writerow({**_workload_columns(workload), **figures})


def read_file(path: Path, *, device_name: str = "", samples_per_epoch: float = 1.0) -> Exchanged:
    """Read any of the forms above; ``device_name`` names the device of a table that does not say."""
    if looks_like_json(path):
        return _read_json(path)
    columns, rows = read_rows(path)
    name = device_name or path.stem
    if columns >= NATIVE_MARK:
        return Exchanged(profiles=_grouped(path, rows, _profile_key, native_measurement, Profile))
    if {"workload_name", "samples"} <= columns:
        return Exchanged(convergence=_grouped(path, rows, _workload_key, _native_run, lambda w, runs: (w, runs)))
    if {"cores", "time_ms"} <= columns:
        workload = WorkloadInfo(path.stem, _id(path.stem))
        return Exchanged(profiles=[Profile(_device(name), workload, tuple(read_powertrain_table(path)))])
    if {"power_limit", "time_per_epoch"} <= columns:

        def power(row: dict[str, str]) -> Measurement:
            return _zeus_measurement(row, samples_per_epoch)

        return Exchanged(
            profiles=_grouped(path, rows, lambda row: (_device(name), _zeus_workload(row)), power, Profile)
        )
    if {"target_metric", "target_epoch"} <= columns:

        def train(row: dict[str, str]) -> ConvergenceRun:
            return _zeus_run(row, samples_per_epoch)

        key = lambda row: (_zeus_workload(row),)  # noqa: E731
        return Exchanged(convergence=_grouped(path, rows, key, train, lambda w, runs: (w, runs)))
    raise InputError(
        f"{path} is no table that Underwatt knows: its columns are {', '.join(sorted(columns)) or 'none'}.",
        hint="`underwatt store import --help` lists the forms.",
    )


def _read_json(path: Path) -> Exchanged:
    record = read_json(path)
    if record[KIND] == "plan":
        owners_of(record, path)
        return Exchanged(plans=[record])
    profile, runs = profile_of(record, path)
    return Exchanged(profiles=[profile], convergence=[(profile.workload, runs)] if runs else [])


def _grouped(
    path: Path,
    rows: Rows,
    key_of: Callable[[dict[str, str]], tuple[Any, ...]],
    item_of: Callable[[dict[str, str]], Any],
    build: Callable[..., Any],
) -> list[Any]:
    """Rows gathered by what they belong to."""
    groups: dict[str, tuple[tuple[Any, ...], list[Any]]] = {}
    for key, item in parsed(path, rows, lambda row: (key_of(row), item_of(row))):
        groups.setdefault(json.dumps(to_json(key)), (key, []))[1].append(item)
    if not groups:
        raise InputError(f"{path} has a header and no rows.")
    return [build(*key, tuple(items)) for key, items in groups.values()]


def _profile_key(row: dict[str, str]) -> tuple[DeviceInfo, WorkloadInfo]:
    return DeviceInfo(**json.loads(row["device"])), WorkloadInfo(**json.loads(row["workload"]))


def _workload_key(row: dict[str, str]) -> tuple[WorkloadInfo]:
    return (WorkloadInfo(**json.loads(row["workload"])),)


def _native_run(row: dict[str, str]) -> ConvergenceRun:
    return ConvergenceRun(
        int(row["batch_size"]),
        float(row["target"]),
        number_or_nan(row["samples"]),
        int(row["seed"]),
        number_or_nan(row["learning_rate"]),
        number_or_nan(row.get("given_up_samples", "")),
    )


def _zeus_workload(row: dict[str, str]) -> WorkloadInfo:
    name = f"{row['dataset']} {row['network']} {row['optimizer']}"
    return WorkloadInfo(name, _id(name))


def _zeus_measurement(row: dict[str, str], samples_per_epoch: float) -> Measurement:
    batch_size = int(row["batch_size"])
    step_s = _positive(row, "time_per_epoch") * batch_size / samples_per_epoch
    mode = PowerMode(power_limit_w=_positive(row, "power_limit"))
    return Measurement(Setting(mode, batch_size), step_s=step_s, power_w=_positive(row, "average_power"))


def _zeus_run(row: dict[str, str], samples_per_epoch: float) -> ConvergenceRun:
    epochs = number_or_nan(row["target_epoch"])  # blank or nan: never reached
    return ConvergenceRun(
        int(row["batch_size"]),
        float(row["target_metric"]),
        epochs * samples_per_epoch,
        int(row["run"]),
        number_or_nan(row["learning_rate"]),
    )


def _workload_columns(workload: WorkloadInfo) -> dict[str, str]:
    return {
        "workload_name": workload.name,
        "workload_id": workload.id,
        "workload": json.dumps(to_json(workload)),
    }


def _device(name: str) -> DeviceInfo:
    return DeviceInfo(backend="replay", name=name, id=_id(name), address=f"replay:{name}")


def _id(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:16]


def _cell(value: Any) -> Any:
    return "" if value is None or (isinstance(value, float) and not math.isfinite(value)) else value


def _positive(row: dict[str, str], column: str) -> float:
    value = float(row[column])
    if not (math.isfinite(value) and value > 0):
        raise InputError(f"{column} must be positive, not {row[column]!r}.")
    return value
