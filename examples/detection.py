"""Object detection: a small anchor-free detector finds circles, squares and triangles in drawn images.

Its measure is the mean average precision over all held-out images. About a minute.

python examples/detection.py                        # one worker
paceline run --workers 2 examples/detection.py      # two, and the same training
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import paceline

NAMES = ("circle", "square", "triangle")
SIZE, STRIDE, MOST = 64, 8, 3  # pixels of an image, pixels of a cell, objects of an image
EPOCHS, BATCH = 12, 64


class Shapes(Dataset):
    """Images of `SIZE` x `SIZE` pixels with one to `MOST` shapes, drawn from the row's number: (image, boxes, labels).

    Boxes are (left, top, right, bottom) in pixels. Missing objects have the label -1.
    """

    def __init__(self, rows, first=0):
        self.rows, self.first = rows, first

    def __len__(self):
        return self.rows

    def __getitem__(self, row):
        draw = torch.Generator().manual_seed(self.first + row)
        image = 0.2 * torch.rand(SIZE, SIZE, generator=draw)
        y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
        boxes, labels = torch.zeros(MOST, 4), torch.full((MOST,), -1)
        for number in range(int(torch.randint(1, MOST + 1, (), generator=draw))):
            radius = float(torch.randint(5, 11, (), generator=draw))
            left, top = (torch.rand(2, generator=draw) * (SIZE - 2 * radius)).tolist()
            center_x, center_y, label = left + radius, top + radius, int(torch.randint(3, (), generator=draw))
            across, down = (x - center_x).abs(), y - center_y
            inside = [
                across**2 + down**2 <= radius**2,
                (across <= radius) & (down.abs() <= radius),
                (down.abs() <= radius) & (across <= (down + radius) / 2),
            ][label]
            image[inside] = 0.5 + 0.5 * float(torch.rand((), generator=draw))
            boxes[number] = torch.tensor([left, top, left + 2 * radius, top + 2 * radius])
            labels[number] = label
        return image[None], boxes, labels


def layer(inputs, outputs, stride=1):
    convolution = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())


class Detector(nn.Module):
    """For each cell the logits of the classes, and the distances of a box's sides from the cell's center, in cells."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(layer(1, 16), layer(16, 32, 2), layer(32, 64, 2), layer(64, 64, 2), layer(64, 64))
        self.classes, self.sides = nn.Conv2d(64, len(NAMES), 1), nn.Conv2d(64, 4, 1)
        nn.init.constant_(self.classes.bias, -3.0)  # few cells have an object

    def forward(self, images):
        features = self.features(images)
        return self.classes(features).flatten(2).transpose(1, 2), self.sides(features).exp().flatten(2).transpose(1, 2)


def centers():
    """The centers of all cells, (cells, 2) as x and y in pixels."""
    along = torch.arange(SIZE // STRIDE) * STRIDE + STRIDE / 2
    return torch.cartesian_prod(along, along).flip(1)


def boxes_of(sides):
    """Boxes in pixels, from the distances that the detector gives for each cell."""
    middle = centers().to(sides)
    return torch.cat([middle - sides[..., :2] * STRIDE, middle + sides[..., 2:] * STRIDE], -1)


def overlap(one, other):
    """Intersection over union of boxes, which broadcast."""
    corner = torch.maximum(one[..., :2], other[..., :2]), torch.minimum(one[..., 2:], other[..., 2:])
    shared = (corner[1] - corner[0]).clamp(min=0).prod(-1)
    areas = [(box[..., 2:] - box[..., :2]).clamp(min=0).prod(-1) for box in (one, other)]
    return shared / (areas[0] + areas[1] - shared).clamp(min=1e-6)


def loss(output, batch):
    """Focal loss (Lin et al., 2017) of all cells, and 1 - IoU of the cells at objects' centers: a mean over objects."""
    logits, sides = output
    _, boxes, labels = batch
    there = labels >= 0
    middle = (boxes[..., :2] + boxes[..., 2:]) / 2 // STRIDE
    cells = (middle[..., 1] * (SIZE // STRIDE) + middle[..., 0]).long()
    image, number = there.nonzero(as_tuple=True)
    cell, label = cells[image, number], labels[image, number]
    wanted = torch.zeros_like(logits)
    wanted[image, cell, label] = 1.0
    each = F.binary_cross_entropy_with_logits(logits, wanted, reduction="none")
    focal = (0.25 + 0.5 * wanted) * (1 - torch.exp(-each)) ** 2 * each
    boxed = 1 - overlap(boxes_of(sides)[image, cell], boxes[image, number])
    return 4 * focal.sum() + boxed.sum(), there.sum()


class AveragePrecision:
    """The mean over classes of the area under the precision-recall curve, at an IoU of at least one half."""

    def __init__(self):
        self._defaults = {"scores": [], "kinds": [], "hits": [], "objects": torch.zeros(len(NAMES))}
        self._reductions = {"scores": "cat", "kinds": "cat", "hits": "cat", "objects": "sum"}
        self.reset()

    def reset(self):
        self.scores, self.kinds, self.hits, self.objects = [], [], [], torch.zeros(len(NAMES))

    def update(self, output, batch):
        logits, sides = output
        _, boxes, labels = batch
        for number, found in enumerate(boxes_of(sides)):
            scores, kinds = logits[number].sigmoid().max(-1)
            taken = torch.zeros(MOST, dtype=torch.bool)
            kept = []
            for best in scores.argsort(descending=True)[:20].tolist():
                if scores[best] < 0.05 or any(
                    kinds[best] == kinds[other] and overlap(found[best], found[other]) > 0.5 for other in kept
                ):
                    continue  # too unlikely, or found already
                kept.append(best)
                fits = torch.where((labels[number] == kinds[best]) & ~taken, overlap(found[best], boxes[number]), 0.0)
                taken[fits.argmax()] |= bool(fits.max() >= 0.5)
                self.hits.append((fits.max() >= 0.5).float()[None])
                self.scores.append(scores[best][None])
                self.kinds.append(kinds[best][None])
            self.objects += torch.bincount(labels[number][labels[number] >= 0], minlength=len(NAMES))

    def compute(self):
        scores, kinds, hits = (
            torch.cat([torch.zeros(1), *parts])[1:] for parts in (self.scores, self.kinds, self.hits)
        )
        precisions = {}
        for kind, name in enumerate(NAMES):
            order = scores[kinds == kind].argsort(descending=True, stable=True)
            found = hits[kinds == kind][order]
            precision = found.cumsum(0) / torch.arange(1, len(found) + 1)
            highest = precision.flip(0).cummax(0).values.flip(0)  # at this recall or a higher one
            precisions[name] = (highest * found).sum() / self.objects[kind].clamp(min=1)
        return {"map": torch.stack([*precisions.values()]).mean(), **precisions}


if __name__ == "__main__":
    training, held_out = Shapes(2000), Shapes(300, first=1_000_000)
    trainer = paceline.Trainer(
        model=Detector,
        loss=loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3, weight_decay=0.01),
        global_batch=BATCH,
        schedule=paceline.cosine(warmup=20),
    )
    trainer.keep_best("map")
    for report in trainer.steps(training, epochs=EPOCHS):
        if report.epoch_end and report.epoch % 4 == 3:
            trainer.evaluate(held_out, AveragePrecision())

    result = trainer.evaluate(held_out, AveragePrecision())
    each = ", ".join(f"{name} {result[name]:.3f}" for name in NAMES)
    print(f"mean average precision over {result['n']} held-out images: {result['map']:.3f} ({each})")
    trainer.export("detector.safetensors")
