"""CartPole by policy gradient: every worker plays its own episodes, and all of them make one update.

    python examples/cartpole.py                         # one worker
    paceline run --workers 2 examples/cartpole.py       # two workers, twice the episodes an update
"""

import gymnasium
import torch
from torch import nn
from torch.distributions import Categorical

import paceline

EPISODES, UPDATES, DISCOUNT = 16, 400, 0.99


def net():
    """State (4) to the logits of two actions and the value of the state."""
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))


def play(model, device, seed):
    """EPISODES episodes side by side: rows of states, actions and discounted returns, and the episodes' lengths."""
    torch.manual_seed(seed)
    state, _ = envs.reset(seed=seed)
    alive = torch.ones(EPISODES, dtype=torch.bool)
    states, actions, playing = [], [], []
    while alive.any():
        states.append(torch.tensor(state))
        with torch.no_grad():
            logits = model(states[-1].to(device))[:, :2].cpu()
        actions.append(Categorical(logits=logits).sample())
        playing.append(alive)
        state, _, fell, timeout, _ = envs.step(actions[-1].numpy())
        alive = alive & ~torch.tensor(fell | timeout)
    playing = torch.stack(playing)
    returns = torch.zeros(len(playing) + 1, EPISODES)
    for time in reversed(range(len(playing))):
        returns[time] = playing[time] * (1 + DISCOUNT * returns[time + 1])
    rows = {"states": torch.stack(states), "actions": torch.stack(actions), "returns": returns[:-1]}
    return {name: row[playing] for name, row in rows.items()}, playing.sum(0)


def loss(output, batch):
    """Actions that did better than the critic expected become more likely; sums, because rows differ in number."""
    policy, value = Categorical(logits=output[:, :2]), output[:, 2] * 100
    advantage = batch["returns"] - value
    actor = -policy.log_prob(batch["actions"]) * advantage.detach() / 20
    total = actor + (advantage / 20) ** 2 - 0.01 * policy.entropy()
    return total.sum(), len(total)


team = paceline.join()
envs = gymnasium.make_vec("CartPole-v1", num_envs=EPISODES, vectorization_mode="vector_entry_point")
trainer = paceline.Trainer(
    model=net,
    loss=loss,
    optimizer=lambda params: torch.optim.Adam(params, lr=5e-3),
    forward=lambda model, batch: model(batch["states"]),
    clip_norm=0.5,
)
recent = torch.zeros(20)  # the last updates' mean returns, the same on every worker
while trainer.steps_done < UPDATES and recent.mean() <= 400:
    rows, lengths = play(trainer.model, trainer.device, paceline.stream_seed(0, trainer.steps_done, team.rank))
    report = trainer.step(rows)
    total, episodes = team.all_reduce(torch.tensor([lengths.sum(), len(lengths)]), name="returns")
    recent = torch.cat([recent[1:], (total / episodes).reshape(1)])
    if report.step % 10 == 0:
        trainer.log(mean_return=float(total / episodes))
    print(report.step, float(total/episodes), flush=True)

print(f"mean return of the last {len(recent)} updates: {recent.mean():.0f} of 500, after {trainer.steps_done} updates")
