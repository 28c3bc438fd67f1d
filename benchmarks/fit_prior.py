"""The prior of samples to target by batch size: fitted to recorded trainings, and judged by leaving each of them out.

    python benchmarks/fit_prior.py --train summary_train.csv [--write]

What each training's own runs say of B_noise and B_small (``convergence/prior.py``) is printed, and written there with
``--write``. Trainings: the four networks of ``record_convergence.py`` (the mean of what their proxy and target runs
say, as sure as one of them) and each workload of a Zeus train trace, at the hardest target that nine in ten of its runs
reach (as in ``joint.py``).

Left out, one at a time: how far the prior of all others is from what the training's own runs say, in powers of two and
in standard deviations. Then, whether something that can be seen at once predicts B_noise: the log likelihood of the
trainings that were left out, summed, with and without it. More is better; what gives no more is not used.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from pathlib import Path
from statistics import mean

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _table import Column, add_output, as_table, write
from edge import RECORD, convergence
from joint import proxy_and_hard
from underwatt.convergence import prior as shipped
from underwatt.convergence.curve import fit_convergence
from underwatt.convergence.prior import VAGUE, Evidence, shape_prior
from underwatt.store.exchange import read_file

# What could be seen before each training: optimizer with the square root rule, text or speech, parameters, samples in
# the data set, and the batch size that its authors use. Approximate where a paper only names them.
SEEN = {
    "resnet18": (1, 0, 11.2e6, 4800, 128),
    "mobilenetv2": (1, 0, 2.3e6, 4800, 128),
    "efficientvit": (1, 0, 2e6, 4800, 128),
    "char_transformer": (1, 1, 4.8e6, 33_000, 128),
    "cifar100": (0, 0, 1.4e6, 50_000, 1024),
    "librispeech": (1, 1, 50e6, 281_000, 192),
    "squad": (1, 1, 110e6, 88_000, 32),
}
SEEN_NAMES = ("adaptive, √b", "text or speech", "model size", "data set size", "own batch size")
SLOPE_STD = 1.0  # of B_noise in powers of two, for each standard deviation of what was seen, before anything is known
LINE = 'Evidence("{}", {:.2f}, {:.2f}, {:.2f}, {:.2f}),'


def own_evidence(train: Path, record: Path) -> list[Evidence]:
    """What each training's own runs say."""
    recorded = json.loads(record.read_text())
    found = []
    for name in recorded["lr_at_128"]:
        roles = [fit_convergence(convergence(recorded, name, role)).evidence(name) for role in ("target", "proxy")]
        parts = [mean(getattr(one, part) for one in roles) for part in ("noise", "small")]
        stds = [math.sqrt(mean(getattr(one, f"{part}_std") ** 2 for one in roles)) for part in ("noise", "small")]
        found.append(Evidence(name, parts[0], stds[0], parts[1], stds[1]))
    for workload, runs in read_file(train).convergence:
        targets = proxy_and_hard(runs)
        if targets is not None:
            fitted = fit_convergence(runs, targets[1], resolution_samples=1.0)
            found.append(fitted.evidence(workload.name.split()[0]))
    return found


def left_out(rows: list[Evidence]) -> list[dict[str, object]]:
    """Each training beside the prior of all others."""
    table = []
    for one in rows:
        others = shape_prior([row for row in rows if row.workload != one.workload], without=one.workload)
        off = one.noise - others.noise
        table.append(
            {
                "workload": one.workload,
                "noise": one.noise,
                "noise_std": one.noise_std,
                "others": others.noise,
                "others_std": others.noise_std,
                "off": off,
                "stds": off / math.hypot(one.noise_std, others.noise_std),
                "small": one.small,
                "small_std": one.small_std,
                "others_small": others.small,
                "others_small_std": others.small_std,
            }
        )
    return table


def log_likelihood(rows: list[Evidence], seen: np.ndarray | None) -> float:
    """Of B_noise of each training by all others, with or without a slope for what could be seen."""
    total = 0.0
    for at, one in enumerate(rows):
        x = np.ones((len(rows), 1)) if seen is None else np.column_stack([np.ones(len(rows)), seen])
        prior_mean, prior_precision = np.zeros(x.shape[1]), np.full(x.shape[1], SLOPE_STD**-2)
        prior_mean[0], prior_precision[0] = VAGUE.noise, VAGUE.noise_std**-2
        others = [row for row in range(len(rows)) if row != at]
        variance = np.array([row.noise_std**2 + shipped._USUAL_VARIATION**2 for row in rows])
        precision = np.diag(prior_precision) + (x[others].T / variance[others]) @ x[others]
        values = np.array([row.noise for row in rows])
        centre = np.linalg.solve(
            precision, prior_precision * prior_mean + (x[others].T / variance[others]) @ values[others]
        )
        expected, spread = x[at] @ centre, variance[at] + x[at] @ np.linalg.solve(precision, x[at])
        total -= 0.5 * ((one.noise - expected) ** 2 / spread + math.log(2 * math.pi * spread))
    return float(total)


def worth(rows: list[Evidence]) -> list[dict[str, object]]:
    """Whether anything that can be seen at once predicts B_noise."""
    known = [row for row in rows if row.workload in SEEN]
    columns = np.array([SEEN[row.workload] for row in known], float)
    columns[:, 2:] = np.log2(columns[:, 2:])
    columns = (columns - columns.mean(0)) / columns.std(0)
    table: list[dict[str, object]] = [{"seen": "nothing", "log_likelihood": log_likelihood(known, None)}]
    for name, column in zip(SEEN_NAMES, columns.T, strict=True):
        table.append({"seen": name, "log_likelihood": log_likelihood(known, column)})
    return table


def rewrite(rows: list[Evidence]) -> None:
    path = Path(shipped.__file__)
    lines = [f"    {LINE.format(r.workload, r.noise, r.noise_std, r.small, r.small_std)}" for r in rows]
    text = re.sub(
        r"KNOWN: tuple\[Evidence, \.\.\.\] = \(.*?\)\n# fmt: on",
        lambda _: "\n".join(["KNOWN: tuple[Evidence, ...] = (", *lines, ")", "# fmt: on"]),
        path.read_text(encoding="utf-8"),
        flags=re.DOTALL,
    )
    path.write_text(text, encoding="utf-8")


LEFT_OUT = (
    Column("workload"),
    Column("noise", "log2 B_noise", ".2f"),
    Column("noise_std", "±", ".2f"),
    Column("others", "by others", ".2f"),
    Column("others_std", "±", ".2f"),
    Column("stds", "stds off", ".2f"),
    Column("small", "log2 B_small", ".2f"),
    Column("small_std", "±", ".2f"),
    Column("others_small", "by others", ".2f"),
    Column("others_small_std", "±", ".2f"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, required=True, help="Zeus train trace")
    parser.add_argument("--convergence", type=Path, default=RECORD, help="a record made by record_convergence.py")
    parser.add_argument("--write", action="store_true", help="write it into convergence/prior.py")
    add_output(parser)
    options = parser.parse_args()
    rows = own_evidence(options.train, options.convergence)
    if options.write:
        rewrite(rows)
    judged, seen = left_out(rows), worth(rows)
    print(as_table(judged, LEFT_OUT))
    print("\nwhat can be seen at once, as a predictor of B_noise")
    print(as_table(seen, (Column("seen"), Column("log_likelihood", "log likelihood", ".2f"))))
    write("fit_prior", {"left_out": judged, "seen": seen}, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
