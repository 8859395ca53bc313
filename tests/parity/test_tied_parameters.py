"""A parameter with several names is exported, saved and resumed as the whole one under each of them, whatever the plan
keeps of it on a worker. Fast tests hold this in test_plans_models_workers.py ("shared", "skips") and in
test_resume_under_another_plan.py, whose model has its words' weight as its head.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import each_value
from launching import SCRIPTS, paceline
from safetensors.torch import load_file
from sharing import BATCH, MODELS, ROWS, SEED, loss, optimizer, x, y
from torch import nn

from paceline import sample_index, stream_seed
from paceline.base.sharding import ShardingSpec
from paceline.compute.job import TrainingJob
from paceline.compute.state_dict import model_state
from paceline.errors import UsageError

PLANS = [(2, "tensor=2"), (3, "tensor=3"), (2, "pipeline=2"), (3, "pipeline=3"), (4, "pipeline=2 tensor=2")]
PLANS += [(1, "recompute=blocks"), (2, "shard=2 zero=1"), (2, "shard=2 zero=2"), (3, "shard=3 zero=3")]
# pipeline= refuses a penalty on parameters of several stages, and zero=2|3 lists of them.
UNFIT = {("Held", words) for _, words in PLANS if "pipeline" in words or "zero=2" in words or "zero=3" in words}
CELLS = each_value([*MODELS], PLANS, valid=lambda name, plan: (name, plan[1]) not in UNFIT)


@cache
def by_hand(name: str, count: int) -> dict[str, torch.Tensor]:
    """The weights after so many steps in plain PyTorch."""
    torch.manual_seed(stream_seed(SEED, 0, -1))
    model = MODELS[name]().double()
    update = optimizer(model.named_parameters())
    for step in range(count):
        epoch, first = divmod(step * BATCH, ROWS)
        rows = [sample_index(place, ROWS, SEED, epoch) for place in range(first, first + BATCH)]
        update.zero_grad()
        loss(model(x[rows]), (None, y[rows])).backward()
        update.step()
    return dict(model.state_dict())


def apart(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Of equal names and shapes, the norm of the difference as a part of the norm."""
    assert {name: value.shape for name, value in mine.items()} == {name: value.shape for name, value in theirs.items()}
    norms = [
        sum(float(v.double().norm()) ** 2 for v in some)
        for some in ((mine[n] - theirs[n] for n in theirs), theirs.values())
    ]
    return float((norms[0] / norms[1]) ** 0.5)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "plan"), CELLS)
def test_tied_parameters_are_exported_and_resumed_under_every_name(
    name: str, plan: tuple[int, str], tmp_path: Path
) -> None:
    workers, plan_words = plan
    for count in (3, 5):
        script = (SCRIPTS / "sharing.py", name, count)
        words = ("run", "--workers", workers, "--run-dir", "out", "--max-restarts", "0", "--plan", plan_words, *script)
        paceline(*map(str, words), cwd=tmp_path)
        assert apart(load_file(tmp_path / "out.safetensors"), by_hand(name, count)) < 1e-12


def test_checkpoint_refuses_a_shard_in_place_of_the_whole_parameter() -> None:
    """Whatever its cause: nothing is written that the next run would take for the whole."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    cuts = {"0.bias": ShardingSpec.split((6,), 0, 2)}
    anything: Any = lambda *given: None
    job = TrainingJob(model, anything, anything, torch.device("cpu"), 0, cuts=cuts, shapes=shapes)
    model[0].bias.data = model[0].bias.data[:3]
    assert model_state(job)["0.bias"].shape == (6,)
    model[1].weight.data = model[1].weight.data[:, :3]
    with pytest.raises(UsageError) as refused:
        model_state(job)
    assert str(refused.value) == (
        "1.weight has shape (2, 3), but had shape (2, 6) when the Trainer was created; "
        "do not change the shapes of parameters after creating the Trainer"
    )
