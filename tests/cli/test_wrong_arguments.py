"""What people give instead of what is wanted: each is told what it was, what it should be, and the line to write."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from alone import happened
from basics import data, make, net
from mistaken import Maps, best, trained
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau, StepLR

import paceline
from paceline import plateau
from paceline.cli.main import main
from paceline.errors import DatasetError, MetricError, UsageError
from paceline.plan import Plan

ADAMW = "write optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3)"
COSINE = "torch.optim.lr_scheduler.CosineAnnealingLR"
FACTOR = f"write schedule=lambda step: min(1.0, (step + 1) / 100), or schedule=functools.partial({COSINE}, T_max=...)"
LOSS = "write loss=lambda output, batch: torch.nn.functional.cross_entropy(output, batch[1])"
MICRO_BATCH = "[3x10 float64, 3 int64]"
MODEL = "and an nn.Module or a function of nothing that makes one is wanted"


class Own(SGD):
    def __init__(self, params: Any, rate: float) -> None:
        super().__init__(params, rate)


def some() -> SGD:
    return SGD(net().parameters(), lr=0.25)


PLATEAU = (
    "schedule is torch.optim.lr_scheduler.ReduceLROnPlateau, which needs a value to follow, and a step has none but "
    'the loss of its rows; write schedule=paceline.plateau("loss"{}), as evaluate() or log() names the value'
)
GIVEN: dict[str, tuple[dict[str, Any], str]] = {
    "an optimizer": (
        {"optimizer": some()},
        "optimizer is torch.optim.SGD(...) itself, and a function that makes it of the params is wanted; "
        "write optimizer=lambda params: torch.optim.SGD(params, lr=0.25)",
    ),
    "an optimizer's class": (
        {"optimizer": Own},
        "optimizer is Own without its rate; write optimizer=lambda params: Own(params, rate=...)",
    ),
    "an optimizer's name": (
        {"optimizer": "adamw"}, f"optimizer cannot be called with the params: it is a str; {ADAMW}",
    ),
    "an optimizer without params": (
        {"optimizer": lambda: some()},
        f"optimizer cannot be called with the params: too many positional arguments; {ADAMW}",
    ),
    "a scheduler": (
        {"schedule": CosineAnnealingLR(some(), T_max=10)},
        f"schedule is {COSINE}(...) itself, made for another optimizer; "
        f"write schedule=functools.partial({COSINE}, T_max=10); it counts optimizer steps",
    ),
    "a plateau itself": ({"schedule": ReduceLROnPlateau(some())}, PLATEAU.format("")),
    "a plateau": ({"schedule": ReduceLROnPlateau}, PLATEAU.format("")),
    "a part of a plateau": (
        {"schedule": partial(ReduceLROnPlateau, mode="max", patience=3)},
        PLATEAU.format(", mode='max', patience=3"),
    ),
    "a function that returns a plateau": (
        {"schedule": lambda optimizer: ReduceLROnPlateau(optimizer)}, PLATEAU.format(""),
    ),
    "a plateau without its value": (
        {"schedule": plateau},
        'schedule is paceline.plateau, which makes one; write schedule=paceline.plateau("loss")',
    ),
    "a scheduler's class": (
        {"schedule": CosineAnnealingLR},
        f"schedule is {COSINE} without its T_max; "
        f"write schedule=functools.partial({COSINE}, T_max=...); it counts optimizer steps",
    ),
    "a part of a scheduler": (
        {"schedule": partial(StepLR, gamma=0.5)},
        "schedule is torch.optim.lr_scheduler.StepLR without its step_size; write schedule=functools.partial("
        "torch.optim.lr_scheduler.StepLR, step_size=...); it counts optimizer steps",
    ),
    "a function of another optimizer": (
        {"schedule": lambda optimizer: CosineAnnealingLR(optimizer and some(), 10)},
        f"schedule(optimizer) returned {COSINE} of another optimizer; make it of the optimizer that it is called with",
    ),
    "a function of the optimizer that returns none": (
        {"schedule": lambda optimizer: CosineAnnealingLR(optimizer, 10) and None},
        "schedule(optimizer) returned None; return one of torch's schedulers, or of a function of the step a factor",
    ),
    "a factor": ({"schedule": 0.1}, f"schedule cannot be called with the step: it is a float; {FACTOR}"),
    "a criterion": (
        {"loss": nn.CrossEntropyLoss()},
        f"loss is torch.nn.CrossEntropyLoss, which gets (output, batch), and batch is {MICRO_BATCH}; "
        "write loss=lambda output, batch: torch.nn.CrossEntropyLoss()(output, batch[1])",
    ),
    "a function of torch's": (
        {"loss": F.cross_entropy},
        f"loss is torch.nn.functional.cross_entropy, which gets (output, batch), and batch is {MICRO_BATCH}; "
        "write loss=lambda output, batch: torch.nn.functional.cross_entropy(output, batch[1])",
    ),
    "a criterion's class": (
        {"loss": nn.CrossEntropyLoss},
        f"loss is the class torch.nn.CrossEntropyLoss, and a function of (output, batch) is wanted; {LOSS}",
    ),
    "a loss of the output": (
        {"loss": lambda output: output.sum()},
        f"loss cannot be called with (output, batch): too many positional arguments; {LOSS}",
    ),
    "a forward of the batch": (
        {"forward": lambda batch: batch[0]},
        "forward cannot be called with (model, batch): too many positional arguments; "
        "write forward=lambda model, batch: model(batch[0])",
    ),
    "words of the plan": (
        {"precision": "bf16", "micro": 8, "compile": True},
        "precision= and micro= and compile= are words of the plan, and no argument of Trainer; "
        'write plan="precision=bf16 micro=8 compile"',
    ),
    "a word beside the plan": (
        {"shard": 2, "plan": "micro=8"},
        'shard= is a word of the plan, and no argument of Trainer; write plan="micro=8 shard=2"',
    ),
    "another library's word": ({"batch_size": 8}, "Trainer has no argument batch_size=; did you mean global_batch=?"),
    "a word of steps": ({"epochs": 3}, "Trainer has no argument epochs=; say it in steps(dataset, ...)"),
    "a slip": ({"optimiser": Own}, "Trainer has no argument optimiser=; did you mean optimizer=?"),
    "what nobody knows": (
        {"zebra": 1},
        "Trainer has no argument zebra=; there are model, loss, optimizer, global_batch, forward, schedule, clip_norm, "
        "seed, plan, tensor, pipeline_blocks, loss_over",
    ),
    "a global batch": (
        {"global_batch": 16.0},
        "global_batch=16.0 is a float, and a whole number is wanted; "
        "write global_batch=16, the rows of one optimizer step",
    ),
    "an optimizer that is not returned": (
        {"optimizer": lambda params: None},
        "optimizer(params) returned None; return a torch optimizer, or a list of them, made from params",
    ),
    "no model": ({"model": None}, f"model is a NoneType, {MODEL}; write model=Net()"),
    "models": ({"model": [net()]}, f"model is a list, {MODEL}; write model=Net()"),
    "a model's class": (
        {"model": nn.Bilinear},
        f"model wants in1_features and in2_features and out_features, {MODEL}; "
        "write model=Bilinear(in1_features=..., in2_features=..., out_features=...)",
    ),
    "a dict of a plan": (
        {"plan": {"micro": 8}},
        "plan={'micro': 8} is a dict, and one line of text is wanted; write plan=\"micro=8 precision=bf16\"",
    ),
    "a schedule of nothing": (
        {"schedule": lambda step: None},
        "schedule gives no factor of the learning rate for step 0 "
        f"(unsupported operand type(s) for *: 'float' and 'NoneType'); {FACTOR}",
    ),
    "a maker of schedules": (
        {"schedule": paceline.cosine},
        "schedule is paceline.cosine, which makes one; write schedule=paceline.cosine(1000), with the steps in all",
    ),
    "a forward the wrong way round": (
        {"forward": lambda batch, model: model(batch[0])},
        "forward cannot be called with (model, batch): it takes (batch, model); "
        "write forward=lambda model, batch: model(batch[0])",
    ),
    "a loss the wrong way round": (
        {"loss": lambda batch, output: F.cross_entropy(output, batch[1])},
        f"loss cannot be called with (output, batch): it takes (batch, output); {LOSS}",
    ),
    "a seed": (
        {"seed": "1"},
        "seed='1' is a str, and a whole number is wanted; write seed=N, from which all random streams follow",
    ),
    **{
        f"a norm of {norm!r}": (
            {"clip_norm": norm},
            f"clip_norm={norm!r} is a {type(norm).__name__}, and a finite number above 0 is wanted, or None; "
            "write clip_norm=1.0, the largest norm of the mean gradient",
        )
        for norm in (0.0, -1.0, float("nan"), float("inf"), True, "1")
    },
}  # fmt: skip


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize("case", GIVEN)
def test_what_a_trainer_cannot_take(case: str) -> None:
    given, message = GIVEN[case]
    with pytest.raises(UsageError) as caught:
        trained(**given)
    assert str(caught.value) == message


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize(
    ("aim", "message"),
    [
        (
            {"epochs": 1.5},
            "epochs=1.5 is a float, and a whole number is wanted; "
            "write epochs=2, passes over the dataset, or count=, the optimizer steps",
        ),
        ({"count": True}, "count=True is a bool, and a whole number is wanted; write count=N, the optimizer steps"),
        ({"count": -1}, "count=-1 is less than none; write count=N, the optimizer steps"),
    ],
)
def test_aims_that_are_no_whole_numbers(aim: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        make().steps(data, **aim)
    assert str(caught.value) == message
    assert len(list(make(global_batch=torch.tensor(24)).steps(data, count=torch.tensor(2)))) == 2


ROWS = (
    "is not a dataset, which has rows by number; "
    "give of a class an instance, of a dict one value as data['train'], of tensors TensorDataset(*tensors)"
)
CALLS: dict[str, tuple[Any, type[Exception], str]] = {
    "a batch size": (
        lambda t: t.steps(data, batch_size=8), UsageError,
        "steps() has no argument batch_size=; say global_batch=8 of the Trainer",
    ),
    "shuffle": (
        lambda t: t.steps(data, shuffle=True), UsageError,
        "steps() has no argument shuffle=; each epoch has an order of its own, and order= says another",
    ),
    "epoch": (lambda t: t.steps(data, epoch=3), UsageError, "steps() has no argument epoch=; did you mean epochs=?"),
    "a batch size of evaluate": (
        lambda t: t.evaluate(data, best(a=1.0), batch_size=8), UsageError,
        "evaluate() has no argument batch_size=; say micro=8 in the plan, the rows that are computed at once",
    ),
    "values without names": (
        lambda t: t.log({"a": 1}), UsageError, "log() takes values by name; write trainer.log(**{'a': 1})",
    ),
    "a collate": (
        lambda t: t.steps(data, collate=True), UsageError,
        "collate=True is a bool, and a function of a list of rows is wanted; "
        "write collate=torch.utils.data.default_collate",
    ),
    "an order": (
        lambda t: t.steps(data, order=[1, 0]), UsageError,
        "order=[1, 0] is a list, and a function of (position, size, seed, epoch) is wanted; "
        "write order=paceline.sample_index",
    ),
    "a loader": (
        lambda t: t.steps(data, loader=2), UsageError,
        'loader=2 is an int, and a dict is wanted; write loader={"num_workers": 2}',
    ),
    "a dict": (lambda t: t.steps({"train": data}), DatasetError, f"a dict {ROWS}"),
    "tensors": (lambda t: t.evaluate(data.tensors, best(a=1.0)), DatasetError, f"a tuple {ROWS}"),
    "a text": (lambda t: t.steps("data.csv"), DatasetError, f"a str {ROWS}"),
    "a class": (lambda t: t.steps(Maps), DatasetError, f"the class Maps {ROWS}"),
    "a metric's class": (
        lambda t: t.evaluate(data, Right), MetricError,
        "<class 'test_wrong_arguments.Right'> is no metric; write Right(), which makes one of the class",
    ),
    "a pair the wrong way round": (
        lambda t: t.evaluate(data, (len, Right())), MetricError,
        "(<built-in function len>, right) is no metric; "
        "write (metric, lambda output, batch: (output, batch[1])): the object comes first",
    ),
}  # fmt: skip


class Right:
    update = compute = reset = None

    def __repr__(self) -> str:
        return "right"


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize("case", CALLS)
def test_what_a_method_cannot_take(case: str) -> None:
    call, kind, message = CALLS[case]
    with pytest.raises(kind) as caught:
        call(make())
    assert str(caught.value) == message


@pytest.mark.usefixtures("run")
def test_a_plan_may_be_one() -> None:
    assert make(plan=Plan(micro=8)).plan.micro == 8


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_a_loop_where_nothing_can_be_trained(off: Any) -> None:
    mine = make()
    with off(), pytest.raises(UsageError) as caught:
        list(mine.steps(data))
    assert str(caught.value) == (
        "the loop over steps() runs under torch.no_grad() or inference_mode(), where nothing is trained; "
        "put these around the part of the body that is meant"
    )


@pytest.mark.usefixtures("run")
def test_a_loss_whose_counts_are_not_those_of_its_rows(run: Any) -> None:
    list(make(loss=lambda o, b: (F.cross_entropy(o, b[1], reduction="sum"), 1)).steps(data))
    (note,) = [entry["text"] for entry in happened(run, "note")]
    told = "the loss is not a sum over rows (two micro-batches together give a count of 1, one by one a count of 2), so"
    assert note.startswith(told)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["train.py"], "train.py is no command; write paceline run train.py"),
        (["run", "--wrokers", "4", "train.py"], "paceline run does not know --wrokers; did you mean --workers?"),
        (
            ["check", "train.py", "--lr", "3"],
            "paceline check does not know --lr; see `paceline check --help`; the script's own arguments stand after --",
        ),
        (
            ["run", "--workers", "2", "--shares", "-1,2", __file__],
            "shares '-1,2' do not fit 2 workers; give one weight per worker, none negative, not all zero",
        ),
        (["run", "--run-dir", __file__, __file__], f"--run-dir {__file__} is a file; give a folder, or leave it out"),
    ],
)
def test_commands_that_cannot_be(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert capsys.readouterr().err == f"paceline: {told}\n"
