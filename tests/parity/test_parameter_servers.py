"""Parameter servers give what one process gives, on any number of workers and servers, through kills and resumes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE

import pytest
import served
from agents import until
from launching import paceline, train_basics
from once import once
from oracle import apart, serve_in_codes
from proxies import Proxy
from safetensors.torch import load_file
from served import BATCH
from server_runs import (
    KILLED,
    STEPS,
    TOLERANCE,
    check_nobody_went_back,
    check_served,
    check_served_from_checkpoint,
    check_served_weights,
    plain_served,
    served_by_hand,
    served_command,
    served_steps,
    stop_at_a_mark,
    train_served,
)
from test_compression_codecs import rounded
from warm import Process, environment

from paceline import Trainer
from paceline.base.journal import read_journal
from paceline.errors import PlanError
from paceline.observe.summary import Summary, facts
from paceline.param_server.client import assign_parameters
from paceline.team.fault_injection import read_log

SHARES = ("--shares", "1,1")  # whose sums have the same bits in each run


@pytest.fixture(scope="session")
def two_servers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an undisturbed run of two workers and two servers."""
    return once(tmp_path_factory, "two servers", lambda folder: train_served(folder, 2, "server=2", *SHARES))


def bits(folder: Path) -> bytes:
    return (folder / "out.safetensors").read_bytes()


def test_two_parameter_servers_give_what_one_process_gives(two_servers: Path) -> None:
    check_served(two_servers)
    events = [one for one in read_journal(two_servers / "run") if one["event"] == "server"]
    assert sorted(one["server"] for one in events if one["what"] == "started") == [0, 1]
    assert (two_servers / "run" / "logs" / "server-1.log").exists()
    assert not (two_servers / "cuts").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "servers"), [(1, 7), (2, 3), (5, 1), (5, 3)])
def test_any_number_of_servers_and_workers(tmp_path: Path, workers: int, servers: int) -> None:
    """Also more than there are parameters."""
    train_served(tmp_path, workers, f"server={servers}")
    check_served(tmp_path)


def test_stop_and_resume_under_other_plans(tmp_path: Path) -> None:
    """A checkpoint of servers that had resumed has no part that another server trains on."""
    train_served(tmp_path, 1, "server=2", "--steps", "2")
    done = stop_at_a_mark(served_command(2, "server=2"), tmp_path, SLOW="8")
    assert 2 < done < STEPS - 1
    train_served(tmp_path, 1, "data=1", "--steps", str(done + 1))
    train_served(tmp_path, 1, "server=1")
    check_served(tmp_path, first=done + 2)


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
def test_codec_rounds_the_sums_of_each_worker_and_the_change(
    tmp_path: Path, word: str, workers: int, plan: str
) -> None:
    """The change where all are in step. A connection that is lost changes nothing."""
    shares = ("--shares", ",".join(["1"] * workers)) if workers > 1 else ()
    train_served(tmp_path, workers, f"{plan} codec={word}", *shares, CUT="5")
    servers, plain = int(plan.split()[0].removeprefix("server=")), plain_served()
    owners = assign_parameters([param.nbytes for param in plain.model.parameters()], servers)
    parts = [[n for n, owner in enumerate(owners) if owner == part] for part in range(servers)]
    code = lambda row: rounded(row, word)
    weights = serve_in_codes(plain, served_steps(), workers, parts, code, back="staleness" not in plan)
    assert apart(load_file(tmp_path / "out.safetensors"), weights) <= TOLERANCE
    assert apart(weights, served_by_hand()[0]) > 1e-5
    (event,) = (event for event in read_journal(tmp_path / "run") if event["event"] == "codec")
    held = 1 + ("copies" in plan)
    assert event["full"] == held * STEPS * 146 * 8
    codes = {"bf16": 2 * 146, "fp16": 516 * servers, "int8": 260 * servers}[word]
    assert event["sent"] == held * STEPS * codes
    text = dict(facts(Summary(tmp_path / "run"))["Costs"])["codec"]
    assert text.startswith(f"{word} (rounding): ")
    assert f" to servers instead of {'18.7' if held > 1 else '9.34'} kB" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "plan", "chaos"),
    [
        (3, "server=2", ""),
        (1, "server=1", ""),
        (5, "server=3", "kill:1@3.reduced,kill:4@5.applied"),
        (2, "server=3 copies=1", "kill:1000001@3.applied"),
        (3, "server=2 copies=1", "kill:1@3.applied,kill:1000000@5.summed"),
    ],
)
def test_exact_sums_have_the_bits_of_one_process(tmp_path: Path, workers: int, plan: str, chaos: str) -> None:
    """Whoever is lost; and of other plans."""
    for name, count, words, env in (("one", 1, "", {}), ("served", workers, plan, {"PACELINE_CHAOS": chaos})):
        (tmp_path / name).mkdir()
        train_served(tmp_path / name, count, f"{words} exact", **env)
    assert len(read_log(tmp_path / "served" / "run") if chaos else []) == len(chaos.split(",") if chaos else [])
    for file in ("out.safetensors", "told.json"):
        one, other = ((tmp_path / name / file).read_bytes() for name in ("one", "served"))
        assert one == other
    check_served(tmp_path / "served")


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


@pytest.mark.parametrize("third", [pytest.param((3, "data=3"), marks=pytest.mark.slow), ()])
def test_exact_gradient_that_outgrows_its_grid_is_pushed_again(
    tmp_path: Path, third: tuple[int, str] | tuple[()]
) -> None:
    """With the bits of one process, in float32, whose sums are one number each."""
    results = []
    for workers, plan in ((1, ""), (2, "server=2"), *([third] if third else [])):
        (folder := tmp_path / str(workers)).mkdir()
        done = train_basics(folder, GROWS, workers, "--plan", f"exact micro=2 {plan}")
        results.append((bits(folder), done.stdout))
        assert int((folder / "calls").read_text()) > 8 * 4 // workers
    assert len({*results}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("chaos", ["kill:1@3.applied", "kill:1@3.reduced", "kill:1000000@3.applied"])
def test_codec_survives_a_kill(tmp_path: Path, chaos: str) -> None:
    """Shares differ while there are fewer: what codes omit is then other rows', and as little."""
    train_served(tmp_path, 2, "server=2 copies=1 codec=bf16", PACELINE_CHAOS=chaos)
    assert len(read_log(tmp_path / "run")) == 1
    assert apart(load_file(tmp_path / "out.safetensors"), served_by_hand()[0]) <= 5e-3


LOST = [(0, "applied"), (1, "saving"), (0, "writing")]  # without copies; the table of recovery has them


@pytest.mark.parametrize(
    ("worker", "moment"), [(1, "reduced"), *(pytest.param(*lost, marks=pytest.mark.slow) for lost in LOST)]
)
def test_kill_of_a_worker_gives_the_undisturbed_weights(tmp_path: Path, worker: int, moment: str) -> None:
    options = ("--save-every", "2") if moment in ("saving", "writing") else ()
    train_served(tmp_path, 2, "server=2", *options, PACELINE_CHAOS=f"kill:{worker}@3.{moment}")
    assert [entry["moment"] for entry in read_log(tmp_path / "run")] == [moment]
    check_served_weights(tmp_path)


@pytest.mark.parametrize(
    ("server", "moment", "kind", "how"),
    [
        (1, "applied", "kill", KILLED),
        pytest.param(1, "reduced", "stop", "was stopped", marks=pytest.mark.slow),
        *(
            pytest.param(server, moment, "kill", KILLED, marks=pytest.mark.slow)
            for server, moment in ((0, "summed"), (1, "reduced"))
        ),
    ],
)
def test_kill_of_a_server_without_copies_returns_to_the_checkpoint(
    tmp_path: Path, server: int, moment: str, kind: str, how: str
) -> None:
    chaos = f"{kind}:{1000000 + server}@5.{moment}"
    output = train_served(tmp_path, 1, "server=2", "--save-every", "2", PACELINE_CHAOS=chaos)
    assert [entry["moment"] for entry in read_log(tmp_path / "run")] == [moment]
    assert f"server {server} {how}: all workers and servers return to the last checkpoint" in output
    check_served_from_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("workers", "servers", "server", "moment"),
    [
        (2, 2, 0, "applied"),
        *(
            pytest.param(workers, 3, server, moment, marks=pytest.mark.slow)
            for workers, server, moment in [(2, 0, "summed"), (3, 1, "reduced"), (5, 2, "applied")]
        ),
    ],
)
def test_kill_of_a_server_with_a_copy_loses_nothing(
    tmp_path: Path, workers: int, servers: int, server: int, moment: str
) -> None:
    """Nor what its optimizer keeps: a checkpoint has it soon afterwards, of whoever has it then."""
    plan, chaos = f"server={servers} copies=1", f"kill:{1000000 + server}@3.{moment}"
    output = train_served(tmp_path, workers, plan, "--steps", "5", PACELINE_CHAOS=chaos)
    assert [entry["moment"] for entry in read_log(tmp_path / "run")] == [moment]
    assert f"server {server} {KILLED}: server {(server + 1) % servers} has a copy of its state" in output
    check_nobody_went_back(tmp_path, output, server)
    train_served(tmp_path, 1, "data=1")
    check_served(tmp_path, first=6)


@pytest.mark.slow
def test_kill_of_one_server_after_another_loses_nothing_with_copies(tmp_path: Path) -> None:
    """The first has its state back, from the one that is lost then, when that one is lost."""
    chaos = "stop:1000001@2.reduced,kill:1000002@6.applied"
    output = train_served(tmp_path, 1, "server=3 copies=1", PACELINE_CHAOS=chaos, RESTORED="3")
    assert len(read_log(tmp_path / "run")) == 2
    assert "server 1 was stopped: server 2 has a copy of its state" in output
    assert f"server 2 {KILLED}: server 0 has a copy of its state" in output
    check_nobody_went_back(tmp_path, output, 1, 2)
    check_served(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("worker", "server"),
    [("0@3.applied", "0@3.applied"), ("1@3.reduced", "0@3.summed"), ("0@4.backward", "1@3.applied")],
)
def test_kill_of_a_worker_and_a_server_at_once(tmp_path: Path, worker: str, server: str) -> None:
    output = train_served(tmp_path, 3, "server=2 copies=1", PACELINE_CHAOS=f"kill:{worker},kill:100000{server}")
    assert len(read_log(tmp_path / "run")) == 2
    assert "go back" not in output
    check_served_weights(tmp_path)


def test_kill_of_a_server_and_its_copy_returns_to_the_checkpoint(tmp_path: Path) -> None:
    chaos = "kill:1000000@5.applied,kill:1000001@5.applied"
    output = train_served(tmp_path, 1, "server=2 copies=1", "--save-every", "2", PACELINE_CHAOS=chaos)
    assert len(read_log(tmp_path / "run")) == 2
    assert ": all workers and servers return to the last checkpoint" in output
    check_served_from_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("plan", "env"),
    [
        ("server=2 copies=1", {"CUT": "3"}),
        *(
            pytest.param(plan, env, marks=pytest.mark.slow)
            for plan, env in [("server=2 copies=1", {}), ("server=3 copies=1", {}), ("server=2", {"CUT": "3"})]
        ),
    ],
    ids=str,
)
def test_copies_and_lost_connections_change_no_bit(
    two_servers: Path, tmp_path: Path, plan: str, env: dict[str, str]
) -> None:
    """What was pushed or asked for before is so again, and counts once. Three servers add squares in another order."""
    undisturbed = two_servers
    if "server=3" in plan:
        (undisturbed := tmp_path / "undisturbed").mkdir()
        train_served(undisturbed, 2, "server=3", *SHARES)
    train_served(tmp_path, 2, plan, *SHARES, **env)
    if env:
        assert len((tmp_path / "cuts").read_text().splitlines()) > 2 * STEPS
    assert bits(tmp_path) == bits(undisturbed)


@pytest.mark.parametrize(
    ("plan", "near"),
    [
        ("server=2", True),
        *(
            pytest.param(plan, near, marks=pytest.mark.slow)
            for plan, near in [
                ("server=2", False),
                ("server=3 copies=1", True),
                ("server=2 codec=int8", False),
                ("server=2 exact", True),
            ]
        ),
    ],
)
def test_messages_that_are_lost_or_come_twice_change_no_bit(
    two_servers: Path, tmp_path: Path, plan: str, near: bool
) -> None:
    """Each 7th acknowledgement of servers, and each 11th push; nor whether tensors are shared or sent."""
    undisturbed = two_servers
    if not plan.startswith("server=2") or len(plan.split()) > 1:
        (undisturbed := tmp_path / "undisturbed").mkdir()
        train_served(undisturbed, 2, plan, *SHARES)
    (tmp_path / "odd").mkdir()
    with Proxy(7, 11) as proxy:
        train_served(tmp_path / "odd", 2, plan, *SHARES, PROXY=str(proxy.port), **{} if near else {"FAR": "1"})
    print(proxy.did, proxy.kinds)
    assert proxy.did["lost"] >= 5
    assert proxy.did["doubled"] >= 5
    assert (proxy.did["lent"] >= 2 * STEPS) is near
    assert bits(tmp_path / "odd") == bits(undisturbed)


@pytest.mark.slow
def test_join_of_a_worker(tmp_path: Path) -> None:
    script = served_command(1, "server=2")
    with Process(
        [sys.executable, "-m", "paceline", *script], environment(SLOW="7"), cwd=tmp_path, stdout=PIPE, stderr=PIPE
    ) as process:
        until((tmp_path / "reached").exists)
        paceline("run", "--join", "run", "--workers", "1", "--run-dir", "other", *script[-3:], cwd=tmp_path)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    assert "worker 1 has joined: 2 workers" in stderr
    check_served(tmp_path)


def test_stop_before_servers_are_there_ends_at_once(tmp_path: Path) -> None:
    body = """
import os, time
trainer = make(plan="server=1")
if int(os.environ["PACELINE_RANK"]) >= 1000000:
    while not os.path.exists("out/journal.jsonl") or "phase" not in open("out/journal.jsonl").read():
        time.sleep(0.01)
    open("waits", "w").close()
    time.sleep(600)
for _ in trainer.steps(data, epochs=1): pass
"""
    (tmp_path / "train.py").write_text("from basics import *\n" + body)
    assert stop_at_a_mark(("run", "--run-dir", "out", "train.py"), tmp_path, "waits") == 0


def test_exception_in_a_server_ends_the_run(tmp_path: Path) -> None:
    body = """
import os
trainer = make(plan="server=1")
if int(os.environ["PACELINE_RANK"]) >= 1000000:
    raise ValueError("no room here")
for _ in trainer.steps(data, epochs=1): pass
"""
    stderr = train_basics(tmp_path, body, 1, code=1).stderr
    assert "server 0 failed (host" in stderr
    assert "ValueError: no room here" in stderr
    assert "the end of out/logs/server-0.log:" in stderr


LATER = "this Trainer was created after training began, but parameter servers run the script only up to then"
LATER += "; create every Trainer before the first loop over steps() or the first step()"


def test_trainer_made_after_training_began_is_refused(tmp_path: Path) -> None:
    body = """
trainer = make(plan="server=1")
for _ in trainer.steps(data, count=2): pass
make(plan="server=1")
"""
    assert LATER in train_basics(tmp_path, body, 1, code=2).stderr


def test_servers_are_refused_without_paceline_run(golden: Callable[[str, str], None]) -> None:
    with pytest.raises(PlanError) as refused:
        Trainer(served.net, served.loss, served.groups, global_batch=BATCH, plan="server=2")
    golden("refused: servers without paceline run", str(refused.value))


def test_paceline_check_with_servers(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("from basics import *\nfor _ in make().steps(data, epochs=2): pass\n")
    command = ("check", "--workers", "2", "--steps", "3", "--plan", "server=1", "train.py")
    assert "verdict: the same training on 2 workers as on one" in paceline(*command, cwd=tmp_path).stdout


def test_several_trainers_and_single_steps_share_servers(tmp_path: Path) -> None:
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
    plain = tmp_path / "plain"
    plain.mkdir()
    train_basics(plain, body.replace("server=2", "data=1"), 1)
    for number in (2, 3):
        name = f"{number}.safetensors"
        assert apart(load_file(tmp_path / name), load_file(plain / name)) <= TOLERANCE


# -- parts ------------------------------------------------------------------------------------------------------------


def test_parameters_are_assigned_to_servers_evenly_by_bytes() -> None:
    sizes = [8, 100, 3, 60, 50, 8, 40]
    for servers in (1, 2, 3, 9):
        owners = assign_parameters(sizes, servers)
        loads = [sum(size for size, owner in zip(sizes, owners, strict=True) if owner == one) for one in range(servers)]
        assert owners == assign_parameters(sizes, servers)
        assert sum(loads) == sum(sizes)
        assert max(loads) - min(loads) <= max(sizes)
    assert assign_parameters([5, 5, 5, 5], 2) == [0, 1, 0, 1]
