"""Balances a pole by advantage actor-critic. All workers together play 16 games.

paceline run --workers 2 --run-dir runs/a2c with_paceline.py
"""

import gymnasium
import torch
from torch import nn
from torch.distributions import Bernoulli

import paceline

team = paceline.join()
mine = list(range(16)[team.rank :: team.size])
mode = {"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP}
games = gymnasium.make_vec("CartPole-v1", len(mine), "sync", mode)
state, _ = games.reset(seed=mine)


def loss(output, batch):
    _, action, returns = batch
    policy, value = Bernoulli(logits=output[:, 0]), output[:, 1]
    actor = policy.log_prob(action) * (returns - value).detach()
    return (0.5 * (returns - value) ** 2 - actor - 0.01 * policy.entropy()).mean()


trainer = paceline.Trainer(
    model=lambda: nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2)),
    loss=loss,
    optimizer=lambda params: torch.optim.Adam(params, lr=1e-2),
    clip_norm=0.5,
)


@torch.no_grad()
def judge(state):
    return trainer.model(torch.tensor(state, device=trainer.device)).cpu().unbind(1)


while trainer.steps_done < 400:
    torch.manual_seed(trainer.steps_done)
    steps, returns = [], []
    for _ in range(32):
        logit, _ = judge(state)
        action = (torch.rand(16)[mine] < logit.sigmoid()).float()
        before = torch.tensor(state)
        state, reward, fell, stop, _ = games.step(action.int().numpy())
        steps.append((before, action, torch.tensor(reward), torch.tensor(fell | stop)))
    _, future = judge(state)
    for _, _, reward, end in reversed(steps):
        future = reward.float() + 0.99 * future * ~end
        returns.insert(0, future)
    before, action, _, end = (torch.cat(column) for column in zip(*steps))
    report = trainer.step((before, action, torch.cat(returns)))
    ends = team.all_reduce(end.sum(), name="ends of games")
    if report.every(20):
        print(
            f"step {report.step}: {report.loss:.4f} {512 / (ends + 1):.0f} steps a game"
        )
trainer.export("policy.safetensors")
