"""Write README's results from the records in ``results/``, each with the commit it was made at.

    python benchmarks/write_results.py                        the table between README's two marks, again
    python benchmarks/write_results.py --check                change nothing; fail where README is not up to date
    python benchmarks/write_results.py --make DATA [NAME …]   first make these records again (all: takes long)

DATA is a folder with ``powertrain`` tables and ``zeus`` traces. The words of each line stand here; its figures are
computed from the rows of its records. A line whose record is missing is left out, and README says so in a comment.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean, mean, median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

FOLDER = Path(__file__).resolve().parent
README = FOLDER.parent / "README.md"
RESULTS = FOLDER / "results"
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"

ORIN = "{data}/powertrain/orin_agx_train_"
MOBILENET = f"--reference {ORIN}resnet18.csv --target {ORIN}mobilenetv3.csv"
ZEUS = "--train {data}/zeus/summary_train.csv --power {data}/zeus/summary_power_"
HOLD_BOARDS = ("nano", "tx2-nx", "orin-nano")
# The records behind README, and the commands that make them.
COMMANDS = {
    "predict": f"predict.py {MOBILENET} --samples 10 --repeats 10 --methods underwatt,underwatt-noref --keep",
    "select": f"select.py {MOBILENET} --budgets 17:50:1 --repeats 3 --keep",
    "joint_v100": f"joint.py {ZEUS}v100.csv --keep v100",
    "joint_a40": f"joint.py {ZEUS}a40.csv --keep a40",
    **{
        f"edge_{watts}_{board}": f"edge.py --watts {watts} --boards {board} --keep {watts}_{board}"
        for watts in ("mean", "peak")
        for board in ("nano", "tx2-nx")
    },
    "measure": "measure.py --cases 200 --keep",
    "physics": "physics.py --data {data}/powertrain --keep",
    **{f"hold_{board}": f"hold.py --boards {board} --seeds 3-5,40-42 --keep {board}" for board in HOLD_BOARDS},
    "tune": "tune.py --keep",
    "cold": "cold.py --keep",
    **{f"trainers_{name}": f"trainers.py --trainers {name} --keep {name}" for name in ("lightning", "transformers")},
    # In Flower's environment.
    **{f"fleet_{boards}": f"fleet.py --boards {boards} --keep {boards}" for boards in (6, 20)},
    "fleet_6_times10": "fleet.py --boards 6 --times 10 --stop --methods wait,underwatt,oracle --keep 6_times10",
}
# Made on a borrowed GPU before records held their commit: these are the commits that brought them.
OLDER = {"hold_h200": "46d9c31", "hold_h200_again": "46d9c31"}

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Line:
    """One line of the table: what was asked, the records that answer it, and the answer in words."""

    what: str
    script: str
    records: tuple[str, ...]
    figure: Callable[..., str]  # of the rows of each record, in that order


def predicted(method: str, more: str = "") -> Callable[[Rows], str]:
    """Errors of time and power from ten measurements."""

    def figure(rows: Rows) -> str:
        same = [row for row in rows if row["method"] == method and row["samples"] == 10]
        return (
            "{:.1f}% / {:.1f}%".format(*(median(row[key] for row in same) for key in ("time_mape", "power_mape")))
            + more
        )

    return figure


def selected(rows: Rows) -> str:
    """How much slower than the best mode, how many measured, and how often over the budget."""

    def of(method: str) -> tuple[float, float, float]:
        same = [row for row in rows if row["method"] == method]
        kept = [row["time_penalty_pct"] for row in same if row["over_w"] == 0]
        penalty = math.inf if None in kept else mean(kept)
        return penalty, mean(row["measured"] for row in same), mean(row["over_w"] > 0 for row in same)

    penalty, measured, over = of("underwatt")
    _, others_measured, others_over = of("powertrain")
    how_often = "never over budget" if over == 0 else f"over budget in {over:.0%}"
    budgets = len({row["budget_w"] for row in rows})
    return (
        f"{budgets} budgets: {penalty:.1f}% slower than the best, {measured:.1f} modes measured, {how_often} "
        f"(PowerTrain here: {others_measured:.0f} measured, over in {others_over:.0%})"
    )


def joined(*records: Rows) -> str:
    """Time against the oracle's on each GPU: ours with and without convergence, and all rivals."""

    def over_oracle(method: str, form: str = ".2f") -> str:
        found = [[row["time_over_oracle"] for row in rows if row["method"] == method] for rows in records]
        ratios = (math.inf if None in same else geometric_mean(same) for same in found)
        return _and(f"{ratio:{form}}×" for ratio in ratios)

    measured = mean(row["measured"] for rows in records for row in rows if row["method"] == "cold")
    return (
        f"{over_oracle('cold')} the oracle's time without any convergence run, {measured:.0f} settings measured; "
        f"{over_oracle('underwatt')} with some (the published method, which measures every setting: "
        f"{over_oracle('table')}; the middle of the batch sizes offered, which is close to the best here: "
        f"{over_oracle('default-batch')}; most samples a second: {over_oracle('fastest-epoch')}; largest batch: "
        f"{over_oracle('largest-batch', '.1f')})"
    )


def edged(*records: Rows) -> str:
    """Speedups over the baseline, under mean and under peak watts; finding nothing is a speedup of zero."""

    def speedups(method: str, watts: str) -> list[float]:
        rows = [row for record in records for row in record if row["method"] == method and row["watts"] == watts]
        return [row["speedup"] or 0.0 for row in rows]

    def overall(method: str, watts: str = "mean") -> str:
        found = speedups(method, watts)
        return f"{geometric_mean(found) if min(found) > 0 else 0.0:.2f}×"

    cold = speedups("cold", "mean")
    return (
        f"{overall('cold')} faster than the paper's baseline without any convergence run ({min(cold):.2f} to "
        f"{max(cold):.1f}×), {overall('underwatt')} with proxy runs, the published method {overall('published')}; "
        f"under peak watts {overall('cold', 'peak')}, {overall('underwatt', 'peak')} and {overall('published', 'peak')}"
    )


def measured(rows: Rows) -> str:
    """How often a measurement is as true as it should be, and its time against PowerTrain's."""
    usable = [row for row in rows if row["status"] == "ok"]
    shares = [
        mean(abs(row[key]) <= limit for row in usable) for key, limit in (("step_error", 0.01), ("power_error", 0.015))
    ]
    cost = median(row["cost_s"] / row["powertrain_s"] for row in usable)
    return (
        f"within 1% (time) and 1.5% (power) in {math.floor(100 * min(shares))}% of cases, "
        f"in {cost:.2f} of PowerTrain's time"
    )


def explained(rows: Rows) -> str:
    """Errors that twelve constants leave, and how far off the boards are where nothing was fitted."""
    tables = [row for row in rows if "table" in row]
    time_pct, power_pct = (_range([row[key] for row in tables], ".1f") for key in ("time_mape", "power_mape"))
    idle_pct = max(abs(row["off_pct"]) for row in rows if "idle" in row)
    points_pct = [abs(row[key]) for row in rows for key in ("frames_off_pct", "power_off_pct") if key in row]
    return (
        f"{time_pct}% time, {power_pct}% power on {len(tables)} real tables, {tables[0]['constants']} constants each; "
        f"idle within {idle_pct:.0f}% of published watts, a TX2 from data sheets within {max(points_pct):.0f}%"
    )


def held(*records: Rows) -> str:
    """How many runs held what can be held and said so, and their time against an oracle's."""
    rows = [row for record in records for row in record]
    can = [row for row in rows if row["can_hold"]]
    right = sum(row["said_held"] == row["was_held"] for row in rows)
    ratios = [
        geometric_mean(row["time_over_oracle"] for row in record if row["time_over_oracle"]) for record in records
    ]
    return (
        f"held in {sum(row['was_held'] for row in can)} of {len(can)} runs in which anything could, the verdict right "
        f"in {right} of {len(rows)}; at most {max(row['energy_over_pct'] for row in can):.2f}% of the energy above the "
        f"budget, {max(row['time_over_pct'] for row in can):.1f}% of the time more than 2% above it; "
        f"{_and(f'{ratio:.2f}×' for ratio in ratios)} the time of an oracle that knows everything"
    )


def started_cold(rows: Rows) -> str:
    """Mean times over those of the best fixed setting, of means over seeds, each cell alike."""

    def over_best(method: str) -> list[float]:
        cells = sorted({(row["job"], row["device"]) for row in rows})
        times_s = [
            [
                mean(row["time_s"] for row in rows if (row["job"], row["device"], row["method"]) == (*cell, one))
                for one in (method, "best-fixed")
            ]
            for cell in cells
        ]
        return [mine_s / best_s for mine_s, best_s in times_s]

    def told(method: str) -> str:
        return f"{geometric_mean(over_best(method)):.2f}×"

    cold = over_best("cold")
    return (
        f"{told('cold')} the time of the best fixed setting in hindsight (worst {max(cold):.2f}×), {told('warm')} with "
        f"convergence known; all batch sizes taken to learn alike {told('samples')}, the published method with its "
        f"table {told('published')}, one clock lowered {told('baseline')}"
    )


def trained(*records: Rows) -> str:
    """Times as fast to the target as the same trainer at its own batch size."""

    def ratio(rows: Rows) -> float:
        found = {(row["method"], row["seed"]): row for row in rows if row["job"] == "long"}
        seeds = {seed for _, seed in found}
        return geometric_mean(found["fixed", seed]["time_s"] / found["underwatt", seed]["time_s"] for seed in seeds)

    ratios = _and(f"{ratio(rows):.2f}×" for rows in records)
    return f"{ratios} as fast to the target as at its own batch size and a clock that fits"


def led(*records: Rows) -> str:
    """Times as fast as waiting for the slowest, and against the oracle."""

    def ratio(rows: Rows, other: str) -> float:
        found = {(row["skew"], row["seed"], row["method"]): row["time_s"] for row in rows}
        mine = [key for key in found if key[2] == "underwatt"]
        return geometric_mean(found[(*key[:2], other)] / found[key] for key in mine)

    counts = _and(str(rows[0]["boards"]) for rows in records)
    sooner, oracles = (
        _and(f"{ratio(rows, 'wait'):.1f}×" for rows in records),
        [ratio(rows, "oracle") for rows in records],
    )
    ended = [row for rows in records for row in rows if row["method"] == "underwatt"]
    return (
        f"{counts} boards: {sooner} sooner than waiting for the slowest, {_and(f'{1 / one:.2f}×' for one in oracles)} "
        f"the time of an oracle; {sum(row['reached'] for row in ended)} of {len(ended)} reached the target"
    )


def tuned(rows: Rows) -> str:
    """Times faster at the two tightest budgets, with and without what the published method's table takes."""
    tight_w = sorted({row["budget_w"] for row in rows})[:2]
    tight = [row for row in rows if row["budget_w"] in tight_w]
    baseline, published = (
        _range([row[f"faster_than_{name}"] for row in tight], ".1f") for name in ("baseline", "published")
    )
    alone = _range([row["published_s"] / row["underwatt_s"] for row in tight], ".1f")
    minutes = _range([row["oracle_s"] / 60 for row in rows], ".0f")
    return (
        f"a training that an oracle ends in {minutes} min: {baseline}× faster than the paper's baseline with its "
        f"settings given for free; than the published method {alone}× the training alone, {published}× with the "
        "table that it measures first, which weighs less in a longer training"
    )


def held_on_gpu(*records: Rows) -> str:
    """Mean and worst window against the budget."""
    rows = [row for record in records for row in record if row["method"] == "underwatt"]
    below = _range([-row["mean_over_pct"] for row in rows], ".1f")
    worst = max(row["worst_5s_over_pct"] for row in rows)
    return f"mean {below}% below the budget; worst window of 5 s {worst:.2f}% above"


LINES = (
    Line(
        "time and power of 4,300 unmeasured modes from 10 measured ones, MobileNetV3 on AGX Orin with ResNet-18 as "
        "reference",
        "predict",
        ("predict",),
        predicted("underwatt", " (PowerTrain, published, from 50: 15.1% / 5.6%)"),
    ),
    Line("the same without any reference", "predict", ("predict",), predicted("underwatt-noref")),
    Line("fastest mode within a budget, measuring as you go", "select", ("select",), selected),
    Line(
        "batch size and power limit together, Zeus' V100 and A40 traces",
        "joint",
        ("joint_v100", "joint_a40"),
        joined,
    ),
    Line(
        "the paper's scenarios, four networks on *simulated* Nano and TX2 NX, convergence from real trainings",
        "edge",
        tuple(name for name in COMMANDS if name.startswith("edge_")),
        edged,
    ),
    Line("a measurement, on *simulated* boards where the truth is known", "measure", ("measure",), measured),
    Line("the physics of the boards, fitted to whole tables", "physics", ("physics",), explained),
    Line(
        "a budget that changes, with heat and another process, on *simulated* boards, search included",
        "hold",
        tuple(name for name in COMMANDS if name.startswith("hold_")),
        held,
    ),
    Line("`tune` with an empty store on a *simulated* Nano at tight budgets", "tune", ("tune",), tuned),
    Line(
        "time to a target from an empty store, three small networks really trained on three *simulated* boards",
        "cold",
        ("cold",),
        started_cold,
    ),
    Line(
        "Lightning's and Transformers' trainers on a *simulated* Nano at a tight budget, search included",
        "trainers",
        ("trainers_lightning", "trainers_transformers"),
        trained,
    ),
    Line(
        "a fleet of unlike *simulated* boards, each within its own watts, one of them lost, real learning",
        "fleet",
        ("fleet_6",),
        led,
    ),
    Line("the same where a step costs ten times the work", "fleet", ("fleet_6_times10",), led),
    Line("the same with more boards", "fleet", ("fleet_20",), led),
    Line(
        "250, 350 and 450 W on a real H200 by batch size and pauses alone, nothing set, two networks",
        "hold_gpu",
        ("hold_h200", "hold_h200_again"),
        held_on_gpu,
    ),
)


def _and(words: Iterable[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def _range(values: Sequence[float], form: str) -> str:
    return "–".join(dict.fromkeys((format(min(values), form), format(max(values), form))))


SIMULATED = (
    "*Simulated*: the boards' physics and the predictor's are written apart, yet of one family (whichever of "
    "launching, loading, computing and moving memory is slowest sets the pace), so these lines are kinder to our "
    "predictions than a board would be; the lines of real tables are not."
)


def table(results: Path) -> str:
    """README's table, what its simulated lines are worth, and a comment for each line that has no record."""
    lines = ["| what | figure | printed by | commit |", "|---|---|---|---|"]
    missing = []
    for line in LINES:
        absent = [name for name in line.records if not (results / f"{name}.json").exists()]
        if absent:
            missing.append(f"<!-- no line for {line.script}.py ({line.what}): no record {', '.join(absent)} -->")
            continue
        records = [json.loads((results / f"{name}.json").read_text(encoding="utf-8")) for name in line.records]
        commits = (record.get("commit") or OLDER[name] for name, record in zip(line.records, records, strict=True))
        figure = line.figure(*(record["rows"] for record in records))
        lines.append(
            f"| {line.what} | {figure} | `benchmarks/{line.script}.py` | {', '.join(dict.fromkeys(commits))} |"
        )
    return "\n".join([*lines, "", SIMULATED, *(["", *missing] if missing else [])])


def filled(text: str, results: Path) -> str:
    """README with its table made again."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"README has no {BEGIN} … {END} to write between.")
    return f"{head}{BEGIN}\n\n{table(results)}\n\n{END}{tail}"


def make(data: str, names: Sequence[str]) -> None:
    """Run the benchmarks that keep these records."""
    if unknown := sorted(set(names) - set(COMMANDS)):
        raise SystemExit(f"no record {', '.join(unknown)}: choose from {', '.join(COMMANDS)}")
    for name in names or COMMANDS:
        script, *words = shlex.split(COMMANDS[name].format(data=shlex.quote(data)))
        print(f"{name}: {script} {' '.join(words)}", flush=True)
        subprocess.run([sys.executable, str(FOLDER / script), *words], check=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail where README is not up to date, and change nothing")
    parser.add_argument("--make", nargs="+", metavar=("DATA", "NAME"), help="make these records again first")
    parser.add_argument("--readme", type=Path, default=README, help=argparse.SUPPRESS)
    parser.add_argument("--results", type=Path, default=RESULTS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.make:
        make(options.make[0], options.make[1:])
    text = options.readme.read_text(encoding="utf-8")
    wanted = filled(text, options.results)
    if options.check:
        if text != wanted:
            print(
                "README's results are not those of benchmarks/results: run benchmarks/write_results.py", file=sys.stderr
            )
        return int(text != wanted)
    options.readme.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
