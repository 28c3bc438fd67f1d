"""One of two processes that train together: writes the batch sizes it trained with; may die in the middle.

python ddp_child.py FOLDER RANK DIES_AT TRAINER
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from profile_helpers import COST

from underwatt.control.state import ControlOptions
from underwatt.measure.measurement import MeasureOptions

SAMPLES, OWN, EPOCHS = 4001, 8, 3
DEVICES = "virtual:nano?seed=1,virtual:nano?seed=2"
QUICK = ControlOptions(measure=MeasureOptions(precision=0.1, min_steps=3, limit_s=0.5))


class Points(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self) -> None:
        self.rows = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self.rows[index]
        return {"inputs": row, "labels": (row.sum() > 0).long(), "number": torch.tensor(index)}


class Net(torch.nn.Module):
    def __init__(self, dies_at: int) -> None:
        super().__init__()
        self.layer, self.seen, self.dies_at = torch.nn.Linear(8, 2), [], dies_at

    def forward(self, inputs: Any, labels: Any, number: Any) -> dict[str, torch.Tensor]:
        if len(self.seen) == self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.seen.append(number.tolist())
        return {"loss": torch.nn.functional.cross_entropy(self.layer(inputs), labels)}


def by_transformers(net: Net, folder: Path) -> None:
    import transformers

    from underwatt.adapters.transformers import TransformersCallback

    budget = TransformersCallback(**given(folder))
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "trainer"),
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=OWN,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        ddp_backend="gloo",
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        save_strategy="no",
        learning_rate=1e-2,
    )
    transformers.Trainer(net, arguments, train_dataset=Points(), callbacks=[budget]).train()


def by_lightning(net: Net, folder: Path) -> None:
    import lightning.pytorch as pl

    from underwatt.adapters.lightning import LightningCallback

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: Any) -> Any:
            return self.net(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    trainer = pl.Trainer(
        max_epochs=EPOCHS,
        callbacks=[LightningCallback(**given(folder))],
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(Points(), OWN, shuffle=True))


def given(folder: Path) -> dict[str, Any]:
    more = {"device": DEVICES, "cost": COST, "folder": folder / "run", "options": QUICK}
    return {"budget_w": 8.0, "batch_sizes": (4, 8, 16, 32), **more}


def main() -> None:
    folder, rank, dies_at, trainer = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = Net(dies_at if rank == 1 else -1)
    ended = "well"
    try:
        (by_transformers if trainer == "transformers" else by_lightning)(net, folder)
    except Exception as exc:  # noqa: BLE001 - the test looks at it
        ended = f"{type(exc).__name__}: {exc}"
    (folder / f"rank{rank}.json").write_text(json.dumps({"seen": net.seen, "ended": ended}))
    os._exit(0)  # PyTorch's own farewell to a dead process may take long


if __name__ == "__main__":
    main()
