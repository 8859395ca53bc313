"""Why a loss or gradient is not finite: the module, parameter, rows or function that made it, by exact text."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import train_basics
from scripts.basics import data, make, net
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from paceline.errors import NonFiniteLossError

ROWS = "(worker 0: micro-batch 2 (rows 6-8 of epoch 0))"
APPLIED = "; the step was not applied; "
LOOK = "look at these rows, lower the learning rate or set clip_norm="
ZEROS = (
    "check it for a logarithm, root or division at 0 and for overflows; otherwise lower the learning rate or set"
    " clip_norm="
)
LOSS = "check it for a logarithm or division at 0, and compute losses from logits, as cross_entropy does"
SPOILED = (
    "check what the script writes into weights; if an update did it, lower the learning rate or use a larger eps= of"
    " the optimizer, and resume from an earlier checkpoint"
)
GRADIENT = "check for a square root, division or logarithm at 0"

third = data.tensors[0][7]  # a row of micro-batch 2, in the order of the dataset


def odd(x: torch.Tensor) -> torch.Tensor:
    """1 in the row that goes wrong, else 0."""
    return (x[:, :1] == third[:1]).to(x)


class Wrong(nn.Module):
    """Wrong in that row: its output, or its gradient alone."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.inner = how, nn.Linear(10, 10).double()

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        if self.how == "value":
            return self.inner(x) / (1 - odd(x))
        if self.how == "between":
            return self.inner(x / (1 - odd(x)))
        found: torch.Tensor = self.inner(x)
        if self.how == "gradient":
            return found + (found * (1 - odd(x))).square().sum(1, keepdim=True).sqrt()
        return found


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wrong, self.head = Wrong("no"), nn.Linear(10, 2).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.wrong(x, mask=torch.full((2,), -math.inf)))


class Block(nn.Module):
    """Computes its part again in backward."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.wrong = Wrong(how)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.wrong, x, use_reentrant=False)


def steep(how: str, kind: Callable[[str], nn.Module] = Wrong) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(kind(how), nn.Linear(10, 2)).double()


def loss_that(does: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor, Any], Any]:
    return lambda output, batch: nn.functional.cross_entropy(output, batch[1]) + does(batch[0])


def refused(rows: Any = data, **options: Any) -> str:
    trainer = make(plan="micro=3", **options)
    with pytest.raises(NonFiniteLossError) as caught:
        list(trainer.steps(rows, count=1, order=lambda position, *_: position))
    return str(caught.value)


def spoiled(value: float) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = net()
        model[2].bias.data[0] = value
        return model

    return build


def holes() -> TensorDataset:
    x, y = (tensor.clone() for tensor in data.tensors)
    x[7, 3] = math.nan
    return TensorDataset(x, y)


LOSSES: dict[str, tuple[Callable[[], str], str]] = {
    "module": (lambda: refused(model=steep("value")), f"'0' (Wrong) produces the first inf{APPLIED}{ZEROS}"),
    "between modules": (lambda: refused(model=steep("between")), f"'0' (Wrong) produces the first inf{APPLIED}{ZEROS}"),
    "loss": (
        lambda: refused(loss=loss_that(lambda x: (1 - odd(x)).log().sum())),
        f"the loss function produces the first -inf{APPLIED}{LOSS}",
    ),
    "loss, of what had a mask": (
        lambda: refused(model=Masked, loss=loss_that(lambda x: (0 / (1 - odd(x))).sum())),
        f"the loss function produces the first nan{APPLIED}{LOSS}",
    ),
    "rows": (lambda: refused(rows=holes()), f"these rows contain nan{APPLIED}repair or remove these rows"),
    "forward": (
        lambda: refused(forward=lambda model, batch: model(batch[0] / (1 - odd(batch[0])))),
        f"the forward produces the first inf{APPLIED}{ZEROS}",
    ),
    "forward, of the output": (
        lambda: refused(forward=lambda model, batch: model(batch[0]) / (1 - odd(batch[0]))),
        f"the forward produces the first inf{APPLIED}{ZEROS}",
    ),
}


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize("case", LOSSES)
def test_what_made_a_loss_that_is_not_finite(case: str) -> None:
    made, told = LOSSES[case]
    found = made()
    assert found == f"the loss of step 1 is not finite {ROWS}: {told}"


@pytest.mark.usefixtures("run")
def test_a_parameter_that_was_not_finite_before() -> None:
    found = refused(model=spoiled(math.nan))
    assert found.endswith(f": the parameter '2.bias' was not finite before the step{APPLIED}{SPOILED}")


@pytest.mark.usefixtures("run")
def test_what_does_not_happen_again_is_not_explained() -> None:
    seen = []

    def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
        found = output.mean()
        if odd(batch[0]).any():
            seen.append(1)
            found = found / (len(seen) > 1)
        return found

    assert refused(loss=loss) == f"the loss of step 1 is not finite {ROWS}{APPLIED}{LOOK}"


GRADIENTS: dict[str, tuple[dict[str, Any], str]] = {
    "module": ({"model": steep("gradient")}, "'0.inner.weight' is nan{}, produced in the backward of '0' (Wrong)"),
    "computed again": (
        {"model": steep("gradient", Block)},
        "'0.wrong.inner.weight' is nan{}, produced in the backward of '0.wrong' (Wrong)",
    ),
    "loss": (
        {"loss": lambda output, batch: (output * (1 - odd(batch[0]))).square().sum(1).sqrt().sum()},
        "'0.weight' is nan{}, produced in the backward of the loss function",
    ),
}


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize("case", GRADIENTS)
def test_what_made_a_gradient_that_is_not_finite(case: str) -> None:
    options, told = GRADIENTS[case]
    found = refused(**options)
    where = ", in micro-batch 2 (rows 6-8 of epoch 0) on worker 0"
    assert re.sub(r"\([0-9.e-]+\)", "(LOSS)", found) == (
        "the gradient of step 1 is not finite, though its loss is (LOSS): that of "
        f"{told.format(where)} (SqrtBackward0){APPLIED}{GRADIENT}"
    )


@pytest.mark.usefixtures("run")
def test_to_look_for_it_leaves_nothing_behind() -> None:
    """Neither weights, statistics, gradients nor streams: what follows is what follows without it."""

    class Fragile(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.spoils = nn.Sequential(nn.BatchNorm1d(10), nn.Dropout(), nn.Linear(10, 2)).double(), ""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.layers(x)
            if self.spoils == "value":
                return found / 0
            return found + (found * 0).sqrt() if self.spoils == "gradient" else found

    def train(spoils: bool) -> tuple[nn.Module, torch.Tensor]:
        torch.manual_seed(5)
        trainer = make(model=Fragile)
        for step in range(4):
            for trainer.model.spoils in ("value", "gradient") if spoils and step == 2 else ():
                with pytest.raises(NonFiniteLossError):
                    trainer.step([tensor[:24] for tensor in data.tensors])
            trainer.model.spoils = ""
            trainer.step([tensor[24 * step : 24 * step + 24] for tensor in data.tensors])
        return trainer.model, torch.rand(())

    (one, drawn), (other, again) = train(spoils=True), train(spoils=False)
    assert drawn == again
    for name, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


TEAM = """
from paceline.errors import NonFiniteLossError

class Wrong(nn.Linear):
    how = ""
    def forward(self, x):
        odd = (x[:, :1] == data.tensors[0][13, :1]).to(x)
        found = super().forward(x / (1 - odd) if self.how == "value" else x)
        return found + (found * (1 - odd)).square().sum(1, keepdim=True).sqrt() if self.how == "gradient" else found

t = make(model=lambda: nn.Sequential(Wrong(10, 10), nn.ReLU(), nn.Linear(10, 2)).double())
for number, Wrong.how in enumerate(["value", "gradient"]):
    try:
        list(t.steps(data, count=1, order=lambda position, *_: position))
    except NonFiniteLossError as error:
        print("told:", error)
"""
VALUE = (
    "the loss of step 1{} is not finite (worker 1: micro-batch 4 (rows 12-14 of epoch 0)): "
    "'0' (Wrong) produces the first nan"
)
SLOPE = "the gradient of step 1{} is not finite, though its loss is (LOSS): that of '0.weight' is nan"
MORE = ", in micro-batch 4 (rows 12-14 of epoch 0) on worker 1, produced in the backward of '0' (Wrong) (SqrtBackward0)"


@pytest.mark.parametrize(
    ("plan", "more"),
    [
        ("data=2", MORE),
        ("shard=2", ""),
        pytest.param("shard=2 zero=1", MORE, marks=pytest.mark.slow),
        pytest.param("data=2 exact", MORE, marks=pytest.mark.slow),
        pytest.param("shard=2 exact", "", marks=pytest.mark.slow),
        pytest.param("local=2 every=2", MORE, marks=pytest.mark.slow),
    ],
)
def test_all_workers_say_the_same(plan: str, more: str, tmp_path: Path) -> None:
    train_basics(tmp_path, TEAM, 2, "--plan", f"{plan} micro=3", code=0)
    logs = [(tmp_path / "out" / "logs" / f"worker-{worker}.log").read_text() for worker in range(2)]
    told = [re.sub(r"is \([0-9.e-]+\)", "is (LOSS)", "\n".join(re.findall("^told: (.*)$", log, re.M))) for log in logs]
    assert told[0] == told[1]
    of, applied = (" of island 1", APPLIED.replace("step", "round")) if "local" in plan else ("", APPLIED)
    assert told[0].splitlines() == [VALUE.format(of) + applied + ZEROS, SLOPE.format(of) + more + applied + GRADIENT]
