"""Other ways to predict, as published: PowerTrain's networks, and a table of what was measured and nothing else.

PowerTrain (FGCS 2024) trains two small neural networks on a reference and fine-tunes them on the new workload. As
published: Dense 256-128-64-1, ReLU, dropout 0.4 and 0.3 after the first two layers, Adam 1e-3, mean squared error, 100
epochs, batches of 32, best checkpoint kept; transfer replaces the last layer, refits the scaler on the new samples and
fine-tunes every weight. Not published, chosen here: targets are scaled like the inputs, a fifth of the rows decides
which checkpoint is best, the batch size is one more input where it varies, and the uncertainty (the method has none) is
the error left on the samples.

Training on a whole reference takes minutes, so the published one (ResNet-18 on an Orin AGX) is kept as a file beside
this module; ``benchmarks/make_references.py --network TABLE`` trains and writes it again.

The table is the method of "Accelerated Training on Low-Power Edge Devices" (TMLR 2025).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from underwatt._imports import require
from underwatt.errors import PredictError
from underwatt.predict.base import Observations, by_setting, check_same_knobs, observe
from underwatt.records import Prediction

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import ModuleType

    from numpy.typing import NDArray

    from underwatt.predict.base import Floats, SettingArray
    from underwatt.records import Measurement, Profile

LAYERS = (256, 128, 64)
DROPOUTS = (0.4, 0.3)
LEARNING_RATE = 1e-3
REFERENCE = Path(__file__).with_name("powertrain_orin_agx_resnet18.npz")
REFERENCE_KNOBS = ("cpu_cores", "cpu_mhz", "gpu_mhz", "mem_mhz")
EPOCHS = 100
BATCH_ROWS = 32
CHECKPOINT_SHARE = 0.2
# A network that fits its samples exactly is not that sure of the rest.
LEAST_STD = 0.02
# A prediction at or below zero has no logarithm; the smallest sample, divided by this, stands in for it.
FLOOR = 10.0
# A reading of a setting measured once is off by about this much; repeats say more.
READING_STD = (0.025, 0.015)


class PowerTrain:
    """The published networks; needs PyTorch. Uses the first reference only, as published.

    ``relative`` errors make the loss, as its authors do for an Orin Nano; squared ones else.
    """

    name = "powertrain"

    def __init__(self, *, seed: int = 0, epochs: int = EPOCHS, relative: bool = False) -> None:
        self._torch = require("torch", extra="torch")
        self._seed, self._epochs, self._relative = seed, epochs, relative

    def fit(self, measurements: Sequence[Measurement], references: Sequence[Profile] = ()) -> FittedPowerTrain:
        """Fine-tune on the measurements, from networks trained on the reference: the published one where none is given.

        From nothing where that one has other knobs.
        """
        return self.prepare(observe(measurements).settings, references)(measurements)

    def prepare(
        self, candidates: SettingArray, references: Sequence[Profile] = ()
    ) -> Callable[[Sequence[Measurement]], FittedPowerTrain]:
        """Train on the reference once, to fine-tune again and again."""
        if references:
            return partial(self.transfer, pretrained=self.pretrain(references[0]))
        return partial(self.transfer, pretrained=saved_reference() if candidates.knobs == REFERENCE_KNOBS else None)

    def pretrain(self, reference: Profile) -> FittedPowerTrain:
        """Train on a whole reference: minutes of work that many fits can share."""
        return self._train_both(observe(reference.measurements, whose=f"the reference {reference.workload.name}"), None)

    def transfer(self, measurements: Sequence[Measurement], pretrained: FittedPowerTrain | None) -> FittedPowerTrain:
        """Fine-tune trained networks on the measurements; ``None`` starts from nothing."""
        seen = observe(measurements)
        if pretrained is not None and pretrained.knobs != seen.settings.knobs:
            raise PredictError(
                f"PowerTrain needs a reference of the same knobs: it sets {', '.join(pretrained.knobs)}, "
                f"the measurements set {', '.join(seen.settings.knobs)}.",
                hint="Leave the reference out, or use the default predictor, which can bridge this.",
            )
        return self._train_both(seen, pretrained)

    def _train_both(self, seen: Observations, start: FittedPowerTrain | None) -> FittedPowerTrain:
        rows = seen.settings.matrix()
        starts = (None, None) if start is None else start.networks
        logs = (seen.log_step_s, seen.log_power_w)
        return FittedPowerTrain(seen.settings.knobs, tuple(map(partial(self._train, rows), logs, starts)))

    def _train(self, rows: Floats, logs: Floats, start: _Network | None) -> _Network:
        torch, values = self._torch, np.exp(logs)
        # A private generator state: fitting must not disturb the user's random numbers, nor depend on them.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed)
            inputs, targets = _Scaler.of(rows), _Scaler.of(values)
            if start is None:
                module = _network(torch.nn, rows.shape[1])
            else:
                module = copy.deepcopy(start.module)
                module[-1] = torch.nn.Linear(LAYERS[-1], 1)
            x = torch.as_tensor(inputs.scale(rows), dtype=torch.float32)
            y = torch.as_tensor(targets.scale(values), dtype=torch.float32)[:, None]
            self._descend(module, x, y, float(targets.mean / targets.std) if self._relative else None)
        network = _Network(torch, module, inputs, targets, floor=float(np.exp(logs.min())) / FLOOR)
        return replace(network, std=max(LEAST_STD, float(np.sqrt(np.mean((network.logs(rows) - logs) ** 2)))))

    def _descend(self, module: Any, x: Any, y: Any, level: float | None) -> None:
        """Train on scaled targets; relative errors are of these and the ``level`` that was taken off them."""
        torch = self._torch
        order = torch.randperm(len(x))
        held_back = order[: max(1, int(CHECKPOINT_SHARE * len(x)))]
        training = order[len(held_back) :]
        optimizer = torch.optim.Adam(module.parameters(), lr=LEARNING_RATE)

        def loss(out: Any, wanted: Any) -> Any:
            return ((out - wanted) ** 2 if level is None else ((out - wanted) / (wanted + level)).abs()).mean()

        best, best_loss = copy.deepcopy(module.state_dict()), float("inf")
        for _ in range(self._epochs):
            module.train()
            for batch in training[torch.randperm(len(training))].split(BATCH_ROWS):
                optimizer.zero_grad()
                loss(module(x[batch]), y[batch]).backward()
                optimizer.step()
            module.eval()
            with torch.no_grad():
                now = float(loss(module(x[held_back]), y[held_back]))
            if now < best_loss:
                best, best_loss = copy.deepcopy(module.state_dict()), now
        module.load_state_dict(best)


@dataclass(frozen=True, slots=True, eq=False)
class FittedPowerTrain:
    """Two trained networks: step time and power. Those of a reference can be fine-tuned."""

    knobs: tuple[str, ...]
    networks: tuple[_Network, ...]

    def predict(self, settings: SettingArray) -> Prediction:
        """Log time and log power of each setting; the uncertainty is the same for all.

        Refuses settings that differ in something that never varied in what it was trained on: of that it knows nothing.
        """
        check_same_knobs(settings, self.knobs)
        rows, seen = settings.matrix(), self.networks[0].inputs
        fixed = np.flatnonzero(~seen.varied & np.any(rows != seen.mean, axis=0))
        if len(fixed):
            names = " and ".join((*self.knobs, "batch size")[at] for at in fixed)
            raise PredictError(
                f"PowerTrain never saw {names} vary, and is asked about other values.",
                hint="Measure settings that differ in it, or use the default predictor.",
            )
        found = [(network.logs(rows), np.full(len(rows), network.std)) for network in self.networks]
        return Prediction(*found[0], *found[1])


@dataclass(frozen=True, slots=True, eq=False)
class _Scaler:
    mean: Floats
    std: Floats
    varied: NDArray[np.bool_]

    @classmethod
    def of(cls, values: Floats) -> _Scaler:
        varied = np.ptp(values, axis=0) > 0
        mean = np.where(varied, values.mean(axis=0), values[0])
        return cls(mean, np.where(varied, values.std(axis=0), 1.0), varied)

    def scale(self, values: Floats) -> Floats:
        return np.asarray((values - self.mean) / self.std)


@dataclass(frozen=True, slots=True, eq=False)
class _Network:
    """A trained network with the scalers it was trained with, the least it may say, and its error on its samples."""

    torch: ModuleType
    module: Any
    inputs: _Scaler
    targets: _Scaler
    floor: float
    std: float = LEAST_STD

    def logs(self, rows: Floats) -> Floats:
        """The log of what it says of each row."""
        self.module.eval()
        with self.torch.no_grad():
            out = self.module(self.torch.as_tensor(self.inputs.scale(rows), dtype=self.torch.float32))
        values = out.numpy().astype(float).ravel() * self.targets.std + self.targets.mean
        return np.asarray(np.log(np.maximum(values, self.floor)))


def saved_reference() -> FittedPowerTrain:
    """The networks of the published reference, as ``save_networks`` wrote them."""
    torch = require("torch", extra="torch")
    with np.load(REFERENCE) as kept:
        networks = []
        for at in range(2):
            module = _network(torch.nn, len(REFERENCE_KNOBS) + 1)
            state = {name: torch.as_tensor(kept[f"{at}.{name}"].astype(np.float32)) for name in module.state_dict()}
            module.load_state_dict(state)
            inputs, targets = (
                _Scaler(*(kept[f"{at}.{whose}.{part}"] for part in ("mean", "std", "varied")))
                for whose in ("inputs", "targets")
            )
            networks.append(_Network(torch, module, inputs, targets, float(kept[f"{at}.floor"])))
    return FittedPowerTrain(REFERENCE_KNOBS, tuple(networks))


def save_networks(fitted: FittedPowerTrain, path: Path = REFERENCE) -> None:
    """Write networks for ``saved_reference``: weights in half precision, which fine-tuning never notices."""
    arrays: dict[str, Any] = {}
    for at, network in enumerate(fitted.networks):
        weights = network.module.state_dict().items()
        arrays |= {f"{at}.{name}": value.numpy().astype(np.float16) for name, value in weights}
        for whose, scaler in (("inputs", network.inputs), ("targets", network.targets)):
            arrays |= {f"{at}.{whose}.{part}": getattr(scaler, part) for part in ("mean", "std", "varied")}
        arrays[f"{at}.floor"] = network.floor
    np.savez_compressed(path, **arrays)


def _network(nn: Any, inputs: int) -> Any:
    layers, width = [], inputs
    for wide, dropout in zip(LAYERS, (*DROPOUTS, None), strict=True):
        layers += [nn.Linear(width, wide), nn.ReLU(), *([nn.Dropout(dropout)] if dropout else [])]
        width = wide
    return nn.Sequential(*layers, nn.Linear(width, 1))


class LookupTable:
    """Answers for measured settings only, with the mean of their repeats; references are of no use to it."""

    name = "lookup"

    def fit(
        self,
        measurements: Sequence[Measurement],
        references: Sequence[Profile] = (),  # noqa: ARG002 - part of the interface
    ) -> FittedLookupTable:
        """Gather the measurements by setting."""
        seen = observe(measurements)
        figures = {}
        for setting, same in by_setting(measurements).items():
            logs = np.log([(m.step_s, m.power_w) for m in same])
            stds = np.maximum(READING_STD, logs.std(axis=0, ddof=1) if len(same) > 1 else 0.0)
            row = (*setting.mode.knobs().values(), setting.batch_size)
            figures[row] = np.column_stack([logs.mean(axis=0), stds]).ravel()
        return FittedLookupTable(seen.settings.knobs, figures)


@dataclass(frozen=True, slots=True, eq=False)
class FittedLookupTable:
    """Mean and spread of each measured setting."""

    knobs: tuple[str, ...]
    _figures: Mapping[tuple[float, ...], Floats]  # of a setting: log time, its std, log power, its std

    def knows(self, settings: SettingArray) -> NDArray[np.bool_]:
        """Which of the settings were measured."""
        check_same_knobs(settings, self.knobs)
        return np.array([tuple(row) in self._figures for row in settings.matrix().tolist()], dtype=bool)

    def predict(self, settings: SettingArray) -> Prediction:
        """What was measured; raises ``PredictError`` for a setting that was not."""
        unknown = np.flatnonzero(~self.knows(settings))
        if len(unknown):
            raise PredictError(
                f"{len(unknown)} of {len(settings)} settings were never measured: {settings[int(unknown[0])]}, …",
                hint="Measure them, ask only for measured ones, or use the default predictor.",
            )
        found = [self._figures[tuple(row)] for row in settings.matrix().tolist()]
        return Prediction(*np.reshape(found, (len(found), 4)).T)
