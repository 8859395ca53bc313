"""Classifies handwritten digits with a small CNN.

python with_lightning.py
"""

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

images, labels = load_digits(return_X_y=True)
images = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
labels = torch.tensor(labels)
train = TensorDataset(images[360:], labels[360:])
test = TensorDataset(images[:360], labels[:360])


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.3),
            nn.Linear(1024, 10),
        )

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        right = (self.net(x).argmax(1) == y).float()
        self.log("accuracy", right.mean(), prog_bar=True, sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        steps = self.trainer.estimated_stepping_batches
        scheduler = OneCycleLR(optimizer, 3e-3, total_steps=steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


lightning.seed_everything(0)
best = ModelCheckpoint("runs/image", monitor="accuracy", mode="max", save_last=True)
stop = EarlyStopping("accuracy", patience=4, mode="max")
trainer = lightning.Trainer(max_epochs=20, callbacks=[best, stop])
train_loader = DataLoader(train, batch_size=64, shuffle=True)
test_loader = DataLoader(test, batch_size=64)
trainer.fit(Classifier(), train_loader, test_loader, ckpt_path="last")
module = Classifier.load_from_checkpoint(best.best_model_path)
torch.save(module.net.state_dict(), "digits.pt")
