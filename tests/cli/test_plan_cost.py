"""What a plan is said to cost, beside what a worker held and sent; and what is said where its memory was too small."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from agents import journal
from conftest import enter_group
from hypothesis import given
from hypothesis import strategies as st
from launching import SCRIPTS, TRANSFORMERS, paceline, train_basics
from torch import nn
from warm import environment

from paceline.base.memory import advice
from paceline.compute.state_dict import optimizer_state_ratio
from paceline.launch.options import LaunchOptions
from paceline.launch.plan import probe
from paceline.parallel.cost_model import Facts
from paceline.parallel.plan_cost import cost
from paceline.plan import Plan
from paceline.planner.descriptions import ProbeRequest

STEPS = 4  # in the first one, which is not counted, the loss is looked at, which takes forwards besides
HELD = "parameters", "gradients", "optimizer"
NAMES = ("gradients", "weights", "all_gather", "pipeline", "context", "tensor", "expert", "merges")
BODY = f"""
import json
from pathlib import Path
from paceline.parallel.plan_cost import cost, facts_of
from paceline.parallel.tensor_parallel.script_view import call_without_script_view
from expert_models import Experts
from optimizers import both as muon
from staging import gpt2, ids, words
def layers():
    blocks = [nn.Sequential(nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 300)) for _ in range(4)]
    return nn.Sequential(nn.Linear(10, 300), *blocks, nn.LayerNorm(300), nn.Linear(300, 2)).double()
class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(64, 8), Experts(8, 64, 96)
    def forward(self, x):
        weights, index = self.router(x).softmax(-1).topk(2)
        return x + self.experts(x, index, weights)
def mixtures():
    return nn.Sequential(nn.Linear(10, 64), Mixture(), Mixture(), nn.LayerNorm(64), nn.Linear(64, 2)).double()
def next_word(logits, batch):
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[0][:, 1:].flatten())
sentences = TensorDataset(ids.tensors[0].repeat(3, 1))
def in_dtype(model, batch):
    return model(batch[0].to(next(model.parameters()).dtype))
mlp, gpt = (layers, cross_entropy, data, in_dtype), (lambda: gpt2().double(), next_word, sentences, words)
moe = mixtures, cross_entropy, data, None
model, loss, rows, forward = {{model}}
t = paceline.Trainer(model, loss, {{optimizer}}, global_batch=24, plan={{plan!r}}, forward=forward)
sums = lambda: {{{{kind: told[1] for kind, told in t._group.ledger.items() if kind in {NAMES}}}}}
for report in t.steps(rows, count={STEPS}):
    first, rest = (sums(), {STEPS} - report.turn) if report.step == report.turn else (first, rest)
team = paceline.join()
facts, memory = call_without_script_view(lambda: (facts_of(t._job), t._strategy.memory()))
found = cost(t.plan, facts, team.size, 24 // 3 // (team.size // t.plan.mesh(team.size).unit))
sent = {{{{kind: (sum - first[kind]) / rest for kind, sum in sums().items()}}}}
told = [found.held, found.sent, found.in_flight, list(memory.values()), sent, sums()]
Path(f"cost-{{{{team.rank}}}}.json").write_text(json.dumps(told))
"""


@pytest.mark.parametrize(
    ("workers", "plan", "model"),
    [
        (2, "local=4 every=2", "mlp"),
        (4, "data=2 shard=2 zero=3", "mlp"),
        (2, "shard=2 zero=1", "mlp muon"),
        (2, "shard=2 zero=1 precision=bf16:pure", "mlp"),
        (2, "shard=2 zero=1 optimizer_states=int8", "mlp"),
        *[
            pytest.param(workers, plan, model, marks=pytest.mark.slow)
            for workers, plan, model in (
                (4, "data=4", "mlp"),
                (2, "shard=2 zero=1", "mlp"),
                (4, "data=2 shard=2 zero=3", "mlp muon"),
                (4, "shard=4 zero=2", "mlp muon"),
                (4, "pipeline=2 tensor=2", "mlp"),
                (4, "pipeline=2 virtual=2 tensor=2", "mlp"),
                (2, "precision=bf16:pure", "mlp"),
                (2, "precision=bf16:pure,stochastic", "mlp"),
                (2, "shard=2 zero=2 precision=bf16:pure", "mlp"),
                (2, "shard=2 zero=3 precision=bf16:pure", "mlp muon"),
                (2, "shard=2 zero=3 offload=cpu precision=bf16:pure", "mlp"),
                (2, "shard=2 zero=3 precision=bf16:pure,stochastic", "mlp"),
                (4, "data=2 tensor=2 precision=bf16:pure", "mlp"),
                (2, "pipeline=2 precision=bf16:pure", "mlp"),
                (2, "optimizer_states=int8", "gpt"),
                (4, "data=2 shard=2 zero=3 optimizer_states=int8", "mlp"),
                (2, "precision=bf16:pure optimizer_states=int8", "mlp"),
                (2, "tensor=2 optimizer_states=int8", "mlp"),
                (2, "pipeline=2 optimizer_states=int8", "mlp"),
                (2, "expert=2", "moe"),
                (4, "data=2 expert=2", "moe"),
                (4, "shard=2 zero=1 expert=2", "moe"),
                (4, "shard=2 zero=3 expert=2", "moe"),
                (2, "context=2", "gpt"),
                (4, "local=2 every=1", "mlp"),
                (2, "local=4 every=2 fragments=2 delay=0", "mlp"),
                (2, "local=2 every=2 fragments=2 outer_codec=int8", "mlp"),
                (2, "local=4 every=1 outer_codec=int4 outer=sgd:0.5", "mlp"),
                (4, "shard=2 zero=1 local=4 every=2 fragments=2", "mlp"),
                (4, "shard=2 zero=3 local=2 every=2 fragments=2", "mlp"),
                (4, "shard=2 zero=1 local=2 every=1", "mlp"),
                (4, "shard=2 zero=3 local=4 every=1", "mlp"),
                (4, "data=2 tensor=2", "mlp"),
                (2, "pipeline=2", "mlp"),
                (2, "pipeline=2", "gpt"),
                (2, "pipeline=2 virtual=2", "mlp"),
                (2, "pipeline=2 virtual=2 schedule=gpipe", "gpt"),
                (4, "data=2 pipeline=2", "gpt"),
                (4, "shard=2 zero=1 pipeline=2", "mlp"),
                (4, "data=2 context=2", "gpt"),
                (4, "shard=2 zero=1 context=2", "gpt"),
                (4, "shard=2 zero=1 tensor=2", "mlp"),
                *[(4, f"data=2 shard=2 zero={zero}", "mlp") for zero in (1, 2)],
                *[(4, f"shard=4 zero={zero}", "mlp") for zero in (1, 2, 3)],
                *[(2, f"shard=2 zero={zero} offload=cpu", "mlp") for zero in (1, 2, 3)],
            )
        ],
    ],
)
def test_a_plan_costs_what_it_is_said_to(workers: int, plan: str, model: str, tmp_path: Path) -> None:
    model, _, optimizer = model.partition(" ")
    body = BODY.format(plan=f"{plan} micro=3", model=model, optimizer=optimizer or "torch.optim.AdamW")
    train_basics(
        tmp_path, body, workers, "--shares", ",".join("1" * workers), **(TRANSFORMERS if model == "gpt" else {})
    )
    every = [json.loads((tmp_path / f"cost-{rank}.json").read_text()) for rank in range(workers)]
    for held, sent, in_flight, memory, lines, _ in every:
        assert memory == pytest.approx(held, rel=0.03)
        # How many tokens go to other workers' experts differs from one micro-batch to the next.
        near = 0.25 if model == "moe" else 0.03
        assert lines.pop("expert", 0) == pytest.approx(sent.pop("expert", 0), rel=near, abs=999)
        assert [lines.get(name, 0) for name in NAMES] == pytest.approx(
            [sent.get(n, 0) for n in NAMES], rel=0.03, abs=999
        )
        virtual = 8 if "gpipe" in plan else 5 if "virtual" in plan else 2 if "pipeline" in plan else 1
        assert in_flight == virtual * (2 if "gpipe" in plan else 1)
    (memory,) = journal(tmp_path / "out", "memory")
    assert [memory[name] for name in ("parameters", "gradients", "optimizer")] == every[0][3]
    (told,) = journal(tmp_path / "out", "collectives")
    assert {name: told["kinds"][name][1] for name in every[0][5]} == pytest.approx(every[0][5], rel=0.03)


BEFORE = {
    2: (
        *("data=2", "shard=2 zero=1", "shard=2 zero=2", "shard=2 zero=3", "shard=2 zero=3 recompute=blocks"),
        *("pipeline=2", "pipeline=2 virtual=2", "tensor=2", "tensor=2 recompute=blocks", "context=2"),
    ),
    4: (
        *("data=2 shard=2 zero=3", "pipeline=4", "pipeline=2 tensor=2", "shard=2 zero=3 tensor=2", "tensor=4"),
        *("data=2 pipeline=2", "shard=2 zero=1 context=2", "pipeline=2 context=2", "tensor=2 context=2 micro=2"),
    ),
}
EXPERTS = (2, "expert=2"), (4, "data=2 expert=2"), (4, "shard=2 zero=1 expert=2")


@pytest.mark.parametrize(
    ("model", "workers", "plan"),
    [
        ("mlp", 2, "tensor=2"),
        *[
            pytest.param(model, workers, plan, marks=pytest.mark.slow)
            for model in ("mlp", "gpt", "llama")
            for workers, plans in BEFORE.items()
            for plan in plans
            if (model != "mlp" or "context" not in plan) and (model, plan) != ("mlp", "tensor=2")
        ],
        *[pytest.param("mixture", workers, plan, marks=pytest.mark.slow) for workers, plan in EXPERTS],
    ],
)
def test_the_cost_of_a_plan_is_known_before_any_of_its_workers_runs(
    model: str, workers: int, plan: str, tmp_path: Path
) -> None:
    """One worker predicts what each worker holds and sends, within 1 %; how many tokens go to which expert varies."""
    more = TRANSFORMERS if model == "llama" else {}
    text = str(Plan.parse(plan).validate(workers))
    options = LaunchOptions(
        str(SCRIPTS / "predicted.py"), [model], plan=text, quiet=True, environment=environment(**more)
    )
    found = probe(tmp_path / "probe", options, ProbeRequest(workers, (text,), measures_machine=False))
    words = ("--workers", str(workers), "--plan", plan, "--run-dir", "out", "--shares", ",".join("1" * workers))
    paceline("run", *words, SCRIPTS / "predicted.py", model, cwd=tmp_path, **more)
    (event,) = journal(tmp_path / "out", "figures")
    mesh = Plan.parse(text).mesh(workers)
    for rank, measured in enumerate(event["measured"]):
        predicted = found.plans[text][mesh.coordinate(rank, "pipeline")]
        assert predicted.held == pytest.approx(sum(measured[kind] for kind in HELD), rel=0.01)
        sent, told = dict(measured["sent"]), dict(predicted.sent)
        near = 0.25 if model == "mixture" else 0.01
        assert told.pop("expert", 0) == pytest.approx(sent.pop("expert", 0), rel=near)
        assert sum(told.values()) == pytest.approx(sum(sent.values()), rel=0.01, abs=999)  # with the step's vector


class Odd(torch.optim.SGD):
    """One that cannot be made anew from what it tells of itself, and draws."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        torch.rand(1)
        assert len(self.param_groups[0]["params"]) == 2


@pytest.mark.parametrize(
    ("make", "each"),
    [
        (lambda params: [torch.optim.AdamW(params)], 2.0),
        (lambda params: [torch.optim.SGD(params, lr=0.1)], 0.0),
        (lambda params: [torch.optim.SGD(params, lr=0.1, momentum=0.9)], 1.0),
        (lambda params: [torch.optim.AdamW(params[:1]), torch.optim.SGD(params[1:], lr=0.1)], 2.0 * 3 / 4),
        (lambda params: [Odd(params, lr=0.1)], 2.0),
    ],
)
def test_what_optimizers_keep(make, each: float) -> None:
    params = [nn.Parameter(torch.zeros(30)), nn.Parameter(torch.zeros(10))]
    optimizers = make(params)
    before = torch.get_rng_state()
    assert optimizer_state_ratio(optimizers) == each
    assert torch.equal(torch.get_rng_state(), before)


FACTS = Facts([(1000, 1000)] * 12 + [(7,), (), (3, 5)], [4] * 15, 0, [[n] for n in range(12)], [12, 13, 14], 2.0)


@given(st.integers(1, 24))
def test_plans_in_more_pieces_hold_less(workers: int) -> None:
    plan = Plan.parse("micro=2").validate(workers)
    plans = [plan, *plan.in_shards(workers)]
    assert len({str(each) for each in plans}) == len(plans)
    assert all(Plan.parse(str(each)).validate(workers).micro == 2 for each in plans), "it can be said"
    held = {str(each): sum(cost(each, FACTS, workers).held) for each in plans}
    assert held[str(plan)] == max(held.values())
    if workers > 3:
        assert held[f"shard={workers} zero=3 micro=2"] == min(held.values())


TRIED = [
    ("data=4", (640e6, 640e6, 1280e6)),
    ("shard=4 zero=1", (640e6, 640e6, 320e6)),
    ("shard=4", (200e6, 180e6, 320e6)),
]
HOLDS = (
    "the plan 'data=4' makes a worker hold 640 MB of parameters, 640 MB of gradients and 1.28 GB of the optimizer's "
)
HOLDS += "state"


@pytest.mark.parametrize(
    ("room", "what", "cure"),
    [
        (2.2e9, "the optimizer's state did not fit into memory", "use --plan 'shard=4 zero=1': it needs 1.6 GB"),
        (1.3e9, "the gradients did not fit into memory", "use --plan 'shard=4': it needs 700 MB"),
        (
            0.6e9,
            "the parameters did not fit into memory",
            "use more workers, on other hosts: 'shard=4', which needs least memory, needs 700 MB",
        ),
        (
            2.8e9,
            "the activations of forward and backward did not fit into memory",
            "use recompute=blocks, or --plan 'shard=4 zero=1', which frees 960 MB, or a smaller micro= "
            "in the plan, which changes the mathematics",
        ),
    ],
)
def test_advice(room: float, what: str, cure: str) -> None:
    told = advice([(text, [int(size) for size in held]) for text, held in TRIED], 100_000_000, int(room))
    shown = {2.2e9: "2.2 GB", 1.3e9: "1.3 GB", 0.6e9: "600 MB", 2.8e9: "2.8 GB"}[room]
    assert told == (f"{what}: {HOLDS}, and 100 MB of other memory, of {shown} available", cure)


LARGE = """
from basics import *
def model():
    return nn.Sequential(nn.Linear(10, 2000), *[nn.Linear(2000, 2000) for _ in range(24)], nn.Linear(2000, 2))
t = paceline.Trainer(model, cross_entropy, torch.optim.AdamW, global_batch=24)
rows = TensorDataset(x.float(), data.tensors[1])
for report in t.steps(rows, count=4):
    pass
"""


@pytest.mark.root
@pytest.mark.slow
def test_the_plan_that_is_proposed_fits(memory_group, tmp_path: Path) -> None:
    """384 MB of parameters, for which data parallelism takes four times as much, in 1 GB for each of four workers."""
    (tmp_path / "train.py").write_text(LARGE)
    enter, env = enter_group(memory_group(4 << 30)), {"PYTHONPATH": str(SCRIPTS), "OMP_NUM_THREADS": "1"}
    command = ("run", "--workers", "4", "--max-restarts", "0")
    done = paceline(*command, "--run-dir", "one", "train.py", cwd=tmp_path, code=137, preexec=enter, **env)
    said = re.search(
        r"  killed by the kernel's out-of-memory killer \(SIGKILL\): the optimizer's state did not fit into memory: "
        r"the plan 'data=4' makes a worker hold 384 MB of parameters, 384 MB of gradients and 769 MB of the "
        r"optimizer's state, and \S+ MB of other memory, of 1\.07 GB available\n",
        done.stderr,
    )
    assert said, done.stderr
    found = re.search(r"next: use --plan '(.+?)': it needs \d+(\.\d)? MB; then run", done.stderr)
    assert found, done.stderr
    paceline(*command, "--run-dir", "two", "--plan", found[1], "train.py", cwd=tmp_path, preexec=enter, **env)


def test_torch_that_has_too_little_memory_is_explained(tmp_path: Path) -> None:
    body = (
        "def loss(output, batch):\n"
        "    raise torch.OutOfMemoryError('tried to allocate 3 GiB\\nand more')\n"
        "list(make(loss).steps(data))\n"
    )
    done = train_basics(tmp_path, body, 1, code=1)
    assert re.search(
        r"OutOfMemoryError: the activations of forward and backward did not fit into memory: the plan 'data=1' makes"
        r" a worker hold 1\.68 kB "
        r"of parameters, 1\.68 kB of gradients and 0 B of the optimizer's state, and \S+ MB of other memory, of \S+"
        r" GB available"
        r" \(tried "
        r"to allocate 3 GiB\); use recompute=blocks, or a smaller micro= in the plan, which changes the mathematics\. "
        r"The largest tensors: x of the script 7\.68 kB, 0\.weight 1\.28 kB, 2\.weight 256 B, 0\.bias 128 B, "
        r"2\.bias 16 B; "
        r"all of them are in memory/worker-0\.json of the run folder\n",
        done.stderr,
    ), done.stderr


LIMITED = """
import resource
elements = [0]
def loss(output, batch):
    torch.empty(elements[0])
    return cross_entropy(output, batch)
def model():
    return nn.Sequential(nn.Linear(10, 50_000), nn.Tanh(), nn.Linear(50_000, 2)).double()
trainer = paceline.Trainer(model, loss, lambda params: torch.optim.AdamW(params, lr=0.1), global_batch=24)
table = torch.zeros(1_000_000, dtype=torch.float64)
for report in trainer.steps(data, count=2):
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), -1))
    elements[0] = 10**9
"""


def test_memory_that_runs_out_is_listed_by_name_and_by_kind(tmp_path: Path) -> None:
    """A limit of the address space makes torch fail to allocate 4 GB; its optimizer has state from the first step."""
    done = train_basics(tmp_path, LIMITED, 2, "--plan", "shard=2 zero=1", "--max-restarts", "0", code=1)
    assert "can't allocate memory: you tried to allocate 4000000000 bytes" in done.stderr
    largest = "table of the script 8 MB, 0.weight 4 MB, the gradient of 0.weight 2 MB, exp_avg of 0.weight 2 MB, "
    assert f"The largest tensors: {largest}" in done.stderr
    for worker in range(2):
        found = json.loads((tmp_path / "out" / "memory" / f"worker-{worker}.json").read_text())
        sizes = {kind: found["bytes"][kind] for kind in ("parameters", "optimizer", "script")}
        assert sizes["parameters"] == 8 * (10 * 50_000 + 50_000 + 2 * 50_000 + 2)
        assert sizes["optimizer"] == pytest.approx(sizes["parameters"], rel=0.01)  # two halves
        assert sizes["script"] >= 8_000_000
        assert found["bytes"]["process"] > sum(sizes.values())
        tensors = {one["name"]: one["shape"] for one in found["tensors"]}
        assert tensors["exp_avg of 0.weight"] == [25_000, 10]
        assert tensors["0.weight"] == [50_000, 10]


@pytest.mark.gpu
def test_a_gpu_whose_memory_runs_out_leaves_a_snapshot_of_torch(tmp_path: Path) -> None:
    body = "def loss(output, batch):\n    torch.empty(1 << 45, device='cuda')\nlist(make(loss).steps(data))\n"
    done = train_basics(tmp_path, body, 1, code=1)
    assert "The largest tensors: 0.weight" in done.stderr
    assert (tmp_path / "out" / "memory" / "worker-0.pickle").stat().st_size > 0


@pytest.mark.parametrize(("words", "sent"), [("", 4 * 22), ("copies=1", 4 * 44), ("codec=bf16", 44)])
def test_of_tables_nobody_knows_how_many_rows_go_to_servers(words: str, sent: int) -> None:
    facts = Facts([(7,), (3, 5), (100, 4)], [4] * 3, sparse=1)
    assert cost(Plan.parse(f"data=2 server=2 {words}"), facts, 2).sent == {"servers": sent}


def test_with_zero_3_a_worker_holds_what_is_in_no_block_and_the_largest_block_whole() -> None:
    """An embedding of 1,000 rows beside two blocks: what is gathered is whole, all else a half."""
    shapes = [(1000, 4), (6, 4), (2, 4)]
    facts = Facts(shapes, [4] * 3, blocks=[[1], [2]], rest=[0])
    held = cost(Plan.parse("data=1 shard=2 zero=3"), facts, 2)
    assert held.parameters == 4 * (4000 + 24 + (4000 + 24 + 8) // 2)
    assert cost(Plan.parse("data=1 shard=2 zero=2"), facts, 2).parameters == 4 * (4032 + 4032 // 2)
