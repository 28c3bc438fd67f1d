"""What a training step costs, counted on PyTorch's meta device: shapes without numbers, so nothing is computed."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any

from underwatt.errors import JobError, OutOfMemoryError, UnderwattError
from underwatt.jobs._torch import FlopCounterMode, TorchDispatchMode, torch
from underwatt.jobs.data import as_dataset, first_batch
from underwatt.jobs.faults import call_job
from underwatt.jobs.training import build_model, forward, loss_of, one_step, to_device
from underwatt.records import WorkloadCost

if TYPE_CHECKING:
    from collections.abc import Iterator

    from underwatt.jobs.job import Job

# Two batch sizes give the part per sample and the part per step. Not 1: batch norm refuses a single value.
SMALL, LARGE = 2, 4
# PyTorch's multi-tensor optimizer kernels take some dozens of tensors a launch (30 to 110, by how many lists).
TENSORS_PER_LAUNCH = 36


def count_cost(job: Job) -> WorkloadCost:
    """FLOPs, bytes, kernels and memory of training, without training; raises ``JobError`` where that fails.

    A job that fails also where it is really trained raises that error: nothing is wrong with counting it.
    """
    try:
        return _count_cost(job)
    except UnderwattError:
        raise
    except Exception as exc:
        _try_step(job)
        first = (str(exc).strip().splitlines() or [""])[0].rstrip(".")
        raise JobError(
            f"The cost of this job cannot be counted: {type(exc).__name__}: {first}.",
            hint="Keep tensors in parameters or buffers, and read no values (.item(), if tensor:) in model and loss.",
        ) from exc


def _try_step(job: Job) -> None:
    """Forward and backward on the CPU, of numbers; what the job raises is its own error."""

    def step() -> None:
        model = build_model(job, job.seed).train()
        one_step(job, model, job.make_optimizer(model, job.lr), [first_batch(job, SMALL)], [SMALL])

    with contextlib.suppress(OutOfMemoryError):
        call_job(SMALL, step)


def _count_cost(job: Job) -> WorkloadCost:
    model = build_model(job, job.seed).to("meta").train()
    optimizer = job.make_optimizer(model, job.lr)
    small, large = _count_step(job, model, SMALL), _count_step(job, model, LARGE)
    update = _count_update(optimizer)
    bytes_per_sample = (large.bytes_moved - small.bytes_moved) / (LARGE - SMALL)
    weights = sum(_nbytes(value) for value in [*model.parameters(), *model.buffers()])
    gradients = sum(_nbytes(value) for value in model.parameters() if value.requires_grad)
    states = sum(_nbytes(value) for value in _tensors(list(optimizer.state.values())))
    return WorkloadCost(
        flops_per_sample=(large.flops - small.flops) / (LARGE - SMALL),
        bytes_per_sample=bytes_per_sample,
        bytes_per_step=max(0.0, large.bytes_moved - LARGE * bytes_per_sample) + update.bytes_moved,
        kernels_per_step=large.kernels + update.kernels,
        load_bytes_per_sample=float(sum(_nbytes(torch.as_tensor(v)) for v in _leaves(as_dataset(job)[0]))),
        parameters=float(sum(value.numel() for value in model.parameters())),
        state_bytes=float(weights + gradients + states),
        activation_bytes_per_sample=(large.activation_bytes - small.activation_bytes) / (LARGE - SMALL),
    )


def _count_step(job: Job, model: torch.nn.Module, batch_size: int) -> _Count:
    """Forward and backward at one batch size."""
    flops, count = FlopCounterMode(display=False, custom_mapping=_FLOPS), _Count()
    model.zero_grad(set_to_none=True)
    batch = to_device(first_batch(job, batch_size), "meta")
    own = {_storage_key(value) for value in [*model.parameters(), *model.buffers()]}
    saved: dict[int, Any] = {}

    def save(value: torch.Tensor) -> torch.Tensor:
        # By storage: many operations save the same tensor, or a view of it. Held, so that no key is used twice.
        if _storage_key(value) not in own:
            saved[_storage_key(value)] = value.untyped_storage()
        return value

    with flops, count:
        with torch.autograd.graph.saved_tensors_hooks(save, lambda value: value):
            loss = _loss(job, *forward(job, model, batch))
        count.activation_bytes = float(sum(storage.nbytes() for storage in saved.values()))
        loss.backward()  # type: ignore[no-untyped-call]
    count.flops = flops.get_total_flops()
    return count


def _loss(job: Job, output: Any, targets: Any) -> torch.Tensor:
    """The job's loss; where its own step computes that and names none, a sum, which costs hardly less."""
    if job.train_step is None or job.loss is not None:
        return loss_of(job, output, targets)
    parts: torch.Tensor = sum(value.float().sum() for value in _tensors([output]) if value.requires_grad)
    return parts


def _count_update(optimizer: torch.optim.Optimizer) -> _Count:
    """One step of the optimizer, in the multi-tensor form that PyTorch uses on a GPU."""
    for group in optimizer.param_groups:
        if group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True
    optimizer.step()  # makes its state
    count = _Count()
    with count:
        optimizer.step()
    return count


def _convolution_backward_flops(
    grad_shape: list[int], input_shape: list[int], weight_shape: list[int], *rest: Any, **_: Any
) -> int:
    """Each gradient of a convolution costs what its forward pass costs.

    PyTorch's own formula counts the weight gradient of a grouped convolution once for each pair of groups, which
    makes a depthwise layer look hundreds of times dearer than it is.
    """
    transposed, mask = rest[4], rest[7]
    positions = (input_shape if transposed else grad_shape)[2:]
    forward_flops = 2 * input_shape[0] * math.prod(positions) * math.prod(weight_shape)
    return forward_flops * sum(map(bool, mask[:2]))


_FLOPS = {torch.ops.aten.convolution_backward: _convolution_backward_flops}


class _Count(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up what each operation on the meta device reads and writes, and the kernels it launches."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes_moved = self.kernels = 0.0
        self.flops = self.activation_bytes = 0.0  # which others count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        read = [value for value in _tensors([args, kwargs]) if value.device.type == "meta"]
        written = [value for value in _tensors(result) if value.device.type == "meta"]
        if (read or written) and not _is_free(func):
            if func.__name__.startswith("_foreach") and not written:
                written = list(_tensors(args[0]))  # in place
            self.bytes_moved += sum(map(_nbytes, read)) + sum(map(_nbytes, written))
            lists = [value for value in args if isinstance(value, (list, tuple))]
            self.kernels += max((math.ceil(len(value) / TENSORS_PER_LAUNCH) for value in lists), default=1)
        return result


def _is_free(func: Any) -> bool:
    """Whether an operation moves nothing: a view of its input, or memory that is set aside and not filled."""
    if "empty" in func.__name__ or func.__name__.startswith(("detach", "_record_function", "lift")):
        return True
    aliases = [value.alias_info for value in func._schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def _nbytes(value: torch.Tensor) -> int:
    # An expanded tensor has more elements than it has memory.
    return min(value.numel() * value.element_size(), value.untyped_storage().nbytes())


def _storage_key(value: torch.Tensor) -> int:
    return int(value.untyped_storage()._cdata)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    elif value is not None and not isinstance(value, str):
        yield value


def _tensors(value: Any) -> Iterator[Any]:
    return (leaf for leaf in _leaves(value) if isinstance(leaf, torch.Tensor))
