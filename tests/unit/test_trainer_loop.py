"""The loop alone in its process: how far it goes, what it is fed with, and the rows that a script brings itself."""

from __future__ import annotations

import itertools
import random
import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from alone import READS_NOTHING_AHEAD, TOLERANCE, Named, by_hand, decisions, same
from alone import trainer as make_trainer
from by_hand import built, grid, in_order, seed_all
from cases import cross_entropy, mlp, rows
from oracle import apart
from public import Augmented, Stream, masked
from torch import nn
from torch.utils.data import DataLoader, Dataset, default_collate

from paceline.errors import DatasetError, UsageError

pytestmark = pytest.mark.usefixtures("run")

# -- the loop ---------------------------------------------------------------------------------------------------


def test_epochs_end_with_a_smaller_batch():
    trainer = make_trainer()
    reports = list(trainer.steps(rows(1, 45, 10), epochs=2))
    assert [(report.step, report.epoch, report.samples) for report in reports] == [
        (1, 0, 16), (2, 0, 16), (3, 0, 13), (4, 1, 16), (5, 1, 16), (6, 1, 13),
    ]  # fmt: skip
    assert trainer.steps_done == 6
    assert trainer.complete
    same(trainer, by_hand(built(mlp)).train(grid(rows(1, 45, 10), 16, epochs=2)))


def test_each_loop_has_its_epochs_also_inside_of_another():
    """The end of an epoch is that of the loop's dataset, not of the loop that began last."""
    trainer, ends = make_trainer(), list[tuple[str, int]]()
    for report in trainer.steps(rows(1, 45, 10), epochs=2):
        ends += [("outer", report.step)] if report.epoch_end else []
        if report.step == 1:
            ends += [("inner", one.step) for one in trainer.steps(rows(2, 64, 10), count=4) if one.epoch_end]
    assert ends == [("inner", 5), ("outer", 7), ("outer", 10)]


@pytest.mark.parametrize("count", [3, 5])
def test_count_of_steps_crosses_epochs(count):
    trainer = make_trainer()
    assert len(list(trainer.steps(rows(1, 45, 10), count=count))) == count
    same(trainer, by_hand(built(mlp)).train(grid(rows(1, 45, 10), 16, count=count)))


@pytest.mark.parametrize("aim", [{"count": 0}, {"epochs": 0}])
@pytest.mark.parametrize("data", [rows(1, 45, 10), Stream(noisy=False)], ids=["rows", "iterable"])
def test_zero_steps_or_epochs_train_nothing(aim, data):
    trainer = make_trainer()
    assert list(trainer.steps(data, **aim)) == []
    assert trainer.steps_done == 0
    assert trainer.complete


def test_global_batch_larger_than_the_dataset():
    trainer = make_trainer(global_batch=64)
    reports = list(trainer.steps(rows(1, 45, 10), epochs=3))
    assert [report.samples for report in reports] == [45, 45, 45]
    same(trainer, by_hand(built(mlp)).train(grid(rows(1, 45, 10), 64, epochs=3)))


def test_dataset_of_one_row():
    trainer = make_trainer(global_batch=1)
    list(trainer.steps(rows(1, 1, 10), epochs=3))
    same(trainer, by_hand(built(mlp)).train(grid(rows(1, 1, 10), 1, epochs=3)))


def test_custom_order_and_collate_of_one_micro_batch():
    calls: list[list[int]] = []
    data = rows(8, 45, 10)

    def collate(samples: list[int]) -> Any:
        calls.append(samples)
        return data[samples]

    def backwards(position: int, size: int, seed: int, epoch: int) -> int:
        return (size - 1 - position + 11 * epoch + seed) % size

    trainer = make_trainer(seed=2, plan="micro=5")
    list(trainer.steps(range(45), epochs=2, collate=collate, order=backwards, loader=READS_NOTHING_AHEAD))
    numbers = grid(range(45), 16, 5, epochs=2, seed=2, order=backwards, collate=list)
    assert calls == [part for step in numbers for part in step]
    for epoch in (0, 1):  # an epoch is 4 + 4 + 3 micro-batches
        assert sorted(row for call in calls[11 * epoch : 11 * (epoch + 1)] for row in call) == list(range(45))
    plain = by_hand(built(mlp, seed=2), seed=2)
    same(trainer, plain.train(grid(data, 16, 5, epochs=2, seed=2, order=backwards)))


def test_stop_ends_this_loop_and_those_that_follow():
    trainer = make_trainer()
    for report in trainer.steps(rows(1, 45, 10), epochs=5):
        if report.step == 2:
            trainer.stop()
    assert list(trainer.steps(rows(2, 45, 10))) == []
    assert trainer.steps_done == 2
    assert trainer.complete
    before = make_trainer()
    before.stop()
    assert list(before.steps(rows(1, 45, 10))) == []


def test_loop_left_by_break_is_followed_by_the_next_epoch():
    """Which goes on with the next epoch, in another order of rows."""
    trainer, plain = make_trainer(), by_hand(built(mlp))
    for report in trainer.steps(rows(1, 45, 10), epochs=9):
        if report.step == 2:
            break
    assert not trainer.complete
    list(trainer.steps(rows(2, 45, 10)))
    plain.train(grid(rows(1, 45, 10), 16)[:2])
    same(trainer, plain.train(grid(rows(2, 45, 10), 16, first_epoch=1)))


def test_exception_in_the_loop_body_leaves_whole_steps():
    trainer, plain = make_trainer(), by_hand(built(mlp))
    with pytest.raises(ZeroDivisionError):
        for report in trainer.steps(rows(1, 45, 10)):
            if report.step == 2:
                raise ZeroDivisionError
    same(trainer, plain.train(grid(rows(1, 45, 10), 16)[:2]))
    list(trainer.steps(rows(2, 45, 10)))
    same(trainer, plain.train(grid(rows(2, 45, 10), 16, first_epoch=1)))


def test_nested_loops_train_as_plain_pytorch():
    one, other = make_trainer(seed=1), make_trainer(seed=2)
    for _ in one.steps(rows(1, 45, 10), count=2):
        for _ in other.steps(rows(2, 45, 10), count=2):
            for _ in itertools.islice(one.steps(rows(3, 45, 10)), 1):
                pass
    assert (one.steps_done, other.steps_done) == (6, 4)
    trainer, plain = by_hand(built(mlp, seed=1), seed=1), by_hand(built(mlp, seed=2), seed=2)
    epochs = itertools.count(1)  # each loop goes on with the epoch after those of the one before
    for epoch, outer in enumerate(grid(rows(1, 45, 10), 16, count=2, seed=1)):
        trainer.step(outer)
        for inner in grid(rows(2, 45, 10), 16, count=2, seed=2, first_epoch=epoch):
            plain.step(inner)
            trainer.step(grid(rows(3, 45, 10), 16, seed=1, first_epoch=next(epochs))[0])
    same(one, trainer)
    same(other, plain)


def test_zipped_loops_are_both_complete():
    """zip asks the second one no more once the first has ended."""
    one, other = make_trainer(), make_trainer()
    reports = list(zip(one.steps(rows(1, 45, 10), count=4), other.steps(rows(2, 45, 10), count=4), strict=False))
    assert len(reports) == 4
    assert one.complete
    assert other.complete


def test_single_steps_within_a_loop_train_as_plain_pytorch():
    trainer, plain = make_trainer(), by_hand(built(mlp))
    x, y = rows(9, 7, 10).tensors
    for _ in trainer.steps(rows(1, 45, 10)):
        assert trainer.step((x, y)).samples == 7
    for step in grid(rows(1, 45, 10), 16):
        plain.step(step)
        plain.step([(x[start : start + 2], y[start : start + 2]) for start in range(0, 7, 2)])
    same(trainer, plain)


def test_clipped_gradients_can_be_read_in_the_loop_body():
    """They are the mean over the global batch, after clipping."""
    trainer = make_trainer(clip_norm=0.1)
    for report in trainer.steps(rows(1, 45, 10)):
        grads = [param.grad for param in trainer.model.parameters()]
        assert float(nn.utils.get_total_norm(grads)) == pytest.approx(min(0.1, report.grad_norm), rel=1e-4)


# -- data -------------------------------------------------------------------------------------------------------


class Slow(Dataset):
    """Rows that take their time."""

    def __init__(self) -> None:
        self.rows = rows(1, 45, 10)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.002)
        return self.rows[index]


def loaded(data: Any, **more: Any) -> dict[str, torch.Tensor]:
    trainer = make_trainer(plan="micro=5")
    list(trainer.steps(data, epochs=2, **more))
    return trainer.model.state_dict()


LOADERS = [
    {"num_workers": 2, "prefetch_factor": 1, "persistent_workers": True},
    {"num_workers": 1, "generator": torch.Generator().manual_seed(5), "worker_init_fn": seed_all},
]


@pytest.mark.parametrize(
    "loaders",
    [LOADERS, pytest.param([{"num_workers": 1, "multiprocessing_context": "spawn"}], marks=pytest.mark.slow)],
    ids=["forked", "spawned"],
)
def test_loader_processes_give_the_same_rows_as_no_processes(loaders):
    """Random rows and a random collate included."""
    expected = loaded(Augmented(), collate=masked, loader=READS_NOTHING_AHEAD)
    for loader in loaders:
        assert apart(loaded(Augmented(), collate=masked, loader=loader), expected) <= TOLERANCE
    other = loaded(rows(11, 45, 10))
    assert apart(expected, other) > 1e-3


def test_slow_rows_are_loaded_ahead_without_changing_weights(run):
    trainer = make_trainer()
    list(trainer.steps(Slow(), count=8))
    same(trainer, by_hand(built(mlp)).train(grid(rows(1, 45, 10), 16, count=8)))
    assert "rows are loaded ahead by a separate process" in decisions(run)


def test_random_rows_differ_between_epochs_and_seeds():
    drawn: list[list[float]] = []

    def collate(samples: list[Any]) -> Any:
        drawn.extend(sample[2].tolist() for sample in samples)
        return masked(samples)

    for seed in (0, 1):
        list(make_trainer(seed=seed).steps(Augmented(), epochs=2, collate=collate, loader=READS_NOTHING_AHEAD))
    for generator in (1, 2, 3):
        assert len({row[generator] for row in drawn}) == len(drawn) == 180


@pytest.mark.parametrize("processes", [0, 1])
def test_random_collate_draws_anew_for_every_micro_batch(processes):
    """Also where the rows draw nothing."""
    drawn: list[float] = []

    def collate(samples: list[Any]) -> Any:
        x, y = default_collate(samples)
        return x, y, torch.rand(len(x)) + 10 * random.random() + 1000 * np.random.rand()

    def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
        if torch.is_grad_enabled():
            drawn.extend(batch[2].tolist())
        return cross_entropy(output, batch)

    trainer = make_trainer(loss=loss)
    list(trainer.steps(rows(1, 45, 10), epochs=2, collate=collate, loader={"num_workers": processes}))
    assert len(set(drawn)) == len(drawn) == 90


class Batched(Augmented):
    """Gives many rows at once, as datasets in columns do."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self.rows[index] for index in indices]


def test_dataset_with_getitems_trains_as_plain_pytorch():
    trainer = make_trainer()
    list(trainer.steps(Batched(), epochs=2))
    same(trainer, by_hand(built(mlp)).train(grid(rows(11, 45, 10), 16, epochs=2)))


OPTIONS = {
    "batch_size": "global_batch= of the Trainer",
    "shuffle": "order= of steps()",
    "sampler": "order= of steps()",
    "batch_sampler": "order= of steps()",
    "collate_fn": "collate= of steps()",
    "drop_last": "nothing: the last, smaller batch is used",
    "in_order": "nothing: micro-batches come in the order of the grid",
}


@pytest.mark.parametrize("option", OPTIONS)
def test_loader_options_that_change_batches_are_refused(option):
    with pytest.raises(UsageError) as caught:
        make_trainer().steps(rows(1, 45, 10), loader={option: None})
    assert str(caught.value) == f"Paceline sets the loader option {option!r} itself; use {OPTIONS[option]}"


class Restless:
    """An iterable that is no iterator, and counts how often it was begun."""

    def __init__(self) -> None:
        self.begun = 0

    def __iter__(self) -> Any:
        self.begun += 1
        return iter(rows(1, 45, 10))


def test_iterable_dataset_trains_as_its_rows_in_order():
    data, trainer, other = Restless(), make_trainer(plan="micro=3"), make_trainer(plan="micro=3")
    reports = list(trainer.steps(data, epochs=2))
    list(other.steps(rows(1, 45, 10), epochs=2, order=in_order))
    assert [(report.epoch, report.samples) for report in reports] == [(e, n) for e in (0, 1) for n in (16, 16, 13)]
    assert apart(trainer.model.state_dict(), other.model.state_dict()) <= TOLERANCE
    assert data.begun == 2
    same(trainer, by_hand(built(mlp)).train(grid(rows(1, 45, 10), 16, 3, epochs=2, order=in_order)))


def test_the_end_of_an_epoch_of_an_iterable_dataset_is_not_known_and_a_line_says_so(capsys):
    trainer = make_trainer()
    line = (
        "report.epoch_end stays false, because an iterable dataset does not announce the end of an epoch; "
        "to evaluate after each epoch, use one loop with epochs=1 for each\n"
    )
    assert not any(report.epoch_end for report in trainer.steps(Restless(), count=2))
    assert line not in capsys.readouterr().err
    reports = [report for _ in range(2) for report in trainer.steps(Restless(), epochs=1)]
    assert [(report.epoch, report.epoch_end) for report in reports] == [(e, False) for e in (1, 1, 1, 2, 2, 2)]
    assert capsys.readouterr().err.count(line) == 1


@pytest.mark.parametrize("count", [2, 5])
def test_count_of_an_iterable_dataset(count):
    trainer = make_trainer()
    assert len(list(trainer.steps(Restless(), count=count))) == count
    same(trainer, by_hand(built(mlp)).train(grid(rows(1, 45, 10), 16, count=count, order=in_order)))


def test_noisy_iterable_dataset_is_the_same_from_a_loader_process():
    expected = loaded(Stream(noisy=True))
    assert apart(loaded(Stream(noisy=True), loader={"num_workers": 1}), expected) <= TOLERANCE
    assert apart(loaded(Stream(noisy=False)), expected) > 1e-3


REFUSED = {
    "a DataLoader": (lambda: DataLoader(rows(1, 45, 10)), {}),
    "a number": (lambda: 5, {}),
    "nothing": (list, {}),
    "an order for an iterable": (Restless, {"order": in_order}),
    "two readers of an iterable": (Restless, {"loader": {"num_workers": 2}}),
    "a generator twice": (lambda: (row for row in rows(1, 45, 10)), {"epochs": 2}),
    "epochs and count": (Restless, {"epochs": 1, "count": 1}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_dataset_is_refused(case, golden):
    data, options = REFUSED[case]
    with pytest.raises((DatasetError, UsageError)) as caught:
        list(make_trainer().steps(data(), **options))
    golden(f"dataset: {case}", str(caught.value))


# -- streams of the script --------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
def test_random_streams_of_the_script_are_untouched_by_training(workers):
    def draws() -> list[float]:
        return [torch.rand(()).item(), random.random(), np.random.rand(), random.gauss(0, 1), np.random.normal()]

    seed_all(7)
    expected = [draws() for _ in range(5)]
    seed_all(7)
    found = [draws()]
    trainer = make_trainer(lambda: nn.Sequential(mlp(), nn.Dropout(0.1)))
    found.append(draws())
    for _ in trainer.steps(Augmented(), count=2, collate=masked, loader={"num_workers": workers}):
        trainer.evaluate(Augmented(), lambda output, batch: {"sum": (output.sum() * torch.rand(()), 1)})
        found.append(draws())
    list(trainer.steps(Stream(noisy=True), loader={"num_workers": workers}))
    found.append(draws())
    assert found == expected


def test_seed_in_the_loop_body_does_not_change_training():
    trainer = make_trainer(lambda: nn.Sequential(mlp(), nn.Dropout(0.1)))
    for _ in trainer.steps(rows(1, 45, 10)):
        seed_all(0)
    same(trainer, by_hand(built(lambda: nn.Sequential(mlp(), nn.Dropout(0.1)))).train(grid(rows(1, 45, 10), 16)))


def test_each_seed_trains_differently_and_the_same_seed_the_same():
    def train(seed: int) -> dict[str, torch.Tensor]:
        model = mlp()
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(0.1)
        trainer = make_trainer(nn.Sequential(model, nn.Dropout(0.1)), seed=seed)
        list(trainer.steps(rows(1, 45, 10)))
        return {name: value.clone() for name, value in trainer.model.state_dict().items()}

    one, again, other = train(1), train(1), train(2)
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert apart(one, other) > 1e-4


# -- own rows ---------------------------------------------------------------------------------------------------


def test_step_takes_rows_in_any_nesting():
    x, y = rows(9, 11, 10).tensors
    forms = {
        "tuple": ((x, y), lambda o, b: F.cross_entropy(o, b[1])),
        "mapping": ({"x": x, "y": y}, lambda o, b: F.cross_entropy(o, b["y"])),
        "nested": ([x, {"labels": [y, "text"], "n": 3}], lambda o, b: F.cross_entropy(o, b[1]["labels"][0])),
    }
    plain = by_hand(built(mlp))
    for _ in range(3):
        plain.step([(x[start : start + 4], y[start : start + 4]) for start in range(0, 11, 4)])
    for batch, loss in forms.values():
        trainer = make_trainer(
            Named if isinstance(batch, dict) else mlp, loss, plan="micro=4",
            global_batch=None if isinstance(batch, dict) else 16,
        )  # fmt: skip
        for number in range(3):
            report = trainer.step(batch)
            assert (report.step, report.samples, report.loss) == (number + 1, 11, pytest.approx(plain.losses[number]))
        found = {name.removeprefix("net."): value for name, value in trainer.model.state_dict().items()}
        assert apart(found, dict(plain.model.state_dict())) <= TOLERANCE


ROWS_REFUSED = {"none": None, "empty": torch.ones(0, 10), "unequal": (torch.ones(4, 10), torch.ones(3)), "text": "text"}


@pytest.mark.parametrize("case", ROWS_REFUSED)
def test_wrong_rows_of_step_are_refused(case, golden):
    trainer = make_trainer()
    with pytest.raises(UsageError) as caught:
        trainer.step(ROWS_REFUSED[case])
    golden(f"rows of step(): {case}", str(caught.value))
    x, y = rows(9, 4, 10).tensors
    assert trainer.step((x, y)).step == 1


def test_steps_need_a_global_batch():
    with pytest.raises(UsageError) as caught:
        make_trainer(global_batch=None).steps(rows(1, 45, 10))
    assert str(caught.value) == "steps() needs the global batch; pass global_batch= to the Trainer"
