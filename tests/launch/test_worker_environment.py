"""What a worker reads from its launcher's environment. The real launchers start in test_torchrun_mpi_srun.py."""

from __future__ import annotations

import re
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.base.console import shown
from paceline.base.environment import World, began, inherited_warm, read_world
from paceline.errors import UsageError

PLACE = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
OMPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_NAMESPACE": "2883649537",
}  # fmt: skip
SLURM = {
    "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_NODES": "3", "SLURM_STEP_NODELIST": "gpu[07-08],login1", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "5",
}  # fmt: skip


def port(number: str) -> int:
    return 10_000 + zlib.crc32(number.encode()) % 20_000


def place(world: World) -> tuple[int, int, int, int]:
    return world.rank, world.size, world.local_rank, world.local_size


def test_srun_variables_give_rank_and_store():
    world = read_world(SLURM)
    assert world.launcher == "srun"
    assert place(world) == (3, 5, 1, 2)
    assert world.store == ("gpu07", port("12.0"))
    assert world.job == "12.0"


def test_srun_on_one_node_uses_localhost():
    world = read_world({**SLURM, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "gpu07"})
    assert world.store == ("127.0.0.1", port("12.0"))


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[1-4]", "n1"),
        ("gpu[003,005-007],a1", "gpu003"),
        ("rack[2-3]n[04-08]", "rack2n04"),
        ("n[1-2]-ib,b", "n1-ib"),
    ],
)
def test_first_host_of_a_slurm_nodelist(nodes, first):
    assert read_world({**SLURM, "SLURM_STEP_NODELIST": nodes}).store == (first, port("12.0"))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.data())
def test_slurm_tasks_per_node(counts, data):
    """Slurm writes equal neighbours as COUNT(xTIMES)."""
    node = data.draw(st.integers(0, len(counts) - 1))
    runs = [[counts[0], 0]]
    for count in counts:
        if runs[-1][0] != count:
            runs.append([count, 0])
        runs[-1][1] += 1
    text = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in runs)
    world = read_world({**SLURM, "SLURM_STEP_TASKS_PER_NODE": text, "SLURM_NODEID": str(node)})
    assert world.local_size == counts[node]


def test_slurm_batch_script_is_a_world_of_one():
    batch = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "5", "SLURM_JOB_ID": "12", "SLURM_NODEID": "0"}
    assert place(read_world(batch)) == (0, 1, 0, 1)


def test_mpirun_variables_give_rank_and_store():
    world = read_world(OMPI)
    assert world.launcher == "mpirun"
    assert place(world) == (1, 4, 1, 4)
    assert world.store == ("127.0.0.1", port("2883649537"))
    assert world.job == "2883649537"


@pytest.mark.parametrize(
    "env",
    [
        {**OMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},  # worker 0 may be on another host
        {**OMPI, "PMIX_NAMESPACE": ""},
        {**SLURM, "SLURM_STEP_NODELIST": ""},
        {**SLURM, "SLURM_JOB_ID": "", "SLURM_STEP_ID": ""},
    ],
)
def test_missing_master_addr_is_asked_for(env):
    with pytest.raises(UsageError) as caught:
        read_world(env)
    world = read_world({**env, **PLACE})
    assert str(caught.value) == (
        f"worker {world.rank} was started by {world.launcher} without MASTER_ADDR and MASTER_PORT; "
        "export both on every worker: the address of worker 0's host and a free port there"
    )
    assert world.store == ("node1", 29500)


@pytest.mark.parametrize("env", [OMPI, SLURM], ids=["mpirun", "srun"])
def test_exported_master_addr_and_port_count(env):
    number = {"mpirun": "2883649537", "srun": "12.0"}[read_world(env).launcher]
    host = {"mpirun": "127.0.0.1", "srun": "gpu07"}[read_world(env).launcher]
    assert read_world({**env, **PLACE}).store == ("node1", 29500)
    assert read_world({**env, "MASTER_ADDR": "node1"}).store == ("node1", port(number))
    assert read_world({**env, "MASTER_PORT": "29500"}).store == (host, 29500)
    # Where the port is the user's own, two parts of one job may have numbers of their own.
    assert read_world({**env, **PLACE}).job == ""


def test_store_ports_are_spread_below_ephemeral_ports():
    ports = [read_world({**SLURM, "SLURM_JOB_ID": str(job)}).store[1] for job in range(1, 2001)]
    assert 10_000 <= min(ports) <= max(ports) < 30_000
    assert len(set(ports)) > 1850  # drawn at random it would be 1903 on average


NUMBERS = ("STORE_FD", "EVENTS_FD", "COMMANDS_FD", "JOIN_TIMEOUT", "KEEP", "MAX_STEPS")
PACELINE = {"PACELINE_RANK": "0", "PACELINE_WORLD_SIZE": "2", "PACELINE_STORE": "127.0.0.1:5"}


@pytest.mark.parametrize("value", ["banana", "-1", "1e3", "1.5", "\u0663", "9" * 13, "a\x1b[2J"])
@pytest.mark.parametrize("name", [*NUMBERS, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE"])
def test_variable_that_is_no_number_is_named(name: str, value: str) -> None:
    least = int(name in ("JOIN_TIMEOUT", "KEEP", "MAX_STEPS"))
    said = f"PACELINE_{name}={shown(value)} is not a whole number from {least} to 999,999,999,999; write it in digits"
    with pytest.raises(UsageError, match=f"^{re.escape(said)}$"):
        read_world({**PACELINE, f"PACELINE_{name}": value})


@pytest.mark.parametrize("name", ["TENSORBOARD", "HEAL"])
def test_boolean_variable_is_0_or_1(name: str) -> None:
    for value, meant in {"0": False, "": False, "1": True}.items():
        assert getattr(read_world({**PACELINE, f"PACELINE_{name}": value}), name.lower()) is meant
    with pytest.raises(UsageError, match=f"^PACELINE_{name}=no must be 0 or 1; set it to 0 or 1, or unset it$"):
        read_world({**PACELINE, f"PACELINE_{name}": "no"})


@pytest.mark.parametrize("value", ["", ":", "a:b", "a:-1"])
def test_invalid_agent_variables_are_usage_errors(value: str) -> None:
    env = {**PACELINE, "PACELINE_MIRROR": value or ":a", "PACELINE_BEGAN": value, "PACELINE_STORE": value or ":"}
    with pytest.raises(UsageError, match="is not a whole number from"):
        read_world(env)
    assert began(env) is None
    assert inherited_warm({"PACELINE_WARM": value}) is None


def test_torchrun_restart_is_another_job():
    env = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", **PLACE, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    first, second = (read_world({**env, "TORCHELASTIC_RESTART_COUNT": count}) for count in "01")
    assert not first.store_is_ours
    assert first.store == second.store
    assert first.job != second.job
