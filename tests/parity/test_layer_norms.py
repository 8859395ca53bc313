"""`trainer.layer_norms()`: the norms of plain PyTorch in one process, under any plan."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from launching import SCRIPTS, paceline
from oracle import built
from scripts.basics import data, make
from scripts.layer_norms import CLIP, STEPS, Net, optimizer
from scripts.layer_norms import data as rows

from paceline.errors import UsageError

PLANS = {
    "shard=2 zero=1": (2, "dense"),
    "data=2": (2, "dense"),
    "shard=2 zero=2": (2, "dense"),
    "shard=2 zero=3 offload=cpu": (2, "dense"),
    "data=2 shard=2 zero=3": (4, "dense"),
    "pipeline=2": (2, "dense"),
    "tensor=2": (2, "dense"),
    "tensor=2 pipeline=2": (4, "dense"),
    "tensor=2 shard=2 zero=1": (4, "dense"),
    "data=2 exact": (2, "dense"),
    "expert=2": (2, "experts"),
    "expert=2 shard=2 zero=3": (4, "experts"),
    "expert=2 pipeline=2": (4, "experts"),
}


def oracle(kind: str) -> list[list[dict[str, float]]]:
    model = built(lambda: Net(kind).double())
    x, y = rows().tensors
    stepper, found = optimizer(model.parameters()), []
    for _ in range(STEPS):
        stepper.zero_grad()
        F.cross_entropy(model(x), y).backward()
        gradients = {name: float(p.grad.norm()) for name, p in model.named_parameters() if p.grad is not None}
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        stepper.step()
        found.append([{name: float(p.detach().norm()) for name, p in model.named_parameters()}, gradients])
    return found


@pytest.mark.parametrize("plan", [*PLANS][:1] + [pytest.param(plan, marks=pytest.mark.slow) for plan in [*PLANS][1:]])
def test_norms_of_layers_are_those_of_one_process(plan: str, tmp_path: Path) -> None:
    workers, kind = PLANS[plan]
    options = ("--workers", str(workers), "--plan", plan, "--max-restarts", "0")
    paceline("run", *options, SCRIPTS / "layer_norms.py", kind, "out.json", cwd=tmp_path)
    found = json.loads((tmp_path / "out.json").read_text())
    assert len(found) == STEPS
    for (weights, gradients, norm), (expected_weights, expected_gradients) in zip(found, oracle(kind), strict=True):
        assert norm > CLIP  # so that gradients are clipped
        assert math.sqrt(math.fsum(value**2 for value in gradients.values())) == pytest.approx(norm, rel=1e-12)
        assert weights == pytest.approx(expected_weights, rel=1e-12, abs=1e-14)
        assert gradients == pytest.approx(expected_gradients, rel=1e-12, abs=1e-14)


@pytest.mark.usefixtures("run")
def test_before_the_first_step_there_are_no_gradients() -> None:
    trainer = make()
    norms = trainer.layer_norms()
    assert norms.gradients == {}
    assert norms.weights == {
        name: pytest.approx(float(p.detach().norm())) for name, p in trainer.model.named_parameters()
    }
    for report in trainer.steps(data, count=2):
        norms = trainer.layer_norms()
        assert sum(value**2 for value in norms.gradients.values()) == pytest.approx(report.grad_norm**2, rel=1e-12)


@pytest.mark.usefixtures("run")
def test_islands_are_refused() -> None:
    trainer = make(plan="local=4 every=2")
    with pytest.raises(UsageError) as caught:
        trainer.layer_norms()
    assert str(caught.value) == (
        "layer_norms() cannot be used with local=, where workers have different gradients; leave local= out of the plan"
    )
