"""Mistakes that nothing fails of at once: each is told of before it costs a training."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from alone import ONE_BY_ONE, decisions, happened
from basics import data, make, net
from launching import train_basics
from mistaken import best, trained
from oracle import apart
from safetensors.torch import load_file
from torch import nn
from torch.optim import SGD

import paceline
from paceline.errors import ChangingBufferError, UsageError


def test_a_layer_whose_size_changed_before_a_resume(tmp_path: Path) -> None:
    body = "t = make(model=lambda: nn.Sequential(nn.Linear(10, {}), nn.ReLU(), nn.Linear({}, 2)).double())\n"
    loop = "list(t.steps(data, epochs=3))\n"
    train_basics(tmp_path, body.format(16, 16) + loop, 2, "--steps", "5")
    done = train_basics(tmp_path, body.format(8, 8) + loop, 2, code=1)
    assert (
        "  CheckpointError: the checkpoint of step 5 in out does not fit the model of trainer 0: wrong shape: 0.bias "
        "([16] instead of [8]), 0.weight ([16, 10] instead of [8, 10]), 2.weight ([2, 16] instead of [2, 8]); "
        "restore the original model, or train the new one from the start in another --run-dir\n"
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
        "UsageError: the model cannot be exported to m.pt: only .safetensors files are written, because they run "
        "no code; use the name m.safetensors\n"
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
    "a buffer of the loss": ({"loss": Centred()}, " (in its buffer 'centre')"),
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
        rf"the loss of one micro-batch changes when it is computed again \({number}, then {number}\): "
        rf"the loss or the model keeps state between calls{re.escape(named)}, so the result depends on the number of "
        "workers; keep the state in a buffer declared with paceline.buffer, or in trainer.state and change it in the "
        "training loop, or train with one worker and micro= equal to global_batch=",
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


COUNTER = """
calls, total, seen = 0, torch.zeros(2).double(), []

def loss(output, batch):
    global calls
    calls += 1
    if CASE == "tensor":
        total.add_(output.detach().mean(0))
    seen.append(float(output.detach().mean()))
    return cross_entropy(output, batch) * (1 + 0.1 * (calls > 1000))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.drop, self.n, self.cache = net(), nn.Dropout(0.1), 0, None

    def forward(self, x):
        self.n += self.training
        self.cache = len(x) if self.cache is None else self.cache
        return self.drop(self.inner(x))

given = {"model": Net} if CASE == "model" else {"loss": loss}
list(make(**given).steps(data))
"""
COUNTED = {
    "loss": ("calls changes", "it"),
    "model": ("model.n changes", "it"),
    "tensor": ("total, calls change", "them"),
}


@pytest.mark.parametrize(
    ("case", "workers"),
    [(case, 1) for case in COUNTED]
    + [("loss", 2)]
    + [pytest.param(case, 3, marks=pytest.mark.slow) for case in COUNTED],
)
def test_what_changes_with_each_micro_batch_and_may_matter_later_is_named(
    case: str, workers: int, tmp_path: Path
) -> None:
    done = train_basics(tmp_path, f"CASE = {case!r}\n" + COUNTER, workers)
    names, what = COUNTED[case]
    line = (
        f"{names} each time a micro-batch is computed, by the loss or the model: if the loss depends on {what}, "
        f"the result depends on the number of workers; then keep {what} in trainer.state and change {what} in the body "
        "of the loop\n"
    )
    assert done.stderr.count(line) == 1
    assert done.stderr.count("each time a micro-batch") == 1


def test_logs_and_caches_and_metrics_of_a_loss_are_not_taken_for_counters(run: Any) -> None:
    from torchmetrics.classification import MulticlassAccuracy

    seen, found, accuracy, called = [0.0], dict[int, float](), MulticlassAccuracy(2), SimpleNamespace(first=None)

    def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
        called.first = output if called.first is None else called.first
        accuracy.update(output.detach(), batch[1])
        seen.append(float(output.detach().mean()))
        found[len(seen)] = seen[-1]
        return F.cross_entropy(output, batch[1])

    list(make(loss=loss).steps(data, epochs=2))
    assert len(seen) > 8
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
        f"{why}, which would then differ between workers; "
        "change it in the training loop instead, or train with one worker"
    )


def test_what_a_trainer_has_is_not_replaced(run: Any) -> None:
    mine = make()
    with pytest.raises(AttributeError) as caught:
        mine.model = net()
    assert (
        str(caught.value)
        == "trainer.model cannot be replaced: the optimizer refers to its parameters; create another Trainer, or use"
        " trainer.model.load_state_dict(...)"
    )
    with pytest.raises(AttributeError) as caught:
        mine.state = {"best": 0.0}
    assert str(caught.value) == (
        "trainer.state cannot be replaced: checkpoints hold this object; use trainer.state.update(...)"
    )


def test_a_best_value_that_nobody_gives(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    mine = make()
    mine.keep_best("acuracy")
    mine.log(lr=0.1)
    assert "keep_best() follows" not in capsys.readouterr().err
    for _ in range(2):
        mine.evaluate(data, best(accuracy=0.5, f1=0.25))
    told = (
        "keep_best() follows 'acuracy', but evaluate() reported 'accuracy': until it is reported, no value is"
        " followed yet\n"
    )
    assert capsys.readouterr().err.count(told) == 1
    logged = make()
    logged.keep_best("loss/val")
    logged.log(lr=0.1, val_loss=1.0)
    told = (
        "keep_best() follows 'loss/val', but log() reported 'val_loss': until it is reported, no value is followed"
        " yet\n"
    )
    assert capsys.readouterr().err.count(told) == 1
    right = make()
    right.keep_best("f1")
    right.evaluate(data, best(accuracy=0.5, f1=0.25))
    right.evaluate(data, best(accuracy=0.5))
    assert "keep_best() follows" not in capsys.readouterr().err
    with pytest.raises(UsageError) as caught:
        make().keep_best(best)  # type: ignore[arg-type]
    assert str(caught.value).endswith('; write keep_best("accuracy"), as evaluate() or log() names it')


def test_weights_that_no_step_was_made_for(run: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    told = "these weights are not trained: this process made no step; write `for report in trainer.steps(...):`\n"
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
    assert "these weights are not trained: this process made no step; " in capsys.readouterr().err


def test_parameters_that_no_optimizer_has_or_two(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def weights(params: Any) -> SGD:
        return SGD([(name, param) for name, param in params if name.endswith("weight")], lr=0.1)

    trained(optimizer=weights)
    assert (
        "2 of 4 trainable parameters are in no optimizer and will not be updated: 0.bias, 2.bias; pass them to an"
        " optimizer, or freeze them with requires_grad_(False)\n" in capsys.readouterr().err
    )
    with pytest.raises(UsageError) as caught:
        trained(optimizer=lambda params: [SGD(params, lr=0.1), weights(params)])
    assert str(caught.value) == (
        "0.weight is in two optimizers, and both would update it; pass each parameter to only one of them"
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
        "the script now has lr=0.01, but the run continues with lr=0.1 from the checkpoint; "
        "to change it, set it in the optimizer's param_groups after creating the Trainer\n",
        "the script now has seed=4, but the run continues with seed=3 from the checkpoint; "
        "to change it, start a new run in another --run-dir\n",
    ):
        assert done.stderr.count(told) == 1
    one, other = (load_file(tmp_path / f"{name}.safetensors") for name in ("whole", "b"))
    assert apart(one, other) < 1e-12


RESTING = (
    "{} in eval mode during training; from_pretrained() returns models in eval mode: "
    "write model=lambda: Net.from_pretrained(...).train(), unless this is intended"
)


@pytest.mark.parametrize(
    ("modes", "layers"),
    [
        ("...", ""),
        (".eval()", "2 dropout layers and 1 BatchNorm layer of the model are"),
        ("dropout", "1 dropout layer of the model is"),
        ("norm", ""),
    ],
)
def test_layers_in_eval_mode_during_training_are_named_once(
    modes: str, layers: str, run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Frozen statistics of BatchNorm in a model that trains are intended, as a rule."""
    model = nn.Sequential(net(), nn.BatchNorm1d(2), nn.Dropout(0.1), nn.Dropout(0.2), nn.Dropout(0.0)).double()
    if modes == ".eval()":
        model.eval()
    elif modes != "...":
        model[{"norm": 1, "dropout": 2}[modes]].eval()
    for _ in make(model=model).steps(data, count=3):
        pass
    printed = capsys.readouterr().err
    assert printed.count("in eval mode") == (2 if layers else 0)
    assert RESTING.format(layers) in printed if layers else "from_pretrained" not in printed
