"""Trains a small LightningModule, by what `HOW` says: "plain" is Lightning's own Trainer, "strategy" the same with
Paceline's strategy, "ddp" with Lightning's, and "paceline" is paceline.lightning.trainer.

lightning_cases.py KIND HOW OUT [words as JSON]

Writes metrics, learning rates and weights to OUT.json.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.callbacks import EarlyStopping
from safetensors.torch import save_file
from torch.utils.data import DataLoader, TensorDataset

KIND, HOW, OUT = sys.argv[1:4]
WORDS = json.loads(sys.argv[4]) if len(sys.argv) > 4 else {}
warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
generator = torch.Generator().manual_seed(0)
FEATURES = torch.randn(48, 6, generator=generator)
LABELS = torch.randint(0, 3, (48,), generator=generator)
EVENTS: list[str] = []


class Rows(L.LightningDataModule):
    """32 training rows and 16 to validate with."""

    def prepare_data(self) -> None:
        EVENTS.append("prepare_data")

    def setup(self, stage: str) -> None:
        self.train = TensorDataset(FEATURES[:32], LABELS[:32])
        self.val = TensorDataset(FEATURES[32:], LABELS[32:])

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, batch_size=8)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, batch_size=8)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.val, batch_size=8)


class Net(L.LightningModule):
    """A classifier with most of what modules use: hyperparameters, values, metrics, hooks and its trainer."""

    def __init__(self, width: int = 16, lr: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = torch.nn.Sequential(torch.nn.Linear(6, width), torch.nn.Tanh(), torch.nn.Linear(width, 3))
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(3, average="micro")
        self.held_out = torchmetrics.classification.MulticlassAccuracy(3)
        self.curve = torchmetrics.classification.BinaryAUROC()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> dict[str, torch.Tensor]:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.accuracy(logits, y)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log_dict({"first": logits[:, 0].mean()}, on_epoch=True, on_step=False)
        self.log("right", (logits.argmax(1) == y).float().sum(), reduce_fx="sum", on_epoch=True, on_step=False)
        return {"loss": loss}

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        self.held_out.update(logits, y)
        self.curve.update(logits.softmax(1)[:, 0], (y == 0).long())
        self.log("val_loss", F.cross_entropy(logits, y))
        self.log("held_out", self.held_out)

    def on_validation_epoch_end(self) -> None:
        self.log("auc", self.curve.compute())
        self.curve.reset()

    def test_step(self, batch: list[torch.Tensor]) -> None:
        self.log("test_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def on_train_epoch_start(self) -> None:
        EVENTS.append(f"epoch {self.current_epoch} starts after step {self.global_step}")

    def on_train_epoch_end(self) -> None:
        EVENTS.append(f"epoch {self.current_epoch} ends after step {self.global_step}")
        self.log("epochs", float(self.current_epoch + 1))

    def configure_optimizers(self) -> object:
        adam = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        schedulers = torch.optim.lr_scheduler
        if KIND == "cosine":
            steps = self.trainer.estimated_stepping_batches
            return {
                "optimizer": adam,
                "lr_scheduler": {"scheduler": schedulers.OneCycleLR(adam, 0.1, steps), "interval": "step"},
            }
        if KIND == "epochs":
            warm = schedulers.LinearLR(adam, 0.5, total_iters=1)
            each = schedulers.SequentialLR(adam, [warm, schedulers.StepLR(adam, 1, 0.5)], [1])
            return [adam], [each]
        if KIND == "plateau":
            plateau = schedulers.ReduceLROnPlateau(adam, factor=0.1, patience=0, threshold=0.5)
            return {"optimizer": adam, "lr_scheduler": plateau, "monitor": "val_loss"}
        if KIND == "groups":
            first, last = self.layers[0].parameters(), self.layers[2].parameters()
            sgd = torch.optim.SGD([{"params": first}, {"params": last, "lr": 0.2}], lr=0.1, momentum=0.9)
            frequent = {"scheduler": schedulers.StepLR(sgd, 1, 0.5), "interval": "step", "frequency": 2}
            return [{"optimizer": sgd, "lr_scheduler": frequent}]
        return [adam]


torch.manual_seed(3)
net, rows = Net(), Rows()
words = {"gradient_clip_val": 0.5, **WORDS}
callbacks = [EarlyStopping("val_loss", patience=1, min_delta=0.5)] if words.pop("stop", False) else []
if HOW == "paceline":
    import paceline

    words.setdefault("epochs", words.pop("max_epochs", 2))
    trainer = paceline.lightning.trainer(net, rows, global_batch=8, callbacks=callbacks, **words)
    optimizer, tested = trainer.optimizers[0], trainer.test()
    result = tested["test_loss"]
else:
    more: dict[str, object] = {"accelerator": "cpu", "devices": 1, "num_sanity_val_steps": 0, "logger": False}
    if HOW == "strategy":
        from paceline.lightning import PacelineStrategy

        more |= {"strategy": PacelineStrategy(), "devices": 2, "use_distributed_sampler": True}
    elif HOW == "ddp":
        more |= {"strategy": "ddp", "devices": 2}
    more |= {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(callbacks=callbacks, **{"max_epochs": 2, **words, **more})
    trainer.fit(net, datamodule=rows)
    fitted = dict(trainer.callback_metrics)
    optimizer = trainer.optimizers[0]
    result = trainer.test(net, datamodule=rows, verbose=False)[0]["test_loss"]
if HOW == "paceline":
    trainer.paceline.export(f"{OUT}.safetensors")
elif trainer.is_global_zero:
    save_file(net.state_dict(), f"{OUT}.safetensors")
if trainer.is_global_zero:
    metrics = trainer.callback_metrics if HOW == "paceline" else fitted
    values = {
        "metrics": {name: float(value) for name, value in metrics.items() if name != "test_loss"},
        "rates": [group["lr"] for group in optimizer.param_groups],
        "test_loss": float(result),
        "steps": trainer.global_step,
        "events": EVENTS,
    }
    Path(f"{OUT}.json").write_text(json.dumps(values))
