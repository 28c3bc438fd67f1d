"""A Transformers ``Trainer`` under a power budget: one callback more, which also changes the batch size under way.

    python examples/train_transformers.py   # on a simulated Jetson Nano; UNDERWATT_DEVICE=nvml:0 names a real device

A small GPT-2 learns the sentences of a made-up grammar, letter by letter. Nothing is downloaded.
Lines that end with ``# +`` are what Underwatt adds; ``# -`` is a line that one of them stands for. Without the one and
with the other it is the script as it was, which a test runs too.
"""

from __future__ import annotations

import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from data import board, grammar_text
from underwatt import TransformersCallback  # +

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
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--folder", default="out/train_transformers")
    options = parser.parse_args()

    arguments = TrainingArguments(
        output_dir=options.folder,
        max_steps=options.steps,
        per_device_train_batch_size=16,
        learning_rate=1e-3,
        save_strategy="no",
        report_to="none",
    )
    where = {"folder": options.folder, **board(network, sentences(), is_loss=True)}  # +
    budget = TransformersCallback(budget_w=3, batch_sizes=(8, 16, 32, 64), **where)  # +
    # - Trainer(network(), arguments, train_dataset=sentences()).train()
    Trainer(network(), arguments, train_dataset=sentences(), callbacks=[budget]).train()  # +


if __name__ == "__main__":
    main()
