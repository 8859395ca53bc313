"""What a script sees of a cut model outside of the trainer's own steps is what it sees with one worker."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from agents import journal
from launching import exported, train_basics
from safetensors.torch import load_file

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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "plan"),
    [
        (2, ""),
        (3, "tensor=3"),
        (2, "shard=2 zero=1"),
        (2, "shard=2 zero=3"),
        (3, "pipeline=3"),
        (2, "server=1"),
        (4, "pipeline=2 tensor=2"),
    ],
)
def test_random_generators_of_the_script_are_those_of_one_worker(
    workers: int, plan: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A trainer leaves them as they are, and a call of the model in the loop draws from them."""
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
    for report in one.steps(data, count=2): said[name] += [report.loss, report.grad_norm, *body()]
def write():
    if team.rank == 0: open("said.json", "w").write(json.dumps(said))
"""
PENALTIES = f"""{NETS}
up = lambda: [layer.up.weight for layer in made[-1].model[1:4]]
PENALTIES = {{
    "squares and norms": lambda: sum(param.square().sum() + param.norm() for param in made[-1].model.parameters()),
    "products, rows and counts": lambda: sum(
        (weight @ weight.T - torch.eye(24)).square().mean() + (weight[:3] - weight.mean(0)).abs().sum()
        + weight.numel() * weight.detach().mean() for weight in up()
    ),
}}
made = []
for name, penalty in PENALTIES.items():
    made.append(trainer(10, 2, lambda output, batch: cross_entropy(output, batch) + 0.1 * penalty()))
    trained(name, made[-1])
def both(model, batch): return model(batch[0]), PENALTIES["squares and norms"]()
made.append(trainer(10, 2, lambda output, batch: cross_entropy(output[0], batch) + output[1], forward=both))
trained("in the forward", made[-1])
def whole(output, batch):
    return F.cross_entropy(output, torch.zeros(len(output)).long()) + PENALTIES["products, rows and counts"]()
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


@pytest.mark.parametrize(
    "name", ["distillation", *(pytest.param(n, marks=pytest.mark.slow) for n in ("adversaries", "target"))]
)
def test_pipeline_model_that_another_model_calls_is_refused(name: str, tmp_path: Path) -> None:
    options = ("--max-restarts", "0", "--plan", "micro=4 pipeline=2")
    body = OTHERS.replace('trained("teacher", teacher)', "pass") + f"{name}()\n"
    done = train_basics(tmp_path, body, 2, *options, code=2)
    assert (
        "UsageError: the forward or loss of Sequential calls Sequential, which is also split by pipeline=; "
        'do not split Sequential: give its Trainer plan="pipeline=1"\n'
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


# ---- weights in the body of a loop

WEIGHTS = f"""{NETS}
import os, zlib
class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.first, self.layers = nn.Embedding(20, 8), nn.Linear(10, 8), net(8, 2)
    def forward(self, x): return self.layers(self.first(x) + self.words((x[:, 0].abs() * 7).long() % 20))
def made(seed=1):
    table = {{"words": "vocabulary", "layers.*.up": "column", "layers.*.down": "row"}}
    table = table if "several" in os.getcwd() else None
    sgd = lambda params: torch.optim.SGD(params, lr=0.1)
    return paceline.Trainer(lambda: Words().double(), cross_entropy, sgd, seed=seed, global_batch=8, tensor=table)
one, none = made(), torch._C._len_torch_function_stack
params = lambda: [*one.model.parameters()]
words = lambda: one.model.words.weight
up, down = lambda: one.model.layers[1].up.weight, lambda: one.model.layers[2].down.weight
"""
USES = f"""{WEIGHTS}
def reads():
    found = [sum(p.square().sum() for p in params()), sum(p.norm() for p in params()), up().mean(), words()[3:5].sum()]
    found += [nn.utils.parameters_to_vector(params()).abs().max(), torch.stack([p.sum() for p in params()]).std()]
    found += [up().numel() + sum(down().shape) + len(words()), up().norm(dim=0).max(), down().norm(dim=1).min()]
    found += [(up() @ up().T - torch.eye(24)).square().sum(), torch.linalg.svdvals(down())[0], up().data.std()]
    found += [nn.utils.get_total_norm(params()), *torch._foreach_norm(params()), up()[5, 3], up().flatten()[7]]
    found += [zlib.crc32(repr((up().shape, words())).encode()), sum(len(row) * row.sum() for row in words())]
    found += [down().detach().numpy().sum(), F.linear(x[:2, :8], up()).sum(), down().clone().sum()]
    found += [up().tolist()[20][1]]
    return [float(value) for value in found]
@torch.no_grad()
def changes():
    for p in params():
        p.clamp_(-0.5, 0.5)
        if p.dim() == 2: p /= p.norm(dim=1, keepdim=True).clamp(min=0.9)
        p.data.mul_(0.99)
    up()[0].zero_(); up()[3:5] *= 2; down()[:, 2] = 0.25; words()[7, 1:3] = 1; down().diagonal().add_(0.01)
    for row in words(): row.div_(max(1.0, float(row.norm())))
    up().sub_(up().mean()); words().add_(torch.ones(8).double() * 0.01)
    down().copy_(torch.where(down() > 0, down(), -down()))
    half = up().view(-1)[:40]; up().mul_(0.5); half += 0.125
    early = words()[::3]; words().mul_(2); found = [float(early.sum())]
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(params()) * 1.01, params())
    torch._foreach_mul_(params(), 0.99); torch._foreach_lerp_(params(), [p.flip(0) for p in params()], 0.01)
    words().cumsum_(0).div_(20); nn.init.orthogonal_(one.model.layers[3].up.weight)
    one.model.layers[3].down.reset_parameters()
    up().add_(torch.randn_like(up()), alpha=0.01)
    nn.init.uniform_(words(), -0.5, 0.5); F.threshold(words().data, -0.4, 0, inplace=True)
    found += [float(words().sum())]
    torch.cumsum(down() / 8, 1, out=down().data)
    found += [float(torch.sum(up(), 1, out=torch.zeros(24).double()).max())]
    one.model.load_state_dict({{n: p * 1.01 for n, p in one.model.named_parameters()}}, strict=False)
    return found + reads()
"""
CHANGES = f"""{USES}
trained("reads", one, reads)
torch.manual_seed(3)
trained("changes", one, changes)
write()
"""
OUTSIDE = f"""{USES}
torch.manual_seed(3)
said["before"], said["steps"] = reads() + changes(), []
for _ in range(3):
    rows = [t.tensor_split(team.size)[team.rank] for t in data[:9]]
    said["steps"] += [one.step(rows).loss, *changes()]
for report in one.steps(data, count=2): pass
another = made(5)
said["after"] = changes() + [float(p.sum()) for p in another.model.parameters()]
another.close()
said["closed"] = reads()
write()
"""
METHODS = f"""{WEIGHTS}
ema, later, other = {{n: p.detach().clone() for n, p in one.model.named_parameters()}}, {{}}, made(5)
accuracy = lambda output, batch: {{"loss": (F.cross_entropy(output, batch[1], reduction="sum"), len(output))}}
def averages():
    for n, p in one.model.named_parameters(): ema[n].lerp_(p.detach(), 0.1)
    made = later.setdefault("ema", {{n: p.detach().clone() for n, p in one.model.named_parameters()}})
    for n, p in one.model.named_parameters(): made[n].mul_(0.9).add_(p.detach(), alpha=0.1)
    return [float(sum((e - p).norm() for e, p in zip(old.values(), params())).detach()) for old in (ema, made)]
def methods():
    found = [float(up().norm())]
    with torch.no_grad():
        found += [float(one.model(x[:4]).sum() + one.model.layers[1](x[:3, :8]).sum() + one.model.first(x[:3]).sum())]
    one.export("out.safetensors"), one.save()
    found += [one.evaluate(data, accuracy)["loss"], float(up().norm())]
    for report in other.steps(data, count=3): found += [float(other.model.words.weight.norm()), report.loss]
    with torch.no_grad():
        for a, b in zip(other.model.parameters(), params()): a.lerp_(b, 0.5)
    found += [other.step([t.tensor_split(team.size)[team.rank] for t in data[:6]]).loss, float(down().norm())]
    return [*found, float(other.model.words.weight.norm())]
def ends():
    try:
        for report in one.steps(data, count=3):
            assert none() == (team.size > 1)
            raise KeyError
    except KeyError: assert none() == (team.size > 1)
    for report in one.steps(data, count=3): break
    assert none() == (team.size > 1)
    with torch.device("cpu"):
        for report, _ in zip(one.steps(data, count=2), other.steps(data, count=2)): trace = float(up().norm())
    assert none() == (team.size > 1)
    loop = one.steps(data, count=4)
    with torch.device("cpu"): next(loop)
    with torch.overrides.BaseTorchFunctionMode(): next(loop)
    torch.set_default_device("cpu"), next(loop), torch.set_default_device(None)
    found = float(words().norm())
    thread = threading.Thread(target=loop.close)
    thread.start(), thread.join()
    for report in one.steps(data, count=2): pass
    assert none() == (team.size > 1)
    return [trace, found, report.loss]
import threading, torch.overrides
trained("averages", one, averages)
trained("methods", one, methods)
said["ends"] = ends()
write()
"""


# Scripts that are trained one after another in one run, as if each were the only one; and those of slow tests alone.
BODIES = {
    "random generators": STREAMS,
    "losses that use weights": PENALTIES,
    "hooks on layers": HOOKED,
    "changes in the loop": CHANGES,
}
MORE_BODIES = {
    "changes outside of the loop": OUTSIDE,
    "methods": METHODS,
    "calls of another model": OTHERS + "adversaries(), distillation(), target(), write()\n",
}
ONE_AFTER_ANOTHER = """
import json, os
for name, text in json.load(open("bodies.json")).items():
    names = dict(globals())
    exec(text, names)
    if paceline.join().rank == 0: os.rename("said.json", f"{name}.json")
"""


def results(folder: Path, bodies: dict[str, str], workers: int, plan: str) -> dict[str, Any]:
    """What each script wrote into said.json."""
    (folder / "bodies.json").write_text(json.dumps(bodies))
    train_basics(folder, ONE_AFTER_ANOTHER, workers, "--plan", plan, "--max-restarts", "0")
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in bodies}


@pytest.mark.parametrize(
    ("workers", "bodies"),
    [(2, BODIES), pytest.param(2, MORE_BODIES, marks=pytest.mark.slow)]
    + [pytest.param(3, bodies, marks=pytest.mark.slow) for bodies in (BODIES, MORE_BODIES)],
    ids=lambda value: value if isinstance(value, int) else "fast" if "hooks on layers" in value else "more",
)
def test_script_sees_whole_weights_of_a_tensor_parallel_model(
    workers: int, bodies: dict[str, str], tmp_path: Path
) -> None:
    """It reads and changes them, in a loss, in a hook, in the body of the loop and outside of it."""
    (one := tmp_path / "one").mkdir()
    (several := tmp_path / "several").mkdir()
    expected = results(one, bodies, 1, "micro=4")
    found = results(several, bodies, workers, f"micro=4 tensor={workers}")
    for name, values in expected.items():
        assert found[name] == {key: pytest.approx(value, rel=1e-12) for key, value in values.items()}, name


STAGES = f"""{NETS}
one = trainer(10, 2, cross_entropy)
ema = [p.detach().clone() for p in one.model.parameters()]
def right():
    with torch.no_grad():
        for p, average in zip(one.model.parameters(), ema): average.lerp_(p.clamp_(-0.3, 0.3), 0.5)
    return [sum(p.numel() for p in one.model.parameters()), one.model[0].weight.shape[0]]
"""
SUMS = [
    ("sum(p.square().sum() for p in one.model.parameters())", "sum"),
    ("nn.utils.parameters_to_vector(one.model.parameters())", "view"),
    ("[p.data.norm() for p in one.model.parameters()]", "norm"),
    ("torch.nn.utils.get_total_norm([*one.model.parameters()])", "linalg_vector_norm"),
    ("one.model[0].weight[0], one.model[4].weight[0]", "getitem"),
]


def test_pipeline_script_changes_elements_of_weights(tmp_path: Path) -> None:
    body = STAGES + 'trained("right", one, right)\nwrite()\n'
    alone = said(tmp_path / "one", body, 1, "micro=4")
    found = said(tmp_path / "two", body, 2, "micro=4 pipeline=2")
    assert found == {name: pytest.approx(values, rel=1e-12) for name, values in alone.items()}


@pytest.mark.parametrize(
    ("reads", "name"), [SUMS[0], *(pytest.param(*one, marks=pytest.mark.slow) for one in SUMS[1:])]
)
def test_pipeline_script_that_reads_a_weight_of_another_stage_is_refused(reads: str, name: str, tmp_path: Path) -> None:
    body = f"{STAGES}for report in one.steps(data, count=3): {reads}\n"
    done = train_basics(tmp_path, body, 2, "--max-restarts", "0", "--plan", "micro=4 pipeline=2", code=2)
    assert re.search(
        rf"UsageError: the script uses \S+ \({name}\), which pipeline= assigns to another worker; "
        r"use only elementwise changes \(clamp_, averages\), or compute with weights written by export\(\), "
        r"or leave pipeline= out\n",
        done.stderr,
    )


@pytest.mark.parametrize("plan", ["shard=2 zero=3", pytest.param("shard=2 zero=2", marks=pytest.mark.slow)])
def test_sharded_weight_that_one_worker_alone_reads_ends_the_run(plan: str, tmp_path: Path) -> None:
    body = f"{STAGES}for report in one.steps(data, count=3):\n    if one.main: one.model[0].weight.sum().item()\n"
    done = train_basics(tmp_path, body, 2, "--max-restarts", "0", "--plan", f"micro=4 {plan}", code=1)
    assert re.search(
        r"CollectiveMismatchError: workers called different collectives: worker 0 is in a number that the script reads "
        r"from sharded weights at train\.py:\d+, worker 1 is in ",
        done.stderr,
    )


METRIC = """
def metric(output, batch): return {"norm": (float(sum(p.detach().square().sum() for p in one.model.parameters())), 1)}
one.evaluate(data, metric)
"""


@pytest.mark.parametrize(
    ("plan", "error"),
    [
        (
            "tensor=2",
            "a metric uses a weight that tensor= shards over the workers; "
            "compute the value before evaluate(), where the script sees full weights",
        ),
        pytest.param(
            "shard=2 zero=3",
            "a metric uses a weight that zero=2 or zero=3 shards over the workers; "
            "compute the value before evaluate(), where the script sees full weights",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "pipeline=2",
            "a metric uses 0.weight (sum), which pipeline= assigns to another worker; use only elementwise changes "
            "(clamp_, averages), or compute with weights written by export(), or leave pipeline= out",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_metric_that_reads_a_sharded_weight_is_refused(plan: str, error: str, tmp_path: Path) -> None:
    body = STAGES + METRIC
    done = train_basics(tmp_path, body, 2, "--max-restarts", "0", "--plan", f"micro=4 {plan}", code=2)
    assert f"UsageError: {error}\n" in done.stderr


LEFT = """
def layers():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(10, 10), nn.Tanh()) for _ in range(3)], nn.Linear(10, 2)).double()
trainer = make(model=layers)
for report in trainer.steps(data, count=6):
    if report.step == 3: break
try:
    for report in trainer.steps(data, count=6):
        if report.step == 5: raise KeyError
except KeyError: pass
for report in trainer.steps(data, count=2): pass
trainer.export("out.safetensors")
"""


@pytest.mark.parametrize("plan", ["pipeline=2", "tensor=2", "shard=2 zero=3"])
def test_a_loop_that_the_script_leaves_trains_on_later(plan: str, tmp_path: Path) -> None:
    one = load_file(exported(tmp_path / "one", LEFT, 1, ""))
    (tmp_path / "several").mkdir()
    done = train_basics(tmp_path / "several", LEFT, 2, "--max-restarts", "0", "--plan", plan)
    assert "Error" not in done.stderr
    several = load_file(tmp_path / "several" / "out.safetensors")
    assert one.keys() == several.keys()
    for name, weight in one.items():
        torch.testing.assert_close(several[name], weight, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_kill_under_tensor_and_workers_that_join_again_read_weights_and_averages(tmp_path: Path) -> None:
    """The two of the unit that a kill takes come back while the others train on."""
    body = f"""{USES}
import glob, time
reads()
said["count"] = sum(p.numel() for p in one.model.parameters())
one.state["averages"] = {{name: p.detach().clone() for name, p in one.model.named_parameters()}}
open(f"came-{{os.getpid()}}", "w").close()
said["steps"] = []
for report in one.steps(data, count=40):
    said["steps"] += [report.loss, float(up().norm())]
    for name, p in one.model.named_parameters(): one.state["averages"][name].lerp_(p.detach(), 0.1)
    if "several" in os.getcwd() and len(glob.glob("came-*")) < 6: time.sleep(0.2)
said["averages"] = [float(average.norm()) for average in one.state["averages"].values()]
write()
"""
    alone = said(tmp_path / "one", body, 1, "micro=4")
    folder = tmp_path / "several"
    folder.mkdir()
    done = train_basics(folder, body, 4, "--plan", "micro=4 data=2 tensor=2", chaos="kill:1@2.forward")
    text = "worker 1 was killed by SIGKILL, and worker 0 of the same replica is restarted: 2 workers go on"
    assert f"\n{text}\n" in done.stderr
    assert [event["workers"] for event in journal(folder / "out", "lost")] == [[1]]
    assert [event["workers"] for event in journal(folder / "out", "formed")] == [[2, 3], [2, 3, 0, 1]]
    found = json.loads((folder / "said.json").read_text())
    assert found == {name: pytest.approx(values, rel=1e-12) for name, values in alone.items()}
