"""Layers of experts of transformers, divided by `tensor=` or `expert=`: each model gives what plain PyTorch gives."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import grouped_experts
import oracle
import pytest
import torch
from agents import journal
from expert_models import Experts
from experts import MICRO, MODELS
from launching import SCRIPTS, TRANSFORMERS, paceline
from once import once
from oracle import apart
from safetensors.torch import load_file
from torch import nn
from warm import Process, environment

from paceline.compute.expert_modules import inputs_of, is_experts
from paceline.parallel.tensor_parallel.experts import run_experts

WORKERS = {"tensor=2": 2, "tensor=4": 4, "data=2 tensor=2": 4, "pipeline=2 tensor=2": 4, "shard=2 zero=3 tensor=2": 4}
WORKERS |= {"tensor=2 recompute=blocks": 2, "expert=2": 2, "expert=4": 4, "expert=2 data=2": 4, "expert=2 shard=2": 4}
WORKERS |= {"expert=2 tensor=2": 4, "expert=2 pipeline=2": 4}
FAST = ("mixtral", "expert=2")


def plain(name: str, folder: Path) -> None:
    """In a process of its own, as the script changes what `float()` does."""
    command = [sys.executable, SCRIPTS / "experts.py", name, "out", "plain"]
    with Process(command, environment(**TRANSFORMERS), cwd=folder) as process:
        assert process.wait(300) == 0


def result(folder: Path) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The weights, and each step's loss and norm."""
    figures = json.loads((folder / "out.json").read_text())
    return load_file(folder / "out.safetensors"), [figure for step in figures for figure in step]


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        pytest.param(name, plan, marks=[] if (name, plan) == FAST else pytest.mark.slow)
        for plan in WORKERS
        for name in MODELS
    ],
)
def test_divided_experts_give_what_plain_pytorch_gives(
    name: str, plan: str, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    expected, figures = result(once(tmp_path_factory, f"plain {name} with experts", partial(plain, name)))
    command = ("run", "--workers", str(WORKERS[plan]), "--run-dir", "run", "--plan", f"{plan} micro={MICRO}")
    paceline(*command, SCRIPTS / "experts.py", name, "out", cwd=tmp_path, **TRANSFORMERS)
    weights, found = result(tmp_path)
    assert apart(weights, expected) < 1e-12
    assert found == pytest.approx(figures, rel=1e-12)
    decisions = " ".join(str(event["what"]) for event in journal(tmp_path / "run", "decision"))
    is_axis = "expert=" in plan
    assert ("workers, which exchange tokens" if is_axis else "experts model.layers.*.mlp.experts") in decisions


@pytest.mark.parametrize("asked", [range(7), range(2), range(5, 7)])
def test_parts_of_experts_add_up_to_all_of_them(asked: range) -> None:
    """Outputs and all gradients, also of a worker whose experts get no token."""
    torch.manual_seed(0)
    layer = Experts(7, 3, 5).double()
    assert is_experts(layer)
    tokens, weights = torch.randn(2, 6, 3).double().requires_grad_(), torch.rand(2, 6, 2).double().requires_grad_()
    index = torch.stack([torch.randperm(len(asked))[:2] + asked.start for _ in range(12)]).view(2, 6, 2)
    flat = tokens.view(12, 3), index.view(12, 2), weights.view(12, 2)
    expected = layer(*flat).view(2, 6, 3)
    goal = torch.randn_like(expected)
    inputs = (tokens, weights, layer.up, layer.down)
    gradients = torch.autograd.grad((expected * goal).sum(), inputs)
    output, sums = torch.zeros_like(expected), [torch.zeros_like(one) for one in inputs]
    for held in (range(3), range(3, 5), range(5, 7)):
        part = Experts(len(held), 3, 5)
        part.num_experts = 7  # as it says where its weights are those of a shard
        part.up, part.down = (nn.Parameter(one.detach()[held.start : held.stop]) for one in (layer.up, layer.down))
        found = run_experts(part, held, *inputs_of(part, (tokens,), {"index": index, "weights": weights}))
        assert part.num_experts == 7
        output += found
        totals = (*sums[:2], *(one[held.start : held.stop] for one in sums[2:]))
        found_gradients = torch.autograd.grad((found * goal).sum(), (tokens, weights, part.up, part.down))
        for total, one in zip(totals, found_gradients, strict=True):
            total += one
    assert torch.allclose(output, expected, rtol=1e-12, atol=1e-14)
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-14) for a, b in zip(sums, gradients, strict=True))


class Gate(nn.Module):
    """Has experts of its own, but also a layer that is not theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts, self.weight, self.norm = 4, nn.Parameter(torch.ones(4, 2, 2)), nn.LayerNorm(2)

    def forward(self, tokens: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.norm(tokens)


def test_other_modules_are_not_taken_for_experts() -> None:
    assert not is_experts(Gate())
    assert not is_experts(nn.Linear(4, 4))
    router = nn.Linear(4, 4)
    router.num_experts = 4
    assert not is_experts(router)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["data=2", "expert=2", "tensor=2"])
def test_experts_of_grouped_products_in_float32_train_as_in_one_process(plan: str, tmp_path: Path) -> None:
    optimizer_of = partial(torch.optim.AdamW, lr=grouped_experts.RATE)
    model = oracle.built(grouped_experts.model)
    one = oracle.Plain(model, grouped_experts.loss, [optimizer_of(model.parameters())], grouped_experts.forward)
    one.train(
        oracle.grid(grouped_experts.data(), grouped_experts.BATCH, grouped_experts.MICRO, count=grouped_experts.STEPS)
    )
    options = ("--workers", "2", "--run-dir", "run", "--plan", f"{plan} micro={grouped_experts.MICRO}")
    paceline("run", *options, SCRIPTS / "grouped_experts.py", "out.safetensors", cwd=tmp_path, **TRANSFORMERS)
    assert apart(load_file(tmp_path / "out.safetensors"), dict(model.state_dict())) < 1e-5
