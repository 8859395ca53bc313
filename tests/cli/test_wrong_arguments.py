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
from torch.distributed.fsdp import FSDPModule
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
MODEL = "model= needs an nn.Module or a function without arguments that returns one; got"


class Own(SGD):
    def __init__(self, params: Any, rate: float) -> None:
        super().__init__(params, rate)


def some() -> SGD:
    return SGD(net().parameters(), lr=0.25)


PLATEAU = (
    "schedule is torch.optim.lr_scheduler.ReduceLROnPlateau, which needs a value to follow; write"
    ' schedule=paceline.plateau("loss"{}), with the name of a value that evaluate() or log() reports'
)
GIVEN: dict[str, tuple[dict[str, Any], str]] = {
    "an optimizer": (
        {"optimizer": some()},
        "optimizer= needs a function that makes an optimizer from params; got torch.optim.SGD(...) itself; "
        "write optimizer=lambda params: torch.optim.SGD(params, lr=0.25)",
    ),
    "an optimizer's class": (
        {"optimizer": Own},
        "optimizer is Own without its rate; write optimizer=lambda params: Own(params, rate=...)",
    ),
    "an optimizer's name": (
        {"optimizer": "adamw"}, f"optimizer= cannot be called with the parameters: it is a str; {ADAMW}",
    ),
    "an optimizer without params": (
        {"optimizer": lambda: some()},
        f"optimizer= cannot be called with the parameters: too many positional arguments; {ADAMW}",
    ),
    "a scheduler": (
        {"schedule": CosineAnnealingLR(some(), T_max=10)},
        f"schedule is {COSINE}(...) of another optimizer; "
        f"write schedule=functools.partial({COSINE}, T_max=10); it is called once per optimizer step",
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
        'schedule is the function paceline.plateau, which creates a schedule; write schedule=paceline.plateau("loss")',
    ),
    "a scheduler's class": (
        {"schedule": CosineAnnealingLR},
        f"schedule is {COSINE} without its T_max; "
        f"write schedule=functools.partial({COSINE}, T_max=...); it is called once per optimizer step",
    ),
    "a part of a scheduler": (
        {"schedule": partial(StepLR, gamma=0.5)},
        "schedule is torch.optim.lr_scheduler.StepLR without its step_size; write schedule=functools.partial("
        "torch.optim.lr_scheduler.StepLR, step_size=...); it is called once per optimizer step",
    ),
    "a function of another optimizer": (
        {"schedule": lambda optimizer: CosineAnnealingLR(optimizer and some(), 10)},
        f"schedule(optimizer) returned {COSINE} of another optimizer; "
        "create it for the optimizer that schedule= is called with",
    ),
    "a function of the optimizer that returns none": (
        {"schedule": lambda optimizer: CosineAnnealingLR(optimizer, 10) and None},
        "schedule(optimizer) returned None; return a scheduler of torch; or, from a function of the step, a factor",
    ),
    "a factor": ({"schedule": 0.1}, f"schedule= cannot be called with the step: it is a float; {FACTOR}"),
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
        f"loss= needs a function of (output, batch); got the class torch.nn.CrossEntropyLoss; {LOSS}",
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
        "precision= and micro= and compile= belong in the plan, not in the arguments of Trainer; "
        'write plan="precision=bf16 micro=8 compile"',
    ),
    "a word beside the plan": (
        {"shard": 2, "plan": "micro=8"},
        'shard= belongs in the plan, not in the arguments of Trainer; write plan="micro=8 shard=2"',
    ),
    "another library's word": ({"batch_size": 8}, "Trainer has no argument batch_size=; did you mean global_batch=?"),
    "a word of steps": ({"epochs": 3}, "Trainer has no argument epochs=; pass it to steps(dataset, ...)"),
    "a slip": ({"optimiser": Own}, "Trainer has no argument optimiser=; did you mean optimizer=?"),
    "what nobody knows": (
        {"zebra": 1},
        "Trainer has no argument zebra=; its arguments are model, loss, optimizer, global_batch, forward, schedule, "
        "clip_norm, seed, plan, tensor, pipeline_blocks, loss_over",
    ),
    "a global batch": (
        {"global_batch": 16.0},
        "global_batch= needs an integer, got 16.0; "
        "write global_batch=16, the rows of one optimizer step",
    ),
    "an optimizer that is not returned": (
        {"optimizer": lambda params: None},
        "optimizer(params) returned None; return a torch optimizer, or a list of optimizers, created from params",
    ),
    "no model": ({"model": None}, f"{MODEL} a NoneType; write model=Net()"),
    "models": ({"model": [net()]}, f"{MODEL} a list; write model=Net()"),
    "a model's class": (
        {"model": nn.Bilinear},
        f"{MODEL} a function that requires 'in1_features' and 'in2_features' and 'out_features'; "
        "write model=Bilinear(in1_features=..., in2_features=..., out_features=...)",
    ),
    "a dict of a plan": (
        {"plan": {"micro": 8}},
        "plan= needs a string; got {'micro': 8}; write plan=\"micro=8 precision=bf16\"",
    ),
    "a schedule of nothing": (
        {"schedule": lambda step: None},
        "schedule does not return a factor of the learning rate for step 0 "
        f"(unsupported operand type(s) for *: 'float' and 'NoneType'); {FACTOR}",
    ),
    "a maker of schedules": (
        {"schedule": paceline.cosine},
        "schedule is the function paceline.cosine, which creates a schedule; "
        "write schedule=paceline.cosine(1000), with the total number of steps",
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
        "seed= needs an integer, got '1'; write seed=N, the seed of all random streams",
    ),
    **{
        f"a norm of {norm!r}": (
            {"clip_norm": norm},
            f"clip_norm= needs a finite number above 0, or None; got {norm!r}; "
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
            "epochs= needs an integer, got 1.5; "
            "write epochs=2, passes over the dataset, or count=, the optimizer steps",
        ),
        ({"count": True}, "count= needs an integer, got True; write count=N, the optimizer steps"),
        ({"count": -1}, "count must be at least 0, got -1; write count=N, the optimizer steps"),
    ],
)
def test_aims_that_are_no_whole_numbers(aim: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        make().steps(data, **aim)
    assert str(caught.value) == message
    assert len(list(make(global_batch=torch.tensor(24)).steps(data, count=torch.tensor(2)))) == 2


ROWS = (
    "is not a dataset; pass an instance of the class; one value of the dict, for example"
    " data['train']; for tensors TensorDataset(*tensors)"
)
CALLS: dict[str, tuple[Any, type[Exception], str]] = {
    "a batch size": (
        lambda t: t.steps(data, batch_size=8), UsageError,
        "steps() has no argument batch_size=; pass global_batch=8 to Trainer",
    ),
    "shuffle": (
        lambda t: t.steps(data, shuffle=True), UsageError,
        "steps() has no argument shuffle=; every epoch is shuffled; pass order= for another order",
    ),
    "epoch": (lambda t: t.steps(data, epoch=3), UsageError, "steps() has no argument epoch=; did you mean epochs=?"),
    "a batch size of evaluate": (
        lambda t: t.evaluate(data, best(a=1.0), batch_size=8), UsageError,
        "evaluate() has no argument batch_size=; set micro=8 in the plan, the rows computed at once",
    ),
    "values without names": (
        lambda t: t.log({"a": 1}), UsageError, "log() needs values by name; write trainer.log(**{'a': 1})",
    ),
    "a collate": (
        lambda t: t.steps(data, collate=True), UsageError,
        "collate= needs a function of a list of samples; got True; "
        "write collate=torch.utils.data.default_collate",
    ),
    "an order": (
        lambda t: t.steps(data, order=[1, 0]), UsageError,
        "order= needs a function of (position, size, seed, epoch) or a sampler of torch; got [1, 0]; "
        "write order=paceline.sample_index",
    ),
    "a loader": (
        lambda t: t.steps(data, loader=2), UsageError,
        'loader= needs a dict; got 2; write loader={"num_workers": 2}',
    ),
    "a dict": (lambda t: t.steps({"train": data}), DatasetError, f"a dict {ROWS}"),
    "tensors": (lambda t: t.evaluate(data.tensors, best(a=1.0)), DatasetError, f"a tuple {ROWS}"),
    "a text": (lambda t: t.steps("data.csv"), DatasetError, f"a str {ROWS}"),
    "a class": (lambda t: t.steps(Maps), DatasetError, f"the class Maps {ROWS}"),
    "a metric's class": (
        lambda t: t.evaluate(data, Right), MetricError,
        "<class 'test_wrong_arguments.Right'> is not a metric; write Right(), which creates an object of the class",
    ),
    "a pair the wrong way round": (
        lambda t: t.evaluate(data, (len, Right())), MetricError,
        "(<built-in function len>, right) is not a metric; "
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


LOOP = "`for report in trainer.steps(dataset, epochs=N):`"
START = "choose the number of workers when you start the script: paceline run --workers N train.py"
ROWS_OF_A_STEP = (
    "pass global_batch= to Trainer, the rows of one optimizer step; micro=N in the plan sets the rows computed at once"
)
ELSEWHERE: dict[str, tuple[Any, str]] = {
    "max_steps": (10, "pass count=10 to steps(), the number of optimizer steps"),
    "max_epochs": (3, "pass epochs=3 to steps()"),
    "num_train_epochs": (3, "pass epochs=3 to steps()"),
    "num_workers": (4, 'pass loader={"num_workers": 4} to steps()'),
    "sampler": (None, "pass it as order= to steps()"),
    "batch_sampler": (None, "pass it as order= to steps()"),
    "callbacks": ([], f"put their code into the body of the loop: write {LOOP}"),
    "accelerator": ("gpu", "Paceline uses each worker's GPU, or the CPU on machines without one"),
    "devices": (2, START),
    "num_nodes": (2, START),
    "strategy": (
        "ddp",
        'workers are replicas by default; pass plan= to Trainer for more, for example plan="shard=2 zero=3"',
    ),
    "gradient_clip_val": (1.0, "pass clip_norm=1.0 to Trainer"),
    "max_grad_norm": (1.0, "pass clip_norm=1.0 to Trainer"),
    "accumulate_grad_batches": (2, ROWS_OF_A_STEP),
    "gradient_accumulation_steps": (2, ROWS_OF_A_STEP),
    "fp16": (
        True,
        'the plan sets the precision, plan="precision=fp16" of Trainer; without it weights compute in their own dtype',
    ),
    "bf16": (
        True,
        'the plan sets the precision, plan="precision=bf16" of Trainer; without it weights compute in their own dtype',
    ),
}


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize("name", ELSEWHERE)
def test_arguments_of_other_libraries(name: str) -> None:
    value, cure = ELSEWHERE[name]
    with pytest.raises(UsageError) as caught:
        trained(**{name: value})
    assert str(caught.value) == f"Trainer has no argument {name}=; {cure}"
    with pytest.raises(UsageError) as caught:
        make().steps(data, **{name: value})
    assert str(caught.value) == f"steps() has no argument {name}=; {cure}"


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize("name", ["fit", "train"])
def test_methods_of_other_libraries(name: str) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(make(), name)
    assert str(caught.value) == f"'Trainer' object has no attribute '{name}'; write {LOOP}"


@pytest.mark.usefixtures("run")
def test_a_wrapped_model() -> None:
    with pytest.raises(UsageError) as caught:
        trained(model=nn.DataParallel(net()))
    assert str(caught.value) == (
        "model is wrapped in DataParallel; pass the model without the wrapper: Paceline runs one worker for each GPU"
    )


@pytest.mark.usefixtures("run")
def test_a_model_that_fully_shard_has_sharded() -> None:
    wrapped = nn.Sequential(net())
    wrapped[0].__class__ = type("FSDPNet", (FSDPModule, type(wrapped[0])), {})  # what fully_shard does to its class
    with pytest.raises(UsageError) as caught:
        trained(model=wrapped)
    assert str(caught.value) == (
        "model is already sharded by torch's fully_shard; pass the model as it was before fully_shard: "
        'use plan="shard=N" to shard it over N workers'
    )


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
        "the loop over steps() runs under torch.no_grad() or inference_mode(), which disables training; "
        "use them only around code inside the loop that needs no gradients"
    )


@pytest.mark.usefixtures("run")
def test_a_loss_whose_counts_are_not_those_of_its_rows(run: Any) -> None:
    list(make(loss=lambda o, b: (F.cross_entropy(o, b[1], reduction="sum"), 1)).steps(data))
    (note,) = [entry["text"] for entry in happened(run, "note")]
    told = (
        "the loss is not a sum over rows (two micro-batches together give a count of 1, one by one they give a count"
        " of 2)"
    )
    assert note.startswith(told)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["train.py"], "unknown command train.py; use paceline run train.py"),
        (["run", "--wrokers", "4", "train.py"], "unknown option --wrokers of paceline run; did you mean --workers?"),
        (
            ["check", "train.py", "--lr", "3"],
            (
                "unknown option --lr of paceline check; see `paceline check --help`; "
                "pass the script's own arguments after --"
            ),
        ),
        (
            ["run", "--workers", "2", "--shares", "-1,2", __file__],
            (
                "shares '-1,2' do not fit 2 workers; give one number per worker; none may be negative, and not"
                " all may be zero"
            ),
        ),
        (
            ["run", "--run-dir", __file__, __file__],
            f"--run-dir {__file__} is a file; name a folder, or leave --run-dir out",
        ),
    ],
)
def test_commands_that_cannot_be(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert capsys.readouterr().err == f"paceline: {told}\n"
