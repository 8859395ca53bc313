"""Metrics that are no sums: torchmetrics' objects and a user's own, beside one process over all rows at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from alone import trainer
from basics import net, x
from cases import rows
from launching import METRICS, train_basics
from safetensors.torch import load_file

from paceline.checkpoint.tree import pack, unpack
from paceline.errors import MetricError

SCRIPT = """
import json, os, signal
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import BinaryAUROC, BinaryConfusionMatrix, BinaryF1Score
from torchmetrics.regression import PearsonCorrCoef, SpearmanCorrCoef
def score(o, b):
    if os.environ["PACELINE_RANK"] == "{lost}" and len(asked) == 3 and not os.path.exists("lost"):
        open("lost", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    asked.append(0)
    return o.softmax(1)[:, 1]
asked = []
kinds = {{"auc": BinaryAUROC(), "f1": BinaryF1Score(), "confusion": BinaryConfusionMatrix()}}
figures = MetricCollection([PearsonCorrCoef(), SpearmanCorrCoef()], prefix="of ")
t = make(plan="exact micro=3")
some = torch.utils.data.Subset(data, range(95))
for report in t.steps(data, count=8):
    if report.step == 4:
        t.export("weights.safetensors")
        found = t.evaluate(some, (kinds, lambda o, b: (score(o, b), b[1])))
        found |= t.evaluate(some, (figures, lambda o, b: {{"preds": score(o, b), "target": b[0].sum(1)}}))
        found |= t.evaluate(some, (MeanMetric(), lambda o, b: (score(o, b), b[0][:, 0].abs())))
        few = t.evaluate(torch.utils.data.Subset(data, range(4)), (kinds, lambda o, b: (score(o, b), b[1])))
        assert few["n"] == 4 and int(few["confusion"].sum()) == 4
        for one in [*kinds.values(), *figures.values()]:
            assert one.sync_on_compute and not one.update_called, one
        with open(f"found-{{os.environ['PACELINE_RANK']}}.json", "w") as file:
            json.dump({{name: v.tolist() if isinstance(v, torch.Tensor) else v for name, v in found.items()}}, file)
"""


def alone(weights: Path) -> dict[str, Any]:
    """Each of them by torchmetrics itself, of all rows at once."""
    from torchmetrics import MeanMetric  # here and below, because it takes seconds that other tests need not wait
    from torchmetrics.classification import BinaryAUROC, BinaryConfusionMatrix, BinaryF1Score
    from torchmetrics.regression import PearsonCorrCoef, SpearmanCorrCoef

    model, some = net(), x[:95]
    model.load_state_dict(load_file(weights))
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


def measures(folder: Path, workers: int, shares: str, lost: int | str) -> None:
    train_basics(folder, SCRIPT.format(lost=lost), workers, *(["--shares", shares] if shares else []), **METRICS)
    assert (folder / "lost").exists() == (lost != "")
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("found-*.json"))]
    assert len(found) == workers - (lost != "")
    assert all(one == found[0] for one in found)
    expected = alone(folder / "weights.safetensors")
    assert found[0].keys() == {*expected, "n"}
    assert found[0].pop("n") == 95
    for name, value in found[0].items():
        assert torch.allclose(torch.tensor(value).double(), expected[name].double(), rtol=1e-5, atol=1e-6), name


def test_the_result_is_that_of_one_process(tmp_path: Path) -> None:
    measures(tmp_path, 3, "3,1,2", 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "shares", "lost"),
    [(1, "", ""), (2, "", 0), (2, "3,1", 1), (3, "", 0), (5, "1,2,2,3,1", 3), (5, "", ""), (5, "", 0)],
)
def test_the_result_is_that_of_one_process_on_any_workers(workers: int, shares: str, lost: Any, tmp_path: Path) -> None:
    measures(tmp_path, workers, shares, lost)


class Own:
    """A state of each kind, without torchmetrics."""

    _defaults: dict[str, Any] = {  # noqa: RUF012
        "mean": torch.zeros((), dtype=torch.float64),
        "most": torch.tensor(-1e9),
        "least": torch.tensor(1e9),
        "rows": torch.tensor(100),
        "total": torch.tensor(5.0),
        "wide": torch.zeros(2000),
        "parts": torch.zeros(0),
        "middle": torch.zeros(1),
        "each": torch.zeros(1),
        "texts": [],
    }
    _reductions: dict[str, Any] = {  # noqa: RUF012
        "mean": "mean",
        "most": "max",
        "least": "min",
        "rows": "sum",
        "total": "sum",
        "wide": "sum",
        "parts": "cat",
        "each": None,
        "middle": lambda stacked: stacked.median(0).values,
        "texts": None,
    }

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        for name, start in self._defaults.items():
            setattr(self, name, start.clone() if isinstance(start, torch.Tensor) else [])

    def update(self, output: torch.Tensor, batch: Any) -> None:
        value = batch[0][:, 0]
        self.mean, self.most, self.least = value.mean(), value.max(), value.min()
        self.rows += len(value)
        self.total = self.total + value.sum()
        self.wide += value.sum().float()
        self.parts, self.middle, self.each = value, value.max().reshape(1), value.sum().reshape(1)
        self.texts.append([str(len(value)), value[:1]])

    def compute(self) -> dict[str, Any]:
        found = {name: getattr(self, name) for name in self._defaults if name != "texts"}
        return {**found, "texts": float("".join(text for text, _ in self.texts))}


@pytest.mark.usefixtures("run")
def test_each_kind_of_state_merges_as_it_says() -> None:
    data, own = rows(2, 10, 10), Own()
    value = data.tensors[0][:, 0]
    found = trainer(plan="micro=4").evaluate(data, own)
    parts = value.split(4)
    assert found.pop("n") == 10
    assert abs(found["mean"] - float(value.mean())) < 1e-12
    assert (found["most"], found["least"]) == (float(value.max()), float(value.min()))
    assert found["rows"] == 110
    assert abs(found["total"] - 5 - float(value.sum())) < 1e-12
    assert torch.allclose(found["wide"], value.sum().float().expand(2000))
    assert torch.equal(found["parts"], value)
    assert found["middle"] == sorted(float(part.max()) for part in parts)[1]
    assert torch.allclose(found["each"], torch.stack([part.sum().reshape(1) for part in parts]))
    assert found["texts"] == 442
    assert int(own.rows) == 100


@pytest.mark.usefixtures("run")
def test_what_is_no_metric_is_told() -> None:
    from torchmetrics.classification import BinaryF1Score

    class Silent:
        update = compute = reset = lambda self, output=None, batch=None: None

    for metric, text in (
        (
            BinaryF1Score(),
            "BinaryF1Score.update(preds, target) does not say what it takes of output and batch; "
            "write evaluate(dataset, (metric, lambda output, batch: (output, batch[1])))",
        ),
        (
            Silent(),
            "Silent does not say how its states merge; "
            "give it _defaults and _reductions, as torchmetrics.Metric.add_state does",
        ),
        (
            {"a": 1},
            "{'a': 1} is no metric; "
            "give a function that returns {name: (sum, count)}, or an object with update, compute and reset",
        ),
    ):
        with pytest.raises(MetricError) as caught:
            trainer().evaluate(rows(2, 10, 10), metric)
        assert str(caught.value) == text


@pytest.mark.usefixtures("run")
def test_a_collection_needs_no_names() -> None:
    from torchmetrics import MetricCollection
    from torchmetrics.classification import BinaryAUROC, BinaryF1Score

    both = MetricCollection([BinaryF1Score(), BinaryAUROC()])
    found = trainer().evaluate(rows(2, 45, 10), (both, lambda o, b: (o.softmax(1)[:, 0], (b[1] == 0).long())))
    assert found.keys() == {"BinaryF1Score", "BinaryAUROC", "n"}


def test_one_value_of_any_stride_can_be_sent() -> None:
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
        "Mean.update(scores, weights) cannot be called with what the function beside it returns: missing a required "
        f"argument: 'scores'; {_NAMES}",
    ),
    (
        (Mean(), lambda output, batch: output),
        "Mean.update(scores, weights) cannot be called with what the function beside it returns: missing a required "
        f"argument: 'weights'; {_NAMES}",
    ),
    (
        Takes(),
        "Takes.update(output, batch, weights) cannot be called with output and batch: missing a required argument: "
        "'weights'; write (metric, lambda output, batch: (...)) with a function that returns (output, batch, weights)",
    ),
]


@pytest.mark.usefixtures("run")
def test_an_object_that_takes_other_arguments_is_refused_by_what_it_takes() -> None:
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
def test_what_needs_gradients_in_an_evaluation_is_told_how_to_have_them() -> None:
    hint = (
        "evaluate() and predict() compute without gradients: put what needs them, and the forward that they go "
        "through, under `with torch.enable_grad():`"
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


def test_dummy_micro_batches_of_an_evaluation_count_nothing(tmp_path: Path) -> None:
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
