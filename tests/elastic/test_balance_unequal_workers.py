"""Unequal workers: which part of the global batch each gets, how that is measured, and that it changes nothing else."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launching import train_basics
from oracle import apart
from safetensors.torch import load_file

from paceline.base.batching import Grid, deal_rows
from paceline.base.journal import read_journal
from paceline.data.balance import Balance, Change, WorkerCost, slowest, solve, soonest
from paceline.observe.summary import Summary, facts
from paceline.team.fault_injection import read_log

GRID = Grid(256, 32)
costs = st.builds(WorkerCost, st.sampled_from([0.0, 0.1, 1.0]), st.floats(0.01, 10.0))


@given(st.integers(1, 7), st.lists(costs, min_size=1, max_size=3))
def test_solve_finds_the_earliest_end(units: int, some: list[WorkerCost]) -> None:
    found = solve(units, some)
    assert sum(found) == units
    every = (c for c in itertools.product(range(units + 1), repeat=len(some)) if sum(c) == units)
    assert slowest(units, found, some) == min(slowest(units, counts, some) for counts in every)


@given(st.integers(1, 3000), st.lists(st.one_of(costs, st.just(WorkerCost(0.1, 0.0))), min_size=1, max_size=9))
def test_deal_at_once_equals_a_deal_one_by_one(units: int, some: list[WorkerCost]) -> None:
    counts = [0] * len(some)
    for _ in range(units):
        counts[min(range(len(some)), key=lambda at: some[at].of((counts[at] + 1) / units))] += 1
    assert solve(units, some) == tuple(counts)


@given(st.lists(costs, min_size=1, max_size=4))
def test_divisible_work_ends_no_later(some: list[WorkerCost]) -> None:
    done = [slowest(units, solve(units, some), some) for units in (1, 10, 1000)]
    assert all(soonest(some) <= seconds * (1 + 1e-9) for seconds in done)
    assert done[-1] <= soonest(some) * 1.01 + max(cost.rate for cost in some) / 1000


@given(
    st.integers(1, 70),
    st.integers(1, 40),
    st.lists(st.integers(0, 50), min_size=1, max_size=5).filter(any),
    st.booleans(),
)
def test_every_row_is_assigned_once(rows: int, micro: int, weights: list[int], fine: bool) -> None:
    grid = Grid(max(rows, micro), micro)
    cuts = grid.cut(rows)
    shares = deal_rows(cuts, weights, grid.grain if fine else None)
    dealt = [(number, part) for share in shares for number, part in share]
    assert [row for _, part in dealt for row in part] == list(range(rows))
    assert all(part.start >= cuts[number].start and part.stop <= cuts[number].stop for number, part in dealt)
    for share in shares:
        numbers = [number for number, _ in share]
        assert numbers == sorted(set(numbers)), "a micro-batch comes to a worker in two parts"
        assert fine or all(part == cuts[number] for number, part in share)


def test_assignment_of_whole_or_divided_micro_batches() -> None:
    cuts = GRID.cut(256)
    whole, fine = ([sum(len(p) for _, p in s) for s in deal_rows(cuts, (4, 2, 1), g)] for g in (None, GRID.grain))
    assert whole == [160, 64, 32]
    assert fine == [148, 72, 36]


@given(st.integers(1, 400), st.integers(1, 60), st.booleans())
def test_count_of_units_equals_the_assigned_parts(global_batch: int, micro: int, fine: bool) -> None:
    grid = Grid(global_batch, min(micro, global_batch))
    shares = deal_rows(grid.cut(global_batch), [1.0] * (global_batch + 1), grid.grain if fine else None)
    assert Balance(grid, (0,), fine=fine).units == sum(bool(share) for share in shares)


def test_balance_of_a_thousand_workers_cuts_the_global_batch_a_few_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cut, calls = Grid.cut, []

    def counted(grid: Grid, rows: int) -> list[range]:
        calls.append(rows)
        return cut(grid, rows)

    monkeypatch.setattr(Grid, "cut", counted)
    team = Simulated(1000, noise=0.01, fine=True, grid=Grid(4000, 4))
    team.run(12, [1.0] * 500 + [0.5] * 500)
    assert team.changes
    assert len(calls) < 10


# ---- simulated workers: so many global batches a second, and noise


class Simulated:
    """Steps of a team whose workers' `speeds` are a function of the step; `used` is the part of their sum in each."""

    def __init__(self, members: int, noise: float = 0.0, fine: bool = False, fixed: float = 0.0, grid: Grid = GRID):
        self.balance, self.noise, self.fixed = Balance(grid, tuple(range(members))), noise, fixed
        self.balance.divide(tested=fine, strict=False)
        self.changes: list[tuple[int, Change]] = []
        self.used: list[float] = []
        self.steps = 0

    def run(self, steps: int, speeds: Sequence[float], seed: int = 0) -> Simulated:
        chance = random.Random(seed)
        for _ in range(steps):
            took = [
                (self.fixed + part / speed) * chance.lognormvariate(0, self.noise) if part else 1e-4 * chance.random()
                for part, speed in zip(self.balance.parts, speeds, strict=True)
            ]
            true = [part / speed for part, speed in zip(self.balance.parts, speeds, strict=True)]
            self.used.append(1 / sum(speeds) / max(true))
            self.steps += 1
            change = self.balance.learn(took)
            if change is not None:
                self.changes.append((self.steps, change))
        return self


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.1])
def test_balance_uses_unequal_speeds_within_twenty_steps(noise: float) -> None:
    team = Simulated(3, noise, fine=True).run(20, [1.0, 0.5, 0.25])
    assert team.used[0] < 0.6
    assert team.used[-1] > 0.9
    team.run(100, [1.0, 0.5, 0.25]).run(20, [1.0, 0.5, 1.0])
    assert team.used[-1] > 0.9, "a worker has become faster"


def test_balance_of_whole_micro_batches() -> None:
    team = Simulated(3).run(20, [1.0, 0.5, 0.25])
    assert team.balance.parts == (5 / 8, 2 / 8, 1 / 8)


@pytest.mark.parametrize("speeds", [[1.0, 1.0, 1.0, 1.0], [1.0, 0.5, 0.25]], ids=["equal", "unequal"])
@pytest.mark.parametrize("noise", [0.05, 0.2, 0.5])
@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 10), marks=pytest.mark.slow)])
def test_balance_under_noise_changes_at_most_once_in_a_hundred_steps(
    noise: float, speeds: list[float], seeds: Sequence[int]
) -> None:
    for seed in seeds:
        team = Simulated(len(speeds), noise, fine=True).run(1000, speeds, seed)
        assert len(team.changes) <= 10


def test_balance_gives_a_too_slow_worker_nothing_and_tries_it_again() -> None:
    team = Simulated(4).run(400, [1.0, 1.0, 1.0, 0.02])
    (_, first), *more = team.changes
    assert first.parts[3] == 0
    assert [change.trial for _, change in more] == [3, None, 3, None]
    waits = [after - before for (before, _), (after, _) in itertools.pairwise(team.changes)]
    assert waits[1::2] == [1, 1], "one step is enough to see that it is still slow"
    assert waits[0] < waits[2]
    what, why = team.balance.news[0]
    assert (
        what
        == "workers 0, 1, 2 and 3 compute 38, 38, 25 and 0 % of each global batch; the others finish earlier without"
        " worker 3"
    )
    assert why.endswith(" s, with the shares before 12 s")
    team.run(400, [1.0] * 4)
    assert team.balance.parts == (0.25,) * 4


def test_balance_reports_settled_shares_once() -> None:
    """The journal has all; 38 and 62 %, 62 and 38 and 50 and 50 within seconds are nothing to read."""
    team = Simulated(2, fine=True)
    for speeds in ([4.0, 2.0], [2.0, 4.0], [4.0, 4.0]):
        team.run(20, speeds)
        assert team.balance.settled() == []
    assert len(team.changes) == len(team.balance.news) == 3
    team.run(400, [4.0, 4.0])
    ((what, why),) = team.balance.settled()
    assert (what, why) == team.balance.news[-1]
    assert what == "workers 0 and 1 compute 50 and 50 % of each global batch"
    team.run(20, [4.0, 2.0]).run(600, [4.0, 4.0])
    assert len(team.changes) > 4
    assert team.balance.settled() == [], "that they compute as much was said"


def test_balance_separates_fixed_costs() -> None:
    team = Simulated(2, fixed=0.2, fine=True).run(60, [1.0, 0.25])
    done = [0.2 + part / speed for part, speed in zip(team.balance.parts, [1.0, 0.25], strict=True)]
    assert max(done) / min(done) < 1.1


@pytest.mark.parametrize(
    ("members", "speeds", "said"),
    [
        (
            12,
            [1.0],
            "67 % of their speed is used; with the plan micro=2, which changes the mathematics, it would be 97 %",
        ),
        (
            3,
            [1.0, 0.4, 0.15],
            "86 % of their speed is used; with the plan micro=8, which changes the mathematics, it would be 98 %",
        ),
        (4, [1.0], None),
    ],
)
def test_too_coarse_grid_is_reported_once(members: int, speeds: list[float], said: str | None) -> None:
    team = Simulated(members).run(200, (speeds * members)[:members])
    hints = [why for what, why in team.balance.news if "too large" in what]
    assert hints == ([said] if said else [])


def test_divided_micro_batches_make_no_grid_too_coarse() -> None:
    team = Simulated(12, fine=True).run(50, [1.0] * 12)
    assert team.used[-1] > 0.8
    assert [what for what, _ in team.balance.news if "too large" in what] == []


def test_grid_of_single_rows_is_not_called_too_coarse() -> None:
    """There is no smaller one to advise."""
    team = Simulated(3, grid=Grid(4, 1)).run(200, [1.0, 1.0, 1.0])
    assert team.used[-1] < 0.7
    assert [what for what, _ in team.balance.news if "too large" in what] == []


def test_new_team_keeps_the_measured_speeds() -> None:
    team = Simulated(3, fine=True).run(40, [1.0, 0.5, 0.25])
    said = json.loads(json.dumps(team.balance.state()))
    other = Balance(GRID, (0,))
    for balance in (team.balance, other):
        balance.reform((2, 0, 5), said)
    assert team.balance.parts == other.parts
    late, first, new = other.parts
    assert late < new < first, "who is not known is taken for an average one"
    rows = [[0.1 + 0.01 * (step % 3), 0.2, 0.3] for step in range(40)]
    for row in rows:
        assert team.balance.learn(row) == other.learn(row)
        assert team.balance.counts == other.counts


# ---- real workers

SLOW = """
import os, time
def loss(output, batch):
    time.sleep(len(batch[1]) * 2e-3 * [1, 2, 4][paceline.join().rank] * (paceline.join().size > 1))
    return F.cross_entropy(output, batch[1])
"""


def parts_of(folder: Path, trainer: int = 0) -> list[list[float]]:
    events = (event for event in read_journal(folder) if event["event"] == "shares")
    return [event["parts"] for event in events if event.get("trainer", 0) == trainer]


def both(
    folder: Path, body: str, *options: str, chaos: str = "", files: Sequence[str] = ("weights",)
) -> list[list[float]]:
    """Trains with one worker and with three, which must export the same; returns the shares of the three."""
    paths = [folder / f"{name}.safetensors" for name in files]
    train_basics(folder, body, 1, "--run-dir", "one")
    one = [load_file(path) for path in paths]
    train_basics(folder, body, 3, "--run-dir", "three", *options, chaos=chaos)
    for path, weights in zip(paths, one, strict=True):
        assert apart(load_file(path), weights) < 1e-12
    return parts_of(folder / "three")


def trained(more: str, plan: str = "") -> str:
    loop = "list(t.steps(data, count=32))\nt.export('weights.safetensors')\n"
    return SLOW + f"t = make(loss, {more}, plan={plan!r})\n" + loop


LATE = """
class Late(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.drop = net(), nn.Dropout(0.5)
    def forward(self, rows):
        return self.inner(self.drop(rows) if t.steps_done >= 20 else rows)
first = make(loss, global_batch=48)
list(first.steps(data, count=32))
first.export("first.safetensors")
"""


def test_unequal_workers_get_unequal_parts_until_a_late_draw_and_the_same_weights(tmp_path: Path) -> None:
    """The second trainer's model draws from its 21st step on, and no micro-batch is divided from then on."""
    body = SLOW + LATE + trained("Late, global_batch=48").removeprefix(SLOW)
    found = both(tmp_path, body, files=("first", "weights"))  # a busy machine may mislead the first ones
    assert any(one > two > three > 0 for one, two, three in found), found
    for parts in (found, parts_of(tmp_path / "three", trainer=1)[:1]):
        assert any(part * 8 != round(part * 8) for some in parts for part in some), "no micro-batch was divided"
    events = [event for event in read_journal(tmp_path / "three") if event["event"] == "decision"]
    assert [event for event in events if str(event["what"]).startswith("workers 0, 1 and 2 compute ")]
    assert "micro-batches are executed one by one" in [e["what"] for e in events if e.get("trainer", 0) == 1]
    shares = next(text for name, text in facts(Summary(tmp_path / "three"))["Plan"] if name == "shares")
    assert re.fullmatch(
        r"worker 0: \d\d%, worker 1: \d\d%, worker 2: \d+%; by measured speed, changed \d times?", shares
    )


@pytest.mark.slow
def test_balance_counts_no_waiting_for_gradients(tmp_path: Path) -> None:
    """Under zero=1 a fast worker waits in its backward for the gradients of a slow one."""
    parts = both(tmp_path, trained("net, global_batch=48"), "--plan", "shard=3 zero=1")
    assert any(one > two > three > 0 for one, two, three in parts), parts


@pytest.mark.slow
def test_balance_of_pipelines_by_their_slowest_worker(tmp_path: Path) -> None:
    """The last stage of the second pipeline is slow; the first stage only waits for it."""
    blocks = "lambda: nn.Sequential(*[nn.Sequential(nn.Linear(10, 10), nn.Tanh()) for _ in range(4)]).double()"
    slow = SLOW.replace("[1, 2, 4]", "[1, 1, 1, 4]")
    loop = "list(t.steps(data, count=24))\nt.export('weights.safetensors')\n"
    body = slow + f"t = make(loss, {blocks}, global_batch=48)\n" + loop
    train_basics(tmp_path, body, 1, "--run-dir", "one")
    (tmp_path / "weights.safetensors").rename(tmp_path / "one.safetensors")
    train_basics(tmp_path, body, 4, "--run-dir", "four", "--plan", "pipeline=2")
    assert apart(load_file(tmp_path / "weights.safetensors"), load_file(tmp_path / "one.safetensors")) < 1e-12
    assert any(one > two > 0 for one, two in parts_of(tmp_path / "four"))
    said = [str(event["what"]) for event in read_journal(tmp_path / "four") if event["event"] == "decision"]
    assert [what for what in said if what.startswith("the units of workers 0-1 and 2-3 compute ")]
    shares = next(text for name, text in facts(Summary(tmp_path / "four"))["Plan"] if name == "shares")
    assert re.fullmatch(r"workers 0-1: \d\d%, workers 2-3: \d+%; by measured speed, changed \d times?", shares)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["exact", "micro=6"])
def test_balance_keeps_micro_batches_whole_under_exact_or_dropout(plan: str, tmp_path: Path) -> None:
    drops = "lambda: nn.Sequential(nn.Linear(10, 16), nn.Dropout(0.1), nn.Linear(16, 2)).double()"
    model = drops if plan != "exact" else "net"
    (parts, *_) = both(tmp_path, trained(f"{model}, global_batch=48", plan))
    assert all(part * 8 == round(part * 8) for part in parts)
    assert parts[0] > parts[1]


PACKED = """
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 6, batch_first=True), nn.Linear(6, 4)
    def forward(self, rows):
        words, lengths, _ = rows
        packed = pack_padded_sequence(words, lengths, batch_first=True, enforce_sorted=False)
        return self.head(pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0])

def loss(output, batch):
    kept = batch[2] >= 0
    found = F.cross_entropy(output.flatten(0, 1), batch[2].flatten(), ignore_index=-1, reduction="sum")
    return found, kept.sum()

def collate(rows):
    words, labels = zip(*rows)
    return (pad_sequence(words, batch_first=True), torch.tensor([len(some) for some in words]),
        pad_sequence(labels, batch_first=True, padding_value=-1))

chance = torch.Generator().manual_seed(0)
lengths = [5] * 96 + [2 + row % 5 for row in range(96)]  # at first a part is as long as the whole
rows = [(torch.randn(n, 3, generator=chance).double(), torch.randint(4, (n,), generator=chance)) for n in lengths]
t = make(loss, lambda: Packed().double(), global_batch=24, forward=lambda model, batch: model(batch))
list(t.steps(rows, collate=collate, order=lambda position, size, seed, epoch: position))
t.export('weights.safetensors')
"""


def test_divided_micro_batch_that_fails_is_undone_by_all_workers(tmp_path: Path) -> None:
    """Rows alone are shorter than the padded batch: not at first, when that is observed. Three workers divide eight
    micro-batches before any speed is known.
    """
    both(tmp_path, PACKED)
    happened = read_journal(tmp_path / "three")
    assert [event for event in happened if event["event"] == "lost"] == []
    said = {event["what"]: event["why"] for event in happened if event["event"] == "decision"}
    error = r"ValueError: Expected input batch_size \(8\) to match target .*"
    why = rf"a part of a micro-batch failed at train.py:\d+ \({error}\)"
    assert re.fullmatch(why, said["micro-batches are not divided among workers"])


@pytest.mark.slow
@pytest.mark.parametrize("when", ["forward", "reduced"])
def test_kill_while_shares_are_unequal(when: str, tmp_path: Path) -> None:
    parts = both(tmp_path, trained("global_batch=48"), chaos=f"kill:1@20.{when}")
    assert [entry["fault"] for entry in read_log(tmp_path / "three")] == [f"kill:1@20.{when}"]
    assert len(parts[0]) == 3


@pytest.mark.slow
def test_given_shares_stay(tmp_path: Path) -> None:
    assert both(tmp_path, trained("global_batch=48"), "--shares", "1,1,2") == []


@pytest.mark.slow
def test_collate_without_rows_is_not_divided(tmp_path: Path) -> None:
    """A collate whose tensors have no rows after a while: seen in the step, and undone."""
    collate = (
        "from torch.utils.data import default_collate\n"
        "def collate(rows):\n"
        "    x, y = default_collate(rows)\n"
        "    return [x, y, torch.ones(3)] if t.steps_done >= 20 else [x, y]\n"
    )
    body = collate + trained("global_batch=48").replace("count=32", "count=32, collate=collate")
    (parts, *_) = both(tmp_path, body)
    assert any(part * 8 != round(part * 8) for part in parts), "no micro-batch was divided"


@pytest.mark.slow
def test_kill_in_an_evaluation_while_shares_are_unequal(tmp_path: Path) -> None:
    """The new team has not made a step yet, and its workers know different speeds."""
    body = SLOW.replace("2e-3", "8e-3") + (  # so long that other work of the machine hides no difference of speeds
        "import signal\n"
        "def metric(output, batch):\n"
        "    if paceline.join().size == 3 and paceline.join().rank == 1:\n"
        "        open('fired', 'w').close()\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return {'right': ((output.argmax(1) == batch[1]).sum(), len(batch[1]))}\n"
        "t = make(loss, global_batch=48)\n"
        "for report in t.steps(data, count=32):\n"
        "    if report.step == 24:\n"
        "        found = t.evaluate(data, metric)\n"
        "        with open('right', 'a') as file:\n"
        "            file.write(f'{found}\\n')\n"
        "t.export('weights.safetensors')\n"
    )
    parts = both(tmp_path, body)
    assert (tmp_path / "fired").exists()
    assert len(parts[0]) == 3
    assert len(set((tmp_path / "right").read_text().splitlines())) == 1
