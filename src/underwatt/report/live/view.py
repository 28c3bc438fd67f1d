"""What the page shows of a run: a fold over the lines of its log, without files, sockets or clocks."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from underwatt.errors import InputError
from underwatt.plan.budget import parse_budget
from underwatt.report.live.entries import ended, entry_of
from underwatt.report.live.trace import PowerTrace
from underwatt.report.sources import setting_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    Event = Mapping[str, Any]

ENTRIES = 200
STALE_S = 5.0  # watts that were read longer ago are not those of now: the sensor is lost
STATES = ("searching", "holding", "correcting", "restoring")
_CARRIED = ("steps", "samples", "loss", "step_s", "energy_j", "time_left_s", "gap_share", "batch_size", "share")
_UNITS = {"cpu_cores": "", "cpu_mhz": "MHz", "gpu_mhz": "MHz", "mem_mhz": "MHz", "power_limit_w": "W"}
_KNOBS = {"cpu_cores": "CPU cores", "cpu_mhz": "CPU", "gpu_mhz": "GPU", "mem_mhz": "Memory", "power_limit_w": "Limit"}


class RunView:
    """The newest of everything, the log for people, and power over time."""

    def __init__(self) -> None:
        self.trace = PowerTrace()
        self.facts: dict[str, Any] = {"phase": "waiting", "at_s": 0.0, "measured": 0, "asked": None}
        self.entries: deque[dict[str, Any]] = deque(maxlen=ENTRIES)
        self.entry_count = 0
        self.unreadable = 0  # lines of a kind that is known, and of a shape that is not

    def apply(self, event: Event) -> None:
        """Take in one line of the log; a kind that is not known is left out."""
        kind = event["kind"]
        try:
            if kind == "power":
                self.trace.add(event["at_s"], event["power_w"])
                if event["at_s"]:
                    self._pass_time(event["at_s"][-1])
                return
            entry = entry_of(event)
            self._pass_time(event["at_s"])
            fold = getattr(self, f"_on_{kind}", None)
            if fold is not None:
                fold(event)
        except (KeyError, TypeError, ValueError, AttributeError, InputError):
            self.unreadable += 1
            return
        if entry is not None:
            self.entry_count += 1
            self.entries.append({"number": self.entry_count, **entry})

    def ask(self, budget: str) -> None:
        """Remember a budget that was asked for until the run says what holds."""
        asked_w = None if "=" in budget else parse_budget(budget).power_w
        if asked_w is None or asked_w != self.facts.get("budget_w"):
            self.facts["asked"] = {"budget": budget, "at_s": self.facts["at_s"]}

    def shown(self) -> dict[str, Any]:
        """The facts with what the trace adds to them."""
        latest = self.trace.latest()
        fresh = latest is not None and self.facts["at_s"] - latest.at_s < STALE_S
        return {
            **self.facts,
            "power_w": latest.mean_w if latest and fresh else None,
            "over_s": self.trace.over_s,
            "unreadable": self.unreadable,
        }

    def lose(self) -> None:
        """The process of the run is gone, and it did not say how it ended."""
        if self.facts["phase"] == "running":
            self.facts["phase"] = "gone"

    def _pass_time(self, at_s: float) -> None:
        self.facts["at_s"] = max(self.facts["at_s"], float(at_s))

    def _on_start(self, event: Event) -> None:
        self.facts |= {
            "phase": "running",
            "job": event["job"],
            "device": event["device"]["name"],
            "simulated": bool(event["simulated"]),
            "workload": event["workload"]["name"],
            "started_at": event["started_at"],
            "budget_text": event["budget"],
            "goal": event.get("goal"),
            "target": event.get("target"),
            "pid": event.get("pid"),
            "state": "searching",
        }

    def _on_resume(self, event: Event) -> None:
        self.facts |= {"phase": "running", "pid": event.get("pid"), "end": None, "time_left_s": None, "warning": None}

    def _on_budget(self, event: Event) -> None:
        self.trace.add_budget(event["at_s"], event["power_w"])
        self.facts["budget_w"] = event["power_w"]
        self.facts["budget_means"] = _means(event)
        warning = self.facts.get("warning")
        if warning is not None and event["at_s"] > warning["at_s"]:
            self.facts["warning"] = None  # what was warned of may be over, and would be said again
        if event["why"] == "changed":
            self.facts["asked"] = None

    def _on_setting(self, event: Event) -> None:
        setting = setting_of(event["setting"])
        self.facts |= {
            "state": event["state"],
            "why": event.get("why"),
            "setting": {
                "batch_size": setting.batch_size,
                "knobs": [
                    {"name": _KNOBS[name], "value": value, "unit": _UNITS[name]}
                    for name, value in setting.mode.knobs().items()
                ],
            },
        }

    def _on_measured(self, event: Event) -> None:
        del event
        self.facts["measured"] += 1

    def _on_plan(self, event: Event) -> None:
        self.facts["reason"] = event["reason"]

    def _on_progress(self, event: Event) -> None:
        self.facts |= {name: event[name] for name in _CARRIED if name in event}
        self.facts |= {"phase": "running", "state": event["state"]}

    def _on_score(self, event: Event) -> None:
        self.facts |= {"score": event["value"], "target": event.get("target", self.facts.get("target"))}

    def _on_note(self, event: Event) -> None:
        if event["level"] == "warning":
            self.facts["warning"] = {"text": event["text"], "at_s": event["at_s"]}

    def _on_end(self, event: Event) -> None:
        self.facts |= {name: event[name] for name in ("energy_j", "samples", "steps") if event.get(name) is not None}
        if event.get("score") is not None:
            self.facts["score"] = event["score"]
        end = {name: event.get(name) for name in ("outcome", "restored", "error")}
        self.facts |= {"phase": "ended", "end": end | {"words": ended(event)}, "time_left_s": None, "asked": None}


def _means(event: Event) -> str:
    """What the watts of a budget bound, where it is not simply their mean."""
    if event.get("watts") == "peak":
        return "for peaks"
    return f"as mean over {event['window_s']:g} s" if event.get("window_s") else ""
