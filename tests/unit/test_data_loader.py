"""A worker's feed: which micro-batches it loads, that those of others cost it nothing, and what is said where it has
none.
"""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from launching import train_basics
from torch.utils.data import TensorDataset, default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from examples import examples
from paceline.base.batching import Grid, deal
from paceline.base.journal import read_journal
from paceline.data.loader import Assignment, Feed, Slot, Source, _Rows, _Start, share_of
from paceline.data.order import sample_index
from paceline.session.grid_text import grid_text, idle_text


def feed_of(grid: Grid, rows: int, batches: int, told: list[Any], **options: Any) -> Feed:
    source = Source.of(torch.arange(rows), 0, None, None, options)
    return Feed(source, grid, (0, batches, 1), lambda *event, **more: told.append((*event, more)))


@examples(
    st.integers(1, 40),
    st.integers(1, 12),
    st.integers(1, 100),
    st.integers(0, 30),
    st.lists(st.sampled_from([0.0, 1.0, 2.0, 9.0]), min_size=1, max_size=6).filter(any),
    st.booleans(),
    fast=30,
)
def test_loader_slots_are_the_micro_batches_of_each_batch_in_order(
    global_batch: int, micro: int, rows: int, start: int, weights: list[float], fine: bool
) -> None:
    grid = Grid(global_batch, min(micro, global_batch))
    for rank in range(len(weights)):
        place = Assignment(rank, tuple(weights), fine=fine)
        feed = feed_of(grid, rows, 30, [])
        one_by_one = []
        for step in range(start, 30):
            epoch, first, cuts = feed.grid_of(step)
            for index, part, blank in share_of(place, grid, sum(map(len, cuts))):
                one_by_one.append(
                    Slot(index, epoch, first + cuts[index].start, first + cuts[index].stop, (), part, blank)
                )
        assert list(feed.slots(start, place)) == one_by_one


def looks_at(feed: Feed, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The batches that a feed cuts up from here on; a hundred at most."""
    looked: list[int] = []
    grid_of = feed.grid_of

    def counted(step: int) -> Any:
        looked.append(step)
        assert len(looked) < 100
        return grid_of(step)

    monkeypatch.setattr(feed, "grid_of", counted)
    return looked


@pytest.mark.parametrize("weights", [(1.0, 1.0, 0.0), (1.0, 1.0, 1.0)], ids=["--shares 1,1,0", "3 workers"])
def test_worker_with_an_empty_share_loads_no_batch_ahead(
    weights: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the phase is; and it starts no loader process, which would have nothing to load."""
    told: list[Any] = []
    feed, assignment = feed_of(Grid(8, 4), 8 * 1000, 10**7, told, num_workers=1), Assignment(2, weights)
    looked = looks_at(feed, monkeypatch)
    assert [feed.at(step, assignment) for step in range(3)] == [(0, 8, [])] * 3
    assert list(feed.slots(3, assignment)) == []
    assert (looked, told) == ([0, 1, 2], [])


def test_worker_with_a_share_of_the_last_batch_only_reads_no_other_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The paradox of the largest remainder: of three micro-batches worker 0 gets one, of four none."""
    feed = feed_of(Grid(16, 4), 16 * 999 + 12, 10**7, [])
    looked = looks_at(feed, monkeypatch)
    slots = feed.slots(5, Assignment(0, (1.0, 3.0, 3.0)))
    assert [next(slots).epoch for _ in range(3)] == [0, 1, 2]
    assert looked == [999, 1999, 2999]


# -- what is said -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grid", "weights", "found"),
    [
        (Grid(16, 2), (1.0,) * 8, None),
        (Grid(16, 8), (1.0, 1.0, 0.0), None),  # as was asked for
        (
            Grid(16, 8),
            (1.0,) * 4,
            (
                "workers 2-3 have nothing to do, because the 2 micro-batches are not divided further",
                "the plan micro=4 gives one micro-batch to each of the 4 workers, which changes the mathematics",
            ),
        ),
        (
            Grid(10, 10),
            (1.0, 1.0),
            (
                "worker 1 has nothing to do, because the 1 micro-batch is not divided further",
                "the plan micro=5 gives one micro-batch to each of the 2 workers, which changes the mathematics",
            ),
        ),
        (
            Grid(16, 2),
            (20.0, 1.0, 0.0),
            (
                "worker 1 has nothing to do, because the 8 micro-batches are not divided further",
                "the plan micro=1 gives one micro-batch to each of the 2 workers, which changes the mathematics",
            ),
        ),
        (
            Grid(4, 1),
            (1.0,) * 6,
            (
                "workers 4-5 have nothing to do, because the 4 micro-batches are not divided further",
                "for 6 workers the global batch needs more than 4 rows, which changes the mathematics",
            ),
        ),
    ],
)
def test_idle_workers_are_named_with_a_plan_that_uses_them(
    grid: Grid, weights: tuple[float, ...], found: tuple[str, str] | None
) -> None:
    assert idle_text(grid, weights) == found


@given(st.integers(1, 300), st.integers(1, 40), st.integers(1, 300))
def test_suggested_micro_batch_size_uses_every_worker(global_batch: int, workers: int, micro: int) -> None:
    grid = Grid(global_batch, min(micro, global_batch))
    found = idle_text(grid, (1.0,) * workers)
    if found is None or "micro=" not in found[1]:
        assert (found is None) == (len(grid.cut(global_batch)) >= workers)
        assert found is None or workers > global_batch
    else:
        named = int(found[1].split("micro=")[1].split()[0])
        assert all(deal(len(Grid(global_batch, named).cut(global_batch)), (1.0,) * workers))


def test_shares_of_many_workers_are_summarized() -> None:
    grid, start = Grid(16, 2), "global batch 16 = 8 micro-batches of 2 rows, "
    some = f"assigned to the workers as {', '.join(['1'] * 8 + ['0'] * 8)}"
    assert grid_text(grid, [1] * 8 + [0] * 8, None, None) == start + some
    assert grid_text(grid, [1] * 8 + [0] * 9, None, None) == start + "0 to 1 on each of 17 workers"


def test_worker_without_micro_batches_is_noted_and_does_not_delay_the_run(tmp_path: Path) -> None:
    """In a phase that would take it half a minute to look through."""
    body = "t = make(plan='micro=24')\nlist(t.steps(data, count=10**7, loader={'num_workers': 1}))\n"
    done = train_basics(tmp_path, body, 2, "--steps", "2")
    what = "worker 1 has nothing to do, because the 1 micro-batch is not divided further"
    why = "the plan micro=12 gives one micro-batch to each of the 2 workers, which changes the mathematics"
    assert done.stdout.count(f"{what}: {why}\n") + done.stderr.count(f"{what}: {why}\n") == 1
    assert [entry["why"] for entry in read_journal(tmp_path / "out") if entry.get("what") == what] == [why]


# -- rows at once -----------------------------------------------------------------------------------------------

LAYOUTS = st.sampled_from(["as it is", "transposed", "channels last", "every second row", "one column", "broadcast"])


def laid_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "transposed":
        return tensor.flip(0).transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "channels last" and tensor.dim() == 4:
        return tensor.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    if layout == "every second row":
        return torch.cat([tensor, tensor])[::2]
    if layout == "one column" and tensor.dim() > 1:
        return torch.stack([tensor, tensor], 1)[:, 0]
    return tensor[:1].expand_as(tensor) if layout == "broadcast" else tensor


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 3), max_size=4), LAYOUTS), min_size=1, max_size=3),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64]),
    st.lists(st.integers(0, 4), min_size=1, max_size=6),
)
def test_vectorized_rows_equal_default_collate(
    shapes: list[tuple[list[int], str]], dtype: torch.dtype, indices: list[int]
) -> None:
    """Values, dtypes and strides; or they are not loaded so."""
    made = [laid_out(torch.arange(5 * math.prod(shape)).view(5, *shape).to(dtype), how) for shape, how in shapes]
    data = TensorDataset(*made)
    expected = default_collate([data[index] for index in indices])
    found = _Rows(Source.of(data, 0, None, None, {})).at_once(indices)
    if found is None:
        assert any(not tensor.numel() or tensor.stride() != torch.empty(tensor.shape).stride() for tensor in made)
    else:
        assert type(found) is type(expected)
        for mine, its in zip(found, expected, strict=True):
            assert torch.equal(mine, its)
            assert (mine.dtype, mine.shape, mine.stride()) == (its.dtype, its.shape, its.stride())


class Doubled(TensorDataset):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return tuple(2 * tensor for tensor in super().__getitem__(index))


class Named(torch.Tensor):
    pass


def test_datasets_of_other_kinds_are_loaded_row_by_row() -> None:
    rows = torch.arange(6.0)
    same = _Rows(Source.of(TensorDataset(rows), 0, None, None, {}))
    assert same.at_once([1, 2]) is not None
    for data in (Doubled(rows), TensorDataset(rows.as_subclass(Named)), TensorDataset(rows.clone().requires_grad_())):
        assert _Rows(Source.of(data, 0, None, None, {})).at_once([1, 2]) is None
    assert _Rows(Source.of(TensorDataset(rows), 0, list, None, {})).at_once([1, 2]) is None
    assert same.at_once([-1]) is None  # is row 5
    assert same.at_once([6]) is None  # fails as the dataset does
    place = Assignment(0, (1.0,))
    for data, expected in ((TensorDataset(rows), [0, 1]), (Doubled(rows), [0, 2])):
        source = Source.of(data, 0, None, lambda position, *_: position, {})
        feed = Feed(source, Grid(4, 2), (0, 1, 1), lambda *_, **__: None)
        assert feed.at(0, place)[2][0].batch[0].tolist() == expected


def test_registered_tensor_collate_function_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source.of(TensorDataset(torch.arange(6.0)), 0, None, None, {})
    monkeypatch.setitem(default_collate_fn_map, torch.Tensor, lambda batch, *, collate_fn_map=None: len(batch))
    assert _Rows(source).at_once([1, 2]) is None


@pytest.mark.parametrize("options", [{}, {"num_workers": 0}, {"timeout": 0}, {"num_workers": 1}])
def test_loader_options_keep_rows_and_random_streams(options: dict[str, Any]) -> None:
    data = TensorDataset(torch.arange(24.0), torch.arange(24))
    source = Source.of(data, 3, None, None, options)
    feed = Feed(source, Grid(8, 4), (0, 3, 1), lambda *_, **__: None)
    before = torch.get_rng_state()
    found = [
        row for _, _, share in feed.all(Assignment(0, (1.0,))) for taken in share for row in taken.batch[0].tolist()
    ]
    assert sorted(found) == list(range(24))
    assert found == [sample_index(position, 24, 3, 0) for position in range(24)]
    assert torch.equal(torch.get_rng_state(), before)


class RandomRows:
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        return index + torch.rand(3)


def test_pickled_loader_of_a_spawned_process_gives_the_same_random_rows() -> None:
    """The dataset of micro-batches and the start function travel as a pickle, before and after rows were loaded."""
    rows = _Rows(Source.of(RandomRows(), 3, None, None, {"num_workers": 1}))
    slots = [Slot(0, 0, 0, 4, (5, 1, 7, 2)), Slot(1, 1, 4, 6, (5, 1))]
    fresh = pickle.loads(pickle.dumps(rows))
    expected = [rows[slot][1] for slot in slots]
    assert not torch.equal(expected[0][:2], expected[1])
    for copied in (fresh, pickle.loads(pickle.dumps(rows))):
        torch.manual_seed(99)
        assert all(torch.equal(copied[slot][1], batch) for slot, batch in zip(slots, expected, strict=True))
    assert pickle.loads(pickle.dumps(_Start(math.sqrt))).then is math.sqrt


class Drawn:
    """Rows with a draw each, which are noted in a file; those from the `odd` one on have a text as well."""

    def __init__(self, file: Path, odd: int = 1000) -> None:
        self.file, self.odd = file, odd

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        with self.file.open("a") as file:
            file.write(f"{index}\n")
        return (index + torch.rand(3), *["text"] * (index >= self.odd))


@pytest.mark.parametrize(("options", "odd"), [({}, 1000), ({"num_workers": 1}, 1000), ({}, 16)])
def test_part_of_a_micro_batch_loads_only_its_rows(options: dict[str, Any], odd: int, tmp_path: Path) -> None:
    """Once it is seen that rows can be told apart; and where others follow that cannot, all of a micro-batch."""
    place, in_order = Assignment(0, (1.0, 2.0), fine=True), lambda position, rows, seed, epoch: position
    found: dict[str, list[Any]] = {}
    for name, collate in (("usual", None), ("own", lambda rows: default_collate(rows))):
        source = Source.of(Drawn(tmp_path / name, odd), 3, collate, in_order, options)
        feed = Feed(source, Grid(8, 8), (0, 3, 1), lambda *_, **__: None)
        for _, count, share in feed.all(place):
            assert count == 8
            found.setdefault(name, []).append([taken for taken in share if taken.take_part()])
    loaded = {name: [*map(int, (tmp_path / name).read_text().split())][8:] for name in found}  # seen to draw, and again
    assert loaded["own"] == [*range(24)]
    part = found["usual"][0][0].rows
    assert 0 < part < 8
    assert loaded["usual"][: 8 + 2 * part] == [*range(8), *range(8, 8 + part), *range(16, 16 + part)]
    assert loaded["usual"][8 + 2 * part :] == ([] if odd == 1000 else [*range(16, 24)])
    if odd != 1000:
        assert (found["usual"].pop(), found["own"].pop()) == ([], [])
    for (mine,), (theirs,) in zip(found["usual"], found["own"], strict=True):
        assert (mine.rows, mine.numbers, mine.start) == (part, theirs.numbers, theirs.start)
        assert str(mine.source) == str(theirs.source)
        assert mine.divided
        assert torch.equal(mine.batch[0], theirs.batch[0])


@pytest.mark.gpu
def test_loader_processes_pin_memory_on_a_gpu() -> None:
    torch.cuda.init()
    source = Source.of(TensorDataset(torch.arange(8.0)), 0, None, None, {"num_workers": 1})
    feed = Feed(source, Grid(8, 4), (0, 1, 1), lambda *_, **__: None)
    assert [taken.batch[0].is_pinned() for _, _, share in feed.all(Assignment(0, (1.0,))) for taken in share] == [
        True,
        True,
    ]
