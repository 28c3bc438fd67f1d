"""What does not fit one table, as JSON: a profile together with its convergence runs, and a plan.

A file says what it is under ``"underwatt"``: ``"profile"`` or ``"plan"``. The content of a plan is the business of
``underwatt.plan.plan_file``; here it only has to say for which device and job it is.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from underwatt.errors import InputError
from underwatt.records import (
    COUNTS,
    FIGURES,
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

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from typing import TextIO

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
