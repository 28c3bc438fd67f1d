"""A training's state on disk, whole at every moment: a run that was killed goes on from the last one."""

from __future__ import annotations

import copy
import io
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from underwatt._files import write_atomically
from underwatt.errors import InputError
from underwatt.jobs._torch import torch

if TYPE_CHECKING:
    from pathlib import Path

    from underwatt.jobs.training import Training

NAME = "checkpoint.pt"
AFRESH = "Start a run without --resume, in a folder of its own."


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run has come: of which workload, in the device's seconds and joules, and of the way to the target."""

    workload_id: str
    elapsed_s: float
    energy_j: float
    share: float
    evaluated_samples: int  # when the model was last tested
    score: float | None
    done: str = ""  # how it ended, where it has come to its end


def save(folder: Path, training: Training, progress: Progress) -> None:
    """Write a checkpoint beside the last one, then put it in its place."""
    state = training.state()
    state |= {name: _loadable(state[name]) for name in ("model", "optimizer")}  # the rest is ours
    content = {"training": state, "progress": asdict(progress)}
    write_atomically(folder / NAME, lambda file: torch.save(content, file), durable=True)


def _loadable(value: Any) -> Any:
    """The same state in types that can be loaded without running anybody's code: NumPy's numbers become Python's.

    Raises ``RuntimeError`` for what no checkpoint can hold, rather than have that found out when it is needed.
    """
    if isinstance(value, dict):
        same = copy.copy(value)  # with whatever a model's own dictionary knows beside its items
        same.update({key: _loadable(item) for key, item in value.items()})
        return same
    if type(value) in (list, tuple):
        return type(value)(map(_loadable, value))
    if value is None or isinstance(value, (torch.Tensor, str, bytes)) or type(value) in (bool, int, float):
        return value
    if type(value).__module__ == "numpy" and hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        return value.item()
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as exc:  # pickling runs the value's own code, which raises anything
        raise RuntimeError(f"a {type(value).__name__} in the training's state could not be loaded again") from exc
    return value


def exists(folder: Path) -> bool:
    """Whether a run in this folder can go on."""
    return (folder / NAME).is_file()


def load(folder: Path, workload_id: str) -> tuple[dict[str, Any], Progress]:
    """State and progress of a run; refuses one of another job."""
    path = folder / NAME
    if not path.is_file():
        raise InputError(f"There is no checkpoint in {folder}.", hint=AFRESH)
    try:
        # On the CPU, whatever it was trained on: random states must lie there, and all else is copied from there.
        found = torch.load(path, map_location="cpu", weights_only=True)
        training, progress = found["training"], Progress(**found["progress"])
    except Exception as exc:  # a damaged file raises anything
        why = (str(exc).strip().splitlines() or [type(exc).__name__])[0].rstrip(".")
        raise InputError(f"The checkpoint {path} cannot be read ({why}).", hint=AFRESH) from exc
    if progress.workload_id != workload_id:
        raise InputError(
            f"The checkpoint in {folder} is of another job, or of this one before it was changed.",
            hint="Undo the change, or start a run without --resume, in a folder of its own.",
        )
    return training, progress
