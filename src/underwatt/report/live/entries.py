"""One line of the page's log for each event that a person wants to know of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from underwatt.records import Status
from underwatt.report.sources import OUTCOMES, setting_of
from underwatt.report.words import allowed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Event = Mapping[str, Any]

_BUDGETS = {"start": "Budget: {}.", "schedule": "Budget by the schedule: {}.", "changed": "Budget changed: {}."}


def entry_of(event: Event) -> dict[str, Any] | None:
    """Time, kind, level and words of an event; ``None`` for what only charts and figures show."""
    words = _WORDS.get(event["kind"])
    if words is None:
        return None
    return {"at_s": event["at_s"], "kind": event["kind"], "level": _level(event), "text": words(event)}


def ended(event: Event) -> str:
    """How a run ended, in words."""
    return f"The run {OUTCOMES.get(event['outcome'], 'ended')}"


def _level(event: Event) -> str:
    if event["kind"] == "note":
        return str(event["level"])
    return "warning" if event.get("outcome") == "failed" else "info"


def _start(event: Event) -> str:
    return f"{event['job']} on {event['device']['name']} began, with a budget of {event['budget']}."


def _budget(event: Event) -> str:
    return _BUDGETS.get(event["why"], "Budget: {}.").format(allowed(event))


def _setting(event: Event) -> str:
    why = f" – {event['why']}" if event.get("why") else ""
    return f"{str(event['state']).capitalize()}: {setting_of(event['setting'])}{why}"


def _measured(event: Event) -> str:
    found = event["measurement"]
    setting = setting_of(found["setting"])
    if Status(found["status"]) in (Status.OK, Status.THROTTLED):
        slowed = ", slowed down by the device" if found["status"] == Status.THROTTLED.value else ""
        step_s = found["step_s"]
        took = f"{step_s:.3g} s" if step_s >= 1 else f"{1e3 * step_s:.3g} ms"
        return f"Measured {setting}: {took} a step, {found['power_w']:.2f} W{slowed}"
    said = found["status"].replace("_", " ")
    return f"Measured {setting}: {said}{': ' if found.get('note') else ''}{found.get('note', '')}"


def _plan(event: Event) -> str:
    return f"Chose {setting_of(event['chosen'])}. {event['reason']}".rstrip()


def _score(event: Event) -> str:
    aim = "" if event.get("target") is None else f" of {event['target']:g}"
    return f"Score {event['value']:.4g}{aim} after {event['samples']:,} samples."


def _end(event: Event) -> str:
    put_back = "the device is as it was before" if event["restored"] else "the device was NOT put back"
    error = f" {event['error']}" if event.get("error") else ""
    return f"{ended(event)}; {put_back}.{error}"


_WORDS: dict[str, Callable[[Event], str]] = {
    "start": _start,
    "resume": lambda _event: "The run goes on from its checkpoint.",
    "budget": _budget,
    "setting": _setting,
    "measured": _measured,
    "plan": _plan,
    "score": _score,
    "note": lambda event: str(event["text"]),
    "end": _end,
}
