"""What a Trainer is given, alone in its process, against the same training by hand in plain PyTorch."""

from __future__ import annotations

import copy
import math
import random
import warnings
from collections import OrderedDict, namedtuple
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from alone import MERGED, OBSERVED, Named, by_hand, decisions, happened, same
from alone import trainer as make_trainer
from by_hand import built, grid
from cases import Language, cross_entropy, groups, mlp, next_token, rows, tokens, two_optimizers, warm_up
from oracle import apart
from public import sgd
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import Subset, TensorDataset

import paceline
from paceline import stream_seed
from paceline.errors import LossError, NonFiniteLossError, UsageError

pytestmark = pytest.mark.usefixtures("run")

# -- forward and batches ----------------------------------------------------------------------------------------

Pair = namedtuple("Pair", "features label")


def reconstruction(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return (output.sum(1) - batch.sum(1)).square().mean()


SAMPLES = list(rows(1, 40, 10))
BATCHES = {
    "tensor": (mlp, [x for x, _ in SAMPLES], reconstruction),
    "a tensor as dataset": (mlp, rows(1, 40, 10).tensors[0], reconstruction),
    "array": (mlp, rows(1, 40, 10).tensors[0].numpy(), reconstruction),
    "tuple": (mlp, SAMPLES, cross_entropy),
    "list": (mlp, [[x, y] for x, y in SAMPLES], cross_entropy),
    "named tuple": (mlp, [Pair(x, y) for x, y in SAMPLES], lambda o, b: F.cross_entropy(o, b.label)),
    "mapping": (Named, [{"x": x, "y": y} for x, y in SAMPLES], lambda o, b: F.cross_entropy(o, b["y"])),
    "ordered": (Named, [OrderedDict(x=x, y=y) for x, y in SAMPLES], lambda o, b: F.cross_entropy(o, b["y"])),
    "subset": (mlp, Subset(rows(1, 60, 10), range(3, 43)), cross_entropy),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_default_forward_takes_each_kind_of_batch(kind):
    model, data, loss = BATCHES[kind]
    trainer = make_trainer(model, loss, plan="micro=5")
    reports = list(trainer.steps(data, epochs=1))
    plain = by_hand(built(model), loss=loss).train(grid(data, 16, 5))
    same(trainer, plain)
    assert [report.loss for report in reports] == pytest.approx(plain.losses, rel=1e-10)


def test_custom_forward_is_used():
    def forward(model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        return model[2](torch.sin(model[0](x))) + y[:, None]

    trainer = make_trainer(forward=forward)
    list(trainer.steps(rows(1, 40, 10)))
    same(trainer, by_hand(built(mlp), forward=forward).train(grid(rows(1, 40, 10), 16)))


# -- the model --------------------------------------------------------------------------------------------------


def test_module_is_trained_in_place_and_keeps_its_mode():
    model = nn.Sequential(mlp(), nn.Dropout(0.5)).eval()
    trainer = make_trainer(model)
    list(trainer.steps(rows(1, 40, 10)))
    assert trainer.model is model
    assert not model.training
    assert not model[1].training


def test_model_function_is_called_under_the_seed():
    def make() -> nn.Module:
        model = mlp()
        with torch.no_grad():
            model[0].bias += torch.from_numpy(np.random.rand(32)) + random.random()
        return model

    one, two, other = (make_trainer(make, seed=seed).model.state_dict() for seed in (3, 3, 4))
    expected = built(make, seed=3).state_dict()
    for name in one:
        assert torch.equal(one[name], expected[name])
        assert torch.equal(one[name], two[name])
        assert not torch.equal(one[name], other[name])


def test_tied_weights_stay_one_parameter():
    trainer = make_trainer(lambda: Language().double(), next_token, plan="micro=7", global_batch=14)
    list(trainer.steps(tokens(5, 57)))
    assert trainer.model.out.weight is trainer.model.embed.weight
    plain = by_hand(built(lambda: Language().double()), loss=next_token)
    same(trainer, plain.train(grid(tokens(5, 57), 14, micro=7)))


# -- the loss ---------------------------------------------------------------------------------------------------


def weighted(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    weights = 0.1 + batch[0][:, 0].abs()
    return (F.cross_entropy(output, batch[1], reduction="none") * weights).sum(), weights.sum()


def with_metrics(output: torch.Tensor, batch: Any) -> Any:
    total = F.cross_entropy(output, batch[1], reduction="sum")
    right = (output.argmax(1) == batch[1]).sum()
    return total, len(output), {"loss again": (total, len(output)), "right": [right, torch.tensor(len(output))]}


LOSSES = {
    "a scalar": cross_entropy,
    "a tensor of one element": lambda output, batch: cross_entropy(output, batch).reshape(1, 1),
    "sum and count": lambda output, batch: (F.cross_entropy(output, batch[1], reduction="sum"), len(output)),
    "sum and a float count": weighted,
    "sum, count and metrics": with_metrics,
}


@pytest.mark.parametrize("form", LOSSES)
def test_loss_of_each_form_trains_as_plain_pytorch(form):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a metric may be a part of the loss, with its gradient
        trainer = make_trainer(loss=LOSSES[form], plan="micro=5")
        reports = list(trainer.steps(rows(1, 45, 10), epochs=2))
    plain = by_hand(built(mlp), loss=LOSSES[form]).train(grid(rows(1, 45, 10), 16, 5, epochs=2))
    same(trainer, plain)
    assert [report.loss for report in reports] == pytest.approx(plain.losses, rel=1e-10)
    for report in reports:
        assert set(report.metrics) == ({"loss again", "right"} if "metrics" in form else set())
        if "metrics" in form:
            assert report.metrics["loss again"] == pytest.approx(report.loss, rel=1e-12)
            right = report.metrics["right"] * report.samples
            assert right == pytest.approx(round(right))


def test_float_counts_are_not_mistaken_for_a_loss_that_mixes_rows(run):
    """Sums that are rounded to float32 differ in their last bits, whole or in parts."""
    weights = torch.rand(512, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    data = TensorDataset(*rows(1, 512, 10).tensors, weights)
    first, second = (batch[2] for batch in grid(data, 256)[0][:2])
    assert float((first + second).sum().float()) != float(first.sum().float()) + float(second.sum().float())

    def loss(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return (F.cross_entropy(output, batch[1], reduction="none") * batch[2]).sum(), batch[2].sum().float()

    list(make_trainer(loss=loss, global_batch=256).steps(data))
    assert decisions(run)[MERGED] == OBSERVED


# -- optimizers and parameters ----------------------------------------------------------------------------------


def unnamed(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad([param for _, param in params], lr=0.02)


@pytest.mark.parametrize("optimizer", [groups, two_optimizers, unnamed])
def test_several_optimizers_and_parameter_groups_train_as_plain_pytorch(optimizer):
    trainer = make_trainer(optimizer=optimizer, clip_norm=0.7, plan="micro=5")
    reports = list(trainer.steps(rows(1, 45, 10), epochs=2))
    plain = by_hand(built(mlp), optimizer)
    # Clipping by hand: a hook before each step of the first optimizer sees the whole mean gradient.
    norms = []
    clip = partial(nn.utils.clip_grad_norm_, list(plain.model.parameters()), 0.7)
    plain.optimizers[0].register_step_pre_hook(lambda *_: norms.append(float(clip())))
    same(trainer, plain.train(grid(rows(1, 45, 10), 16, 5, epochs=2)))
    assert [report.grad_norm for report in reports] == pytest.approx(norms, rel=1e-9)


def test_optimizer_receives_the_trainable_named_parameters_in_order():
    model = mlp()
    model[0].bias.requires_grad_(False)
    seen: list[Any] = []
    make_trainer(model, optimizer=lambda params: seen.append(params) or sgd(params))
    assert [(name, id(param)) for name, param in seen[0]] == [
        (name, id(param)) for name, param in model.named_parameters() if name != "0.bias"
    ]


def test_frozen_parameters_do_not_move_even_in_the_optimizer(run):
    """A checkpoint holds them too, under their names."""
    model = mlp()
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    trainer = make_trainer(
        model, optimizer=lambda params: torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    )
    list(trainer.steps(rows(1, 40, 10)))
    assert torch.equal(model[0].weight, before)
    assert trainer.model[0].weight.grad is None
    assert [event["step"] for event in happened(run, "checkpoint")] == [3]


def test_parameter_frozen_from_the_start_cannot_be_trained_later(golden):
    model = mlp()
    model[0].requires_grad_(False)
    trainer = make_trainer(model)
    with pytest.raises(UsageError) as caught:
        for report in trainer.steps(rows(1, 40, 10)):
            model[0].requires_grad_(report.step == 2)
    golden("parameter frozen from the start cannot be trained later", str(caught.value))
    assert trainer.steps_done == 2


def test_optimizer_with_foreign_parameters_is_refused(golden):
    head = nn.Linear(4, 4).double()
    with pytest.raises(UsageError) as caught:
        make_trainer(optimizer=lambda params: sgd([*(param for _, param in params), *head.parameters()]))
    golden("optimizer with foreign parameters is refused", str(caught.value))


GIVEN = {
    "a closure": {"optimizer": lambda params: torch.optim.LBFGS([param for _, param in params])},
    "sparse gradients over the whole batch": {
        "model": lambda: nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 2)),
        "loss_over": "batch",
    },
    "sparse gradients with exact": {"model": nn.EmbeddingBag(4, 2, mode="sum", sparse=True), "plan": "exact"},
    "a lazy parameter": {"model": lambda: nn.Sequential(nn.Linear(3, 2), nn.LazyLinear(2))},
    "a lazy buffer": {"model": lambda: nn.Sequential(nn.Linear(3, 2), nn.LazyBatchNorm1d(affine=False))},
    "no model": {"model": lambda: 5},
    "no optimizer": {"optimizer": lambda params: []},
}


@pytest.mark.parametrize("what", GIVEN)
def test_wrong_trainer_arguments_are_refused(what, golden, run):
    with pytest.raises(UsageError) as caught:
        make_trainer(**GIVEN[what])
    golden(f"trainer with {what}", str(caught.value))
    assert run.trainers.members == run.trainers.models == []


def test_custom_optimizer_without_a_closure_is_accepted():
    class Own(torch.optim.SGD):
        def step(self) -> None:
            super().step()

    trainer = make_trainer(optimizer=lambda params: Own(params, lr=0.1, momentum=0.9))
    list(trainer.steps(rows(1, 45, 10)))
    same(trainer, by_hand(built(mlp)).train(grid(rows(1, 45, 10), 16)))


class Signs(torch.optim.Optimizer):
    """An optimizer of the user's own that knows nothing of torch's options."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(param.grad.sign(), alpha=group["lr"])


@pytest.mark.parametrize("made", [Signs, torch.optim.Adafactor, torch.optim.NAdam])
def test_optimizers_without_torchs_usual_options(made):
    def optimizer(params: Any) -> torch.optim.Optimizer:
        return made([param for _, param in params], lr=0.01)

    trainer = make_trainer(optimizer=optimizer, plan="micro=5")
    list(trainer.steps(rows(1, 45, 10)))
    same(trainer, by_hand(built(mlp), optimizer).train(grid(rows(1, 45, 10), 16, 5)))


class Late(nn.Module):
    """Uses a part of itself when it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.both = mlp(), mlp(), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) + self.second(x) if self.both else self.first(x)


def test_momentum_of_a_parameter_with_a_late_first_gradient():
    trainer, plain = make_trainer(Late), by_hand(built(Late))
    steps = grid(rows(1, 60, 10), 16, epochs=2)
    for report, step in zip(trainer.steps(rows(1, 60, 10), epochs=2), steps, strict=True):
        plain.step(step)
        trainer.model.both = plain.model.both = report.step >= 2
    same(trainer, plain)


def convolutions() -> nn.Module:
    layers = nn.Unflatten(1, (1, 2, 5)), nn.Conv2d(1, 6, 3, padding=1), nn.Tanh(), nn.Conv2d(6, 4, (2, 3)), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(12, 4)).double().to(memory_format=torch.channels_last)


def test_noncontiguous_parameters_train_unfused_as_plain_pytorch(golden, run):
    """Torch's fused kernels would take them, and the gradients, for contiguous."""

    def optimizer(params: Any, **more: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([param for _, param in params], lr=0.01, **more)

    trainer = make_trainer(convolutions, optimizer=optimizer)
    list(trainer.steps(rows(1, 60, 10), epochs=2))
    same(trainer, by_hand(built(convolutions), optimizer).train(grid(rows(1, 60, 10), 16, epochs=2)))
    assert "AdamW runs fused" not in decisions(run)
    for plan in ("", "exact"):
        with pytest.raises(UsageError) as caught:
            make_trainer(convolutions, optimizer=partial(optimizer, fused=True), plan=plan)
        golden("noncontiguous parameters train unfused as plain pytorch", str(caught.value))


def test_parameters_may_be_frozen_and_thawed(run):
    trainer, plain = make_trainer(), by_hand(built(mlp))
    steps = grid(rows(12, 50, 10), 16, epochs=3)
    for report, step in zip(trainer.steps(rows(12, 50, 10), epochs=3), steps, strict=True):
        plain.step(step)
        for model in (trainer.model, plain.model):
            model[2].requires_grad_(not 2 <= report.step < 6)
    same(trainer, plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64])
def test_parameters_of_two_dtypes_are_clipped_together(dtype):
    """The norm is that of all gradients together, whatever they are made of."""

    def make() -> nn.Module:
        model = mlp()
        model.scale = nn.Parameter(torch.full((10,), 0.5, dtype=dtype))
        return model

    def forward(model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch[0] * model.scale.abs().double())

    trainer = make_trainer(make, forward=forward, clip_norm=0.01)
    (report, *_) = list(trainer.steps(rows(1, 16, 10)))
    plain = by_hand(built(make), forward=forward)
    norms = []

    def look(*_: Any) -> None:
        norms.append(math.sqrt(sum(float(p.grad.abs().double().square().sum()) for p in plain.model.parameters())))

    plain.optimizers[0].register_step_pre_hook(look)
    plain.train(grid(rows(1, 16, 10), 16))
    assert report.grad_norm == pytest.approx(norms[0], rel=1e-2 if dtype == torch.bfloat16 else 1e-6)


# -- schedules --------------------------------------------------------------------------------------------------


class WarmThenCosine(lr_scheduler.SequentialLR):
    """A composed schedule as a class: it is given the optimizer, as torch's own are."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(optimizer, 6)]
        super().__init__(optimizer, parts, milestones=[3])


SCHEDULES = {
    "a function": warm_up,
    "a partial function": partial(lambda step, half: 0.5 ** (step / half), half=3),
    "a class": WarmThenCosine,
    "one cycle": partial(lr_scheduler.OneCycleLR, max_lr=0.3, total_steps=9),
    "cosine": partial(lr_scheduler.CosineAnnealingLR, T_max=9),
    "steps": partial(lr_scheduler.MultiStepLR, milestones=[2, 5], gamma=0.3),
    "by a factor": partial(lr_scheduler.MultiplicativeLR, lr_lambda=lambda step: 0.8),
    "a function of the optimizer": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(optimizer, 6)],
        milestones=[3],
    ),
    "a function of the optimizer that returns a factor": lambda optimizer: lr_scheduler.LambdaLR(optimizer, warm_up),
    "a function that chains": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, 0.1, total_iters=2), lr_scheduler.ExponentialLR(optimizer, 0.9)], optimizer
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_are_those_of_plain_torch(name):
    schedule = SCHEDULES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns when the order of steps is wrong
        trainer = make_trainer(optimizer=two_optimizers, schedule=schedule, plan="micro=16")
        reports = list(trainer.steps(rows(1, 45, 10), epochs=3))
    plain = by_hand(built(mlp), two_optimizers)
    made = partial(lr_scheduler.LambdaLR, lr_lambda=schedule) if name.endswith(" function") else schedule
    plain.schedulers = [made(optimizer) for optimizer in plain.optimizers]
    plain.train(grid(rows(1, 45, 10), 16, 16, epochs=3))
    assert [report.lr for report in reports] == pytest.approx(plain.rates, rel=1e-12)
    assert len(set(plain.rates)) > 1
    same(trainer, plain)


# -- what fails within a step -----------------------------------------------------------------------------------


class Fragile(nn.Module):
    """Counts, normalises and draws, and fails when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.net = nn.BatchNorm1d(10), mlp()
        self.register_buffer("calls", torch.zeros(()))
        self.fails_in = -1
        self.spoils = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.fails_in -= 1
        if self.fails_in == 0:
            raise ZeroDivisionError
        out = self.net(F.dropout(self.norm(x), 0.1)) * (1 + self.calls.item() / 100)
        return out * math.nan if self.spoils and self.calls % 5 == 0 else out


@pytest.mark.parametrize("how", ["raises", "is not finite"])
def test_failed_step_leaves_weights_buffers_and_streams_unchanged(golden, how):
    """Neither weights, buffers, statistics nor streams: the next steps are those of a run without it."""
    trainer, plain = make_trainer(lambda: Fragile().double()), by_hand(built(lambda: Fragile().double()))
    x, y = rows(9, 16, 10).tensors
    torch.manual_seed(1)
    for number in range(4):
        assert trainer.step((x, y)).step == number + 1
        if number != 1:
            continue
        if how == "raises":
            trainer.model.fails_in = 6
            with pytest.raises(ZeroDivisionError):
                trainer.step((x, y))
        else:
            trainer.model.spoils = True
            with pytest.raises(NonFiniteLossError) as caught:
                trainer.step((x, y))
            golden("failed step leaves weights buffers and streams unchanged", str(caught.value))
            trainer.model.spoils = False
    assert torch.rand(()) == torch.rand((), generator=torch.Generator().manual_seed(1))
    for _ in range(4):
        plain.step([(x[start : start + 2], y[start : start + 2]) for start in range(0, 16, 2)])
    same(trainer, plain)


@pytest.mark.parametrize(
    ("size", "micro", "where", "cure"),
    [
        (45, 4, "micro-batch 3 (rows 44-44 of epoch 0)", "the plan micro=7"),
        (45, 5, "micro-batch 3 (rows 15-15 of epoch 0)", "the plan micro=7"),
        (33, 4, "micro-batch 0 (rows 32-32 of epoch 0)", "global_batch=18"),
        pytest.param(9, 2, "micro-batch 4 (rows 8-8 of epoch 0)", "the plan micro=3", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("norm", [nn.BatchNorm1d(10), nn.GroupNorm(10, 10)], ids=["BatchNorm", "GroupNorm"])
def test_single_row_that_batchnorm_cannot_normalise_is_refused_before_the_first_step(norm, size, micro, where, cure):
    """And ways out that serve."""
    trainer, steps = make_trainer(lambda: nn.Sequential(norm, mlp()).double(), plan=f"micro={micro}"), 0
    with pytest.raises(UsageError) as caught:
        for _ in trainer.steps(rows(1, size, 10), epochs=2):
            steps += 1
    fewer = f", or train on the first {size - 1} rows: torch.utils.data.Subset(dataset, range({size - 1}))"
    assert steps == 0
    assert (
        str(caught.value)
        == f"BatchNorm cannot normalise a single row: {where}; choose {cure}, which avoids a micro-batch of a single"
        f" row but changes the mathematics{fewer if micro != 5 else ''}"
    )
    if isinstance(norm, nn.BatchNorm1d):
        batch = int(cure.removeprefix("global_batch=")) if "global" in cure else 16
        good = make_trainer(trainer.model, plan=cure.split()[-1] if batch == 16 else "", global_batch=batch)
        assert len(list(good.steps(rows(1, size, 10)))) == -(-size // batch)
        if micro != 5:
            good = make_trainer(trainer.model, plan=f"micro={micro}")
            list(good.steps(Subset(rows(1, size, 10), range(size - 1))))


def test_single_row_that_can_be_normalised_is_accepted():
    """Several values in a channel, a norm that rests, and a loop that ends before; nothing is left of the trial."""
    shaped = nn.Sequential(nn.Unflatten(1, (2, 5)), nn.BatchNorm1d(2), nn.Flatten(), mlp()).double()
    resting = nn.Sequential(nn.BatchNorm1d(10).eval(), mlp()).double()
    short = nn.Sequential(nn.BatchNorm1d(10), mlp()).double()
    for model, count in ((shaped, 6), (resting, 6), (short, 2)):
        trainer = make_trainer(copy.deepcopy(model), plan="micro=4")
        assert len(list(trainer.steps(rows(1, 45, 10), count=count))) == count
        same(trainer, by_hand(copy.deepcopy(model)).train(grid(rows(1, 45, 10), 16, 4, count=count)))


def test_single_row_of_step_that_batchnorm_cannot_normalise_is_refused(golden):
    trainer = make_trainer(lambda: nn.Sequential(nn.BatchNorm1d(10), mlp()).double(), plan="micro=4")
    x, y = rows(1, 5, 10).tensors
    with pytest.raises(UsageError) as caught:
        trainer.step((x, y))
    golden("single row of step that batchnorm cannot normalise is refused", str(caught.value))


def test_loss_without_gradient_is_refused_before_the_first_step(golden):
    trainer = make_trainer(loss=lambda output, batch: F.cross_entropy(output, batch[1]).detach())
    with pytest.raises(LossError) as caught:
        list(trainer.steps(rows(1, 45, 10)))
    golden("loss without gradient is refused before the first step", str(caught.value))
    assert trainer.steps_done == 0


# -- arithmetic -------------------------------------------------------------------------------------------------


def test_bf16_is_plain_autocast():
    seen = set()

    def make() -> nn.Module:
        return mlp().float()

    def forward(model: nn.Module, batch: Any) -> torch.Tensor:
        output = model(batch[0].float())
        seen.add(output.dtype)
        return output

    trainer = make_trainer(make, forward=forward, plan="precision=bf16 micro=16")
    reports = list(trainer.steps(rows(1, 128, 10), epochs=10))
    assert seen == {torch.bfloat16}
    assert {param.dtype for param in trainer.model.parameters()} == {torch.float32}
    assert reports[-1].loss < 0.7 * reports[0].loss

    def autocast(model: nn.Module, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return forward(model, batch)

    def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return cross_entropy(output, batch)

    plain = by_hand(built(make), loss=loss, forward=autocast).train(grid(rows(1, 128, 10), 16, 16, epochs=10))
    assert apart(trainer.model.state_dict(), dict(plain.model.state_dict())) < 0.03
    exact = by_hand(built(make), forward=lambda model, batch: model(batch[0].float()))
    exact.train(grid(rows(1, 128, 10), 16, 16, epochs=10))
    assert apart(trainer.model.state_dict(), dict(exact.model.state_dict())) > 1e-5  # it was not fp32 all along


@pytest.mark.gpu
def test_gpu_trains_as_the_cpu():
    def make() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(10), mlp(), nn.BatchNorm1d(4, momentum=None)).double()

    trainer = make_trainer(make, clip_norm=1.0)
    assert trainer.device.type == "cuda"
    reports = list(trainer.steps(rows(1, 64, 10), epochs=5))
    assert all(param.device == trainer.device for param in trainer.model.parameters())
    metric = trainer.evaluate(rows(2, 45, 10), lambda output, batch: {"sum": (output.sum(), len(output))})
    plain = by_hand(built(make))

    def clip(*_: object) -> None:
        nn.utils.clip_grad_norm_(plain.model.parameters(), 1.0)

    plain.optimizers[0].register_step_pre_hook(clip)
    plain.train(grid(rows(1, 64, 10), 16, epochs=5))
    on_cpu = {name: value.cpu() for name, value in trainer.model.state_dict().items()}
    assert apart(on_cpu, dict(plain.model.state_dict())) < 1e-9
    assert [report.loss for report in reports] == pytest.approx(plain.losses, rel=1e-8)
    with torch.no_grad():
        expected = plain.model.eval()(rows(2, 45, 10).tensors[0]).sum() / 45
    assert metric["sum"] == pytest.approx(float(expected), rel=1e-8)


def test_public_names_exist():
    for name in paceline.__all__:
        assert getattr(paceline, name) is not None
    assert paceline.stream_seed is stream_seed
    assert set(paceline.__all__) <= set(dir(paceline))
    assert dir(paceline.data) == sorted(paceline.data.__all__)
    with pytest.raises(AttributeError, match="module 'paceline' has no attribute 'trainer_'"):
        _ = paceline.trainer_
