"""The run's figures for Prometheus, made anew at each scrape from what the page shows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.registry import Collector

from underwatt.live.view import STATES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client.core import Metric

CONTENT_TYPE = CONTENT_TYPE_LATEST
_GAUGES = {
    "power_w": ("underwatt_power_watts", "Mean power over the last second."),
    "budget_w": ("underwatt_budget_watts", "Power that the budget allows now."),
    "step_s": ("underwatt_step_seconds", "Time of a training step."),
    "batch_size": ("underwatt_batch_size", "Samples in a step."),
    "time_left_s": ("underwatt_time_left_seconds", "Time until the target is expected to be reached."),
    "score": ("underwatt_score", "Newest score of the model."),
    "target": ("underwatt_target_score", "Score at which the training is done."),
}
_COUNTERS = {
    "energy_j": ("underwatt_energy_joules", "Energy used by the run."),
    "samples": ("underwatt_samples", "Samples trained on."),
    "steps": ("underwatt_steps", "Steps trained."),
    "over_s": ("underwatt_over_budget_seconds", "Seconds in which mean power exceeded the budget by over 2%."),
    "at_s": ("underwatt_run_seconds", "Time since the run began, by the device's clock."),
}
_PHASES = ("waiting", "running", "ended", "gone")


class _Figures(Collector):
    def __init__(self, facts: Callable[[], dict[str, Any]]) -> None:
        self._facts = facts

    def describe(self) -> list[Metric]:
        """Nothing before the first scrape: figures that a run does not have are left out."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Every figure that is known."""
        facts = self._facts()
        for field, (name, words) in _GAUGES.items():
            if facts.get(field) is not None:
                yield GaugeMetricFamily(name, words, value=facts[field])
        for field, (name, words) in _COUNTERS.items():
            if facts.get(field) is not None:
                yield CounterMetricFamily(name, words, value=facts[field])
        yield _one_of("underwatt_state", "What the controller does.", "state", STATES, facts.get("state"))
        yield _one_of("underwatt_phase", "Whether the run goes on.", "phase", _PHASES, facts["phase"])
        if "job" in facts:
            labels = {name: str(facts[name]) for name in ("job", "device", "workload")}
            labels["simulated"] = "true" if facts["simulated"] else "false"
            yield InfoMetricFamily("underwatt_run", "Which run this is.", value=labels)


def metrics_text(facts: Callable[[], dict[str, Any]]) -> bytes:
    """All figures in the Prometheus text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Figures(facts))
    return generate_latest(registry)


def _one_of(name: str, words: str, label: str, values: tuple[str, ...], now: str | None) -> Metric:
    family = GaugeMetricFamily(name, words, labels=[label])
    for value in values:
        family.add_metric([value], float(value == now))
    return family
