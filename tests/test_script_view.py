"""What a script sees of a cut model outside of the trainer's own steps is what it sees with one worker."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from launching import train_basics

STREAMS = """
import json, random, zlib
import numpy
torch.manual_seed(5), numpy.random.seed(5), random.seed(5)
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(10, 24), nn.Linear(24, 10), nn.Dropout(0.5)
    def forward(self, x): return x + self.drop(self.down(torch.tanh(self.up(x))))
class Net(nn.Sequential):
    def __init__(self):
        numpy.random.rand(), random.random()
        super().__init__(*[Layer() for _ in range(3)], nn.Linear(10, 2))
def drawing(params):
    torch.rand(1)
    return torch.optim.SGD(params, lr=0.1)
def streams():
    states = torch.get_rng_state().tolist(), numpy.random.get_state(), random.getstate()
    return [zlib.crc32(repr(state).encode()) for state in states]
def called():
    with torch.no_grad(): return t.model(x[:4]).sum().item()
t = paceline.Trainer(lambda: Net().double(), cross_entropy, drawing, global_batch=24, seed=1)
said = {"made": streams(), "drawn": [called()]}
for _ in t.steps(data, count=2): said["drawn"].append(called())
said["end"] = streams()
if t.main: open("said.json", "w").write(json.dumps(said))
"""


def said(folder: Path, body: str, workers: int, plan: str) -> Any:
    """What a script writes into said.json."""
    folder.mkdir()
    train_basics(
        folder,
        body,
        workers,
        *(("--plan", plan) if plan else ()),
        *(() if "server" in plan else ("--max-restarts", "0")),
    )
    return json.loads((folder / "said.json").read_text())


@cache
def streams_of_one(folder: Path) -> Any:
    return said(folder, STREAMS, 1, "")


@pytest.mark.parametrize(
    ("workers", "plan"),
    [
        (2, "tensor=2"),
        *(
            pytest.param(workers, plan, marks=pytest.mark.slow)
            for workers, plan in [
                (2, ""),
                (3, "tensor=3"),
                (2, "shard=2 zero=1"),
                (2, "shard=2 zero=3"),
                (3, "pipeline=3"),
                (2, "context=2"),
                (2, "server=1"),
                (4, "pipeline=2 tensor=2"),
            ]
        ),
    ],
)
def test_a_trainer_leaves_the_scripts_generators_and_a_call_in_the_loop_draws_from_them(
    workers: int, plan: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    alone = streams_of_one(tmp_path_factory.getbasetemp() / "streams")
    found = said(tmp_path / "several", STREAMS, workers, plan)
    assert (found["made"], found["end"]) == (alone["made"], alone["end"])
    assert found["drawn"] == pytest.approx(alone["drawn"], rel=1e-12)


# ---- losses that use weights, and models that others call

NETS = """
import json
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8)
    def forward(self, x): return x + self.down(torch.tanh(self.up(x)))
def net(before, after):
    return nn.Sequential(nn.Linear(before, 8), *[Layer() for _ in range(3)], nn.Linear(8, after)).double()
said, team = {}, paceline.join()
def trainer(before, after, loss, seed=1, **more):
    sgd = lambda params: torch.optim.SGD(params, lr=0.1)
    return paceline.Trainer(lambda: net(before, after), loss, sgd, seed=seed, global_batch=8, **more)
def trained(name, one, body=lambda: []):
    said[name] = []
    for report in one.steps(data, count=3): said[name] += [report.loss, report.grad_norm, *body()]
def write():
    if team.rank == 0: open("said.json", "w").write(json.dumps(said))
"""
PENALTIES = f"""{NETS}
up = lambda: [layer.up.weight for layer in made[-1].model[1:4]]
PENALTIES = {{
    "squares": lambda: sum(param.square().sum() for param in made[-1].model.parameters()),
    "norms": lambda: sum(param.norm() for param in made[-1].model.parameters()),
    "products": lambda: sum((weight @ weight.T - torch.eye(24)).square().mean() for weight in up()),
    "rows": lambda: sum((weight[:3] - weight.mean(0)).abs().sum() for weight in up()),
    "counts": lambda: sum(weight.numel() * weight.detach().mean() for weight in up()),
}}
made = []
for name, penalty in PENALTIES.items():
    made.append(trainer(10, 2, lambda output, batch: cross_entropy(output, batch) + 0.1 * penalty()))
    trained(name, made[-1])
def both(model, batch): return model(batch[0]), PENALTIES["norms"]()
made.append(trainer(10, 2, lambda output, batch: cross_entropy(output[0], batch) + output[1], forward=both))
trained("in the forward", made[-1])
def whole(output, batch): return F.cross_entropy(output, torch.zeros(len(output)).long()) + PENALTIES["products"]()
made.append(trainer(10, 2, whole, loss_over="batch"))
trained("over the batch", made[-1])
write()
"""
OTHERS = f"""{NETS}
def adversaries():
    gen = trainer(10, 6, lambda output, batch: output.square().mean() - critic.model(output).mean())
    judge = lambda output, batch: (output * batch[1][:, None]).mean() + output.square().mean()
    critic = trainer(6, 1, judge, 2, forward=lambda model, batch: model(batch[0]))
    def body():
        with torch.no_grad(): fakes = gen.model(x[:6])
        pair = torch.cat([fakes, x[:6, :6]]), torch.cat([torch.ones(6), -torch.ones(6)]).double()
        return [critic.step([part.tensor_split(team.size)[team.rank] for part in pair]).loss]
    trained("adversaries", gen, body)
def distillation():
    teacher = trainer(10, 2, cross_entropy)
    def likeness(output, batch):
        with torch.no_grad(): wanted = teacher.model(batch[0])
        return F.mse_loss(output, wanted)
    trained("teacher", teacher)
    trained("student", trainer(10, 2, likeness, 2))
def target():
    slow = trainer(10, 2, cross_entropy)
    both = lambda model, batch: (model(batch[0]), slow.model(batch[0]))
    fast = trainer(10, 2, lambda output, batch: F.mse_loss(output[0], output[1].detach()), 2, forward=both)
    def body():
        with torch.no_grad():
            for mine, other in zip(slow.model.parameters(), fast.model.parameters()): mine.lerp_(other, 0.5)
        return []
    trained("target", fast, body)
"""
CUT = [(2, "micro=4 tensor=2"), pytest.param(3, "micro=4 tensor=3", marks=pytest.mark.slow)]


@cache
def of_one(body: str, folder: Path) -> Any:
    return said(folder, body, 1, "micro=4")


@pytest.mark.parametrize(("workers", "plan"), CUT)
def test_a_loss_or_a_forward_may_use_weights_that_are_cut(
    workers: int, plan: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    alone = of_one(PENALTIES, tmp_path_factory.getbasetemp() / "penalties")
    found = said(tmp_path / "several", PENALTIES, workers, plan)
    assert found == {name: pytest.approx(values, rel=1e-12) for name, values in alone.items()}


@pytest.mark.parametrize(("workers", "plan"), CUT)
def test_a_loss_or_a_forward_may_call_another_model_that_is_cut(
    workers: int, plan: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    body = OTHERS + "adversaries(), distillation(), target(), write()\n"
    alone = of_one(body, tmp_path_factory.getbasetemp() / "others")
    found = said(tmp_path / "several", body, workers, plan)
    assert found == {name: pytest.approx(values, rel=1e-12) for name, values in alone.items()}


@pytest.mark.parametrize(
    "name", ["distillation", *(pytest.param(n, marks=pytest.mark.slow) for n in ("adversaries", "target"))]
)
def test_a_model_in_stages_that_another_one_calls_is_refused(name: str, tmp_path: Path) -> None:
    options = ("--max-restarts", "0", "--plan", "micro=4 pipeline=2")
    body = OTHERS.replace('trained("teacher", teacher)', "pass") + f"{name}()\n"
    done = train_basics(tmp_path, body, 2, *options, code=2)
    assert (
        "UsageError: the forward or loss of Sequential calls Sequential, which pipeline= cuts in stages as well; "
        'let the trainer of the one that is called keep it whole: plan="pipeline=1"\n'
    ) in done.stderr


HOOKED = f"""{NETS}
seen = {{}}
torch.manual_seed(3)
made = net(10, 2)
for layer in made[1:4]: layer.up.register_forward_hook(lambda module, given, output: seen.update({{module: output}}))
def loss(output, batch):
    return cross_entropy(output, batch) + 0.1 * sum(one.abs().mean() + one.max() for one in seen.values())
one = paceline.Trainer(made, loss, lambda ps: torch.optim.SGD(ps, lr=0.1), seed=1, global_batch=8)
said["seen"] = len(seen)
trained("hooked", one)
write()
"""


def test_a_hook_on_a_layer_that_is_cut_gets_what_the_layer_gives(tmp_path: Path) -> None:
    alone, found = (
        said(tmp_path / str(workers), HOOKED, workers, plan)
        for workers, plan in ((1, "micro=4"), (2, "micro=4 tensor=2"))
    )
    assert found == {name: pytest.approx(values, rel=1e-12) for name, values in alone.items()}


CHANGED = f"""{NETS}
def body():
    with torch.no_grad():
        for layer in one.model[1:4]: layer.up.weight.data.mul_(0.5)
    return []
one = trainer(10, 2, cross_entropy)
trained("changed", one, body)
write()
"""


def test_weights_that_the_loop_changes_are_noticed_where_they_are_parts(tmp_path: Path) -> None:
    """Each element by itself is right, so it is no refusal."""
    told = []
    for workers, plan in ((1, "micro=4"), (2, "micro=4 tensor=2")):
        (tmp_path / str(workers)).mkdir()
        done = train_basics(tmp_path / str(workers), CHANGED, workers, "--max-restarts", "0", "--plan", plan)
        told.append([line for line in done.stderr.splitlines() if line.startswith("the loop changes")])
    alone, found = (json.loads((tmp_path / n / "said.json").read_text()) for n in "12")
    assert found == {name: pytest.approx(values, rel=1e-12) for name, values in alone.items()}
    assert told == [
        [],
        [
            "the loop changes 1.up.weight, of which tensor= leaves each worker a part: its norms and sums are of that "
            'part; change each element by itself, or say "whole" of that layer in tensor='
        ],
    ]
