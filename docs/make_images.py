"""Makes the pictures of README and docs again, each from figures that are in this repository or from a run made now.

python docs/make_images.py figures     # the two drawings; needs PyTorch, takes seconds
python docs/make_images.py report      # the picture of a report; needs Playwright and Chromium, takes minutes
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

DOCS = Path(__file__).resolve().parent
IMAGES = DOCS / "images"
sys.path.insert(0, str(DOCS.parent / "benchmarks"))

WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 64, 150, 20, 52
COLOURS = ("#0b7261", "#b4540a", "#5b4fc4", "#8a6d00")
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#444}.grid{stroke:#8884;fill:none}"
    "@media(prefers-color-scheme:dark){text{fill:#bbb}}"
)
BUDGETS_W = (3.5, 5.0, 7.0)
SCHEDULE = "at_s,power_w\n0,5\n3,4\n"


@dataclass(frozen=True)
class Line:
    """One line of a drawing."""

    name: str
    values: Sequence[float]


def draw(batch_sizes: Sequence[int], lines: Sequence[Line], ticks: Sequence[float], x_name: str, y_name: str) -> str:
    """A line chart over batch sizes with logarithmic axes; the lowest point of each line is filled."""
    low, high = math.log(ticks[0]), math.log(ticks[-1])

    def x(number: int) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * number / (len(batch_sizes) - 1)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (math.log(value) - low) / (high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"><style>{STYLE}</style>'
    ]
    for tick in ticks:
        parts.append(f'<path class="grid" d="M{LEFT} {y(tick):.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for number, size in enumerate(batch_sizes):
        parts.append(f'<text x="{x(number):.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{size}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 10}" text-anchor="middle">{x_name}</text>')
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(f'<text transform="translate(16 {middle}) rotate(-90)" text-anchor="middle">{y_name}</text>')
    labels = _apart([y(line.values[-1]) for line in lines])
    for line, colour, label_y in zip(lines, COLOURS, labels, strict=False):
        points = " ".join(f"{x(n):.1f},{y(value):.1f}" for n, value in enumerate(line.values))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        best = int(np.argmin(line.values))
        parts.append(f'<circle cx="{x(best):.1f}" cy="{y(line.values[best]):.1f}" r="6" fill="{colour}"/>')
        parts.append(f'<text x="{WIDTH - RIGHT + 8}" y="{label_y + 4:.1f}" style="fill:{colour}">{line.name}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _apart(heights: Sequence[float], least: float = 17) -> list[float]:
    """Heights of labels, moved down where they would overlap."""
    moved = list(heights)
    order = sorted(range(len(moved)), key=lambda n: moved[n])
    for above, below in pairwise(order):
        moved[below] = max(moved[below], moved[above] + least)
    return moved


def figures() -> None:
    """Samples to target from real trainings; time to target under budgets on a simulated board."""
    import edge

    record = json.loads(edge.RECORD.read_text(encoding="utf-8"))
    costs = edge.costs()
    sizes = list(edge.BATCH_SIZES)
    names = {
        "resnet18": "ResNet18",
        "mobilenetv2": "MobileNetV2",
        "efficientvit": "EfficientViT",
        "char_transformer": "char. transformer",
    }
    lines = []
    for model, name in names.items():
        samples = edge.mean_samples(edge.convergence(record, model, "target"), sizes)
        fewest = min(samples.values())
        lines.append(Line(name, [samples[size] / fewest for size in sizes]))
    drawing = draw(sizes, lines, (1, 1.25, 1.5, 2, 2.5), "batch size", "samples to target, over the fewest")
    (IMAGES / "samples_to_target.svg").write_text(drawing, encoding="utf-8")

    world = edge.make_world("nano", "resnet18", costs["resnet18"], edge.convergence(record, "resnet18", "target"))
    lines = []
    for budget_w in BUDGETS_W:
        fits = world.power_w <= budget_w
        best_s = [float(world.time_s[fits & (world.settings.batch_size == size)].min()) for size in sizes]
        lines.append(Line(f"{budget_w:g} W", best_s))
    drawing = draw(sizes, lines, (150, 200, 300, 400, 550), "batch size", "time to target, s (simulated)")
    (IMAGES / "time_to_target.svg").write_text(drawing, encoding="utf-8")


def report() -> None:
    """A small transformer, really trained, on a simulated Nano: converge, plan, run, report, a picture of its top."""
    from playwright.sync_api import sync_playwright

    underwatt = str(Path(sys.executable).parent / "underwatt")
    job = str(DOCS.parent / "examples" / "jobs.py") + ":char_transformer_small"
    device = ("--device", "virtual:nano")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "budget.csv").write_text(SCHEDULE, encoding="utf-8")
        for arguments in (
            ("converge", job, "--points", "4", "--seeds", "2"),
            ("plan", "--measure", job, *device, "--budget", "5W"),
            ("run", job, *device, "--schedule", "budget.csv"),
            ("report", "--budget", "5W"),
        ):
            environment = os.environ | {"UNDERWATT_STATE": str(folder / "state"), "OMP_NUM_THREADS": "1"}
            subprocess.run([underwatt, *arguments], cwd=folder, env=environment, check=True)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 1160, "height": 1355})
            page.goto((folder / "report.html").as_uri())
            page.wait_for_timeout(2000)  # figures are drawn when they come into view
            page.screenshot(path=IMAGES / "report.png")
            browser.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("figures", "report"))
    {"figures": figures, "report": report}[parser.parse_args().what]()
