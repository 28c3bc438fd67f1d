"""Real trainings, recorded: samples to target by batch size for the paper's four networks, on proxy and target data.

    python benchmarks/record_convergence.py --prepare SOURCE --data DIR        once, where Pillow is (decodes the JPEGs)
    python benchmarks/record_convergence.py --data DIR --json OUT --limit-s 520      on a GPU; results as they come
    python benchmarks/record_convergence.py --data DIR --json OUT --smoke            the same in small, on any machine

Needs PyTorch and NumPy only. On a GPU several trainings run at once, each as CUDA graphs on a stream of its own: a step
at a tiny batch size is bound by kernel launches, and one training alone would leave the GPU idle. How data was split
and how targets were chosen is part of what is written (``data_roles``, ``method``).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import traceback
from collections import deque
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE.parent / "examples"), str(HERE)]  # nothing is installed there

from convergence_data import DATA_ROLES, load_roles, prepare  # noqa: E402
from convergence_lane import Lane, Model, Task, samples_to, smoothed  # noqa: E402
from models.efficientvit import EfficientViT  # noqa: E402
from models.mobilenet import MobileNetV2  # noqa: E402
from models.resnet import ResNet18  # noqa: E402
from models.transformer import CharTransformer  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

CURVE_POINTS = 80
CALIBRATION_SEED = 1000  # no recorded run has it
PRETRAINING_SEED = 2000

METHOD = (
    "Each model is pretrained once on the pretraining role (batch 128). Accuracy is that on held-out data, as the mean "
    "of three successive evaluations, so that one lucky score does not count. For each role a calibration run "
    "(batch 32, a seed of its own, a fixed budget of samples) gives the best accuracy; the target is a fixed fraction "
    "of it, the same for every model and role, and easier fractions are read off the same runs. A run ends where it "
    "crosses the target (interpolated linearly between evaluations), or as never reached at limit_factor times the "
    "samples of the calibration run, or when its loss is no longer finite. All batch sizes are evaluated after the "
    "same numbers of samples and see the samples of a seed in the same order. AdamW, learning rate scaled with the "
    "square root of the batch size, float32 with TF32 matrix products, no augmentation, weights of the head fresh for "
    "images (the classes differ). A seed decides the order of samples and that head; sums on a GPU have no fixed "
    "order, so a seed does not give the same figures to the last digit again. Curves hold the single evaluations."
)


@dataclass(frozen=True)
class Sizes:
    """How much of everything."""

    batch_sizes: tuple[int, ...] = (4, 8, 16, 32, 64, 128)
    seeds: int = 8  # as many as fit into the time
    evaluate_every: int = 512  # samples; a multiple of every batch size
    pretraining_samples: int = 49_152
    calibration_samples: int = 61_440
    fractions: tuple[float, ...] = (0.85, 0.90, 0.95)  # the last is the target
    limit_factor: float = 5.0
    least_limit: int = 8_192
    evaluation_samples: int = 1000


MODELS = (
    Model("resnet18", lambda classes: ResNet18(classes), "image"),
    Model("mobilenetv2", lambda classes: MobileNetV2(classes), "image"),
    Model("efficientvit", lambda classes: EfficientViT(classes), "image"),
    Model("char_transformer", lambda classes: CharTransformer(classes), "text", lr=1e-3),
)
SMOKE_MODELS = (
    Model("resnet18", lambda classes: ResNet18(classes, width=8), "image"),
    Model("mobilenetv2", lambda classes: MobileNetV2(classes, width=0.25), "image"),
    Model("efficientvit", lambda classes: EfficientViT(classes, width=16), "image"),
    Model("char_transformer", lambda classes: CharTransformer(classes, dim=48, layers=2, heads=3), "text", lr=1e-3),
)
SMOKE_SIZES = Sizes(
    batch_sizes=(4, 64),
    seeds=1,
    evaluate_every=64,
    pretraining_samples=64,
    calibration_samples=256,
    least_limit=192,
    limit_factor=1.0,
    evaluation_samples=24,
)


class Recorder:
    """Runs tasks side by side and writes what comes out at once."""

    def __init__(self, options: argparse.Namespace, sizes: Sizes, models: tuple[Model, ...]) -> None:
        self.began_s = time.monotonic()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.set_float32_matmul_precision("high")
        torch.set_num_threads(1)
        self.options, self.sizes, self.models = options, sizes, models
        self._stretch = (sizes.evaluate_every, sizes.evaluation_samples)
        self.roles = load_roles(Path(options.data), self.device, small=options.smoke)
        self.lanes_at_once = options.lanes if self.device.type == "cuda" else 1
        gpu = torch.cuda.get_device_name() if self.device.type == "cuda" else ""
        self.record: dict[str, Any] = {
            "what": "samples to target by batch size, from real trainings",
            "smoke": options.smoke,
            "gpu": gpu,
            "torch": torch.__version__,
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "data_roles": DATA_ROLES,
            "method": METHOD,
            "sizes": {**vars(sizes), "lanes": self.lanes_at_once},
            "lr_at_128": {model.name: model.lr for model in models},
            "calibration": [],
            "complete_seeds": [],  # every model, role and batch size is there; of the others the slow ones are missing
            "runs": [],
            "failed": [],
            "unfinished": [],
        }

    def left_s(self) -> float:
        """Seconds until the time is up."""
        return float(self.options.limit_s) - (time.monotonic() - self.began_s)

    def say(self, text: str) -> None:
        """A line of progress."""
        print(f"[{time.monotonic() - self.began_s:6.1f} s] {text}", flush=True)

    def write(self) -> None:
        """Put what there is into the file, all or nothing."""
        self.record["wall_s"] = round(time.monotonic() - self.began_s, 1)
        path = Path(self.options.json)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        part.write_text(json.dumps(self.record, indent=1) + "\n", encoding="utf-8")
        part.replace(path)

    def run(self, tasks: list[Task], done: Callable[[Lane, dict[str, Tensor]], None]) -> None:
        """Run tasks in order, as many at once as there are lanes, until all are done or time is up."""
        waiting = deque(tasks)
        lanes: list[Lane] = []
        # Streams are handed on from run to run: PyTorch has 32, and two runs on one would wait for each other.
        cuda = self.device.type == "cuda"
        streams = [torch.cuda.Stream() if cuda else None for _ in range(self.lanes_at_once)]
        while (waiting or lanes) and self.left_s() > 0:
            if waiting and len(lanes) < self.lanes_at_once:
                task, stream = waiting.popleft(), streams.pop()
                self._make_room()
                try:
                    split = self.roles[task.model.kind, task.role]
                    lanes.append(Lane(task, split, *self._stretch, self.device, stream))
                except Exception as exc:  # noqa: BLE001 - one bad run must not cost the others
                    streams.append(stream)
                    self._failed(task, exc)
            busy = False
            for lane in list(lanes):
                try:
                    busy |= lane.poll()
                    if lane.finished:
                        done(lane, lane.close())
                except Exception as exc:  # noqa: BLE001
                    lane.finished = "failed"
                    self._failed(lane.task, exc)
                if lane.finished:
                    lanes.remove(lane)
                    streams.append(lane.stream)
            if not busy and lanes:
                time.sleep(0.0003)
        self.record["unfinished"] += [str(lane.task) for lane in lanes] + [str(task) for task in waiting]

    def _failed(self, task: Task, exc: Exception) -> None:
        traceback.print_exc()
        self.record["failed"].append(f"{task}: {type(exc).__name__}: {str(exc)[:300]}")

    def _make_room(self) -> None:
        # Memory of ended graphs goes back only when asked for, and that waits for the device: so rarely.
        if self.device.type == "cuda" and torch.cuda.memory_reserved() > 0.5 * torch.cuda.mem_get_info()[1]:
            torch.cuda.empty_cache()

    def pretrain(self) -> dict[str, dict[str, Tensor]]:
        """The weights that every run of a model begins with."""
        weights: dict[str, dict[str, Tensor]] = {}
        largest = max(self.sizes.batch_sizes)

        def done(lane: Lane, state: dict[str, Tensor]) -> None:
            weights[lane.task.model.name] = state
            self.say(f"pretrained {lane.task.model.name}")

        tasks = [
            Task(m, "pretrain", largest, PRETRAINING_SEED, self.sizes.pretraining_samples, evaluate=False)
            for m in self.models
        ]
        self.run(tasks, done)
        return weights

    def calibrate(self, weights: dict[str, dict[str, Tensor]]) -> dict[tuple[str, str], tuple[float, int]]:
        """The best accuracy of each model on each role, and how many samples a run may take."""
        found: dict[tuple[str, str], tuple[float, int]] = {}

        def done(lane: Lane, _: dict[str, Tensor]) -> None:
            task, curve = lane.task, lane.curve
            best = max(accuracy for _, accuracy in smoothed(curve))
            target = best * self.sizes.fractions[-1]
            at = samples_to(smoothed(curve), target)
            every = self.sizes.evaluate_every
            limit = max(self.sizes.least_limit, self.sizes.limit_factor * at if math.isfinite(at) else 0)
            found[task.model.name, task.role] = (best, math.ceil(limit / every) * every)
            self.record["calibration"].append(
                {"model": task.model.name, "role": task.role, "batch_size": task.batch_size, "seed": task.seed}
                | {"best_accuracy": best, "target": target, "samples": at, "samples_limit": limit}
                | {"curve": _thinned(curve)}
            )
            self.say(f"{task.model.name} {task.role}: best {best:.3f}, target {target:.3f} after {at:,.0f} samples")
            self.write()

        tasks = [
            Task(m, role, 32, CALIBRATION_SEED, self.sizes.calibration_samples, start=weights.get(m.name, {}))
            for m in self.models
            for role in ("target", "proxy")
        ]
        self.run(tasks, done)
        return found

    def main(self) -> None:
        """Pretrain, find the targets, record."""
        self.say(f"{self.record['gpu'] or 'CPU'}, torch {torch.__version__}, {self.lanes_at_once} trainings at once")
        self.write()
        weights = self.pretrain()
        found = self.calibrate(weights)
        tasks = [
            Task(model, role, size, seed, found[model.name, role][1], self._target(found[model.name, role]))
            for seed in range(self.sizes.seeds)  # all of one seed before any of the next
            for size in sorted(self.sizes.batch_sizes)  # the longest first, so that none is left alone at the end
            for model in self.models
            for role in ("target", "proxy")
            if (model.name, role) in found
        ]
        for task in tasks:
            task.start = weights.get(task.model.name, {})

        def done(lane: Lane, _: dict[str, Tensor]) -> None:
            self._keep(lane, found[lane.task.model.name, lane.task.role][0], len(tasks))

        self.run(tasks, done)
        self.write()
        self.say(
            f"{len(self.record['runs'])} runs recorded, {len(self.record['failed'])} failed, "
            f"{len(self.record['unfinished'])} not done in time; written to {self.options.json}"
        )

    def _target(self, calibrated: tuple[float, int]) -> float:
        return calibrated[0] * self.sizes.fractions[-1]

    def _keep(self, lane: Lane, best: float, of: int) -> None:
        task = lane.task
        reached = {f"{f:g}": samples_to(smoothed(lane.curve), best * f) for f in self.sizes.fractions}
        samples = reached[f"{self.sizes.fractions[-1]:g}"]
        self.record["runs"].append(
            {
                "model": task.model.name,
                "role": task.role,
                "batch_size": task.batch_size,
                "lr": task.lr,
                "seed": task.seed,
                "target": task.target,
                "samples": _or_none(samples),
                "samples_limit": task.limit,
                "ended": lane.finished,
                "samples_to_fraction": {key: _or_none(value) for key, value in reached.items()},
                "wall_s": round(time.monotonic() - lane.started_s, 2),
                "curve": _thinned(lane.curve),
            }
        )
        seeds = [run["seed"] for run in self.record["runs"]]
        self.record["complete_seeds"] = sorted(s for s in set(seeds) if seeds.count(s) * self.sizes.seeds == of)
        self.write()
        text = f"{samples:,.0f} samples" if math.isfinite(samples) else lane.finished
        self.say(f"{len(self.record['runs'])}/{of} {task}: {text} ({self.left_s():.0f} s left)")


def _or_none(value: float) -> float | None:
    return round(value, 1) if math.isfinite(value) else None


def _thinned(curve: list[tuple[int, float]]) -> list[tuple[int, float]]:
    step = max(1, math.ceil(len(curve) / CURVE_POINTS))
    kept = curve[::step] + (curve[-1:] if (len(curve) - 1) % step else [])
    return [(samples, round(accuracy, 5)) for samples, accuracy in kept]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder with images.npz and text/, made by --prepare")
    parser.add_argument("--prepare", metavar="SOURCE", help="make that folder from one with text/ and cifar10/")
    parser.add_argument("--json", default="convergence.json")
    parser.add_argument("--limit-s", type=float, default=520.0)
    parser.add_argument("--lanes", type=int, default=16, help="trainings at once on a GPU")
    parser.add_argument("--seeds", type=int, default=0)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    if options.prepare:
        prepare(Path(options.prepare), Path(options.data))
        return
    sizes = SMOKE_SIZES if options.smoke else Sizes()
    if options.seeds:
        sizes = Sizes(**{**vars(sizes), "seeds": options.seeds})
    Recorder(options, sizes, SMOKE_MODELS if options.smoke else MODELS).main()


if __name__ == "__main__":
    main()
