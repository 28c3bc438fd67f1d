"""Runs with a deadline, or with joules, on virtual boards: what they say, what they use, when they end."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from run_world import QUICK, SIZES, Hurt, Run, running, seen_before, virtual

from underwatt.budget import Budget, Schedule, parse_budget
from underwatt.control.live_budget import LiveBudget
from underwatt.convergence.curve import SampleTable

SAMPLES = 40_000
TABLE = SampleTable(dict.fromkeys(SIZES, float(SAMPLES)))


@dataclass
class Trained:
    seconds: float
    energy_j: float
    notes: list[tuple[float, str]]

    def about_deadline(self) -> list[str]:
        return [text for _, text in self.notes if "deadline" in text]


def to_target(run: Run, samples: int = SAMPLES) -> Trained:
    done, begin_j = 0, run.device.board.energy_j
    while done < samples:
        done += run.step()
        run.controller.progressed(done / SAMPLES)
    notes = [(event.at_s, event.text) for event in run.said("note")]
    return Trained(run.elapsed_s, run.device.board.energy_j - begin_j, notes)


def train(budget: str, *, is_known: bool = True, knobs: bool = True) -> Trained:
    device = Hurt(virtual(), knobs=knobs)
    known = seen_before(device) if is_known and knobs else ()
    live = LiveBudget(parse_budget(budget))
    options = QUICK if is_known else None  # a hasty search from nothing finds little
    with running(device, live, known=known, options=options, convergence=TABLE) as run:
        return to_target(run)


@pytest.fixture(scope="module")
def soonest() -> Trained:
    return train("14W")


@pytest.mark.parametrize("budget", ["14W", ""])
@pytest.mark.parametrize("is_known", [True, False])
def test_with_time_enough_the_thriftiest_way_is_taken(budget: str, is_known: bool) -> None:
    """Beside a run without a deadline that knows as much: a search costs both of them the same."""
    soonest = train(budget or "100W", is_known=is_known)
    deadline_s = 2 * soonest.seconds
    trained = train(f"{budget},{deadline_s}s".lstrip(","), is_known=is_known)
    assert trained.seconds <= deadline_s
    assert trained.energy_j < 0.97 * soonest.energy_j
    at_s, said = next(note for note in trained.notes if "deadline" in note[1])
    assert "can be made" in said
    assert at_s <= (1.0 if is_known else 60.0), "it is said as soon as it can be told"


def test_a_tight_deadline_is_met_with_less_energy_than_the_soonest_takes(soonest: Trained) -> None:
    trained = train(f"14W,{1.1 * soonest.seconds}s")
    assert trained.seconds <= 1.1 * soonest.seconds
    assert trained.energy_j <= soonest.energy_j


def test_a_deadline_that_cannot_be_made_is_said_at_once_and_costs_no_speed(soonest: Trained) -> None:
    trained = train(f"14W,{soonest.seconds / 2}s")
    [(at_s, said)] = [note for note in trained.notes if "deadline" in note[1]]
    assert at_s <= 1.0
    assert "cannot be made" in said
    assert "late" in said
    assert trained.seconds == pytest.approx(soonest.seconds, rel=0.05)


def test_a_deadline_holds_over_a_schedule(soonest: Trained) -> None:
    """After a while only little is allowed: who dawdles at first is late."""
    drop_s = 0.6 * soonest.seconds

    def run_it(deadline_s: float | None) -> Trained:
        device = Hurt(virtual())
        budget = Budget(schedule=Schedule.of([(0.0, 14.0), (drop_s, 6.0)]), deadline_s=deadline_s)
        with running(device, LiveBudget(budget), known=seen_before(device), options=QUICK, convergence=TABLE) as run:
            return to_target(run)

    free = run_it(None)
    bounded = run_it(1.15 * free.seconds)
    assert bounded.seconds <= 1.15 * free.seconds
    assert bounded.energy_j <= 1.01 * free.energy_j


def test_where_only_pauses_help_a_deadline_is_judged_with_them() -> None:
    alone = train("7W", knobs=False)
    trained = train(f"7W,{1.5 * alone.seconds}s", knobs=False)
    assert "can be made" in trained.about_deadline()[-1]
    assert trained.seconds <= 1.5 * alone.seconds


def test_without_convergence_nothing_can_be_said_and_that_is_said_once() -> None:
    device = Hurt(virtual())
    live = LiveBudget(parse_budget("14W, 2h"))
    with running(device, live, known=seen_before(device), options=QUICK) as run:
        run.train(30)
        [said] = [text for text in run.notes("warning") if "deadline" in text]
        assert "is not known" in said
        assert run.train(10)[0] > 9.0, "as fast as the budget allows"
