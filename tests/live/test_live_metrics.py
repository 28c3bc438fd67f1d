from __future__ import annotations

from live_run import FakeRun, Served, eventually
from prometheus_client.parser import text_string_to_metric_families

from underwatt.live.metrics import metrics_text


def samples(text: str) -> dict[str, float]:
    return {
        sample.name + "".join(f"{{{value}}}" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_every_figure_of_the_run_is_there_for_prometheus(served: Served, fake_run: FakeRun) -> None:
    for _ in range(3):
        fake_run.second(11.0)
    eventually(lambda: served.server.feed.reader.view.facts.get("steps") == 30)
    status, headers, text = served.ask("/metrics", headers=served.bearer)
    assert status == 200
    assert headers["content-type"].startswith("text/plain; version=")
    found = samples(text)
    assert 10.7 < found["underwatt_power_watts"] < 11.3
    assert found["underwatt_budget_watts"] == 10.0
    assert found["underwatt_energy_joules_total"] > 30
    assert found["underwatt_samples_total"] == 960
    assert found["underwatt_steps_total"] == 30
    assert found["underwatt_step_seconds"] == 0.1
    assert found["underwatt_over_budget_seconds_total"] == 2.0
    assert found["underwatt_state{holding}"] == 1.0
    assert found["underwatt_state{searching}"] == 0.0
    assert found["underwatt_phase{running}"] == 1.0
    assert "underwatt_run_info{Jetson Nano (virtual)}{digits}{true}{digits}" in found
    assert "underwatt_score" not in found, "unknown is left out, not zero"
    assert served.ask(f"/metrics?token={served.server.token}")[0] == 200


def test_names_from_the_log_cannot_break_the_format() -> None:
    name = 'a"b\\c\nd{}'
    facts = {"phase": "running", "job": name, "device": name, "workload": name, "simulated": False}
    families = list(text_string_to_metric_families(metrics_text(lambda: facts).decode()))
    labels = next(family.samples[0].labels for family in families if family.name == "underwatt_run_info")
    assert labels["job"] == name
