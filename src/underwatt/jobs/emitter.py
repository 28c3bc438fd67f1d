"""Tell Underwatt of training steps and follow what it answers: one file for Python 3.6 up that never raises.

``python -m underwatt.jobs.emitter > underwatt_beat.py`` copies it. Where nobody listens, it does next to nothing.

    import underwatt_beat as beat

    for images, labels in beat.loader(dataset, batch_size=64, shuffle=True, optimizer=optimizer):  # PyTorch 1 and 2
        ...                                 # a step: its batch size, and the pauses in between, keep the budget
    beat.metric(accuracy)                   # the model's score; more is better

    size = beat.ask(64)                     # without PyTorch: 64 where nobody listens, 0 where the training is to end
    while size:
        train(size)
        beat.step(size=size)
        size = beat.ask(size)

Call it on one rank only. A script that calls nothing but ``step`` is left alone: it says when its steps end.
"""

import atexit
import os
import pathlib
import select
import sys
import time
import typing

FLUSH_S = 0.05  # steps quicker than this travel together, each with its own time
MOST_WAITING = 60  # so that one write stays under 4096 bytes, which Linux writes wholly or not at all
ANSWER_S = 10.0  # an answer is waited for so long; after one that did not come, none is until one does
LONGEST_S = 1.0  # a longer wait is asked about again in between
_waiting: "list[tuple[float, int, int]]" = []
_flushed_s, _pid, _fd, _answers = 0.0, 0, -1, -1
_size, _owed, _is_answered, _calm_until_s = -1, 0, True, 0.0  # what was told last, -1 before; answers not read yet
_poll = select.poll()  # of the pipe with answers
_loader: "list[_Loader]" = []  # the one under way

samples = int(os.environ.get("UNDERWATT_SAMPLES") or 0)  # of the checkpoint, where a run is gone on with
folder = os.environ.get("UNDERWATT_FOLDER") or "."  # where the run keeps what it writes
seed = int(os.environ.get("UNDERWATT_SEED") or 0)


def step(count: int = 1, size: int = 0) -> None:
    """One more training step (or several) is complete, of this batch size; a loader under way tells its own."""
    if not (_loader and _loader[0].is_under_way):
        _tell(count, size)


def _tell(count: int, size: int) -> None:
    if _is_heard():
        _waiting.append((time.monotonic(), count, size))
        if _waiting[-1][0] - _flushed_s >= FLUSH_S or len(_waiting) >= MOST_WAITING:
            _send()


def ask(size: int = 0) -> int:
    """What to go on with: waits as long as the budget asks for, and gives the batch size; 0 is the training's end."""
    global _calm_until_s, _is_answered
    while _is_heard() and _answers >= 0:
        if (_size > 0 and time.monotonic() < _calm_until_s) or not _send("ask\n", is_ask=True):
            break
        answer = _hear(ANSWER_S if _is_answered else 0.0)
        _is_answered = answer is not None
        if answer is None:
            break
        wait_s, calm_s = answer
        if not wait_s > 0 or _size == 0:
            _calm_until_s = time.monotonic() + calm_s
            break
        time.sleep(min(wait_s, LONGEST_S))
    return size if _size < 0 else _size


def oom(what: "int | BaseException" = 0) -> int:
    """A batch of this size, or of the loader under way, did not fit: the size to go on with, 0 where there is none.

    Given an error, it says 0 to one that is not about memory. What it was about then comes again in smaller batches:

        except RuntimeError as error:
            if not beat.oom(error): raise
    """
    global _calm_until_s
    if isinstance(what, BaseException) and not (isinstance(what, MemoryError) or "out of memory" in str(what).lower()):
        return 0
    size = (what if isinstance(what, int) else 0) or (_loader[0].handed_out if _loader else 0)
    _send(f"oom {size}\n" if size else "oom\n")
    _calm_until_s = 0.0
    smaller = ask(0) if _is_heard() and _answers >= 0 else 0
    if not smaller or (size and smaller >= size):
        return 0
    if _loader:
        _loader[0].taken_back, _loader[0].size = True, smaller
    if "torch" in sys.modules:
        sys.modules["torch"].cuda.empty_cache()
    return smaller


def metric(value: float) -> None:
    """The model now scores this on held-out data; more is better."""
    _send(f"metric {value:.9g}\n")


def loss(value: float) -> None:
    """The loss of the last step, as often as it is known anyway."""
    _send(f"loss {value:.9g}\n")


def saved(position: int = -1) -> None:
    """A checkpoint has been written after so many samples; whoever goes on from it finds them in ``samples``."""
    if position < 0 and _loader:
        position = _loader[0].position
    _send(f"saved {position}\n" if position >= 0 else "saved\n")


def away() -> None:
    """What goes on now is no step, such as a test; ``ask`` in it from time to time paces that too."""
    _send("away\n")


def back() -> None:
    """There are steps again."""
    _send("back\n")


def rate(size: int, usual_size: int, rule: str = "sqrt") -> float:
    """What to multiply a learning rate with that suits the usual batch size: ``sqrt``, or ``linear`` for plain SGD."""
    return float(size) / usual_size if rule == "linear" else (float(size) / usual_size) ** 0.5


def loader(dataset: "typing.Any", batch_size: int = 32, **more: "typing.Any") -> "_Loader":
    """Batches of a PyTorch data set, of this size where nobody listens; other arguments are those of ``DataLoader``.

    Its place in the data is known by ``samples`` and ``seed`` alone, so that a run goes on where it was. With
    ``optimizer`` the learning rates follow the batch size within each of its steps, so that schedulers and checkpoints
    see their own: linearly for SGD, by the square root for others, or by ``lr_rule``.
    """
    return _Loader(dataset, batch_size, **more)


class _Loader:
    """One pass over the data each time it is gone through; a step is over when the next batch is asked for."""

    def __init__(
        self,
        dataset: "typing.Any",
        batch_size: int,
        shuffle: bool = False,
        drop_last: bool = False,
        sampler: "typing.Any" = None,
        optimizer: "typing.Any" = None,
        **more: "typing.Any",
    ) -> None:
        if not hasattr(dataset, "__len__") or "batch_sampler" in more:
            raise TypeError("beat.loader needs a data set with a length, and makes the batches itself")
        self.dataset, self.usual_size, self.drop_last = dataset, batch_size, drop_last
        self.position, self.handed_out, self.stopped, self.is_under_way = samples, 0, False, False
        self._shuffle, self._sampler = shuffle, sampler
        self._length = max(1, len(dataset if sampler is None else sampler))
        self._order: tuple[int, list[int]] = (-1, [])  # of which pass
        rule = more.pop("lr_rule", "")
        if optimizer is not None:
            self._follow(optimizer, rule)
        self._more, self.size, self._rate_size = more, batch_size, batch_size  # the last: of the batch under way
        self._sent: list[tuple[int, int]] = []
        self._data: typing.Any = None
        self._previous: typing.Any = None  # of steps on a GPU, what says that it is complete

    @property
    def epoch(self) -> int:
        """Of the pass that comes next, or is under way, counted from 0."""
        return int(self.position // self._length)

    def __len__(self) -> int:
        left = self._length - self.position % self._length
        return left // max(1, self.size) if self.drop_last else -(-left // max(1, self.size))

    def __iter__(self) -> "typing.Iterator[typing.Any]":
        if _loader and _loader[0].is_under_way:  # a test in the loop of another: all of its data, and no steps
            inner = _Loader(self.dataset, self.usual_size, self._shuffle, self.drop_last, self._sampler)
            inner.position = 0
            away()
            try:
                yield from _torch().utils.data.DataLoader(self.dataset, batch_sampler=_Batches(inner), **self._more)
            finally:
                back()
            return
        if self._data is None:
            self._data = _torch().utils.data.DataLoader(self.dataset, batch_sampler=_Batches(self), **self._more)
        _loader[:] = [self]
        back()
        self._asks()
        self.is_under_way, ends_at = True, (self.epoch + 1) * self._length
        try:
            while self.position < ends_at and not self.stopped:
                self._sent[:] = []
                for batch in self._data:
                    (self.handed_out, self._rate_size), self.taken_back = self._sent.pop(0), False
                    self.position += self.handed_out
                    yield batch
                    if self.taken_back:
                        self.position -= self.handed_out
                        break
                    self._stepped()
                    if not self._asks():
                        break
                else:
                    self.position = ends_at  # also past what was dropped
        except GeneratorExit:  # somebody leaves the loop
            self._stepped()
            raise
        finally:
            self.is_under_way = False
            away()

    def order(self) -> "list[int]":
        """What is left of this pass, the same whenever it is asked for."""
        if self._order[0] != self.epoch:
            order = list(range(len(self.dataset)) if self._sampler is None else self._sampler)
            if self._shuffle and self._sampler is None:
                random = _torch().Generator().manual_seed(seed * 65537 + self.epoch)
                order = _torch().randperm(len(order), generator=random).tolist()
            self._order = (self.epoch, order)
        return self._order[1][self.position % self._length :]

    def _stepped(self) -> None:
        self._wait_for_gpu()
        _tell(1, self.handed_out)

    def _asks(self) -> bool:
        self.size = ask(self.size)
        self.stopped = self.size == 0
        return not self.stopped

    def _wait_for_gpu(self) -> None:
        torch = _torch()
        if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
            return
        event = torch.cuda.Event(blocking=True)
        event.record()
        # The step before suffices while there are no pauses: waiting for each would let the GPU run dry.
        is_calm = time.monotonic() < _calm_until_s and self._previous is not None
        (self._previous if is_calm else event).synchronize()
        self._previous = event

    def _follow(self, optimizer: "typing.Any", rule: str) -> None:
        rule = rule or ("linear" if any("SGD" in base.__name__ for base in type(optimizer).__mro__) else "sqrt")
        own = optimizer.step

        def step(_: "typing.Any", *args: "typing.Any", **more: "typing.Any") -> "typing.Any":
            rates = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups if _loader == [self] else ():
                group["lr"] = group["lr"] * rate(self._rate_size, self.usual_size, rule)
            try:
                return own(*args, **more)
            finally:
                for group, before in zip(optimizer.param_groups, rates):  # noqa: B905 - Python 3.6
                    group["lr"] = before

        step.__dict__.update(getattr(own, "__dict__", {}))  # by which schedulers know a step that is theirs
        optimizer.step = step.__get__(optimizer)


class _Batches:
    """The indices of each batch, made when it is asked for."""

    def __init__(self, owner: "_Loader") -> None:
        self._owner = owner

    def __iter__(self) -> "typing.Iterator[typing.Any]":
        owner, order, at = self._owner, self._owner.order(), 0
        while at < len(order):
            batch = order[at : at + owner.size]
            if not batch or (owner.drop_last and len(batch) < owner.size):
                return
            at += len(batch)
            owner._sent.append((len(batch), owner.size))
            yield batch


def _torch() -> "typing.Any":
    import torch.utils.data

    return torch


def _is_heard() -> bool:
    global _pid, _fd, _answers, _owed, _poll
    if os.getpid() != _pid:  # the first call, or a forked process: what waits there is its parent's to send
        _pid, _waiting[:], _owed = os.getpid(), [], 0
        _fd, _answers = _opened("UNDERWATT_BEATS", os.O_WRONLY), _opened("UNDERWATT_ANSWERS", os.O_RDONLY)
        _poll = select.poll()
        if _answers >= 0:
            _poll.register(_answers, select.POLLIN)
    return _fd >= 0


def _opened(variable: str, how: int) -> int:
    try:
        return os.open(os.environ[variable], how | os.O_NONBLOCK)
    except (KeyError, OSError):
        return -1


def _send(last: str = "", is_ask: bool = False) -> bool:
    """Write what waits, then this; whether it went. What does not go is not waited for."""
    global _flushed_s, _owed
    if not _is_heard():
        return False
    _flushed_s = time.monotonic()
    try:
        lines = [f"step {at_s:.6f} {count} {size or ''}".rstrip() + "\n" for at_s, count, size in _waiting]
        os.write(_fd, "".join([*lines, last]).encode())
        del _waiting[:]
        _owed += is_ask
        return True
    except OSError:  # the pipe is full, or nobody is there: keep the count, not each time
        sizes = {size for _, _, size in _waiting}
        _waiting[:] = [(_waiting[-1][0], sum(n for _, n, s in _waiting if s == size), size) for size in sizes]
        return False


def _hear(within_s: float) -> "tuple[float, float] | None":
    """Read answers until there is one to each question: how long to wait, and how long not to ask again."""
    global _size, _owed, _answers
    until_s, answer = time.monotonic() + within_s, None
    try:
        while _owed > 0 and _poll.poll(max(0.0, 1e3 * (until_s - time.monotonic()))):
            lines = os.read(_answers, 4096).split(b"\n")[:-1]
            _answers, _owed = (_answers, _owed - len(lines)) if lines else (-1, 0)  # or whoever did is gone
            for size, wait_s, calm_s in map(bytes.split, lines):
                _size, answer = int(size), (float(wait_s), float(calm_s))
    except (OSError, ValueError):
        return None
    return answer if _owed <= 0 else None


atexit.register(_send)
if __name__ == "__main__":
    print(pathlib.Path(__file__).read_text(), end="")
