"""Optimizers whose update of a number depends on others get what they need under each plan, or are refused."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from agents import journal
from launching import SCRIPTS, paceline, train_basics
from optimizers import OPTIMIZERS, in_plain_torch
from safetensors.torch import load_file
from torch import nn

from paceline.base.sharding import ShardingSpec
from paceline.compute.update_coupling import Coupling, Scope, find_coupling
from paceline.optim import LAMB, LARS
from paceline.plan import Plan
from paceline.session.optimizer_arguments import coupling_of, names_to_own
from paceline.team.fault_injection import read_log

STEPS = 12


def distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Relative to the norm of the weights."""
    assert found.keys() == expected.keys()
    apart = sum(float((found[name] - tensor).square().sum()) for name, tensor in expected.items())
    return float((apart / sum(float(tensor.square().sum()) for tensor in expected.values())) ** 0.5)


def train(folder: Path, workers: int, plan: str, *names: str, code: int = 0, options: Any = ()) -> str:
    """What the console says."""
    words = [*(["--plan", plan] if plan else []), *options]
    args = ("run", "--workers", str(workers), "--run-dir", "out", *words, SCRIPTS / "optimizers.py", str(STEPS), *names)
    return " ".join(paceline(*args, cwd=folder, code=code).stderr.split())


# -- what an optimizer's updates depend on ----------------------------------------------------------------------------


def tried(make: Callable[[Any], Any], shapes: dict[str, tuple[int, ...]]) -> Coupling:
    def made(params: dict[str, nn.Parameter]) -> list[torch.optim.Optimizer]:
        found = make(list(params.items()))
        return found if isinstance(found, list) else [found]

    params = {name: nn.Parameter(torch.empty(shape, device="meta")) for name, shape in shapes.items()}
    before = torch.get_rng_state()
    found = find_coupling(made(params), params, shapes, made, torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), before)
    return found


SHAPES = {"a.weight": (16, 12), "a.bias": (16,), "b.weight": (12, 16), "b.bias": (12,), "by": ()}
ELEMENTS = ("Adam", "AdamW", "SGD", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD")
OTHERS = "updates each parameter depending on the others"
WHOLE = "updates each element depending on the full parameter"
SHAPED = "keeps state whose shape differs from its parameter's"
KINDS = {
    "DAdapt": (Scope.ALL, "DAdapt", OTHERS),
    "Prodigy": (Scope.ALL, "Prodigy", OTHERS),
    "NormClipped": (Scope.ALL, "NormClipped", OTHERS),
    "Noting": (Scope.ALL, "Noting", OTHERS),
    "hooked": (Scope.ALL, "SGD", OTHERS),
    "in_groups": (Scope.ALL, "SGD", OTHERS),
    "Complete": (
        Scope.ALL,
        "Complete",
        "could not be tested on small tensors (the gradients of all parameters are wanted)",
    ),
    "Soap": (Scope.PARAMETER, "Soap", WHOLE),
    "StableAdamW": (Scope.PARAMETER, "StableAdamW", WHOLE),
    "Adafactor": (Scope.PARAMETER, "Adafactor", WHOLE),
    "both": (Scope.PARAMETER, "Muon", WHOLE),
    "LAMB": (Scope.PARAMETER, "LAMB", WHOLE),
    "Stacked": (Scope.PARAMETER, "Stacked", SHAPED),
    "AdamW": (Scope.ELEMENT, "", ""),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_coupling_is_found(name: str) -> None:
    coupling = tried(OPTIMIZERS[name], SHAPES)
    assert (coupling.scope, coupling.kind, coupling.why) == KINDS[name]


def test_optimizers_that_take_an_empty_tensor_as_a_parameter_are_found() -> None:
    """With state of the shape of the parameter."""
    shapes = {name: shape for name, shape in SHAPES.items() if shape}
    found = {name: tried(make, shapes) for name, make in OPTIMIZERS.items()}
    assert {name for name, one in found.items() if one.takes_empty} == {"StableAdamW", "both", "LAMB"}


def test_groups_by_size_need_full_parameters_on_all_workers() -> None:
    """They would be others for an empty tensor."""
    params = {"0.weight": nn.Parameter(torch.zeros(8, 12)), "1.weight": nn.Parameter(torch.zeros(1, 16))}
    cuts = {"0.weight": ShardingSpec.split((16, 12), 0, 2), "1.weight": ShardingSpec.split((2, 16), 0, 2)}
    job = SimpleNamespace(local_params=params, local_cuts=cuts, named=params, in_rows=[])

    def by_size(params: Any) -> torch.optim.Optimizer:
        large = [param for _, param in params if param.numel() > 100]
        small = [param for _, param in params if param.numel() <= 100]
        return LARS([{"params": large}, {"params": small, "momentum": 0.0}], lr=0.1)

    def by_dimensions(params: Any) -> torch.optim.Optimizer:
        return LARS([param for _, param in params if param.dim() == 2], lr=0.1)

    owned = []
    for make in (by_size, by_dimensions):
        coupling, groups = coupling_of(make, job)  # type: ignore[arg-type]
        owned.append(names_to_own(make, job, coupling, groups, Plan.parse("shard=2")))  # type: ignore[arg-type]
    assert owned == [None, {"0.weight", "1.weight"}]


@pytest.mark.parametrize("name", ELEMENTS)
def test_torch_optimizers_with_elementwise_updates(name: str) -> None:
    assert tried(lambda params: getattr(torch.optim, name)(params, lr=0.1), SHAPES).scope == Scope.ELEMENT


@pytest.mark.parametrize("made", [LAMB, LARS])
def test_lamb_and_lars_need_whole_parameters(made: Any) -> None:
    assert tried(lambda params: made([param for _, param in params], lr=0.1), SHAPES).scope == Scope.PARAMETER


class Rare(torch.optim.SGD):
    """Divides by the norm over all parameters, in each thirtieth step alone."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.param_groups[0]["every"], self.steps = 30, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps += 1
        if self.steps % self.param_groups[0]["every"] == 0:
            grads = [param.grad for param in self.param_groups[0]["params"] if param.grad is not None]
            torch._foreach_div_(grads, torch.nn.utils.get_total_norm(grads))
        super().step()


def test_optimizer_coupling_in_rare_steps_is_found() -> None:
    coupling = tried(Rare, SHAPES)
    assert (coupling.scope, coupling.kind, coupling.why) == (Scope.ALL, "Rare", OTHERS)


def test_optimizer_coupling_with_groups_by_size() -> None:
    """It puts small matrices into another group, where they are treated in another way."""

    def make(params: Any) -> torch.optim.Optimizer:
        large = [param for _, param in params if param.numel() > 100]
        small = [param for _, param in params if param.numel() <= 100]
        return LARS([{"params": large}, {"params": small, "momentum": 0.0}], lr=0.1)

    assert tried(make, SHAPES).scope == Scope.PARAMETER


def test_optimizer_groups_by_parameter_attributes_are_kept() -> None:
    """A script marks parameters, as timm does, and its function asks for the mark."""
    own = {name: nn.Parameter(torch.ones(shape)) for name, shape in SHAPES.items()}
    own["a.bias"].no_decay = True  # type: ignore[attr-defined]

    def make(params: Any) -> torch.optim.Optimizer:
        free = [param for _, param in params if getattr(param, "no_decay", False)]
        rest = [param for _, param in params if not getattr(param, "no_decay", False)]
        return torch.optim.AdamW([{"params": rest}, {"params": free, "weight_decay": 0.0}])

    job = SimpleNamespace(local_params=own, local_cuts={}, named=own, in_rows=[])
    found, groups = coupling_of(make, job)  # type: ignore[arg-type]
    assert found.scope == Scope.ELEMENT
    assert groups == {name: (0, int(name == "a.bias")) for name in SHAPES}


# -- and what it gets -------------------------------------------------------------------------------------------------

CELLS = [(2, "shard=2 zero=1"), (2, "shard=2 zero=2"), (3, "shard=3"), (2, "shard=2 offload=cpu"), (2, "tensor=2")]
CELLS += [(2, "pipeline=2"), (4, "data=2 shard=2 zero=1"), (4, "shard=2 tensor=2 zero=1"), (1, ""), (3, "")]
CELLS += [
    (4, "shard=2 tensor=2 zero=3"),
    (4, "shard=2 pipeline=2 zero=2"),
    (2, "server=1"),
    (3, "server=2 copies=1"),
    (2, "context=2"),
    (2, "exact shard=2 zero=1"),
]
QUICK = ("DAdapt", "Soap", "both", "AdamW")  # one of each kind


@pytest.mark.parametrize(
    ("workers", "plan", "names"),
    [
        (2, "shard=2 zero=1", QUICK),
        *(pytest.param(*cell, tuple(OPTIMIZERS), marks=pytest.mark.slow) for cell in CELLS),
    ],
    ids=lambda value: ("some" if value == QUICK else "all") if isinstance(value, tuple) else None,
)
def test_optimizers_that_couple_parameters_train_as_plain_pytorch(
    workers: int, plan: str, names: tuple[str, ...], tmp_path: Path
) -> None:
    said = train(tmp_path, workers, plan, *names, options=("--max-restarts", "0") if "server" not in plan else ())
    for name in names:
        assert distance(load_file(tmp_path / f"{name}.safetensors"), in_plain_torch(name, STEPS)) < 1e-12, name
    if plan == "shard=2 zero=1":
        what = "DAdapt gets full parameters on each worker, and its state is not sharded"
        assert f"{what}: it {OTHERS}" in said
        assert what in [entry.get("what") for entry in journal(tmp_path / "out", "decision")]
        assert f"Muon updates full parameters, each on one worker, which keeps its state: it {WHOLE}" in said
        assert " AdamW gets" not in said


OWNED = """
import json, os
held = {}
def optimizer(params):
    held.clear()
    held.update(params)
    held["optimizer"] = paceline.optim.LAMB([param for _, param in params], lr=0.01)
    return held["optimizer"]
t = paceline.Trainer(lambda: nn.Sequential(nn.Linear(10, 12), nn.Tanh(), nn.Linear(12, 12), nn.Linear(12, 2)).double(),
    cross_entropy, optimizer, global_batch=24)
for r in t.steps(data, count=3): pass
state = held.pop("optimizer").state
kept = {name: [param.numel(), state[param]["exp_avg"].numel()] for name, param in held.items()}
open(f"kept-{os.environ['PACELINE_RANK']}.json", "w").write(json.dumps(kept))
"""


@pytest.mark.parametrize("plan", ["shard=3", pytest.param("shard=2 tensor=2 zero=1", marks=pytest.mark.slow)])
def test_each_full_parameter_and_its_state_are_on_one_worker(plan: str, tmp_path: Path) -> None:
    workers = math.prod(int(number) for number in re.findall(r"(?:shard|tensor)=(\d)", plan))
    train_basics(tmp_path, OWNED, workers, "--max-restarts", "0", "--plan", plan)
    kept = [json.loads((tmp_path / f"kept-{worker}.json").read_text()) for worker in range(workers)]
    sizes = {"0.weight": 120, "0.bias": 12, "2.weight": 144, "2.bias": 12, "3.weight": 24, "3.bias": 2}
    for name, size in sizes.items():
        assert sorted(one[name] for one in kept) == [[0, 0]] * (workers - 1) + [[size, size]], name
    assert max(sum(own for own, _ in one.values()) for one in kept) < 150, "all owners have about as much"


KILLED = [("data=2 shard=2 zero=1", "kill:1@7.backward"), ("data=2 shard=2 zero=3", "kill:2@7.applied")]
KILLED += [("data=2 tensor=2", "kill:3@6.reduced")]


@pytest.mark.parametrize(
    ("plan", "fault"), [pytest.param(*one, marks=[] if not at else pytest.mark.slow) for at, one in enumerate(KILLED)]
)
def test_kill_of_a_worker_that_owns_parameters(plan: str, fault: str, tmp_path: Path) -> None:
    names = ["both", "StableAdamW"]
    command = ("run", "--workers", "4", "--run-dir", "out", "--plan", plan, SCRIPTS / "optimizers.py", str(STEPS))
    paceline(*command, *names, cwd=tmp_path, PACELINE_CHAOS=fault)
    assert [entry["fault"] for entry in read_log(tmp_path / "out")] == [fault]
    for name in names:
        assert distance(load_file(tmp_path / f"{name}.safetensors"), in_plain_torch(name, STEPS)) < 1e-12, name


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "plan"), [(2, "shard=2 zero=1"), (3, "shard=3"), (4, "data=2 shard=2 zero=2")])
def test_exact_owners_give_the_bytes_of_one_worker(workers: int, plan: str, tmp_path: Path) -> None:
    names = ["both", "LAMB", "StableAdamW"]
    for folder, count, words in (("one", 1, "exact"), ("several", workers, f"exact {plan}")):
        (tmp_path / folder).mkdir()
        train(tmp_path / folder, count, words, *names)
    for name in names:
        one, several = (tmp_path / folder / f"{name}.safetensors" for folder in ("one", "several"))
        assert several.read_bytes() == one.read_bytes(), name


@pytest.mark.slow
def test_state_of_owners_resumes_under_other_plans(tmp_path: Path) -> None:
    names = ["both", "LAMB"]
    plans = [(2, "shard=2 zero=1"), (3, "shard=3"), (2, "tensor=2"), (1, ""), (2, "pipeline=2"), (2, "shard=2 zero=2")]
    for number, (workers, plan) in enumerate(plans, 1):
        stop = ("--steps", str(4 * number)) if number < len(plans) else ()
        train(tmp_path, workers, plan, "by turns", *names, options=(*stop, "--max-restarts", "0"))
    for name in names:
        assert distance(load_file(tmp_path / f"{name}.safetensors"), in_plain_torch(name, STEPS)) < 1e-12, name


@pytest.mark.parametrize("name", ["Prodigy", pytest.param("Complete", marks=pytest.mark.slow)])
def test_parameter_servers_that_divide_coupled_parameters_are_refused(name: str, tmp_path: Path) -> None:
    said = train(tmp_path, 2, "server=2", name, code=2)
    what = f"UsageError: {name} {KINDS[name][2]}, and server=2 divides the parameters among 2 servers"
    assert f"{what}; use server=1, where one server holds all parameters, or an optimizer like AdamW" in said


def test_optimizer_state_of_another_shape_gets_full_parameters(tmp_path: Path) -> None:
    said = train(tmp_path, 2, "shard=2 zero=1", "Blocked")
    what = "Blocked gets full parameters on each worker, and its state is not sharded"
    assert f"{what}: it keeps state whose shape differs from its parameter's" in said


@pytest.mark.slow
def test_parameter_servers_give_each_optimizer_whole_parameters(tmp_path: Path) -> None:
    names = ["Soap", "StableAdamW", "Adafactor", "both", "LAMB", "Stacked", "AdamW"]
    train(tmp_path, 2, "server=2", *names)
    for name in names:
        assert distance(load_file(tmp_path / f"{name}.safetensors"), in_plain_torch(name, STEPS)) < 1e-12, name


@pytest.mark.slow
def test_local_sgd_islands_in_shards_keep_whole_optimizer_state(tmp_path: Path) -> None:
    """Stopped and resumed between: the outer optimizer's momentum is of rows, what islands keep is whole."""
    names = ["DAdapt", "Soap"]
    for name in names:
        found = []
        for workers, plan in ((1, "local=2 every=2"), (4, "local=2 every=2 shard=2 zero=1")):
            folder = tmp_path / f"{name} {workers}"
            folder.mkdir()
            train(folder, workers, plan, name, options=("--steps", "6", "--max-restarts", "0"))
            train(folder, workers, plan, name, options=("--max-restarts", "0"))
            found.append(load_file(folder / f"{name}.safetensors"))
        assert distance(*found) < 1e-12, name


RESUMED = [((2, "server=1"), (1, "")), ((2, "shard=2"), (3, "")), ((1, ""), (2, "shard=2 zero=1"))]


@pytest.mark.parametrize(
    ("first", "then"), [pytest.param(*one, marks=[] if not at else pytest.mark.slow) for at, one in enumerate(RESUMED)]
)
def test_optimizer_state_resumes_under_another_plan(
    first: tuple[int, str], then: tuple[int, str], tmp_path: Path
) -> None:
    """The estimated step size lies in a group, the momentum of the norm under a text."""
    names = ["Prodigy", "Noting"]
    train(tmp_path, *first, "by turns", *names, options=("--steps", "10"))
    train(tmp_path, *then, "by turns", *names)
    for name in names:
        assert distance(load_file(tmp_path / f"{name}.safetensors"), in_plain_torch(name, STEPS)) < 1e-12, name
