"""A plain PyTorch script that is a partner of Underwatt's: batch size and pauses follow the budget while it trains.

    python -m underwatt.jobs.emitter > underwatt_beat.py
    underwatt run --budget 10W -b 8,16,32,64 -- python examples/train_command.py

Run on its own it trains as it always did. Python 3.6 and PyTorch 1 are enough. Lines that end with ``# +`` are what
Underwatt adds; ``# -`` is a line that one of them stands for. Without the one and with the other it is the script as it
was, which a test runs too.
"""

import argparse

# - import os
import sys

import torch

sys.path.append(".")  # where underwatt_beat.py was written # +
import underwatt_beat as beat  # +


def main():  # type: ignore[no-untyped-def]
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    # - parser.add_argument("--checkpoint", default="train_command.pt")
    parser.add_argument("--checkpoint", default=beat.folder + "/train_command.pt")  # +
    options = parser.parse_args()
    torch.manual_seed(0)
    classes = torch.arange(2000) % 10
    images = torch.randn(10, 64)[classes] + 2 * torch.randn(2000, 64)
    dataset = torch.utils.data.TensorDataset(images, classes)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    # - loader = torch.utils.data.DataLoader(dataset, batch_size=32, shuffle=True)
    # - if os.path.exists(options.checkpoint):
    loader = beat.loader(dataset, batch_size=32, shuffle=True, optimizer=optimizer)  # +
    if beat.samples:  # +
        state = torch.load(options.checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    # - for epoch in range(options.epochs):
    for epoch in range(loader.epoch, options.epochs):  # +
        for inputs, targets in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        score = float((model(images).argmax(1) == classes).float().mean())
        beat.metric(score)  # +
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, options.checkpoint)
        beat.saved()  # +
        print("epoch", epoch, "accuracy", round(score, 3), flush=True)


if __name__ == "__main__":
    main()
