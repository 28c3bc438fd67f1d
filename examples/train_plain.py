"""A plain PyTorch script that Underwatt drives from outside; the two lines that name ``emitter`` are all it takes.

    underwatt profile --device D -- python examples/train_plain.py --batch-size {batch_size} --lr {lr}

In an environment without Underwatt, copy the emitter beside the script and import that:
``python -m underwatt.jobs.emitter > underwatt_beat.py``.
"""

from __future__ import annotations

import argparse

import torch

from data import digits
from underwatt.jobs import emitter


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--epochs", type=int, default=1000)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    dataset = torch.utils.data.TensorDataset(*digits())
    for _ in range(options.epochs):
        for images, classes in torch.utils.data.DataLoader(dataset, options.batch_size, shuffle=True, drop_last=True):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images), classes).backward()
            optimizer.step()
            emitter.step()


if __name__ == "__main__":
    main()
