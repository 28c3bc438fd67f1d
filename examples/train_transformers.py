"""A Transformers ``Trainer`` under a power budget: ``TransformersCallback`` is all that a training script gains.

    python examples/train_transformers.py --device nvml:0 --budget 300W

Without ``--device`` the board is a simulated Jetson Nano, which has to be told what a step costs; the training is real:
a small GPT-2 that learns the sentences of a made-up grammar, letter by letter. Nothing is downloaded.
"""

from __future__ import annotations

import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from data import grammar_text
from underwatt import Job, TransformersCallback, count_cost

LENGTH = 32


def sentences() -> list[dict[str, torch.Tensor]]:
    codes = torch.tensor(list(grammar_text(1000, seed=0).encode("ascii")))
    return [{"input_ids": window, "labels": window} for window in codes.split(LENGTH) if len(window) == LENGTH]


def network() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=128, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="virtual:nano")
    parser.add_argument("--budget", default="3W")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--folder", default="out/train_transformers")
    options = parser.parse_args()

    cost = None
    if options.device.startswith("virtual"):
        job = Job(
            network,
            sentences(),
            target=1.0,
            forward=lambda net, batch: (net(**batch).loss, None),
            loss=lambda loss, _: loss,
        )
        cost = count_cost(job)
    budget = TransformersCallback(budget=options.budget, device=options.device, folder=options.folder, cost=cost)
    arguments = TrainingArguments(
        output_dir=options.folder,
        max_steps=options.steps,
        per_device_train_batch_size=16,
        learning_rate=1e-3,
        save_strategy="no",
        report_to="none",
    )
    Trainer(network(), arguments, train_dataset=sentences(), callbacks=[budget]).train()


if __name__ == "__main__":
    main()
