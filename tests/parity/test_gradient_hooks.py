"""Gradient hooks see the gradient of one micro-batch's mean, whoever computes it and however."""

from __future__ import annotations

from pathlib import Path

import hooked
import pytest
import torch
from alone import HOOKED, ONE_BY_ONE, TOLERANCE, decisions, happened, trainer
from basics import data
from by_hand import grid
from cases import mlp, rows
from hooked import GLOBAL_BATCH, MICRO, SCENARIOS, STEPS, Scenario
from launching import SCRIPTS, paceline, train_basics
from oracle import apart
from safetensors.torch import load_file

from paceline.errors import UsageError

SEES = "micro-batches are computed one by one, and the hook sees the gradient of the mean over a micro-batch"
WHERE = {
    "parameters": "a gradient hook on 0.weight",
    "within": "a gradient hook in hooked.py:43",
    "module": "a backward hook on 2",
    "late": "a gradient hook on 0.weight",
}


def by_mean(scenario: Scenario) -> dict[str, torch.Tensor]:
    """Of each micro-batch a backward of its mean, in which the hooks act; then times its count, all added up, and
    divided by the global count.
    """
    model = hooked.built(scenario)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, step in enumerate(grid(data, GLOBAL_BATCH, MICRO, count=STEPS)):
        if number == 3:
            scenario.late(model)
        sums, total = [torch.zeros_like(param) for param in model.parameters()], 0.0
        for batch in step:
            model.zero_grad()
            found = scenario.loss(model(batch[0]), batch)
            mean, count = (found[0] / found[1], float(found[1])) if isinstance(found, tuple) else (found, len(batch[0]))
            mean.backward()
            for sum_, param in zip(sums, model.parameters(), strict=True):
                sum_ += param.grad * count
            total += count
        for sum_, param in zip(sums, model.parameters(), strict=True):
            param.grad = sum_ / total
        optimizer.step()
    return dict(model.state_dict())


@pytest.mark.parametrize(
    ("workers", "plan", "names"),
    [
        pytest.param(1, "", [*SCENARIOS], marks=pytest.mark.slow),
        (2, "", [*SCENARIOS]),
        pytest.param(3, "", [*SCENARIOS], marks=pytest.mark.slow),
        pytest.param(2, "exact", [*SCENARIOS], marks=pytest.mark.slow),
        pytest.param(2, "shard=2 zero=1", [*SCENARIOS], marks=pytest.mark.slow),
        pytest.param(2, "shard=2 zero=2", ["within", "module"], marks=pytest.mark.slow),
        pytest.param(3, "shard=3", ["within", "module"], marks=pytest.mark.slow),
        pytest.param(2, "exact shard=2", ["within", "module"], marks=pytest.mark.slow),
    ],
)
def test_gradient_hooks_act_on_the_mean_of_each_micro_batch(
    workers: int, plan: str, names: list[str], tmp_path: Path
) -> None:
    shares = [] if plan or workers == 1 else ["--shares", "3,1,2" if workers == 3 else "3,1"]
    options = ["--plan", f"{plan} micro={MICRO}", *shares]
    options += ["--max-restarts", "0"] if "shard" in plan else []
    run = ("run", "--workers", str(workers), "--run-dir", "out", *options, SCRIPTS / "hooked.py", *names)
    said = paceline(*run, cwd=tmp_path).stderr
    for name in names:
        assert apart(load_file(tmp_path / f"{name}.safetensors"), by_mean(SCENARIOS[name])) <= TOLERANCE, name
        assert name not in WHERE or said.count(f"{WHERE[name]}: {SEES}\n") == 1, said


def test_gradient_hooks_are_called_once_for_each_micro_batch(run):
    model, seen = mlp(), []
    model[0].weight.register_hook(lambda grad: seen.append(grad.norm()))
    register = torch.Tensor.register_hook
    mine, plain = trainer(model, plan="micro=4"), trainer(lambda: mlp(), plan="micro=4")
    plain.model.load_state_dict(mine.model.state_dict())
    for one in (mine, plain):
        list(one.steps(rows(1, 64, 10), epochs=2))
    assert apart(mine.model.state_dict(), plain.model.state_dict()) <= TOLERANCE
    assert len(seen) == 2 * 64 // 4
    assert torch.Tensor.register_hook is register
    assert decisions(run)[ONE_BY_ONE] == HOOKED
    assert [note["text"] for note in happened(run, "note")] == [f"a gradient hook on 0.weight: {SEES}"]


def test_gradient_hook_under_loss_scaling_is_refused(run):
    model = mlp().float()
    model[0].register_full_backward_hook(lambda *_: None)
    mine = trainer(model, plan="precision=fp16", forward=lambda model, batch: model(batch[0].float()))
    said = "a backward hook on 0 would see gradients multiplied by the fp16 loss scale; use precision=bf16"
    with pytest.raises(UsageError, match=said):
        list(mine.steps(rows(1, 64, 10)))
    assert mine.steps_done == 0


def late_on_a_shard() -> str:
    return (
        "t = make()\nfor r in t.steps(data):\n    if r.step == 2: t.model[0].weight.register_hook(lambda grad: grad)\n"
    )


def test_gradient_hook_on_a_layer_that_is_split_is_refused(tmp_path: Path) -> None:
    """It would see this worker's shard of the gradient: its norm, say, is another one."""
    body = """
def hooked():
    model = net()
    model[0].weight.register_hook(lambda gradient: gradient / gradient.norm())
    return model
t = paceline.Trainer(hooked, cross_entropy, torch.optim.AdamW, global_batch=8, plan="tensor=2 micro=2")
for _ in t.steps(data, count=2):
    pass
"""
    said = " ".join(train_basics(tmp_path, body, 2, "--max-restarts", "0", code=2).stderr.split())
    what = "a gradient hook on 0.weight would see only this worker's shard of the gradient"
    assert f"UsageError: {what}; remove the hook, or leave the layer out of tensor=" in said


@pytest.mark.slow
def test_late_gradient_hook_on_a_sharded_parameter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("from basics import *\n" + late_on_a_shard())
    options = ("--workers", "2", "--max-restarts", "0", "--plan", "shard=2", "train.py")
    said = " ".join(paceline("run", *options, cwd=tmp_path, code=2).stderr.split())
    assert "UsageError: the parameter 0.weight has a hook, which would not be called on a shard; use zero=1" in said
