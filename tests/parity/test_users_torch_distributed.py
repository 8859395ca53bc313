"""What users' code finds of torch.distributed under every plan: no group, unless it makes one itself; and iterable
datasets that divide themselves among the workers.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from launching import train_basics, without_an_agent
from networks import hosts as hosts
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy

PLANS = [(1, ""), (2, ""), (3, ""), (2, "shard=2 zero=2"), (2, "shard=2 zero=3"), (3, "shard=3 zero=3")]
FAST = [(1, ""), (2, "shard=2 zero=3")]

# Everything that asks for a rank does as libraries do: a dataset that divides itself, a loss that sums its own count,
# a metric that is gathered on whoever computes it.
LIBRARIES = """
import torch.distributed as dist
seen = set()
def look(where):
    found = dist.is_available() and dist.is_initialized()
    seen.add(where)
    assert not found, where
    return found
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        look("constructor")
        self.layers = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 2)).double()
        with torch.no_grad():
            for number, p in enumerate(self.layers.parameters()):
                p.copy_(torch.linspace(-0.5, 0.5, p.numel()).sin().view(p.shape) / (number + 1))
    def forward(self, x):
        look("forward")
        return self.layers(x)
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        rank, size = (dist.get_rank(), dist.get_world_size()) if look("dataset") else (0, 1)
        for row in range(rank, len(data), size):
            yield data[row]
def loss(output, batch):
    count = torch.tensor(len(output))
    if look("loss"):
        dist.all_reduce(count)
    output.register_hook(lambda grad: look("backward") or grad)
    return F.cross_entropy(output, batch[1], reduction="sum"), count
def collate(rows):
    look("collate")
    return torch.utils.data.default_collate(rows)
class Optimizer(torch.optim.SGD):
    def step(self, closure=None):
        look("optimizer")
        return super().step(closure)
def metric(output, batch):
    look("metric")
    return {"n": (len(output), 1)}
t = paceline.Trainer(Net, loss, lambda params: look("making") or Optimizer(params, lr=0.1), 24)
for report in t.steps(Stream(), epochs=2, collate=collate):
    look("body")
    if t.main and look("main"):
        dist.barrier()
assert t.evaluate(Stream(), metric, collate=collate)["n"] == 96
t.predict(Stream(), path="outputs.npy")
t.export("out.safetensors")
assert len(seen) == 10 + t.main, sorted(seen)
"""


def oracle() -> dict[str, torch.Tensor]:
    """The same training in plain PyTorch."""
    x = torch.randn(96, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = (x.sum(1) > 0).long()
    model = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 2)).double()
    with torch.no_grad():
        for number, p in enumerate(model.parameters()):
            p.copy_(torch.linspace(-0.5, 0.5, p.numel()).sin().view(p.shape) / (number + 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(8):
        rows = slice(step % 4 * 24, step % 4 * 24 + 24)
        optimizer.zero_grad()
        cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    return {f"layers.{name}": value for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    ("workers", "plan"), [pytest.param(*one, marks=[] if one in FAST else pytest.mark.slow) for one in PLANS]
)
def test_torch_distributed_is_not_initialized_in_users_code(workers: int, plan: str, tmp_path: Path) -> None:
    train_basics(tmp_path, LIBRARIES, workers, *(("--plan", plan) if plan else ()))
    found, expected = load_file(tmp_path / "out.safetensors"), oracle()
    apart = torch.cat([(found[name] - value).flatten() for name, value in expected.items()])
    assert apart.norm() <= 1e-12 * torch.cat([value.flatten() for value in expected.values()]).norm()


HINT = (
    "hint: Paceline's workers have no torch.distributed process group: remove collectives, ranks and sizes from "
    "losses, forwards and datasets; return (sum, count) from a loss or metric, and Paceline adds it over all workers; "
    "elsewhere call paceline.join().all_reduce(tensor)"
)
CALLS = {
    "loss": "make(lambda o, b: (torch.distributed.all_reduce(o), o)[1].sum()).steps(data)",
    "loader": "make().steps(Rows(), loader={'num_workers': 1})",
    "stream": "make().steps(row for row in Rows())",
}


@pytest.mark.parametrize(
    ("case", "plan"),
    [("loss", "shard=2 zero=3"), *(pytest.param(case, "data=2", marks=pytest.mark.slow) for case in CALLS)],
)
def test_hint_for_a_collective_of_torch_distributed(case: str, plan: str, tmp_path: Path) -> None:
    rows = (
        "class Rows:\n"
        "    def __len__(self):\n"
        "        return 96\n"
        "    def __getitem__(self, row):\n"
        "        return data[row + torch.distributed.get_rank()]\n"
    )
    done = train_basics(tmp_path, f"{rows}list({CALLS[case]})\n", 2, "--plan", plan, code=1)
    assert HINT in " ".join(done.stderr.split())


HEAD = "import os\nfrom basics import *\nrank, size = int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])\n"
STREAM = """
class Stream(torch.utils.data.IterableDataset):
    def __init__(self, rows):
        self.rows = rows
    def __iter__(self):
        return (data[row] for row in self.rows)
"""
WHOLE = (
    "yield the same rows in the same order on every worker: Paceline distributes them, so an iterable dataset must "
    "not split itself by rank, RANK or WORLD_SIZE"
)
DIVIDED = {
    "first rows": (
        "list(make().steps(Stream(range(rank % 2, 96, 2))))",
        "workers disagree about the dataset: row 0 that it yields differs between worker 1 and {others}",
    ),
    "a later epoch": (  # on hosts of their own, as the next one: of a host, one worker reads
        "class Later(Stream):\n"
        "    def set_epoch(self, epoch):\n"
        "        self.rows = range(96) if not epoch or rank != 1 else range(95, -1, -1)\n"
        "list(make().steps(Later(None), epochs=2))",
        "workers disagree about the dataset: row 96 that it yields differs between worker 1 and {others}",
    ),
    "a shorter end": (
        "list(make().steps(Stream(range(95 if rank == 1 else 96))))",
        "workers disagree about the dataset, which yields for this global batch "
        "24 rows on {others} and 23 rows on worker 1",
    ),
    "evaluate": (
        "make().evaluate(Stream(range(rank % 2, 96, 2)), lambda o, b: {'n': (len(o), 1)})",
        "workers disagree about the dataset of evaluate(): row 0 differs on worker 1",
    ),
    "length of evaluate": (
        "make().evaluate(Stream(range(90 if rank == 1 else 96)), lambda o, b: {'n': (len(o), 1)})",
        "workers disagree about the dataset of evaluate(), which yields 96 rows on {others} and 90 rows on worker 1",
    ),
    "predict": (
        "list(make().predict(Stream(range(rank % 2, 96, 2))))",
        "workers disagree about the dataset of predict(): row 0 differs on worker 1",
    ),
    "length of predict": (
        "list(make().predict(Stream(range(90 if rank == 1 else 96))))",
        "workers disagree about the dataset of predict(), which yields ",
    ),
}


APART = ("a later epoch", "a shorter end")
MARKS: dict[str, list[pytest.MarkDecorator]] = {"first rows": []}
MARKS |= {case: [pytest.mark.slow, pytest.mark.root] for case in APART}


def on_hosts(request: pytest.FixtureRequest, workers: int, script: Path) -> list[tuple[int, str]]:
    """The exit code of each of so many workers, and what it said; each is on a host of its own."""
    network = request.getfixturevalue("hosts")(workers)
    network.start([1] * workers, script)
    return [(worker.code, worker.stderr) for worker in network.end()]


@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", [pytest.param(case, marks=MARKS.get(case, [pytest.mark.slow])) for case in DIVIDED])
def test_an_iterable_dataset_that_divides_itself_is_refused(
    case: str, workers: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    body, told = DIVIDED[case]
    (script := tmp_path / "train.py").write_text(HEAD + STREAM + body)
    others = "workers 0, 2" if workers == 3 else "worker 0"
    if case in APART:
        ended = on_hosts(request, workers, script)
    else:
        ended = without_an_agent(*[script] * workers, cwd=tmp_path)
    for code, stderr in ended:
        assert code == 1
        assert f"DatasetError: {told.format(others=others)}" in stderr
        assert f"; {WHOLE}\n" in stderr


@pytest.mark.root
@pytest.mark.slow
def test_an_iterable_dataset_that_ends_earlier_on_a_host_is_named(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """After whole global batches: nothing was read of which the numbers could be compared."""
    body = "list(make().steps(Stream(range(72 if rank == 1 else 96))))"
    (script := tmp_path / "train.py").write_text(HEAD + STREAM + body)
    ended = on_hosts(request, 2, script)
    assert [code for code, _ in ended] == [1, 1]
    assert "CollectiveMismatchError" in ended[0][1]
    assert "worker 1 is in the end of the iterable dataset of steps()" in ended[0][1]


def test_iterable_dataset_with_own_random_numbers_is_reported_once(tmp_path: Path) -> None:
    body = STREAM + (
        "import random\n"
        "own = random.Random()\n"
        "class Noisy(Stream):\n"
        "    def __iter__(self):\n"
        "        return ((data[row][0] + own.random(), data[row][1]) for row in self.rows)\n"
        "list(make().steps(Noisy(range(96)), epochs=2))\n"
    )
    told = (
        "rows of the iterable dataset differed when read twice, because of random numbers other than those of torch,"
        " random and numpy; they cannot be compared between workers; seed these generators equally on every worker,"
        " or rows may be used twice\n"
    )
    assert train_basics(tmp_path, body, 2).stderr.count(told) == 1


OWN_GROUP = """
import torch.distributed as dist
t = make(plan="shard=2 zero=3")
before = not dist.is_initialized()
dist.init_process_group("paceline", store=dist.FileStore("store", 2), rank=rank, world_size=2)
for report in t.steps(data, count=4):
    total = torch.ones(3)
    dist.all_reduce(total)
    assert before and dist.get_world_size() == 2 and total.tolist() == [2.0] * 3
    sum(p.square().sum() for p in t.model.parameters()).full_tensor()
t.export("out.safetensors")
dist.destroy_process_group()
"""


def test_process_group_of_the_script_beside_that_of_the_plan(tmp_path: Path) -> None:
    head = "import os\nrank = int(os.environ['PACELINE_RANK'])\n"
    train_basics(tmp_path, head + OWN_GROUP, 2, "--max-restarts", "0")


INSIDE = """
import os
import torch.distributed as dist
rank = int(os.environ["PACELINE_RANK"])
dist.init_process_group({backend!r}, store=dist.FileStore("store", 2), rank=rank, world_size=2)
def loss(output, batch):
    assert dist.get_rank() == rank and dist.get_world_size() == 2  # which may be asked
    count = torch.tensor(len(output))
    {in_loss}
    return F.cross_entropy(output, batch[1], reduction="sum"), count
class Rows:
    def __len__(self):
        return 96
    def __getitem__(self, row):
        {in_dataset}
        return data[row]
for report in make(loss).steps(Rows(), count=2, loader={{"num_workers": {workers}}}):
    dist.all_reduce(torch.ones(1))
"""
ADVICE = (
    "return (sum, count) from the loss, and Paceline adds it over all workers; for a loss over all rows of the global "
    'batch, set loss_over="batch"; give the dataset all rows on every worker'
)
REFUSED = {
    "loss": ({"in_loss": "dist.all_reduce(count)"}, "the loss, the forward or a hook calls allreduce()"),
    "dataset": ({"in_dataset": "dist.barrier()"}, "the dataset or collate calls barrier()"),
    "loader": ({"in_dataset": "dist.barrier()", "workers": 1}, "the dataset or collate calls barrier()"),
}


@pytest.mark.parametrize(
    ("case", "backend"),
    [("loss", "gloo"), *(pytest.param(case, "paceline", marks=pytest.mark.slow) for case in REFUSED)],
)
def test_collectives_in_a_loss_or_dataset_are_refused(case: str, backend: str, tmp_path: Path) -> None:
    given, what = REFUSED[case]
    body = INSIDE.format(**{"backend": backend, "in_loss": "pass", "in_dataset": "pass", "workers": 0, **given})
    done = train_basics(tmp_path, body, 2, "--max-restarts", "0", code=None)
    assert done.returncode in (1, 2)
    assert f"UsageError: {what} of torch.distributed; {ADVICE}" in " ".join(done.stderr.split())


ROWS = """
import random
from paceline.errors import DatasetError
team = paceline.join()
class Loaded(torch.utils.data.Dataset):
    loads = 0
    def __init__(self, rows): self.rows = rows
    def __len__(self): return 96
    def __getitem__(self, index):
        Loaded.loads += 1
        return self.rows[index]
trainer = make()
list(trainer.steps(data))
metric = lambda output, batch: {"n": (len(output), len(output))}
same = Loaded(data)
for turn in range(2):
    before = Loaded.loads
    trainer.evaluate(same, metric)
    if team.rank == 0: print("loads", Loaded.loads - before)
other = TensorDataset(x + random.Random(team.rank).random(), data.tensors[1])
for call in (trainer.evaluate, lambda rows, metric: list(trainer.predict(rows))):
    try: call(Loaded(other), metric)
    except DatasetError as error: print(error)
    else: raise AssertionError(f"worker {team.rank} does not refuse it")
"""


@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_dataset_rows_are_compared_once_in_evaluate_and_predict(workers: int, tmp_path: Path) -> None:
    """And those that differ are named on every worker."""
    text = train_basics(tmp_path, ROWS, workers, "--max-restarts", "0").stdout
    first, second = (int(line.split()[-1]) for line in text.splitlines() if line.startswith("loads"))
    assert first > second
    wrong = "worker 1" if workers == 2 else "workers 1-2"
    for call in ("evaluate", "predict"):
        error = (
            f"row 0 of the dataset of {call}() differs between {wrong} and worker 0; use the same data in the"
            " same order on all workers: sort file names, and seed random splits and generated data"
        )
        assert error in text.splitlines()
