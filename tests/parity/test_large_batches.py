"""What a large global batch needs: LARS and LAMB, the gradient noise scale, learning rates that follow the batch."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from launching import paceline as command
from safetensors.torch import load_file
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LinearLR, SequentialLR

from paceline.base.batching import NOTHING
from paceline.compute.grad_noise import LEAST, GradNoiseScale
from paceline.compute.lr_schedules import follow_batch
from paceline.errors import UsageError
from paceline.observe.report import facts
from paceline.observe.summary import Summary
from paceline.optim import LAMB, LARS

# -- optimizers -------------------------------------------------------------------------------------------------------


def lars(weight: np.ndarray, grads: list[np.ndarray], lr: float, momentum: float, decay: float, trust: float) -> Any:
    moved = np.zeros_like(weight)
    for grad in grads:
        rate = lr
        if weight.ndim > 1 and np.any(weight):
            below = np.linalg.norm(grad) + decay * np.linalg.norm(weight)
            rate = lr * trust * np.linalg.norm(weight) / below if below else lr * trust
        moved = momentum * moved + rate * (grad + decay * weight)
        weight = weight - moved
    return weight


def lamb(weight: np.ndarray, grads: list[np.ndarray], lr: float, decay: float) -> Any:
    first, second = np.zeros_like(weight), np.zeros_like(weight)
    for done, grad in enumerate(grads, 1):
        first, second = 0.9 * first + 0.1 * grad, 0.999 * second + 0.001 * grad**2
        moves = first / (1 - 0.9**done) / (np.sqrt(second / (1 - 0.999**done)) + 1e-6) + decay * weight
        above, below = np.linalg.norm(weight), np.linalg.norm(moves)
        ratio = above / below if weight.ndim > 1 and above and below else 1.0
        weight = weight - lr * ratio * moves
    return weight


@pytest.mark.parametrize("shape", [(5, 3), (4,), (2, 3, 2)])
@pytest.mark.parametrize("start", ["usual", "zero"])
def test_lars_and_lamb_are_the_formulas_of_their_papers(shape: tuple[int, ...], start: str) -> None:
    chance = np.random.default_rng(3)
    weight = np.zeros(shape) if start == "zero" else chance.standard_normal(shape)
    grads = [chance.standard_normal(shape) for _ in range(4)] + [np.zeros(shape)]
    for make, expected in (
        (
            lambda p: LARS(p, lr=0.5, momentum=0.8, weight_decay=0.1, trust=0.02),
            lars(weight, grads, 0.5, 0.8, 0.1, 0.02),
        ),
        (lambda p: LAMB(p, lr=0.05, weight_decay=0.1), lamb(weight, grads, 0.05, 0.1)),
    ):
        param = nn.Parameter(torch.tensor(weight))
        unused = nn.Parameter(torch.ones(2))
        optimizer = make([param, unused])
        for grad in grads:
            param.grad = torch.tensor(grad)
            optimizer.step()
        np.testing.assert_allclose(param.detach().numpy(), expected, rtol=1e-12, atol=1e-14)
        assert unused.equal(torch.ones(2)), "without a gradient a parameter is let be"


def test_lars_and_lamb_refuse_wrong_options() -> None:
    param = [nn.Parameter(torch.ones(2))]
    for make, what in (
        (lambda: LARS(param, lr=-1.0), "lr must be at least 0, got -1.0"),
        (lambda: LARS(param, lr=1.0, momentum=1.0), "momentum must be at least 0 and less than 1, got 1.0"),
        (lambda: LAMB(param, betas=(0.9, 1.5)), "beta2 must be at least 0 and less than 1, got 1.5"),
    ):
        with pytest.raises(UsageError) as caught:
            make()
        assert str(caught.value) == f"{what}; change the argument of the optimizer"


SCRIPT = """
import sys, torch, paceline
from torch import nn
from torch.utils.data import TensorDataset
from paceline.optim import LAMB, LARS

kind, target = sys.argv[1:]
torch.manual_seed(0)
x, y = torch.randn(96, 6, dtype=torch.float64), torch.randn(96, 2, dtype=torch.float64)
trainer = paceline.Trainer(
    lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double(),
    lambda output, batch: nn.functional.mse_loss(output, batch[1]),
    lambda params: LAMB(params, lr=0.02, weight_decay=0.01) if kind == "LAMB" else LARS(params, lr=0.5, trust=0.1),
    global_batch=24, tensor={"0": "column", "2": "row"},
)
for _ in trainer.steps(TensorDataset(x, y), epochs=2):
    pass
trainer.export(target)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["LARS", "LAMB"])
def test_lars_and_lamb_train_alike_under_every_plan(tmp_path: Path, kind: str) -> None:
    from safetensors.torch import load_file

    (tmp_path / "script.py").write_text(SCRIPT)
    found = []
    for number, (workers, plan) in enumerate([("1", "data=1"), ("3", "data=3"), ("2", "tensor=2"), ("2", "shard=2")]):
        target = tmp_path / f"{number}.safetensors"
        where = ["--workers", workers, "--run-dir", f"run{number}", "--plan", plan]
        command("run", *where, "script.py", kind, target, cwd=tmp_path)
        found.append(load_file(target))
    for other in found[1:]:
        for name, tensor in found[0].items():
            torch.testing.assert_close(other[name], tensor, rtol=1e-12, atol=1e-12)


# -- the noise scale --------------------------------------------------------------------------------------------------

NOISY = """
import json, sys, torch, paceline
from torch import nn
from torch.utils.data import TensorDataset

BATCH, MICRO, STEPS, KIND = 24, 4, 130, sys.argv[1]
generator = torch.Generator().manual_seed(1)
x = torch.randn(BATCH * STEPS, 5, generator=generator, dtype=torch.float64)
y = x @ torch.randn(5, 1, generator=generator).double() + torch.randn(len(x), 1, generator=generator).double()


class Line(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, 5, dtype=torch.float64))

    def forward(self, x):
        if KIND == "draws":  # then micro-batches are computed one by one
            torch.rand(1)
        return x @ self.weight.T


def loss(output, batch):
    squares = (output - batch[1]) ** 2
    return (2 * squares.sum(), 2 * len(squares)) if KIND == "tokens" else squares.mean()


def parts(workers):
    share = BATCH // workers
    return [range(MICRO)] if workers == 1 else [range(w * share, (w + 1) * share) for w in range(workers)]


if __name__ == "__main__":
    trainer = paceline.Trainer(
        Line, loss, lambda params: torch.optim.SGD(params, lr=1e-3),
        global_batch=BATCH, plan=f"micro={MICRO}", clip_norm=1.0,
    )
    weights = []
    for report in trainer.steps(TensorDataset(x, y), count=STEPS, order=lambda position, *_: position):
        weights.append(trainer.model.weight.detach().clone())
    if trainer.main:
        print(json.dumps([weight.tolist() for weight in weights]))
"""


@pytest.mark.parametrize(
    ("workers", "kind"), [(1, "draws"), pytest.param(2, "plain", marks=pytest.mark.slow), (3, "tokens")]
)
def test_gradient_noise_scale_is_that_of_the_paper(tmp_path: Path, workers: int, kind: str) -> None:
    """From gradients by hand, of the weights that the run had."""
    (tmp_path / "noisy.py").write_text(NOISY)
    shares = ",".join(["1"] * workers)
    ran = command(
        "run", "--workers", str(workers), "--shares", shares, "--run-dir", "run", "noisy.py", kind, cwd=tmp_path
    )
    weights = [np.zeros((1, 5)), *(np.array(one) for one in json.loads(ran.stdout.splitlines()[-1]))]
    space: dict[str, Any] = {"__name__": "noisy"}
    exec(NOISY.replace("sys.argv[1]", repr(kind)), space)
    x, y = space["x"].numpy(), space["y"].numpy()
    signal = noise = 0.0
    expected = []
    for look, step in enumerate(range(9, 130, 10), 1):
        here, goal, weight = x[step * 24 : step * 24 + 24], y[step * 24 : step * 24 + 24], weights[step]
        each = 2 * (here @ weight.T - goal) * here
        whole = float(np.sum(each.mean(0) ** 2))
        some = [each[list(part)] for part in space["parts"](workers)]
        counts = [len(part) for part in some]
        squares = sum(float(np.sum(part.sum(0) ** 2)) for part in some)
        found = (squares - sum(n * n for n in counts) * whole) / (sum(counts) - sum(n * n for n in counts) / 24)
        share = max(0.05, 1 / look)
        noise, signal = noise + share * (found - noise), signal + share * (whole - found / 24 - signal)
        expected.append(noise / signal)
    events = [event for event in map(json.loads, (tmp_path / "run/journal.jsonl").open()) if event["event"] == "noise"]
    assert events[0] == events[0] | {"trainer": 0, "step": 10 * LEAST, "looks": LEAST}
    for event in events:
        assert event["scale"] == pytest.approx(expected[event["looks"] - 1], rel=1e-9)
    (row,) = (text for name, text in facts(Summary(tmp_path / "run"))["Results"] if name == "noise scale")
    assert row.endswith("measurements): a global batch beyond this size, or workers added for it, helps little")


def test_gradient_noise_scale_of_known_gradients() -> None:
    chance, noise = np.random.default_rng(0), GradNoiseScale()
    for _ in range(4000):
        each = 0.5 + chance.standard_normal((8, 100))  # of 8 rows: |G|^2 = 25, the trace of the covariance 100
        parts = [each[:2].sum(0), each[2:].sum(0)]
        about = {"sq_norm": sum(float(part @ part) for part in parts), "sq_norm_rows": 8.0, "sq_norm_squares": 40.0}
        deque(noise.learn(replace(NOTHING, count=8.0, **about), float(np.linalg.norm(each.mean(0))), 8), maxlen=0)
    assert noise.scale == pytest.approx(4.0, rel=0.1)


# -- learning rates that follow the batch -----------------------------------------------------------------------------

GROWS = """
import sys, torch, paceline
from torch import nn
from torch.utils.data import TensorDataset

batch, count, *plans = sys.argv[1:]
trainers = [
    paceline.Trainer(
        lambda: nn.Linear(3, 1), lambda output, batch: output.square().mean(),
        lambda params: torch.optim.SGD(params, lr=0.1), global_batch=int(batch), schedule=lambda step: 0.9**step,
        plan=plan or None,
    ) for plan in plans
]
for number, trainer in enumerate(trainers):
    for report in trainer.steps(TensorDataset(torch.ones(640, 3)), count=int(count)):
        if trainer.main:
            print("lr", number, report.step, report.lr)
    trainer.export(f"{number}-{count}.safetensors")
"""


FACTORS = {"linear": 2.0, "sqrt": 2.0**0.5, "": 1.0}


def plan_of(rule: str, plan: str = "") -> str:
    return f"{plan} lr_scaling={rule}".strip() if rule else plan


def assert_rates_follow(folder: Path, options: list[str], plans: list[str], rules: list[str]) -> None:
    """Trains 4 steps with a global batch of 8 rows and resumes with 16 rows: learning rates and weights are those of
    each trainer's rule, also where an optimizer is kept elsewhere.
    """
    (folder / "grows.py").write_text(GROWS)
    start = ["run", "--run-dir", "run", *options]
    command(*start, "grows.py", "8", "4", *plans, cwd=folder)
    ran = command(*start, "grows.py", "16", "7", *plans, cwd=folder)
    for number, rule in enumerate(rules):
        lines = [line.split() for line in ran.stdout.splitlines() if line.startswith(f"lr {number} ")]
        rates = [float(words[3]) for words in lines]
        assert rates == pytest.approx([0.1 * FACTORS[rule] * 0.9**step for step in (4, 5, 6)]), rule
        line = f"lr_scaling={rule}: learning rates multiplied by {FACTORS[rule]:.6g}, "
        line += "because the global batch changed from 8 to 16 rows"
        assert (line in ran.stderr) is bool(rule)
        before, after = (load_file(folder / f"{number}-{count}.safetensors") for count in (4, 7))
        for rate in rates:
            slope = 2 * (before["weight"].sum() + before["bias"])
            before = {name: weights - rate * slope for name, weights in before.items()}
        assert all(torch.allclose(after[name], before[name], rtol=1e-5) for name in before), rule


def test_learning_rates_follow_the_global_batch_where_the_plan_says_so(tmp_path: Path) -> None:
    rules = [*FACTORS]
    assert_rates_follow(tmp_path, ["--workers", "2"], [plan_of(rule, "data=2") for rule in rules], rules)


@pytest.mark.parametrize(
    ("rule", "workers", "plan"),
    [
        ("linear", "2", "server=2"),
        pytest.param("sqrt", "1", "server=1 staleness=inf window=1", marks=pytest.mark.slow),
    ],
)
def test_learning_rates_of_parameter_servers_follow_the_global_batch(
    rule: str, workers: str, plan: str, tmp_path: Path
) -> None:
    assert_rates_follow(tmp_path, ["--workers", workers, "--plan", plan_of(rule, plan)], [""], [rule])


def test_nested_schedulers_follow_the_global_batch() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    inner = [LinearLR(optimizer, 0.5, total_iters=2), LambdaLR(optimizer, lambda step: 0.9**step)]
    scheduler = SequentialLR(optimizer, inner, [2])
    rates = []
    for step in range(5):
        if step == 1:
            assert follow_batch("linear", 8, 24, [optimizer], [scheduler]) == (
                "lr_scaling=linear: learning rates multiplied by 3, because the global batch changed from 8 to 24 rows"
            )
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([0.05, 0.225, 0.3, 0.27, 0.243])
