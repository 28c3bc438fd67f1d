"""Who a workload is: a hash of what it computes, so that profiles of different jobs are never mixed."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import platform
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from underwatt._imports import require
from underwatt.records import WorkloadInfo

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from underwatt.jobs.job import Job

SCRIPT_MAX_BYTES = 1_000_000


def command_info(command: Sequence[str]) -> WorkloadInfo:
    """Identity of an external command: its words, and the content of the scripts that it names."""
    parts = list(command)
    for word in command:
        with contextlib.suppress(OSError):  # most words are no files, and may be too long to be one
            path = Path(word)
            if path.is_file() and path.stat().st_size <= SCRIPT_MAX_BYTES:
                parts.append(hashlib.sha256(path.read_bytes()).hexdigest())
    return WorkloadInfo(" ".join(command), _digest(parts), {"platform": platform.platform()})


def job_info(job: Job) -> WorkloadInfo:
    """Identity of a PyTorch job: its modules, a sample, loss, optimizer and kind of device, not batch size or rate.

    The code of classes and functions from outside PyTorch is part of it: the same layers can be wired differently.
    """
    from underwatt.jobs.data import as_dataset
    from underwatt.jobs.training import build_model, device_of

    torch = require("torch", extra="torch")
    model = build_model(job, job.seed)
    parts: list[str] = []
    for name, module in model.named_modules():
        parts += [name, _code(type(module)), module.extra_repr()]
    parts += [f"{name} {tuple(value.shape)} {value.dtype}" for name, value in model.state_dict().items()]
    optimizer = job.make_optimizer(model, job.lr)
    given = job.optimizer.keywords if isinstance(job.optimizer, partial) else {}
    options = {**given, **optimizer.defaults}
    parts += [_code(type(optimizer)), *(f"{key}={_described(options[key])}" for key in sorted(options) if key != "lr")]
    made_by = job.optimizer if job.takes_model else None  # which may give each group options of its own
    code = (job.loss, job.forward, job.collate, job.train_step, job.sampler, job.scheduler, made_by)
    parts += [_code(part) for part in code if part is not None]
    parts += [f"a step of the schedule: {job.schedule_samples}"] if job.schedule_samples else []
    parts += [
        type(job.data).__qualname__,
        str(_shapes(as_dataset(job)[0])),
        f"workers={job.num_workers}",
        device_of(job).type,
    ]
    name = (job.name or type(model).__name__) + (" (synthetic data)" if job.synthetic else "")
    software = {"python": platform.python_version(), "torch": str(torch.__version__)}
    return WorkloadInfo(name, _digest(parts), software, tuple(job.batch_sizes))


def loop_info(name: str, optimizer: Any = None) -> WorkloadInfo:
    """Identity of somebody's own loop: the name it was given, and what its optimizer trains, where there is one.

    Of the model no more can be seen from there. Without an optimizer the name is all there is.
    """
    if optimizer is None:
        return WorkloadInfo(name, f"tune-{name}")
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    parts = [name, f"{type(optimizer).__module__}.{type(optimizer).__qualname__}", *map(_weight, weights)]
    return WorkloadInfo(name, f"tune-{_digest(parts)}")


def _weight(weight: Any) -> str:
    """Shape, kind of number and of device; a lazy layer has no shape before its first batch."""
    from torch.nn.parameter import is_lazy

    shape = "lazy" if is_lazy(weight) else tuple(weight.shape)
    return f"{shape} {weight.dtype} {weight.device.type}"


def _code(thing: Any) -> str:
    """The source of a class or function, or just its name where it is PyTorch's or cannot be read.

    What a partial or an object was made with belongs to it: a loss with label smoothing is another loss.
    """
    if isinstance(thing, partial):
        return f"{_code(thing.func)} {_described(thing.args)} {_described(thing.keywords)}"
    if not (inspect.isclass(thing) or inspect.isroutine(thing)):
        return f"{_code(type(thing))} {_described(getattr(thing, '__dict__', {}))}"
    name = f"{thing.__module__}.{thing.__qualname__}"
    if name.startswith("torch."):
        return name
    try:
        return inspect.getsource(thing)
    except (OSError, TypeError):
        return name


def _described(value: Any) -> str:
    """A value as text that is the same in another process."""
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(_described(item) for item in value)}]"
    if isinstance(value, (set, frozenset)):
        return _described(sorted(value, key=str))
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_described(value[key])}' for key in sorted(value, key=str))}}}"
    if hasattr(value, "shape"):
        return str(_shapes(value))
    if isinstance(value, partial) or inspect.isclass(value) or inspect.isroutine(value):
        return _code(value)
    text = repr(value)
    return type(value).__qualname__ if " at 0x" in text else text


def _shapes(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_shapes(item) for item in value]
    if isinstance(value, dict):
        return {key: _shapes(item) for key, item in value.items()}
    return f"{tuple(value.shape)} {value.dtype}" if hasattr(value, "shape") else type(value).__name__


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
