"""Fine-tunes BERT to tell lines of code from lines of prose.

python with_lightning.py
"""

import lightning
import torch
from datasets import load_dataset
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    get_linear_schedule_with_warmup,
)

tokenizer = AutoTokenizer.from_pretrained("bert")
collate = DataCollatorWithPadding(tokenizer)
data = load_dataset("lines")
data = data.map(lambda row: tokenizer(row["text"], truncation=True))
data = data.remove_columns("text")


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = AutoModelForSequenceClassification.from_pretrained("bert").train()

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        right = self.model(**batch).logits.argmax(1) == batch["labels"]
        self.log("accuracy", right.float().mean(), prog_bar=True, sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=5e-4)
        steps = self.trainer.estimated_stepping_batches
        scheduler = get_linear_schedule_with_warmup(optimizer, 20, steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


lightning.seed_everything(0)
best = ModelCheckpoint("runs/bert", monitor="accuracy", mode="max", save_last=True)
trainer = lightning.Trainer(max_epochs=3, gradient_clip_val=1.0, callbacks=[best])
train_loader = DataLoader(data["train"], 32, shuffle=True, collate_fn=collate)
test_loader = DataLoader(data["test"], 32, collate_fn=collate)
trainer.fit(Classifier(), train_loader, test_loader, ckpt_path="last")
module = Classifier.load_from_checkpoint(best.best_model_path)
module.model.save_pretrained("bert-tuned")
