"""The Trainer as one script uses it, alone in its process, against the same training by hand in plain PyTorch."""

from __future__ import annotations

import itertools
import math
import os
import random
import signal
import time
import warnings
from collections import OrderedDict, namedtuple
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from by_hand import Plain, built, grid, in_order, seed_all
from cases import Language, cross_entropy, groups, mlp, next_token, rows, tokens, two_optimizers, warm_up
from oracle import apart
from public import Augmented, Late, Stream, masked, sgd, slope, steep
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

import paceline
from paceline import Trainer, stream_seed
from paceline.errors import DatasetError, LossError, MetricError, NonFiniteLossError, UsageError
from paceline.observe.journal import read_journal
from paceline.phases import State
from paceline.run import Run
from paceline.team.team import Team
from paceline.world import World

TOLERANCE = 1e-12
READS_NOTHING_AHEAD = {"num_workers": 0}


@pytest.fixture(autouse=True)
def run(tmp_path, monkeypatch, request):
    """Every test is a script of its own, with a run folder: checkpoints are written as at home."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM)}
    if not request.node.get_closest_marker("gpu"):
        monkeypatch.setattr("paceline.trainer._device", lambda rank: torch.device("cpu"))
    run = Run(Team(World(run_dir=str(tmp_path / "run"))))
    monkeypatch.setattr(Run, "_current", run)
    torch.set_num_threads(1)
    yield run
    run.close(failed=True)
    os.close(run._lock)
    for number, handler in handlers.items():
        signal.signal(number, handler)


def trainer(model: Any = mlp, loss: Any = cross_entropy, optimizer: Any = sgd, **more: Any) -> Trainer:
    return Trainer(model, loss, optimizer, **{"global_batch": 16, **more})


def by_hand(model: nn.Module, optimizer: Any = sgd, **more: Any) -> Plain:
    made = optimizer([(name, p) for name, p in model.named_parameters() if p.requires_grad])
    return Plain(model, **{"loss": cross_entropy, **more}, optimizers=made if isinstance(made, list) else [made])


def same(mine: Trainer, plain: Plain) -> None:
    assert apart(mine.model.state_dict(), dict(plain.model.state_dict())) <= TOLERANCE


def happened(run: Run, event: str) -> list[dict[str, Any]]:
    return [entry for entry in read_journal(run.folder) if entry["event"] == event]


def decisions(run: Run) -> dict[str, str]:
    return {entry["what"]: entry["why"] for entry in happened(run, "decision")}


ONE_BY_ONE = "micro-batches are executed one by one"
MERGED = "micro-batches may be merged in execution"
OBSERVED = "the forward drew no random numbers and changed no buffers, and the loss of two was the sum of theirs"

# -- forward and batches ----------------------------------------------------------------------------------------

Pair = namedtuple("Pair", "features label")


class Named(nn.Module):
    """Takes its batch by names."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, *, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        return self.net(x)


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
def test_the_default_forward_takes_a_batch_as_it_comes(kind):
    model, data, loss = BATCHES[kind]
    mine = trainer(model, loss)
    reports = list(mine.steps(data, epochs=2))
    plain = by_hand(built(model), loss=loss).train(grid(data, 16, epochs=2))
    same(mine, plain)
    assert [report.loss for report in reports] == pytest.approx(plain.losses, rel=1e-10)


def test_an_own_forward():
    def forward(model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        return model[2](torch.sin(model[0](x))) + y[:, None]

    mine = trainer(forward=forward)
    list(mine.steps(rows(1, 40, 10)))
    same(mine, by_hand(built(mlp), forward=forward).train(grid(rows(1, 40, 10), 16)))


# -- the model --------------------------------------------------------------------------------------------------


def test_a_module_is_trained_in_place_and_keeps_its_mode():
    model = nn.Sequential(mlp(), nn.Dropout(0.5)).eval()
    mine = trainer(model)
    list(mine.steps(rows(1, 40, 10)))
    assert mine.model is model
    assert not model.training
    assert not model[1].training


def test_a_function_is_called_under_the_seed():
    def make() -> nn.Module:
        model = mlp()
        with torch.no_grad():
            model[0].bias += torch.from_numpy(np.random.rand(32)) + random.random()
        return model

    one, two, other = (trainer(make, seed=seed).model.state_dict() for seed in (3, 3, 4))
    expected = built(make, seed=3).state_dict()
    for name in one:
        assert torch.equal(one[name], expected[name])
        assert torch.equal(one[name], two[name])
        assert not torch.equal(one[name], other[name])


def test_tied_weights_stay_one_parameter():
    mine = trainer(lambda: Language().double(), next_token, plan="micro=2", global_batch=14)
    list(mine.steps(tokens(5, 57), epochs=2))
    assert mine.model.out.weight is mine.model.embed.weight
    plain = by_hand(built(lambda: Language().double()), loss=next_token)
    same(mine, plain.train(grid(tokens(5, 57), 14, micro=2, epochs=2)))


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
def test_a_loss_takes_any_of_its_forms(form):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a metric may be a part of the loss, with its gradient
        mine = trainer(loss=LOSSES[form])
        reports = list(mine.steps(rows(1, 45, 10), epochs=2))
    plain = by_hand(built(mlp), loss=LOSSES[form]).train(grid(rows(1, 45, 10), 16, epochs=2))
    same(mine, plain)
    assert [report.loss for report in reports] == pytest.approx(plain.losses, rel=1e-10)
    for report in reports:
        assert set(report.metrics) == ({"loss again", "right"} if "metrics" in form else set())
        if "metrics" in form:
            assert report.metrics["loss again"] == pytest.approx(report.loss, rel=1e-12)
            right = report.metrics["right"] * report.samples
            assert right == pytest.approx(round(right))


def test_float_counts_do_not_look_like_a_loss_that_mixes_rows(run):
    """Sums that are rounded to float32 differ in their last bits, whole or in parts."""
    weights = torch.rand(512, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    data = TensorDataset(*rows(1, 512, 10).tensors, weights)
    first, second = (batch[2] for batch in grid(data, 256)[0][:2])
    assert float((first + second).sum().float()) != float(first.sum().float()) + float(second.sum().float())

    def loss(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return (F.cross_entropy(output, batch[1], reduction="none") * batch[2]).sum(), batch[2].sum().float()

    list(trainer(loss=loss, global_batch=256).steps(data))
    assert decisions(run)[MERGED] == OBSERVED


# -- optimizers and parameters ----------------------------------------------------------------------------------


def unnamed(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad([param for _, param in params], lr=0.02)


@pytest.mark.parametrize("optimizer", [groups, two_optimizers, unnamed])
def test_optimizers_of_any_number_and_groups_by_name(optimizer):
    mine = trainer(optimizer=optimizer, clip_norm=0.7)
    reports = list(mine.steps(rows(1, 45, 10), epochs=2))
    plain = by_hand(built(mlp), optimizer)
    # Clipping by hand: a hook before each step of the first optimizer sees the whole mean gradient.
    norms = []
    clip = partial(nn.utils.clip_grad_norm_, list(plain.model.parameters()), 0.7)
    plain.optimizers[0].register_step_pre_hook(lambda *_: norms.append(float(clip())))
    same(mine, plain.train(grid(rows(1, 45, 10), 16, epochs=2)))
    assert [report.grad_norm for report in reports] == pytest.approx(norms, rel=1e-9)


def test_optimizer_receives_the_trainable_named_parameters_in_order():
    model = mlp()
    model[0].bias.requires_grad_(False)
    seen: list[Any] = []
    trainer(model, optimizer=lambda params: seen.append(params) or sgd(params))
    assert [(name, id(param)) for name, param in seen[0]] == [
        (name, id(param)) for name, param in model.named_parameters() if name != "0.bias"
    ]


def test_frozen_parameters_do_not_move_even_in_the_optimizer(run):
    """A checkpoint holds them too, under their names."""
    model = mlp()
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    mine = trainer(model, optimizer=lambda params: torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5))
    list(mine.steps(rows(1, 40, 10)))
    assert torch.equal(model[0].weight, before)
    assert mine.model[0].weight.grad is None
    assert [event["step"] for event in happened(run, "checkpoint")] == [3]


def test_a_parameter_frozen_from_the_start_cannot_be_trained_later():
    model = mlp()
    model[0].requires_grad_(False)
    mine = trainer(model)
    with pytest.raises(UsageError) as caught:
        for report in mine.steps(rows(1, 40, 10)):
            model[0].requires_grad_(report.step == 2)
    assert str(caught.value) == (
        "0.weight was frozen when the Trainer was made and is to be trained now; make the Trainer while it is "
        "trainable, then freeze it until its time comes"
    )
    assert mine.steps_done == 2


def test_parameters_that_are_not_the_models_are_refused():
    head = nn.Linear(4, 4).double()
    with pytest.raises(UsageError) as caught:
        trainer(optimizer=lambda params: sgd([*(param for _, param in params), *head.parameters()]))
    assert str(caught.value) == (
        "2 of the optimizer's 6 tensors are not parameters of the model; make it from the params it is given, and a "
        "loss with parameters a part of the model"
    )


def test_parameters_may_be_frozen_and_thawed(run):
    mine, plain = trainer(), by_hand(built(mlp))
    steps = grid(rows(12, 50, 10), 16, epochs=3)
    for report, step in zip(mine.steps(rows(12, 50, 10), epochs=3), steps, strict=True):
        plain.step(step)
        for model in (mine.model, plain.model):
            model[2].requires_grad_(not 2 <= report.step < 6)
    same(mine, plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64])
def test_parameters_of_two_dtypes_are_clipped_together(dtype):
    """The norm is that of all gradients together, whatever they are made of."""

    def make() -> nn.Module:
        model = mlp()
        model.scale = nn.Parameter(torch.full((10,), 0.5, dtype=dtype))
        return model

    def forward(model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch[0] * model.scale.abs().double())

    mine = trainer(make, forward=forward, clip_norm=0.01)
    (report, *_) = list(mine.steps(rows(1, 16, 10)))
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
    "plateau": lr_scheduler.ReduceLROnPlateau,
    "one cycle": partial(lr_scheduler.OneCycleLR, max_lr=0.3, total_steps=9),
    "cosine": partial(lr_scheduler.CosineAnnealingLR, T_max=9),
    "steps": partial(lr_scheduler.MultiStepLR, milestones=[2, 5], gamma=0.3),
    "by a factor": partial(lr_scheduler.MultiplicativeLR, lr_lambda=lambda step: 0.8),
    "an impatient plateau": partial(lr_scheduler.ReduceLROnPlateau, patience=0, threshold=0.1, factor=0.5),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_are_those_of_plain_torch(name):
    schedule = SCHEDULES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns when the order of steps is wrong
        mine = trainer(optimizer=two_optimizers, schedule=schedule)
        reports = list(mine.steps(rows(1, 45, 10), epochs=3))
    plain = by_hand(built(mlp), two_optimizers)
    made = partial(lr_scheduler.LambdaLR, lr_lambda=schedule) if name.endswith("function") else schedule
    plain.schedulers = [made(optimizer) for optimizer in plain.optimizers]
    plain.train(grid(rows(1, 45, 10), 16, epochs=3))
    assert [report.lr for report in reports] == pytest.approx(plain.rates, rel=1e-12)
    assert len(set(plain.rates)) > 1 or name == "plateau"
    same(mine, plain)


# -- the loop ---------------------------------------------------------------------------------------------------


def test_epochs_and_their_last_smaller_batch():
    mine = trainer()
    reports = list(mine.steps(rows(1, 45, 10), epochs=2))
    assert [(report.step, report.epoch, report.samples) for report in reports] == [
        (1, 0, 16), (2, 0, 16), (3, 0, 13), (4, 1, 16), (5, 1, 16), (6, 1, 13),
    ]  # fmt: skip
    assert mine.steps_done == 6
    assert mine.complete
    same(mine, by_hand(built(mlp)).train(grid(rows(1, 45, 10), 16, epochs=2)))


@pytest.mark.parametrize("count", [1, 3, 4, 8])
def test_count_goes_over_epochs_and_ends_within_one(count):
    mine = trainer()
    assert len(list(mine.steps(rows(1, 45, 10), count=count))) == count
    same(mine, by_hand(built(mlp)).train(grid(rows(1, 45, 10), 16, count=count)))


@pytest.mark.parametrize("aim", [{"count": 0}, {"epochs": 0}])
@pytest.mark.parametrize("data", [rows(1, 45, 10), Stream(noisy=False)], ids=["rows", "iterable"])
def test_nothing_asked_for_is_nothing_done(aim, data):
    mine = trainer()
    assert list(mine.steps(data, **aim)) == []
    assert mine.steps_done == 0
    assert mine.complete


def test_a_global_batch_larger_than_the_data():
    mine = trainer(global_batch=64)
    reports = list(mine.steps(rows(1, 45, 10), epochs=3))
    assert [report.samples for report in reports] == [45, 45, 45]
    same(mine, by_hand(built(mlp)).train(grid(rows(1, 45, 10), 64, epochs=3)))


def test_one_row_of_data_and_a_global_batch_of_one():
    mine = trainer(global_batch=1)
    list(mine.steps(rows(1, 1, 10), epochs=3))
    same(mine, by_hand(built(mlp)).train(grid(rows(1, 1, 10), 1, epochs=3)))


def test_an_own_order_and_a_collate_that_sees_one_micro_batch():
    calls: list[list[int]] = []
    data = rows(8, 45, 10)

    def collate(samples: list[int]) -> Any:
        calls.append(samples)
        return data[samples]

    def backwards(position: int, size: int, seed: int, epoch: int) -> int:
        return (size - 1 - position + 11 * epoch + seed) % size

    mine = trainer(seed=2, plan="micro=5")
    list(mine.steps(range(45), epochs=2, collate=collate, order=backwards, loader=READS_NOTHING_AHEAD))
    numbers = grid(range(45), 16, 5, epochs=2, seed=2, order=backwards, collate=list)
    assert calls == [part for step in numbers for part in step]
    for epoch in (0, 1):  # an epoch is 4 + 4 + 3 micro-batches
        assert sorted(row for call in calls[11 * epoch : 11 * (epoch + 1)] for row in call) == list(range(45))
    plain = by_hand(built(mlp, seed=2), seed=2)
    same(mine, plain.train(grid(data, 16, 5, epochs=2, seed=2, order=backwards)))


def test_stop_ends_the_training_also_for_loops_that_follow():
    mine = trainer()
    for report in mine.steps(rows(1, 45, 10), epochs=5):
        if report.step == 2:
            mine.stop()
    assert list(mine.steps(rows(2, 45, 10))) == []
    assert mine.steps_done == 2
    assert mine.complete
    before = trainer()
    before.stop()
    assert list(before.steps(rows(1, 45, 10))) == []


def test_a_loop_left_by_break_is_followed_by_another():
    """Which goes on with the next epoch, in another order of rows."""
    mine, plain = trainer(), by_hand(built(mlp))
    for report in mine.steps(rows(1, 45, 10), epochs=9):
        if report.step == 2:
            break
    assert not mine.complete
    list(mine.steps(rows(2, 45, 10)))
    plain.train(grid(rows(1, 45, 10), 16)[:2])
    same(mine, plain.train(grid(rows(2, 45, 10), 16, first_epoch=1)))


def test_an_exception_in_the_body_leaves_whole_steps():
    mine, plain = trainer(), by_hand(built(mlp))
    with pytest.raises(ZeroDivisionError):
        for report in mine.steps(rows(1, 45, 10)):
            if report.step == 2:
                raise ZeroDivisionError
    same(mine, plain.train(grid(rows(1, 45, 10), 16)[:2]))
    list(mine.steps(rows(2, 45, 10)))
    same(mine, plain.train(grid(rows(2, 45, 10), 16, first_epoch=1)))


def test_loops_within_loops():
    one, other = trainer(seed=1), trainer(seed=2)
    for _ in one.steps(rows(1, 45, 10), count=2):
        for _ in other.steps(rows(2, 45, 10), count=2):
            for _ in itertools.islice(one.steps(rows(3, 45, 10)), 1):
                pass
    assert (one.steps_done, other.steps_done) == (6, 4)
    mine, plain = by_hand(built(mlp, seed=1), seed=1), by_hand(built(mlp, seed=2), seed=2)
    epochs = itertools.count(1)  # each loop goes on with the epoch after those of the one before
    for epoch, outer in enumerate(grid(rows(1, 45, 10), 16, count=2, seed=1)):
        mine.step(outer)
        for inner in grid(rows(2, 45, 10), 16, count=2, seed=2, first_epoch=epoch):
            plain.step(inner)
            mine.step(grid(rows(3, 45, 10), 16, seed=1, first_epoch=next(epochs))[0])
    same(one, mine)
    same(other, plain)


def test_two_loops_in_step_are_both_complete():
    """zip asks the second one no more once the first has ended."""
    one, other = trainer(), trainer()
    reports = list(zip(one.steps(rows(1, 45, 10), count=4), other.steps(rows(2, 45, 10), count=4), strict=False))
    assert len(reports) == 4
    assert one.complete
    assert other.complete


def test_single_steps_within_a_loop():
    mine, plain = trainer(), by_hand(built(mlp))
    x, y = rows(9, 7, 10).tensors
    for _ in mine.steps(rows(1, 45, 10)):
        assert mine.step((x, y)).samples == 7
    for step in grid(rows(1, 45, 10), 16):
        plain.step(step)
        plain.step([(x[start : start + 2], y[start : start + 2]) for start in range(0, 7, 2)])
    same(mine, plain)


def test_gradients_of_the_step_can_be_read_in_the_body():
    """They are the mean over the global batch, after clipping."""
    mine = trainer(clip_norm=0.1)
    for report in mine.steps(rows(1, 45, 10)):
        grads = [param.grad for param in mine.model.parameters()]
        assert float(nn.utils.get_total_norm(grads)) == pytest.approx(min(0.1, report.grad_norm), rel=1e-4)


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
def test_a_step_that_fails_leaves_nothing_behind(how):
    """Neither weights, buffers, statistics nor streams: the next steps are those of a run without it."""
    mine, plain = trainer(lambda: Fragile().double()), by_hand(built(lambda: Fragile().double()))
    x, y = rows(9, 16, 10).tensors
    torch.manual_seed(1)
    for number in range(4):
        assert mine.step((x, y)).step == number + 1
        if number != 1:
            continue
        if how == "raises":
            mine.model.fails_in = 6
            with pytest.raises(ZeroDivisionError):
                mine.step((x, y))
        else:
            mine.model.spoils = True
            with pytest.raises(NonFiniteLossError) as caught:
                mine.step((x, y))
            assert str(caught.value) == (
                "the loss of step 3 is not finite (worker 0: rows 6-7 of this worker's batch); the step was not "
                "applied; look at these rows, lower the learning rate or set clip_norm="
            )
            mine.model.spoils = False
    assert torch.rand(()) == torch.rand((), generator=torch.Generator().manual_seed(1))
    for _ in range(4):
        plain.step([(x[start : start + 2], y[start : start + 2]) for start in range(0, 16, 2)])
    same(mine, plain)


def test_a_loss_that_cannot_be_trained_is_refused_before_anything_changes():
    mine = trainer(loss=lambda output, batch: F.cross_entropy(output, batch[1]).detach())
    with pytest.raises(LossError) as caught:
        list(mine.steps(rows(1, 45, 10)))
    assert str(caught.value) == (
        "the loss does not depend on any trainable parameter; compute it from the model's output, without detach(), "
        "item() or no_grad()"
    )
    assert mine.steps_done == 0


# -- data -------------------------------------------------------------------------------------------------------


class Slow(Dataset):
    """Rows that take their time."""

    def __init__(self) -> None:
        self.rows = rows(1, 45, 10)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.002)
        return self.rows[index]


def loaded(data: Any, **more: Any) -> dict[str, torch.Tensor]:
    mine = trainer()
    list(mine.steps(data, epochs=2, **more))
    return mine.model.state_dict()


@pytest.mark.parametrize(
    "loader",
    [
        {"num_workers": 1},
        {"num_workers": 2, "prefetch_factor": 1, "persistent_workers": True},
        {"num_workers": 2, "generator": torch.Generator().manual_seed(5), "worker_init_fn": seed_all},
        {"num_workers": 1, "multiprocessing_context": "spawn"},
    ],
    ids=["one process", "two", "seeded by the user", "spawned"],
)
def test_loader_processes_change_nothing(loader):
    """Random rows and a random collate included."""
    expected = loaded(Augmented(), collate=masked, loader=READS_NOTHING_AHEAD)
    assert apart(loaded(Augmented(), collate=masked, loader=loader), expected) <= TOLERANCE
    other = loaded(rows(11, 45, 10))
    assert apart(expected, other) > 1e-3


def test_slow_rows_are_loaded_ahead_and_change_nothing(run):
    mine = trainer()
    list(mine.steps(Slow(), count=12))
    same(mine, by_hand(built(mlp)).train(grid(rows(1, 45, 10), 16, count=12)))
    assert "rows are loaded ahead of need by a process of their own" in decisions(run)


def test_noise_differs_from_epoch_to_epoch_and_seed_to_seed():
    drawn: list[list[float]] = []

    def collate(samples: list[Any]) -> Any:
        drawn.extend(sample[2].tolist() for sample in samples)
        return masked(samples)

    for seed in (0, 1):
        list(trainer(seed=seed).steps(Augmented(), epochs=2, collate=collate, loader=READS_NOTHING_AHEAD))
    for generator in (1, 2, 3):
        assert len({row[generator] for row in drawn}) == len(drawn) == 180


@pytest.mark.parametrize("processes", [0, 1])
def test_a_random_collate_draws_anew_for_every_micro_batch(processes):
    """Also where the rows draw nothing."""
    drawn: list[float] = []

    def collate(samples: list[Any]) -> Any:
        x, y = default_collate(samples)
        return x, y, torch.rand(len(x)) + 10 * random.random() + 1000 * np.random.rand()

    def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
        if torch.is_grad_enabled():
            drawn.extend(batch[2].tolist())
        return cross_entropy(output, batch)

    mine = trainer(loss=loss)
    list(mine.steps(rows(1, 45, 10), epochs=2, collate=collate, loader={"num_workers": processes}))
    assert len(set(drawn)) == len(drawn) == 90


class Batched(Augmented):
    """Gives many rows at once, as datasets in columns do."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self.rows[index] for index in indices]


def test_a_dataset_that_gives_many_rows_at_once():
    mine = trainer()
    list(mine.steps(Batched(), epochs=2))
    same(mine, by_hand(built(mlp)).train(grid(rows(11, 45, 10), 16, epochs=2)))


OPTIONS = {
    "batch_size": "global_batch= of the Trainer",
    "shuffle": "order= of steps()",
    "sampler": "order= of steps()",
    "batch_sampler": "order= of steps()",
    "collate_fn": "collate= of steps()",
    "drop_last": "nothing: the last, smaller batch is used",
    "in_order": "nothing: micro-batches come in the order of the grid",
}


@pytest.mark.parametrize("option", OPTIONS)
def test_loader_options_that_would_change_the_grid_are_refused(option):
    with pytest.raises(UsageError) as caught:
        trainer().steps(rows(1, 45, 10), loader={option: None})
    assert str(caught.value) == f"loader option {option!r} is decided by the grid; use {OPTIONS[option]}"


class Restless:
    """An iterable that is no iterator, and counts how often it was begun."""

    def __init__(self) -> None:
        self.begun = 0

    def __iter__(self) -> Any:
        self.begun += 1
        return iter(rows(1, 45, 10))


def test_an_iterable_dataset_is_the_same_as_its_rows_in_order():
    data, mine, other = Restless(), trainer(plan="micro=3"), trainer(plan="micro=3")
    reports = list(mine.steps(data, epochs=2))
    list(other.steps(rows(1, 45, 10), epochs=2, order=in_order))
    assert [(report.epoch, report.samples) for report in reports] == [(e, n) for e in (0, 1) for n in (16, 16, 13)]
    assert apart(mine.model.state_dict(), other.model.state_dict()) <= TOLERANCE
    assert data.begun == 2
    same(mine, by_hand(built(mlp)).train(grid(rows(1, 45, 10), 16, 3, epochs=2, order=in_order)))


@pytest.mark.parametrize("count", [2, 5])
def test_count_of_an_iterable_dataset(count):
    mine = trainer()
    assert len(list(mine.steps(Restless(), count=count))) == count
    same(mine, by_hand(built(mlp)).train(grid(rows(1, 45, 10), 16, count=count, order=in_order)))


def test_a_noisy_iterable_is_the_same_from_a_process_of_its_own_and_new_each_epoch():
    expected = loaded(Stream(noisy=True))
    assert apart(loaded(Stream(noisy=True), loader={"num_workers": 1}), expected) <= TOLERANCE
    assert apart(loaded(Stream(noisy=False)), expected) > 1e-3


REFUSED = {
    "a DataLoader": (
        lambda: DataLoader(rows(1, 45, 10)), {},
        "a DataLoader is not a dataset: its items are batches, not rows; "
        "give the dataset itself; collate=, order= and loader= of steps() say the rest",
    ),
    "a number": (lambda: 5, {}, "a int is not a dataset; give it __len__ and __getitem__, or __iter__"),
    "nothing": (list, {}, "the dataset has no rows; check how it was made"),
    "an order for an iterable": (
        Restless, {"order": in_order}, "an iterable dataset has its own order; leave order= out",
    ),
    "two readers of an iterable": (
        Restless, {"loader": {"num_workers": 2}},
        "an iterable dataset cannot be read by 2 loader processes; "
        "use num_workers=1, or a dataset with __len__ and __getitem__",
    ),
    "a generator twice": (
        lambda: (row for row in rows(1, 45, 10)), {"epochs": 2},
        "the dataset gave no rows in epoch 1; give an iterable that starts again at each iter()",
    ),
    "epochs and count": (Restless, {"epochs": 1, "count": 1}, "both epochs= and count= were given; give one of them"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_data_that_cannot_be_dealt_is_refused(case):
    data, options, message = REFUSED[case]
    with pytest.raises((DatasetError, UsageError)) as caught:
        list(trainer().steps(data(), **options))
    assert str(caught.value) == message


# -- arithmetic -------------------------------------------------------------------------------------------------


def test_bf16_is_plain_autocast():
    seen = set()

    def make() -> nn.Module:
        return mlp().float()

    def forward(model: nn.Module, batch: Any) -> torch.Tensor:
        output = model(batch[0].float())
        seen.add(output.dtype)
        return output

    mine = trainer(make, forward=forward, plan="precision=bf16")
    reports = list(mine.steps(rows(1, 128, 10), epochs=10))
    assert seen == {torch.bfloat16}
    assert {param.dtype for param in mine.model.parameters()} == {torch.float32}
    assert reports[-1].loss < 0.7 * reports[0].loss

    def autocast(model: nn.Module, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return forward(model, batch)

    def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return cross_entropy(output, batch)

    plain = by_hand(built(make), loss=loss, forward=autocast).train(grid(rows(1, 128, 10), 16, epochs=10))
    assert apart(mine.model.state_dict(), dict(plain.model.state_dict())) < 0.03
    exact = by_hand(built(make), forward=lambda model, batch: model(batch[0].float()))
    exact.train(grid(rows(1, 128, 10), 16, epochs=10))
    assert apart(mine.model.state_dict(), dict(exact.model.state_dict())) > 1e-5  # it was not fp32 all along


@pytest.mark.gpu
def test_a_gpu_trains_as_the_cpu_does():
    def make() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(10), mlp(), nn.BatchNorm1d(4, momentum=None)).double()

    mine = trainer(make, clip_norm=1.0)
    assert mine.device.type == "cuda"
    reports = list(mine.steps(rows(1, 64, 10), epochs=5))
    assert all(param.device == mine.device for param in mine.model.parameters())
    metric = mine.evaluate(rows(2, 45, 10), lambda output, batch: {"sum": (output.sum(), len(output))})
    plain = by_hand(built(make))
    plain.optimizers[0].register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(plain.model.parameters(), 1.0))
    plain.train(grid(rows(1, 64, 10), 16, epochs=5))
    on_cpu = {name: value.cpu() for name, value in mine.model.state_dict().items()}
    assert apart(on_cpu, dict(plain.model.state_dict())) < 1e-9
    assert [report.loss for report in reports] == pytest.approx(plain.losses, rel=1e-8)
    with torch.no_grad():
        expected = plain.model.eval()(rows(2, 45, 10).tensors[0]).sum() / 45
    assert metric["sum"] == pytest.approx(float(expected), rel=1e-8)


# -- merging ----------------------------------------------------------------------------------------------------


def contrastive(output: torch.Tensor, batch: Any) -> torch.Tensor:
    """Every row against all the others of its batch."""
    return F.cross_entropy(output @ output.t(), torch.arange(len(output)))


def token_mean(output: torch.Tensor, batch: Any) -> torch.Tensor:
    """A mean over tokens, of which rows have different numbers."""
    total, count, _ = next_token(output, batch)
    return total / count


class Sizes(nn.Module):
    """Remembers how many rows it was given at a time."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.sizes = inner, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            self.sizes.append(len(x))
        return self.inner(x)


def merging(model: nn.Module, loss: Any, data: Any, **more: Any) -> Trainer:
    """Trains with pieces of up to four micro-batches where they are allowed."""
    mine = trainer(Sizes(model), loss, global_batch=32, plan="micro=4", **more)
    for report in mine.steps(data, epochs=3):
        if report.step == 1:  # how many are merged is otherwise a matter of measured time
            if mine._merging._verdict == "merge":
                mine._merging.size, mine._merging._settled = 4, True
            mine.model.sizes.clear()
    return mine


def test_a_plain_model_is_merged(run):
    mine = merging(built(mlp), cross_entropy, rows(1, 96, 10))
    assert decisions(run)[MERGED] == OBSERVED
    assert set(mine.model.sizes) == {16}
    plain = by_hand(Sizes(built(mlp))).train(grid(rows(1, 96, 10), 32, 4, epochs=3))
    same(mine, plain)


class Buckets(nn.Module):
    """Numbers as words."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (3 + 2 * x).round().clamp(0, 6).long()


class Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1)


STRICT = {
    "dropout": (nn.Dropout(0.5), "the forward draws random numbers"),
    "batchnorm": (nn.BatchNorm1d(10).double(), "BatchNorm normalises each micro-batch"),
    "spectral norm": (
        nn.utils.parametrizations.spectral_norm(nn.Linear(10, 10)).double(),
        "the forward changes the buffer 'inner.0.parametrizations.weight.0._u'",
    ),
    "an embedding that rescales": (
        nn.Sequential(Buckets(), nn.Embedding(7, 10, max_norm=0.5), Mean()).double(),
        "the forward changes the parameter 'inner.0.1.weight'",
    ),
    "instance norm": (
        nn.Sequential(nn.Unflatten(1, (2, 5)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten()).double(),
        "the forward changes the buffer 'inner.0.1.running_mean'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STRICT)
def test_a_model_with_side_effects_is_executed_one_by_one(name, run):
    layer, why = STRICT[name]
    start = nn.Sequential(layer, built(mlp))
    initial = {key: value.clone() for key, value in start.state_dict().items()}
    mine = merging(start, cross_entropy, rows(1, 96, 10))
    assert decisions(run)[ONE_BY_ONE] == why
    assert set(mine.model.sizes) == {4}
    trained = {key: value.clone() for key, value in mine.model.state_dict().items()}
    start.load_state_dict(initial)
    plain = by_hand(Sizes(start)).train(grid(rows(1, 96, 10), 32, 4, epochs=3))
    assert apart(trained, dict(plain.model.state_dict())) <= TOLERANCE


@pytest.mark.parametrize(
    ("model", "loss", "data"),
    [(mlp, contrastive, rows(1, 96, 10)), (lambda: Language().double().eval(), token_mean, tokens(5, 96))],
    ids=["contrastive", "mean over tokens"],
)
def test_a_loss_that_is_not_a_sum_over_rows_is_not_merged(model, loss, data, run):
    first, second = grid(data, 32, 4)[0][:2]
    together = tuple(torch.cat(pair) for pair in zip(first, second, strict=True))
    start = built(model)
    with torch.no_grad():
        whole, one, two = (float(loss(start(batch[0]), batch)) for batch in (together, first, second))
    mine = merging(built(model), loss, data)
    assert decisions(run)[ONE_BY_ONE] == (
        f"the loss is not a sum over rows: two micro-batches together give {8 * whole:.6g}, "
        f"one by one {4 * one + 4 * two:.6g}"
    )
    assert MERGED not in decisions(run)
    assert set(mine.model.sizes) == {4}
    same(mine, by_hand(Sizes(built(model)), loss=loss).train(grid(data, 32, 4, epochs=3)))


def for_four(model: nn.Module, batch: Any) -> torch.Tensor:
    assert len(batch[0]) == 4, "made for four rows"
    return model(batch[0])


def with_noise_of_four(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch[0] + torch.linspace(-1, 1, 40, dtype=torch.float64).view(4, 10))


@pytest.mark.parametrize(
    ("forward", "loss", "why"),
    [
        (slope, steep, "RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn"),
        (for_four, cross_entropy, "AssertionError: made for four rows"),
        (
            with_noise_of_four, cross_entropy,
            "RuntimeError: The size of tensor a (8) must match the size of tensor b (4) at non-singleton di",
        ),
    ],
    ids=["takes gradients itself", "asserts its rows", "has buffers of one size"],
)  # fmt: skip
def test_a_forward_that_cannot_be_merged_is_not(forward, loss, why, run):
    """Observing whether it can must not fail what would train."""
    mine = merging(built(mlp), loss, rows(1, 96, 10), forward=forward)
    assert decisions(run)[ONE_BY_ONE] == f"two micro-batches together fail ({why})"
    assert MERGED not in decisions(run)
    assert set(mine.model.sizes) == {4}
    same(mine, by_hand(Sizes(built(mlp)), loss=loss, forward=forward).train(grid(rows(1, 96, 10), 32, 4, epochs=3)))


@pytest.mark.parametrize("draws_at", [1, 2, 5])
def test_a_model_that_begins_to_draw_ends_merging_for_good(draws_at, run):
    mine = trainer(lambda: Late().double(), global_batch=32, plan="micro=2")
    plain = by_hand(built(lambda: Late().double()))
    steps = grid(rows(13, 160, 10), 32, 2, count=9)
    for report, step in zip(mine.steps(rows(13, 160, 10), count=9), steps, strict=True):
        plain.step(step)
        if report.step == 1:
            mine._merging.size, mine._merging._settled = 4, True
        elif report.step == draws_at + 1:  # 16 micro-batches, one by one: of the merged pieces only the first was tried
            assert mine.model.sizes == [8] + [2] * 16
        elif draws_at + 1 < report.step <= draws_at + 2:
            assert mine.model.sizes == [2] * 16
        mine.model.sizes.clear()
        # Draws end again: what has begun to draw once is not trusted.
        mine.model.draws = plain.model.draws = draws_at <= report.step < draws_at + 2
    assert mine.model.sizes == []
    same(mine, plain)
    assert decisions(run)[ONE_BY_ONE] == "the forward draws random numbers"


def test_a_draw_in_the_loss_is_noticed_too(run):
    def noisy(output: torch.Tensor, batch: Any) -> torch.Tensor:
        return F.cross_entropy(output + 0.1 * torch.randn_like(output), batch[1])

    mine = merging(built(mlp), noisy, rows(1, 96, 10))
    assert decisions(run)[ONE_BY_ONE] == "the forward draws random numbers"
    same(mine, by_hand(Sizes(built(mlp)), loss=noisy).train(grid(rows(1, 96, 10), 32, 4, epochs=3)))


@pytest.mark.parametrize("generator", ["python", "numpy", "torch"])
def test_a_draw_of_any_generator_in_the_forward_is_noticed(generator, run):
    draw = {"python": random.random, "numpy": np.random.rand, "torch": lambda: torch.rand(()).item()}[generator]

    def forward(model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch[0] * draw())

    mine = merging(built(mlp), cross_entropy, rows(1, 96, 10), forward=forward)
    assert decisions(run)[ONE_BY_ONE] == "the forward draws random numbers"
    assert set(mine.model.sizes) == {4}
    same(mine, by_hand(Sizes(built(mlp)), forward=forward).train(grid(rows(1, 96, 10), 32, 4, epochs=3)))


# -- streams of the script --------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
def test_the_scripts_own_draws_go_on_as_if_nothing_was_trained(workers):
    def draws() -> list[float]:
        return [torch.rand(()).item(), random.random(), np.random.rand(), random.gauss(0, 1), np.random.normal()]

    seed_all(7)
    expected = [draws() for _ in range(5)]
    seed_all(7)
    found = [draws()]
    mine = trainer(lambda: nn.Sequential(mlp(), nn.Dropout(0.1)))
    found.append(draws())
    for _ in mine.steps(Augmented(), count=2, collate=masked, loader={"num_workers": workers}):
        mine.evaluate(Augmented(), lambda output, batch: {"sum": (output.sum() * torch.rand(()), 1)})
        found.append(draws())
    list(mine.steps(Stream(noisy=True), loader={"num_workers": workers}))
    found.append(draws())
    assert found == expected


def test_a_seed_in_the_body_does_not_change_the_training():
    mine = trainer(lambda: nn.Sequential(mlp(), nn.Dropout(0.1)))
    for _ in mine.steps(rows(1, 45, 10)):
        seed_all(0)
    same(mine, by_hand(built(lambda: nn.Sequential(mlp(), nn.Dropout(0.1)))).train(grid(rows(1, 45, 10), 16)))


def test_each_seed_trains_differently_and_the_same_seed_the_same():
    def train(seed: int) -> dict[str, torch.Tensor]:
        model = mlp()
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(0.1)
        mine = trainer(nn.Sequential(model, nn.Dropout(0.1)), seed=seed)
        list(mine.steps(rows(1, 45, 10)))
        return {name: value.clone() for name, value in mine.model.state_dict().items()}

    one, again, other = train(1), train(1), train(2)
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert apart(one, other) > 1e-4


# -- evaluation -------------------------------------------------------------------------------------------------


def accuracy(output: torch.Tensor, batch: Any) -> dict[str, tuple[Any, Any]]:
    return {"right": ((output.argmax(1) == batch[1]).sum(), len(output))}


def test_evaluation_is_exact_at_rest_and_restores_each_modules_mode():
    model = nn.Sequential(nn.BatchNorm1d(10), nn.Dropout(0.5), mlp()).double()
    model[0].eval()
    mine = trainer(model)
    seen: list[bool] = []

    def metric(output: torch.Tensor, batch: Any) -> dict[str, tuple[Any, Any]]:
        seen.append(model.training or model[1].training or torch.is_grad_enabled())
        return accuracy(output, batch)

    x, y = rows(2, 45, 10).tensors
    results = [mine.evaluate(rows(2, 45, 10), metric)]
    for _ in mine.steps(rows(1, 45, 10), count=1):
        results.append(mine.evaluate(rows(2, 45, 10), metric))
    assert seen
    assert not any(seen)
    assert [module.training for module in (model, *model)] == [True, False, True, True]
    with torch.no_grad():
        model.eval()
        assert results[1] == {"right": int((model(x).argmax(1) == y).sum()) / 45, "n": 45}


def test_a_metric_that_fails_leaves_the_model_in_training():
    mine = trainer(nn.Sequential(mlp(), nn.Dropout(0.5)))
    for bad, message in (
        (lambda output, batch: output.sum(), "the metric returned tensor("),
        (lambda output, batch: {"sum": output.sum()}, "the metric returned {'sum': tensor("),
        (lambda output, batch: {"sum": (1, 2, 3)}, "the metric returned {'sum': (1, 2, 3)}; "),
    ):
        with pytest.raises(MetricError) as caught:
            mine.evaluate(rows(2, 45, 10), bad)
        assert str(caught.value).startswith(message)
        assert str(caught.value).endswith("; return {name: (sum, count)}")
        assert mine.model.training
        assert mine.model[1].training


def test_names_that_differ_between_rows_are_refused():
    def metric(output: torch.Tensor, batch: Any) -> dict[str, tuple[Any, Any]]:
        return accuracy(output, batch) | ({"odd": (1, 1)} if len(output) < 2 else {})

    with pytest.raises(MetricError) as caught:
        trainer().evaluate(rows(2, 45, 10), metric)
    assert str(caught.value) == (
        "the metric returned ['odd', 'right'] for some rows and ['right'] for others; return the same names "
        "everywhere, with count 0 where there is nothing to count"
    )


def test_another_model_is_evaluated_in_its_place():
    mine, other = trainer(), nn.Sequential(built(mlp, seed=9), nn.Dropout(0.5))
    x, y = rows(2, 45, 10).tensors
    found = mine.evaluate(rows(2, 45, 10), accuracy, model=other)
    assert found["right"] == int((other[0](x).argmax(1) == y).sum()) / 45
    assert other.training


def test_iterable_data_and_noise_are_evaluated_the_same_each_time():
    mine = trainer()
    list(mine.steps(rows(1, 45, 10), loader={"num_workers": 2}))  # options that are not for an iterable dataset
    ordered = mine.evaluate(rows(11, 45, 10), accuracy)
    assert mine.evaluate(Stream(noisy=False), accuracy) == ordered
    noisy = mine.evaluate(Stream(noisy=True), lambda output, batch: {"sum": (output.sum(), len(output))})
    assert mine.evaluate(Stream(noisy=True), lambda output, batch: {"sum": (output.sum(), len(output))}) == noisy


# -- log, state, save, export -----------------------------------------------------------------------------------


def test_log_keeps_figures_at_their_step(run):
    mine = trainer()
    mine.log(started=True)
    for _ in mine.steps(rows(1, 45, 10), count=2):
        mine.log(**mine.evaluate(rows(2, 9, 10), accuracy), note="text", value=torch.tensor(2.5))
    events = happened(run, "log")
    assert [(event["step"], event["trainer"]) for event in events] == [(0, 0), (1, 0), (2, 0)]
    assert events[0]["values"] == {"started": True}
    assert {**events[1]["values"], "right": 0} == {"right": 0, "n": 9, "note": "text", "value": 2.5}
    assert [event["results"]["n"] for event in happened(run, "evaluate")] == [9, 9]


def test_main_and_steps_done_alone():
    mine = trainer()
    assert mine.main
    assert mine.steps_done == 0
    assert mine.complete  # there is no loop yet that would have to end


def test_state_takes_back_what_was_saved():
    first = State()
    average = torch.optim.swa_utils.AveragedModel(mlp())
    first["best"], first["history"], first["average"], first["late"] = 0.5, [1, {"a": torch.ones(2)}], average, 7
    with torch.no_grad():
        average.module[0].weight.fill_(3.0)
    again = State()
    again.restore(first.saved())
    assert again["best"] == 0.5
    again["best"] = 0.0  # the script's first value: the checkpoint's wins
    assert again["best"] == 0.5
    again["best"] = 0.9
    assert again["best"] == 0.9
    assert again.setdefault("late", 0) == 7
    assert again.setdefault("new", 1) == 1
    fresh = torch.optim.swa_utils.AveragedModel(mlp())
    assert "average" not in again
    again["average"] = fresh
    assert again["average"] is fresh
    assert torch.equal(fresh.module[0].weight, average.module[0].weight)
    assert set(again.saved()) == {"best", "history", "average", "late", "new"}


def test_first_values_given_at_once_give_way_to_the_checkpoint_too():
    first = State()
    first["best"], first["average"] = 0.5, torch.optim.swa_utils.AveragedModel(mlp())
    for give in (State.update, State.__ior__):
        again, fresh = State(), torch.optim.swa_utils.AveragedModel(mlp())
        again.restore(first.saved())
        give(again, {"best": 0.0, "average": fresh, "new": 1})
        assert again == {"best": 0.5, "average": fresh, "new": 1}
        assert torch.equal(fresh.module[0].weight, first["average"].module[0].weight)
        again.update(best=0.7)
        assert again["best"] == 0.7


def test_once_training_goes_on_an_assignment_is_one():
    """Also the first: a script may only ever say state["n"] = state.get("n", 0) + 1."""
    first = State()
    first["n"], first["average"] = 3, torch.optim.swa_utils.AveragedModel(mlp())
    again = State()
    again.restore(first.saved())
    again.begin()
    again["n"] = again.get("n", 0) + 1
    assert again["n"] == 4
    again["average"] = torch.optim.swa_utils.AveragedModel(mlp())  # an object is still filled
    assert torch.equal(again["average"].module[0].weight, first["average"].module[0].weight)


def test_state_that_was_not_put_back_yet_is_saved_again():
    first = State()
    first["average"] = torch.optim.swa_utils.AveragedModel(mlp())
    again = State()
    again.restore(first.saved())
    assert again.saved().keys() == {"average"}
    assert again.saved()["average"][0] == "object"


def test_export_holds_the_weights_under_their_names(tmp_path):
    from safetensors.torch import load_file

    mine = trainer()
    for report in mine.steps(rows(1, 45, 10), count=2):
        mine.export(tmp_path / f"{report.step}.safetensors")
    found = load_file(tmp_path / "2.safetensors")
    assert found.keys() == mine.model.state_dict().keys()
    assert all(torch.equal(found[name], value) for name, value in mine.model.state_dict().items())
    assert not torch.equal(load_file(tmp_path / "1.safetensors")["0.weight"], found["0.weight"])


def test_a_checkpoint_is_taken_after_the_body(run):
    """save() asks for it; it is taken when the loop asks for the next step."""
    mine = trainer()
    for report in mine.steps(rows(1, 45, 10), count=3):
        if report.step == 2:
            mine.save()
            assert happened(run, "checkpoint") == []
            mine.state["after"] = "the call"
    assert [event["step"] for event in happened(run, "checkpoint")] == [2, 3]
    mine.save()  # outside of a loop it is taken at once
    assert len(happened(run, "checkpoint")) == 3


# -- own rows ---------------------------------------------------------------------------------------------------


def test_own_rows_in_any_nesting():
    x, y = rows(9, 11, 10).tensors
    forms = {
        "tuple": ((x, y), lambda o, b: F.cross_entropy(o, b[1])),
        "mapping": ({"x": x, "y": y}, lambda o, b: F.cross_entropy(o, b["y"])),
        "nested": ([x, {"labels": [y, "text"], "n": 3}], lambda o, b: F.cross_entropy(o, b[1]["labels"][0])),
    }
    plain = by_hand(built(mlp))
    for _ in range(3):
        plain.step([(x[start : start + 4], y[start : start + 4]) for start in range(0, 11, 4)])
    for batch, loss in forms.values():
        mine = trainer(
            Named if isinstance(batch, dict) else mlp, loss, plan="micro=4",
            global_batch=None if isinstance(batch, dict) else 16,
        )  # fmt: skip
        for number in range(3):
            report = mine.step(batch)
            assert (report.step, report.samples, report.loss) == (number + 1, 11, pytest.approx(plain.losses[number]))
        found = {name.removeprefix("net."): value for name, value in mine.model.state_dict().items()}
        assert apart(found, dict(plain.model.state_dict())) <= TOLERANCE


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (None, "no worker brought a row to step(); bring at least one row"),
        (torch.ones(0, 10), "no worker brought a row to step(); bring at least one row"),
        (
            (torch.ones(4, 10), torch.ones(3)),
            "the rows of the batch cannot be counted: first dimensions are [3, 4]; "
            "bring tensors whose first dimension is the row, all of one length",
        ),
        (
            "text",
            "the rows of the batch cannot be counted: first dimensions are missing; "
            "bring tensors whose first dimension is the row, all of one length",
        ),
    ],
    ids=["none", "empty", "unequal", "text"],
)
def test_rows_that_cannot_be_trained_on_are_refused(batch, message):
    mine = trainer()
    with pytest.raises(UsageError) as caught:
        mine.step(batch)
    assert str(caught.value) == message
    x, y = rows(9, 4, 10).tensors
    assert mine.step((x, y)).step == 1


def test_steps_need_a_global_batch():
    with pytest.raises(UsageError) as caught:
        trainer(global_batch=None).steps(rows(1, 45, 10))
    assert str(caught.value) == "steps() needs the global batch; give global_batch= to the Trainer"


def test_public_names_are_all_there():
    for name in paceline.__all__:
        assert getattr(paceline, name) is not None
    assert paceline.stream_seed is stream_seed
    assert set(paceline.__all__) <= set(dir(paceline))
    with pytest.raises(AttributeError, match="module 'paceline' has no attribute 'trainer_'"):
        _ = paceline.trainer_
