"""Training that is not in step: each row counts once whoever is lost, and what does not depend on the order of updates
is that of one process.
"""

from __future__ import annotations

import json
import re
import signal
import sys
from collections import Counter
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
import served
import torch
from agents import until
from launching import SCRIPTS, paceline, train_basics
from oracle import apart
from proxies import Proxy
from safetensors.torch import load_file
from test_parameter_servers import KILLED, TOLERANCE, by_hand, lost_in_turn, nobody_went_back, trained
from warm import Process, environment

from paceline.base.journal import read_journal
from paceline.observe.summary import Summary, facts
from paceline.team.coordinator import STOPPED
from paceline.team.fault_injection import read_log

BATCH, ROWS = 6, 30  # of counted.py
PACE = {"PACE": "0.004"}


def counted(folder: Path, workers: int, plan: str, steps: int, *options: str, micro: int = 3, **env: str) -> str:
    said = ("--workers", str(workers), "--run-dir", "run", "--plan", f"micro={micro} {plan}", *options)
    done = paceline("run", *said, SCRIPTS / "counted.py", ".", str(steps), cwd=folder, **PACE, **env)
    return done.stdout + done.stderr


def stopped(folder: Path, plan: str, steps: int, **env: str) -> None:
    """Three workers, to which SIGTERM comes when the first one has made eight steps."""
    said = ("--workers", "3", "--run-dir", "run", "--plan", plan)
    command = [sys.executable, "-m", "paceline", "run", *said, str(SCRIPTS / "counted.py"), ".", str(steps)]
    with Process(
        command, environment(REACHED="0:8", PACE="0.05", **env), cwd=folder, stdout=PIPE, stderr=PIPE
    ) as process:
        until((folder / "reached").exists)
        process.send_signal(signal.SIGTERM)
        _, told = process.communicate(timeout=60)
    assert process.returncode == STOPPED, told


def windows_of(folder: Path) -> list[dict[str, Any]]:
    return [event for event in read_journal(folder / "run") if event["event"] == "window"]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """Of counted.py; its rows may be a table's."""
    weights = load_file(folder / "out.safetensors")
    return weights | {"rows": weights.pop("table.weight").flatten()} if "table.weight" in weights else weights


def each_row_once(folder: Path, steps: int, first: int = 0) -> list[dict[str, Any]]:
    """Every row of every update, exactly; the windows of the journal, which are of the steps from the `first` on."""
    weights = weights_of(folder)
    assert torch.equal(weights["rows"], torch.full([ROWS], -steps * BATCH / ROWS, dtype=torch.float64))
    assert torch.equal(weights["more"], torch.full([7], -steps * BATCH, dtype=torch.float64))
    assert weights["norm.num_batches_tracked"] == steps * BATCH // 3
    turns = json.loads((folder / "told.json").read_text())
    assert turns[-1][0] == steps
    assert [samples for _, _, samples in turns] == [turn * BATCH for _, turn, _ in turns]
    assert sum(turn for _, turn, _ in turns) == steps - first
    return windows_of(folder) if (folder / "run").exists() else []


def test_one_worker_gives_what_one_process_gives(tmp_path: Path) -> None:
    """AdamW with groups, schedule, clip and dropout, whatever the window."""
    trained(tmp_path, 1, "server=2 staleness=4 window=3")
    weights, figures = by_hand()
    assert apart(load_file(tmp_path / "out.safetensors"), weights) <= TOLERANCE
    told = json.loads((tmp_path / "told.json").read_text())["figures"]
    assert [one[0] for one in told] == [3, 6, 8]
    rows = [12, 12, 12, 4] * 2  # of a turn the mean is over its rows
    for (step, loss, rate, norm), first in zip(told, (0, 3, 6), strict=True):
        turn, sizes = figures[first:step], rows[first:step]
        mean = sum(one[1] * size for one, size in zip(turn, sizes, strict=True)) / sum(sizes)
        assert [loss, rate, norm] == pytest.approx([mean, *turn[-1][2:]], rel=1e-9)


@pytest.mark.parametrize(
    ("workers", "servers", "bound"),
    [(3, 2, "2"), *(pytest.param(*case, marks=pytest.mark.slow) for case in [(5, 3, "1"), (5, 1, "4"), (4, 2, "inf")])],
)
def test_each_row_counts_once(tmp_path: Path, workers: int, servers: int, bound: str) -> None:
    """Stragglers at random. BatchNorm's records are those of all updates, in one order."""
    plan, steps = f"server={servers} staleness={bound} window=40", 100
    said = counted(tmp_path, workers, plan, steps, STRAGGLE="0.1:8")
    windows = each_row_once(tmp_path, steps)
    assert [(one["step"], one["updates"], one["dropped"]) for one in windows] == [
        (40, 40, 0),
        (80, 40, 0),
        (100, 20, 0),
    ]
    for one in windows:
        assert sum(count for _, count in one["workers"]) == sum(count for _, count in one["missed"]) == one["updates"]
    made = Counter[int]()
    for one in windows:
        made.update(dict(one["workers"]))
    assert {*made} == {*range(workers)}
    told = "updates: " + ", ".join(f"{made[worker]} by worker {worker}" for worker in range(workers))
    told += r"; \d+\.\d others between reading and update, at most \d+"
    assert re.fullmatch(told, dict(facts(Summary(tmp_path / "run"))["What happened"])["out of step"])
    how = "as far ahead as they are" if bound == "inf" else f"at most {bound} ahead"
    assert f"updates are not in step: workers read weights {how}, and meet every 40 updates" in said
    assert "global batch 6 = 2 micro-batches of 3 rows; one epoch = 5 steps" in said


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
trainer.export("out.safetensors")
"""


def test_buffers_are_those_of_one_process(tmp_path: Path) -> None:
    """Though those of workers are as the window began."""
    for name, plan in (("windows", "server=2 staleness=4 window=4"), ("plain", "")):
        (tmp_path / name).mkdir()
        train_basics(tmp_path / name, BUFFERS, 1, "--plan", f"micro=8 {plan}")
    mine, plain = (load_file(tmp_path / name / "out.safetensors") for name in ("windows", "plain"))
    for name, value in plain.items():
        assert torch.allclose(mine[name], value, rtol=1e-12, atol=1e-14), name


def test_damping_divides_rates_by_what_was_missed(tmp_path: Path) -> None:
    """On all servers alike; the schedule's rate is not touched."""
    counted(tmp_path, 3, "server=2 staleness=inf window=30 damping", 60, SLOW="0:4")
    missed = Counter[int]()
    for one in windows_of(tmp_path):
        missed.update(dict(one["missed"]))
    assert missed.total() == 60
    assert max(missed) > 1
    weights, whole = load_file(tmp_path / "out.safetensors"), sum(count / (1 + m) for m, count in missed.items())
    assert float(weights["more"][0]) == pytest.approx(-BATCH * whole, rel=1e-12)
    assert float(weights["rows"].sum()) == pytest.approx(-BATCH * whole, rel=1e-12)


def test_delayed_momentum_is_that_of_a_loop_by_hand(tmp_path: Path) -> None:
    """Through a resume between two refreshes, and under a schedule and clipping."""
    momentum, waiting, made = dict[Any, Any](), dict[Any, Any](), list[int]()

    @torch.no_grad()
    def step(optimizer: torch.optim.Optimizer) -> None:
        (group,) = optimizer.param_groups
        made.append(1)
        optimizer._opt_called = True  # or the schedule warns
        for param in group["params"]:
            gradient = param.grad + 0.1 * param
            waiting[param] = waiting.get(param, 0.0) + gradient
            param -= group["lr"] * gradient / 3
            if len(made) % 3 == 0:
                momentum[param] = 0.8 * momentum.get(param, 0.0) + waiting.pop(param) / 3
                param -= group["lr"] * 0.8 * momentum[param]

    for options in (("--steps", "4"), ()):
        trained(tmp_path, 1, "server=2 staleness=1 window=3 delayed=3", *options, NESTEROV="1")
    weights, _ = by_hand(8, served.nesterov, step)
    assert apart(load_file(tmp_path / "out.safetensors"), weights) <= TOLERANCE


@pytest.mark.parametrize("chaos", ["", pytest.param("kill:1000000@20.applied", marks=pytest.mark.slow)])
def test_delayed_momentum_is_refreshed_by_updates_of_whoever(tmp_path: Path, chaos: str) -> None:
    """All gradients of one weight are alike, so the order makes no difference."""
    plan = "server=2 copies=1 staleness=2 window=20 delayed=4"
    counted(tmp_path, 3, plan, 60, MOMENTUM="0.5", PACELINE_CHAOS=chaos)
    assert len(read_log(tmp_path / "run") if chaos else []) == bool(chaos)
    weight, momentum = 0.0, 0.0
    for _ in range(60 // 4):
        momentum = 0.5 * momentum + 1.0
        weight -= BATCH * (1.0 + 0.5 * momentum)
    assert torch.allclose(load_file(tmp_path / "out.safetensors")["more"], torch.tensor(weight).double(), rtol=1e-12)


def test_other_momentum_is_not_delayed(tmp_path: Path) -> None:
    for kind, name in (
        ("AdamW(params, lr=0.1)", "AdamW"),
        ("SGD(params, lr=0.1, momentum=0.9)", "SGD without it"),
    ):
        body = f"import paceline; paceline.Trainer(net, cross_entropy, lambda params: torch.optim.{kind}, 24)"
        text = train_basics(tmp_path, body, 1, "--plan", "server=1 staleness=2 delayed=2", code=2).stderr
        assert (
            f"delayed=2 is for torch.optim.SGD with nesterov=True, and the optimizer is {name}; "
            "take SGD with momentum= and nesterov=True, or leave delayed out"
        ) in text


def test_what_a_lost_worker_had_is_dealt_again(tmp_path: Path) -> None:
    """The others go on, and it comes back for another window."""
    said = counted(tmp_path, 3, "server=2 staleness=1 window=50", 150, KILL="1:11")
    (first, *_) = each_row_once(tmp_path, 150)
    assert "worker 1 was killed by SIGKILL: 2 workers go on" in said
    assert "worker 1 has joined: 3 workers" in said
    assert first["updates"] == 50
    assert 0 < dict(first["workers"])[1] < 17, "it had no ticket, or was not killed in the midst"


KILLS = [(server, moment) for server in (0, 1) for moment in ("reduced", "applied")]


@pytest.mark.parametrize(
    ("server", "moment"), [pytest.param(*one, marks=[] if one == (0, "reduced") else pytest.mark.slow) for one in KILLS]
)
def test_a_lost_server_goes_back_with_all(tmp_path: Path, server: int, moment: str) -> None:
    chaos = f"kill:{1000000 + server}@25.{moment}"
    said = counted(tmp_path, 2, "server=2 staleness=2 window=10", 40, "--save-every", "10", PACELINE_CHAOS=chaos)
    assert [entry["moment"] for entry in read_log(tmp_path / "run")] == [moment]
    assert f"server {server} was killed by SIGKILL: all go back to the last checkpoint" in said
    assert f"lost    server {server} was killed by SIGKILL, after step " in said
    turns = json.loads((tmp_path / "told.json").read_text())
    each_row_once(tmp_path, 40, first=turns[0][0] - turns[0][1])


COPIED = [(1, 2, 1, "applied"), *((workers, 3, server, "reduced") for workers in (3, 5) for server in (0, 1, 2))]


@pytest.mark.parametrize(
    ("workers", "servers", "server", "moment"),
    [(3, 2, 0, "reduced"), *(pytest.param(*one, marks=pytest.mark.slow) for one in [*COPIED, (3, 3, 0, "applied")])],
)
def test_a_server_of_which_there_is_a_copy_loses_no_row(
    tmp_path: Path, workers: int, servers: int, server: int, moment: str
) -> None:
    """Also when it is the one that deals. Rows that it had dealt are dealt again, unless all have applied them."""
    plan, chaos = f"server={servers} copies=1 staleness=2 window=40", f"kill:{1000000 + server}@50.{moment}"
    said = counted(tmp_path, workers, plan, 120, PACELINE_CHAOS=chaos)
    assert [entry["moment"] for entry in read_log(tmp_path / "run")] == [moment]
    assert f"server {server} {KILLED}: server {(server + 1) % servers} has a copy of what it kept" in said
    nobody_went_back(tmp_path, said, server)
    assert sum(one["updates"] for one in each_row_once(tmp_path, 120)) == 120


@pytest.mark.slow
def test_the_first_servers_are_lost_one_after_another(tmp_path: Path) -> None:
    """And each has its state back when the next one is lost, from whom it had it."""
    said = ("--workers", "3", "--run-dir", "run", "--plan", "micro=3 server=2 copies=1 staleness=2 window=20")
    command = [sys.executable, "-m", "paceline", "run", *said, str(SCRIPTS / "counted.py"), ".", "160"]
    chaos = "kill:1000000@10.applied,wait:0@40.loading,kill:1000001@80.reduced"
    told = lost_in_turn(command, tmp_path, PACELINE_CHAOS=chaos, **PACE)
    nobody_went_back(tmp_path, told, 0, 1)
    each_row_once(tmp_path, 160)


@pytest.mark.slow
def test_two_servers_that_share_nothing_are_lost(tmp_path: Path) -> None:
    chaos = "kill:1000000@25.applied,kill:1000002@30.reduced"
    said = counted(tmp_path, 4, "server=4 copies=1 staleness=inf window=40", 100, PACELINE_CHAOS=chaos)
    assert len(read_log(tmp_path / "run")) == 2
    nobody_went_back(tmp_path, said, 0, 2)
    each_row_once(tmp_path, 100)


@pytest.mark.slow
@pytest.mark.parametrize("server", [0, 1])
def test_optimizers_lose_nothing_either(tmp_path: Path, server: int) -> None:
    """Of one worker alone: what it had pushed is in no update twice, and in one."""
    chaos = f"kill:{1000000 + server}@4.applied"
    trained(tmp_path, 1, "server=2 copies=1 staleness=4 window=3", PACELINE_CHAOS=chaos)
    assert len(read_log(tmp_path / "run")) == 1
    assert apart(load_file(tmp_path / "out.safetensors"), by_hand()[0]) <= TOLERANCE


def test_connections_that_are_lost_lose_nothing(tmp_path: Path) -> None:
    counted(tmp_path, 3, "server=2 staleness=2 window=20", 60, CUT="7")
    windows = each_row_once(tmp_path, 60)
    assert len((tmp_path / "cuts").read_text().splitlines()) > 30
    assert sum(one["updates"] for one in windows) == 60


def test_what_is_lost_or_comes_twice_counts_once(tmp_path: Path) -> None:
    """Each 7th acknowledgement of servers, and each 11th push: the weights have the bits of each row once."""
    with Proxy(7, 11) as proxy:
        counted(tmp_path, 3, "server=2 staleness=4 window=40", 80, PROXY=str(proxy.port))
    print(proxy.did, proxy.kinds)
    each_row_once(tmp_path, 80)
    for kind in ("lost DEAL", "lost READ", "doubled PUSH", "doubled PUSHED"):
        assert proxy.kinds[kind] >= 3


@pytest.mark.parametrize("server", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_ticket_that_came_to_one_of_two_servers_is_applied_once(tmp_path: Path, server: int) -> None:
    """As another worker pushes it, when the first one is lost."""
    said = counted(tmp_path, 3, "server=2 staleness=2 window=40", 80, BETWEEN=f"1:{server}")
    assert "worker 1 was killed by SIGKILL: 2 workers go on" in said
    assert 0 < int((tmp_path / "killed").read_text()) < 40
    assert sum(one["updates"] for one in each_row_once(tmp_path, 80)) == 80


@pytest.mark.slow
@pytest.mark.parametrize("bound", [1, 4])
def test_nobody_reads_too_far_ahead_in_a_thousand_tickets(tmp_path: Path, bound: int) -> None:
    """Some are slow at random, and one of them more often."""
    env = {"WATCH": "1", "STRAGGLE": "0.05:8", "SLOW": "2:3"}
    counted(tmp_path, 4, f"server=2 staleness={bound} window=250", 1000, **env)
    each_row_once(tmp_path, 1000)
    ahead = [int(line) for line in (tmp_path / "reads").read_text().splitlines()]
    assert len(ahead) == 1000
    assert max(ahead) == bound


def test_a_stop_ends_the_window_and_the_rest_is_made_later(tmp_path: Path) -> None:
    """Also without staleness, and on another team."""
    stopped(tmp_path, "micro=3 server=2 staleness=4", 100)
    [saved] = (tmp_path / "run" / "checkpoints").glob("step-*")
    done = int(saved.name.removeprefix("step-"))
    assert 0 < done < 50
    counted(tmp_path, 2, "server=1", 100)
    each_row_once(tmp_path, 100, first=done)


@pytest.mark.slow
def test_a_worker_joins_at_the_end_of_a_window_that_it_shortens(tmp_path: Path) -> None:
    script = (str(SCRIPTS / "counted.py"), ".", "200")
    said = ("--workers", "1", "--run-dir", "run", "--plan", "micro=3 server=2 staleness=4 window=200")
    command = [sys.executable, "-m", "paceline", "run", *said, *script]
    with Process(command, environment(REACHED="0:8", PACE="0.04"), cwd=tmp_path, stdout=PIPE, stderr=PIPE) as process:
        until((tmp_path / "reached").exists)
        paceline("run", "--join", "run", "--workers", "1", "--run-dir", "other", *script, cwd=tmp_path, PACE="0.04")
        _, told = process.communicate(timeout=60)
    assert process.returncode == 0, told
    assert "worker 1 has joined: 2 workers" in told
    first, *rest = each_row_once(tmp_path, 200)
    assert first["updates"] < 200
    assert {worker for one in rest for worker, _ in one["workers"]} == {0, 1}


NAN = """
import os
def bad(output, batch):
    return output.sum() * (float("nan") if os.environ["PACELINE_RANK"] == "1" else 1.0)
trainer = make(loss=bad)
for _ in trainer.steps(data, epochs=9): pass
"""


def test_a_loss_that_is_not_finite_ends_the_window_for_all(tmp_path: Path) -> None:
    text = train_basics(tmp_path, NAN, 2, "--plan", "server=1 staleness=4", code=1).stderr
    assert "is not finite (worker 1: micro-batch 0 (rows " in text
    assert "the step was not applied" in text


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


def test_a_window_ends_where_an_iterable_does(tmp_path: Path) -> None:
    said = train_basics(tmp_path, ROWS_END, 2, "--plan", "micro=8 server=1 staleness=4 window=5").stdout
    assert "[(5, 5, 120), (8, 3, 72)]" in said


SEVERAL = """
one, other = make(), make()
for report in one.steps(data, epochs=2):
    if report.every(4):
        for _ in other.steps(data, epochs=1): pass
one.export("one.safetensors")
other.export("other.safetensors")
"""


def test_several_trainers_have_windows_of_their_own(tmp_path: Path) -> None:
    for name, plan in (("windows", "server=2 staleness=4 window=4"), ("plain", "")):
        (tmp_path / name).mkdir()
        train_basics(tmp_path / name, SEVERAL, 1, "--plan", f"micro=8 {plan}")
    for trainer in ("one", "other"):
        mine, plain = (load_file(tmp_path / name / f"{trainer}.safetensors") for name in ("windows", "plain"))
        assert apart(mine, plain) <= TOLERANCE


def test_single_steps_are_refused(tmp_path: Path) -> None:
    body = """
trainer = make()
trainer.step([part[:4] for part in data.tensors])
"""
    text = train_basics(tmp_path, body, 2, "--plan", "server=1 staleness=2", code=2).stderr
    assert (
        "step() brings the rows of one step, and under staleness=2 a turn of the loop has several; "
        "use steps(), or leave staleness=2 out"
    ) in text


def test_paceline_check_refuses_what_cannot_be_the_same(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    said = paceline("check", "--plan", "server=1 staleness=4", "train.py", cwd=tmp_path, code=2).stderr
    told = "with staleness=4 the result depends on who is how fast, and is not that of one worker"
    assert said == f"paceline: {told}; check the script without staleness\n"
