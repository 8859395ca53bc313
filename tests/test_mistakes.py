"""What people give instead of what is wanted: each is told what it was, what it should be, and the line to write."""

from __future__ import annotations

from collections import namedtuple
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from basics import cross_entropy, data, make, net, x
from launching import train_basics
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau, StepLR
from torch.utils.data import Dataset

from paceline.errors import NonFiniteLossError, UsageError, hint_of
from paceline.trainer import Trainer

ADAMW = "write optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3)"
COSINE = "torch.optim.lr_scheduler.CosineAnnealingLR"
FACTOR = f"write schedule=lambda step: min(1.0, (step + 1) / 100), or schedule=functools.partial({COSINE}, T_max=...)"
LOSS = "write loss=lambda output, batch: torch.nn.functional.cross_entropy(output, batch[1])"
MICRO_BATCH = "[3x10 float64, 3 int64]"


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
        "seed, plan",
    ),
    "a global batch": (
        {"global_batch": 16.0},
        "global_batch=16.0 is a float, and a whole number is wanted; "
        "write global_batch=16, the rows of one optimizer step",
    ),
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
        "worker 0: micro-batch 1 (rows 3-5 of epoch 0) and 6 more)"
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
