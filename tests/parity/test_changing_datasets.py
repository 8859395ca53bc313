"""A dataset that the loop's body changes: each step has the rows as they are when the step begins, on any number of
workers, wherever rows are loaded.
"""

from __future__ import annotations

import functools
import io
import itertools
import random
import re
import sys
import threading
from array import array
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from launching import train_basics
from oracle import apart
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import Dataset, IterableDataset, Subset

from paceline import sample_index
from paceline.base.batching import Grid
from paceline.base.journal import read_journal
from paceline.data.change_detection import Snapshot
from paceline.data.fingerprint import Fingerprint
from paceline.data.loader import Assignment, Feed, Source
from paceline.errors import DatasetError

GLOBAL = 0


class Transform:
    """Adds a number, which lies in different places."""

    __slots__ = ("plus",)

    def __init__(self) -> None:
        self.plus = 0

    def __call__(self, value: int) -> int:
        return value + self.plus


class Rows(Dataset[int]):
    """Row i is i, and a number in each of the places that a script may change."""

    kind = 0

    def __init__(self) -> None:
        self.plus, self.transform, self.listed, self.named = 0, Transform(), [0], {"plus": 0}
        self.tensor, self.array = torch.zeros(3, dtype=torch.int64), np.zeros(3, dtype=np.int64)
        self.inner = SimpleNamespace(deep=SimpleNamespace(plus=0))
        self.partly = Transform()
        self.transforms = [lambda value: value, functools.partial(lambda of, value: of(value), self.partly)]

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        value = index + self.plus + self.listed[0] + self.named["plus"] + self.inner.deep.plus + self.kind + GLOBAL
        value += int(self.tensor[1]) + int(self.array[1])
        for transform in (self.transform, *self.transforms):
            value = transform(value)
        return value


def _global(_: Rows) -> None:
    global GLOBAL
    GLOBAL += 100


def _in_kind(_: Rows) -> None:
    Rows.kind += 100


CHANGES: dict[str, Callable[[Rows], None]] = {
    "an attribute": lambda rows: setattr(rows, "plus", rows.plus + 100),
    "an attribute in a slot": lambda rows: setattr(rows.transform, "plus", rows.transform.plus + 100),
    "an attribute of an attribute": lambda rows: setattr(rows.inner.deep, "plus", rows.inner.deep.plus + 100),
    "an argument of a partial": lambda rows: setattr(rows.partly, "plus", rows.partly.plus + 100),
    "an item of a list": lambda rows: rows.listed.__setitem__(0, rows.listed[0] + 100),
    "an entry of a dict": lambda rows: rows.named.update(plus=rows.named["plus"] + 100),
    "a tensor in place": lambda rows: rows.tensor.add_(100),
    "a tensor's data": lambda rows: rows.tensor.data.add_(100),
    "a tensor as an array": lambda rows: rows.tensor.numpy().__iadd__(100),
    "an array in place": lambda rows: rows.array.__iadd__(100),
    "an attribute of the class": _in_kind,
    "a global variable": _global,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Any:
    yield
    global GLOBAL
    GLOBAL = Rows.kind = 0


def feed_of(data: Any, steps: int, **options: Any) -> Feed:
    source = Source.of(data, 3, None, None, options)
    return Feed(source, Grid(8, 4), (0, steps, 1), lambda *_, **__: None, watched=True)


def values(feed: Feed, step: int) -> list[int]:
    assert feed.has(step)
    return [value for taken in feed.at(step, Assignment(0, (1.0,)))[2] for value in taken.batch.tolist()]


def expected(step: int, plus: int, rows: int = 64) -> list[int]:
    return [
        sample_index(position % rows, rows, 3, position // rows) + plus for position in range(8 * step, 8 * step + 8)
    ]


@pytest.mark.parametrize("change", CHANGES)
def test_dataset_changes_are_seen_by_the_next_step_though_a_process_loads_ahead(change: str) -> None:
    data = Rows()
    feed = feed_of(Subset(data, range(64)), 4, num_workers=1)
    for step in range(4):
        assert values(feed, step) == expected(step, 100 * (step > 1))
        if step == 1:
            CHANGES[change](data)
    feed.close()
    told = "loader processes are restarted when the script changes the dataset between steps"
    assert [what for what, _ in feed.take_news()] == [told]


def test_loader_process_is_used_only_while_the_dataset_does_not_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Feed, "SLOW", 0.0)
    data, begun = Rows(), list[Any]()
    feed = feed_of(data, 24)
    begin = feed.begun
    monkeypatch.setattr(feed, "begun", lambda loader: begun.append(loader) or begin(loader))
    for step in range(24):
        assert values(feed, step) == expected(step, 100 * (step > 11) + 100 * (step > 12))
        feed.measured(1e-9)
        if step in (11, 12):
            data.plus += 100
        assert len(begun) == (step >= 4) + (step >= 16)
    feed.close()
    assert [(what, why.split(" by ")[0]) for what, why in feed.take_news()] == [
        ("rows are loaded ahead by a separate process", "loading delayed each step"),
        ("rows are loaded within the step for now: the dataset changes between steps", "dataset.plus changed"),
    ]


def test_loader_process_is_not_forked_beside_the_threads_of_lance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Feed, "SLOW", 0.0)
    monkeypatch.setitem(sys.modules, "lance", sys)
    feed = feed_of(Rows(), 8)
    monkeypatch.setattr(feed, "begun", None)
    for step in range(8):
        assert values(feed, step) == expected(step, 0)
        feed.measured(1e-9)
    ((told, why),) = feed.take_news()
    assert told == "rows are loaded within the step, because lance cannot be used in a process that is forked"
    assert re.fullmatch(r"loading delayed each step by \d+ ms \(loader=\{'num_workers': N\} overrides\)", why)


@pytest.mark.parametrize("what", ["changes in each step", "changes itself", "holds what cannot be compared"])
def test_loader_process_is_not_used_where_it_could_change_rows(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Feed, "SLOW", 0.0)

    class Counting(Rows):
        calls = 0

        def __getitem__(self, index: int) -> int:
            self.calls += what == "changes itself"
            return super().__getitem__(index) + self.calls // 8

    data, plus = Counting(), 0
    if what.startswith("holds"):
        data.file = io.StringIO()  # type: ignore[attr-defined]
    feed = feed_of(data, 24)
    monkeypatch.setattr(feed, "begun", None)
    for step in range(24):
        found, drawn = values(feed, step), expected(step, plus)
        assert found[:7] == (drawn if what != "changes itself" else [one + step for one in drawn])[:7]
        feed.measured(1e-9)
        if what == "changes in each step":
            data.plus += 1
            plus += 1
    names = {"changes in each step": "dataset.plus", "changes itself": "dataset.calls"}
    if what.startswith("holds"):
        ((told, why),) = feed.take_news()
        assert (
            told == "rows are loaded within the step, because a process that loads ahead could miss a change of the"
            " dataset"
        )
        assert why.startswith("dataset.file cannot be compared; loading delayed each step by ")
        assert why.endswith(" ms (loader={'num_workers': N} overrides)")
    else:
        assert feed.take_news() == [
            (f"rows are loaded within the step {when}: the dataset changes between steps", f"{names[what]} changed")
            for when in ("for now", "from now on")
        ]


@pytest.mark.parametrize("persistent", [False, True])
def test_loader_processes_are_forked_anew_each_epoch_where_changes_cannot_be_seen(
    persistent: bool,
) -> None:
    """As torch forks its own, unless they are persistent."""
    data = Rows()
    data.large = np.zeros(100_000)  # type: ignore[attr-defined]
    data.transforms = [lambda value: value + int(data.large[5])]  # type: ignore[attr-defined]
    feed = feed_of(data, 24, num_workers=1, persistent_workers=persistent)
    for step in range(24):
        assert values(feed, step) == expected(step, 0 if persistent else 100 * (step // 8))
        data.large[5] = 100 * ((step + 1) // 8)  # type: ignore[attr-defined]
    feed.close()
    told = "loader processes are restarted at each epoch and then see what the script has changed"
    news = [] if persistent else [(told, "dataset.large cannot be compared from step to step")]
    assert feed.take_news() == news


def test_custom_order_is_called_when_its_rows_are_loaded() -> None:
    first = [0]
    data = Rows()
    for options in ({}, {"num_workers": 1}):
        first[0] = 0
        source = Source.of(data, 3, None, lambda position, *_: (first[0] + position) % 64, options)
        feed = Feed(source, Grid(8, 4), (0, 4, 1), lambda *_, **__: None, watched=True)
        for step in range(4):
            assert values(feed, step) == [(10 * step + position) % 64 for position in range(8 * step, 8 * step + 8)]
            first[0] += 10
        feed.close()


class Stream(IterableDataset[int]):
    """Numbers, and what is added to them."""

    plus = 0

    def __iter__(self) -> Any:
        return (index + self.plus for index in range(20))


@pytest.mark.parametrize("processes", [0, 1])
def test_iterable_dataset_changes_are_seen_by_the_next_step_or_epoch(processes: int) -> None:
    """Also the first row of a global batch; of 20 rows in batches of 8 each third batch is an epoch's last."""
    data = Stream()
    options = {"num_workers": 1} if processes else {}
    source = Source.of(data, 3, None, None, options)
    feed = Feed(source, Grid(8, 4), (0, None, 3), lambda *_, **__: None, watched=True)
    for step in range(9):
        plus = 100 * step if not processes else 300 * (step // 3)
        assert values(feed, step) == [plus + index for index in range(20)[8 * (step % 3) : 8 * (step % 3) + 8]]
        data.plus += 100
    assert not feed.has(9)
    feed.close()
    what = (
        "an iterable dataset read by a loader process was changed between steps; the change takes effect in the next"
        " epoch"
    )
    why = "dataset.plus changed; without num_workers= each step sees changes"
    assert feed.take_news() == ([(what, why)] if processes else [])


class Fails:
    """Nobody can ask it anything."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


@pytest.mark.parametrize(
    "value",
    [
        io.StringIO(), iter([1]), itertools.count(), np.zeros(100_000), np.zeros(3, dtype=object), threading.local(),
        [{}] * 100_000, torch.nn.Linear,
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_dataset_snapshot_names_what_cannot_be_compared(value: Any) -> None:
    state = Snapshot(dataset=SimpleNamespace(held=value))
    assert state.unseen.startswith("" if value is nn.Linear else "dataset.held")
    assert bool(state.unseen) == (value is not nn.Linear)
    assert Snapshot(dataset=[Fails()]).unseen == "dataset[0]"


def test_dataset_snapshot_of_an_unchanged_dataset_is_equal() -> None:
    """Of everything that datasets usually hold; also where equal plain values were assigned."""
    frozen = np.zeros(100_000)
    frozen.setflags(write=False)
    many = [(f"image-{index}.png", index) for index in range(10_000)]
    held = [frozen, many, torch.zeros(10**6), array("d", [1.0]), bytearray(4), threading.Lock(), Path("x")]
    held += [np.dtype("f4")]
    held += [nn.Linear(2, 2), random.Random(1), torch.Generator(), np.random.default_rng(1), np.random.RandomState(1)]
    held += [functools.lru_cache(abs), {1, 2}, frozenset({3}), slice(0, 2), range(3), lambda: held]
    data = SimpleNamespace(held=held, number=1.5, text="a")
    state = Snapshot(dataset=data)
    data.number, data.text = float("1.5"), "".join(["a"])
    assert (state.unseen, state.changed()) == ("", "")
    held[9].random()
    assert state.changed() == "dataset.held[9]"


# -- newcomers --------------------------------------------------------------------------------------------------


class Two:
    """A group of this worker and another one, which says what this one does, or what it is to say."""

    size, rank, names = 2, 0, (0, 1)

    def __init__(self) -> None:
        self.other, self.told = list[Any](), list[Any]()

    def declare(self, name: str, kind: str) -> None:
        pass

    def gather_json(self, mine: Any) -> list[Any]:
        self.told.append(mine)
        return [mine, self.other.pop(0) if self.other else mine]


def test_a_joining_worker_with_the_unchanged_dataset_is_refused() -> None:
    """It has the dataset as its script makes it, without what the loop has changed: it is refused."""
    data, group = Rows(), Two()
    source = Source.of(data, 3, None, None, {})
    mine, newcomer = (Fingerprint(source, lambda *_, **__: None) for _ in range(2))
    assert mine.compare(group, 0) == ""  # type: ignore[arg-type]
    before = group.told[-1]
    data.plus += 100
    group.told.clear()
    assert mine.compare(group, 1) == ""  # type: ignore[arg-type]
    assert group.told == [True]  # no row was loaded
    group.other = [False, before]
    assert mine.compare(group, 2) == ""  # type: ignore[arg-type]
    group.other = [True, group.told[-1]]
    data.plus -= 100
    with pytest.raises(DatasetError) as caught:
        newcomer.compare(group, 2)  # type: ignore[arg-type]
    assert str(caught.value).startswith("row 2 of the dataset differs between worker 1 and worker 0; ")


# -- trained ----------------------------------------------------------------------------------------------------

SCRIPT = """
import time

class Slow(torch.utils.data.Dataset):
    def __init__(self, slow):
        self.slow, self.scale = slow, 1.0
    def __len__(self):
        return 96
    def __getitem__(self, index):
        time.sleep(0.001 * self.slow)
        return x[index] * self.scale, data[index][1]

for number, (loader, slow, changes_from) in enumerate(CASES):
    rows = Slow(slow)
    trainer = make(plan="micro=8")
    for report in trainer.steps(rows, count=18, loader=loader):
        if report.step >= changes_from:
            rows.scale = 1 + report.step / 10
    trainer.export(f"{number}.safetensors")
"""
# What is refused is the last thing that a script does.
GROWS = """
class Growing(torch.utils.data.Dataset):
    size = 48

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return data[index]

rows = Growing()
trainer = make(plan="micro=8")
for epoch in range(2):
    for report in trainer.steps(rows, epochs=1):
        pass
    rows.size = 96
trainer.export("grown.safetensors")
rows = Growing()
for report in make(plan="micro=8").steps(rows, epochs=2):
    print("in epoch", report.epoch)
    rows.size = 72
"""


@functools.cache
def by_hand(changes_from: int) -> dict[str, torch.Tensor]:
    import basics

    import paceline

    torch.manual_seed(paceline.stream_seed(0, 0, -1))
    model, scale = basics.net(), 1.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(18):
        picked = [sample_index(24 * (step % 4) + row, 96, 0, step // 4) for row in range(24)]
        optimizer.zero_grad()
        x, y = basics.data[picked]
        nn.functional.cross_entropy(model(x * scale), y).backward()
        optimizer.step()
        if step + 1 >= changes_from:
            scale = 1 + (step + 1) / 10
    return dict(model.state_dict())


def by_hand_growing() -> dict[str, torch.Tensor]:
    import basics

    import paceline

    torch.manual_seed(paceline.stream_seed(0, 0, -1))
    model = basics.net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch, size in enumerate((48, 96)):
        for first in range(0, size, 24):
            optimizer.zero_grad()
            x, y = basics.data[[sample_index(first + row, size, 0, epoch) for row in range(24)]]
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return dict(model.state_dict())


AHEAD = {"num_workers": 1}
# (loader=, milliseconds to load a row, the step from which on the body changes the dataset)
FAST = [(None, 2, 8), (AHEAD, 0, 12)]  # changed once loading has moved, and rows loaded ahead
SLOW = [(None, 2, 1), (AHEAD, 0, 1), ({"num_workers": 2}, 0, 1)]


@pytest.mark.parametrize(
    ("workers", "cases"),
    [
        (2, FAST),
        *(pytest.param(workers, cases, marks=pytest.mark.slow) for workers, cases in ((1, FAST), (3, FAST), (2, SLOW))),
        *(pytest.param(workers, SLOW[:2], marks=pytest.mark.slow) for workers in (1, 3)),
    ],
)
def test_training_follows_a_dataset_that_the_loop_changes(workers: int, cases: list[Any], tmp_path: Path) -> None:
    """Its rows; its length only between loops, and a change within one is refused."""
    done = train_basics(tmp_path, f"CASES = {cases}\n{SCRIPT}{GROWS}", workers, "--max-restarts", "0", code=1)
    for number, (_, _, changes_from) in enumerate(cases):
        weights = load_file(tmp_path / f"{number}.safetensors")
        assert apart(weights, by_hand(changes_from)) < 1e-12, cases[number]
    decisions = {entry["what"] for entry in read_journal(tmp_path / "out") if entry["event"] == "decision"}
    moved = "rows are loaded ahead by a separate process"
    assert (moved in decisions) == (cases is FAST)
    assert (
        "DatasetError: the dataset has 72 rows at the start of epoch 1, but had 48 when the loop over steps() began; "
        "write one loop over steps(dataset, epochs=1) per epoch, and change the length between the loops\n"
    ) in done.stderr
    assert done.stdout.count("in epoch 0") == 2
    assert "in epoch 1" not in done.stdout
    assert apart(load_file(tmp_path / "grown.safetensors"), by_hand_growing()) < 1e-12
