"""The figures of a report as plain records: what tests read and what is drawn. Nothing here knows how it looks.

Every figure has a ``message``: what it shows, in words, for those who cannot see it and those in a hurry.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from underwatt.events import Verdict
    from underwatt.planning.choice import Expectation
    from underwatt.records import ConvergenceRun, Measurement, Setting
    from underwatt.rivals.compare import Alternative

    Floats = tuple[float, ...]
    Grid = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Title:
    """Whose report this is."""

    workload: str
    device: str
    simulated: bool
    about_watts: str  # what they are the watts of; empty where nobody knows
    budget: str  # empty where none was given
    target: float | None  # of the run, where there is one
    made_at: str
    version: str


@dataclass(frozen=True, slots=True)
class Missing:
    """A section that is left out, why, and the command that would provide it."""

    section: str
    why: str
    command: str


@dataclass(frozen=True, slots=True)
class KeyFigure:
    """A number worth a large font, what it is, and what surrounds it."""

    name: str
    value: str
    detail: str


@dataclass(frozen=True, slots=True)
class Decision:
    """The choice in one sentence, and why it was made."""

    sentence: str
    reason: str
    key_figures: tuple[KeyFigure, ...]
    command: str = ""  # that sets it by hand


@dataclass(frozen=True, slots=True)
class Other:
    """What somebody else would choose; label and letter stand for it where there is little room for its name."""

    letter: str
    label: str
    choice: Alternative


@dataclass(frozen=True, slots=True)
class MeasuredPoint:
    """A measured setting, seen as time to the target."""

    setting: Setting
    time_s: float
    power_w: float
    fits: bool


@dataclass(frozen=True, slots=True)
class Front:
    """Time against power: the front with its band, what was measured, the choice, and what others would choose."""

    per: str  # "target" or "sample": what the time is the time of
    budget_w: float | None
    bounds: str  # "mean" or "peak": which watts the budget bounds; those drawn are means
    front: tuple[Expectation, ...]  # from the fastest to the one that draws least
    measured: tuple[MeasuredPoint, ...]
    chosen: Expectation
    others: tuple[Other, ...]
    settings: int
    keeping: int  # how many settings keep the budget
    paused: int  # how many are shown as pauses between steps hold them
    message: str


@dataclass(frozen=True, slots=True)
class HeatMap:
    """One quantity over batch size and clock, the other knobs as the choice has them; one row a clock."""

    quantity: str  # "time_s" or "power_w"
    per: str
    knob: str
    knob_values: Floats
    batch_sizes: tuple[int, ...]
    values: Grid  # NaN where the setting cannot run
    keeps: tuple[tuple[bool, ...], ...]
    measured: tuple[tuple[bool, ...], ...]
    chosen: tuple[int, int]  # row and column
    paused: int  # how many cells are shown as pauses between steps hold them
    others_at: str  # where the other knobs stand
    message: str


@dataclass(frozen=True, slots=True)
class Convergence:
    """Samples to the target by batch size: trainings, and the fitted curve with its 90% interval."""

    target: float
    runs: tuple[ConvergenceRun, ...]
    batch_sizes: tuple[int, ...]
    samples: Floats
    low: Floats
    high: Floats
    chosen_batch_size: int | None
    message: str


@dataclass(frozen=True, slots=True)
class Checked:
    """One quantity of settings that were held back: measured, predicted, and the bounds of a 90% interval."""

    quantity: str  # "step_s" or "power_w"
    measured: Floats
    predicted: Floats
    low: Floats
    high: Floats
    mean_error: float  # percent


@dataclass(frozen=True, slots=True)
class Parity:
    """Predicted against measured."""

    settings: tuple[Setting, ...]
    step_s: Checked
    power_w: Checked
    measured: int  # how many settings were measured; where there are very many, some of them are checked
    message: str


@dataclass(frozen=True, slots=True)
class Change:
    """Something the run did: a new budget, a new setting, a note."""

    at_s: float
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class PowerTrace:
    """Readings of a run against its budget; thinned so that no extreme and no excess is lost."""

    simulated: bool
    at_s: Floats
    power_w: Floats
    readings: int  # before thinning
    mean_at_s: Floats
    low_w: Floats
    mean_w: Floats
    high_w: Floats
    budget_at_s: Floats
    budget_w: Floats
    over_at_s: Floats  # shown readings above the budget
    over_power_w: Floats
    readings_over: int  # before thinning
    windows_s: Floats  # over how long readings are averaged to judge them, by step of the budget; 0 for peaks
    bounded_s: float  # that watts were bounded
    judged_s: float  # of it, what could be judged: readings that a sensor's lag excuses could not
    time_over_s: float  # of it, that power was over by more than the tolerance
    energy_over_j: float
    changes: tuple[Change, ...]
    message: str


@dataclass(frozen=True, slots=True)
class Along:
    """A run as it went, beside its watts: scores, samples a second with all pauses counted, clock and temperature."""

    simulated: bool
    end_s: float
    score_at_s: Floats
    scores: Floats
    target: float | None
    at_s: Floats
    samples_a_second: Floats
    clock: str  # the knob that is shown; empty where no clock was read
    clock_at_s: Floats
    clock_values: Floats
    temperature_at_s: Floats
    temperature_c: Floats
    message: str


@dataclass(frozen=True, slots=True)
class Level:
    """What was done at one level of the budget, over all the time that it held."""

    allowed: str
    time_s: float
    setting: Setting  # the one that was held longest
    share: float  # of the time, that it was in use
    samples_a_second: float
    power_w: float
    command: str  # that sets its mode by hand


@dataclass(frozen=True, slots=True)
class Levels:
    """The decision for each level of a budget that changed."""

    rows: tuple[Level, ...]
    message: str


@dataclass(frozen=True, slots=True)
class EnergyOverTime:
    """Energy spent as a run went on, and what the plan expected of the whole of it."""

    simulated: bool
    at_s: Floats
    energy_j: Floats
    expected_j: float | None
    expected_under: str  # the budget for which it was expected
    budget_j: float | None
    message: str


@dataclass(frozen=True, slots=True)
class Share:
    """What a run spent at one setting."""

    setting: Setting
    time_s: float
    energy_j: float


@dataclass(frozen=True, slots=True)
class EnergySpent:
    """Energy of a run by setting, the largest part first."""

    shares: tuple[Share, ...]
    message: str


@dataclass(frozen=True, slots=True)
class EnergyBySetting:
    """Expected energy to the target of the choice and of what others would choose."""

    chosen: Expectation
    others: tuple[Other, ...]
    message: str


@dataclass(frozen=True, slots=True)
class Measurements:
    """Everything that was measured, in the order it was."""

    knobs: tuple[str, ...]
    rows: tuple[Measurement, ...]
    message: str


@dataclass(frozen=True, slots=True)
class Report:
    """All figures; ``None`` where the data are missing, which ``missing`` then says."""

    title: Title
    decision: Decision | None = None
    verdict: Verdict | None = None  # on the run's budget; none where there is no run
    happened: str = ""  # how the run went, empty where there is none
    front: Front | None = None
    time_map: HeatMap | None = None
    power_map: HeatMap | None = None
    convergence: Convergence | None = None
    parity: Parity | None = None
    trace: PowerTrace | None = None
    along: Along | None = None
    levels: Levels | None = None
    energy_over_time: EnergyOverTime | None = None
    energy_spent: EnergySpent | None = None
    energy_by_setting: EnergyBySetting | None = None
    measurements: Measurements | None = None
    assumptions: tuple[str, ...] = ()
    missing: tuple[Missing, ...] = ()
