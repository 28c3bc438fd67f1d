"""The noise of a training's gradients, looked at while it goes on."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from underwatt.jobs._torch import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from underwatt.jobs.training import Training

# Of a step's time, for looking at gradients; checked with benchmarks/gradient_cost.py.
MOST_LOOKING = 0.005
FIRST_LOOK, UNTIMED_LOOKS, LONGEST_PERIOD, SMOOTH = 3, 4, 1000, 0.05


class GradientWatch:
    """Compares the gradients of successive steps now and then: how much of them is signal, and how much noise.

    Both are measured as the optimizer does: one that scales its steps by the size of gradients, as Adam does, sees the
    noise of each tensor in relation to its size. A GPU is never waited for, and looking takes at most ``most_share`` of
    the time on average: where it takes more, it is done less often.
    """

    def __init__(
        self,
        training: Training,
        now_s: Callable[[], float] = time.perf_counter,
        most_share: float = MOST_LOOKING,
    ) -> None:
        self._training, self._now_s, self._most_share = training, now_s, most_share
        self._kept: list[torch.Tensor] = []  # the gradients of the step before
        self._squares: Any = None
        self._usual: Any = None  # squares of each tensor, on average
        self._size, self._step, self._due, self._looks = 0, 0, FIRST_LOOK, 0
        self._compares = self._is_off = False
        self._last_s, self._step_s, self._cost_s, self.gpu_s = math.nan, math.nan, 0.0, 0.0
        self._on_its_way: Any = None  # what was copied from a GPU, of which batch size, and the events around it

    def look(self) -> tuple[float, float] | None:
        """After a step: the squared true gradient and the variance of one sample's, where a pair became known."""
        begin_s = self._now_s()
        took_s, self._last_s = begin_s - self._last_s, begin_s
        if took_s > 0:  # the first is NaN
            self._step_s = took_s if math.isnan(self._step_s) else self._step_s + SMOOTH * (took_s - self._step_s)
        self._step += 1
        found = self._arrived()
        if self._is_off or self._step < self._due or self._on_its_way is not None:
            self._compares = False
            return found
        try:
            with torch.no_grad():
                found = self._compare() or found
        except (RuntimeError, TypeError):  # sparse, on several devices, no memory for a copy: then without
            self._is_off, self._kept = True, []
        self._spent(self._now_s() - begin_s)
        return found

    def _compare(self) -> tuple[float, float] | None:
        gradients = [weight.grad for weight in self._training.model.parameters() if weight.grad is not None]
        if not gradients or any(gradient.dtype != torch.float32 for gradient in gradients):
            raise TypeError("nothing that could be compared")
        size, is_cuda = self._training.batch_size, gradients[0].is_cuda
        timer = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if is_cuda else []  # type: ignore[no-untyped-call]
        if timer:
            timer[0].record()
        squares = torch.stack(torch._foreach_norm(gradients)).square()
        pair = None
        if self._compares and size == self._size and len(gradients) == len(self._kept):
            pair = self._pair(gradients, squares)
        self._compares = pair is None or self._period == 1
        if self._compares:
            if len(self._kept) != len(gradients):
                self._kept = [torch.empty_like(gradient) for gradient in gradients]
            torch._foreach_copy_(self._kept, gradients)
            self._squares, self._size, self._due = squares, size, self._step + 1
        else:
            self._due = self._step + self._period
        if pair is None:
            return None
        if not is_cuda:
            return self._told(pair.tolist(), size)
        copied = torch.empty(2, pin_memory=True)
        copied.copy_(pair, non_blocking=True)
        timer[1].record()
        self._on_its_way = copied, size, *timer
        return None

    def _pair(self, gradients: list[torch.Tensor], squares: Any) -> Any:
        """The product of two successive gradients, and their mean square, tensors weighed as the optimizer does."""
        torch._foreach_add_(self._kept, gradients)
        product = (torch.stack(torch._foreach_norm(self._kept)).square() - squares - self._squares) / 2
        square = (squares + self._squares) / 2
        self._usual = (
            square if self._usual is None or len(self._usual) != len(square) else self._usual.lerp(square, SMOOTH)
        )
        usual = self._usual.clamp_min(1e-30)
        counts = torch.tensor([gradient.numel() for gradient in gradients], device=usual.device)
        weights = counts / usual if self._training.job.is_adaptive else 1 / usual.sum()
        return torch.stack([(weights * product).sum(), (weights * square).sum()])

    def _arrived(self) -> tuple[float, float] | None:
        if self._on_its_way is None or not self._on_its_way[3].query():
            return None
        (copied, size, begin, end), self._on_its_way = self._on_its_way, None
        self.gpu_s = begin.elapsed_time(end) / 1000
        return self._told(copied.tolist(), size)

    def _told(self, pair: list[float], size: int) -> tuple[float, float]:
        product, square = pair
        noise = size * (square - product)
        # Batches of one pass have no sample in common, so that their noises are opposed a little.
        return product + noise / max(self._training.train_samples - 1, 1), noise

    def _spent(self, seconds: float) -> None:
        """A look took so long; the first ones load and allocate."""
        self._looks += 1
        if self._looks > UNTIMED_LOOKS:
            self._cost_s += SMOOTH * (seconds - self._cost_s) if self._cost_s else seconds

    @property
    def _period(self) -> int:
        """A pair of gradients is compared every so many steps."""
        allowed_s = self._most_share * self._step_s
        if not allowed_s > 0:
            return 1
        pair_s = max(2 * self._cost_s, self.gpu_s)
        return min(max(1, math.ceil(pair_s / allowed_s)), LONGEST_PERIOD)
