"""Workers that others start: torchrun's second attempt, Open MPI's mpirun, and srun of a Slurm on two hosts.

The servers come with `.ci/servers`. Slurm's nodes are network namespaces; its daemons live in the test's folder and end
with it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from launching import paceline
from real_engines import DIGITS, STEPS, needs, weights
from slurm import Slurm
from slurm import slurm as slurm

pytestmark = [pytest.mark.slow, pytest.mark.root]
SHARES = {"PACELINE_SHARES": "1,1"}  # those that follow the speed would give other bits
RUN = {**STEPS, **SHARES, "PACELINE_RUN_DIR": "run"}
WHERE = """
import paceline
team = paceline.join()
world = team.world
print(f"{world.rank} {world.size} {world.local_rank} {world.local_size} {world.launcher}\\n", end="", flush=True)
"""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The digits' weights as `paceline run` trains them."""
    folder = tmp_path_factory.mktemp("alone")
    paceline("run", "--workers", "2", "--run-dir", "run", DIGITS, cwd=folder, **STEPS, **SHARES)
    return weights(folder / "run")


# -- torchrun ---------------------------------------------------------------------------------------------------

TWICE = """
import os, sys, paceline
team = paceline.join()
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
total = team.any(attempt == "1", name="the second attempt")
print(f"attempt {attempt} worker {team.rank} {total}\\n", end="", flush=True)
team.any(True, name="said")
if attempt == "0" and team.rank == 1:
    sys.exit(3)
"""


def test_torchrun_restart(tmp_path: Path) -> None:
    """The store is the agent's and remembers the first attempt."""
    (tmp_path / "train.py").write_text(TWICE)
    command = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "train.py"]
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=tmp_path,
        env={**os.environ, **STEPS},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "attempt 0 worker 0 False", "attempt 0 worker 1 False", "attempt 1 worker 0 True", "attempt 1 worker 1 True",
    ]  # fmt: skip


# -- mpirun -----------------------------------------------------------------------------------------------------

MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n"]


def test_mpirun_gives_the_weights_of_paceline_run(tmp_path: Path, alone: bytes) -> None:
    needs("mpirun")
    done = subprocess.run(
        [*MPIRUN, "2", sys.executable, DIGITS],
        cwd=tmp_path,
        env={**os.environ, **RUN},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert weights(tmp_path / "run") == alone  # two workers that deal and add alike get the same bits


def test_mpirun_ranks_and_two_starts_at_once(tmp_path: Path) -> None:
    needs("mpirun")
    (tmp_path / "where.py").write_text(WHERE)
    starts = []
    for size in (2, 3):
        starts.append(
            subprocess.Popen(
                [*MPIRUN, str(size), sys.executable, "where.py"],
                cwd=tmp_path,
                env={**os.environ, **STEPS},
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    for size, start in zip((2, 3), starts, strict=True):
        said, _ = start.communicate(timeout=120)
        assert start.returncode == 0
        assert sorted(said.splitlines()) == [f"{rank} {size} {rank} {size} mpirun" for rank in range(size)]


# -- srun -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", ["1", "2"])
def test_srun_gives_the_weights_of_paceline_run(slurm: Slurm, tmp_path: Path, alone: bytes, nodes: str) -> None:
    """With nothing exported. Two nodes add over the network: the sum of two has the same bits."""
    slurm.srun("-N", nodes, "-n", "2", sys.executable, DIGITS, cwd=tmp_path, **RUN)
    assert weights(tmp_path / "run") == alone


def test_srun_ranks(slurm: Slurm, tmp_path: Path) -> None:
    (tmp_path / "where.py").write_text(WHERE)
    said = slurm.srun("-N", "2", "-n", "3", "--distribution=block", sys.executable, "where.py", cwd=tmp_path)
    assert sorted(said.splitlines()) == ["0 3 0 2 srun", "1 3 1 2 srun", "2 3 0 1 srun"]


def test_srun_two_steps_of_one_allocation_and_its_batch_script(slurm: Slurm, tmp_path: Path) -> None:
    (tmp_path / "where.py").write_text(WHERE)
    python = sys.executable
    (tmp_path / "job.sh").write_text(
        f"#!/bin/sh\n{python} where.py > script\n"
        f"srun -n 2 --exact {python} where.py > first &\nsrun -n 2 --exact {python} where.py > second\nwait\n"
    )
    done = slurm.run("sbatch", "--wait", "-N", "1", "-n", "4", "job.sh", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "script").read_text() == "0 1 0 1 none\n"
    for step in ("first", "second"):
        assert sorted((tmp_path / step).read_text().splitlines()) == ["0 2 0 2 srun", "1 2 1 2 srun"]
