"""A training's state on disk, whole at every moment: a run that was killed goes on from the last one.

A checkpoint ends with a checksum of all that is before it, and the one before it is kept: disks and memory cards do
flip bits, and PyTorch loads such a file without a word. Whatever stands after its archive is nothing to PyTorch, so
``torch.load`` opens a checkpoint like any other.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

from underwatt._files import write_atomically
from underwatt.errors import InputError
from underwatt.jobs._torch import torch
from underwatt.records import from_json

if TYPE_CHECKING:
    from pathlib import Path

    from underwatt.jobs.training import Training

NAME, PREVIOUS, DAMAGED = "checkpoint.pt", "checkpoint.previous.pt", "checkpoint.damaged.pt"
BEST, LAST = "model.pt", "last.pt"  # weights alone, for whoever wants the model
_MARK = b"underwatt sha256 "
_TRAILER_BYTES = len(_MARK) + 64
_READ_BYTES = 1 << 20
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
    best_score: float | None = None
    best_samples: int = 0  # when it was scored


def save(folder: Path, training: Training, progress: Progress) -> None:
    """Write a checkpoint beside the last one, then put it in its place; the last one is kept as the previous one."""
    state = training.state()
    state |= {name: _loadable(state[name]) for name in ("model", "optimizer")}  # the rest is ours
    content = {"training": state, "progress": asdict(progress)}
    write_atomically(folder / NAME, lambda file: _write(content, file), durable=True, previous=folder / PREVIOUS)


def save_model(path: Path, model: torch.nn.Module) -> None:
    """Write a model's weights, from the CPU, as ``model.load_state_dict(torch.load(path))`` takes them anywhere."""
    weights = _loadable(model.state_dict())
    for name, value in weights.items():
        weights[name] = value.cpu() if isinstance(value, torch.Tensor) else value
    write_atomically(path, lambda file: _pickled(weights, file))


def _pickled(content: Any, file: BinaryIO) -> _Counted:
    counted = _Counted(file)
    try:
        torch.save(content, counted)  # type: ignore[arg-type]
    except RuntimeError as exc:
        raise counted.failure or exc from None  # PyTorch makes words of its own of a disk that is full
    return counted


def _write(content: Any, file: BinaryIO) -> None:
    counted = _pickled(content, file)
    file.write(_MARK + counted.digest.hexdigest().encode())


class _Counted:
    """A file whose checksum is known when all is written, and which knows why something could not be."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest = hashlib.sha256()
        self.flush = file.flush
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        self.digest.update(data)
        try:
            return self._file.write(data)
        except OSError as exc:
            self.failure = exc
            raise


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
    return any((folder / name).is_file() for name in (NAME, PREVIOUS))


def load(folder: Path, workload_id: str) -> tuple[dict[str, Any], Progress, str]:
    """State and progress of a run, and what there is to say of it; refuses one of another job.

    Where the newest checkpoint is damaged it is put aside, and the one before it is taken.
    """
    if not exists(folder):
        raise InputError(f"There is no checkpoint in {folder}.", hint=AFRESH)
    newest, previous = folder / NAME, folder / PREVIOUS
    note = ""
    try:
        training, progress = _read(newest)
    except InputError as damage:
        if not previous.is_file():
            raise
        try:
            training, progress = _read(previous)
        except InputError as exc:
            raise InputError(f"{damage.message} Nor can the one before it: {exc.message}", hint=AFRESH) from exc
        note = f"{damage.message} Going on from the one before it."
        with contextlib.suppress(OSError):  # else the next one that is written would push the good one out
            newest.replace(folder / DAMAGED)
    if progress.workload_id != workload_id:
        raise InputError(
            f"The checkpoint in {folder} is of another job, or of this one before it was changed.",
            hint="Undo the change, or start a run without --resume, in a folder of its own.",
        )
    return training, progress, note


def _read(path: Path) -> tuple[dict[str, Any], Progress]:
    try:
        _check(path)
        # On the CPU, whatever it was trained on: random states must lie there, and all else is copied from there.
        found = torch.load(path, map_location="cpu", weights_only=True)
        return dict(found["training"]), from_json(Progress, found["progress"])
    except Exception as exc:  # a damaged file raises anything
        why = (str(exc).strip().splitlines() or [type(exc).__name__])[0].rstrip(".")
        raise InputError(f"The checkpoint {path} cannot be read ({why}).", hint=AFRESH) from exc


def _check(path: Path) -> None:
    """Refuse a file that is not, bit by bit, what was written."""
    with path.open("rb") as file:
        left = os.fstat(file.fileno()).st_size - _TRAILER_BYTES
        digest = hashlib.sha256()
        while left > 0 and (part := file.read(min(left, _READ_BYTES))):
            digest.update(part)
            left -= len(part)
        trailer = file.read(_TRAILER_BYTES + 1)
    if not trailer.startswith(_MARK):
        raise ValueError("it is cut short, or was not written by this version")
    if trailer != _MARK + digest.hexdigest().encode():
        raise ValueError("its checksum does not match: bits of it have changed")
