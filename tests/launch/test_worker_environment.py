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


def test_srun_alone_tells_everything():
    world = read_world(SLURM)
    assert world.launcher == "srun"
    assert place(world) == (3, 5, 1, 2)
    assert world.store == ("gpu07", port("12.0"))
    assert world.job == "12.0"


def test_srun_on_one_node_needs_no_name():
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
def test_the_first_of_slurms_nodes(nodes, first):
    assert read_world({**SLURM, "SLURM_STEP_NODELIST": nodes}).store == (first, port("12.0"))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.data())
def test_tasks_of_a_slurm_node(counts, data):
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


def test_a_batch_script_is_no_task_of_its_allocation():
    batch = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "5", "SLURM_JOB_ID": "12", "SLURM_NODEID": "0"}
    assert place(read_world(batch)) == (0, 1, 0, 1)


def test_mpirun_on_one_host_tells_everything():
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
def test_what_cannot_be_derived_is_asked_for(env):
    with pytest.raises(UsageError) as caught:
        read_world(env)
    world = read_world({**env, **PLACE})
    assert str(caught.value) == (
        f"worker {world.rank} was started by {world.launcher} without MASTER_ADDR and MASTER_PORT; "
        "export both on every worker: the address of worker 0's host and a free port there"
    )
    assert world.store == ("node1", 29500)


@pytest.mark.parametrize("env", [OMPI, SLURM], ids=["mpirun", "srun"])
def test_what_the_user_exports_counts(env):
    number = {"mpirun": "2883649537", "srun": "12.0"}[read_world(env).launcher]
    host = {"mpirun": "127.0.0.1", "srun": "gpu07"}[read_world(env).launcher]
    assert read_world({**env, **PLACE}).store == ("node1", 29500)
    assert read_world({**env, "MASTER_ADDR": "node1"}).store == ("node1", port(number))
    assert read_world({**env, "MASTER_PORT": "29500"}).store == (host, 29500)
    # Where the port is the user's own, two parts of one job may have numbers of their own.
    assert read_world({**env, **PLACE}).job == ""


def test_ports_of_starts_are_spread_below_those_that_systems_hand_out():
    ports = [read_world({**SLURM, "SLURM_JOB_ID": str(job)}).store[1] for job in range(1, 2001)]
    assert 10_000 <= min(ports) <= max(ports) < 30_000
    assert len(set(ports)) > 1850  # drawn at random it would be 1903 on average


NUMBERS = ("STORE_FD", "EVENTS_FD", "ORDERS_FD", "JOIN_TIMEOUT", "KEEP", "MAX_STEPS")
PACELINE = {"PACELINE_RANK": "0", "PACELINE_WORLD_SIZE": "2", "PACELINE_STORE": "127.0.0.1:5"}


@pytest.mark.parametrize("value", ["banana", "-1", "1e3", "1.5", "\u0663", "9" * 13, "a\x1b[2J"])
@pytest.mark.parametrize("name", [*NUMBERS, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE"])
def test_a_variable_that_is_no_number_is_named(name: str, value: str) -> None:
    least = int(name in ("JOIN_TIMEOUT", "KEEP", "MAX_STEPS"))
    said = f"PACELINE_{name}={shown(value)} is no whole number from {least} to 999,999,999,999; give one, in digits"
    with pytest.raises(UsageError, match=f"^{re.escape(said)}$"):
        read_world({**PACELINE, f"PACELINE_{name}": value})


@pytest.mark.parametrize("name", ["TENSORBOARD", "HEAL"])
def test_a_variable_that_is_yes_or_no_is_0_or_1(name: str) -> None:
    for value, meant in {"0": False, "": False, "1": True}.items():
        assert getattr(read_world({**PACELINE, f"PACELINE_{name}": value}), name.lower()) is meant
    with pytest.raises(
        UsageError, match=f"^PACELINE_{name}=no is neither 0 nor 1; give one of these, or leave it out$"
    ):
        read_world({**PACELINE, f"PACELINE_{name}": "no"})


@pytest.mark.parametrize("value", ["", ":", "a:b", "a:-1"])
def test_what_only_the_agent_sets_is_no_raw_error_either(value: str) -> None:
    env = {**PACELINE, "PACELINE_MIRROR": value or ":a", "PACELINE_BEGAN": value, "PACELINE_STORE": value or ":"}
    with pytest.raises(UsageError, match="is no whole number from"):
        read_world(env)
    assert began(env) is None
    assert inherited_warm({"PACELINE_WARM": value}) is None


def test_torchruns_second_attempt_is_told_from_its_first():
    env = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", **PLACE, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    first, second = (read_world({**env, "TORCHELASTIC_RESTART_COUNT": count}) for count in "01")
    assert not first.store_is_ours
    assert first.store == second.store
    assert first.job != second.job
