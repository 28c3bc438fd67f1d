"""Two real processes (gloo) that train together on two simulated boards: one decision, one budget, no deadlock."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning.pytorch", reason="Lightning is not installed")
pytest.importorskip("transformers", reason="Transformers is not installed")

import torch
from ddp_child import EPOCHS, SAMPLES

from underwatt.adapters.callback_base import TrainerBudget
from underwatt.jobs.data import PassBatches
from underwatt.runlog.log import read_log

CHILD = Path(__file__).parents[1] / "helpers" / "ddp_child.py"
LIMIT_S = 240


def train_together(folder: Path, trainer: str, dies_at: int = -1) -> list[dict[str, Any]]:
    """What each process wrote; nothing of one that was killed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(2):
        place = {"RANK": rank, "LOCAL_RANK": rank, "NODE_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1, "ACCELERATE_USE_CPU": "true"}
        environment = os.environ | {name: str(value) for name, value in (place | where).items()}
        words = [sys.executable, str(CHILD), str(folder), str(rank), str(dies_at), trainer]
        with (folder / f"rank{rank}.txt").open("w") as output:
            children.append(subprocess.Popen(words, env=environment, stdout=output, stderr=subprocess.STDOUT))
    try:
        for child in children:
            child.wait(LIMIT_S)
    finally:
        for child in children:
            child.kill()
            child.wait()
    files = [folder / f"rank{rank}.json" for rank in range(2)]
    assert files[0].is_file(), (folder / "rank0.txt").read_text()
    return [json.loads(file.read_text()) for file in files if file.is_file()]


@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize("trainer", ["lightning", "transformers"])
def test_all_ranks_take_the_same_batch_size_at_every_step_and_share_one_budget(trainer: str, tmp_path: Path) -> None:
    one, other = train_together(tmp_path, trainer)
    assert (one["ended"], other["ended"]) == ("well", "well")
    sizes = [[len(batch) for batch in rank["seen"]] for rank in (one, other)]
    assert sizes[0] == sizes[1]
    assert len(set(sizes[0])) > 2, "the batch size never changed"
    each = -(-SAMPLES // 2)
    for epoch in range(EPOCHS):
        seen = [
            number
            for rank in (one, other)
            for number in [n for batch in rank["seen"] for n in batch][epoch * each : (epoch + 1) * each]
        ]
        assert set(seen) == set(range(SAMPLES)), "an epoch is all of the data"
        assert len(seen) == 2 * each
    log = read_log(tmp_path / "run" / "log.jsonl")
    assert log.start.device.name.startswith("2 ×")
    assert log.end.restored
    assert log.end.samples == each * EPOCHS, "those of one device"
    mean_w = log.energy_j() / log.points.at_s[-1]
    assert 4.0 < mean_w <= 8.0 * 1.005, "more than one board can draw, and both within the budget"
    assert log.verdict().held is not False


@pytest.mark.timeout(LIMIT_S + 60)
def test_where_one_rank_dies_the_other_ends_with_an_error_and_the_devices_are_back(tmp_path: Path) -> None:
    [left] = train_together(tmp_path, "transformers", dies_at=30)
    assert left["ended"] != "well"
    log = read_log(tmp_path / "run" / "log.jsonl")
    assert (log.end.outcome, log.end.restored) == ("failed", True)


def test_each_rank_goes_on_with_its_own_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the first one would have all ranks drop out the same."""

    def one(rank: int, **state: Any) -> TrainerBudget:
        budget: Any = TrainerBudget(budget_w=4.0, batch_sizes=(4,))
        budget._processes, budget._group = 2, "both"
        budget._batches = PassBatches(range(rank, 16, 2), lambda: 4)
        budget._resumed = state
        torch.manual_seed(rank)
        return budget

    kept: list[Any] = []

    def gather(into: list[Any], mine: Any, group: Any) -> None:
        kept.append(mine)
        into[:] = [*kept, *[mine] * (2 - len(kept))]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    one(0)._state()
    state = one(1)._state()
    drawn = []
    for rank in range(2):
        budget: Any = one(7, **state)
        budget._go_on(rank)
        next(iter(budget._batches))
        budget._step_begins()
        drawn.append(torch.rand(3).tolist())
    assert drawn == [torch.rand(3, generator=torch.Generator().manual_seed(rank)).tolist() for rank in range(2)]
