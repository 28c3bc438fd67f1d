"""A training job as its author describes it: model, data, what to reach, and how its learning rate follows batches.

``load_job`` makes it from an address such as ``train.py:job``.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from underwatt._imports import require
from underwatt.errors import InputError, JobError, UnderwattError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    import torch

USAGE_HINT = "Write it as file.py:factory or module:factory, where factory() returns an underwatt Job."
DEFAULT_BATCH_SIZES = (4, 8, 16, 32, 64, 128)
LIKE_PERCENT = 2.0  # a target above it was meant so; none that is above 1 is ever reached
RuleName = Literal["sqrt", "linear", "none"]
# A callable gets (learning rate, its batch size, the new batch size) and returns the new learning rate.
LrRule: TypeAlias = RuleName | Callable[[float, int, int], float]
RULES: dict[str, Callable[[float, int, int], float]] = {
    "sqrt": lambda lr, base, batch_size: lr * math.sqrt(batch_size / base),
    "linear": lambda lr, base, batch_size: lr * batch_size / base,
    "none": lambda lr, _base, _batch_size: lr,
}


def scaled_lr(lr: float, base_batch_size: int, batch_size: int, rule: LrRule) -> float:
    """The learning rate at ``batch_size``, given the one that suits ``base_batch_size``.

    ``sqrt`` keeps the noise of adaptive optimizers (Adam, AdamW) alike across batch sizes, ``linear`` that of SGD.
    """
    if not callable(rule) and rule not in RULES:
        raise JobError(
            f"There is no learning-rate rule {rule!r}.", hint=f"Use {', '.join(RULES)}, or a function of your own."
        )
    scaled = (rule if callable(rule) else RULES[rule])(lr, base_batch_size, batch_size)
    if not (math.isfinite(scaled) and scaled > 0):
        raise JobError(
            f"The learning rate at batch size {batch_size} comes out as {scaled!r}.",
            hint="Give a positive base learning rate and a rule that keeps it positive.",
        )
    return scaled


def usual_rule(optimizer: Any) -> LrRule:
    """Linear for SGD and its kin, by name (ASGD, SGDW, SGD8bit) or by descent; the square root for all others."""
    return "linear" if any("SGD" in kind.__name__ for kind in type(optimizer).__mro__) else "sqrt"


def as_batch_sizes(given: str | int | Sequence[int]) -> tuple[int, ...]:
    """Batch sizes, also from a list such as ``"8,16,32"``, or a single one; none from an empty one."""
    parts = str(given).split(",") if isinstance(given, (str, int)) else given
    try:
        sizes = tuple(int(str(part)) for part in parts if str(part).strip())
    except ValueError:
        sizes = (0,)
    if any(size < 1 for size in sizes):
        raise InputError(f"Batch sizes must be whole numbers of at least 1, not {given!r}.", hint="Such as 8,16,32.")
    return sizes


@dataclass(frozen=True, slots=True)
class Effort:
    """How often the model is tested, and after how many samples it is given up; alike for all batch sizes."""

    evaluate_every_samples: int
    limit_samples: float = math.inf
    target: float | None = None  # to train to, in place of the job's own

    def __post_init__(self) -> None:
        if self.limit_samples < 1 or self.evaluate_every_samples < 1:
            raise InputError(
                f"A limit of {self.limit_samples} samples with a score every {self.evaluate_every_samples} makes no "
                "sense.",
                hint="Both must be at least 1.",
            )


@dataclass(frozen=True, eq=False)
class Job:
    """A PyTorch training job; only the model, the data and the target have no default.

    A batch is ``(inputs, …, targets)``: the model is called with the inputs, the loss with the model's output and the
    targets. Where that does not fit, ``forward`` makes (output, targets) of a batch, or ``train_step`` does a whole
    step: zeroes gradients, goes forward and back, clips, steps the optimizer, and returns the loss. What it keeps from
    step to step, such as a scaler of mixed precision, is in checkpoints where it is an object with ``state_dict``.

    ``metric`` is called once, with the outputs and targets of the *whole* test set, on the CPU: F1, AUC and mAP are no
    means over batches. One with ``update``, ``compute`` and ``reset``, as torchmetrics has them, gets batch by batch.

    A ``scheduler`` is made of the optimizer and stepped once for every ``schedule_samples`` samples, so that it spans
    the same data at any batch size; one that waits for a plateau is stepped with each score. It sees the rates that
    suit ``lr_batch_size``; those of other batch sizes hold within a step only.

    Without a target, a limit of samples or a patience must say when the training is over.
    """

    model: torch.nn.Module | Callable[[], torch.nn.Module]  # a function is called for each run, a module is copied
    data: Any  # a dataset with a length, or a tuple of tensors or arrays of equal length
    target: float = math.nan  # the metric to reach on held-out data; none where it is NaN
    test_data: Any = None  # held out of ``data`` (a fifth) where absent
    proxy_data: Any = None  # what convergence is studied on; ``data`` where absent
    proxy_test_data: Any = None
    loss: Callable[[Any, Any], torch.Tensor] | None = None  # cross-entropy where absent
    metric: Any = None  # of (outputs, targets) of the test set; accuracy where absent
    higher_is_better: bool = True
    forward: Callable[[torch.nn.Module, Any], tuple[Any, Any]] | None = None
    train_step: Callable[[torch.nn.Module, Any, torch.optim.Optimizer], Any] | None = None
    # Called (parameters, lr=…), or (model, lr=…) where its first argument is named ``model``; AdamW where absent.
    optimizer: Callable[..., torch.optim.Optimizer] | None = None
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    schedule_samples: int | None = None  # of one step of the scheduler; ``lr_batch_size`` where absent
    lr: float = 1e-3  # at ``lr_batch_size``
    lr_batch_size: int = 128
    lr_rule: LrRule | None = None  # linear for SGD, square root for all others where absent
    batch_sizes: Sequence[int] = DEFAULT_BATCH_SIZES
    accumulate: bool = True  # a batch beyond memory is trained in parts; False where samples of one are compared
    sampler: Callable[[Any], Any] | None = None  # makes a sampler of the data that is trained on; shuffled where absent
    collate: Callable[[list[Any]], Any] | None = None
    num_workers: int = 0
    limit_samples: float = math.inf  # the training ends after so many ...
    patience_samples: float = math.inf  # ... or where so many have brought no better score
    device: str | None = None  # CUDA where there is one, else the CPU
    seed: int = 0
    name: str = ""  # the factory's name where absent
    synthetic: bool = False  # the data is made up: good for speed, meaningless for accuracy; shown in the name

    def __post_init__(self) -> None:
        sizes = (self.batch_sizes,) if isinstance(self.batch_sizes, int) else tuple(self.batch_sizes)
        if not sizes or any(not isinstance(size, int) or isinstance(size, bool) or size < 1 for size in sizes):
            raise JobError(
                f"Batch sizes must be whole numbers of at least 1, not {list(sizes)}.",
                hint="Give for example batch_sizes=(8, 16, 32, 64).",
            )
        object.__setattr__(self, "batch_sizes", tuple(sorted(set(sizes))))
        if not self.has_target and math.isinf(min(self.limit_samples, self.patience_samples)):
            raise JobError(
                "The job has no target.",
                hint="Give the value of the metric to reach, for example Job(…, target=0.9) for 90% accuracy, "
                "or say when it is over: limit_samples=…, patience_samples=….",
            )
        if self.metric is None and self.has_target and self.target > LIKE_PERCENT:
            raise JobError(
                f"No training reaches a target of {self.target:g}: without a metric of its own a job is judged by its "
                "accuracy, which is 1 at most.",
                hint="Give for example 0.9 for 90%, or metric=… for another score.",
            )
        if self.sampler is not None and (not callable(self.sampler) or hasattr(self.sampler, "__iter__")):
            raise JobError(
                f"The sampler is a {type(self.sampler).__name__}, and not a function that makes one.",
                hint="A part of the data may be held out, so give for example "
                "sampler=lambda data: WeightedRandomSampler(weights_of(data), len(data)).",
            )
        if self.lr_batch_size < 1 or not (math.isfinite(self.lr) and self.lr > 0):
            raise JobError(
                f"A learning rate of {self.lr!r} at batch size {self.lr_batch_size!r} makes no sense.",
                hint="Give lr=… above 0 and the batch size it was found at as lr_batch_size=….",
            )
        scheduled = self.lr_batch_size if self.schedule_samples is None else self.schedule_samples
        if not min(self.limit_samples, self.patience_samples, scheduled) >= 1:
            raise JobError("Limit, patience and a step of the schedule are at least 1 sample.", hint="Count samples.")
        for name in ("data", "test_data", "proxy_data", "proxy_test_data"):
            value = getattr(self, name)
            if name == "data" or value is not None:
                _check_data(name, value)

    def lr_at(self, batch_size: int) -> float:
        """The learning rate at a batch size."""
        rule = self._usual_rule if self.lr_rule is None else self.lr_rule
        return scaled_lr(self.lr, self.lr_batch_size, batch_size, rule)

    @property
    def is_adaptive(self) -> bool:
        """Whether the optimizer scales its steps by the size of gradients, as Adam does and SGD does not."""
        return self._usual_rule != "linear"

    @cached_property
    def _usual_rule(self) -> LrRule:
        """The rule that suits the optimizer; a real one is asked, so that classes, partials and lambdas all do."""
        torch = require("torch", extra="torch")
        try:
            with torch.random.fork_rng([]):  # whoever asks in the middle of a training finds it as it was
                return usual_rule(self.make_optimizer(torch.nn.Linear(1, 1), self.lr))
        except Exception:  # noqa: BLE001 - one that sorts parameters into groups may want those of the model
            with torch.random.fork_rng([]):
                model = self.model if isinstance(self.model, torch.nn.Module) else self.model()
            return usual_rule(self.make_optimizer(model, self.lr))

    @property
    def has_target(self) -> bool:
        """Whether there is a score to reach."""
        return math.isfinite(self.target)

    def reached(self, value: float) -> bool:
        """Whether a value of the metric meets the target."""
        return value >= self.target if self.higher_is_better else value <= self.target

    def is_better(self, value: float, than: float | None) -> bool:
        """Whether a value of the metric is better than another, or than none."""
        return than is None or (value > than if self.higher_is_better else value < than)

    def make_optimizer(self, model: torch.nn.Module, lr: float) -> torch.optim.Optimizer:
        """The job's optimizer of a model."""
        make = self.optimizer or require("torch", extra="torch").optim.AdamW
        optimizer: torch.optim.Optimizer = make(model if self.takes_model else model.parameters(), lr=lr)
        return optimizer

    @cached_property
    def takes_model(self) -> bool:
        """Whether the optimizer is made of the whole model, and not of its parameters."""
        try:
            return next(iter(inspect.signature(self.optimizer).parameters), "") == "model"  # type: ignore[arg-type]
        except (TypeError, ValueError):
            return False


def _check_data(name: str, data: Any) -> None:
    if not isinstance(data, tuple) and not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise JobError(
            f"The job's {name} has no length or cannot be indexed ({type(data).__name__}).",
            hint="Give a map-style dataset, or a tuple of tensors such as (images, labels).",
        )
    lengths = {len(part) for part in data} if isinstance(data, tuple) else {len(data)}
    if len(lengths) > 1:
        raise JobError(
            f"The tensors of the job's {name} differ in length: {sorted(lengths)}.",
            hint="Each must have one entry a sample, such as (images, labels).",
        )
    if lengths in (set(), {0}):
        raise JobError(f"The job's {name} is empty.", hint="Check the path and the filter it was made with.")


# From an address to the job.


def load_job(address: str) -> Job:
    """The job at ``file.py:factory`` or ``module:factory``."""
    where, colon, factory_name = address.rpartition(":")
    if not colon or not where or not factory_name:
        raise JobError(f"{address!r} does not name a job.", hint=USAGE_HINT)
    is_file = where.endswith(".py") or "/" in where
    module = _load_file(Path(where)) if is_file else _load_module(where)
    factory = getattr(module, factory_name, None)
    if not callable(factory):
        raise JobError(f"There is no factory {factory_name!r} in {where}.", hint=_others_hint(module))
    try:
        job = factory()
    except UnderwattError:
        raise
    except (Exception, SystemExit) as exc:
        raise JobError(
            f"{factory_name}() in {where} failed: {_last_line(exc)}.",
            hint="Call it on its own in Python to see the whole traceback.",
        ) from exc
    if not isinstance(job, Job):
        raise JobError(
            f"{factory_name}() in {where} returned {type(job).__name__}, not a Job.",
            hint="End it with: return underwatt.Job(model, data, target=…).",
        )
    return job if job.name else replace(job, name=factory_name)


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise JobError(f"There is no file {path}.", hint=USAGE_HINT)
    # As for a script: what lies beside the file can be imported, also later, from within the factory.
    _put_on_path(path.parent)
    name = f"underwatt_job_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise JobError(f"{path} is not a Python file.", hint=USAGE_HINT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as exc:
        del sys.modules[name]
        raise _does_not_import(str(path), exc) from exc
    return module


def _load_module(name: str) -> ModuleType:
    _put_on_path(Path())
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as exc:
        if isinstance(exc, ModuleNotFoundError) and f"{name}.".startswith(f"{exc.name}."):
            raise JobError(f"There is no module {name!r}.", hint=USAGE_HINT) from exc
        raise _does_not_import(name, exc) from exc


def _put_on_path(folder: Path) -> None:
    resolved = str(folder.resolve())
    if resolved not in sys.path:
        sys.path.insert(0, resolved)


def _does_not_import(where: str, exc: BaseException) -> JobError:
    if isinstance(exc, SystemExit):
        return JobError(
            f"{where} ends Python while it is imported ({_last_line(exc)}).",
            hint='Put what it runs under if __name__ == "__main__":, so that it can be imported.',
        )
    return JobError(f"{where} does not import: {_last_line(exc)}.", hint="Mend it until it imports in Python.")


def _last_line(exc: BaseException) -> str:
    """The last line of the traceback as its author would read it, with the place it points to."""
    text = traceback.format_exception_only(exc)[-1].strip().rstrip(".")
    # Frames of the import machinery have angle brackets for a file, and are nobody's fault.
    frames = [f for f in traceback.extract_tb(exc.__traceback__) if f.filename != __file__ and "<" not in f.filename]
    if isinstance(exc, SyntaxError) and exc.filename:
        return f"{text} ({Path(exc.filename).name}, line {exc.lineno})"
    return f"{text} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else text


def _others_hint(module: ModuleType) -> str:
    names = [name for name, value in vars(module).items() if _could_be_factory(module, name, value)]
    return f"It has: {', '.join(names)}." if names else "It has no function that could be one."


def _could_be_factory(module: ModuleType, name: str, value: Any) -> bool:
    if name.startswith("_") or not inspect.isfunction(value) or value.__module__ != module.__name__:
        return False
    parameters = inspect.signature(value).parameters.values()
    return all(p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)
