"""The server's side: rounds in which every board works as long as the others, around a strategy of Flower's.

The strategy inside samples the boards and averages, as it always does. What is added stands between the two: each board
is asked for what it can do in the round, and its update is brought to a common measure before it is averaged.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from underwatt._imports import require
from underwatt.device.timing import SystemClock
from underwatt.errors import InputError
from underwatt.fleet.messages import KEY, Report, Work
from underwatt.fleet.rounds import (
    FIRST_TIMES,
    NOISE_BATCH,
    Fronts,
    RoundPlan,
    growth_of,
    next_times,
    plan_round,
    round_length_s,
    scales,
)
from underwatt.fleet.sampling import sampled

require("flwr", extra="fleet")

# After the check, whose error is the better one.
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict  # noqa: E402
from flwr.serverapp.strategy import FedAvg, Result, Strategy  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from flwr.serverapp import Grid

    from underwatt.fleet.site import Site

_log = logging.getLogger("underwatt.fleet")
POLL_S = 0.1
# What communication takes is remembered with so much of what was seen before.
REMEMBERED = 0.7
# Replies may come so much later than planned, as a share of the round and in seconds; then they are not waited for.
LATE_SHARE, LATE_S = 0.1, 1.0
SAME_LEVEL = 0.03  # budgets this close to each other need no search of their own, as on a board
# Where nothing is known of a board's link yet: what is planned with, and how long it is waited for.
FIRST_OVERHEAD_S, FIRST_WAIT_S = 1.0, 180.0
MOST_REFERENCES, MOST_OF_A_KIND = 8, 3
SILENT = 2  # rounds in a row, after which a board gets no more than its floor of a site's watts
SEARCHING = 0.1  # of the boards; where fewer still search, rounds are not made longer for them
# Of those made from FedAvg: trees are no weights, and QFedAvg takes the length of an update for something else.
NOT_UPDATES = {"FedXgbBagging", "FedXgbCyclic", "QFedAvg"}
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(slots=True)
class BoardState:
    """What the server knows of a board: all of it was reported, or seen by when its replies came."""

    report: Report | None = None
    overhead_s: float = math.nan  # of its last rounds, beside training
    missed: int = 0  # rounds in a row without a reply
    promised: int = 0  # steps of the round under way
    searched: bool = False  # it has found what suits its watts

    @property
    def spent(self) -> bool:
        """Whether it has no joules or no time left for any other step: then it is asked no more."""
        return self.report is not None and self.report.spent


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """What happened in a round, for pages and reports."""

    number: int
    begun_s: float
    ended_s: float
    planned_s: float
    reports: dict[int, Report] = field(default_factory=dict)
    arrived_s: dict[int, float] = field(default_factory=dict)
    lacking: tuple[int, ...] = ()  # boards that were asked and did not answer


class FleetStrategy(Strategy):  # type: ignore[misc]
    """Rounds of equal time for unequal boards; use as any strategy: ``FleetStrategy(FedAvg()).start(grid, …)``.

    ``length_s`` fixes the length of rounds, which otherwise adapts. ``site`` divides the watts of one source among the
    boards. ``clock`` tells the time; a simulated grid is one. ``normalise=False`` averages updates as they are.
    ``is_statistic`` says which arrays are no weights, by their names: they are averaged, never scaled.
    """

    def __init__(
        self,
        inner: Any = None,
        *,
        length_s: float | None = None,
        noise_batch: float = NOISE_BATCH,
        site: Site | None = None,
        clock: Any = None,
        normalise: bool = True,
        is_statistic: Callable[[str], bool] = lambda name: name.endswith(STATISTICS),
    ) -> None:
        self.inner = inner if inner is not None else FedAvg()
        kinds = {kind.__name__ for kind in type(self.inner).__mro__}
        if "FedAvg" not in kinds or kinds & NOT_UPDATES:
            raise InputError(
                f"{type(self.inner).__name__} does not combine updates of weights, so work cannot be evened out in it.",
                hint="Use FedAvg or one of the strategies made from it, such as FedProx, FedAvgM or FedAdam.",
            )
        self.length_s, self.noise_batch, self.site = length_s, noise_batch, site
        self.clock = clock if clock is not None else SystemClock()
        self.normalise, self.is_statistic = normalise, is_statistic
        self.boards: dict[int, BoardState] = {}
        self.rounds: list[RoundRecord] = []
        self._profiles: dict[str, dict[int, str]] = {}  # by kind of board and workload: of some boards, the newest last
        self.growth: float | None = None  # of updates with progress, as it was seen so far
        self._times = FIRST_TIMES  # training, against communication
        self._arrays: Any = None
        self._strangers: set[int] = set()  # boards without a floor at a site, of which somebody was told

    def summary(self) -> None:
        """Say what is used."""
        self.inner.summary()
        _log.info("Rounds of equal time by Underwatt; updates %snormalised.", "" if self.normalise else "not ")

    # A round

    def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Grid) -> list[Any]:
        """One message for each board that the strategy inside asks, with what that board is to do."""
        messages = self._to_ask("train", server_round, arrays, config, grid)
        self._arrays = arrays
        if not messages:
            return []
        nodes = [message.metadata.dst_node_id for message in messages]
        states = [self.boards.setdefault(node, BoardState()) for node in nodes]
        plan, leases = self._planned(nodes, states)
        made = []
        useless = self._without_watts(nodes, states, leases)
        for at, (message, state) in enumerate(zip(messages, states, strict=True)):
            if nodes[at] in useless:
                continue
            state.promised = int(plan.steps[at])
            work = Work(
                number=server_round,
                train_s=float(plan.train_s[at]),
                batch_size=int(plan.batch_size[at]) if state.searched else 0,
                steps=int(plan.steps[at]),
                noise_batch=self.noise_batch,
                references=self._references(nodes[at], state),
                **leases.get(nodes[at], {}),
            )
            made.append(_with_work(message, work))
        return made

    def _to_ask(self, kind: str, *about: Any) -> list[Any]:
        """The messages that the strategy inside would send, to boards that can do something.

        A training that ran for hours does not end because a board has joined whose floor the site does not know; before
        the first round it is an error where none is left.
        """
        messages = sampled(self.inner, kind, self._able, *about)
        if not (messages or self.rounds or self.site is None):
            nodes = list(about[-1].get_node_ids())
            for node in () if self._able(nodes) else nodes:
                self.site.floor_w(node)
        return messages

    def _able(self, nodes: Iterable[int]) -> list[int]:
        """Of some boards those that can do something: not spent, and with a floor where there is a site."""
        able = []
        for node in nodes:
            if node in self.boards and self.boards[node].spent:
                continue
            try:
                if self.site is not None:
                    self.site.floor_w(node)
            except InputError as exc:
                if node not in self._strangers:
                    _log.warning("%s It is left out. %s", exc.message, exc.hint)
                self._strangers.add(node)
                continue
            able.append(node)
        return able

    def _planned(
        self, nodes: Sequence[int], states: Sequence[BoardState]
    ) -> tuple[RoundPlan, dict[int, dict[str, float]]]:
        """The plan of a round, and the leases of a site's watts."""
        reports = [state.report for state in states]
        fronts = Fronts.of(
            [report.front if report else () for report in reports],
            [report.idle_w if report else 0 for report in reports],
        )
        limit_w = np.array([report.budget_w if report else math.inf for report in reports])
        overhead_s = np.array([self._usual_overhead_s(state) for state in states])
        step_s = np.array([r.train_s / r.steps if r and r.steps else math.nan for r in reports])
        length_s = self.length_s
        if length_s is None:
            searching = sum(not state.searched for state in states) > SEARCHING * len(states)
            length_s = round_length_s(self._times, overhead_s, step_s, searching=searching)
        leases: dict[int, dict[str, float]] = {}
        if self.site is not None:
            # The watts of one that was silent twice are better used by others; once, its reply may have been lost.
            limit_w = np.where([state.missed >= SILENT for state in states], 0.0, limit_w)
            data = np.array([report.data if report else 1 for report in reports], dtype=float)
            lasts_s = length_s + self._late_s(length_s)
            limit_w, leases = self.site.grant(
                self.clock.now_s(), nodes, fronts, limit_w, data, lasts_s, self.noise_batch, self.growth
            )
        return plan_round(fronts, limit_w, overhead_s, length_s, self.noise_batch), leases

    @staticmethod
    def _without_watts(
        nodes: Sequence[int], states: Sequence[BoardState], leases: Mapping[int, Mapping[str, float]]
    ) -> set[int]:
        """Boards whose share of a site is their floor: not asked now, and later as if nothing was known of them.

        One that was silent is asked, since it would not be heard of again.
        """
        found = {
            node: state
            for node, state in zip(nodes, states, strict=True)
            if node in leases and leases[node]["lease_w"] <= leases[node]["floor_w"] and not state.missed
        }
        if len(found) == len(nodes):
            return set()
        for state in found.values():
            state.report = state.report and _unknown(state.report)
        return set(found)

    def _usual_overhead_s(self, state: BoardState) -> float:
        """What a board's rounds take beside training; of one that is new, what they take on others."""
        if math.isfinite(state.overhead_s):
            return state.overhead_s
        seen = [other.overhead_s for other in self.boards.values() if math.isfinite(other.overhead_s)]
        return float(np.median(seen)) if seen else FIRST_OVERHEAD_S

    @staticmethod
    def _late_s(length_s: float) -> float:
        return LATE_S + LATE_SHARE * length_s

    def _references(self, node: int, state: BoardState) -> tuple[str, ...]:
        """What other boards have measured, for one that still searches; of a new one the kind is not known yet."""
        if state.report is None:
            return tuple([*found.values()][-1] for found in self._profiles.values())[-MOST_REFERENCES:]
        found = {} if state.searched else self._profiles.get(state.report.kind, {})
        return tuple(text for other, text in found.items() if other != node)

    def exchange(self, grid: Grid, messages: Sequence[Any], planned_s: float) -> tuple[list[Any], dict[int, float]]:
        """Send a round's messages and gather the replies, with when each came, in seconds since they were sent."""
        sent_s = self.clock.now_s()
        names = list(grid.push_messages(messages))
        waiting = set(names)
        # Boards that did not answer lately may, and nobody waits for them.
        doubtful = {
            name
            for name, message in zip(names, messages, strict=True)
            if self.boards[message.metadata.dst_node_id].missed
        }
        replies: list[Any] = []
        arrived: dict[int, float] = {}
        states = [self.boards[message.metadata.dst_node_id] for message in messages]
        is_new = any(math.isnan(state.overhead_s) and not state.missed for state in states)
        until_s = sent_s + planned_s + (FIRST_WAIT_S if is_new else self._late_s(planned_s))
        while waiting:
            now_s = self.clock.now_s()
            for reply in grid.pull_messages(list(waiting)):
                waiting.discard(reply.metadata.reply_to_message_id)
                replies.append(reply)
                arrived[reply.metadata.src_node_id] = now_s - sent_s
            if is_new and 2 * len(replies) > len(messages):  # so long it takes; the others get as much again
                is_new, until_s = False, now_s + max(now_s - sent_s, planned_s)
            if now_s >= (until_s if waiting - doubtful else sent_s + planned_s):
                break
            self.clock.sleep(POLL_S)
        return replies, arrived

    def aggregate_train(self, server_round: int, replies: Iterable[Any]) -> tuple[Any, Any]:
        """Bring updates to a common measure, and have the strategy inside average them by data."""
        good = [reply for reply in replies if not reply.has_error()]
        read = [(reply, self._read(reply)) for reply in good]
        with_work = [(reply, report) for reply, report in read if report is not None and report.progress > 0]
        if not with_work:
            made = [reply for reply, report in read if report is None]
            return self.inner.aggregate_train(server_round, made)  # type: ignore[no-any-return]
        weights = [float(max(report.data, 1)) for _, report in with_work]
        progress = [report.progress for _, report in with_work]
        seen = growth_of(progress, [self._norm(reply) for reply, _ in with_work])
        if seen is not None:
            self.growth = seen if self.growth is None else REMEMBERED * self.growth + (1 - REMEMBERED) * seen
        self._times = next_times(self._times, self.growth)
        factors = [1.0] * len(with_work)
        if self.normalise:
            factors = scales(progress, weights, 1.0 if self.growth is None else self.growth)
        for (reply, _), weight, factor in zip(with_work, weights, factors, strict=True):
            self._scale(reply, weight, factor)
        made = [reply for reply, _ in with_work]
        return self.inner.aggregate_train(server_round, made)  # type: ignore[no-any-return]

    def _norm(self, reply: Any) -> float:
        """How long an update is."""
        record = next(iter(reply.content.array_records.values()))
        pairs = (
            (self._arrays[key].numpy(), array.numpy()) for key, array in record.items() if self._scales(key, array)
        )
        return math.sqrt(math.fsum(float(np.square(after - before, dtype=np.float64).sum()) for before, after in pairs))

    def _scales(self, key: str, array: Any) -> bool:
        """Whether this is a weight that was trained: neither a statistic of batches nor a count."""
        return not self.is_statistic(key) and np.issubdtype(np.dtype(array.dtype), np.floating)

    def _read(self, reply: Any) -> Report | None:
        if KEY not in reply.content:
            return None
        try:
            return Report.read(dict(reply.content[KEY]))
        except InputError as exc:
            _log.warning("The report of node %s is left out: %s", reply.metadata.src_node_id, exc)
            return None

    def _scale(self, reply: Any, weight: float, factor: float) -> None:
        """Put the scaled update into a reply; weights that are no numbers of a kind that can be scaled stay."""
        name, record = next(iter(reply.content.array_records.items()))
        made = {}
        for key, array in record.items():
            if factor == 1.0 or not self._scales(key, array):
                made[key] = array
                continue
            values, before = array.numpy(), self._arrays[key].numpy()
            made[key] = Array((before + factor * (values - before)).astype(values.dtype))
        reply.content[name] = ArrayRecord(made)
        metrics = next(iter(reply.content.metric_records.values()))
        metrics[self.inner.weighted_by_key] = weight

    def configure_evaluate(self, server_round: int, arrays: Any, config: Any, grid: Grid) -> Iterable[Any]:
        """As the strategy inside does, but for boards that can do nothing any more; with a site, at their floors."""
        messages = self._to_ask("evaluate", server_round, arrays, config, grid)
        if self.site is None:
            return messages
        nodes = [message.metadata.dst_node_id for message in messages]
        self.site.drawn_w(self.clock.now_s(), nodes)  # from now on it counts with those that no round has asked yet
        floors_w = map(self.site.floor_w, nodes)
        return [
            _with_work(message, Work(number=server_round, floor_w=floor_w))
            for message, floor_w in zip(messages, floors_w, strict=True)
        ]

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Any]) -> Any:
        """As the strategy inside does."""
        return self.inner.aggregate_evaluate(server_round, replies)

    # All rounds

    def start(
        self,
        grid: Grid,
        initial_arrays: Any,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: Any = None,
        evaluate_config: Any = None,
        evaluate_fn: Callable[[int, Any], Any] | None = None,
    ) -> Any:
        """Train for so many rounds; ``timeout`` is that of evaluations, as rounds end by themselves."""
        self.summary()
        train_config = ConfigRecord() if train_config is None else train_config
        evaluate_config = ConfigRecord() if evaluate_config is None else evaluate_config
        result, arrays = Result(), initial_arrays
        if evaluate_fn and (found := evaluate_fn(0, arrays)) is not None:
            result.evaluate_metrics_serverapp[0] = found
        began = time.monotonic()
        for number in range(1, num_rounds + 1):
            if self._all_are_spent(grid):
                _log.warning("No board has joules or time left: training ends before round %d.", number)
                break
            trained, metrics = self._round(number, arrays, train_config, grid)
            if trained is not None:
                result.arrays = arrays = trained
            if metrics is not None:
                result.train_metrics_clientapp[number] = metrics
            messages = list(self.configure_evaluate(number, arrays, evaluate_config, grid))
            if messages:
                replies = grid.send_and_receive(messages, timeout=timeout)
                if (scored := self.aggregate_evaluate(number, replies)) is not None:
                    result.evaluate_metrics_clientapp[number] = scored
            if evaluate_fn and (found := evaluate_fn(number, arrays)) is not None:
                result.evaluate_metrics_serverapp[number] = found
        _log.info("%d rounds took %.1f s.", len(self.rounds), time.monotonic() - began)
        return result

    def _all_are_spent(self, grid: Grid) -> bool:
        """Whether all boards that are there have said that they do no more, but for those that are left out."""
        if not any(state.spent for state in self.boards.values()):
            return False
        nodes = list(grid.get_node_ids())
        return bool(nodes) and not self._able(nodes)

    def _round(self, number: int, arrays: Any, config: Any, grid: Grid) -> tuple[Any, MetricRecord | None]:
        begun_s = self.clock.now_s()
        messages = self.configure_train(number, arrays, config, grid)
        if not messages:
            return None, None
        planned_s = max(
            float(one.content[KEY]["train-s"]) + self._usual_overhead_s(self.boards[one.metadata.dst_node_id])
            for one in messages
        )
        replies, arrived = self.exchange(grid, messages, planned_s)
        reports = self._learn(messages, replies, arrived)
        ended_s = self.clock.now_s()
        lacking = tuple(m.metadata.dst_node_id for m in messages if m.metadata.dst_node_id not in reports)
        self.rounds.append(RoundRecord(number, begun_s, ended_s, planned_s, reports, arrived, lacking))
        found: tuple[Any, MetricRecord | None] = self.aggregate_train(number, replies)
        return found

    def _learn(self, messages: Sequence[Any], replies: Sequence[Any], arrived: dict[int, float]) -> dict[int, Report]:
        """Take in what the boards reported; who did not answer, or did less than it can, is noticed."""
        reports = {}
        for reply in replies:
            node = reply.metadata.src_node_id
            report = None if reply.has_error() else self._read(reply)
            if report is not None:
                reports[node] = report
        for message in messages:
            node = message.metadata.dst_node_id
            state = self.boards[node]
            if node not in reports:
                state.missed += 1
                _log.info("Node %s did not answer (%d in a row).", node, state.missed)
                continue
            report, state.missed = reports[node], 0
            if not (report.steps or report.spent) and state.report is not None:
                # Its watts were too few for a step: next time it gets a share as if nothing was known of it.
                report = _unknown(state.report)
            if state.report is not None and abs(report.budget_w / state.report.budget_w - 1) > SAME_LEVEL:
                state.searched = False  # other watts: it chooses anew
            state.report, state.searched = report, state.searched or report.searched
            if report.spent:
                _log.info("Node %s has no joules or no time left, and is asked no more in this run.", node)
            if report.profile and report.front_batch:
                of_kind = self._profiles.setdefault(report.kind, {})
                of_kind.pop(node, None)
                of_kind[node] = report.profile
                if len(of_kind) > MOST_OF_A_KIND + 1:
                    del of_kind[next(iter(of_kind))]
            seen_s = max(arrived[node] - report.busy_s, 0.0)
            before_s = state.overhead_s
            state.overhead_s = REMEMBERED * before_s + (1 - REMEMBERED) * seen_s if math.isfinite(before_s) else seen_s
            if self.site is not None:
                self.site.returned(node, searched=report.searched)
            if state.promised and report.steps < state.promised // 2:
                _log.info("Node %s did %d of %d steps.", node, report.steps, state.promised)
        return reports


def _unknown(report: Report) -> Report:
    """A report as if nothing was known of what the board can do."""
    return replace(report, front_batch=(), front_w=(), front_s=(), front_s_high=())


def _with_work(message: Any, work: Work) -> Any:
    """A message of the strategy inside, with what the board is to do."""
    record = RecordDict(dict(message.content))
    record[KEY] = ConfigRecord(work.as_record())
    about = message.metadata
    return Message(record, about.dst_node_id, about.message_type, group_id=str(work.number))
