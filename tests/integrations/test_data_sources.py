"""Training sees the same rows of each kind of dataset on any team, through a kill, a join and a resume."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import SCRIPTS, paceline
from s3 import Proxy, s3_server
from sources import ALL, BATCH, EPOCHS, KINDS, REMOTE, ROWS, SEED, ByLength

from paceline.base.batching import stream_seed
from paceline.base.journal import read_journal
from paceline.data.order import sample_index
from paceline.data.row_stream import EPOCHS as EPOCH_STREAMS


def drawn_by_hand(dataset: Any, epoch: int) -> list[int]:
    """What torch draws for an epoch."""
    sampler = getattr(dataset, "order", None) or dataset.batch_sampler
    number = stream_seed(SEED, epoch, -1) & 0x7FFFFFFF
    if isinstance(sampler, ByLength):
        sampler.set_epoch(epoch)
        sampler.generator.manual_seed(number)
    torch.manual_seed(number)
    return [row for drawn in sampler for row in (drawn if isinstance(drawn, list) else [drawn])]


def rows_by_hand(name: str, folder: Path) -> list[list[int]]:
    """The number of rows of each step, and the sums of their powers."""
    kind, steps = ALL[name], []
    dataset = kind.open(folder)
    order = sample_index if name == "packed" else getattr(dataset, "order", sample_index)
    for epoch in range(EPOCHS):
        if kind.is_iterable:
            if hasattr(dataset, "set_epoch"):
                dataset.set_epoch(epoch)
            torch.manual_seed(stream_seed(SEED, EPOCH_STREAMS, epoch))
            in_order = [kind.number(row) for row in dataset]
        elif kind.is_sampled:
            in_order = drawn_by_hand(dataset, epoch)
        else:
            in_order = [int(order(position, ROWS, SEED, epoch)) for position in range(ROWS)]
        assert kind.is_sampled or sorted(in_order) == list(range(ROWS))
        for first in range(0, len(in_order), BATCH):
            rows = in_order[first : first + BATCH]
            steps.append([len(rows), *(sum(row**power for row in rows) for power in (1, 2, 3))])
    return steps


def need(name: str) -> None:
    """Skips a test of a format whose library is not installed."""
    if name == "lance":
        pytest.importorskip("lance")


NUMBERED = [name for name in KINDS if not KINDS[name].is_iterable and not KINDS[name].is_sampled]


@pytest.mark.parametrize("name", NUMBERED)
def test_rows_are_numbered_as_they_were_written(name: str, tmp_path: Path) -> None:
    need(name)
    kind, folder = KINDS[name], tmp_path / "data"
    folder.mkdir()
    kind.write(folder)
    for dataset in (kind.open(folder), kind.open(folder)):  # the second one reads what the first one has kept
        assert len(dataset) == ROWS
        assert [kind.number(dataset[number]) for number in range(ROWS)] == list(range(ROWS))
        if hasattr(dataset, "__getitems__"):
            assert [kind.number(row) for row in dataset.__getitems__([41, 3, 19, 3])] == [41, 3, 19, 3]
        if hasattr(dataset, "order") and name != "packed":
            taken = [dataset.order(position, ROWS, SEED, 1) for position in range(ROWS)]
            assert sorted(taken) == list(range(ROWS))


TEAMS = [(2, 3), (1, 5), (3, 1), (5, 2)]
CELLS = [(name, *team) for name in KINDS for team in TEAMS]
FAST = [("webdataset", 2, 3), ("hugging face streaming", 3, 1)]


@pytest.mark.parametrize(
    ("name", "workers", "then"),
    [pytest.param(*cell, marks=() if cell in FAST else pytest.mark.slow) for cell in CELLS],
)
def test_rows_are_the_same_through_a_kill_a_join_and_a_resume(
    name: str, workers: int, then: int, tmp_path: Path
) -> None:
    """A worker is killed in the first epoch and joins again. The run stops in the middle of the second epoch, and
    continues with another number of workers, of which one is killed and joins again.
    """
    need(name)
    (folder := tmp_path / "data").mkdir()
    ALL[name].write(folder)
    train_and_resume(name, "data", (workers, then), tmp_path)
    assert json.loads((tmp_path / "out.json").read_text()) == rows_by_hand(name, folder)


def train_and_resume(name: str, data: str, teams: tuple[int, int], folder: Path) -> None:
    """Trains with one team, and continues with another one. A worker of each is killed."""
    formed_before = 0
    for count, step, steps in zip(teams, (2, 9), (("--steps", "7"), ()), strict=True):
        options = ("--workers", str(count), "--run-dir", "run", *steps)
        formed_before += 2 * (count > 1)  # one without the killed worker, and one with it
        chaos = {"PACELINE_CHAOS": f"kill:0@{step}.forward", "FORMED": str(formed_before)} if count > 1 else {}
        paceline("run", *options, SCRIPTS / "sources.py", name, data, "out.json", cwd=folder, **chaos)
    formed = [event["workers"] for event in read_journal(folder / "run") if event["event"] == "formed"]
    assert sorted(map(len, formed)) == sorted(size for one in teams if one > 1 for size in (one - 1, one))


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    with pytest.MonkeyPatch.context() as patch, s3_server(tmp_path_factory.mktemp("s3"), patch) as server:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield server


@pytest.mark.slow
@pytest.mark.usefixtures("s3")
@pytest.mark.parametrize("name", REMOTE)
def test_rows_of_a_bucket_are_the_same_through_a_kill_a_join_and_a_resume(name: str, tmp_path: Path) -> None:
    import fsspec

    (folder := tmp_path / "data").mkdir()
    ALL[name].write(folder)
    where = f"bucket/{name.replace(' ', '-')}"
    fsspec.filesystem("s3").put(str(folder), where, recursive=True)
    train_and_resume(name, f"s3://{where}", (2, 3), tmp_path)
    assert json.loads((tmp_path / "out.json").read_text()) == rows_by_hand(name, folder)
