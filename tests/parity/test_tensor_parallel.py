"""`tensor=`: what scripts do with models whose layers are cut, kills of workers, and what is refused. Parity of the
plans is in test_plans_models_workers.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy
import pytest
import torch
from agents import journal
from basics import net
from covering import each_value
from fault_runs import LONG, STEPS, Calm, fired, train
from fault_runs import MOMENTS as EVERY_MOMENT
from fault_runs import calm as calm
from launching import train_basics
from oracle import apart
from safetensors.torch import load_file
from torch import nn

from paceline.errors import UsageError
from paceline.parallel.parallel_job import ParallelJob
from paceline.parallel.tensor_parallel.layers import TensorCut

# ---- what scripts do

KEYWORDS = """
WORDS = ["name", "module", "model", "forward", "layer", "block", "function", "debug", "args", "self_", "given"]
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(10, 16), nn.Linear(16, 10)
    def forward(self, x, **words):
        assert sorted(words) == sorted(WORDS)
        return x + self.down(self.up(x).relu()) * words["name"] * words["debug"]
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(10, 2)
    def forward(self, x, **words):
        for block in self.blocks:
            x = block(x, **words)
        return self.head(x)
t = make(
    model=lambda: Net().double(),
    forward=lambda model, batch: model(batch[0], **{word: 0.5 for word in WORDS}),
    tensor={"blocks.*.up": "column", "blocks.*.down": "row"},
    plan="recompute=blocks",
)
for _ in t.steps(data, epochs=1): pass
"""
OWN_FUNCTIONS = """
class Normed(torch.autograd.Function):  # of an activation, with a backward that needs all of it
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x.norm(dim=-1, keepdim=True)
    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        norm = x.norm(dim=-1, keepdim=True)
        return grad * norm + x / norm * (grad * x).sum(-1, keepdim=True)
class Head(torch.autograd.Function):  # of a weight, in sections, as losses over large vocabularies
    @staticmethod
    def forward(ctx, x, weight, rows=2):
        ctx.save_for_backward(x, weight)
        return torch.cat([x @ some.t() for some in weight.split(rows)], -1).logsumexp(-1)
    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        share = (x @ weight.t()).softmax(-1) * grad.unsqueeze(-1)
        return share @ weight, share.flatten(0, -2).t() @ x.flatten(0, -2), None
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.head = nn.Linear(10, 16), nn.Linear(16, 6), nn.Linear(6, 4, bias=False)
    def forward(self, x):
        x = self.down(Normed.apply(self.up(x)))
        return torch.stack([Head.apply(x, self.head.weight), self.head(x).sum(-1)], -1)
cut = {"up": "column", "down": "row", "head": "gathered"}
t = make(model=lambda: Net().double(), tensor=cut)
for _ in t.steps(data, epochs=1): pass
"""
ATTENDING = "from attending import *\n"
SCRIPTS = {
    "a forward with keywords of any name, recomputed": KEYWORDS,
    "autograd functions of an activation and of a weight": OWN_FUNCTIONS,
    "outputs that are predicted": "t = make()\nfor r in t.steps(data, count=2): pass\n"
    "t.predict(data, path='outputs.npy')\n",
    "a fused weight, with dropout where all have all": ATTENDING
    + "t = paceline.Trainer(Net, loss, lambda ps: torch.optim.SGD(ps, lr=0.3), global_batch=20, tensor=CUT)\n"
    "for r in t.steps(data, epochs=1): pass\n",
    "dropout of what all have a part of": ATTENDING
    + "t = paceline.Trainer(lambda: Net(dropout=0.2), loss, lambda ps: torch.optim.SGD(ps, lr=0.3), global_batch=20)\n"
    "for r in t.steps(data, epochs=1): pass\n",
    "heads that are counted, and a weight of three that is said to be one": ATTENDING
    + "t = paceline.Trainer(lambda: Net(heads=4, dropout=0.2), loss, lambda ps: torch.optim.SGD(ps, lr=0.3),\n"
    "    global_batch=20, tensor=CUT | {'attention.qkv': 'column'})\n"
    "for r in t.steps(data, epochs=1): pass\n",
    "a part that leaves the model": "t = make(tensor={'2': 'column'})\nfor r in t.steps(data, epochs=1): pass\n",
    "a parameter that is whole and meets parts": ATTENDING + "class Scaled(nn.Module):\n"
    "    def __init__(self):\n"
    "        super().__init__()\n"
    "        self.up, self.down = nn.Linear(10, 16), nn.Linear(16, 2)\n"
    "        self.by = nn.Parameter(torch.tensor(1.5))\n"
    "    def forward(self, x): return self.down(torch.tanh(self.up(x) * self.by)) * self.by\n"
    "t = make(model=lambda: Scaled().double(), tensor={'up': 'column', 'down': 'row'})\n"
    "from basics import data\n"
    "for r in t.steps(data, epochs=1): pass\n",
    "an optimizer that looks at whole parameters": "t = paceline.Trainer(net, cross_entropy, lambda ps: "
    "torch.optim.Adafactor(ps, lr=0.1), global_batch=24)\n"
    "for r in t.steps(data, epochs=1): pass\n",
    "a gradient of a gradient": "def penalised(model, batch):\n"
    "    some = batch[0].requires_grad_()\n"
    "    output = model(some)\n"
    "    (slope,) = torch.autograd.grad(output.sum(), some, create_graph=True)\n"
    "    return output + slope.square().sum()\n"
    "net = lambda: nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(),\n"
    "                            nn.Linear(16, 2), nn.Tanh(), nn.Linear(2, 2)).double()\n"
    "t = make(model=net, forward=penalised, plan='micro=6')\n"
    "for r in t.steps(data, epochs=1): pass\n",
    "blocks computed again": "net = lambda: nn.Sequential(*(nn.Sequential(nn.Linear(10, 16), nn.GELU(), "
    "nn.Linear(16, 10)) for _ in range(3)), nn.Linear(10, 2)).double()\n"
    "t = make(model=net, plan='recompute=blocks')\n"
    "for r in t.steps(data, epochs=1): pass\n",
    "a layer of torch's that evaluates in its own way": "net = lambda: nn.Sequential(\n"
    "    nn.TransformerEncoderLayer(10, 2, 16, 0.0, batch_first=True), nn.Flatten(), nn.Linear(10, 2)).double()\n"
    "t = make(model=net, forward=lambda model, batch: model(batch[0][:, None]), tensor={'0.linear1': 'column', "
    "'0.linear2': 'row'})\n"
    "for r in t.steps(data, count=2):\n"
    "    found = t.evaluate(data, lambda output, batch: {'sum': (output.square().sum(), len(output))})\n"
    "    t.state['found'] = t.state.get('found', 0) + found['sum']\n"
    "if t.main: __import__('pathlib').Path('found').write_text(repr(t.state['found']))\n",
    "two that train each other": "gen = paceline.Trainer(\n"
    "    lambda: nn.Sequential(nn.Linear(10, 16), nn.GELU(), nn.Linear(16, 10)).double(),\n"
    "    lambda output, batch: -critic.model(output).mean(),\n"
    "    lambda ps: torch.optim.SGD(ps, lr=0.1), global_batch=24)\n"
    "critic = make(model=lambda: nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 1)).double(),\n"
    "    loss=lambda output, batch: output.mean() - critic.model(gen.model(batch[0])).mean())\n"
    "for one, two in zip(critic.steps(data, count=3), gen.steps(data, count=3)): pass\n"
    "critic.export('critic.safetensors')\n"
    "t = gen\n",
    "one's own rows": "team = paceline.join()\n"
    "t = make(global_batch=None, plan='micro=5')\n"
    "for step in range(3):\n"
    "    mine = slice(20 * team.rank // team.size, 20 * (team.rank + 1) // team.size)\n"
    "    some = slice(20 * step % 80, 20 * step % 80 + 20)\n"
    "    t.step([tensor[some][mine] for tensor in data.tensors])\n",
    "acting with what is trained": "t = make(global_batch=None, plan='micro=5')\n"
    "team = paceline.join()\n"
    "for step in range(3):\n"
    "    mine = x[:20].chunk(team.size)[team.rank]\n"
    "    seen = torch.cat(team.gather(mine))\n"
    "    with torch.no_grad(): does = t.model(seen).argmax(1).chunk(team.size)[team.rank]\n"
    "    t.step([mine, does])\n",
}


SECOND_ORDER_APART = [name for name in SCRIPTS if name != "a gradient of a gradient"]  # which zero=3 refuses
# Like a model of the parity table, or like another script.
FOR_SLOW_TESTS = {
    "a fused weight, with dropout where all have all",
    "dropout of what all have a part of",
    "heads that are counted, and a weight of three that is said to be one",
    "blocks computed again",
}


def train_scripts(folder: Path, names: Sequence[str], workers: int, plan: str) -> None:
    """Each script as if it were the only one, in one run."""
    (folder / "scripts.json").write_text(json.dumps({name: SCRIPTS[name] for name in names}))
    body = (
        "import json\n"
        "for name, text in json.load(open('scripts.json')).items():\n"
        "    names = dict(globals())\n"
        "    exec(text, names)\n"
        "    names['t'].export(f'{name}.safetensors')\n"
    )
    train_basics(folder, body, workers, *(["--max-restarts", "0", "--plan", plan] if plan else []))


@pytest.mark.parametrize(
    ("plan", "names"),
    [
        ("tensor=2", [name for name in SCRIPTS if name not in FOR_SLOW_TESTS]),
        pytest.param("tensor=2", [*FOR_SLOW_TESTS], marks=pytest.mark.slow),
        pytest.param("data=2 tensor=2", [*SCRIPTS], marks=pytest.mark.slow),
        pytest.param("shard=2 zero=2 tensor=2", [*SCRIPTS], marks=pytest.mark.slow),
        pytest.param("shard=2 zero=3 tensor=2", SECOND_ORDER_APART, marks=pytest.mark.slow),
    ],
    ids=["tensor=2", "tensor=2, more", "data=2 tensor=2", "zero=2", "zero=3"],
)
def test_tensor_parallel_scripts_train_as_one_worker(plan: str, names: list[str], tmp_path: Path) -> None:
    one, several = tmp_path / "one", tmp_path / "several"
    for folder, workers, words in ((one, 1, ""), (several, 2 * plan.replace("zero=", "").count("="), plan)):
        folder.mkdir()
        train_scripts(folder, names, workers, words)
    files = [file.name for file in one.glob("*.safetensors")]
    assert len(files) >= len(names)
    found = {name: apart(load_file(several / name), load_file(one / name)) for name in files}
    assert {name: distance for name, distance in found.items() if distance > 1e-12} == {}
    if "outputs that are predicted" in names:
        evaluated = [float((folder / "found").read_text()) for folder in (several, one)]
        assert evaluated[0] == pytest.approx(evaluated[1], rel=1e-12)
        outputs = [numpy.load(folder / "outputs.npy") for folder in (several, one)]
        assert outputs[0].shape == (96, 2)
        assert abs(outputs[0] - outputs[1]).max() <= 1e-12


# ---- losses

MOMENTS = EVERY_MOMENT[:-1]  # not while the team forms anew, which has a test of its own
PLAN = "micro=4 tensor=2"


@pytest.mark.slow
@pytest.mark.parametrize(("moment", "worker"), each_value(MOMENTS, range(4)))
def test_kill_of_any_worker_under_tensor(moment: str, worker: int, calm: Calm, tmp_path: Path) -> None:
    """The table of recovery has all faults at all moments, with blocks that are computed again."""
    at, ballast = (9 if moment in ("saving", "writing") else 11), (4 if moment == "writing" else 0)
    fault = f"kill:{worker}@{at}.{moment}"
    ended = train(tmp_path, 4, STEPS, fault, ballast=ballast, plan=PLAN)
    calm.meets_after(fault, ended, STEPS)
    mate = worker ^ 1
    said = f"worker {worker} was killed by SIGKILL, and worker {mate} of the same replica is restarted: 2 workers go on"
    assert f"\n{said}\n" in ended.text


@pytest.mark.slow
def test_two_kills_under_tensor_and_both_units_join_again(calm: Calm, tmp_path: Path) -> None:
    faults = {"kill:0@5.forward", "kill:3@30.backward"}
    ended = train(tmp_path, 4, LONG, ",".join(faults), 'journal.jsonl "formed" 4', plan=PLAN)
    assert fired(ended) == faults
    calm.meets(ended, LONG)
    assert [event["workers"] for event in ended.events("formed")] == [[2, 3], [2, 3, 0, 1], [0, 1], [0, 1, 2, 3]]


@pytest.mark.slow
def test_kill_under_tensor_while_the_next_generation_forms(calm: Calm, tmp_path: Path) -> None:
    faults = {"kill:5@11.loading", "kill:0@11.forming"}
    ended = train(tmp_path, 6, STEPS, ",".join(faults), plan=PLAN)
    assert fired(ended) == faults
    calm.meets(ended, STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [[0], [4], [5], [1, 4]])
def test_kill_under_tensor_during_the_state_transfer(workers: list[int], calm: Calm, tmp_path: Path) -> None:
    """From the unit of workers 0 and 1 to that of 4 and 5."""
    faults = {f"kill:{worker}@{0 if worker > 3 else 6}.hand-over" for worker in workers}
    wait = f"chaos.jsonl fault {1 + len(faults)}"
    ended = train(tmp_path, 6, LONG, ",".join({"kill:5@5.forward"} | faults), wait, plan=PLAN)
    assert fired(ended) == {"kill:5@5.forward"} | faults, "a fault did not fire"
    calm.meets(ended, LONG)


@pytest.mark.slow
def test_kill_in_the_last_tensor_unit_resumes_from_the_checkpoint(calm: Calm, tmp_path: Path) -> None:
    """Nobody is left who holds a whole model."""
    fault = "kill:1@15.backward"
    ended = train(tmp_path, 2, STEPS, fault, plan=PLAN)
    calm.meets_after(fault, ended, STEPS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "words", "steps", "apart"),
    [
        ("float64", "", 500, 1e-12),
        ("float32", "", 500, 1e-5),
        ("float32", "precision=bf16", 500, 0.05),
        ("float32", "precision=bf16", STEPS, 0.02),
    ],
)
def test_parameters_on_every_worker_of_a_tensor_unit_stay_equal(
    kind: str, words: str, steps: int, apart: float, calm: Calm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Compared in some of the steps, at the checkpoints and at the end: else the run ends with what differs."""
    monkeypatch.setenv("DTYPE", kind)
    monkeypatch.setenv("ATTENTION", "1")
    ended = train(tmp_path, 4, steps, plan=f"{PLAN} {words}")
    (told,) = ended.events("agreement")
    assert told["checks"] >= steps / 50
    assert told["distance"] is None
    mine = ended.told["losses"]
    theirs = json.loads((calm.of(steps, words) / "out.json").read_text())["losses"]
    assert [loss for _, loss, *_ in mine] == pytest.approx([loss for _, loss, *_ in theirs], rel=apart)


# ---- what cannot be

UNCUT = {
    "nothing to cut": (lambda: nn.Linear(10, 2), None),
    "an odd size": (lambda: nn.Sequential(nn.Linear(10, 15), nn.ReLU(), nn.Linear(15, 2)), {"0": "column", "2": "row"}),
    "odd sections": (
        lambda: nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 2)),
        {"0": "column:5", "2": "row"},
    ),
    "no such module": (net, {"3": "column"}),
    "no such placement": (net, {"0": "rows"}),
    "no such layer": (net, {"1": "column"}),
}


@pytest.mark.parametrize("case", UNCUT)
def test_tensor_parallel_names_a_layer_that_cannot_be_cut(case: str, golden: Callable[[str, str], None]) -> None:
    make, placements = UNCUT[case]
    job = ParallelJob(make(), lambda model, batch: model(batch), lambda output, batch: output, torch.device("cpu"), 0)
    two: Any = SimpleNamespace(size=2, rank=0)
    with pytest.raises(UsageError) as refused:
        TensorCut(job, two, placements)
    golden(f"cut: {case}", str(refused.value))


class Planned(nn.Module):
    """Brings a plan of its own, as models of transformers do."""

    _tp_plan: ClassVar = {"blocks.*.0": "colwise", "blocks.*.2": "rowwise"}

    def __init__(self, width: int) -> None:
        super().__init__()
        sizes = (16, width, 16)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(10, n), nn.ReLU(), nn.Linear(n, 10)) for n in sizes), nn.Linear(10, 2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


ADVISED = {
    "derived": ({"blocks.1.*": "whole"}, 16, 4),
    "own plan": ({"blocks.1.0": "whole", "blocks.1.2": "whole"}, 15, 4),
    "after a pattern": ({"blocks.*.0": "column", "blocks.*.2": "row", "blocks.1.*": "whole"}, 15, 4),
}


@pytest.mark.parametrize("case", ADVISED)
def test_whole_in_tensor_table_leaves_a_layer_uncut(case: str) -> None:
    placements, width, count = ADVISED[case]
    two: Any = SimpleNamespace(size=2, rank=0)

    def cut(said: dict[str, str] | None) -> TensorCut:
        model = Planned(width)
        if case == "derived":
            model._tp_plan = {}  # type: ignore[misc]
        forward = lambda model, batch: model(batch)
        return TensorCut(ParallelJob(model, forward, lambda output, batch: output, torch.device("cpu"), 0), two, said)

    if case == "own plan":
        with pytest.raises(UsageError) as refused:
            cut(None)
        assert str(refused.value) == (
            "tensor=2 does not divide the 15 outputs of blocks.1.0; "
            'exclude it with Trainer(..., tensor={"blocks.1.0": "whole"}); other layers stay split'
        )
    made = cut(placements)
    assert len(made.layers) == count
    assert not any(name.startswith("blocks.1") for name in made.table)


# Each in a trainer of its own, whose first forward is that of an evaluation.
REFUSED = {
    "what torch cannot see into": (
        "evaluated(make(model=lambda: Hidden().double(), tensor={'up': 'column', 'down': 'row'}), basics.data)",
        (
            "UsageError: the output of down changes when tensor= splits Hidden; in tensor=, set its layers to"
            ' "whole", or to "column:3" if a weight fuses three'
        ),
    ),
    "another gradient": (
        "trained(make(model=lambda: Hidden(True).double(), tensor={'up': 'column', 'down': 'row'}), basics.data)",
        (
            'UsageError: the gradient of up.weight changes when tensor= splits Hidden; set its layer to "whole" in'
            " tensor="
        ),
    ),
    "writes into a part": (
        "evaluated(make(model=lambda: Writing().double(), tensor={'up': 'column', 'down': 'row'}), basics.data)",
        (
            "UsageError: Writing writes into the shard of a layer that tensor= splits (__setitem__); create a new"
            ' tensor instead, or set that layer to "whole" in tensor='
        ),
    ),
    "groups by size": (
        (
            "paceline.Trainer(basics.net, loss, lambda ps: torch.optim.SGD([{'params': [p for _, p in ps if "
            "(p.numel() > 100) == large]} for large in (False, True)], lr=0.1), global_batch=24)"
        ),
        (
            "UsageError: optimizer puts 0.weight into one group by its shape (16, 10) but into another group by the"
            " shape (8, 10) of its local shard; choose the groups by parameter name or ndim"
        ),
    ),
    "weights by name": (
        "make().model.state_dict()",
        (
            "UsageError: state_dict() of Sequential, which tensor= splits, would contain only this worker's shards;"
            " write the full weights with export(), or read them from a checkpoint"
        ),
    ),
    "a copy": (
        "copy.deepcopy(make().model)",
        (
            "UsageError: Sequential cannot be copied, because tensor= leaves each worker only shards of its layers;"
            " write the full model with export(), or leave tensor= out to keep copies (averages)"
        ),
    ),
    "acting on one's own": (
        "make().model(x[paceline.join().rank :][:2])",
        (
            "UsageError: workers 0 and 1 call Sequential with different inputs, but tensor= splits its layers, so"
            " they compute it together; pass the same input on all of them, for example"
            " torch.cat(paceline.join().gather(x))"
        ),
    ),
}
TRIES = f"""
import basics, copy
from paceline.errors import UsageError
from attending import *
def hooked(x):
    x.register_hook(lambda grad: grad / grad.shape[-1])
    return x
def unseen(x):
    with torch._C.DisableTorchFunction(): return x / x.shape[-1]
class Hidden(nn.Module):
    def __init__(self, late=False):
        super().__init__()
        self.up, self.down, self.late = nn.Linear(10, 16), nn.Linear(16, 2), late
    def forward(self, x): return self.down((hooked if self.late else unseen)(self.up(x)))
class Writing(Hidden):
    def forward(self, x):
        x = self.up(x)
        x[:, :3] = 0.0
        return self.down(x)
def evaluated(t, rows): t.evaluate(rows, lambda output, batch: {{"sum": (output.sum(), 1)}})
def trained(t, rows): next(iter(t.steps(rows, count=1)))
for name, call in {[(name, call) for name, (call, _) in REFUSED.items()]!r}:
    try:
        eval(call)
        said = "nothing"
    except UsageError as error:
        said = f"{{type(error).__name__}}: {{error}} {{getattr(error, '__notes__', '')}}"
    if paceline.join().rank == 0:
        print(name, said, sep=": ", flush=True)
"""


def test_tensor_parallel_refuses_what_it_cannot_train(tmp_path: Path) -> None:
    done = train_basics(tmp_path, TRIES, 2, "--max-restarts", "0", "--plan", "tensor=2", code=None)
    lines = {line.partition(": ")[0]: line.partition(": ")[2] for line in done.stdout.splitlines()}
    assert lines.keys() >= REFUSED.keys(), done.stdout + done.stderr
    assert {name: lines[name] for name, (_, said) in REFUSED.items() if said not in lines[name]} == {}


def test_tensor_parallel_reports_layers_and_shares_of_units(tmp_path: Path) -> None:
    """And who has how much, by units."""
    done = train_basics(tmp_path, "for r in make().steps(data, count=1): pass\n", 4, "--plan", "tensor=2 micro=24")
    assert "= 1 micro-batch of 24 rows, assigned to the units of 2 workers as 1, 0; one" in done.stderr
    idle = "workers 2-3 have nothing to do, because the 1 micro-batch is not divided further"
    assert f"{idle}: the plan micro=12 gives one micro-batch to each of the 2 units of 2 workers, which" in done.stderr
    told = "2 layers are split over 2 workers: column 0; row 2"
    assert told in done.stdout + done.stderr
    assert [event["why"] for event in journal(tmp_path / "out", "decision") if event["what"] == told] == [
        "a trial run of its blocks found that they can be split"
    ]
