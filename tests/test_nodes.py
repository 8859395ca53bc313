"""`paceline run --nodes auto`: one command on nodes that start by themselves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from agents import WORKER, until
from launching import paceline
from warm import environment

from paceline.errors import UsageError
from paceline.world import read_nodes

SKY = {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
DSTACK = {"DSTACK_NODE_RANK": "1", "DSTACK_NODES_NUM": "2", "DSTACK_MASTER_NODE_IP": "10.0.0.1"}
KUBEFLOW = {"PET_NODE_RANK": "1", "PET_NNODES": "2", "PET_MASTER_ADDR": "job-0.job", "PET_NPROC_PER_NODE": "4"}


def test_what_nodes_are_told() -> None:
    assert read_nodes(SKY) == read_nodes(DSTACK) == read_nodes(SKY | DSTACK) == (1, 2, "10.0.0.1", 0)
    assert read_nodes(KUBEFLOW) == (1, 2, "job-0.job", 4)
    with pytest.raises(UsageError) as raised:
        read_nodes(SKY | KUBEFLOW)
    assert str(raised.value) == (
        "the variables of SkyPilot and Kubeflow disagree about the nodes; unset those of another start"
    )
    with pytest.raises(UsageError) as raised:
        read_nodes({})
    assert str(raised.value) == (
        "--nodes auto finds no variables of SkyPilot, dstack, Kubeflow; "
        "say --listen on the first node and --join on the others"
    )


def test_without_a_secret_it_refuses(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    done = paceline("run", "--nodes", "auto", "train.py", cwd=tmp_path, code=2, **SKY)
    assert done.stderr == (
        "paceline: --nodes auto needs a secret that the nodes share; "
        "give all nodes the same --token-file or PACELINE_TOKEN, of 32 characters or more\n"
    )


def test_two_nodes_meet(tmp_path: Path) -> None:
    """The second one may begin first. Workers do not find the secret."""
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
    until(lambda: (tmp_path / "run-0/up-0").exists() and (tmp_path / "run-1/up-1").exists())
    (tmp_path / "go").touch()
    said = [node.communicate(timeout=60)[1] for node in nodes]
    assert nodes[1].returncode == 0, said
    assert "for the run at 127.0.0.1:29400, worker 1" in said[0]
