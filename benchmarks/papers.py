"""What the two papers claim, beside what is found here.

    python benchmarks/papers.py at --json OUT          "Accelerated Training on Low-Power Edge Devices"
    python benchmarks/papers.py pt --json OUT          PowerTrain, on the tables that its authors published
    python benchmarks/papers.py texts [--json FILE]    trains what ``at`` needs to compare proxies of text

``at`` takes the scenarios of ``edge.py``: four networks on a *simulated* Nano and TX2 NX, samples to the target from
real trainings (``record_convergence.py``). Whoever chooses knows every setting's true time and watts and the proxy's
mean samples, and is judged by the target's, so that differences are those of the knobs and not of searching; what
searching gets is ``edge.py``'s. Intervals (90%) are over the seeds of the trainings, proxy's and target's drawn anew
with replacement 200 times: they say what few noisy trainings leave open, not that boards are simulated.

baseline     the largest batch that fits, at the highest GPU clock that fits, all else at its highest: the clock alone
batch only   the best batch size with every knob at its highest
joint        the best batch size and GPU clock, all else at its highest: the paper's method
all knobs    the best batch size and CPU cores, CPU, GPU and memory clock

``pt`` has the errors and the choices of PowerTrain's networks (transferred, and from scratch), of Underwatt, and of the
vendor's modes (the rows of the table nearest to them). Errors are of all rows that were not measured; ours are medians,
means and the middle 80% of the draws of modes. Budgets above the largest power of the table bind nothing and are left
out; penalties are of the choices that keep the budget.

Each row has what the paper says, where it says anything, and what was found; the last lines say why they differ.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean, mean
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.stats import spearmanr

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from _papers_powertrain import Row, claim, powertrain_claims
from _table import Column, add_output, as_table, write
from underwatt.budget import Watts
from underwatt.errors import UnderwattError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from edge import Case

FOLDER = Path(__file__).resolve().parent
RECORDS = (FOLDER / "results" / "convergence_h200.json", FOLDER / "results" / "convergence_texts.json")
DATA = Path(os.environ.get("UNDERWATT_DATA") or FOLDER.parent.parent / "shared" / "data")
RESAMPLES = 200
WITHIN = (5.0, 95.0)  # percentiles over the seeds

Samples = dict[int, float]  # to the target by batch size; inf where it is never reached


# "Accelerated Training on Low-Power Edge Devices".

RULES = ("baseline", "batch only", "joint", "all knobs")
WATTS = (Watts.PEAK, Watts.MEAN)  # the paper bounds the peak
PAPERS_PAIR = (64, 128)  # batch sizes that it compares at one limit


@dataclass(frozen=True)
class Offer:
    """What one budget leaves to each rule: by batch size, the least time of a sample, and the watts of that setting."""

    board: str
    network: str
    watts: Watts
    budget_w: float
    by_rule: Mapping[str, Mapping[int, tuple[float, float]]]


def offer_of(case: Case) -> Offer:
    from underwatt.rivals.compare import Table, by_clock_alone, largest_batch

    world, sizes = case.world, case.world.settings.batch_size
    sample_s = world.time_s / np.array([world.target_samples[int(size)] for size in sizes])
    clocks = by_clock_alone(world.settings)
    highest = np.all(world.settings.values == world.settings.values.max(axis=0), axis=1)
    first = largest_batch(Table(world.settings, world.time_s, sample_s, case.drawn_w), case.budget_w)
    rows = {"batch only": highest, "joint": clocks, "all knobs": np.ones_like(clocks)}
    rows["baseline"] = np.arange(len(clocks)) == first
    by_rule: dict[str, dict[int, tuple[float, float]]] = {}
    for rule in RULES:
        fitting = rows[rule] & (case.drawn_w <= case.budget_w)
        by_rule[rule] = {}
        for size in np.unique(sizes[fitting]):
            at = int(np.argmin(np.where(fitting & (sizes == size), sample_s, np.inf)))
            by_rule[rule][int(size)] = (float(sample_s[at]), float(world.power_w[at]))
    return Offer(world.board, world.model, case.budget.watts, case.budget_w, by_rule)


@dataclass(frozen=True)
class Took:
    """What a choice comes to: its batch size, and time and energy to the target."""

    size: int
    time_s: float
    energy_j: float


def choose(offer: Offer, rule: str, believed: Samples, true: Samples) -> Took | None:
    """The best of what a rule is offered by the samples it believes in, judged by the true ones."""
    found = offer.by_rule[rule]
    known = [size for size in found if math.isfinite(found[size][0] * believed[size])]
    if not known:
        return None
    size = min(known, key=lambda one: found[one][0] * believed[one])
    time_s = found[size][0] * true[size]
    return Took(size, time_s, time_s * found[size][1])


class Trainings:
    """Samples to the target by batch size of every recorded training, and its means over some of the seeds."""

    def __init__(self, record: Mapping[str, Any]) -> None:
        self.seeds: list[int] = record["complete_seeds"]
        self.curves: dict[tuple[str, str], dict[int, list[list[list[float]]]]] = {}
        self.found: dict[tuple[str, str], dict[int, dict[int, float]]] = {}
        for run in record["runs"]:
            if run["seed"] in self.seeds:
                key, size = (run["model"], run["role"]), run["batch_size"]
                samples = math.inf if run["samples"] is None else run["samples"]
                self.found.setdefault(key, {}).setdefault(size, {})[run["seed"]] = samples
                self.curves.setdefault(key, {}).setdefault(size, []).append(run["curve"])

    def samples(self, network: str, role: str, seeds: Sequence[int]) -> Samples:
        """The mean over these seeds; one that stands twice counts twice."""
        return {size: mean(by[seed] for seed in seeds) for size, by in self.found[network, role].items()}

    def score(self, network: str, role: str, size: int, samples: float) -> float:
        """The mean score of the recorded trainings after so many samples, the last one where they ended before."""
        curves = self.curves[network, role][size]
        return mean(float(np.interp(samples, *np.array(curve, float).T)) for curve in curves)


def at_figures(offers: Sequence[Offer], trainings: Trainings, seeds: tuple[list[int], list[int]]) -> dict[str, float]:
    """Every figure by its name, for some seeds of the proxy's and of the target's trainings."""
    figures: dict[str, float] = {}
    networks = list(dict.fromkeys(offer.network for offer in offers))
    proxy = {name: trainings.samples(name, "proxy", seeds[0]) for name in networks}
    target = {name: trainings.samples(name, "target", seeds[1]) for name in networks}
    for kind in dict.fromkeys(offer.watts for offer in offers):
        same = [offer for offer in offers if offer.watts is kind]
        took = {
            rule: [choose(offer, rule, proxy[offer.network], target[offer.network]) for offer in same] for rule in RULES
        }
        first = took["baseline"]
        for rule in RULES[1:]:
            pairs = [(a, b) for a, b in zip(first, took[rule], strict=True) if a and b]
            figures[f"{kind.value} {rule} found"] = len(pairs)
            figures[f"{kind.value} {rule} mean"] = geometric_mean(a.time_s / b.time_s for a, b in pairs)
            figures[f"{kind.value} {rule} most"] = max(a.time_s / b.time_s for a, b in pairs)
            figures[f"{kind.value} {rule} energy"] = geometric_mean(b.energy_j / a.energy_j for a, b in pairs)
        small, large = PAPERS_PAIR
        gains = [
            offer.by_rule["joint"][large][0] * target[offer.network][large]
            / (offer.by_rule["joint"][small][0] * target[offer.network][small])
            for offer in same
            if {small, large} <= set(offer.by_rule["joint"])
        ]  # fmt: skip
        figures[f"{kind.value} pair"] = max(gains, default=math.nan)
        by_target = [choose(offer, "joint", target[offer.network], target[offer.network]) for offer in same]
        behind = [a.time_s / b.time_s for a, b in zip(took["joint"], by_target, strict=True) if a and b]
        figures[f"{kind.value} optimal"], figures[f"{kind.value} optimal worst"] = geometric_mean(behind), max(behind)
        figures[f"{kind.value} score"] = _ahead(same, first, took["joint"], trainings)
        for name in networks:
            own = [one for offer, one in zip(same, behind, strict=True) if offer.network == name]
            figures[f"{kind.value} {name} wrong"], figures[f"{kind.value} {name} worst"] = geometric_mean(own), max(own)
    for name in networks:
        sizes = sorted(set(proxy[name]) & set(target[name]))
        figures[f"{name} rank"] = float(spearmanr(*([by[s] for s in sizes] for by in (proxy[name], target[name])))[0])
    return figures


def _ahead(offers: Sequence[Offer], first: Sequence[Took | None], then: Sequence[Took | None], by: Trainings) -> float:
    """Score of the joint choice less that of the baseline when the joint one reaches its target, in points, mean."""
    ahead = []
    for offer, slow, fast in zip(offers, first, then, strict=True):
        if slow and fast and math.isfinite(fast.time_s):
            samples = {one.size: fast.time_s / offer.by_rule[rule][one.size][0] for rule, one in
                       (("baseline", slow), ("joint", fast))}  # fmt: skip
            scores = [by.score(offer.network, "target", one.size, samples[one.size]) for one in (fast, slow)]
            ahead.append(100 * (scores[0] - scores[1]))
    return mean(ahead)


AT_CLAIMS = (
    ("{w} watts: joint over the baseline, at most", "{w} joint most", {"peak": "up to 2.3–2.4"}, "×"),
    ("{w} watts: joint over the baseline, geometric mean", "{w} joint mean", {}, "×"),
    ("{w} watts: all knobs over the baseline, at most", "{w} all knobs most", {}, "×"),
    ("{w} watts: all knobs over the baseline, geometric mean", "{w} all knobs mean", {}, "×"),
    ("{w} watts: batch only over the baseline, where it fits at all, geometric mean", "{w} batch only mean", {}, "×"),
    ("{w} watts: budgets that batch only can keep", "{w} batch only found", {}, "of {n}"),
    ("{w} watts: batch 64 over 128, each at its highest clock, at most", "{w} pair", {"peak": "1.32"}, "×"),
    ("{w} watts: energy of joint over the baseline's", "{w} joint energy", {"peak": "less"}, "×"),
    ("{w} watts: energy of all knobs over the baseline's", "{w} all knobs energy", {}, "×"),
    ("{w} watts: joint by the proxy over joint by the target itself", "{w} optimal", {"peak": "close to 1"}, "×"),
    ("{w} watts: the same, worst", "{w} optimal worst", {}, "×"),
    ("{w} watts: score of joint above the baseline's after equal time", "{w} score", {"peak": "equal"}, "points"),
)  # fmt: skip


def at(record: Mapping[str, Any], texts: Mapping[str, Any] | None, resamples: int = RESAMPLES) -> list[Row]:
    """Every claim of the first paper, and why its largest figure is reached here or is not."""
    import edge

    proxies = {name: edge.convergence(dict(record), name, "proxy") for name in record["lr_at_128"]}
    offers = []
    for network, cost in edge.costs().items():
        for board in edge.BOARDS:
            world = edge.make_world(board, network, cost, edge.convergence(dict(record), network, "target"))
            offers += [offer_of(case) for kind in WATTS for case in edge.cases_of(world, proxies[network], kind)]
    trainings = Trainings(record)
    figures = at_figures(offers, trainings, (trainings.seeds, trainings.seeds))
    rng = np.random.default_rng(0)

    def drawn() -> list[int]:
        return [int(seed) for seed in rng.choice(trainings.seeds, len(trainings.seeds))]

    again = [at_figures(offers, trainings, (drawn(), drawn())) for _ in range(resamples)]
    bars = {name: _bars([one[name] for one in again]) for name in figures}
    rows = []
    for kind in WATTS:
        number = sum(offer.watts is kind for offer in offers)
        for what, name, published, unit in AT_CLAIMS:
            key, said = name.format(w=kind.value), published.get(kind.value, "–")
            unit = unit.format(n=number)
            rows.append(claim("at", what.format(w=kind.value), said, figures[key], unit, bars[key]))
    for network in dict.fromkeys(offer.network for offer in offers):
        key = f"{network} rank"
        rows.append(claim("at", f"{network}: rank correlation of proxy and target", "–", figures[key], "", bars[key]))
        for what, end in (("mean", "wrong"), ("worst", "worst")):
            key = f"peak {network} {end}"
            said = f"{network}: time by the proxy's choice over the target's own, {what}"
            rows.append(claim("at", said, "–", figures[key], "×", bars[key]))
    if texts is not None:
        rows += text_claims(Trainings(texts))
    print(why(offers, trainings, bars["peak joint most"]))
    return rows


def _bars(values: Sequence[float]) -> dict[str, float]:
    finite = [value for value in values if math.isfinite(value)]
    return dict(zip(("low", "high"), np.percentile(finite, WITHIN).tolist(), strict=True)) if finite else {}


def why(offers: Sequence[Offer], trainings: Trainings, bars: Mapping[str, float]) -> str:
    """Where the largest speed-ups come from: fewer samples, or quicker ones; and what is missing to the paper's 2.4."""
    lines = []
    target = {name: trainings.samples(name, "target", trainings.seeds) for name in {o.network for o in offers}}
    proxy = {name: trainings.samples(name, "proxy", trainings.seeds) for name in target}
    for rule in RULES[2:]:
        best: tuple[float, str] = (0.0, "")
        reached = of = 0
        for offer in (one for one in offers if one.watts is Watts.PEAK):
            first = choose(offer, "baseline", proxy[offer.network], target[offer.network])
            then = choose(offer, rule, proxy[offer.network], target[offer.network])
            if first is None or then is None:
                continue
            ratio, fewer = (
                first.time_s / then.time_s,
                target[offer.network][first.size] / target[offer.network][then.size],
            )
            of, reached = of + 1, reached + (ratio >= 2.4)
            best = max(best, (ratio, f"{offer.network} on {offer.board} at {offer.budget_w:g} W, batch {then.size} "
                              f"instead of {first.size}: {fewer:.2f}× fewer samples, each {ratio / fewer:.2f}× as "
                              "quick"))  # fmt: skip
        lines.append(f"{rule}: 2.4× or more at {reached} of {of} peak budgets; most {best[0]:.2f}×, {best[1]}.")
    needs = ", ".join(f"{name} {by[max(by)] / min(by.values()):.2f}×" for name, by in sorted(target.items()))
    lines.append(
        f"The largest batch needs this many times the samples of the best one: {needs}. With clock and batch alone the "
        "speed-up is this factor, or what is left of it after the smaller batch has used the GPU less well: 2.4× needs "
        "a training that learns that much worse at 128, or a board on which the small batch may run that much faster "
        "within the same watts. The seeds alone leave open a largest speed-up of the joint choice from "
        f"{bars['low']:.2f}× to {bars['high']:.2f}×. Targets, seeds and sensors of the paper are not public, and our "
        "boards are simulated."
    )
    return "\nWhy 2.4× is reached, or is not\n" + "\n".join(lines)


# Several proxies for one target: real texts, a small transformer, on any CPU.

TEXT_FILES = {
    "target": ("austen_sense.txt",),
    "same author": ("austen_persuasion.txt",),
    "Shakespeare": ("tinyshakespeare.txt",),
    "WikiText": ("wikitext2_valid.txt",),
}
TEXT_SIZES = (4, 8, 16, 32, 64, 128)
TEXT_SEEDS = (0, 1)
TEXT_EVERY, TEXT_TESTED, TEXT_LIMIT = 256, 128, 12_288
TEXT_CALIBRATION, TEXT_FRACTION = 4_096, 0.95
TEXT_NETWORK = "small char_transformer"


def train_texts(data: Path, path: Path, limit_s: float) -> dict[str, Any]:
    """Train what is not in the record yet, for so long; asked again it goes on."""
    import torch

    from convergence_data import text_split
    from convergence_lane import Lane, Model, Task, samples_to, smoothed
    from models.transformer import CharTransformer

    torch.set_num_threads(1)
    began_s = time.monotonic()
    record = json.loads(path.read_text()) if path.exists() else {"calibration": {}, "runs": []}
    record |= {"what": "samples to target by batch size, small transformer, each text a role of its own, on a CPU"}
    model = Model(TEXT_NETWORK, lambda classes: CharTransformer(classes, dim=32, layers=1, heads=2), "text", lr=4e-3)
    cpu = torch.device("cpu")

    def trained(role: str, size: int, seed: int, limit: int, target: float = math.inf) -> Any:
        split = text_split([data / "text" / name for name in TEXT_FILES[role]], cpu)
        lane = Lane(Task(model, role, size, seed, limit, target), split, TEXT_EVERY, TEXT_TESTED, cpu)
        while not lane.finished:
            lane.poll()
        return lane

    for seed in TEXT_SEEDS:
        for role in TEXT_FILES:
            if role not in record["calibration"]:
                lane = trained(role, 32, 1000, TEXT_CALIBRATION)
                record["calibration"][role] = max(score for _, score in smoothed(lane.curve))
            target = TEXT_FRACTION * record["calibration"][role]
            for size in TEXT_SIZES:
                done = {(run["role"], run["batch_size"], run["seed"]) for run in record["runs"]}
                if (role, size, seed) in done or time.monotonic() - began_s > limit_s:
                    continue
                lane = trained(role, size, seed, TEXT_LIMIT, target)
                samples = samples_to(smoothed(lane.curve), target)
                rounded = [(at, round(score, 4)) for at, score in lane.curve]
                found = {"model": TEXT_NETWORK, "role": role, "batch_size": size, "seed": seed, "target": target}
                found |= {"samples": samples if math.isfinite(samples) else None, "curve": rounded}
                record["runs"].append(found)
                complete = [s for s in TEXT_SEEDS if sum(run["seed"] == s for run in record["runs"])
                            == len(TEXT_FILES) * len(TEXT_SIZES)]  # fmt: skip
                record |= {"complete_seeds": complete, "lr_at_128": {TEXT_NETWORK: model.lr}}
                path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
                print(f"{role} batch {size} seed {seed}: {samples:,.0f} samples", file=sys.stderr, flush=True)
    return dict(record)


def text_claims(trainings: Trainings) -> list[Row]:
    """How well each text stands in for another: the order of batch sizes, and how much worse the largest one learns."""
    rows = []
    target = trainings.samples(TEXT_NETWORK, "target", trainings.seeds)
    for role in TEXT_FILES:
        ranks, worse, lost = [], [], []
        for seeds in [trainings.seeds, *([seed] for seed in trainings.seeds)]:
            found = trainings.samples(TEXT_NETWORK, role, seeds)
            ranks.append(float(spearmanr([found[s] for s in TEXT_SIZES], [target[s] for s in TEXT_SIZES])[0]))
            worse.append(found[max(found)] / min(found.values()))
            lost.append(target[min(found, key=found.__getitem__)] / min(target.values()))
        figures = {"rank correlation with the target": (ranks, ""), "samples at 128 over the best": (worse, "×")}
        figures["the target's samples at its best batch over the best"] = (lost, "×")
        for what, (values, unit) in figures.items():
            if role != "target" or values is worse:
                first, *each = values
                bars = {"low": min(each), "high": max(each)}
                rows.append(claim("at", f"text, {role}: {what}", "–", first, unit, bars))
    return rows


COLUMNS = (
    Column("claim"),
    Column("published"),
    Column("ours", form=".2f"),
    Column("mean", form=".2f"),
    Column("low", form=".2f"),
    Column("high", form=".2f"),
    Column("unit"),
)


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paper", choices=("at", "pt", "texts"))
    parser.add_argument("--data", type=Path, default=DATA, help="folder with powertrain/ and text/")
    parser.add_argument("--record", type=Path, default=RECORDS[0], help="at: made by record_convergence.py")
    parser.add_argument("--limit-s", type=float, default=math.inf, help="texts: begin no training after so long")
    add_output(parser)
    options = parser.parse_args(given)
    try:
        if options.paper == "texts":
            train_texts(options.data, options.json or RECORDS[1], options.limit_s)
            return 0
        if options.paper == "at":
            texts = json.loads(RECORDS[1].read_text()) if RECORDS[1].exists() else None
            rows = at(json.loads(options.record.read_text()), texts)
        else:
            rows = powertrain_claims(options.data)
    except (UnderwattError, OSError, ValueError) as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 2
    print("\n" + as_table(rows, COLUMNS))
    write(f"papers_{options.paper}", rows, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
