"""CartPole by policy gradient: every worker plays its own episodes, and all of them together make one update.

python examples/cartpole.py                         # one worker
paceline run --workers 2 examples/cartpole.py       # two, so twice the episodes in every update
"""

import gymnasium
import torch
from torch import nn
from torch.distributions import Categorical

import paceline

EPISODES, UPDATES, DISCOUNT = 16, 400, 0.99  # episodes are a worker's, in each of at most so many updates


def net():
    """From the state (4 numbers) to the logits of the two actions and the worth of the state, in hundreds."""
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))


@torch.no_grad()
def play(model, seed):
    """The rows of EPISODES episodes played side by side, and the length of each."""
    torch.manual_seed(seed)
    state, _ = envs.reset(seed=seed)
    standing = alive = torch.ones(EPISODES, dtype=torch.bool)
    steps = []
    while alive.any():
        output = model(torch.tensor(state).to(trainer.device)).cpu()
        action = Categorical(logits=output[:, :2]).sample()
        steps.append((torch.tensor(state), action, output[:, 2] * 100, alive))
        state, _, fell, timeout, _ = envs.step(action.numpy())
        standing = standing & ~(alive & torch.tensor(fell))
        alive = alive & ~torch.tensor(fell | timeout)
    states, actions, values, alive = (torch.stack(column) for column in zip(*steps, strict=True))

    last = model(torch.tensor(state).to(trainer.device)).cpu()[:, 2] * 100
    returns = [standing * last]  # what a pole that still stands is worth when time is up
    for playing in alive.flip(0):
        returns.append(torch.where(playing, 1 + DISCOUNT * returns[-1], returns[-1]))
    returns = torch.stack(returns[:0:-1])
    better = (returns - values)[alive]  # than the critic expected
    rows = {"states": states[alive], "actions": actions[alive], "returns": returns[alive]}
    return rows | {"advantages": (better - better.mean()) / (better.std() + 1e-6)}, alive.sum(0)


def loss(output, batch):
    """The mean over rows: better actions become likelier, the critic learns the returns, chance is kept alive."""
    policy, value = Categorical(logits=output[:, :2]), output[:, 2]
    actor = -policy.log_prob(batch["actions"]) * batch["advantages"]
    critic = 8 * (value - batch["returns"] / 100) ** 2
    return (actor + critic - 0.01 * policy.entropy()).mean()


team = paceline.join()
envs = gymnasium.make_vec("CartPole-v1", num_envs=EPISODES, vectorization_mode="vector_entry_point")
trainer = paceline.Trainer(
    model=net,
    loss=loss,
    optimizer=lambda params: torch.optim.Adam(params, lr=0.01),
    forward=lambda model, batch: model(batch["states"]),
    clip_norm=0.5,
)
recent = trainer.state.setdefault("recent", torch.zeros(20))  # mean returns of the last updates
while trainer.steps_done < UPDATES and recent.mean() <= 400:
    rows, lengths = play(trainer.model, paceline.stream_seed(0, trainer.steps_done, team.rank))
    trainer.step(rows)
    total, episodes = team.all_reduce(torch.tensor([lengths.sum(), len(lengths)]), name="returns")
    recent = trainer.state["recent"] = torch.cat([recent[1:], (total / episodes).reshape(1)])
    trainer.log(mean_return=float(total / episodes))

print(f"the last {len(recent)} updates' mean return is {recent.mean():.0f} of 500, after {trainer.steps_done} updates")
