"""The records that flow through Underwatt: frozen, plain, units in every name.

One unit per quantity inside the package: seconds, watts, joules, MHz, bytes, degrees Celsius.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from enum import Enum
from functools import cache
from itertools import chain
from pathlib import PurePath
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast, get_args, get_origin, get_type_hints

from underwatt.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_SAID = {"said": True}  # of a field with a default that files hold all the same: without it they are damaged


@dataclass(frozen=True, slots=True)
class PowerMode:
    """A value for each knob of a device; ``None`` means the device has no such knob, or it is left alone."""

    cpu_cores: int | None = None
    cpu_mhz: float | None = None
    gpu_mhz: float | None = None
    mem_mhz: float | None = None
    power_limit_w: float | None = None

    def __post_init__(self) -> None:
        for name in KNOBS:
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise InputError(f"{name} must be a positive number, not {value!r}.")

    def knobs(self) -> dict[str, float]:
        """The knobs that have a value, in the order of ``KNOBS``."""
        return {name: value for name in KNOBS if (value := getattr(self, name)) is not None}

    @classmethod
    def of(cls, knobs: Mapping[str, float]) -> PowerMode:
        """A mode from knob names and numbers, as tables and journals hold them."""
        if unknown := knobs.keys() - set(KNOBS):
            raise InputError(f"There is no knob {', '.join(sorted(unknown))}; the knobs are {', '.join(KNOBS)}.")
        values: dict[str, Any] = dict(knobs)
        if "cpu_cores" in values:
            values["cpu_cores"] = int(values["cpu_cores"])
        return cls(**values)

    def with_knobs(self, **values: float | None) -> PowerMode:
        """The same mode with some knobs changed."""
        return replace(self, **values)  # type: ignore[arg-type]

    def __str__(self) -> str:
        parts = {
            "cpu_cores": "{:g} core" if self.cpu_cores == 1 else "{:g} cores",
            "cpu_mhz": "CPU {:g} MHz",
            "gpu_mhz": "GPU {:g} MHz",
            "mem_mhz": "memory {:g} MHz",
            "power_limit_w": "limit {:g} W",
        }
        return ", ".join(parts[name].format(value) for name, value in self.knobs().items()) or "as it is"


KNOBS: tuple[str, ...] = tuple(f.name for f in fields(PowerMode))


@dataclass(frozen=True, slots=True)
class Setting:
    """What Underwatt chooses: a power mode and a batch size together."""

    mode: PowerMode
    batch_size: int

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise InputError(f"Batch size must be at least 1, not {self.batch_size}.")

    def __str__(self) -> str:
        return f"batch {self.batch_size}, {self.mode}"


@dataclass(frozen=True, slots=True)
class PowerSample:
    """One reading of the device's total power; ``energy_j`` is the hardware counter where there is one."""

    at_s: float
    power_w: float
    energy_j: float | None = None
    counted_w: float | None = None  # the mean since the reading before, by that counter; a meter knows it

    @property
    def mean_w(self) -> float:
        """What this reading says of a mean: single readings of steps and pauses miss most of either."""
        return self.power_w if self.counted_w is None else self.counted_w


@dataclass(frozen=True, slots=True)
class DeviceState:
    """What a device is doing now: clocks as they run, rails, temperatures, and why it is slowed down."""

    running: PowerMode
    rails_w: Mapping[str, float] = field(default_factory=dict)
    temperatures_c: Mapping[str, float] = field(default_factory=dict)
    throttle_reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """Who a device is.

    ``address`` opens it again (``jetson:/``, ``nvml:GPU-…``, ``virtual:nano``). ``simulated`` is shown wherever
    its figures are. ``in_process`` devices live and die with this process: there is nothing to restore after it.
    ``power_of`` says what its watts are the watts of, such as ``module (VDD_IN)``; empty where nobody knows.
    """

    backend: str
    name: str
    id: str
    address: str
    simulated: bool = False
    in_process: bool = False
    software: Mapping[str, str] = field(default_factory=dict)
    power_of: str = ""

    @property
    def about_watts(self) -> str:
        """A sentence for where its watts are shown first."""
        return f"Watts are those of the {self.power_of}, not of the wall." if self.power_of else ""


@dataclass(frozen=True, slots=True)
class Capability:
    """One knob or sensor of a device: is it there, may this user use it, and if not, what would permit it."""

    name: str
    kind: str  # "knob" or "sensor"
    usable: bool
    detail: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class WorkloadInfo:
    """Who a training job is: a name for people, and a hash of what it computes so that profiles are not mixed."""

    name: str
    id: str
    software: Mapping[str, str] = field(default_factory=dict)
    batch_sizes: tuple[int, ...] = ()  # that the job may be trained with, where it says so


@dataclass(frozen=True, slots=True)
class WorkloadCost:
    """What training costs, counted without running it; a step at batch size b costs per_step + b × per_sample."""

    flops_per_sample: float  # forward and backward
    bytes_per_sample: float  # moved through memory for each sample
    bytes_per_step: float  # moved whatever the batch size: weights, gradients, optimizer state
    kernels_per_step: float  # launches by the CPU
    load_bytes_per_sample: float  # input prepared by the CPU
    parameters: float
    state_bytes: float  # resident: weights, gradients, optimizer state
    activation_bytes_per_sample: float  # resident until the backward pass

    def memory_bytes(self, batch_size: int) -> float:
        """Memory resident at the peak of one step."""
        return self.state_bytes + batch_size * self.activation_bytes_per_sample

    def of_test(self) -> WorkloadCost:
        """The same for a test of the model: forward only, a third of the work, and nothing is kept or updated."""
        return replace(
            self,
            flops_per_sample=self.flops_per_sample / 3,
            bytes_per_sample=self.bytes_per_sample / 3,
            bytes_per_step=4 * self.parameters,
            kernels_per_step=self.kernels_per_step / 3,
            activation_bytes_per_sample=0.0,
        )

    def of_transfer(self) -> WorkloadCost:
        """The same for writing the training's state to a disk, or reading it from there: the CPU's work alone."""
        return WorkloadCost(0.0, 0.0, 0.0, 1.0, self.state_bytes, self.parameters, self.state_bytes, 0.0)


class Status(str, Enum):
    """How a measurement ended."""

    OK = "ok"
    THROTTLED = "throttled"  # measured, but the device slowed itself down
    OUT_OF_MEMORY = "out_of_memory"
    FAILED = "failed"
    DISTURBED = "disturbed"  # measured beside something else that drew power: not what the setting draws by itself


@dataclass(frozen=True, slots=True)
class Measurement:
    """One setting, measured: time per step, mean and peak watts, and how sure that is.

    ``*_ci95`` are half widths of the 95% interval, in the unit of the value. Times and watts are NaN where the
    status says that nothing was measured.
    """

    setting: Setting
    step_s: float = field(default=math.nan, metadata=_SAID)
    power_w: float = field(default=math.nan, metadata=_SAID)
    peak_w: float = math.nan
    energy_j: float = math.nan  # over the measured window
    window_s: float = math.nan  # the measured window; settling and warm-up are not in it
    cost_s: float = math.nan  # everything this measurement took, mode change, settling and warm-up included
    step_s_ci95: float = math.nan
    power_w_ci95: float = math.nan
    steps: int = 0
    samples: int = 0
    missed_samples: int = 0
    status: Status = field(default=Status.OK, metadata=_SAID)
    note: str = ""

    @property
    def usable(self) -> bool:
        """Whether time and power were measured."""
        return self.status in (Status.OK, Status.THROTTLED)


def lasting(measurements: Iterable[Measurement]) -> tuple[Measurement, ...]:
    """Those that also count another time: what failed, or was disturbed, may go otherwise then, and is to be tried."""
    return tuple(m for m in measurements if m.status not in (Status.FAILED, Status.DISTURBED))


@dataclass(frozen=True, slots=True)
class Profile:
    """Measurements of one workload on one device."""

    device: DeviceInfo
    workload: WorkloadInfo
    measurements: tuple[Measurement, ...] = ()

    def usable(self) -> tuple[Measurement, ...]:
        """The measurements that hold a time and a power."""
        return tuple(m for m in self.measurements if m.usable)


@dataclass(frozen=True, slots=True)
class ConvergenceRun:
    """One training at one batch size: how many samples it took to reach a target; NaN means never reached.

    ``given_up_samples`` says where a run that might have got there with more samples was given up; NaN for others.
    """

    batch_size: int
    target: float
    samples: float
    seed: int = 0
    learning_rate: float = math.nan
    given_up_samples: float = math.nan

    def __post_init__(self) -> None:
        if not math.isfinite(self.target):
            raise InputError(f"The target of a convergence run must be a number, not {self.target!r}.")

    @property
    def reached(self) -> bool:
        """Whether the target was reached at all."""
        return math.isfinite(self.samples)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Mean and standard deviation of log step time and log mean power, one entry for each setting asked about."""

    log_step_s: NDArray[np.float64]
    log_step_s_std: NDArray[np.float64]
    log_power_w: NDArray[np.float64]
    log_power_w_std: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.log_step_s)


# The codec: every record as JSON values, and flat ones as rows of the store and of CSV files. All of it follows from
# the fields of the dataclass, so that a new field is in every form at once.

_Record = TypeVar("_Record")


def to_json(value: Any) -> Any:
    """A record as plain JSON values: dataclasses become objects, NaN becomes null.

    A field with the metadata ``omit_none`` is left out where it is ``None``.
    """
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if hasattr(value, "__dataclass_fields__"):
        values = ((f, getattr(value, f.name)) for f in fields(value))
        return {f.name: to_json(item) for f, item in values if not (item is None and f.metadata.get("omit_none"))}
    if isinstance(value, dict):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    return value


def from_json(record: type[_Record], value: Any, where: str = "") -> _Record:
    """A record from what ``to_json`` made of it; raises ``InputError`` that names the field that makes no sense.

    A field that is missing takes its default; one that the record does not have is left out, so that older and newer
    files can be read; null is NaN where a number is wanted.
    """
    return cast("_Record", _decoded(record, value, where or record.__name__))


def to_row(record: Any) -> dict[str, Any]:
    """A record as one flat row: the values of the records inside it stand beside its own."""
    row: dict[str, Any] = {}
    for column in _fields(record.__class__):
        value = getattr(record, column.name)
        row |= to_row(value) if column.is_record else {column.name: to_json(value)}
    return row


def from_row(record: type[_Record], row: Mapping[str, Any]) -> _Record:
    """A record from what ``to_row`` made of it; columns of something else are passed over."""
    return cast("_Record", _decoded_record(record, row, record.__name__, is_row=True))


class Column(NamedTuple):
    """One field of a record, and so one column of its rows."""

    name: str
    kind: Any  # its type, without None
    null: Any  # what null, or a blank cell, stands for: None or NaN; MISSING where it is an error
    required: bool  # in a file, where not every field that has a default may be missing
    is_record: bool


def columns(record: Any) -> tuple[Column, ...]:
    """The columns of the rows of a record, in order."""
    nested = (columns(column.kind) if column.is_record else (column,) for column in _fields(record))
    return tuple(chain.from_iterable(nested))


@cache
def _fields(record: Any) -> tuple[Column, ...]:
    hints = get_type_hints(record, localns=globals())  # other modules may import our records for their types only
    found = []
    for part in fields(record):
        kind, null = _kind(hints[part.name])
        required = (part.default is MISSING and part.default_factory is MISSING) or part.metadata == _SAID
        found.append(Column(part.name, kind, null, required, is_dataclass(kind)))
    return tuple(found)


def _kind(hint: Any) -> tuple[Any, Any]:
    """A type without None, and what null stands for."""
    if get_origin(hint) is UnionType:
        return next(one for one in get_args(hint) if one is not NoneType), None
    return hint, math.nan if hint is float else MISSING


def _decoded(kind: Any, value: Any, where: str, null: Any = MISSING) -> Any:
    if value is None and null is not MISSING:
        return null
    try:
        if kind in (int, float) and not isinstance(value, (bool, str)):
            # A whole number may stand as 8.0, and has to fit a column of the store.
            if kind is float or (value == int(value) and abs(value) < 2**63):
                return kind(value)
        elif kind in (str, bool) and isinstance(value, kind):
            return value
        elif is_dataclass(kind) and isinstance(value, Mapping):
            return _decoded_record(kind, value, where)
        elif isinstance(kind, type) and issubclass(kind, Enum):
            return kind(value)
        elif get_origin(kind) is tuple and isinstance(value, (list, tuple)):
            of, null = _kind(get_args(kind)[0])
            return tuple(_decoded(of, item, f"{where}[{at}]", null) for at, item in enumerate(value))
        elif get_origin(kind) is Mapping and isinstance(value, Mapping):
            of, null = _kind(get_args(kind)[1])
            return {str(key): _decoded(of, item, f"{where}.{key}", null) for key, item in value.items()}
    except (TypeError, ValueError, OverflowError):
        pass
    raise InputError(f"{where} cannot be {value!r:.80}.")


def _decoded_record(record: Any, value: Mapping[str, Any], where: str, *, is_row: bool = False) -> Any:
    if record is PowerMode and not is_row and (unknown := value.keys() - set(KNOBS)):  # without it: another mode
        raise InputError(f"There is no knob {', '.join(sorted(unknown))}; the knobs are {', '.join(KNOBS)}.")
    found = {}
    for name, kind, null, required, is_record in _fields(record):
        if is_row and is_record:
            found[name] = _decoded_record(kind, value, where, is_row=True)
        elif name in value:
            item = value[name]
            # Nearly every value is as it should be, and a store holds many.
            fits = type(item) is kind and kind is not int
            found[name] = item if fits else _decoded(kind, item, f"{where}.{name}", null)
        elif required:
            raise InputError(f"{where} has no {name}.")
    return record(**found)
