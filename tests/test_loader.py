"""A worker's feed: which micro-batches it loads, that those of others cost it nothing, and what is said where it has
none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from launching import train_basics

from paceline.data.loader import Feed, Place, Slot, Source, share_of
from paceline.observe.journal import read_journal
from paceline.phases import grid_text, idle_text
from paceline.step import Grid, deal


def feed_of(grid: Grid, rows: int, batches: int, place: Place, told: list[Any], **options: Any) -> Feed:
    source = Source.of(torch.arange(rows), 0, None, None, options)
    return Feed(source, grid, (0, batches, 1), lambda: place, lambda *event, **more: told.append((*event, more)))


@given(
    st.integers(1, 40),
    st.integers(1, 12),
    st.integers(1, 100),
    st.integers(0, 30),
    st.lists(st.sampled_from([0.0, 1.0, 2.0, 9.0]), min_size=1, max_size=6).filter(any),
    st.booleans(),
)
def test_slots_are_those_of_every_batch_in_turn(
    global_batch: int, micro: int, rows: int, start: int, weights: list[float], fine: bool
) -> None:
    grid = Grid(global_batch, min(micro, global_batch))
    for rank in range(len(weights)):
        place = Place(rank, tuple(weights), fine=fine)
        feed = feed_of(grid, rows, 30, place, [])
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
def test_a_worker_with_an_empty_share_looks_at_no_batch_ahead(
    weights: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the phase is; and it starts no loader process, which would have nothing to load."""
    told: list[Any] = []
    feed = feed_of(Grid(8, 4), 8 * 1000, 10**7, Place(2, weights), told, num_workers=1)
    looked = looks_at(feed, monkeypatch)
    assert [feed.at(step) for step in range(3)] == [(0, 8, [])] * 3
    assert list(feed.slots(3, Place(2, weights))) == []
    assert (looked, told) == ([0, 1, 2], [])


def test_a_worker_with_a_share_of_an_epochs_last_batch_alone_looks_at_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The paradox of the largest remainder: of three micro-batches worker 0 gets one, of four none."""
    feed = feed_of(Grid(16, 4), 16 * 999 + 12, 10**7, Place(0, (1.0, 3.0, 3.0)), [])
    looked = looks_at(feed, monkeypatch)
    slots = feed.slots(5, feed.place())
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
                "workers 2-3 have nothing to do while the 2 micro-batches stay whole",
                "the plan micro=4 has one for each of the 4 workers, which changes the mathematics",
            ),
        ),
        (
            Grid(10, 10),
            (1.0, 1.0),
            (
                "worker 1 has nothing to do while the 1 micro-batch stays whole",
                "the plan micro=5 has one for each of the 2 workers, which changes the mathematics",
            ),
        ),
        (
            Grid(16, 2),
            (20.0, 1.0, 0.0),
            (
                "worker 1 has nothing to do while the 8 micro-batches stay whole",
                "the plan micro=1 has one for each of the 2 workers, which changes the mathematics",
            ),
        ),
        (
            Grid(4, 1),
            (1.0,) * 6,
            (
                "workers 4-5 have nothing to do while the 4 micro-batches stay whole",
                "for 6 workers the global batch would need more rows than 4, which changes the mathematics",
            ),
        ),
    ],
)
def test_who_has_nothing_to_do_and_what_would_serve(
    grid: Grid, weights: tuple[float, ...], found: tuple[str, str] | None
) -> None:
    assert idle_text(grid, weights) == found


@given(st.integers(1, 300), st.integers(1, 40), st.integers(1, 300))
def test_the_micro_that_is_named_serves(global_batch: int, workers: int, micro: int) -> None:
    grid = Grid(global_batch, min(micro, global_batch))
    found = idle_text(grid, (1.0,) * workers)
    if found is None or "micro=" not in found[1]:
        assert (found is None) == (len(grid.cut(global_batch)) >= workers)
        assert found is None or workers > global_batch
    else:
        named = int(found[1].split("micro=")[1].split()[0])
        assert all(deal(len(Grid(global_batch, named).cut(global_batch)), (1.0,) * workers))


def test_shares_of_many_workers_are_not_told_one_by_one() -> None:
    grid, start = Grid(16, 2), "global batch 16 = 8 micro-batches of 2 rows, "
    some = f"dealt to the workers as {', '.join(['1'] * 8 + ['0'] * 8)}"
    assert grid_text(grid, [1] * 8 + [0] * 8, None, None) == start + some
    assert grid_text(grid, [1] * 8 + [0] * 9, None, None) == start + "0 to 1 on each of 17 workers"


def test_a_worker_without_micro_batches_says_so_and_keeps_nobody_waiting(tmp_path: Path) -> None:
    """In a phase that would take it half a minute to look through."""
    body = "t = make(plan='micro=24')\nlist(t.steps(data, count=10**7, loader={'num_workers': 1}))\n"
    done = train_basics(tmp_path, body, 2, "--steps", "2")
    what = "worker 1 has nothing to do while the 1 micro-batch stays whole"
    why = "the plan micro=12 has one for each of the 2 workers, which changes the mathematics"
    assert done.stdout.count(f"{what}: {why}\n") + done.stderr.count(f"{what}: {why}\n") == 1
    assert [entry["why"] for entry in read_journal(tmp_path / "out") if entry.get("what") == what] == [why]
