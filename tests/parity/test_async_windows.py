"""Asynchronous training in windows: each row counts once whoever is killed, and what does not depend on the order of
updates is that of one process.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE

import pytest
import served
import torch
from agents import until
from launching import SCRIPTS, paceline, train_basics
from oracle import DelayedMomentum, apart
from proxies import Proxy
from safetensors.torch import load_file
from server_runs import (
    COUNTED_BATCH,
    KILLED,
    PACE,
    TOLERANCE,
    check_each_row_counted_once,
    check_nobody_went_back,
    check_served_weights,
    check_tables_are_equal,
    counted_command,
    plain_served,
    read_versions,
    served_by_hand,
    served_steps,
    stop_counted,
    train_counted,
    train_served,
    windows_of,
)
from warm import Process, environment

from paceline.observe.summary import Summary, facts
from paceline.team.fault_injection import read_log

TABLE = {"TABLE": "1"}
slow = pytest.mark.slow


def test_one_worker_gives_what_one_process_gives(tmp_path: Path) -> None:
    """AdamW with groups, schedule, clip and dropout, whatever the window."""
    train_served(tmp_path, 1, "server=2 staleness=4 window=3")
    check_served_weights(tmp_path)
    reported = json.loads((tmp_path / "told.json").read_text())["figures"]
    assert [one[0] for one in reported] == [3, 6, 8]
    rows = [12, 12, 12, 4] * 2  # of a turn the mean is over its rows
    for (step, loss, rate, norm), first in zip(reported, (0, 3, 6), strict=True):
        turn, sizes = served_by_hand()[1][first:step], rows[first:step]
        mean = sum(one[1] * size for one, size in zip(turn, sizes, strict=True)) / sum(sizes)
        assert [loss, rate, norm] == pytest.approx([mean, *turn[-1][2:]], rel=1e-9)


@pytest.mark.parametrize(
    ("workers", "servers", "bound", "table"),
    [
        (3, 1, "2", TABLE),
        *(
            pytest.param(*case, marks=slow)
            for case in [
                (3, 2, "2", {}),
                (5, 3, "1", {}),
                (5, 1, "4", {}),
                (4, 2, "inf", {}),
                (5, 2, "1", TABLE),
                (4, 3, "inf", TABLE),
            ]
        ),
    ],
)
def test_each_row_counts_once(tmp_path: Path, workers: int, servers: int, bound: str, table: dict[str, str]) -> None:
    """Stragglers at random. BatchNorm's records are those of all updates, in one order. The rows of a table are as new
    as the rest: from one server in each reading the same; and at the end of a window all have all.
    """
    output = train_counted(
        tmp_path, workers, f"server={servers} staleness={bound} window=24", 60, STRAGGLE="0.1:8", **table
    )
    windows = check_each_row_counted_once(tmp_path, 60)
    done = [(one["step"], one["updates"], one["dropped"]) for one in windows]
    assert done == [(24, 24, 0), (48, 24, 0), (60, 12, 0)]
    for one in windows:
        assert sum(count for _, count in one["workers"]) == sum(count for _, count in one["missed"]) == one["updates"]
    made = Counter[int]()
    for one in windows:
        made.update(dict(one["workers"]))
    assert {*made} == {*range(workers)}
    text = "updates: " + ", ".join(f"{made[worker]} by worker {worker}" for worker in range(workers))
    text += r"; staleness \d+\.\d updates on average, at most \d+"
    assert re.fullmatch(text, dict(facts(Summary(tmp_path / "run"))["What happened"])["out of step"])
    limit = "no limit" if bound == "inf" else f"at most {bound}"
    assert "updates are asynchronous: workers synchronize every 24 updates; " in output
    assert f"batches that a worker may be ahead of the slowest: {limit}\n" in output
    assert "global batch 6 = 2 micro-batches of 3 rows; one epoch = 5 steps" in output
    if table:
        versions = read_versions(tmp_path)
        assert len(versions) >= 60 + 3 * workers
        assert all(rows == rest for count, _, rows, rest in versions if count == 1)
        check_tables_are_equal(tmp_path, workers)


BUFFERS = """
import paceline
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(10, 4), torch.nn.BatchNorm1d(4),
            torch.nn.BatchNorm1d(4, momentum=None), torch.nn.Linear(4, 2)).double()
        for name in ("moving", "seen", "last"):
            self.register_buffer(name, torch.ones(1, dtype=torch.float64))
        paceline.buffer(self, "moving", "affine", factor=0.7)
        paceline.buffer(self, "seen", "sum", factor=0.9)
        paceline.buffer(self, "last", "last")
    def forward(self, x):
        if self.training:
            self.moving.mul_(0.7).add_(0.3 * x.mean())
            self.seen.mul_(0.9).add_(x.abs().mean())
            self.last.fill_(float(x.sum()))
        return self.inner(x)
trainer = make(model=Net)
for _ in trainer.steps(data, count=10): pass
trainer.export("one.safetensors")
"""
SEVERAL = """
one, two = make(), make()
for report in one.steps(data, epochs=2):
    if report.every(4):
        for _ in two.steps(data, epochs=1): pass
one.export("one.safetensors")
two.export("two.safetensors")
"""


@pytest.mark.parametrize(("body", "names"), [(BUFFERS, ["one"]), (SEVERAL, ["one", "two"])], ids=["buffers", "several"])
def test_buffers_and_several_trainers_are_those_of_one_process(tmp_path: Path, body: str, names: list[str]) -> None:
    """Buffers of workers are as the window began. Each trainer has windows of its own."""
    for folder, plan in (("windows", "server=1 staleness=4 window=4"), ("plain", "")):
        (tmp_path / folder).mkdir()
        train_basics(tmp_path / folder, body, 1, "--plan", f"micro=8 {plan}")
    for name in names:
        windows, plain = (load_file(tmp_path / folder / f"{name}.safetensors") for folder in ("windows", "plain"))
        for key, value in plain.items():
            assert torch.allclose(windows[key], value, rtol=1e-12, atol=1e-14), key
        assert apart(windows, plain) <= TOLERANCE


def test_damping_divides_rates_by_what_was_missed(tmp_path: Path) -> None:
    """On all servers alike; the schedule's rate is not touched."""
    train_counted(tmp_path, 2, "server=2 staleness=inf window=20 damping", 40, SLOW="0:4")
    missed = Counter[int]()
    for one in windows_of(tmp_path):
        missed.update(dict(one["missed"]))
    assert missed.total() == 40
    assert max(missed) > 1
    weights, whole = load_file(tmp_path / "out.safetensors"), sum(count / (1 + m) for m, count in missed.items())
    assert float(weights["more"][0]) == pytest.approx(-COUNTED_BATCH * whole, rel=1e-12)
    assert float(weights["rows"].sum()) == pytest.approx(-COUNTED_BATCH * whole, rel=1e-12)


def test_delayed_momentum_is_that_of_one_process(tmp_path: Path) -> None:
    """Through a resume between two refreshes, and under a schedule and clipping."""
    for options in (("--steps", "4"), ()):
        train_served(tmp_path, 1, "server=1 staleness=1 window=3 delayed=3", *options, NESTEROV="1")
    plain = plain_served(served.nesterov, lambda optimizer: DelayedMomentum(optimizer, 3)).train(served_steps())
    assert apart(load_file(tmp_path / "out.safetensors"), plain.model.state_dict()) <= TOLERANCE


@pytest.mark.parametrize("chaos", ["", pytest.param("kill:1000000@20.applied", marks=slow)])
def test_delayed_momentum_is_refreshed_by_updates_of_any_worker(tmp_path: Path, chaos: str) -> None:
    """All gradients of one weight are alike, so the order makes no difference."""
    plan = "server=2 copies=1 staleness=2 window=20 delayed=4"
    train_counted(tmp_path, 2, plan, 40, MOMENTUM="0.5", PACELINE_CHAOS=chaos)
    assert len(read_log(tmp_path / "run") if chaos else []) == bool(chaos)
    weight, momentum = 0.0, 0.0
    for _ in range(40 // 4):
        momentum = 0.5 * momentum + 1.0
        weight -= COUNTED_BATCH * (1.0 + 0.5 * momentum)
    assert torch.allclose(load_file(tmp_path / "out.safetensors")["more"], torch.tensor(weight).double(), rtol=1e-12)


REFUSED = """
import paceline
def refuse(make):
    try:
        make()
    except paceline.PacelineError as error:
        print(f"refused: {error}")
sgd, sparse = torch.optim.SGD, lambda: torch.nn.EmbeddingBag(4, 2, sparse=True)
for update in (lambda params: torch.optim.AdamW(params, lr=0.1), lambda params: sgd(params, lr=0.1, momentum=0.9)):
    plan = "server=1 staleness=2 delayed=2"
    refuse(lambda: paceline.Trainer(net, cross_entropy, update, 24, plan=plan))
refuse(lambda: make(model=sparse, plan="server=1 staleness=2 delayed=1"))
trainer = make(plan="server=1 staleness=2")
trainer.step([part[:4] for part in data.tensors])
"""


def test_delayed_momentum_and_single_steps_that_do_not_fit_are_refused(
    tmp_path: Path, golden: Callable[[str, str], None]
) -> None:
    done = train_basics(tmp_path, REFUSED, 1, code=2)
    golden("refused: trainers", "\n".join(re.findall("refused: .*", done.stdout)))
    (step,) = {*re.findall(r"step\(\) makes .*", done.stderr)}
    golden("refused: a single step", step)


def kill_in_a_window(folder: Path, plan: str, steps: int, table: bool, **env: str) -> str:
    """Each row counts once in windows of 24 updates of three workers, though something is lost meanwhile."""
    output = train_counted(folder, 3, f"{plan} window=24", steps, **env, **TABLE if table else {})
    assert sum(one["updates"] for one in check_each_row_counted_once(folder, steps)) == steps
    if table:
        read_versions(folder)
        check_tables_are_equal(folder, 3)
    return output


@pytest.mark.parametrize("table", [True, pytest.param(False, marks=slow)])
@pytest.mark.parametrize("server", [0, pytest.param(1, marks=slow)])
def test_kill_of_a_worker_whose_push_reached_one_of_two_servers(tmp_path: Path, server: int, table: bool) -> None:
    """It is applied once, as another worker pushes it; the lost one comes back for another window."""
    output = kill_in_a_window(tmp_path, "server=2 staleness=2", 80, table, PACE="0.02", BETWEEN=f"1:{server}")
    assert 0 < int((tmp_path / "killed").read_text()) < 24
    assert "worker 1 was killed by SIGKILL: 2 workers go on" in output
    assert "worker 1 has joined: 3 workers" in output


@slow
@pytest.mark.parametrize("table", [False, True])
def test_kill_of_a_worker_assigns_its_work_again(tmp_path: Path, table: bool) -> None:
    """The others go on, and it comes back for another window."""
    output = kill_in_a_window(tmp_path, "server=2 staleness=1", 120, table, PACE="0.01", KILL="1:11")
    assert "worker 1 was killed by SIGKILL: 2 workers go on" in output
    assert "worker 1 has joined: 3 workers" in output
    first = windows_of(tmp_path)[0]
    assert first["updates"] == 24
    assert 0 < dict(first["workers"])[1] < 8, "it had no work, or was not killed in the midst"


KILLS = [(server, moment) for server in (0, 1) for moment in ("reduced", "applied")]


@pytest.mark.parametrize(
    ("server", "moment"), [pytest.param(*one, marks=[] if one == (0, "reduced") else slow) for one in KILLS]
)
def test_kill_of_a_server_without_copies_returns_to_the_checkpoint(tmp_path: Path, server: int, moment: str) -> None:
    chaos = f"kill:{1000000 + server}@15.{moment}"
    output = train_counted(
        tmp_path, 1, "server=2 staleness=2 window=10", 30, "--save-every", "10", PACELINE_CHAOS=chaos
    )
    assert [entry["moment"] for entry in read_log(tmp_path / "run")] == [moment]
    assert f"server {server} {KILLED}: all workers and servers return to the last checkpoint" in output
    assert f"lost    server {server} {KILLED}, after step " in output
    turns = json.loads((tmp_path / "told.json").read_text())
    check_each_row_counted_once(tmp_path, 30, first=turns[0][0] - turns[0][1])


COPIED = [(1, 2, 1, "applied", False), (3, 2, 0, "reduced", False), (3, 3, 0, "applied", False)]
COPIED += [(workers, 3, server, "reduced", False) for workers in (3, 5) for server in (0, 1, 2)]
COPIED += [(3, 2, 1, "applied", True)]


@pytest.mark.parametrize(
    ("workers", "servers", "server", "moment", "table"),
    [(2, 2, 0, "reduced", True), *(pytest.param(*one, marks=slow) for one in COPIED)],
)
def test_kill_of_a_server_with_a_copy_loses_no_row(
    tmp_path: Path, workers: int, servers: int, server: int, moment: str, table: bool
) -> None:
    """Also of the one that assigns work. Rows that it had assigned are so again, unless all have applied them."""
    plan, chaos = f"server={servers} copies=1 staleness=2 window=24", f"kill:{1000000 + server}@30.{moment}"
    output = train_counted(tmp_path, workers, plan, 70, PACELINE_CHAOS=chaos, **TABLE if table else {})
    assert [entry["moment"] for entry in read_log(tmp_path / "run")] == [moment]
    assert f"server {server} {KILLED}: server {(server + 1) % servers} has a copy of its state" in output
    check_nobody_went_back(tmp_path, output, server)
    assert sum(one["updates"] for one in check_each_row_counted_once(tmp_path, 70)) == 70
    if table:
        read_versions(tmp_path)
        check_tables_are_equal(tmp_path, workers)


@slow
def test_kill_of_one_server_after_another_loses_no_row(tmp_path: Path) -> None:
    """And each has its state back when the next one is lost, from whom it had it."""
    chaos = "kill:1000000@10.applied,kill:1000001@80.reduced"
    plan = "server=2 copies=1 staleness=2 window=20"
    output = train_counted(tmp_path, 3, plan, 160, PACELINE_CHAOS=chaos, RESTORED="40")
    assert len(read_log(tmp_path / "run")) == 2
    check_nobody_went_back(tmp_path, output, 0, 1)
    check_each_row_counted_once(tmp_path, 160)


@slow
def test_kill_of_two_servers_that_share_nothing(tmp_path: Path) -> None:
    chaos = "kill:1000000@25.applied,kill:1000002@30.reduced"
    output = train_counted(tmp_path, 4, "server=4 copies=1 staleness=inf window=40", 100, PACELINE_CHAOS=chaos)
    assert len(read_log(tmp_path / "run")) == 2
    check_nobody_went_back(tmp_path, output, 0, 2)
    check_each_row_counted_once(tmp_path, 100)


@slow
@pytest.mark.parametrize("server", [0, 1])
def test_kill_of_a_server_with_a_copy_gives_the_undisturbed_weights(tmp_path: Path, server: int) -> None:
    """Of one worker alone: what it had pushed is in no update twice, and in one."""
    chaos = f"kill:{1000000 + server}@4.applied"
    train_served(tmp_path, 1, "server=2 copies=1 staleness=4 window=3", PACELINE_CHAOS=chaos)
    assert len(read_log(tmp_path / "run")) == 1
    check_served_weights(tmp_path)


@slow
@pytest.mark.parametrize("table", [False, True])
def test_connections_that_are_lost_lose_nothing(tmp_path: Path, table: bool) -> None:
    kill_in_a_window(tmp_path, "server=2 staleness=2", 60, table, CUT="7")
    assert len((tmp_path / "cuts").read_text().splitlines()) > 30


@pytest.mark.parametrize("table", [True, pytest.param(False, marks=slow)])
def test_messages_that_are_lost_or_come_twice_count_once(tmp_path: Path, table: bool) -> None:
    """Each 7th acknowledgement of servers, and each 11th push: the weights have the bits of each row once."""
    with Proxy(7, 11) as proxy:
        env = {"PROXY": str(proxy.port), **(TABLE if table else {})}
        train_counted(tmp_path, 2, "server=2 staleness=4 window=40", 60, **env)
    print(proxy.did, proxy.kinds)
    check_each_row_counted_once(tmp_path, 60)
    if table:
        read_versions(tmp_path)
    for kind in ("lost DEAL", "lost READ", "doubled PUSH", "doubled PUSHED", *(["doubled ROWS"] if table else [])):
        assert proxy.kinds[kind] >= 3, kind


@slow
@pytest.mark.parametrize("bound", [1, 4])
def test_no_worker_reads_too_far_ahead_in_a_thousand_updates(tmp_path: Path, bound: int) -> None:
    """Some are slow at random, and one of them more often."""
    env = {"WATCH": "1", "STRAGGLE": "0.05:8", "SLOW": "2:3"}
    train_counted(tmp_path, 4, f"server=2 staleness={bound} window=250", 1000, **env)
    check_each_row_counted_once(tmp_path, 1000)
    ahead = [int(line) for line in (tmp_path / "reads").read_text().splitlines()]
    assert len(ahead) == 1000
    assert max(ahead) == bound


@pytest.mark.parametrize("table", [False, pytest.param(True, marks=slow)])
def test_stop_ends_the_window_and_resume_makes_the_rest(tmp_path: Path, table: bool) -> None:
    """Also without staleness, and on another team."""
    env = TABLE if table else {}
    done = stop_counted(tmp_path, "micro=3 server=2 staleness=4", 60, workers=2, **env)
    train_counted(tmp_path, 1, "server=1", 60, **env)
    check_each_row_counted_once(tmp_path, 60, first=done)


@slow
def test_join_of_a_worker_at_the_end_of_a_window_that_it_shortens(tmp_path: Path) -> None:
    script = (str(SCRIPTS / "counted.py"), ".", "200")
    command = [sys.executable, "-m", "paceline", *counted_command(1, "micro=3 server=2 staleness=4 window=200", 200)]
    env = environment(**{**PACE, "REACHED": "0:8", "PACE": "0.04"})
    with Process(command, env, cwd=tmp_path, stdout=PIPE, stderr=PIPE) as process:
        until((tmp_path / "reached").exists)
        paceline("run", "--join", "run", "--workers", "1", "--run-dir", "other", *script, cwd=tmp_path, PACE="0.04")
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    assert "worker 1 has joined: 2 workers" in stderr
    first, *rest = check_each_row_counted_once(tmp_path, 200)
    assert first["updates"] < 200
    assert {worker for one in rest for worker, _ in one["workers"]} == {0, 1}


NAN = """
import os
def bad(output, batch):
    return output.sum() * (float("nan") if os.environ["PACELINE_RANK"] == "1" else 1.0)
trainer = make(loss=bad)
for _ in trainer.steps(data, epochs=9): pass
"""


def test_loss_that_is_not_finite_ends_the_window_for_all(tmp_path: Path) -> None:
    stderr = train_basics(tmp_path, NAN, 2, "--plan", "server=1 staleness=4", code=1).stderr
    assert "is not finite (worker 1: micro-batch 0 (rows " in stderr
    assert "the step was not applied" in stderr


ROWS_END = """
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter([(row, label) for row, label in zip(*data.tensors)])
trainer = make()
steps = [(report.step, report.turn, report.samples) for report in trainer.steps(Stream(), epochs=2)]
trainer.export("out.safetensors")
if trainer.main:
    print(steps)
"""


def test_window_ends_where_an_iterable_dataset_does(tmp_path: Path) -> None:
    plan = "micro=8 server=1 staleness=4 window=5"
    assert "[(5, 5, 120), (8, 3, 72)]" in train_basics(tmp_path, ROWS_END, 2, "--plan", plan).stdout


def test_paceline_check_refuses_what_cannot_be_the_same(tmp_path: Path, golden: Callable[[str, str], None]) -> None:
    (tmp_path / "train.py").write_text("")
    for word in ("staleness=4", "backup=1"):
        stderr = paceline("check", "--plan", f"server=1 {word}", "train.py", cwd=tmp_path, code=2).stderr
        golden(f"check: {word}", stderr)
