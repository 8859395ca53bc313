"""What strangers, stalls and lost files do to a run on two hosts, begun by hand or under `paceline launch ssh`."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest
from agents import alive, until
from pairs import PORT, WAYS, Begin, Pair
from pairs import alone as alone
from pairs import hosts as hosts
from pairs import pair as pair
from paths import SUPPORT
from test_one_process_per_worker import SPREAD, warm_of
from test_run_folder_deleted import DELETED, GONE
from test_unknown_connections import FLOOD, MANY
from warm import environment

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.parametrize("way", WAYS)]
CHANGED = "files of the run folder {} were deleted or changed; written again: {}"
RESTARTED = "the coordinator ended (SIGKILL) and is restarted; training continues"


# ---- programs without the token


def rogue(run: Pair, port: int, token: str = "") -> subprocess.Popen[str]:
    """One at the first host's address."""
    host, program = run.network.hosts[0], SUPPORT / "rogues.py"
    command = host.command(sys.executable, program, host.address, str(port), "takes", *filter(None, [token]))
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == f"{port}\n"
    return process


@pytest.mark.parametrize("knows", [False, True])
def test_port_taken_by_another_program_before_the_run(pair: Begin, way: str, knows: bool) -> None:
    run = pair(way)
    other = rogue(run, PORT, 64 * "7" if knows else "")
    where = f"{run.network.hosts[0].address}:{PORT}"
    try:
        if way == "ssh":
            run.start("--listen", where, members=False)
        else:
            (run.folder / "token").write_text(64 * "7")
            (run.folder / "token").chmod(0o600)
            (run.folder / "train.py").write_text("open('trained', 'w').close()\n")
            run.agent("run", 0, "--listen", where)
            run.agent("join", 1, "--join", where, "--token-file", "token")
        codes = [process.wait(60) for process in run.started]
    finally:
        other.kill()
        other.communicate()
    assert codes == [2] * len(codes), run.text
    cure = "use an address of this host and a free port"
    assert f"paceline: --listen {where}: Address already in use; {cure}" in run.text.splitlines()
    if way != "ssh":
        what = f"the run at {where} cannot be joined: its answer has the unknown field 'arguments'"
        cure = "use the same version of Paceline as the run"
        if not knows:
            what = f"the program at {where} does not know this run's token"
            cure = "check whether the run is still running there, or copy the file token of its run folder here again"
        assert f"paceline: {what}; {cure}" in run.text.splitlines()
    assert "owned" not in run.text
    assert not (run.folder / "trained").exists()
    assert run.left() == []


@pytest.mark.parametrize("knows", [False, True])
def test_port_taken_by_another_program_after_a_kill_of_the_agent(pair: Begin, way: str, knows: bool) -> None:
    """In mid-run, when the first host's agent was killed. It gives more than options; also where it `knows` the token,
    nobody comes to it.
    """
    run = pair(way)
    run.start()
    (_, port), token = run.address(), (run.folder_of(0) / "token").read_text().strip()
    coordinator, other_worker = run.coordinator(), run.worker(1)
    os.kill(run.agent_of(0), signal.SIGKILL)
    until(lambda: not alive(coordinator))
    other = rogue(run, port, token if knows else "")
    try:
        if way == "ssh":
            assert run.started[0].wait(90) not in (0, 2), run.text
            until(lambda: not run.left())
        else:
            until(lambda: "does not answer; the workers of this host wait" in run.text)
            time.sleep(1.0)  # in which it answers what it is asked
            assert alive(other_worker)
            run.started[1].send_signal(signal.SIGINT)
            run.started[1].send_signal(signal.SIGINT)
            assert run.started[1].wait(60) != 0
    finally:
        other.kill()
        other.communicate()
    assert "owned" not in run.text
    assert not (run.folder / "out.safetensors").exists()


def test_port_taken_by_another_program_after_the_run(pair: Begin, alone: bytes, way: str) -> None:
    """Who still has the token and the address asks it, and believes nothing."""
    run = pair(way)
    run.start()
    host, port = run.address()
    run.end(alone)
    other, token = rogue(run, port), str(run.folder_of(1) / "token")
    where, program = f"{host}:{port}", [sys.executable, "-m", "paceline"]
    try:
        for command in (["run", "--join", where], ["stop", where], ["stacks", where]):
            words = [*program, *command, "--token-file", token, *(["train.py"] if command[0] == "run" else [])]
            done = subprocess.run(
                run.network.hosts[1].command(*words), cwd=run.folder, env=environment(), capture_output=True, text=True
            )
            what = f"the program at {where} does not know this run's token"
            cure = "check whether the run is still running there, or copy the file token of its run folder here again"
            assert (done.returncode, done.stdout, done.stderr) == (2, "", f"paceline: {what}; {cure}\n")
    finally:
        other.kill()
        other.communicate()
    assert run.left() == []


# ---- unknown connections, and many open files


@pytest.mark.parametrize("what", ["coordinator", "server"])
def test_many_silent_connections(pair: Begin, alone: bytes, way: str, what: str) -> None:
    run = pair(way)
    run.start("--plan", "server=1")
    where = [run.address()]
    if what == "server":
        where = [address for pid in family(run) for address in listens(run, pid) if address != run.address()]
    floods = [
        subprocess.Popen(
            run.third.command(sys.executable, "-c", FLOOD, host, str(port), str(MANY)),
            stdout=subprocess.PIPE,
            text=True,
        )
        for host, port in where
    ]
    try:
        for flood in floods:
            assert flood.stdout is not None
            flood.stdout.readline()  # some sockets are torch's, which closes none, and some are not reached from there
        run.end(alone)
    finally:
        for flood in floods:
            flood.kill()
            flood.communicate()


def family(run: Pair) -> list[int]:
    return [child.pid for host in (0, 1) for child in psutil.Process(run.agent_of(host)).children(recursive=True)]


def listens(run: Pair, pid: int) -> list[tuple[str, int]]:
    """The addresses of a parameter server that it greets at."""
    own = {host.address for host in run.network.hosts}
    try:
        connections = psutil.Process(pid).net_connections("tcp4")
    except psutil.NoSuchProcess:
        return []
    return [(one.laddr.ip, one.laddr.port) for one in connections if one.status == "LISTEN" and one.laddr.ip in own]


@pytest.mark.parametrize("plan", ["server=1"])
def test_script_with_many_open_files(pair: Begin, alone: bytes, way: str, plan: str) -> None:
    run = pair(way)
    run.start("--plan", plan, OPEN=str(MANY))
    run.end(alone)


# ---- processes that die and stall


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
@pytest.mark.parametrize("seed", range(2))
def test_kill_of_the_fork_server_while_it_forks(pair: Begin, alone: bytes, way: str, how: int, seed: int) -> None:
    """On the second host, in mid-run."""
    run = pair(way)
    run.start("--plan", "exact micro=3")
    warm = warm_of(run.agent_of(1))
    os.kill(run.worker(1), signal.SIGKILL)
    time.sleep(random.Random(seed).uniform(0.0, 4 * SPREAD))
    os.kill(warm, how)
    until(lambda: len((run.folder / "processes-1").read_text().split()) == 2 or run.ended)
    run.end(alone)


@pytest.mark.parametrize(
    ("plan", "seconds"), [("server=1", 3.0), ("server=1", 20.0), ("server=2 copies=1", 3.0), ("micro=3", 3.0)]
)
@pytest.mark.parametrize("host", [0, 1])
def test_sigstop_of_an_agent_that_goes_on(
    pair: Begin, alone: bytes, way: str, host: int, plan: str, seconds: float
) -> None:
    run = pair(way)
    run.start("--plan", plan)
    number = run.agent_of(host)
    os.kill(number, signal.SIGSTOP)
    time.sleep(seconds)
    os.kill(number, signal.SIGCONT)
    run.end(alone, silent=True)


@pytest.mark.parametrize("plan", ["server=1", "micro=3"])
def test_sigstop_of_the_launcher_that_goes_on(pair: Begin, alone: bytes, way: str, plan: str) -> None:
    """Where there is none, both agents do; a worker whose agent is silent for longer than a second may be replaced."""
    run = pair(way)
    run.start("--plan", plan)
    for process in run.started:
        os.kill(process.pid, signal.SIGSTOP)
    time.sleep(3.0)
    for process in run.started:
        os.kill(process.pid, signal.SIGCONT)
    text = run.end(alone, silent=way != "ssh")
    assert way != "ssh" or "lost" not in text


# ---- files that are deleted


@pytest.mark.parametrize("how", ["changed", "deleted"])
def test_deleted_token_when_the_coordinator_restarts(pair: Begin, alone: bytes, way: str, how: str) -> None:
    run = pair(way)
    run.start("--plan", "exact micro=3")
    path = run.folder_of(0) / "token"
    token = path.read_text()
    path.unlink() if how == "deleted" else path.write_text("a" * 64)
    os.kill(run.coordinator(), signal.SIGKILL)
    run.says(RESTARTED)
    os.kill(run.worker(1), signal.SIGKILL)
    run.says(CHANGED.format("run", "token"))
    until(lambda: len((run.folder / "processes-1").read_text().split()) == 2 or run.ended)
    run.end(alone)
    assert (path.read_text(), path.stat().st_mode & 0o777) == (token, 0o600)


@pytest.mark.parametrize("how", ["deleted", "moved"])
@pytest.mark.parametrize("host", [0, 1])
def test_deleted_run_folder_of_a_host(pair: Begin, alone: bytes, way: str, host: int, how: str) -> None:
    run = pair(way)
    run.start("--plan", "exact micro=3")
    path = run.folder_of(host)
    coordinator, worker = run.coordinator(), run.worker(1)
    moved = path.rename(run.folder / "moved")
    if how == "deleted":
        shutil.rmtree(moved)
    run.says(DELETED.replace("run folder run", f"run folder {path.relative_to(run.folder)}"))
    os.kill(coordinator, signal.SIGKILL)
    run.says(RESTARTED)
    os.kill(worker, signal.SIGKILL)
    until(lambda: len((run.folder / "processes-1").read_text().split()) == 2 or run.ended)
    run.end(alone)


@pytest.mark.parametrize("host", [0, 1])
def test_deleted_journal_of_a_host(pair: Begin, alone: bytes, way: str, host: int) -> None:
    run = pair(way)
    run.start("--plan", "exact micro=3")
    folder = run.folder_of(host)
    time.sleep(1.1)  # between two looks of the agent
    (folder / "journal.jsonl").unlink()
    run.says(GONE["journal.jsonl"].replace("run folder run", f"run folder {folder.relative_to(run.folder)}"))
    run.end(alone)
