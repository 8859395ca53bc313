"""`exact`: the same bits on any number of workers, whatever their shares. Those of every plan of the parity table are
compared in test_plans_models_workers.py.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from launching import SCRIPTS, TRANSFORMERS, paceline
from paths import EXAMPLES
from torch.nn import Parameter

from paceline.base.batching import VectorLayout, exact_sum
from paceline.comm.exact_sums import ExactSums
from paceline.comm.gradient_buckets import Buckets

TEAMS = [
    ["--workers", "1"],
    ["--workers", "2"],
    ["--workers", "3"],
    ["--workers", "5"],
    ["--workers", "2", "--shares", "5,3"],
    ["--workers", "3", "--shares", "1,0,6"],
]
CASES = ["mlp", "dropout", "batchnorm", "partly", "tokens"]
# Of the same cut, which decides the order of sums inside of layers.
CUT = ["dropout", "wide", "llama", "llama, tied"]
CUT_TEAMS = {
    "tensor=2": [("2", "1,1"), ("4", "1,1,2,2")],
    "micro=1 tensor=2": [("2", "1,1"), ("6", "3,3,0,0,1,1")],
    "shard=2 zero=1 tensor=2": [("4", "1,1,1,1"), ("8", "1,1,0,0,2,2,1,1")],
    "pipeline=2": [("2", "1,1"), ("6", "3,3,0,0,1,1")],
    "pipeline=2 virtual=2 schedule=zb": [("2", "1,1"), ("4", "1,1,2,2")],
    "pipeline=2 shard=2 zero=3": [("4", "1,1,1,1"), ("8", "1,1,0,0,2,2,1,1")],
    "context=2": [("2", "1,1"), ("6", "3,3,0,0,1,1")],
    "context=2 tensor=2 micro=1": [("4", "1,1,1,1"), ("8", "1,1,1,1,2,2,2,2")],
}
STACKS = ["short", "gpt", "tied gpt", "one key head"]  # of blocks, with attention


def plain(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros(numel, dtype=dtype, device=device)


def summed(grads: list[torch.Tensor], shares: list[list[int]], largest: float) -> tuple[torch.Tensor, bool]:
    """The sum of micro-batches' gradients, each worker's share in buckets of its own, whose wires are then added."""
    workers, wires = [], []
    for share in shares:
        param = Parameter(torch.zeros_like(grads[0]))
        buckets = Buckets([param], allocate=plain, exact=True)
        buckets.exact.largest = [largest]
        buckets.begin(lambda bucket: None, len(grads))
        for number in share:
            (param * grads[number]).sum().backward()
        buckets.flush()
        workers.append(buckets)
        wires.append(buckets.buckets[0].flat.clone())
    maxima = torch.stack([buckets.exact.maxima for buckets in workers]).amax(0)
    last = workers[-1]
    last.buckets[0].flat.copy_(torch.stack(wires).sum(0))
    fits = last.exact.resolve(maxima)
    return last.sums[0].clone(), fits


floats = st.floats(-1e6, 1e6, width=32)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(floats, min_size=3, max_size=3), min_size=1, max_size=9), st.integers(0, 2**32), st.booleans())
def test_exact_sum_does_not_depend_on_workers_or_order(rows, seed, double):
    grads = [torch.tensor(row, dtype=torch.float64 if double else torch.float32) for row in rows]
    largest = max(float(grad.abs().max()) for grad in grads)
    chance = random.Random(seed)
    order = list(range(len(grads)))
    alone, fits = summed(grads, [order], largest)
    assert fits
    chance.shuffle(order)
    cut = chance.randint(0, len(order))
    apart, fits = summed(grads, [order[:cut], order[cut:]], largest)
    assert fits
    assert torch.equal(alone, apart)
    for place in range(3):
        exactly = math.fsum(float(grad[place]) for grad in grads)
        # Float32 keeps all its digits down to a millionth of the largest; float64 is carried as two numbers.
        grid = len(grads) * largest * 2**-44
        assert float(alone[place]) == pytest.approx(exactly, rel=2**-53 if double else 2**-24, abs=grid)


def test_exact_grid_notices_a_larger_gradient_and_shrinks_slowly():
    grad = torch.tensor([1.0, -3.0])
    assert not summed([grad], [[0]], 0.0)[1]
    assert not summed([grad], [[0]], 3.0 / 33)[1]
    assert summed([grad], [[0]], 3.0 / 15)[1]
    sums = ExactSums([2])
    for maximum, expected in ((8.0, 8.0), (1.0, 4.0), (1.0, 2.0), (0.0, 2.0), (math.inf, 2.0), (1.0, 1.0)):
        sums.resolve(torch.tensor([maximum], dtype=torch.float64))
        assert sums.largest == [expected]


@given(st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=8), st.randoms())
def test_exact_losses_do_not_depend_on_workers_or_order(losses, chance):
    layout = VectorLayout(("right",), 2, 1)
    parts = [(number, loss, 2.0, {"right": (loss / 3, 1.0)}) for number, loss in enumerate(losses)]
    agreed = layout.unpack(layout.pack(0, 0.0, {}, set(), {}))
    whole = layout.exactly(agreed, layout.rows(parts, len(parts)))
    chance.shuffle(parts)
    cut = chance.randint(0, len(parts))
    rows = [layout.rows(share, len(parts)) for share in (parts[:cut], parts[cut:])]
    assert layout.exactly(agreed, [a + b for a, b in zip(*rows, strict=True)]) == whole
    assert whole.loss == math.fsum(losses)
    assert whole.count == 2 * len(losses)
    assert math.isnan(exact_sum([1.0, math.inf, -math.inf]))


def outcome(folder: Path, team: list[str], *words: str) -> tuple[bytes, object]:
    folder.mkdir()
    arguments, env = (folder / "out", *(words or CASES), "exact"), TRANSFORMERS if "llama" in words else {}
    paceline("run", *team, SCRIPTS / "contract.py", *arguments, cwd=folder, **env)
    return (folder / "out.safetensors").read_bytes(), json.loads((folder / "out.json").read_text())


@pytest.mark.slow
def test_exact_bits_on_any_number_of_workers_and_shares(tmp_path):
    outcomes = [outcome(tmp_path / str(number), team) for number, team in enumerate(TEAMS)]
    for team, found in zip(TEAMS, outcomes, strict=True):
        assert found == outcomes[0], team


@pytest.mark.slow
@pytest.mark.parametrize("plan", CUT_TEAMS)
def test_any_number_of_replicas_of_one_cut_has_the_same_bits(tmp_path: Path, plan: str) -> None:
    words = [*(STACKS if "pipeline" in plan or "context" in plan else CUT), *plan.split()]
    outcomes = [
        outcome(tmp_path / workers, ["--workers", workers, "--max-restarts", "0", "--shares", shares], *words)
        for workers, shares in CUT_TEAMS[plan]
    ]
    assert all(found == outcomes[0] for found in outcomes[1:])


def test_exact_stages_have_the_bits_of_one_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block computes what it does on one worker, in the same order."""
    monkeypatch.setenv("BLOCKS", "2")
    teams = [("1", []), ("2", ["pipeline=2"]), ("4", ["pipeline=2", "schedule=gpipe"])]
    outcomes = [outcome(tmp_path / workers, ["--workers", workers], "gpt", "short", *plan) for workers, plan in teams]
    assert all(found == outcomes[0] for found in outcomes[1:])


GROWS = """
import torch, paceline, sys
data = torch.utils.data.TensorDataset(torch.randn(64, 4, generator=torch.Generator().manual_seed(1)))
trainer = paceline.Trainer(
    lambda: torch.nn.Linear(4, 1), lambda o, b: o.square().mean() * (1e6 if trainer.steps_done == 5 else 1.0),
    lambda p: torch.optim.SGD(p, lr=1e-7), global_batch=16, plan="exact micro=2")
calls = 0
forward = trainer.model.forward
def counted(x):
    global calls
    calls += 1
    return forward(x)
trainer.model.forward = counted
for report in trainer.steps(data, count=10):
    if trainer.main:
        print(report.step, calls, report.loss.hex(), flush=True)
trainer.export(sys.argv[1])
"""


def test_exact_step_is_repeated_when_a_gradient_outgrows_its_grid(tmp_path):
    """The first step, which knows no grid yet, and the one whose loss is a million times larger."""
    (tmp_path / "grows.py").write_text(GROWS)
    found = []
    for workers, shares in (("1", "1"), ("2", "1,1")):  # said, or they follow what is measured
        done = paceline(
            "run", "--workers", workers, "--shares", shares, "grows.py", f"{workers}.safetensors", cwd=tmp_path
        )
        lines = [line.split() for line in done.stdout.splitlines() if line[:1].isdigit() and "0x" in line]
        share = 8 // int(workers)
        look = 6  # at the loss, once: one micro-batch again, two together and apart, and one in two parts
        assert [int(line[1]) for line in lines] == [look + share * n for n in (2, 3, 4, 5, 6, 8, 9, 10, 11, 12)]
        found.append(([line[2] for line in lines], (tmp_path / f"{workers}.safetensors").read_bytes()))
    assert found[0] == found[1]


@pytest.mark.slow
def test_exact_bits_after_a_resume_on_fewer_workers(tmp_path):
    """Stopped half way on three workers, continued on one: the grid goes on where it was."""
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, paceline\nfrom cases import CASES\ncase = CASES['tokens']\n"
        "t = paceline.Trainer(case.model, case.loss, case.optimizer, 14, clip_norm=0.7, plan='exact micro=2')\n"
        "for report in t.steps(case.data(), count=16): pass\nt.export(sys.argv[1])\n"
    )
    environment = {"PYTHONPATH": str(SCRIPTS)}
    paceline("run", "--workers", "2", script, "whole.safetensors", cwd=tmp_path, **environment)
    paceline(
        "run",
        "--workers",
        "3",
        "--run-dir",
        "r",
        "--steps",
        "7",
        script,
        "parts.safetensors",
        cwd=tmp_path,
        **environment,
    )
    assert not (tmp_path / "parts.safetensors").exists()
    paceline("run", "--workers", "1", "--run-dir", "r", script, "parts.safetensors", cwd=tmp_path, **environment)
    assert (tmp_path / "parts.safetensors").read_bytes() == (tmp_path / "whole.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("example", "steps"), [("gpt.py", "40"), ("digits.py", "200")])
def test_exact_bits_after_many_steps_of_the_examples(tmp_path, example, steps):
    digests = set()
    for number, team in enumerate(TEAMS):
        run = ["--run-dir", str(number), "--plan", "exact", "--steps", steps, "--save-every", steps]
        paceline("run", *team, *run, EXAMPLES / example, cwd=tmp_path, timeout=900)
        paceline("export", str(number), f"{number}.safetensors", cwd=tmp_path)
        digests.add(hashlib.sha256((tmp_path / f"{number}.safetensors").read_bytes()).hexdigest())
    assert len(digests) == 1
