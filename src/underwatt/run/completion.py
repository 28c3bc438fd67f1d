"""When is a step complete? On a GPU a training loop only queues it, so somebody has to wait for the GPU."""

from __future__ import annotations

import sys
from typing import Any


class Completion:
    """Waits for steps on the GPU that PyTorch uses, where it uses one.

    While steps follow each other at once, the *previous* step is waited for: waiting for each would let the GPU run
    dry. Where there are pauses between steps, each one is waited for, because a pause begins when its step has ended.
    """

    def __init__(self, *, on_gpu: bool | None = None) -> None:
        self.on_gpu = on_gpu  # ``None``: found out at the first step
        self._in_flight: Any = None

    def wait(self, *, pausing: bool) -> None:
        """Return when the step that was queued last, or the one before it, is complete."""
        if self.on_gpu is None:
            torch = sys.modules.get("torch")
            self.on_gpu = torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized()
        if not self.on_gpu:
            return
        event = sys.modules["torch"].cuda.Event(blocking=True)
        event.record()
        if pausing or self._in_flight is None:
            event.synchronize()
        else:
            self._in_flight.synchronize()
        self._in_flight = None if pausing else event
