"""What strangers and dying processes do to a run on two hosts, begun by hand or under `paceline launch ssh`."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from agents import alive, until
from pairs import PORT, WAYS, Begin, Pair
from pairs import alone as alone
from pairs import hosts as hosts
from pairs import pair as pair
from test_identity import SPREAD, warm_of
from test_unknown_connections import MANY

pytestmark = [pytest.mark.root, pytest.mark.slow]
both_ways = pytest.mark.parametrize("way", WAYS)


def rogue(run: Pair, port: int, token: str = "") -> subprocess.Popen[str]:
    """One at the first host's address."""
    host, program = run.network.hosts[0], Path(__file__).with_name("rogues.py")
    command = host.command(sys.executable, program, host.address, str(port), "takes", *filter(None, [token]))
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == f"{port}\n"
    return process


@pytest.mark.parametrize("knows", [False, True])
@both_ways
def test_another_program_that_has_the_port_before_the_run(pair: Begin, way: str, knows: bool) -> None:
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
    cure = "give an address of this host, and a port that is free"
    assert f"paceline: --listen {where}: Address already in use; {cure}" in run.text.splitlines()
    if way != "ssh":
        what = f"the run at {where} cannot be joined: it gives 'arguments', which nobody who joins takes"
        cure = "see that the run and this command use the same Paceline"
        if not knows:
            what = f"what answers at {where} does not know this run's token"
            cure = "see whether the run still goes on there, or copy the file token of its folder here again"
        assert f"paceline: {what}; {cure}" in run.text.splitlines()
    assert "owned" not in run.text
    assert not (run.folder / "trained").exists()
    assert run.left() == []


@both_ways
def test_another_program_that_takes_the_coordinators_address(pair: Begin, way: str) -> None:
    """In mid-run, when the first host's agent was killed. It says that the run is over, and how to go on."""
    run = pair(way)
    run.start()
    _, port = run.address()
    coordinator, other_worker = run.coordinator(), run.worker(1)
    os.kill(run.agent_of(0), signal.SIGKILL)
    until(lambda: not alive(coordinator))
    other = rogue(run, port)
    try:
        if way == "ssh":
            assert run.started[0].wait(90) not in (0, 2), run.text
            until(lambda: not run.left())
        else:
            until(lambda: "no word from the coordinator" in run.text)
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


@both_ways
def test_a_script_may_have_many_files_open(pair: Begin, alone: bytes, way: str) -> None:
    run = pair(way)
    run.start("--plan", "server=1", OPEN=str(MANY))
    run.end(alone)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
@pytest.mark.parametrize("seed", range(2))
def test_a_warm_process_that_dies_while_it_forks_under_launch_ssh(
    pair: Begin, alone: bytes, how: int, seed: int
) -> None:
    """On the second host, in mid-run."""
    run = pair("ssh")
    run.start("--plan", "exact micro=3")
    warm = warm_of(run.agent_of(1))
    os.kill(run.worker(1), signal.SIGKILL)
    time.sleep(random.Random(seed).uniform(0.0, 4 * SPREAD))
    os.kill(warm, how)
    until(lambda: len((run.folder / "processes-1").read_text().split()) == 2 or run.ended)
    run.end(alone)
