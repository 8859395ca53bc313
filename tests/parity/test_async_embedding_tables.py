"""Tables whose gradients are rows, where training is not in step: as `test_async_windows.py` for whole ones."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import SCRIPTS, paceline, train_basics
from paths import EXAMPLES
from proxies import Proxy
from test_async_windows import BATCH, counted, each_row_once, stopped
from test_parameter_servers import KILLED, nobody_went_back

from paceline.compute.sparse_grads import TouchedRows
from paceline.team.fault_injection import read_log

EXAMPLE = EXAMPLES / "recommend.py"
TABLE = {"TABLE": "1"}


def versions_of(folder: Path) -> list[Any]:
    """Of each reading how many servers there were, how many updates were asked for, and the table and the rest had;
    never fewer, nor a part of one.
    """
    found = [json.loads(line) for line in (folder / "versions").read_text().splitlines()]
    assert all(asked <= table == int(table) for _, asked, table, _ in found)
    return found


def all_have_the_same(folder: Path, workers: int) -> None:
    """At the end of each turn, of which all but the newcomers have each."""
    tables = defaultdict[int, list[Any]](list)
    for line in (folder / "turns").read_text().splitlines():
        step, table = json.loads(line)
        tables[step].append(table)
        assert sum(table) == -step * BATCH
    assert all(table == some[0] for some in tables.values() for table in some)
    assert max(map(len, tables.values())) == workers


@pytest.mark.parametrize(
    ("workers", "plan"),
    [
        (3, "server=1 staleness=2"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [(5, "server=2 staleness=1"), (4, "server=3 staleness=inf")]
        ),
    ],
)
def test_rows_are_as_new_as_what_is_whole(tmp_path: Path, workers: int, plan: str) -> None:
    """From one server in each reading the same; and at the end of a window all have all."""
    counted(tmp_path, workers, f"{plan} window=40", 100, STRAGGLE="0.1:8", **TABLE)
    assert [one["updates"] for one in each_row_once(tmp_path, 100)] == [40, 40, 20]
    found = versions_of(tmp_path)
    assert len(found) >= 100 + 3 * workers
    assert all(table == rest for servers, _, table, rest in found if servers == 1)
    all_have_the_same(tmp_path, workers)


LOST = [
    ("staleness=1", {"KILL": "1:11"}),
    ("staleness=2", {"BETWEEN": "1:0"}),
    ("staleness=2", {"CUT": "7"}),
    ("staleness=2 copies=1", {"PACELINE_CHAOS": "kill:1000000@50.reduced"}),
    ("staleness=inf", {"BETWEEN": "1:1"}),
    ("staleness=2 copies=1", {"PACELINE_CHAOS": "kill:1000001@50.applied"}),
]


@pytest.mark.parametrize(
    ("plan", "env"),
    [pytest.param(*one, marks=[] if number in (0, 3) else pytest.mark.slow) for number, one in enumerate(LOST)],
)
def test_each_row_counts_once_whoever_is_lost(tmp_path: Path, plan: str, env: dict[str, str]) -> None:
    """A worker, also one whose push has come to one of two servers; connections; a server of which there is a copy."""
    said = counted(tmp_path, 3, f"server=2 {plan} window=40", 120, **env, **TABLE)
    assert sum(one["updates"] for one in each_row_once(tmp_path, 120)) == 120
    versions_of(tmp_path)
    all_have_the_same(tmp_path, 3)
    assert ("CUT" in env) is (tmp_path / "cuts").exists()
    assert ("KILL" in env or "BETWEEN" in env) is (tmp_path / "killed").exists()
    if "PACELINE_CHAOS" in env:
        (fault,) = read_log(tmp_path / "run")
        nobody_went_back(tmp_path, said, int(fault["worker"]) - 1000000)


def test_pushes_that_come_twice_count_once(tmp_path: Path) -> None:
    with Proxy(7, 11) as proxy:
        counted(tmp_path, 3, "server=2 staleness=4 window=40", 80, PROXY=str(proxy.port), **TABLE)
    each_row_once(tmp_path, 80)
    versions_of(tmp_path)
    assert min(proxy.kinds[kind] for kind in ("lost READ", "doubled ROWS", "doubled PUSHED")) >= 3


def test_rows_of_an_update_that_was_lost_with_its_server_do_not_stay(tmp_path: Path) -> None:
    """A worker has read them, and no other server had made it: what it has is another server's from then on."""
    said = counted(tmp_path, 3, "server=2 copies=1 staleness=inf window=60", 120, VANISH="25", **TABLE)
    assert f"server 0 {KILLED}: server 1 has a copy of what it kept" in said
    found = versions_of(tmp_path)
    assert any(asked == rest == 25 < table for servers, asked, table, rest in found if servers == 2), "nobody read them"
    alone = [(table, rest) for servers, _, table, rest in found if servers == 1]
    assert len(alone) >= 3
    assert all(table <= rest for table, rest in alone)  # which is asked for later
    each_row_once(tmp_path, 120)
    all_have_the_same(tmp_path, 3)


@pytest.mark.slow
def test_a_stop_ends_the_window_and_the_rest_is_made_later(tmp_path: Path) -> None:
    """In step, on another team."""
    stopped(tmp_path, "micro=3 server=2 staleness=4", 100, **TABLE)
    [saved] = (tmp_path / "run" / "checkpoints").glob("step-*")
    done = int(saved.name.removeprefix("step-"))
    assert 0 < done < 50
    counted(tmp_path, 2, "server=1", 100, **TABLE)
    each_row_once(tmp_path, 100, first=done)


def test_momentum_that_is_delayed_is_for_whole_gradients(tmp_path: Path) -> None:
    body = "make(model=lambda: torch.nn.EmbeddingBag(4, 2, sparse=True))"
    text = train_basics(tmp_path, body, 1, "--plan", "server=1 staleness=2 delayed=1", code=2).stderr
    assert (
        "the model gives sparse gradients, which delayed=1 does not know yet; make it with sparse=False, or leave "
        "delayed=1 out"
    ) in text


@pytest.mark.slow
def test_an_update_moves_a_twentieth_of_the_tables_at_most(tmp_path: Path) -> None:
    """Counted at the workers: what they push, and what they take, also at the end of a window."""
    steps, rows, width = 20, 50_000 + 200_000, 32
    said = ("--workers", "2", "--run-dir", "run", "--plan", "server=2 staleness=4 window=20", "--steps", str(steps))
    paceline("run", *said, SCRIPTS / "weighed.py", EXAMPLE, cwd=tmp_path)
    told = [json.loads((tmp_path / f"told-{worker}").read_text()) for worker in (0, 1)]
    for what in ("pushed", "taken"):
        moved = sum(one[what] for one in told) / steps
        assert 0.001 < moved / (4 * rows * width) < 0.05, what


def test_what_is_known_of_a_table_is_what_has_changed() -> None:
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
