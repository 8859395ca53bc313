"""Embedding tables whose gradients are sparse, in asynchronous training; `test_async_windows.py` has more of it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from launching import SCRIPTS, paceline
from paths import EXAMPLES
from server_runs import (
    KILLED,
    check_each_row_counted_once,
    check_tables_are_equal,
    read_versions,
    train_counted,
)

from paceline.compute.sparse_grads import TouchedRows

EXAMPLE = EXAMPLES / "recommend.py"


def test_kill_of_a_server_takes_back_rows_of_an_update_that_only_it_had(tmp_path: Path) -> None:
    """A worker has read them, and no other server had made it: what it has is another server's from then on."""
    plan = "server=2 copies=1 staleness=inf window=40"
    output = train_counted(tmp_path, 3, plan, 80, VANISH="15", TABLE="1")
    assert f"server 0 {KILLED}: server 1 has a copy of its state" in output
    versions = read_versions(tmp_path)
    assert any(servers == 2 and rest <= 15 < table for servers, _, table, rest in versions), "nobody read them"
    with_one = [(table, rest) for servers, _, table, rest in versions if servers == 1]
    assert len(with_one) >= 3
    assert all(table <= rest for table, rest in with_one)  # which is asked for later
    check_each_row_counted_once(tmp_path, 80)
    check_tables_are_equal(tmp_path, 3)


@pytest.mark.slow
def test_an_update_of_embedding_tables_moves_a_twentieth_of_them_at_most(tmp_path: Path) -> None:
    """Counted at the workers: what they push, and what they take, also at the end of a window."""
    steps, rows, width = 20, 50_000 + 200_000, 32
    said = ("--workers", "2", "--run-dir", "run", "--plan", "server=2 staleness=4 window=20", "--steps", str(steps))
    paceline("run", *said, SCRIPTS / "weighed.py", EXAMPLE, cwd=tmp_path)
    reports = [json.loads((tmp_path / f"told-{worker}").read_text()) for worker in (0, 1)]
    for what in ("pushed", "taken"):
        moved = sum(one[what] for one in reports) / steps
        assert 0.001 < moved / (4 * rows * width) < 0.05, what


def test_touched_rows_are_those_that_have_changed() -> None:
    """As sets say, for whoever is not further behind than the table has rows; for others any row may have."""
    draw = random.Random(0)
    touched, made = TouchedRows(20, 5), dict[int, set[int]]()
    for update in range(5, 200):
        rows = set(draw.sample(range(20), draw.randint(0, 6)))
        made[update] = {*range(20)} if update == 100 else rows
        touched.note(update, None if update == 100 else torch.tensor(sorted(rows), dtype=torch.int64), update - 9)
        first = next(n for n in range(update + 2) if touched.since(n) is not None)
        kept = [made[n] for n in range(first, update + 1)]
        assert sum(map(len, kept)) <= 20
        assert update - 9 <= first or update < 14
        assert first == max(5, update - 9) or first == 101 or sum(map(len, kept)) + len(made[first - 1]) > 20
        for since in range(first, update + 2):
            found = touched.since(since)
            assert found is not None
            assert found.tolist() == sorted(set().union(*(made[n] for n in range(since, update + 1))))
