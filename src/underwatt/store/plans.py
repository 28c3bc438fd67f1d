"""A plan as one file: chosen on a server, taken to the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from underwatt.budget import Budget, Watts
from underwatt.errors import InputError
from underwatt.planning.choice import Expectation, Interval, Plan
from underwatt.planning.problem import Goal
from underwatt.records import PowerMode, Setting, to_json
from underwatt.store.exchange import KIND

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from underwatt.records import DeviceInfo, WorkloadInfo
    from underwatt.rivals.compare import Alternative


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
        plan = record["plan"]
        budget = plan["budget"]
        return Plan(
            chosen=_expectation(plan["chosen"]),
            budget=Budget(**{**budget, "watts": Watts(budget["watts"])}),
            goal=Goal(plan["goal"]),
            risk=float(plan["risk"]),
            faster=plan["faster"] and _expectation(plan["faster"]),
            thriftier=plan["thriftier"] and _expectation(plan["thriftier"]),
            front=tuple(_expectation(item) for item in plan["front"]),
            reason=str(plan["reason"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError, InputError) as exc:
        raise InputError(
            f"{whose} holds no whole plan ({exc}).", hint="Plan again with `underwatt plan --out`."
        ) from exc


def _expectation(item: Mapping[str, Any]) -> Expectation:
    mode = {name: value for name, value in item["setting"]["mode"].items() if value is not None}
    return Expectation(
        setting=Setting(PowerMode.of(mode), int(item["setting"]["batch_size"])),
        time_s=_interval(item["time_s"]),
        power_w=_interval(item["power_w"]),
        energy_j=_interval(item["energy_j"]),
        chance_over=float(item["chance_over"]),
        measured=bool(item["measured"]),
    )


def _interval(item: Mapping[str, Any]) -> Interval:
    return Interval(float(item["expected"]), float(item["low"]), float(item["high"]))
