"""The script ``train_plain.py`` as a job: what it takes to hand an existing training to Underwatt."""

import torch
from torch import nn

from data import digits
from underwatt.jobs.job import Job


def job() -> Job:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    return Job(model, digits(), target=0.95, optimizer=torch.optim.AdamW, lr=5e-3, lr_batch_size=32)
