"""`pipeline=` and `context=`: models of many kinds as they are, kills of workers, what scripts do with such models, and
what is refused. Parity of the plans is in test_plans_models_workers.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from agents import journal
from covering import each_value
from fault_runs import MOMENTS, Calm
from fault_runs import calm as calm
from launching import train_basics, train_models
from once import once
from oracle import apart
from safetensors.torch import load_file
from staging import MODELS

TEAMS = {  # each schedule, and each axis with each other one; parity models train under more plans
    "pipeline=2": 2,
    "pipeline=2 virtual=2 schedule=zb": 2,
    "pipeline=3 schedule=gpipe": 3,
    "data=2 pipeline=2 schedule=zbv": 4,
    "pipeline=4": 4,
    "shard=2 zero=3 pipeline=2 virtual=2": 4,
    "context=4": 4,
    "shard=2 zero=3 context=2": 4,
    "data=2 pipeline=2 tensor=2": 8,
    "pipeline=2 context=2 tensor=2": 8,
}


@pytest.mark.slow
@pytest.mark.parametrize("plan", TEAMS)
def test_pipeline_and_context_with_models_as_they_are(
    plan: str, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    alone = lambda folder: train_models(folder, "staging.py", 1, "", MODELS)
    one = once(tmp_path_factory, "staged models of one worker", alone)
    train_models(tmp_path, "staging.py", TEAMS[plan], f"micro=3 {plan}", MODELS)
    found = {name: apart(*(load_file(at / f"{name}.safetensors") for at in (tmp_path, one))) for name in MODELS}
    assert {name: distance for name, distance in found.items() if distance > 1e-12} == {}
    pattern = re.compile(r"is split into \d stages|sequences are divided among .* holds the full weights")
    events = [str(event["what"]) for event in journal(tmp_path / "out", "decision")]
    assert sum(bool(pattern.search(event)) for event in events) == len(MODELS) * (
        ("pipeline" in plan) + ("context" in plan)
    )


# ---- losses

# The table of recovery has the other moments of a pipeline. Where each worker of a unit has all of the state, and it is
# small, the first one alone writes it.
LOST = [("pipeline=2", "backward", 2), ("pipeline=2 schedule=zbv", "forward", 0)]
LOST += [("pipeline=2 schedule=zbv", "backward", 3), ("context=2", "writing", 0)]
LOST += [("context=2", *one) for one in each_value(MOMENTS[:-2], range(4))]
LOST_QUICK = LOST[:1]


@pytest.mark.parametrize(
    ("plan", "moment", "worker"),
    [pytest.param(*row, marks=[] if row in LOST_QUICK else pytest.mark.slow) for row in LOST],
)
def test_kill_of_any_worker_in_a_pipeline(
    plan: str, moment: str, worker: int, calm: Calm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ATTENTION", "1")
    step = 9 if moment in ("saving", "writing") else 11
    ended = calm.meets_kill(tmp_path, f"{plan} recompute=blocks", worker, moment, step)
    said = f"worker {worker} was killed by SIGKILL, and worker {worker ^ 1} of the same replica is restarted"
    assert f"\n{said}: 2 workers go on\n" in ended.text


# ---- what scripts do, each in a trainer of its own

TRIES = """
import copy
import numpy as np
from paceline.errors import UsageError
import basics
from staging import Block, LENGTH, WIDTH, loss, numbers
def tried(name, action):
    try:
        found = action()
        said[name] = "" if found is None else found
    except UsageError as error:
        said[name] = f"{type(error).__name__}: {error}"
said, team = {}, paceline.join()
x = numbers.tensors[0]
class Row(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.last = nn.Linear(WIDTH, 3)
    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = self.between(block, x)
        return {"out": self.last(x)} if self.named else self.last(x)
    def between(self, block, x): return block(x)
    named = False
class Named(Row): named = True
class Reads(Row):
    def between(self, block, x): return block(x) if x.sum() > 1e9 else block(-x)
class Arrays(Row):
    def between(self, block, x): return block(x) if np.asarray(x.detach()).sum() > 1e9 else block(-x)
class Stops(Row):
    def forward(self, x): return self.last(self.blocks[1](self.blocks[0](self.first(x))))
class Ends(Row):
    def forward(self, x): return self.blocks[1](self.blocks[0](self.first(x)))
class Turns(Row):
    def forward(self, x): return self.last(self.blocks[0](self.blocks[2](self.first(x))))
class Late(Row):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
    def forward(self, x): return super().forward(self.norm(x))
class Repeated(Row):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([self.blocks[0]] * 4)
class Kept:
    pass
class Objects(Row):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Giving() for _ in range(4))
    def between(self, block, x): return block(x).x
class Giving(nn.Linear):
    def __init__(self): super().__init__(WIDTH, WIDTH)
    def forward(self, x):
        kept = Kept()
        kept.x = super().forward(x)
        return kept
class Normal(Row):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(LENGTH)) for _ in range(4))
class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = Row(), Row()
    def forward(self, x): return self.up(x) + self.down(x)
def made(model=Row, **more):
    more = {"global_batch": 8, **more}
    return paceline.Trainer(lambda: model().double(), loss, lambda ps: torch.optim.SGD(ps, lr=0.1), **more)
def trained(trainer, count=2):
    for _ in trainer.steps(numbers, count=count): pass
def acted():
    t = made(Named)
    trained(t)
    with torch.no_grad():
        found = t.model(torch.cat(team.gather(x[:8].chunk(team.size)[team.rank])))
    return [float(found["out"].sum()), float(getattr(found, "out", found["out"]).square().sum())]
def brought():
    t, losses = made(global_batch=None), []
    for step in range(3):
        mine = x[step * 5 : step * 5 + 5].tensor_split(team.size)[team.rank]
        losses.append(t.step([mine]).loss)
    return losses
def adversaries():
    gen = paceline.Trainer(
        lambda: Row().double(), lambda output, batch: -critic.model(output).mean(),
        lambda ps: torch.optim.SGD(ps, lr=0.1), global_batch=8)
    critic = paceline.Trainer(
        lambda: nn.Linear(3, 1).double(), lambda output, batch: (output * batch[1][:, None, None]).mean(),
        lambda ps: torch.optim.SGD(ps, lr=0.1), global_batch=8, forward=lambda model, batch: model(batch[0]),
        plan="pipeline=1")
    losses = []
    for one in gen.steps(numbers, count=3):
        with torch.no_grad(): fakes = gen.model(x[:6])
        both = torch.cat([fakes, x[:6, :, :3]]), torch.cat([torch.ones(6), -torch.ones(6)]).double()
        losses += [one.loss, critic.step([part.tensor_split(team.size)[team.rank] for part in both]).loss]
    return losses
def predicted():
    import numpy
    t = made()
    trained(t)
    t.predict(numbers, path="found.npy")
    return [float(numpy.load("found.npy").sum()), t.evaluate(numbers, lambda o, b: {"sum": (o.sum(), len(o))})["sum"]]
for name, action in ACTIONS.items():
    tried(name, eval(f"lambda: {action}"))
if team.rank == team.size - 1: __import__("pathlib").Path("said.json").write_text(json.dumps(said))
"""
DONE = {"acting": "acted()", "step()": "brought()", "adversaries": "adversaries()", "predict": "predicted()"}
REFUSED = {
    "called with gradients": "made().model(x)",
    "weights by name": "made().model.state_dict()",
    "a copy": "copy.deepcopy(made().model)",
    "a block by itself": "made().model.blocks[0](x)",
    "several lists": "made(Two)",
    "another kind": "made(pipeline_blocks=3)",
}


def test_pipeline_with_scripts_of_every_kind(tmp_path: Path, golden: Callable[[str, str], None]) -> None:
    found = {}
    for workers in (1, 2):
        folder = tmp_path / str(workers)
        folder.mkdir()
        actions = {**DONE, **(REFUSED if workers > 1 else {})}
        body = f"import json\nACTIONS = {actions!r}\n{TRIES}"
        plan = f"micro=4{' pipeline=2' if workers > 1 else ''}"
        train_basics(folder, body, workers, "--max-restarts", "0", "--plan", plan)
        found[workers] = json.loads((folder / "said.json").read_text())
    for name in DONE:
        assert found[2][name] == pytest.approx(found[1][name], rel=1e-12), name
    for name in REFUSED:
        golden(name, found[2][name])


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["shard=2 zero=3 pipeline=2", "shard=2 zero=2 pipeline=2 virtual=2"])
def test_pipeline_of_gathered_parameters_with_scripts_of_every_kind(plan: str, tmp_path: Path) -> None:
    found = {}
    for workers, words in ((1, ""), (4, plan)):
        folder = tmp_path / str(workers)
        folder.mkdir()
        actions = {**DONE, **(REFUSED if workers > 1 else {})}
        del actions["adversaries"]
        body = f"import json\nACTIONS = {actions!r}\n{TRIES}"
        train_basics(folder, body, workers, "--max-restarts", "0", "--plan", f"micro=2 {words}")
        found[workers] = json.loads((folder / "said.json").read_text())
    assert {name: found[4][name] for name in found[1]} == {
        name: pytest.approx(values, rel=1e-12) for name, values in found[1].items()
    }
    assert [name for name in REFUSED if "UsageError" not in str(found[4][name])] == []


@pytest.mark.slow
def test_loss_of_a_pipeline_refuses_a_model_that_its_workers_cannot_gather(tmp_path: Path) -> None:
    body = f"import json\nACTIONS = {{}}\n{TRIES}\nadversaries()\n"
    options = ("--max-restarts", "0", "--plan", "micro=2 shard=2 zero=3 pipeline=2")
    said = train_basics(tmp_path, body, 4, *options, code=2).stderr
    what = "UsageError: the forward or loss of Row, which pipeline= splits into stages, calls Linear, whose parameters "
    what += "zero=2 or zero=3 gathers from workers that do not make this call; use zero=1"
    assert what in " ".join(said.split())


# Each ends a run, on the worker that finds it.
ENDS = {
    "trained(made(Reads))": "the forward reads a value (bool) that another stage of the pipeline computes; do not let "
    "values computed by a block decide what the forward does, or leave pipeline= out",
    "trained(made(Arrays))": "the forward reads a value (array) that another stage of the pipeline computes; do not "
    "let values computed by a block decide what the forward does, or leave pipeline= out",
    "trained(made(Stops))": "the forward uses last.weight between two blocks or without calling all of them; call "
    "all blocks in order and use last.weight after them, or leave pipeline= out",
    "trained(made(Ends))": "the forward of Ends ended without calling blocks.2; call all blocks in order in the "
    "forward, or leave pipeline= out",
    "trained(made(Turns))": "blocks.2 is called before earlier blocks of its list, but pipeline= runs blocks in list "
    'order; name a list whose blocks are called in order: pipeline_blocks="path", or leave pipeline= out',
    "trained(made(forward=lambda model, batch: model(batch[0]) + model(-batch[0])))": "one forward calls "
    "blocks.0 twice, but pipeline= runs each block once; if the forward calls a model twice, pass both inputs in one "
    "call (torch.cat), or leave pipeline= out",
    "trained(made(Late))": "norm.weight is created after the blocks but used before them; pipeline= assigns it to the "
    "last stage; create norm.weight before the blocks in __init__, or leave pipeline= out",
    "trained(made(Repeated))": "Repeated calls one module several times instead of a list of blocks (blocks), but "
    "pipeline= runs each block once; leave pipeline= out, or split the layers inside with tensor=N",
    "trained(made(Objects))": "blocks.0 returns a Kept, which pipeline= cannot send to the worker of the next block; "
    "return tensors, or tuples, lists or dicts of tensors, or leave pipeline= out",
    "trained(made(Normal))": "pipeline= does not support models with BatchNorm or with buffers declared by "
    "paceline.buffer yet; leave pipeline= out",
}


OWN = """
from staging import Block, LENGTH, WIDTH, loss, numbers
chance = torch.Generator().manual_seed(1)
class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
    def forward(self, x):
        for block in self.blocks: x = block(x)
        return x + torch.randn(x.shape, generator=chance)
t = paceline.Trainer(lambda: Own().double(), loss, lambda ps: torch.optim.SGD(ps, lr=0.1), global_batch=8)
list(t.steps(numbers, count=2))
"""


def test_context_parallel_refuses_outputs_that_differ_from_the_whole_model(tmp_path: Path) -> None:
    with pytest.raises(AssertionError) as ended:
        train_basics(tmp_path, OWN, 2, "--max-restarts", "0", "--plan", "context=2")
    said = "UsageError: the outputs differ when context= divides the sequences of Own; leave context= out\n"
    assert said in str(ended.value)


def test_pipeline_advises_other_stages_when_one_is_slow(tmp_path: Path) -> None:
    slow = """
import time
class Slow(Row):
    def between(self, block, x): return self.waits(block(x))
    def waits(self, x):
        return Waits.apply(x)
class Waits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.clone()
    @staticmethod
    def backward(ctx, grad):
        time.sleep([1e-3, 30e-3][team.rank])  # much more than other work on the machine takes
        return grad
trained(made(Slow), count=17)
"""
    body = f"import json\nACTIONS = {{}}\n{TRIES}\n{slow}\n"
    done = train_basics(tmp_path, body, 2, "--max-restarts", "0", "--plan", "micro=4 pipeline=2")
    (said,) = (line for line in done.stderr.splitlines() if "other stages" in line)
    seconds = r"0\.\d+ s on worker"
    what = (
        r'other stages would balance these workers better: Trainer\(\.\.\., pipeline_blocks="blocks:3"\)\. In a step, '
        r"the stages"
    )
    pattern = (
        rf"{what} take {seconds} 0, {seconds} 1; with the suggestion, the slowest worker would compute for 0\.\d+ s "
        r"instead of 0\.\d+ s"
    )
    assert re.fullmatch(pattern, said)
    assert said in [event["text"] for event in journal(tmp_path / "out", "note")]


@pytest.mark.parametrize("action", [a if "Reads" in a else pytest.param(a, marks=pytest.mark.slow) for a in ENDS])
def test_pipeline_refuses_a_model_it_cannot_cut(action: str, tmp_path: Path) -> None:
    body = f"import json\nACTIONS = {{}}\n{TRIES}\n{action}\n"
    with pytest.raises(AssertionError) as ended:
        train_basics(tmp_path, body, 2, "--max-restarts", "0", "--plan", "micro=4 pipeline=2")
    assert f"UsageError: {ENDS[action]}\n" in str(ended.value)
