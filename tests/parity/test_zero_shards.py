"""Sharded training beside `data`: the bits with `exact` through checkpoints, and what is refused. The bits of each plan
by itself are in test_plans_models_workers.py.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from agents import journal
from checkpoints import find_checkpoint
from hypothesis import given
from hypothesis import strategies as st
from launching import equal_bytes, train_basics
from once import once
from torch import nn

from paceline.base.batching import exact_sum
from paceline.base.environment import World
from paceline.base.sharding import RowShards
from paceline.comm.communicator import Group
from paceline.comm.fsdp_reduce_scatter import FsdpReduceScatter
from paceline.comm.gradient_buckets import Buckets
from paceline.compute.blocks import blocks_of
from paceline.compute.cpu_offload import CpuOffloadedParams
from paceline.compute.state_dict import own_of

PLANS = {
    "data": (1, ""),
    "data, 3 workers": (3, ""),
    "shard=2 zero=1": (2, "shard=2 zero=1"),
    "shard=3 zero=1": (3, "shard=3 zero=1"),
    "data=2 shard=2 zero=1": (4, "data=2 shard=2 zero=1"),
    "shard=2 zero=2": (2, "shard=2 zero=2"),
    "shard=3": (3, "shard=3"),
    "data=2 shard=2": (4, "data=2 shard=2"),
    "shard=2 offload=cpu": (2, "shard=2 offload=cpu"),
}
BODY = (
    "from pathlib import Path\n"
    "class Heat(nn.Module):\n"
    "    def __init__(self):\n"
    "        super().__init__()\n"
    "        self.by = nn.Parameter(torch.tensor(1.5))\n"
    "    def forward(self, x):\n"
    "        return x / self.by\n"
    "def model(): return nn.Sequential(nn.Linear(10, 7), nn.ReLU(), nn.Linear(7, 2), Heat())\n"
    "t = paceline.Trainer(\n"
    "    model, cross_entropy, lambda params: torch.optim.AdamW(params, lr=0.01), global_batch=24, clip_norm=0.05,\n"
    "    forward=lambda model, batch: model(batch[0].float()))\n"
    "losses = [r.loss for r in t.steps(data, count=10)]\n"
    "t.export('out.safetensors')\n"
    "if t.main: Path('losses').write_text(repr(losses))\n"
)


def train(folder: Path, workers: int, words: str, *options: str) -> None:
    """Ten steps with `exact`, or as many as there are until the run that the options stop."""
    train_basics(folder, BODY, workers, "--max-restarts", "0", "--plan", f"exact {words}".strip(), *options)


@pytest.mark.slow
@pytest.mark.parametrize("chain", [[*PLANS], [*PLANS][::-1]], ids=["there", "and back"])
def test_exact_shards_resume_each_others_checkpoints(
    chain: list[str], tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    """Each plan makes a step of what the one before it has saved, and the last plan the rest."""
    one = once(tmp_path_factory, "exact steps of one worker", lambda folder: train(folder, *PLANS["data"]))
    for steps, plan in enumerate(chain[:-1], 1):
        train(tmp_path, *PLANS[plan], "--steps", str(steps))
        assert find_checkpoint(tmp_path / "out", print).step == steps
    train(tmp_path, *PLANS[chain[-1]])
    assert (tmp_path / "out.safetensors").read_bytes() == (one / "out.safetensors").read_bytes()


def test_rows_are_sharded_as_torch_chunk_cuts() -> None:
    """As torch.chunk cuts; every row is somebody's."""
    for length in range(1, 20):
        for count in range(1, 8):
            cuts = [RowShards(count).rows(length, place) for place in range(count)]
            chunks = [part.tolist() for part in torch.arange(length).chunk(count)]
            assert [list(rows) for rows in cuts if rows] == chunks
            assert [row for rows in cuts for row in rows] == list(range(length))


@given(st.data())
def test_exact_squares_do_not_depend_on_shards(data: st.DataObject) -> None:
    shapes = data.draw(st.lists(st.sampled_from([(), (1,), (7,), (3, 5), (40, 9)]), min_size=1, max_size=4))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    scales = data.draw(st.lists(st.integers(-30, 30), min_size=len(shapes), max_size=len(shapes)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1 << 30)))
    grads = [
        torch.randn(shape, generator=generator, dtype=dtype) * 2.0**scale
        for shape, scale in zip(shapes, scales, strict=True)
    ]

    def squares(shards: RowShards) -> torch.Tensor:
        whole = [nn.Parameter(torch.zeros_like(grad)) for grad in grads]
        own = [*own_of(dict(enumerate(whole)), {}, shards)[0].values()]
        buckets = Buckets(whole, shards=shards, local_params=own, exact=True)
        buckets.exact.largest = [float(grad.abs().max()) for grad in grads]
        for param, grad in zip(own, grads, strict=True):
            param.grad = shards.of(grad, shards.me).view(param.shape).clone()
        return buckets.squares(micro_batches=8)

    alone = squares(RowShards(1, 0))
    for count in (2, 3):
        assert torch.equal(sum(squares(RowShards(count, place)) for place in range(count)), alone)
    true = exact_sum([x * x for grad in grads for x in grad.double().reshape(-1).tolist()])
    assert exact_sum(alone.tolist()) == pytest.approx(true, rel=1e-12)


def test_reduce_scatter_keeps_dtypes_apart() -> None:
    """0.1 is another number in each."""
    own = [nn.Parameter(torch.zeros(3, dtype=dtype)) for dtype in (torch.float32, torch.float64)]
    group = Group(World())
    staging = FsdpReduceScatter(Buckets(own, hooks=False), [param.shape for param in own], [[0], [1]], group)
    staging.rebind(group.allocate)
    staging.begin(lambda bucket: None)
    staging.begin_backward(last=True)
    for number, param in enumerate(own):
        whole = nn.Parameter(torch.zeros_like(param))
        whole.grad = torch.full_like(param, 0.1)
        staging.land(number, whole)
    staging.end_backward()
    staging.flush()
    assert [param.grad.tolist() for param in own] == [torch.full_like(param, 0.1).tolist() for param in own]


@given(st.data())
def test_reduce_scatter_sums_each_gradient_once(data: st.DataObject) -> None:
    """Whatever comes, in any order or not at all, the sums are those of all micro-batches that are not blank."""
    sizes = data.draw(st.lists(st.integers(1, 2), min_size=1, max_size=8))
    exact = data.draw(st.booleans())
    own = [nn.Parameter(torch.zeros(size)) for size in sizes]
    cuts = sorted(data.draw(st.sets(st.integers(1, len(sizes)))) | {0, len(sizes)})
    blocks = [range(a, b) for a, b in itertools.pairwise(cuts)]
    home = Buckets(own, exact=exact, hooks=False)
    if exact:
        home.exact.largest = [8.0] * len(sizes)
    group = Group(World())
    staging = FsdpReduceScatter(home, [param.shape for param in own], blocks, group)
    staging.rebind(group.allocate)
    handed: list[int] = []
    backwards = data.draw(st.lists(st.booleans(), min_size=1, max_size=4))  # whether it is blank
    expected, used = [torch.zeros(size) for size in sizes], set()
    staging.begin(lambda bucket: handed.append(bucket.index), micro_batches=4)
    for place, blank in enumerate(backwards):
        called = [block for block in blocks if data.draw(st.booleans()) for _ in range(data.draw(st.integers(1, 2)))]
        for block in called:
            staging.call(block[0])
        staging.begin_backward(last=place + 1 == len(backwards), is_dummy=blank)
        order = data.draw(st.permutations(range(len(sizes))))
        landing = order[: data.draw(st.integers(0, len(sizes)))]
        for turn, number in enumerate(landing):
            for block in [block for block in called if not set(block) & set(landing[turn:])]:
                called.remove(block)
                staging.leave(block[0])
            param = nn.Parameter(torch.zeros(sizes[number]))
            param.grad = torch.full((sizes[number],), float(number + place + 1))
            if blank:
                param.grad.fill_(float("nan"))
            else:
                expected[number] += param.grad
                used.add(number)
            staging.land(number, param)
            assert param.grad is None
        assert not handed or place + 1 == len(backwards)
        staging.end_backward()
    assert staging.flush() == set(range(len(sizes))) - used
    if exact:
        assert home.exact.resolve(home.exact.maxima)
    assert handed == list(range(len(home.buckets)))
    assert all(torch.equal(param.grad, want) for param, want in zip(own, expected, strict=True))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))


def test_fsdp_blocks_are_the_modules_that_repeat() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList([Layer(), Layer(), Layer()])
    model.heads = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.LayerNorm(2)})
    model.odd = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Conv1d(1, 1, 1))
    assert list(blocks_of(model)) == ["layers.0", "layers.1", "layers.2"]
    model.tied = model.layers[1].inner[0]
    assert list(blocks_of(model)) == ["layers.0", "layers.2"]
    assert blocks_of(nn.Linear(2, 2)) == {}
    lists = nn.ModuleList(
        [nn.ModuleList([Layer(), nn.LayerNorm(2)]), nn.ModuleDict({"a": Layer(), "b": nn.ModuleList()})]
    )
    assert list(blocks_of(nn.ModuleDict({"stages": lists}))) == ["stages.0.0", "stages.1.a"]


# Each in a trainer of its own, in one run.
REFUSED = {
    "torch.distributed": "make(model=other_group() or net)",
    "parameters outside of the forward": "trained(make(loss=decayed))",
    "fused": "make(plan='shard=2 exact', optimizer=lambda p: torch.optim.SGD(p, lr=1, fused=True))",
}
TRIES = f"""
import json
from paceline.errors import UsageError
def make(model=net, loss=cross_entropy, optimizer=torch.optim.SGD, plan="shard=2"):
    trainers.append(paceline.Trainer(model, loss, optimizer, global_batch=24, plan=plan))
    return trainers[-1]
def trained(t):
    for r in t.steps(data, count=1): pass
def decayed(output, batch):
    return F.cross_entropy(output, batch[1]) + sum(p.square().sum() for p in trainers[-1].model.parameters())
def other_group():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
trainers = []
def attempt(call):
    try:
        eval(call)
    except UsageError as error:
        return f"UsageError: {{error}}"
    finally:
        if "other_group" in call: torch.distributed.destroy_process_group()
texts = {{name: attempt(call) for name, call in {REFUSED!r}.items()}}
if paceline.join().rank == 0: open("texts.json", "w").write(json.dumps(texts))
"""


def test_shards_refuse_what_they_cannot_train(tmp_path: Path, golden: Callable[[str, str], None]) -> None:
    train_basics(tmp_path, TRIES, 2, "--max-restarts", "0")
    texts = json.loads((tmp_path / "texts.json").read_text())
    assert texts.keys() == REFUSED.keys()
    for name, text in texts.items():
        golden(name, text)
    told = [str(entry.get("what")) for entry in journal(tmp_path / "out", "decision")]
    assert "parameters are gathered in 2 blocks: 0 to 2 (Linear)" in told


@pytest.mark.slow
@pytest.mark.parametrize("zero", [2, 3])
def test_exact_bytes_of_fsdp_with_workers_that_are_late(zero: int, tmp_path: Path) -> None:
    """Their gradients travel in memory that all use in turn: one worker is late here, another one there."""
    body = (
        "import random, time\n"
        "class Late(nn.Linear):\n"
        "    def forward(self, x):\n"
        "        x.register_hook(lambda grad: time.sleep(clock.choice([0, 0, 0.004]))) if x.requires_grad else None\n"
        "        return super().forward(x)\n"
        "clock = random.Random(paceline.join().rank)\n"
        "def model(): return nn.Sequential(*[Late(16, 16) for _ in range(9)], nn.Linear(16, 2))\n"
        "t = paceline.Trainer(model, cross_entropy, lambda params: torch.optim.SGD(params, lr=0.1), global_batch=24,\n"
        "    forward=lambda model, batch: model(F.pad(batch[0].float(), (0, 6))))\n"
        "for r in t.steps(data, count=6): pass\n"
        "t.export('out.safetensors')\n"
    )
    equal_bytes(tmp_path, body, 2, f"shard=2 zero={zero}")


@pytest.mark.slow
def test_journal_has_the_memory_of_each_shard_level(tmp_path: Path) -> None:
    body = (
        "def model(): return nn.Sequential(*[nn.Linear(300, 300) for _ in range(8)])\n"
        "t = paceline.Trainer(model, lambda out, b: out.square().mean(), lambda p: torch.optim.AdamW(p, lr=1e-3),\n"
        "    global_batch=24, forward=lambda model, batch: model(F.pad(batch[0].float(), (0, 290))))\n"
        "for r in t.steps(data, count=2): pass\n"
    )
    layer, layers = 4 * 300 * 301, 8
    whole, part = layers * layer, layers * layer // 2
    wanted = {
        "data=2": (whole, whole, 2 * whole),
        "shard=2 zero=1": (whole, whole, 2 * part),
        "shard=2 zero=2": (part + whole, part + 2 * layer, 2 * part),
        "shard=2 zero=3": (part + layer, part + 2 * layer, 2 * part),
    }
    for plan, bytes_ in wanted.items():
        folder = tmp_path / plan
        folder.mkdir()
        train_basics(folder, body, 2, "--max-restarts", "0", "--plan", plan)
        (told,) = journal(folder / "out", "memory")
        assert [told[name] for name in ("parameters", "gradients", "optimizer")] == pytest.approx(bytes_, rel=0.02)
        assert told["process"] > sum(bytes_)


def test_offload_follows_weights_that_a_script_changes() -> None:
    """As plain training, with weights that are changed by hand between two steps."""
    found = []
    for hosted in (False, True):
        torch.manual_seed(0)
        rows = [nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(5))]
        there = CpuOffloadedParams(rows) if hosted else None
        assert there is None or all(map(torch.equal, rows, there.copies))  # optimizers may keep what they begin with
        optimizer = torch.optim.AdamW(rows if there is None else there.copies, lr=0.1)
        for step in range(4):
            for number, row in enumerate(rows):
                row.grad = None if (step, number) == (2, 1) else torch.full_like(row, step + 1.0)
            with nullcontext() if there is None else there.update():
                optimizer.step()
            if step == 1:
                with torch.no_grad():
                    rows[0].clamp_(-0.5, 0.5)
            if step == 2:
                rows[1].data.clamp_(-0.5, 0.5)
        found.append([row.detach().clone() for row in rows])
    assert all(torch.equal(plain, kept) for plain, kept in zip(*found, strict=True))
