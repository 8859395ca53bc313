"""What a Trainer does beside training: evaluate, log, keep state, save and export; alone in its process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from alone import happened
from alone import trainer as make_trainer
from by_hand import built
from cases import mlp, rows
from public import Stream
from torch import nn

from paceline.errors import MetricError, UsageError
from paceline.session.trainer_state import TrainerState

pytestmark = pytest.mark.usefixtures("run")

# -- evaluation -------------------------------------------------------------------------------------------------


def accuracy(output: torch.Tensor, batch: Any) -> dict[str, tuple[Any, Any]]:
    return {"right": ((output.argmax(1) == batch[1]).sum(), len(output))}


def test_evaluate_is_exact_in_eval_mode_and_restores_each_mode():
    model = nn.Sequential(nn.BatchNorm1d(10), nn.Dropout(0.5), mlp()).double()
    model[0].eval()
    trainer = make_trainer(model)
    seen: list[bool] = []

    def metric(output: torch.Tensor, batch: Any) -> dict[str, tuple[Any, Any]]:
        seen.append(model.training or model[1].training or torch.is_grad_enabled())
        return accuracy(output, batch)

    x, y = rows(2, 45, 10).tensors
    results = [trainer.evaluate(rows(2, 45, 10), metric)]
    for _ in trainer.steps(rows(1, 45, 10), count=1):
        results.append(trainer.evaluate(rows(2, 45, 10), metric))
    assert seen
    assert not any(seen)
    assert [module.training for module in (model, *model)] == [True, False, True, True]
    with torch.no_grad():
        model.eval()
        assert results[1] == {"right": int((model(x).argmax(1) == y).sum()) / 45, "n": 45}


@pytest.mark.parametrize("form", ["mean", "sum", "metrics"])
def test_evaluate_without_a_metric_gives_the_loss(form):
    """The loss as a mean, as a sum and a count, and with metrics."""

    def loss(output: torch.Tensor, batch: Any) -> Any:
        total = nn.functional.cross_entropy(output, batch[1], reduction="sum")
        made = {"mean": total / len(output), "sum": (total, 2 * len(output))}
        return made.get(form, (total, len(output), accuracy(output, batch)))

    trainer = make_trainer(lambda: nn.Sequential(mlp(), nn.Dropout(0.5)).double(), loss)
    x, y = rows(2, 45, 10).tensors
    results = trainer.evaluate(rows(2, 45, 10))
    with torch.no_grad():
        output = trainer.model.eval()(x)
    mean = float(nn.functional.cross_entropy(output, y)) / (2 if form == "sum" else 1)
    right = {"right": int((output.argmax(1) == y).sum()) / 45} if form == "metrics" else {}
    assert results == {"loss": pytest.approx(mean, rel=1e-12), **right, "n": 45}


def test_failed_evaluate_metric_leaves_the_model_in_training():
    trainer = make_trainer(nn.Sequential(mlp(), nn.Dropout(0.5)))
    for bad, message in (
        (lambda output, batch: output.sum(), "the metric returned tensor("),
        (lambda output, batch: {"sum": output.sum()}, "the metric returned {'sum': tensor("),
        (lambda output, batch: {"sum": (1, 2, 3)}, "the metric returned {'sum': (1, 2, 3)}; "),
    ):
        with pytest.raises(MetricError) as caught:
            trainer.evaluate(rows(2, 45, 10), bad)
        assert str(caught.value).startswith(message)
        assert str(caught.value).endswith("; return {name: (sum, count)}")
        assert trainer.model.training
        assert trainer.model[1].training


def test_evaluate_metric_names_that_differ_between_rows_are_refused(golden):
    def metric(output: torch.Tensor, batch: Any) -> dict[str, tuple[Any, Any]]:
        return accuracy(output, batch) | ({"odd": (1, 1)} if len(output) < 2 else {})

    with pytest.raises(MetricError) as caught:
        make_trainer().evaluate(rows(2, 45, 10), metric)
    golden("evaluate metric names that differ between rows are refused", str(caught.value))


def test_evaluate_takes_another_model():
    trainer, other = make_trainer(), nn.Sequential(built(mlp, seed=9), nn.Dropout(0.5))
    x, y = rows(2, 45, 10).tensors
    found = trainer.evaluate(rows(2, 45, 10), accuracy, model=other)
    assert found["right"] == int((other[0](x).argmax(1) == y).sum()) / 45
    assert other.training


def test_evaluate_of_iterable_and_noisy_data_repeats_its_result():
    trainer = make_trainer()
    list(trainer.steps(rows(1, 45, 10), loader={"num_workers": 2}))  # options that are not for an iterable dataset
    ordered = trainer.evaluate(rows(11, 45, 10), accuracy)
    assert trainer.evaluate(Stream(noisy=False), accuracy) == ordered
    noisy = trainer.evaluate(Stream(noisy=True), lambda output, batch: {"sum": (output.sum(), len(output))})
    assert trainer.evaluate(Stream(noisy=True), lambda output, batch: {"sum": (output.sum(), len(output))}) == noisy


# -- log, state, save, export -----------------------------------------------------------------------------------


def test_logged_values_have_their_step(run):
    trainer = make_trainer()
    trainer.log(started=True)
    for _ in trainer.steps(rows(1, 45, 10), count=2):
        trainer.log(**trainer.evaluate(rows(2, 9, 10), accuracy), note="text", value=torch.tensor(2.5))
    events = happened(run, "log")
    assert [(event["step"], event["trainer"]) for event in events] == [(0, 0), (1, 0), (2, 0)]
    assert events[0]["values"] == {"started": True}
    assert {**events[1]["values"], "right": 0} == {"right": 0, "n": 9, "note": "text", "value": 2.5}
    assert [event["results"]["n"] for event in happened(run, "evaluate")] == [9, 9]


def test_main_and_steps_done_of_one_worker():
    trainer = make_trainer()
    assert trainer.main
    assert trainer.steps_done == 0
    assert trainer.complete  # there is no loop yet that would have to end


def test_trainer_state_is_restored_from_a_checkpoint():
    first = TrainerState()
    average = torch.optim.swa_utils.AveragedModel(mlp())
    first["best"], first["history"], first["average"], first["late"] = 0.5, [1, {"a": torch.ones(2)}], average, 7
    with torch.no_grad():
        average.module[0].weight.fill_(3.0)
    again = TrainerState()
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


def test_trainer_state_first_values_are_replaced_by_the_checkpoint():
    first = TrainerState()
    first["best"], first["average"] = 0.5, torch.optim.swa_utils.AveragedModel(mlp())
    for give in (TrainerState.update, TrainerState.__ior__):
        again, fresh = TrainerState(), torch.optim.swa_utils.AveragedModel(mlp())
        again.restore(first.saved())
        give(again, {"best": 0.0, "average": fresh, "new": 1})
        assert again == {"best": 0.5, "average": fresh, "new": 1}
        assert torch.equal(fresh.module[0].weight, first["average"].module[0].weight)
        again.update(best=0.7)
        assert again["best"] == 0.7


def test_trainer_state_assignment_after_resume_is_kept():
    """Also the first: a script may only ever say state["n"] = state.get("n", 0) + 1."""
    first = TrainerState()
    first["n"], first["average"] = 3, torch.optim.swa_utils.AveragedModel(mlp())
    again = TrainerState()
    again.restore(first.saved())
    again.end_replay()
    again["n"] = again.get("n", 0) + 1
    assert again["n"] == 4
    again["average"] = torch.optim.swa_utils.AveragedModel(mlp())  # an object is still filled
    assert torch.equal(again["average"].module[0].weight, first["average"].module[0].weight)


def test_trainer_state_not_restored_yet_is_saved_again():
    first = TrainerState()
    first["average"] = torch.optim.swa_utils.AveragedModel(mlp())
    again = TrainerState()
    again.restore(first.saved())
    assert again.saved().keys() == {"average"}
    assert again.saved()["average"][0] == "object"


def test_trainer_state_that_a_checkpoint_cannot_save_is_named(golden):
    trainer = make_trainer()
    trainer.state["best"] = {"model": [mlp]}
    with pytest.raises(UsageError) as caught:
        trainer.save()
    golden("trainer state that a checkpoint cannot save is named, 1", str(caught.value))
    trainer.state["best"] = torch.optim.swa_utils.AveragedModel(mlp())
    trainer.state["best"].register_buffer("odd", torch.ones(2).to_sparse())
    with pytest.raises(UsageError) as caught:
        trainer.save()
    golden("trainer state that a checkpoint cannot save is named, 2", str(caught.value))


def test_export_has_the_weights_under_their_names(tmp_path):
    from safetensors.torch import load_file

    trainer = make_trainer()
    for report in trainer.steps(rows(1, 45, 10), count=2):
        trainer.export(tmp_path / f"{report.step}.safetensors")
    found = load_file(tmp_path / "2.safetensors")
    assert found.keys() == trainer.model.state_dict().keys()
    assert all(torch.equal(found[name], value) for name, value in trainer.model.state_dict().items())
    assert not torch.equal(load_file(tmp_path / "1.safetensors")["0.weight"], found["0.weight"])


def test_checkpoint_is_taken_after_the_loop_body(run):
    """save() asks for it; it is taken when the loop asks for the next step."""
    trainer = make_trainer()
    for report in trainer.steps(rows(1, 45, 10), count=3):
        if report.step == 2:
            trainer.save()
            assert happened(run, "checkpoint") == []
            trainer.state["after"] = "the call"
    assert [event["step"] for event in happened(run, "checkpoint")] == [2, 3]
    trainer.save()  # outside of a loop it is taken at once
    assert len(happened(run, "checkpoint")) == 3
