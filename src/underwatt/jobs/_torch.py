"""PyTorch for the modules that cannot do without it, or the hint how to get it."""

from __future__ import annotations

from underwatt._imports import require

require("torch", extra="torch")

# After the check, whose error is the better one.
import torch  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

__all__ = ["FlopCounterMode", "TorchDispatchMode", "torch"]
