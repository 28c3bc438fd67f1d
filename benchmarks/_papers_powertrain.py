"""The claims of PowerTrain (FGCS 2024) for ``papers.py``: errors of its networks, and what they choose."""

from __future__ import annotations

import math
import sys
from statistics import mean, median
from typing import TYPE_CHECKING, Any

import numpy as np

from _repeats import read_profile
from predict import Method, PublishedPowerTrain, Underwatt, evaluate, mape
from select_modes import Bench, run
from underwatt.drivers.virtual.board_specs import BOARDS
from underwatt.predict.base import observe
from underwatt.rivals.predictors import PowerTrain, saved_reference

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from underwatt.records import Profile

Row = dict[str, Any]
DRAWN = (10.0, 90.0)  # percentiles over the draws of modes


def claim(
    paper: str, what: str, published: str, ours: float, unit: str, more: Mapping[str, float] | None = None
) -> Row:
    """One line: what is claimed, what the paper says, and what was found, with its interval where there is one."""
    found = dict.fromkeys(("mean", "low", "high")) | dict(more or {})
    return {"paper": paper, "claim": what, "published": published, "ours": ours, "unit": unit, **found}


MOBILE, RESNET, NANO = (f"powertrain/orin_{name}.csv" for name in
                        ("agx_train_mobilenetv3", "agx_train_resnet18", "nano_train_resnet18"))  # fmt: skip
# Errors of time and power, in percent, by the number of modes that were measured.
PUBLISHED_ERRORS = {
    "MobileNetV3 on AGX Orin": {10: (27.5, 13.4), 20: (19.7, 8.3), 30: (17.3, 6.6), 50: (15.1, 5.6), 100: (11.9, 4.3)},
    "ResNet-18 on Orin Nano": {50: (7.9, 6.0)},
}
TRANSFERRED = "PowerTrain transferred"
PUBLISHED_EVERY_MODE = (8.1, 3.6)
PUBLISHED_CHOICES = {"over budget": "9–41", "over by more than 1 W": "3–27", "time lost, median": "0–2"}
BUDGETS_W = range(17, 51)
CHOOSERS = {
    "powertrain": "PowerTrain",
    "powertrain-scratch": "PowerTrain from scratch",
    "underwatt": "Underwatt",
    "vendor": "the vendor's modes",
    "random50": "best of 50 random modes",
}


def powertrain_claims(data: Path, draws: int = 10, repeats: int = 3) -> list[Row]:
    """Every claim of the second paper."""
    mobile, resnet, nano = (read_profile(data / name) for name in (MOBILE, RESNET, NANO))
    rows, transfers_s = [], []
    for target, (whose, published) in zip((mobile, nano), PUBLISHED_ERRORS.items(), strict=True):
        for count, errors in published.items():
            for name, method in _methods(resnet, relative=target is nano).items():
                found = [evaluate(name, method, target, count, draw) for draw in range(draws)]
                said = errors if name == TRANSFERRED else None
                transfers_s += [row.fit_s for row in found] if name == TRANSFERRED else []
                rows += _error_claims(
                    f"{whose}, {count} modes, {name}", [(row.time_mape, row.power_mape) for row in found], said
                )
                print(f"{rows[-2]['claim']}: {rows[-2]['ours']:.1f} / {rows[-1]['ours']:.1f}", file=sys.stderr)
    seen, everything = observe(mobile.measurements), PowerTrain().pretrain(mobile)
    fitted = everything.predict(seen.settings)
    off = (mape(fitted.log_step_s - seen.log_step_s), mape(fitted.log_power_w - seen.log_power_w))
    rows += _error_claims("MobileNetV3 on AGX Orin, trained on every mode", [off], PUBLISHED_EVERY_MODE)
    rows.append(claim("pt", "a transfer, the reference's networks kept, median", "< 30", median(transfers_s), "s"))
    return rows + choices(mobile, resnet, repeats)


def _methods(reference: Profile, *, relative: bool) -> dict[str, Method]:
    """Who predicts; on an Orin Nano PowerTrain's authors make relative errors the loss."""
    kept = saved_reference()
    methods: dict[str, Method] = {
        TRANSFERRED: PublishedPowerTrain(kept, relative=relative),
        "PowerTrain from scratch": PublishedPowerTrain(None, relative=relative),
        "Underwatt": Underwatt([reference]),
        "Underwatt without reference": Underwatt(()),
    }
    return methods | ({"PowerTrain, squared errors": PublishedPowerTrain(kept)} if relative else {})


def _error_claims(what: str, found: Sequence[tuple[float, float]], published: tuple[float, float] | None) -> list[Row]:
    rows = []
    for at, name in enumerate(("time", "power")):
        values = [pair[at] for pair in found]
        low, high = np.percentile(values, DRAWN).tolist()
        said = "–" if published is None else f"{published[at]:g}"
        more = {"mean": mean(values), "low": low, "high": high}
        rows.append(claim("pt", f"error of {name}, {what}", said, median(values), "%", more))
    return rows


def choices(target: Profile, reference: Profile, repeats: int) -> list[Row]:
    """What each method chooses within each budget that binds."""
    bench = Bench([reference], target, saved_reference(), BOARDS["orin-agx"].stock_modes)
    budgets = [float(w) for w in BUDGETS_W if w <= bench.truth.drawn_w.max()]
    print(
        f"budgets {budgets[0]:g} to {budgets[-1]:g} W: the table's largest power is {bench.truth.drawn_w.max():.1f} W"
    )
    rows = []
    for method, name in CHOOSERS.items():
        found = run(bench, budgets, [method], 1 if method in ("vendor", "underwatt") else repeats)
        lost = [row.time_penalty_pct for row in found if row.over_w == 0]
        said = PUBLISHED_CHOICES if method == "powertrain" else {}
        figures = {
            "over budget": 100 * mean(row.over_w > 0 for row in found),
            "over by more than 1 W": 100 * mean(row.over_w > 1 for row in found),
            "time lost, median": median(lost) if lost else math.nan,
        }
        for what, value in figures.items():
            more = {}
            if what == "time lost, median" and lost:
                low, high = np.percentile(lost, DRAWN).tolist()
                more = {"mean": mean(lost), "low": low, "high": high}
            rows.append(claim("pt", f"{name}: {what}", said.get(what, "–"), value, "%", more))
        rows.append(claim("pt", f"{name}: modes measured", "50" if said else "–", mean(r.measured for r in found), ""))
    return rows
