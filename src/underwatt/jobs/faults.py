"""What goes wrong in a user's training step, as one of our errors: out of memory is an answer, all else is a failure.

A step that ran out of memory can be done again, unless its optimizer had begun to change the model: ``watch_updates``
tells.
"""

from __future__ import annotations

import re
import sysconfig
import traceback
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, TypeVar

from underwatt.errors import OutOfMemoryError, StepError, UnderwattError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_Result = TypeVar("_Result")
_INSTALLED = {"site-packages", "dist-packages"}
_FRAME = re.compile(r'^  File "(.+)", line (\d+), in .*\n    (.*)$', re.MULTILINE)
_ERROR_LINE = re.compile(r"[\w.]+(: |$)")
_OUT_OF_MEMORY = re.compile(
    r"out of memory|OutOfMemory|CUBLAS_STATUS_ALLOC_FAILED|can't allocate memory|NvMapMemAlloc|RESOURCE_EXHAUSTED"
    r"|^(\S+\.)?_?(Array)?MemoryError\b",
    re.IGNORECASE | re.MULTILINE,
)
# What users' own code often raises, and what helps.
_REMEDIES = {
    r"(?i)\bshapes?\b|size mismatch|sizes? of tensor|batch_size": "Model, data and loss do not fit together: try "
    "loss(model(inputs), targets) with a few samples; where a batch is not (inputs, targets), give forward=….",
    r"Tried to step \d+ times": "The schedule was over before the training: it takes a step for every schedule_samples "
    "samples (lr_batch_size where absent), until the target or limit_samples. Give it more steps.",
}


def says_out_of_memory(text: str) -> bool:
    """Whether an error text of PyTorch, another framework or the system means that memory ran out."""
    return _OUT_OF_MEMORY.search(text) is not None


def ran_out_of_memory(error: Exception) -> bool:
    """Whether this is how PyTorch, or the system, says that memory ran out."""
    return isinstance(error, (MemoryError, OutOfMemoryError)) or says_out_of_memory(_text(error))


def kernel_oom_kills() -> int:
    """How often the kernel has killed a process for memory: on a Jetson, this is how a batch does not fit."""
    try:
        counters = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
        return int(counters.get("oom_kill", 0))
    except (OSError, ValueError):
        return 0


def does_not_fit(batch_size: int) -> OutOfMemoryError:
    """The one error for a batch size that is too large."""
    return OutOfMemoryError(f"Batch size {batch_size} does not fit in memory.", hint="Use a smaller batch size.")


def half_updated(batch_size: int, hint: str) -> OutOfMemoryError:
    """The error for a model that may be half changed."""
    return OutOfMemoryError(
        f"Memory ran out while the optimizer changed the model, at batch size {batch_size}: it may be half changed.",
        hint=hint,
    )


def call_job(batch_size: int, call: Callable[[], _Result], of_run: str = "") -> _Result:
    """Call into a job, its faults translated; an error about memory remembers nothing, not even the fault itself."""
    try:
        return call()
    except UnderwattError:
        raise
    except Exception as exc:  # the job is the user's code and may raise anything
        if is_lost_worker(exc):
            raise lost_worker() from exc
        if not ran_out_of_memory(exc):
            what = f"The job failed in a step at batch size {batch_size}{of_run}"
            hint = next((hint for pattern, hint in _REMEDIES.items() if re.search(pattern, str(exc))), "")
            raise StepError(f"{what}: {_what_and_where(exc)}.", hint=hint) from exc
        traceback.clear_frames(exc.__traceback__)
    # Raised out here: an error that remembers the frames of a full GPU keeps that GPU full.
    raise does_not_fit(batch_size)


def is_lost_worker(error: BaseException) -> bool:
    """Whether this is how PyTorch says that a loader's worker has died; it may say so at any moment of a process."""
    text = str(error)
    if "in DataLoader worker process" in text:
        return False  # a worker that lives tells of an error of the data set's
    if isinstance(error, RuntimeError):
        return text.startswith("DataLoader worker (pid")
    # The pipe to it breaks a moment before it is known to be dead.
    frames = traceback.extract_tb(error.__traceback__) if isinstance(error, (ConnectionError, EOFError)) else []
    return any(Path(frame.filename).match("torch/utils/data/dataloader.py") for frame in frames)


def lost_worker() -> StepError:
    """The error for a loader whose worker is gone."""
    return StepError(
        "A worker process of the job's loader has died.",
        hint="Memory may have run out: use a smaller num_workers. The training goes on from its checkpoint (--resume).",
    )


def _what_and_where(error: Exception) -> str:
    """The first line of an error, and the line of the user's own code that raised it, where some was under way."""
    text, frames = _text(error), traceback.extract_tb(error.__traceback__)
    first, places = text.splitlines()[0], [(frame.filename, str(frame.lineno), frame.line or "") for frame in frames]
    if "in DataLoader worker process" in first:  # whose traceback comes as text, with the error as its last part
        places += _FRAME.findall(text)
        first = next((line for line in reversed(text.splitlines()) if _ERROR_LINE.match(line)), first)
    ours = str(Path(__file__).resolve().parents[1])
    foreign = (ours, "<", sysconfig.get_path("stdlib"))
    for name, line, code in reversed(places):
        if not (name.startswith(foreign) or _INSTALLED & set(Path(name).parts)):
            return f"{first.rstrip('.')} ({name}, line {line}: {' '.join(code.split())})"
    return first.rstrip(".")


def _text(error: Exception) -> str:
    return "".join(traceback.format_exception_only(error)).strip()


@contextmanager
def watch_updates() -> Iterator[Event]:
    """Use as ``with watch_updates() as begun:`` around a step of any PyTorch optimizers; then ``begun.is_set()``."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    begun = Event()
    hook = register_optimizer_step_pre_hook(lambda *_: begun.set())
    try:
        yield begun
    finally:
        hook.remove()
