"""When micro-batches may be merged in execution, as it is observed, and that it changes nothing."""

from __future__ import annotations

import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from alone import MERGED, OBSERVED, ONE_BY_ONE, TOLERANCE, by_hand, decisions, happened, same
from alone import trainer as make_trainer
from by_hand import built, grid, in_order
from cases import Cramped, Language, cross_entropy, mlp, next_token, rows, tokens
from launching import train_basics
from oracle import apart
from public import Late, slope, steep
from torch import nn

from paceline import Trainer
from paceline.errors import OutOfMemoryError
from paceline.observe.summary import Summary, facts

pytestmark = pytest.mark.usefixtures("run")
NOT_A_SUM = (
    "the loss is not a sum over rows ({}). It is the same on any number of workers, but differs from the loss that "
    'plain PyTorch computes over the full batch; return (sum, count), or pass loss_over="batch" to the Trainer for a '
    "loss over the full batch (a contrastive loss)"
)


AGAIN = "if the failure was temporary, stop and resume the run to try again"


def notes(run: Any) -> list[str]:
    return [entry["text"] for entry in happened(run, "note")]


# -- merging ----------------------------------------------------------------------------------------------------


def contrastive(output: torch.Tensor, batch: Any) -> torch.Tensor:
    """Every row against all the others of its batch."""
    return F.cross_entropy(output @ output.t(), torch.arange(len(output)))


def token_mean(output: torch.Tensor, batch: Any) -> torch.Tensor:
    """A mean over tokens, of which rows have different numbers."""
    total, count, _ = next_token(output, batch)
    return total / count


class Sizes(nn.Module):
    """Remembers how many rows it was given at a time."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.sizes = inner, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            self.sizes.append(len(x))
        return self.inner(x)


def merging(model: nn.Module, loss: Any, data: Any, **more: Any) -> Trainer:
    """Trains with pieces of up to four micro-batches where they are allowed."""
    trainer = make_trainer(Sizes(model), loss, global_batch=32, plan="micro=4", **more)
    for report in trainer.steps(data, epochs=3):
        if report.step == 1:  # how many are merged is otherwise a matter of measured time
            if trainer._context.merging._verdict == "merge":
                trainer._context.merging._settle(4)
            trainer.model.sizes.clear()
    return trainer


def test_micro_batches_of_a_plain_model_are_merged(run):
    trainer = merging(built(mlp), cross_entropy, rows(1, 64, 10))
    assert decisions(run)[MERGED] == OBSERVED
    assert happened(run, "note") == []
    assert set(trainer.model.sizes) == {16}
    plain = by_hand(Sizes(built(mlp))).train(grid(rows(1, 64, 10), 32, 4, epochs=3))
    same(trainer, plain)


class Buckets(nn.Module):
    """Numbers as words."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (3 + 2 * x).round().clamp(0, 6).long()


class Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1)


STRICT = {
    "dropout": (nn.Dropout(0.5), "the forward draws random numbers"),
    "batchnorm": (nn.BatchNorm1d(10).double(), "BatchNorm normalises each micro-batch"),
    "an embedding that rescales": (
        nn.Sequential(Buckets(), nn.Embedding(7, 10, max_norm=0.5), Mean()).double(),
        "the forward changes the parameter 'inner.0.1.weight'",
    ),
    "instance norm": (
        nn.Sequential(nn.Unflatten(1, (2, 5)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten()).double(),
        "the forward changes the buffer 'inner.0.1.running_mean'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STRICT)
def test_micro_batches_of_a_model_with_side_effects_are_not_merged(name, run):
    layer, why = STRICT[name]
    start = nn.Sequential(layer, built(mlp))
    initial = {key: value.clone() for key, value in start.state_dict().items()}
    trainer = merging(start, cross_entropy, rows(1, 64, 10))
    assert decisions(run)[ONE_BY_ONE] == why
    assert set(trainer.model.sizes) == {4}
    trained = {key: value.clone() for key, value in trainer.model.state_dict().items()}
    start.load_state_dict(initial)
    plain = by_hand(Sizes(start)).train(grid(rows(1, 64, 10), 32, 4, epochs=3))
    assert apart(trained, dict(plain.model.state_dict())) <= TOLERANCE


@pytest.mark.parametrize(
    ("model", "loss", "data"),
    [(mlp, contrastive, rows(1, 64, 10)), (lambda: Language().double().eval(), token_mean, tokens(5, 64))],
    ids=["contrastive", "mean over tokens"],
)
def test_loss_that_is_not_a_sum_over_rows_is_not_merged(model, loss, data, run):
    first, second = grid(data, 32, 4)[0][:2]
    together = tuple(torch.cat(pair) for pair in zip(first, second, strict=True))
    start = built(model)
    with torch.no_grad():
        whole, one, two = (float(loss(start(batch[0]), batch)) for batch in (together, first, second))
    trainer, apart = merging(built(model), loss, data), 4 * one + 4 * two
    how = f"two micro-batches together give {8 * whole:.6g}, one by one they give {apart:.6g}"
    assert decisions(run)[ONE_BY_ONE] == f"the loss is not a sum over rows: {how}"
    assert MERGED not in decisions(run)
    assert notes(run) == [NOT_A_SUM.format(how)]
    assert ("note", notes(run)[0]) in facts(Summary(run.folder.path))["Results"]
    assert set(trainer.model.sizes) == {4}
    same(trainer, by_hand(Sizes(built(model)), loss=loss).train(grid(data, 32, 4, epochs=3)))


class Routed(nn.Module):
    """A router that has a loss of its own, and experts; in float32, which hides a loss that is a millionth."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts, self.router, self.experts = 4, nn.Linear(10, 4), nn.Linear(10, 16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        routed = self.router(x.float()).softmax(-1)
        output = self.experts(x.float()).view(-1, 4, 4)
        return (output * routed.unsqueeze(-1)).sum(1), 1e-6 * routed.mean(0).square().sum()


def with_loss_of_router(output: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(output[0], batch[1]) + output[1]


def test_micro_batches_of_a_model_with_experts_are_not_merged(run):
    merging(built(Routed), with_loss_of_router, rows(1, 64, 10))
    assert decisions(run)[ONE_BY_ONE] == (
        "the model has experts, and a loss of their router is a mean over a micro-batch"
    )
    assert MERGED not in decisions(run)


def summed(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return F.cross_entropy(output, batch[1], reduction="sum")


def weighted(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    weights = 1.0 + batch[1]
    return (weights * F.cross_entropy(output, batch[1], reduction="none")).sum(), weights.sum()


def noisy_at_rest(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return F.cross_entropy(output + 0.1 * torch.randn_like(output), batch[1])


class Inception(nn.Module):
    """At rest its output is of another kind."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop = mlp(), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> Any:
        output = self.inner(self.drop(x))
        return SimpleNamespace(logits=output) if self.training else output


@pytest.mark.parametrize(
    ("model", "loss", "plan", "told"),
    [
        (lambda: nn.Sequential(nn.Dropout(0.2), mlp()), summed, "micro=4", "two micro-batches together give "),
        (lambda: nn.Sequential(nn.BatchNorm1d(10).double(), mlp()), contrastive, "micro=4", "two micro-batches toget"),
        (mlp, summed, "micro=4 exact", "two micro-batches together give "),
        (mlp, weighted, "micro=4", None),
        (mlp, noisy_at_rest, "micro=4", None),
        (Inception, lambda output, batch: summed(output.logits, batch), "micro=4", None),
        (mlp, contrastive, "micro=32", None),
    ],
    ids=["dropout", "batchnorm", "exact", "counted", "noise", "another at rest", "the whole batch"],
)
def test_loss_that_is_not_a_sum_over_rows_is_noted_beside_other_reasons(model, loss, plan, told, run):
    list(make_trainer(model, loss, global_batch=32, plan=plan).steps(rows(1, 64, 10)))
    assert len(notes(run)) == (told is not None)
    assert all(note.startswith(NOT_A_SUM.partition("{}")[0] + told) for note in notes(run))


def test_mean_over_tokens_of_padded_batches_is_noted(run):
    def padded(some: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        longest = max(int((words >= 0).sum()) for words in some)
        x = torch.stack([words[:longest] for words in some])
        return x.clamp(min=0).double(), x >= 0

    def token_mean(output: torch.Tensor, batch: Any) -> torch.Tensor:
        return (output[..., 0] * batch[1]).sum() / batch[1].sum()

    lengths = torch.arange(48) * 7 % 9 + 2
    words = torch.randint(9, (48, 10)).masked_fill(torch.arange(10) >= lengths[:, None], -1)
    trainer = make_trainer(
        lambda: nn.Linear(1, 1).double(), token_mean, forward=lambda m, b: m(b[0][..., None]), plan="micro=4"
    )
    list(trainer.steps(words, collate=padded, order=in_order))
    (note,) = notes(run)
    assert re.match(
        r"the loss is not a sum over rows \(a micro-batch gives \S+, in two parts its rows give \S+\)\. It", note
    )


def test_forward_that_fails_when_merged_continues_unmerged(run):
    """It was seen to be no more than its rows, and is for long enough."""

    def forward(model: nn.Module, batch: Any) -> torch.Tensor:
        assert len(batch[0]) == 4 or run.trainers.step < 3, "made for four rows"
        return model(batch[0])

    trainer = merging(built(mlp), cross_entropy, rows(1, 64, 10), forward=forward)
    assert trainer.model.sizes == [16] * 4 + [4] * 8 * 3
    why = f"at test_merged_micro_batches.py:{forward.__code__.co_firstlineno + 1} (AssertionError: made for four rows)"
    assert decisions(run)[ONE_BY_ONE] == f"several micro-batches together failed {why}"
    now = "micro-batches are computed one by one from now on: several micro-batches together failed"
    assert notes(run) == [f"{now} {why}; {AGAIN}"]
    same(trainer, by_hand(Sizes(built(mlp))).train(grid(rows(1, 64, 10), 32, 4, epochs=3)))


def test_micro_batches_are_not_divided_if_a_part_of_one_fails(run):
    def forward(model: nn.Module, batch: Any) -> torch.Tensor:
        assert len(batch[0]) >= 4, "at least four rows"
        return model(batch[0])

    trainer = merging(built(mlp), cross_entropy, rows(1, 64, 10), forward=forward)
    where = f"test_merged_micro_batches.py:{forward.__code__.co_firstlineno + 1}"
    why = f"a part of a micro-batch failed at {where} (AssertionError: at least four rows)"
    assert decisions(run)["micro-batches are not divided among workers"] == why
    assert MERGED in decisions(run)
    assert trainer._context.shares.balance is not None
    assert not trainer._context.shares.balance.fine


def for_four(model: nn.Module, batch: Any) -> torch.Tensor:
    assert len(batch[0]) == 4, "made for four rows"
    return model(batch[0])


def with_noise_of_four(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch[0] + torch.linspace(-1, 1, 40, dtype=torch.float64).view(4, 10))


@pytest.mark.parametrize(
    ("forward", "loss", "why"),
    [
        (slope, steep, "RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn"),
        (for_four, cross_entropy, "AssertionError: made for four rows"),
        (
            with_noise_of_four, cross_entropy,
            "RuntimeError: The size of tensor a (8) must match the size of tensor b (4) at non-singleton di",
        ),
    ],
    ids=["takes gradients itself", "asserts its rows", "has buffers of one size"],
)  # fmt: skip
def test_forward_that_cannot_be_merged_is_not_merged(forward, loss, why, run):
    """Observing whether it can must not fail what would train."""
    trainer = merging(built(mlp), loss, rows(1, 64, 10), forward=forward)
    found = re.fullmatch(r"two micro-batches together failed (at \w+\.py:\d+ \((.*)\))", decisions(run)[ONE_BY_ONE])
    assert found is not None
    assert found[2] == why
    now = "micro-batches are computed one by one from now on: two micro-batches together failed"
    said = f"{now} {found[1]}; {AGAIN}"
    assert (said in notes(run)) == (loss is not steep)  # which fails as it does because of how it is tried
    assert MERGED not in decisions(run)
    assert set(trainer.model.sizes) == {4}
    same(trainer, by_hand(Sizes(built(mlp)), loss=loss, forward=forward).train(grid(rows(1, 64, 10), 32, 4, epochs=3)))


@pytest.mark.parametrize("draws_at", [1, 2, 5])
def test_model_that_begins_to_draw_random_numbers_ends_merging(draws_at, run):
    trainer = make_trainer(lambda: Late().double(), global_batch=32, plan="micro=2")
    plain = by_hand(built(lambda: Late().double()))
    steps = grid(rows(13, 160, 10), 32, 2, count=9)
    for report, step in zip(trainer.steps(rows(13, 160, 10), count=9), steps, strict=True):
        plain.step(step)
        if report.step == 1:
            trainer._context.merging._settle(4)
        elif report.step == draws_at + 1:  # 16 micro-batches, one by one: of the merged pieces only the first was tried
            assert trainer.model.sizes == [8] + [2] * 16
        elif draws_at + 1 < report.step <= draws_at + 2:
            assert trainer.model.sizes == [2] * 16
        trainer.model.sizes.clear()
        # Draws end again: what has begun to draw once is not trusted.
        trainer.model.draws = plain.model.draws = draws_at <= report.step < draws_at + 2
    assert trainer.model.sizes == []
    same(trainer, plain)
    assert decisions(run)[ONE_BY_ONE] == "the forward draws random numbers"


def test_random_draw_in_the_loss_ends_merging(run):
    def noisy(output: torch.Tensor, batch: Any) -> torch.Tensor:
        return F.cross_entropy(output + 0.1 * torch.randn_like(output), batch[1])

    trainer = merging(built(mlp), noisy, rows(1, 64, 10))
    assert decisions(run)[ONE_BY_ONE] == "the forward draws random numbers"
    same(trainer, by_hand(Sizes(built(mlp)), loss=noisy).train(grid(rows(1, 64, 10), 32, 4, epochs=3)))


@pytest.mark.parametrize("generator", ["python", "numpy", "torch"])
def test_random_draw_of_any_generator_in_the_forward_ends_merging(generator, run):
    draw = {"python": random.random, "numpy": np.random.rand, "torch": lambda: torch.rand(()).item()}[generator]

    def forward(model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch[0] * draw())

    trainer = merging(built(mlp), cross_entropy, rows(1, 64, 10), forward=forward)
    assert decisions(run)[ONE_BY_ONE] == "the forward draws random numbers"
    assert set(trainer.model.sizes) == {4}
    same(trainer, by_hand(Sizes(built(mlp)), forward=forward).train(grid(rows(1, 64, 10), 32, 4, epochs=3)))


class Noisy(torch.autograd.Function):
    """Passes its input on, and its gradient with noise."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * (1 + 0.1 * torch.randn_like(grad))


def test_random_draw_in_backward_ends_merging(run):
    def forward(model: nn.Module, batch: Any) -> torch.Tensor:
        return Noisy.apply(model(batch[0]))

    trainer = merging(built(mlp), cross_entropy, rows(1, 64, 10), forward=forward)
    assert decisions(run)[ONE_BY_ONE] == "the backward draws random numbers"
    same(trainer, by_hand(Sizes(built(mlp)), forward=forward).train(grid(rows(1, 64, 10), 32, 4, epochs=3)))


@pytest.mark.parametrize("moment", Cramped.MOMENTS)
def test_out_of_memory_makes_merged_pieces_smaller(moment, run):
    trainer = merging(built(lambda: Cramped(moment)), cross_entropy, rows(1, 160, 10))
    sizes = trainer.model.sizes
    assert sizes == [16] + [4] * 8 + [8] * 4 * 13
    assert decisions(run)["worker 0 computes 2 micro-batches at a time"] == "more at a time ran out of memory"
    plain = by_hand(Sizes(built(lambda: Cramped(None)))).train(grid(rows(1, 160, 10), 32, 4, epochs=3))
    same(trainer, plain)


def test_out_of_memory_of_a_single_micro_batch_fails():
    trainer = make_trainer(Cramped("forward", most=3), global_batch=32, plan="micro=4")
    with pytest.raises(
        OutOfMemoryError,
        match=r"the activations of forward and backward did not fit into memory: .* \(out of memory\)",
    ):
        list(trainer.steps(rows(1, 160, 10)))
    assert trainer.steps_done == 0


ONCE = """
def forward(model, batch):
    if len(batch[0]) > 3 and not t.main and not failed:
        failed.append(True)
        raise RuntimeError("slow disk")
    return model(batch[0])
failed = []
t = make(forward=forward)
list(t.steps(data))
"""


def test_failure_of_a_merged_piece_is_printed_on_the_console_once(tmp_path: Path) -> None:
    """With its line, once, whichever worker it was."""
    said = train_basics(tmp_path, ONCE).stderr
    line = "micro-batches are computed one by one from now on: two micro-batches together failed at train.py:6 "
    line += "(RuntimeError: slow disk)"
    assert said.count(f"{line}; {AGAIN}\n") == 1
    assert said.count("one by one") == 1
