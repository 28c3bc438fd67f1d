"""A short load for `underwatt check`: one file for Python 3.6, run by its path with whatever Python has PyTorch.

``load_script.py BATCH_SIZE [GPU]`` trains a small network until it is ended: on the GPU with PyTorch where that can use
one, else on the CPU with NumPy. ``load_script.py --probe`` says by its exit code whether it would use a GPU.
"""

import os
import sys
import time
from typing import Callable  # noqa: UP035 - of Python 3.6

LAYERS = 4
WIDTH_GPU, WIDTH_CPU = 2048, 384
REPORT_S = 0.01  # quicker steps are told of together


def main(words: "list[str]") -> int:
    """Train, or say whether a GPU would be used."""
    if words[1:2]:
        os.environ["CUDA_VISIBLE_DEVICES"] = words[1]
    try:
        import torch

        has_gpu = torch.cuda.is_available()
    except Exception:  # noqa: BLE001 - a PyTorch that cannot be imported is none
        has_gpu = False
    if words[0] == "--probe":
        return 0 if has_gpu else 1
    os.nice(5)  # whoever reads the power comes first
    beats = open(os.environ["UNDERWATT_BEATS"], "w")  # noqa: SIM115, PTH123 - until the end
    step = torch_step(int(words[0])) if has_gpu else numpy_step(int(words[0]))
    while True:
        steps, begin_s = 0, time.monotonic()
        while steps == 0 or time.monotonic() - begin_s < REPORT_S:
            step()
            steps += 1
        beats.write(f"step - {steps}\n")
        beats.flush()


def torch_step(batch_size: int) -> Callable[[], None]:
    """A step of training on the GPU."""
    import torch

    layers = [torch.nn.Linear(WIDTH_GPU, WIDTH_GPU) for _ in range(LAYERS)]
    model = torch.nn.Sequential(*layers).cuda()
    inputs = torch.randn(4 * batch_size, WIDTH_GPU, device="cuda")

    def step() -> None:
        for weight in model.parameters():
            weight.grad = None
        model(inputs).square().mean().backward()
        torch.cuda.synchronize()

    return step


def numpy_step(batch_size: int) -> Callable[[], None]:
    """A step of training on the CPU: forward, and the two products of the way back."""
    import numpy

    weights = [numpy.ones((WIDTH_CPU, WIDTH_CPU), "float32") / WIDTH_CPU for _ in range(LAYERS)]
    inputs = numpy.ones((8 * batch_size, WIDTH_CPU), "float32")

    def step() -> None:
        values = inputs
        for weight in weights:
            values = values @ weight
        for weight in reversed(weights):
            inputs.T @ values
            values = values @ weight.T

    return step


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
