"""Metrics that are no sums: torchmetrics' objects and a user's own, beside one process over all rows at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from alone import trainer
from basics import data, make, net, x
from cases import rows
from each_kind import EachKind, compare
from launching import METRICS, train_basics
from safetensors.torch import load_file
from torch.utils.data import Subset

from paceline.checkpoint.tree import pack, unpack
from paceline.errors import MetricError

KILLED = """
import os, signal
from each_kind import EachKind, compare
def slowly(output, batch):
    if os.environ["PACELINE_RANK"] == "{lost}" and len(asked) == 3 and not os.path.exists("lost"):
        open("lost", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    asked.append(0)
    return output
asked = []
t = make(plan="exact micro=3")
some = torch.utils.data.Subset(data, range(95))
"""
EACH_KIND = """
for report in t.steps(data, count=8):
    if report.step == 4:
        metric = EachKind()
        found = t.evaluate(some, (metric, lambda o, b: (slowly(o, b), b)))
        few = t.evaluate(torch.utils.data.Subset(data, range(4)), (metric, lambda o, b: (o, b)))
        compare(found, x[:95, 0], 3)
        compare(few, x[:4, 0], 3)
        assert int(metric.rows) == 100
        open(f"found-{os.environ['PACELINE_RANK']}", "w").close()
"""
TORCHMETRICS = """
import json
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import BinaryAUROC, BinaryConfusionMatrix, BinaryF1Score
from torchmetrics.regression import PearsonCorrCoef, SpearmanCorrCoef
def score(o, b):
    return slowly(o, b).softmax(1)[:, 1]
kinds = {"auc": BinaryAUROC(), "f1": BinaryF1Score(), "confusion": BinaryConfusionMatrix()}
figures = MetricCollection([PearsonCorrCoef(), SpearmanCorrCoef()], prefix="of ")
for report in t.steps(data, count=8):
    if report.step == 4:
        t.export("weights.safetensors")
        found = t.evaluate(some, (kinds, lambda o, b: (score(o, b), b[1])))
        found |= t.evaluate(some, (figures, lambda o, b: {"preds": score(o, b), "target": b[0].sum(1)}))
        found |= t.evaluate(some, (MeanMetric(), lambda o, b: (score(o, b), b[0][:, 0].abs())))
        few = t.evaluate(torch.utils.data.Subset(data, range(4)), (kinds, lambda o, b: (score(o, b), b[1])))
        assert few["n"] == 4 and int(few["confusion"].sum()) == 4
        for one in [*kinds.values(), *figures.values()]:
            assert one.sync_on_compute and not one.update_called, one
        with open(f"found-{os.environ['PACELINE_RANK']}", "w") as file:
            json.dump({name: v.tolist() if isinstance(v, torch.Tensor) else v for name, v in found.items()}, file)
"""


def by_torchmetrics(weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Each of them by torchmetrics itself, of all rows at once."""
    from torchmetrics import MeanMetric  # here and below, because it takes seconds that other tests need not wait
    from torchmetrics.classification import BinaryAUROC, BinaryConfusionMatrix, BinaryF1Score
    from torchmetrics.regression import PearsonCorrCoef, SpearmanCorrCoef

    model, some = net(), x[:95]
    model.load_state_dict(weights)
    with torch.no_grad():
        scores = model(some).softmax(1)[:, 1]
    target = (some.sum(1) > 0).long()
    given: dict[str, tuple[Any, tuple[torch.Tensor, torch.Tensor]]] = {
        "auc": (BinaryAUROC(), (scores, target)),
        "f1": (BinaryF1Score(), (scores, target)),
        "confusion": (BinaryConfusionMatrix(), (scores, target)),
        "of PearsonCorrCoef": (PearsonCorrCoef(), (scores, some.sum(1))),
        "of SpearmanCorrCoef": (SpearmanCorrCoef(), (scores, some.sum(1))),
        "MeanMetric": (MeanMetric(), (scores, some[:, 0].abs())),
    }
    for one, arguments in given.values():
        one.update(*arguments)
    return {name: one.compute() for name, (one, _) in given.items()}


def same_metrics(results: dict[str, Any], expected: dict[str, Any]) -> None:
    assert results.keys() == {*expected, "n"}
    assert results.pop("n") == 95
    for name, value in results.items():
        assert torch.allclose(torch.as_tensor(value).double(), expected[name].double(), rtol=1e-5, atol=1e-6), name


def evaluates(folder: Path, body: str, workers: int, shares: str, lost: int | str, **env: str) -> list[Path]:
    """The files of the workers that were not lost."""
    options = ["--shares", shares] if shares else []
    train_basics(folder, KILLED.format(lost=lost) + body, workers, *options, **env)
    assert (folder / "lost").exists() == (lost != "")
    files = sorted(folder.glob("found-*"))
    assert len(files) == workers - (lost != "")
    return files


def test_metric_states_merge_across_workers_through_a_kill(tmp_path: Path) -> None:
    evaluates(tmp_path, EACH_KIND, 3, "3,1,2", 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "shares", "lost"),
    [
        *[(1, "", ""), (2, "", 0), (2, "3,1", 1), (3, "", 0), (3, "3,1,2", 1)],
        *[(5, "1,2,2,3,1", 3), (5, "", ""), (5, "", 0)],
    ],
)
def test_torchmetrics_are_those_of_one_process_on_any_workers(
    workers: int, shares: str, lost: Any, tmp_path: Path
) -> None:
    found = [
        json.loads(file.read_text()) for file in evaluates(tmp_path, TORCHMETRICS, workers, shares, lost, **METRICS)
    ]
    assert all(one == found[0] for one in found)
    same_metrics(found[0], by_torchmetrics(load_file(tmp_path / "weights.safetensors")))


@pytest.mark.usefixtures("run")
def test_torchmetrics_are_those_of_one_process() -> None:
    """Their states are merged from many micro-batches."""
    from torchmetrics import MeanMetric, MetricCollection
    from torchmetrics.classification import BinaryAUROC, BinaryConfusionMatrix, BinaryF1Score
    from torchmetrics.regression import PearsonCorrCoef, SpearmanCorrCoef

    kinds = {"auc": BinaryAUROC(), "f1": BinaryF1Score(), "confusion": BinaryConfusionMatrix()}
    figures = MetricCollection([PearsonCorrCoef(), SpearmanCorrCoef()], prefix="of ")
    mine, some = make(plan="exact micro=3"), Subset(data, range(95))
    found = mine.evaluate(some, (kinds, lambda o, b: (o.softmax(1)[:, 1], b[1])))
    found |= mine.evaluate(some, (figures, lambda o, b: {"preds": o.softmax(1)[:, 1], "target": b[0].sum(1)}))
    found |= mine.evaluate(some, (MeanMetric(), lambda o, b: (o.softmax(1)[:, 1], b[0][:, 0].abs())))
    same_metrics(found, by_torchmetrics(mine.model.state_dict()))
    for one in [*kinds.values(), *figures.values()]:
        assert one.sync_on_compute
        assert not one.update_called


@pytest.mark.usefixtures("run")
def test_each_kind_of_metric_state_merges_as_it_says() -> None:
    rows_, metric = rows(2, 10, 10), EachKind()
    compare(trainer(plan="micro=4").evaluate(rows_, metric), rows_.tensors[0][:, 0], 4)
    assert int(metric.rows) == 100


@pytest.mark.usefixtures("run")
def test_evaluate_refuses_what_is_no_metric() -> None:
    from torchmetrics.classification import BinaryF1Score

    class Silent:
        update = compute = reset = lambda self, output=None, batch=None: None

    for metric, text in (
        (
            BinaryF1Score(),
            "BinaryF1Score.update(preds, target) does not tell which of output and batch it needs; "
            "write evaluate(dataset, (metric, lambda output, batch: (output, batch[1])))",
        ),
        (
            Silent(),
            "Silent does not declare how its states are merged; "
            "give it _defaults and _reductions, as torchmetrics.Metric.add_state does",
        ),
        (
            {"a": 1},
            "{'a': 1} is not a metric; "
            "pass a function that returns {name: (sum, count)}, or an object with update, compute and reset",
        ),
    ):
        with pytest.raises(MetricError) as caught:
            trainer().evaluate(rows(2, 10, 10), metric)
        assert str(caught.value) == text


@pytest.mark.usefixtures("run")
def test_metric_collection_needs_no_names() -> None:
    from torchmetrics import MetricCollection
    from torchmetrics.classification import BinaryAUROC, BinaryF1Score

    both = MetricCollection([BinaryF1Score(), BinaryAUROC()])
    found = trainer().evaluate(rows(2, 45, 10), (both, lambda o, b: (o.softmax(1)[:, 0], (b[1] == 0).long())))
    assert found.keys() == {"BinaryF1Score", "BinaryAUROC", "n"}


def test_pack_of_a_value_with_any_stride() -> None:
    """As the scores of a micro-batch of one row, a column of it."""
    one = torch.arange(4.0).view(2, 2)[:1, 1]
    assert one.stride() == (2,)
    assert unpack(pack([one]))[0].equal(one)


class Mean:
    """Of a score."""

    def __init__(self) -> None:
        self._defaults, self._reductions = {"total": torch.zeros(())}, {"total": "sum"}
        self.reset()

    def reset(self) -> None:
        self.total = torch.zeros(())

    def update(self, scores: torch.Tensor, weights: torch.Tensor) -> None:
        self.total += (scores * weights).sum()

    def compute(self) -> torch.Tensor:
        return self.total


class Takes(Mean):
    def update(self, output: torch.Tensor, batch: Any, weights: torch.Tensor) -> None:
        """More than there is."""


_NAMES = "let the function return a tuple in this order, or a dict with these names"
_UNFIT: list[tuple[Any, str]] = [
    (
        (Mean(), lambda output, batch: {"preds": output, "target": batch[1]}),
        (
            "Mean.update(scores, weights) cannot be called with the result of the function passed with it: missing a"
            f" required argument: 'scores'; {_NAMES}"
        ),
    ),
    (
        (Mean(), lambda output, batch: output),
        (
            "Mean.update(scores, weights) cannot be called with the result of the function passed with it: missing a"
            f" required argument: 'weights'; {_NAMES}"
        ),
    ),
    (
        Takes(),
        (
            "Takes.update(output, batch, weights) cannot be called with output and batch: missing a required"
            " argument: 'weights'; write (metric, lambda output, batch: (...)) with a function that returns (output,"
            " batch, weights)"
        ),
    ),
]


@pytest.mark.usefixtures("run")
def test_evaluate_refuses_a_metric_with_other_arguments() -> None:
    for metric, text in _UNFIT:
        with pytest.raises(MetricError) as caught:
            trainer().evaluate(rows(2, 10, 10), metric)
        assert str(caught.value) == text
    for given in (lambda o, b: (o, torch.ones(())), lambda o, b: {"weights": torch.ones(()), "scores": o}):
        assert trainer().evaluate(rows(2, 10, 10), (Mean(), given))["n"] == 10


def _slope(output: torch.Tensor, batch: Any) -> dict[str, Any]:
    slopes = torch.autograd.grad(output.sum(), batch[0].requires_grad_())
    return {"slope": (slopes[0].abs().sum(), 1)}


class _Force(torch.nn.Module):
    """The gradient of an energy."""

    def __init__(self, cured: bool) -> None:
        super().__init__()
        self.energy, self.cured = net(), cured

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad() if self.cured else torch.no_grad() if not self.training else torch.enable_grad():
            x = x.double().requires_grad_()
            return torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]


@pytest.mark.usefixtures("run")
def test_evaluate_and_predict_say_how_to_compute_gradients() -> None:
    hint = (
        "evaluate() and predict() compute without gradients: put the code that needs gradients, including the "
        "forward, under `with torch.enable_grad():`"
    )
    count = lambda output, batch: {"force": (output.abs().sum(), 1)}
    tries: list[Any] = [
        lambda: trainer().evaluate(rows(2, 10, 10), _slope),
        lambda: trainer(lambda: _Force(False)).evaluate(rows(2, 10, 10), count),
        lambda: list(trainer(lambda: _Force(False)).predict(rows(2, 10, 10))),
    ]
    for one in tries:
        with pytest.raises(RuntimeError) as caught:
            one()
        assert any(hint in note for note in caught.value.__notes__)
    cured = trainer(lambda: _Force(True))
    assert cured.evaluate(rows(2, 10, 10), count)["force"] > 0

    def slope(output: torch.Tensor, batch: Any) -> dict[str, Any]:
        with torch.enable_grad():
            x = batch[0].requires_grad_()
            return _slope(cured.model.energy(x.double()), [x])

    assert cured.evaluate(rows(2, 10, 10), slope)["slope"] > 0


def test_evaluate_does_not_count_dummy_micro_batches(tmp_path: Path) -> None:
    """Of 76 rows in micro-batches of 3 the last two, of 3 and 1, go to two of three workers; the third runs a dummy."""
    body = (
        "import json\n"
        "t = make()\n"
        "for r in t.steps(data, count=1): pass\n"
        "rows = TensorDataset(data.tensors[0][:76], data.tensors[1][:76])\n"
        "found = t.evaluate(rows, lambda o, b: {'rows': (float(len(o)), 1), 'x': (b[0].sum(), len(o))})\n"
        "open('found.json', 'w').write(json.dumps(found)) if t.main else None\n"
    )
    train_basics(tmp_path, body, 3, "--plan", "data=1 shard=3 zero=3")
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["n"] == 76
    assert found["rows"] == 76 / 26
    assert found["x"] == pytest.approx(float(x[:76].sum()) / 76, rel=1e-12)
