"""Parameters that are gathered block by block: layers that not every micro-batch runs, attributes, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from launching import equal_bytes, train_basics
from torch import nn

from paceline.base.sharding import RowShards
from paceline.compute.blocks import blocks_of, by_block
from paceline.compute.cpu_offload import CpuOffloadedParams
from paceline.compute.state_dict import marks_of, own_of
from paceline.errors import UsageError
from paceline.parallel.deferred_init import build
from paceline.parallel.fsdp import refuse_ungatherable

# Micro-batches of 3 rows ask for different layers: which is told by the first row.
BODY = (
    "class Layer(nn.Module):\n"
    "    def __init__(self):\n"
    "        super().__init__()\n"
    "        self.a, self.b = nn.Linear(10, 10), nn.Linear(10, 10)\n"
    "    def forward(self, x, both=True):\n"
    "        return x + (self.a(x) + self.b(x) if both else self.a(x)).tanh()\n"
    "class Model(nn.Module):\n"
    "    def __init__(self):\n"
    "        super().__init__()\n"
    "        self.layers, self.head = nn.ModuleList(Layer() for _ in range(8)), nn.Linear(10, 2)\n"
    "        self.empty = nn.Parameter(torch.zeros(0, 3))\n"
    "    def forward(self, x):\n"
    "        which = int(x[0, 0] * 1000)\n"
    "        for number, layer in enumerate(self.layers):\n"
    "            {run}\n"
    "        return self.head(x) + self.empty.sum()\n"
    "t = paceline.Trainer(lambda: Model().double(), cross_entropy, lambda p: torch.optim.AdamW(p, lr=0.01),\n"
    "    global_batch=24, clip_norm=1.0)\n"
    "for r in t.steps(data, count=4): pass\n"
    "t.export('out.safetensors')\n"
)
DROPPED = BODY.format(run="if (which >> number) & 1: x = layer(x)")
DETACHED = BODY.format(run="y = layer(x); x = layer(y.detach() if (which >> number) & 1 else y)")
DEPTH = BODY.format(run="x = x + layer(layer(x)) if (which >> number) & 1 else layer(x)")
PARTS = BODY.format(run="x = layer(x, both=(which >> number) & 1)")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "workers", "plan"),
    [
        pytest.param(PARTS, 2, "shard=2 micro=3", id="parts of layers"),
        pytest.param(PARTS, 3, "shard=3 recompute=blocks micro=3", id="recomputed"),
        pytest.param(DROPPED, 2, "shard=2 zero=2 micro=3", id="layers"),
        pytest.param(DETACHED, 2, "shard=2 zero=2 micro=3", id="backwards"),
        pytest.param(DEPTH, 2, "shard=2 zero=2 micro=3", id="calls"),
        pytest.param(DROPPED, 4, "data=2 shard=2 zero=2 micro=3", id="in replicas"),
        pytest.param(DROPPED, 3, "shard=3 zero=1 micro=3", id="zero=1"),
    ],
)
def test_exact_shards_with_layers_that_some_micro_batches_run(
    body: str, workers: int, plan: str, tmp_path: Path
) -> None:
    equal_bytes(tmp_path, body, workers, plan, alone="exact micro=3")


@pytest.mark.slow
@pytest.mark.parametrize(("body", "workers"), [(DROPPED, 2), (DROPPED, 5), (DETACHED, 2)], ids=["2", "5", "backward"])
def test_fsdp_names_layers_that_workers_gather_differently(body: str, workers: int, tmp_path: Path) -> None:
    done = train_basics(tmp_path, body, workers, "--max-restarts", "0", "--plan", f"shard={workers} micro=3", code=1)
    said = " ".join(done.stderr.split())
    assert "CollectiveMismatchError: workers called different collectives: worker" in said, said
    assert "the all-gather of layers." in said
    cure = "if some micro-batches skip a layer, use zero=2, which gathers all parameters before each forward"
    assert f"; {cure}" in said


PENALTY = (
    "def penalised(model, batch):\n"
    "    x = batch[0].requires_grad_()\n"
    "    output = model(x)\n"
    "    (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)\n"
    "    return output + slope.square().sum()\n"
    "t = make(model=lambda: nn.Sequential(*[nn.Linear(10, 10) for _ in range(3)], nn.Linear(10, 2)).double(),\n"
    "    forward=penalised)\n"
    "for r in t.steps(data, count=1): pass\n"
)
SAID = {
    "gradient penalty": (
        PENALTY,
        "UsageError: a backward needs parameters that were freed: the loss uses an intermediate value of a layer other "
        "than its output, or a second-order gradient (create_graph); use zero=2",
    ),
    "in place": (
        "class Layer(nn.Linear):\n"
        "    def forward(self, x):\n"
        "        return super().forward(x.relu_())\n"
        "t = make(model=lambda: nn.Sequential(*[Layer(10, 10) for _ in range(3)], nn.Linear(10, 2)).double())\n"
        "for r in t.steps(data, count=1): pass\n",
        "UsageError: a layer changes its input in place, which zero=2 and zero=3 do not allow; let the layer return a "
        "new tensor (inplace=False), or use zero=1",
    ),
    "inference": (
        "t = make()\nwith torch.inference_mode(): t.model(x)\n",
        "UsageError: the first call of the model is under inference_mode(); use torch.no_grad()",
    ),
    "deepcopy": (
        "import copy\nt = make()\ncopy.deepcopy(t.model)\n",
        "UsageError: Sequential is sharded and cannot be copied; use zero=1",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", SAID)
def test_fsdp_refuses_what_sharded_parameters_cannot_do(case: str, tmp_path: Path) -> None:
    body, said = SAID[case]
    done = train_basics(tmp_path, body, 2, "--max-restarts", "0", "--plan", "shard=2", code=2)
    assert said in " ".join(done.stderr.split()), done.stderr


OUTSIDE = (
    "class Layer(nn.Module):\n"
    "    def __init__(self):\n"
    "        super().__init__()\n"
    "        self.a, self.b = nn.Linear(10, 10), nn.Linear(10, 10)\n"
    "    def half(self, x): return x + self.a(x).tanh()\n"
    "    def forward(self, x): return x + self.b(x).tanh()\n"
    "class Model(nn.Module):\n"
    "    def __init__(self):\n"
    "        super().__init__()\n"
    "        self.layers, self.head = nn.ModuleList(Layer() for _ in range(4)), nn.Linear(10, 2)\n"
    "    def forward(self, x):\n"
    "        decay = sum(p.square().sum() for p in self.parameters())\n"
    "        for layer in self.layers: x = layer(layer.half(layer.forward(x)))\n"
    "        return self.head(x) + decay / 1000\n"
    "t = make(model=lambda: Model().double())\n"
    "for r in t.steps(data, count=4): pass\n"
    "t.export('out.safetensors')\n"
)
PARTS_ALONE = OUTSIDE.replace(
    "t = make(", "t = make(forward=lambda model, batch: model.head(model.layers[0](batch[0])), "
)
WITH_EXPORT = PENALTY.replace("count=1): pass\n", "count=4): pass\nt.export('out.safetensors')\n")


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(OUTSIDE, id="outside"),
        pytest.param(PARTS_ALONE, id="parts alone", marks=pytest.mark.slow),
        pytest.param(WITH_EXPORT, id="penalty", marks=pytest.mark.slow),
    ],
)
def test_zero_2_keeps_parameters_whole_until_the_step_ends(body: str, tmp_path: Path) -> None:
    """Used without calling a layer or the model, more often than it is called, and by a second backward."""
    equal_bytes(tmp_path, body, 2, "shard=2 zero=2")


@pytest.mark.slow
@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("what", ["t.model(x[:3])", "t.model[1](x[:3])", "t.evaluate(data, metric)"])
def test_fsdp_with_calls_of_the_model_before_and_between_steps(what: str, zero: int, tmp_path: Path) -> None:
    """What is gathered for them is freed, so that a change of weights is one."""
    body = (
        "def metric(output, batch): return {'sum': (output.sum().item(), 1)}\n"
        "t = make(model=lambda: nn.Sequential(*[nn.Linear(10, 10) for _ in range(3)], nn.Linear(10, 2)).double())\n"
        "def call():\n"
        f"    with torch.no_grad(): {what}\n"
        "call()\n"
        "for r in t.steps(data, count=4):\n"
        "    call()\n"
        "    with torch.no_grad():\n"
        "        for param in t.model.parameters(): param.mul_(0.9)\n"
        "t.export('out.safetensors')\n"
    )
    equal_bytes(tmp_path, body, 2, f"shard=2 zero={zero}")


@pytest.mark.slow
def test_fsdp_with_parameters_frozen_after_the_trainer_was_made(tmp_path: Path) -> None:
    """Before the first step, and after some."""
    body = (
        "t = make(model=lambda: nn.Sequential(*[nn.Linear(10, 10) for _ in range(3)], nn.Linear(10, 2)).double())\n"
        "t.model[1].requires_grad_(False)\n"
        "for r in t.steps(data, count=5):\n"
        "    if r.step == 2: t.model[0].weight.requires_grad_(False)\n"
        "t.export('out.safetensors')\n"
    )
    equal_bytes(tmp_path, body, 2, "shard=2")


def a_model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.LayerNorm(3))


def hooked(model: nn.Module) -> None:
    model[0].weight.register_hook(lambda grad: grad)


def watched(model: nn.Module) -> None:
    model[0].weight.register_post_accumulate_grad_hook(lambda param: None)


def turned(model: nn.Module) -> None:
    model[2] = nn.Linear(2, 3)
    model[2].weight = nn.Parameter(torch.zeros(2, 3).t())


def mixed(model: nn.Module) -> None:
    model[1].bias = nn.Parameter(torch.zeros(3, dtype=torch.float64))


def kept(model: nn.Module) -> None:
    model[1].pairs = {"first": [model[0].weight]}


@pytest.mark.parametrize("change", [hooked, watched, turned, mixed, kept], ids=lambda change: change.__name__)
def test_fsdp_refuses_what_gathering_would_lose(
    change: Callable[[nn.Module], None], golden: Callable[[str, str], None]
) -> None:
    model = a_model()
    groups = by_block(dict(model.named_parameters()), list(blocks_of(model)))
    refuse_ungatherable(model, groups)
    change(model)
    with pytest.raises(UsageError) as refused:
        refuse_ungatherable(model, groups)
    golden(f"gathering: {change.__name__}", str(refused.value))


def test_shards_have_the_attributes_of_their_parameters() -> None:
    def make() -> nn.Module:
        layer = nn.Linear(300, 300)
        layer.weight.rate = 0.5
        return layer

    layer, (bare, _) = make(), build(make)
    rows, bias = own_of(dict(layer.named_parameters()), {}, RowShards(2, 0))[0].values()
    assert all(vars(param) == {"rate": 0.5} for param in (rows, *CpuOffloadedParams([rows]).copies))
    assert vars(bias) == {}
    assert marks_of(bare.weight) == {"rate": 0.5}


@pytest.mark.slow
@pytest.mark.parametrize("words", ["zero=1", "zero=2", "zero=3", "offload=cpu"])
def test_optimizer_groups_by_attributes_of_sharded_parameters(words: str, tmp_path: Path) -> None:
    body = (
        "def model():\n"
        "    made = net()\n"
        "    for name, param in made.named_parameters(): param.rate = 0.1 if 'bias' in name else 0.01\n"
        "    return made\n"
        "def optimizer(named):\n"
        "    params = [param for _, param in named]\n"
        "    return torch.optim.SGD([{'params': [p for p in params if p.rate == r], 'lr': r} for r in (0.1, 0.01)])\n"
        "t = paceline.Trainer(model, cross_entropy, optimizer, global_batch=24)\n"
        "assert [param.rate for param in t.model.parameters()] == [0.01, 0.1, 0.01, 0.1]\n"
        "for r in t.steps(data, count=3): pass\n"
        "t.export('out.safetensors')\n"
    )
    equal_bytes(tmp_path, body, 2, f"shard=2 {words}")
