"""Sharded training beside `data`: the bits with `exact`, checkpoints from and to every plan, and what is refused."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from agents import journal
from checkpoints import find_checkpoint
from hypothesis import given
from hypothesis import strategies as st
from launching import SHARDED, equal_bytes, train_basics
from safetensors.torch import load_file
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
UNEQUAL = {2: "3,1", 3: "3,0,2", 4: "1,0,2,1"}
TEAMS = [(*team, "") for team in SHARDED] + [(*team, UNEQUAL[team[0]]) for team in SHARDED if team[0] in UNEQUAL]
TEAMS += [(2, "shard=2 offload=cpu", ""), (4, "shard=2 zero=1 offload=cpu", UNEQUAL[4])]
QUICK = (4, "shard=2 zero=3", UNEQUAL[4])


def train(folder: Path, workers: int, words: str, *options: str) -> None:
    """Ten steps with `exact`, or as many as there are until the run that the options stop."""
    train_basics(folder, BODY, workers, "--max-restarts", "0", "--plan", f"exact {words}".strip(), *options)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    train(folder, *PLANS["data"])
    return folder


@pytest.mark.parametrize(
    ("workers", "words", "shares"),
    [pytest.param(*team, marks=[] if team == QUICK else pytest.mark.slow) for team in TEAMS],
)
def test_exact_has_the_bytes_of_one_worker(
    workers: int, words: str, shares: str, undisturbed: Path, tmp_path: Path
) -> None:
    train(tmp_path, workers, words, *(["--shares", shares] if shares else []))
    for name in ("out.safetensors", "losses"):
        assert (tmp_path / name).read_bytes() == (undisturbed / name).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("then", PLANS)
@pytest.mark.parametrize("first", PLANS)
def test_what_any_plan_saved_any_plan_resumes(first: str, then: str, undisturbed: Path, tmp_path: Path) -> None:
    train(tmp_path, *PLANS[first], "--steps", "5")
    assert find_checkpoint(tmp_path / "out", print).step == 5
    train(tmp_path, *PLANS[then])
    assert (tmp_path / "out.safetensors").read_bytes() == (undisturbed / "out.safetensors").read_bytes()


def test_who_has_which_rows() -> None:
    """As torch.chunk cuts; every row is somebody's."""
    for length in range(1, 20):
        for count in range(1, 8):
            cuts = [RowShards(count).rows(length, place) for place in range(count)]
            chunks = [part.tolist() for part in torch.arange(length).chunk(count)]
            assert [list(rows) for rows in cuts if rows] == chunks
            assert [row for rows in cuts for row in rows] == list(range(length))


@given(st.data())
def test_the_exact_squares_do_not_depend_on_who_has_which_rows(data: st.DataObject) -> None:
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


def test_blocks_of_one_shape_and_two_dtypes_travel_in_their_own() -> None:
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
def test_staged_gradients_are_summed_and_handed_on_once(data: st.DataObject) -> None:
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


def test_blocks_are_what_repeats() -> None:
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


REFUSED = {
    "fused": (
        "plan='shard=2 exact', optimizer=lambda p: torch.optim.SGD(p, lr=1, fused=True), model=net",
        "UsageError: SGD runs fused and would round the rows of a shard other than in the whole; "
        "leave fused out, or exact",
    ),
    "torch.distributed": (
        "plan='shard=2', optimizer=lambda p: (torch.optim.SGD(p, lr=1)), model=(other_group() or net)",
        "UsageError: the script has initialised torch.distributed, whose default group the plan needs; "
        "leave init_process_group out, or say zero=1",
    ),
}


def test_parameters_that_are_not_gathered_are_told(tmp_path: Path) -> None:
    body = (
        "def decayed(output, batch):\n"
        "    return F.cross_entropy(output, batch[1]) + sum(p.square().sum() for p in t.model.parameters())\n"
        "t = make(loss=decayed)\n"
        "for r in t.steps(data, count=1): pass\n"
    )
    done = train_basics(tmp_path, body, 2, "--max-restarts", "0", "--plan", "shard=2", code=2)
    said = (
        "UsageError: the forward or the loss uses parameters of the model that are in pieces; "
        "use them within model(...), where they are gathered, or say zero=2"
    )
    assert said in " ".join(done.stderr.split()), done.stderr


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_sharded_is_refused(case: str, tmp_path: Path) -> None:
    trainer, said = REFUSED[case]
    body = (
        "def other_group():\n"
        "    store = torch.distributed.HashStore()\n"
        "    torch.distributed.init_process_group('gloo', store=store, rank=0, world_size=1)\n"
        f"t = paceline.Trainer(loss=cross_entropy, global_batch=24, {trainer})\n"
    )
    done = train_basics(tmp_path, body, 2, "--max-restarts", "0", code=2)
    assert said in " ".join(done.stderr.split()), done.stderr


def test_the_blocks_are_told(tmp_path: Path) -> None:
    body = BODY.replace("count=10", "count=1")
    done = train_basics(tmp_path, body, 2, "--max-restarts", "0", "--plan", "shard=2")
    said = "parameters are gathered in 3 blocks: 0 to 2 (Linear), and the rest"
    assert said in " ".join(done.stderr.split())
    assert said in [entry.get("what") for entry in journal(tmp_path / "out", "decision")]


@pytest.mark.slow
@pytest.mark.parametrize("zero", [2, 3])
def test_blocks_alike_whose_workers_are_never_at_the_same_place(zero: int, tmp_path: Path) -> None:
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
def test_the_journal_tells_what_a_worker_holds(tmp_path: Path) -> None:
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


def test_rows_in_the_hosts_memory_follow_what_a_script_does_to_them() -> None:
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


@pytest.mark.parametrize(
    ("workers", "plan"),
    [
        (2, "shard=2"),
        *[
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [(3, "shard=3 zero=2"), (4, "shard=2"), (2, "shard=2 zero=1")]
        ],
    ],
)
def test_parameters_without_dimensions(workers: int, plan: str, tmp_path: Path) -> None:
    """One in a block, one in the rest that is used under two names, one that gets no gradient."""
    body = (
        "class Scaled(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.scale, self.inner = nn.Parameter(torch.tensor(1.5)), nn.Linear(10, 10)\n"
        "    def forward(self, x):\n"
        "        return x + self.scale * self.inner(x).relu()\n"
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.blocks = nn.Sequential(Scaled(), Scaled())\n"
        "        self.head, self.heat = nn.Linear(10, 2), nn.Parameter(torch.tensor(0.7))\n"
        "        self.unused, self.tied = nn.Parameter(torch.tensor(3.0)), nn.Module()\n"
        "        self.tied.heat = self.heat\n"
        "    def forward(self, x):\n"
        "        return self.head(self.blocks(x)) / self.heat + self.tied.heat * x[:, :2]\n"
        "optimizer = lambda p: torch.optim.AdamW(p, lr=0.01)\n"
        "t = paceline.Trainer(lambda: Model().double(), cross_entropy, optimizer, global_batch=24, clip_norm=1.0)\n"
        "for r in t.steps(data, count=6): pass\n"
        "t.export('out.safetensors')\n"
    )
    equal_bytes(tmp_path, body, workers, plan)
    trained = load_file(tmp_path / "one" / "out.safetensors")
    assert trained["heat"] != 0.7
    assert trained["unused"] == 3
