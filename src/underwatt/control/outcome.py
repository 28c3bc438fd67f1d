"""What a search has come to: a setting that is out already, why nothing fits, or what was chosen and what it takes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from underwatt.control.knowledge import Knowledge
from underwatt.errors import BudgetError, OutOfMemoryError
from underwatt.events import Expected, Planned

if TYPE_CHECKING:
    from underwatt.budget import Budget
    from underwatt.control.headroom import Room
    from underwatt.control.options import ControlOptions
    from underwatt.planning.problem import Problem
    from underwatt.records import Measurement, Setting

FEWEST_STEPS = 3


def is_decided(so_far: Measurement | None, room: Room, knowledge: Knowledge, options: ControlOptions) -> bool:
    """Whether a setting under measurement is out already: it draws too much, or is clearly too slow."""
    if so_far is None or so_far.power_w_ci95 > 2 * options.rough * so_far.power_w:
        return False
    seen = knowledge.drift.seen_from(so_far)
    if room.has_knobs and seen.power_w - seen.power_w_ci95 > room.left_w:
        return True
    if so_far.steps < FEWEST_STEPS or so_far.step_s_ci95 > options.rough * so_far.step_s:
        return False
    problem = room.problem()
    best, trial = knowledge.best(problem), Knowledge(problem, [seen]).best(problem)
    return bool(best and best.fits and trial and trial.time_s > options.hopeless * best.time_s)


def expected_s(base: Problem, knowledge: Knowledge, setting: Setting | None) -> float:
    """What a whole training takes at a setting, as the device is now; inf while that is not known."""
    known = knowledge.of(setting) if setting else None
    if known is None:
        return math.inf
    row = int(np.argmax(base.candidates.batch_size == known.setting.batch_size))
    return float(known.step_s * knowledge.drift.slow_factor * np.exp(base.log_steps[row]))


def no_size_left() -> OutOfMemoryError:
    """What to say where every batch size is known not to fit into memory."""
    return OutOfMemoryError(
        "Every offered batch size ran out of memory when it was measured before.",
        hint="Offer smaller batch sizes, or measure anew with another store.",
    )


def why_nothing_fits(room: Room, knowledge: Knowledge, budget: Budget) -> BudgetError | None:
    """Why nothing that was measured keeps the budget; ``None`` where something does, or nothing was measured."""
    best = knowledge.best(problem := room.problem())
    if best is None or best.fits:
        return None
    if math.isinf(room.budget_w):
        found = [knowledge.outcome(m.setting, problem) for m in knowledge.measurements()]
        time_s, energy_j = min(o.time_s for o in found if o), min(o.energy_j for o in found if o)
        return BudgetError(
            f"No setting reaches the target within {budget}: the soonest takes {time_s:.4g} s, the thriftiest "
            f"{energy_j / 3600:.4g} Wh.",
            hint="Raise the energy or the time of the budget, or choose an easier target.",
        )
    least_w = min(budget.drawn_w(m) for m in knowledge.measurements()) + knowledge.drift.extra_w
    return BudgetError(
        f"No setting keeps {room.budget_w:g} W: the least that was measured is {least_w:.2f} W.",
        hint=f"Raise the budget to {math.ceil(10 * least_w * 1.02) / 10:g} W, or offer smaller batch sizes.",
    )


def plan_of(room: Room, knowledge: Knowledge, setting: Setting) -> Planned | None:
    """The chosen setting, what it is expected to take, and why; ``None`` where it was not measured."""
    chosen = knowledge.outcome(setting, room.problem())
    if chosen is None:
        return None
    power_w = min(chosen.measurement.power_w + knowledge.drift.extra_w, room.held_w)
    expected = Expected(chosen.time_s, power_w, chosen.time_s * power_w)
    count = len(knowledge.measurements())
    bound = "no bound on watts" if math.isinf(room.budget_w) else f"{room.budget_w:g} W"
    reason = f"It is the best of {count} settings that were measured, under {bound}."
    return Planned(chosen=setting, expected=expected, reason=reason)
