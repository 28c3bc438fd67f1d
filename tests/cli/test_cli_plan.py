from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import foreign_predictor
import pytest
from test_cli_devices import run

JOB = """
import torch
from underwatt import Job

def tiny():
    data = torch.randn(64, 3, 16, 16), torch.randint(4, (64,))
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 32, 3), torch.nn.Flatten(), torch.nn.Linear(32 * 14 * 14, 4))
    return Job(model, data, target=0.9, batch_sizes=(4, 8, 16, 32))
"""


@pytest.fixture
def profiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """A profile on a virtual Nano, and the id of its workload."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("UNDERWATT_STORE", raising=False)
    (tmp_path / "job.py").write_text(JOB)
    assert run("profile", "job.py:tiny", "-d", "virtual:nano", "-n", "12") == 0
    capsys.readouterr()
    assert run("store", "ls", "--json") == 0
    return str(json.loads(capsys.readouterr().out)["profiles"][0]["workload"]["id"])


def converge_to(workload_id: str, samples: dict[int, int], tmp_path: Path) -> None:
    header = "workload_name,workload_id,workload,batch_size,target,samples,seed,learning_rate\n"
    identity = json.dumps({"name": "tiny", "id": workload_id, "software": {}}).replace('"', '""')
    rows = "".join(f'tiny,{workload_id},"{identity}",{b},0.9,{n},0,\n' for b, n in samples.items())
    (tmp_path / "runs.csv").write_text(header + rows)
    assert run("store", "import", "runs.csv") == 0


def test_convergence_moves_the_choice_of_batch_size(
    profiled: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("plan", "--budget", "4W", "--json") == 0
    shown = capsys.readouterr()
    weighed = json.loads(shown.out)
    assert weighed["per"] == "sample"
    assert "weighed by what 7 other trainings needed" in " ".join(shown.err.split())
    assert weighed["plan"]["chosen"]["setting"]["batch_size"] == 32
    unsure = weighed["plan"]["unsure"]
    assert 1 == unsure["low"] <= unsure["expected"] < 1.01  # the largest is far ahead on this board
    converge_to(profiled, {4: 1000, 8: 1100, 16: 20_000, 32: 50_000}, tmp_path)
    capsys.readouterr()
    assert run("plan", "--budget", "4W", "--json", "--out", "plan.json") == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["per"] == "target"
    assert planned["plan"]["unsure"] is None
    assert planned["plan"]["chosen"]["setting"]["batch_size"] in (4, 8)
    assert planned["plan"]["chosen"]["power_w"]["expected"] <= 4
    assert {other["name"] for other in planned["others"]} >= {"largest batch that fits, highest clock", "maximum mode"}
    assert run("plan", "--energy", "50Wh", "--deadline", "2h", "--least-energy") == 0
    assert run("plan", "--energy", "0.001J") == 1
    assert "smallest feasible energy" in capsys.readouterr().err
    assert run("plan", "--budget", "4W", "--target", "0.5") == 2
    kept = json.loads((tmp_path / "plan.json").read_text())
    assert kept == planned
    assert kept["device"]["simulated"] is True


def test_the_documented_keys_are_those_that_are_printed(
    profiled: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--budget", "08:00-18:00=4W,else=3W", "--start", "17:00", "--json")
    assert run("plan", *options, "--measure", "job.py:tiny", "-d", "virtual:nano") == 0
    record = json.loads(capsys.readouterr().out)
    plan, [*others] = record["plan"], record["others"]
    documented = _documented_keys()
    top = {key.split(".")[0] for key in documented[0]}
    assert top == set(record)
    assert {key.removeprefix("plan.") for key in documented[0] if key.startswith("plan.")} == set(plan)
    for expectation in (plan["chosen"], plan["faster"], plan["thriftier"], *plan["front"]):
        assert expectation is None or set(expectation) == documented[1]
    assert all(set(other) == documented[2] for other in others)
    assert set(plan["chosen"]["time_s"]) == {"expected", "low", "high"}
    course_keys = {"starts_at", "levels", "stretches", "finish_s", "energy_j"}
    assert course_keys == set(record["course"]) <= documented[3]
    assert run("plan", "--budget", "4W", "--json") == 0
    assert set(json.loads(capsys.readouterr().out)) == top - {"measured_now", "stopped", "schedule", "course"}


def test_the_largest_batch_is_the_jobs_and_not_the_largest_that_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("UNDERWATT_STORE", raising=False)
    (tmp_path / "job.py").write_text(JOB)
    assert run("profile", "job.py:tiny", "-d", "virtual:nano", "-n", "8", "-b", "4,8") == 0
    capsys.readouterr()

    def largest(*more: str) -> int:
        assert run("plan", "--budget", "8W", "--json", *more) == 0
        others = json.loads(capsys.readouterr().out)["others"]
        [batch] = [one["setting"]["batch_size"] for one in others if one["name"].startswith("largest batch")]
        return int(batch)

    assert largest() == 32
    assert largest("-b", "4,16") == 16
    job = JOB.replace("(4, 8, 16, 32)", "(4, 8, 16)")
    (tmp_path / "job.py").write_text(job)
    assert run("profile", "job.py:tiny", "-d", "virtual:nano", "-n", "9", "-b", "4,8") == 0
    capsys.readouterr()
    assert largest() == 16, "a job that was changed since says so when it is profiled again"


SCHEDULE = "08:00-18:00=4W,else=3W"


def test_a_plan_over_a_schedule_says_what_is_done_at_each_level_and_when_the_target_is_reached(
    profiled: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    converge_to(profiled, {4: 20_000_000, 8: 21_000_000, 16: 22_000_000, 32: 23_000_000}, tmp_path)
    capsys.readouterr()
    alone_s = {}
    for level in ("3W", "4W"):
        assert run("plan", "--budget", level, "--json") == 0
        alone_s[level] = json.loads(capsys.readouterr().out)["plan"]["chosen"]
    assert run("plan", "--budget", SCHEDULE, "--start", "17:59", "--json") == 0
    made = json.loads(capsys.readouterr().out)
    course, [low, high] = made["course"], made["course"]["levels"]
    assert (low["power_w"], high["power_w"]) == (3.0, 4.0)
    assert low["chosen"]["setting"] == alone_s["3W"]["setting"]
    assert high["chosen"]["setting"] == alone_s["4W"]["setting"] == made["plan"]["chosen"]["setting"]
    first, *more = course["stretches"]
    assert (first["begin_s"], first["end_s"], first["power_w"]) == (0.0, 60.0, 4.0)
    assert more[0]["setting"] == low["chosen"]["setting"]
    done = 0.0
    for stretch in course["stretches"]:
        chosen = low if stretch["power_w"] == 3.0 else high
        done += (stretch["end_s"] - stretch["begin_s"]) / chosen["chosen"]["time_s"]["expected"]
    assert done == pytest.approx(1.0)
    assert course["stretches"][-1]["end_s"] == course["finish_s"]
    assert made["schedule"] == "08:00-18:00=4W,18:00-08:00=3W"
    assert run("plan", "--budget", SCHEDULE, "--start", "17:59") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "The target is expected after" in shown
    assert "begun at 17:59" in shown


def test_a_schedule_from_a_file_with_a_level_that_nothing_keeps_waits_there(
    profiled: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    converge_to(profiled, {4: 50_000, 8: 51_000, 16: 52_000, 32: 53_000}, tmp_path)
    (tmp_path / "sun.csv").write_text("at_s,power_w\n0,0.5\n100,4\n")
    capsys.readouterr()
    assert run("plan", "--schedule", "sun.csv", "--json", "--out", "plan.json", "--keep") == 0
    course = json.loads(capsys.readouterr().out)["course"]
    assert course["levels"][0]["chosen"] is None
    assert course["stretches"][0] == {"begin_s": 0.0, "end_s": 100.0, "power_w": 0.5, "setting": None}
    assert course["finish_s"] > 100
    assert run("plan", "--schedule", "sun.csv") == 0
    assert "training waits" in capsys.readouterr().out
    assert run("store", "import", "plan.json") == 0
    assert run("plan", "--schedule", "sun.csv", "--budget", "4W") == 2
    assert run("plan", "--budget", "4W", "--start", "22:00") == 2
    assert "would do nothing" in " ".join(capsys.readouterr().err.split())


def test_bounds_on_the_whole_training_hold_over_a_schedule_too(
    profiled: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    converge_to(profiled, {4: 200_000, 8: 210_000, 16: 220_000, 32: 230_000}, tmp_path)
    plan = ("plan", "--budget", "08:00-18:00=9W,else=3W", "--start", "09:00", "--json")
    capsys.readouterr()
    assert run(*plan) == 0
    soonest = json.loads(capsys.readouterr().out)["course"]
    assert run(*plan, "--least-energy") == 0
    thrifty = json.loads(capsys.readouterr().out)["course"]
    assert thrifty["energy_j"] < soonest["energy_j"]
    assert thrifty["finish_s"] > soonest["finish_s"]
    bound_j = 1.08 * soonest["energy_j"]  # in which the soonest is not sure to stay
    assert run(*plan, "--energy", f"{bound_j}J") == 0
    bounded = json.loads(capsys.readouterr().out)["course"]
    assert thrifty["energy_j"] < bounded["energy_j"] < soonest["energy_j"]
    assert soonest["finish_s"] < bounded["finish_s"] < thrifty["finish_s"]
    assert run(*plan, "--deadline", f"{soonest['finish_s'] / 2}s") == 1
    assert "deadline" in capsys.readouterr().err
    assert run(*plan, "--deadline", f"{2 * soonest['finish_s']}s") == 0


def test_without_convergence_a_schedule_still_has_a_setting_for_each_level(
    profiled: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("plan", "--budget", SCHEDULE, "--json") == 0
    course = json.loads(capsys.readouterr().out)["course"]
    assert [level["chosen"]["power_w"]["expected"] <= level["power_w"] for level in course["levels"]] == [True, True]
    assert (course["finish_s"], course["stretches"]) == (None, [])
    assert run("plan", "--budget", SCHEDULE) == 0


def _documented_keys() -> list[set[str]]:
    """The keys in the first column of each table that docs/planning.md has for --json."""
    text = (Path(__file__).parents[2] / "docs" / "planning.md").read_text(encoding="utf-8")
    section = text.split("## `underwatt plan --json`")[1].split("Everything travels")[0]
    tables = section.split("|---|---|\n")[1:]
    return [
        {
            key
            for line in table.splitlines()
            if line.startswith("|")
            for key in re.findall(r"`([^`]+)`", line.split("|")[1])
        }
        for table in tables
    ]


def test_what_a_job_prints_is_not_part_of_the_answer(
    profiled: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "loud.py").write_text(JOB.replace("def tiny():", "def tiny():\n    print('a job may print')"))
    assert run("plan", "--measure", "loud.py:tiny", "-d", "virtual:nano", "--budget", "4W", "--json") == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["underwatt"] == "plan"
    assert "a job may print" in shown.err


def test_a_batch_size_beyond_what_is_known_is_called_a_guess(
    profiled: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("plan", "--budget", "4W", "-b", "16,512") == 0
    assert "512 lies beyond what was measured (4 to 32)" in " ".join(capsys.readouterr().err.split())
    converge_to(profiled, {4: 1000, 8: 1100, 16: 2000}, tmp_path)
    capsys.readouterr()
    assert run("plan", "--budget", "4W", "-b", "8,32") == 0
    err = " ".join(capsys.readouterr().err.split())
    assert "32 lies beyond what was trained to the target (4 to 16)" in err
    assert "beyond what was measured" not in err
    assert run("plan", "--budget", "4W", "--target", "0.5") == 2
    assert "There are: 0.9." in " ".join(capsys.readouterr().err.split())


def test_an_export_says_what_it_wrote_and_overwrites_only_when_told(
    profiled: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("store", "export", "1", "out.csv") == 0
    assert "Profile 1 (tiny on Virtual Jetson Nano" in " ".join(capsys.readouterr().out.split())
    (tmp_path / "out.csv").write_text("precious")
    assert run("store", "export", "1", "out.csv") == 2
    assert "--force" in capsys.readouterr().err
    assert (tmp_path / "out.csv").read_text() == "precious"
    assert run("store", "export", "1", "out.csv", "--force") == 0
    assert (tmp_path / "out.csv").read_text() != "precious"
    capsys.readouterr()
    assert run("store", "export", "1") == 0
    assert capsys.readouterr().out == (tmp_path / "out.csv").read_text(), "nothing but the table goes to the pipe"


def test_a_person_sees_the_choice_and_what_others_take(profiled: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", "--budget", "4W") == 0
    out = " ".join(capsys.readouterr().out.split())
    for text in (
        "budget 4 W",
        "most samples a second",
        "vendor's",
        "largest batch",
        "faster neighbour",
        "predicted",
        "over?",
    ):
        assert text in out
    assert run("plan", "--energy", "50Wh") == 2
    assert "underwatt converge" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--budget", "0.5W"], 1, "smallest feasible power"),
        (["--budget", "0.5W"], 1, "W (measured)"),
        (["--budget", "0.5W", "-b", "64"], 1, "W (predicted"),
        (["--budget", "3"], 2, "Did you mean 3W?"),
        (["--budget", "08:00-18:00=15W,else=7W", "--start", "25:00"], 2, "no time of day"),
        (["--budget", "08:00-18:00=0.5W,else=0.4W"], 1, "smallest feasible power"),
        (["--budget", "-4W"], 2, "above zero"),
        (["--budget", "4 bananas"], 2, "unit"),
        ([], 2, "No budget"),
        (["--deadline", "20W"], 2, "wrong unit"),
        (["--energy", "2h"], 2, "wrong unit"),
        (["--budget", "4W", "--risk", "2"], 2, "risk"),
        (["--budget", "4W", "--convergence", "nothing"], 2, "no convergence runs"),
        (["--budget", "4W", "--profile", "9"], 1, "no profile 9"),
        (["--budget", "4W", "--out", "no/such/folder/plan.json"], 2, "cannot be written"),
        (["job.py:tiny", "--budget", "4W"], 2, "--measure"),
        (["--measure", "job.py:tiny", "--budget", "4W", "--profile", "1"], 2, "one of the two"),
        (["--measure", "--budget", "4W", "-d", "virtual:nano"], 2, "No job was named"),
        (["--measure", "job.py:tiny", "-d", "virtual:nano", "--deadline", "2h"], 2, "underwatt converge"),
    ],
)
def test_nonsense_is_one_sentence(
    profiled: str, arguments: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("plan", *arguments) == code
    err = " ".join(capsys.readouterr().err.split())
    assert says in err
    assert "Traceback" not in err


def test_nothing_measured_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("plan", "--budget", "4W") == 1
    assert "underwatt profile" in capsys.readouterr().err


def test_another_board_at_the_same_address_is_not_the_profiled_one(
    profiled: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("store", "export", "1", "out.csv") == 0
    text = (tmp_path / "out.csv").read_text().replace("virtual:nano", "virtual:orin-agx")
    (tmp_path / "moved.csv").write_text(text)
    assert run("store", "import", "moved.csv", "--store", "moved.db") == 0
    capsys.readouterr()
    assert run("plan", "--budget", "4W", "--store", "moved.db", "--json") == 0
    shown = capsys.readouterr()
    assert "is not here" in shown.err
    assert json.loads(shown.out)["plan"]["chosen"]["setting"]["mode"]["gpu_mhz"] <= 921.6


def test_trainings_that_never_got_there_do_not_break_planning(
    profiled: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    converge_to(profiled, {4: "", 8: ""}, tmp_path)  # type: ignore[dict-item]
    capsys.readouterr()
    assert run("plan", "--budget", "4W") == 0
    assert "No training reached the target 0.9" in " ".join(capsys.readouterr().err.split())


def test_a_plan_and_a_profile_with_its_convergence_travel_as_one_file_each(
    profiled: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    converge_to(profiled, {4: 1000, 8: 1100, 16: 2000, 32: 5000}, tmp_path)
    assert run("plan", "--budget", "4W", "--out", "plan.json", "--keep") == 0
    assert run("store", "export", "plan:1", "again.json") == 0
    assert (tmp_path / "again.json").read_text() == (tmp_path / "plan.json").read_text()
    assert run("store", "export", "1", "both.json", "--with-convergence") == 0
    for name in ("plan.json", "both.json", "plan.json"):
        assert run("store", "import", name, "--store", "device.db") == 0
    assert "known already" in capsys.readouterr().out
    assert run("store", "ls", "--json", "--store", "device.db") == 0
    there = json.loads(capsys.readouterr().out)
    assert there["profiles"][0]["usable"] == 12
    assert there["convergence"][0]["runs"] == 4
    assert [kept["record"] for kept in there["plans"]] == [json.loads((tmp_path / "plan.json").read_text())]
    assert run("store", "ls", "--store", "device.db") == 0
    assert "plan:1: tiny on Virtual Jetson Nano" in capsys.readouterr().out
    assert run("plan", "--budget", "4W", "--json", "--store", "device.db") == 0
    assert json.loads(capsys.readouterr().out) == json.loads((tmp_path / "plan.json").read_text())


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["export", "plan:7"], 1, "no plan 7"),
        (["export", "plan:x"], 2, "no convergence runs"),
        (["export", "1", "--with-convergence"], 2, "no convergence runs of tiny"),
        (["export", "plan:1", "--with-convergence"], 2, "Only a profile"),
        (["import", "half.json"], 2, "no whole plan"),
    ],
)
def test_what_cannot_travel_is_one_sentence(
    profiled: str, tmp_path: Path, arguments: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("plan", "--budget", "4W", "--out", "half.json") == 0
    record = json.loads((tmp_path / "half.json").read_text())
    del record["plan"]["chosen"]
    (tmp_path / "half.json").write_text(json.dumps(record))
    assert run("store", *arguments) == code
    assert says in " ".join(capsys.readouterr().err.split())


def test_powertrain_is_shown_when_asked_for(profiled: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch", reason="PowerTrain needs PyTorch")
    assert run("plan", "--budget", "4W", "--json", "--powertrain") == 0
    assert "PowerTrain's choice" in {other["name"] for other in json.loads(capsys.readouterr().out)["others"]}


def test_without_pytorch_powertrain_is_left_out_with_a_note(
    profiled: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert run("plan", "--budget", "4W", "--json", "--powertrain") == 0
    shown = capsys.readouterr()
    assert "PowerTrain is left out" in shown.err
    assert "PowerTrain's choice" not in {other["name"] for other in json.loads(shown.out)["others"]}


def test_measuring_as_you_go_says_why_and_ends_with_a_measured_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("UNDERWATT_STORE", raising=False)
    (tmp_path / "job.py").write_text(JOB)
    ask = ("plan", "--measure", "job.py:tiny", "--device", "virtual:nano", "--budget", "4W")
    assert run(*ask, "--json") == 0
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert found["plan"]["chosen"]["measured"] is True
    assert found["plan"]["chosen"]["power_w"]["expected"] <= 4
    assert 3 <= found["measured_now"] <= 36
    told = " ".join(shown.err.split())
    assert "to learn how time and power behave" in told
    assert "expected to gain" in told
    [oracle] = [other for other in found["others"] if other["known"] == "truth"]
    assert oracle["name"] == "oracle (simulated truth)"
    assert found["plan"]["chosen"]["time_s"]["expected"] <= 1.1 * oracle["time_s"]
    assert run("store", "show", "1", "--json") == 0
    assert len(json.loads(capsys.readouterr().out)["measurements"]) == found["measured_now"]
    assert run(*ask) == 0
    shown = capsys.readouterr()
    assert f"{found['measured_now']} known" in " ".join(shown.err.split())
    assert "oracle (simulated" in " ".join(shown.out.split())
    assert "Watts are those of the module (POM_5V_IN)" in " ".join(shown.out.split())
    assert "judged by that truth" in " ".join(shown.out.split())
    assert run("plan", "--measure", "job.py:tiny", "-d", "virtual:nano", "--budget", "0.5W") == 1
    told = " ".join(capsys.readouterr().err.split())
    assert "smallest power measured so far" in told
    assert "That is without pauses" in told


def test_a_predictor_is_chosen_by_name(
    profiled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    foreign_predictor.install(tmp_path, monkeypatch)
    chosen = {}
    for name in ("underwatt", "lookup", foreign_predictor.NAME):
        assert run("plan", "--budget", "4W", "--predictor", name, "--json") == 0
        chosen[name] = json.loads(capsys.readouterr().out)["plan"]["chosen"]
        assert run("predict", "--predictor", name, "--json") == 0
        assert json.loads(capsys.readouterr().out)["predictions"]
    assert chosen["lookup"]["measured"] is True, "a table knows nothing else"
    assert not chosen["underwatt"]["measured"]
    assert chosen["underwatt"]["time_s"] != chosen[foreign_predictor.NAME]["time_s"]
    measuring = ("plan", "--measure", "job.py:tiny", "-d", "virtual:nano", "--budget", "4W", "--json")
    assert run(*measuring, "--predictor", foreign_predictor.NAME) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["chosen"]["measured"] is True
    assert run("predict", "--validate", "--predictor", foreign_predictor.NAME, "--json") == 0
    assert json.loads(capsys.readouterr().out)["predictor"] == foreign_predictor.NAME
    assert run("plan", "--budget", "4W", "--predictor", "oracle") == 1
    assert "There is no predictor 'oracle'" in capsys.readouterr().err
