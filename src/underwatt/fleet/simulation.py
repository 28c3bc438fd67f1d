"""A fleet in simulated time: virtual boards, a real small network that really learns, Flower's strategy and apps.

The network's first layers are fixed random filters, its last two are trained: so what the fixed ones make of an image
is computed once here, and a step takes microseconds, while each board is charged for the whole network, forward
through all of it and backward through what is trained, as PyTorch's operations cost it.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from underwatt._imports import require
from underwatt.budget import Budget
from underwatt.drivers.virtual.device import open_virtual
from underwatt.errors import InputError
from underwatt.fleet.board import round as fleet_round
from underwatt.fleet.grid import SimulatedGrid, SimulatedNode
from underwatt.fleet.rounds import NOISE_BATCH
from underwatt.fleet.strategy import FleetStrategy, RoundRecord
from underwatt.jobs.cost import count_cost
from underwatt.jobs.job import Job

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from numpy.typing import NDArray

    from underwatt.budget import Schedule
    from underwatt.drivers.virtual.device import VirtualJetson
    from underwatt.fleet.site import Site
    from underwatt.records import WorkloadCost

    Floats = NDArray[np.float32]
    Weights = list[Floats]

SIDE, FEATURES, HIDDEN, CLASSES = 32, 128, 32, 10
FILTERS = (96, 256)  # of the fixed layers: 0.18 GFLOP an image
NOISE = 0.2
LR, LR_SIZE, MOMENTUM = 0.004, 32, 0.9  # SGD's, which follows the batch size in proportion
SIZES = (8, 16, 32, 64)
NAMES = ("hidden.weight", "hidden.bias", "out.weight", "out.bias")
TRACE_S = 1.0  # between two points of a board's watts over time


# What is learned


@dataclass(frozen=True)
class Task:
    """Digits, real ones, placed and blurred by noise, as the fixed layers see them; and what a step costs."""

    train: tuple[Floats, NDArray[np.int64]]
    test: tuple[Floats, NDArray[np.int64]]
    cost: WorkloadCost

    @classmethod
    def digits(cls, train: int = 4000, test: int = 1000, *, filters: tuple[int, int] = FILTERS) -> Task:
        """Of so many images; those of test and training have no digit in common."""
        torch = require("torch", extra="fleet")
        bunch = require("sklearn.datasets", extra="demo").load_digits()
        order = np.random.default_rng(0).permutation(len(bunch.target))
        fixed = _fixed_layers(torch, filters)
        sets = []
        for seed, (count, rows) in enumerate(((train, order[:1400]), (test, order[1400:]))):
            chance = np.random.default_rng(seed)
            chosen = chance.choice(rows, count)
            images = NOISE * chance.standard_normal((count, 1, SIDE, SIDE), dtype=np.float32)
            for image, digit, (top, left) in zip(
                images, bunch.images[chosen] / 16, chance.integers(2, 7, (count, 2)), strict=True
            ):
                image[0, top : top + 24, left : left + 24] += np.kron(digit, np.ones((3, 3)))
            with torch.no_grad():
                seen = [fixed(torch.from_numpy(images[at : at + 250])).numpy() for at in range(0, count, 250)]
            sets.append((np.concatenate(seen), bunch.target[chosen].astype(np.int64)))
        mean, spread = sets[0][0].mean(axis=0), sets[0][0].std(axis=0)
        scaled = [(((seen - mean) / spread).astype(np.float32), classes) for seen, classes in sets]
        return cls(scaled[0], scaled[1], _cost(torch, fixed))

    def shares(self, boards: int, skew: float | None, seed: int) -> list[NDArray[np.int64]]:
        """Which images each board holds: at random, or of each class as a Dirichlet of ``skew`` says."""
        chance, classes = np.random.default_rng(seed), self.train[1]
        if skew is None:
            return np.array_split(chance.permutation(len(classes)), boards)
        least = max(min(SIZES), len(classes) // (8 * boards))
        while True:
            held: list[list[NDArray[np.int64]]] = [[] for _ in range(boards)]
            for one in range(CLASSES):
                rows = chance.permutation(np.flatnonzero(classes == one))
                cuts = (np.cumsum(chance.dirichlet(np.full(boards, skew)))[:-1] * len(rows)).astype(int)
                for board, part in zip(held, np.split(rows, cuts), strict=True):
                    board.append(part)
            found = [np.concatenate(parts) for parts in held]
            if min(map(len, found)) >= least:
                return found

    def accuracy(self, weights: Weights) -> float:
        """Of the test images."""
        hidden, bias, out, out_bias = weights
        scores = np.maximum(self.test[0] @ hidden + bias, 0) @ out + out_bias
        return float((scores.argmax(axis=1) == self.test[1]).mean())


def _fixed_layers(torch: Any, filters: tuple[int, int]) -> Any:
    torch.manual_seed(0)
    nn, (first, second) = torch.nn, filters
    return nn.Sequential(
        nn.Conv2d(1, first, 5),
        nn.ReLU(),
        nn.Conv2d(first, second, 5, stride=2),
        nn.ReLU(),
        nn.AvgPool2d(3),
        nn.Flatten(),
        nn.Linear(16 * second, FEATURES),
    )


def _cost(torch: Any, fixed: Any) -> WorkloadCost:
    """Of a step of the whole network: the fixed layers run forward only."""

    class Network(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.fixed, self.hidden = fixed, torch.nn.Linear(FEATURES, HIDDEN)
            self.out = torch.nn.Linear(HIDDEN, CLASSES)

        def forward(self, images: Any) -> Any:
            with torch.no_grad():
                seen = self.fixed(images)
            return self.out(torch.relu(self.hidden(seen)))

    def sgd(parameters: Any, lr: float) -> Any:
        return torch.optim.SGD(parameters, lr=lr, momentum=MOMENTUM)

    data = (torch.zeros(8, 1, SIDE, SIDE), torch.zeros(8, dtype=torch.long))
    return count_cost(Job(Network, data, target=0.9, lr=LR, optimizer=sgd))


def first_weights(seed: int) -> Weights:
    """Before anything was learned."""
    chance = np.random.default_rng(seed)
    shapes = ((FEATURES, HIDDEN), (HIDDEN,), (HIDDEN, CLASSES), (CLASSES,))
    return [
        (chance.standard_normal(shape) / math.sqrt(shape[0]) if len(shape) > 1 else np.zeros(shape)).astype(np.float32)
        for shape in shapes
    ]


class Learner:
    """SGD with momentum on a board's own images, in shuffled passes; ``near`` pulls back to the start (FedProx)."""

    def __init__(
        self, task: Task, rows: NDArray[np.int64], weights: Weights, chance: np.random.Generator, near: float = 0.0
    ) -> None:
        self._images, self._classes = task.train[0][rows], task.train[1][rows]
        self._chance, self._near, self._before = chance, near, weights
        self.weights = [one.copy() for one in weights]
        self._momenta = [np.zeros_like(one) for one in weights]
        self._order: NDArray[np.int64] = np.zeros(0, dtype=np.int64)

    def step(self, size: int, lr: float) -> None:
        """One step of the optimizer on the next batch."""
        while len(self._order) < size:
            self._order = np.concatenate([self._order, self._chance.permutation(len(self._classes))])
        rows, self._order = self._order[:size], self._order[size:]
        images = self._images[rows]
        hidden_w, hidden_b, out_w, out_b = self.weights
        hidden = images @ hidden_w + hidden_b
        on = hidden > 0
        hidden *= on
        error = hidden @ out_w + out_b
        error -= error.max(axis=1, keepdims=True)
        np.exp(error, error)
        error /= error.sum(axis=1, keepdims=True)
        error[np.arange(size), self._classes[rows]] -= 1
        error /= size
        back = (error @ out_w.T) * on
        gradients = (images.T @ back, back.sum(axis=0), hidden.T @ error, error.sum(axis=0))
        for value, momentum, gradient, before in zip(self.weights, self._momenta, gradients, self._before, strict=True):
            momentum *= MOMENTUM
            momentum += gradient
            if self._near:
                momentum += self._near * (value - before)
            value -= np.float32(lr) * momentum


def rate(size: int) -> float:
    """The learning rate of a batch size."""
    return LR * size / LR_SIZE


# Where it is learned


@dataclass(frozen=True, kw_only=True)
class BoardPlan:
    """One board of a fleet: its kind, its watts, its link, and when it is lost."""

    kind: str
    budget: Budget
    latency_s: float = 0.5
    bytes_per_s: float = 1e6
    lost_s: float = math.inf


@dataclass(frozen=True, kw_only=True)
class FleetPlan:
    """A fleet to be simulated, as a file describes it."""

    boards: tuple[BoardPlan, ...]
    skew: float | None = None
    target: float = 0.88
    limit_s: float = 300.0
    seed: int = 0
    loss: float = 0.0  # share of the messages
    noise_batch: float = NOISE_BATCH

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> FleetPlan:
        """From what a TOML file says."""
        rest, boards = dict(given), []
        network = rest.pop("network", {})
        for one in rest.pop("boards", ()):
            board = {**{key: value for key, value in network.items() if key != "loss"}, **one}
            count, budget = board.pop("count", 1), Budget.of(board.pop("budget", ""))
            try:
                boards += [BoardPlan(budget=budget, **board)] * count
            except TypeError as exc:
                raise _unknown("A board of this fleet", exc) from None
        if not boards:
            raise InputError("This fleet has no boards.", hint="Write [[boards]] with kind and budget for each.")
        try:
            return cls(boards=tuple(boards), loss=network.get("loss", 0.0), **rest)
        except TypeError as exc:
            raise _unknown("This fleet", exc) from None


def _unknown(what: str, exc: TypeError) -> InputError:
    return InputError(
        f"{what} cannot be read: {str(exc).split('() ')[-1]}.", hint="docs/fleet.md says what it may say."
    )


@dataclass
class Watts:
    """What a simulated board truly draws, joule by joule, from now on; no sensor, so nothing is excused."""

    device: VirtualJetson
    at_s: list[float] = field(default_factory=lambda: [0.0])
    joules: list[float] = field(default_factory=lambda: [0.0])

    def __post_init__(self) -> None:
        self._begun_j = self.device.board.energy_j
        self.device.clock.every(TRACE_S, self._note)

    def _note(self) -> None:
        now_s = self.device.clock.now_s()
        if now_s > self.at_s[-1]:
            self.at_s.append(now_s)
            self.joules.append(self.device.board.energy_j - self._begun_j)

    def energy_j(self, until_s: float) -> float:
        """Joules up to a moment."""
        return float(np.interp(until_s, self.at_s, self.joules))

    def power_w(self, until_s: float) -> tuple[list[float], list[float]]:
        """Mean watts of each second, by its end."""
        upto = int(np.searchsorted(self.at_s, until_s, side="right"))
        at_s, joules = np.array(self.at_s[:upto]), np.array(self.joules[:upto])
        return at_s[1:].tolist(), (np.diff(joules) / np.diff(at_s)).tolist()

    def over_share(self, course: Schedule, until_s: float) -> float:
        """By which share the joules are more than the budget allows, summed over the whole time."""
        allowed_j = sum((end - begin) * level for begin, end, level in course.pieces(0.0, until_s))
        return max(0.0, self.energy_j(until_s) / allowed_j - 1.0)


@dataclass(frozen=True)
class FleetRecord:
    """What became of a simulated fleet."""

    plan: FleetPlan
    scores: tuple[tuple[float, float], ...]  # (seconds, accuracy) after each round
    rounds: tuple[RoundRecord, ...]
    watts: tuple[Watts, ...]
    ended_s: float
    idle_share: float

    @property
    def reached_s(self) -> float:
        """When the target was reached; inf where it was not."""
        return next((at_s for at_s, score in self.scores if score >= self.plan.target), math.inf)


class _Over(Exception):  # noqa: N818 - how a training ends early, no error
    """Enough was trained."""


class SimulatedFleet:
    """Virtual boards with their data, behind a grid; ``run`` trains them with a strategy."""

    def __init__(self, plan: FleetPlan, task: Task) -> None:
        self.plan, self.task = plan, task
        self.devices = [open_virtual(f"{one.kind}?seed={plan.seed + at}") for at, one in enumerate(plan.boards)]
        self.watts = tuple(map(Watts, self.devices))
        self.rows = task.shares(len(plan.boards), plan.skew, plan.seed)
        self._chances = [np.random.default_rng((plan.seed, at)) for at in range(len(plan.boards))]
        nodes = [
            SimulatedNode(at + 1, device.clock, bytes_per_s=one.bytes_per_s, latency_s=one.latency_s, lost_s=one.lost_s)
            for at, (device, one) in enumerate(zip(self.devices, plan.boards, strict=True))
        ]
        self.grid = SimulatedGrid(nodes, self._train, loss=plan.loss, seed=plan.seed)

    def _train(self, message: Any, context: Any) -> Any:
        """The ClientApp of every board: its own loop, as a user would write it without PyTorch."""
        app, at = require("flwr.app", extra="fleet"), context.node_id - 1
        weights = [array.numpy() for array in message.content["arrays"].values()]
        learner = Learner(self.task, self.rows[at], weights, self._chances[at])
        sizes = tuple(size for size in SIZES if size <= len(self.rows[at]))
        options = {"device": self.devices[at], "budget": self.plan.boards[at].budget, "cost": self.task.cost}
        with fleet_round(context, message, batch_sizes=sizes, **options) as local:
            for size in local.sizes(momentum=MOMENTUM, data=len(self.rows[at])):
                learner.step(size, rate(size))
                local.step(rate(size))
        metrics = app.MetricRecord({"num-examples": len(self.rows[at])})
        content = {"arrays": as_arrays(learner.weights), "metrics": metrics, **local.records()}
        return app.Message(app.RecordDict(content), reply_to=message)

    def run(
        self,
        *,
        length_s: float | None = None,
        site: Site | None = None,
        on_round: Callable[[float, float], None] | None = None,
        stop_at_target: bool = False,
    ) -> FleetRecord:
        """Train until the plan's limit, or until its target is reached."""
        strategy = FleetStrategy(
            require("flwr.serverapp.strategy", extra="fleet").FedAvg(fraction_evaluate=0.0, min_available_nodes=1),
            length_s=length_s,
            site=site,
            clock=self.grid,
            noise_batch=self.plan.noise_batch,
        )
        scores: list[tuple[float, float]] = []

        def evaluate(_number: int, arrays: Any) -> None:
            score = self.task.accuracy([array.numpy() for array in arrays.values()])
            scores.append((self.grid.now_s(), score))
            if on_round:
                on_round(*scores[-1])
            if self.grid.now_s() >= self.plan.limit_s or (stop_at_target and score >= self.plan.target):
                raise _Over

        with contextlib.suppress(_Over):
            strategy.start(self.grid, as_arrays(first_weights(self.plan.seed)), num_rounds=10**6, evaluate_fn=evaluate)
        now_s = self.grid.now_s()
        for device in self.devices:
            device.clock.advance(now_s - device.clock.now_s())
        idle = self.grid.idle_share(now_s)
        return FleetRecord(self.plan, tuple(scores), tuple(strategy.rounds), self.watts, now_s, idle)


def as_arrays(weights: Iterable[Floats]) -> Any:
    """Weights as they travel."""
    app = require("flwr.app", extra="fleet")
    return app.ArrayRecord({name: app.Array(value) for name, value in zip(NAMES, weights, strict=True)})
