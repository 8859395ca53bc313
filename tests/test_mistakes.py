"""What people give instead of what is wanted: each is told what it was, what it should be, and the line to write."""

from __future__ import annotations

import re
from collections import namedtuple
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from alone import ONE_BY_ONE, decisions, happened
from basics import cross_entropy, data, make, net, x
from launching import train_basics
from oracle import apart
from safetensors.torch import load_file
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau, StepLR
from torch.utils.data import Dataset

import paceline
from paceline.cli import main
from paceline.errors import (
    ChangingBufferError,
    DatasetError,
    MetricError,
    NonFiniteLossError,
    UsageError,
    hint_of,
)
from paceline.plan import Plan
from paceline.trainer import Trainer

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


def trained(**given: Any) -> None:
    list(
        Trainer(
            **{"model": net, "loss": cross_entropy, "optimizer": partial(SGD, lr=0.1), "global_batch": 24} | given
        ).steps(data)
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
    "a scheduler that wants nothing": (
        {"schedule": ReduceLROnPlateau(some())},
        "schedule is torch.optim.lr_scheduler.ReduceLROnPlateau(...) itself, made for another optimizer; "
        "write schedule=torch.optim.lr_scheduler.ReduceLROnPlateau; it counts optimizer steps",
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
    "a function of the optimizer": (
        {"schedule": lambda optimizer: CosineAnnealingLR(optimizer, 10)},
        f"schedule is called with the step, and makes a scheduler of it; {FACTOR}",
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
        "<class 'test_mistakes.Right'> is no metric; write Right(), which makes one of the class",
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


def twice(loss: torch.Tensor) -> torch.Tensor:
    loss.backward()
    return loss


class Maps(Dataset[Any]):
    def __init__(self, kind: Any = dict) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return 96

    def __getitem__(self, row: int) -> Any:
        return self.kind(x=x[row], label=data.tensors[1][row])


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.inner(x * mask)


PAIRS = "params are (name, parameter) pairs: write [(name, p) for name, p in params if p.ndim > 1]"
MAP = "{'x': 3x10 float64, 'label': 3 int64}"
HINTS: dict[str, tuple[dict[str, Any], Any, type[Exception], str]] = {
    "an attribute of a list": (
        {"loss": lambda o, b: F.cross_entropy(o, b.label)}, data, AttributeError,
        f"batch is {MICRO_BATCH}: write batch[1]",
    ),
    "a list for a tensor": (
        {"loss": lambda o, b: (o - F.one_hot(b)).sum()}, data, TypeError,
        f"batch is {MICRO_BATCH}: write batch[1]",
    ),
    "a key of a list": (
        {"loss": lambda o, b: F.cross_entropy(o, b["label"])}, data, TypeError,
        f"batch is {MICRO_BATCH}: write batch[1]",
    ),
    "an attribute of a mapping": (
        {"forward": lambda m, b: m(b.x)}, Maps(), AttributeError, f"batch is {MAP}: write batch['x']",
    ),
    "a number for a key": (
        {"forward": lambda m, b: m(b["x"]), "loss": lambda o, b: F.cross_entropy(o, b[1])}, Maps(), KeyError,
        f"batch is {MAP}: write batch['x'] or batch['label']",
    ),
    "an attribute of a tensor": (
        {"loss": lambda o, b: F.cross_entropy(o, b.label)}, x, AttributeError, "batch is 3x10 float64: write batch",
    ),
    "a third of two": (
        {"loss": lambda o, b: F.cross_entropy(o, b[2])}, data, IndexError,
        f"batch is {MICRO_BATCH}: write batch[1]",
    ),
    "an output that is a tuple": (
        {"forward": lambda m, b: (m(b[0]), 1)}, data, TypeError,
        "output is (3x2 float64, int): write output[0] or output[1]",
    ),
    "keys that are no arguments": (
        {}, Maps(), TypeError,
        f"batch is {MAP} and goes to model(**batch), Sequential takes input: "
        "write forward=lambda model, batch: model(batch['x'])",
    ),
    "some keys that are arguments": (
        {"model": Two}, Maps(lambda **row: {"label": row["label"], "x": row["x"], "mask": row["x"]}), TypeError,
        "batch is {'label': 3 int64, 'x': 3x10 float64, 'mask': 3x10 float64} and goes to model(**batch), "
        "Two takes x, mask: write forward=lambda model, batch: model(batch['x'], batch['mask'])",
    ),
    "a forward of nothing": (
        {"forward": lambda model, batch: None}, data, TypeError,
        "output is None: the forward returns nothing; end it with return",
    ),
    "a backward of their own": (
        {"loss": lambda output, batch: twice(cross_entropy(output, batch))}, data, RuntimeError,
        "the trainer calls backward(): leave it out of loss and forward",
    ),
    "a model of two inputs": (
        {"model": Two}, data, TypeError,
        f"batch is {MICRO_BATCH} and goes to model(batch[0]), Two takes x, mask: "
        "write forward=lambda model, batch: model(batch[0], batch[1])",
    ),
}  # fmt: skip


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize("case", HINTS)
def test_what_a_batch_is_is_said_where_code_takes_it_for_something_else(case: str) -> None:
    given, dataset, kind, hint = HINTS[case]
    with pytest.raises(kind) as caught:
        list(make(**given).steps(dataset))
    assert hint_of(caught.value) == hint
    assert caught.traceback[-1].path.name != "hints.py"


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize("taken", [lambda params: [p for p in params if p.ndim > 1], lambda params: params.values()])
def test_params_that_are_taken_for_tensors(taken: Any) -> None:
    with pytest.raises(AttributeError) as caught:
        trained(optimizer=lambda params: SGD(taken(params), lr=0.1))
    assert hint_of(caught.value) == PAIRS


@pytest.mark.usefixtures("run")
def test_errors_about_something_else_get_no_hint() -> None:
    def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
        raise ValueError("bad row")

    with pytest.raises(ValueError, match="bad row") as caught:
        list(make(loss=loss).steps(data))
    assert hint_of(caught.value) == ""
    words = nn.Sequential(nn.Embedding(2, 2))  # whose numbers go further
    with pytest.raises(IndexError, match="out of range in self") as unknown:
        list(make(model=words, forward=lambda m, b: m(b[1] + 7), loss=lambda o, b: o.sum()).steps(data))
    assert hint_of(unknown.value) == ""
    with pytest.raises(KeyError) as other:
        list(make(forward=lambda m, b: m(b["x"]), loss=lambda o, b: {}["x"]).steps(Maps()))
    assert hint_of(other.value) == ""


def test_a_hint_stands_in_the_failure_block_and_the_exception_stays(tmp_path: Path) -> None:
    done = train_basics(tmp_path, "list(make(loss=lambda o, b: F.cross_entropy(o, b)).steps(data))\n", 2, code=1)
    block = done.stderr[done.stderr.index("worker 0 failed (") :]
    assert "  TypeError: cross_entropy_loss(): argument 'target' (position 2) must be Tensor, not list\n" in block
    assert "  at train.py:2 in <lambda>: list(make(loss=lambda o, b: F.cross_entropy(o, b)).steps(data))\n" in block
    assert f"next: batch is {MICRO_BATCH}: write batch[1]; then run `" in block


class Row(NamedTuple):
    x: torch.Tensor
    label: torch.Tensor


class Below(namedtuple("Below", "x label")):
    __slots__ = ()


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize("kind", [Row, Below])
def test_named_tuples_stay_what_they_are(kind: Any) -> None:
    """Cut, merged, moved and evaluated: a batch keeps its names."""
    seen = set()

    def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
        seen.add(type(batch))
        return F.cross_entropy(output, batch.label)

    mine = make(loss=loss)
    list(mine.steps(Maps(kind), epochs=2))
    mine.step(kind(*data[:24]))
    assert mine.evaluate(Maps(kind), lambda o, b: {"label": (b.label.sum(), len(b.x))})["n"] == 96
    assert seen == {kind}
    other = make()
    list(other.steps(data, epochs=2))
    other.step(list(data[:24]))
    for one, two in zip(mine.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("run")
def test_a_loss_that_is_not_a_number_everywhere_names_two_places_and_a_count() -> None:
    with pytest.raises(NonFiniteLossError) as caught:
        list(make(loss=lambda o, b: F.cross_entropy(o, b[1]) * float("nan")).steps(data))
    assert caught.value.what == (
        "the loss of step 1 is not finite (worker 0: micro-batch 0 (rows 0-2 of epoch 0); "
        "worker 0: micro-batch 1 (rows 3-5 of epoch 0) and 6 more): the loss function makes the first nan"
    )


def test_a_layer_whose_size_changed_before_a_resume(tmp_path: Path) -> None:
    body = "t = make(model=lambda: nn.Sequential(nn.Linear(10, {}), nn.ReLU(), nn.Linear({}, 2)).double())\n"
    loop = "list(t.steps(data, epochs=3))\n"
    train_basics(tmp_path, body.format(16, 16) + loop, 2, "--steps", "5")
    done = train_basics(tmp_path, body.format(8, 8) + loop, 2, code=1)
    assert (
        "  CheckpointError: the checkpoint of step 5 in out does not fit the model of trainer 0: misshapen: 0.bias "
        "([16] instead of [8]), 0.weight ([16, 10] instead of [8, 10]), 2.weight ([2, 16] instead of [2, 8]); "
        "make the model as it was, or train the new one from the start in another --run-dir\n"
    ) in done.stderr.replace(f"{tmp_path}/", "")
    assert "size mismatch" not in done.stderr


def test_an_export_is_not_lost_for_want_of_a_folder_and_its_name_is_looked_at_before_the_training(
    tmp_path: Path,
) -> None:
    made = "paceline.Trainer(net, cross_entropy, torch.optim.SGD, 24)"
    body = f"t = {made}\nlist(t.steps(data))\nt.export('new/folder/m.safetensors')\nt.export('m.pt')\n"
    done = train_basics(tmp_path, body, 2, code=2)
    assert (tmp_path / "new/folder/m.safetensors").exists()
    note = (
        "note: t.export('m.pt') in line 5 will be refused: only .safetensors files are written; name it m.safetensors\n"
    )
    assert done.stderr.index(note) < done.stderr.index("global batch 24 = ")
    assert done.stderr.count(note) == 1
    assert (
        "UsageError: the model cannot be exported to m.pt: only .safetensors files, which run no code, are written; "
        "name it m.safetensors\n"
    ) in done.stderr


class Centred(nn.Module):
    """As DINO's loss."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(2, dtype=torch.float64))

    def forward(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        loss = F.cross_entropy(output - self.centre, batch[1])
        self.centre.mul_(0.9).add_(output.detach().mean(0), alpha=0.1)
        return loss


class Counting(nn.Module):
    """Its temperature follows the forwards that it has made."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.inner, self.n, self.drop = net(), 0, drop

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n += 1
        return self.inner(F.dropout(x, self.drop, training=True)) / (1 + 0.1 * self.n)


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.h = net(), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.inner(x) if self.h is None else self.inner(x) + 0.1 * self.h.mean(0)
        self.h = output.detach()
        return output


def counted() -> Any:
    seen: list[int] = []

    def loss(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
        seen.append(1)
        return F.cross_entropy(output, batch[1], reduction="sum"), len(output) + len(seen)

    return loss


KEEPS: dict[str, tuple[dict[str, Any], str]] = {
    "a buffer of the loss": ({"loss": Centred()}, ", as its buffer 'centre'"),
    "a counter of the model": ({"model": Counting}, ""),
    "a counter behind dropout": ({"model": lambda: Counting(0.5)}, ""),
    "the last output": ({"model": Remembering}, ""),
    "a count": ({"loss": counted()}, ""),
}


@pytest.mark.parametrize("case", KEEPS)
def test_what_a_loss_or_a_model_keeps_by_itself_is_told_of(case: str, run: Any) -> None:
    given, named = KEEPS[case]
    list(make(**given).steps(data, epochs=2))
    (note,) = [entry["text"] for entry in happened(run, "note")]
    number = r"(a count of )?[\d.]+"
    assert re.fullmatch(
        rf"the loss of one micro-batch is another one when it is computed again \({number}, then {number}\): "
        rf"something that the loss or the model keeps moves{named}, and the result depends on the number of workers; "
        "keep it in a buffer of the model and say how it is merged with paceline.buffer, put it in trainer.state and "
        "change it in the body of the loop, or train with one worker",
        note,
    )
    assert sum(entry["what"] == ONE_BY_ONE for entry in happened(run, "decision")) == 1


def test_what_is_drawn_or_merged_by_rule_is_not_taken_for_it(run: Any) -> None:
    list(make(model=lambda: nn.Sequential(nn.Dropout(0.5), net())).steps(data))
    whole = net()
    whole.register_buffer("centre", torch.zeros(2, dtype=torch.float64))
    paceline.buffer(whole, "centre", "sum", factor=0.9)

    def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
        found = F.cross_entropy(output - whole.centre, batch[1])
        whole.centre.mul_(0.9).add_(output.detach().mean(0), alpha=0.1)
        return found

    list(make(model=whole, loss=loss).steps(data))
    assert not happened(run, "note")


class Clamped(nn.Sequential):
    """As the critic of a Wasserstein GAN."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for param in self.parameters():
            param.data.clamp_(-0.1, 0.1)
        return super().forward(x)


def test_parameters_that_a_forward_writes_without_a_version(run: Any) -> None:
    list(make(model=lambda: Clamped(net())).steps(data))
    why = "the forward changes the parameter '0.0.weight'"
    assert decisions(run)[ONE_BY_ONE] == why
    with pytest.raises(ChangingBufferError) as caught:
        list(make(model=lambda: Clamped(net()), plan="exact").steps(data))
    assert str(caught.value) == (
        f"{why}, which would come out differently on each worker; "
        "change it in the body of the loop, or train with one worker"
    )


def test_what_a_trainer_has_is_not_replaced(run: Any) -> None:
    mine = make()
    with pytest.raises(AttributeError) as caught:
        mine.model = net()
    assert str(caught.value) == (
        "trainer.model cannot be replaced: the optimizer has its parameters; "
        "make another Trainer, or trainer.model.load_state_dict(...)"
    )
    with pytest.raises(AttributeError) as caught:
        mine.state = {"best": 0.0}
    assert str(caught.value) == (
        "trainer.state cannot be replaced: a checkpoint keeps what lies in it; write trainer.state.update(...)"
    )


def best(**values: float) -> Any:
    return lambda output, batch: {name: (value * len(output), len(output)) for name, value in values.items()}


def test_a_best_value_that_nobody_gives(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    mine = make()
    mine.keep_best("acuracy")
    mine.log(lr=0.1)
    assert "keep_best() follows" not in capsys.readouterr().err
    for _ in range(2):
        mine.evaluate(data, best(accuracy=0.5, f1=0.25))
    told = "keep_best() follows 'acuracy', and evaluate() gave 'accuracy': until there is one, no best is kept\n"
    assert capsys.readouterr().err.count(told) == 1
    logged = make()
    logged.keep_best("loss/val")
    logged.log(lr=0.1, val_loss=1.0)
    told = "keep_best() follows 'loss/val', and log() gave 'val_loss': until there is one, no best is kept\n"
    assert capsys.readouterr().err.count(told) == 1
    right = make()
    right.keep_best("f1")
    right.evaluate(data, best(accuracy=0.5, f1=0.25))
    right.evaluate(data, best(accuracy=0.5))
    assert "keep_best() follows" not in capsys.readouterr().err
    with pytest.raises(UsageError) as caught:
        make().keep_best(best)  # type: ignore[arg-type]
    assert str(caught.value).endswith(
        ', and the name of a value is wanted; write keep_best("accuracy"), as evaluate() or log() names it'
    )


def test_weights_that_no_step_was_made_for(run: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    told = "these weights are not trained: no step was made here; write `for report in trainer.steps(...):`\n"
    mine = make()
    mine.export(tmp_path / "a.safetensors")
    assert capsys.readouterr().err.count(told) == 1
    mine.model.load_state_dict(net().state_dict())
    mine.export(tmp_path / "b.safetensors")
    trained = make()
    list(trained.steps(data))
    trained.export(tmp_path / "c.safetensors")
    assert "not trained" not in capsys.readouterr().err


def test_no_epochs_are_no_training(run: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    mine = make()
    list(mine.steps(data, epochs=0))
    mine.export(tmp_path / "a.safetensors")
    assert "these weights are not trained: no step was made here; " in capsys.readouterr().err


def test_parameters_that_no_optimizer_has_or_two(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def weights(params: Any) -> SGD:
        return SGD([(name, param) for name, param in params if name.endswith("weight")], lr=0.1)

    trained(optimizer=weights)
    assert (
        "2 of 4 trainable parameters are in no optimizer and stay as they are: 0.bias, 2.bias; "
        "give them to one, or freeze them with requires_grad_(False)\n"
    ) in capsys.readouterr().err
    with pytest.raises(UsageError) as caught:
        trained(optimizer=lambda params: [SGD(params, lr=0.1), weights(params)])
    assert str(caught.value) == (
        "0.weight is in two optimizers, which would both update it; give each parameter to one of them"
    )


def test_another_learning_rate_and_another_seed_before_a_resume(tmp_path: Path) -> None:
    body = (
        "t = paceline.Trainer(net, cross_entropy, lambda params: torch.optim.SGD(params, lr={}), 24, seed={})\n"
        "print(*[report.lr for report in t.steps(data)])\nt.export('{}.safetensors')\n"
    )
    train_basics(tmp_path, body.format(0.1, 3, "whole"), 2)
    (tmp_path / "out").rename(tmp_path / "whole")
    train_basics(tmp_path, body.format(0.1, 3, "a"), 2, "--steps", "2")
    done = train_basics(tmp_path, body.format(0.01, 4, "b"), 2)
    assert done.stdout == "0.1 0.1\n"
    for told in (
        "the script says lr=0.01 now, and lr=0.1 of the checkpoint goes on; "
        "to change it, set it in the optimizer's param_groups after the Trainer is made\n",
        "the script says seed=4 now, and seed=3 of the checkpoint goes on; "
        "to change it, start a new run in another --run-dir\n",
    ):
        assert done.stderr.count(told) == 1
    one, other = (load_file(tmp_path / f"{name}.safetensors") for name in ("whole", "b"))
    assert apart(one, other) < 1e-12
