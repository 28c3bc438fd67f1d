"""Flower's grid in one process, with a simulated clock: ServerApp, ClientApp and strategy run unchanged, without Ray.

Every node has a clock of its own, that of its virtual board. A message reaches a node after its download; the node's
app runs, which moves the node's clock; the reply is there after its upload. Then the server's clock moves on. Nodes run
one after the other, and their time passes side by side.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

from underwatt._imports import require

require("flwr", extra="fleet")

# After the check, whose error is the better one.
from flwr.app import Context, Message, RecordDict  # noqa: E402
from flwr.serverapp import Grid  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from underwatt.drivers.virtual.simulated_board import VirtualClock

# Flower's SuperLink gives a node up when its heartbeat stays away; measured with version 1.41.
HEARTBEAT_S = 40.0


@dataclass(eq=False)
class SimulatedNode:
    """A node: its clock, its link, and when it is lost."""

    node_id: int
    clock: VirtualClock
    node_config: dict[str, Any] = field(default_factory=dict)
    bytes_per_s: float = math.inf
    latency_s: float = 0.0
    lost_s: float = math.inf  # from then on nobody hears of it
    context: Context = field(init=False)

    def __post_init__(self) -> None:
        self.context = Context(0, self.node_id, self.node_config, RecordDict(), {})

    def transfer_s(self, message: Message) -> float:
        """How long a message takes either way."""
        arrays, others = message.content.array_records.values(), message.content.config_records.values()
        size = sum(len(array.data) for record in arrays for array in record.values())
        size += sum(len(str(value)) for record in others for value in record.values())
        return self.latency_s + size / self.bytes_per_s


@dataclass(frozen=True)
class Exchange:
    """One message and what became of it, in the server's time."""

    node_id: int
    sent_s: float
    begun_s: float  # when the node had it
    ended_s: float  # when the node was done
    arrived_s: float  # inf where no reply came


class SimulatedGrid(Grid):  # type: ignore[misc]
    """Runs the app of each node in this process; ``loss`` is the share of messages that the network loses, each way."""

    def __init__(
        self,
        nodes: Iterable[SimulatedNode],
        app: Callable[[Message, Context], Message],
        *,
        loss: float = 0.0,
        seed: int = 0,
    ) -> None:
        self._nodes = {node.node_id: node for node in nodes}
        self._app, self._loss, self._random = app, loss, Random(seed)
        self._now_s = 0.0
        self._ids = itertools.count(1)
        self._under_way: dict[str, tuple[float, Message | None]] = {}  # when each reply arrives
        self.exchanges: list[Exchange] = []
        _take_identity()

    # The clock, as a strategy asks it

    def now_s(self) -> float:
        """Simulated seconds since the start."""
        return self._now_s

    def sleep(self, seconds: float) -> None:
        """Let time pass on the server."""
        self._now_s += seconds

    # What Flower asks

    def set_run(self, run: Any) -> None:
        """Nothing: there is one run."""

    @property
    def run(self) -> Any:
        """There is one run, and nothing to say of it."""
        return None

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """A message for a node."""
        return Message(content, dst_node_id, message_type, group_id=group_id, ttl=ttl)

    def get_node_ids(self) -> list[int]:
        """The nodes that are there, and those that are not yet known to be lost."""
        return [i for i, node in self._nodes.items() if self._now_s < node.lost_s + HEARTBEAT_S]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Send messages, which their nodes answer in their own time."""
        return [self._send(message) for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """The replies that are here by now."""
        found = []
        for name in list(message_ids):
            arrives_s, reply = self._under_way.get(name, (math.inf, None))
            if reply is not None and arrives_s <= self._now_s:
                found.append(reply)
                del self._under_way[name]
        return found

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Send messages and wait for the replies, for lost nodes until their heartbeat is missed."""
        sent_s = self._now_s
        names = self.push_messages(messages)
        until_s = sent_s + (math.inf if timeout is None else timeout)
        arrivals = [self._under_way[name][0] for name in names]
        given_up = [
            min(arrives_s, sent_s + HEARTBEAT_S) if math.isinf(arrives_s) else arrives_s for arrives_s in arrivals
        ]
        self._now_s = min(until_s, max(given_up, default=sent_s))
        return self.pull_messages(names)

    def _send(self, message: Message) -> str:
        name = f"message-{next(self._ids)}"
        message.metadata.__dict__["_message_id"] = name  # as the SuperLink does, so that the reply names it
        node = self._nodes[message.metadata.dst_node_id]
        sent_s = self._now_s
        begun_s = max(sent_s + node.transfer_s(message), node.clock.now_s())
        if begun_s >= node.lost_s or self._is_lost():
            self._under_way[name] = (math.inf, None)
            self.exchanges.append(Exchange(node.node_id, sent_s, math.inf, math.inf, math.inf))
            return name
        node.clock.advance(begun_s - node.clock.now_s())
        reply = self._app(message, node.context)
        ended_s = node.clock.now_s()
        arrives_s = ended_s + node.transfer_s(reply)
        if arrives_s >= node.lost_s or self._is_lost():
            arrives_s = math.inf
        self._under_way[name] = (arrives_s, reply)
        self.exchanges.append(Exchange(node.node_id, sent_s, begun_s, ended_s, arrives_s))
        return name

    def _is_lost(self) -> bool:
        return bool(self._loss) and self._random.random() < self._loss

    def idle_share(self, until_s: float) -> float:
        """Which share of the nodes' time up to a moment went neither to training nor to communication."""
        busy = dict.fromkeys(self._nodes, 0.0)
        for one in self.exchanges:
            if math.isfinite(one.arrived_s):
                busy[one.node_id] += min(one.arrived_s, until_s) - min(one.sent_s, until_s)
        there = sum(min(node.lost_s, until_s) for node in self._nodes.values())
        return 1.0 - sum(busy.values()) / there if there else 0.0


def _take_identity() -> None:
    """Newer versions of Flower ask who sends a message; in deployment the process is told when it is started."""
    with contextlib.suppress(ImportError):
        from flwr.supercore.task_identity import TaskIdentity

        for name in ("task_id", "run_id", "node_id"):
            if getattr(TaskIdentity, f"_{name}") is None:
                setattr(TaskIdentity, name, 0)
