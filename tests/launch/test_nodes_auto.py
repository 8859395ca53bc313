"""`paceline run --nodes auto`: one command on nodes that start by themselves."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from agents import WORKER, journal, until
from launching import SCRIPTS, paceline
from oracle import apart
from real_engines import SLOWLY
from safetensors.torch import load_file
from warm import environment

from paceline.base.environment import read_nodes
from paceline.checkpoint.lock import hold_lock
from paceline.errors import LaunchError, UsageError
from paceline.launch.joining import stand_by
from paceline.launch.local import PORT

SKY = {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
DSTACK = {"DSTACK_NODE_RANK": "1", "DSTACK_NODES_NUM": "2", "DSTACK_MASTER_NODE_IP": "10.0.0.1"}
KUBEFLOW = {"PET_NODE_RANK": "1", "PET_NNODES": "2", "PET_MASTER_ADDR": "job-0.job", "PET_NPROC_PER_NODE": "4"}

PODS = {"JOB_COMPLETION_INDEX": "0", "PACELINE_FIRST": "train-0.train", "PACELINE_ADDRESS": "10.0.0.5"}


def test_nodes_auto_reads_variables_of_sky_dstack_kubeflow_and_kubernetes() -> None:
    assert read_nodes(SKY) == read_nodes(DSTACK) == read_nodes(SKY | DSTACK) == (1, 2, "10.0.0.1", 0)
    assert read_nodes(KUBEFLOW) == (1, 2, "job-0.job", 4)
    assert read_nodes(PODS | {"JOB_COMPLETION_INDEX": "2"}) == (2, 0, "train-0.train", 0)
    assert read_nodes(PODS) == (0, 0, "10.0.0.5", 0)
    assert read_nodes({"JOB_COMPLETION_INDEX": "0"} | KUBEFLOW) == (1, 2, "job-0.job", 4)  # in a pod of somebody's
    with pytest.raises(UsageError) as raised:
        read_nodes(SKY | KUBEFLOW)
    assert str(raised.value) == (
        "the variables of SkyPilot and Kubeflow contradict each other; unset the variables that another launcher left"
    )
    with pytest.raises(UsageError) as raised:
        read_nodes({})
    assert str(raised.value) == (
        "--nodes auto finds no variables of SkyPilot, dstack, Kubeflow, Kubernetes; "
        "say --listen on the first node and --join on the others"
    )


def test_nodes_auto_without_a_token_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    done = paceline("run", "--nodes", "auto", "train.py", cwd=tmp_path, code=2, **SKY)
    assert done.stderr == (
        "paceline: --nodes auto needs a secret that all nodes share; "
        "pass the same --token-file, or set the same PACELINE_TOKEN, of at least 32 characters on all nodes\n"
    )


def test_nodes_auto_two_nodes_meet(tmp_path: Path) -> None:
    """The second one may begin first, and has its own folder in the run folder. Workers do not find the secret."""
    (tmp_path / "train.py").write_text(
        WORKER + "assert 'PACELINE_TOKEN' not in os.environ\nmark('up')\n"
        "while not os.path.exists('go'): time.sleep(0.02)\n"
    )
    nodes = []
    for rank in ("1", "0"):
        told = SKY | {"SKYPILOT_NODE_RANK": rank, "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1"}
        command = ["run", "--nodes", "auto", "--cold-start", "--run-dir", f"run-{rank}", "train.py"]
        nodes.append(
            subprocess.Popen(
                [sys.executable, "-m", "paceline", *command],
                env=environment(**told, PACELINE_TOKEN=32 * "k"),
                cwd=tmp_path,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    until(lambda: (tmp_path / "run-0/up-0").exists() and (tmp_path / "run-1/hosts/node-1/up-1").exists())
    (tmp_path / "go").touch()
    said = [node.communicate(timeout=60)[1] for node in nodes]
    assert nodes[1].returncode == 0, said
    assert "for the run at 127.0.0.1:29400, as worker 1" in said[0]


def test_nodes_auto_waits_for_the_name_of_the_first_node_until_sigterm(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    told = PODS | {"JOB_COMPLETION_INDEX": "1", "PACELINE_FIRST": "first.invalid"}
    command = [sys.executable, "-m", "paceline", "run", "--nodes", "auto", "--run-dir", "run", "train.py"]
    env = environment(**told, PACELINE_TOKEN=32 * "k")
    with subprocess.Popen(command, env=env, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as node:
        until(
            lambda: bool(
                int(re.findall("SigCgt:\\s+(\\w+)", Path(f"/proc/{node.pid}/status").read_text())[0], 16) & 1 << 14
            )
        )
        node.terminate()
        assert node.communicate(timeout=60)[1] == "paceline: stopped by SIGTERM; the same command starts again\n"
    assert node.returncode == 75
    with pytest.raises(LaunchError) as raised:
        stand_by(("first.invalid", PORT))
    assert re.fullmatch(r"first\.invalid:29400 cannot be reached \(.+\); check `ip route`", str(raised.value))


def test_lock_of_a_folder_is_awaited(tmp_path: Path) -> None:
    """As that of a pod in whose place we are."""
    before = hold_lock(tmp_path)
    with pytest.raises(LaunchError, match="is in use by process"):
        hold_lock(tmp_path, 0.1)
    timer = threading.Timer(0.3, os.close, [before])
    timer.start()
    os.close(hold_lock(tmp_path, 60.0))
    timer.join()


@pytest.mark.slow
def test_nodes_auto_kill_of_the_first_node_and_its_replacement(tmp_path: Path) -> None:
    """As in pods: one that is killed is replaced, under its name; what comes out is what one worker gives."""
    (tmp_path / "train.py").write_text(SLOWLY)
    (tmp_path / "token").write_text(64 * "k")
    (tmp_path / "token").chmod(0o600)
    command = [sys.executable, "-m", "paceline", "run", "--nodes", "auto", "--token-file", "token", "--run-dir", "run"]
    command += ["--save-every", "1", "--min-workers", "2", "train.py"]
    scripts = {"PYTHONPATH": str(SCRIPTS)}

    def start(number: int) -> subprocess.Popen[bytes]:
        told = {"JOB_COMPLETION_INDEX": str(number), "PACELINE_FIRST": "localhost", "PACELINE_ADDRESS": "127.0.0.1"}
        with (tmp_path / f"said-{number}").open("ab") as out:
            return subprocess.Popen(command, env=environment(**told, **scripts), cwd=tmp_path, stdout=out, stderr=out)

    nodes, run = [start(number) for number in range(2)], tmp_path / "run"
    try:
        until(
            lambda: (run / "journal.jsonl").exists() and bool(journal(run, "formed") and journal(run, "checkpoint")),
            200,
        )
        nodes[0].kill()
        nodes[0].wait()
        nodes[0] = start(0)
        joined = "worker 1 has joined: 2 workers\n"
        until(lambda: (tmp_path / "said-1").read_text().count(joined) == 2, 200)
        (tmp_path / "go").touch()
        assert [node.wait(200) for node in nodes] == [0, 0]
    finally:
        for node in nodes:
            node.kill()
            node.wait()
    assert "resuming from step " in (tmp_path / "said-0").read_text()
    found = load_file(tmp_path / "out.safetensors")
    paceline("run", "--run-dir", "alone", "train.py", cwd=tmp_path, **scripts)
    assert apart(found, load_file(tmp_path / "out.safetensors")) < 1e-12
