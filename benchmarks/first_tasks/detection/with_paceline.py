"""Fine-tunes a detector of squares, discs and crosses.

paceline run --workers 2 --run-dir runs/detection with_paceline.py
"""

import torch
from transformers import AutoModelForObjectDetection
from transformers.image_transforms import center_to_corners_format
from transformers.loss.loss_for_object_detection import box_iou

import paceline

train = torch.load("shapes/train.pt")
test = torch.load("shapes/test.pt")


def collate(rows):
    return {"pixel_values": torch.stack([row["image"] for row in rows]), "labels": rows}


def average(output, batch):
    hits, guesses, objects = 0, 0, 0
    for logits, boxes, row in zip(output.logits, output.pred_boxes, batch["labels"]):
        scores, classes = logits.sigmoid().max(1)
        sure = scores > 0.5
        corners = center_to_corners_format(row["boxes"])
        overlap, _ = box_iou(center_to_corners_format(boxes[sure]), corners)
        right = (overlap > 0.5) & (classes[sure, None] == row["class_labels"])
        hits += right.any(0).sum()
        guesses += sure.sum()
        objects += len(corners)
    return {"recall": (hits, objects), "precision": (hits, guesses)}


trainer = paceline.Trainer(
    model=lambda: AutoModelForObjectDetection.from_pretrained("detector").train(),
    loss=lambda output, batch: output.loss,
    optimizer=lambda params: torch.optim.AdamW(params, lr=2e-3),
    schedule=paceline.cosine(warmup=20),
    global_batch=32,
    clip_norm=1.0,
)
trainer.keep_best("recall")
for report in trainer.steps(train, epochs=20, collate=collate):
    if report.epoch_end:
        result = trainer.evaluate(test, average, collate=collate)
        print(f"epoch {report.epoch}: {report.loss:.4f} {result['recall']:.4f}")
trainer.load_best()
trainer.export("detector.safetensors")
