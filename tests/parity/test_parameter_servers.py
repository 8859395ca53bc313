"""Parameter servers give what one process gives, on any number of workers and servers, through losses and resumes."""

from __future__ import annotations

import json
import signal
import sys
from functools import cache
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
import served
import torch
from agents import until
from by_hand import built, grid
from launching import SCRIPTS, paceline, train_basics
from oracle import apart
from proxies import Proxy
from safetensors.torch import load_file
from served import BATCH, CLIP, MICRO, ROWS, SEED
from test_compression_codecs import rounded
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from warm import Process, environment

from paceline import Trainer, stream_seed
from paceline.base.batching import deal
from paceline.base.journal import read_journal
from paceline.errors import PlanError
from paceline.observe.summary import Summary, facts
from paceline.param_server.client import assign_parameters
from paceline.team.coordinator import STOPPED
from paceline.team.fault_injection import GO, read_log

STEPS, TOLERANCE = 8, 1e-12


@cache  # without the micro-batches that came too `late`, each with its step
def by_hand(
    steps: int = STEPS,
    make: Any = served.groups,
    step: Any = lambda optimizer: optimizer.step(),
    late: frozenset[tuple[int, int]] = frozenset(),
) -> tuple[dict[str, torch.Tensor], list[list[float]]]:
    torch.set_num_threads(1)
    model = built(served.net, SEED)
    optimizer = make(model.named_parameters())
    schedule, figures = LambdaLR(optimizer, served.rate), []
    for number, batch in enumerate(grid(served.data(), BATCH, MICRO, count=steps, seed=SEED)):
        optimizer.zero_grad()
        came = {index: part for index, part in enumerate(batch) if (number + 1, index) not in late}
        total, count = 0.0, sum(len(part[0]) for part in came.values())
        for index, part in came.items():
            torch.manual_seed(stream_seed(SEED, number, index))
            found = (model(part[0]) - part[1]).square().sum()
            found.backward()
            total += found.item()
        for param in model.parameters():
            assert param.grad is not None
            param.grad /= count
        norm, rate = float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)), optimizer.param_groups[0]["lr"]
        figures.append([number + 1, total / count, rate, norm])
        step(optimizer)
        schedule.step()
    return model.state_dict(), figures


def in_codes(word: str, workers: int, servers: int, back: bool = True) -> dict[str, torch.Tensor]:
    """The weights, where each worker pushes `rounded` sums of its micro-batches, of each server's parameters together;
    and the change of these comes `back` rounded, too.
    """
    model = built(served.net, SEED)
    params = list(model.parameters())
    optimizer = served.groups(model.named_parameters())
    schedule, owners = LambdaLR(optimizer, served.rate), assign_parameters([param.nbytes for param in params], servers)
    parts = [[n for n, owner in enumerate(owners) if owner == part] for part in range(servers)]

    def coded(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        row = torch.cat([torch.empty(0), *(tensor.reshape(-1) for tensor in tensors)]).float()
        made = torch.from_numpy(rounded(row.numpy(), word)).double().split([tensor.numel() for tensor in tensors])
        return [part.view(tensor.shape) for part, tensor in zip(made, tensors, strict=True)]

    expected = 0
    for number, batch in enumerate(grid(served.data(), BATCH, MICRO, count=STEPS, seed=SEED)):
        count = sum(len(part[0]) for part in batch)
        expected = expected if back and expected else count
        sums = [torch.zeros_like(param) for param in params]
        for share in deal(len(batch), [1.0] * workers):
            optimizer.zero_grad()
            for index in share:
                torch.manual_seed(stream_seed(SEED, number, index))
                ((model(batch[index][0]) - batch[index][1]).square().sum() / expected).backward()
            for part in parts:
                mine = part[::-1]  # as backward makes them
                for n, grad in zip(mine, coded([params[n].grad for n in mine]) if share else [], strict=bool(share)):
                    sums[n] += grad
        if not back:  # one worker clips by what it has made, before it is coded
            norm = nn.utils.get_total_norm([param.grad for param in params])
        for param, total in zip(params, sums, strict=True):
            param.grad = total * expected / count
        norm = nn.utils.get_total_norm([param.grad for param in params]) if back else norm
        nn.utils.clip_grads_with_norm_(params, CLIP, norm)
        before = [param.detach().clone() for param in params]
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            for part in parts if back else ():
                for n, change in zip(part, coded([params[n] - before[n] for n in part]), strict=True):
                    params[n].copy_(before[n] + change)
        expected = count
    return model.state_dict()


def trained(folder: Path, workers: int, plan: str, *options: str, code: int = 0, **env: str) -> str:
    said = ("--workers", str(workers), "--run-dir", "run", "--plan", f"micro={MICRO} {plan}", *options)
    done = paceline("run", *said, SCRIPTS / "served.py", ".", str(STEPS), cwd=folder, code=code, **env)
    return done.stdout + done.stderr


def right(folder: Path, first: int = 1) -> None:
    """Weights, and the figures of the steps from this one on, as by hand."""
    weights, figures = by_hand()
    assert apart(load_file(folder / "out.safetensors"), weights) <= TOLERANCE
    told = json.loads((folder / "told.json").read_text())
    for mine, theirs in zip(told["figures"], figures[first - 1 :], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-9)
    assert [one["n"] for one in told["evaluated"]] == [ROWS, ROWS]


def test_two_servers_give_what_one_process_gives(tmp_path: Path) -> None:
    said = trained(tmp_path, 2, "server=2")
    right(tmp_path)
    assert "2 workers" in said
    assert "failed" not in said
    told = [one for one in read_journal(tmp_path / "run") if one["event"] == "server"]
    started = [one["server"] for one in told if one["what"] == "started"]
    assert sorted(started) == [0, 1]
    assert (tmp_path / "run" / "logs" / "server-1.log").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (1, 3), (1, 7), (2, 1), (2, 3), (5, 1), (5, 2), (5, 3)])
def test_any_number_of_servers_and_workers(tmp_path: Path, workers: int, servers: int) -> None:
    """Also more than there are parameters."""
    trained(tmp_path, workers, f"server={servers}")
    right(tmp_path)


def test_a_run_goes_on_under_other_plans(tmp_path: Path) -> None:
    for steps in ("2", "3"):  # what a server was given of others' at first is in no checkpoint
        trained(tmp_path, 2, "server=2", "--steps", steps)
    trained(tmp_path, 2, "data=2", "--steps", "5")
    trained(tmp_path, 1, "server=3")
    right(tmp_path, first=6)


@pytest.mark.parametrize(
    ("word", "workers", "plan"),
    [
        ("bf16", 2, "server=2"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("int8", 2, "server=2"),
                ("fp16", 3, "server=3 copies=1"),
                ("int8", 3, "server=1"),
                ("bf16", 1, "server=7"),
                ("bf16", 1, "server=2 staleness=4"),
                ("int8", 1, "server=3 staleness=1 copies=1"),
            ]
        ),
    ],
)
def test_codes_are_those_of_each_workers_sums_and_of_the_change(
    tmp_path: Path, word: str, workers: int, plan: str
) -> None:
    """The change where all are in step. A connection that is lost changes nothing."""
    shares = ("--shares", ",".join(["1"] * workers)) if workers > 1 else ()
    trained(tmp_path, workers, f"{plan} codec={word}", *shares, CUT="5")
    servers, back = int(plan.split()[0].removeprefix("server=")), "staleness" not in plan
    weights = in_codes(word, workers, servers, back)
    assert apart(load_file(tmp_path / "out.safetensors"), weights) <= TOLERANCE
    assert apart(weights, by_hand()[0]) > 1e-5
    (told,) = (event for event in read_journal(tmp_path / "run") if event["event"] == "codec")
    held = 1 + ("copies" in plan)
    assert told["full"] == held * STEPS * 146 * 8
    codes = {"bf16": 2 * 146, "fp16": 516 * servers, "int8": 260 * servers}[word]
    assert told["sent"] == held * STEPS * codes
    text = dict(facts(Summary(tmp_path / "run"))["Costs"])["codec"]
    assert text.startswith(f"{word} (rounding): ")
    assert f" sent to servers instead of {'18.7' if held > 1 else '9.34'} kB, " in text


EXACT = [
    (3, "server=2", ""),
    *(
        (workers, f"server={servers}{' copies=1' * copies}", chaos)
        for workers, servers, copies, chaos in [
            (1, 1, 0, ""),
            (5, 3, 0, "kill:1@3.reduced,kill:4@5.applied"),
            (2, 3, 1, "kill:1000001@3.applied"),
            (3, 2, 1, "kill:1@3.applied,kill:1000000@5.summed"),
        ]
    ),
]


@pytest.mark.parametrize(
    ("workers", "plan", "chaos"), [EXACT[0], *(pytest.param(*one, marks=pytest.mark.slow) for one in EXACT[1:])]
)
def test_exact_sums_have_the_bits_of_one_process(tmp_path: Path, workers: int, plan: str, chaos: str) -> None:
    """Whoever is lost; and of other plans."""
    for name, count, words, env in (("one", 1, "", {}), ("served", workers, plan, {"PACELINE_CHAOS": chaos})):
        (tmp_path / name).mkdir()
        trained(tmp_path / name, count, f"{words} exact", **env)
    assert len(read_log(tmp_path / "served" / "run") if chaos else []) == len(chaos.split(",") if chaos else [])
    for file in ("out.safetensors", "told.json"):
        one, other = ((tmp_path / name / file).read_bytes() for name in ("one", "served"))
        assert one == other
    right(tmp_path / "served")


GROWS = """
import paceline
calls = []
def grown(output, batch):
    calls.append(1)
    return (output[:, 0] * 10 ** (6 * batch[1])).sum()
t = paceline.Trainer(lambda: torch.nn.Linear(3, 1), grown,
    lambda p: torch.optim.Adagrad(p, lr=1e-2), global_batch=8, seed=1, clip_norm=0.5, plan="exact micro=2")
rows = torch.utils.data.TensorDataset(torch.randn(32, 3, generator=torch.Generator().manual_seed(0)),
    (torch.arange(32) % 11 == 0).float())
figures = [(r.loss, r.grad_norm) for r in t.steps(rows, epochs=2, order=lambda position, size, seed, epoch: position)]
t.export("out.safetensors")
if t.main:
    print(figures)
    open("calls", "w").write(str(len(calls)))
"""


def test_a_gradient_that_outgrows_its_grid_is_pushed_again(tmp_path: Path) -> None:
    """In float32, whose sums are one number each; the last step of those that served is of another plan's."""
    told = []
    for name, workers, plan in (("one", 1, ""), ("served", 2, "server=2"), ("data", 3, "data=3")):
        (tmp_path / name).mkdir()
        done = train_basics(tmp_path / name, GROWS, workers, "--plan", f"exact micro=2 {plan}")
        told.append(((tmp_path / name / "out.safetensors").read_bytes(), done.stdout))
        assert int((tmp_path / name / "calls").read_text()) > 8 * 4 // workers
    assert len({*told}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("chaos", ["kill:1@3.applied", "kill:1@3.reduced", "kill:1000000@3.applied"])
def test_codes_survive_losses(tmp_path: Path, chaos: str) -> None:
    """Shares differ while there are fewer: what codes leave out is then other rows', and as little."""
    trained(tmp_path, 2, "server=2 copies=1 codec=bf16", PACELINE_CHAOS=chaos)
    assert len(read_log(tmp_path / "run")) == 1
    assert apart(load_file(tmp_path / "out.safetensors"), by_hand()[0]) <= 5e-3


MOMENTS = ["forward", "backward", "reduced", "applied", "loading", "summed", "saving"]
LOST = [(worker, moment) for worker in (0, 1) for moment in MOMENTS if (worker, moment) != (1, "reduced")]
LOST += [(0, "writing")]  # the first alone writes so little


@pytest.mark.parametrize(
    ("worker", "moment"), [(1, "reduced"), *(pytest.param(*lost, marks=pytest.mark.slow) for lost in LOST)]
)
def test_a_worker_is_lost(tmp_path: Path, worker: int, moment: str) -> None:
    options = ("--save-every", "2") if moment in ("saving", "writing") else ()
    trained(tmp_path, 2, "server=2", *options, PACELINE_CHAOS=f"kill:{worker}@3.{moment}")
    assert [entry["moment"] for entry in read_log(tmp_path / "run")] == [moment]
    weights, _ = by_hand()
    assert apart(load_file(tmp_path / "out.safetensors"), weights) <= TOLERANCE


@pytest.mark.parametrize(
    ("server", "moment", "kind", "how"),
    [
        (1, "applied", "kill", "was killed by SIGKILL"),
        pytest.param(1, "reduced", "stop", "was stopped", marks=pytest.mark.slow),
        *(
            pytest.param(server, moment, "kill", "was killed by SIGKILL", marks=pytest.mark.slow)
            for server in (0, 1)
            for moment in ("summed", "reduced")
        ),
    ],
)
def test_a_server_is_lost(tmp_path: Path, server: int, moment: str, kind: str, how: str) -> None:
    chaos = f"{kind}:{1000000 + server}@5.{moment}"
    said = trained(tmp_path, 2, "server=2", "--save-every", "2", PACELINE_CHAOS=chaos)
    assert [entry["moment"] for entry in read_log(tmp_path / "run")] == [moment]
    assert f"server {server} {how}: all go back to the last checkpoint" in said
    right(tmp_path, first=len(by_hand()[1]) + 1 - len(json.loads((tmp_path / "told.json").read_text())["figures"]))


def nobody_went_back(folder: Path, said: str, *lost: int) -> None:
    """Each of these servers was lost, once, and has come again; all others are still in their first processes."""
    assert "go back" not in said
    events = read_journal(folder / "run")
    assert sorted(one["server"] for one in events if one["event"] == "server" and one["what"] == "ended") == sorted(
        lost
    )
    started = [one for one in events if one["event"] in ("server", "worker") and one["what"] == "started"]
    assert sorted(one["server"] for one in started if one["life"]) == sorted(lost)
    assert [one["workers"] for one in events if one["event"] == "lost"] == [[1000000 + server] for server in lost]


KILLED = "was killed by SIGKILL"


@pytest.mark.parametrize(
    ("workers", "servers", "server", "moment"),
    [
        (2, 2, 0, "applied"),
        *(
            pytest.param(workers, 3, server, moment, marks=pytest.mark.slow)
            for workers, server in [(2, 0), (3, 1), (5, 2)]
            for moment in ("summed", "reduced", "applied")
        ),
    ],
)
def test_a_server_of_which_there_is_a_copy_loses_nothing(
    tmp_path: Path, workers: int, servers: int, server: int, moment: str
) -> None:
    """Nor what its optimizer keeps: a checkpoint has it soon afterwards, of whoever has it then."""
    plan, chaos = f"server={servers} copies=1", f"kill:{1000000 + server}@3.{moment}"
    said = trained(tmp_path, workers, plan, "--steps", "5", PACELINE_CHAOS=chaos)
    assert [entry["moment"] for entry in read_log(tmp_path / "run")] == [moment]
    assert f"server {server} {KILLED}: server {(server + 1) % servers} has a copy of what it kept" in said
    nobody_went_back(tmp_path, said, server)
    trained(tmp_path, 1, "data=1")
    right(tmp_path, first=6)


def test_copies_change_nothing(tmp_path: Path) -> None:
    """Not a bit."""
    for name, plan in (("whole", "server=3"), ("copied", "server=3 copies=1")):
        (tmp_path / name).mkdir()
        trained(tmp_path / name, 2, plan)
    whole, copied = ((tmp_path / name / "out.safetensors").read_bytes() for name in ("whole", "copied"))
    assert whole == copied


def lost_in_turn(command: list[str], folder: Path, **env: str) -> str:
    """What a run says in which one is lost, then a worker waits until that one is back, and then another is lost."""
    with Process(command, environment(**env), cwd=folder, stdout=PIPE, stderr=PIPE) as process:
        until((journal := folder / "run" / "journal.jsonl").exists)
        until(lambda: '"generation"' in journal.read_text())
        (folder / "run" / GO).touch()
        _, told = process.communicate(timeout=100)
    assert process.returncode == 0, told
    assert len(read_log(folder / "run")) == 3
    return str(told)


def test_servers_with_copies_are_lost_one_after_another(tmp_path: Path) -> None:
    """The first has its state back, from the one that is lost then, when that one is lost."""
    said = ("--workers", "2", "--run-dir", "run", "--plan", f"micro={MICRO} server=3 copies=1")
    command = [sys.executable, "-m", "paceline", "run", *said, str(SCRIPTS / "served.py"), ".", str(STEPS)]
    chaos = "stop:1000001@2.reduced,wait:0@3.loading,kill:1000002@6.applied"
    told = lost_in_turn(command, tmp_path, PACELINE_CHAOS=chaos)
    assert "server 1 was stopped: server 2 has a copy of what it kept" in told
    assert f"server 2 {KILLED}: server 0 has a copy of what it kept" in told
    nobody_went_back(tmp_path, told, 1, 2)
    right(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("worker", "server"),
    [("0@3.applied", "0@3.applied"), ("1@3.reduced", "0@3.summed"), ("0@4.backward", "1@3.applied")],
)
def test_a_worker_and_a_server_are_lost_at_once(tmp_path: Path, worker: str, server: str) -> None:
    said = trained(tmp_path, 3, "server=2 copies=1", PACELINE_CHAOS=f"kill:{worker},kill:100000{server}")
    assert len(read_log(tmp_path / "run")) == 2
    assert "go back" not in said
    assert apart(load_file(tmp_path / "out.safetensors"), by_hand()[0]) <= TOLERANCE


def test_a_server_and_its_copy_are_lost(tmp_path: Path) -> None:
    chaos = "kill:1000001@5.applied,kill:1000002@5.applied"
    said = trained(tmp_path, 2, "server=3 copies=1", "--save-every", "2", PACELINE_CHAOS=chaos)
    assert len(read_log(tmp_path / "run")) == 2
    assert ": all go back to the last checkpoint" in said
    right(tmp_path, first=len(by_hand()[1]) + 1 - len(json.loads((tmp_path / "told.json").read_text())["figures"]))


def test_connections_that_are_lost_change_nothing(tmp_path: Path) -> None:
    """Not a bit: what was pushed or asked for before is so again, and heeded once."""
    for name, env in (("whole", {}), ("cut", {"CUT": "3"})):
        (tmp_path / name).mkdir()
        trained(tmp_path / name, 2, "server=2", **env)
    assert len((tmp_path / "cut" / "cuts").read_text().splitlines()) > 2 * STEPS
    assert not (tmp_path / "whole" / "cuts").exists()
    whole, cut = ((tmp_path / name / "out.safetensors").read_bytes() for name in ("whole", "cut"))
    assert whole == cut


@pytest.mark.parametrize(
    ("workers", "plan", "near"),
    [
        (2, "server=2", True),
        *(
            pytest.param(workers, plan, near, marks=pytest.mark.slow)
            for near in (True, False)
            for workers, plan in [
                *[(2, "server=2")] * (not near),
                (3, "server=3 copies=1"),
                (2, "server=2 codec=int8"),
                (3, "server=2 exact"),
            ]
        ),
    ],
)
def test_what_is_lost_or_comes_twice_changes_nothing(tmp_path: Path, workers: int, plan: str, near: bool) -> None:
    """Not a bit: each 7th acknowledgement of servers, and each 11th push; nor whether tensors are lent or sent."""
    shares = ("--shares", ",".join(["1"] * workers))
    (tmp_path / "whole").mkdir()
    trained(tmp_path / "whole", workers, plan, *shares)
    with Proxy(7, 11) as proxy:
        (tmp_path / "odd").mkdir()
        trained(tmp_path / "odd", workers, plan, *shares, PROXY=str(proxy.port), **{} if near else {"FAR": "1"})
    print(proxy.did, proxy.kinds)
    assert proxy.did["lost"] >= 5
    assert proxy.did["doubled"] >= 5
    assert (proxy.did["lent"] >= workers * STEPS) is near
    whole, odd = ((tmp_path / name / "out.safetensors").read_bytes() for name in ("whole", "odd"))
    assert whole == odd


def test_a_stop_saves_and_ends(tmp_path: Path) -> None:
    said = ("--workers", "2", "--run-dir", "run", "--plan", f"micro={MICRO} server=2")
    command = [sys.executable, "-m", "paceline", "run", *said, str(SCRIPTS / "served.py"), ".", str(STEPS)]
    with Process(command, environment(SLOW="10"), cwd=tmp_path, stdout=PIPE, stderr=PIPE) as process:
        until((tmp_path / "reached").exists)
        process.send_signal(signal.SIGTERM)
        _, told = process.communicate(timeout=60)
    assert process.returncode == STOPPED, told
    [saved] = (tmp_path / "run" / "checkpoints").glob("step-*")
    trained(tmp_path, 2, "server=1")
    right(tmp_path, first=int(saved.name.removeprefix("step-")) + 1)


@pytest.mark.slow
def test_a_worker_joins(tmp_path: Path) -> None:
    script = (str(SCRIPTS / "served.py"), ".", str(STEPS))
    said = ("--workers", "1", "--run-dir", "run", "--plan", f"micro={MICRO} server=2")
    command = [sys.executable, "-m", "paceline", "run", *said, *script]
    with Process(command, environment(SLOW="7"), cwd=tmp_path, stdout=PIPE, stderr=PIPE) as process:
        until((tmp_path / "reached").exists)
        paceline("run", "--join", "run", "--workers", "1", "--run-dir", "other", *script, cwd=tmp_path)
        _, told = process.communicate(timeout=60)
    assert process.returncode == 0, told
    assert "worker 1 has joined: 2 workers" in told
    right(tmp_path)


def test_a_stop_before_servers_are_there_ends_at_once(tmp_path: Path) -> None:
    body = """
import os, time
trainer = make(plan="server=1")
if int(os.environ["PACELINE_RANK"]) >= 1000000:
    open("waits", "w").close()
    time.sleep(600)
for _ in trainer.steps(data, epochs=1): pass
"""
    (tmp_path / "train.py").write_text("from basics import *\n" + body)
    command = [sys.executable, "-m", "paceline", "run", "--workers", "2", "--run-dir", "run", "train.py"]
    with Process(command, environment(), cwd=tmp_path, stdout=PIPE, stderr=PIPE) as process:
        until((tmp_path / "waits").exists)
        until(lambda: "phase" in (tmp_path / "run" / "journal.jsonl").read_text())
        process.send_signal(signal.SIGTERM)
        _, told = process.communicate(timeout=20)
    assert process.returncode == STOPPED, told


def test_a_server_that_fails_ends_the_run(tmp_path: Path) -> None:
    body = """
import os
trainer = make(plan="server=1")
if int(os.environ["PACELINE_RANK"]) >= 1000000:
    raise ValueError("no room here")
for _ in trainer.steps(data, epochs=1): pass
"""
    told = train_basics(tmp_path, body, 2, code=1).stderr
    assert "server 0 failed (host" in told
    assert "ValueError: no room here" in told
    assert "the end of out/logs/server-0.log:" in told


LATER = "this Trainer is made after training began, and parameter servers run the script up to there alone"
LATER += "; make all trainers before the first loop over steps(), or the first step()"


def test_a_trainer_made_later_is_refused(tmp_path: Path) -> None:
    body = """
trainer = make(plan="server=1")
for _ in trainer.steps(data, count=2): pass
make(plan="server=1")
"""
    assert LATER in train_basics(tmp_path, body, 1, code=2).stderr


def test_servers_are_refused_without_our_launcher() -> None:
    with pytest.raises(PlanError) as found:
        Trainer(served.net, served.loss, served.groups, global_batch=BATCH, plan="server=2")
    assert str(found.value) == (
        "server=2 needs processes beside the workers, which `paceline run` alone starts; "
        "start the script with `paceline run`, without --max-restarts 0, or leave server out"
    )


def test_paceline_check_knows_servers(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("from basics import *\nfor _ in make().steps(data, epochs=2): pass\n")
    told = paceline("check", "--workers", "2", "--steps", "3", "--plan", "server=1", "train.py", cwd=tmp_path).stdout
    assert "verdict: the same training on 2 workers as on one" in told


def test_several_trainers_and_own_rows_share_servers(tmp_path: Path) -> None:
    body = """
from paceline import join
torch.manual_seed(0)
one, two = make(plan="server=2"), make(plan="server=2", global_batch=12)
before = [p.detach().clone() for p in one.model.parameters()]
part = slice(join().rank, None, join().size)
while one.steps_done < 3:
    rows = data[24 * one.steps_done : 24 * one.steps_done + 24]
    one.step(tuple(t[part] for t in rows))
for _ in two.steps(data, count=2): pass
for trainer, number, size in ((one, 3, 24), (two, 2, 12)):
    trainer.export(f"{number}.safetensors")
"""
    train_basics(tmp_path, body, 2)
    alone = tmp_path / "alone"
    alone.mkdir()
    train_basics(alone, body.replace("server=2", "data=1"), 1)
    for number in (2, 3):
        name = f"{number}.safetensors"
        assert apart(load_file(tmp_path / name), load_file(alone / name)) <= TOLERANCE


# -- parts ------------------------------------------------------------------------------------------------------------


def test_parameters_are_spread_evenly_by_bytes() -> None:
    sizes = [8, 100, 3, 60, 50, 8, 40]
    for servers in (1, 2, 3, 9):
        owners = assign_parameters(sizes, servers)
        loads = [sum(size for size, owner in zip(sizes, owners, strict=True) if owner == one) for one in range(servers)]
        assert owners == assign_parameters(sizes, servers)
        assert sum(loads) == sum(sizes)
        assert max(loads) - min(loads) <= max(sizes)
    assert assign_parameters([5, 5, 5, 5], 2) == [0, 1, 0, 1]
