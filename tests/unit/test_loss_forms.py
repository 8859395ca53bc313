"""What a loss returns: counts that are none, and calls of a loop by hand, are refused before the first step."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import basics
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from alone import by_hand, same
from alone import trainer as make_trainer
from by_hand import built, grid
from cases import cross_entropy, mlp, rows
from launching import train_basics
from oracle import apart
from safetensors.torch import load_file
from torch import nn

from paceline.errors import LossError, MetricError, UsageError, hint_of
from paceline.trainer import Trainer

DATA = rows(1, 45, 10)
FORMS = (
    "return a scalar (the mean over the rows it was given), (sum, count) or (sum, count, {name: (sum, count)}); count "
    "is the number of summed rows or tokens, or the sum of their weights; return an accuracy as a metric"
)


def summed(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return F.cross_entropy(output, batch[1], reduction="sum")


def accuracy(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return (output.argmax(1) == batch[1]).double().mean()


FIRST = "micro-batch 0 (rows 0-1 of epoch 0)"
REFUSED = {
    "a number of its own": (
        lambda o, b: 0.5,
        "0.5 as the count of 2 rows, but 0.5 and 0.5 for their halves, which do not add up to it",
    ),
    "one": (
        lambda o, b: torch.ones(()),
        "1 as the count of 2 rows, but 1 and 1 for their halves, which do not add up to it",
    ),
    "a mapping": (lambda o, b: {"accuracy": accuracy(o, b)}, "a dict as the count"),
    "a text": (lambda o, b: "2", "a str as the count"),
    "nothing": (lambda o, b: None, "a NoneType as the count"),
    "a bool": (lambda o, b: True, "a bool as the count"),
    "a bool of torch's": (lambda o, b: torch.tensor(True), "a bool as the count"),
    "several": (lambda o, b: torch.ones(2), "a tensor of shape (2,) as the count"),
    "a complex number": (lambda o, b: torch.ones((), dtype=torch.complex128), "a complex number as the count"),
    "less than none": (lambda o, b: -2, f"-2 as the count of {FIRST}"),
    "not a number": (lambda o, b: float("nan"), f"nan as the count of {FIRST}"),
    "infinite": (lambda o, b: torch.tensor(torch.inf), f"inf as the count of {FIRST}"),
    "another loss": (lambda o, b: o.square().sum(), "a count that depends on trainable parameters"),
}


def refused(loss: Any, **more: Any) -> str:
    trainer = make_trainer(loss=loss, **more)
    before = [param.clone() for param in trainer.model.parameters()]
    with pytest.raises(LossError) as caught:
        list(trainer.steps(DATA))
    assert all(map(torch.equal, before, trainer.model.parameters()))
    return str(caught.value)


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize("case", REFUSED)
def test_loss_with_a_wrong_count_is_refused(case: str) -> None:
    count, told = REFUSED[case]
    assert refused(lambda o, b: (summed(o, b), count(o, b))) == f"the loss returned {told}; {FORMS}"


class Sure(nn.Module):
    """Knows each label, so that every accuracy is exactly 1."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, labels: torch.Tensor) -> torch.Tensor:
        return self.scale * F.one_hot(labels, 5)


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize(
    ("plan", "told"),
    [
        ("", "1 as the count of 2 rows, but 1 and 1 for their halves, which do not add up to it"),
        ("micro=1", "1 as the count of 1 row, but 1 for two copies of it"),
    ],
)
def test_accuracy_of_exactly_one_is_refused_as_a_count(plan: str, told: str) -> None:
    assert (
        refused(
            lambda o, b: (cross_entropy(o, b), accuracy(o, b)),
            model=Sure,
            forward=lambda model, batch: model(batch[1]),
            plan=plan or None,
        )
        == f"the loss returned {told}; {FORMS}"
    )


def rare(output: Any, batch: Any) -> torch.Tensor:
    return (batch[0][:, 0] > 0.5).double().sum()


def weights(batch: Any) -> torch.Tensor:
    return 0.1 + batch[0][:, 0].abs()


def weighted(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return (F.cross_entropy(output, batch[1], reduction="none") * weights(batch)).sum()


def flat(model: nn.Module, batch: Any) -> torch.Tensor:
    """Three tokens of each row, one after another."""
    return model(batch[0].repeat_interleave(3, 0))


def undefined_for(output: torch.Tensor) -> torch.Tensor:
    raise ValueError("too few rows")


ACCEPTED: dict[str, dict[str, Any]] = {
    "a mask, which leaves some micro-batches without any": {
        "loss": lambda o, b: ((F.cross_entropy(o, b[1], reduction="none") * (b[0][:, 0] > 0.5)).sum(), rare(o, b))
    },
    "weights": {"loss": lambda o, b: (weighted(o, b), weights(b).sum())},
    "weights of single rows": {"loss": lambda o, b: (weighted(o, b), weights(b).sum().item()), "plan": "micro=1"},
    "weights, and one by one": {"loss": lambda o, b: (weighted(o, b), weights(b).sum()), "plan": "exact"},
    "weights of tokens": {
        "forward": flat,
        "loss": lambda o, b: (
            weighted(o, [b[0].repeat_interleave(3, 0), b[1].repeat_interleave(3)]),
            3 * weights(b).sum(),
        ),
    },
    "weights, and an output of one's own": {
        "forward": lambda model, batch: SimpleNamespace(logits=model(batch[0]), name="mlp"),
        "loss": lambda o, b: (weighted(o.logits, b), weights(b).sum()),
    },
    "numpy's": {"loss": lambda o, b: (summed(o, b), np.float64(len(o)))},
    "numpy's whole": {"loss": lambda o, b: (summed(o, b), np.int64(len(o)))},
    "a float of a loss that cannot have parts": {
        "loss": lambda o, b: (summed(o, b) if len(o) > 1 else undefined_for(o), float(len(o)))
    },
}


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize("case", ACCEPTED)
def test_loss_counts_may_be_sums_of_masks_and_weights(case: str) -> None:
    given = {"plan": None, "forward": lambda model, batch: model(batch[0]), **ACCEPTED[case]}
    data = rows(1, 48, 10)  # no micro-batch of a single row
    trainer = make_trainer(**given)
    list(trainer.steps(data))
    micro = 1 if given["plan"] == "micro=1" else None
    plain = by_hand(built(mlp), loss=given["loss"], forward=given["forward"])
    same(trainer, plain.train(grid(data, 16, micro)))


@pytest.mark.usefixtures("run")
def test_fractional_count_that_cannot_be_checked_is_refused() -> None:
    told = refused(lambda o, b: (summed(o, b) if len(o) > 1 else undefined_for(o), len(o) / 4))
    assert told == f"the loss returned 0.5 as the count of {FIRST}; {FORMS}"


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize(
    ("metrics", "told"),
    [
        ({"a": 1.0}, "metrics {'a': 1.0}; "),
        ({"a": ("b", 1)}, "metrics {'a': ('b', 1)}; "),
        ({"a": (1, torch.ones(2))}, "metrics {'a': (1, tensor([1., 1.]))}; "),
        ({"a": (1, -1)}, "-2 as the count of its metric 'a'; "),
        ({"a": (1, float("nan"))}, "nan as the count of its metric 'a'; "),
    ],
)
def test_loss_metric_without_sum_and_count_is_refused(metrics: Any, told: str) -> None:
    found = refused(lambda o, b: (summed(o, b), len(o), metrics), global_batch=4, plan="micro=2")
    assert found.startswith(f"the loss returned {told}return a scalar ")


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize(
    ("found", "told"),
    [
        ({"a": 0.5}, "the metric returned {'a': 0.5}; return {name: (sum, count)}"),
        ({"a": ("b", 1)}, "the metric returned {'a': ('b', 1)}; return {name: (sum, count)}"),
        (
            {"a": (1, -2)},
            (
                "the metric returned -2 as the count of 'a' for 2 rows; return {name: (sum, count)}, where count is"
                " the number of summed rows"
            ),
        ),
    ],
)
def test_evaluate_metric_without_sum_and_count_is_refused(found: Any, told: str) -> None:
    with pytest.raises(MetricError) as caught:
        make_trainer().evaluate(DATA, lambda output, batch: found)
    assert str(caught.value) == told


# ---- calls that belong to a loop by hand


def scaled(own: Trainer, optimizer: Any, loss: torch.Tensor) -> torch.Tensor:
    return torch.amp.GradScaler("cpu").scale(loss)


def backward(own: Trainer, optimizer: Any, loss: torch.Tensor) -> torch.Tensor:
    loss.backward(retain_graph=True)
    return loss


def of_autograd(own: Trainer, optimizer: Any, loss: torch.Tensor) -> torch.Tensor:
    torch.autograd.backward([loss], retain_graph=True)
    return loss


def of_inputs(own: Trainer, optimizer: Any, loss: torch.Tensor) -> torch.Tensor:
    loss.backward(retain_graph=True, inputs=[next(own.model.parameters())])
    return loss


def step(own: Trainer, optimizer: Any, loss: torch.Tensor) -> torch.Tensor:
    optimizer.step()
    return loss


def zero(own: Trainer, optimizer: Any, loss: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    return loss


def zero_model(own: Trainer, optimizer: Any, loss: torch.Tensor) -> torch.Tensor:
    own.model.zero_grad()
    return loss


BACKWARD = (
    "backward() at {}, which would add to the gradients that the trainer computes; return the loss; compute other "
)
BACKWARD += "gradients with torch.autograd.grad(value, inputs)"
ZERO = (
    "zero_grad() at {}, which would delete the gradients that the trainer has computed in this step; remove the call: "
)
ZERO += "the trainer clears the gradients before each step"
CALLS = {
    scaled: "GradScaler.scale() at {}, which would multiply the loss by its scale; return the unscaled loss, and use "
    'plan="precision=fp16", which scales it',
    backward: BACKWARD,
    of_autograd: BACKWARD,
    of_inputs: BACKWARD,
    step: "optimizer.step() at {}, which would update the weights in the middle of a step; remove the call: the "
    "trainer updates the weights once per step",
    zero: ZERO,
    zero_model: ZERO,
}


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize("where", ["loss", "forward"])
@pytest.mark.parametrize("call", CALLS)
def test_backward_step_and_zero_grad_in_the_loss_are_refused(call: Any, where: str) -> None:
    seen: dict[str, Any] = {}

    def optimizer(params: Any) -> torch.optim.Optimizer:
        seen["optimizer"] = torch.optim.SGD(params, lr=0.1)
        return seen["optimizer"]

    def forward(model: nn.Module, batch: Any) -> torch.Tensor:
        output = model(batch[0])
        if where == "forward":
            call(trainer, seen["optimizer"], output.sum())
        return output

    def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
        found = cross_entropy(output, batch)
        return call(trainer, seen["optimizer"], found) if where == "loss" else found

    trainer = make_trainer(optimizer=optimizer, loss=loss, forward=forward)
    with pytest.raises(UsageError) as caught:
        list(trainer.steps(DATA))
    line = f"test_loss_forms.py:{call.__code__.co_firstlineno + 1}"
    assert str(caught.value) == f"the loss or forward calls {CALLS[call].format(line)}"
    assert trainer.steps_done == 0


@pytest.mark.usefixtures("run")
def test_backward_and_step_of_an_untrained_model_in_the_loss_are_allowed() -> None:
    """A scaler that is off, and a model beside, which the loss fits to each micro-batch from the same start."""
    scaler = torch.amp.GradScaler("cpu", enabled=False)

    def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
        beside = nn.Linear(10, 5).double()
        nn.init.zeros_(beside.weight)
        nn.init.zeros_(beside.bias)
        inner = torch.optim.SGD(beside.parameters(), lr=0.1)
        inner.zero_grad()
        cross_entropy(beside(batch[0]), batch).backward()
        inner.step()
        beside.zero_grad()
        noise = torch.zeros(10, dtype=torch.float64, requires_grad=True)
        cross_entropy(beside(batch[0] + noise), batch).backward(inputs=[noise])
        return scaler.scale(cross_entropy(output, batch) + output.mean() * noise.grad.sum())

    trainer = make_trainer(loss=loss, plan="micro=4")
    list(trainer.steps(DATA, count=3))
    same(trainer, by_hand(built(mlp), loss=loss).train(grid(DATA, 16, 4, count=3)))


@pytest.mark.usefixtures("run")
def test_second_backward_of_a_later_step_has_a_hint() -> None:
    def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
        found = cross_entropy(output, batch)
        if trainer.steps_done:
            found.backward()
        return found

    trainer = make_trainer(loss=loss)
    with pytest.raises(RuntimeError, match="backward through the graph a second time") as caught:
        list(trainer.steps(DATA))
    assert hint_of(caught.value) == "the trainer calls backward(): do not call it in the loss or forward"


# ---- with workers

PAIR = """
def loss(o, b):
    return F.cross_entropy(o, b[1]), (o.argmax(1) == b[1]).double().mean()
list(make(loss).steps(data))
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 3])
def test_loss_with_accuracy_as_count_ends_the_run_before_the_first_step(workers: int, tmp_path: Any) -> None:
    block = train_basics(tmp_path, PAIR, workers, code=1).stderr
    assert len(re.findall(r"^worker \d+ failed \(", block, re.MULTILINE)) == 1
    assert "LossError: the loss returned " in block
    assert " as the count of 3 rows, but " in block
    assert f" for their halves, which do not add up to it; {FORMS}\n" in block


WEIGHTED = """
def loss(o, b):
    weights = 0.1 + b[0][:, 0].abs()
    return (F.cross_entropy(o, b[1], reduction='none') * weights).sum(), weights.sum()
t = make(loss)
list(t.steps(data))
t.export('out.safetensors')
"""


@pytest.mark.parametrize(
    "plan",
    [
        "shard=2 zero=3",
        *(pytest.param(plan, marks=pytest.mark.slow) for plan in ("", "tensor=2", "pipeline=2")),
    ],
)
def test_loss_weights_are_counts_under_each_plan(plan: str, tmp_path: Any) -> None:
    train_basics(tmp_path, WEIGHTED, 2, *(["--plan", plan] if plan else []))
    plain = by_hand(
        built(basics.net), lambda p: torch.optim.SGD(p, lr=0.1), loss=lambda o, b: (weighted(o, b), weights(b).sum())
    )
    plain.train(grid(basics.data, 24))
    assert apart(load_file(tmp_path / "out.safetensors"), dict(plain.model.state_dict())) <= 1e-12
