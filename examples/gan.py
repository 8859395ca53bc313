"""A generative adversarial network: two trainers take turns. The generator learns to draw points of 8 clusters.

python examples/gan.py                              # one worker
paceline run --workers 2 examples/gan.py            # two, and the same training
"""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline

STEPS, BATCH, NOISE, WIDTH = 1500, 256, 8, 128


def ring(count, generator):
    """Points around 8 centres on the unit circle, with a standard deviation of 0.05."""
    angle = torch.randint(0, 8, (count,), generator=generator) * (math.pi / 4)
    return torch.stack([angle.cos(), angle.sin()], dim=1) + 0.05 * torch.randn(count, 2, generator=generator)


def mlp(inputs, outputs):
    return nn.Sequential(
        nn.Linear(inputs, WIDTH),
        nn.LeakyReLU(0.2),
        nn.Linear(WIDTH, WIDTH),
        nn.LeakyReLU(0.2),
        nn.Linear(WIDTH, outputs),
    )


def adam(params):
    return torch.optim.Adam(params, lr=5e-4, betas=(0.5, 0.9))


def judge(scores, batch):
    """The discriminator's loss: real points get high scores, generated ones low scores."""
    real, generated = scores
    return (F.softplus(-real) + F.softplus(generated)).mean()


def score_both(model, batch):
    """Scores of the real rows of a micro-batch, and of as many generated ones."""
    (real,) = batch
    noise = torch.randn(len(real), NOISE, device=real.device)  # seeded by the step and the micro-batch
    with torch.no_grad():
        generated = generator.model(noise)
    return model(real), model(generated)


generator = paceline.Trainer(
    model=lambda: mlp(NOISE, 2),
    forward=lambda model, batch: model(batch[0]),
    loss=lambda points, batch: F.softplus(-discriminator.model(points)).mean(),  # the score should be high
    optimizer=adam,
    global_batch=BATCH,
)
discriminator = paceline.Trainer(
    model=lambda: mlp(2, 1), forward=score_both, loss=judge, optimizer=adam, global_batch=BATCH
)

draw = torch.Generator().manual_seed(0)
points = TensorDataset(ring(16 * BATCH, draw))
noises = TensorDataset(torch.randn(64 * BATCH, NOISE, generator=draw))

# One step of the discriminator, then one of the generator.
turns = zip(discriminator.steps(points, count=STEPS), generator.steps(noises, count=STEPS), strict=True)
for judged, fooled in turns:
    if judged.step % 250 == 0:
        print(f"step {judged.step}: discriminator {judged.loss:.3f}, generator {fooled.loss:.3f}")

with torch.no_grad():
    drawn = generator.model.eval()(torch.randn(2000, NOISE, generator=draw).to(generator.device)).cpu()
centres = torch.tensor([[math.cos(k * math.pi / 4), math.sin(k * math.pi / 4)] for k in range(8)])
distance, nearest = torch.cdist(drawn, centres).min(dim=1)
close = distance < 0.2
found = len(nearest[close].unique())
print(f"{close.float().mean():.0%} of the drawn points lie in a cluster, {found} of 8 clusters are drawn")
